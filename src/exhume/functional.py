"""Elementwise activations, their smoothing, and recognition of dense layers inside any module."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Elementwise = Callable[[Tensor], Tensor]


def identity(u: Tensor) -> Tensor:
    """Return u."""
    return u


def quadratic(u: Tensor) -> Tensor:
    """Return u^2."""
    return u * u


def cubic(u: Tensor) -> Tensor:
    """Return u^3."""
    return u * u * u


def relu_tanh(u: Tensor) -> Tensor:
    """Return relu(u) + tanh(u), which has odd degrees from three, as ReLU has not."""
    return F.relu(u) + torch.tanh(u)


ACTIVATIONS: dict[str, Elementwise] = {
    "identity": identity,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "quadratic": quadratic,
    "cubic": cubic,
    "relu_tanh": relu_tanh,
}


@dataclass(frozen=True)
class Relaxed:
    """ReLU whose values are exact, and whose derivative is sigmoid(alpha u) (Haim et al. 2022).

    relu(u) - h(u) + h(u), with all but the last summand held fixed, h(u) = log(1 + exp(alpha u)) / alpha

    Args:
        alpha: slope of the derivative at the kink is alpha / 4.
    """

    alpha: float

    def relu(self, u: Tensor) -> Tensor:
        """Return relu(u), differentiable any number of times."""
        h = _softplus(u, self.alpha)
        return F.relu(u).detach() + (h - h.detach())


@dataclass(frozen=True)
class Activation:
    """An elementwise function phi with its first two derivatives (almost everywhere)."""

    name: str
    fn: Elementwise

    def value_and_slope(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi(u) and phi'(u), both shaped like u and differentiable."""
        if self.name == "identity":
            return u, torch.ones_like(u)
        if self.name == "relu":  # the most common one, at a third of the cost of a general derivative
            return F.relu(u), (u > 0).to(u.dtype)
        value, slope = torch.func.jvp(self.fn, (u,), (torch.ones_like(u),))[:2]
        return value, slope

    def curvature(self, u: Tensor) -> Tensor:
        """Return phi''(u), shaped like u."""
        return torch.func.jvp(lambda v: self.value_and_slope(v)[1], (u,), (torch.ones_like(u),))[1]

    @property
    def piecewise_linear(self) -> bool:
        """Whether phi'' vanishes almost everywhere."""
        return self.name in ("identity", "relu", "leaky_relu")

    def smoothed(self, smoothing: Smoothing | None) -> Activation:
        """Replace ReLU by the matched softplus log(1 + exp(beta u)) / beta, whose slope is sigmoid(beta u).

        Leaky ReLU, which is 0.01 u + 0.99 relu(u), and relu(u) + tanh(u) likewise.

        Args:
            smoothing: beta; or what keeps the values of ReLU and smooths its derivative; None leaves all as it is.
        """
        if smoothing is None:
            return self
        smooth = stand_in(smoothing)
        name = "relaxed" if isinstance(smoothing, Relaxed) else "softplus"
        match self.name:
            case "relu":
                return Activation(name, smooth)
            case "leaky_relu":
                return Activation(f"leaky {name}", lambda u: 0.01 * u + 0.99 * smooth(u))
            case "relu_tanh":
                return Activation(f"{name} and tanh", lambda u: smooth(u) + torch.tanh(u))
            case _:
                return self


Smoothing = float | Relaxed


def stand_in(smoothing: Smoothing) -> Elementwise:
    """The function that takes the place of ReLU: the softplus of slope beta, or the relaxed ReLU."""
    if isinstance(smoothing, Relaxed):
        return smoothing.relu
    return lambda u: _softplus(u, smoothing)


def _softplus(u: Tensor, beta: float) -> Tensor:
    return F.softplus(u, beta=beta, threshold=30.0)


def leaky_backward(phi: Activation, leak: float) -> Activation:
    """The same values, but a ReLU in phi is differentiated as if it had slope `leak` where it is off."""

    def leaky(u: Tensor) -> Tensor:
        straight = F.leaky_relu(u, leak)
        return F.relu(u).detach() + straight - straight.detach()

    match phi.name:
        case "relu":
            return Activation("relu, leaky backward", leaky)
        case "relu_tanh":
            return Activation("relu_tanh, leaky backward", lambda u: leaky(u) + torch.tanh(u))
        case _:
            return phi


@dataclass(frozen=True)
class DenseChain:
    """A multi-layer perceptron u_l = W_l a_{l-1} + b_l, a_l = phi_l(u_l), a_0 the flattened input.

    Args:
        weights: parameter name of each W_l [w_l, w_{l-1}].
        biases: parameter name of each b_l [w_l], or None.
        activations: phi_l for each layer; the last is usually the identity.
    """

    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    activations: tuple[Activation, ...]

    @property
    def piecewise_linear(self) -> bool:
        """Whether every hidden activation is, so that signals do not vary with the input locally."""
        return all(phi.piecewise_linear for phi in self.activations[:-1])

    @property
    def activation(self) -> str:
        """Names of the hidden activations, joined where they differ."""
        return "+".join(dict.fromkeys(phi.name for phi in self.activations[:-1])) or "identity"

    @property
    def body(self) -> DenseChain | None:
        """The layers below the last, whose outputs are the features h of f = W h + b.

        None for a single layer, and where an activation follows the last.
        """
        if len(self.weights) == 1 or self.activations[-1].name != "identity":
            return None
        return DenseChain(self.weights[:-1], self.biases[:-1], self.activations[:-1])

    def smoothed(self, smoothing: Smoothing | None) -> DenseChain:
        """Replace every ReLU, see `Activation.smoothed`."""
        return replace(self, activations=tuple(phi.smoothed(smoothing) for phi in self.activations))

    def forward(self, params: Mapping[str, Tensor], u: Tensor) -> Tensor:
        """Return the outputs [m, C] for inputs u [m, *shape]."""
        a = u.flatten(1)
        for weight, bias, phi in zip(self.weights, self.biases, self.activations, strict=True):
            a = phi.fn(F.linear(a, params[weight], None if bias is None else params[bias]))
        return a


def call(model: nn.Module, params: Mapping[str, Tensor], u: Tensor) -> Tensor:
    """Return what a module gives with these parameters on inputs u [m, *shape].

    Attention is written out: fused kernels cannot be differentiated twice.
    """
    with sdpa_kernel(SDPBackend.MATH):
        return cast(Tensor, torch.func.functional_call(model, dict(params), (u,)))


@dataclass(frozen=True, eq=False)
class Head:
    """The linear layer that a model ends in, f(u) = W h(u) + b.

    Args:
        weight: parameter name of W [C, w].
        bias: parameter name of b [C], or None.
        features: pure function h(params, u) [m, w] of inputs u [m, *shape].
    """

    weight: str
    bias: str | None
    features: Callable[[Mapping[str, Tensor], Tensor], Tensor]


def find_head(model: nn.Module, shape: tuple[int, ...]) -> Head | None:
    """Return the linear layer that gives the outputs of `model`, or None where there is none.

    It is the last linear layer that runs, provided that outputs are W h(u) + b and that the gradient of output c
    with respect to W is e_c (x) h(u): with outputs that are processed further, features of other than two
    dimensions, or a weight that serves elsewhere too, they are not.

    Args:
        model: in float64 and eval mode; the answer refers to it, and it is left as it was.
        shape: of one input.
    """
    ran: list[nn.Linear] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: ran.append(cast(nn.Linear, layer)))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    u = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.cat(
        [scale * u for scale in (3, 90, 3000)]
    )  # as large as in `recognise`, for clips that a probe must reach
    try:
        with torch.no_grad():
            model(u.clone())
    finally:
        for hook in hooks:
            hook.remove()
    params = {name: p.detach() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    if not ran or id(ran[-1].weight) not in names:
        return None
    layer = ran[-1]
    head = Head(
        names[id(layer.weight)],
        None if layer.bias is None else names[id(layer.bias)],
        lambda params, u: _input_of(layer, model, params, u),
    )
    return head if _obeys(head, model, params, u) else None


def _input_of(layer: nn.Module, model: nn.Module, params: Mapping[str, Tensor], u: Tensor) -> Tensor:
    """What a layer is given when the model with these parameters runs on u."""
    given: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
    try:
        call(model, params, u)
    finally:
        hook.remove()
    return given[-1] if given else u.new_zeros(0)


def _obeys(head: Head, model: nn.Module, params: Mapping[str, Tensor], u: Tensor) -> bool:
    """Whether outputs and their gradients are those of a linear layer on the features."""
    own = {
        name: params[name].clone().requires_grad_() for name in (head.weight, head.bias) if name is not None
    }
    with torch.enable_grad():
        out = call(model, {**params, **own}, u).reshape(len(u), -1)
        h = head.features(params, u)
        weight, bias = own[head.weight], None if head.bias is None else own[head.bias]
        if h.shape != (len(u), weight.shape[1]) or out.shape[1] != len(weight):
            return False
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        slopes = torch.autograd.grad((probe * out).sum(), list(own.values()), allow_unused=True)
    wanted = [F.linear(h, weight, bias), probe.T @ h, *([] if bias is None else [probe.sum(0)])]
    return all(
        a is not None and bool((a - b).abs().max() <= 1e-10 * b.abs().max())
        for a, b in zip((out, *slopes), wanted, strict=True)
    )


def recognise(model: nn.Module, shape: tuple[int, ...]) -> DenseChain | None:
    """Return the dense chain that `model` computes, or None when it is anything else.

    The linear layers are found by running a copy on random inputs, and the function between two of them by
    comparing values; the chain is returned only if it reproduces the outputs, so a skip connection, a
    normalisation layer or a scaling makes the answer None.
    """
    twin = copy.deepcopy(model).cpu().eval().double()
    u = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Large inputs too, or a clip (ReLU6) that the probe does not reach would pass for a ReLU.
    u = torch.cat([scale * u for scale in (3, 90, 3000)])
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, inputs[0].clone(), output.clone()))

    for layer in twin.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(record)
    with torch.no_grad():
        out = twin(u.clone())
    linears = [layer for layer, _, _ in calls]
    params = dict(twin.named_parameters())
    owned = {id(p) for layer in linears for p in layer.parameters()}
    repeated = len({id(layer.weight) for layer in linears}) < len(linears)
    if not linears or repeated or {id(p) for p in params.values()} != owned:
        return None
    if any(a.dim() != 2 for _, a, _ in calls) or not torch.equal(calls[0][1], u.flatten(1)):
        return None

    befores = [output for _, _, output in calls]
    afters = [a for _, a, _ in calls[1:]] + [out.reshape(len(out), -1)]
    activations = _consistent(_elementwise_choices(twin), befores, afters)
    if activations is None:
        return None
    names = {id(p): name for name, p in params.items()}
    chain = DenseChain(
        weights=tuple(names[id(layer.weight)] for layer in linears),
        biases=tuple(None if layer.bias is None else names[id(layer.bias)] for layer in linears),
        activations=activations,
    )
    with torch.no_grad():
        return chain if _same(chain.forward(params, u), out.reshape(len(out), -1)) else None


def _elementwise_choices(model: nn.Module) -> list[Activation]:
    """The named activations first, then the model's own parameter-free leaves (a LeakyReLU of other slope)."""
    named = [Activation(name, fn) for name, fn in ACTIVATIONS.items()]
    leaves = [m for m in model.modules() if not any(True for _ in m.children()) and not list(m.parameters())]
    own = [_own(m) for m in leaves if not isinstance(m, nn.Flatten | nn.Dropout | nn.Identity)]
    return named + own


def _own(module: nn.Module) -> Activation:
    """An activation of the model's own; the input is cloned, since the module may act in place."""
    return Activation(type(module).__name__.lower() + "*", lambda u: module(u.clone()))


def _consistent(
    choices: list[Activation], befores: list[Tensor], afters: list[Tensor]
) -> tuple[Activation, ...] | None:
    """The activation after each layer, or None where none explains one.

    Units that are never negative pass for linear: where several choices explain a hidden layer, the one that
    explains the most hidden layers is taken.
    """
    explained = [
        [k for k, phi in enumerate(choices) if _explains(phi, before, after)]
        for before, after in zip(befores, afters, strict=True)
    ]
    if not all(explained):
        return None
    votes = Counter(k for ks in explained[:-1] for k in ks)
    hidden = [max(ks, key=lambda k: (votes[k], -k)) for ks in explained[:-1]]
    return tuple(choices[k] for k in (*hidden, explained[-1][0]))


def _explains(phi: Activation, before: Tensor, after: Tensor) -> bool:
    """Whether phi maps `before` to `after`, each entry for itself (a softmax does not)."""
    try:
        value, apart = phi.fn(before.clone()), phi.fn(before.reshape(-1, 1))
    except RuntimeError:  # a layer that wants its own number of units
        return False
    return _same(value, after) and _same(apart, value.reshape(-1, 1))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12)
