"""Which candidates are real, without looking at the truth: equations left out of the fit must need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.evidence import Evidence
from exhume.linalg import gram_solver, solved
from exhume.moves.prune import merge
from exhume.objective import Objective, Point
from exhume.spaces import Space

# Fitted to the "fit" victims of benchmarks/calibration.py and frozen; see docs/certificate.md.
# log odds = ODDS . (1, log score, log deviation, log agreement)
# log error = ERROR . (1, log deviation, log agreement)
ODDS = (-3.4, 0.34, -0.67, -2.0)
ERROR = (-0.2, 0.34, 0.48)
MIN_PROBABILITY = 0.8
FALSE_RATE = 0.032  # upper end of the 95% interval on those victims
WITNESS = 5000  # added to the seed for the independent search
UNKNOWN = 0.3  # stands for a deviation or an agreement that was not computed: as large as a match may be
SAME = 0.1  # relative distance below which two candidates are one
UNEXPLAINED = (
    0.3  # share of the held-out energy left over, above which the equation does not describe the weights
)
SLACK = 0.5  # how far training on squared loss may overshoot a label

NOTES = (
    "A fifth of the hidden units took no part in search and fit; a certified candidate is needed to predict them,"
    " pinned down by the equations, and found again by an independent search.",
    "The error of a candidate is an estimate from the same three numbers, not a bound.",
)


@dataclass(frozen=True, eq=False)
class Certificate:
    """What each candidate earned on equations that the search and the fit never used.

    Args:
        score: rise of the held-out residual without the candidate, relative to that residual [m].
        deviation: relative standard deviation of the candidate, given what the held-out equations miss [m].
        agreement: relative distance to the nearest sample of an independent search [m].
        probability: calibrated probability that the candidate matches a training sample [m].
        error_estimate: expected relative L2 error, an estimate and not a bound [m].
        certified: whether the probability suffices, and nothing else speaks against the candidate [m].
        held_out: held-out residual over held-out energy, with all candidates.
        chance: the same with as many random points of the same space, the null.
        false_rate: share of certified candidates that were not real, on the victims that set the thresholds.
        notes: what it rests on, one sentence each.
    """

    score: Tensor
    deviation: Tensor
    agreement: Tensor
    probability: Tensor
    error_estimate: Tensor
    certified: Tensor
    held_out: float
    chance: float
    false_rate: float
    notes: tuple[str, ...]

    @property
    def recovered(self) -> int:
        """Number of candidates certified."""
        return int(self.certified.sum())

    def take(self, index: Tensor) -> Certificate:
        """The certificate of the candidates at `index`, in that order."""
        names = ("score", "deviation", "agreement", "probability", "error_estimate", "certified")
        score, deviation, agreement, probability, error, certified = (
            getattr(self, name)[index] for name in names
        )
        return replace(
            self,
            score=score,
            deviation=deviation,
            agreement=agreement,
            probability=probability,
            error_estimate=error,
            certified=certified,
        )

    def polished(self, ratio: float, moved: Tensor) -> Certificate:
        """The certificate after simulated training refined the candidates it was given for.

        Args:
            ratio: share of the candidates' errors that is left, see `Polished`. Weak candidates gain less than strong
                ones, so estimates fall to a tenth at most.
            moved: relative distance that each candidate moved [m]; beyond that of a match it is another candidate.
        """
        return replace(
            self,
            error_estimate=self.error_estimate * max(ratio, 0.1),
            certified=self.certified & (moved < UNKNOWN),
        )


def certify(
    evidence: Evidence,
    fit: Bound,
    held: Bound,
    found: Tensor,
    objective: Objective,
    final: Point,
    others: Tensor,
) -> Certificate:
    """Judge candidates by equations that neither search nor fit has seen.

    log odds_i = a . (1, log score_i, log deviation_i, log agreement_i)

    Certified are candidates of sufficient odds, but for copies of a better one and for those where the network's
    output is out of the range of the labels it was trained to; none where the held-out equations stay unexplained.

    Args:
        evidence: what was attacked.
        fit: the equations the candidates were found on.
        held: the equations left out.
        found: coordinates of the candidates as found on `fit` [m, q].
        objective: all equations.
        final: the candidates after the fit on all equations.
        others: model inputs that were found independently [k, d]: by another search on other equations, or read
            off neurons that a single sample activated.
    """
    score, held_out = held_out_rise(fit, held, found)
    u = objective.space.expand(final.z)
    chance = by_chance(fit, held, objective.space, u)
    deviation = spread(objective, final, held_out) / u.norm(dim=1).clamp_min(1e-30)
    agreement = nearest(u, others)
    logs = features(score, deviation, agreement)
    probability = torch.sigmoid(logs @ score.new_tensor(ODDS))
    certified = (probability > MIN_PROBABILITY) & ~copies(u, probability) & ~implausible(evidence, u)
    certified &= ~confused(u, agreement) & (held_out < UNEXPLAINED)
    return Certificate(
        score=score,
        deviation=deviation,
        agreement=agreement,
        probability=probability,
        error_estimate=(logs[:, [0, 2, 3]] @ score.new_tensor(ERROR)).exp(),
        certified=certified,
        held_out=held_out,
        chance=chance,
        false_rate=FALSE_RATE,
        notes=(*NOTES, told(held_out, chance)),
    )


def by_chance(fit: Bound, held: Bound, space: Space, like: Tensor, draws: int = 5) -> float:
    """Median share of the held-out energy that as many random points of the space leave unexplained.

    Args:
        fit: the equations that multipliers are solved on.
        held: the equations left out.
        space: where the candidates live.
        like: model inputs whose number and root mean square norm the points share [m, d].
        draws: sets of points.
    """
    generator, norm = torch.Generator().manual_seed(0), float(like.square().sum(1).mean().sqrt())
    sets = [space.random(len(like), norm, generator) for _ in range(draws)]
    return float(torch.tensor([left_out(fit, held, z)(torch.arange(len(z))) for z in sets]).median())


def told(held_out: float, chance: float) -> str:
    """The held-out residual beside its null, as a sentence."""
    return (
        f"The candidates leave {held_out:.2g} of the held-out equations unexplained; as many random points of the"
        f" same space leave {chance:.2g}."
    )


def features(score: Tensor, deviation: Tensor, agreement: Tensor) -> Tensor:
    """(1, log score, log deviation, log agreement) of each candidate [m, 4], limited to where they say something."""
    sizes = [values.nan_to_num(UNKNOWN).clamp(1e-4, 1e4) for values in (deviation, agreement)]
    return torch.stack([torch.ones_like(score), *(v.log() for v in (score.clamp(1e-3, 1e4), *sizes))], 1)


def copies(u: Tensor, probability: Tensor) -> Tensor:
    """Whether each model input u [m, d] nearly coincides with a more probable one, [m]."""
    copy = torch.ones_like(probability, dtype=torch.bool)
    copy[merge(u, probability.argsort(descending=True), SAME)] = False
    return copy


def confused(u: Tensor, agreement: Tensor) -> Tensor:
    """Whether another search agreed no better with a candidate than half its distance to the next candidate, [m].

    Where all candidates of two searches crowd into one place, each finds some other nearby, and that says nothing
    (the ratio test of Lowe, IJCV 2004). Copies of a candidate are not other candidates.

    Args:
        u: candidates as model inputs [m, d].
        agreement: relative distance of each to what the other search found [m]; NaN agrees with everything.
    """
    apart = torch.cdist(u, u) / u.norm(dim=1, keepdim=True).clamp_min(1e-30)
    own = torch.where(apart > SAME, apart, torch.inf).amin(1)
    return agreement > 0.5 * own


def held_out_rise(fit: Bound, held: Bound, z: Tensor) -> tuple[Tensor, float]:
    """How much worse the held-out equations are predicted when a candidate is removed.

    rise_i = (|t_B - Phi_B' c^(-i)|^2 - |t_B - Phi_B' c|^2) / |t_B - Phi_B' c|^2

    with c the multipliers that fit the equations A with all candidates, c^(-i) those without candidate i.

    Args:
        fit: the equations A that the candidates were found on.
        held: the equations B left out.
        z: coordinates of the candidates [m, q].

    Returns:
        The rise of each candidate [m], and |t_B - Phi_B' c|^2 / |t_B|^2.
    """
    residual, everyone = left_out(fit, held, z), torch.arange(len(z))
    # The subtraction is exact to rounding only, so a perfect prediction must not divide by noise.
    base = max(residual(everyone), 1e-13)
    if len(z) == 1:
        return torch.tensor([1 / base - 1], dtype=torch.float64), base
    rises = [max(residual(everyone[everyone != i]), 1e-13) / base - 1 for i in range(len(z))]
    return torch.tensor(rises, dtype=torch.float64), base


def left_out(fit: Bound, held: Bound, z: Tensor) -> Callable[[Tensor], float]:
    """Share of the held-out energy that some of the candidates leave, |t_B - Phi_B' c|^2 / |t_B|^2.

    Args:
        fit: the equations that the multipliers c are solved on.
        held: the equations B.
        z: coordinates of all candidates [m, q].

    Returns:
        A function of the indices of the candidates kept.
    """
    gram_fit, gram_held = fit.gram(z), held.gram(z)
    k = len(gram_fit) // len(z)
    right_fit, right_held = (part.inner(z, part.target()).view(len(gram_fit), -1) for part in (fit, held))

    def residual(kept: Tensor) -> float:
        index = (kept[:, None] * k + torch.arange(k)).flatten()
        c = solved(gram_solver(gram_fit[index][:, index]), right_fit[index])
        value = held.energy - 2 * (c * right_held[index]).sum() + (c * (gram_held[index][:, index] @ c)).sum()
        return float(value) / held.energy

    return residual


def spread(objective: Objective, point: Point, held_out: float, largest: int = 4000) -> Tensor:
    """Standard deviation of each candidate, from its block of the inverse Hessian, [m].

    sigma_i^2 = 2 rho / (P - unknowns) * trace (H^-1)_ii

    with H the Hessian of the loss (relative to |t|^2) and rho the share of the held-out energy left unexplained: the
    fitted residual would say too little, since candidates bend to it. NaN above `largest` unknowns, where H is not
    formed.

    Args:
        objective: all equations.
        point: the candidates.
        held_out: rho.
        largest: most unknowns.
    """
    m, q = point.z.shape
    if m * q > largest:
        return torch.full((m,), torch.nan, dtype=torch.float64)
    hessian = objective.hessian(point)
    # A direction the equations do not see makes the deviation huge, not infinite.
    hessian.diagonal().add_(1e-10 * float(hessian.diagonal().mean()) + 1e-300)
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed):
        return torch.full((m,), torch.nan, dtype=torch.float64)
    freedom = max(objective.equation.equations - point.coef.numel() - m * q, 1)
    trace = torch.cholesky_inverse(factor).diagonal().view(m, q).sum(1)
    return (2 * held_out / freedom * trace).sqrt()


def nearest(u: Tensor, others: Tensor) -> Tensor:
    """Distance of each u [m, d] to the nearest of `others` [k, d], relative to its norm; NaN for k = 0."""
    if len(others) == 0:
        return torch.full((len(u),), torch.nan, dtype=u.dtype)
    return torch.cdist(u, others).amin(1) / u.norm(dim=1).clamp_min(1e-30)


def implausible(evidence: Evidence, u: Tensor) -> Tensor:
    """Whether the network's output at model inputs u [m, d] lies outside the range of its labels, [m].

    Gradient descent on squared loss draws outputs to the labels from where they started, so an output far beyond
    them belongs to no training sample. Without a known squared loss and labels nothing is implausible.
    """
    recipe = evidence.recipe
    if recipe.loss != "mse" or recipe.labels not in ("pm1", "01", "onehot"):
        return torch.zeros(len(u), dtype=torch.bool)
    # One range for all: labels stated as 0 and 1 that were +-1 must not cost the candidates of one class.
    return (evidence.output(u.view(-1, *evidence.input.shape)).abs() > 1 + SLACK).any(1)
