"""Levenberg-Marquardt on many small independent problems at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Expansion(Protocol):
    """Value [m], gradient [m, q] and Gauss-Newton Hessian [m, q, q] of m problems."""

    @property
    def value(self) -> Tensor:
        """Objective of each problem."""

    @property
    def gradient(self) -> Tensor:
        """Gradient of each problem."""

    @property
    def curvature(self) -> Tensor:
        """Curvature of each problem."""


@dataclass(frozen=True)
class BatchedLM:
    """Damped Gauss-Newton steps, each problem with its own damping.

    s = -(H + damping (diag H + mean diag H / 100))^-1 g, accepted where the objective falls

    Args:
        iterations: number of steps.
        damping: first damping.
        tolerance: a problem rests once its relative decrease falls below this.
    """

    iterations: int = 30
    damping: float = 0.1
    tolerance: float = 1e-4

    def minimise(
        self, expand: Callable[[Tensor], Expansion], retract: Callable[[Tensor], Tensor], z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Minimise all problems from z [m, q]; returns the best points and their values."""
        z = retract(z)
        here = expand(z)
        value, gradient, curvature = here.value.clone(), here.gradient.clone(), here.curvature.clone()
        z, damping = z.clone(), torch.full_like(value, self.damping)
        active = torch.arange(len(z))
        stalls = torch.zeros(len(z), dtype=torch.long)
        for _ in range(self.iterations):
            if len(active) == 0:
                break
            diagonal = curvature[active].diagonal(dim1=1, dim2=2)
            lift = diagonal + 1e-2 * diagonal.mean(1, keepdim=True) + 1e-12
            lifted = curvature[active] + (damping[active, None] * lift).diag_embed()
            step = torch.linalg.solve(lifted, gradient[active, :, None])[..., 0]
            trial = retract(z[active] - step)
            there = expand(trial)
            better = there.value < value[active]
            gain = (value[active] - there.value) / value[active].clamp_min(1e-300)
            accepted = active[better]
            z[accepted] = trial[better]
            value[accepted] = there.value[better]
            gradient[accepted] = there.gradient[better]
            curvature[accepted] = there.curvature[better]
            damping[active] = torch.where(better, damping[active] / 5, damping[active] * 4).clamp(1e-9, 1e9)
            # A rejected step only counts once its damping is large: after good steps it takes a few to get there.
            resting = torch.where(better, gain <= self.tolerance, damping[active] > 1e3)
            stalls[active] = torch.where(resting, stalls[active] + 1, 0)
            active = active[stalls[active] < 4]
        return z, value
