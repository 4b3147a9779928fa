"""The first-order optimisers of published attacks, and what becomes of their state when candidates are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from exhume.batches import Batched
from exhume.joint import Joint
from exhume.objective import Objective
from exhume.solvers.base import Descendable, P, Space
from exhume.solvers.lazy_adam import LazyAdam


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam at a constant rate."""

    lr: float

    def optimizer(self, leaf: Tensor, problem: Objective | Joint | Batched) -> torch.optim.Optimizer:
        """The optimiser of a leaf."""
        return torch.optim.Adam([leaf], self.lr)


@dataclass(frozen=True)
class Lazy:
    """Adam at a constant rate that leaves alone what has no gradient, as candidates outside a batch have not."""

    lr: float

    def optimizer(self, leaf: Tensor, problem: Objective | Joint | Batched) -> torch.optim.Optimizer:
        """The optimiser of a leaf."""
        return LazyAdam(leaf, self.lr)


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball gradient descent.

    Args:
        lr: learning rate, or the number it is divided by the largest curvature for.
        stiff: whether `lr` is divided by the largest eigenvalue of J'J at the start.
        momentum: share of the previous step that is kept.
    """

    lr: float
    stiff: bool = False
    momentum: float = 0.9

    def optimizer(self, leaf: Tensor, problem: Objective | Joint | Batched) -> torch.optim.Optimizer:
        """The optimiser of a leaf."""
        lr = self.lr / problem.stiffness(leaf) if self.stiff and isinstance(problem, Joint) else self.lr
        return torch.optim.SGD([leaf], lr, self.momentum)


def inherited(
    made: torch.optim.Optimizer, leaf: Tensor, before: torch.optim.Optimizer, source: Tensor
) -> torch.optim.Optimizer:
    """An optimiser of new candidates with the state of the old ones.

    Every tensor of the state with a row for each candidate is gathered from the candidate that each takes over;
    those of nobody start at zero. Gradients are taken per unit of share (see `PerShare`), so that copies of a
    candidate, which have half its gradient each, need no other scaling.

    Args:
        made: a fresh optimiser of `leaf`.
        leaf: the unknowns of the new candidates [m, .].
        before: the optimiser of the old ones.
        source: place of the old candidate for each new one, -1 for none [m].
    """
    renewed(made, before)
    old = before.param_groups[0]["params"][0]
    for key, value in before.state.get(old, {}).items():
        if isinstance(value, Tensor) and value.shape == old.shape:
            value = torch.where(source[:, None] < 0, 0.0, value[source.clamp_min(0)])
        made.state[leaf][key] = value.clone() if isinstance(value, Tensor) else value
    return made


def renewed(made: torch.optim.Optimizer, before: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A fresh optimiser with the rates of another, and nothing of its state."""
    made.param_groups[0].update({k: v for k, v in before.param_groups[0].items() if k != "params"})
    return made


@dataclass(frozen=True, eq=False)
class PerShare(Generic[P]):
    """A problem whose gradient is taken per unit of share, the gradient in the space of weighed samples.

    Two halves of a candidate that stay together then move as the whole would, under any optimiser.

    Args:
        problem: what is minimised.
        share: of each candidate [m].
    """

    problem: Descendable[P]
    share: Tensor

    @property
    def space(self) -> Space:
        """Where the iterates live."""
        return self.problem.space

    def at(self, z: Tensor) -> P:
        """Evaluate."""
        return self.problem.at(z)

    def gradient(self, point: P) -> Tensor:
        """Gradient over share [m, q]."""
        return self.problem.gradient(point) / self.share[:, None]
