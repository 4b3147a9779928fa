"""Candidates split in two along the lowest eigenvector of a splitting matrix, or in three where signs are free."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.joint import Joint
from exhume.lineage import START
from exhume.moves.base import Change, Proposal, State, copied, proposal
from exhume.moves.curvature import best_step, changes, largest, lowest, predicted, quartic
from exhume.view import View


@dataclass(frozen=True)
class Split:
    """Replace candidates by two halves at z +- eta v.

    A candidate is split where its predicted gain value^2 / (16 c) is worth it and halves at
    eta* = sqrt(-value / (4 c)), shortened to `cap` |z|, lower the loss when it alone is split; eta is halved up to
    `halvings` times until they do. All that were chosen are then split at once, and the loss computed anew; again eta
    is halved while it does not fall.

    Args:
        worth: least predicted gain of a candidate, relative to the loss.
        cap: largest step, relative to |z|.
        part: largest part of the candidates that is split at once.
        at_once: largest number of them.
        rest: steps, in periods, for which a newborn candidate is left alone.
        halvings: see above.
        steps: of Lanczos.
        name: in the lineage.
    """

    worth: float = 1e-4
    cap: float = 0.3
    part: float = 0.5
    at_once: int = 150
    rest: int = 1
    halvings: int = 4
    steps: int = 20
    name: str = "split"

    def propose(self, state: State) -> Proposal | None:
        """Split the candidates that gain most, if that lowers the loss."""
        view = state.smoothed
        ends = lowest(view, self.steps)
        fourth = quartic(view, ends.vector)
        work = ends.work + 3 * len(view.z)
        gain = torch.where(rested(state, self.rest), predicted(ends.value, fourth), 0.0)
        room = min(int(self.part * len(gain)) or 1, self.at_once, state.free(len(gain)))
        chosen = gain.argsort(descending=True)[:room]
        chosen = chosen[gain[chosen] > self.worth * view.loss]
        if not len(chosen):
            return None
        step = torch.minimum(best_step(ends.value, fourth), self.cap * view.z.norm(dim=1))
        step, spent = _shortened(view, ends.vector, step, self.halvings)
        work += spent
        chosen = chosen[step[chosen] > 0]
        for _ in range(self.halvings + 1):
            if not len(chosen):
                return None
            said = f"{len(chosen)} of {len(gain)} candidates were split"
            made = proposal(state, self.name, halves(state, chosen, ends.vector, step, self.name), work, said)
            if made.gain > 0:
                return made
            step, work = step / 2, made.work
        return None


@dataclass(frozen=True)
class PublishedSplit:
    """Split as published: below a fixed curvature, by a fixed step, whatever the loss then is.

    S is in the units of Shen et al. 2026's code, whose residual is not divided by the number N of first candidates
    where its multipliers are: `threshold` refers to N times the Hessian of |t - Phi' c|^2 that is minimised.

    Args:
        threshold: -0.1 in the paper.
        step: 0.01, or 0.02 in their code.
        part: largest part of the candidates that is split at once.
        at_once: largest number of them; 150 in their code.
        steps: of Lanczos.
        name: in the lineage.
    """

    threshold: float = -0.1
    step: float = 0.01
    part: float = 0.5
    at_once: int = 150
    steps: int = 20
    name: str = "split"

    def propose(self, state: State) -> Proposal | None:
        """Split the candidates of the most negative curvature."""
        view = state.smoothed
        ends = lowest(view, self.steps)
        first = state.lineage.started
        value = ends.value / view.scale * first
        room = min(int(self.part * len(value)), self.at_once, state.free(len(value)))
        chosen = value.argsort()[:room]
        chosen = chosen[value[chosen] < self.threshold]
        if not len(chosen):
            return None
        step = torch.full_like(value, self.step)
        said = f"{len(chosen)} of {len(value)} candidates were split"
        change = halves(state, chosen, ends.vector, step, self.name)
        return proposal(state, self.name, change, ends.work, said)


@dataclass(frozen=True)
class SignedSplit:
    """Replace a candidate by three where multipliers may have either sign: halves of minus it, and twice it.

    Along the largest eigenvector this changes the loss by -eta^2/2 value + O(eta^4): directions of positive curvature
    serve as well. The copies have a third of its share each, and their multipliers are solved for.

    Args:
        worth: see `Split`.
        cap: see `Split`.
        at_once: largest number of candidates that are split at once.
        steps: of Lanczos.
        halvings: times that the step is halved while the loss does not fall.
        name: in the lineage.
    """

    worth: float = 1e-4
    cap: float = 0.3
    at_once: int = 1
    steps: int = 20
    halvings: int = 4
    name: str = "signed split"

    def propose(self, state: State) -> Proposal | None:
        """Split the candidates that gain most, if that lowers the loss and signs are free."""
        if signed(state):
            return None
        view = state.smoothed
        ends = largest(view, self.steps)
        fourth = quartic(view, ends.vector)
        gain = predicted(-ends.value, fourth)
        chosen = gain.argsort(descending=True)[: min(self.at_once, state.free(2 * self.at_once) // 2)]
        chosen = chosen[gain[chosen] > self.worth * view.loss]
        step = torch.minimum(best_step(-ends.value, fourth), self.cap * view.z.norm(dim=1))
        work = ends.work + 3 * len(view.z)
        for _ in range(self.halvings + 1):
            if not len(chosen):
                return None
            change = thirds(state, chosen, ends.vector, step, self.name)
            made = proposal(state, self.name, change, work, f"{len(chosen)} candidates were split in three")
            if made.gain > 0:
                return made
            step, work = step / 2, made.work
        return None


def signed(state: State) -> bool:
    """Whether the signs of multipliers are prescribed."""
    problem = state.problem
    if isinstance(problem, Joint):
        return problem.multipliers.floor is not None
    return problem.signs is not None


def rested(state: State, periods: int) -> Tensor:
    """Which candidates are older than so many periods [m]; those of the start always are."""
    born = {life.candidate: life for life in state.lineage.lives}
    lives = [born[i] for i in state.lineage.ids]
    return torch.tensor(
        [life.move == START or state.step - life.born >= periods * state.period for life in lives],
        dtype=torch.bool,
    )


def halves(state: State, chosen: Tensor, vector: Tensor, step: Tensor, name: str) -> Change:
    """Two halves of each chosen candidate, at z +- step v."""
    parents = chosen.repeat_interleave(2)
    sign = torch.tensor([1.0, -1.0], dtype=vector.dtype).repeat(len(chosen))
    move = (sign * step[parents])[:, None] * vector[parents]
    return copied(state, parents, lambda rows: _moved(rows, move), name)


def thirds(state: State, chosen: Tensor, vector: Tensor, step: Tensor, name: str) -> Change:
    """Each chosen candidate, with twice its multipliers, and copies at z +- step v with minus half of them."""
    parents = chosen.repeat_interleave(3)
    sign = torch.tensor([1.0, -1.0, 0.0], dtype=vector.dtype).repeat(len(chosen))
    move = (sign * step[parents])[:, None] * vector[parents]
    # A row's multiplier is its share times its unknown: a third of the share, three times the multiplier.
    factor = torch.tensor([-1.5, -1.5, 6.0], dtype=vector.dtype).repeat(len(chosen))[:, None]

    def placed(rows: Tensor) -> Tensor:
        q = move.shape[1]
        return torch.cat([rows[:, :q] + move, factor * rows[:, q:]], 1)

    return copied(state, parents, placed, name)


def _moved(rows: Tensor, move: Tensor) -> Tensor:
    q = move.shape[1]
    return torch.cat([rows[:, :q] + move, rows[:, q:]], 1)


def _shortened(view: View, vector: Tensor, step: Tensor, halvings: int) -> tuple[Tensor, int]:
    """The first of step, step / 2, ... that lowers the loss when a candidate alone is split, else 0; and the work."""
    found, work = torch.zeros_like(step), 0
    for _ in range(halvings + 1):
        todo = (found == 0) & (step > 0)
        if not bool(todo.any()):
            break
        falls = changes(view, vector, step) < 0
        found = torch.where(todo & falls, step, found)
        step, work = step / 2, work + 3 * len(step)
    return found, work
