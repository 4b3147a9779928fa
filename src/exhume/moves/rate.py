"""The learning rate that fits the weights, where the stated one does not or none is stated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from exhume.equations.coarse import Coarse

WORST = 1e3  # stands for an infinite gap in the refinement, which interpolates


@dataclass(frozen=True)
class Fitted:
    """A learning rate read off the weights.

    Args:
        lr: the rate with the smallest gap.
        gap: of the simulated weights from the true ones there.
        sharp: whether rates half as large again, and smaller, fit clearly worse. After training to convergence the
            end does not depend on the rate: the gap is flat, and the rate is no finding.
    """

    lr: float
    gap: float
    sharp: bool


@dataclass(frozen=True)
class RateSearch:
    """Search for the learning rate with the smallest gap, candidates held fixed.

    lr = argmin |t_sim(lr) - t| over [centre / span, centre span]

    The rate is identifiable only where training stopped on its way, and then, in small steps, only its product with
    the number of steps is: as good as the number of steps is what is found.

    Args:
        span: factor searched either way.
        points: of the coarse grid in log lr, odd so that the centre is one.
        exactness: of log lr.
        step: factor either way at which a sharp gap must be twice as large.
        coarse: how long runs are simulated, less exactly than to polish.
    """

    span: float = 20.0
    points: int = 13
    exactness: float = 2e-4
    step: float = 1.5
    coarse: Coarse = Coarse(limit=500, tolerance=0.02)

    def run(self, gap: Callable[[float], float], centre: float) -> Fitted:
        """Find the rate.

        Args:
            gap: distance of the simulated weights from the true ones at a rate; infinite if the run diverges.
            centre: of the search.
        """
        width = math.log(self.span)
        spacing = 2 * width / (self.points - 1)
        grid = [math.log(centre) - width + i * spacing for i in range(self.points)]
        gaps = [gap(math.exp(x)) for x in grid]
        least = min(gaps)
        if not math.isfinite(least):
            return Fitted(centre, math.inf, False)
        middle = grid[gaps.index(least)]
        refined = minimize_scalar(
            lambda x: min(gap(math.exp(x)), WORST),
            bounds=(max(middle - spacing, grid[0]), min(middle + spacing, grid[-1])),
            method="bounded",
            options={"xatol": self.exactness},
        )
        x, least = min(((refined.x, refined.fun), (middle, least)), key=lambda pair: pair[1])
        lr = math.exp(x)
        sharp = bool(min(gap(lr / self.step), gap(lr * self.step)) > 2 * least)
        return Fitted(lr, float(least), sharp)
