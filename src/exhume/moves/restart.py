"""Random multi-start: more candidates than samples, the best start kept, others pooled into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.moves.prune import importance, merge, prune, weakest_out
from exhume.objective import Objective, Point
from exhume.solvers.base import Progress, Solution
from exhume.solvers.varpro import VarPro


@dataclass(frozen=True)
class MultiStart:
    """Over-parameterised random starts, pruned and pooled.

    Args:
        starts: number of random starts.
        surplus: candidates in a start, relative to the samples expected.
        share: see `prune`.
        exact: a start that leaves no more of the target than this is the last: rounding is all that is left.
    """

    starts: int = 2
    surplus: float = 1.5
    share: float = 0.05
    exact: float = 1e-16

    def run(
        self,
        objective: Objective,
        solver: VarPro,
        samples: int,
        norm: float,
        generator: torch.Generator,
        progress: Progress,
        stop: Callable[[int], bool],
        begin: Tensor | None = None,
    ) -> tuple[Point, list[Solution[Point]]]:
        """Return the best pruned and pooled point, and every solution.

        Args:
            objective: what to minimise.
            solver: by what.
            samples: number of samples expected.
            norm: typical norm of a model input.
            generator: source of the starts.
            progress: called with the loss after each step.
            stop: called with the number of starts done; True ends the move.
            begin: coordinates that the first start holds beside random ones [k, q].
        """
        m = max(round(self.surplus * samples), samples + 1)
        solutions: list[Solution[Point]] = []
        for s in range(self.starts):
            z = objective.space.random(m, norm, generator)
            if begin is not None and s == 0:
                z = torch.cat([begin, z])[:m]
            solutions.append(solver.minimise(objective, z, progress))
            if stop(s + 1) or solutions[-1].point.loss < self.exact:
                break
        best = min(solutions, key=lambda s: s.point.loss).point
        pruned = prune(objective, best, self.share)
        while pruned.loss < self.exact and len(pruned.z) > samples:
            # Two candidates with the gates of one sample can share it exactly: one of them is asked to do it alone.
            alone = solver.minimise(objective, weakest_out(objective, pruned, len(pruned.z) - 1).z, progress)
            solutions.append(alone)
            if alone.point.loss > self.exact:
                break
            pruned = alone.point
        if len(solutions) == 1 or pruned.loss < self.exact:
            return pruned, solutions
        pooled = self._pool(objective, [prune(objective, s.point, self.share) for s in solutions], m)
        refined = solver.minimise(objective, pooled, progress)
        solutions.append(refined)
        again = prune(objective, refined.point, self.share)
        return min((pruned, again), key=lambda p: p.loss), solutions

    @staticmethod
    def _pool(objective: Objective, points: list[Point], most: int) -> Tensor:
        """The most important distinct candidates of several solutions, at most `most`, [m, q]."""
        z = torch.cat([p.z for p in points])
        weight = torch.cat([importance(objective, p) / max(p.misfit, 1e-20) for p in points])
        kept = merge(objective.space.expand(z), weight.argsort(descending=True), 0.1)
        return z[kept[:most]]
