"""Random features, the setting of the law of data reconstruction: our solver beside momentum SGD as published.

Rows on a sphere, ReLU features, minimum-norm fit. rho is the mean of |x - x_hat| / |x| over the best one-to-one
pairing, uncapped. The first table gives the seconds until rho first falls below 0.1 and 0.001, measured on every
iterate of the run; the second, with --law, at which p / (d n) our attack recovers all rows (rho < 0.001, control 0).

    python benchmarks/random_features.py --n 20 --d 100 --p 8000 --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from common import Row, scores, show, write
from exhume import match, presets
from exhume.metrics import rho
from exhume.solvers.base import Progress, Solution
from exhume.solvers.first_order import follow
from exhume.solvers.varpro import VarPro
from exhume.victims.features import FeatureVictim, random_features

LEVELS = (0.1, 0.001)
RATIOS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
RECOVERED = 1e-3


@dataclass
class Watch:
    """When rho first fell below each level; what watching costs is not counted."""

    train: Tensor
    began: float = field(default_factory=time.perf_counter)
    lost: float = 0.0
    reached: dict[float, float] = field(default_factory=dict)

    def look(self, x: Tensor) -> None:
        now = time.perf_counter()
        if len(x) >= len(self.train):
            error = rho(x, self.train)
            for level in LEVELS:
                if error < level:
                    self.reached.setdefault(level, now - self.began - self.lost)
        self.lost += time.perf_counter() - now

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began - self.lost


@dataclass(frozen=True)
class Watched(VarPro):
    """Variable projection whose every iterate is looked at; it cannot tell."""

    watch: Watch | None = None

    def minimise(self, problem: Any, z: Tensor, progress: Progress | None = None) -> Solution[Any]:
        seen: list[Any] = []

        class Seen:
            """The problem, with its latest point kept."""

            def __getattr__(self, name: str) -> Any:
                return getattr(problem, name)

            def at(self, z: Tensor) -> Any:
                seen.append(problem.at(z))
                return seen[-1]

        def look(loss: float) -> bool:
            assert self.watch is not None
            taken = [point for point in seen if point.loss == loss]
            if taken:
                self.watch.look(problem.space.expand(taken[-1].z))
                seen[:] = taken[-1:]
            return progress is not None and progress(loss)

        return super().minimise(Seen(), z, look)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--d", type=int, default=100)
    parser.add_argument("--p", type=int, default=8000)
    parser.add_argument("--activation", default="relu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60_000, help="most steps of momentum SGD")
    parser.add_argument("--cap", type=float, default=300.0, help="seconds momentum SGD may take a seed")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds our attack may take a seed")
    parser.add_argument("--law", action="store_true", help="also the smallest p / (d n) that recovers")
    parser.add_argument("--quick", action="store_true", help="n = 5, d = 20, p = 400, one seed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def row(victim: FeatureVictim, x: Tensor, watch: Watch, seed: int, extra: Row) -> Row:
    levels = {f"seconds_{level:g}": watch.reached.get(level) for level in LEVELS}
    error = rho(x, victim.train) if len(x) >= len(victim.train) else float("inf")
    return {**extra, **levels, "seed": seed, "n": len(victim.train), "candidates": len(x), "rho": error}


def ours(victim: FeatureVictim, seed: int, budget: float, case: str) -> Row:
    watch = Watch(victim.train)
    attack = replace(presets.exhume(len(victim.train)), solver=Watched(watch=watch))
    found = attack.run(victim.evidence, seed, budget)
    matches = match(found, victim.truth())
    extra: Row = {
        "attack": found.attack,
        "arm": "exhume",
        "case": case,
        "seconds": watch.elapsed,
        "steps": found.steps,
        "loss": found.loss,
        "matched_train": matches.train.count,
        "close_train": matches.train.close,
        "matched_control": matches.control.count,
        "median_error": matches.train.median,
        "certified": None if found.certificate is None else found.certificate.recovered,
    }
    return row(victim, found.x, watch, seed, extra)


def published(victim: FeatureVictim, seed: int, steps: int, cap: float, case: str) -> Row:
    """Momentum SGD until its own floor, or until the cap."""
    attack = presets.iurada(len(victim.train), steps=steps)
    watch = Watch(victim.train)
    began = attack.begin(victim.evidence, seed)
    space, count = began.problem(0).space, 0

    def progress(loss: float) -> bool:
        # Every tenth step: where rho falls slowly, no finer clock is needed.
        nonlocal count
        count += 1
        if count % 10 == 0:
            watch.look(space.expand(space.retract(began.leaf.clone())))
        return watch.elapsed > cap

    optimizer = attack.optimiser.optimizer(began.leaf, began.problem(0))
    solution = follow(optimizer, began.leaf, began.problem, steps, attack.floor, progress)
    seconds, x = watch.elapsed, space.expand(solution.point.z)
    extra: Row = {
        "attack": "iurada",
        "arm": f"momentum SGD, lr {attack.optimiser.lr:g}",
        "case": case,
        "seconds": seconds,
        "steps": solution.steps,
        "loss": solution.point.loss,
        **scores(x, victim.truth()),
        "certified": None,
    }
    return row(victim, x, watch, seed, extra)


def law(n: int, d: int, activation: str, seeds: int, budget: float) -> list[Row]:
    """Our attack at several p / (d n)."""
    rows = []
    for ratio in RATIOS:
        for seed in range(seeds):
            victim = random_features(n, d, round(ratio * d * n), activation, seed)
            rows.append({**ours(victim, seed, budget, f"p = {ratio:g} d n"), "ratio": ratio})
    return rows


def main() -> None:
    chosen = arguments()
    if chosen.quick:
        chosen.n, chosen.d, chosen.p, chosen.seeds = 5, 20, 400, 1
    # The first step of an optimiser imports half of torch: that is nobody's time.
    published(random_features(2, 3, 20), 0, 2, 60.0, "warm-up")
    case = f"random features n={chosen.n} d={chosen.d} p={chosen.p} {chosen.activation}"
    rows: list[Row] = []
    for seed in range(chosen.seeds):
        victim = random_features(chosen.n, chosen.d, chosen.p, chosen.activation, seed)
        rows.append(ours(victim, seed, chosen.budget, case))
        rows.append(published(victim, seed, chosen.steps, chosen.cap, case))
        Console().print(f"seed {seed} done", highlight=False)
    columns = {
        "arm": "arm",
        "seed": "seed",
        "candidates": "candidates",
        "steps": "steps",
        "seconds": "seconds",
        "to rho < 0.1": "seconds_0.1",
        "to rho < 0.001": "seconds_0.001",
        "rho": "rho",
        "matched": "matched_train",
        "control": "matched_control",
        "certified": "certified",
    }
    show(case, rows, columns)
    for level in LEVELS:
        medians = {}
        for name in ("exhume", "iurada"):
            # A run that never got there counts as having taken its whole time: that favours it.
            own = [r for r in rows if r["attack"] == name]
            times = [float(str(r[f"seconds_{level:g}"] or r["seconds"])) for r in own]
            medians[name] = statistics.median(times)
            reached = sum(r[f"seconds_{level:g}"] is not None for r in own)
            print(f"rho < {level:g}: {name} {reached} of {len(own)}, median {medians[name]:.3g} s")
        print(f"rho < {level:g}: ratio of median times {medians['iurada'] / medians['exhume']:.3g}")
    if chosen.law:
        found = law(chosen.n, chosen.d, chosen.activation, chosen.seeds, chosen.budget)
        lines: list[Row] = []
        for ratio in RATIOS:
            own = [r for r in found if r["ratio"] == ratio]
            good = sum(float(str(r["rho"])) < RECOVERED and r["matched_control"] == 0 for r in own)
            errors = ", ".join(f"{r['rho']:.2g}" for r in own)
            lines.append({"p / (d n)": ratio, "recovered": f"{good} of {len(own)}", "rho": errors})
        show("Our attack", lines, {key: key for key in lines[0]})
        rows += found
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
