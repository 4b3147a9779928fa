"""SGD training reduced exactly to the space the samples live in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, Forward, Parameters
from exhume.functional import DenseChain
from exhume.spaces import Space


@dataclass(frozen=True, eq=False)
class Folded:
    """A net whose SGD training on inputs v(z) is that of the given net on model inputs u(z), in fewer weights.

    Args:
        forward: pure function f(params, v) of the folded net.
        init: its parameters theta_0 in float64.
        final: its parameters theta_f in float64.
        space: how coordinates become flattened inputs of the folded net.
        shape: shape of one input v.
        chain: its dense layers, if it is a recognised multi-layer perceptron.
    """

    forward: Forward
    init: Parameters
    final: Parameters
    space: Space
    shape: tuple[int, ...]
    chain: DenseChain | None

    def embed(self, z: Tensor) -> Tensor:
        """Inputs v [m, *shape] at coordinates z [m, q]."""
        return self.space.expand(z).reshape(-1, *self.shape)

    def push(self, direction: Tensor) -> Tensor:
        """Derivative of v along directions [s, m, q] in z, [s, m, *shape]."""
        moved = direction if self.space.basis is None else direction @ self.space.basis
        return moved.reshape(*direction.shape[:2], *self.shape)

    def pull(self, gradient: Tensor) -> Tensor:
        """Transpose of `push` for one gradient [m, *shape] in v, [m, q]."""
        return self.space.coordinates(gradient.flatten(1))


def fold(evidence: Evidence, space: Space) -> Folded:
    """Reduce a dense chain to the linear span of a subspace; leave any other net, or the full space, as it is.

    W_1 -> W_1 E' [w, q + 1] and u -> v = (z, |origin|), with E the orthonormal rows of [basis; origin / |origin|].

    SGD moves W_1 by outer products with the inputs u = v E, and by decay, so that W_1 E' moves as if it were
    trained on v. What lies outside E only decays, and no sample of the space sees it.

    Args:
        evidence: both sets of weights.
        space: where the samples live; an origin of None or zero adds no direction.

    Raises:
        MissingEvidence: the initial weights are unknown.
    """
    if evidence.init is None:
        raise MissingEvidence(
            "the dynamics equation needs the initial weights, from which training is simulated; provide [init]"
        )
    init, final = evidence.at(0.0), evidence.at(1.0)
    chain = evidence.chain
    if chain is None:
        return Folded(evidence.forward, init, final, space, evidence.input.shape, None)
    if space.basis is None:
        return Folded(chain.forward, init, final, space, (space.size,), chain)
    frame, q = frame_of(space), len(space.basis)
    inner = Space(q)
    if len(frame) > q:
        assert space.origin is not None
        origin = torch.zeros(q + 1, dtype=frame.dtype)
        origin[-1] = space.origin.norm()
        inner = Space(q + 1, torch.eye(q, q + 1, dtype=frame.dtype), origin)
    first = chain.weights[0]
    init, final = ({**weights, first: weights[first] @ frame.T} for weights in (init, final))
    return Folded(chain.forward, init, final, inner, (inner.size,), chain)


def unfold(evidence: Evidence, space: Space, params: Parameters) -> Parameters:
    """Parameters of the whole net from those of the folded one; what lies outside E is that of theta_f.

    Args:
        evidence: with a dense chain.
        space: where the samples live.
        params: parameters of `fold(evidence, space)`, or of the net itself where nothing was folded.
    """
    chain = evidence.chain
    if chain is None or space.basis is None:
        return params
    first, frame = chain.weights[0], frame_of(space)
    whole = evidence.at(1.0)[first]
    return {**params, first: whole + (params[first] - whole @ frame.T) @ frame}


def frame_of(space: Space) -> Tensor:
    """Orthonormal rows E that span a subspace and its origin: [q, d], or [q + 1, d] if that is not zero."""
    assert space.basis is not None
    if space.origin is None or float(space.origin.norm()) == 0:
        return space.basis
    return torch.cat([space.basis, space.origin[None] / space.origin.norm()])
