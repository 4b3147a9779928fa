"""The law of data reconstruction: error against p / (d n) for random features, ours beside the published attack.

Rows on a sphere, minimum-norm fit, p random features. Two transitions: from p = n on the fit is exact, and from
p = d n on, as the published law says, rows can be recovered. rho is the mean of |x - x_hat| / |x| over the best
one-to-one pairing; beside it the error of as many random points of the sphere. Runs that fit the weights exactly at a
wrong place are counted.

    python experiments/law/law.py --plot docs/law.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from common import Row, scores, show, write
from exhume import presets
from exhume.metrics import rho
from exhume.presets import Attack
from exhume.spaces import sphere
from exhume.victims.features import FeatureVictim, random_features

RATIOS = (0.05, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)  # p / (d n); p = n is 1 / d
EXACT = 1e-10


def attacks(n: int, steps: int) -> dict[str, Attack]:
    return {
        "exhume": replace(presets.exhume(n), polish=None),
        f"iurada, at most {steps:,} steps": presets.iurada(n, steps=steps),
    }


def attacked(victim: FeatureVictim, name: str, attack: Attack, ratio: float, seed: int, budget: float) -> Row:
    n, d = victim.train.shape
    found = attack.run(victim.evidence, seed, budget)
    x = found.x
    if (
        len(x) < n
    ):  # fewer equations than unknowns: fewer candidates were sought; the rest counts as not found
        x = torch.cat([x, torch.zeros(n - len(x), d).double()])
    draw = sphere(d, d**0.5).random(n, d**0.5, torch.Generator().manual_seed(seed))
    return {
        "attack": found.attack,
        "arm": name,
        "case": f"n={n} d={d} p={round(ratio * d * n)}",
        "ratio": ratio,
        "seed": seed,
        "n": n,
        "candidates": len(found.x),
        "seconds": found.seconds,
        "steps": found.steps,
        "loss": found.misfit,
        "train_loss": victim.loss,
        **scores(x, victim.truth()),
        "certified": None if found.certificate is None else found.certificate.recovered,
        "rho": rho(x, victim.train),
        "rho_random": rho(draw, victim.train),
    }


def plot(rows: list[Row], n: int, d: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4))
    for name, marker in zip(dict.fromkeys(str(row["arm"]) for row in rows), "os", strict=False):
        own = [row for row in rows if row["arm"] == name]
        ratios = sorted({float(str(row["ratio"])) for row in own})
        values = [[max(float(str(r["rho"])), 1e-9) for r in own if r["ratio"] == ratio] for ratio in ratios]
        axis.plot(ratios, [statistics.median(v) for v in values], marker + "-", label=name, ms=4)
        for ratio, some in zip(ratios, values, strict=True):
            axis.plot([ratio] * len(some), some, marker, color="grey", ms=2, alpha=0.5)
    ratios = sorted({float(str(row["ratio"])) for row in rows})
    fits = [[max(float(str(r["train_loss"])), 1e-9) for r in rows if r["ratio"] == ratio] for ratio in ratios]
    axis.plot(
        ratios, [statistics.median(v) for v in fits], "k^-", label="the victim's training loss", ms=4, lw=0.9
    )
    null = statistics.median(float(str(row["rho_random"])) for row in rows)
    axis.axhline(null, color="grey", ls=":", lw=0.8, label="random points")
    axis.axvline(1 / d, color="black", ls="--", lw=0.8)
    axis.axvline(1.0, color="black", ls="--", lw=0.8)
    axis.text(1 / d, 2e-9, " p = n", fontsize=8)
    axis.text(1.0, 2e-9, " p = d n", fontsize=8)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="p / (d n)",
        ylabel="rho; training loss relative to |y|^2",
        title=f"Random ReLU features, n = {n}, d = {d}",
    )
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=5)
    parser.add_argument("--d", type=int, default=20)
    parser.add_argument("--activation", default="relu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_000, help="most steps of the published attack")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds a run may take")
    parser.add_argument("--quick", action="store_true", help="one seed, five ratios")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    seeds, ratios = (1, RATIOS[3::2]) if chosen.quick else (chosen.seeds, RATIOS)
    rows: list[Row] = []
    for ratio in ratios:
        for seed in range(seeds):
            p = max(round(ratio * chosen.d * chosen.n), 1)
            victim = random_features(chosen.n, chosen.d, p, chosen.activation, seed)
            for name, attack in attacks(chosen.n, chosen.steps).items():
                rows.append(attacked(victim, name, attack, ratio, seed, chosen.budget))
    lines: list[Row] = []
    for ratio in ratios:
        for name in dict.fromkeys(str(row["arm"]) for row in rows):
            own = [row for row in rows if (row["ratio"], row["arm"]) == (ratio, name)]
            errors = [float(str(row["rho"])) for row in own]
            wrong = sum(float(str(r["loss"])) < EXACT and float(str(r["rho"])) > 0.1 for r in own)
            lines.append(
                {
                    "p / (d n)": ratio,
                    "training loss": statistics.median(float(str(r["train_loss"])) for r in own),
                    "attack": name,
                    "rho, median": statistics.median(errors),
                    "rho, each": ", ".join(f"{error:.2g}" for error in errors),
                    "exact fit at a wrong place": wrong,
                    "matched": sum(int(str(r["matched_train"])) for r in own),
                    "control": sum(int(str(r["matched_control"])) for r in own),
                    "seconds": statistics.median(float(str(r["seconds"])) for r in own),
                }
            )
    show("Error against p / (d n)", lines, {key: key for key in lines[0]})
    if chosen.plot is not None:
        plot(rows, chosen.n, chosen.d, chosen.plot)
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
