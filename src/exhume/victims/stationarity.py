"""How nearly trained weights satisfy the equation of final weights alone at the true data, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.change import Decay
from exhume.equations.span import Span
from exhume.errors import ModelError
from exhume.evidence import Evidence, Recipe
from exhume.objective import Objective
from exhume.spaces import full
from exhume.victims.train import LOSSES

KINK = 1e-3  # pre-activations below this share of their mean size sit at the kink
FORGOTTEN = Decay(0.0, 0.0, "the final weights themselves are the target")


@dataclass(frozen=True, eq=False)
class Stationarity:
    """Diagnostics of theta = sum_i s_i grad f(x_i; theta) at the true data.

    Args:
        residual: |theta - sum_i s_i grad f_i| / |theta| with s by least squares.
        implied: the same with the s that loss and weight decay imply; None without decay.
        multipliers: s by least squares [n, C].
        euler: largest |<theta, grad f_i> / (L f_i) - 1|, with L the number of layers: zero for a homogeneous net.
        imbalance: mean over hidden units of |in^2 - out^2| / (in^2 + out^2), with the norms of their weights.
        margin: smallest margin, y f or that to the runner-up class.
        spread: largest margin over the smallest.
        condensed: effective number of directions of each hidden layer, (sum s^2)^2 / sum s^4 over singular values s.
        kinks: share of (unit, sample) pairs of each hidden layer that sit at the kink.
    """

    residual: float
    implied: float | None
    multipliers: Tensor
    euler: float
    imbalance: float
    margin: float
    spread: float
    condensed: tuple[float, ...]
    kinks: tuple[float, ...]

    def sentence(self, n: int) -> str:
        """What limits recovery of n samples, in words."""
        limits = []
        if min(self.condensed) < n / 2:
            limits.append(f"hidden layers condensed to {min(self.condensed):.1f} directions")
        if max(self.kinks) > 0.01:
            limits.append(f"{100 * max(self.kinks):.0f}% of the gates at a kink")
        if self.spread > 1.5:
            limits.append(f"margins that differ by a factor of {self.spread:.1f}: only the smallest count")
        fits = f"the equation is missed by {100 * self.residual:.2g}% of |theta| at the true samples"
        return fits + (f"; {', '.join(limits)}" if limits else "")


def stationarity(
    evidence: Evidence, u: Tensor, y: Tensor, loss: str = "logistic", weight_decay: float = 0.0
) -> Stationarity:
    """Measure how far training came.

    Args:
        evidence: of a dense chain.
        u: the true model inputs [n, *shape].
        y: their targets, as `train` takes them.
        loss: that was trained on, a name in `exhume.victims.train.LOSSES`.
        weight_decay: of the recipe; 0 for none.

    Raises:
        ModelError: the model is no plain dense network.
    """
    chain = evidence.chain
    if chain is None:
        raise ModelError(
            "the diagnostics need a plain dense network, but the model is another kind; train an mlp"
        )
    known = replace(evidence, init=None)
    space = full(evidence.input.size)
    equation = Span(nodes=(1.0,)).bind(known, space, FORGOTTEN)
    z = u.flatten(1).double()
    point = Objective(equation, space).at(z)
    f = evidence.output(u).requires_grad_()
    implied = None
    if weight_decay > 0:
        slope = torch.autograd.grad(LOSSES[loss](f, y if loss == "cross-entropy" else y.to(f).view_as(f)), f)[
            0
        ]
        missed = equation.target() - equation.contribution(z, -slope / weight_decay)
        implied = float(missed.norm()) / equation.energy**0.5
    f = f.detach()
    params = evidence.at(1.0)
    raw = Span(nodes=(1.0,)).bind(replace(known, recipe=Recipe()), space, FORGOTTEN)
    inner = raw.inner(z, raw.target())
    layers = len(chain.weights)
    euler = float((inner / (layers * f) - 1).abs().max())
    margins = _margins(f, y, loss)
    pre, a = [], z
    for weight, bias, phi in zip(chain.weights, chain.biases, chain.activations, strict=True):
        out = a @ params[weight].T + (0.0 if bias is None else params[bias])
        pre.append(out)
        a = phi.fn(out)
    sides = [
        (
            params[chain.weights[l]].square().sum(1)
            + (0.0 if (bias := chain.biases[l]) is None else params[bias].square()),
            params[chain.weights[l + 1]].square().sum(0),
        )
        for l in range(layers - 1)
    ]
    gaps = [((a - b).abs() / (a + b).clamp_min(1e-30)).mean() for a, b in sides]
    return Stationarity(
        residual=point.misfit**0.5,
        implied=implied,
        multipliers=point.coef,
        euler=euler,
        imbalance=float(torch.stack(gaps).mean()) if gaps else 0.0,
        margin=float(margins.min()),
        spread=float(margins.max() / margins.min()) if float(margins.min()) > 0 else float("inf"),
        condensed=tuple(_directions(params[name]) for name in chain.weights[:-1]),
        kinks=tuple(float((p.abs() < KINK * p.abs().mean()).double().mean()) for p in pre[:-1]),
    )


def _margins(f: Tensor, y: Tensor, loss: str) -> Tensor:
    """y f, or the output of the true class above the next [n]."""
    if loss != "cross-entropy":
        return (f * y.to(f).view_as(f)).amin(1)
    own = f.gather(1, y[:, None])[:, 0]
    return own - f.scatter(1, y[:, None], -torch.inf).amax(1)


def _directions(weight: Tensor) -> float:
    squares = torch.linalg.svdvals(weight).square()
    return float(squares.sum() ** 2 / squares.square().sum())
