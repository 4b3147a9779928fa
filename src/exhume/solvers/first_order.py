"""Adam and momentum gradient descent on the objective whose multipliers are eliminated: the baselines to beat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.solvers.base import Descendable, P, Problem, Progress, Solution


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), retracted after each step.

    Args:
        iterations: most steps.
        lr: learning rate, about the change of a coordinate in one step.
        final: learning rate of the last step relative to the first; it falls geometrically in between.
        betas: decay of the two moments.
        tolerance: stop when the best loss fell by less than this share over `patience` steps.
        patience: see `tolerance`.
        floor: stop when the loss is below this.
    """

    iterations: int = 3000
    lr: float = 0.01
    final: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    tolerance: float = 1e-3
    patience: int = 100
    floor: float = 1e-24

    def minimise(self, problem: Problem[P], z: Tensor, progress: Progress | None = None) -> Solution[P]:
        """Minimise from z [m, q]; the best finite iterate is returned whatever happens."""
        leaf = z.detach().clone()
        optimizer = torch.optim.Adam([leaf], self.lr, self.betas)
        advance = _steps(problem, optimizer, leaf, self.final ** (1 / max(self.iterations - 1, 1)))
        return descend(
            problem, z, advance, self.iterations, self.tolerance, self.patience, self.floor, progress
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with heavy-ball momentum (Polyak 1964), retracted after each step.

    Args:
        iterations: most steps.
        lr: learning rate; a step is lr times the gradient of a loss that is relative to |t|^2.
        final: learning rate of the last step relative to the first; it falls geometrically in between.
        momentum: share of the previous step that is kept.
        tolerance: stop when the best loss fell by less than this share over `patience` steps.
        patience: see `tolerance`.
        floor: stop when the loss is below this.
    """

    iterations: int = 3000
    lr: float = 1.0
    final: float = 1.0
    momentum: float = 0.9
    tolerance: float = 1e-3
    patience: int = 100
    floor: float = 1e-24

    def minimise(self, problem: Problem[P], z: Tensor, progress: Progress | None = None) -> Solution[P]:
        """Minimise from z [m, q]; the best finite iterate is returned whatever happens."""
        leaf = z.detach().clone()
        optimizer = torch.optim.SGD([leaf], self.lr, self.momentum)
        advance = _steps(problem, optimizer, leaf, self.final ** (1 / max(self.iterations - 1, 1)))
        return descend(
            problem, z, advance, self.iterations, self.tolerance, self.patience, self.floor, progress
        )


def follow(
    optimizer: torch.optim.Optimizer,
    leaf: Tensor,
    problem: Callable[[int], Descendable[P]],
    iterations: int,
    floor: float,
    progress: Progress | None,
) -> Solution[P]:
    """Take a fixed number of steps on a problem that changes with the step; the last finite iterate is returned.

    Losses of a problem that changes are not comparable, so no iterate is the best.

    Args:
        optimizer: of `leaf`.
        leaf: the start [m, q]; overwritten.
        problem: what is minimised at step 0, 1, ...
        iterations: most steps.
        floor: stop when the loss is below this.
        progress: called with the loss after each step.
    """
    now = problem(0)
    point = now.at(now.space.retract(leaf.clone()))
    trace = [point.loss]
    if not math.isfinite(point.loss):
        return Solution(point, "diverged", "The loss was not finite at the start.", 0, tuple(trace))
    for step in range(1, iterations + 1):
        leaf.copy_(point.z)
        leaf.grad = now.gradient(point)
        optimizer.step()
        now = problem(step)
        z = now.space.retract(leaf.clone())
        trial = now.at(z) if bool(z.isfinite().all()) else None
        if trial is None or not math.isfinite(trial.loss):
            return Solution(point, "diverged", "The loss stopped being finite.", step, tuple(trace))
        point = trial
        trace.append(point.loss)
        if progress is not None and progress(point.loss):
            return Solution(point, "stopped", "The budget ran out.", step, tuple(trace))
        if point.loss < floor:
            return Solution(point, "converged", "The loss is below its floor.", step, tuple(trace))
    return Solution(point, "iterations", "All steps of the schedule were taken.", iterations, tuple(trace))


def _steps(
    problem: Problem[P], optimizer: torch.optim.Optimizer, leaf: Tensor, factor: float
) -> Callable[[P], P | None]:
    """Return the map from an iterate to the next, None once a coordinate is not finite."""

    def advance(point: P) -> P | None:
        leaf.copy_(point.z)
        leaf.grad = problem.gradient(point)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= factor
        z = problem.space.retract(leaf.clone())
        return problem.at(z) if bool(z.isfinite().all()) else None

    return advance


def descend(
    problem: Problem[P],
    z: Tensor,
    advance: Callable[[P], P | None],
    iterations: int,
    tolerance: float,
    patience: int,
    floor: float,
    progress: Progress | None,
) -> Solution[P]:
    """Iterate a step that may raise the loss, and keep the best finite iterate.

    Args:
        problem: what to minimise.
        z: start [m, q].
        advance: from an iterate to the next; the same iterate if no step lowers the loss, None if the next is
            not finite.
        iterations: most steps.
        tolerance: stop when the best loss fell by less than this share over `patience` steps.
        patience: see `tolerance`.
        floor: stop when the loss is below this.
        progress: called with the loss after each step.
    """
    point = best = problem.at(problem.space.retract(z))
    trace, mark = [point.loss], point.loss
    if not math.isfinite(point.loss):
        return Solution(point, "diverged", "The loss was not finite at the start.", 0, tuple(trace))
    for step in range(1, iterations + 1):
        trial = advance(point)
        if trial is point:
            return Solution(best, "stalled", "No step lowered the loss.", step, tuple(trace))
        if trial is None or not math.isfinite(trial.loss):
            return Solution(best, "diverged", "The loss stopped being finite.", step, tuple(trace))
        point = trial
        best = point if point.loss < best.loss else best
        trace.append(point.loss)
        if progress is not None and progress(point.loss):
            return Solution(best, "stopped", "The budget ran out.", step, tuple(trace))
        idle = False
        if step % patience == 0:
            idle, mark = mark - best.loss < tolerance * mark, best.loss
        if idle or best.loss < floor:
            return Solution(best, "converged", "The loss no longer fell.", step, tuple(trace))
    return Solution(best, "iterations", "The iteration limit was reached.", iterations, tuple(trace))
