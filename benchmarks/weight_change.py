"""Recover the training rows of one-hidden-layer victims from their change of weights.

Prints one row a seed: the victim (steps, loss, relative change, misfit of the equation at the true rows) and what
the attack found on train and on control. With --swap the victim is trained on the control rows instead, so the
two counts must flip.

    python benchmarks/weight_change.py --data mnist --n 20 --width 2000 --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from common import Row, result, show, write
from exhume import match, presets
from exhume.change import decay_factor, simulated_decay
from exhume.victims.packaged import DataUnavailable
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim

COLUMNS = {
    "arm": "arm",
    "seed": "seed",
    "victim loss": "train_loss",
    "steps": "train_steps",
    "|change|/|init|": "relative_change",
    "misfit at truth": "misfit_at_truth",
    "misfit": "misfit",
    "rank": "rank",
    "kappa error": "kappa_error",
    "seconds": "seconds",
    "train": "matched_train",
    "close": "close_train",
    "within 1%": "within_1_percent",
    "median": "median_error",
    "control": "matched_control",
    "close control": "close_control",
    "random": "matched_random",
    "certified": "certified",
    "limited by": "limited_by",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="mnist", choices=["mnist", "fashion", "faces", "digits", "breast-cancer"]
    )
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--depth", type=int, default=1, help="hidden layers of that width")
    parser.add_argument("--activation", default="relu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--lr", type=float, help="default 0.02; 0.002 for breast-cancer, whose rows are larger"
    )
    parser.add_argument("--loss", default="mse", choices=["mse", "logistic"])
    parser.add_argument(
        "--batch", type=int, help="fixed-order mini-batches of this size (default: full batch)"
    )
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=200_000, help="training steps at most")
    parser.add_argument("--float32", action="store_true", help="train and store in float32")
    parser.add_argument(
        "--column", action="store_true", help="without the feature equation, whatever the depth"
    )
    parser.add_argument("--polish", action="store_true", help="refine by simulated training")
    parser.add_argument("--swap", action="store_true", help="train on the control rows")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds an attack may take")
    parser.add_argument("--quick", action="store_true", help="one seed, width 400")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def case_of(options: argparse.Namespace) -> Case:
    lr = options.lr or (0.002 if options.data == "breast-cancer" else 0.02)
    if options.momentum and options.lr is None:
        lr *= 1 - options.momentum
    # Float32 gradients and mini-batch noise do not reach 1e-10; what is reached is printed.
    tolerance = 1e-8 if options.float32 or options.data == "breast-cancer" else 1e-10
    if options.weight_decay or options.loss == "logistic":
        tolerance = 0.0
    return Case(
        data=options.data,
        n=options.n,
        hidden=(options.width,) * options.depth,
        activation=options.activation,
        training=TrainConfig(
            loss=options.loss,
            lr=lr,
            max_steps=min(options.steps, 3000) if tolerance == 0.0 else options.steps,
            tolerance=tolerance,
            batch_size=options.batch,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            dtype=torch.float32 if options.float32 else torch.float64,
        ),
        swap=options.swap,
    )


def limit(misfit: float, unknowns: int, equations: int, matched: int, n: int) -> str:
    """Name what limits a row: too few equations, the misfit of fixed nodes, or the search."""
    if equations < 2 * unknowns:
        return f"too few equations ({equations} for {unknowns} unknowns)"
    if matched == n:
        return f"precision: misfit {misfit:.0e} at the truth"
    if misfit > 1e-3:
        return f"misfit {misfit:.0e} at the truth (fixed nodes)"
    return "search: the truth fits better than what was found"


def run(case: Case, options: argparse.Namespace) -> Row:
    victim = make_victim(case)
    attack = presets.exhume(samples=case.n)
    attack = attack if options.polish else replace(attack, polish=None)
    attack = replace(attack, feature=None) if options.column else attack
    at_truth = victim.misfit_at_truth(attack.equation)
    found = attack.run(victim.evidence, seed=case.seed, budget=options.budget)
    matches = match(found, victim.truth)
    rank = found.rank or case.n
    unknowns = case.n * (min(rank, victim.evidence.input.size) + 2)
    equations = case.hidden[0] * (rank + 2)
    # Measured from the weights alone, and what the recipe's own recursion leaves of the initial weights.
    kappa, recursion = decay_factor(victim.evidence).weight, simulated_decay(victim.evidence.recipe)
    return {
        **result(found, matches),
        "case": f"{case.data} {'x'.join(map(str, case.hidden))} {case.activation}",
        "arm": ("swapped" if case.swap else "as drawn")
        + (", polished" if options.polish else "")
        + (", by columns" if options.column else ""),
        "seed": case.seed,
        "n": case.n,
        "close_control": matches.control.close,
        "matched_random": matches.random.count,
        "within_1_percent": sum(row.error is not None and row.error < 0.01 for row in matches.rows),
        "misfit_at_truth": at_truth,
        "misfit": found.misfit,
        "relative_change": victim.relative_change(),
        "rank": found.rank,
        "kappa": kappa,
        "kappa_error": None if recursion is None else abs(kappa - recursion),
        "train_steps": victim.trained.steps,
        "train_loss": victim.trained.loss,
        "limited_by": limit(at_truth, unknowns, equations, matches.train.count, case.n),
    }


def main() -> None:
    options = arguments()
    if options.quick:
        options.seeds, options.width = 1, 400
    console = Console()
    case = case_of(options)
    console.print(f"Victim: {case}, default nn.Linear initialisation, labels +-1", highlight=False)
    rows = []
    try:
        for seed in range(options.seeds):
            rows.append(run(replace(case, seed=seed), options))
            console.print(f"seed {seed} done in {rows[-1]['seconds']:.1f} s", highlight=False)
    except DataUnavailable as missing:
        console.print(f"Skipped: {missing}", markup=False)
        return
    show("Recovered from the change of weights", rows, COLUMNS)
    for key in ("matched_train", "close_train", "matched_control", "seconds"):
        values = [float(str(row[key])) for row in rows]
        console.print(
            f"median {key}: {statistics.median(values):g}  (each: {', '.join(f'{v:g}' for v in values)})"
        )
    if options.json is not None:
        write(options.json, rows)


if __name__ == "__main__":
    main()
