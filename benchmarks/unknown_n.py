"""How many samples are there? The certified count where nobody says: n above d, and near-duplicate rows.

The attack is not told the number of samples. Prints one row a seed: rank of the first-layer change (an upper bound on
what the row space can tell), certified and matched counts.

    python benchmarks/unknown_n.py --seeds 5 --json unknown_n.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console

from common import Row, options, result, show, write
from exhume import match, presets
from exhume.victims.data import Split, load, split
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, train_victim

NEAR = 0.05  # relative distance of a near-duplicate, after centring
LONG = TrainConfig(max_steps=20_000, tolerance=1e-8)
BUDGET = 60.0

COLUMNS = {
    "case": "case",
    "seed": "seed",
    "n": "n",
    "rank": "rank",
    "candidates": "candidates",
    "seconds": "seconds",
    "train": "matched_train",
    "close": "close_train",
    "control": "matched_control",
    "certified": "certified",
}


def with_near_duplicate(rows: Split, seed: int) -> Split:
    """Replace the second row by a noisy copy of the first, with its label."""
    x, y = rows.train.x.clone(), rows.train.y.clone()
    noise = torch.randn(x[0].shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    size = rows.spec.encode(x[:1]).norm() * (1.0 if rows.spec.scale is None else rows.spec.scale)
    x[1], y[1] = x[0] + NEAR * size * noise / noise.norm(), y[0]
    return replace(rows, train=replace(rows.train, x=x, y=y))


CASES: tuple[tuple[str, Case, Callable[[Split, int], Split]], ...] = (
    (
        "n above d",
        Case(data="digits", n=100, hidden=(1000,), training=replace(LONG, max_steps=3000)),
        lambda rows, seed: rows,
    ),
    ("near-duplicates", Case(data="mnist", n=20, hidden=(1000,), training=LONG), with_near_duplicate),
    ("near-duplicates", Case(data="digits", n=20, hidden=(1000,), training=LONG), with_near_duplicate),
)


def run(name: str, case: Case, change: Callable[[Split, int], Split]) -> Row:
    rows = change(split(load(case.data), case.n, case.seed), case.seed)
    victim = train_victim(case, rows)
    found = presets.exhume(samples=None).run(victim.evidence, seed=case.seed, budget=BUDGET)
    matches = match(found, victim.truth)
    return {
        **result(found, matches),
        "case": f"{case.data}, {name}",
        "seed": case.seed,
        "n": case.n,
        "rank": found.rank,
    }


def main() -> None:
    chosen = options(__doc__ or "", seeds=5)
    console = Console()
    rows = []
    for name, case, change in CASES:
        for seed in range(chosen.seeds):
            rows.append(run(name, replace(case, seed=seed), change))
            console.print(f"{rows[-1]['case']} seed {seed}: {rows[-1]['seconds']:.0f} s", highlight=False)
            if chosen.json is not None:
                write(chosen.json, rows)
    show("Number of samples unknown", rows, COLUMNS)
    for case in dict.fromkeys(str(row["case"]) for row in rows):
        both = [(row["certified"], row["matched_train"]) for row in rows if row["case"] == case]
        near = sum(c is not None and abs(int(c) - int(str(m))) <= 2 for c, m in both)
        console.print(f"{case}: certified within 2 of matched in {near} of {len(both)}", highlight=False)


if __name__ == "__main__":
    main()
