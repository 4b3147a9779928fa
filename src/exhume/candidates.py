"""Candidates: guessed samples with their multipliers; immutable."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Candidates:
    """m guessed samples.

    Args:
        x: samples in the owner's units (before mean and scale), [m, *shape].
        coef: multipliers of the span equation, [m, k], k = nodes * outputs.
        label: guessed label, the network's own output at the candidate, [m, C].
    """

    x: Tensor
    coef: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.x)
