"""Directions from slices A_l = Z diag(d_l) Z': the best of many matrix pencils, then joint diagonalisation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import scipy.linalg
import torch
from torch import Tensor

from exhume.linalg import rank_by_gap

FLOOR = 1e-11  # share of the largest singular value of the slices that rounding can reach


@dataclass(frozen=True, eq=False)
class Directions:
    """Common directions of symmetric slices.

    Args:
        z: unit directions [s, r], up to sign and order.
        gap: ratio of singular values at s in the spectrum of all slices side by side.
        eigen_gap: smallest relative distance of two eigenvalues in the pencil that was chosen.
        condition: of the matrix of directions.
        off: share of the slices' energy that the directions leave off the diagonal.
    """

    z: Tensor
    gap: float
    eigen_gap: float
    condition: float
    off: float


def joint_range(slices: Tensor, samples: int | None = None) -> tuple[Tensor, float]:
    """Orthonormal basis U [r, s] of the range of slices [L, r, r], and the gap that s was read off.

    Args:
        slices: symmetric.
        samples: s, if known.
    """
    u, s, _ = torch.linalg.svd(slices.transpose(0, 1).flatten(1), full_matrices=False)
    rank, gap = rank_by_gap(s, float(FLOOR * s[0]))
    return u[:, : samples or rank], gap


def directions(slices: Tensor, samples: int | None = None) -> Directions | None:
    """Directions of as many samples as the slices have rank, by the best pencil and joint diagonalisation.

    A = Z D_A Z', B = Z D_B Z':  B E = A E diag(d_B / d_A),  E = Z^-T,  so that the directions are the columns of A E

    (the eigenvectors themselves are dual to them). Of all pairs of slices the one with the best ratio of eigenvalue
    gap to conditioning and a real spectrum is taken.

    Args:
        slices: symmetric [L, r, r].
        samples: their number s, if known.

    Returns:
        The directions, or None where no pair has a real spectrum.
    """
    u, gap = joint_range(slices, samples)
    inner = u.T @ slices @ u
    inner = inner / inner.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-300)
    if inner.shape[1] == 1:
        return Directions(u.T.contiguous(), gap, 1.0, 1.0, 0.0)
    best: tuple[float, float, Tensor] | None = None
    condition = [float(torch.linalg.cond(a)) for a in inner]
    for k, l in permutations(range(len(inner)), 2):
        if not condition[k] < 1e10:
            continue
        values, vectors = scipy.linalg.eig(inner[l].numpy(), inner[k].numpy())
        size = abs(values).max()
        if not size < 1e12 or abs(values.imag).max() > 1e-6 * size:
            continue
        ordered = torch.from_numpy(values.real.copy()).sort().values
        apart = float((ordered.diff() / size).min())
        if best is None or apart / condition[k] > best[0]:
            best = (apart / condition[k], apart, inner[k] @ torch.from_numpy(vectors.real.copy()))
    if best is None:
        return None
    z, off = diagonalise(inner, best[2])
    z = u @ z
    z = z / z.norm(dim=0)
    return Directions(z.T.contiguous(), gap, best[1], float(torch.linalg.cond(z)), off)


def diagonalise(slices: Tensor, z: Tensor, sweeps: int = 60) -> tuple[Tensor, float]:
    """Refine Z [s, s] so that Z^-1 A_l Z^-T is as diagonal as can be for all slices A_l at once.

    V <- (I + W) V,  W of zero diagonal minimises sum_l |off(D_l + W D_l + D_l W' + E_l)|^2

    Args:
        slices: A_l [L, s, s].
        z: start.
        sweeps: most updates.

    Returns:
        The columns, and the share of energy left off the diagonal; the start where no sweep improves on it.

    Reference: Ziehe, Laskov, Nolte, Mueller 2004 (FFDIAG), with the rows of V kept at unit norm.
    """
    best_z, best_off = z, float("inf")
    v = torch.linalg.pinv(z)
    for _ in range(sweeps):
        v = v / v.norm(dim=1, keepdim=True)
        c = v @ slices @ v.T
        d = c.diagonal(dim1=1, dim2=2)
        e = c - torch.diag_embed(d)
        off = float(e.square().sum() / c.square().sum())
        if not off < best_off * (1 - 1e-3):
            break
        best_z, best_off = torch.linalg.pinv(v), off
        zz = d.T @ d
        y = torch.einsum("lj,lij->ij", d, e)
        norm = zz.diagonal()
        det = norm[:, None] * norm[None] - zz.square()
        w = (zz * y.T - norm[:, None] * y) / (det + 1e-12 * norm[:, None] * norm[None])
        w.fill_diagonal_(0.0)
        size = float(w.norm())
        v = v + (min(1.0, 0.9 / size) if size > 0 else 1.0) * (w @ v)
    return best_z, best_off
