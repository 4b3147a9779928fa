"""What a move of a set of candidates takes and returns: a pure function from a state to a proposal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.joint import Joint
from exhume.lineage import Lineage
from exhume.objective import Objective
from exhume.view import View

ROUNDING = 1e-20  # of |t|^2: below it a squared residual is that of rounding


@dataclass(frozen=True, eq=False)
class State:
    """Candidates between two steps of a solver.

    Args:
        row: what the solver moves: coordinates, and multipliers where they are unknowns [m, .].
        lineage: their bookkeeping.
        problem: what is minimised.
        smooth: its equation with a matched softplus in place of ReLU, whose curvature is that of its values.
        step: steps taken so far.
        period: steps that a further candidate is going to cost until moves are due again.
        most: largest number of candidates.
        norm: typical norm of a model input.
        generator: source of random starts.
        refits: whether multipliers are solved for after a move, and before it, so that only the move is compared.
    """

    row: Tensor
    lineage: Lineage
    problem: Objective | Joint
    smooth: Bound
    step: int
    period: int
    most: int
    norm: float
    generator: torch.Generator
    refits: bool = True

    @cached_property
    def view(self) -> View:
        """The candidates on the equation as it is."""
        return self.problem.of(self.lineage).view(self.row)

    @cached_property
    def smoothed(self) -> View:
        """The candidates on the smooth equation, with multipliers and residual as they are.

        A residual of its own would be that of the smoothing once the fit is good.
        """
        return replace(self.view, equation=self.smooth)

    @property
    def loss(self) -> float:
        """What is minimised."""
        return self.view.loss

    @cached_property
    def settled(self) -> State:
        """The same with its multipliers solved for, if they are to be: what a policy hands to its moves."""
        return replace(self, row=self.problem.of(self.lineage).refitted(self.row)) if self.refits else self

    def slack(self, rise: float) -> float:
        """A rise of the loss by this share, and what rounding may add to the loss of an exact fit."""
        return rise * self.loss + ROUNDING * self.view.scale * self.view.equation.energy

    def free(self, move: int) -> int:
        """How many of so many candidates there is room for."""
        return max(min(move, self.most - len(self.lineage)), 0)


@dataclass(frozen=True, eq=False)
class Proposal:
    """What a move would make of a state.

    Args:
        move: its name.
        row: as in `State`.
        lineage: as in `State`; without the work.
        source: place of the candidate whose solver state each takes over, -1 for none [m'].
        gain: fall of the loss, both sides with their multipliers settled.
        cost: candidate-steps until moves are due again, and evaluations spent.
        work: evaluations of a candidate spent.
        said: what was done, as a phrase.
    """

    move: str
    row: Tensor
    lineage: Lineage
    source: Tensor
    gain: float
    cost: float
    work: int
    said: str


class Move(Protocol):
    """A way to change a set of candidates."""

    @property
    def name(self) -> str:
        """In the lineage and in reports."""

    def propose(self, state: State) -> Proposal | None:
        """The best that this move can make of a state; None for nothing."""


@dataclass(frozen=True, eq=False)
class Change:
    """Candidates before their multipliers are solved for.

    Args:
        row: as in `State`.
        lineage: as in `State`.
        source: as in `Proposal`.
    """

    row: Tensor
    lineage: Lineage
    source: Tensor


def kept(state: State, index: Tensor) -> Change:
    """Only the candidates at these places."""
    return Change(state.row[index], state.lineage.take(index, state.step), index)


def joined(state: State, rows: Tensor, label: Tensor, move: str) -> Change:
    """With candidates [b, .] of these labels added."""
    nobody = torch.full((len(rows),), -1)
    lineage = state.lineage.born(nobody, rows.new_ones(len(rows)), label, state.step, move, ends=False)
    source = torch.cat([torch.arange(len(state.row)), nobody])
    return Change(torch.cat([state.row, rows]), lineage, source)


def copied(
    state: State,
    parents: Tensor,
    displaced: Callable[[Tensor], Tensor],
    move: str,
    share: Tensor | None = None,
) -> Change:
    """Replace parents by copies, each of the same part of its share unless `share` says otherwise.

    Args:
        state: before.
        parents: place of each copy's parent [b].
        displaced: from the copies' rows [b, .] to where they go.
        move: the name of the move.
        share: of the copies [b].
    """
    copies = torch.bincount(parents, minlength=len(state.row))[parents]
    share = state.lineage.share[parents] / copies if share is None else share
    left = torch.ones(len(state.row), dtype=torch.bool)
    left[parents] = False
    lineage = state.lineage.born(parents, share, state.lineage.label[parents], state.step, move)
    row = torch.cat([state.row[left], displaced(state.row[parents])])
    return Change(row, lineage, torch.cat([left.nonzero()[:, 0], parents]))


def proposal(state: State, move: str, change: Change, work: int, said: str) -> Proposal:
    """A change with its multipliers settled, beside a state with its own settled.

    The gain is the difference of two losses as they are minimised, computed anew.
    """
    problem = state.problem.of(change.lineage)
    row = problem.space.retract(change.row)
    row = problem.refitted(row) if state.refits else row
    gain = state.loss - problem.at(row).loss
    added = max(len(row) - len(state.row), 0)
    work += len(row)
    return Proposal(move, row, change.lineage, change.source, gain, added * state.period + work, work, said)
