"""Equations that hold for one sample at a time, and what follows from which of them applies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from exhume.change import Decay, FirstLayer
from exhume.equations.column import Column
from exhume.equations.feature import Feature, RowSpace
from exhume.equations.fold import unfold
from exhume.equations.subspace import BoundSubspace
from exhume.evidence import Evidence, Parameters
from exhume.moves.indirect import Indirect
from exhume.moves.polish import Polish
from exhume.objective import Objective, Point
from exhume.solvers.base import Progress, Solution
from exhume.solvers.batched import BatchedLM
from exhume.solvers.varpro import VarPro
from exhume.spaces import Space


def jointly(
    objective: Objective, z: Tensor, units: Tensor | None, solver: VarPro, progress: Progress
) -> Solution[Point]:
    """All candidates at once."""
    return solver.minimise(objective, z, progress)


@dataclass(frozen=True, eq=False)
class Stages:
    """One equation in several forms.

    Args:
        sought: minimised one after the other; the last one says how many samples are missing.
        placed: says where a sample that was found lies, and which are distinct.
    """

    sought: tuple[BoundSubspace, ...]
    placed: BoundSubspace


class Single(Protocol):
    """An equation for one candidate at a time."""

    @property
    def samples(self) -> int:
        """How many samples there are."""

    @property
    def where(self) -> str:
        """Where they are sought, in words."""

    def stages(self, probe: Tensor, units: Tensor | None) -> Stages:
        """Bind it to some hidden units (None for all), for inputs like `probe` [p, q]."""

    def fit(
        self, objective: Objective, z: Tensor, units: Tensor | None, solver: VarPro, progress: Progress
    ) -> Solution[Point]:
        """Place candidates z [m, q] on the equations of an objective, which come from those units."""

    def polish(self, polish: Polish) -> Polish | Indirect:
        """How candidates are refined by simulated training."""


@dataclass(frozen=True, eq=False)
class BySignals:
    """The column equation: signals jump with every gate, so it finds samples, and the joint equation places them.

    Args:
        column: its configuration.
        evidence: what is attacked.
        first: the first-layer change.
        space: where the candidates live.
        sharpness: slopes of the smoothed ReLU, in units of one over the typical pre-activation.
    """

    column: Column
    evidence: Evidence
    first: FirstLayer
    space: Space
    sharpness: tuple[float, ...]
    where: str = "the column space of the first-layer change"

    @property
    def samples(self) -> int:
        """The rank."""
        return self.first.rank

    def stages(self, probe: Tensor, units: Tensor | None) -> Stages:
        """Ever sharper smoothing."""

        def bind(smoothing: float | None) -> BoundSubspace:
            return self.column.bind(self.evidence, self.first, self.space, smoothing, units)

        typical = bind(None).typical(probe)
        sought = tuple(bind(s / typical) for s in self.sharpness)
        return Stages(sought, sought[-1])

    def fit(
        self, objective: Objective, z: Tensor, units: Tensor | None, solver: VarPro, progress: Progress
    ) -> Solution[Point]:
        """All at once."""
        return jointly(objective, z, units, solver, progress)

    def polish(self, polish: Polish) -> Polish | Indirect:
        """By the defect of the joint equation."""
        return polish


@dataclass(frozen=True, eq=False)
class ByFeatures:
    """The feature equation: features hardly move in training, so it places samples better than the joint one.

    Args:
        feature: its configuration.
        evidence: what is attacked.
        decay: what is left of the initialisation.
        space: where the candidates live.
        samples: how many there are.
        solver: places all candidates, each on its own.
    """

    feature: Feature
    evidence: Evidence
    decay: Decay
    space: Space
    samples: int
    solver: BatchedLM = BatchedLM(iterations=30, tolerance=1e-4)
    where: str = "the row space of the second-layer change"

    def _known(self, evidence: Evidence, units: Tensor | None) -> RowSpace | None:
        return self.feature.rows(evidence, self.decay, self.space, self.samples, units)

    @property
    def applies(self) -> bool:
        """Whether the second-layer change holds as many directions as there are samples."""
        return self._known(self.evidence, None) is not None

    def stages(self, probe: Tensor, units: Tensor | None) -> Stages:
        """Sought in about as many rows as samples are missing, placed in all."""
        known = self._known(self.evidence, units)
        assert known is not None
        sought, placed = (
            self.feature.bind(self.evidence, known, self.space, whole) for whole in (False, True)
        )
        return Stages((sought,), placed)

    def fit(
        self, objective: Objective, z: Tensor, units: Tensor | None, solver: VarPro, progress: Progress
    ) -> Solution[Point]:
        """One by one."""
        placed = self.stages(z, units).placed
        point = objective.at(self._scaled(self.solver.minimise(placed.expand, self.space.retract, z)[0]))
        progress(point.loss)
        reason = "Every candidate was placed on its own, by its hidden features."
        return Solution(point, "converged", reason, self.solver.iterations, (point.loss,))

    def _scaled(self, z: Tensor) -> Tensor:
        """Candidates no larger than the range of features allows: without biases no equation tells their norm."""
        chain, box = self.evidence.chain, self.evidence.input.box()
        assert chain is not None
        pinned = any(name is not None for name in chain.biases[:2]) or self.space.origin is not None
        if pinned or box is None:
            return z
        high = torch.where(box[1] > 0, box[1], torch.inf)
        outside = (self.space.expand(z) / high).amax(1, keepdim=True)
        return self.space.retract(z / outside.clamp_min(1.0))

    def polish(self, polish: Polish) -> Polish | Indirect:
        """By what placing errs by in simulated weights."""
        return Indirect(self.again, largest=polish.largest, coarse=polish.coarse, rate=polish.rate)

    def again(self, end: Parameters, z: Tensor) -> Tensor:
        """Where candidates z [m, q] are placed in weights of the folded net, as `fit` does in the true ones."""
        trained = replace(self.evidence, final=unfold(self.evidence, self.space, end))
        known = self._known(trained, None)
        if known is None:
            return z
        placed = self.feature.bind(trained, known, self.space, whole=True)
        return self._scaled(self.solver.minimise(placed.expand, self.space.retract, z)[0])
