"""The span equation of a dense chain, by inner products of factors; no per-sample gradient is formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from exhume.dense import DenseNode, dense_node
from exhume.equations.base import Rows, Slope, slope
from exhume.equations.fold import frame_of
from exhume.equations.part import Part
from exhume.evidence import Parameters
from exhume.functional import DenseChain
from exhume.spaces import Space


@dataclass(frozen=True, eq=False)
class DenseSpan:
    """A span equation bound to a dense chain.

    Layer l contributes the block [scale_W DW_l, scale_b Db_l]; the vector space of residuals is the
    concatenation of the flattened blocks. The first block is expressed in an orthonormal basis of the space,
    so d columns shrink to q + 1.

    Args:
        nodes: the chain at each node v.
        keep: which layers give equations.
        names: parameter names of the weight and the bias of each kept layer; no bias where it gives no equation.
        blocks: target blocks, already scaled, one for each kept layer.
        scales: (weight, bias) scale of each kept layer; the bias scale is None without a bias.
        outside: squared norm of what the restriction cut off the target.
        units: hidden units of the first layer whose equations are used; None for all.
    """

    nodes: tuple[DenseNode, ...]
    keep: tuple[int, ...]
    names: tuple[tuple[str, str | None], ...]
    blocks: tuple[Tensor, ...]
    scales: tuple[tuple[float, float | None], ...]
    outside: float
    units: Tensor | None = None

    @cached_property
    def energy(self) -> float:
        """|t|^2."""
        return self.outside + sum(float((b * b).sum()) for b in self.blocks)

    @property
    def dim(self) -> int:
        """Number of coordinates of one candidate."""
        return self.nodes[0].weights[0].shape[1]

    @property
    def outputs(self) -> int:
        """Number of outputs C."""
        return self.nodes[0].weights[-1].shape[0]

    @property
    def multiplicity(self) -> int:
        """Nodes times outputs."""
        return len(self.nodes) * self.outputs

    @property
    def equations(self) -> int:
        """Number of equations."""
        return sum(b.numel() for b in self.blocks)

    def target(self) -> Tensor:
        """t [P]."""
        return torch.cat([b.flatten() for b in self.blocks])

    def vector(self, change: Parameters) -> Tensor:
        """A change of the folded net's parameters (see `fold`) as a vector like `target`, [P]."""
        return torch.cat([b.flatten() for b in self._blocks(change)])

    def aimed_at(self, target: Tensor) -> DenseSpan:
        """The same equation with another target [P]; what no candidate can reach stays."""
        return replace(self, blocks=tuple(self._split(target)))

    def _blocks(self, change: Parameters) -> list[Tensor]:
        """Scaled blocks of a change, the first layer's in the coordinates of the space."""
        blocks = []
        for l, (weight, bias), (scale, bias_scale) in zip(self.keep, self.names, self.scales, strict=True):
            block = scale * change[weight]
            if l == 0 and self.nodes[0].embed is not None:
                # A space through zero has no coordinate along its origin: the folded net leaves it out.
                block = F.pad(block, (0, self.nodes[0].embed.shape[1] - block.shape[1]))
            if bias is not None:
                assert bias_scale is not None
                block = torch.cat([block, bias_scale * change[bias][:, None]], 1)
            if self.units is not None and l == 0:
                block = block[self.units]
            if self.units is not None and l == 1:
                width = change[weight].shape[1]
                block = torch.cat([block[:, self.units], block[:, width:]], 1)
            blocks.append(block)
        return blocks

    def _split(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([b.numel() for b in self.blocks])
        return [v.view_as(b) for v, b in zip(parts, self.blocks, strict=True)]

    def _own(self, factor: Tensor, layer: int) -> Tensor:
        """Keep the used hidden units of a factor [..., w_1]; `layer` 0 is the first hidden layer."""
        # Without a second hidden layer the nodes hold the used units alone.
        whole = self.units is None or layer != 0 or len(self.nodes[0].weights) == 2
        return factor if whole else factor[..., self.units]

    def _scaled(self, right: Tensor, layer: int, constant: float = 1.0) -> Tensor:
        """Scale a right factor [..., r] and append its bias coordinate (constant 0 for a derivative)."""
        weight, bias = self.scales[layer]
        right = right * weight
        if bias is None:
            return right
        return torch.cat([right, right.new_full((*right.shape[:-1], 1), bias * constant)], -1)

    def _factors(self, z: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each kept layer, left [m, v, c, w] and right [m, v, r] factors of all gradients."""
        m, c = len(z), self.outputs
        head = torch.eye(c, dtype=z.dtype).expand(m, c, c)
        per_node = []
        for node in self.nodes:
            _, right, slope = node.forward(z)
            lefts = node.lefts(slope, head)
            per_node.append([(self._own(lefts[l], l), self._own(right[l], l - 1)) for l in self.keep])
        return [
            (
                torch.stack([factors[k][0] for factors in per_node], 1),
                torch.stack([self._scaled(factors[k][1], k) for factors in per_node], 1),
            )
            for k in range(len(self.keep))
        ]

    def rows(self, z: Tensor) -> Rows:
        """All gradients at z as factors: Phi Phi' is a sum over layers of (left Gram) * (right Gram)."""
        factors = self._factors(z)
        shape = factors[0][0].shape[:3]

        def gram() -> Tensor:
            total = z.new_zeros(shape.numel(), shape.numel())
            for left, right in factors:
                l, r = left.flatten(0, 2), right.flatten(0, 1)
                rr = (r @ r.T).repeat_interleave(shape[2], 0).repeat_interleave(shape[2], 1)
                total = total + (l @ l.T) * rr
            return total

        def inner(vector: Tensor) -> Tensor:
            total = z.new_zeros(shape)
            for (left, right), block in zip(factors, self._split(vector), strict=True):
                total = total + torch.einsum("mvcw,mvw->mvc", left, right @ block.T)
            return total.flatten(1)

        def contribution(coef: Tensor) -> Tensor:
            c, out = coef.view(shape), []
            for left, right in factors:
                combined = torch.einsum("mvc,mvcw->mvw", c, left).flatten(0, 1)
                out.append((combined.T @ right.flatten(0, 1)).flatten())
            return torch.cat(out)

        return Rows(gram, inner, contribution)

    def slope(self, z: Tensor, coef: Tensor) -> Slope:
        """The derivative of Phi' c, its graph kept."""
        return slope(lambda at: self.contribution(at, coef), z)

    def gram(self, z: Tensor) -> Tensor:
        """Phi Phi'."""
        return self.rows(z).gram()

    def inner(self, z: Tensor, vector: Tensor) -> Tensor:
        """Phi v, left' V right for each gradient."""
        return self.rows(z).inner(vector)

    def _combined(self, z: Tensor, coef: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each kept layer, left [m v, w] and right [m v, r] factors of the m v terms of Phi' c."""
        c = coef.view(len(z), len(self.nodes), self.outputs)
        per_node = []
        for v, node in enumerate(self.nodes):
            _, right, slope = node.forward(z)
            lefts = node.lefts(slope, c[:, v, None])
            per_node.append([(self._own(lefts[l][:, 0], l), self._own(right[l], l - 1)) for l in self.keep])
        return [
            (
                torch.cat([factors[k][0] for factors in per_node]),
                torch.cat([self._scaled(factors[k][1], k) for factors in per_node]),
            )
            for k in range(len(self.keep))
        ]

    def contribution(self, z: Tensor, coef: Tensor) -> Tensor:
        """Phi' c."""
        return torch.cat([(left.T @ right).flatten() for left, right in self._combined(z, coef)])

    def missed(self, z: Tensor, coef: Tensor) -> Tensor:
        """|t - Phi' c|^2 by the route that takes fewer multiplications; differentiable in both.

        Through Gram matrices of factors, |t|^2 - 2 <t, Phi' c> + |Phi' c|^2, Phi' c is never formed.
        """
        factors = self._combined(z, coef)
        if self.gram_is_cheaper(len(z)):
            parts = [
                ((left @ left.T) * (right @ right.T)).sum() - 2 * (left * (right @ block.T)).sum()
                for (left, right), block in zip(factors, self.blocks, strict=True)
            ]
            return self.energy + torch.stack(parts).sum()
        apart = [
            torch.addmm(block, left.T, right, alpha=-1)
            for (left, right), block in zip(factors, self.blocks, strict=True)
        ]
        return self.outside + torch.stack([d.square().sum() for d in apart]).sum()

    def gram_is_cheaper(self, m: int) -> bool:
        """Whether |t - Phi' c|^2 and its gradient take fewer multiplications through Gram matrices of factors.

        With s = m v terms, a layer of w x r numbers costs 2 s w r + 3 s^2 (w + r) that way, and 3 s w r by forming
        Phi' c, whose gradient is two more products.
        """
        s = m * len(self.nodes)
        shapes = [block.shape for block in self.blocks]
        return sum(3 * s * (w + r) for w, r in shapes) < sum(w * r for w, r in shapes)

    def potential(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """<v, c_i' Phi_i> of each candidate."""
        parts = [
            (left * (right @ block.T)).sum(1)
            for (left, right), block in zip(self._combined(z, coef), self._split(vector), strict=True)
        ]
        return torch.stack(parts).sum(0).view(len(self.nodes), len(z)).sum(0)

    def vjp(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """J' v, by reverse differentiation of the potential."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            return torch.autograd.grad(self.potential(leaf, coef, vector).sum(), leaf)[0]

    def _tangents(self, z: Tensor, coef: Tensor, direction: Tensor | None) -> list[tuple]:
        """For each kept layer: left [m, v, w], right [m, v, r], d left [m, v, s, w] or None, d right [m, v, s, r]."""
        c = coef.view(len(z), len(self.nodes), self.outputs)
        per_node = [node.tangents(z, direction, c[:, v]) for v, node in enumerate(self.nodes)]
        out = []
        for k, l in enumerate(self.keep):
            left = torch.stack([self._own(t[0][l], l) for t in per_node], 1)
            right = torch.stack([self._scaled(self._own(t[1][l], l - 1), k) for t in per_node], 1)
            moved = [self._own(d, l) for t in per_node if (d := t[2][l]) is not None]
            d_left = torch.stack(moved, 1) if moved else None
            d_right = torch.stack([self._scaled(self._own(t[3][l], l - 1), k, 0.0) for t in per_node], 1)
            out.append((left, right, d_left, d_right))
        return out

    def jvp(self, z: Tensor, coef: Tensor, direction: Tensor) -> Tensor:
        """J d = sum_i d left (x) right + left (x) d right."""
        out = []
        for left, right, d_left, d_right in self._tangents(z, coef, direction[:, None]):
            block = left.flatten(0, 1).T @ d_right.flatten(0, 2)
            if d_left is not None:
                block = block + d_left.flatten(0, 2).T @ right.flatten(0, 1)
            out.append(block.flatten())
        return torch.cat(out)

    def normal(self, z: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """J'J and J' Phi', again by products of factor Grams.

        Column (i, a) of J is sum_v d_a left_iv (x) right_iv + left_iv (x) d_a right_iv: one or two outer products
        per node, so each entry of J'J is a short sum of products of two inner products.
        """
        m, q = len(z), self.dim
        jj = z.new_zeros(m * q, m * q)
        jp = z.new_zeros(m * q, m * self.multiplicity)
        for (left, right, d_left, d_right), (head_left, head_right) in zip(
            self._tangents(z, coef, None), self._factors(z), strict=True
        ):
            if d_left is None and left.shape[2] < len(self.nodes) ** 2:
                _add_narrow(jj, jp, left, d_right, head_left, head_right)
            else:
                _add_outer(jj, jp, left, right, d_left, d_right, head_left, head_right)
        return jj, jp


def _add_narrow(
    jj: Tensor, jp: Tensor, left: Tensor, d_right: Tensor, head_left: Tensor, head_right: Tensor
) -> None:
    """A narrow layer: form its rows of J for each of its few outputs, nodes already summed."""
    for o in range(left.shape[2]):
        column = torch.einsum("mv,mvqr->mqr", left[:, :, o], d_right).flatten(0, 1)
        row = (head_left[..., o, None] * head_right[:, :, None]).flatten(0, 2)
        jj += column @ column.T
        jp += column @ row.T


def _add_outer(
    jj: Tensor,
    jp: Tensor,
    left: Tensor,
    right: Tensor,
    d_left: Tensor | None,
    d_right: Tensor,
    head_left: Tensor,
    head_right: Tensor,
) -> None:
    """A wide layer: J is a sum of outer products; multiply the Grams of their factors."""
    m, nodes, q, _ = d_right.shape

    def fold(t: Tensor) -> Tensor:
        return t.reshape(m * q, t.shape[-1]) if t.dim() == 3 else t.repeat_interleave(q, 0)

    # Terms of one column (i, a): a left and a right factor, of which one is differentiated. The undifferentiated
    # one is the same for all a, so its Gram is taken over samples and repeated.
    terms: list[tuple[Tensor, Tensor]] = []
    for v in range(nodes):
        terms.append((left[:, v], d_right[:, v]))
        if d_left is not None:
            terms.append((d_left[:, v], right[:, v]))

    def gram(a: Tensor, b: Tensor) -> Tensor:
        """Inner products of two factors, spread over (i, a) x (i', a')."""
        product = a.reshape(-1, a.shape[-1]) @ b.reshape(-1, b.shape[-1]).T
        if a.dim() == 2:
            product = product.repeat_interleave(q, 0)
        return product if b.dim() == 3 else product.repeat_interleave(q, 1)

    for s, (l1, r1) in enumerate(terms):
        for t, (l2, r2) in enumerate(terms[: s + 1]):
            part = gram(l1, l2) * gram(r1, r2)
            jj += part if s == t else part + part.T
    c = head_left.shape[2]
    heads_l, heads_r = head_left.flatten(0, 2), head_right.flatten(0, 1)
    for l, r in terms:
        ll = l.reshape(-1, l.shape[-1]) @ heads_l.T
        rr = (r.reshape(-1, r.shape[-1]) @ heads_r.T).repeat_interleave(c, 1)
        ll = ll.repeat_interleave(q, 0) if l.dim() == 2 else ll
        rr = rr.repeat_interleave(q, 0) if r.dim() == 2 else rr
        jp += ll * rr


def bind_dense(
    chain: DenseChain,
    params: Sequence[Parameters],
    target: Parameters,
    space: Space,
    layers: list[tuple[int, float, float | None]],
    part: Part | None = None,
) -> DenseSpan:
    """Restrict a chain and its target to a space and a part of the equations, and scale them.

    Args:
        chain: the dense layers.
        params: parameters at each node.
        target: t by parameter name.
        space: where the candidates live.
        layers: index, weight scale and bias scale (None for no equations) of each layer that gives equations.
        part: use only some of the equations; None uses all.
    """
    units = None if part is None else part.units
    rest = part is None or part.rest
    if not rest:
        # Equations of units alone: rows of the first layer, columns of the second.
        layers = [(l, scale, bias if l == 0 else None) for l, scale, bias in layers if l < 2]
    keep = [l for l, _, _ in layers]
    frame = None if space.basis is None else frame_of(space)
    folded, outside = dict(target), 0.0
    if frame is not None and keep[0] == 0:
        whole = target[chain.weights[0]]
        folded[chain.weights[0]] = inside = whole @ frame.T
        rows = slice(None) if units is None else units
        cut = float(whole[rows].square().sum() - inside[rows].square().sum())
        outside = max(layers[0][1] ** 2 * cut, 0.0)
    if units is not None and len(chain.weights) == 2:  # units of a single hidden layer do not see each other
        params = [_only(chain, p, units) for p in params]
    span = DenseSpan(
        nodes=tuple(dense_node(chain, p, space.origin, space.basis) for p in params),
        keep=tuple(keep),
        names=tuple((chain.weights[l], None if bias is None else chain.biases[l]) for l, _, bias in layers),
        blocks=(),
        scales=tuple((scale, bias) for _, scale, bias in layers),
        outside=outside,
        units=units,
    )
    return replace(span, blocks=tuple(span._blocks(folded)))


def _only(chain: DenseChain, params: Parameters, units: Tensor) -> Parameters:
    """Parameters of a chain with one hidden layer, with some of its units left."""
    (first, last), bias = chain.weights, chain.biases[0]
    cut = {first: params[first][units], last: params[last][:, units]}
    return {**params, **cut} if bias is None else {**params, **cut, bias: params[bias][units]}
