"""Samples in closed form: interpolate, slice, diagonalise, scale, polish; and what of it is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.algebra.field import Field
from exhume.algebra.identifiability import (
    IDENTIFIABLE,
    NOT,
    PARTIAL,
    Identifiability,
    Interpolation,
    identify,
    interpolate,
)
from exhume.algebra.interpolation import slices
from exhume.algebra.pencil import Directions, directions
from exhume.algebra.polish import FLAT, Fit, Model, polish
from exhume.algebra.polynomial import slope_of
from exhume.algebra.reduction import Reduced, reduce
from exhume.algebra.search import Searched, search

MOVABLE = 0.1  # relative standard deviation above which a sample is not pinned down
EXCESS = 3.0  # times the noise of the interpolation that samples may leave unexplained
EXACT = 1e-8  # relative residual that counts as zero
UNEXPLAINED = 0.15  # relative residual above which samples may be displaced too far to be certified


@dataclass(frozen=True, eq=False)
class Recovered:
    """Samples recovered from a field, and what is known of them.

    Args:
        x: samples [s, d], with the bias coordinate where there is one (it is 1).
        b: their coefficients in each field and node [K, s].
        identifiability: of the equations.
        certified: which samples the equations determine, [s].
        why: the certificate in one sentence.
        fit: residual, sharpness and deviations; None where nothing was fitted.
        pencil: the directions it started from, None where a search was needed.
        searched: what the search saw, None without one.
        scaled: whether the norms of the samples are determined.
        signed: whether their signs are.
    """

    x: Tensor
    b: Tensor
    identifiability: Identifiability
    certified: Tensor
    why: str
    fit: Fit | None
    pencil: Directions | None
    searched: Searched | None
    scaled: bool
    signed: bool


def recover(
    fields: Sequence[Field],
    c: Sequence[float],
    samples: int | None = None,
    seed: int = 0,
    starts: int = 20,
    stop: Callable[[], bool] = lambda: False,
) -> Recovered:
    """Recover the samples of a polynomial two-layer network.

    Args:
        fields: points and values; several share their samples.
        c: coefficients of the activation, sigma(t) = sum_k c_k t^k.
        samples: their number, if known; the range of the values and of the slices tells it otherwise.
        seed: of slices and starts.
        starts: random starts, where the closed form does not suffice.
        stop: whether time is up.

    Reference: Shen, Wang, Qian, Lei 2026, section 4, with the gradient-field interpolation in place of theirs.
    """
    degrees = tuple(q for q, value in enumerate(c) if q and value)
    reduced = reduce(fields)
    affine = fields[0].affine
    scaled = affine or len(degrees) > 1
    signed = affine or len({q % 2 for q in degrees}) == 2
    interpolations = [interpolate(one.white, degrees) for one in reduced]
    middle = [interpolate(one.white.middle(), degrees) for one in reduced]
    told = max(
        (identify(one, degrees, i) for one, i in zip(reduced, middle, strict=True)),
        key=lambda t: (t.verdict == IDENTIFIABLE, t.verdict != NOT),
    )
    model = Model(tuple(one.field for one in reduced), slope_of(c), reduced[0].last, not scaled)
    basis = reduced[0].basis
    nothing = Recovered(
        basis.new_zeros(0, len(basis)),
        basis.new_zeros(model.nodes, 0),
        told,
        torch.zeros(0, dtype=torch.bool),
        f"Not certified: {told.reason}.",
        None,
        None,
        None,
        scaled,
        signed,
    )
    if max(degrees) < 3:
        return nothing
    pencil, fit = _closed_form(reduced, interpolations, model, degrees, c, samples, seed)
    noise = _noise(interpolations)
    if fit is not None and told.verdict == IDENTIFIABLE:
        explains = (
            fit.residual <= max(EXCESS * noise, EXACT) if noise is not None else fit.residual < UNEXPLAINED
        )
        if explains:
            # What the field itself misses displaces samples by about as much, all at once, unlike noise.
            sound = fit.sharpness > FLAT and fit.residual < UNEXPLAINED
            certified = (fit.deviation < MOVABLE) & sound
            why = (
                f"{told.reason}; the samples leave {fit.residual:.1e} of the equations unexplained, and"
                f" {int(certified.sum())} of {len(certified)} are pinned down"
            )
            return _lift(nothing, basis, fit, certified, why, pencil, None)
    found = search(model, basis.shape[1], samples, noise, seed, starts, stop, [] if fit is None else [fit])
    if found is None:
        return nothing
    if sum(len(f.steps) for f in fields) <= basis.shape[1]:  # samples may reach beyond what so few steps span
        found = replace(found, stable=torch.zeros_like(found.stable), why=told.reason)
    certified = found.stable & (found.fit.deviation < MOVABLE)
    return _lift(
        replace(nothing, identifiability=_softened(told, found)),
        basis,
        found.fit,
        certified,
        found.why,
        pencil,
        found,
    )


def _softened(told: Identifiability, found: Searched) -> Identifiability:
    """A search gives no proof of uniqueness: at best some samples are determined."""
    if bool(found.stable.any()):
        return replace(told, verdict=PARTIAL, reason=f"{told.reason}; {found.why}")
    if told.verdict == IDENTIFIABLE:
        return replace(told, verdict=PARTIAL, reason=f"{told.reason} in theory, but {found.why}")
    return told


def _lift(
    base: Recovered,
    basis: Tensor,
    fit: Fit,
    certified: Tensor,
    why: str,
    pencil: Directions | None,
    searched: Searched | None,
) -> Recovered:
    order = fit.b.abs().sum(0).mul(fit.x.norm(dim=1)).argsort(descending=True)
    fit = replace(fit, x=fit.x[order], b=fit.b[:, order], deviation=fit.deviation[order])
    return replace(
        base,
        x=fit.x @ basis.T,
        b=fit.b,
        certified=certified[order],
        why=why,
        fit=fit,
        pencil=pencil,
        searched=searched,
    )


def _closed_form(
    reduced: tuple[Reduced, ...],
    interpolations: Sequence[Interpolation],
    model: Model,
    degrees: tuple[int, ...],
    c: Sequence[float],
    samples: int | None,
    seed: int,
) -> tuple[Directions | None, Fit | None]:
    """Pencil and polish, in y coordinates; None where a step has no answer."""
    interpolants = [i.best for i in interpolations if i.best is not None]
    r, q = reduced[0].chart.shape
    if (
        not interpolants or r < q
    ):  # at least q samples, which r < q dimensions of the points do not tell apart
        return None, None
    stack = torch.cat([slices(one, seed + k) for k, one in enumerate(interpolants)])
    found = directions(stack, None if samples is None else min(samples, r))
    if found is None:
        return None, None
    white = scale(reduced[0], found.z, degrees, c)
    y = torch.linalg.solve(reduced[0].chart, white.T).T
    if not bool(torch.isfinite(y).all()):
        return found, None
    return found, polish(model, y)


def scale(reduced: Reduced, z: Tensor, degrees: Sequence[int], c: Sequence[float]) -> Tensor:
    """Give unit directions z [s, r] the norm and sign that bias or degrees fix; x' = rho z.

    With a bias, last . y = 1. Without, beta_q = c_q b rho^q is linear in the field for each degree q, and two degrees
    give rho^(q'-q); one degree leaves rho = 1.
    """
    if reduced.last is not None:
        along = z @ torch.linalg.solve(reduced.chart.T, reduced.last)
        floor = 1e-6 * along.abs().max()
        return z / torch.where(along.abs() < floor, floor, along)[:, None]
    if len(degrees) < 2:
        return z
    beta = coefficients_by_degree(reduced, z, degrees)
    rho = z.new_ones(len(z))
    for i in range(len(z)):
        rho[i] = _ratio(beta[:, i], degrees, c)
    return z * rho[:, None]


def coefficients_by_degree(reduced: Reduced, z: Tensor, degrees: Sequence[int]) -> Tensor:
    """Least-squares beta [Q, s] in f'(w) = sum_q sum_i beta_qi q (z_i . w)^(q-1) z_i."""
    white = reduced.white.middle()
    pre, gain = white.points[0] @ z.T, white.gain[0][:, None]
    columns = [torch.einsum("ji,ia->jai", q * pre ** (q - 1) * gain, z).flatten(0, 1) for q in degrees]
    right = white.steps.reshape(-1, 1)
    solved = torch.linalg.lstsq(torch.cat(columns, 1), right, driver="gelsd").solution
    return solved[:, 0].view(len(degrees), len(z))


def _ratio(beta: Tensor, degrees: Sequence[int], c: Sequence[float]) -> float:
    """rho from the pair of degrees that is strongest, a pair of different parity before one of the same."""
    pairs = [(p, q) for p in range(len(degrees)) for q in range(p + 1, len(degrees))]
    odd = [(p, q) for p, q in pairs if (degrees[q] - degrees[p]) % 2]
    p, q = max(odd or pairs, key=lambda pair: float(min(beta[pair[0]].abs(), beta[pair[1]].abs())))
    step = degrees[q] - degrees[p]
    below, above = float(beta[p]) / c[degrees[p]], float(beta[q]) / c[degrees[q]]
    ratio = above / below if below else 1.0
    size = abs(ratio) ** (1 / step)
    return size if step % 2 == 0 or ratio > 0 else -size


def _noise(interpolations: Sequence[Interpolation]) -> float | None:
    """The largest noise that an interpolation shows, or None where none can tell."""
    seen = [one.best.noise for one in interpolations if one.best is not None and one.best.noise is not None]
    return max(seen, default=None)
