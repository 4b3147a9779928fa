"""Merge coinciding candidates and drop those that the fit does not need."""

from __future__ import annotations

import torch
from torch import Tensor

from exhume.objective import Objective, Point


def importance(objective: Objective, point: Point) -> Tensor:
    """Rise of the misfit if a candidate is removed and the multipliers are re-solved, [m].

    c_i' (G^+_ii)^-1 c_i / |t|^2, by the block inverse of the Gram matrix G
    """
    m = len(point.coef)
    size, rank = point.factor.shape
    if rank < size:  # a singular Gram matrix has no block inverse: remove one after the other
        index = torch.arange(m)
        rises = (
            [objective.at(point.z[index != i]).misfit - point.misfit for i in index.tolist()]
            if m > 1
            else [1.0]
        )
        return torch.tensor(rises, dtype=point.coef.dtype).clamp_min(0)
    rows = point.factor.view(m, size // m, -1)
    coef = point.coef.view(m, size // m, -1)  # a column for each of the outputs that share the Gram matrix
    solved = torch.linalg.pinv(rows @ rows.mT, hermitian=True) @ coef
    return (coef * solved).sum((1, 2)).clamp_min(0) / objective.equation.energy


def merge(u: Tensor, order: Tensor, tolerance: float) -> Tensor:
    """Indices of candidates that stay when each absorbs the later ones (in `order`) within a relative distance.

    Args:
        u: model inputs [m, d].
        order: indices from most to least trusted [m].
        tolerance: relative to the norm of the candidate that stays.
    """
    kept: list[int] = []
    norms = u.norm(dim=1)
    for i in order.tolist():
        if all(float((u[i] - u[j]).norm()) > tolerance * float(norms[j]) for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


def weakest_out(objective: Objective, point: Point, most: int) -> Point:
    """Remove the least important candidate until at most `most` are left."""
    while len(point.z) > most:
        weakest = int(importance(objective, point).argmin())
        point = objective.at(torch.cat([point.z[:weakest], point.z[weakest + 1 :]]))
    return point


def prune(objective: Objective, point: Point, share: float, tolerance: float = 0.05) -> Point:
    """Drop duplicates, then candidates one by one while the misfit rises by less than `share` of itself.

    Args:
        objective: what was minimised.
        point: where.
        share: largest rise of the misfit that one removal may cause, relative to the misfit.
        tolerance: relative distance below which two candidates are one.
    """
    u = objective.space.expand(point.z)
    order = importance(objective, point).argsort(descending=True)
    kept = merge(u, order, tolerance)
    if len(kept) < len(u):
        point = objective.at(point.z[kept.sort().values])
    while len(point.z) > 1:
        rise = importance(objective, point)
        weakest = int(rise.argmin())
        if float(rise[weakest]) > share * max(point.misfit, 1e-20):
            break
        point = objective.at(torch.cat([point.z[:weakest], point.z[weakest + 1 :]]))
    return point
