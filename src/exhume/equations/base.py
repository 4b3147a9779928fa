"""What a solver may ask of a bound equation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from exhume.evidence import Parameters


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
        """Phi Phi' [m k, m k]."""

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

    def normal(self, z: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """J'J [m q, m q] and J' Phi' [m q, m k], J the Jacobian of Phi' c in z."""

    def potential(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """<v, c_i' Phi_i> of each candidate [m]: its first variation with the others frozen; twice differentiable."""
