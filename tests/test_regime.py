"""What equations can tell: degrees of the activation, sign and scale of a sample, equations over unknowns."""

import dataclasses
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import eval_hermitenorm
from torch import nn

from exhume.ambiguity import ambiguity, parity, used_layers
from exhume.equations.span import Span
from exhume.errors import ExhumeError
from exhume.evidence import Evidence, InputSpec
from exhume.functional import ACTIVATIONS, Activation
from exhume.hermite import hermite
from exhume.inspection import inspect
from exhume.metrics import rho, rho_pm
from exhume.objective import Objective
from exhume.regime import laziness, regimes
from exhume.solvers.varpro import VarPro
from exhume.spaces import full, sphere
from exhume.survey import survey
from planted import LAST, NO_DECAY, dense, draw, on_sphere, planted_features, planted_span, state, train


def named(name):
    return Activation(name, ACTIVATIONS[name])


# --- degrees -----------------------------------------------------------------------------------------------

SQUARES = {  # squared coefficients of degrees 0 to 7 at unit scale, to four digits
    "relu": (0.1592, 0.2500, 0.0796, 0, 0.0066, 0, 0.0020, 0),
    "relu_tanh": (0.1592, 1.2226, 0.0796, 0.0220, 0.0066, 0.0039, 0.0020, 0.0010),
    "gelu": (0.0796, 0.2500, 0.0895, 0, 0.0052, 0, 0.0008, 0),
    "silu": (0.0427, 0.2500, 0.0615, 0, 0.0014, 0, 0.0001, 0),
    "softplus": (0.6497, 0.2500, 0.0213, 0, 0.0002, 0, 0.0000, 0),
    "tanh": (0, 0.3669, 0, 0.0220, 0, 0.0039, 0, 0.0010),
}


@pytest.mark.parametrize("name", list(SQUARES))
def test_the_table_of_degrees(name):
    assert [mu * mu for mu in hermite(named(name))] == pytest.approx(SQUARES[name], abs=6e-5)


def test_relu_has_its_closed_form():
    mu = hermite(named("relu"))
    exact = [1 / math.sqrt(2 * math.pi), 0.5, 1 / math.sqrt(4 * math.pi), 0, -1 / math.sqrt(48 * math.pi)]
    assert mu[:5] == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("name", [*SQUARES, "sigmoid", "leaky_relu", "elu", "selu"])
@pytest.mark.parametrize("scale", [0.4, 1.0, 2.5])
def test_coefficients_equal_adaptive_quadrature(name, scale):
    phi = named(name)

    def slow(k):
        def integrand(g):
            value = float(phi.fn(torch.tensor(scale * g, dtype=torch.float64)))
            return value * eval_hermitenorm(k, g) * math.exp(-g * g / 2) / math.sqrt(2 * math.pi)

        halves = [
            quad(integrand, *ends, epsabs=1e-12, epsrel=1e-12, limit=200)[0] for ends in ((-12, 0), (0, 12))
        ]
        return sum(halves) / math.sqrt(math.factorial(k))

    assert hermite(phi, scale, degree=4) == pytest.approx([slow(k) for k in range(5)], abs=1e-10)


def test_a_polynomial_has_the_degrees_it_has_and_no_others():
    cubic = Activation("cubic", lambda u: 2 + u**3)  # he_3 = u^3 - 3 u
    assert hermite(cubic) == pytest.approx([2, 3, 0, math.sqrt(6), 0, 0, 0, 0], abs=1e-12)
    assert hermite(cubic, 2.0)[3] == pytest.approx(8 * math.sqrt(6), abs=1e-11)


def test_scales_and_activations_without_coefficients_are_refused():
    with pytest.raises(ExhumeError, match="positive standard deviation"):
        hermite(named("relu"), 0.0)
    with pytest.raises(ExhumeError, match="must be finite"):
        hermite(Activation("log", torch.log))


# --- sign and scale: every claim against what flipping or scaling a planted sample really costs -------------


def features(sizes, activation, n, hidden_bias=0.0, last_bias=False, seed=0):
    """Only the last layer moved, by sum_i coef_i (penultimate features, 1): the equations hold exactly."""
    net = dense(sizes, activation, hidden_bias > 0, seed)
    if last_bias and net[-1].bias is None:
        weight = net[-1].weight.detach()
        net[-1] = nn.Linear(*weight.T.shape, dtype=torch.float64)
        net[-1].load_state_dict({"weight": weight, "bias": torch.zeros(sizes[-1]).double()})
    with torch.no_grad():
        for layer in net[:-1]:
            if hidden_bias and isinstance(layer, nn.Linear):
                layer.bias.mul_(hidden_bias / 0.3)
    x = on_sphere(n, sizes[0], sizes[0] ** 0.5, seed + 1)
    coef = 0.5 + draw(n, sizes[-1], seed=seed + 2).abs()
    init = state(net)
    with torch.no_grad():
        net[-1].weight += coef.T @ net[:-1](x)
        if net[-1].bias is not None:
            net[-1].bias += coef.sum(0)
    return Evidence.from_module(net, input=InputSpec((sizes[0],)), init=init), x, coef


def misfit(evidence, x, layers):
    space = full(evidence.input.size)
    return Objective(Span(nodes=(1.0,), layers=layers).bind(evidence, space, NO_DECAY), space).at(x).misfit


def cost(evidence, x, layers, factor):
    """Misfit with one sample multiplied by `factor`, over the misfit without that sample; median over samples."""
    ratios = []
    for i in range(min(len(x), 7)):
        changed, without = x.clone(), torch.cat([x[:i], x[i + 1 :]])
        changed[i] *= factor
        ratios.append(misfit(evidence, changed, layers) / misfit(evidence, without, layers))
    return float(np.median(ratios))


MANY, FEW = (80, 4), (6, 16)  # samples and features


def cheap(flipped, case):
    """Whether a flip costs at most twice what the others need to make up a linear part, 4 d / n of the sample's own.

    What is not cheap costs nearly as much as leaving the sample out; with few samples a quarter of it at least.
    """
    n, d = case
    low, high = (8 * d / n, 0.9) if n > d else (1e-9, 0.25)
    assert flipped < low or flipped > high
    return flipped < low


@pytest.mark.parametrize(
    ("activation", "hidden", "bias", "case", "ambiguous"),
    [
        ("relu", (1500,), 0.0, MANY, True),
        ("relu", (1500,), 0.0, FEW, False),
        ("gelu", (1500,), 0.0, MANY, True),
        ("gelu", (1500,), 0.0, FEW, False),
        ("silu", (1500,), 0.0, MANY, True),
        ("leaky_relu", (1500,), 0.0, MANY, True),
        ("relu_tanh", (1500,), 0.0, MANY, False),
        ("relu_tanh", (1500,), 0.0, FEW, False),
        ("relu", (1500,), 1.0, MANY, False),  # biases in the first layer
        ("relu", (1500,), 1e-3, MANY, True),  # but too small to tell
        ("relu", (500, 500), 0.0, MANY, False),  # two hidden layers compose odd degrees
        ("tanh", (1500,), 0.0, MANY, True),
        ("tanh", (1500,), 0.0, FEW, True),
        ("tanh", (300, 300), 0.0, FEW, True),
        ("tanh", (1500,), 0.3, FEW, False),
        ("sigmoid", (1500,), 0.0, MANY, True),  # odd but for a constant
    ],
)
def test_the_sign_from_the_last_layer(activation, hidden, bias, case, ambiguous):
    n, d = case
    evidence, x, _ = features((d, *hidden, 1), activation, n, bias)
    assert misfit(evidence, x, "last") < 1e-18
    told = ambiguity(evidence, "last", n)
    assert told.sign is ambiguous
    assert cheap(cost(evidence, x, "last", -1.0), case) is ambiguous
    assert ambiguity(evidence, "all", n) == told  # only the last layer moved


@pytest.mark.parametrize(
    ("activation", "bias", "case", "ambiguous"),
    [
        ("relu", False, MANY, True),
        ("relu", False, FEW, False),
        ("relu", True, MANY, False),
        ("tanh", False, FEW, True),
        ("tanh", True, FEW, False),
    ],
)
def test_the_sign_from_all_layers(activation, bias, case, ambiguous):
    n, d = case
    planted = planted_span((d, 300, 1), activation, bias, n, node=1.0)
    assert misfit(planted.evidence, planted.x, "all") < 1e-18
    ground = replace(survey(planted.evidence), space=full(d))  # the row space would tell more
    assert ambiguity(planted.evidence, "all", n, ground).sign is ambiguous
    assert cheap(cost(planted.evidence, planted.x, "all", -1.0), case) is ambiguous


def test_an_odd_network_cannot_tell_the_sign_at_all():
    evidence, x, _ = features((6, 300, 1), "tanh", 4)
    assert misfit(evidence, -x, "last") < 1e-20
    planted = planted_span((6, 50, 2), "tanh", False, 3, node=1.0)
    assert misfit(planted.evidence, -planted.x, "all") < 1e-20


def test_the_last_bias_tells_the_sign_of_an_odd_network_only_weakly():
    evidence, x, _ = features((6, 3000, 1), "tanh", 4, last_bias=True)
    told = ambiguity(evidence, "last", 4)
    assert told.sign
    assert "1 numbers of the last bias" in told.reasons[0]
    assert 1e-9 < cost(evidence, x, "last", -1.0) < 0.02


@pytest.mark.parametrize(
    ("activation", "hidden", "bias", "ambiguous"),
    [
        ("relu", (300,), 0.0, True),
        ("leaky_relu", (300,), 0.0, True),
        ("relu", (300, 300), 0.0, True),
        ("relu", (300,), 0.3, False),
        ("tanh", (300,), 0.0, False),
        ("gelu", (300,), 0.0, False),
        ("relu_tanh", (300,), 0.0, False),
    ],
)
def test_the_scale(activation, hidden, bias, ambiguous):
    evidence, x, _ = features((8, *hidden, 1), activation, 4, bias)
    assert ambiguity(evidence, "last", 4).scale is ambiguous
    scaled = cost(evidence, x, "last", 2.0)
    assert scaled < 1e-15 if ambiguous else scaled > 1e-3
    known = replace(evidence, input=InputSpec((8,), sample_norm=8**0.5))
    assert not ambiguity(known, "last", 4).scale


def test_the_scale_is_free_for_all_layers_without_biases_as_well():
    planted = planted_span((8, 60, 1), "relu", False, 3, node=1.0)
    assert ambiguity(planted.evidence, "all", 3).scale
    assert cost(planted.evidence, planted.x, "all", 2.0) < 1e-15
    biased = planted_span((8, 60, 1), "relu", True, 3, node=1.0)
    assert not ambiguity(biased.evidence, "all", 3).scale


def test_the_last_bias_tells_scales_only_as_many_as_it_has_numbers():
    evidence, x, a = features((6, 200, 1), "relu", 3, last_bias=True)
    assert ambiguity(evidence, "last", 3).scale
    s = torch.tensor(
        [2.0, float(a[1] / (a[1] + a[0] / 2)), 1.0]
    ).double()  # a_1 / s_1 + a_2 / s_2 = a_1 + a_2
    assert misfit(evidence, s[:, None] * x, "last") < 1e-16
    evidence, x, _ = features((6, 200, 2), "relu", 2, last_bias=True)
    assert not ambiguity(evidence, "last", 2).scale
    assert misfit(evidence, torch.tensor([[2.0], [0.8]]).double() * x, "last") > 1e-6


def test_linear_networks_tell_what_the_samples_span_and_no_sample():
    evidence, x, _ = features((6, 50, 1), "identity", 4)
    told = ambiguity(evidence, "last", 4)
    assert (told.sign, told.scale) == (True, True)
    mixed = torch.linalg.qr(draw(4, 4, seed=9))[0] @ x
    assert misfit(evidence, mixed, "last") < 1e-18
    assert "no sample" in told.reasons[0]


def test_an_unknown_number_of_samples_is_said_and_rules_nothing_out():
    evidence, _, _ = features((6, 50, 1), "relu", 4)
    told = ambiguity(evidence, "last")
    assert told.sign
    assert "not known" in told.reasons[0]
    assert not ambiguity(evidence, "last", 5).sign
    assert ambiguity(evidence, "last", 6).sign


def test_the_row_space_of_weights_and_biases_tells_sign_and_scale():
    seen = train((16, 64, 1), 6, activation="tanh").seen
    told = ambiguity(seen)
    assert (told.sign, told.scale) == (False, False)
    assert "(x, 1)" in told.reasons[0]
    assert ambiguity(train((16, 64, 1), 6, activation="tanh", bias=False).seen).sign


def test_samples_that_span_fewer_dimensions_than_they_are_lose_their_sign():
    x = draw(20, 3, seed=1) @ draw(3, 16, seed=2) / 3
    seen = train((16, 300, 1), x=x, bias=False, lr=0.02).seen
    assert survey(seen).first.rank == 3
    assert ambiguity(seen, samples=20).sign
    assert not ambiguity(seen, samples=3).sign


def test_other_modules_are_told_apart_by_nothing():
    net = nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(42, 1)).double()
    seen = Evidence.from_module(net, input=InputSpec((16,)), init={k: 0.9 * v for k, v in state(net).items()})
    told = ambiguity(seen)
    assert not told.any
    assert "plain dense networks only" in told.reasons[0]
    assert regimes(seen, survey(seen), 4) == ()
    with pytest.raises(ExhumeError, match="another kind"):
        used_layers(seen, "last")


def test_shares_of_degrees_are_those_of_the_activation():
    """On a sphere of few dimensions degrees mix a little less than for Gaussian inputs; the parts still agree."""
    evidence, _, _ = features((64, 4000, 1), "relu", 4)
    found = parity(evidence, (1,), survey(evidence))
    mu = np.square(hermite(named("relu")))
    assert found.constant + found.linear + found.even + found.odd == pytest.approx(1)
    assert (found.constant, found.linear) == pytest.approx((2 * mu[0], 2 * mu[1]), abs=0.03)
    assert found.odd < 1e-12
    assert found.bent < 1e-12


def test_a_gauge_is_the_models_zero():
    mean = torch.full((6,), 0.5)
    seen = planted_features(3, 6, 40, spec=InputSpec((6,), mean=mean)).evidence
    assert torch.equal(ambiguity(seen, "last", 3).zero, mean)


# --- counts ------------------------------------------------------------------------------------------------


def test_equations_and_unknowns_are_counted():
    seen = train((16, 64, 2), 6).seen  # rank 6: x in an affine set of 5 dimensions
    last, last_reduced, everything, reduced = regimes(seen, survey(seen))
    assert [(r.layers, r.reduced) for r in (last, last_reduced, everything, reduced)] == [
        ("last", False),
        ("last", True),
        ("all", False),
        ("all", True),
    ]
    assert (last.equations, last.unknowns) == (64 * 2 + 2, 6 * (16 + 2))
    assert (last_reduced.equations, last_reduced.unknowns) == (64 * 2 + 2, 6 * (5 + 2))
    assert (everything.equations, everything.unknowns) == (64 * 17 + 130, 6 * (16 + 2))
    assert (reduced.equations, reduced.unknowns) == (64 * 6 + 130, 6 * (5 + 2))
    assert last.ratio == last.equations / last.unknowns
    assert (last.fit, last.law, last.law_reduced) == (6, 96, 36)
    twice = regimes(seen, survey(seen), nodes=2)[0]
    assert twice.unknowns == 6 * (16 + 2 * 2)


def test_a_norm_that_is_given_or_free_is_no_unknown():
    bare = train((16, 64, 1), 6, bias=False).seen  # homogeneous: the scale merges with the multiplier
    assert [r.coordinates for r in regimes(bare, survey(bare))] == [15, 5, 15, 5]
    seen = train((16, 64, 1), 6, bias=False, activation="tanh").seen
    assert [r.coordinates for r in regimes(seen, survey(seen))] == [16, 6, 16, 6]
    known = replace(seen, input=InputSpec((16,), sample_norm=4.0))
    assert [r.coordinates for r in regimes(known, survey(known))] == [15, 5, 15, 5]


def attacked(width, seed):
    planted = planted_features(4, 16, width, seed=seed)
    space = sphere(16, 4.0)
    objective = Objective(LAST.bind(planted.evidence, space, NO_DECAY), space)
    generator = torch.Generator().manual_seed(seed)
    runs = [VarPro().minimise(objective, space.random(4, 4.0, generator)) for _ in range(4)]
    best = min((run.point for run in runs), key=lambda point: point.misfit)
    verdict = regimes(planted.evidence, survey(planted.evidence), 4)[0].verdict
    return best.misfit, rho(best.z, planted.x), verdict


def test_below_one_equation_an_unknown_a_perfect_fit_means_nothing():
    for seed in range(3):
        loss, error, verdict = attacked(16, seed)  # 16 equations, 4 (15 + 1) unknowns
        assert loss < 1e-12
        assert error > 0.5
        assert "mean nothing" in verdict
        assert "not above d n = 64" in verdict


def test_well_above_four_equations_an_unknown_random_starts_find_the_samples():
    for seed in range(3):
        loss, error, verdict = attacked(512, seed)
        assert loss < 1e-12
        assert error < 1e-5
        assert "random starts" in verdict
        assert "above d n = 64" in verdict


def test_flipped_samples_are_where_relu_searches_end_when_samples_outnumber_features():
    """From the truth with one sample flipped: ReLU stays in a minimum of tiny misfit, relu + tanh often leaves it."""
    recovered = {}
    for activation in ("relu", "relu_tanh"):
        ends = []
        for seed in range(5):
            planted = planted_features(12, 4, 600, activation, seed=seed)
            space = sphere(4, 2.0)
            objective = Objective(LAST.bind(planted.evidence, space, NO_DECAY), space)
            start = planted.x.clone()
            start[0] *= -1
            point = VarPro().minimise(objective, start).point
            ends.append((rho(point.z, planted.x), rho_pm(point.z, planted.x), point.misfit))
        assert all(misfit < 2e-3 for _, _, misfit in ends)
        recovered[activation] = sum(error < 1e-5 for error, _, _ in ends)
        if activation == "relu":
            assert sum(forgiven < 0.75 * error for error, forgiven, _ in ends) >= 4
    assert recovered["relu"] == 0
    assert recovered["relu_tanh"] >= 2


def test_laziness_is_the_relative_change():
    t = train((4, 8, 1), 3)
    start, end = (torch.cat([p.flatten() for p in w.values()]) for w in (t.init, t.final))
    assert laziness(t.seen) == pytest.approx(float((end - start).norm() / start.norm()))
    assert laziness(replace(t.seen, init=None)) is None


# --- inspect -----------------------------------------------------------------------------------------------


def test_inspect_counts_and_says_what_cannot_be_told():
    found = inspect(train((16, 64, 1), 6, bias=False).seen)
    assert (found.samples, len(found.regimes)) == (6, 4)
    assert found.hermite.activation == "relu"
    assert found.hermite.squares[1] == pytest.approx(0.25 * found.hermite.scale**2)
    assert [(a.layers, a.sign, a.scale) for a in found.ambiguities] == [
        ("last layer", False, True),
        ("all layers", False, True),
    ]
    assert any("counted for 6 samples, as the rank shows" in sentence for sentence in found.findings)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_inspect_does_not_guess_a_number_of_samples():
    crowded = planted_features(20, 4, 50).evidence  # the first layer stood still
    found = inspect(crowded)
    assert (found.samples, found.regimes) == (None, ())
    assert any("number of samples is not stated" in sentence for sentence in found.findings)
    stated = inspect(crowded, 20)
    assert (stated.samples, {r.samples for r in stated.regimes}) == (20, {20})
    assert not any("not stated" in sentence for sentence in stated.findings)


def test_inspect_says_why_nothing_is_counted():
    seen = train((4, 8, 1), 3).seen
    assert any("without the initial weights" in s for s in inspect(replace(seen, init=None)).findings)
    other = inspect(replace(seen, chain=None), 3)
    assert (other.hermite, other.regimes, other.ambiguities) == (None, (), ())
    assert any("plain dense networks only" in s for s in other.findings)
