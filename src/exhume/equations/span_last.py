"""The span equation of the last layer of any model that ends in a linear layer.

The gradient of output c with respect to [W, b] is e_c (x) [h(u), 1], so the equation is a product of two matrices,

[DW, Db] = sum_v A_v' H_v,   A_v the multipliers [m, C] at node v, H_v the features [m, w + 1] there

and its Gram matrix is H H' (x) I: all C outputs share one elimination, and the m C gradients of C w numbers are
never formed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from exhume.dense import DenseNode
from exhume.equations.base import Rows, Slope, slope
from exhume.equations.part import Part
from exhume.evidence import Forward, Parameters
from exhume.spaces import Space


class Features(Protocol):
    """The features h of a model at one node, as a function of free coordinates z [m, q]."""

    def at(self, z: Tensor) -> Tensor:
        """h [m, w]; differentiable."""

    def along(self, z: Tensor, direction: Tensor | None) -> Tensor:
        """Derivative of h along s directions per candidate [m, s, q], None for all q axes: [m, s, w]."""


@dataclass(frozen=True, eq=False)
class ChainFeatures:
    """Outputs of dense layers.

    Args:
        node: the layers below the last, folded into the space.
    """

    node: DenseNode

    def at(self, z: Tensor) -> Tensor:
        """h [m, w]."""
        return self.node.output(z)

    def along(self, z: Tensor, direction: Tensor | None) -> Tensor:
        """Layer by layer."""
        slope = self.node.forward(z)[2]
        return self.node.pushed(z, slope, direction)[1][-1] * slope[-1][:, None]


@dataclass(frozen=True, eq=False)
class ModuleFeatures:
    """What the last linear layer of a module is given.

    Args:
        features: h(params, u) [m, w].
        params: parameters at the node.
        space: where the candidates live.
        shape: shape of one model input.
    """

    features: Forward
    params: Parameters
    space: Space
    shape: tuple[int, ...]

    def at(self, z: Tensor) -> Tensor:
        """h [m, w]."""
        return self.features(self.params, self.space.expand(z).view(-1, *self.shape))

    def along(self, z: Tensor, direction: Tensor | None) -> Tensor:
        """By reverse differentiation twice: not every layer can be differentiated forward."""
        m, q = z.shape
        steps = torch.eye(q, dtype=z.dtype).expand(m, q, q) if direction is None else direction
        push = slope(self.at, z).jvp
        return torch.stack([push(step) for step in steps.unbind(1)], 1)


@dataclass(frozen=True, eq=False)
class LastSpan:
    """A span equation bound to the last layer.

    Args:
        nodes: the features at each node v.
        names: parameter names of W and of b; no b where it gives no equation.
        scales: equation weights of the two; the second is None without b.
        block: the target [scale_W DW, scale_b Db], [C, r].
        dim: number of coordinates q of one candidate.
        units: features whose equations are used; None for all.
    """

    nodes: tuple[Features, ...]
    names: tuple[str, str | None]
    scales: tuple[float, float | None]
    block: Tensor
    dim: int
    units: Tensor | None = None

    @property
    def energy(self) -> float:
        """|t|^2."""
        return float(self.block.square().sum())

    @property
    def outside(self) -> float:
        """Nothing is cut off: a space restricts inputs, not features."""
        return 0.0

    @property
    def multiplicity(self) -> int:
        """Nodes times outputs."""
        return len(self.nodes) * len(self.block)

    @property
    def equations(self) -> int:
        """Number of equations."""
        return self.block.numel()

    def target(self) -> Tensor:
        """t [P]."""
        return self.block.flatten()

    def vector(self, change: Parameters) -> Tensor:
        """A change of the parameters as a vector like `target`, [P]."""
        (weight, bias), (scale, bias_scale) = self.names, self.scales
        block = scale * self._own(change[weight])
        if bias is not None and bias_scale is not None:
            block = torch.cat([block, bias_scale * change[bias][:, None]], 1)
        return block.flatten()

    def aimed_at(self, target: Tensor) -> LastSpan:
        """The same equation with another target [P]."""
        return replace(self, block=target.view_as(self.block))

    def _own(self, features: Tensor) -> Tensor:
        return features if self.units is None else features[..., self.units]

    def _scaled(self, features: Tensor, constant: float) -> Tensor:
        """Scale features [..., w] and append the coordinate of the bias (0 for a derivative): [..., r]."""
        scale, bias = self.scales
        features = scale * self._own(features)
        if bias is None:
            return features
        return torch.cat([features, features.new_full((*features.shape[:-1], 1), bias * constant)], -1)

    def _features(self, z: Tensor) -> Tensor:
        """H [m, v, r]."""
        return self._scaled(torch.stack([node.at(z) for node in self.nodes], 1), 1.0)

    def _moved(self, z: Tensor, direction: Tensor | None) -> Tensor:
        """Derivative of H along directions, [m, v, s, r]."""
        return self._scaled(torch.stack([node.along(z, direction) for node in self.nodes], 1), 0.0)

    def _by_output(self, coef: Tensor) -> Tensor:
        """A [m, v, C]."""
        return coef.view(len(coef), len(self.nodes), len(self.block))

    def rows(self, z: Tensor) -> Rows:
        """The features at z, for all products."""
        h = self._features(z)
        flat = h.flatten(0, 1)
        return Rows(
            lambda: flat @ flat.T,
            lambda vector: (h @ vector.view_as(self.block).T).flatten(1),
            lambda coef: (self._by_output(coef).flatten(0, 1).T @ flat).flatten(),
        )

    def gram(self, z: Tensor) -> Tensor:
        """H H' [m v, m v], the same for every output."""
        return self.rows(z).gram()

    def inner(self, z: Tensor, vector: Tensor) -> Tensor:
        """Phi v = H V'."""
        return self.rows(z).inner(vector)

    def contribution(self, z: Tensor, coef: Tensor) -> Tensor:
        """Phi' c = A' H."""
        return self.rows(z).contribution(coef)

    def potential(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """<v, c_i' Phi_i> of each candidate, A V . H."""
        return (self._features(z) * (self._by_output(coef) @ vector.view_as(self.block))).sum((1, 2))

    def jvp(self, z: Tensor, coef: Tensor, direction: Tensor) -> Tensor:
        """J d = A' dH."""
        moved = self._moved(z, direction[:, None])[:, :, 0]
        return (self._by_output(coef).flatten(0, 1).T @ moved.flatten(0, 1)).flatten()

    def vjp(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """J' v, by reverse differentiation of the potential."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            return torch.autograd.grad(self.potential(leaf, coef, vector).sum(), leaf)[0]

    def slope(self, z: Tensor, coef: Tensor) -> Slope:
        """The derivative of Phi' c, its graph kept."""
        return slope(lambda at: self.contribution(at, coef), z)

    def normal(self, z: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """J'J and J' Phi'.

        Column (i, a) of J is sum_v A_iv (x) d_a h_iv, so that an entry of J'J is a sum over pairs of nodes of inner
        products of multipliers times inner products of derivatives: its cost does not grow with C.
        """
        m, q = z.shape
        a, h, d = self._by_output(coef), self._features(z), self._moved(z, None)
        nodes, outputs = a.shape[1:]
        if outputs < nodes**2:  # few outputs: sum the nodes first, for each of them
            columns = torch.einsum("mvc,mvqr->cmqr", a, d).flatten(1, 2)
            jj = torch.stack([column @ column.T for column in columns]).sum(0)
        else:
            derivatives, multipliers = d.flatten(0, 2), a.flatten(0, 1)
            gram = (derivatives @ derivatives.T).view(m, nodes, q, m, nodes, q)
            pairs = (multipliers @ multipliers.T).view(m, nodes, 1, m, nodes, 1)
            jj = (pairs * gram).sum((1, 4)).view(m * q, m * q)
        along = d @ h.flatten(0, 1).T  # [m, v, q, m v]
        return jj, torch.einsum("mvc,mvqs->mqsc", a, along).reshape(m * q, m * self.multiplicity)


def bind_last(
    nodes: tuple[Features, ...],
    names: tuple[str, str | None],
    scales: tuple[float, float | None],
    target: Parameters,
    dim: int,
    part: Part | None,
) -> LastSpan:
    """Scale the change of the last layer, and keep a part of its equations.

    Args:
        nodes: the features at each node.
        names: parameter names of W and b.
        scales: weight of the equations of each; None for no equations of b.
        target: t by parameter name.
        dim: number of coordinates of one candidate.
        part: use only some of the features; None uses all.
    """
    (weight, bias), (scale, bias_scale) = names, scales
    if bias_scale is None or (part is not None and not part.rest):
        bias, bias_scale = None, None
    units = None if part is None else part.units
    span = LastSpan(nodes, (weight, bias), (scale, bias_scale), target[weight][:, :0], dim, units)
    return replace(span, block=span.vector(target).view(len(target[weight]), -1))
