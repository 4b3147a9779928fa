"""Points and values of the field f(w) = sum_i b_i sigma'(x_i . w) x_i, and where weights give them away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from exhume.change import decay_factor, decayed_target
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence
from exhume.functional import DenseChain

NODES = (0.0, 0.5, 1.0)
DEAD = 1e-6  # neurons below this share of the largest carry no equation


@dataclass(frozen=True, eq=False)
class Field:
    """The field of a two-layer network sum_j a_j sigma(w_j . x), at one node of training or summed over several.

    step_j = sum_v gain_vj f_v(w_vj),  f_v(w) = sum_i b_vi sigma'(x_i . w) x_i

    Args:
        points: w_vj [V, m, d]; with a bias it is the last coordinate.
        gain: a_vj [V, m].
        steps: [m, d], so that equations are in units of the weights.
        affine: whether the last coordinate belongs to the bias, so that it is 1 in every sample.
        source: where it comes from, in words.
    """

    points: Tensor
    gain: Tensor
    steps: Tensor
    affine: bool
    source: str

    @property
    def nodes(self) -> int:
        """Number of nodes V."""
        return len(self.points)

    def take(self, index: Tensor) -> Field:
        """The field at some of the neurons."""
        return replace(self, points=self.points[:, index], gain=self.gain[:, index], steps=self.steps[index])

    def middle(self) -> Field:
        """The field at the middle node alone."""
        v = self.nodes // 2
        return replace(self, points=self.points[v : v + 1], gain=self.gain[v : v + 1])


def from_values(points: Tensor, values: Tensor, affine: bool = False) -> Field:
    """The field of given points w_j [m, d] and values f(w_j) [m, d].

    Args:
        points: with a bias as last coordinate if `affine`.
        values: likewise.
        affine: whether every sample has 1 there.
    """
    return Field(points[None], points.new_ones(1, len(points)), values, affine, "points and values")


def two_layer(chain: DenseChain | None) -> str | None:
    """What keeps a network from being sum_j a_j sigma(w_j . x), or None if nothing does."""
    if chain is None:
        return "a plain dense network"
    if len(chain.weights) != 2:
        return f"one hidden layer (the network has {len(chain.weights) - 1})"
    if chain.activations[1].name != "identity":
        return "a linear last layer"
    return None


def from_weights(
    chain: DenseChain,
    nodes: Sequence[Mapping[str, Tensor]],
    steps: Mapping[str, Tensor],
    source: str,
    units: Tensor | None = None,
) -> Field:
    """A step of the first layer, the sum of -dL/dw_j = a_j f(w_j) over some nodes.

    Args:
        chain: a network with one hidden layer and one output.
        nodes: parameters where gradients were taken.
        steps: minus the gradient, or a step along it.
        source: in words.
        units: indices of the neurons to use, all by default.
    """
    name, bias = chain.weights[0], chain.biases[0]
    gain = torch.stack([p[chain.weights[1]].detach().double() for p in nodes])
    if gain.shape[1] != 1:
        raise MissingEvidence(
            f"the field of samples needs a network of one output, but this one has {gain.shape[1]};"
            " use another attack"
        )

    def rows(params: Mapping[str, Tensor]) -> Tensor:
        weight = params[name].detach().double()
        return weight if bias is None else torch.cat([weight, params[bias].detach().double()[:, None]], 1)

    keep = torch.arange(gain.shape[2]) if units is None else units
    gain, points = gain[:, 0, keep], torch.stack([rows(p)[keep] for p in nodes])
    norm = points.norm(dim=2).amax(0)
    size = gain.abs().amax(0)
    live = (norm > DEAD * norm.max()) & (size > DEAD * size.max())
    return Field(points[:, live], gain[:, live], rows(steps)[keep][live], bias is not None, source)


def from_stationary(evidence: Evidence, units: Tensor | None = None) -> Field:
    """The field at a stationary point: w_j = a_j f(w_j) up to one factor.

    Holds for gradient flow on a homogeneous network in the limit (Lyu and Li 2020), and for training with weight
    decay at any norm; `imbalance` tells how far the weights are from it.
    """
    final = evidence.at(1.0)
    return from_weights(
        _chain(evidence), [final], final, "final weights, taken for a stationary point", units
    )


def from_change(evidence: Evidence, nodes: Sequence[float] = NODES, units: Tensor | None = None) -> Field:
    """The field of training: w_f - kappa w_0 = sum_v a_v f_v(w_v) up to one factor, at nodes of the chord.

    The midpoint alone is second-order accurate where the signals b_i fade in proportion, since then half of them act
    before it; three nodes with coefficients of their own follow what does not. One step of gradient descent gives the
    field at the initial weights exactly.

    Args:
        evidence: initial and final weights.
        nodes: fractions of the chord, an odd number symmetric about 1/2.
        units: indices of the neurons to use, all by default.
    """
    chain = _chain(evidence)
    if evidence.init is None:
        raise MissingEvidence(
            "the change of weights needs the initial weights, but the evidence has none; provide [model] init"
        )
    once = evidence.recipe.steps == 1
    places = (0.0,) if once else tuple(nodes)
    source = "one step from the initial weights" if once else "change of weights"
    target = decayed_target(evidence, decay_factor(evidence))
    return from_weights(chain, [evidence.at(v) for v in places], target, source, units)


def from_gradient(chain: DenseChain, params: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> Field:
    """The field from one gradient of the loss, a_j f(w_j) = -dL/dw_j; b_i = -dl_i/df_i carries the label's sign.

    Args:
        chain: a network with one hidden layer and one output.
        params: where the gradient was taken.
        gradient: of the mean or summed loss, by parameter name.
    """
    return from_weights(chain, [params], {k: -g for k, g in gradient.items()}, "one gradient")


def from_checkpoints(chain: DenseChain, states: Sequence[Mapping[str, Tensor]]) -> tuple[Field, ...]:
    """One field for each interval between checkpoints, at its midpoint; all share the samples, not the b_i."""
    fields = []
    for before, after in pairwise(states):
        middle = {k: (before[k].double() + after[k].double()) / 2 for k in before}
        step = {k: after[k].double() - before[k].double() for k in before}
        fields.append(from_weights(chain, [middle], step, "change between checkpoints"))
    return tuple(fields)


def imbalance(evidence: Evidence, degree: int) -> float:
    """How far weights are from a stationary point of a homogeneous net: max_j |alpha a_j^2 - |w_j|^2| / |w_j|^2.

    Flow conserves |w_j|^2 - alpha a_j^2, so the defect fades as norms grow, or under weight decay. Neurons below 1%
    of the largest are left out.

    Args:
        evidence: final weights.
        degree: alpha, of the activation.
    """
    chain = _chain(evidence)
    final = evidence.at(1.0)
    a = final[chain.weights[1]][0]
    square = final[chain.weights[0]].square().sum(1)
    if chain.biases[0] is not None:
        square = square + final[chain.biases[0]].square()
    live = square > 1e-4 * square.max()
    return float(((degree * a.square() - square).abs() / square)[live].max())


def _chain(evidence: Evidence) -> DenseChain:
    gap = two_layer(evidence.chain)
    if gap is not None or evidence.chain is None:
        raise MissingEvidence(
            f"the field of samples needs {gap}, but this model is another kind; use another attack"
        )
    return evidence.chain
