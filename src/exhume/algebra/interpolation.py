"""The gradient field of a polynomial from its values at points: componentwise, or as the gradient field it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.algebra.field import Field
from exhume.algebra.polynomial import count, monomials

CUTOFF = 1e-9  # singular values below this share of the largest count as zero
PROBES = 16  # slices taken of a field
MONOMIALS = 500_000  # of one degree that are tabulated
ENTRIES = 60_000_000  # of the largest matrix that is formed


@dataclass(frozen=True, eq=False)
class Interpolant:
    """A polynomial field f(w) = sum_q A_q' phi_{q-1}(w), phi_q the monomials of degree q.

    Args:
        degrees: the q that occur in the potential p, with f = grad p.
        coefs: A_q [binom(r + q - 2, q - 1), r] for each of them.
        rank: number of coefficients that the points determine.
        unknowns: number of coefficients.
        margin: smallest over largest singular value of the equations, 0 where they are fewer than the unknowns.
        residual: relative residual of the values.
        equations: number of equations.
        freedom: how many there are beyond the unknowns, negative where too few.
    """

    degrees: tuple[int, ...]
    coefs: tuple[Tensor, ...]
    rank: int
    unknowns: int
    margin: float
    residual: float
    equations: int
    freedom: int

    @property
    def noise(self) -> float | None:
        """Relative noise of the values, from the residual and the degrees of freedom; None without any."""
        if not self.determined or self.freedom < 10:
            return None
        return self.residual * (self.equations / self.freedom) ** 0.5

    @property
    def determined(self) -> bool:
        """Whether the points leave no freedom in the field."""
        return self.rank == self.unknowns

    def at(self, w: Tensor) -> Tensor:
        """Values f(w) [m, r] at points w [m, r]."""
        r = w.shape[1]
        parts = [monomials(r, q - 1).at(w) @ a for q, a in zip(self.degrees, self.coefs, strict=True)]
        return torch.stack(parts).sum(0)

    def jacobian(self, v: Tensor, degrees: Sequence[int] | None = None) -> Tensor:
        """Df(v) [L, r, r] at v [L, r], entry [l, a, c] = d f_a / d w_c; symmetric where f is a gradient field.

        For f(w) = sum_i b_i sigma'(x_i . w) x_i this is the slice sum_i b_i sigma''(x_i . v) x_i x_i'.

        Args:
            v: where.
            degrees: only these degrees of p; all by default.
        """
        r = v.shape[1]
        out = v.new_zeros(len(v), r, r)
        for q, a in zip(self.degrees, self.coefs, strict=True):
            if q < 2 or (degrees is not None and q not in degrees):
                continue
            lower = monomials(r, q - 2)
            values = lower.at(v)
            for c in range(r):
                out[:, :, c] += (values * lower.power[:, c]) @ a[lower.raised[:, c]]
        return out

    def asymmetry(self, v: Tensor) -> float:
        """Largest |Df - Df'| / |Df| over v [L, r]: zero for the field of samples, so a meter of failure."""
        j = self.jacobian(v)
        part = (j - j.transpose(1, 2)).flatten(1).norm(dim=1)
        return float((part / j.flatten(1).norm(dim=1).clamp_min(1e-300)).max())


def componentwise(field: Field, degrees: Sequence[int]) -> Interpolant | None:
    """Interpolate each component of f by itself, as the kernel matrix K_jk = sum_q (w_j . w_k)^(q-1) does.

    V A = F,  V V' = K,  rank K = N_r = sum_q binom(r + q - 2, q - 1) determines f

    K is not formed: V, the monomials with square-root multinomial weights, has its rank and half its digits lost.

    Args:
        field: in r coordinates; with several nodes every one has coefficients of its own, and their sum is returned.
        degrees: that occur in the potential.

    Returns:
        The interpolant, or None where the equations would not fit in memory.

    Reference: Shen, Wang, Qian, Lei 2026, Theorem 4.1; stated there for one degree and one node.
    """
    m, r = field.steps.shape
    if _too_large(m, r, degrees, field.nodes):
        return None
    tables = [monomials(r, q - 1) for q in degrees]
    sizes = [len(t.scale) for t in tables]
    n = sum(sizes) * field.nodes
    weight, scale = _weight(field, degrees), torch.cat([t.scale for t in tables])
    blocks = [
        torch.cat([t.at(w) for t in tables], 1) * scale * (gain * weight)[:, None]
        for w, gain in zip(field.points, field.gain, strict=True)
    ]
    solved = _solve(torch.cat(blocks, 1), field.steps * weight[:, None])
    total = solved.x.view(field.nodes, len(scale), r).sum(0) * scale[:, None]
    coefs = total.split(sizes)
    return Interpolant(
        tuple(degrees), coefs, solved.rank, n, solved.margin, solved.residual, m * r, (m - n) * r
    )


def gradient_field(field: Field, degrees: Sequence[int]) -> Interpolant | None:
    """Interpolate f as a gradient, f = grad p: the unknowns are the coefficients of p, r equations a point.

    sum_mu c_mu grad w_j^mu = F_j,  rank = sum_q binom(r + q - 1, q) determines p

    The Gram matrix of these equations is G_jk = k'(w_j . w_k) I + k''(w_j . w_k) w_k w_j' with k(s) = sum_q s^q; it
    is not formed. Generic points determine p from m* = ceil(binom(r + q - 1, q) / r) of them on for one degree q, but
    for four pairs (r, q) that need one more (Alexander and Hirschowitz 1995).

    Args:
        field: in r coordinates; several nodes as in `componentwise`.
        degrees: that occur in the potential.

    Returns:
        The interpolant, or None where the equations would not fit in memory.
    """
    m, r = field.steps.shape
    sizes = [count(r, q) for q in degrees]
    n = sum(sizes) * field.nodes
    if _too_large(m * r, r, degrees, field.nodes) or m * r * n > ENTRIES:
        return None
    weight = _weight(field, degrees)
    design = weight.new_zeros(m, r, n)
    start = 0
    for points, gain in zip(field.points, field.gain, strict=True):
        for q, size in zip(degrees, sizes, strict=True):
            lower, scale = monomials(r, q - 1), monomials(r, q).scale
            v = lower.at(points) * (gain * weight)[:, None]
            for a in range(r):
                column = lower.raised[:, a]
                design[:, a, start + column] = v * (lower.power[:, a] * scale[column] / q)
            start += size
    solved = _solve(design.view(m * r, n), (field.steps * weight[:, None]).reshape(-1, 1))
    total = solved.x.view(field.nodes, -1).sum(0)
    coefs = []
    for q, part in zip(degrees, total.split(sizes), strict=True):
        lower, scale = monomials(r, q - 1), monomials(r, q).scale
        coefs.append(lower.power * (part * scale / q)[lower.raised])
    return Interpolant(
        tuple(degrees), tuple(coefs), solved.rank, n, solved.margin, solved.residual, m * r, m * r - n
    )


def _too_large(rows: int, r: int, degrees: Sequence[int], nodes: int) -> bool:
    """Whether the monomials, or their equations, would not fit in memory."""
    n = nodes * sum(count(r, q - 1) for q in degrees)
    return rows * n > ENTRIES or count(r, max(degrees)) > MONOMIALS


def _weight(field: Field, degrees: Sequence[int]) -> Tensor:
    """Weight of each neuron's equations [m]: a homogeneous field lets every point have unit norm."""
    if len(degrees) > 1:
        return field.steps.new_ones(len(field.steps))
    weight = field.points[field.nodes // 2].norm(dim=1).clamp_min(1e-300) ** (1 - degrees[0])
    return weight / weight.max()


def slices(interpolant: Interpolant, seed: int) -> Tensor:
    """Symmetrised Jacobians at random points [L, r, r], of unit norm."""
    generator = torch.Generator().manual_seed(seed)
    r = interpolant.coefs[0].shape[1]
    v = torch.randn(PROBES, r, generator=generator, dtype=torch.float64)
    j = interpolant.jacobian(v)
    j = (j + j.transpose(1, 2)) / 2
    return j / j.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-300)


@dataclass(frozen=True, eq=False)
class _Solved:
    x: Tensor
    rank: int
    margin: float
    residual: float


def _solve(design: Tensor, right: Tensor) -> _Solved:
    """Least-norm least squares by singular values, with rank and margin."""
    rows, unknowns = design.shape
    energy = float(right.square().sum())
    q, upper = torch.linalg.qr(design) if rows > 2 * unknowns else (None, design)
    short = right if q is None else q.T @ right
    u, s, vh = torch.linalg.svd(upper, full_matrices=False)
    keep = s > CUTOFF * s[0]
    inner = u[:, keep].T @ short
    x = vh[keep].T @ (inner / s[keep, None])
    residual = float((design @ x - right).square().sum())
    return _Solved(
        x,
        int(keep.sum()),
        float(s[-1] / s[0]) if rows >= unknowns else 0.0,
        (residual / max(energy, 1e-300)) ** 0.5,
    )
