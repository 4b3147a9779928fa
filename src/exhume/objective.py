"""An equation plus priors, with the multipliers eliminated: what every solver minimises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.linalg import free_of_signs, gram_solver, solved
from exhume.lineage import Lineage
from exhume.spaces import Space
from exhume.terms import Term
from exhume.view import View


@dataclass(frozen=True, eq=False)
class Point:
    """The objective at coordinates z.

    Args:
        z: [m, q].
        coef: multipliers that minimise the residual at z [m, k].
        residual: t - Phi' c, computed explicitly [P].
        misfit: |residual|^2 (with what no candidate can reach) over |t|^2.
        loss: misfit plus the terms.
        factor: F [s, .] with F F' the pseudo-inverse of the Gram matrix G at z (see `Bound.gram`).
    """

    z: Tensor
    coef: Tensor
    residual: Tensor
    misfit: float
    loss: float
    factor: Tensor


@dataclass(frozen=True, eq=False)
class Objective:
    """L(z) = min_c |t - Phi(z)' c|^2 / |t|^2 + sum_i share_i sum_terms term(u_i).

    Args:
        equation: a bound equation.
        space: how coordinates become model inputs.
        terms: priors.
        signs: prescribed signs of the multipliers at z, -1, 0 (free) or 1 [m, k]; None leaves all free.
        cutoff: relative eigenvalue cut-off of the elimination.
        share: of each candidate, see `Lineage` [m]; None for 1.
    """

    equation: Bound
    space: Space
    terms: tuple[Term, ...] = ()
    signs: Callable[[Tensor], Tensor] | None = None
    cutoff: float = 1e-12
    share: Tensor | None = None

    def of(self, lineage: Lineage) -> Objective:
        """The same for other candidates."""
        return replace(self, share=lineage.share)

    def aimed_at(self, target: Tensor) -> Objective:
        """The same objective with another target t [P]."""
        return replace(self, equation=self.equation.aimed_at(target))

    def at(self, z: Tensor) -> Point:
        """Evaluate at z [m, q]: eliminate the multipliers through the Gram matrix, refine them on the residual."""
        equation = self.equation
        target, rows = equation.target(), equation.rows(z)
        gram, right = rows.gram(), rows.inner(target)
        if not bool(torch.isfinite(gram).all()):
            nothing = torch.zeros_like(right)
            return Point(z, nothing, target, math.inf, math.inf, torch.zeros_like(gram))
        factor = self._eliminate(z, gram, right)
        coef = solved(factor, right)
        residual = target - rows.contribution(coef)
        # Squaring the condition number made an error, which a second pass on the residual removes.
        coef = coef + solved(factor, rows.inner(residual))
        residual = target - rows.contribution(coef)
        misfit = (float(residual @ residual) + equation.outside) / equation.energy
        penalty = sum(float(self._weighed(term.value(self.space.expand(z))).sum()) for term in self.terms)
        return Point(z, coef, residual, misfit, misfit + penalty, factor)

    def _eliminate(self, z: Tensor, gram: Tensor, right: Tensor) -> Tensor:
        """F with F F' the pseudo-inverse of the Gram matrix of the multipliers that are not held at zero."""
        if self.signs is None:
            return gram_solver(gram, self.cutoff)
        # Every output has signs of its own, so none share a solution.
        gram = torch.kron(gram, torch.eye(right.numel() // len(gram), dtype=gram.dtype))
        free = free_of_signs(gram, right.flatten(), self.signs(z).flatten())
        part = gram_solver(gram[free][:, free], self.cutoff)
        return part.new_zeros(len(gram), part.shape[1]).index_put((free.nonzero()[:, 0],), part)

    def _weighed(self, values: Tensor) -> Tensor:
        """Each candidate's values [m, ...] times its share."""
        return values if self.share is None else torch.einsum("m,m...->m...", self.share, values)

    def gradient(self, point: Point) -> Tensor:
        """dL/dz [m, q]; the multipliers are optimal, so they are held fixed."""
        gradient = -2 / self.equation.energy * self.equation.vjp(point.z, point.coef, point.residual)
        if not self.terms:
            return gradient
        with torch.enable_grad():
            leaf = point.z.detach().requires_grad_()
            u = self.space.expand(leaf)
            penalty = torch.stack([self._weighed(term.value(u)).sum() for term in self.terms]).sum()
            return gradient + torch.autograd.grad(penalty, leaf)[0]

    def hessian(self, point: Point) -> Tensor:
        """Gauss-Newton Hessian in Kaufman's form, 2 J' (I - Phi+ Phi) J / |t|^2 plus the terms', [m q, m q]."""
        jj, jp = self.equation.normal(point.z, point.coef)
        own = len(point.factor)
        shared = jp.view(len(jp), own, point.coef.numel() // own).mT  # one row for each output that shares it
        cross = (shared @ point.factor).flatten(1)
        hessian = (2 / self.equation.energy) * (jj - cross @ cross.T)
        m, q = point.z.shape
        blocks = hessian.view(m, q, m, q)
        index = torch.arange(m)
        u = self.space.expand(point.z)
        for term in self.terms:
            blocks[index, :, index] += self._weighed(term.curvature(u, self.space))
        return hessian

    def curvatures(self, point: Point) -> Tensor:
        """|c_i|^2 over its mean [m]: a candidate's columns of the Jacobian are proportional to its multipliers."""
        sizes = point.coef.square().sum(1) + 1e-30
        return (sizes / sizes.mean()).clamp_min(1e-6)

    def hessian_product(self, point: Point) -> Callable[[Tensor], Tensor]:
        """The same Hessian as a product with [m, q], from one JVP, one projection and one VJP."""
        rows, slope = self.equation.rows(point.z), self.equation.slope(point.z, point.coef)
        scale = 2 / self.equation.energy
        u = self.space.expand(point.z)

        def product(direction: Tensor) -> Tensor:
            moved = slope.jvp(direction)
            moved = moved - rows.contribution(solved(point.factor, rows.inner(moved)))
            out = scale * slope.vjp(moved)
            for term in self.terms:
                out = out + self._weighed(term.curvature_product(u, self.space, direction))
            return out

        return product

    def view(self, row: Tensor) -> View:
        """The candidates at coordinates [m, q] as moves see them."""
        point = self.at(row)
        share = row.new_ones(len(row)) if self.share is None else self.share
        scale = 1 / self.equation.energy
        return View(
            self.equation, self.space, self.terms, share, row, point.coef, point.residual, scale, point.loss
        )

    def newborn(self, z: Tensor) -> Tensor:
        """Rows of candidates at coordinates z [b, q]."""
        return z

    def refitted(self, row: Tensor) -> Tensor:
        """The same: the multipliers are always solved for."""
        return row
