"""Where candidates live: free coordinates z, and how they become model inputs u = origin + z @ basis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Space:
    """An affine set of flattened model inputs, optionally with their norm kept in a range.

    u = origin + z @ basis, |u| in [radius[0], radius[1]]

    Args:
        size: number of input features d.
        basis: orthonormal rows [q, d]; None is the full space (q = d).
        origin: offset [d], orthogonal to the basis; None is zero.
        radius: smallest and largest norm of u; equal ends are a sphere; None leaves the norm free.
    """

    size: int
    basis: Tensor | None = None
    origin: Tensor | None = None
    radius: tuple[float, float] | None = None

    @property
    def dim(self) -> int:
        """Number of free coordinates q of one candidate."""
        return self.size if self.basis is None else len(self.basis)

    def expand(self, z: Tensor) -> Tensor:
        """Model inputs [m, d] at coordinates z [m, q]."""
        u = z if self.basis is None else z @ self.basis
        return u if self.origin is None else u + self.origin

    def coordinates(self, u: Tensor) -> Tensor:
        """Coordinates [m, q] of the point of the affine set nearest to u [m, d]."""
        return u if self.basis is None else u @ self.basis.T

    def retract(self, z: Tensor) -> Tensor:
        """Scale z [m, q] so that every |u| lies in `radius`."""
        if self.radius is None:
            return z
        fixed = 0.0 if self.origin is None else float(self.origin @ self.origin)
        low, high = (max(r * r - fixed, 0.0) ** 0.5 for r in self.radius)
        norm = z.norm(dim=1, keepdim=True)
        if low > 0 and bool((norm == 0).any()):  # the centre has no direction to scale: take the first axis
            axis = torch.eye(1, z.shape[1], dtype=z.dtype)
            z, norm = torch.where(norm == 0, axis, z), torch.where(norm == 0, 1.0, norm)
        tiny = torch.finfo(z.dtype).tiny
        return z * (norm.clamp(low, high) / norm.clamp_min(tiny))

    def random(self, m: int, norm: float, generator: torch.Generator) -> Tensor:
        """Draw m directions uniformly, with |u| about `norm`, and retract them; returns z [m, q]."""
        z = torch.randn(m, self.dim, generator=generator, dtype=torch.float64)
        fixed = 0.0 if self.origin is None else float(self.origin @ self.origin)
        length = max(norm * norm - fixed, 0.0) ** 0.5
        return self.retract(z * (length / z.norm(dim=1, keepdim=True)))

    def within(self, radius: tuple[float, float]) -> Space:
        """The same set with norms kept between radius[0] and radius[1]."""
        return replace(self, radius=radius)


def full(size: int) -> Space:
    """All of R^d."""
    return Space(size)


def sphere(size: int, radius: float) -> Space:
    """The sphere of the given radius in R^d."""
    return Space(size, radius=(radius, radius))


def subspace(rows: Tensor, origin: Tensor | None = None) -> Space:
    """The affine span origin + span(rows); rows [q, d] need not be orthonormal."""
    basis = torch.linalg.qr(rows.T)[0].T
    if origin is not None:
        origin = origin - (origin @ basis.T) @ basis
    return Space(rows.shape[1], basis, origin)
