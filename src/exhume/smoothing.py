"""Smooth stand-ins for ReLU inside any module, which itself is not changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exhume.evidence import Evidence
from exhume.functional import Elementwise, Smoothing, stand_in

_RELU = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_LEAKY = {F.leaky_relu, F.leaky_relu_}
_IN_PLACE = {torch.relu_, Tensor.relu_, F.leaky_relu_}
_SLOPE = 0.01  # torch's default


class _Replaced(TorchFunctionMode):
    """While in force, every ReLU and leaky ReLU that torch is asked for is another function."""

    def __init__(self, relu: Elementwise) -> None:
        super().__init__()
        self.relu = relu

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func not in _RELU and func not in _LEAKY:
            return func(*args, **named)
        leaky = func in _LEAKY
        u, *rest = (*args, *(named[key] for key in ("input", "negative_slope", "inplace") if key in named))
        slope = (rest[0] if rest and not isinstance(rest[0], bool) else _SLOPE) if leaky else 0.0
        in_place = func in _IN_PLACE or any(value is True for value in rest)
        # The stand-in keeps its input for its derivative, so an in-place layer must not overwrite that one.
        source = u.clone() if in_place else u
        out = self.relu(source) if not leaky else slope * source + (1 - slope) * self.relu(source)
        return u.copy_(out) if in_place else out


def smoothed_forward(
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor], smoothing: Smoothing
) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    """The same pure function with every ReLU replaced: layers, functions and methods, in place or not.

    Leaky ReLU of slope s, which is s u + (1 - s) relu(u), likewise. A ReLU written out as a maximum or a clamp is not
    recognised and stays.

    Args:
        forward: f(params, u).
        smoothing: slope of the softplus, or the relaxed ReLU.
    """

    def smooth(params: Mapping[str, Tensor], u: Tensor) -> Tensor:
        with _Replaced(stand_in(smoothing)):
            return forward(params, u)

    return smooth


def typical(evidence: Evidence, u: Tensor) -> float:
    """Root mean square of the first layer's pre-activations at inputs u [m, d], 1 where no first layer is known.

    Slopes of a softplus are told in units of one over this.
    """
    chain = evidence.chain
    if chain is None or not len(u):
        return 1.0
    weight, name = evidence.final[chain.weights[0]].double(), chain.biases[0]
    pre = F.linear(u, weight, None if name is None else evidence.final[name].double())
    return float(pre.square().mean().sqrt().clamp_min(1e-12))
