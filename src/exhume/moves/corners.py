"""Samples as corners of the box in the row space: exact where many features are at an end of their range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import linprog
from torch import Tensor

from exhume.spaces import Space


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


@dataclass(frozen=True)
class Corners:
    """Corners of {z: low <= origin + z basis <= high} at which far more than q features are at their bounds.

    The samples lie in the space and in the range. Where many features of a sample are at an end of the range, it is a
    corner where as many bounds meet, while q meet at a corner by accident. A linear function finds a corner,
    max <g, z>; from there the sum of the logarithms of the distances to the bounds is lowered by linear programs
    (Candes, Wakin and Boyd 2008), which leads to more active ones. Functions are random, in coordinates in which the
    corners so far have unit covariance; then those that vanish on all corners of a basis but one.

    Args:
        tries: random functions, for each dimension.
        sweeps: rounds over the corners of a basis.
        climbs: linear programs after the first, at most.
        slack: by how much the range may be left, relative to its width: the row space is known to some precision.
        tolerance: distance to a bound that counts as none, likewise.
        apart: a corner depends on others if it is this near to their span, relative to its distance from zero.
    """

    tries: float = 3.0
    sweeps: int = 2
    climbs: int = 4
    slack: float = 1e-4
    tolerance: float = 1e-3
    apart: float = 1e-2

    def run(
        self,
        space: Space,
        low: Tensor,
        high: Tensor,
        generator: torch.Generator,
        stop: Callable[[int], bool],
    ) -> Found:
        """Search.

        Args:
            space: with a basis; its radius is not used.
            low: smallest value of each feature [d].
            high: largest.
            generator: of the functions.
            stop: told how many corners were found after each climb; True ends the search.
        """
        polytope = _polytope(space, low, high, self)
        q = space.dim
        found: list[tuple[int, Tensor]] = []
        count = 0

        def climb(direction: Tensor) -> bool:
            nonlocal count
            reached, programs = polytope.climb(direction, self.climbs)
            count += programs
            if reached is not None:
                found.append(reached)
            return stop(len(found))

        for _ in range(round(self.tries * (q + 1))):
            direction = torch.randn(q, generator=generator, dtype=torch.float64)
            if len(found) > 2 * q:
                direction = _even(torch.stack([z for _, z in found]), direction)
            if climb(direction):
                return self._sorted(found, q, count)
        for _ in range(self.sweeps):
            before = self._sorted(found, q, count)
            basis = before.z[independent(before.z, self.apart)]
            if not len(basis) or any(climb(direction) for direction in _duals(basis)):
                break
            after = self._sorted(found, q, count)
            if int(after.active[independent(after.z, self.apart)].sum()) <= int(
                before.active[independent(before.z, self.apart)].sum()
            ):
                break
        return self._sorted(found, q, count)

    @staticmethod
    def _sorted(found: list[tuple[int, Tensor]], q: int, count: int) -> Found:
        ordered = sorted(found, key=lambda entry: -entry[0])
        z = torch.stack([z for _, z in ordered]) if ordered else torch.zeros(0, q, dtype=torch.float64)
        return Found(z, torch.tensor([active for active, _ in ordered], dtype=torch.long), count)


def independent(z: Tensor, apart: float) -> Tensor:
    """Indices of points that are affinely independent of those before them [k], at most q + 1.

    Taken from the most active corners down, this is the greedy algorithm for the sparsest basis (Spielman, Wang and
    Wright 2012): a corner between samples, where their common bounds meet, depends on them and comes after them.

    Args:
        z: points [m, q], the preferred ones first.
        apart: smallest distance of (z, 1), brought to norm one, from the span of the others.
    """
    size = float(z.square().sum(1).mean().sqrt()) if len(z) else 1.0
    rows = torch.cat([z, z.new_full((len(z), 1), size)], 1)
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


@dataclass(frozen=True, eq=False)
class _Polytope:
    """{z: low <= z columns <= high}, with the features that vary over the space alone."""

    columns: Tensor
    low: Tensor
    high: Tensor
    width: Tensor
    slack: float
    tolerance: float

    def top(self, direction: Tensor) -> Tensor | None:
        """argmax <direction, z>, or None if there is none."""
        sides = torch.cat([self.columns.T, -self.columns.T])
        ends = torch.cat([self.high + self.slack * self.width, self.slack * self.width - self.low])
        solved = linprog(
            -direction.numpy(), A_ub=sides.numpy(), b_ub=ends.numpy(), bounds=(None, None), method="highs"
        )
        return None if solved.x is None else torch.from_numpy(solved.x)

    def ends(self, z: Tensor, reach: float) -> tuple[Tensor, Tensor]:
        """Which features are at their lower and at their upper bound."""
        u = z @ self.columns
        return u - self.low < reach * self.width, self.high - u < reach * self.width

    def active(self, z: Tensor) -> int:
        """How many are."""
        low, high = self.ends(z, self.tolerance + self.slack)
        return int((low | high).sum())

    def climb(self, direction: Tensor, climbs: int) -> tuple[tuple[int, Tensor] | None, int]:
        """A corner, how many bounds are active there, and how many programs that took."""
        z, programs = self.top(direction), 1
        if z is None:
            return None, programs
        active = self.active(z)
        for _ in range(climbs):
            u = z @ self.columns
            near = 1e-2 * self.width
            pull = 1 / (near + (self.high - u).relu()) - 1 / (near + (u - self.low).relu())
            better = self.top(self.columns @ pull)
            programs += 1
            if better is None or (count := self.active(better)) <= active:
                break
            z, active = better, count
        return self.settled(z, active), programs

    def settled(self, z: Tensor, active: int) -> tuple[int, Tensor]:
        """The point that meets the active bounds in the least-squares sense, which makes up for the slack."""
        point = z
        for _ in range(3):
            low, high = self.ends(point, self.tolerance)
            used = low | high
            if int(used.sum()) < len(z):
                return active, z
            bound = torch.where(high, self.high, self.low)[used]
            point = torch.linalg.lstsq(self.columns[:, used].T, bound[:, None], driver="gelsd").solution[:, 0]
        u = point @ self.columns
        outside = torch.maximum((self.low - u) / self.width, (u - self.high) / self.width).max()
        return (self.active(point), point) if float(outside) < self.tolerance else (active, z)


def _polytope(space: Space, low: Tensor, high: Tensor, corners: Corners) -> _Polytope:
    assert space.basis is not None
    varies = space.basis.norm(dim=0) > 1e-9
    shift = 0.0 if space.origin is None else space.origin
    return _Polytope(
        columns=space.basis[:, varies],
        low=(low - shift)[varies],
        high=(high - shift)[varies],
        width=(high - low)[varies],
        slack=corners.slack,
        tolerance=corners.tolerance,
    )


def _even(points: Tensor, direction: Tensor) -> Tensor:
    """The function `direction` of coordinates in which the points have unit covariance: all corners see as much."""
    covariance = torch.cov(points.T)
    lift = 1e-9 * float(covariance.diagonal().mean()) + 1e-30  # the corners so far may all be one
    lifted = covariance + lift * torch.eye(len(covariance), dtype=points.dtype)
    factor = torch.linalg.cholesky(lifted)
    return torch.linalg.solve_triangular(factor.T, direction[:, None], upper=True)[:, 0]


def _duals(basis: Tensor) -> Tensor:
    """Functions, of both signs, that are constant on all points of a basis but one, and those constant on all."""
    size = float(basis.square().sum(1).mean().sqrt())
    rows = torch.cat([basis, basis.new_full((len(basis), 1), size)], 1)
    duals = torch.linalg.pinv(rows).T
    rest = torch.linalg.svd(rows)[2][len(rows) :]
    directions = torch.cat([duals, rest])[:, :-1]
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return torch.cat([directions, -directions])
