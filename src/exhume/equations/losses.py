"""Training losses of one sample in closed form: value, slope, and second derivatives in outputs and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Loss(Protocol):
    """A loss l(f, y) of outputs f [b, C] and labels y [b, C]; directions may have further leading dimensions."""

    def value(self, out: Tensor, label: Tensor) -> Tensor:
        """Loss of each sample, summed over outputs, [b]; differentiable."""

    def slope(self, out: Tensor, label: Tensor) -> Tensor:
        """dl/df [b, C]."""

    def bend(self, out: Tensor, label: Tensor, d_out: Tensor, d_label: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of dl/df and dl/dy along directions [s, b, C] in outputs and labels, both [s, b, C]."""

    def scale(self, samples: int, outputs: int) -> float:
        """What the sum over samples is multiplied by."""


@dataclass(frozen=True)
class Squared:
    """(f - y)^2; `mean` is the reduction, else a sum."""

    mean: bool = True

    def value(self, out: Tensor, label: Tensor) -> Tensor:
        """Sum over outputs."""
        return (out - label).square().sum(-1)

    def slope(self, out: Tensor, label: Tensor) -> Tensor:
        """2 (f - y)."""
        return 2 * (out - label)

    def bend(self, out: Tensor, label: Tensor, d_out: Tensor, d_label: Tensor) -> tuple[Tensor, Tensor]:
        """+-2 (df - dy)."""
        moved = 2 * (d_out - d_label)
        return moved, -moved

    def scale(self, samples: int, outputs: int) -> float:
        """Mean over samples and outputs."""
        return 1 / (samples * outputs) if self.mean else 1.0


@dataclass(frozen=True)
class Logistic:
    """log(1 + exp(-y f)) for labels +-1; `mean` is the reduction, else a sum."""

    mean: bool = True

    def value(self, out: Tensor, label: Tensor) -> Tensor:
        """Sum over outputs."""
        return F.softplus(-label * out).sum(-1)

    def slope(self, out: Tensor, label: Tensor) -> Tensor:
        """-y p with p = 1 / (1 + exp(y f))."""
        return -label * torch.sigmoid(-label * out)

    def bend(self, out: Tensor, label: Tensor, d_out: Tensor, d_label: Tensor) -> tuple[Tensor, Tensor]:
        """The symmetric matrix [[y^2 v, y f v - p], [y f v - p, f^2 v]] with v = p (1 - p)."""
        p = torch.sigmoid(-label * out)
        v = p * (1 - p)
        cross = label * out * v - p
        return label**2 * v * d_out + cross * d_label, cross * d_out + out**2 * v * d_label

    def scale(self, samples: int, outputs: int) -> float:
        """Mean over samples and outputs."""
        return 1 / (samples * outputs) if self.mean else 1.0


@dataclass(frozen=True)
class CrossEntropy:
    """-sum_c y_c log softmax(f)_c, labels being probabilities; `mean` is the reduction, else a sum."""

    mean: bool = True

    def value(self, out: Tensor, label: Tensor) -> Tensor:
        """Cross-entropy of each sample."""
        return -(label * F.log_softmax(out, -1)).sum(-1)

    def slope(self, out: Tensor, label: Tensor) -> Tensor:
        """s sum(y) - y with s = softmax(f); labels on their way to a solution need not add to 1."""
        return torch.softmax(out, -1) * label.sum(-1, keepdim=True) - label

    def bend(self, out: Tensor, label: Tensor, d_out: Tensor, d_label: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax moves by ds = s (df - <s, df>), log softmax by df - <s, df>."""
        s = torch.softmax(out, -1)
        moved = d_out - (s * d_out).sum(-1, keepdim=True)
        mass, d_mass = label.sum(-1, keepdim=True), d_label.sum(-1, keepdim=True)
        return s * moved * mass + s * d_mass - d_label, -moved

    def scale(self, samples: int, outputs: int) -> float:
        """Mean over samples."""
        return 1 / samples if self.mean else 1.0


LOSSES: dict[str, type[Squared] | type[Logistic] | type[CrossEntropy]] = {
    "mse": Squared,
    "logistic": Logistic,
    "cross-entropy": CrossEntropy,
}
