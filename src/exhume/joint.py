"""Samples and multipliers as unknowns of one descent, as most published attacks have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.equations.span_dense import DenseSpan
from exhume.multipliers import Multipliers, Plain
from exhume.spaces import Space
from exhume.terms import Term


@dataclass(frozen=True, eq=False)
class JointSpace:
    """Rows [z | a] of coordinates and scaled multipliers; only the coordinates are retracted.

    Args:
        inner: where the candidates live.
    """

    inner: Space

    def retract(self, row: Tensor) -> Tensor:
        """Retract the coordinates of rows [m, q + k]."""
        z, a = row.split([self.inner.dim, row.shape[1] - self.inner.dim], 1)
        return torch.cat([self.inner.retract(z), a], 1)


@dataclass(frozen=True, eq=False)
class JointPoint:
    """The joint objective at rows [z | a].

    Args:
        z: the rows [m, q + k].
        loss: its value.
        misfit: |t - Phi' c|^2 / |t|^2.
        slope: its gradient [m, q + k].
    """

    z: Tensor
    loss: float
    misfit: float
    slope: Tensor


@dataclass(frozen=True, eq=False)
class Joint:
    """F(z, a) = |t - Phi(z)' c|^2 + sum_i terms(u_i),  c = unit * a.

    Args:
        equation: a bound span equation.
        inner: where the candidates live.
        unit: multiplier that a = 1 stands for; it sets how fast multipliers move beside coordinates.
        terms: priors, in the units of |t|^2.
        multipliers: how a is written.
        head: from coordinates and multipliers lambda to the weights on the gradients; None where they are the same.
    """

    equation: Bound
    inner: Space
    unit: float
    terms: Sequence[Term] = ()
    multipliers: Multipliers = Plain()
    head: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def space(self) -> JointSpace:
        """Where the rows live."""
        return JointSpace(self.inner)

    def parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates z [m, q] and multipliers c [m, k] of rows."""
        z, a = self._split(row)
        multiplier = self.multipliers.of(a)
        return z, self.unit * (multiplier if self.head is None else self.head(z, multiplier))

    def _split(self, row: Tensor) -> list[Tensor]:
        return list(row.split([self.inner.dim, row.shape[1] - self.inner.dim], 1))

    def at(self, row: Tensor) -> JointPoint:
        """Evaluate value and gradient."""
        with torch.enable_grad():
            leaf = row.detach().requires_grad_()
            z, c = self.parts(leaf)
            missed = self._missed(z, c)
            u = self.inner.expand(z)
            priors = [term.value(u).sum() for term in self.terms]
            loss = torch.stack([missed, self.multipliers.penalty(self._split(leaf)[1]), *priors]).sum()
            slope = torch.autograd.grad(loss, leaf)[0]
        return JointPoint(row, float(loss.detach()), float(missed.detach()) / self.equation.energy, slope)

    def gradient(self, point: JointPoint) -> Tensor:
        """dF/d[z | a]."""
        return point.slope

    def _missed(self, z: Tensor, c: Tensor) -> Tensor:
        """|t - Phi' c|^2."""
        equation = self.equation
        if isinstance(equation, DenseSpan):
            return equation.missed(z, c)
        return (equation.target() - equation.contribution(z, c)).square().sum() + equation.outside

    def stiffness(self, row: Tensor, iterations: int = 10) -> float:
        """Largest eigenvalue of J'J at rows, J the Jacobian of Phi' c in [z | a], c = unit a, by power iterations."""
        z, c = self.parts(row)
        rows, slope = self.equation.rows(z), self.equation.slope(z, c)
        v = torch.randn(row.shape, generator=torch.Generator().manual_seed(0), dtype=row.dtype)
        size = 0.0
        for _ in range(iterations):
            v = v / v.norm()
            d, a = v.split([self.inner.dim, c.shape[1]], 1)
            along = slope.jvp(d) + rows.contribution(self.unit * a)
            v = torch.cat([slope.vjp(along), self.unit * rows.inner(along)], 1)
            size = float(v.norm())
        return size
