"""A part of the equations: what is fitted, or what is left out and predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.evidence import Evidence


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the equations of a span equation.

    For a dense chain with a hidden layer they belong to hidden units of the first layer: a unit owns its row of
    [DW_1, Db_1] and its column of DW_2. For the last layer alone they belong to its features, a column each. For any
    other module they are random single weights.

    Args:
        units: indices of the hidden units or features, sorted; None for a module without recognised units.
        rest: whether the equations that belong to no unit (later layers, later biases) are in this part.
        share: share of the equations in this part.
        seed: of the choice.
    """

    units: Tensor | None
    rest: bool
    share: float
    seed: int

    def mask(self, weight: Tensor) -> Tensor:
        """Which entries of a parameter are in this part, as 0 and 1; the masks of `split` add to 1."""
        generator = torch.Generator().manual_seed(self.seed + weight.numel())
        drawn = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
        return (drawn < self.share if self.rest else drawn >= 1 - self.share).to(weight.dtype)


def split(evidence: Evidence, layers: str, share: float, seed: int) -> tuple[Part, Part] | None:
    """Split the equations at random into a fitted part and a part that is left out.

    Args:
        evidence: what is attacked.
        layers: "all" or "last", which layers give equations.
        share: of the hidden units, features or single weights left out.
        seed: of the split.

    Returns:
        Both parts, or None where no equation belongs to a unit: a linear model, one whose first two layers did not
        move, or the last layer of a deep network whose outputs pass through an activation.
    """
    chain, head = evidence.chain, evidence.head
    if chain is not None and len(chain.weights) == 1:
        return None
    if chain is not None and layers == "all" and not any(evidence.moved(k) for k in chain.weights[:2]):
        return None
    if layers == "last" and head is not None:
        width = evidence.final[head.weight].shape[1]
    elif chain is None:
        return Part(None, True, 1 - share, seed), Part(None, False, share, seed)
    elif layers == "last" and len(chain.weights) > 2:
        return None
    else:
        width = evidence.final[chain.weights[0]].shape[0]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    held = max(1, round(share * width))
    return (
        Part(order[held:].sort().values, True, 1 - share, seed),
        Part(order[:held].sort().values, False, share, seed),
    )
