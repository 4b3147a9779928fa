"""Limited-memory BFGS with a strong Wolfe line search on the objective whose multipliers are eliminated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.solvers.base import P, Problem, Progress, Solution, Space
from exhume.solvers.first_order import descend

LIFT = 1e12  # loss at the start as torch sees it: it ignores curvature below an absolute 1e-10


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS (Liu and Nocedal 1989) as in torch.optim, on z -> loss(retract(z)), with z retracted after each step.

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
        # What this step has evaluated: where, the point that retraction made of it, and the gradient there. Torch
        # asks for some twice.
        seen: list[tuple[Tensor, P, Tensor]] = []
        optimizer = self._optimizer(leaf)
        lift = 0.0

        def evaluate() -> tuple[P, Tensor] | None:
            for where, point, gradient in seen:
                if torch.equal(where, leaf):
                    return point, gradient
            z = problem.space.retract(leaf.clone())
            if not bool(z.isfinite().all()):
                return None
            point = problem.at(z)
            gradient = problem.gradient(point) if math.isfinite(point.loss) else z * math.nan
            if not bool(gradient.isfinite().all()):
                return None
            seen.append((leaf.clone(), point, gradient))
            return point, gradient

        def closure() -> float:
            found = evaluate()
            if found is None:  # a wall that the line search steps back from
                leaf.grad = torch.zeros_like(leaf)
                return 10 * lift * seen[0][1].loss
            leaf.grad = _pulled(problem.space, leaf, lift * found[1])
            return lift * found[0].loss

        def advance(point: P) -> P | None:
            nonlocal optimizer, lift
            lift = lift or LIFT / max(point.loss, 1e-200)
            known = [gradient for _, old, gradient in seen if old is point]
            seen[:] = [(point.z, point, known[0] if known else problem.gradient(point))]
            if not bool(seen[0][2].isfinite().all()):
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
            found = evaluate()
            return None if found is None else found[0]

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


def _pulled(space: Space, leaf: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of the loss at the retraction of `leaf`: R' (leaf)' gradient."""
    with torch.enable_grad():
        free = leaf.detach().clone().requires_grad_()
        return torch.autograd.grad(space.retract(free), free, gradient)[0]
