"""Polish with the stated recipe, or with the learning rate that fits the weights; and say what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from exhume.equations.coarse import curvature
from exhume.equations.part import Part
from exhume.equations.simulation import BoundDynamics, Unknowns
from exhume.evidence import Recipe
from exhume.moves.indirect import Indirect
from exhume.moves.polish import Polish, Polished, distance
from exhume.moves.telling import ended, none_fits, rate_in_vain, rate_told, told, too_long
from exhume.objective import Objective
from exhume.solvers.base import Progress

FITS = 0.01  # a rate that leaves a smaller gap is the right one, even where polishing does not halve it


def refine(
    polish: Polish | Indirect,
    recipe: Recipe,
    objective: Callable[[Part | None, float | None], Objective],
    dynamics: BoundDynamics,
    unknowns: Callable[[Tensor, float], Unknowns],
    z: Tensor,
    progress: Progress,
) -> tuple[Polished | None, list[str]]:
    """Refine candidates by simulated training.

    Args:
        polish: how.
        recipe: as stated; lacks nothing but perhaps the learning rate.
        objective: the span equation on a part of the equations, or on all.
        dynamics: the simulated run.
        unknowns: what belongs to candidates at z and a learning rate.
        z: where to start [m, q].
        progress: called with the gap after each simulation; returning True stops.

    Returns:
        The refined candidates, or None if those at z must stay as they are; and sentences.
    """
    notes = []
    if recipe.batch_size is not None and recipe.batch_size < len(z):
        notes.append(
            f"training was simulated on all {len(z)} candidates at every step, not on batches of"
            f" {recipe.batch_size}, whose order is unknown"
        )
    everything, stopped = objective(None, None), False

    def tell(gap: float) -> bool:
        nonlocal stopped
        stopped = progress(gap) or stopped
        return stopped

    def run(lr: float) -> Polished:
        return polish.run(objective, dynamics, lambda at: unknowns(at, lr), z, tell)

    def gap(lr: float) -> float:
        if stopped:
            return math.inf
        found = distance(everything, dynamics, polish.rate.coarse.simulate(dynamics, unknowns(z, lr)))
        tell(found)
        return found

    rate = recipe.lr or stable(dynamics, unknowns(z, 0.0)) / polish.rate.span
    needed = polish.coarse.needed(dynamics, unknowns(z, rate))
    if needed > polish.coarse.most:
        return None, [*notes, too_long(dynamics.steps, needed, polish.coarse.most)]
    stated = None if recipe.lr is None else run(recipe.lr)
    if stopped and (stated is None or not stated.better):
        return None, [*notes, ended()]
    if stated is not None and (stated.better or stated.near):
        return (stated if stated.better else None), [*notes, told(stated, "the stated recipe")]
    fitted = polish.rate.run(gap, rate)
    if stopped:
        return None, [*notes, ended()]
    before = math.inf if stated is None else stated.before
    if not (fitted.gap < polish.largest and fitted.gap <= 0.5 * before):
        return None, [*notes, none_fits() if stated is None else told(stated, "the stated recipe")]
    found = run(fitted.lr)
    if not (found.better or found.near or found.gap < FITS):
        return None, [*notes, rate_in_vain(fitted, found, stated)]
    said = rate_told(fitted, recipe.lr)
    return (found if found.better else None), [*notes, said, told(found, "that learning rate")]


def stable(dynamics: BoundDynamics, unknowns: Unknowns) -> float:
    """Largest learning rate at which SGD is stable, 2 (1 + momentum) / lambda_max."""
    return 2 * (1 + float(unknowns.momentum)) / max(curvature(dynamics, unknowns), 1e-300)
