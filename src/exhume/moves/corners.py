"""Samples as corners of the box in the row space: exact where many features are at an end of their range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from exhume.moves.polytope import Polytope, polytope
from exhume.spaces import Space


class Guide(Protocol):
    """What is known of samples besides the space they live in."""

    def starts(self, known: Tensor, generator: torch.Generator) -> Tensor:
        """Points to climb from [k, q], towards samples other than those known [f, q]."""

    def fits(self, z: Tensor) -> bool:
        """Whether a corner [q] can be a sample."""


@dataclass(frozen=True, eq=False)
class Found:
    """Corners, most active first.

    Args:
        z: coordinates [k, q].
        active: features that end their range there, of those that vary over the space [k].
        programs: linear programs solved.
    """

    z: Tensor
    active: Tensor
    programs: int

    def basis(self, apart: float) -> Found:
        """The most active ones that do not depend on others (see `independent`)."""
        kept = independent(self.z, apart)
        return Found(self.z[kept], self.active[kept], self.programs)


class Pool:
    """Corners found so far.

    Args:
        polytope: whose corners they are.
        climbs: linear programs from a corner to more active ones, at most.
        stop: told how many corners there are after each climb; True ends the search.
        guide: says which to keep; None keeps all.
    """

    def __init__(
        self, polytope: Polytope, climbs: int, stop: Callable[[int], bool], guide: Guide | None
    ) -> None:
        self.polytope, self.climbs, self.stop, self.guide = polytope, climbs, stop, guide
        self._corners: list[tuple[int, Tensor]] = []
        self._programs = 0

    @property
    def corners(self) -> Found:
        """All of them."""
        ordered = sorted(self._corners, key=lambda corner: -corner[0])
        z = torch.stack([z for _, z in ordered]) if ordered else self.polytope.columns.new_zeros(0, self.dim)
        return Found(z, torch.tensor([active for active, _ in ordered], dtype=torch.long), self._programs)

    @property
    def dim(self) -> int:
        """Number of coordinates q."""
        return len(self.polytope.columns)

    def climb(self, direction: Tensor) -> bool:
        """From the corner that is farthest in a direction [q]; True ends the search."""
        z = self.polytope.programs.top(direction)
        self._programs += 1
        return self.stop(len(self._corners)) if z is None else self.improve(z)

    def improve(self, z: Tensor) -> bool:
        """From a point [q]; True ends the search."""
        z, active, programs = self.polytope.improve(z, self.climbs)
        active, z = self.polytope.settled(z, active)
        self._programs += programs
        if self.guide is None or self.guide.fits(z):
            self._corners.append((active, z))
        return self.stop(len(self._corners))


@dataclass(frozen=True)
class Corners:
    """Corners of {z: low <= origin + z basis <= high} at which far more than q features are at their bounds.

    The samples lie in the space and in the range. Where many features of a sample are at an end of the range, it is a
    corner where as many bounds meet, while q meet at a corner by accident. A linear function finds a corner,
    max <g, z>; from there the sum of the logarithms of the distances to the bounds is lowered by linear programs
    (Candes, Wakin and Boyd 2008), which leads to more active ones. Functions are random, in coordinates in which the
    corners so far have unit covariance; then those that vanish on all corners of a basis but one. With a guide, the
    search is from where it leads, and along functions that are constant on what was found.

    Args:
        tries: random functions, for each dimension.
        few: the same, with a guide.
        most: functions that are constant on what was found, in a round.
        patience: rounds in a row that find nothing new before giving up.
        sweeps: rounds over the corners of a basis.
        climbs: linear programs after the first, at most.
        slack: by how much the range may be left at most, relative to its width: the row space is known to some
            precision.
        tolerance: distance to a bound that counts as none at most, likewise.
        apart: a corner depends on others if it is this near to their span, relative to its distance from zero.
    """

    tries: float = 3.0
    few: float = 0.2
    most: int = 20
    patience: int = 2
    sweeps: int = 2
    climbs: int = 4
    slack: float = 1e-4
    tolerance: float = 1e-3
    apart: float = 1e-2

    def precise(self, precision: float) -> Corners:
        """The same search in a space known to a precision, so that near misses are not taken for corners."""
        slack = min(self.slack, max(100 * precision, 1e-9))
        return replace(self, slack=slack, tolerance=min(self.tolerance, 1e3 * slack))

    def run(
        self,
        space: Space,
        low: Tensor,
        high: Tensor,
        generator: torch.Generator,
        stop: Callable[[int], bool],
        guide: Guide | None = None,
    ) -> Found:
        """Search.

        Args:
            space: with a basis; its radius is not used.
            low: smallest value of each feature [d].
            high: largest.
            generator: of the functions.
            stop: told how many corners were found after each climb; True ends the search.
            guide: says where to climb from, and which corners to keep.
        """
        q = space.dim
        if q == 0 and space.origin is not None:  # one sample, which the space alone determines
            reach = self.tolerance * (high - low)
            at_end = ((space.origin - low).abs() < reach) | ((high - space.origin).abs() < reach)
            return Found(low.new_zeros(1, 0), at_end.sum()[None], 0)
        pool = Pool(
            polytope(space, low, high, self.slack, self.tolerance),
            self.climbs,
            stop,
            guide,
        )
        for _ in range(round((self.tries if guide is None else self.few) * (q + 1))):
            direction = torch.randn(q, generator=generator, dtype=torch.float64)
            if len(pool.corners.z) > 2 * q:
                direction = _even(pool.corners.z, direction)
            if pool.climb(direction):
                return pool.corners
        if guide is not None and self._guided(pool, guide, space, generator):
            return pool.corners
        for _ in range(self.sweeps):
            before = pool.corners.basis(self.apart)
            if not len(before.z) or any(pool.climb(direction) for direction in _duals(before.z)):
                break
            if int(pool.corners.basis(self.apart).active.sum()) <= int(before.active.sum()):
                break
        return pool.corners

    def _guided(self, pool: Pool, guide: Guide, space: Space, generator: torch.Generator) -> bool:
        """Climb from where the guide leads, and along functions that are constant on the corners so far."""
        idle = 0
        while idle < self.patience:
            known = pool.corners.basis(self.apart).z
            missing = pool.dim + 1 - len(known)
            if missing == 0:
                break
            for z in guide.starts(known, generator):
                if pool.improve(z):
                    return True
            for direction in _constant(known, min(2 * missing, self.most), generator):
                if pool.climb(direction):
                    return True
            idle = 0 if len(pool.corners.basis(self.apart).z) > len(known) else idle + 1
        return False


def independent(z: Tensor, apart: float) -> Tensor:
    """Indices of points that are affinely independent of those before them [k], at most q + 1.

    Taken from the most active corners down, this is the greedy algorithm for the sparsest basis (Spielman, Wang and
    Wright 2012): a corner between samples, where their common bounds meet, depends on them and comes after them.

    Args:
        z: points [m, q], the preferred ones first.
        apart: smallest distance of (z, 1), brought to norm one, from the span of the others.
    """
    rows = _homogeneous(z)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    basis, kept = rows[:0], []
    for i, row in enumerate(rows):
        rest = row - basis.T @ (basis @ row)
        rest = rest - basis.T @ (basis @ rest)
        if float(rest.norm()) > apart:
            basis = torch.cat([basis, (rest / rest.norm())[None]])
            kept.append(i)
        if len(kept) == rows.shape[1]:
            break
    return torch.tensor(kept, dtype=torch.long)


def _even(points: Tensor, direction: Tensor) -> Tensor:
    """The function `direction` of coordinates in which the points have unit covariance: all corners see as much."""
    covariance = torch.cov(points.T).reshape(points.shape[1], -1)
    lift = 1e-9 * float(covariance.diagonal().mean()) + 1e-30  # the corners so far may all be one
    lifted = covariance + lift * torch.eye(len(covariance), dtype=points.dtype)
    factor = torch.linalg.cholesky(lifted)
    return torch.linalg.solve_triangular(factor.T, direction[:, None], upper=True)[:, 0]


def _duals(basis: Tensor) -> Tensor:
    """Functions, of both signs, that are constant on all points of a basis but one, and those constant on all."""
    rows = _homogeneous(basis)
    duals = torch.linalg.pinv(rows).T
    rest = torch.linalg.svd(rows)[2][len(rows) :]
    directions = torch.cat([duals, rest])[:, :-1]
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return torch.cat([directions, -directions])


def _constant(known: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random functions that are constant on all points [k, q], of both signs."""
    rows = _homogeneous(known)
    draws = torch.randn(count, rows.shape[1], generator=generator, dtype=known.dtype)
    known = torch.linalg.qr(rows.T)[0]
    directions = (draws - draws @ known @ known.T)[:, :-1]
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return torch.cat([directions, -directions])


def _homogeneous(z: Tensor) -> Tensor:
    """Rows (z, 1), the 1 in units of the points' size [k, q + 1]."""
    size = float(z.square().sum(1).mean().sqrt()) if len(z) else 0.0
    return torch.cat([z, z.new_full((len(z), 1), size or 1.0)], 1)
