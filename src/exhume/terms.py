"""Priors: one penalty per candidate, with the curvature that Gauss-Newton needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from exhume.spaces import Space


class Term(Protocol):
    """A penalty on each candidate's model input."""

    def value(self, u: Tensor) -> Tensor:
        """Penalty of each candidate [m] at model inputs u [m, d]; differentiable."""

    def curvature(self, u: Tensor, space: Space) -> Tensor:
        """Positive semi-definite approximation of the Hessian in z, [m, q, q]."""

    def curvature_product(self, u: Tensor, space: Space, direction: Tensor) -> Tensor:
        """The same matrices times a direction [m, q], without forming them."""


@dataclass(frozen=True, eq=False)
class Box:
    """Squared violation of low <= u <= high, relative to the squared width of the box.

    weight * |relu(u - high) + relu(low - u)|^2 / |high - low|^2

    Args:
        low: lower bound of each feature [d].
        high: upper bound [d].
        weight: multiplier.
    """

    low: Tensor
    high: Tensor
    weight: float

    def _scale(self) -> float:
        return self.weight / float(((self.high - self.low) ** 2).sum())

    def value(self, u: Tensor) -> Tensor:
        """Penalty of each candidate [m]."""
        outside = (u - self.high).relu() + (self.low - u).relu()
        return self._scale() * (outside**2).sum(1)

    def curvature(self, u: Tensor, space: Space) -> Tensor:
        """Gauss-Newton Hessian: the basis restricted to the violated features."""
        active = self._active(u)
        if space.basis is None:
            return 2 * self._scale() * active.diag_embed()
        masked = space.basis[None] * active[:, None]
        return 2 * self._scale() * (masked @ space.basis.T)

    def curvature_product(self, u: Tensor, space: Space, direction: Tensor) -> Tensor:
        """The Gauss-Newton Hessian times a direction."""
        moved = direction if space.basis is None else direction @ space.basis
        return 2 * self._scale() * space.coordinates(self._active(u) * moved)

    def _active(self, u: Tensor) -> Tensor:
        return ((u > self.high) | (u < self.low)).to(u.dtype)


@dataclass(frozen=True)
class Smooth:
    """Mean squared difference of neighbouring pixels.

    weight * |D u|^2 / d,  D the horizontal and vertical differences of each channel

    Args:
        shape: shape of one model input, [c, h, w] or [h, w].
        weight: multiplier.
    """

    shape: tuple[int, ...]
    weight: float

    def _differences(self, u: Tensor) -> Tensor:
        image = u.view(*u.shape[:-1], *self.shape)
        return torch.cat(
            [image.diff(dim=-1).flatten(u.dim() - 1), image.diff(dim=-2).flatten(u.dim() - 1)], -1
        )

    def value(self, u: Tensor) -> Tensor:
        """Penalty of each candidate [m]."""
        return self.weight / u.shape[-1] * self._differences(u).square().sum(-1)

    def curvature(self, u: Tensor, space: Space) -> Tensor:
        """The Hessian, the same for every candidate."""
        basis = torch.eye(space.size, dtype=u.dtype) if space.basis is None else space.basis
        moved = self._differences(basis)
        return (2 * self.weight / space.size * (moved @ moved.T)).expand(len(u), -1, -1)

    def curvature_product(self, u: Tensor, space: Space, direction: Tensor) -> Tensor:
        """The Hessian times a direction, through D and its transpose."""
        moved = direction if space.basis is None else direction @ space.basis
        differences, transpose = torch.func.vjp(self._differences, moved)[:2]
        return 2 * self.weight / space.size * space.coordinates(transpose(differences)[0])


@dataclass(frozen=True)
class HighFrequency:
    """Mean squared difference of an image from its blurred self.

    weight * |u - blur(u)|^2 / d,  blur the 3x3 binomial filter (1 2 1)' (1 2 1) / 16 of each channel, zeros outside

    Args:
        shape: shape of one model input, [c, h, w] or [h, w].
        weight: multiplier.
    """

    shape: tuple[int, ...]
    weight: float

    def _detail(self, u: Tensor) -> Tensor:
        image = u.reshape(-1, 1, *self.shape[-2:])
        row = u.new_tensor([0.25, 0.5, 0.25])
        blurred = torch.nn.functional.conv2d(image, torch.outer(row, row)[None, None], padding=1)
        return (image - blurred).view_as(u)

    def value(self, u: Tensor) -> Tensor:
        """Penalty of each candidate [m]."""
        return self.weight / u.shape[-1] * self._detail(u).square().sum(-1)

    def curvature(self, u: Tensor, space: Space) -> Tensor:
        """The Hessian, the same for every candidate."""
        basis = torch.eye(space.size, dtype=u.dtype) if space.basis is None else space.basis
        moved = self._detail(basis)
        return (2 * self.weight / space.size * (moved @ moved.T)).expand(len(u), -1, -1)

    def curvature_product(self, u: Tensor, space: Space, direction: Tensor) -> Tensor:
        """The Hessian times a direction; the filter is its own transpose."""
        moved = direction if space.basis is None else direction @ space.basis
        return 2 * self.weight / space.size * space.coordinates(self._detail(self._detail(moved)))


@dataclass(frozen=True, eq=False)
class Fitted:
    """Squared distance of the trained network's output from the label it was drawn to.

    weight * |f(u) - y(u)|^2,  y(u) the admissible label nearest to f(u), held fixed

    Args:
        output: f, a differentiable function of model inputs [m, d] with values [m, C].
        label: y, likewise; its derivative is never asked for.
        weight: multiplier.
    """

    output: Callable[[Tensor], Tensor]
    label: Callable[[Tensor], Tensor]
    weight: float

    def value(self, u: Tensor) -> Tensor:
        """Penalty of each candidate [m]."""
        return self.weight * (self.output(u) - self.label(u.detach())).square().sum(1)

    def curvature(self, u: Tensor, space: Space) -> Tensor:
        """Gauss-Newton Hessian 2 weight J' J, J the Jacobian of f in z."""
        slope = self._slope(u, space)
        return 2 * self.weight * slope.mT @ slope

    def curvature_product(self, u: Tensor, space: Space, direction: Tensor) -> Tensor:
        """The same times a direction."""
        slope = self._slope(u, space)
        return 2 * self.weight * (slope.mT @ (slope @ direction[:, :, None]))[..., 0]

    def _slope(self, u: Tensor, space: Space) -> Tensor:
        """Jacobian of the outputs in z [m, C, q]."""
        slope = vmap(jacrev(lambda one: self.output(one[None])[0]))(u)
        return slope if space.basis is None else slope @ space.basis.T
