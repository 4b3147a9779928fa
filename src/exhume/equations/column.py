"""The column equation: a sample's back-propagated signal lies in the column space of the first-layer change.

[DW_1, Db_1] = sum_i delta_i (x_i, 1)'  with delta_i the accumulated signal delta_1(x_i; theta) of sample i, so
while its rank equals n, every delta_i lies in its column space. Signals are taken at nodes on the chord. Ours; it
needs n below the rank limit of the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.change import FirstLayer
from exhume.dense import DenseNode, dense_node
from exhume.equations.subspace import BoundSubspace
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence
from exhume.spaces import Space

UNEXPLAINED = (
    0.5  # sine of the angle between a direction and the signals found, above which it is still missing
)


@dataclass(frozen=True, eq=False)
class Signals:
    """delta_1 of each candidate at all nodes and outputs.

    Args:
        nodes: the chain at each node.
        units: hidden units of the first layer that are used, [w]; None for all.
    """

    nodes: tuple[DenseNode, ...]
    units: Tensor | None

    def _own(self, signals: Tensor) -> Tensor:
        return signals if self.units is None else signals[..., self.units]

    def at(self, z: Tensor) -> Tensor:
        """Signals [m, k, w]."""
        c = self.nodes[0].weights[-1].shape[0]
        head = torch.eye(c, dtype=z.dtype).expand(len(z), c, c)
        return torch.cat([self._own(node.lefts(node.forward(z)[2], head)[0]) for node in self.nodes], 1)

    def slope(self, z: Tensor, mixture: Tensor) -> Tensor:
        """Derivative of the mixed signal [m, q, w]."""
        slopes = []
        for node, head in zip(self.nodes, mixture.chunk(len(self.nodes), 1), strict=True):
            d_left = node.tangents(z, None, head)[2][0]
            if d_left is None:
                raise MissingEvidence(
                    "the column equation needs a signal that varies with the input, but this activation is"
                    " piecewise linear; bind it with smoothing"
                )
            slopes.append(self._own(d_left))
        return torch.stack(slopes).sum(0)


@dataclass(frozen=True, eq=False)
class BoundColumn(BoundSubspace):
    """The column equation at fixed evidence; its columns are one direction for each sample."""

    @property
    def missing(self) -> int:
        """Number of samples not found yet, as the directions left unexplained say."""
        return self.columns.shape[1]

    def without(self, z: Tensor) -> BoundColumn:
        """Project out the signals of samples found at z [f, q].

        A direction of the column space stays unless it lies within 30 degrees of what was projected out, so a
        spurious candidate does not use up a direction.
        """
        if len(z) == 0:
            return self
        found = torch.linalg.qr(torch.cat([self.found, self.mixed(z).T], 1))[0]
        rest = self.columns - found @ (found.T @ self.columns)
        left, values, _ = torch.linalg.svd(rest, full_matrices=False)
        return replace(self, columns=left[:, values > UNEXPLAINED], found=found)

    def distinct(self, z: Tensor, probe: Tensor) -> Tensor:
        """Relative score of each candidate with all the others projected out, [m]: near 1 if it adds no signal."""
        index = torch.arange(len(z))
        return torch.cat([self.without(z[index != i]).relative(z[i : i + 1], probe) for i in index.tolist()])


@dataclass(frozen=True)
class Column:
    """Configuration of the column equation.

    Args:
        nodes: where signals are taken, as fractions of the chord from theta_0 to theta_f.
    """

    nodes: tuple[float, ...] = (0.0, 1.0)

    def bind(
        self,
        evidence: Evidence,
        first: FirstLayer,
        space: Space,
        smoothing: float | None,
        units: Tensor | None = None,
    ) -> BoundColumn:
        """Fix the evidence.

        Args:
            evidence: must have a dense chain.
            first: the decomposed first-layer change.
            space: where the candidates live.
            smoothing: slope of the softplus in place of ReLU; without it a ReLU net's score has no slope.
            units: hidden units of the first layer to use; None for all.
        """
        assert evidence.chain is not None
        chain = evidence.chain.smoothed(smoothing)
        nodes = tuple(dense_node(chain, evidence.at(v), space.origin, space.basis) for v in self.nodes)
        columns = first.columns if units is None else torch.linalg.qr(first.columns[units])[0]
        return BoundColumn(Signals(nodes, units), columns, columns[:, :0])
