"""Fewer candidates: halves that went the same way become one again, and those that the fit does not need go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.joint import Joint
from exhume.lineage import Lineage
from exhume.moves.base import Change, Proposal, State, kept, proposal
from exhume.moves.prune import importance
from exhume.objective import Objective


@dataclass(frozen=True)
class Merge:
    """Make one of two candidates of the same label that are near each other, where the loss hardly rises.

    Multipliers and shares add up, coordinates are the mean weighed by multipliers, or by shares where multipliers are
    solved for: the inverse of a split.

    Args:
        apart: largest distance of the two, relative to |u|.
        rise: largest rise of the loss, relative to it.
        name: in the lineage.
    """

    apart: float = 0.05
    rise: float = 1e-3
    name: str = "merge"

    def propose(self, state: State) -> Proposal | None:
        """Merge all such pairs at once, no candidate twice; else the nearest alone."""
        pairs = self._pairs(state)
        for some in (pairs, pairs[:1]):
            if some:
                made = proposal(state, self.name, merged(state, some, self.name), 0, _said(some))
                if made.gain >= -state.slack(self.rise):
                    return made
        return None

    def _pairs(self, state: State) -> list[tuple[int, int]]:
        """Pairs within the distance, nearest first."""
        view, label = state.view, state.lineage.label
        u = view.space.expand(view.z)
        distance = torch.cdist(u, u) / u.norm(dim=1).clamp_min(1e-300)
        alike = label[:, None] == label
        if isinstance(
            state.problem, Joint
        ):  # multipliers that are solved for say nothing of candidates so near
            alike &= view.coef @ view.coef.T > 0
        near = torch.where(alike.triu(1), distance, torch.inf)
        found: list[tuple[int, int]] = []
        used: set[int] = set()
        for k in near.flatten().argsort().tolist():
            i, j = divmod(k, len(u))
            if float(near[i, j]) > self.apart:
                break
            if not {i, j} & used:
                found.append((i, j))
                used |= {i, j}
        return found


@dataclass(frozen=True)
class Prune:
    """Remove candidates that the fit does not need, the least needed first.

    Args:
        rise: largest rise of the loss without all of them, relative to it.
        name: in the lineage.
    """

    rise: float = 1e-3
    name: str = "prune"

    def propose(self, state: State) -> Proposal | None:
        """Remove as many as the loss allows."""
        order = needed(state).argsort()
        best: Proposal | None = None
        for gone in range(1, len(order)):
            change = kept(state, order[gone:].sort().values)
            said = f"{gone} candidates that the fit did not need were removed"
            made = proposal(state, self.name, change, 0, said)
            if made.gain < -state.slack(self.rise):
                break
            best = made
        return best


def needed(state: State) -> Tensor:
    """Rise of the misfit without each candidate, the multipliers of the others free, relative to it [m]."""
    problem = state.problem.of(state.lineage)
    if isinstance(problem, Joint):
        problem = Objective(problem.equation, problem.inner)
    point = problem.at(state.view.z)
    return importance(problem, point) / max(point.misfit, 1e-300)


def merged(state: State, pairs: list[tuple[int, int]], name: str) -> Change:
    """One candidate in place of each pair, in the place of its first."""
    view, lineage = state.view, state.lineage
    i, j = torch.tensor(pairs).T
    size = view.coef.norm(dim=1) if isinstance(state.problem, Joint) else lineage.share
    weight = (size[i] / (size[i] + size[j]).clamp_min(1e-300))[:, None]
    z = weight * view.z[i] + (1 - weight) * view.z[j]
    share = lineage.share[i] + lineage.share[j]
    row = z
    if isinstance(state.problem, Joint):
        q, kind = view.z.shape[1], state.problem.multipliers
        parts = lineage.share[:, None] * kind.of(state.row[:, q:])
        row = torch.cat([z, kind.unknown((parts[i] + parts[j]) / share[:, None])], 1)
    left = torch.ones(len(state.row), dtype=torch.bool)
    left[i], left[j] = False, False
    return Change(
        torch.cat([state.row[left], row]),
        _joined(lineage, i, j, share, state.step, name),
        torch.cat([left.nonzero()[:, 0], i]),
    )


def _joined(lineage: Lineage, i: Tensor, j: Tensor, share: Tensor, step: int, name: str) -> Lineage:
    """Both end; the one that is born of them names the first as its parent."""
    gone = {lineage.ids[k] for k in j.tolist()}
    born = lineage.born(i, share, lineage.label[i], step, name)
    stay = torch.tensor([k for k, one in enumerate(born.ids) if one not in gone], dtype=torch.long)
    return born.take(stay, step)


def _said(pairs: list[tuple[int, int]]) -> str:
    return f"{len(pairs)} pairs of candidates became one each"
