"""Which direction of the outputs a candidate's gradient is taken in, held fixed while differentiating."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Head(Protocol):
    """A map, linear in a, from the multipliers of a candidate to its weights c on the gradients of the outputs."""

    def unknowns(self, outputs: int) -> int:
        """Number of multipliers of a candidate."""

    def gap(self, outputs: int) -> str | None:
        """What a network of so many outputs lacks for this head, or None."""

    def coefficients(self, multiplier: Tensor, label: Tensor, out: Callable[[], Tensor]) -> Tensor:
        """Weights c [m, C] of multipliers [m, k] and labels [m]; `out` gives f(x_i) [m, C], held fixed."""


@dataclass(frozen=True)
class Outputs:
    """One multiplier for each output, of either sign; labels are not used."""

    def unknowns(self, outputs: int) -> int:
        """As many as outputs."""
        return outputs

    def gap(self, outputs: int) -> str | None:
        """Nothing is asked for."""
        return None

    def coefficients(self, multiplier: Tensor, label: Tensor, out: Callable[[], Tensor]) -> Tensor:
        """c = a."""
        return multiplier


@dataclass(frozen=True)
class Labelled:
    """Label times output: label 0 stands for -1, label 1 for +1 (Haim et al. 2022)."""

    def unknowns(self, outputs: int) -> int:
        """One."""
        return 1

    def gap(self, outputs: int) -> str | None:
        """One output."""
        return None if outputs == 1 else "a network of one output"

    def coefficients(self, multiplier: Tensor, label: Tensor, out: Callable[[], Tensor]) -> Tensor:
        """c_i = y_i a_i."""
        return multiplier * (2.0 * label - 1.0)[:, None]


@dataclass(frozen=True)
class RunnerUp:
    """Margin of the label to the next best class (Buzaglo et al. 2023)."""

    def unknowns(self, outputs: int) -> int:
        """One."""
        return 1

    def gap(self, outputs: int) -> str | None:
        """Nothing: the margin of one output is label times output."""
        return None

    def coefficients(self, multiplier: Tensor, label: Tensor, out: Callable[[], Tensor]) -> Tensor:
        """c_i = a_i (e_y - e_j) with j the largest output but y."""
        f = out()
        if f.shape[1] == 1:
            return Labelled().coefficients(multiplier, label, out)
        own = label[:, None]
        following = f.scatter(1, own, -torch.inf).argmax(1, keepdim=True)
        head = torch.zeros_like(f).scatter(1, own, 1.0).scatter(1, following, -1.0)
        return multiplier * head


@dataclass(frozen=True)
class EveryClass:
    """A multiplier for each constraint f_y - f_j >= 1 of a candidate (Lyu and Li 2020)."""

    def unknowns(self, outputs: int) -> int:
        """One for each other class."""
        return max(outputs - 1, 1)

    def gap(self, outputs: int) -> str | None:
        """Nothing: the margin of one output is label times output."""
        return None

    def coefficients(self, multiplier: Tensor, label: Tensor, out: Callable[[], Tensor]) -> Tensor:
        """c_i = sum_{j != y} a_ij (e_y - e_j)."""
        if out().shape[1] == 1:
            return Labelled().coefficients(multiplier, label, out)
        m, outputs = len(multiplier), multiplier.shape[1] + 1
        own = label[:, None]
        others = torch.ones(m, outputs, dtype=torch.bool).scatter(1, own, False).nonzero()[:, 1]
        spread = multiplier.new_zeros(m, outputs).scatter(1, others.view(m, outputs - 1), -multiplier)
        return spread.scatter(1, own, multiplier.sum(1, keepdim=True))


def blocks(m: int, classes: int) -> Tensor:
    """Labels of m candidates at the start, in equal blocks, 0 first; two for a network of one output [m]."""
    return torch.arange(m) * max(classes, 2) // max(m, 1)
