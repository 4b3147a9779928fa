"""The span equation: the change of weights is a weighted sum of per-sample gradients.

theta_f - kappa theta_0 = sum_v sum_i sum_c coef_{v,i,c} grad_theta f_c(x_i; theta_v)

with nodes v on the chord from theta_0 (0) to theta_f (1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exhume.change import Decay, decayed_target
from exhume.dense import dense_node
from exhume.equations.base import Bound
from exhume.equations.part import Part
from exhume.equations.span_dense import bind_dense
from exhume.equations.span_last import ChainFeatures, Features, ModuleFeatures, bind_last
from exhume.equations.span_module import ModuleSpan
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, Parameters
from exhume.functional import DenseChain, Smoothing
from exhume.smoothing import smoothed_forward
from exhume.spaces import Space


@dataclass(frozen=True)
class EquationWeights:
    """Weights of the equations of each parameter group; a group that fits better deserves more."""

    first: float = 1.0
    bias: float = 1.0
    hidden: float = 1.0
    last: float = 1.0

    def by_name(self, params: Parameters, chain: DenseChain | None) -> dict[str, float]:
        """The weight of each parameter's equations."""
        return {k: getattr(self, group) for group, names in groups(params, chain).items() for k in names}


def groups(params: Parameters, chain: DenseChain | None) -> dict[str, tuple[str, ...]]:
    """Parameter names of each group; of a module of unknown structure, vectors are biases, matrices go by order."""
    if chain is not None:
        matrices, biases = chain.weights, tuple(name for name in chain.biases if name is not None)
    else:
        matrices = tuple(k for k, p in params.items() if p.dim() > 1)
        biases = tuple(k for k, p in params.items() if p.dim() <= 1)
    return {"first": matrices[:-1][:1], "bias": biases, "hidden": matrices[1:-1], "last": matrices[-1:]}


@dataclass(frozen=True)
class Span:
    """Configuration of the span equation.

    Args:
        nodes: where gradients are taken, as fractions of the chord from theta_0 to theta_f.
        layers: "all", or "last" for the last layer alone (needs a model that ends in a linear layer).
        weights: equation weights per parameter group.
    """

    nodes: tuple[float, ...] = (0.0, 1.0)
    layers: str = "all"
    weights: EquationWeights = EquationWeights()

    def bind(
        self,
        evidence: Evidence,
        space: Space,
        decay: Decay,
        smoothing: Smoothing | None = None,
        part: Part | None = None,
    ) -> Bound:
        """Fix the evidence: structured products for a dense chain or a last layer, torch.func for the rest.

        Args:
            evidence: weights and forward function.
            space: where the candidates live; a subspace also shrinks the first-layer equations.
            decay: what is left of the initialisation.
            smoothing: what stands in for every ReLU: a slope of the softplus, or the relaxed ReLU.
            part: use only some of the equations (see `part.split`); None uses all.

        Raises:
            MissingEvidence: a node or a layer choice that the evidence cannot serve.
        """
        gaps = []
        if evidence.init is None and any(v != 1.0 for v in self.nodes):
            gaps.append("the initial weights, for nodes other than the final ones")
        ends = last_layer(evidence)
        if ends is None and self.layers == "last":
            gaps.append("a model whose outputs are those of a linear layer, for the last layer alone")
        if gaps:
            raise MissingEvidence(
                f"the span equation needs {' and '.join(gaps)}; provide it or change the equation"
            )
        target = decayed_target(evidence, decay)
        params = [evidence.at(v) for v in self.nodes]
        scale = self.weights.by_name(target, evidence.chain)
        # A parameter that did not move at all was frozen, and its gradients need not add up to nothing.
        scale = {k: v if evidence.moved(k) else 0.0 for k, v in scale.items()}
        chain = None if evidence.chain is None else evidence.chain.smoothed(smoothing)
        if self.layers == "last" and ends is not None and (chain is None or chain.body is not None):
            weight, bias = ends
            if not any(evidence.moved(k) for k in target if k not in ends):
                params = params[:1]  # the features are the same at every node
            scales = (
                self.weights.last if evidence.moved(weight) else 0.0,
                self.weights.bias if bias is not None and evidence.moved(bias) else None,
            )
            nodes = tuple(features_of(evidence, chain, p, space) for p in params)
            return bind_last(nodes, ends, scales, target, space.dim, part)
        if chain is not None:
            every = list(enumerate(zip(chain.weights, chain.biases, strict=True)))
            layers = every if self.layers == "all" else every[-1:]
            used = [(l, names) for l, names in layers if any(scale.get(name or "") for name in names)]
            keep = [(l, scale[weight], scale.get(bias or "") or None) for l, (weight, bias) in used or layers]
            below = [name for _, names in every[:-1] for name in names]
            if below and not any(scale.get(name or "") for name in below):
                params = params[:1]  # only the last layer moved, and its gradients are the same at every node
            return bind_dense(chain, params, target, space, keep, part)
        weights = {k: torch.tensor(v, dtype=torch.float64) for k, v in scale.items()}
        if part is not None:
            weights = {k: v * part.mask(target[k]) for k, v in weights.items()}
        forward = evidence.forward if smoothing is None else smoothed_forward(evidence.forward, smoothing)
        return ModuleSpan(forward, params, target, space, evidence.input.shape, weights)


def last_layer(evidence: Evidence) -> tuple[str, str | None] | None:
    """Names of the weight and bias of the last layer, or None where no linear layer is known to be the last."""
    if evidence.chain is not None:
        return evidence.chain.weights[-1], evidence.chain.biases[-1]
    return None if evidence.head is None else (evidence.head.weight, evidence.head.bias)


def features_of(evidence: Evidence, chain: DenseChain | None, params: Parameters, space: Space) -> Features:
    """The features below the last layer at one node: of a dense chain that has a body, or of a module with a head."""
    if chain is not None and chain.body is not None:
        return ChainFeatures(dense_node(chain.body, params, space.origin, space.basis))
    assert evidence.head is not None
    return ModuleFeatures(evidence.head.features, params, space, evidence.input.shape)
