"""Multipliers as unknowns of a descent: how they are written, where they start, what keeps them in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Multipliers(Protocol):
    """A map from free numbers a to multipliers, entry by entry."""

    @property
    def pace(self) -> float:
        """Multiplier that a = 1 stands for: gradient descent on a moves them pace^2 times as fast."""

    @property
    def floor(self) -> float | None:
        """The least that a multiplier should be; None for multipliers of either sign."""

    def of(self, a: Tensor) -> Tensor:
        """The multipliers."""

    def unknown(self, multiplier: Tensor) -> Tensor:
        """The a of multipliers no smaller than the floor."""

    def penalty(self, a: Tensor, share: Tensor | None) -> Tensor:
        """What is added to the loss, each candidate weighed by its share [m] (None for 1), a number."""


@dataclass(frozen=True)
class Plain:
    """The multipliers are a.

    Args:
        pace: see `Multipliers`.
    """

    pace: float = 1.0

    def of(self, a: Tensor) -> Tensor:
        """pace a."""
        return self.pace * a

    @property
    def floor(self) -> None:
        """None."""

    def unknown(self, multiplier: Tensor) -> Tensor:
        """multiplier / pace."""
        return multiplier / self.pace

    def penalty(self, a: Tensor, share: Tensor | None) -> Tensor:
        """None."""
        return a.new_zeros(())


@dataclass(frozen=True)
class Floored:
    """Multipliers with a floor by penalty: weight * sum relu(least - lambda)^2, lambda = pace a.

    Args:
        least: the floor.
        pace: see `Multipliers`.
        weight: 5 in the code of Haim et al. 2022.
    """

    least: float
    pace: float = 1.0
    weight: float = 5.0

    def of(self, a: Tensor) -> Tensor:
        """pace a."""
        return self.pace * a

    @property
    def floor(self) -> float:
        """`least`."""
        return self.least

    def unknown(self, multiplier: Tensor) -> Tensor:
        """multiplier / pace."""
        return multiplier / self.pace

    def penalty(self, a: Tensor, share: Tensor | None) -> Tensor:
        """The squared shortfall."""
        short = (self.least - self.of(a)).relu().square()
        return self.weight * (short if share is None else share[:, None] * short).sum()


@dataclass(frozen=True)
class Squares:
    """Multipliers (pace a)^2 + least, which cannot fall below the floor (Buzaglo et al. 2023, workshop version).

    Args:
        least: the floor.
        pace: see `Multipliers`.
    """

    least: float
    pace: float = 1.0

    def of(self, a: Tensor) -> Tensor:
        """(pace a)^2 + least."""
        return (self.pace * a).square() + self.least

    @property
    def floor(self) -> float:
        """`least`."""
        return self.least

    def unknown(self, multiplier: Tensor) -> Tensor:
        """The root, kept off zero, where it would have no slope."""
        return (multiplier - self.least).clamp_min(1e-6).sqrt() / self.pace

    def penalty(self, a: Tensor, share: Tensor | None) -> Tensor:
        """None is needed."""
        return a.new_zeros(())
