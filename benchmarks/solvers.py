"""Variable projection against L-BFGS, Adam and momentum SGD on one equation, one space and one start.

Every solver minimises the objective that the attack itself builds, from (a) the candidates of the column search,
before any joint fit, and (b) 1.5 n random candidates. Variable projection stops by its own rule, the others run
until they stall or a cap in seconds is reached. Two levels of the loss are timed, within 1% of the lowest that
any solver reached from that start and twice it, and two of the truth: as many rows matched (< 0.3) and close
(< 0.1) as the best solver ended with. Seconds are CPU seconds of one thread, so other jobs disturb them little.

    python benchmarks/solvers.py --quick
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import Row, options, scores, show, write
from exhume import presets
from exhume.matching import CLOSE, MATCH, assign
from exhume.metrics import relative_l2
from exhume.objective import Objective, Point
from exhume.solvers.base import Progress, Solution
from exhume.solvers.first_order import SGD, Adam
from exhume.solvers.lbfgs import LBFGS
from exhume.solvers.varpro import VarPro
from exhume.spaces import Space
from exhume.survey import survey
from exhume.terms import Box
from exhume.truth import Truth
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

Method = VarPro | LBFGS | Adam | SGD
ENDLESS = 10**6
DENSE, CG = "VarPro dense", "VarPro CG"
LEVELS = {"1pct": "loss within 1% of the lowest", "2x": "loss within 2x of the lowest"}
COUNTS = {"match": MATCH, "close": CLOSE}


# --- what is measured --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handed(VarPro):
    """Takes the joint fit's place in the attack and keeps what it was handed: the objective and the start."""

    log: list[tuple[Any, Tensor]] = field(default_factory=list)

    def minimise(self, problem: Any, z: Tensor, progress: Progress | None = None) -> Solution[Any]:
        self.log.append((problem, z))
        return Solution(problem.at(z), "stopped", "Handed back.", 0, ())


@dataclass
class Watched:
    """An objective that keeps every improvement of a run with its time; a solver cannot tell the difference.

    Args:
        objective: what is minimised.
        cap: CPU seconds after which the run is stopped.
        path: (seconds, steps, loss, z) of the start and of every iterate better than all before it.
    """

    objective: Objective
    cap: float
    path: list[tuple[float, int, float, Tensor]] = field(default_factory=list)
    steps: int = 0
    began: float = field(default_factory=time.process_time)
    recent: list[Point] = field(default_factory=list)

    @property
    def elapsed(self) -> float:
        return time.process_time() - self.began

    @property
    def space(self) -> Space:
        return self.objective.space

    def at(self, z: Tensor) -> Point:
        point = self.objective.at(z)
        self.recent.append(point)
        if not self.path:
            self.path.append((self.elapsed, 0, point.loss, point.z))
        return point

    def gradient(self, point: Point) -> Tensor:
        return self.objective.gradient(point)

    def hessian(self, point: Point) -> Tensor:
        return self.objective.hessian(point)

    def curvatures(self, point: Point) -> Tensor:
        return self.objective.curvatures(point)

    def hessian_product(self, point: Point) -> Callable[[Tensor], Tensor]:
        return self.objective.hessian_product(point)

    def progress(self, loss: float) -> bool:
        self.steps += 1
        if loss < self.path[-1][2]:
            taken = next(p for p in reversed(self.recent) if p.loss == loss)
            self.path.append((self.elapsed, self.steps, loss, taken.z))
        self.recent.clear()
        return self.elapsed > self.cap


@dataclass(frozen=True)
class Start:
    """One problem and one start, shared by all solvers."""

    victim: Victim
    objective: Objective
    z: Tensor
    name: str

    def decode(self, z: Tensor) -> Tensor:
        spec = self.victim.evidence.input
        return spec.decode(self.objective.space.expand(z).view(-1, *spec.shape))


def starts(victim: Victim) -> list[Start]:
    """The attack's objective with the column search's candidates, and with random ones."""
    handed, seed = Handed(), victim.case.seed
    replace(presets.exhume(victim.case.n), solver=handed, repairs=0).run(victim.evidence, seed)
    objective, z = handed.log[0]
    generator = torch.Generator().manual_seed(seed)
    norm = survey(victim.evidence).norm
    random = objective.space.random(round(1.5 * victim.case.n), norm, generator)
    return [Start(victim, objective, z, "column search"), Start(victim, objective, random, "random")]


@dataclass(frozen=True)
class Run:
    """A solver's way from a start: every improvement (seconds, steps, loss, z), how it ended, and its CPU seconds."""

    path: list[tuple[float, int, float, Tensor]]
    solution: Solution[Point]
    seconds: float


def solve(start: Start, method: Method, cap: float) -> Run:
    watched = Watched(start.objective, cap)
    solution = method.minimise(watched, start.z, watched.progress)
    return Run(watched.path, solution, watched.elapsed)


def tuned(start: Start, methods: Sequence[Method], cap: float) -> Method:
    """The method whose short run ends lowest; the runs are not charged to it."""
    return min(methods, key=lambda method: solve(start, method, cap).solution.point.loss)


def contestants(start: Start, cap: float) -> dict[str, Method]:
    size = float(start.z.square().mean().sqrt())  # of a coordinate
    attack = presets.exhume().solver
    adam = [Adam(ENDLESS, lr=r * size, tolerance=0.0) for r in (0.01, 0.03, 0.1)]
    sgd = [SGD(ENDLESS, lr=r * size**2, tolerance=0.0) for r in (1.0, 10.0, 100.0)]
    return {
        DENSE: replace(attack, dense_limit=10**9),
        CG: replace(attack, dense_limit=0),
        "L-BFGS": LBFGS(ENDLESS, tolerance=0.0),
        "Adam": tuned(start, adam, cap / 6),
        "SGD momentum": tuned(start, sgd, cap / 6),
    }


# --- equal loss, equal matches -----------------------------------------------------------------------------


def counts(x: Tensor, truth: Truth) -> dict[str, int]:
    """Rows matched and close, without the rest of `exhume.match`, which takes too long for a whole path."""
    distance = relative_l2(x, truth.train, truth.public_mean, truth.public_scale)
    return {
        name: sum(bool(distance[pair] < limit) for pair in assign(distance, limit).items())
        for name, limit in COUNTS.items()
    }


def compare(start: Start, cap: float) -> list[Row]:
    """Run all solvers from one start; one row each."""
    methods = contestants(start, cap)
    runs = {name: solve(start, method, cap) for name, method in methods.items()}
    truth, case = start.victim.truth, start.victim.case
    lowest = min(run.solution.point.loss for run in runs.values())
    goals = {"1pct": 1.01 * lowest, "2x": 2 * lowest}
    paths = {
        name: [(s, k, counts(start.decode(z), truth)) for s, k, _, z in run.path]
        for name, run in runs.items()
    }
    most = {key: max(path[-1][2][key] for path in paths.values()) for key in COUNTS}
    rows: list[Row] = []
    for name, run in runs.items():
        method, solution = methods[name], run.solution
        row: Row = {
            "attack": "exhume",
            "case": f"{case.data} {case.hidden[0]}",
            "arm": name,
            "start": start.name,
            "seed": case.seed,
            "n": case.n,
            "candidates": len(start.z),
            "seconds": run.seconds,
            "steps": solution.steps,
            "status": solution.status,
            "loss": solution.point.loss,
            "start_loss": run.path[0][2],
            **scores(start.decode(solution.point.z), truth),
            "certified": None,
            "lowest": solution.point.loss == lowest,
            "lr": method.lr if isinstance(method, Adam | SGD) else None,
        }
        for key, goal in goals.items():
            reached = next(((s, k) for s, k, loss, _ in run.path if loss <= goal), (None, None))
            row[f"seconds_{key}"], row[f"steps_{key}"] = reached
        for key in COUNTS:
            met = next(((s, k) for s, k, found in paths[name] if found[key] >= most[key]), (None, None))
            row[f"seconds_{key}"], row[f"steps_{key}"] = met
            row[f"most_{key}"] = most[key]
        rows.append(row)
    return rows


def add_ratios(rows: list[Row]) -> None:
    """Seconds relative to dense variable projection; null where either did not get there, or began there."""
    base = rows[0]
    for row in rows:
        for key in (*LEVELS, *COUNTS):
            own, other = row[f"seconds_{key}"], base[f"seconds_{key}"]
            worked = bool(row[f"steps_{key}"] and base[f"steps_{key}"])
            row[f"ratio_{key}"] = own / other if worked else None  # type: ignore[operator]


def timed(row: Row, key: str) -> str:
    """Seconds, steps and ratio of one goal, in words."""
    seconds, steps, ratio = (row[f"{what}_{key}"] for what in ("seconds", "steps", "ratio"))
    if seconds is None:
        return "not reached"
    if steps == 0:
        return "at the start"
    assert isinstance(seconds, float)
    text = f"{seconds:.3g} s / {steps}"
    return text if ratio is None else f"{text} ({ratio:.2g}x)"


def print_comparison(rows: list[Row]) -> None:
    first = rows[0]
    printed = [
        {
            **row,
            "solver": row["arm"] if row["lr"] is None else f"{row['arm']}, lr {row['lr']:.2g}",
            **{f"to_{key}": timed(row, key) for key in (*LEVELS, *COUNTS)},
        }
        for row in rows
    ]
    show(
        f"{first['case']}, seed {first['seed']}, start: {first['start']}, {first['candidates']} candidates, "
        f"loss {first['start_loss']:.3g}; seconds / steps (seconds relative to {DENSE})",
        printed,
        {
            "solver": "solver",
            "loss": "loss",
            "s": "seconds",
            "steps": "steps",
            "ended": "status",
            "to 2x lowest": "to_2x",
            "to 1% of lowest": "to_1pct",
            "match": "matched_train",
            "close": "close_train",
            "ctrl": "matched_control",
            f"to {first['most_match']} matched": "to_match",
            f"to {first['most_close']} close": "to_close",
        },
    )


def print_summary(rows: list[Row]) -> None:
    """How often each solver got there, and the median ratio where both it and dense VarPro did."""
    arms, summary = list(dict.fromkeys(row["arm"] for row in rows)), []
    for start in dict.fromkeys(row["start"] for row in rows):
        blocks = [r for r in rows if r["start"] == start]
        for arm in arms:
            own = [r for r in blocks if r["arm"] == arm]
            line: Row = {"start": start, "arm": arm, "runs": len(own)}
            line["wins"] = sum(bool(r["lowest"]) for r in own)
            for key in (*LEVELS, *COUNTS):
                reached = sum(r[f"seconds_{key}"] is not None for r in own)
                ratios = [float(r[f"ratio_{key}"]) for r in own if r[f"ratio_{key}"] is not None]  # type: ignore[arg-type]
                middle = f", {statistics.median(ratios):.2g}x" if ratios else ""
                line[key] = f"{reached} of {len(own)}{middle}"
            summary.append(line)
    show(
        f"All starts: runs that got there, and the median of their seconds relative to {DENSE}",
        summary,
        {
            "start": "start",
            "solver": "arm",
            "lowest loss": "wins",
            "to 2x lowest": "2x",
            "to 1% of lowest": "1pct",
        }
        | {"to most matched": "match", "to most close": "close"},
    )


# --- scaling -----------------------------------------------------------------------------------------------


def scaling(iterations: int) -> list[Row]:
    """Seconds of one iteration (linearisation, damped solves, evaluations) from random candidates."""
    base = (20, 2000, 1.5)
    grid = [(n, *base[1:]) for n in (10, 20, 40)]
    grid += [(base[0], width, base[2]) for width in (400, 1000, 4000)]
    grid += [(*base[:2], surplus) for surplus in (1.0, 2.0)]
    rows: list[Row] = []
    for n, width, surplus in grid:
        brief = TrainConfig(max_steps=30)  # the cost does not depend on how well the victim was trained
        victim = make_victim(Case(n=n, hidden=(width,), training=brief))
        attack = presets.exhume(n)
        ground = survey(victim.evidence)
        equation = attack.equation.bind(victim.evidence, ground.space, ground.decay)
        box = victim.evidence.input.box()
        assert box is not None
        objective = Objective(equation, ground.space, (Box(*box, attack.box),))
        z = objective.space.random(round(surplus * n), ground.norm, torch.Generator().manual_seed(0))
        start = Start(victim, objective, z, "random")
        for arm, limit in ((DENSE, 10**9), (CG, 0)):
            method = replace(attack.solver, iterations=iterations, tolerance=0.0, dense_limit=limit)
            run = solve(start, method, math.inf)
            rows.append(
                {
                    "attack": "exhume",
                    "case": f"scaling n={n} width={width} m={surplus:g}n",
                    "arm": arm,
                    "seed": 0,
                    "n": n,
                    "width": width,
                    "surplus": surplus,
                    "candidates": len(z),
                    "unknowns": z.numel(),
                    "equations": objective.equation.equations,
                    "seconds": (run.seconds - run.path[0][0]) / run.solution.steps,
                    "steps": run.solution.steps,
                    "loss": run.solution.point.loss,
                    "matched_train": None,
                    "close_train": None,
                    "matched_control": None,
                    "median_error": None,
                    "certified": None,
                }
            )
    return rows


def print_scaling(rows: list[Row]) -> None:
    lines = []
    for dense, cg in zip(rows[::2], rows[1::2], strict=True):
        assert isinstance(dense["seconds"], float) and isinstance(cg["seconds"], float)
        lines.append({**dense, "cg": cg["seconds"], "ratio": f"{cg['seconds'] / dense['seconds']:.2g}x"})
    show(
        "Seconds of one VarPro iteration, random candidates",
        lines,
        {"n": "n", "width": "width", "m / n": "surplus", "m": "candidates", "unknowns": "unknowns"}
        | {"equations": "equations", "dense": "seconds", "CG": "cg", "CG / dense": "ratio"},
    )


def main() -> None:
    chosen = options("Compare solvers on the attack's own objective, from the same starts.", seeds=2)
    torch.set_num_threads(1)
    caps = {2000: 7.0, 400: 3.5} if chosen.quick else {2000: 14.0, 400: 7.0}
    rows: list[Row] = []
    for width, cap in caps.items():
        for seed in range(chosen.seeds):
            for start in starts(make_victim(Case(hidden=(width,), seed=seed))):
                block = compare(start, cap)
                add_ratios(block)
                print_comparison(block)
                rows += block
    print_summary(rows)
    sizes = scaling(2 if chosen.quick else 3)
    print_scaling(sizes)
    if chosen.json is not None:
        write(Path(chosen.json), rows + sizes)


if __name__ == "__main__":
    main()
