"""Levenberg-Marquardt on the samples themselves, and what the Jacobian at the end says about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from exhume.algebra.field import Field
from exhume.algebra.polynomial import Slope

ENTRIES = 30_000_000  # of the Jacobian; beyond, the equations of the heaviest neurons are used
FLAT = 1e-7  # relative singular value of the scaled Jacobian below which samples are free to move


@dataclass(frozen=True, eq=False)
class Fit:
    """Samples fitted to fields that share them.

    Args:
        x: samples [s, q].
        b: coefficients of each field and node [K, s].
        residual: relative, in units of the weights.
        sharpness: smallest over largest singular value of the Jacobian with respect to relative changes of samples,
            coefficients eliminated; near zero, the equations leave the samples free.
        deviation: relative standard deviation of each sample, the residual being noise [s].
        evaluations: of the residual.
    """

    x: Tensor
    b: Tensor
    residual: float
    sharpness: float
    deviation: Tensor
    evaluations: int


@dataclass(frozen=True, eq=False)
class Model:
    """Residuals R_j = sum_v gain_vj sum_i b_vi sigma'(x_i . w_vj) x_i - step_j of fields, and their derivatives.

    Args:
        fields: all in one coordinate system of q dimensions; they share the samples, not the b_vi.
        slope: derivatives of the activation.
        last: functional that is 1 on every sample [q], or None.
        scaleless: whether (x, b) -> (c x, b / c^alpha) changes nothing: a homogeneous activation without bias.
    """

    fields: tuple[Field, ...]
    slope: Slope
    last: Tensor | None = None
    scaleless: bool = False

    @property
    def nodes(self) -> int:
        """Coefficients of one sample, over all fields and nodes."""
        return sum(f.nodes for f in self.fields)

    def acts(self, field: Field, x: Tensor) -> Tensor:
        """gain_vj sigma'(x_i . w_vj) [V, m, s]."""
        return self.slope.first(field.points @ x.T) * field.gain[:, :, None]

    def design(self, field: Field, x: Tensor) -> Tensor:
        """What each b_vi adds to the steps [m q, V s]."""
        return torch.einsum("vji,ia->javi", self.acts(field, x), x).flatten(2).flatten(0, 1)

    def linear(self, x: Tensor) -> Tensor:
        """Coefficients b [K, s] that fit best at samples x [s, q], K counting fields and nodes."""
        solved = [
            torch.linalg.lstsq(self.design(f, x), f.steps.reshape(-1, 1), driver="gelsd").solution.view(
                -1, len(x)
            )
            for f in self.fields
        ]
        return torch.cat(solved)

    def residual(self, x: Tensor, b: Tensor) -> Tensor:
        """All residuals [sum m q]."""
        parts = []
        for f, own in self._each(b):
            total = torch.einsum("vji,vi->ji", self.acts(f, x), own)
            parts.append((total @ x - f.steps).flatten())
        return torch.cat(parts)

    def jacobian(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives with respect to x [sum m q, s q] and to b [sum m q, K s]."""
        s, q = x.shape
        by_x, by_b = [], []
        for f, own in self._each(b):
            bent = self.slope.second(f.points @ x.T) * f.gain[:, :, None] * own[:, None]
            turned = torch.einsum("vji,vjc->jic", bent, f.points)
            block = torch.einsum("jic,ia->jaic", turned, x)
            total = torch.einsum("vji,vi->ji", self.acts(f, x), own)
            block.diagonal(dim1=1, dim2=3).add_(total[:, :, None])
            by_x.append(block.reshape(-1, s * q))
            by_b.append(self.design(f, x))
        return torch.cat(by_x), torch.block_diag(*by_b)

    def _each(self, b: Tensor) -> Iterator[tuple[Field, Tensor]]:
        return zip(self.fields, b.split([f.nodes for f in self.fields]), strict=True)


def polish(
    model: Model, x: Tensor, b: Tensor | None = None, evaluations: int = 200, tolerance: float = 1e-15
) -> Fit:
    """Minimise the residual over samples and coefficients from a start, by scipy's Levenberg-Marquardt.

    Where a bias fixes the last coordinate, samples move in the affine set last . x = 1. Where nothing fixes their
    scale, equations |x_i| = const are added, which cost nothing at the minimum.

    Args:
        model: the equations.
        x: start [s, q].
        b: coefficients at the start [K, s]; by default the best ones.
        evaluations: of the residual, at most.
        tolerance: relative change of residual, step or gradient to stop at.
    """
    model = _affordable(model, x)
    chart = _Chart(model, x)
    b = model.linear(x) if b is None else b
    energy = max(float(sum(f.steps.square().sum() for f in model.fields)), 1e-300)
    unit = energy**0.5
    s = len(x)

    def unpack(z: np.ndarray) -> tuple[Tensor, Tensor]:
        v = torch.from_numpy(z)
        return chart.expand(v[: chart.size].view(s, -1)), v[chart.size :].view(-1, s)

    def residual(z: np.ndarray) -> np.ndarray:
        xs, bs = unpack(z)
        return torch.cat([model.residual(xs, bs) / unit, chart.gauge(xs)]).numpy()

    def jacobian(z: np.ndarray) -> np.ndarray:
        xs, bs = unpack(z)
        by_x, by_b = model.jacobian(xs, bs)
        top = torch.cat([chart.pull(by_x) / unit, by_b / unit], 1)
        return torch.cat([top, chart.gauge_slope(xs, by_b.shape[1])]).numpy()

    start = torch.cat([chart.coordinates(x).flatten(), b.flatten()]).numpy()
    rows = len(residual(start))
    solved = scipy.optimize.least_squares(
        residual,
        start,
        jacobian,
        method="lm" if rows >= len(start) else "trf",
        x_scale="jac",
        ftol=tolerance,
        xtol=tolerance,
        gtol=tolerance,
        max_nfev=evaluations,
    )
    end_x, end_b = unpack(solved.x)
    size = float(model.residual(end_x, end_b).norm()) / unit
    equations = sum(f.steps.numel() for f in model.fields)
    sharpness, deviation = _spread(jacobian(solved.x), end_x, chart.size, size, equations)
    return Fit(end_x, end_b, size, sharpness, deviation, int(solved.nfev))


class _Chart:
    """Free coordinates of the samples: all of R^q, or the affine set on which a functional is 1."""

    def __init__(self, model: Model, x: Tensor) -> None:
        self.basis: Tensor | None = None
        self.origin = x.new_zeros(x.shape[1])
        if model.last is not None:
            self.origin = model.last / model.last.square().sum()
            self.basis = torch.linalg.svd(model.last[None], full_matrices=True)[2][1:]
        self.norm = x.square().sum(1) if model.scaleless else None
        self.size = len(x) * (x.shape[1] if self.basis is None else len(self.basis))

    def expand(self, z: Tensor) -> Tensor:
        return z if self.basis is None else z @ self.basis + self.origin

    def coordinates(self, x: Tensor) -> Tensor:
        return x if self.basis is None else x @ self.basis.T

    def pull(self, by_x: Tensor) -> Tensor:
        if self.basis is None:
            return by_x
        rows, q = len(by_x), self.basis.shape[1]
        return (by_x.view(rows, -1, q) @ self.basis.T).flatten(1)

    def gauge(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x.new_zeros(0)
        return (x.square().sum(1) / self.norm - 1) / 2

    def gauge_slope(self, x: Tensor, others: int) -> Tensor:
        if self.norm is None:
            return x.new_zeros(0, self.size + others)
        rows = torch.block_diag(*(x / self.norm[:, None]))
        return torch.cat([rows, x.new_zeros(len(x), others)], 1)


def _affordable(model: Model, x: Tensor) -> Model:
    """Keep the equations of the heaviest neurons where all of them would not fit."""
    columns = x.numel() + model.nodes * len(x)
    points = sum(len(f.steps) for f in model.fields)
    share = ENTRIES / (points * x.shape[1] * columns)
    if share >= 1:
        return model
    fields = []
    for f in model.fields:
        order = f.gain.abs().sum(0).argsort(descending=True)
        fields.append(f.take(order[: max(1, int(share * len(order)))]))
    return replace(model, fields=tuple(fields))


def _spread(
    jacobian: np.ndarray, x: Tensor, split: int, residual: float, equations: int
) -> tuple[float, Tensor]:
    """Conditioning of the samples with their coefficients eliminated, and standard deviations sigma^2 (J'J)^-1.

    Args:
        jacobian: by samples, then coefficients.
        x: the samples.
        split: columns that belong to samples.
        residual: relative.
        equations: their number.
    """
    s = len(x)
    j = torch.from_numpy(jacobian)
    by_x, by_b = j[:, :split] * x.norm(dim=1).repeat_interleave(split // s), j[:, split:]
    # Coefficients of neighbouring nodes are nearly exchangeable, which takes nothing from the samples.
    u, size, _ = torch.linalg.svd(by_b / by_b.norm(dim=0).clamp_min(1e-300), full_matrices=False)
    u = u[:, size > 1e-10 * size[0]]
    left = by_x - u @ (u.T @ by_x)
    if equations <= j.shape[1] - (s if len(j) > equations else 0):
        return 0.0, torch.full((s,), torch.inf, dtype=x.dtype)
    upper = torch.linalg.qr(left, mode="r")[1] if len(left) > split else left
    _, values, vh = torch.linalg.svd(upper, full_matrices=False)
    sharpness = float(values[-1] / values[0]) if len(values) == split else 0.0
    if not sharpness > 1e-14:
        return sharpness, torch.full((s,), torch.inf, dtype=x.dtype)
    variance = ((vh.T / values) ** 2).sum(1).view(s, -1).sum(1)
    freedom = max(len(j) - j.shape[1], 1)
    return sharpness, residual * (variance / freedom).sqrt()
