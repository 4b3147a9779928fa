"""A joint descent on a few candidates at a time, so that memory does not grow with their number."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from exhume.joint import Joint, JointPoint, JointSpace
from exhume.lineage import Lineage

REBUILT = 1000  # evaluations after which the running sum is added up anew, since updates round


class Batched:
    """F of `Joint`, with the gradient of a batch of candidates at a time.

    sum_i Phi_i' c_i is kept as a running sum S of contributions: at each evaluation a batch B is drawn without
    replacement, and the loss is that of S - S_B + Phi_B' c_B, of which S and S_B count as constants.

    Args:
        whole: all candidates; may be bound anew between evaluations.
        size: candidates of a batch.
        generator: draws them.
    """

    def __init__(self, whole: Joint, size: int, generator: torch.Generator) -> None:
        self.whole, self.size, self.generator = whole, size, generator
        self._rows: Tensor | None = None
        self._sum: Tensor | None = None
        self._count = 0

    def of(self, lineage: Lineage) -> Batched:
        """The same, from now on for other candidates."""
        self.whole = self.whole.of(lineage)
        return self

    @property
    def space(self) -> JointSpace:
        """Where the rows live."""
        return self.whole.space

    def at(self, row: Tensor) -> JointPoint:
        """Value at all candidates, gradient of one batch and zero for the others."""
        batch = torch.randperm(len(row), generator=self.generator)[: self.size]
        others = self._contribution(row) - self._part(row, batch)
        target = self.whole.equation.target()
        rest = replace(self.whole.take(batch), equation=self.whole.equation.aimed_at(target - others))
        here = rest.at(row[batch])
        outside = torch.ones(len(row), dtype=torch.bool)
        outside[batch] = False
        unmoved = outside.nonzero()[:, 0]
        penalty = self.whole.take(unmoved).priors(row[unmoved])
        misfit = here.misfit * rest.equation.energy / self.whole.equation.energy
        slope = torch.zeros_like(row).index_copy(0, batch, here.slope)
        return JointPoint(row, here.loss + penalty, misfit, slope)

    def gradient(self, point: JointPoint) -> Tensor:
        """dF/d[z | a], of the batch."""
        return point.slope

    def parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates and multipliers of rows."""
        return self.whole.parts(row)

    def _part(self, row: Tensor, index: Tensor) -> Tensor:
        return self.whole.equation.contribution(*self.whole.take(index).parts(row[index])).detach()

    def _contribution(self, row: Tensor) -> Tensor:
        """Phi' c of all candidates, updated for those that moved since the last time."""
        every = torch.arange(len(row))
        same = self._rows is not None and self._rows.shape == row.shape
        if self._rows is None or self._sum is None or not same or self._count % REBUILT == 0:
            self._sum = torch.stack([self._part(row, some) for some in every.split(self.size)]).sum(0)
        else:
            moved = every[(row != self._rows).any(1)]
            if len(moved):
                self._sum = self._sum + self._part(row, moved) - self._part(self._rows, moved)
        self._count += 1
        self._rows = row.clone()
        return self._sum
