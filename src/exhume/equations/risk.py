"""The loss of one batch as a function of parameters, inputs and labels: gradient, and Hessian times directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exhume.equations.losses import Loss
from exhume.evidence import Forward
from exhume.functional import DenseChain

Shapes = Mapping[str, torch.Size]


def flatten(tree: Mapping[str, Tensor], shapes: Shapes) -> Tensor:
    """Concatenate parameters [*lead, *shape] to [*lead, P], in the order of `shapes`."""
    return torch.cat([tree[k].flatten(tree[k].dim() - len(shape)) for k, shape in shapes.items()], -1)


def unflatten(vector: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Views of a vector [*lead, P] as parameters [*lead, *shape]."""
    parts = vector.split([shape.numel() for shape in shapes.values()], -1)
    return {k: part.unflatten(-1, shape) for (k, shape), part in zip(shapes.items(), parts, strict=True)}


class Risk(Protocol):
    """R(theta, v, y) = scale * sum_i loss(f(v_i; theta), y_i), theta [P], v [b, *shape], y [b, C]."""

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of the parameters that theta holds, in order."""

    def gradient(self, theta: Tensor, v: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """R, and its gradient in theta [P]."""

    def push(
        self,
        theta: Tensor,
        v: Tensor,
        label: Tensor,
        d_theta: Tensor,
        d_v: Tensor,
        d_label: Tensor | None,
    ) -> Tensor:
        """Derivatives of the gradient in theta, [s, P], along s directions of theta, v and y (None is zero)."""

    def pull(
        self, theta: Tensor, v: Tensor, label: Tensor, direction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives of <direction, gradient in theta>, for a direction [P], by theta, v and y."""


def variation(
    forward: Forward, shapes: Shapes, loss: Loss, theta: Tensor, v: Tensor, label: Tensor, direction: Tensor
) -> Tensor:
    """<direction, gradient of each sample's part of R> [b], for a direction [P]; differentiable in v."""

    def parts(flat: Tensor) -> Tensor:
        return loss.scale(*label.shape) * loss.value(forward(unflatten(flat, shapes), v), label)

    return torch.func.jvp(parts, (theta,), (direction,))[1]


@dataclass(frozen=True, eq=False)
class DenseRisk:
    """The risk of a dense chain, by hand: no graph is built.

    Args:
        chain: the layers.
        shapes: names and shapes of the parameters.
        loss: of one sample, with the scale of a batch.
    """

    chain: DenseChain
    shapes: Shapes
    loss: Loss

    def _forward(
        self, params: Mapping[str, Tensor], v: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Activations a_0, ..., a_L, pre-activations u_l and slopes phi_l'(u_l)."""
        chain = self.chain
        a, pre, slopes = [v], [], []
        for weight, bias, phi in zip(chain.weights, chain.biases, chain.activations, strict=True):
            w = params[weight].T
            u = a[-1] @ w if bias is None else torch.addmm(params[bias], a[-1], w)
            value, slope = phi.value_and_slope(u)
            pre.append(u)
            a.append(value)
            slopes.append(slope)
        return a, pre, slopes

    def gradient(self, theta: Tensor, v: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Back-propagation."""
        params = unflatten(theta, self.shapes)
        a, _, slopes = self._forward(params, v)
        scale = self.loss.scale(*label.shape)
        error, found = scale * self.loss.slope(a[-1], label), {}
        for l in reversed(range(len(slopes))):
            weight, bias = self.chain.weights[l], self.chain.biases[l]
            delta = error if self.chain.activations[l].name == "identity" else error * slopes[l]
            found[weight] = delta.T @ a[l]
            if bias is not None:
                found[bias] = delta.sum(0)
            if l:
                error = delta @ params[weight]
        return scale * self.loss.value(a[-1], label).sum(), flatten(found, self.shapes)

    def push(
        self,
        theta: Tensor,
        v: Tensor,
        label: Tensor,
        d_theta: Tensor,
        d_v: Tensor,
        d_label: Tensor | None,
    ) -> Tensor:
        """Back-propagation, differentiated along the directions."""
        params, moved = unflatten(theta, self.shapes), unflatten(d_theta, self.shapes)
        return self._bend(params, v, label, moved, d_v, d_label)[0]

    def pull(
        self, theta: Tensor, v: Tensor, label: Tensor, direction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same derivative along (direction, 0, 0), of the gradients in v and y too: the Hessian is symmetric."""
        params, moved = unflatten(theta, self.shapes), unflatten(direction[None], self.shapes)
        found, delta, d_delta, d_label = self._bend(params, v, label, moved, None, None)
        first = self.chain.weights[0]
        return found[0], d_delta[0] @ params[first] + delta @ moved[first][0], d_label[0]

    def _bend(
        self,
        params: Mapping[str, Tensor],
        v: Tensor,
        label: Tensor,
        moved: Mapping[str, Tensor],
        d_v: Tensor | None,
        d_label: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Derivatives of back-propagation along s directions; a direction of None is zero.

        Returns:
            That of the gradient in theta [s, P], the first layer's signal delta_1 [b, w_1] and its derivative
            [s, b, w_1], and the derivative of the gradient in y [s, b, C].
        """
        chain = self.chain
        a, pre, slopes = self._forward(params, v)
        d_a, d_pre = [d_v], []
        for l, (weight, bias) in enumerate(zip(chain.weights, chain.biases, strict=True)):
            du = a[l] @ moved[weight].mT
            if (da := d_a[l]) is not None:
                du = du + da @ params[weight].T
            if bias is not None:
                du = du + moved[bias][:, None]
            d_pre.append(du)
            d_a.append(du * slopes[l])
        d_out = d_a.pop()
        assert d_out is not None
        scale = self.loss.scale(*label.shape)
        still = torch.zeros_like(d_out) if d_label is None else d_label
        d_error, d_own = (scale * d for d in self.loss.bend(a[-1], label, d_out, still))
        error, found = scale * self.loss.slope(a[-1], label), {}
        for l in reversed(range(len(slopes))):
            weight, bias, phi = chain.weights[l], chain.biases[l], chain.activations[l]
            delta, d_delta = error * slopes[l], d_error * slopes[l]
            if not phi.piecewise_linear:
                d_delta = d_delta + error * phi.curvature(pre[l]) * d_pre[l]
            found[weight] = d_delta.mT @ a[l]
            if (da := d_a[l]) is not None:
                found[weight] = found[weight] + delta.T @ da
            if bias is not None:
                found[bias] = d_delta.sum(1)
            if l:
                error, d_error = delta @ params[weight], d_delta @ params[weight] + delta @ moved[weight]
        return flatten(found, self.shapes), delta, d_delta, d_own


@dataclass(frozen=True, eq=False)
class ModuleRisk:
    """The risk of any pure forward function, by automatic differentiation of one batch.

    Args:
        forward: f(params, v) [b, C].
        shapes: names and shapes of the parameters.
        loss: of one sample, with the scale of a batch.
    """

    forward: Forward
    shapes: Shapes
    loss: Loss

    def _value(self, theta: Tensor, v: Tensor, label: Tensor) -> Tensor:
        scale = self.loss.scale(*label.shape)
        return scale * self.loss.value(self.forward(unflatten(theta, self.shapes), v), label).sum()

    def gradient(self, theta: Tensor, v: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Reverse mode."""
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            value = self._value(leaf, v, label)
            return value.detach(), torch.autograd.grad(value, leaf)[0]

    def push(
        self,
        theta: Tensor,
        v: Tensor,
        label: Tensor,
        d_theta: Tensor,
        d_v: Tensor,
        d_label: Tensor | None,
    ) -> Tensor:
        """Reverse over reverse, one direction at a time: the Hessian in (theta, v, y) is symmetric."""
        along = [d_theta, d_v] if d_label is None else [d_theta, d_v, d_label]
        with torch.enable_grad():
            point = [t.detach().requires_grad_() for t in (theta, v, label)]
            value = self._value(*point)
            slope = torch.autograd.grad(value, point[: len(along)], create_graph=True)
            rows = [
                torch.autograd.grad(slope, point[0], one, retain_graph=True)[0]
                for one in zip(*along, strict=True)
            ]
        return torch.stack(rows)

    def pull(
        self, theta: Tensor, v: Tensor, label: Tensor, direction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reverse over reverse."""
        with torch.enable_grad():
            point = [t.detach().requires_grad_() for t in (theta, v, label)]
            slope = torch.autograd.grad(self._value(*point), point[0], create_graph=True)
            by_theta, by_v, by_label = torch.autograd.grad(slope, point, direction, materialize_grads=True)
        return by_theta, by_v, by_label
