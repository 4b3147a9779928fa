"""The feature equation: a sample's hidden features lie in the row space of the second-layer change.

[DW_2, Db_2] = sum_t sum_i delta_2(x_i; theta_t) (phi(W_1(t) x_i + b_1(t)), 1)'

Features move far less in training than signals do, and steadily where signals jump with every gate, so the leading
rows hold the features at all times: n of them where the first layer stood still, a few times n otherwise. Ours; it
needs a second layer, and more units than samples in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.change import Decay, decayed_target, rounding
from exhume.dense import DenseNode, dense_node
from exhume.equations.subspace import BoundSubspace
from exhume.evidence import Evidence
from exhume.spaces import Space

SPARE = 4  # rows a search uses beyond one for each missing sample: the last ones are weaker than what moved
SAME = 0.1  # relative distance below which two candidates are one


@dataclass(frozen=True, eq=False)
class Hidden:
    """(phi(W_1 x + b_1), 1) of each candidate at all nodes.

    Args:
        nodes: the first layer at each node.
        units: hidden units that are used; None for all.
        bias: whether the constant is there, which it is where the second layer has a bias.
    """

    nodes: tuple[DenseNode, ...]
    units: Tensor | None
    bias: bool

    def _own(self, features: Tensor) -> Tensor:
        return features if self.units is None else features[..., self.units]

    def at(self, z: Tensor) -> Tensor:
        """Features [m, k, w]."""
        used = torch.stack([self._own(node.forward(z)[1][1]) for node in self.nodes], 1)
        return torch.cat([used, used.new_ones(*used.shape[:-1], 1)], -1) if self.bias else used

    def slope(self, z: Tensor, mixture: Tensor) -> Tensor:
        """Derivative of the mixed features [m, q, w]; it is the large array here, so it is filled in place."""
        parts = [
            (self._own(share[:, None] * node.forward(z)[2][0])[:, None], self._own(node.weights[0].T))
            for node, share in zip(self.nodes, mixture.T, strict=True)
        ]
        width = parts[0][1].shape[1]
        whole = z.new_zeros(len(z), z.shape[1], width + self.bias)
        for gates, weights in parts:
            whole[..., :width].addcmul_(gates, weights)
        return whole


@dataclass(frozen=True, eq=False)
class BoundFeature(BoundSubspace):
    """The feature equation at fixed evidence.

    Args:
        rows: right singular vectors of the second-layer change times singular values [w, R], `found` projected out.
        left: number of samples not found yet.
    """

    rows: Tensor
    left: int

    @property
    def missing(self) -> int:
        """Number of samples not found yet."""
        return self.left

    def without(self, z: Tensor) -> BoundFeature:
        """Project out the features of samples found at z [f, q] at all nodes, and take the rows that then lead.

        Strong samples move by more than weak ones amount to: what leads after them is the weak ones.
        """
        if len(z) == 0:
            return self
        vectors = self.project(self.vectors.at(z)).flatten(0, 1)
        found = torch.linalg.qr(torch.cat([self.found, vectors.T], 1))[0]
        rows = self.rows - found @ (found.T @ self.rows)
        left = max(self.left - len(z), 0)
        columns = leading(rows, left + SPARE) if left else rows[:, :0]
        return replace(self, columns=columns, found=found, rows=rows, left=left)

    def distinct(self, z: Tensor, probe: Tensor) -> Tensor:
        """Relative score of each candidate [m]; 1 for one that nearly coincides with a better one."""
        score = self.relative(z, probe)
        nearer = torch.cdist(z, z) < SAME * z.norm(dim=1, keepdim=True)
        copied = nearer & (score[None] < score[:, None])
        return torch.where(copied.any(1), torch.ones_like(score), score)


def leading(rows: Tensor, most: int) -> Tensor:
    """Orthonormal basis [w, k <= most] of the leading left singular vectors of rows [w, R]."""
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    used = (values > 1e-12 * values[-1].clamp_min(1e-300)).nonzero()[:, 0].flip(0)[:most]
    return torch.linalg.qr(rows @ vectors[:, used])[0]


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The leading rows of the second-layer change.

    Args:
        rows: right singular vectors times singular values [w_1 (+ 1), R].
        samples: number of samples n.
        bias: whether the last coordinate is that of the bias.
        units: hidden units of the first layer that are used; None for all.
    """

    rows: Tensor
    samples: int
    bias: bool
    units: Tensor | None


@dataclass(frozen=True)
class Feature:
    """Configuration of the feature equation.

    Args:
        nodes: where features are taken, as fractions of the chord from theta_0 to theta_f.
        times: rows kept for each sample, whose features move in training.
        spare: equations that must be left for each unknown.
    """

    nodes: tuple[float, ...] = (0.0, 1.0)
    times: int = 4
    spare: float = 2.0

    def room(self, evidence: Evidence, space: Space, samples: int) -> int:
        """Rows that can be kept, by the shapes alone; 0 where they cannot hold or tell that many samples."""
        chain = evidence.chain
        if chain is None or len(chain.weights) < 2 or chain.smoothed(1.0).activations[0].piecewise_linear:
            return 0
        outer, inner = evidence.final[chain.weights[1]].shape
        most = min(self.times * samples, outer, int(inner - self.spare * space.dim))
        return most if most >= samples else 0

    def rows(
        self, evidence: Evidence, decay: Decay, space: Space, samples: int, units: Tensor | None = None
    ) -> RowSpace | None:
        """The leading rows of the second-layer change; None where they cannot hold or tell that many samples.

        Args:
            evidence: must have a dense chain.
            decay: what is left of the initialisation.
            space: where the candidates live.
            samples: number of samples n.
            units: hidden units of the first layer to use; None for all. The others are not looked at.
        """
        most = self.room(evidence, space, samples)
        if not most:
            return None
        chain = evidence.chain
        assert chain is not None
        target, name = decayed_target(evidence, decay), chain.biases[1]
        change = target[chain.weights[1]] if units is None else target[chain.weights[1]][:, units]
        bias = None if name is None or decay.weight != decay.bias else target[name]
        if bias is not None:
            change = torch.cat([change, bias[:, None]], 1)
        values, right = _leading_svd(change, most)
        rank = int((values > rounding(evidence, change, chain.weights[1])).sum())
        if rank < samples:
            return None
        return RowSpace(right[:, :rank] * values[:rank], samples, bias is not None, units)

    def bind(self, evidence: Evidence, known: RowSpace, space: Space, whole: bool = False) -> BoundFeature:
        """Fix the evidence.

        Args:
            evidence: must have a dense chain.
            known: see `rows`.
            space: where the candidates live.
            whole: use all the rows, for placing a sample, rather than one for each sample, for seeking.
        """
        chain = evidence.chain
        assert chain is not None
        first = replace(
            chain, weights=chain.weights[:1], biases=chain.biases[:1], activations=chain.activations[:1]
        )
        nodes = tuple(dense_node(first, evidence.at(v), space.origin, space.basis) for v in self.nodes)
        rows = known.rows
        columns = torch.linalg.qr(rows / rows.norm(dim=0))[0] if whole else leading(rows, known.samples)
        vectors = Hidden(nodes, known.units, known.bias)
        return BoundFeature(vectors, columns, columns[:, :0], rows, known.samples)


def _leading_svd(matrix: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Leading singular values [k] and right singular vectors [w, k], k <= most."""
    if 3 * most > min(matrix.shape):
        values, right = torch.linalg.svd(matrix, full_matrices=False)[1:]
        return values[:most], right[:most].T
    # The spectrum falls fast, so that a few power iterations tell the leading part to rounding.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        _, values, right = torch.svd_lowrank(matrix, most + 10, niter=4)
    return values[:most], right[:, :most]
