"""Where to look for corners: hidden features of little leverage on the second layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from exhume.equations.leverage import BoundLeverage, Resolved, bind_leverage
from exhume.equations.subspace import Quadratic
from exhume.evidence import Evidence
from exhume.solvers.batched import BatchedLM
from exhume.spaces import Space

PROBES = 64  # random points that say what a leverage means


@dataclass(frozen=True)
class Leverage:
    """A search by the leverage equation: eps falls, from random starts, with a penalty on features out of range.

    Args:
        schedule: eps, in units of the largest singular value of the second layer.
        starts: random starts in a round.
        box: weight of the squared violation of the range.
        accept: a candidate fits if its leverage at the last eps is below this share of what random points have.
        solver: minimises each start at each eps.
    """

    schedule: tuple[float, ...] = (1e-2, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6)
    starts: int = 40
    box: float = 1e-2
    accept: float = 3e-3
    solver: BatchedLM = BatchedLM(iterations=10, tolerance=1e-3)


@dataclass(frozen=True, eq=False)
class ByLeverage:
    """The search on fixed evidence.

    Args:
        search: its configuration.
        equation: bound to the evidence.
        space: where the candidates live.
        low: smallest value of each feature [d].
        high: largest.
        norm: typical norm of a model input.
        finest: the equation at the last eps.
        usual: median leverage of random points there.
    """

    search: Leverage
    equation: BoundLeverage
    space: Space
    low: Tensor
    high: Tensor
    norm: float
    finest: Resolved
    usual: float

    def starts(self, known: Tensor, generator: torch.Generator) -> Tensor:
        """Points of little leverage [k, q], besides the samples at known coordinates [f, q]."""
        equation = self.equation.without(known)
        z = self.space.random(self.search.starts, self.norm, generator)
        for eps in self.search.schedule:
            expand = partial(self._expand, equation.at(eps))
            z, _ = self.search.solver.minimise(expand, self.space.retract, z)
        return z

    def fits(self, z: Tensor) -> bool:
        """Whether the leverage at coordinates z [q] is far below that of random points."""
        return float(self.finest.value(z[None])[0]) < self.search.accept * self.usual

    def _expand(self, equation: Resolved, z: Tensor) -> Quadratic:
        """The leverage plus the squared violation of the range."""
        expansion, u, basis = equation.expand(z), self.space.expand(z), self.space.basis
        assert basis is not None
        width, weight = self.high - self.low, self.search.box
        basis = basis / width
        outside = ((u - self.high).relu() - (self.low - u).relu()) / width
        masked = basis[None] * (outside != 0)[:, None]
        return Quadratic(
            expansion.value + weight * outside.square().sum(1),
            expansion.gradient + 2 * weight * outside @ basis.T,
            expansion.curvature + 2 * weight * masked @ basis.T,
        )


def by_leverage(
    search: Leverage,
    evidence: Evidence,
    space: Space,
    samples: int,
    norm: float,
    units: Tensor | None = None,
) -> ByLeverage | None:
    """Bind the search; None where the range is not known or the second layer does not tell samples apart.

    Args:
        search: its configuration.
        evidence: final weights at a stationary point.
        space: where the candidates live; has a basis.
        samples: number of samples.
        norm: typical norm of a model input.
        units: hidden units of the first layer to use; None for all.
    """
    box, equation = evidence.input.box(), bind_leverage(evidence, space, samples, search.schedule[-1], units)
    if box is None or equation is None:
        return None
    finest = equation.at(search.schedule[-1])
    probe = space.random(PROBES, norm, torch.Generator().manual_seed(0))
    usual = float(finest.value(probe).median())
    return ByLeverage(search, equation, space, *box, norm, finest, usual)
