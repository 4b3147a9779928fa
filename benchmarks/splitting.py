"""Does moving candidates pay? Splitting beside its controls and rivals, on the same victims from the same starts.

Four settings: random features by `iurada` and by our solver; small `loo` and `haim` victims, n = 20 rows of MNIST on
200 hidden units. Arms, at the same steps of the descent: no split; noise on the candidates; duplicates with
independent noise; halves along a random direction; halves along the bottom eigenvector of the splitting matrix; as
many candidates from the start; the optimiser begun anew; multipliers solved for; fresh candidates; the published
preset; the policy.
Duplicates, random and bottom halves are of the same candidates, those of the lowest eigenvalues, and go as far. The
error of a row is its relative distance to its candidate, one-to-one and capped at 1; differences to "no split" are
paired by seed, with 95% intervals (Student). Cost is in candidate-steps: the number of candidates summed over steps,
and what the moves evaluated.

With --law: the smallest p / (d n) at which all rows of random features are recovered, with and without moves. With
--unknown: ten settings where nobody states the number of rows, certified count against it.

    python benchmarks/splitting.py --quick
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from common import Row, interval, result, scores, show, write
from exhume import match, presets
from exhume.descent import Descent
from exhume.equations.base import Bound
from exhume.equations.span import Span
from exhume.evidence import Evidence
from exhume.lineage import first
from exhume.matching import assign
from exhume.metrics import relative_l2
from exhume.moves.base import Move, Proposal, State, copied, kept, proposal
from exhume.moves.curvature import lowest
from exhume.moves.grow import Grow
from exhume.moves.growth import Growth
from exhume.moves.policy import Routine, published, scaled
from exhume.moves.restart import MultiStart
from exhume.objective import Objective
from exhume.smoothing import typical
from exhume.solvers.varpro import VarPro
from exhume.survey import survey
from exhume.truth import Truth
from exhume.victims.data import load, split
from exhume.victims.features import random_features
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, train_victim
from unknown_n import CASES, LONG

SIZE = 0.1  # how far copies and noise go, relative to |z|
PART = 0.25  # of the candidates that each event copies
EVENTS = 3  # at a fifth, two fifths and three fifths of all steps
RATIOS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
RECOVERED = 1e-3
COLUMNS = {
    "setting": "case",
    "arm": "arm",
    "seed": "seed",
    "m": "candidates",
    "s": "seconds",
    "cost": "cost",
    "loss": "loss",
    "error": "error",
    "its control": "error_control",
    "matched": "matched_train",
    "close": "close_train",
    "control": "matched_control",
}


# --- control arms as moves ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nothing:
    """Every candidate stays as it is: what remains is what the schedule does to optimiser and multipliers."""

    name: str = "nothing"

    def propose(self, state: State) -> Proposal | None:
        return proposal(state, self.name, kept(state, torch.arange(len(state.row))), 0, "nothing was moved")


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on every candidate."""

    name: str = "noise"

    def propose(self, state: State) -> Proposal | None:
        view = state.view
        row = state.row.clone()
        row[:, : view.z.shape[1]] += SIZE * view.z.norm(dim=1, keepdim=True) * _unit(view.z, state)
        change = replace(kept(state, torch.arange(len(row))), row=row)
        return proposal(state, self.name, change, 0, "noise was added")


@dataclass(frozen=True)
class Copies:
    """Two copies in place of each of the candidates of the lowest eigenvalues.

    Args:
        way: "bottom" or "random" for halves at z +- v, "noise" for two independent displacements.
        name: of the arm.
    """

    way: str
    name: str

    def propose(self, state: State) -> Proposal | None:
        view = state.smoothed
        ends = lowest(view, 12)
        chosen = ends.value.argsort()[: max(round(PART * len(view.z)), 1)]
        parents = chosen.repeat_interleave(2)
        sign = torch.tensor([1.0, -1.0]).double().repeat(len(chosen))[:, None]
        if self.way == "noise":
            v = torch.stack([_unit(view.z, state), _unit(view.z, state)], 1)[chosen].flatten(0, 1)
        else:
            v = sign * (ends.vector if self.way == "bottom" else _unit(view.z, state))[parents]
        move = SIZE * view.z.norm(dim=1)[parents, None] * v
        change = copied(
            state, parents, lambda rows: rows + torch.cat([move, 0 * rows[:, len(move[0]) :]], 1), self.name
        )
        return proposal(state, self.name, change, ends.work, f"{len(chosen)} candidates were copied")


def _unit(z: Tensor, state: State) -> Tensor:
    v = torch.randn(z.shape, generator=state.generator, dtype=z.dtype)
    return v / v.norm(dim=1, keepdim=True)


@dataclass(frozen=True)
class Arm:
    """One way to treat the candidates.

    Args:
        name: in tables.
        move: what is done at an event, or None.
        refits: whether multipliers are solved for.
        restarts: whether the optimiser begins anew.
        larger: candidates of the start, relative to the others'.
    """

    name: str
    move: Move | None = None
    refits: bool = False
    restarts: bool = False
    larger: float = 1.0


def arms(m: int) -> tuple[Arm, ...]:
    """All arms for m candidates at the start."""
    return (
        Arm("no split"),
        Arm("noise", Noise()),
        Arm("duplicate + noise", Copies("noise", "duplicate")),
        Arm("random direction", Copies("random", "random split")),
        Arm("bottom eigenvector", Copies("bottom", "split")),
        Arm("oversized start", larger=(1 + PART) ** EVENTS),
        Arm("optimiser restart", Nothing(), restarts=True),
        Arm("multipliers solved", Nothing(), refits=True),
        Arm("fresh atoms", Grow(starts=32, steps=40, at_once=max(round(PART * m), 1)), refits=True),
    )


# --- settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Setting:
    """A victim and how it is attacked.

    Args:
        name: in tables.
        evidence: what the attacks see.
        truth: what they do not.
        n: rows.
        attack: the descent, or None for our solver.
    """

    name: str
    evidence: Evidence
    truth: Truth
    n: int
    attack: Descent | None


def settings(seed: int, full: bool) -> Iterator[Setting]:
    """The four of them; victims draw from generators of their own."""
    n, d = (20, 100) if full else (10, 50)
    victim = random_features(n, d, 3 * n * d, seed=seed)
    steps = 20_000 if full else 500
    yield Setting("features, iurada", victim.evidence, victim.truth(), n, presets.iurada(n, steps=steps))
    yield Setting("features, ours", victim.evidence, victim.truth(), n, None)
    case = Case(n=20, hidden=(200,), seed=seed, training=TrainConfig(max_steps=20_000, tolerance=1e-8))
    made = train_victim(case, split(load("mnist"), 20, seed))
    yield Setting("loo", made.evidence, made.truth, 20, presets.loo(20, steps=8000 if full else 300))
    decay = TrainConfig(
        lr=0.05, momentum=0.9, weight_decay=5e-3, max_steps=10_000, tolerance=0.0, loss="logistic"
    )
    case = Case(n=20, hidden=(200,), bias="first", start=1e-4, seed=seed, training=decay)
    made = train_victim(case, split(load("mnist"), 20, seed))
    yield Setting("haim", made.evidence, made.truth, 20, presets.haim(20, steps=20_000 if full else 400))


def errors(x: Tensor, truth: Truth, rows: Tensor) -> float:
    """Mean relative distance of rows to their candidates, one-to-one, capped at 1."""
    distance = relative_l2(x, rows, truth.public_mean, truth.public_scale)
    paired = assign(distance, float("inf"))
    found = [min(float(distance[i, j]), 1.0) for i, j in paired.items()]
    return (sum(found) + len(rows) - len(found)) / len(rows)


def row(setting: Setting, arm: str, seed: int, x: Tensor, extra: Row) -> Row:
    truth = setting.truth
    return {
        "case": setting.name,
        "arm": arm,
        "seed": seed,
        "n": setting.n,
        "candidates": len(x),
        "error": errors(x, truth, truth.train),
        "error_control": errors(x, truth, truth.control),
        **scores(x, truth),
        "certified": None,
        **extra,
    }


def descended(setting: Setting, attack: Descent, arm: str, seed: int) -> Row:
    """One descent."""
    found = attack.run(setting.evidence, seed=seed + 1000)
    cost = len(found.x) * found.steps if found.lineage is None else found.lineage.steps(found.steps)
    extra: Row = {
        "attack": found.attack,
        "seconds": found.seconds,
        "steps": found.steps,
        "loss": found.loss,
        "status": found.status,
        "cost": cost,
    }
    return row(setting, arm, seed, found.x, extra)


def by_descent(setting: Setting, seed: int) -> Iterator[Row]:
    """All arms of a published attack."""
    attack = setting.attack
    assert attack is not None
    period = attack.steps // 5
    m = round(attack.surplus * setting.n)
    solved = attack.name == "iurada"
    for arm in arms(m):
        if solved and arm.name == "multipliers solved":
            continue  # they always are
        now = replace(attack, surplus=arm.larger * attack.surplus)
        if arm.move is not None:
            last = EVENTS / 5 + 0.01
            now = replace(
                now, moves=Routine(arm.move, period, last, refits=arm.refits, restarts=arm.restarts)
            )
        yield descended(setting, now, arm.name, seed)
    yield descended(setting, replace(attack, moves=replace(published(period), last=0.61)), "published", seed)
    yield descended(setting, under_policy(attack), "policy", seed)


def under_policy(attack: Descent) -> Descent:
    """The attack under the default policy, which looks ten times."""
    return replace(attack, moves=scaled(attack.steps // 10, signs_free=attack.signs_free))


# --- our solver ----------------------------------------------------------------------------------------------------


def bound(evidence: Evidence, seed: int) -> tuple[Objective, Bound, float, torch.Generator]:
    """What is minimised on random features, the smooth equation, the norm of a row, and a generator."""
    ground = survey(evidence)
    generator = torch.Generator().manual_seed(seed + 1000)
    span, space = Span(nodes=(1.0,)), ground.space
    probe = space.expand(space.random(64, ground.norm, generator))
    slope = 10.0 / typical(evidence, probe)
    plain, smooth = (span.bind(evidence, space, ground.decay, s) for s in (None, slope))
    return Objective(plain, space), smooth, ground.norm, generator


def by_solver(setting: Setting, seed: int, full: bool) -> Iterator[Row]:
    """All arms of variable projection, in rounds of as many steps with the moves between."""
    steps = 25 if full else 15
    for arm in arms(setting.n):
        if arm.name in ("optimiser restart", "multipliers solved"):
            continue  # the solver keeps no state, and the multipliers are always solved for
        began = time.perf_counter()
        objective, smooth, norm, generator = bound(setting.evidence, seed)
        z = objective.space.random(round(arm.larger * setting.n), norm, generator)
        lineage, done = first(torch.zeros(len(z), dtype=torch.long)), 0
        for event in range(EVENTS + 1):
            point = VarPro(iterations=steps).minimise(objective.of(lineage), z)
            z, done = point.point.z, done + point.steps
            if arm.move is None or event == EVENTS:
                continue
            state = State(z, lineage, objective, smooth, done, steps, 8 * setting.n, norm, generator)
            made = arm.move.propose(state)
            if made is not None:
                z, lineage = made.row, made.lineage.worked(made.work)
        extra: Row = {
            "attack": "ours",
            "seconds": time.perf_counter() - began,
            "steps": done,
            "loss": point.point.loss,
            "status": point.status,
            "cost": lineage.steps(done),
        }
        yield row(setting, arm.name, seed, objective.space.expand(z), extra)
    yield grown(setting, seed)


def grown(setting: Setting, seed: int, budget: float = 120.0) -> Row:
    """Candidates grown one by one."""
    began = time.perf_counter()
    objective, smooth, norm, generator = bound(setting.evidence, seed)
    found = Growth().run(
        objective,
        smooth,
        VarPro(),
        setting.n,
        2 * setting.n,
        norm,
        generator,
        lambda loss: time.perf_counter() - began > budget,
        lambda m: time.perf_counter() - began > budget,
        objective.space.random(0, norm, generator),
    )
    extra: Row = {
        "attack": "ours",
        "seconds": time.perf_counter() - began,
        "steps": found.step,
        "loss": found.point.loss,
        "status": found.solutions[-1].status,
        "cost": found.lineage.steps(found.step),
    }
    return row(setting, "growth", seed, objective.space.expand(found.point.z), extra)


def started(setting: Setting, seed: int, budget: float) -> Row:
    """Random starts, as without moves, on all equations."""
    began = time.perf_counter()
    objective, _, norm, generator = bound(setting.evidence, seed)
    point, runs = MultiStart(starts=4).run(
        objective,
        VarPro(),
        setting.n,
        norm,
        generator,
        lambda loss: time.perf_counter() - began > budget,
        lambda done: time.perf_counter() - began > budget,
    )
    steps = sum(run.steps for run in runs)
    extra: Row = {
        "attack": "ours",
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "loss": point.loss,
        "status": runs[-1].status,
        "cost": round(1.5 * setting.n) * steps,
    }
    return row(setting, "random starts", seed, objective.space.expand(point.z), extra)


# --- what is printed -----------------------------------------------------------------------------------------------


def told(differences: Sequence[float]) -> str:
    """Mean and 95% interval of paired differences, in words."""
    if len(differences) < 2:
        return f"{differences[0]:.3g}"
    mean, low, high = interval(list(differences))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def compare(rows: list[Row]) -> list[Row]:
    """Each arm against no split, seed by seed."""
    out: list[Row] = []
    for case in dict.fromkeys(str(r["case"]) for r in rows):
        own = [r for r in rows if r["case"] == case]
        base = {r["seed"]: r for r in own if r["arm"] == "no split"}
        for arm in dict.fromkeys(str(r["arm"]) for r in own):
            these = [r for r in own if r["arm"] == arm and r["seed"] in base]

            def apart(key: str, these: list[Row] = these, base: dict[object, Row] = base) -> list[float]:
                return [float(str(r[key])) - float(str(base[r["seed"]][key])) for r in these]

            ratio = [float(str(r["cost"])) / float(str(base[r["seed"]]["cost"])) for r in these]
            logs = [
                float(
                    np.log10(
                        max(float(str(r["loss"])), 1e-30) / max(float(str(base[r["seed"]]["loss"])), 1e-30)
                    )
                )
                for r in these
            ]
            out.append(
                {
                    "setting": case,
                    "arm": arm,
                    "seeds": len(these),
                    "error - no split": told(apart("error")),
                    "matched - no split": told(apart("matched_train")),
                    "log10 loss ratio": told(logs),
                    "cost ratio": float(np.mean(ratio)),
                    "control matched": sum(int(str(r["matched_control"])) for r in these),
                }
            )
    return out


LAW = {"random starts": started, "growth": grown}


def law(
    n: int, d: int, seeds: int, ratios: Sequence[float], budget: float, names: Sequence[str]
) -> list[Row]:
    """Random starts and growth at several p / (d n)."""
    rows: list[Row] = []
    lines: list[Row] = []
    for ratio in ratios:
        for seed in range(seeds):
            victim = random_features(n, d, round(ratio * d * n), seed=seed)
            setting = Setting(f"p = {ratio:g} d n", victim.evidence, victim.truth(), n, None)
            for name in names:
                made: Row = {**LAW[name](setting, seed, budget), "arm": name, "ratio": ratio}
                rows.append(made)
                told = f"{made['arm']}: {made['matched_train']} of {n}, error {made['error']:.2g}"
                Console().print(
                    f"p = {ratio:g} d n, seed {seed}, {told}, {made['seconds']:.0f} s", highlight=False
                )
        for arm in names:
            own = [r for r in rows if r["ratio"] == ratio and r["arm"] == arm]
            good = sum(float(str(r["error"])) < RECOVERED and r["matched_control"] == 0 for r in own)
            lines.append(
                {
                    "p / (d n)": ratio,
                    "arm": arm,
                    "all recovered": f"{good} of {len(own)}",
                    "errors": ", ".join(f"{r['error']:.2g}" for r in own),
                    "seconds": ", ".join(f"{r['seconds']:.0f}" for r in own),
                }
            )
    show(
        f"Random features n={n} d={d}: recovered is a mean error below {RECOVERED:g}, control 0",
        lines,
        _same(lines),
    )
    return rows


def unknown() -> list[Row]:
    """Ten settings whose number of rows nobody states."""
    rows: list[Row] = []
    attack = replace(presets.exhume(None), restart=Growth())

    def add(name: str, n: int, evidence: Evidence, truth: Truth, seed: int) -> None:
        found = attack.run(evidence, seed=seed + 1000, budget=90.0)
        matches = match(found, truth)
        rows.append(
            {
                **result(found, matches),
                "case": name,
                "arm": "growth",
                "seed": seed,
                "n": n,
                "rank": found.rank,
            }
        )
        Console().print(f"{name}: {rows[-1]['certified']} of {n}, {found.seconds:.0f} s", highlight=False)

    for seed, (n, d, ratio) in enumerate(((5, 20, 6), (8, 30, 6), (10, 40, 5), (12, 50, 5))):
        victim = random_features(n, d, ratio * n * d, seed=seed)
        add(f"random features n={n} d={d} p={ratio}dn", n, victim.evidence, victim.truth(), seed)
    for name, case, change in CASES:
        made = train_victim(case, change(split(load(case.data), case.n, case.seed), case.seed))
        add(f"{case.data} n={case.n}, {name}", case.n, made.evidence, made.truth, 0)
    for case in (
        Case(data="mnist", n=10, hidden=(500,), training=LONG),
        Case(data="digits", n=30, hidden=(500,), training=LONG),
        Case(data="digits", n=40, hidden=(300, 300), training=LONG),
    ):
        made = train_victim(case, split(load(case.data), case.n, case.seed))
        add(f"{case.data} n={case.n}, hidden {case.hidden}", case.n, made.evidence, made.truth, 0)
    columns = {
        "setting": "case",
        "n": "n",
        "rank": "rank",
        "candidates": "candidates",
        "certified": "certified",
        "matched": "matched_train",
        "close": "close_train",
        "control": "matched_control",
        "s": "seconds",
    }
    show("Number of rows unknown", rows, columns)
    return rows


def _same(lines: Sequence[Row]) -> dict[str, str]:
    return {key: key for key in lines[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small victims and short descents (the default)")
    parser.add_argument(
        "--full", action="store_true", help="n = 20, d = 100 and descents of 8,000 steps and more"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--settings", nargs="+", default=["features, iurada", "features, ours", "loo", "haim"]
    )
    parser.add_argument("--law", action="store_true", help="the smallest p / (d n) instead")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--arms", nargs="+", default=list(LAW), choices=LAW, help="of the law")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for a run of the law")
    parser.add_argument("--unknown", action="store_true", help="settings of unknown n instead")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.law:
        rows = law(20, 100, chosen.seeds, chosen.ratios, chosen.budget, chosen.arms)
    elif chosen.unknown:
        rows = unknown()
    else:
        rows = []
        for seed in range(chosen.seeds):
            for setting in settings(seed, chosen.full):
                if setting.name not in chosen.settings:
                    continue
                began = time.perf_counter()
                made = (
                    by_solver(setting, seed, chosen.full)
                    if setting.attack is None
                    else by_descent(setting, seed)
                )
                rows += list(made)
                took = time.perf_counter() - began
                Console().print(f"{setting.name}, seed {seed}: {took:.0f} s", highlight=False)
                if chosen.json is not None:
                    write(chosen.json, rows)
        show("Arms", rows, COLUMNS)
        lines = compare(rows)
        show("Paired differences to no split: mean [95% interval]", lines, _same(lines))
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
