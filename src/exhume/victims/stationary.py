"""Networks at an exact stationary point, made from Z-eigenvectors: both equations hold to rounding, untrained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

SAME = 1e-6  # distance below which two unit eigenvectors are one
MOST_PATTERNS = 4000  # starts at sums of samples


@dataclass(frozen=True, eq=False)
class Stationary:
    """A two-layer network sum_j a_j (w_j . x)^alpha that is stationary for samples x_i with multipliers b_i.

    w_j = alpha a_j sum_i b_i (x_i . w_j)^(alpha - 1) x_i,  a_j = sum_i b_i (x_i . w_j)^alpha

    Args:
        w: first layer [m, d].
        a: second layer [m].
        x: samples [s, d].
        b: multipliers, with the sign of the label [s].
        alpha: degree of the activation.
    """

    w: Tensor
    a: Tensor
    x: Tensor
    b: Tensor
    alpha: int

    def defects(self) -> tuple[float, float]:
        """Largest relative defect of the two equations."""
        pre = self.w @ self.x.T
        slope = self.alpha * (pre ** (self.alpha - 1) * self.b) @ self.x * self.a[:, None]
        first = ((slope - self.w).norm(dim=1) / self.w.norm(dim=1)).max()
        second = ((pre**self.alpha @ self.b - self.a).abs() / self.a.abs()).max()
        return float(first), float(second)


def stationary(x: Tensor, b: Tensor, alpha: int, starts: int = 400, seed: int = 0) -> Stationary:
    """Put one neuron on every real Z-eigenvector that Newton's method finds.

    f(v) = mu v, |v| = 1  ->  w = (sqrt(alpha) |mu|)^(-1 / (alpha - 1)) v,  a = sign(mu) |w| / sqrt(alpha)

    with f(v) = sum_i b_i (x_i . v)^(alpha - 1) x_i. Newton starts at signed sums of samples, the eigenvectors
    of orthonormal samples, and at random points.

    Args:
        x: samples [s, d].
        b: multipliers [s].
        alpha: degree, at least 3.
        starts: random starts.
        seed: of the starts.
    """
    generator = torch.Generator().manual_seed(seed)
    # Orthonormal samples: sum_i b_i c_i^(alpha - 1) x_i = mu sum_i c_i x_i, so c_i = |b_i|^(-1 / (alpha - 2)).
    size = b.abs() ** (-1 / (alpha - 2))
    signs = (0.0, 1.0) if alpha % 2 else (-1.0, 0.0, 1.0)
    patterns = torch.tensor(list(product(signs, repeat=len(x)))[1:][:MOST_PATTERNS], dtype=x.dtype)
    turn = b.sign() if alpha % 2 else torch.ones_like(b)
    random = torch.randn(starts, len(x), generator=generator, dtype=x.dtype)
    v = torch.cat([patterns * size * turn, random]) @ x
    v = v[v.norm(dim=1) > 1e-9]
    v, mu = _newton(v / v.norm(dim=1, keepdim=True), x, b, alpha)
    v, mu = _distinct(v, mu)
    norm = (alpha**0.5 * mu.abs()) ** (-1 / (alpha - 1))
    return Stationary(v * norm[:, None], mu.sign() * norm / alpha**0.5, x, b, alpha)


def _newton(v: Tensor, x: Tensor, b: Tensor, alpha: int, steps: int = 60) -> tuple[Tensor, Tensor]:
    """Newton's method on f(v) = mu v, |v|^2 = 1, for many starts [k, d]; those that converged to a mu != 0."""
    d = x.shape[1]
    eye = torch.eye(d, dtype=x.dtype)
    mu = (((v @ x.T) ** alpha) * b).sum(1)
    for _ in range(steps):
        pre = v @ x.T
        f = (pre ** (alpha - 1) * b) @ x
        jacobian = torch.einsum("ki,ia,ic->kac", (alpha - 1) * pre ** (alpha - 2) * b, x, x)
        system = torch.zeros(len(v), d + 1, d + 1, dtype=x.dtype)
        system[:, :d, :d] = jacobian - mu[:, None, None] * eye
        system[:, :d, d] = -v
        system[:, d, :d] = 2 * v
        right = torch.cat([mu[:, None] * v - f, 1 - v.square().sum(1, keepdim=True)], 1)
        solved, info = torch.linalg.solve_ex(system, right)
        ok = (info == 0) & torch.isfinite(solved).all(1)
        v, mu = v[ok] + solved[ok, :d], mu[ok] + solved[ok, d]
    pre = v @ x.T
    defect = ((pre ** (alpha - 1) * b) @ x - mu[:, None] * v).norm(dim=1)
    kept = (defect < 1e-13 * mu.abs()) & (mu.abs() > 1e-6 * b.abs().max()) & (v.norm(dim=1) > 0.5)
    return v[kept], mu[kept]


def _distinct(v: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """One of each direction: v and -v carry the same equation."""
    kept: list[int] = []
    for k in range(len(v)):
        if not kept or float((v[kept] @ v[k]).abs().max()) < 1 - SAME:
            kept.append(k)
    return v[kept], mu[kept]
