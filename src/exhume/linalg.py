"""Least squares through Gram matrices, and ranks read off a spectrum."""

from __future__ import annotations

import torch
from scipy.optimize import lsq_linear
from torch import Tensor


def gram_solver(gram: Tensor, cutoff: float = 1e-12) -> Tensor:
    """Return a factor F with F F' = pseudo-inverse of a positive semi-definite matrix.

    Columns are scaled to unit diagonal first, so that `cutoff` is relative to each feature's own size, and
    eigenvalues below `cutoff` times the largest are dropped: the Gram matrix is singular exactly when extra
    candidates coincide.

    Args:
        gram: [k, k].
        cutoff: relative eigenvalue cut-off.

    Returns:
        F [k, k'] with k' the numerical rank.
    """
    scale = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * gram * scale)
    keep = values > cutoff * values[-1]
    return scale[:, None] * vectors[:, keep] * values[keep].rsqrt()


def solved(factor: Tensor, right: Tensor) -> Tensor:
    """(F F' (x) I) right, shaped like `right`.

    Args:
        factor: F [s, s'], from `gram_solver` of a Gram matrix that several outputs share.
        right: s rows of all its numbers, one column for each output; any shape.
    """
    return (factor @ (factor.T @ right.reshape(len(factor), -1))).view_as(right)


def free_of_signs(gram: Tensor, right: Tensor, signs: Tensor) -> Tensor:
    """Unknowns that are not zero in min_c |t - Phi' c|^2 with the signs of some of them prescribed.

    signs_i c_i >= 0 where signs_i is not 0; bounded-variable least squares (Stark and Parker 1995) on G = F' F.

    Args:
        gram: G = Phi Phi' [k, k].
        right: Phi t [k].
        signs: -1, 0 or 1 for each unknown [k].

    Returns:
        A mask [k]; the minimiser is the unconstrained one on these unknowns.
    """
    infinite = torch.full_like(right, torch.inf)
    low, high = torch.where(signs > 0, 0.0, -infinite), torch.where(signs < 0, 0.0, infinite)
    return (signs == 0) | (_bounded(gram, right, low, high) * signs > 0)


def least_squares_above(gram: Tensor, right: Tensor, low: Tensor) -> Tensor:
    """The minimiser c [k] of |t - Phi' c|^2 with c >= low, from G = Phi Phi' [k, k] and Phi t [k]; low is [k]."""
    return low + _bounded(gram, right - gram @ low, torch.zeros_like(low), torch.full_like(low, torch.inf))


def _bounded(gram: Tensor, right: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The minimiser within bounds that are 0 or infinite, which scaling of the unknowns leaves as they are."""
    scale = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * gram * scale)
    keep = values > 1e-12 * values[-1]
    root = values[keep].sqrt()[:, None] * vectors[:, keep].T
    aim = values[keep].rsqrt() * ((scale * right) @ vectors[:, keep])
    found = lsq_linear(root.numpy(), aim.numpy(), (low.numpy(), high.numpy()), method="bvls")
    return scale * torch.from_numpy(found.x)


def rank_by_gap(values: Tensor, floor: float, largest: int | None = None) -> tuple[int, float]:
    """Rank r = argmax_k s_k / max(s_{k+1}, floor) over a descending spectrum, and that ratio.

    Args:
        values: singular values, descending [k].
        floor: size that rounding alone can give a singular value; smaller ones count as zero.
        largest: largest rank considered.

    Returns:
        The rank (0 if all values are below `floor`) and the gap, the ratio at it.
    """
    clipped = values.clamp_min(floor)
    below = torch.cat([clipped[1:], clipped.new_tensor([floor])])
    ratio = (clipped / below)[: largest or len(values)]
    if len(ratio) == 0 or float(values[0]) <= floor:
        return 0, 1.0
    k = int(ratio.argmax())
    return k + 1, float(ratio[k])
