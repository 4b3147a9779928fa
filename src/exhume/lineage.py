"""What follows candidates through moves: their share of a first candidate, their label, and where they came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

START = "start"  # the move that made the first candidates


@dataclass(frozen=True)
class Life:
    """One candidate from its birth to its end.

    Args:
        candidate: its number, in order of birth.
        parent: the candidate it was made of, or None.
        born: solver step at which it appeared.
        move: what made it: "start", or the name of a move.
        ended: step at which a move replaced or removed it; None for one that is still there.
    """

    candidate: int
    parent: int | None
    born: int
    move: str
    ended: int | None = None


@dataclass(frozen=True, eq=False)
class Lineage:
    """Bookkeeping of m candidates, as data that follows them.

    Args:
        share: part of a first candidate that each stands for, 1 at the start and halved by a split: it weighs every
            prior and the floor of the multipliers, so that a split at no distance changes no loss [m].
        label: class that each stands for, where the attack has labels [m].
        ids: their numbers.
        lives: every candidate there ever was.
        work: evaluations of a candidate that moves took beside the steps of the solver.
    """

    share: Tensor
    label: Tensor
    ids: tuple[int, ...]
    lives: tuple[Life, ...]
    work: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: Tensor, step: int) -> Lineage:
        """The candidates at these places, in this order; the others end at a step."""
        kept = [self.ids[i] for i in index.tolist()]
        lives = tuple(self._ended(life, step) if life.candidate not in kept else life for life in self.lives)
        return replace(self, share=self.share[index], label=self.label[index], ids=tuple(kept), lives=lives)

    def born(
        self, parents: Tensor, share: Tensor, label: Tensor, step: int, move: str, ends: bool = True
    ) -> Lineage:
        """Add newborn candidates at the end; their parents end, where `ends`.

        Args:
            parents: places of their parents, -1 for none [b].
            share: theirs [b].
            label: theirs [b].
            step: of the solver.
            move: what made them.
            ends: whether the parents are replaced.
        """
        ids = [None if i < 0 else self.ids[i] for i in parents.tolist()]
        left = [i for i, one in enumerate(self.ids) if not (ends and one in ids)]
        stay = self.take(torch.tensor(left, dtype=torch.long), step)
        fresh = tuple(Life(len(self.lives) + j, parent, step, move) for j, parent in enumerate(ids))
        return replace(
            stay,
            share=torch.cat([stay.share, share]),
            label=torch.cat([stay.label, label]),
            ids=(*stay.ids, *(life.candidate for life in fresh)),
            lives=(*stay.lives, *fresh),
        )

    def worked(self, work: int) -> Lineage:
        """The same after so many more evaluations of a candidate."""
        return replace(self, work=self.work + work)

    def steps(self, last: int) -> int:
        """Candidate-steps until a step: the sum over steps of the number of candidates, and the work of moves."""
        return self.work + sum(
            (last if life.ended is None else life.ended) - life.born for life in self.lives
        )

    @property
    def started(self) -> int:
        """Number of candidates at the start."""
        return sum(life.move == START for life in self.lives)

    def summary(self, last: int) -> str:
        """What became of the candidates until a step, as a sentence without its full stop."""
        made = Counter(life.move for life in self.lives if life.move != START)
        by = ", ".join(f"{count} by {move}" for move, count in made.items()) or "none"
        return (
            f"{self.started} candidates at the start became {len(self)}: new ones were {by}; with what moves took,"
            f" the search cost {self.steps(last):,} candidate-steps"
        )

    @staticmethod
    def _ended(life: Life, step: int) -> Life:
        return replace(life, ended=step) if life.ended is None else life


def first(label: Tensor) -> Lineage:
    """Candidates before the first step, with labels [m]."""
    m = len(label)
    lives = tuple(Life(i, None, 0, START) for i in range(m))
    return Lineage(torch.ones(m, dtype=torch.float64), label, tuple(range(m)), lives)
