"""Per-sample gradients of a dense chain as outer products, so that no gradient is ever formed.

The gradient of output c with respect to layer l at input i is  delta_l[i, c] (x) [a_{l-1}[i], 1],  a left factor
of width w_l times a right factor of width w_{l-1} (+1 with a bias). Inner products of gradients are products of
inner products of factors; everything below rests on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exhume.functional import Activation, DenseChain


@dataclass(frozen=True, eq=False)
class DenseNode:
    """A dense chain at one point of weight space, as a function of free coordinates z [m, q].

    The input is x = origin + z @ basis; the first layer is folded into `weights[0]` = W_1 basis' [w_1, q] and
    `biases[0]` = W_1 origin + b_1. The right factor of the first layer is z @ embed + offset, the coordinates
    of x in an orthonormal basis of the space it lives in.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    activations: tuple[Activation, ...]
    embed: Tensor | None
    offset: Tensor | None

    def _first_right(self, z: Tensor) -> Tensor:
        right = z if self.embed is None else z @ self.embed
        return right if self.offset is None else right + self.offset

    def forward(self, z: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return pre-activations u_l [m, w_l], right factors a_{l-1} and slopes phi_l'(u_l), layer by layer."""
        pre, right, slope = [], [self._first_right(z)], []
        a = z
        for weight, bias, phi in zip(self.weights, self.biases, self.activations, strict=True):
            u = a @ weight.T if bias is None else torch.addmm(bias, a, weight.T)
            a, s = phi.value_and_slope(u)
            pre.append(u)
            slope.append(s)
            right.append(a)
        return pre, right, slope

    def output(self, z: Tensor) -> Tensor:
        """Return the outputs of the last layer [m, w_L], without slopes."""
        a = z
        for weight, bias, phi in zip(self.weights, self.biases, self.activations, strict=True):
            a = phi.fn(F.linear(a, weight, bias))
        return a

    def lefts(self, slope: list[Tensor], head: Tensor) -> list[Tensor]:
        """Back-propagate heads: left factors delta_l [m, h, w_l] for output directions `head` [m, h, C]."""
        delta = head * slope[-1][:, None]
        out = [delta]
        for weight, s in zip(self.weights[:0:-1], slope[-2::-1], strict=True):
            delta = (delta @ weight) * s[:, None]
            out.append(delta)
        return out[::-1]

    def tangents(
        self, z: Tensor, direction: Tensor | None, head: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], list[Tensor]]:
        """Factors and their derivatives along directions in z, for one combined head per sample.

        Args:
            z: coordinates [m, q].
            direction: s directions per sample [m, s, q]; None means all q axes.
            head: combined output direction [m, C] (the multipliers).

        Returns:
            left [m, w_l], right [m, w_{l-1}], d left [m, s, w_l] or None where it vanishes, d right [m, s, .].
        """
        pre, right, slope = self.forward(z)
        left = [delta[:, 0] for delta in self.lefts(slope, head[:, None])]
        d_right, d_pre = self.pushed(z, slope, direction)
        d_left: list[Tensor | None] = []
        d_delta: Tensor | None = None
        for l in reversed(range(len(self.weights))):
            last = l == len(self.weights) - 1
            incoming = head if last else left[l + 1] @ self.weights[l + 1]
            moved = None if last or d_delta is None else (d_delta @ self.weights[l + 1]) * slope[l][:, None]
            if not self.activations[l].piecewise_linear:
                bent = (incoming * self.activations[l].curvature(pre[l]))[:, None] * d_pre[l]
                moved = bent if moved is None else moved + bent
            d_delta = moved
            d_left.append(d_delta)
        return left, right[:-1], d_left[::-1], d_right

    def pushed(
        self, z: Tensor, slope: list[Tensor], direction: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Derivatives of right factors [m, s, w_{l-1}] and pre-activations [m, s, w_l] along directions, by layer.

        Args:
            z: coordinates [m, q].
            slope: of the activations there, as from `forward`.
            direction: s directions per sample [m, s, q]; None means all q axes.
        """
        m = len(z)
        if direction is None:
            d_right = [self.embed_axes(z).expand(m, -1, -1)]
            du = self.weights[0].T.expand(m, -1, -1)
        else:
            d_right = [direction if self.embed is None else direction @ self.embed]
            du = direction @ self.weights[0].T
        d_pre = [du]
        for weight, s in zip(self.weights[1:], slope[:-1], strict=True):
            d_right.append(du * s[:, None])
            du = d_right[-1] @ weight.T
            d_pre.append(du)
        return d_right, d_pre

    def embed_axes(self, z: Tensor) -> Tensor:
        """Derivative of the first right factor along the q axes, [q, r]."""
        return torch.eye(z.shape[1], dtype=z.dtype) if self.embed is None else self.embed


def dense_node(
    chain: DenseChain, params: Mapping[str, Tensor], origin: Tensor | None, basis: Tensor | None
) -> DenseNode:
    """Fold x = origin + z @ basis into the first layer of a chain with parameters `params` (float64)."""
    weights = [params[name] for name in chain.weights]
    biases = [None if name is None else params[name] for name in chain.biases]
    embed, offset = None, origin
    first = weights[0]
    if origin is not None:
        shift = first @ origin
        biases[0] = shift if biases[0] is None else biases[0] + shift
    if basis is not None:
        weights[0] = first @ basis.T
        q = len(basis)
        embed = torch.eye(q, q + 1, dtype=basis.dtype)
        offset = basis.new_zeros(q + 1)
        offset[-1] = 0.0 if origin is None else origin.norm()
    return DenseNode(tuple(weights), tuple(biases), chain.activations, embed, offset)
