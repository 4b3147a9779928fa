"""The leverage equation: hidden features of a training sample have little leverage on the second layer.

W_2 = sum_i delta_2(x_i) h(x_i)',  h = phi(W_1 x + b_1),  at a stationary point of training with weight decay

l(x) = min_a (|h - W_2' a|^2 + eps^2 |a|^2) / |h|^2 = eps^2 h' (W_2' W_2 + eps^2 I)^-1 h / |h|^2

It is the ridge leverage score of h (Alaoui and Mahoney, NeurIPS 2015), near zero at training samples for every eps
and not elsewhere. The feature equation asks whether h lies in the leading rows of W_2; where the second layer
condenses, its spectrum falls without a gap and no number of rows is right, while a penalty on a needs none. A large
eps sees the strong directions alone and is smooth; a small one is sharp. Kinks of ReLU do not matter: whatever the
gates of layer 2, W_2 is a sum of outer products with h itself. Ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.dense import dense_node
from exhume.equations.feature import Hidden
from exhume.equations.subspace import Quadratic
from exhume.evidence import Evidence
from exhume.functional import DenseChain
from exhume.spaces import Space


@dataclass(frozen=True, eq=False)
class Resolved:
    """The leverage at one eps.

    Args:
        vectors: h of a candidate.
        found: orthonormal basis [w, f] of the features of samples already found; they are projected out.
        root: R [w, k] with l(x) = |R' h|^2 / |h|^2.
    """

    vectors: Hidden
    found: Tensor
    root: Tensor

    def value(self, z: Tensor) -> Tensor:
        """Leverage of each candidate [m]."""
        return (self._features(z)[0] @ self.root).square().sum(1)

    def expand(self, z: Tensor) -> Quadratic:
        """Gauss-Newton expansion of every leverage."""
        unit, size = self._features(z)
        slope = self.vectors.slope(z, torch.ones_like(size)) / size[:, :, None]
        # The derivative of h / |h|; the projection off `found` is in the root already.
        along = slope @ unit[:, :, None]
        slope = (slope - along * unit[:, None]) @ self.root
        rest = unit @ self.root
        gradient = 2 * (slope @ rest[:, :, None])[..., 0]
        return Quadratic(rest.square().sum(1), gradient, 2 * slope @ slope.mT)

    def _features(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """h over its norm [m, w], and the norm [m, 1], without what was found."""
        h = self.vectors.at(z)[:, 0]
        h = h - (h @ self.found) @ self.found.T
        size = h.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return h / size, size


@dataclass(frozen=True, eq=False)
class BoundLeverage:
    """The leverage equation at fixed evidence.

    Args:
        vectors: h of a candidate.
        rows: W_2, with the bias of the layer as a last column where it decays as the weights do, less what was found.
        found: see `Resolved`.
        unit: largest singular value of all rows, which eps is relative to.
    """

    vectors: Hidden
    rows: Tensor
    found: Tensor
    unit: float

    def at(self, eps: float) -> Resolved:
        """The leverage at one eps, in units of the largest singular value."""
        _, values, right = torch.linalg.svd(self.rows, full_matrices=True)
        width = eps * self.unit
        values = torch.cat([values, values.new_zeros(len(right) - len(values))])
        root = right.T * (width / (values.square() + width**2).sqrt())
        return Resolved(self.vectors, self.found, root - self.found @ (self.found.T @ root))

    def without(self, z: Tensor) -> BoundLeverage:
        """Project out the features of samples found at z [f, q], so that a search meets only the others."""
        if len(z) == 0:
            return self
        h = self.vectors.at(z)[:, 0]
        found = torch.linalg.qr(torch.cat([self.found, h.T], 1))[0]
        return replace(self, rows=self.rows - (self.rows @ found) @ found.T, found=found)


def bind_leverage(
    evidence: Evidence,
    space: Space,
    samples: int,
    finest: float,
    units: Tensor | None = None,
) -> BoundLeverage | None:
    """Fix the evidence; None where the second layer does not show that many directions.

    Args:
        evidence: final weights at a stationary point.
        space: where the candidates live.
        samples: number of samples.
        finest: smallest eps that is used, relative to the largest singular value; that of the last sample must not be
            below it.
        units: hidden units of the first layer to use; None for all.
    """
    chain = evidence.chain
    if chain is None or len(chain.weights) < 3 or chain.smoothed(1.0).activations[0].piecewise_linear:
        return None
    if evidence.recipe.share(chain.weights[1]) == 0:
        return None
    params = evidence.at(1.0)
    rows, bias = _second(evidence, chain, units)
    values = torch.linalg.svdvals(rows)
    if len(values) < samples or float(values[samples - 1]) < finest * float(values[0]):
        return None
    first = replace(
        chain, weights=chain.weights[:1], biases=chain.biases[:1], activations=chain.activations[:1]
    )
    vectors = Hidden((dense_node(first, params, space.origin, space.basis),), units, bias)
    return BoundLeverage(vectors, rows, rows.new_zeros(rows.shape[1], 0), float(values[0]))


def _second(evidence: Evidence, chain: DenseChain, units: Tensor | None) -> tuple[Tensor, bool]:
    """Rows of the second layer, and whether its bias is their last column."""
    params, share = evidence.at(1.0), evidence.recipe.share
    weight, bias = chain.weights[1], chain.biases[1]
    rows = params[weight] if units is None else params[weight][:, units]
    if bias is None or share(bias) != share(weight):
        return rows, False
    return torch.cat([rows, params[bias][:, None]], 1), True
