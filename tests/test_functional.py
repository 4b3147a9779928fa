import copy
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exhume.functional import ACTIVATIONS, Activation, recognise
from planted import dense, draw, state

SHAPE = (6,)
legacy = np.random.get_state  # the global stream is what must not move


def names(chain):
    return tuple(phi.name for phi in chain.activations)


class Functional(nn.Module):
    """An MLP written by hand: activations are function calls, the input is flattened inside."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 7)
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        x = F.relu(self.first(x.flatten(1)))
        return self.head(torch.tanh(self.second(x)))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.head(h + F.relu(self.middle(h)))


class InputSkip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(14, 1)

    def forward(self, x):
        return self.head(torch.cat([x, F.relu(self.first(x))], 1))


class Scaled(nn.Module):
    """Linear layers and ReLU, times a number in one place."""

    def __init__(self, where):
        super().__init__()
        self.first, self.head, self.where = nn.Linear(6, 8), nn.Linear(8, 1), where

    def forward(self, x):
        scale = {w: 0.5 if w == self.where else 1.0 for w in ("input", "hidden", "output")}
        return scale["output"] * self.head(scale["hidden"] * F.relu(self.first(scale["input"] * x)))


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.head(F.relu(self.again(F.relu(self.again(h)))))


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.head = (nn.Linear(i, o) for i, o in ((6, 8), (8, 8), (8, 8), (8, 1)))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(F.relu(self.first(x)))))))


class FreeParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.shift = (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
            nn.Parameter(torch.zeros(1)),
        )

    def forward(self, x):
        return self.net(x) + self.shift


def mlp(*between, widths=(6, 9, 7, 2), bias=True):
    layers = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b, bias=bias), *between[i : i + 1]]
    return nn.Sequential(*layers)


with torch.random.fork_rng():
    torch.manual_seed(0)
    DENSE = {
        "sequential": (mlp(nn.ReLU(), nn.ReLU()), SHAPE, ("relu", "relu", "identity")),
        "functional relu and tanh, flatten inside": (Functional(), (2, 3), ("relu", "tanh", "identity")),
        "relu in place": (mlp(nn.ReLU(inplace=True), nn.ReLU(True)), SHAPE, ("relu", "relu", "identity")),
        "one module used twice": (mlp(*[nn.ReLU()] * 2), SHAPE, ("relu", "relu", "identity")),
        "leaky relu": (mlp(nn.LeakyReLU(), nn.LeakyReLU()), SHAPE, ("leaky_relu", "leaky_relu", "identity")),
        "steep leaky relu": (mlp(nn.LeakyReLU(0.3), nn.ReLU()), SHAPE, ("leakyrelu*", "relu", "identity")),
        "no biases": (mlp(nn.Tanh(), nn.GELU(), bias=False), SHAPE, ("tanh", "gelu", "identity")),
        "final sigmoid": (mlp(nn.SiLU(), nn.ELU(), nn.Sigmoid()), SHAPE, ("silu", "elu", "sigmoid")),
        "final relu": (mlp(nn.SELU(), nn.Softplus(), nn.ReLU()), SHAPE, ("selu", "softplus", "relu")),
        "flatten first": (
            nn.Sequential(nn.Flatten(), mlp(nn.ReLU(), nn.ReLU())),
            (2, 3),
            ("relu", "relu", "identity"),
        ),
        "dropout": (
            mlp(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.ReLU()),
            SHAPE,
            ("relu", "relu", "identity"),
        ),
        "no hidden layer": (nn.Linear(6, 3), SHAPE, ("identity",)),
        "two linear layers": (mlp(nn.Identity(), widths=(6, 4, 2)), SHAPE, ("identity", "identity")),
    }

    OTHER = {
        "convolution": (
            nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)),
            (1, 3, 3),
        ),
        "batch norm": (mlp(nn.Sequential(nn.BatchNorm1d(9), nn.ReLU()), nn.ReLU()), SHAPE),
        "batch norm without affine": (
            mlp(nn.Sequential(nn.BatchNorm1d(9, affine=False), nn.ReLU()), nn.ReLU()),
            SHAPE,
        ),
        "layer norm then relu": (
            mlp(nn.Sequential(nn.LayerNorm(9, elementwise_affine=False), nn.ReLU())),
            SHAPE,
        ),
        "skip connection": (Skip(), SHAPE),
        "skip from the input": (InputSkip(), SHAPE),
        "layer applied twice": (Repeated(), SHAPE),
        "tied weights": (Tied(), SHAPE),
        "PReLU": (mlp(nn.PReLU(), nn.ReLU()), SHAPE),
        "scaled input": (Scaled("input"), SHAPE),
        "scaled hidden layer": (Scaled("hidden"), SHAPE),
        "scaled output": (Scaled("output"), SHAPE),
        "parameter outside the layers": (FreeParameter(), SHAPE),
        "no linear layer": (nn.Sequential(nn.Flatten(), nn.Tanh()), SHAPE),
        "linear over the last of two axes": (mlp(nn.ReLU(), widths=(3, 5, 1)), (2, 3)),
    }


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_chain_is_recognised_and_computes_the_same(name):
    model, shape, activations = DENSE[name]
    chain = recognise(model, shape)
    assert chain is not None
    assert names(chain) == activations
    twin = copy.deepcopy(model).double().eval()
    params = dict(twin.named_parameters())
    assert {*chain.weights, *filter(None, chain.biases)} == set(params)
    u = draw(10, *shape, seed=5)
    torch.testing.assert_close(chain.forward(params, u), twin(u), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_is_not_recognised(name):
    model, shape = OTHER[name]
    assert recognise(model, shape) is None


MIXING = {
    "softmax": nn.Softmax(1),
    "softmax over the last axis": nn.Softmax(-1),
    "log-softmax": nn.LogSoftmax(1),
    "group norm": nn.GroupNorm(1, 2, affine=False),
}
SHAPED = {  # these refuse an input of another shape
    "layer norm": nn.LayerNorm(2, elementwise_affine=False),
    "batch norm": nn.BatchNorm1d(2, affine=False),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_units_is_not_an_activation(name):
    assert recognise(mlp(nn.ReLU(), nn.ReLU(), MIXING[name]), SHAPE) is None


@pytest.mark.parametrize("name", SHAPED)
def test_a_layer_that_knows_its_shape_is_not_an_activation(name):
    assert recognise(mlp(nn.ReLU(), nn.ReLU(), SHAPED[name]), SHAPE) is None


def test_a_clip_beyond_the_probe_is_seen():
    """Pre-activations of the second layer stay below 6 on the probe; on raw pixels they do not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(nn.ReLU6(), nn.ReLU6()).double()
    chain, u = recognise(model, SHAPE), 255 * draw(50, 6, seed=5)
    assert chain is None or torch.allclose(
        chain.forward(dict(model.named_parameters()), u), model(u), atol=1e-9
    )


@pytest.mark.parametrize(
    "name", ["sequential", "functional relu and tanh, flatten inside", "relu in place", "dropout"]
)
@pytest.mark.parametrize("training", [True, False])
def test_recognition_leaves_module_mode_and_random_state_alone(name, training):
    model, shape, _ = DENSE[name]
    model = copy.deepcopy(model).train(training)
    before, modes = state(model), [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    streams = torch.random.get_rng_state(), legacy()[1].tolist(), random.getstate()
    assert recognise(model, shape) is not None
    after = state(model)
    assert all(torch.equal(after[k], before[k]) and after[k].dtype == before[k].dtype for k in before)
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert torch.equal(torch.random.get_rng_state(), streams[0])
    assert (legacy()[1].tolist(), random.getstate()) == streams[1:]


def autograd_derivatives(fn, u):
    """phi' and phi'' by reverse mode, twice."""
    leaf = u.clone().requires_grad_()
    (slope,) = torch.autograd.grad(fn(leaf).sum(), leaf, create_graph=True)
    if not slope.requires_grad:
        return slope, torch.zeros_like(u)
    (curvature,) = torch.autograd.grad(slope.sum(), leaf, allow_unused=True)
    return slope.detach(), torch.zeros_like(u) if curvature is None else curvature


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slope_and_curvature_equal_autograd(name):
    phi = Activation(name, ACTIVATIONS[name])
    u = 3 * draw(40, 5, seed=2)
    value, slope = phi.value_and_slope(u)
    expected = autograd_derivatives(phi.fn, u)
    torch.testing.assert_close(value, phi.fn(u), rtol=0, atol=0)
    torch.testing.assert_close(slope, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(phi.curvature(u), expected[1], rtol=1e-12, atol=1e-12)
    assert phi.piecewise_linear == bool((expected[1] == 0).all())


def test_slope_and_curvature_of_the_models_own_activation():
    phi = recognise(mlp(nn.LeakyReLU(0.3, inplace=True), nn.ReLU()), SHAPE).activations[0]
    u = draw(20, 3)
    before = u.clone()
    torch.testing.assert_close(phi.value_and_slope(u)[1], torch.where(u > 0, 1.0, 0.3).double())
    assert not phi.curvature(u).any()
    assert torch.equal(u, before)


@pytest.mark.parametrize("beta", [0.5, 1.0, 7.0, 200.0])
def test_smoothed_relu_has_a_sigmoid_slope(beta):
    phi = Activation("relu", F.relu).smoothed(beta)
    u = torch.cat([draw(200, seed=1), torch.linspace(-60, 60, 241, dtype=torch.float64)]) / beta
    value, slope = phi.value_and_slope(u)
    gate = torch.sigmoid(beta * u)
    torch.testing.assert_close(slope, gate, rtol=0, atol=1e-12)
    torch.testing.assert_close(phi.curvature(u), beta * gate * (1 - gate), rtol=0, atol=1e-12 * beta)
    torch.testing.assert_close(
        value, torch.logaddexp(torch.zeros(()).double(), beta * u) / beta, rtol=0, atol=1e-12 / beta
    )
    assert not phi.piecewise_linear


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e150])
def test_smoothed_relu_is_stable_far_from_zero(size):
    phi = Activation("relu", F.relu).smoothed(10.0)
    u = torch.tensor([-size, size], dtype=torch.float64)
    value, slope = phi.value_and_slope(u)
    assert value.tolist() == [0.0, size]
    assert slope.tolist() == pytest.approx([0.0, 1.0], abs=1e-12)
    assert phi.curvature(u).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    leaf = u.clone().requires_grad_()
    (back,) = torch.autograd.grad(
        phi.value_and_slope(leaf)[1].sum(), leaf
    )  # as vjp of the span equation does
    assert back.isfinite().all()


def test_smoothed_leaky_relu_is_the_same_mixture_of_identity_and_smoothed_relu():
    leaky, relu = (Activation(name, ACTIVATIONS[name]).smoothed(4.0) for name in ("leaky_relu", "relu"))
    u = 2 * draw(100, seed=3)
    value, slope = leaky.value_and_slope(u)
    torch.testing.assert_close(value, 0.01 * u + 0.99 * relu.fn(u), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, 0.01 + 0.99 * torch.sigmoid(4.0 * u), rtol=0, atol=1e-12)
    torch.testing.assert_close(leaky.curvature(u), 0.99 * relu.curvature(u), rtol=1e-12, atol=1e-12)


def test_smoothing_replaces_relu_and_nothing_else():
    chain = recognise(dense((4, 5, 5, 1)), (4,))
    assert names(chain.smoothed(3.0)) == ("softplus", "softplus", "identity")
    assert names(chain.smoothed(None)) == ("relu", "relu", "identity")
    tanh = recognise(dense((4, 5, 1), "tanh"), (4,))
    assert tanh.smoothed(3.0).activations[0] is tanh.activations[0]


def test_smoothing_tends_to_relu():
    u = draw(1000)
    phi = Activation("relu", F.relu)
    gaps = [float((phi.smoothed(beta).fn(u) - F.relu(u)).abs().max()) for beta in (1.0, 10.0, 100.0)]
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2]
    assert gaps[2] <= 0.7 / 100  # log 2 over beta


@pytest.mark.parametrize("seed", range(20))
def test_units_that_never_change_sign_do_not_hide_a_relu(seed):
    """Deep in a narrow net whole layers stay positive on the probe, where ReLU and identity agree."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.ReLU())][:-1]
        chain = recognise(nn.Sequential(*layers), SHAPE)
    assert chain is not None and names(chain) == ("relu",) * 11 + ("identity",)
