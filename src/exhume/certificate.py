"""Which candidates are real, without looking at the truth: equations left out of the fit must need them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.linalg import gram_solver
from exhume.spaces import Space

# Set on the "fit" victims of benchmarks/calibration.py and frozen; see docs/certificate.md.
MIN_SCORE = 1.0
MAX_DRIFT = 0.15
ERROR_SCALE = 0.16
FALSE_RATE = 0.04  # upper end of the 95% interval on those victims

UNCALIBRATED = (
    "The thresholds were set on ReLU networks; on other activations some certified candidates are blurred samples,"
    " with relative errors of 0.3 to 0.6."
)
NOTES = (
    "A fifth of the hidden units took no part in search and fit; a certified candidate is needed to predict them.",
    "The error of a candidate is an estimate from the strength of that need, not a bound.",
)


@dataclass(frozen=True, eq=False)
class Certificate:
    """What each candidate earned on equations that the search and the fit never used.

    Args:
        score: rise of the held-out residual without the candidate, relative to that residual [m].
        drift: relative distance that the final fit on all equations moved the candidate [m].
        error_estimate: expected relative L2 error, an estimate and not a bound [m].
        certified: score and drift pass their thresholds [m].
        held_out: held-out residual over held-out energy, with all candidates.
        false_rate: share of certified candidates that were not real, on the victims that set the thresholds.
        notes: what it rests on, one sentence each.
    """

    score: Tensor
    drift: Tensor
    error_estimate: Tensor
    certified: Tensor
    held_out: float
    false_rate: float
    notes: tuple[str, ...]

    @property
    def recovered(self) -> int:
        """Number of candidates certified."""
        return int(self.certified.sum())

    def take(self, index: Tensor) -> Certificate:
        """The certificate of the candidates at `index`, in that order."""
        names = ("score", "drift", "error_estimate", "certified")
        score, drift, error, certified = (getattr(self, name)[index] for name in names)
        return replace(self, score=score, drift=drift, error_estimate=error, certified=certified)


def certify(
    fit: Bound, held: Bound, space: Space, found: Tensor, final: Tensor, calibrated: bool
) -> Certificate:
    """Judge candidates by equations that neither search nor fit has seen.

    Args:
        fit: the equations the candidates were found on.
        held: the equations left out.
        space: where the candidates live.
        found: coordinates of the candidates as found on `fit` [m, q].
        final: their coordinates after the final fit on all equations [m, q].
        calibrated: whether the network is of a kind that the thresholds were set on.
    """
    score, held_out = held_out_rise(fit, held, found)
    before, after = space.expand(found), space.expand(final)
    drift = (after - before).norm(dim=1) / after.norm(dim=1).clamp_min(1e-30)
    certified = (score > MIN_SCORE) & (drift < MAX_DRIFT)
    return Certificate(
        score=score,
        drift=drift,
        error_estimate=ERROR_SCALE * score.clamp_min(1e-12).rsqrt(),
        certified=certified,
        held_out=held_out,
        false_rate=FALSE_RATE,
        notes=NOTES if calibrated else (*NOTES, UNCALIBRATED),
    )


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
    m, k = len(z), fit.multiplicity
    gram_fit, right_fit = fit.gram(z), fit.inner(z, fit.target()).flatten()
    gram_held, right_held = held.gram(z), held.inner(z, held.target()).flatten()

    def residual(kept: Tensor) -> float:
        index = (kept[:, None] * k + torch.arange(k)).flatten()
        factor = gram_solver(gram_fit[index][:, index])
        c = factor @ (factor.T @ right_fit[index])
        value = held.energy - 2 * c @ right_held[index] + c @ gram_held[index][:, index] @ c
        # The subtraction is exact to rounding only, so a perfect prediction must not divide by noise.
        return max(float(value), 1e-13 * held.energy)

    everyone = torch.arange(m)
    base = residual(everyone)
    rises = (
        [residual(everyone[everyone != i]) / base - 1 for i in range(m)]
        if m > 1
        else [held.energy / base - 1]
    )
    return torch.tensor(rises, dtype=torch.float64), base / held.energy
