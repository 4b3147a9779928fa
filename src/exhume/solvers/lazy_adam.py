"""Adam that leaves alone what has no gradient, for descents on a part of the unknowns at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LazyAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) with a step count for each number, which rests where its gradient is 0.

    Args:
        leaf: the unknowns.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second.
    """

    def __init__(
        self, leaf: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__([leaf], {"lr": lr, "betas": betas, "eps": eps})
        self.state[leaf] = {key: torch.zeros_like(leaf) for key in ("first", "second", "count")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Move every number whose gradient is not 0."""
        group = self.param_groups[0]
        leaf, (a, b) = group["params"][0], group["betas"]
        first, second, count = (self.state[leaf][key] for key in ("first", "second", "count"))
        moving = leaf.grad != 0
        gradient = leaf.grad[moving]
        count[moving] += 1
        first[moving] = a * first[moving] + (1 - a) * gradient
        second[moving] = b * second[moving] + (1 - b) * gradient.square()
        ahead = first[moving] / (1 - a ** count[moving])
        size = (second[moving] / (1 - b ** count[moving])).sqrt()
        leaf[moving] -= group["lr"] * ahead / (size + group["eps"])
        return None if closure is None else closure()
