"""The column equation: a sample's back-propagated signal lies in the column space of the first-layer change.

[DW_1, Db_1] = sum_i delta_i (x_i, 1)'  with delta_i the accumulated signal delta_1(x_i; theta) of sample i, so
while its rank equals n, every delta_i lies in its column space. Taking delta at nodes on the chord,

score(z) = min_e |P_perp F(z)' e|^2 / |F(z)' e|^2,   F(z) [k, w] the signals at all nodes and outputs

vanishes at a training sample and not elsewhere: one equation per candidate, of q unknowns each, instead of one
joint fit of m q unknowns. It is the subspace idea of MUSIC (Schmidt, IEEE Trans. Antennas Propag. 1986) carried
over to weights, and ours; it needs n below the rank limit of the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.change import FirstLayer
from exhume.dense import DenseNode, dense_node
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence
from exhume.spaces import Space

UNEXPLAINED = (
    0.5  # sine of the angle between a direction and the signals found, above which it is still missing
)


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A batch of independent least-squares problems at one point.

    Args:
        value: objective of each [m].
        gradient: [m, q].
        curvature: Gauss-Newton Hessian [m, q, q].
    """

    value: Tensor
    gradient: Tensor
    curvature: Tensor


@dataclass(frozen=True, eq=False)
class BoundColumn:
    """The column equation at fixed evidence.

    Args:
        nodes: the chain at each node.
        units: hidden units of the first layer that are used, [w]; None for all.
        columns: orthonormal basis [w, r] of the column space, without what `found` explains.
        found: orthonormal basis [w, f] of the signals of samples already found; they are projected out.
    """

    nodes: tuple[DenseNode, ...]
    units: Tensor | None
    columns: Tensor
    found: Tensor

    def _project(self, signals: Tensor) -> Tensor:
        """Remove the signals already found from [..., w]."""
        return signals - (signals @ self.found) @ self.found.T if self.found.shape[1] else signals

    def _own(self, signals: Tensor) -> Tensor:
        return signals if self.units is None else signals[..., self.units]

    def _signals(self, z: Tensor) -> Tensor:
        """delta_1 at all nodes and outputs, [m, k, w], found ones projected out."""
        c = self.nodes[0].weights[-1].shape[0]
        head = torch.eye(c, dtype=z.dtype).expand(len(z), c, c)
        signals = torch.cat([self._own(node.lefts(node.forward(z)[2], head)[0]) for node in self.nodes], 1)
        return self._project(signals)

    def mixed(self, z: Tensor) -> Tensor:
        """The signal of the best mixture at each candidate, unit length, [m, w]."""
        signals = torch.einsum("mk,mkw->mw", self._best_mixture(z)[1], self._signals(z))
        return signals / signals.norm(dim=1, keepdim=True).clamp_min(1e-30)

    def without(self, z: Tensor) -> BoundColumn:
        """Project out the signals of samples found at z [f, q], so that a search meets only the others.

        A direction of the column space stays unless it lies within 30 degrees of what was projected out, so a
        spurious candidate does not use up a direction. At a found sample the signal vanishes and the score is
        large: found samples repel (recursively applied and projected MUSIC, Mosher and Leahy, IEEE Trans.
        Signal Process. 1999).
        """
        if len(z) == 0:
            return self
        found = torch.linalg.qr(torch.cat([self.found, self.mixed(z).T], 1))[0]
        rest = self.columns - found @ (found.T @ self.columns)
        left, values, _ = torch.linalg.svd(rest, full_matrices=False)
        return BoundColumn(self.nodes, self.units, left[:, values > UNEXPLAINED], found)

    @property
    def missing(self) -> int:
        """Number of samples not found yet, as the directions left unexplained say."""
        return self.columns.shape[1]

    def _best_mixture(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The score [m] and the mixture e [m, k] that attains it, with |F' e| = 1."""
        signals = self._signals(z)
        inside = signals @ self.columns
        total = signals @ signals.mT
        missed = total - inside @ inside.mT
        # A dead candidate (no active unit) has no signal at all: the ridge makes its score 1.
        size = total.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_min(1e-30)
        ridge = 1e-10 * size * torch.eye(total.shape[1], dtype=z.dtype)
        factor = torch.linalg.cholesky(total + ridge)
        half = torch.linalg.solve_triangular(factor, missed + ridge, upper=False)
        values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
        mixture = torch.linalg.solve_triangular(factor.mT, vectors[:, :, :1], upper=True)[..., 0]
        return values[:, 0], mixture

    def typical(self, z: Tensor) -> float:
        """Root mean square pre-activation of the first layer at candidates z, the unit of a smoothing slope."""
        pre = torch.stack([node.forward(z)[0][0] for node in self.nodes])
        return float(pre.square().mean().sqrt())

    def relative(self, z: Tensor, probe: Tensor) -> Tensor:
        """Score of each candidate over the median score of random points `probe` [p, q], [m].

        The ratio is what tells a sample from chance: where the signal hardly varies with the input (a tanh net
        near its linear range), every score is small.
        """
        # Where random points fit too, as on a set that hardly holds anything else, all fit.
        return self.score(z) / self.score(probe).median().clamp_min(1e-3)

    def distinct(self, z: Tensor, probe: Tensor) -> Tensor:
        """Relative score of each candidate with all the others projected out, [m]: near 1 if it adds no signal."""
        index = torch.arange(len(z))
        return torch.cat([self.without(z[index != i]).relative(z[i : i + 1], probe) for i in index.tolist()])

    def score(self, z: Tensor) -> Tensor:
        """Share of the best mixture's energy outside the column space, [m]."""
        return self._best_mixture(z)[0]

    def expand(self, z: Tensor) -> Quadratic:
        """Gauss-Newton expansion of every score, its mixture held fixed (it is optimal, so the gradient is exact)."""
        value, mixture = self._best_mixture(z)
        parts = mixture.chunk(len(self.nodes), 1)
        signal = z.new_zeros(len(z), self.columns.shape[0])
        slope = z.new_zeros(len(z), z.shape[1], self.columns.shape[0])
        for node, head in zip(self.nodes, parts, strict=True):
            left, _, d_left, _ = node.tangents(z, None, head)
            signal = signal + self._own(left[0])
            if d_left[0] is None:
                raise MissingEvidence(
                    "the column equation needs a signal that varies with the input, but this activation is"
                    " piecewise linear; bind it with smoothing"
                )
            slope = slope + self._own(d_left[0])
        signal, slope = self._project(signal), self._project(slope)
        signal = signal / signal.norm(dim=1, keepdim=True).clamp_min(1e-30)
        along = torch.einsum("mqw,mw->mq", slope, signal)
        residual = signal - (signal @ self.columns) @ self.columns.T
        inside = slope @ self.columns
        # J = P_perp (slope - signal along'); products expanded so that no second [m, q, w] array is formed.
        cross = torch.einsum("mqw,mw->mq", slope, residual)
        energy = (residual * residual).sum(1)
        jj = slope @ slope.mT - inside @ inside.mT
        jj = jj - along[:, :, None] * cross[:, None] - cross[:, :, None] * along[:, None]
        jj = jj + energy[:, None, None] * along[:, :, None] * along[:, None]
        return Quadratic(value, 2 * (cross - energy[:, None] * along), 2 * jj)


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
        return BoundColumn(nodes, units, columns, columns[:, :0])
