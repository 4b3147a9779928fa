"""Variable projection with Levenberg-Marquardt: dense normal equations, or conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.solvers.base import P, Problem, Progress, Solution

TRIES, LEAST = (
    14,
    1e-8,
)  # damping can rise from its least to 4^14 times that, a gradient step, before a solve gives up


@dataclass(frozen=True)
class VarPro:
    """Levenberg-Marquardt on the objective whose multipliers are eliminated (Golub and Pereyra 1973, Kaufman 1975).

    (H + damping D) s = -g;  z <- retract(z + s) where the loss falls, else more damping

    D is the diagonal of H, or where H is not formed its mean times the relative curvature of each candidate, which is
    also the preconditioner of the conjugate gradients.

    Args:
        iterations: most accepted steps.
        damping: first damping; divided by 5 on success, times 4 on failure.
        tolerance: stop after three steps in a row whose relative decrease is below this.
        floor: stop when the loss is below this.
        dense_limit: up to this many unknowns the normal equations are solved densely, beyond by CG.
        cg_steps: most CG steps for one damped system.
    """

    iterations: int = 60
    damping: float = 0.1
    tolerance: float = 1e-4
    floor: float = 1e-24
    dense_limit: int = 1500
    cg_steps: int = 40

    def minimise(self, problem: Problem[P], z: Tensor, progress: Progress | None = None) -> Solution[P]:
        """Minimise from z [m, q]; the best finite iterate is returned whatever happens."""
        point = problem.at(problem.space.retract(z))
        if not math.isfinite(point.loss):
            return Solution(point, "diverged", "The loss was not finite at the start.", 0, (point.loss,))
        trace, damping, small = [point.loss], self.damping, 0
        for step in range(1, self.iterations + 1):
            solve = self._system(problem, point)
            for _ in range(TRIES):
                trial = problem.at(problem.space.retract(point.z + solve(damping)))
                if trial.loss < point.loss:
                    break
                damping *= 4
                if progress is not None and progress(point.loss):
                    return Solution(point, "stopped", "The budget ran out.", step, tuple(trace))
            else:
                return Solution(point, "stalled", "No step lowered the loss.", step, tuple(trace))
            gain = (point.loss - trial.loss) / point.loss
            point, damping = trial, max(damping / 5, LEAST)
            trace.append(point.loss)
            if progress is not None and progress(point.loss):
                return Solution(point, "stopped", "The budget ran out.", step, tuple(trace))
            small = small + 1 if gain < self.tolerance else 0
            if small == 3 or point.loss < self.floor:
                return Solution(point, "converged", "The loss no longer fell.", step, tuple(trace))
        return Solution(
            point, "iterations", "The iteration limit was reached.", self.iterations, tuple(trace)
        )

    def _system(self, problem: Problem[P], point: P) -> Callable[[float], Tensor]:
        """Return a function from damping to step."""
        gradient = problem.gradient(point)
        if gradient.numel() <= self.dense_limit:
            hessian = problem.hessian(point)
            diagonal = hessian.diagonal()
            # A coordinate the residual does not see (a dead candidate) still needs a positive pivot.
            lift = diagonal + 1e-6 * diagonal.mean().clamp_min(1e-300)

            def dense(damping: float) -> Tensor:
                factor, _ = torch.linalg.cholesky_ex(hessian + (damping * lift).diag())
                return -torch.cholesky_solve(gradient.reshape(-1, 1), factor).view_as(gradient)

            return dense
        product = problem.hessian_product(point)
        scale = _mean_diagonal(product, gradient) * problem.curvatures(point)[:, None]
        return lambda damping: _conjugate_gradients(
            lambda v: product(v) + damping * scale * v, -gradient, scale, self.cg_steps
        )


def _mean_diagonal(product: Callable[[Tensor], Tensor], like: Tensor, probes: int = 4) -> float:
    """Hutchinson estimate of the mean of the Hessian's diagonal."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(probes):
        v = torch.randint(0, 2, like.shape, generator=generator).to(like) * 2 - 1
        total += float((v * product(v)).mean())
    return max(total / probes, 1e-300)


def _conjugate_gradients(
    product: Callable[[Tensor], Tensor], rhs: Tensor, scale: Tensor, steps: int, tolerance: float = 1e-3
) -> Tensor:
    """Solve A x = rhs for a positive definite A, preconditioned by `scale`, to a relative residual, from zero."""
    x = torch.zeros_like(rhs)
    r, p = rhs.clone(), rhs / scale
    rz = float((r * p).sum())
    goal = tolerance**2 * rz
    for _ in range(steps):
        if rz <= goal:
            break
        ap = product(p)
        curvature = float((p * ap).sum())
        if curvature <= 0:
            break
        alpha = rz / curvature
        x, r = x + alpha * p, r - alpha * ap
        new = float((r * r / scale).sum())
        p = r / scale + (new / rz) * p
        rz = new
    return x
