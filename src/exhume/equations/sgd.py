"""A run of SGD on given samples: its steps, and what they do to tangents and to adjoints."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from exhume.equations.risk import Risk


@dataclass(frozen=True, eq=False)
class State:
    """Parameters and velocity, each [P] (or [s, P] for s tangents)."""

    theta: Tensor
    velocity: Tensor


@dataclass(frozen=True, eq=False)
class Tangents:
    """Directions of the unknowns; None is zero.

    Args:
        inputs: [s, m, *shape].
        label: [s, m, C].
        scalars: of learning rate, momentum and weight decay [s, 3].
    """

    inputs: Tensor
    label: Tensor | None = None
    scalars: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Adjoint:
    """What step t passes on to the unknowns.

    Args:
        rows: samples of the batch.
        theta: parameters before the step [P].
        signal: derivative of the end by the velocity after the step [P], through every later step.
        inputs: gradient of the batch's inputs [b, *shape].
        label: gradient of its labels [b, C].
        scalars: gradients of learning rate, momentum and weight decay.
    """

    rows: slice
    theta: Tensor
    signal: Tensor
    inputs: Tensor
    label: Tensor
    scalars: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """torch.optim.SGD on batches in the order of the samples.

    velocity' = momentum velocity + grad R(theta) + decay theta,  theta' = theta - lr velocity'

    Args:
        risk: loss of a batch.
        inputs: of the net, all samples [m, *shape].
        label: [m, C].
        lr: learning rate.
        momentum: of the velocity.
        decay: L2 weight decay.
        batch: samples of a step; the last batch of an epoch may be smaller.
    """

    risk: Risk
    inputs: Tensor
    label: Tensor
    lr: float
    momentum: float
    decay: float
    batch: int

    def rows(self, t: int) -> slice:
        """Samples of step t."""
        begin = t % ceil(len(self.inputs) / self.batch) * self.batch
        return slice(begin, begin + self.batch)

    def step(self, t: int, state: State) -> tuple[State, Tensor]:
        """Make step t; return the new state and the loss of the batch before it."""
        rows = self.rows(t)
        loss, gradient = self.risk.gradient(state.theta, self.inputs[rows], self.label[rows])
        velocity = gradient.add_(state.theta, alpha=self.decay).add_(state.velocity, alpha=self.momentum)
        return State(torch.sub(state.theta, velocity, alpha=self.lr), velocity), loss

    def push(self, t: int, before: State, after: State, moved: State, tangents: Tangents) -> State:
        """Derivatives [s, P] of the state after step t, from those before it."""
        rows = self.rows(t)
        label = None if tangents.label is None else tangents.label[:, rows]
        bent = self.risk.push(
            before.theta, self.inputs[rows], self.label[rows], moved.theta, tangents.inputs[:, rows], label
        )
        velocity = bent.add_(moved.theta, alpha=self.decay).add_(moved.velocity, alpha=self.momentum)
        if tangents.scalars is None:
            return State(torch.sub(moved.theta, velocity, alpha=self.lr), velocity)
        lr, momentum, decay = tangents.scalars.T[..., None]
        velocity = velocity + momentum * before.velocity + decay * before.theta
        return State(moved.theta - self.lr * velocity - lr * after.velocity, velocity)

    def pull(self, t: int, before: State, after: State, outer: State) -> tuple[State, Adjoint]:
        """Transpose of `push`: from derivatives of the end by the state after step t to those by the state before."""
        rows = self.rows(t)
        signal = torch.sub(outer.velocity, outer.theta, alpha=self.lr)
        theta, inputs, label = self.risk.pull(before.theta, self.inputs[rows], self.label[rows], signal)
        scalars = (-after.velocity @ outer.theta, before.velocity @ signal, before.theta @ signal)
        inner = State(theta.add_(signal, alpha=self.decay).add_(outer.theta), self.momentum * signal)
        return inner, Adjoint(rows, before.theta, signal, inputs, label, scalars)
