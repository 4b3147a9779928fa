"""Data in 30 of 60 dimensions: the whole space, the row space of the first-layer change, and the true subspace.

Algorithms 1 and 2 of Tansley et al. 2026 and Algorithm 2 in the subspace the data were drawn from (a reference that
no attacker has), on the last layer of networks of several widths and depths; our attack in the row space beside them.
rho is the mean of |x - x_hat| / |x| over the best one-to-one pairing. More rows than dimensions are in the second
table, where ReLU cannot tell x from -x and relu + tanh can: rho and rho up to sign.

    python benchmarks/subspace.py --plot docs/subspace.png
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from common import Row, scores, show, write
from exhume import presets
from exhume.equations.span import Span
from exhume.evidence import Evidence, InputSpec
from exhume.metrics import rho, rho_pm
from exhume.presets import Attack
from exhume.survey import survey
from exhume.truth import Truth
from exhume.victims.features import random_features
from exhume.victims.nets import mlp
from exhume.victims.train import TrainConfig, train

D, RANK = 60, 30
N = 32  # above the rank, so that the drop of the spectrum is that of the data and not of their number
COLUMNS = {key: key for key in ("case", "width", "p / (n r)", "p / (n d)", "arm", "seed", "rho", "matched",
                                "control", "misfit", "seconds")}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Drawn:
    """A trained network and the rows it was trained on.

    Args:
        evidence: what an attacker has.
        rows: of training [n, d].
        control: as many others of the same subspace.
        basis: of the subspace [r, d].
    """

    evidence: Evidence
    rows: Tensor
    control: Tensor
    basis: Tensor


def draw(width: int, depth: int, seed: int) -> Drawn:
    """Train a ReLU network of `depth` weight layers on rows of norm sqrt(d), labels the sign of a linear function."""
    generator = torch.Generator().manual_seed(6121 * (seed + 1) + 17)
    basis = torch.linalg.qr(torch.randn(D, RANK, generator=generator, dtype=torch.float64))[0].T
    x = torch.randn(2 * N, RANK, generator=generator, dtype=torch.float64) @ basis
    x = D**0.5 * x / x.norm(dim=1, keepdim=True)
    y = (x @ torch.randn(D, generator=generator, dtype=torch.float64)).sign()[:, None]
    model = mlp((D, *(width,) * (depth - 1), 1), seed=1000 + seed)
    trained = train(
        model, x[:N], y[:N], TrainConfig(lr=0.2 / width**0.5 / depth, max_steps=4000, tolerance=1e-6)
    )
    model.load_state_dict(trained.final)
    spec = InputSpec((D,), sample_norm=D**0.5)
    return Drawn(Evidence.from_module(model, input=spec, init=trained.init), x[:N], x[N:], basis)


def arms(drawn: Drawn, steps: int) -> Iterator[tuple[str, Attack]]:
    """What is compared, ours last."""
    yield "Algorithm 1", presets.tansley(N, subspace=False, steps=steps)
    yield "Algorithm 2", presets.tansley(N, steps=steps)
    yield "reference subspace", presets.tansley(N, basis=drawn.basis, steps=steps)
    last = Span(nodes=(0.0, 1.0), layers="last")
    yield (
        "exhume, last layer",
        replace(presets.exhume(N), equation=last, column=None, feature=None, polish=None),
    )


def run(width: int, depth: int, seed: int, steps: int, budget: float) -> list[Row]:
    drawn = draw(width, depth, seed)
    found_rank = survey(drawn.evidence).space.dim
    truth = Truth(train=drawn.rows, control=drawn.control, public_mean=torch.zeros(D).double())
    rows: list[Row] = []
    for arm, attack in arms(drawn, steps):
        found = attack.run(drawn.evidence, seed=seed + 500, budget=budget)
        score = scores(found.x, truth)
        rows.append(
            {
                **score,
                "attack": found.attack,
                "case": f"depth {depth}, rank {found_rank}",
                "depth": depth,
                "width": width,
                "p / (n r)": width / (N * RANK),
                "p / (n d)": width / (N * D),
                "arm": arm,
                "seed": seed,
                "n": N,
                "candidates": len(found.x),
                "rho": rho(found.x, drawn.rows) if len(found.x) >= N else None,
                "matched": score["matched_train"],
                "control": score["matched_control"],
                "misfit": found.misfit,
                "loss": found.loss,
                "steps": found.steps,
                "seconds": found.seconds,
                "certified": None,
            }
        )
    return rows


def signs(seeds: int, budget: float) -> list[Row]:
    """Twelve rows in four dimensions, 64 equations for each of the unknowns."""
    rows: list[Row] = []
    for activation in ("relu", "relu_tanh"):
        for seed in range(seeds):
            victim = random_features(12, 4, 12 * 4 * 16, activation, seed)
            found = presets.exhume(12).run(victim.evidence, seed=seed + 500, budget=budget)
            rows.append(
                {
                    "case": "n = 12, d = 4",
                    "arm": activation,
                    "seed": seed,
                    "rho": rho(found.x, victim.train) if len(found.x) >= 12 else None,
                    "rho up to sign": rho_pm(found.x, victim.train) if len(found.x) >= 12 else None,
                    "declared": found.ambiguity is not None and found.ambiguity.sign,
                }
            )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """One panel a depth: rho against width, one curve an arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    depths = sorted({int(str(row["depth"])) for row in rows})
    figure, axes = plt.subplots(1, len(depths), figsize=(4.6 * len(depths), 3.8), squeeze=False, sharey=True)
    for axis, depth in zip(axes[0], depths, strict=True):
        own = [row for row in rows if row["depth"] == depth]
        for arm in dict.fromkeys(str(row["arm"]) for row in own):
            values: dict[int, list[float]] = {}
            for row in own:
                if row["arm"] == arm and row["rho"] is not None:
                    values.setdefault(int(str(row["width"])), []).append(float(str(row["rho"])))
            widths = sorted(values)
            axis.plot(
                widths, [sum(values[w]) / len(values[w]) for w in widths], "o-", ms=3, lw=1.2, label=arm
            )
        axis.axvline(N * RANK, color="grey", lw=0.7, ls="--")
        axis.axvline(N * D, color="grey", lw=0.7, ls=":")
        axis.set(title=f"{depth} weight layers", xlabel="width", xscale="log", yscale="log")
    axes[0, 0].set_ylabel("rho")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two widths, one depth, one seed")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--depths", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=None, help="of Algorithms 1 and 2 (default 20,000)")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds an attack may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    seeds = chosen.seeds or (1 if chosen.quick else 3)
    steps = chosen.steps or (2000 if chosen.quick else 20_000)
    widths = (1920, 3840) if chosen.quick else (960, 1920, 3840, 7680)
    rows: list[Row] = []
    for depth in chosen.depths or ((2,) if chosen.quick else (2, 3, 5)):
        # Beyond two layers the hidden ones are square: the widest would not fit two cores.
        for width in widths if depth == 2 else widths[:2]:
            for seed in range(seeds):
                rows += run(width, depth, seed, steps, chosen.budget)
                Console().print(f"depth {depth}, width {width}, seed {seed} done", highlight=False)
    show("Data in a subspace", rows, COLUMNS)
    ambiguous = signs(seeds, chosen.budget)
    show("More rows than dimensions", ambiguous, {key: key for key in ambiguous[0]})
    if chosen.plot is not None:
        plot(rows, chosen.plot)
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
