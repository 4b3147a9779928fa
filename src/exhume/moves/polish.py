"""Polish: refine samples until a simulated training run on them ends at the true weights.

The span equation t = Phi(z)' c holds up to a misfit at the true samples, because gradients are taken at a few fixed
nodes. A simulated run on the candidates tells that misfit: with t_sim its change of the weights,

    defect(z) = t_sim - Phi(z)' argmin_c |t_sim - Phi(z)' c|

is what the nodes miss at z. At the true samples t_sim = t, so t - defect lies in the span exactly. Solving the span
equation for the corrected target, and again, converges to samples whose simulated run ends at the true weights
(defect correction; Stetter, Numer. Math. 1978). A round costs one run of training and one solve.

ReLU gates are the obstacle: a gate that flips between a candidate and the true sample moves its unit's equations by
a jump that no linearisation sees. So a round uses only settled units, whose pre-activations are further from zero, at
every candidate, than the candidates are from the samples; as these come closer, more units settle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equations.part import Part
from exhume.equations.simulation import BoundDynamics, Simulation, Unknowns
from exhume.evidence import Parameters
from exhume.objective import Objective
from exhume.solvers.base import Progress
from exhume.solvers.varpro import VarPro

CHORD = (0.0, 0.25, 0.5, 0.75, 1.0)  # where on the way from theta_0 to the simulated end gates are looked at


@dataclass(frozen=True, eq=False)
class Polished:
    """What polishing reached.

    Args:
        z: coordinates of the candidates in the best round [m, q].
        gap: |t_sim - t| / |t| there.
        before: the same where it started.
        trace: the same after each round.
        diverged: whether the very first simulation left the finite numbers.
    """

    z: Tensor
    gap: float
    before: float
    trace: tuple[float, ...]
    diverged: bool


@dataclass(frozen=True)
class Polish:
    """Configuration of the defect correction.

    Args:
        rounds: most simulations.
        margin: a unit is settled if every pre-activation is this many times further from zero than the error of a
            candidate would typically move it.
        surplus: equations kept for each unknown, even if units must be used that are not settled.
        patience: rounds without a smaller gap before giving up.
        largest: gap at the start above which the recipe is taken to be another one.
        solver: of the corrected equation.
    """

    rounds: int = 12
    margin: float = 2.0
    surplus: float = 3.0
    patience: int = 3
    largest: float = 0.3
    solver: VarPro = VarPro()

    def run(
        self,
        objective: Callable[[Part | None], Objective],
        dynamics: BoundDynamics,
        unknowns: Callable[[Tensor], Unknowns],
        z: Tensor,
        progress: Progress,
    ) -> Polished:
        """Refine candidates; those of the round with the smallest gap are returned.

        Args:
            objective: the span equation on a part of the equations, or on all.
            dynamics: the simulated run.
            unknowns: labels and recipe that belong to candidates at z.
            z: where to start [m, q].
            progress: called with the gap after each round; returning True stops.
        """
        everything = objective(None)
        end = dynamics.simulate(unknowns(z))
        before = gap = self._gap(everything, dynamics, end)
        best, error, trace, idle = (gap, z), gap, [gap], 0
        if not before < self.largest:
            return Polished(z, before, before, (before,), end.diverged)
        for _ in range(self.rounds):
            part = self._settled(dynamics, end.end, z, error)
            problem = objective(part)
            z = self._corrected(problem, dynamics, end.end, z)
            end = dynamics.simulate(unknowns(z))
            gap, error = (self._gap(o, dynamics, end) for o in (everything, problem))
            trace.append(gap)
            idle = 0 if gap < best[0] else idle + 1
            best = min(best, (gap, z), key=lambda pair: pair[0])
            if progress(gap) or idle == self.patience or not math.isfinite(gap):
                break
        return Polished(best[1], best[0], before, tuple(trace), False)

    def _corrected(self, problem: Objective, dynamics: BoundDynamics, end: Parameters, z: Tensor) -> Tensor:
        """Solve the span equation for the target without the defect that the nodes have at z."""
        equation = problem.equation
        target = equation.target()
        simulated = target + equation.vector(_difference(end, dynamics.net.final))
        defect = problem.aimed_at(simulated).at(z).residual
        return self.solver.minimise(problem.aimed_at(target - defect), z).point.z

    def _gap(self, problem: Objective, dynamics: BoundDynamics, end: Simulation) -> float:
        """Distance of the simulated weights from the true ones in the equations of a problem, relative to |t|."""
        if end.diverged:
            return math.inf
        missed = problem.equation.vector(_difference(end.end, dynamics.net.final))
        return float(missed.norm()) / problem.equation.energy**0.5

    def _settled(self, dynamics: BoundDynamics, end: Parameters, z: Tensor, error: float) -> Part | None:
        """The units of the first layer that no gate can surprise; None, for all, where nothing jumps."""
        chain = dynamics.net.chain
        if chain is None or not chain.activations[0].piecewise_linear or len(chain.weights) == 1:
            return None
        distance = clearance(dynamics, end, z)
        m, q = z.shape
        least = math.ceil(self.surplus * m * q / (q + 2))
        kept = max(int((distance > self.margin * error).sum()), least)
        return Part(distance.argsort(descending=True)[:kept].sort().values, rest=True, share=1.0, seed=0)


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
        typical = v.norm(dim=1)[:, None] * w.norm(dim=1) / z.shape[1] ** 0.5
        found = torch.minimum(found, (pre.abs() / typical.clamp_min(1e-300)).amin(0))
    return found


def _difference(a: Parameters, b: Parameters) -> Parameters:
    return {k: a[k] - p for k, p in b.items()}


def told(found: Polished) -> str:
    """What polishing did, as a sentence; a recipe that contradicts the weights is named."""
    if found.diverged:
        return (
            "training on the candidates, simulated with the stated recipe, diverged: the recipe contradicts the"
            " weights (learning rate, momentum or loss), and the candidates were not polished"
        )
    if len(found.trace) == 1:
        return (
            f"training on the candidates, simulated with the stated recipe, ends {found.before:.0%} of the change"
            " away from the true weights: the recipe contradicts them (loss, learning rate, steps, labels), or"
            " candidates are missing or wrong; they were not polished"
        )
    if found.gap > 0.5 * found.before:
        return (
            f"simulated training on the candidates stays {found.gap:.1%} of the change away from the true weights"
            f" ({found.before:.1%} before polishing): a candidate is missing or wrong, or the recipe is not exact"
        )
    return (
        f"candidates were polished until simulated training on them ended {found.gap:.2%} of the change away from the"
        f" true weights ({found.before:.1%} before)"
    )
