"""The published attacks on the change of weights beside ours, on the same victims.

Three victims: MNIST parity on one wide layer; the same rows brought to one norm, which the sphere-constrained attacks
need; and the setting of Loo et al., 784-1024-1024-1 and 50 rows. Schedules of 80,001 steps are compressed in time,
and named so, unless --full is given. Every attack sees the weights, the number of rows and what the target file may
state, never the rows; a match is one-to-one within 30%, and the control column counts matches with unseen rows.

    python benchmarks/papers_change.py --quick
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from torch import Tensor

from common import Row, result, show, write
from exhume import match, presets
from exhume.matching import assign
from exhume.metrics import relative_l2
from exhume.presets import Attack
from exhume.truth import Truth
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

NORM = 10.0  # of every row of the normalised victim
COLUMNS = {
    "victim": "case",
    "attack": "arm",
    "seed": "seed",
    "candidates": "candidates",
    "steps": "steps",
    "seconds": "seconds",
    "loss": "loss",
    "misfit": "misfit",
    "matched": "matched_train",
    "close": "close_train",
    "control": "matched_control",
    "median": "median_error",
    "certified": "certified",
}


@dataclass(frozen=True)
class Lengths:
    """Steps of the published descents.

    Args:
        loo: of the annealed schedule on one hidden layer.
        deep: of the same on two.
        sphere: of the sphere-constrained ones.
    """

    loo: int
    deep: int
    sphere: int


def arms(n: int, victim: str, length: Lengths) -> Iterator[tuple[str, Attack]]:
    """Attacks on a victim: ours first."""
    yield "exhume, no polish", replace(presets.exhume(n), polish=None)
    if victim == "two layers":
        yield f"loo, both kernels, {length.deep:,} steps", presets.loo(n, steps=length.deep)
        return
    yield f"loo, both kernels, {length.loo:,} steps", presets.loo(n, steps=length.loo)
    yield f"loo, one kernel, {length.loo:,} steps", presets.loo(n, both=False, steps=length.loo)
    if victim == "one norm":
        steps = length.sphere
        yield f"iurada, lr 300, {steps:,} steps", presets.iurada(n, lr=300.0, steps=steps)
        yield f"tansley 1, last layer, {steps:,} steps", presets.tansley(n, subspace=False, steps=steps)
        yield f"tansley 2, last layer, {steps:,} steps", presets.tansley(n, steps=steps)
        yield f"tansley 2, all layers, {steps:,} steps", presets.tansley(n, layers="all", steps=steps)


def victims(seed: int) -> Iterator[tuple[str, Victim]]:
    wide = Case(n=20, hidden=(1000,), seed=seed)
    yield "one layer", make_victim(wide)
    yield "one norm", make_victim(replace(wide, norm=NORM))
    # Loo et al.'s rows are not of the size of ours: the rate is what reaches the same loss.
    deep = TrainConfig(lr=0.01, max_steps=20_000, tolerance=1e-8)
    yield "two layers", make_victim(Case(n=50, hidden=(1024, 1024), training=deep, seed=seed))


def curve(x: Tensor, truth: Truth) -> list[float]:
    """Distance of every training row to its candidate, one-to-one, sorted: the reconstruction curve."""
    distance = relative_l2(x, truth.train, truth.public_mean, truth.public_scale)
    paired = assign(distance, float("inf"))
    return sorted(float(distance[i, j]) for i, j in paired.items())


def plot(curves: Sequence[tuple[str, str, list[float]]], path: Path) -> None:
    """One panel a victim, one curve an attack."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(victim for victim, _, _ in curves))
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for _, arm, values in (one for one in curves if one[0] == name):
            axis.plot(range(1, len(values) + 1), values, label=arm, lw=1.2)
        axis.axhline(0.3, color="grey", lw=0.6, ls="--")
        axis.set(title=name, xlabel="training rows, best first", ylabel="relative distance", yscale="log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, short schedules")
    parser.add_argument("--full", action="store_true", help="the published number of steps")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--victims", nargs="+", default=["one layer", "one norm", "two layers"])
    parser.add_argument("--deep", type=int, default=None, help="steps of the descent on two hidden layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write the reconstruction curves here")
    chosen = parser.parse_args()
    seeds = chosen.seeds or (1 if chosen.quick else 3)
    length = Lengths(4000, 600, 4000) if chosen.quick else Lengths(8000, 4000, 20_000)
    if chosen.full:
        length = Lengths(80_001, 80_001, 1_000_000)
    length = replace(length, deep=chosen.deep or length.deep)
    rows: list[Row] = []
    curves: list[tuple[str, str, list[float]]] = []
    for seed in range(seeds):
        for name, victim in victims(seed):
            if name not in chosen.victims:
                continue
            n = victim.case.n
            for arm, attack in arms(n, name, length):
                found = attack.run(victim.evidence, seed=seed + 1000)
                matches = match(found, victim.truth)
                values = curve(found.x, victim.truth)
                rows.append(
                    {
                        **result(found, matches),
                        "case": name,
                        "arm": arm,
                        "seed": seed,
                        "n": n,
                        "misfit": found.misfit,
                        "curve": ", ".join(f"{v:.3g}" for v in values),
                    }
                )
                if seed == 0:
                    curves.append((name, arm, values))
                Console().print(f"{name}, {arm}: {found.seconds:.0f} s", highlight=False)
    show("Published attacks and ours", rows, COLUMNS)
    for name in dict.fromkeys(str(row["case"]) for row in rows):
        ours = [row for row in rows if row["case"] == name and row["attack"] == "exhume"]
        for arm in dict.fromkeys(str(row["arm"]) for row in rows if row["case"] == name and row not in ours):
            theirs = [row for row in rows if row["case"] == name and row["arm"] == arm]
            pairs = list(zip(ours, theirs, strict=True))
            as_many = sum(int(str(a["matched_train"])) >= int(str(b["matched_train"])) for a, b in pairs)
            ratio = min(float(str(b["seconds"])) / float(str(a["seconds"])) for a, b in pairs)
            print(
                f"{name}: exhume matched as many as {arm} on {as_many} of {len(pairs)}, {ratio:.1f}x faster or more"
            )
    if chosen.plot is not None:
        plot(curves, chosen.plot)
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
