"""Small networks to attack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from exhume.errors import ModelError, nearest


class Polynomial(nn.Module):
    """The activation c_0 + c_1 t + c_2 t^2 + ...

    Args:
        c: its coefficients.
    """

    def __init__(self, c: Sequence[float]) -> None:
        super().__init__()
        self.c = tuple(c)

    def forward(self, t: Tensor) -> Tensor:
        """Return the polynomial of each entry."""
        out = torch.zeros_like(t)
        for value in reversed(self.c):
            out = out * t + value
        return out


class Quadratic(Polynomial):
    """The activation t^2."""

    def __init__(self) -> None:
        super().__init__((0.0, 0.0, 1.0))


class Cubic(Polynomial):
    """The activation t^3."""

    def __init__(self) -> None:
        super().__init__((0.0, 0.0, 0.0, 1.0))


class ReluTanh(nn.Module):
    """The activation relu(t) + tanh(t)."""

    def forward(self, t: Tensor) -> Tensor:
        """Return relu(t) + tanh(t) of each entry."""
        return torch.relu(t) + torch.tanh(t)


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "quadratic": Quadratic,
    "cubic": Cubic,
    "relu_tanh": ReluTanh,
}


def mlp(
    sizes: Sequence[int],
    activation: str = "relu",
    bias: bool | Literal["first"] = True,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """Return Flatten, Linear, activation, ..., Linear with PyTorch's default initialisation.

    The weights are drawn in float64 and rounded to `dtype`, so that a seed names one net in every precision.

    Args:
        sizes: features, hidden widths, outputs, e.g. (784, 2000, 1).
        activation: name of the function between layers.
        bias: whether the layers have biases; "first" for the first layer alone, which keeps a ReLU net homogeneous.
        seed: of the initialisation; the global generator is left as it was.
        dtype: of the parameters.

    Raises:
        ModelError: fewer than two sizes, or an unknown activation.
    """
    if len(sizes) < 2:
        raise ModelError(
            f"sizes must name at least inputs and outputs, but is {tuple(sizes)}; give e.g. (784, 1000, 1)"
        )
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"activation must be one that exhume knows, but is {activation!r};"
            f" {nearest(activation, ACTIVATIONS)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed accelerators too
        layers: list[nn.Module] = [nn.Flatten()]
        for l, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            own = bias is True or (bias == "first" and l == 0)
            layers += [nn.Linear(fan_in, fan_out, bias=own, dtype=torch.float64), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def small_start(model: nn.Sequential, size: float, seed: int = 0) -> nn.Sequential:
    """Redraw the first layer of an `mlp`, weights and bias, from N(0, size^2), in place; returns the model.

    Args:
        model: as `mlp` made it.
        size: standard deviation; 1e-4 in Haim et al. 2022.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed + 50_021)
    with torch.no_grad():
        for p in model[1].parameters():
            p.copy_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model
