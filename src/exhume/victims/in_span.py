"""A first layer trained in the span of the data, where plain SGD keeps all of its updates."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class InSpan(nn.Module):
    """The layer W = kappa W_0 + C Q' on fixed inputs u_1..u_n, with Q [d, n] a basis of their span.

    A gradient with respect to W is delta' U, so SGD with any momentum, L2 decay and batches moves C as it
    moves W, and kappa by decay alone. Both are parameters: C sees inputs u Q, kappa has a gradient of zero,
    and an SGD optimiser does to them exactly what it does to W.

    Args:
        layer: gives W_0 [w, d] and the bias, which is shared.
        u: all inputs of the run, [n, d] with n < d.
    """

    def __init__(self, layer: nn.Linear, u: Tensor) -> None:
        super().__init__()
        self.basis, upper = torch.linalg.qr(u.T)
        self.start = layer.weight.detach().clone()
        self.rows = torch.cat(
            [upper.T, u @ self.start.T], 1
        )  # u Q and u W_0', [n, n + w]: what forward takes
        self.coef = nn.Parameter(u.new_zeros(len(self.start), len(u)))
        self.kappa = nn.Parameter(u.new_ones(()))
        self.bias = layer.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Return the pre-activations [m, w] of some of `self.rows`."""
        along, start = rows.split([self.coef.shape[1], self.coef.shape[0]], 1)
        kappa = self.kappa.detach() + 0 * self.kappa  # a gradient of zero, not none: optimisers skip none
        out = torch.addcmul(along @ self.coef.T, kappa, start)
        return out if self.bias is None else out + self.bias

    def weight(self) -> Tensor:
        """Return W [w, d]."""
        return (self.kappa * self.start + self.coef @ self.basis.T).detach()


def leading_linear(model: nn.Module, u: Tensor) -> tuple[nn.Linear, list[nn.Module]] | None:
    """Return the first layer and all that follows it, if `InSpan` can stand for the first layer, else None.

    It can in a Sequential of an optional Flatten, a trainable Linear layer and anything that does not share
    its weight, on fewer inputs u [n, *shape] than features.
    """
    layers = list(model) if type(model) is nn.Sequential else []
    if layers and isinstance(layers[0], nn.Flatten):
        layers = layers[1:]
    elif u.ndim > 2:
        return None
    if not layers or type(layers[0]) is not nn.Linear:
        return None
    first, rest = layers[0], layers[1:]
    shared = any(p is first.weight for layer in rest for p in layer.parameters())
    if shared or not first.weight.requires_grad or len(u) >= first.in_features:
        return None
    return first, rest
