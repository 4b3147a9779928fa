"""When candidates are moved, and by which move: the one with the largest verified gain for its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from exhume.moves.base import Move, Proposal, State
from exhume.moves.curvature import lowest, stability
from exhume.moves.grow import Grow
from exhume.moves.reduce import Merge, Prune
from exhume.moves.split import PublishedSplit, SignedSplit, Split


@dataclass(frozen=True, eq=False)
class Moved:
    """A state after moves.

    Args:
        state: what it is now.
        source: place before of the candidate whose solver state each takes over, -1 for none [m].
        gain: fall of the loss by moves, relative to it.
        said: what was done, one phrase a move.
    """

    state: State
    source: Tensor
    gain: float
    said: tuple[str, ...]


class Schedule(Protocol):
    """Moves as a solver applies them."""

    @property
    def period(self) -> int:
        """Steps of a descent between two looks."""

    @property
    def last(self) -> float:
        """Part of all steps after which no more moves are made."""

    @property
    def most(self) -> float:
        """Largest number of candidates, relative to the number at the start."""

    @property
    def refits(self) -> bool:
        """Whether multipliers are solved for before and after a move."""

    @property
    def restarts(self) -> bool:
        """Whether the optimiser of a descent forgets all when candidates were moved."""

    @property
    def slope(self) -> float:
        """Slope of the softplus that stands in for a ReLU without smoothing, over the typical pre-activation."""

    @property
    def patience(self) -> float:
        """Looks in a row at which nothing was moved, after which no more are taken."""

    def due(self, losses: Sequence[float]) -> bool:
        """Whether moves are due after a period with these losses."""

    def moved(self, state: State) -> Moved:
        """Move candidates, if it pays."""

    def told(self, state: State) -> tuple[str, ...]:
        """What can be said of the candidates in the end, one sentence each."""


@dataclass(frozen=True)
class Policy:
    """Verified moves: what reduces candidates for nothing first, then the one of largest gain for its cost.

    Gains are falls of the loss that is minimised, multipliers solved for on both sides; costs are candidate-steps
    until moves are due again, and evaluations.

    Args:
        moves: those that compete.
        reductions: those that are made first, wherever they hardly raise the loss.
        period: see `Schedule`.
        plateau: moves are due where the loss fell by less than this share over a period.
        least: a move must lower the loss by this share.
        last: see `Schedule`.
        most: see `Schedule`.
        slope: see `Schedule`.
        refits: see `Schedule`.
        restarts: see `Schedule`.
        patience: see `Schedule`.
    """

    moves: tuple[Move, ...] = (Split(), Grow())
    reductions: tuple[Move, ...] = (Merge(), Prune())
    period: int = 200
    plateau: float = 0.2
    least: float = 1e-4
    last: float = 0.8
    most: float = 2.0
    slope: float = 10.0
    refits: bool = True
    restarts: bool = False
    patience: float = 2

    def due(self, losses: Sequence[float]) -> bool:
        """On a plateau."""
        return losses[-1] > (1 - self.plateau) * losses[0]

    def moved(self, state: State) -> Moved:
        """Reductions, then at most one move."""
        before = state.loss
        state = state.settled
        source, said = torch.arange(len(state.row)), []
        for move in self.reductions:
            made = move.propose(state) if len(state.row) > 1 else None
            if made is not None:
                state, source = after(state, made), _through(source, made.source)
                said.append(made.said)
        proposed = [made for move in self.moves if (made := move.propose(state)) is not None]
        spent = sum(made.work for made in proposed)  # by the losers of the comparison as well
        worth = [made for made in proposed if made.gain > self.least * state.loss]
        if worth:
            best = max(worth, key=lambda made: made.gain / made.cost)
            state, source = replace(state, row=best.row, lineage=best.lineage), _through(source, best.source)
            said.append(best.said)
        state = replace(state, lineage=state.lineage.worked(spent))
        gain = (before - state.loss) / max(before, 1e-300)
        return Moved(state, source, gain, tuple(said))

    def told(self, state: State) -> tuple[str, ...]:
        """The certificate of split stability."""
        gain = max(0.0, -float(stable(state).min()))
        return (
            f"no split of a single candidate is predicted to lower the loss by more than {gain:.2g} of it",
        )


@dataclass(frozen=True)
class Routine:
    """One move at a fixed period, made whatever becomes of the loss, as published.

    Args:
        move: which.
        period: see `Schedule`.
        last: see `Schedule`.
        most: see `Schedule`.
        slope: see `Schedule`.
        refits: see `Schedule`.
        restarts: see `Schedule`.
        patience: see `Schedule`.
    """

    move: Move
    period: int
    last: float = 1.0
    most: float = 8.0
    slope: float = 10.0
    refits: bool = False
    restarts: bool = True
    patience: float = math.inf

    def due(self, losses: Sequence[float]) -> bool:
        """Always."""
        return True

    def moved(self, state: State) -> Moved:
        """Whatever the move proposes."""
        made = self.move.propose(state)
        if made is None:
            return Moved(state, torch.arange(len(state.row)), 0.0, ())
        return Moved(after(state, made), made.source, made.gain / max(state.loss, 1e-300), (made.said,))

    def told(self, state: State) -> tuple[str, ...]:
        """Nothing: what was made was not checked."""
        return ()


def stable(state: State, steps: int = 20) -> Tensor:
    """Scores of the split-stability certificate on the smooth equation, see `curvature.stability` [m]."""
    return stability(state.smoothed, lowest(state.smoothed, steps))


def after(state: State, made: Proposal) -> State:
    """The state that a proposal leads to."""
    return replace(state, row=made.row, lineage=made.lineage.worked(made.work))


def _through(source: Tensor, later: Tensor) -> Tensor:
    return torch.where(later < 0, -1, source[later.clamp_min(0)])


def published(period: int = 20_000, *, step: float = 0.01) -> Routine:
    """Sample splitting as Shen, Wang, Qian and Lei (ICML 2026) publish it.

    Every `period` steps (20,000 to 40,000 in the paper) candidates of curvature below -0.1 are split, half of them
    at most, into halves at +-`step` along the lowest eigenvector; the optimiser starts anew. Deviations: matched
    softplus for the curvature, whose Hessian is that of its values; gradients per share; penalties and floors by
    share, so that a split at no distance changes no loss.

    Args:
        period: steps of the descent between splits.
        step: 0.01 in the paper, 0.02 at most in their code.
    """
    return Routine(PublishedSplit(step=step), period)


def scaled(period: int = 200, *, signs_free: bool = False) -> Policy:
    """Split, grow, merge and prune as gains verify, in the units of the loss; the default.

    Args:
        period: steps of the descent between two looks.
        signs_free: whether multipliers have either sign, so that positive curvature serves as well.
    """
    splits: tuple[Move, ...] = (Split(), SignedSplit()) if signs_free else (Split(),)
    return Policy(moves=(*splits, Grow()), period=period)
