"""How far a simulated change of weights is from the true one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Change = Mapping[str, Tensor]


class Discrepancy(Protocol):
    """A scalar that vanishes where two changes of weights agree, given by parameter name."""

    def value(self, change: Change, target: Change) -> Tensor:
        """Discrepancy of a simulated change from the true one; differentiable in the simulated one."""


def _inner(a: Change, b: Change) -> Tensor:
    return torch.stack([(a[k] * b[k]).sum() for k in b]).sum()


@dataclass(frozen=True)
class Squared:
    """|change - target|^2 / |target|^2."""

    def value(self, change: Change, target: Change) -> Tensor:
        """Relative squared distance."""
        off = {k: change[k] - t for k, t in target.items()}
        return _inner(off, off) / _inner(target, target)


@dataclass(frozen=True)
class Cosine:
    """1 - cos(change, target): blind to a common factor, such as a wrong learning rate."""

    def value(self, change: Change, target: Change) -> Tensor:
        """One minus the cosine; a flat 1 where nothing changed, since no direction is better there."""
        largest = max(float(change[k].detach().abs().max()) for k in target)
        if largest == 0:
            return 1 - 0 * _inner(change, target)
        scaled = {k: change[k] / largest for k in target}  # whose squares neither overflow nor vanish
        size = _inner(scaled, scaled).sqrt() * _inner(target, target).sqrt()
        return 1 - _inner(scaled, target) / size


@dataclass(frozen=True)
class Whitened:
    """Mean over parameter tensors l of |change_l - target_l|^2 / |target_l|^2: small layers count like large ones.

    Tensors that did not change are left out.
    """

    def value(self, change: Change, target: Change) -> Tensor:
        """Mean relative squared distance."""
        parts = [
            (change[k] - t).square().sum() / t.square().sum() for k, t in target.items() if bool(t.any())
        ]
        return torch.stack(parts).mean()
