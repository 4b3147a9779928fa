"""The ends of the spectra of many symmetric matrices at once, given products with one vector of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ritz:
    """Approximate eigenpairs of m matrices.

    Args:
        values: ascending [m, j].
        vectors: unit eigenvectors as rows [m, j, q].
        residuals: |S v - value v| of each [m, j].
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Ritz:
    """Rayleigh-Ritz pairs on the Krylov spaces span{v, S v, ..., S^(j-1) v} of symmetric S_1 ... S_m.

    The basis is orthogonalised twice at every step, so that no eigenvalue appears twice; where a space is exhausted,
    it goes on with another direction.

    Args:
        product: from v_i [m, q] to S_i v_i [m, q].
        start: v_i; rows of zeros are replaced [m, q].
        steps: largest dimension j of a space.
    """
    m, q = start.shape
    spare = torch.randn(steps + 1, q, generator=torch.Generator().manual_seed(0), dtype=start.dtype)
    basis = start.new_zeros(m, 0, q)
    alphas, betas = [], []
    w, size = start, torch.zeros(m, dtype=start.dtype)
    for j in range(min(steps, q)):
        w, beta = _next(w, basis, size, spare[j])
        if j:
            betas.append(beta)
        basis = torch.cat([basis, w[:, None]], 1)
        moved = product(w)
        alphas.append((w * moved).sum(1))
        size = torch.maximum(size, moved.norm(dim=1))
        w = moved
    _, left = _next(w, basis, size, spare[-1])
    t = torch.stack(alphas, 1).diag_embed()
    if betas:
        off = torch.stack(betas, 1).diag_embed(1)
        t = t + off + off.mT
    values, vectors = torch.linalg.eigh(t)
    return Ritz(values, vectors.mT @ basis, left[:, None] * vectors[:, -1].abs())


def _next(w: Tensor, basis: Tensor, size: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector that w adds to a basis [m, j, q], and the length of what it adds, 0 where that is rounding."""
    w = _apart(w, basis)
    length = w.norm(dim=1)
    nothing = length <= 1e-12 * size + torch.finfo(w.dtype).tiny
    w = torch.where(nothing[:, None], _apart(spare.expand_as(w), basis), w)
    w = w / w.norm(dim=1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    return w, torch.where(nothing, 0.0, length)


def _apart(w: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):
        w = w - torch.einsum("mjq,mj->mq", basis, torch.einsum("mjq,mq->mj", basis, w))
    return w
