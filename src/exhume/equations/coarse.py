"""Long training runs simulated with fewer, larger steps, and an estimate of the error this makes.

Where steps are small, a run is nearly a flow, and T_e / n of its steps can be one: n steps without momentum, of

    h = (1 - kappa^(1/n)) / decay   (T_e lr / (1 - momentum) / n without decay)
    T_e = T - momentum / (1 - momentum)

so that the weights decay by kappa, as in the run itself, and rest where it rests: a step multiplies what no gradient
reaches by 1 - h decay. T_e counts the steps that momentum took to build up. The end is E(k) = E(0) + C k + O(k^2) in
the coarseness k = T_e / n, and the run itself ends at E((1 + momentum) / (1 - momentum)), since momentum bends the
flow as much as steps so many times larger would (modified equation of the heavy ball). So ends at k and 2 k give the
end of the run to second order (Richardson).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.change import simulated_decay
from exhume.equations.risk import flatten, unflatten
from exhume.equations.simulation import BoundDynamics, Unknowns
from exhume.evidence import Parameters, Recipe

GAIN = 2.0  # fall of the error from 2 k to k, less one: 3 for smooth nets, 1 where gates flip


@dataclass(frozen=True, eq=False)
class Coarsened:
    """The end of a run that may have been simulated with larger steps.

    Args:
        end: parameters in folded coordinates.
        factor: steps of the run that the finest simulation made one; 1 if it was simulated as it is.
        error: estimated distance of `end` from the exact one, relative to the true change; 0 for factor 1.
        diverged: whether the run left the finite numbers.
        steps: gradients computed, all simulations together.
    """

    end: Parameters
    factor: float
    error: float
    diverged: bool
    steps: int


@dataclass(frozen=True)
class Coarse:
    """Configuration of the coarse simulation.

    Args:
        limit: runs of up to so many steps are simulated as they are.
        tolerance: largest estimated error, relative to the true change; steps are halved until it is met.
        stiffness: h lambda_max of the largest steps, lambda_max the largest eigenvalue of the loss at either end;
            gradient descent is unstable beyond 2.
        most: gradients that one simulation may take; what needs more is not simulated.
    """

    limit: int = 2000
    tolerance: float = 2e-3
    stiffness: float = 1.0
    most: int = 30_000

    def needed(self, dynamics: BoundDynamics, unknowns: Unknowns) -> float:
        """Gradients that a simulation takes at least."""
        if dynamics.steps <= self.limit:
            return dynamics.steps
        n = _first(dynamics, unknowns, self.stiffness)
        return min(7 * n, dynamics.steps)  # three ends, of n, 2 n and 4 n steps

    def simulate(self, dynamics: BoundDynamics, unknowns: Unknowns) -> Coarsened:
        """Simulate a run on candidates with the largest steps that stability and tolerance allow, or as it is.

        Args:
            dynamics: the run; on mini-batches it is simulated as it is.
            unknowns: what it is simulated with. A run that needs too many gradients counts as diverged.
        """
        if self.needed(dynamics, unknowns) > self.most:
            return Coarsened(dynamics.net.init, 1.0, 0.0, True, 0)
        found, spent = self._larger_steps(dynamics, unknowns)
        if found is not None:
            return found
        exact = dynamics.simulate(unknowns)
        return Coarsened(exact.end, 1.0, 0.0, exact.diverged, spent + exact.steps)

    def _larger_steps(self, dynamics: BoundDynamics, unknowns: Unknowns) -> tuple[Coarsened | None, int]:
        """The end by larger steps, or None if they are not worth it or miss the tolerance; gradients computed."""
        flow, batch = _flow(dynamics, unknowns), dynamics.batch_size
        if flow is None or dynamics.steps <= self.limit or (batch or len(unknowns.z)) < len(unknowns.z):
            return None, 0
        n = math.ceil(_first(dynamics, unknowns, self.stiffness))
        size, ends, spent = float(dynamics.target().norm()), list[Tensor](), 0
        # Beyond a quarter of the steps little is left to gain: three ends cost 7/16 of the run or less.
        while 4 * n <= dynamics.steps and (ends or 16 * n <= dynamics.steps):
            ends.append(flow.end(dynamics, unknowns, n))
            spent += n
            if len(ends) >= 3:
                error = flow.error(ends, n) / size
                if error <= self.tolerance:
                    end = unflatten(flow.extrapolated(ends[-1], ends[-2], n), dynamics.shapes)
                    return Coarsened(end, flow.time / n, error, False, spent), spent
                # At second order each halving of the steps gains a factor of 4 at most.
                halvings = math.floor(math.log2(dynamics.steps / (4 * n)))
                if error > self.tolerance * 4**halvings:
                    break
            n *= 2
        return None, spent


@dataclass(frozen=True, eq=False)
class Flow:
    """A run as a flow.

    Args:
        time: T_e.
        rate: lr / (1 - momentum).
        decay: L2 weight decay.
        kappa: what the run leaves of weights without gradient.
        goal: coarseness whose end is that of the run.
    """

    time: float
    rate: float
    decay: float
    kappa: float
    goal: float

    def end(self, dynamics: BoundDynamics, unknowns: Unknowns, n: int) -> Tensor:
        """End of n steps [P]; NaN if they diverge."""
        h = -math.expm1(math.log(self.kappa) / n) / self.decay if self.decay else self.time / n * self.rate
        lr, none = torch.tensor([h, 0.0], dtype=torch.float64)
        found = replace(dynamics, steps=n).simulate(replace(unknowns, lr=lr, momentum=none))
        return flatten(found.end, dynamics.shapes) * (math.nan if found.diverged else 1.0)

    def extrapolated(self, near: Tensor, far: Tensor, n: int) -> Tensor:
        """The line through the ends of n and n / 2 steps, at the coarseness of the run."""
        k = self.time / n
        return near + (self.goal - k) / k * (far - near)

    def error(self, ends: list[Tensor], n: int) -> float:
        """Estimated error of the line, by its bend at the last three ends, of which the last took n steps.

        With E(k) = E + C k + Q k^2 the line misses Q (goal - k) (goal - 2 k), and momentum of its own Q goal^2.
        """
        bend = ends[-3] - ends[-2] - 2 * (ends[-2] - ends[-1])  # 6 Q k^2
        r = self.goal * n / self.time
        return float(bend.norm()) * (abs((1 - r) * (2 - r)) + r * r) / (2 * GAIN)


def _first(dynamics: BoundDynamics, unknowns: Unknowns, stiffness: float) -> float:
    """Number of the largest steps; infinite where a run is no flow."""
    flow = _flow(dynamics, unknowns)
    if flow is None:
        return math.inf
    return max(8.0, flow.time * flow.rate * curvature(dynamics, unknowns) / stiffness)


def _flow(dynamics: BoundDynamics, unknowns: Unknowns) -> Flow | None:
    """The flow of a run; None where nothing is left of it (momentum never builds up, or all decays at once)."""
    lr, momentum, decay = (float(v) for v in (unknowns.lr, unknowns.momentum, unknowns.weight_decay))
    kappa = simulated_decay(Recipe(lr=lr, steps=dynamics.steps, momentum=momentum, weight_decay=decay))
    time = dynamics.steps - momentum / (1 - momentum)
    if kappa is None or not 0 < kappa < math.inf or time <= 0:
        return None
    return Flow(time, lr / (1 - momentum), decay, kappa, (1 + momentum) / (1 - momentum))


def curvature(dynamics: BoundDynamics, unknowns: Unknowns, iterations: int = 15) -> float:
    """Largest eigenvalue, in size, of the Hessian of the loss at theta_0 and at theta_f, by power iterations."""
    net, label = dynamics.net, unknowns.label
    v = net.embed(unknowns.z)
    largest = 0.0
    for weights in (net.init, net.final):
        theta = flatten(weights, dynamics.shapes)
        d = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0), dtype=theta.dtype)
        size = 0.0
        for _ in range(iterations):
            d = dynamics.risk.pull(theta, v, label, d / d.norm().clamp_min(1e-300))[0]
            size = float(d.norm())
        largest = max(largest, size)
    return largest
