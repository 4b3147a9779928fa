"""The span equation of any module, by torch.func; chunked over candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from exhume.equations.base import Rows, Slope, slope
from exhume.evidence import Forward, Parameters
from exhume.spaces import Space


@dataclass(frozen=True, eq=False)
class ModuleSpan:
    """A span equation bound to a pure forward function.

    Args:
        forward: f(params, u) [m, C].
        params: parameters at each node.
        change: t by parameter name.
        space: where the candidates live.
        shape: shape of one model input.
        scale: equation weight of each parameter, or of each of its entries; zero drops an equation.
        chunk: candidates whose per-sample gradients are held at once.
    """

    forward: Forward
    params: Sequence[Parameters]
    change: Parameters
    space: Space
    shape: tuple[int, ...]
    scale: Mapping[str, Tensor]
    chunk: int = 16

    @property
    def energy(self) -> float:
        """|t|^2."""
        return float(self.target().square().sum())

    @property
    def outside(self) -> float:
        """Nothing is cut off: the equations are not restricted."""
        return 0.0

    @property
    def dim(self) -> int:
        """Number of coordinates of one candidate."""
        return self.space.dim

    @property
    def multiplicity(self) -> int:
        """Nodes times outputs."""
        z = torch.zeros(1, self.dim, dtype=torch.float64)
        return len(self.params) * self._heads(self.params[0], z).shape[1]

    @property
    def equations(self) -> int:
        """Number of equations."""
        return sum(p.numel() for p in self.change.values())

    def _heads(self, params: Parameters, z: Tensor) -> Tensor:
        return self.forward(params, self.space.expand(z).view(-1, *self.shape))

    def _flat(self, tree: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        return torch.cat([(self.scale[k] * tree[k]).flatten(lead) for k in self.change], lead)

    def _tree(self, vector: Tensor) -> Parameters:
        """A weight-space direction that pairs with gradients as `vector` pairs with scaled gradients."""
        parts = vector.split([p.numel() for p in self.change.values()])
        return {k: self.scale[k] * v.view_as(p) for (k, p), v in zip(self.change.items(), parts, strict=True)}

    def target(self) -> Tensor:
        """t [P]."""
        return self._flat(self.change)

    def vector(self, change: Parameters) -> Tensor:
        """A change of the parameters as a vector like `target`, [P]."""
        return self._flat(change)

    def aimed_at(self, target: Tensor) -> ModuleSpan:
        """The same equation with another target [P]; where the scale is zero there is no equation to change."""
        parts = target.split([p.numel() for p in self.change.values()])
        change = {
            k: torch.where(self.scale[k] > 0, v.view_as(p) / self.scale[k].clamp_min(1e-300), 0.0)
            for (k, p), v in zip(self.change.items(), parts, strict=True)
        }
        return replace(self, change=change)

    def _gradients(self, z: Tensor) -> Tensor:
        """All gradients of these candidates, [m, k, P]; for small m only."""
        per_node = []
        for params in self.params:
            jac = vmap(lambda one, p=params: jacrev(lambda w: self._heads(w, one[None])[0])(p))(z)
            per_node.append(self._flat(jac, 2))
        return torch.cat(per_node, 1)

    def gram(self, z: Tensor) -> Tensor:
        """Phi Phi', chunk by chunk."""
        chunks = z.split(self.chunk)
        rows = []
        for a in chunks:
            ga = self._gradients(a).flatten(0, 1)
            rows.append(torch.cat([ga @ self._gradients(b).flatten(0, 1).T for b in chunks], 1))
        return torch.cat(rows)

    def inner(self, z: Tensor, vector: Tensor) -> Tensor:
        """Phi v: one forward-mode derivative of the outputs along v, per node."""
        along = self._tree(vector)
        return torch.cat([jvp(lambda w: self._heads(w, z), (p,), (along,))[1] for p in self.params], 1)

    def contribution(self, z: Tensor, coef: Tensor) -> Tensor:
        """Phi' c: one reverse-mode derivative per node."""
        total = torch.zeros((), dtype=z.dtype)
        for params, c in zip(self.params, coef.chunk(len(self.params), 1), strict=True):
            pull = vjp(lambda w: self._heads(w, z), params)[1]
            total = total + self._flat(pull(c)[0])
        return total

    def potential(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """<v, c_i' Phi_i> of each candidate."""
        return (coef * self.inner(z, vector)).sum(1)

    def jvp(self, z: Tensor, coef: Tensor, direction: Tensor) -> Tensor:
        """Forward over reverse."""
        return jvp(lambda w: self.contribution(w, coef), (z,), (direction,))[1]

    def vjp(self, z: Tensor, coef: Tensor, vector: Tensor) -> Tensor:
        """J' v, by reverse differentiation of the potential."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            return torch.autograd.grad(self.potential(leaf, coef, vector).sum(), leaf)[0]

    def rows(self, z: Tensor) -> Rows:
        """The products as they are: gradients of all candidates at once would not fit."""
        return Rows(
            lambda: self.gram(z),
            lambda vector: self.inner(z, vector),
            lambda coef: self.contribution(z, coef),
        )

    def slope(self, z: Tensor, coef: Tensor) -> Slope:
        """The derivative of Phi' c, its graph kept."""
        return slope(lambda at: self.contribution(at, coef), z)

    def normal(self, z: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """J'J and J' Phi' with J formed column by column; for small problems."""
        m, q = z.shape
        jacobian = torch.stack([self.jvp(z, coef, e.view(m, q)) for e in torch.eye(m * q, dtype=z.dtype)])
        gradients = torch.cat([self._gradients(part) for part in z.split(self.chunk)]).flatten(0, 1)
        return jacobian @ jacobian.T, jacobian @ gradients.T
