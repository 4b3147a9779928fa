"""What every solver takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class Point(Protocol):
    """An evaluated iterate."""

    @property
    def z(self) -> Tensor:
        """Coordinates [m, q]."""

    @property
    def loss(self) -> float:
        """Objective value."""


P = TypeVar("P", bound=Point)


class Space(Protocol):
    """What a solver needs of a space."""

    def retract(self, z: Tensor) -> Tensor:
        """Return the admissible point that a step reaches."""


class Descendable(Protocol[P]):
    """An objective with a gradient."""

    @property
    def space(self) -> Space:
        """Where the iterates live."""

    def at(self, z: Tensor) -> P:
        """Evaluate."""

    def gradient(self, point: P) -> Tensor:
        """Gradient [m, q]."""


class Problem(Descendable[P], Protocol[P]):
    """A smooth least-squares objective with its multipliers eliminated."""

    def hessian(self, point: P) -> Tensor:
        """Gauss-Newton Hessian [m q, m q]."""

    def curvatures(self, point: P) -> Tensor:
        """Rough size of each candidate's part of the Hessian's diagonal, positive, 1 on average [m]."""

    def hessian_product(self, point: P) -> Callable[[Tensor], Tensor]:
        """Gauss-Newton Hessian times a direction [m, q]."""


@dataclass(frozen=True, eq=False)
class Solution(Generic[P]):
    """How a run ended.

    Args:
        point: the best finite iterate.
        status: one of "converged", "iterations", "stalled", "diverged", "stopped".
        reason: the same, as a sentence.
        steps: accepted and rejected steps taken.
        trace: loss after each step.
    """

    point: P
    status: str
    reason: str
    steps: int
    trace: tuple[float, ...]


Progress = Callable[[float], bool]
"""Called with the loss after each step, accepted or not; returning True stops the run."""
