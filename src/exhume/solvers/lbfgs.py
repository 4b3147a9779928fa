"""Limited-memory BFGS with a strong Wolfe line search on the objective whose multipliers are eliminated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.solvers.base import P, Problem, Progress, Solution
from exhume.solvers.first_order import descend

LIFT = 1e12  # loss at the start as torch sees it: it ignores curvature below an absolute 1e-10


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS (Liu and Nocedal 1989) as in torch.optim, retracted after each quasi-Newton step.

    A step that a line search cannot take is tried once more along the negative gradient, with empty memory.

    Args:
        iterations: most quasi-Newton steps.
        history: pairs of steps and gradient changes remembered.
        evaluations: most evaluations in one line search.
        tolerance: stop when the best loss fell by less than this share over `patience` steps.
        patience: see `tolerance`.
        floor: stop when the loss is below this.
    """

    iterations: int = 500
    history: int = 20
    evaluations: int = 25
    tolerance: float = 1e-4
    patience: int = 3
    floor: float = 1e-24

    def minimise(self, problem: Problem[P], z: Tensor, progress: Progress | None = None) -> Solution[P]:
        """Minimise from z [m, q]; the best finite iterate is returned whatever happens."""
        return descend(
            problem,
            z,
            self._steps(problem, z.detach().clone()),
            self.iterations,
            self.tolerance,
            self.patience,
            self.floor,
            progress,
        )

    def _steps(self, problem: Problem[P], leaf: Tensor) -> Callable[[P], P | None]:
        """Return the map from an iterate to the next, to itself if no step lowers the loss."""
        seen: list[tuple[P, Tensor]] = []  # evaluated in this step, with gradients: torch asks for some twice
        optimizer = self._optimizer(leaf)
        lift = 0.0

        def closure() -> float:
            for point, gradient in seen:
                if torch.equal(point.z, leaf):
                    leaf.grad = lift * gradient
                    return lift * point.loss
            if bool(leaf.isfinite().all()):
                point = problem.at(leaf.clone())
                gradient = problem.gradient(point) if math.isfinite(point.loss) else leaf * math.nan
                if bool(gradient.isfinite().all()):
                    seen.append((point, gradient))
                    leaf.grad = lift * gradient
                    return lift * point.loss
            # A wall that the line search steps back from.
            leaf.grad = torch.zeros_like(leaf)
            return 10 * lift * seen[0][0].loss

        def advance(point: P) -> P | None:
            nonlocal optimizer, lift
            lift = lift or LIFT / max(point.loss, 1e-200)
            seen[:] = [pair for pair in seen if pair[0] is point] or [(point, problem.gradient(point))]
            if not bool(seen[0][1].isfinite().all()):
                return None
            while True:
                fresh = not optimizer.state
                leaf.copy_(point.z)
                optimizer.step(closure)
                if bool(leaf.isfinite().all()) and not torch.equal(leaf, point.z):
                    break
                optimizer = self._optimizer(leaf)
                if fresh:
                    return point
            z = problem.space.retract(leaf.clone())
            for known, _ in seen:
                if torch.equal(known.z, z):
                    return known
            # The pair that torch forms next must be of the step made, not of the one before retraction.
            optimizer.state[leaf].update(d=(z - point.z).flatten(), t=1.0)
            return problem.at(z)

        return advance

    def _optimizer(self, leaf: Tensor) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            [leaf],
            max_iter=1,
            max_eval=1 + self.evaluations,
            tolerance_grad=0.0,
            tolerance_change=1e-300,
            history_size=self.history,
            line_search_fn="strong_wolfe",
        )
