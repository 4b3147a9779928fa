"""Polish: refine samples until a simulated training run on them ends at the true weights.

The span equation t = Phi(z)' c holds up to a misfit at the true samples, because gradients are taken at a few fixed
nodes. A simulated run on the candidates tells that misfit: with t_sim its change of the weights,

    defect(z) = t_sim - Phi(z)' argmin_c |t_sim - Phi(z)' c|

is what the nodes miss at z. At the true samples t_sim = t, so t - defect lies in the span exactly. Solving the span
equation for the corrected target, and again, converges to samples whose simulated run ends at the true weights
(defect correction; Stetter, Numer. Math. 1978). A round costs one run of training and one solve.

ReLU gates are the obstacle: a gate that flips between a candidate and the true sample moves its unit's equations by
a jump that no linearisation sees. There are two ways around it, and the correction is exact at the true samples with
either. Smoothed gates, as soft as the candidates are uncertain, let candidates move through the jumps, from far away
and in deep nets. Settled units, whose pre-activations are further from zero, at every candidate, than the candidates
are from the samples, make the last steps fast; as these come closer, more units settle. A way that no longer helps
gives the other its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from exhume.equations.coarse import Coarse, Coarsened
from exhume.equations.part import Part
from exhume.equations.simulation import BoundDynamics, Unknowns
from exhume.evidence import Parameters
from exhume.moves.gates import clearance, moved
from exhume.moves.rate import RateSearch
from exhume.objective import Objective
from exhume.solvers.base import Progress
from exhume.solvers.varpro import VarPro

Choice = tuple[Part | None, float | None]  # equations, and slope of the softplus in place of ReLU
Way = Callable[[BoundDynamics, Parameters, Tensor, float], Choice]

ENOUGH = 3e-4  # a gap this small is the goal: candidates are about as far from the samples


@dataclass(frozen=True, eq=False)
class Polished:
    """What polishing reached.

    Args:
        z: coordinates of the candidates in the best round [m, q].
        gap: |t_sim - t| / |t| there, in the weighted equations of the span equation.
        before: the same where it started.
        trace: the same after each round.
        diverged: whether the very first simulation left the finite numbers.
        factor: steps of the run that the simulation made one, at most.
        error: estimated error of the simulation, relative to the change, at most.
        left: share of the candidates' errors that is left, as far as the weights tell.
        better: whether the candidates may replace those it started from. A wrong recipe, or a wrong set of
            candidates, leaves a gap that moving them cannot close; what they gain by trying is no evidence.
    """

    z: Tensor
    gap: float
    before: float
    trace: tuple[float, ...]
    diverged: bool
    factor: float
    error: float
    left: float
    better: bool

    @property
    def near(self) -> bool:
        """Whether the simulated run ends as near to the true weights as it can be told."""
        return self.gap <= max(self.error, ENOUGH)


@dataclass(frozen=True, eq=False)
class _State:
    """Candidates, the simulated run on them, and how far it ends from the true weights.

    Args:
        z: [m, q].
        end: of the run.
        gap: in all equations.
        error: in those that were just solved, a measure of the candidates' errors.
    """

    z: Tensor
    end: Coarsened
    gap: float
    error: float


@dataclass(frozen=True)
class Polish:
    """Configuration of the defect correction.

    Args:
        rounds: most solves; each is followed by one simulation, or two after an overshoot.
        margin: a unit is settled if every pre-activation is this many times further from zero than the error of a
            candidate would typically move it.
        surplus: equations kept for each unknown, even if units must be used that are not settled: few are clean,
            many are well conditioned, and a round that does not help gives the next its turn.
        softness: width of a smoothed gate, in pre-activations that the error of a candidate would typically move.
        turn: a round that leaves more of the gap than this gives the next way of treating gates its turn.
        astray: a round that ends with more than this times the smallest gap is undone.
        patience: rounds without a smaller gap before giving up.
        largest: gap at the start above which the recipe is taken to be another one.
        solver: of the corrected equation.
        coarse: how long runs are simulated.
        rate: search for the learning rate where the stated one does not fit.
    """

    rounds: int = 40
    margin: float = 2.0
    surplus: tuple[float, ...] = (2.0, 3.0, 5.0, 8.0)
    softness: float = 2.0
    turn: float = 0.8
    astray: float = 1.3
    patience: int = 9
    largest: float = 0.3
    solver: VarPro = VarPro()
    coarse: Coarse = Coarse()
    rate: RateSearch = RateSearch()

    def run(
        self,
        objective: Callable[[Part | None, float | None], Objective],
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
        everything = objective(None, None)

        def reach(z: Tensor, problem: Objective) -> _State:
            end = self.coarse.simulate(dynamics, unknowns(z))
            return _State(z, end, *(distance(o, dynamics, end) for o in (everything, problem)))

        best = now = reach(z, everything)
        before, trace, idle = best.gap, [best.gap], 0
        factor, inexact = now.end.factor, now.end.error
        ways = self._ways(dynamics)

        def look(_: float) -> bool:
            return progress(best.gap)

        for _ in range(self.rounds if before < self.largest else 0):
            # Nearer than the simulation is exact there is nothing to see.
            if best.gap <= max(now.end.error, ENOUGH) or idle == self.patience:
                break
            problem = objective(*ways[0](dynamics, now.end.end, now.z, now.error))
            solved = self._corrected(problem, dynamics, now.end.end, now.z, look)
            after = reach(solved, problem)
            if now is best and after.gap > best.gap:
                # From the best point an overshoot is worth a shorter step.
                half = reach(problem.space.retract(now.z + 0.5 * (after.z - now.z)), problem)
                after = min(after, half, key=lambda state: state.gap)
            trace.append(after.gap)
            factor, inexact = max(factor, after.end.factor), max(inexact, after.end.error)
            if after.gap > self.turn * now.gap:
                ways = (*ways[1:], ways[0])
            idle = 0 if after.gap < best.gap else idle + 1
            best = min(best, after, key=lambda state: state.gap)
            # A somewhat larger gap may lie on the way to a smaller one; a much larger one does not.
            now = after if after.gap < self.astray * best.gap else best
            if progress(after.gap):
                break
        left = best.gap / before if math.isfinite(before) else math.inf
        return Polished(
            z=best.z,
            gap=best.gap,
            before=before,
            trace=tuple(trace),
            diverged=not math.isfinite(before),
            factor=factor,
            error=inexact,
            left=left,
            better=left <= 0.5,
        )

    def _corrected(
        self, problem: Objective, dynamics: BoundDynamics, end: Parameters, z: Tensor, progress: Progress
    ) -> Tensor:
        """Solve the span equation for the target without the defect that the nodes have at z."""
        equation = problem.equation
        target = equation.target()
        simulated = target + equation.vector(_difference(end, dynamics.net.final))
        defect = problem.aimed_at(simulated).at(z).residual
        return self.solver.minimise(problem.aimed_at(target - defect), z, progress).point.z

    def _ways(self, dynamics: BoundDynamics) -> tuple[Way, ...]:
        """How a round deals with the gates of a net."""
        chain = dynamics.net.chain
        jumps = chain is not None and any(phi.piecewise_linear for phi in chain.activations[:-1])
        if chain is None or not jumps:
            return (_as_it_is,)
        soft = not chain.smoothed(1.0).piecewise_linear
        # Gates of a second layer move every equation of the first: no unit is settled.
        settled = len(chain.weights) == 2 or not soft
        return (
            *([self._smoothed] if soft else []),
            *([partial(self._settled, surplus=s) for s in self.surplus] if settled else []),
        )

    def _smoothed(self, dynamics: BoundDynamics, _: Parameters, z: Tensor, error: float) -> Choice:
        """All units, with gates as soft as the candidates are uncertain."""
        chain, net = dynamics.net.chain, dynamics.net
        assert chain is not None
        typical = float(moved(net.embed(z), net.init[chain.weights[0]], z).median())
        return None, 1 / max(self.softness * error * typical, 1e-12)

    def _settled(
        self, dynamics: BoundDynamics, end: Parameters, z: Tensor, error: float, surplus: float
    ) -> Choice:
        """The units of the first layer that no gate can surprise."""
        free = clearance(dynamics, end, z)
        m, q = z.shape
        least = math.ceil(surplus * m * q / (q + 2))
        kept = max(int((free > self.margin * error).sum()), least)
        return Part(free.argsort(descending=True)[:kept].sort().values, rest=True, share=1.0, seed=0), None


def _as_it_is(*_: object) -> Choice:
    return None, None


def distance(problem: Objective, dynamics: BoundDynamics, end: Coarsened) -> float:
    """Distance of the simulated weights from the true ones in the equations of a problem, relative to |t|."""
    if end.diverged:
        return math.inf
    missed = problem.equation.vector(_difference(end.end, dynamics.net.final))
    return float(missed.norm()) / problem.equation.energy**0.5


def _difference(a: Parameters, b: Parameters) -> Parameters:
    return {k: a[k] - p for k, p in b.items()}
