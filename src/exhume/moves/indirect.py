"""Polish by indirect inference: what an equation errs by is seen where the samples are known.

The feature equation places a sample with a small error b, since features move in training. Train on the candidates z,
in simulation, place them anew in the weights that come out, and they land at z + b(z), with b nearly that at the
samples. So, with z_0 what was found in the true weights,

z <- z_0 - b(z) = z + (z_0 - T(z)),   T(z) = z + b(z)

has the samples as a fixed point (Gourieroux, Monfort and Renault, J. Appl. Econometrics 1993). No gate stands in the
way, as features are continuous; a round costs one simulated run and one placing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from exhume.equations.coarse import Coarse
from exhume.equations.part import Part
from exhume.equations.simulation import BoundDynamics, Unknowns
from exhume.evidence import Parameters
from exhume.moves.polish import Polished, distance
from exhume.moves.rate import RateSearch
from exhume.objective import Objective
from exhume.solvers.base import Progress

BETTER = 0.75  # candidates are replaced if at most this much is left of the gap, and of the distance of z_0 and T(z)
ENOUGH = 1e-5  # relative distance of z_0 and T(z) below which rounds gain nothing


@dataclass(frozen=True)
class Indirect:
    """Configuration of the correction.

    Args:
        place: T, where the equation places candidates [m, q] in simulated weights of the folded net.
        rounds: most simulated runs.
        largest: gap at the start above which the recipe is taken to be another one.
        coarse: how long runs are simulated.
        rate: search for the learning rate where the stated one does not fit.
    """

    place: Callable[[Parameters, Tensor], Tensor]
    rounds: int = 6
    largest: float = 0.3
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
        """Correct candidates; those are returned that are placed nearest to where they were found.

        A wrong recipe can be fitted as well, since z has as many unknowns as equations here: rounds whose simulated
        run ends further from the true weights than the first one's are left out.

        Args:
            objective: the span equation on a part of the equations, or on all; it measures the gap.
            dynamics: the simulated run.
            unknowns: labels and recipe that belong to candidates at z.
            z: as the equation placed them in the true weights [m, q].
            progress: called with the gap after each round; returning True stops.
        """
        everything, found, here = objective(None, None), z, z
        best, nearest, trace, first = z, math.inf, [], math.inf
        reached, factor, inexact = math.inf, 1.0, 0.0
        for round in range(self.rounds):
            end = self.coarse.simulate(dynamics, unknowns(here))
            gap = distance(everything, dynamics, end)
            trace.append(gap)
            factor, inexact = max(factor, end.factor), max(inexact, end.error)
            if not gap < self.largest:
                reached = min(reached, gap)
                break
            missed = found - self.place(end.end, here)
            error = float(missed.norm() / found.norm())
            if round == 0:
                first = error
            if error < nearest and gap <= trace[0]:
                best, nearest, reached = here, error, gap
            elif error > 2 * nearest:
                break
            if progress(gap) or error < ENOUGH:
                break
            here = everything.space.retract(here + missed)
        # The distance falls with a wrong recipe as well, the gap does not: errors are as large as the worse says.
        left = max(nearest / first, reached / trace[0]) if 0 < first < math.inf else math.inf
        return Polished(
            z=best,
            gap=reached,
            before=trace[0],
            trace=tuple(trace),
            diverged=not math.isfinite(trace[0]),
            factor=factor,
            error=inexact,
            left=left,
            better=left <= BETTER,
        )
