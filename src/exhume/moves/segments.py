"""A first-order descent in segments, with moves between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.joint import Joint
from exhume.lineage import Lineage
from exhume.moves.base import State
from exhume.moves.policy import Schedule
from exhume.objective import Objective
from exhume.optimisers import PerShare, inherited, renewed
from exhume.solvers.base import Progress, Solution
from exhume.solvers.first_order import follow
from exhume.view import View


@dataclass(frozen=True, eq=False)
class Course:
    """A descent that moves can interrupt.

    Args:
        leaf: the unknowns at the start [m, .].
        lineage: of the candidates at the start.
        problem: what a step minimises, for the candidates at the start.
        whole: the same with all candidates in every gradient.
        smooth: its equation with matched smoothing.
        optimizer: makes the optimiser of a leaf for a problem.
        generator: source of random starts.
    """

    leaf: Tensor
    lineage: Lineage
    problem: Callable[[int], Any]
    whole: Callable[[int], Objective | Joint]
    smooth: Callable[[int], Bound]
    optimizer: Callable[[Tensor, Any], torch.optim.Optimizer]
    generator: torch.Generator

    def state(self, row: Tensor, lineage: Lineage, schedule: Schedule, step: int) -> State:
        """The candidates at a step, as moves see them."""
        problem = self.whole(step)
        inner, equation = problem.inner if isinstance(problem, Joint) else problem.space, problem.equation
        most = max(equation.equations // (equation.dim + equation.multiplicity), len(row))
        return State(
            row,
            lineage,
            problem,
            self.smooth(step),
            step,
            schedule.period,
            # More unknowns than equations determine nothing.
            min(round(schedule.most * len(self.leaf)), most),
            float(inner.expand(row[:, : inner.dim]).norm(dim=1).median()),
            self.generator,
            schedule.refits,
        )


def in_segments(
    course: Course, schedule: Schedule, steps: int, floor: float, progress: Progress
) -> tuple[Solution[Any], Lineage]:
    """Descend for a period, move candidates if that is due, and go on with what the optimiser knows of them.

    Args:
        course: what is minimised, from where.
        schedule: when candidates are moved, and how.
        steps: of the descent in all.
        floor: stop when the loss is below this.
        progress: called with the loss after each step.
    """
    leaf, lineage, done, idle = course.leaf, course.lineage, 0, 0
    optimizer = course.optimizer(leaf, course.problem(0))
    trace: list[float] = []
    while True:
        segment = _segment(course, lineage, done)
        length = min(schedule.period, steps - done)
        solution = follow(optimizer, leaf, segment, length, floor, progress)
        trace += solution.trace if not trace else solution.trace[1:]
        done += solution.steps
        if solution.status != "iterations" or done >= steps:
            return replace(solution, steps=done, trace=tuple(trace)), lineage
        over = done > schedule.last * steps or idle >= schedule.patience
        if over or not schedule.due(solution.trace):
            leaf.copy_(solution.point.z)
            continue
        state = course.state(solution.point.z, lineage, schedule, done)
        moved = schedule.moved(state)
        idle = 0 if moved.said else idle + 1
        lineage, before = moved.state.lineage, optimizer
        leaf = moved.state.row.clone()
        made = course.optimizer(leaf, course.problem(done).of(lineage))
        optimizer = (
            renewed(made, before) if schedule.restarts else inherited(made, leaf, before, moved.source)
        )
        if schedule.refits and isinstance(optimizer, torch.optim.SGD):
            # Multipliers that were solved for can bend the loss more than the rate allows.
            bent = [stiffness(one.view) for one in (state, moved.state)]
            optimizer.param_groups[0]["lr"] *= min(1.0, bent[0] / max(bent[1], 1e-300))


def stiffness(view: View, iterations: int = 10) -> float:
    """Largest eigenvalue of J'J / share, J the Jacobian of Phi' c in z, by power iterations."""
    slope = view.equation.slope(view.z, view.coef)
    root = view.share.rsqrt()[:, None]
    v = torch.randn(view.z.shape, generator=torch.Generator().manual_seed(0), dtype=view.z.dtype)
    size = 0.0
    for _ in range(iterations):
        v = root * slope.vjp(slope.jvp(root * v / v.norm().clamp_min(1e-300)))
        size = float(v.norm())
    return size


def _segment(course: Course, lineage: Lineage, done: int) -> Callable[[int], PerShare[Any]]:
    return lambda step: PerShare(course.problem(done + step).of(lineage), lineage.share)
