"""Polynomials in several variables: activations as polynomials, monomials, and derivatives as index tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations_with_replacement
from math import comb, factorial, prod

import numpy as np
import torch
from torch import Tensor

LARGEST = 8  # degree up to which an activation is recognised as a polynomial


def coefficients(sigma: Callable[[Tensor], Tensor]) -> tuple[float, ...] | None:
    """Coefficients c_0, c_1, ... of sigma(t) = sum_k c_k t^k, or None if sigma is no polynomial of degree <= 8.

    Interpolated at Chebyshev nodes of [-1, 1], then checked far outside of it, where nothing but the same
    polynomial agrees.

    Args:
        sigma: elementwise function of a float64 tensor.
    """
    nodes = np.cos(np.pi * (np.arange(24) + 0.5) / 24)
    with torch.no_grad():
        values = sigma(torch.from_numpy(nodes)).numpy()
        far = torch.tensor([-40.0, -7.0, -3.0, 2.5, 11.0, 60.0], dtype=torch.float64)
        wanted = sigma(far)
    found = np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebfit(nodes, values, LARGEST))
    found[np.abs(found) < 1e-10 * max(np.abs(found).max(), 1e-300)] = 0.0
    c = tuple(float(v) for v in np.trim_zeros(found, "b"))
    if len(c) < 2:
        return None
    said = torch.from_numpy(np.polynomial.polynomial.polyval(far.numpy(), np.array(c)))
    return c if torch.allclose(said, wanted, rtol=1e-6) else None


@dataclass(frozen=True)
class Slope:
    """First and second derivative of an activation, as plain functions.

    Args:
        first: sigma'.
        second: sigma''.
    """

    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]


def slope_of(c: Sequence[float]) -> Slope:
    """Derivatives of sigma(t) = sum_k c_k t^k, by Horner's rule."""
    first = [k * v for k, v in enumerate(c)][1:]
    second = [k * v for k, v in enumerate(first)][1:]
    return Slope(partial(_horner, tuple(first)), partial(_horner, tuple(second)))


def _horner(c: tuple[float, ...], t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    for k, value in enumerate(reversed(c)):
        out = torch.full_like(t, value) if k == 0 else out.mul_(t).add_(value)
    return out


@dataclass(frozen=True, eq=False)
class Monomials:
    """All monomials of degree q in r variables, and how they are differentiated.

    Args:
        index: the variables of each, [N, q] with N = binom(r + q - 1, q), non-decreasing in a row.
        scale: square root of the multinomial coefficient [N]: with it (w . v)^q is the inner product of monomials.
        raised: index among the monomials of degree q + 1 of the product with each variable, [N, r].
        power: exponent of that variable in the product, [N, r], so that d/dw_a (w^nu w_a) = power w^nu.
    """

    index: Tensor
    scale: Tensor
    raised: Tensor
    power: Tensor

    def at(self, w: Tensor) -> Tensor:
        """Values [m, N] at points w [m, r]."""
        out = w.new_ones(len(w), len(self.index))
        for k in range(self.index.shape[1]):
            out = out * w[:, self.index[:, k]]
        return out


def count(r: int, q: int) -> int:
    """Number of monomials of degree q in r variables."""
    return comb(r + q - 1, q)


@lru_cache(maxsize=32)
def monomials(r: int, q: int) -> Monomials:
    """Return the monomials of degree q in r variables."""
    rows = list(combinations_with_replacement(range(r), q))
    above = {row: k for k, row in enumerate(combinations_with_replacement(range(r), q + 1))}
    raised = [[above[tuple(sorted((*row, a)))] for a in range(r)] for row in rows]
    power = [[row.count(a) + 1.0 for a in range(r)] for row in rows]
    scale = [(factorial(q) / prod(factorial(n) for n in Counter(row).values())) ** 0.5 for row in rows]
    return Monomials(
        torch.tensor(rows, dtype=torch.int64).reshape(len(rows), q),
        torch.tensor(scale, dtype=torch.float64),
        torch.tensor(raised, dtype=torch.int64),
        torch.tensor(power, dtype=torch.float64),
    )
