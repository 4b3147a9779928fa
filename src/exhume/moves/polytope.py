"""The box in the coordinates of a subspace: linear programs, active bounds, and the point where those meet."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
import torch
from torch import Tensor

from exhume.spaces import Space


class Silent(highspy.Highs):
    """HiGHS without the line that its constructor prints, which is due before any option can be set."""

    def enableCallbacks(self) -> None:
        """Turn output off first."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class Programs:
    """Linear programs over one polytope {z: low <= z columns <= high}, each started from the basis of the last.

    Args:
        columns: of z [q, d].
        low: bounds [d].
        high: likewise.
    """

    def __init__(self, columns: Tensor, low: Tensor, high: Tensor) -> None:
        q, rows = columns.shape
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = q, rows
        program.col_cost_ = np.zeros(q)
        program.col_lower_, program.col_upper_ = np.full(q, -highspy.kHighsInf), np.full(q, highspy.kHighsInf)
        program.row_lower_, program.row_upper_ = low.numpy(), high.numpy()
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.arange(0, rows * q + 1, q)
        matrix.index_ = np.tile(np.arange(q), rows)
        matrix.value_ = columns.T.numpy().ravel()
        self._solver = Silent()
        # Another cost leaves the last corner feasible, from where the primal simplex method goes on.
        self._solver.setOptionValue("simplex_strategy", 4)
        self._solver.setOptionValue("presolve", "off")
        self._solver.passModel(program)
        self._index = np.arange(q, dtype=np.int32)

    def top(self, direction: Tensor) -> Tensor | None:
        """argmax <direction, z>, or None if there is none."""
        self._solver.changeColsCost(len(self._index), self._index, -direction.numpy())
        self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return torch.tensor(np.array(self._solver.getSolution().col_value), dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Polytope:
    """{z: low <= z columns <= high}, with the features that vary over the space alone.

    Args:
        columns: of z [q, d].
        low: bounds [d].
        high: likewise.
        width: of the range of each feature [d].
        slack: by how much the range may be left, relative to its width.
        tolerance: distance to a bound that counts as none, likewise.
        programs: linear programs over it.
    """

    columns: Tensor
    low: Tensor
    high: Tensor
    width: Tensor
    slack: float
    tolerance: float
    programs: Programs

    def ends(self, z: Tensor, reach: float) -> tuple[Tensor, Tensor]:
        """Which features are at their lower and at their upper bound."""
        u = z @ self.columns
        return (u - self.low).abs() < reach * self.width, (self.high - u).abs() < reach * self.width

    def active(self, z: Tensor) -> int:
        """How many are."""
        low, high = self.ends(z, self.tolerance + self.slack)
        return int((low | high).sum())

    def improve(self, z: Tensor, climbs: int) -> tuple[Tensor, int, int]:
        """Lower the sum of the logarithms of the distances to the bounds by linear programs, from a point.

        Args:
            z: where from [q].
            climbs: programs at most.

        Returns:
            The corner reached, or the point itself if none has more active bounds; how many; programs solved.
        """
        active, programs = self.active(z), 0
        for _ in range(climbs):
            u = z @ self.columns
            near = 1e-2 * self.width
            pull = 1 / (near + (self.high - u).relu()) - 1 / (near + (u - self.low).relu())
            better = self.programs.top(self.columns @ pull)
            programs += 1
            if better is None or (count := self.active(better)) <= active:
                break
            z, active = better, count
        return z, active, programs

    def settled(self, z: Tensor, active: int) -> tuple[int, Tensor]:
        """The point that meets the active bounds in the least-squares sense, which makes up for the slack."""
        point = z
        for _ in range(3):
            low, high = self.ends(point, self.tolerance)
            used = low | high
            if int(used.sum()) < len(z):
                return active, z
            bound = torch.where(high, self.high, self.low)[used]
            point = torch.linalg.lstsq(self.columns[:, used].T, bound[:, None], driver="gelsd").solution[:, 0]
        u = point @ self.columns
        outside = torch.maximum((self.low - u) / self.width, (u - self.high) / self.width).max()
        return (self.active(point), point) if float(outside) < self.tolerance else (active, z)


def polytope(space: Space, low: Tensor, high: Tensor, slack: float, tolerance: float) -> Polytope:
    """The part of a space with a basis that lies in the range [low, high] of each feature [d]."""
    assert space.basis is not None
    varies = space.basis.norm(dim=0) > 1e-9
    shift = 0.0 if space.origin is None else space.origin
    columns, width = space.basis[:, varies], (high - low)[varies]
    low, high = (low - shift)[varies], (high - shift)[varies]
    programs = Programs(columns, low - slack * width, high + slack * width)
    return Polytope(columns, low, high, width, slack, tolerance, programs)
