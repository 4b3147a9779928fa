"""Candidates grown one by one, each placed where the residual asks for it, and the unneeded ones replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.lineage import Lineage, first
from exhume.moves.base import State
from exhume.moves.grow import Grow
from exhume.moves.mirror import Mirror
from exhume.moves.policy import Policy, after
from exhume.moves.reduce import Merge, Prune, needed
from exhume.objective import Objective, Point
from exhume.solvers.base import Progress, Solution
from exhume.solvers.varpro import VarPro


@dataclass(frozen=True, eq=False)
class Grown:
    """What growth ended in.

    Args:
        point: the candidates.
        lineage: theirs.
        solutions: every run of the solver.
        step: steps of the solver in all.
    """

    point: Point
    lineage: Lineage
    solutions: tuple[Solution[Point], ...]
    step: int


@dataclass(frozen=True)
class Growth:
    """Moves between short runs of a solver, from one random candidate until none pays; n is an output.

    A move that adds candidates pays where the loss, after `between` steps of the solver, has fallen by more than
    `worth` times the share that as many unknowns would explain of noise, (q + k) / (P - m (q + k)) each. Where the
    number of samples is stated, growth goes on until there are so many. Then, `repairs` times, a part of the
    candidates is drawn at random, those that the fit needs least more often, removed and grown anew; the best fit
    counts (large neighbourhood search). Candidates on the wrong side of zero are turned over first (`Mirror`).

    Args:
        policy: which moves.
        between: steps of the solver between two moves.
        worth: see above.
        repairs: see above.
        part: of the candidates, removed in a repair.
        exact: a fit that leaves no more of the target than this is the last: rounding is all that is left.
    """

    policy: Policy = Policy(moves=(Grow(),), reductions=(Merge(), Prune(rise=1e-6)), period=400)
    between: int = 6
    worth: float = 3.0
    repairs: int = 12
    part: float = 0.25
    exact: float = 1e-16

    def run(
        self,
        objective: Objective,
        smooth: Bound,
        solver: VarPro,
        samples: int | None,
        most: int,
        norm: float,
        generator: torch.Generator,
        progress: Progress,
        stop: Callable[[int], bool],
        begin: Tensor,
    ) -> Grown:
        """Return the best fit.

        Args:
            objective: what to minimise.
            smooth: its equation with a matched softplus in place of ReLU.
            solver: by what.
            samples: number of samples, if known.
            most: largest number of candidates.
            norm: typical norm of a model input.
            generator: source of random starts.
            progress: called with the loss after each step of the solver.
            stop: called with the number of candidates before each move; True ends the growth.
            begin: coordinates to grow from [k, q]; none for a random one.
        """
        begin = begin if len(begin) else objective.space.random(1, norm, generator)
        lineage = first(torch.zeros(len(begin), dtype=torch.long))
        full = most if samples is None else min(samples, most)
        state = State(begin, lineage, objective, smooth, 0, self.policy.period, full, norm, generator)
        runs: list[Solution[Point]] = []
        grow = _Run(self, solver, progress, stop, runs)
        state = grow.settle(state, replace(solver, iterations=self.between))
        state = grow.settle(grow.up(state, samples is None), solver)
        mirror: Mirror | None = Mirror()
        for _ in range(self.repairs):
            if state.loss < self.exact or len(state.row) == 1 or stop(len(state.row)):
                break
            again = grow.settle(grow.up(_fewer(state, mirror, self.part), samples is None), solver)
            mirror = None  # what has been turned over in vain is not again
            if again.loss < state.loss:
                state, mirror = again, Mirror()
            else:  # the work was done, whatever came of it
                state = replace(state, step=again.step, lineage=state.lineage.worked(again.lineage.work))
        return Grown(objective.of(state.lineage).at(state.row), state.lineage, tuple(runs), state.step)


class _Run:
    """One growth, and the runs of the solver so far."""

    def __init__(
        self,
        growth: Growth,
        solver: VarPro,
        progress: Progress,
        stop: Callable[[int], bool],
        runs: list[Solution[Point]],
    ) -> None:
        self.growth, self.solver, self.progress, self.stop, self.runs = growth, solver, progress, stop, runs

    def settle(self, state: State, solver: VarPro) -> State:
        """The candidates after a run of the solver."""
        problem = state.problem.of(state.lineage)
        assert isinstance(problem, Objective)
        solution = solver.minimise(problem, state.row, self.progress)
        self.runs.append(solution)
        return replace(state, row=solution.point.z, step=state.step + solution.steps)

    def up(self, state: State, open_ended: bool) -> State:
        """Add candidates while there is room, or while it pays."""
        short = replace(self.solver, iterations=self.growth.between)
        policy = replace(self.growth.policy, reductions=())
        while state.free(1) and not self.stop(len(state.row)):
            moved = policy.moved(state)
            if len(moved.state.row) == len(state.row):
                break
            later = self.settle(moved.state, short)
            if open_ended and later.loss > (1 - self._noise(later)) * state.loss:
                break
            state = later
            if state.loss < self.growth.exact:
                break
        for move in self.growth.policy.reductions:
            made = move.propose(state) if len(state.row) > 1 else None
            state = state if made is None else after(state, made)
        return state

    def _noise(self, state: State) -> float:
        """`worth` times the share of noise that the unknowns of one more candidate explain."""
        equation = state.problem.equation
        own = equation.dim + equation.multiplicity
        return self.growth.worth * own / max(equation.equations - (len(state.row) - 1) * own, own)


def _fewer(state: State, mirror: Mirror | None, part: float) -> State:
    """Candidates turned over, if some ask for it; else without a part of them.

    That part is drawn by one over the root of how much the fit needs a candidate.
    """
    change = None if mirror is None else mirror.turned(state)
    if change is not None:
        return replace(state, row=change.row, lineage=change.lineage)
    rise = needed(state)
    chance = rise.clamp_min(1e-3 * float(rise.max())).rsqrt()
    gone = min(max(round(part * len(rise)), 1), len(rise) - 1)
    left = torch.ones(len(rise), dtype=torch.bool)
    left[torch.multinomial(chance, gone, generator=state.generator)] = False
    index = left.nonzero()[:, 0]
    return replace(state, row=state.row[index], lineage=state.lineage.take(index, state.step))
