"""Find samples one at a time by a subspace equation, projecting out those already found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equations.subspace import BoundSubspace
from exhume.moves.single import Stages
from exhume.solvers.batched import BatchedLM
from exhume.spaces import Space

PROBES = 64  # random points that say what a score means


@dataclass(frozen=True)
class SubspaceSearch:
    """Batched multi-start search for the zeros of a subspace equation.

    Args:
        starts: random starts in a round, for each sample still missing (but at least 12 in all).
        rounds: most rounds.
        accept: a candidate is kept if its score, with the signals of the better ones projected out, is below
            this share of what random points score; a spurious one scores near 1, its vector being explained.
        patience: rounds in a row without a new sample before giving up.
        solver: minimises each start at each smoothing.
    """

    starts: float = 2.5
    rounds: int = 8
    accept: float = 0.4
    patience: int = 2
    solver: BatchedLM = BatchedLM(iterations=12, tolerance=1e-3)

    def run(
        self,
        stages: Stages,
        space: Space,
        norm: float,
        known: Tensor,
        generator: torch.Generator,
        stop: Callable[[int, int], bool],
    ) -> Tensor:
        """Return coordinates [f, q] of all samples found, `known` among them.

        Args:
            stages: the bound equation.
            space: where the candidates live.
            norm: typical norm of a model input, for the random starts.
            known: coordinates of samples found before [k, q].
            generator: source of the starts.
            stop: called with the numbers found and still missing before each round; True ends the search.
        """
        found, idle = known, 0
        last = stages.sought[-1]
        rank = last.missing
        probe = space.random(PROBES, norm, generator)
        for _ in range(self.rounds):
            missing = last.without(found).missing
            if missing == 0 or idle == self.patience or len(found) >= 1.25 * rank:
                break
            if stop(len(found), missing):
                break
            z = space.random(max(12, round(self.starts * missing)), norm, generator)
            for stage in stages.sought:
                reduced = stage.without(found)
                z, _ = self.solver.minimise(reduced.expand, space.retract, z)
            # Half of what is missing at most: later rounds then see the weak samples without the strong ones.
            fresh = self._greedy(reduced, z, (missing + 1) // 2, probe)
            idle = 0 if len(fresh) else idle + 1
            found = torch.cat([found, fresh])
            if len(fresh):
                # Sharpen every sample, without projecting out the others.
                found, _ = self.solver.minimise(stages.placed.expand, space.retract, found)
        return found

    def _greedy(self, equation: BoundSubspace, z: Tensor, most: int, probe: Tensor) -> Tensor:
        """Take the best candidate, project it out, and again, while the score stays below `accept`."""
        taken = z[:0]
        while len(taken) < most:
            scores = equation.relative(z, probe)
            best = int(scores.argmin())
            if float(scores[best]) > self.accept:
                break
            taken = torch.cat([taken, z[best : best + 1]])
            equation = equation.without(z[best : best + 1])
        return taken
