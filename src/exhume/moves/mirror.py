"""Candidates on the wrong side of zero: where even degrees alone place them, the linear one tells their sign."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.moves.base import Change, State, joined, kept
from exhume.moves.reduce import needed


@dataclass(frozen=True)
class Mirror:
    """Turn candidates u over to -u where least squares prefers that.

    The features of a ReLU layer at u and -u differ by a linear term alone, relu(t) - relu(-t) = t. A set of
    candidates can therefore fit well with some of them mirrored, and two more, opposite to each other, that carry
    nothing but the linear term which is then missing; no small step turns one over. Such pairs are removed, -u is set
    beside every other candidate u, and of the two sides the one is kept that the fit needs more.

    Args:
        opposite: largest cosine of the two of a pair.
        name: in the lineage.
    """

    opposite: float = -0.9
    name: str = "mirror"

    def turned(self, state: State) -> Change | None:
        """The better sides, whatever the loss then is; None where no candidate is turned over."""
        view = state.view
        if view.space.origin is not None or not len(view.z):  # zero is not in the space
            return None
        rest = (~opposites(view.z, self.opposite)).nonzero()[:, 0]
        if not len(rest):
            return None
        single = kept(state, rest)
        q, m = view.z.shape[1], len(rest)
        single_state = replace(state, row=single.row, lineage=single.lineage)
        mirrored = torch.cat([-single.row[:, :q], single.row[:, q:]], 1)
        both = joined(single_state, mirrored, single.lineage.label, self.name)
        double = replace(state, row=both.row, lineage=both.lineage).settled
        need = needed(double).view(2, m)
        turn = need[1] > need[0]
        if not bool(turn.any()):
            return None
        order = torch.cat([(~turn).nonzero()[:, 0], turn.nonzero()[:, 0] + m])
        few = kept(double, order)
        return Change(few.row, few.lineage, torch.where(order < m, rest[order % m], -1))


def opposites(z: Tensor, cosine: float) -> Tensor:
    """Which candidates [m, q] have another on nearly the opposite side of zero [m]."""
    unit = z / z.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return (unit @ unit.T).amin(1) < cosine
