"""Samples and multipliers as unknowns of one descent, as most published attacks have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.equations.span_dense import DenseSpan
from exhume.linalg import gram_solver, least_squares_above, solved
from exhume.lineage import Lineage
from exhume.multipliers import Multipliers, Plain
from exhume.spaces import Space
from exhume.terms import Term
from exhume.view import View


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
    """F(z, a) = |t - Phi(z)' c|^2 + sum_i share_i terms(u_i),  c_i = unit * head(share_i lambda(a_i)).

    Args:
        equation: a bound span equation.
        inner: where the candidates live.
        unit: multiplier that a = 1 stands for; it sets how fast multipliers move beside coordinates.
        terms: priors, in the units of |t|^2.
        multipliers: how a is written.
        head: from coordinates, multipliers lambda and labels to the weights on the gradients; None where multipliers
            are those weights.
        unknowns: number of multipliers k of a candidate, for candidates that moves add.
        share: of each candidate, see `Lineage` [m]; None for 1.
        label: of each candidate, for the head [m].
    """

    equation: Bound
    inner: Space
    unit: float
    terms: Sequence[Term] = ()
    multipliers: Multipliers = Plain()
    head: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    unknowns: int = 1
    share: Tensor | None = None
    label: Tensor = torch.zeros(0, dtype=torch.long)

    def of(self, lineage: Lineage) -> Joint:
        """The same for other candidates."""
        return replace(self, share=lineage.share, label=lineage.label)

    def take(self, index: Tensor) -> Joint:
        """The same for some of the candidates."""
        share = None if self.share is None else self.share[index]
        return replace(self, share=share, label=self.label[index] if len(self.label) else self.label)

    @property
    def space(self) -> JointSpace:
        """Where the rows live."""
        return JointSpace(self.inner)

    def parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates z [m, q] and multipliers c [m, k] of rows."""
        z, a = self._split(row)
        return z, self._weights(z, self._weighed(self.multipliers.of(a)))

    def _weights(self, z: Tensor, multiplier: Tensor) -> Tensor:
        """Weights on the gradients [m, C] of multipliers [m, k]."""
        return self.unit * (multiplier if self.head is None else self.head(z, multiplier, self.label))

    def _weighed(self, values: Tensor) -> Tensor:
        """Each candidate's values [m] or [m, k] times its share."""
        return values if self.share is None else torch.einsum("m,m...->m...", self.share, values)

    def _split(self, row: Tensor) -> list[Tensor]:
        return list(row.split([self.inner.dim, row.shape[1] - self.inner.dim], 1))

    def at(self, row: Tensor) -> JointPoint:
        """Evaluate value and gradient."""
        with torch.enable_grad():
            leaf = row.detach().requires_grad_()
            z, c = self.parts(leaf)
            missed = self._missed(z, c)
            u = self.inner.expand(z)
            priors = [self._weighed(term.value(u)).sum() for term in self.terms]
            floor = self.multipliers.penalty(self._split(leaf)[1], self.share)
            loss = torch.stack([missed, floor, *priors]).sum()
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

    def view(self, row: Tensor) -> View:
        """The candidates of rows as moves see them."""
        z, c = self.parts(row)
        residual = self.equation.target() - self.equation.contribution(z, c)
        share = z.new_ones(len(z)) if self.share is None else self.share
        return View(self.equation, self.inner, self.terms, share, z, c, residual, 1.0, self.at(row).loss)

    def priors(self, row: Tensor) -> float:
        """What the terms add to F."""
        u = self.inner.expand(self._split(row)[0])
        return sum(float(self._weighed(term.value(u)).sum()) for term in self.terms)

    def directions(self, z: Tensor) -> Tensor:
        """The weights on the gradients that each multiplier stands for, c_i = directions_i lambda_i [m, C, k]."""
        unit = torch.eye(self.unknowns, dtype=z.dtype)
        return torch.stack([self._weights(z, one.expand(len(z), -1)) for one in unit], 2)

    def newborn(self, z: Tensor) -> Tensor:
        """Rows of candidates at coordinates z [b, q] with multipliers as small as can be."""
        least = z.new_full((len(z), self.unknowns), self.multipliers.floor or 0.0)
        return torch.cat([z, self.multipliers.unknown(least)], 1)

    def refitted(self, row: Tensor) -> Tensor:
        """Rows whose multipliers solve least squares, none below its floor, where that lowers the loss."""
        z, a = self._split(row)
        m, k = a.shape
        if not m:
            return row
        head, rows = self.directions(z), self.equation.rows(z)
        gram = rows.gram()
        shared = m * head.shape[1] // len(gram)
        gram = torch.kron(gram, torch.eye(shared, dtype=z.dtype)).view(m, head.shape[1], m, head.shape[1])
        gram = torch.einsum("ick,icjd,jdl->ikjl", head, gram, head).reshape(m * k, m * k)
        right = torch.einsum("ick,ic->ik", head, rows.inner(self.equation.target())).flatten()
        low = self.multipliers.floor
        if low is None:
            found = solved(gram_solver(gram), right)
        else:
            found = least_squares_above(gram, right, self._weighed(torch.full_like(a, low)).flatten())
        share = 1.0 if self.share is None else self.share[:, None]
        other = torch.cat([z, self.multipliers.unknown(found.view(m, k) / share)], 1)
        return other if self.at(other).loss < self.at(row).loss else row
