"""Attacks on final weights alone: the equation, heads, multipliers, smoothing in any module, baselines, victims."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exhume import presets
from exhume.change import Decay, decayed_target
from exhume.descent import Anneal, Drawn
from exhume.equations.span import Span
from exhume.errors import MissingEvidence, ModelError
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.functional import Activation, Relaxed
from exhume.heads import EveryClass, Labelled, Outputs, RunnerUp, blocks
from exhume.inversion import ClassScore, score
from exhume.joint import Joint
from exhume.multipliers import Floored, Plain, Squares
from exhume.optimisers import Momentum
from exhume.rows import FirstRows
from exhume.smoothing import smoothed_forward
from exhume.spaces import full
from exhume.victims.data import load, split
from exhume.victims.nets import mlp, small_start
from exhume.victims.stationarity import stationarity
from exhume.victims.train import TrainConfig, train
from exhume.victims.victim import Case, make_victim
from planted import affine, dense, draw, generator, planted_span, random_evidence, sample_gradient, state

ALONE = Decay(0.0, 0.0, "final weights alone")
KKT = ("haim", "buzaglo", "buzaglo-decay", "naive", "first-rows")
HEADS = [Labelled(), RunnerUp(), EveryClass(), Outputs()]


def alone(evidence):
    return replace(evidence, init=None)


# --- relaxed ReLU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [3.0, 20.0])
def test_the_relaxed_relu_is_exact_in_value_and_a_sigmoid_in_slope_to_second_order(alpha):
    u = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    phi = Activation("relu", F.relu).smoothed(Relaxed(alpha))
    gate = torch.sigmoid(alpha * u)
    value, slope = phi.value_and_slope(u)
    torch.testing.assert_close(value, u.relu(), rtol=0, atol=1e-15)
    torch.testing.assert_close(slope, gate, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(phi.curvature(u), alpha * gate * (1 - gate), rtol=1e-11, atol=1e-11)
    leaf = u.clone().requires_grad_()
    first = torch.autograd.grad(phi.fn(leaf).sum(), leaf, create_graph=True)[0]
    torch.testing.assert_close(first, gate, rtol=1e-12, atol=1e-14)
    second = torch.autograd.grad(first.sum(), leaf)[0]
    torch.testing.assert_close(second, alpha * gate * (1 - gate), rtol=1e-11, atol=1e-11)


def test_leaky_relu_is_relaxed_in_its_relu_part():
    u = torch.tensor([-2.0, 0.3], dtype=torch.float64)
    value, slope = Activation("leaky_relu", F.leaky_relu).smoothed(Relaxed(5.0)).value_and_slope(u)
    torch.testing.assert_close(value, F.leaky_relu(u))
    torch.testing.assert_close(slope, 0.01 + 0.99 * torch.sigmoid(5 * u))


class Written(nn.Module):
    """One network, its ReLU written in one of the ways that torch offers."""

    def __init__(self, relu):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.relu = relu

    def forward(self, u):
        return self.last(self.relu(self.second(self.relu(self.first(u)))))


def ignoring(u):
    """Acts in place, and forgets what it was given back."""
    F.relu(u, inplace=True)
    return u


WAYS = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "function": F.relu,
    "function in place": lambda u: F.relu(u, inplace=True),
    "positional": lambda u: F.relu(u, True),
    "named": lambda u: F.relu(input=u),
    "torch": torch.relu,
    "torch in place": torch.relu_,
    "method": lambda u: u.relu(),
    "method in place": lambda u: u.relu_(),
    "ignored": ignoring,
    "leaky module": nn.LeakyReLU(0.0),
    "leaky function": lambda u: F.leaky_relu(u, negative_slope=0.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("smoothing", [7.0, Relaxed(7.0)], ids=["softplus", "relaxed"])
def test_every_way_to_write_relu_is_smoothed_and_the_module_is_left_alone(way, smoothing):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Written(WAYS[way]).double()
    chain = nn.Sequential(model.first, nn.ReLU(), model.second, nn.ReLU(), model.last)
    spec = InputSpec((5,))
    seen = replace(Evidence.from_module(model, input=spec), chain=None)
    twin = Evidence.from_module(chain, input=spec)
    z, c, v = draw(4, 5, seed=1), draw(4, 2, seed=2), draw(4, 5, seed=3)
    u = draw(6, 5, seed=4)
    before = model(u).detach()
    ours, theirs = (Span((1.0,)).bind(one, full(5), ALONE, smoothing) for one in (seen, twin))
    assert type(ours).__name__ == "ModuleSpan" and type(theirs).__name__ == "DenseSpan"
    torch.testing.assert_close(ours.gram(z), theirs.gram(z), rtol=1e-10, atol=1e-12)
    # A vector of the same form for both: their orders of parameters differ.
    for first, second in (
        (ours.inner(z, ours.target()), theirs.inner(z, theirs.target())),
        (ours.vjp(z, c, ours.target()), theirs.vjp(z, c, theirs.target())),
        (ours.jvp(z, c, v).norm(), theirs.jvp(z, c, v).norm()),
    ):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    assert torch.equal(model(u), before)


def test_other_functions_are_not_smoothed():
    params = {"w": draw(3, 3)}

    def forward(p, u):
        return torch.tanh(u @ p["w"]).clamp(min=0)

    u = draw(4, 3, seed=1)
    assert torch.equal(smoothed_forward(forward, 5.0)(params, u), forward(params, u))


# --- heads and multipliers ---------------------------------------------------------------------------------


def test_labels_are_equal_blocks():
    assert blocks(6, 2).tolist() == [0, 0, 0, 1, 1, 1]
    assert blocks(7, 3).bincount().tolist() == [3, 2, 2]


def test_a_head_is_the_direction_it_says():
    out = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0], [4.0, 1.0, 0.0]], dtype=torch.float64)
    a, label = torch.tensor([[2.0], [3.0], [5.0]], dtype=torch.float64), torch.arange(3)
    assert RunnerUp().coefficients(a, label, lambda: out).tolist() == [[2, 0, -2], [0, 3, -3], [-5, 0, 5]]
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    assert EveryClass().coefficients(b, label, lambda: out).tolist() == [
        [3, -1, -2],
        [-3, 7, -4],
        [-5, -6, 11],
    ]
    assert Labelled().coefficients(a[:2], label[:2], lambda: out[:2, :1]).tolist() == [[-2], [3]]
    assert Outputs().coefficients(b, label, lambda: out) is b
    one = out[:2, :1]
    for head in (RunnerUp(), EveryClass()):  # the margin of a single output
        assert head.coefficients(a[:2], label[:2], lambda: one).tolist() == [[-2], [3]]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_a_head_says_which_networks_it_is_for(head):
    assert head.gap(1) is None and (head.gap(3) is None) == (type(head) is not Labelled)
    assert head.unknowns(1) == 1
    assert (
        head.unknowns(3) == {"Labelled": 1, "RunnerUp": 1, "EveryClass": 2, "Outputs": 3}[type(head).__name__]
    )


def test_multipliers_and_their_floor():
    a = torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)
    assert Floored(0.7, 0.5).of(a).flatten().tolist() == [-0.5, 0.25, 1.0]
    assert float(Floored(0.7, 0.5).penalty(a, None)) == pytest.approx(5 * (1.2**2 + 0.45**2))
    assert Squares(0.7, 2.0).of(a).flatten().tolist() == pytest.approx([4.7, 1.7, 16.7])
    assert float(Plain().penalty(a, None)) == float(Squares(0.7).penalty(a, None)) == 0.0


def test_one_rate_in_other_units_is_two_rates():
    """Momentum descent on a with lambda = pace a is descent on lambda at pace^2 times the rate."""

    def slope(value):
        return 2 * (value - 3.0)

    lr, rate = 0.05, 0.002
    pace = (rate / lr) ** 0.5
    a, value = torch.tensor(1.0 / pace).double(), torch.tensor(1.0).double()
    steps = [torch.optim.SGD([leaf], r, 0.9) for leaf, r in ((a, lr), (value, rate))]
    for _ in range(20):
        a.grad, value.grad = pace * slope(pace * a), slope(value)
        for step in steps:
            step.step()
    assert float(pace * a) == pytest.approx(float(value), rel=1e-12)


# --- the equation ------------------------------------------------------------------------------------------


def planted(head, n=3, seed=0):
    """Weights whose last layer solves the equation exactly.

    The gradients with respect to a linear last layer do not depend on it, so that it can be set to
    sum_i c_i phi(x_i). With two classes the runner-up is the other one, whatever the outputs.
    """
    outputs = {Labelled: 1, RunnerUp: 2}.get(type(head), 3)
    model, x = dense((6, 40, outputs), bias=False, seed=seed), draw(n, 6, seed=seed + 1)
    a = 0.5 + torch.rand(n, head.unknowns(outputs), generator=generator(seed + 2), dtype=torch.float64)
    coef = head.coefficients(a, blocks(n, outputs), lambda: torch.zeros(n, outputs).double())
    with torch.no_grad():
        model[2].weight.copy_(coef.T @ model[:2](x))
    return Evidence.from_module(model, input=InputSpec((6,))), x, a


LAST, ALL, FREE = Span((1.0,), "last"), Span((1.0,)), Plain()


def joint(evidence, head, m, unit=1.0, kind=FREE, span=LAST, terms=(), smoothing=None):
    equation = span.bind(evidence, full(evidence.input.size), ALONE, smoothing)
    return Joint(
        equation,
        full(evidence.input.size),
        unit,
        terms,
        kind,
        lambda z, a, label: head.coefficients(a, label, lambda: evidence.output(z.detach())),
        label=blocks(m, evidence.outputs),
    )


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_the_loss_is_zero_at_a_planted_truth(head):
    evidence, x, a = planted(head)
    problem = joint(evidence, head, 3)
    point = problem.at(torch.cat([x, a], 1))
    assert point.misfit < 1e-24
    assert float(problem.gradient(point).abs().max()) < 1e-10
    assert problem.at(torch.cat([x + 0.1, a], 1)).misfit > 1e-4


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_order_within_a_class_does_not_matter(head):
    outputs = 1 if isinstance(head, Labelled) else 3
    evidence = alone(random_evidence((5, 12, outputs), "tanh"))
    problem = joint(evidence, head, 6, span=ALL)
    row = torch.cat([draw(6, 5, seed=1), draw(6, head.unknowns(outputs), seed=2)], 1)
    swapped = row[torch.tensor([1, 0, 3, 2, 5, 4])] if outputs == 3 else row[torch.tensor([2, 0, 1, 5, 3, 4])]
    assert problem.at(swapped).loss == pytest.approx(problem.at(row).loss, rel=1e-12)


@pytest.mark.parametrize("kind", [Floored(0.6, 1.3), Squares(0.2, 0.7)], ids=["floored", "squares"])
@pytest.mark.parametrize("head", [RunnerUp(), EveryClass()], ids=["runner-up", "every"])
@pytest.mark.parametrize("cheaper", [True, False], ids=["gram", "explicit"])
def test_value_and_gradient_are_those_of_double_backward(kind, head, cheaper, monkeypatch):
    """The slow twin: torch differentiates the gradient of the summed margins once more, ReLU relaxed in both."""
    evidence = alone(random_evidence((5, 11, 7, 3), "relu"))
    problem = joint(evidence, head, 4, 0.25, kind, ALL, smoothing=Relaxed(4.0))
    monkeypatch.setattr(type(problem.equation), "gram_is_cheaper", lambda self, m: cheaper)
    row = torch.cat([draw(4, 5, seed=1), 0.5 + draw(4, head.unknowns(3), seed=2).abs()], 1)
    leaf = row.clone().requires_grad_()
    z, a = leaf[:, :5], leaf[:, 5:]
    params = {k: p.clone().requires_grad_() for k, p in evidence.at(1.0).items()}
    out = smoothed_forward(evidence.forward, Relaxed(4.0))(params, z)
    coef = head.coefficients(kind.of(a), problem.label, lambda: out.detach())
    found = torch.autograd.grad(0.25 * (coef * out).sum(), list(params.values()), create_graph=True)
    missed = sum((p.detach() - g).square().sum() for p, g in zip(params.values(), found, strict=True))
    loss = missed + kind.penalty(a, None)
    point = problem.at(row)
    assert point.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    expected = torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(problem.gradient(point), expected, rtol=1e-8, atol=1e-10)


def test_the_gradient_is_the_derivative_where_the_network_is_smooth():
    """With a smooth activation values and derivatives agree, so finite differences must too."""
    evidence = alone(random_evidence((4, 9, 1), "tanh"))
    problem = joint(evidence, Labelled(), 4, 0.5, Floored(0.4), ALL)
    row = torch.cat([draw(4, 4, seed=1), draw(4, 1, seed=2)], 1)
    way = draw(*row.shape, seed=3)
    step = 1e-5
    slope = (problem.at(row + step * way).loss - problem.at(row - step * way).loss) / (2 * step)
    assert float((problem.gradient(problem.at(row)) * way).sum()) == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("homogeneous", [True, False])
def test_euler_identity_holds_for_first_layer_biases_and_breaks_for_hidden_ones(homogeneous):
    model = mlp((6, 10, 8, 1), bias="first" if homogeneous else True, seed=1)
    evidence = Evidence.from_module(model, input=InputSpec((6,)))
    x = draw(4, 6, seed=2)
    for one in x:
        g = {k: v.detach() for k, v in sample_gradient(evidence, 1.0, one, 0).items()}
        inner = sum(float((g[k] * p).sum()) for k, p in evidence.at(1.0).items())
        f = float(evidence.output(one[None]))
        assert (abs(inner - 3 * f) < 1e-12) == homogeneous
    told = stationarity(evidence, x, torch.ones(4).double())
    assert (told.euler < 1e-9) == homogeneous


def test_multipliers_scale_as_a_power_of_the_weights():
    """theta -> s theta and lambda -> s^(2 - L) lambda leave the relative residual as it was."""
    model = mlp((6, 10, 8, 1), bias="first", seed=1)
    row, s = torch.cat([draw(4, 6, seed=2), draw(4, 1, seed=3)], 1), 1.7
    found = joint(Evidence.from_module(model, input=InputSpec((6,))), Labelled(), 4, span=ALL).at(row)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(s)
    other = joint(Evidence.from_module(model, input=InputSpec((6,))), Labelled(), 4, 1 / s, span=ALL)
    assert other.at(row).misfit == pytest.approx(found.misfit, rel=1e-12)
    still = joint(Evidence.from_module(model, input=InputSpec((6,))), Labelled(), 4, 0.0, span=ALL)
    assert still.at(row).misfit == pytest.approx(1.0, rel=1e-12)


def test_a_parameter_without_decay_has_zero_on_the_left():
    evidence = alone(random_evidence((5, 9, 7, 2)))
    assert decayed_target(evidence, ALONE).keys() == evidence.final.keys()
    told = replace(evidence, recipe=Recipe(weight_decay=0.1, decay_share=(("2.bias", 0.5), ("*.bias", 0.0))))
    found = decayed_target(told, ALONE)
    for k, p in evidence.final.items():
        share = 0.5 if k == "2.bias" else 0.0 if k.endswith("bias") else 1.0
        torch.testing.assert_close(found[k], share * p.double())
    every, some = (Span((1.0,)).bind(one, full(5), ALONE) for one in (evidence, told))
    assert some.equations == every.equations  # the equations are kept
    biases = sum(float(p.square().sum()) for k, p in evidence.final.items() if k.endswith("bias"))
    half = 0.25 * float(evidence.final["2.bias"].square().sum())
    assert some.energy == pytest.approx(every.energy - biases + half)


# --- presets -----------------------------------------------------------------------------------------------


def bare(outputs=1, chain=True):
    seen = Evidence.from_module(dense((6, 8, outputs)), input=InputSpec((6,)))
    return seen if chain else replace(seen, chain=None)


@pytest.mark.parametrize("name", KKT)
def test_initial_weights_are_not_asked_for_and_not_used(name):
    outputs = 3 if name == "buzaglo" else 1
    made = planted_span((6, 20, outputs), n=3, node=1.0)
    attack = presets.ATTACKS[name].preset(3)
    attack = attack if isinstance(attack, FirstRows) else replace(attack, steps=15)
    assert attack.missing(made.evidence) == ()
    with_init, without = attack.run(made.evidence, seed=1), attack.run(alone(made.evidence), seed=1)
    assert torch.equal(with_init.x, without.x)
    assert with_init.misfit == without.misfit


def test_all_gaps_are_named_at_once():
    for attack, seen, words in (
        (presets.haim(), bare(3), ("one output", "number of samples")),
        (presets.buzaglo(), bare(3), ("number of samples",)),
        (presets.buzaglo_decay(), bare(2), ("number of samples",)),
        (presets.naive(), bare(2), ("number of samples",)),
        (FirstRows(), bare(chain=False), ("plain dense network",)),
    ):
        with pytest.raises(MissingEvidence) as raised:
            attack.run(seen)
        assert all(word in str(raised.value) for word in words)


def test_the_presets_are_the_published_settings():
    found = presets.haim(10)
    begun = found.begin(bare())
    z, a = begun.leaf.split([6, 1], 1)
    problem = begun.problem(0)
    assert len(z) == 20 and problem.unit == 1 / 20
    multiplier = problem.multipliers.of(a)
    assert 0 <= float(multiplier.min()) < 0.2 and 0.8 < float(multiplier.max()) < 1
    assert isinstance(found.multipliers, Drawn)
    assert found.multipliers.kind.pace**2 * found.optimiser.lr == pytest.approx(1e-4)
    box = problem.terms[0]  # [-1, 1] where no range is stated: six features that are 1 beyond
    assert float(box.value(2 * torch.ones(1, 6).double())) == pytest.approx(6.0)
    assert found.anneal.smoothing(0) == found.anneal.smoothing(40_000) == Relaxed(150.0)
    assert Anneal(10, 100.0, 200, relaxed=True).smoothing(50) == Relaxed(13.2)
    signed = presets.buzaglo_decay(10).begin(bare())
    drawn = signed.problem(0).multipliers.of(signed.leaf[:, 6:])
    assert float(drawn.min()) < -0.5 and float(drawn.max()) > 0.5


@pytest.mark.parametrize("name", ["haim", "buzaglo", "buzaglo-decay"])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "module"])
def test_every_preset_descends_on_any_module(name, chain):
    evidence = alone(planted_span((6, 30, 3 if name == "buzaglo" else 1), n=4, node=1.0).evidence)
    evidence = evidence if chain else replace(evidence, chain=None)
    attack = replace(presets.ATTACKS[name].preset(4), steps=60, spread=0.5, optimiser=Momentum(1e-4))
    begun = attack.begin(evidence, seed=2)
    found = attack.run(evidence, seed=2)
    assert found.loss < begun.problem(0).at(begun.leaf).loss
    assert len(found.x) == 8 and found.ambiguity is not None
    assert any("derivative" in note for note in found.assumed)


def test_both_forms_of_the_network_give_one_descent():
    evidence = alone(planted_span((6, 30, 1), n=4, node=1.0).evidence)
    attack = replace(presets.haim(4), steps=40, spread=0.5)
    one, other = (attack.run(e, seed=3) for e in (evidence, replace(evidence, chain=None)))
    torch.testing.assert_close(one.x, other.x, rtol=1e-8, atol=1e-10)


def test_weight_decay_without_labels_is_blind_to_their_sign():
    """f -> -f with s -> -s is the same problem: no label is read."""
    model = dense((6, 20, 1), bias=False)
    flipped = dense((6, 20, 1), bias=False)
    with torch.no_grad():
        flipped[2].weight.neg_()
    attack = replace(presets.buzaglo_decay(4), steps=30, spread=0.5)
    spec = InputSpec((6,))
    evidence = [Evidence.from_module(m, input=spec, recipe=Recipe(labels="pm1")) for m in (model, flipped)]
    begun = [attack.begin(e, seed=1) for e in evidence]
    problems = [b.problem(0) for b in begun]
    z, a = begun[0].leaf.split([6, 1], 1)
    first, second = problems[0].at(torch.cat([z, a], 1)), problems[1].at(torch.cat([z, -a], 1))
    # The gradient of the first layer is the same for both; that of the last, and its target, change sign.
    assert first.misfit == pytest.approx(second.misfit, rel=1e-12)
    unlabelled = replace(evidence[0], recipe=Recipe())
    assert torch.equal(attack.run(evidence[0], seed=1).x, attack.run(unlabelled, seed=1).x)


def test_inversion_drives_the_classes_apart_within_the_range():
    evidence = replace(bare(), input=InputSpec((6,), low=-1.0, high=1.0))
    attack = presets.naive(5, steps=400, lr=0.1)
    begun = attack.begin(evidence, seed=1)
    found = attack.run(evidence, seed=1)
    start = score(evidence.output(begun.leaf))
    assert found.steps == 400 and found.loss < 0  # a score has no floor
    u = found.x
    f = evidence.output(u)[:, 0]
    assert float(f.max() - f.min()) > float(start)
    assert float(u.abs().max()) < 1.5
    assert 0 < found.misfit < 1 and isinstance(attack.equation, ClassScore)


def test_the_score_of_many_classes_is_their_own_output():
    f = draw(6, 3)
    assert float(score(f)) == pytest.approx(float(f[[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2]].sum() / 2))


def test_a_row_that_one_sample_made_is_that_sample():
    """A unit that sample i alone activates has w = a x_i and b = a."""
    x = draw(3, 6, seed=1)
    x = 2.0 * x / x.norm(dim=1, keepdim=True)
    model = dense((6, 3, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.5], [-2.0], [1.5]]).double() * x)
        model[0].bias.copy_(torch.tensor([0.5, -2.0, 1.5]).double())
    found = FirstRows().run(Evidence.from_module(model, input=InputSpec((6,))))
    assert float(torch.cdist(x, found.x).amin(1).max()) < 1e-12
    both = FirstRows().run(Evidence.from_module(dense((6, 3, 1), bias=False), input=InputSpec((6,))))
    assert len(both.x) == 6


# --- victims -----------------------------------------------------------------------------------------------


def toy(loss="mse", activation="relu", tolerance=0.0, **options):
    x, y = draw(6, 4, seed=1), torch.tensor([1.0, -1.0] * 3).double()
    model = mlp((4, 20, 1), activation, bias="first", seed=2)
    config = TrainConfig(loss=loss, tolerance=tolerance, **options)
    trained = train(model, x, y, config)
    model.load_state_dict(trained.final)
    return Evidence.from_module(model, input=InputSpec((4,))), x, y, trained


DECAYED = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.03, "max_steps": 8000}


def test_weight_decay_ends_at_a_stationary_point_with_the_multipliers_the_loss_implies():
    """To rounding with a smooth activation; a ReLU net has kinks, but is homogeneous and balanced."""
    evidence, x, y, _ = toy(activation="tanh", **DECAYED)
    smooth = stationarity(evidence, x, y, "mse", 0.03)
    assert smooth.residual <= smooth.implied < 1e-6 < smooth.euler
    evidence, x, y, trained = toy(**DECAYED)
    told = stationarity(evidence, x, y, "mse", 0.03)
    assert told.euler < 1e-9 and told.imbalance < 0.05 and max(told.kinks) > 0.1
    begun = stationarity(replace(evidence, final={k: trained.init[k] for k in evidence.final}), x, y)
    assert begun.residual > told.residual and begun.imbalance > 5 * told.imbalance


def test_parameters_left_out_of_decay_are_left_out():
    """A bias whose gradient is zero stays, and the others' equation has its share."""
    shares = (("*.bias", 0.0),)
    evidence, x, y, _ = toy(activation="tanh", **DECAYED, decay_share=shares)
    told = stationarity(replace(evidence, recipe=Recipe(decay_share=shares)), x, y, "mse", 0.03)
    untold = stationarity(evidence, x, y, "mse", 0.03)
    assert told.implied < 0.002 < 0.01 < untold.residual


@pytest.mark.parametrize("spanned", [True, False])
def test_the_decay_of_a_group_is_that_group_s(spanned):
    """Training in the span of the data and training as written agree with shares, as without."""
    n, d = (3, 6) if spanned else (6, 4)
    x, y = draw(n, d, seed=1), draw(n, 1, seed=2).sign()
    model = mlp((d, 8, 1), seed=3)
    config = TrainConfig(
        lr=0.05, max_steps=50, tolerance=0.0, weight_decay=0.1, decay_share=(("1.*", 0.5), ("*.bias", 0.0))
    )
    params = dict(model.named_parameters())
    groups = [
        {"params": [p], "weight_decay": 0.05 if k.startswith("1.") else 0.0 if k.endswith("bias") else 0.1}
        for k, p in params.items()
    ]
    found = train(model, x, y, config).final
    plain = torch.optim.SGD(groups, 0.05)
    for _ in range(50):
        plain.zero_grad()
        F.mse_loss(model(x), y).backward()
        plain.step()
    for k, p in params.items():
        torch.testing.assert_close(found[k], p.detach(), rtol=1e-9, atol=1e-12)


def test_loss_scaled_descent_reaches_losses_that_plain_descent_does_not():
    options = {"loss": "logistic", "lr": 0.02, "max_steps": 2000}
    plain, scaled = toy(**options), toy(**options, loss_scaled=True, tolerance=1e-100)
    assert scaled[3].loss < 1e-20 < 1e-4 < plain[3].loss
    told, before = (stationarity(e, x, y) for e, x, y, _ in (scaled, plain))
    assert told.residual < before.residual
    assert bool((told.multipliers[:, 0] * scaled[2] > -0.05 * told.multipliers.abs().max()).all())


def test_a_small_start_is_small_in_the_first_layer_alone():
    model, plain = (mlp((4, 20, 7, 1), bias="first", seed=2) for _ in range(2))
    small_start(model, 1e-4, seed=3)
    assert (
        0.5e-4 < float(model[1].weight.detach().std()) < 2e-4
        and float(model[1].bias.detach().abs().max()) < 1e-3
    )
    assert torch.equal(model[3].weight, plain[3].weight)
    assert model[3].bias is None and model[5].bias is None
    assert state(model).keys() == {"1.weight", "1.bias", "3.weight", "5.weight"}


def test_margins_condensation_and_kinks_are_what_they_say():
    """One unit for each of two samples, one of them at its kink for the other."""
    model = mlp((2, 2, 1), bias=False)
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
        model[3].weight.copy_(torch.tensor([[2.0, -1.0]]))
    evidence = Evidence.from_module(model, input=InputSpec((2,)))
    told = stationarity(evidence, torch.eye(2).double(), torch.tensor([1.0, -1.0]).double())
    assert (told.margin, told.spread) == (1.0, 2.0)
    assert told.condensed == pytest.approx((2.0,)) and told.kinks == pytest.approx((0.5,))
    assert told.imbalance == pytest.approx((3 / 5 + 0) / 2)
    assert "kink" in told.sentence(2) and "margins" in told.sentence(2)
    with pytest.raises(ModelError, match="plain dense network"):
        stationarity(replace(evidence, chain=None), torch.eye(2).double(), torch.ones(2).double())


def test_rows_by_class_and_a_victim_of_ten_classes():
    rows = split(load("digits"), 20, 0, by_class=True)
    assert rows.train.label.bincount().tolist() == [2] * 10 == rows.control.label.bincount().tolist()
    training = TrainConfig(loss="cross-entropy", max_steps=5, weight_decay=0.01)
    victim = make_victim(Case(data="digits", n=20, hidden=(30,), bias="first", start=1e-4, training=training))
    assert victim.evidence.outputs == 10 and victim.evidence.recipe.labels == "index"
    told = stationarity(
        victim.evidence, victim.evidence.input.encode(rows.train.x), rows.train.label, "cross-entropy"
    )
    assert math.isfinite(told.residual) and told.multipliers.shape == (20, 10)


def test_a_subspace_serves_this_equation_too():
    evidence, space = alone(random_evidence((6, 12, 1))), affine(6, 3)
    z = draw(4, 3, seed=1)
    one, whole = (Span((1.0,)).bind(evidence, s, ALONE) for s in (space, full(6)))
    torch.testing.assert_close(one.gram(z), whole.gram(space.expand(z)), rtol=1e-9, atol=1e-11)
    assert one.energy == pytest.approx(whole.energy)
