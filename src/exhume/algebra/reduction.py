"""Few coordinates that lose nothing: samples lie in the range of the steps, and only their part in W's range acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.algebra.field import Field
from exhume.linalg import rank_by_gap

FLOOR = 1e-12  # share of the largest singular value that rounding can reach


@dataclass(frozen=True, eq=False)
class Reduced:
    """A field in the coordinates y of the range of its steps, x = basis y, and in whitened ones, x' = chart y.

    Since x . w = y . (basis' w), the part of w outside the range has no effect on the field and is dropped exactly.
    White coordinates make the points' second moments the identity, and drop what the points do not reach:
    w = chart' w', grad' = chart grad.

    Args:
        field: in y coordinates, q dimensions.
        basis: orthonormal columns [d, q].
        chart: [r, q], of full row rank; r < q where the points reach fewer dimensions than the steps.
        white: the field in white coordinates, r dimensions.
        gap: ratio of singular values at q.
        last: the functional that is 1 on every sample, [q], for a field with a bias.
    """

    field: Field
    basis: Tensor
    chart: Tensor
    white: Field
    gap: float
    last: Tensor | None


def reduce(fields: Sequence[Field], rank: int | None = None) -> tuple[Reduced, ...]:
    """Find the coordinates that fields with the same samples share.

    Args:
        fields: in all d input coordinates.
        rank: dimension of the steps' range, if known; else the largest drop of their singular values tells.
    """
    steps = torch.cat([f.steps / f.steps.norm() for f in fields])
    _, s, vh = torch.linalg.svd(steps, full_matrices=False)
    found, gap = rank_by_gap(s, float(FLOOR * s[0]))
    basis = vh[: rank or found].T.contiguous()
    chart = _chart(torch.cat([f.points.flatten(0, 1) for f in fields]) @ basis)
    return tuple(_reduced(f, basis, chart, gap) for f in fields)


def _chart(points: Tensor) -> Tensor:
    """chart [r, q] of points [m, q], with points = white chart and white' white = m."""
    _, s, vh = torch.linalg.svd(points, full_matrices=False)
    r = rank_by_gap(s, float(1e-10 * s[0]))[0] if float(s[-1]) < 1e-8 * float(s[0]) else len(s)
    return s[:r, None] * vh[:r] / len(points) ** 0.5


def _reduced(field: Field, basis: Tensor, chart: Tensor, gap: float) -> Reduced:
    inner = replace(field, points=field.points @ basis, steps=field.steps @ basis)
    white = replace(inner, points=inner.points @ torch.linalg.pinv(chart), steps=inner.steps @ chart.T)
    return Reduced(inner, basis, chart, white, gap, basis[-1].clone() if field.affine else None)
