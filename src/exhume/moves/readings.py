"""Samples read off single neurons, put in place of the candidates that the fit bent away from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.certificate import UNKNOWN, left_out
from exhume.equations.base import Bound
from exhume.spaces import Space


@dataclass(frozen=True, eq=False)
class Readings:
    """Coordinates that are known, and the candidates they belong to.

    Args:
        index: of the candidates [k].
        z: where they are [k, q].
    """

    index: Tensor
    z: Tensor

    @staticmethod
    def none(z: Tensor) -> Readings:
        """No candidate of z [m, q] is known."""
        return Readings(torch.zeros(0, dtype=torch.long), z[:0])

    def place(self, z: Tensor) -> Tensor:
        """Candidates z [m, q] with the known ones where they are."""
        return z.index_copy(0, self.index, self.z)


@dataclass(frozen=True)
class ReadOff:
    """Pair readings with candidates that equations left out of the fit cannot tell from them.

    What a neuron that one sample alone activated gives away is exact for any course of training, while the equations
    that candidates are fitted to have a misfit of their own, which moves them. A reading that is none (a mixture of
    samples, or one spoilt by rounding) explains the held-out equations worse than the candidate near it, which stays.

    Args:
        rise: share by which a reading may explain the held-out equations worse than the candidate it replaces.
    """

    rise: float = 0.1

    def run(self, space: Space, exclusive: Tensor, fit: Bound, held: Bound, z: Tensor) -> Readings:
        """Readings that take a candidate's place.

        Args:
            space: where the candidates live.
            exclusive: model inputs that neurons give away [k, d].
            fit: the equations that the candidates were found on.
            held: the equations left out.
            z: the candidates [m, q].
        """
        known = space.coordinates(exclusive)
        own = torch.arange(len(z))
        index: list[int] = []
        kept: list[int] = []
        for i, near in enumerate(torch.cdist(exclusive, space.expand(z)) if len(z) else []):
            j = int(near.argmin())
            if near[j] > UNKNOWN * exclusive[i].norm() or j in index:
                continue
            placed = z.index_copy(0, torch.tensor([j]), known[i : i + 1])
            if left_out(fit, held, placed)(own) <= (1 + self.rise) * left_out(fit, held, z)(own):
                index.append(j)
                kept.append(i)
        return Readings(torch.tensor(index, dtype=torch.long), known[kept])
