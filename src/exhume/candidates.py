"""Candidates: guessed samples with their multipliers; immutable, every function returns new ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

    def take(self, index: Tensor) -> Candidates:
        """Return the candidates at `index` (integer or boolean [m])."""
        return Candidates(self.x[index], self.coef[index], self.label[index])

    @classmethod
    def concatenate(cls, parts: list[Candidates]) -> Candidates:
        """Join several sets of candidates."""
        return cls(*(torch.cat([getattr(p, k) for p in parts]) for k in ("x", "coef", "label")))
