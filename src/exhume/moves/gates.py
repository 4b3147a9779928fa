"""How far the gates of the first layer are from flipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exhume.equations.simulation import BoundDynamics
from exhume.evidence import Parameters

CHORD = (0.0, 0.25, 0.5, 0.75, 1.0)  # where on the way from theta_0 to the simulated end gates are looked at


def clearance(dynamics: BoundDynamics, end: Parameters, z: Tensor) -> Tensor:
    """Relative error of a candidate that would typically flip a gate of each unit, the smallest over candidates, [w].

    |w_j . v_i + b_j| / (|w_j| |v_i| / sqrt(q)): a random error of relative size e moves a pre-activation by about e
    times the denominator.
    """
    chain, net = dynamics.net.chain, dynamics.net
    assert chain is not None
    weight, bias = chain.weights[0], chain.biases[0]
    v = net.embed(z)
    found = torch.full((net.init[weight].shape[0],), math.inf, dtype=v.dtype)
    for node in CHORD:
        w = torch.lerp(net.init[weight], end[weight], node)
        pre = v @ w.T
        if bias is not None:
            pre = pre + torch.lerp(net.init[bias], end[bias], node)
        found = torch.minimum(found, (pre.abs() / moved(v, w, z).clamp_min(1e-300)).amin(0))
    return found


def moved(v: Tensor, w: Tensor, z: Tensor) -> Tensor:
    """What an error as large as a candidate would typically move each pre-activation, |w_j| |v_i| / sqrt(q), [m, w].

    Args:
        v: inputs of the folded net [m, d].
        w: weights of the first layer [w, d].
        z: coordinates of the candidates [m, q].
    """
    return v.norm(dim=1)[:, None] * w.norm(dim=1) / z.shape[1] ** 0.5
