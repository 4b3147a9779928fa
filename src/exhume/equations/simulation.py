"""A simulated training run as a function of what it was trained on, with its derivatives both ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equations.discrepancy import Discrepancy
from exhume.equations.fold import Folded
from exhume.equations.losses import Loss
from exhume.equations.reversal import backwards
from exhume.equations.risk import Risk, Shapes, flatten, unflatten, variation
from exhume.equations.sgd import Adjoint, Run, State, Tangents
from exhume.errors import ExhumeError
from exhume.evidence import Parameters


@dataclass(frozen=True, eq=False)
class Unknowns:
    """What a run of training depends on besides the initial weights; also its gradients and directions.

    Args:
        z: coordinates of the candidates [m, q].
        label: targets [m, C]; +-1 for "logistic", probabilities for "cross-entropy".
        lr: learning rate, a scalar in float64 like the next two.
        momentum: of SGD.
        weight_decay: L2 penalty as in torch.optim.
    """

    z: Tensor
    label: Tensor
    lr: Tensor
    momentum: Tensor
    weight_decay: Tensor


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated run.

    Args:
        end: parameters after the last step whose outcome is finite, in folded coordinates.
        loss: of each batch before its step, [steps].
        steps: steps made.
        diverged: whether it stopped early because the next weights would not be finite.
        reason: how it ended, in a sentence.
    """

    end: Parameters
    loss: Tensor
    steps: int
    diverged: bool
    reason: str


@dataclass(frozen=True, eq=False)
class BoundDynamics:
    """The dynamics equation at fixed evidence: P equations, in the parameters of the folded net.

    Derivatives in reverse are a discrete adjoint: every step builds its own graph alone, and the states it needs
    are recomputed from checkpoints, so memory does not grow with the number of steps.

    Args:
        net: the folded net.
        shapes: names and shapes of its parameters, the order of the equations.
        loss: of one sample.
        risk: loss of a batch.
        outputs: number of outputs C.
        steps: number of updates T.
        batch_size: samples of an update; None for all.
        memory: bytes that stored states may take.
    """

    net: Folded
    shapes: Shapes
    loss: Loss
    risk: Risk
    outputs: int
    steps: int
    batch_size: int | None
    memory: int

    @property
    def equations(self) -> int:
        """Number of equations P."""
        return sum(shape.numel() for shape in self.shapes.values())

    def target(self) -> Tensor:
        """The true change, theta_f - theta_0 [P]."""
        return flatten(self.net.final, self.shapes) - flatten(self.net.init, self.shapes)

    def simulate(self, unknowns: Unknowns) -> Simulation:
        """Train on the candidates; stop at the last finite weights if they diverge."""
        run, state, losses = self._run(unknowns), self._start(), []
        for t in range(self.steps):
            after, loss = run.step(t, state)
            losses.append(loss)
            if not math.isfinite(float(after.theta.sum())):
                reason = f"the weights were not finite after step {t + 1} of {self.steps}; lower lr"
                break
            state = after
        else:
            t, reason = self.steps, f"all {self.steps} steps were made"
        diverged = t < self.steps
        return Simulation(
            unflatten(state.theta, self.shapes),
            torch.stack(losses[:t]) if t else state.theta[:0],
            t,
            diverged,
            reason,
        )

    def residual(self, unknowns: Unknowns) -> Tensor:
        """Simulated minus true final weights [P]; of the last finite weights if the run diverges."""
        return flatten(self.simulate(unknowns).end, self.shapes) - flatten(self.net.final, self.shapes)

    def jvp(self, unknowns: Unknowns, direction: Unknowns) -> Tensor:
        """Derivative of the residual along a direction, [P]: tangents carried forward, nothing stored.

        Raises:
            ExhumeError: the run diverges.
        """
        scalars = torch.stack([direction.lr, direction.momentum, direction.weight_decay])
        tangents = Tangents(self.net.push(direction.z[None]), direction.label[None], scalars[None])
        return self._forward(self._run(unknowns), tangents)[0]

    def jacobian(self, unknowns: Unknowns) -> Tensor:
        """Derivative of the residual by the coordinates, [P, m q], a few columns at a time; for small problems.

        Raises:
            ExhumeError: the run diverges.
        """
        run, axes = self._run(unknowns), torch.eye(unknowns.z.numel(), dtype=torch.float64)
        # Two states of tangents and what a step makes on its way are about eight vectors of length P for each
        # column; more than a few columns leave the caches and are slower.
        chunk = max(1, min(16, self.memory // (8 * 8 * self.equations)))
        found = torch.empty(self.equations, len(axes), dtype=torch.float64)
        for columns, part in zip(found.split(chunk, 1), axes.split(chunk), strict=True):
            tangents = Tangents(self.net.push(part.view(-1, *unknowns.z.shape)))
            columns.copy_(self._forward(run, tangents).T)
        return found

    def vjp(self, unknowns: Unknowns, cotangent: Tensor) -> Unknowns:
        """Transpose of `jvp` applied to a cotangent [P].

        Raises:
            ExhumeError: the run diverges.
        """
        run = self._run(unknowns)
        return self._collect(run, self._sweep(run, cotangent))

    def value(self, unknowns: Unknowns, discrepancy: Discrepancy) -> float:
        """Discrepancy of the simulated change from the true one; infinite if the run or the number overflows."""
        found = self.simulate(unknowns)
        change = {k: p - self.net.init[k] for k, p in found.end.items()}
        value = float(discrepancy.value(change, self._target()))
        return math.inf if found.diverged or not math.isfinite(value) else value

    def gradient(self, unknowns: Unknowns, discrepancy: Discrepancy) -> tuple[float, Unknowns]:
        """The discrepancy and its gradient, by one run and one sweep back; (inf, zeros) if any of it overflows."""
        run = self._run(unknowns)
        states = self._states(run)
        _, end = next(states)
        with torch.enable_grad():
            leaf = (end.theta - flatten(self.net.init, self.shapes)).requires_grad_()
            value = discrepancy.value(unflatten(leaf, self.shapes), self._target())
            cotangent = torch.autograd.grad(value, leaf)[0]
        overflow = math.inf, self._collect(run, iter(()))
        if not bool(torch.isfinite(torch.cat([value.detach()[None], end.theta, cotangent])).all()):
            return overflow
        found = self._collect(run, _back(run, states, end, cotangent))
        parts = (found.z, found.label, found.lr, found.momentum, found.weight_decay)
        finite = all(bool(torch.isfinite(part).all()) for part in parts)
        return (float(value.detach()), found) if finite else overflow

    def potential(self, unknowns: Unknowns, cotangent: Tensor) -> Callable[[Tensor], Tensor]:
        """First variation of <cotangent, theta_T> in each candidate, with path and adjoint frozen.

        potential(z)_i = sum_t <signal_t, grad of candidate i's part of the loss at theta_t>

        Args:
            unknowns: where the run and its adjoint are taken.
            cotangent: [P].

        Returns:
            A function of coordinates [m, q] that gives [m], twice differentiable; its gradient at unknowns.z is
            that of `vjp`. Each call sweeps back through the run; a graph of it holds all of its steps.
        """
        run = self._run(unknowns)

        def at(z: Tensor) -> Tensor:
            v, total = self.net.embed(z), torch.zeros(len(z), dtype=z.dtype)
            for part in self._sweep(run, cotangent):
                found = variation(
                    self.net.forward,
                    self.shapes,
                    self.loss,
                    part.theta,
                    v[part.rows],
                    run.label[part.rows],
                    part.signal,
                )
                index = torch.arange(len(z))[part.rows]
                total = total.index_add(0, index, found)
            return total

        return at

    def _target(self) -> Parameters:
        return {k: p - self.net.init[k] for k, p in self.net.final.items()}

    def _start(self) -> State:
        theta = flatten(self.net.init, self.shapes)
        return State(theta, torch.zeros_like(theta))

    def _run(self, unknowns: Unknowns) -> Run:
        m, label = len(unknowns.z), unknowns.label
        if label.shape != (m, self.outputs):
            raise ExhumeError(
                f"labels must have the shape {(m, self.outputs)} of the outputs, but have {tuple(label.shape)};"
                " give one row for each candidate"
            )
        return Run(
            self.risk,
            self.net.embed(unknowns.z.detach()),
            label.detach(),
            float(unknowns.lr.detach()),
            float(unknowns.momentum.detach()),
            float(unknowns.weight_decay.detach()),
            min(self.batch_size or m, m),
        )

    def _states(self, run: Run) -> Iterator[tuple[int, State]]:
        slots = max(1, self.memory // (2 * 8 * self.equations))
        return backwards(self._start(), self.steps, slots, lambda t, state: run.step(t, state)[0])

    def _sweep(self, run: Run, cotangent: Tensor) -> Iterator[Adjoint]:
        states = self._states(run)
        _, end = next(states)
        _require_finite(end)
        return _back(run, states, end, cotangent)

    def _collect(self, run: Run, sweep: Iterator[Adjoint]) -> Unknowns:
        inputs, label = torch.zeros_like(run.inputs), torch.zeros_like(run.label)
        scalars = torch.zeros(3, dtype=torch.float64)
        for part in sweep:
            inputs[part.rows] += part.inputs
            label[part.rows] += part.label
            scalars += torch.stack(part.scalars)
        return Unknowns(self.net.pull(inputs), label, *scalars.unbind())

    def _forward(self, run: Run, tangents: Tangents) -> Tensor:
        """Derivatives of the end along s directions, [s, P]."""
        state = self._start()
        nothing = torch.zeros(len(tangents.inputs), self.equations, dtype=torch.float64)
        moved = State(nothing, nothing)
        for t in range(self.steps):
            after, _ = run.step(t, state)
            _require_finite(after)
            moved = run.push(t, state, after, moved, tangents)
            state = after
        return moved.theta


def _back(run: Run, states: Iterator[tuple[int, State]], end: State, cotangent: Tensor) -> Iterator[Adjoint]:
    """What each step passes on, last to first."""
    outer, after = State(cotangent, torch.zeros_like(cotangent)), end
    for t, before in states:
        outer, part = run.pull(t, before, after, outer)
        yield part
        after = before


def _require_finite(end: State) -> None:
    if not bool(torch.isfinite(end.theta).all()):
        raise ExhumeError(
            "derivatives need a run that stays finite, but the simulated weights diverge; lower the learning rate"
        )
