"""Starts for activations that are no polynomial: their low Hermite moments at random weights are those of one."""

from __future__ import annotations

import torch
from torch import Tensor

from exhume.algebra.field import Field
from exhume.algebra.interpolation import PROBES, gradient_field, slices
from exhume.algebra.pencil import directions
from exhume.algebra.polish import Model
from exhume.algebra.polynomial import Slope
from exhume.algebra.reduction import Reduced, reduce
from exhume.functional import Activation

DEGREES = (1, 2, 3, 4)


def derivatives(sigma: Activation) -> Slope:
    """First and second derivative of any activation (almost everywhere)."""
    return Slope(lambda t: sigma.value_and_slope(t)[1], sigma.curvature)


def model_of(reduced: Reduced, slope: Slope) -> Model:
    """The equations of a field in y coordinates, for polishing with the true activation."""
    return Model((reduced.field,), slope, reduced.last)


def moment_starts(field: Field, seed: int = 0, typical: float | None = None) -> tuple[Reduced, Tensor | None]:
    """Samples, in y coordinates, whose low moments fit a field at random weights.

    Projected on polynomials of degree 4 under Gaussian w, p(w) = sum_i b_i sigma(x_i . w) is
    sum_i b_i sum_q h_q(|x_i|) He_q(x_i . w / |x_i|): its Hessians are diagonal in the same directions as those of a
    polynomial network. The projection is a least-squares fit of the gradient field, so only what lies beyond degree 4
    acts as noise, not the fitted degrees themselves.

    Args:
        field: at random weights.
        seed: of the slices.
        typical: norm of a sample, where no bias gives it.

    Returns:
        The reduced field, and samples [s, q], or None where no pencil has a real spectrum.

    Reference: Wang, Lee, Lei 2023 (arXiv 2212.03714); they average Stein's identity, see `averages`.
    """
    reduced = reduce([field])[0]
    fitted = gradient_field(reduced.white, DEGREES) or gradient_field(reduced.white, DEGREES[:3])
    if fitted is None:
        return reduced, None
    return reduced, _placed(reduced, slices(fitted, seed), typical)


def averaged_starts(
    field: Field, seed: int = 0, typical: float | None = None
) -> tuple[Reduced, Tensor | None]:
    """The same by the published averages, for comparison: their error falls with the square root of the width."""
    reduced = reduce([field])[0]
    generator = torch.Generator().manual_seed(seed)
    r = len(reduced.chart)
    v = torch.randn(PROBES, r, generator=generator, dtype=torch.float64)
    return reduced, _placed(reduced, averages(reduced.white, v / v.norm(dim=1, keepdim=True)), typical)


def averages(field: Field, v: Tensor) -> Tensor:
    """Slices [2 L, r, r] at v [L, r], by Stein's identity over Gaussian points w_j.

    mean_j f_j (x) (w_j (w_j . v) - v)  ->  sum_i b_i E[sigma'''] (x_i . v) x_i x_i'

    and likewise He_3(w_j)[v, v] for E[sigma''''] (x_i . v)^2, which is what even activations have.

    Args:
        field: one node in r coordinates, with points of unit covariance.
        v: unit vectors.

    Reference: Wang, Lee, Lei 2023, with second-layer weights divided out by least squares.
    """
    w, gain = field.points[field.nodes // 2], field.gain[field.nodes // 2]
    f = field.steps * gain[:, None] / gain.square().mean()
    along = w @ v.T
    third = torch.einsum("ja,jb,jl->lab", f, w, along) / len(w) - torch.einsum("ja,lb->lab", f, v) / len(w)
    fourth = (
        torch.einsum("ja,jb,jl->lab", f, w, along.square() - 1)
        - 2 * torch.einsum("ja,jl,lb->lab", f, along, v)
    ) / len(w)
    both = torch.cat([third, fourth])
    both = (both + both.transpose(1, 2)) / 2
    # Not normalised one by one: a moment that vanishes must not weigh as much as one that does not.
    return both / both.flatten(1).norm(dim=1).max()


def _placed(reduced: Reduced, stack: Tensor, typical: float | None) -> Tensor | None:
    found = directions(stack, len(reduced.chart))
    if found is None:
        return None
    y = torch.linalg.lstsq(reduced.chart, found.z.T).solution.T
    if reduced.last is not None:
        along = y @ reduced.last
        floor = 0.1 * along.abs().median()
        along = torch.where(along.abs() < floor, floor, along)
        return y / along[:, None]
    return y / y.norm(dim=1, keepdim=True) * (typical or 1.0)
