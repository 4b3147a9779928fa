"""Networks in the regime where the span equation holds best: NTK parametrisation, and linearised training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exhume.victims.nets import ACTIVATIONS, mlp


class NTKLinear(nn.Module):
    """u -> W u / sqrt(fan_in) + b with W ~ N(0, 1), b = 0 (Jacot, Gabriel and Hongler 2018).

    Args:
        fan_in: inputs.
        fan_out: outputs.
        bias: whether there is a b; it is not rescaled.
        generator: draws W.
    """

    def __init__(self, fan_in: int, fan_out: int, bias: bool, generator: torch.Generator) -> None:
        super().__init__()
        drawn = torch.randn(fan_out, fan_in, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(drawn)
        self.bias = nn.Parameter(torch.zeros(fan_out, dtype=torch.float64)) if bias else None

    def forward(self, u: Tensor) -> Tensor:
        """Return the pre-activations [m, fan_out]."""
        return F.linear(u / u.shape[-1] ** 0.5, self.weight, self.bias)


def ntk_mlp(
    sizes: Sequence[int],
    activation: str = "relu",
    bias: bool = True,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """Return Flatten, NTKLinear, activation, ..., NTKLinear; arguments as in `nets.mlp`."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [NTKLinear(fan_in, fan_out, bias, generator), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Linearised(nn.Module):
    """f(u; theta_0) + <grad f(u; theta_0), theta - theta_0>, a model that is affine in theta.

    Its parameters are those of f, by the same names with dots as underscores, and start at theta_0.

    Args:
        model: f, with the parameters theta_0; never changed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that its parameters are not taken for this model's
        self._names = {name: name.replace(".", "_") for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            self.register_parameter(self._names[name], nn.Parameter(p.detach().clone()))
            self.register_buffer(f"start_{self._names[name]}", p.detach().clone())

    def forward(self, u: Tensor) -> Tensor:
        """Return the outputs [m, C]."""
        start = {name: getattr(self, f"start_{own}") for name, own in self._names.items()}
        moved = {name: getattr(self, own) - start[name] for name, own in self._names.items()}

        def f(params: dict[str, Tensor]) -> Tensor:
            return cast(Tensor, torch.func.functional_call(self._model[0], params, (u,)))

        out = torch.func.jvp(f, (start,), (moved,))
        return out[0] + out[1]


def linearised_mlp(
    sizes: Sequence[int],
    activation: str = "relu",
    bias: bool = True,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Linearised:
    """Return `nets.mlp` of the same arguments, linearised at its initialisation."""
    return Linearised(mlp(sizes, activation, bias, seed=seed, dtype=dtype))
