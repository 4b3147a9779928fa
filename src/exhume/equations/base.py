"""What a solver may ask of a bound equation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exhume.evidence import Parameters


@dataclass(frozen=True, eq=False)
class Rows:
    """The gradients Phi at one z, evaluated once for many products.

    Args:
        gram: G with Phi Phi' = G (x) I, as `Bound.gram`.
        inner: Phi v [m, k] for a vector [P].
        contribution: Phi' c [P] for multipliers [m, k].
    """

    gram: Callable[[], Tensor]
    inner: Callable[[Tensor], Tensor]
    contribution: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Slope:
    """The derivative J of Phi' c in z at one z and c, linearised once for many products.

    Args:
        jvp: J d [P] for a direction [m, q].
        vjp: J' v [m, q] for a vector [P].
    """

    jvp: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor], Tensor]


def slope(contribution: Callable[[Tensor], Tensor], z: Tensor) -> Slope:
    """Linearise z -> Phi(z)' c by reverse differentiation alone: J' v is linear in v, and its transpose is J."""
    value, pull = torch.func.vjp(contribution, z)[:2]
    push = torch.func.vjp(lambda v: pull(v)[0], torch.zeros_like(value))[1]
    return Slope(lambda direction: push(direction)[0], lambda vector: pull(vector)[0])


class Bound(Protocol):
    """An equation t = Phi(z)' c at fixed evidence, linear in the multipliers c, nonlinear in the coordinates z.

    z is [m, q] (free coordinates of m candidates), c is [m, k]; Phi stacks the m * k gradients as rows of
    length P, and is never formed by the structured implementation.
    """

    @property
    def energy(self) -> float:
        """|t|^2, including what lies outside the restricted equations."""

    @property
    def outside(self) -> float:
        """Squared norm of the part of t that no candidate of the space can reach."""

    @property
    def dim(self) -> int:
        """Number of coordinates q of one candidate."""

    @property
    def multiplicity(self) -> int:
        """Number of multipliers k of one candidate: nodes times outputs."""

    @property
    def equations(self) -> int:
        """Number of equations P."""

    def gram(self, z: Tensor) -> Tensor:
        """G [s, s] with Phi Phi' = G (x) I, the identity over the m k / s outputs that share their features.

        s = m k where none do. Multipliers [m, k] are s rows of m k / s columns, in this order.
        """

    def inner(self, z: Tensor, vector: Tensor) -> Tensor:
        """Phi v [m, k] for a vector v [P]; differentiable in z."""

    def target(self) -> Tensor:
        """t [P]."""

    def vector(self, change: Parameters) -> Tensor:
        """A change of the folded net's parameters in the form of the target [P]."""

    def aimed_at(self, target: Tensor) -> Bound:
        """The same equation with another target [P]."""

    def contribution(self, z: Tensor, coef: Tensor) -> Tensor:
        """Phi' c [P]."""

    def jvp(self, z: Tensor, coef: Tensor, direction: Tensor) -> Tensor:
        """Derivative of Phi' c along `direction` [m, q] in z, [P]."""

    def vjp(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """Transpose of `jvp` applied to a vector [P], [m, q]."""

    def rows(self, z: Tensor) -> Rows:
        """`gram`, `inner` and `contribution` at one z."""

    def slope(self, z: Tensor, coef: Tensor) -> Slope:
        """`jvp` and `vjp` at one z and c."""

    def normal(self, z: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """J'J [m q, m q] and J' Phi' [m q, m k], J the Jacobian of Phi' c in z."""

    def potential(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """<v, c_i' Phi_i> of each candidate [m]: its first variation with the others frozen; twice differentiable."""
