"""Attacks on final weights alone: ours, the published ones and their baselines, scored on train and on control rows.

Four kinds of victim, each 784-300-300-C with biases in the first layer alone, a small start and weight decay run to
a stationary point: MNIST parity and Fashion-MNIST on 20 rows, ten classes on 10 x 5 rows of MNIST, and regression
of the digit on squared loss. Fashion-MNIST is left out where its file is not there. An attack sees the final weights,
the range of pixels, a public mean and the number of rows. A match is one-to-one within 30% (close: 10%) of the row
less the public mean; cosines and SSIM > 0.4 are one-to-one too, on rows less the mean and on images. "first-rows" has
300 candidates, the others at most 40 or 100.

    python benchmarks/papers_kkt.py --quick
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from common import Row, interval, result, show, write
from exhume import match, presets
from exhume.matching import Matches
from exhume.metrics import relative_l2, ssim_matrix
from exhume.presets import Attack
from exhume.reconstruction import Reconstruction
from exhume.rows import FirstRows
from exhume.victims.data import Rows, Split, load, split
from exhume.victims.packaged import DataUnavailable
from exhume.victims.stationarity import stationarity
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, train_victim

DECAY = 5e-3
TRAINING = TrainConfig(lr=0.05, momentum=0.9, weight_decay=DECAY, max_steps=10_000, tolerance=0.0)
VICTIMS = ("mnist", "fashion", "ten classes", "regression")
COLUMNS = {
    "victim": "case",
    "attack": "arm",
    "seed": "seed",
    "m": "candidates",
    "s": "seconds",
    "misfit": "misfit",
    "matched": "matched_train",
    "close": "close_train",
    "control": "matched_control",
    "median": "median_error",
    "cosine": "cosine_train",
    "its control": "cosine_control",
    "SSIM>0.4": "ssim_train",
    "its control ": "ssim_control",
    "certified": "certified",
    "of them wrong": "wrong",
}


def victim(name: str, seed: int) -> Victim:
    """Train one."""
    loss = {"ten classes": "cross-entropy", "regression": "mse"}.get(name, "logistic")
    data = "fashion" if name == "fashion" else "mnist"
    n = 50 if name == "ten classes" else 20
    training = replace(TRAINING, loss=loss)
    case = Case(data, n, hidden=(300, 300), bias="first", start=1e-4, training=training, seed=seed)
    rows = split(load(data), n, seed, by_class=name == "ten classes")
    if name != "regression":
        return train_victim(case, rows)
    real = Split(_numbered(rows.train), _numbered(rows.control), rows.spec)
    made = train_victim(case, real)
    recipe = replace(made.evidence.recipe, labels="real")
    return replace(made, evidence=replace(made.evidence, recipe=recipe))


def _numbered(rows: Rows) -> Rows:
    """Rows whose target is the digit itself, brought to [-1, 1]."""
    return replace(rows, y=(rows.label.double() - 4.5) / 4.5)


def arms(name: str, n: int, seed: int, chosen: argparse.Namespace) -> Iterator[tuple[str, Attack]]:
    """Attacks on a victim: ours, the baselines, and on the first seed the published ones."""
    yield "kkt", presets.kkt(n)
    yield "naive", presets.naive(n, steps=2000)
    yield "first-rows", FirstRows(samples=n)
    if seed >= chosen.published:
        return
    steps = chosen.steps
    if name == "ten classes":
        yield f"buzaglo, {steps:,} steps", presets.buzaglo(n, steps=steps)
        return  # a multiplier for each of ten outputs of a hundred candidates: minutes for the descent of ours
    elif name == "regression":
        yield f"buzaglo-decay, {steps:,} steps", presets.buzaglo_decay(n, lr=0.1, steps=steps)
    else:
        yield f"haim, {steps:,} steps", presets.haim(n, steps=steps)
    ours = presets.kkt(n, steps=steps)
    yield f"kkt without corners, {steps:,} steps", replace(ours.descent, samples=n)


def cosines(x: Tensor, rows: Tensor, mean: Tensor) -> Tensor:
    """Cosine of each row and its candidate, one-to-one, the sum as large as can be [n]."""
    a, b = ((one - mean).flatten(1) for one in (rows, x))
    unit = [one / one.norm(dim=1, keepdim=True).clamp_min(1e-30) for one in (a, b)]
    return _paired(unit[0] @ unit[1].T)


def similarities(x: Tensor, rows: Tensor) -> int:
    """Rows with a candidate of SSIM above 0.4, one-to-one, as many as can be."""
    near = (ssim_matrix(x, rows, 0.0, 1.0) > 0.4).double()
    return int(_paired(near).sum())


def _paired(similarity: Tensor) -> Tensor:
    i, j = linear_sum_assignment(-similarity.numpy())
    return similarity[torch.from_numpy(i), torch.from_numpy(j)]


def row(name: str, arm: str, seed: int, made: Victim, found: Reconstruction, matches: Matches) -> Row:
    """All columns of one run."""
    truth = made.truth
    mean = truth.public_mean
    assert mean is not None
    certificate, wrong = found.certificate, None
    if certificate is not None:
        error = relative_l2(found.x, truth.train, mean).amin(0)
        wrong = int((error[certificate.certified] > 0.3).sum())
    return {
        **result(found, matches),
        "case": name,
        "arm": arm,
        "seed": seed,
        "n": made.case.n,
        "misfit": found.misfit,
        "cosine_train": float(cosines(found.x, truth.train, mean).median()),
        "cosine_control": float(cosines(found.x, truth.control, mean).median()),
        "ssim_train": similarities(found.x, truth.train),
        "ssim_control": similarities(found.x, truth.control),
        "wrong": wrong,
    }


def compare(name: str, rows: list[Row]) -> None:
    """Ours against control and baselines, seed by seed."""
    own = {str(r["seed"]): r for r in rows if r["case"] == name and r["arm"] == "kkt"}
    if len(own) < 2:
        return
    against = {"its control": {seed: r["cosine_control"] for seed, r in own.items()}}
    for arm in ("naive", "first-rows"):
        against[arm] = {
            str(r["seed"]): r["cosine_train"] for r in rows if r["case"] == name and r["arm"] == arm
        }
    for what, other in against.items():
        apart = [float(str(r["cosine_train"])) - float(str(other[seed])) for seed, r in own.items()]
        mean, low, high = interval(apart)
        print(f"{name}: median cosine above {what} by {mean:.2f} [{low:.2f}, {high:.2f}]")
    matched = [int(str(r["matched_train"])) for r in own.values()]
    control = [int(str(r["matched_control"])) for r in own.values()]
    wrong = sum(int(str(r["wrong"] or 0)) for r in own.values())
    certified = sum(int(str(r["certified"] or 0)) for r in own.values())
    print(f"{name}: matched {matched}, control {control}, certified {certified}, of them wrong {wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 minutes on two cores")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--published", type=int, default=None, help="seeds that published attacks run on")
    parser.add_argument("--steps", type=int, default=None, help="of the published attacks")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    chosen.published = (1 if chosen.quick else 3) if chosen.published is None else chosen.published
    chosen.steps = chosen.steps or (1000 if chosen.quick else 50_000)
    rows: list[Row] = []
    for name in chosen.victims:
        large = name in ("mnist", "fashion")
        for seed in range(chosen.seeds or (5 if large or not chosen.quick else 2)):
            try:
                made = victim(name, seed)
            except DataUnavailable as error:
                print(f"{name} is left out: {error}")
                break
            train = made.split.train
            y = train.label if name == "ten classes" else train.y
            told = stationarity(
                made.evidence, made.evidence.input.encode(train.x), y, made.case.training.loss, DECAY
            )
            Console().print(f"{name} {seed}: {told.sentence(made.case.n)}", highlight=False)
            for arm, attack in arms(name, made.case.n, seed, chosen):
                found = attack.run(made.evidence, seed=seed + 1000)
                rows.append(row(name, arm, seed, made, found, match(found, made.truth)))
                Console().print(f"  {arm}: {found.seconds:.0f} s", highlight=False)
    show("Attacks on final weights alone", rows, COLUMNS)
    for name in chosen.victims:
        compare(name, rows)
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
