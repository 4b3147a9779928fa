"""Hermite coefficients of an activation: which degrees of a Gaussian input it passes on."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.polynomial.hermite_e import hermeval
from numpy.polynomial.legendre import leggauss

from exhume.errors import ExhumeError
from exhume.functional import Activation

DEGREE = 7  # as far as the printed table goes; what lies beyond is below a percent of the rest
_REACH, _PANELS, _NODES = 12.0, 64, 24  # beyond 12 standard deviations the density is below 1e-31


def hermite(phi: Activation, scale: float = 1.0, degree: int = DEGREE) -> tuple[float, ...]:
    """Return the normalised Hermite coefficients of an activation for a scaled Gaussian input.

    mu_k = E[phi(scale g) he_k(g)] / sqrt(k!),  g ~ N(0, 1),  so that  E[phi(scale g)^2] = sum_k mu_k^2

    he_k are the probabilists' polynomials. The weighted integral is a composite Gauss-Legendre sum on each side
    of zero, exact to rounding for smooth functions and for a kink at zero; Gauss-Hermite nodes straddle the kink
    of a ReLU, and their error falls only as one over their number. A kink elsewhere costs about 1e-5.

    Args:
        phi: the activation; its function takes and returns float64 tensors.
        scale: standard deviation of the input.
        degree: largest k.

    Returns:
        mu_0, ..., mu_degree.

    Raises:
        ExhumeError: the scale is not positive, or phi is not finite on the inputs.
    """
    if not 0 < scale < math.inf:
        raise ExhumeError(
            f"scale must be the positive standard deviation of a pre-activation, but is {scale}; give that"
            " of a typical sample"
        )
    nodes, weights = leggauss(_NODES)
    width = _REACH / _PANELS
    half = (width * (np.arange(_PANELS)[:, None] + (nodes + 1) / 2)).ravel()
    g = np.concatenate([-half, half])
    mass = np.tile(np.tile(weights * width / 2, _PANELS), 2) * np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
    with torch.no_grad():
        value = phi.fn(torch.from_numpy(scale * g)).numpy()
    if not np.isfinite(value).all():
        raise ExhumeError(
            f"activation {phi.name!r} must be finite for inputs up to {scale * _REACH:.3g}, but is not; use a"
            " smaller scale"
        )
    return tuple(
        float((mass * value * hermeval(g, [0.0] * k + [1.0])).sum() / math.sqrt(math.factorial(k)))
        for k in range(degree + 1)
    )
