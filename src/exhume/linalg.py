"""Least squares through Gram matrices, and ranks read off a spectrum."""

from __future__ import annotations

import torch
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
