"""Samples by many starts where no closed form determines them, and which of them come back every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.algebra.polish import FLAT, Fit, Model, polish

EXACT = 1e-7  # relative residual that counts as zero where the values have no known noise
LOOSE = 0.3  # relative residual above which a fit describes nothing
SAME = 0.99  # cosine above which two directions are one sample
AGAIN = 0.8  # share of the good runs that a sample must reappear in
HELPS = 0.7  # one more sample must lower the residual at least to this share
ENOUGH = 5  # good runs after which no more are needed
EVALUATIONS = 300  # of one start
FEWEST = 3  # good runs without which nothing can be called stable


@dataclass(frozen=True, eq=False)
class Searched:
    """What many starts found.

    Args:
        fit: the best.
        stability: share of the good runs in which each sample of the best one reappears [s].
        stable: whether a sample may count as determined [s].
        good: number of runs that reached the floor.
        runs: number of runs with that many samples.
        why: what came of it, as a sentence.
    """

    fit: Fit
    stability: Tensor
    stable: Tensor
    good: int
    runs: int
    why: str


def search(
    model: Model,
    dimension: int,
    samples: int | None,
    noise: float | None,
    seed: int,
    starts: int,
    stop: Callable[[], bool],
    known: Sequence[Fit] = (),
) -> Searched | None:
    """Fit as many samples as the values' range has dimensions, then more, until the residual is down to the noise.

    A sample counts as stable when it reappears in most runs that reach the floor and the equations are stiff there.
    Nothing is stable where the equations are fewer than the unknowns, or the Jacobian has a null direction: then a
    residual of zero means nothing.

    Args:
        model: the equations.
        dimension: of the range.
        samples: their number, if known.
        noise: relative noise of the values, if known.
        seed: of the starts.
        starts: random starts for each number of samples.
        stop: whether time is up.
        known: fits that exist already.
    """
    equations = sum(f.steps.numel() for f in model.fields)
    per_sample = dimension - (1 if model.scaleless or model.last is not None else 0) + model.nodes
    most = equations // per_sample
    numbers = [samples] if samples is not None else list(range(dimension, min(2 * dimension, most) + 1))
    floor = EXACT if noise is None else max(EXACT, 1.5 * noise)
    best: Searched | None = None
    for s in numbers:
        generator = torch.Generator().manual_seed(seed)
        fits = [fit for fit in known if len(fit.x) == s]
        for _ in range(starts):
            if stop():
                break
            fits.append(polish(model, start(model, s, dimension, generator), None, EVALUATIONS, 1e-10))
            if sum(fit.residual <= floor for fit in fits) >= ENOUGH:
                break
        if not fits:
            break
        lowest = min(fits, key=lambda fit: fit.residual)
        if lowest.residual <= LOOSE:
            fits.append(polish(model, lowest.x, lowest.b))
        found = _judge(fits, floor, s * per_sample, equations)
        helped = best is None or found.fit.residual < HELPS * best.fit.residual
        if best is None or found.fit.residual < best.fit.residual:
            best = found
        if found.good or stop() or not helped:
            break
    return best


def start(model: Model, s: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Random directions of the scale that makes pre-activations of order one, [s, q].

    Args:
        model: the equations; its bias functional gives the norm, where there is one.
        s: number of samples.
        dimension: q.
        generator: source of the draw.
    """
    x = torch.randn(s, dimension, generator=generator, dtype=torch.float64)
    if model.last is not None:
        # Spread like the affine set's own distance from zero, the one length that the equations give away.
        length = 1 / float(model.last.norm())
        along = model.last * length
        x = x - (x @ along)[:, None] * along
        return x * (length / x.norm(dim=1, keepdim=True)) + along * length
    x = x / x.norm(dim=1, keepdim=True)
    if model.scaleless:
        return x
    typical = float(torch.cat([f.points.flatten(0, 1) for f in model.fields]).norm(dim=1).median())
    return x / typical * dimension**0.5


def _judge(fits: list[Fit], floor: float, unknowns: int, equations: int) -> Searched:
    best = min(fits, key=lambda fit: fit.residual)
    good = [fit for fit in fits if fit.residual <= max(floor, 1.05 * best.residual) and fit.residual < LOOSE]
    s = len(best.x)
    stability = torch.stack([_reappears(best.x, fit.x) for fit in good]).mean(0) if good else torch.zeros(s)
    reached = bool(good) and best.residual <= max(floor, EXACT)
    enough = equations > unknowns and best.sharpness > FLAT and len(good) >= FEWEST
    stable = (stability >= AGAIN) & enough & reached
    counts = (
        f"{len(good)} of {len(fits)} starts with {s} samples end at the lowest residual, {best.residual:.1e}"
    )
    if equations <= unknowns:
        why = f"{equations} equations are no more than the {unknowns} unknowns of {s} samples, whatever fits"
    elif not best.sharpness > FLAT:
        why = f"{counts}, but the Jacobian is singular there, so the samples may move and fit as well"
    elif not reached:
        why = f"{counts}, above what noise explains"
    else:
        why = f"{counts}, and {int(stable.sum())} samples reappear in {AGAIN:.0%} of these"
    return Searched(best, stability.to(best.x.dtype), stable, len(good) if reached else 0, len(fits), why)


def _reappears(x: Tensor, other: Tensor) -> Tensor:
    """Whether each direction of x [s, q] is, up to sign, among those of `other`, as 0 or 1 [s]."""
    a, b = (v / v.norm(dim=1, keepdim=True).clamp_min(1e-300) for v in (x, other))
    return ((a @ b.T).abs().amax(1) > SAME).to(x.dtype)
