"""Add candidates that are no copies: where the residual asks for them most, or anywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.joint import Joint
from exhume.linalg import gram_solver
from exhume.moves.base import Proposal, State, joined, kept, proposal
from exhume.moves.reduce import needed
from exhume.moves.split import signed
from exhume.view import View


@dataclass(frozen=True)
class Grow:
    """Add a fresh candidate where its whole block of multipliers lowers the loss most.

    max_z  scale b' (G_zz - G_zX G_XX^+ G_Xz)^-1 b - terms(z),  b = Phi_z r

    the exact fall of scale |r|^2 when all multipliers are solved for anew, X the candidates there are, less the
    priors. Where the signs of multipliers are prescribed, only entries of b of the right sign count, each on its own.
    Searched by gradient ascent from random starts, first with smooth features (Frank-Wolfe with corrections; Firefly,
    Wu et al. 2020, for neurons).

    Args:
        starts: random starts.
        steps: of gradient ascent on that, relative to the first term.
        rate: relative to |z|, the length of the first steps; it falls to 0.
        at_once: fresh candidates added at once, best first, if they differ.
        apart: least relative distance between them.
        name: in the lineage.
    """

    starts: int = 48
    steps: int = 60
    rate: float = 0.2
    at_once: int = 1
    apart: float = 0.3
    name: str = "grow"

    def propose(self, state: State) -> Proposal | None:
        """Add the best, if there is room and the loss falls."""
        room = state.free(self.at_once)
        if not room:
            return None
        z, label = self._sought(state)
        block = Block(state, state.view)
        score = block.fall(z, label) - block.penalty(z)
        best: list[int] = []
        for i in score.argsort(descending=True).tolist():
            near = [float((z[i] - z[j]).norm() / z[j].norm().clamp_min(1e-300)) < self.apart for j in best]
            if len(best) < room and float(score[i]) > 0 and not any(near):
                best.append(i)
        if not best:
            return None
        rows = state.problem.of(state.lineage).newborn(z[best])
        work = 3 * self.starts * self.steps
        said = f"{len(best)} fresh candidates were added"
        made = proposal(state, self.name, joined(state, rows, label[best], self.name), work, said)
        return made if made.gain > 0 else None

    def _sought(self, state: State) -> tuple[Tensor, Tensor]:
        """Where gradient ascent ends [starts, q], and labels, the best at the start [starts]."""
        view, classes = state.smoothed, int(state.lineage.label.max()) + 1 if len(state.lineage) else 1
        z = fresh(state, self.starts)
        labels = torch.arange(classes)[:, None].expand(classes, self.starts)
        smooth, true = Block(state, view), Block(state, state.view)
        label = torch.stack([smooth.fall(z, one) for one in labels]).argmax(0)
        length = self.rate * z.norm(dim=1).mean() / z.shape[1] ** 0.5
        first, second = torch.zeros_like(z), torch.zeros_like(z)
        for step in range(self.steps):
            with torch.enable_grad():
                leaf = z.detach().requires_grad_()
                block = smooth if 2 * step < self.steps else true
                fall = block.fall(leaf, label)
                net = fall - block.penalty(leaf)  # each start relative to what it gains: they differ widely
                relative = (net / fall.detach().clamp_min(1e-300)).sum()
                slope = torch.autograd.grad(relative, leaf)[0].nan_to_num()
            first = 0.9 * first + 0.1 * slope  # Adam's step
            second = 0.99 * second + 0.01 * slope.square()
            ahead = first / (1 - 0.9 ** (step + 1))
            scale = (second / (1 - 0.99 ** (step + 1))).sqrt() + 1e-30
            z = view.space.retract(z + length * (1 - step / self.steps) * ahead / scale)
        return z, label


@dataclass(frozen=True)
class Reseed:
    """Replace candidates that the fit does not need by random ones, if the loss does not rise.

    Args:
        share: largest rise of the misfit without a candidate, relative to the misfit, for it to be replaced.
        name: in the lineage.
    """

    share: float = 1e-3
    name: str = "reseed"

    def propose(self, state: State) -> Proposal | None:
        """Replace all of them at once."""
        rise = needed(state)
        idle = (rise < self.share) & (rise < rise.max())
        if not bool(idle.any()):
            return None
        rest = kept(state, (~idle).nonzero()[:, 0])
        rows = state.problem.of(rest.lineage).newborn(fresh(state, int(idle.sum())))
        without = replace(state, row=rest.row, lineage=rest.lineage)
        change = joined(without, rows, state.lineage.label[idle], self.name)
        source = torch.where(change.source < 0, -1, rest.source[change.source.clamp_min(0)])
        said = f"{int(idle.sum())} candidates that the fit did not need were drawn anew"
        made = proposal(state, self.name, replace(change, source=source), len(rise), said)
        return made if made.gain >= -state.slack(0.0) else None


def fresh(state: State, count: int) -> Tensor:
    """Random coordinates of the typical size of a candidate [count, q]."""
    return state.smoothed.space.random(count, state.norm, state.generator)


class Block:
    """What the block of multipliers of one more candidate gains.

    Args:
        state: the candidates there are.
        view: them on the equation whose gradients are used.
    """

    def __init__(self, state: State, view: View) -> None:
        self.view, self.problem, self.signed = view, state.problem, signed(state)
        self.factor = gram_solver(view.equation.gram(view.z))

    def penalty(self, z: Tensor) -> Tensor:
        """What the priors add to the loss by a candidate at each of z [b, q], [b]."""
        u = self.view.space.expand(z)
        return torch.stack([z.new_zeros(len(z)), *(term.value(u) for term in self.view.terms)]).sum(0)

    def fall(self, z: Tensor, label: Tensor) -> Tensor:
        """The fall of scale |r|^2 by a candidate at each of z [b, q] with labels [b], exact but for signs [b]."""
        m, b = len(self.view.z), len(z)
        rows = self.view.equation.rows(torch.cat([self.view.z, z]))
        gram = rows.gram()
        own = len(gram) // (m + b)  # multipliers of a candidate that share nothing
        split = m * own
        right = rows.inner(self.view.residual)[m:].reshape(b, own, -1)
        cross = (gram[split:, :split] @ self.factor).view(b, own, -1)
        block = gram[split:, split:].view(b, own, b, own)[torch.arange(b), :, torch.arange(b)]
        block = block - cross @ cross.mT
        floor = 1e-9 * block.diagonal(dim1=1, dim2=2).amax(1).detach().clamp_min(1e-300)
        block = block + floor[:, None, None] * torch.eye(own, dtype=z.dtype)
        if not isinstance(self.problem, Joint) or self.problem.head is None:
            return self.view.scale * (right * torch.linalg.solve(block, right)).sum((1, 2))
        sense = replace(self.problem, share=None, label=label).directions(z.detach()) / self.problem.unit
        right, sizes = _directed(right, block, sense)
        right = right.relu() if self.signed else right
        return self.view.scale * (right.square() / sizes).sum(1)


def _directed(right: Tensor, block: Tensor, sense: Tensor) -> tuple[Tensor, Tensor]:
    """b and the diagonal of G along the directions of a head [b, C, k]."""
    right = right.reshape(len(right), -1)
    shared = right.shape[1] // block.shape[1]
    whole = torch.stack([torch.kron(one, torch.eye(shared, dtype=one.dtype)) for one in block])
    along = torch.einsum("bck,bc->bk", sense, right)
    return along, torch.einsum("bck,bcd,bdk->bk", sense, whole, sense)
