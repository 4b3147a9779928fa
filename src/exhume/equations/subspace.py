"""A vector of each sample lies in a subspace that the weights reveal: one equation per candidate.

score(z) = min_e |P_perp F(z)' e|^2 / |F(z)' e|^2,   F(z) [k, w] the vectors of a candidate at all nodes

vanishes at a training sample and not elsewhere: q unknowns at a time, instead of one joint fit of m q unknowns. It
is the subspace idea of MUSIC (Schmidt, IEEE Trans. Antennas Propag. 1986) carried over to weights, and ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exhume.dense import DenseNode


class Vectors(Protocol):
    """The vectors of a candidate, as functions of its coordinates."""

    @property
    def nodes(self) -> tuple[DenseNode, ...]:
        """The chain at each node."""

    def at(self, z: Tensor) -> Tensor:
        """All vectors F [m, k, w] at candidates z [m, q]."""

    def slope(self, z: Tensor, mixture: Tensor) -> Tensor:
        """Derivative of F' e in z [m, q, w] for mixtures e [m, k]."""


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A batch of independent least-squares problems at one point.

    Args:
        value: objective of each [m].
        gradient: [m, q].
        curvature: Gauss-Newton Hessian [m, q, q].
    """

    value: Tensor
    gradient: Tensor
    curvature: Tensor


@dataclass(frozen=True, eq=False)
class BoundSubspace(ABC):
    """A subspace equation at fixed evidence.

    Args:
        vectors: of a candidate.
        columns: orthonormal basis [w, r] of the subspace, without what `found` explains.
        found: orthonormal basis [w, f] of the vectors of samples already found; they are projected out.
    """

    vectors: Vectors
    columns: Tensor
    found: Tensor

    @property
    @abstractmethod
    def missing(self) -> int:
        """Number of samples not found yet."""

    @abstractmethod
    def without(self, z: Tensor) -> BoundSubspace:
        """Project out the vectors of samples found at z [f, q], so that a search meets only the others.

        At a found sample the vector vanishes and the score is large: found samples repel (recursively applied and
        projected MUSIC, Mosher and Leahy, IEEE Trans. Signal Process. 1999).
        """

    @abstractmethod
    def distinct(self, z: Tensor, probe: Tensor) -> Tensor:
        """Relative score of each candidate with all the others accounted for, [m]: near 1 if it adds nothing."""

    def project(self, vectors: Tensor) -> Tensor:
        """Remove the vectors already found from [..., w]."""
        return vectors - (vectors @ self.found) @ self.found.T if self.found.shape[1] else vectors

    def mixed(self, z: Tensor) -> Tensor:
        """The vector of the best mixture at each candidate, unit length, [m, w]."""
        vectors = self.project(self.vectors.at(z))
        best = torch.einsum("mk,mkw->mw", self.best_mixture(z)[1], vectors)
        return best / best.norm(dim=1, keepdim=True).clamp_min(1e-30)

    def best_mixture(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The score [m] and the mixture e [m, k] that attains it, with |F' e| = 1."""
        vectors = self.project(self.vectors.at(z))
        inside = vectors @ self.columns
        total = vectors @ vectors.mT
        missed = total - inside @ inside.mT
        # A dead candidate (no active unit) has no vector at all: the ridge makes its score 1.
        size = total.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_min(1e-30)
        ridge = 1e-10 * size * torch.eye(total.shape[1], dtype=z.dtype)
        factor = torch.linalg.cholesky(total + ridge)
        half = torch.linalg.solve_triangular(factor, missed + ridge, upper=False)
        values, modes = torch.linalg.eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
        mixture = torch.linalg.solve_triangular(factor.mT, modes[:, :, :1], upper=True)[..., 0]
        return values[:, 0], mixture

    def typical(self, z: Tensor) -> float:
        """Root mean square pre-activation of the first layer at candidates z, the unit of a smoothing slope."""
        pre = torch.stack([node.forward(z)[0][0] for node in self.vectors.nodes])
        return float(pre.square().mean().sqrt())

    def relative(self, z: Tensor, probe: Tensor) -> Tensor:
        """Score of each candidate over the median score of random points `probe` [p, q], [m].

        The ratio is what tells a sample from chance: where the vector hardly varies with the input (a tanh net
        near its linear range), every score is small.
        """
        # Where random points fit too, as on a set that hardly holds anything else, all fit.
        return self.score(z) / self.score(probe).median().clamp_min(1e-3)

    def score(self, z: Tensor) -> Tensor:
        """Share of the best mixture's energy outside the column space, [m]."""
        return self.best_mixture(z)[0]

    def expand(self, z: Tensor) -> Quadratic:
        """Gauss-Newton expansion of every score, its mixture held fixed (it is optimal, so the gradient is exact)."""
        value, mixture = self.best_mixture(z)
        vector = self.project(torch.einsum("mk,mkw->mw", mixture, self.vectors.at(z)))
        size = vector.norm(dim=1, keepdim=True).clamp_min(1e-30)
        vector = vector / size
        residual = vector - (vector @ self.columns) @ self.columns.T
        slope = self.vectors.slope(z, mixture / size)
        along, cross = (slope @ torch.stack([vector, residual], 2)).unbind(2)
        # J = P_perp (slope - vector along'); products expanded so that no second [m, q, w] array is formed. What was
        # found is orthogonal to the columns, so both are taken off at once.
        inside = slope @ torch.cat([self.columns, self.found], 1)
        energy = (residual * residual).sum(1)
        jj = slope @ slope.mT - inside @ inside.mT
        jj = jj - along[:, :, None] * cross[:, None] - cross[:, :, None] * along[:, None]
        jj = jj + energy[:, None, None] * along[:, :, None] * along[:, None]
        return Quadratic(value, 2 * (cross - energy[:, None] * along), 2 * jj)
