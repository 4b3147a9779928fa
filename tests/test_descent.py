"""The published attacks on the change of weights: what they minimise, how they step, what they ask for."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from exhume import presets
from exhume.descent import Anneal, Descent
from exhume.equations.span import Span
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.functional import ACTIVATIONS, Activation, leaky_backward
from exhume.joint import Joint
from exhume.metrics import rho, rho_pm
from exhume.optimisers import Momentum
from exhume.solvers.first_order import follow
from exhume.spaces import full
from exhume.terms import Box
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import (
    NO_DECAY,
    Naive,
    affine,
    dense,
    distance,
    draw,
    planted_features,
    planted_span,
    random_evidence,
    state,
    train,
)

PUBLISHED = ("loo", "loo-quick", "iurada", "tansley-1", "tansley-2")


def joint(equation, space, unit=0.3, terms=()):
    return Joint(equation, space, unit, terms)


def rows(z, c, unit=0.3):
    return torch.cat([z, c / unit], 1)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("layers", ["all", "last"])
def test_the_joint_loss_is_zero_at_a_planted_truth(activation, layers):
    made = planted_span((6, 20, 2), activation, n=3, node=1.0)
    problem = joint(Span((1.0,), layers).bind(made.evidence, full(6), NO_DECAY), full(6))
    point = problem.at(rows(made.x, made.coef))
    assert point.loss < 1e-24
    assert float(problem.gradient(point).abs().max()) < 1e-10
    assert problem.at(rows(made.x + 0.1, made.coef)).loss > 1e-4


@pytest.mark.parametrize("cheaper", [True, False], ids=["gram", "explicit"])
@pytest.mark.parametrize("space", [full(5), affine(5, 3)], ids=["full", "affine"])
def test_value_and_gradient_are_those_of_writing_every_gradient_down(cheaper, space, monkeypatch):
    """The slow twin differentiates per-sample gradients, two nodes and two outputs, once more."""
    evidence, span = random_evidence((5, 12, 7, 2), "softplus"), Span(nodes=(0.0, 1.0))
    equation = span.bind(evidence, space, NO_DECAY)
    monkeypatch.setattr(type(equation), "gram_is_cheaper", lambda self, m: cheaper)
    box = Box(-0.5 * torch.ones(5).double(), 0.7 * torch.ones(5).double(), 2.0)
    problem = joint(equation, space, terms=(box,))
    row = rows(draw(3, space.dim, seed=1), draw(3, 4, seed=2))
    naive = Naive(evidence, span, space, NO_DECAY, "dense")
    leaf = row.clone().requires_grad_()
    z, c = problem.parts(leaf)
    outside = naive.energy() - float(naive.target().square().sum())
    loss = (
        (naive.target() - naive.contribution(z, c)).square().sum()
        + outside
        + box.value(space.expand(z)).sum()
    )
    found = problem.at(row)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    expected = torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(problem.gradient(found), expected, rtol=1e-9, atol=1e-10)


def test_the_cheaper_route_is_the_one_with_fewer_multiplications():
    equation = Span((1.0,)).bind(random_evidence((30, 400, 1)), full(30), NO_DECAY)
    assert equation.gram_is_cheaper(2) and not equation.gram_is_cheaper(400)


def test_order_does_not_matter_and_the_unit_is_a_unit():
    evidence = random_evidence((5, 12, 1), "tanh")
    equation = Span((1.0, 0.0)).bind(evidence, full(5), NO_DECAY)
    z, c = draw(4, 5, seed=1), draw(4, 2, seed=2)
    problem, other = joint(equation, full(5)), joint(equation, full(5), unit=2.0)
    value, order = problem.at(rows(z, c)), torch.tensor([2, 0, 3, 1])
    permuted = problem.at(rows(z[order], c[order]))
    assert permuted.loss == pytest.approx(value.loss, rel=1e-12)
    torch.testing.assert_close(permuted.slope, value.slope[order])
    assert other.at(rows(z, c, 2.0)).loss == pytest.approx(value.loss, rel=1e-12)


def test_stiffness_is_the_largest_eigenvalue():
    evidence = random_evidence((4, 10, 1), "tanh")
    equation, z, c = Span((1.0,)).bind(evidence, full(4), NO_DECAY), draw(3, 4, seed=1), draw(3, 1, seed=2)
    problem = joint(equation, full(4))

    def explained(row):
        return equation.contribution(*problem.parts(row))

    jacobian = torch.autograd.functional.jacobian(explained, rows(z, c)).flatten(1)
    largest = float(torch.linalg.svdvals(jacobian)[0] ** 2)
    assert problem.stiffness(rows(z, c), iterations=60) == pytest.approx(largest, rel=1e-3)


def test_the_softplus_schedule_is_the_published_one():
    paper = presets.loo(5)
    assert [paper.anneal.at(i) for i in (0, 20_000, 40_000, 60_000)] == [11.0, 20.0, 110.0, 200.0]
    quick = presets.loo(5, steps=4000)
    assert quick.anneal.at(2000) == pytest.approx(paper.anneal.at(40_000), rel=1e-3)
    assert (paper.name, paper.steps, quick.name) == ("loo", 80_001, "loo-quick")
    assert Anneal(1.0, 10.0, 3.0).at(1000) == 3.0


def test_a_leaky_backward_changes_slopes_only():
    phi = leaky_backward(Activation("relu", torch.relu), 0.02)
    u = torch.tensor([-2.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert phi.fn(u).tolist() == [0.0, 3.0]
    assert torch.autograd.grad(phi.fn(u).sum(), u)[0].tolist() == [0.02, 1.0]
    tanh = Activation("tanh", torch.tanh)
    assert leaky_backward(tanh, 0.02) is tanh
    both = leaky_backward(Activation("relu_tanh", ACTIVATIONS["relu_tanh"]), 0.02)
    slope = 1 - torch.tanh(u.detach()) ** 2
    torch.testing.assert_close(both.fn(u), torch.relu(u) + torch.tanh(u))
    torch.testing.assert_close(
        torch.autograd.grad(both.fn(u).sum(), u)[0], slope + torch.tensor([0.02, 1.0]).double()
    )


class Bowl:
    """|z|^2, until it is not finite after some evaluations."""

    space = full(2)

    def __init__(self, good=10**9):
        self.left = good

    def at(self, z):
        self.left -= 1
        loss = float(z.square().sum()) if self.left >= 0 else math.nan
        return type("P", (), {"z": z, "loss": loss})

    def gradient(self, point):
        return 2 * point.z


def descend(problem, steps=200, floor=0.0, progress=None):
    leaf = torch.ones(1, 2, dtype=torch.float64)
    return follow(torch.optim.SGD([leaf], 0.1), leaf, lambda step: problem, steps, floor, progress)


def test_a_descent_says_how_it_ended_and_keeps_the_last_finite_iterate():
    assert descend(Bowl(), 5).status == "iterations"
    assert descend(Bowl(), floor=1e-6).status == "converged"
    assert descend(Bowl(), progress=lambda loss: loss < 0.1).status == "stopped"
    broken = descend(Bowl(good=4))
    assert broken.status == "diverged" and math.isfinite(broken.point.loss) and broken.steps == 4
    assert descend(Bowl(good=0)).steps == 0


def test_a_problem_may_change_with_the_step():
    seen = []
    leaf = torch.ones(1, 2, dtype=torch.float64)

    def problem(step):
        seen.append(step)
        return Bowl()

    follow(torch.optim.SGD([leaf], 0.1), leaf, problem, 3, 0.0, None)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_gap_is_named_at_once(name):
    attack = presets.ATTACKS[name].preset(None)
    model = dense((6, 8, 1))
    bare = Evidence.from_module(model, input=InputSpec((6,)))
    with pytest.raises(MissingEvidence, match=r"initial weights") as raised:
        attack.run(bare)
    assert ("sample_norm" in str(raised.value)) == attack.sphere
    same = Evidence.from_module(model, input=InputSpec((6,)), init=state(model))
    with pytest.raises(MissingEvidence, match="differ from the initial"):
        attack.run(same)


def test_the_number_of_samples_is_asked_for_where_the_weights_do_not_tell_it():
    made = planted_features(3, 8, 40)
    with pytest.raises(MissingEvidence, match="number of samples"):
        presets.iurada().run(made.evidence)


def test_iurada_recovers_random_features_as_published():
    """Planted, p = 16 d n: the loss reaches the published floor and the rows are found."""
    made = planted_features(4, 16, 1024, seed=3)
    found = presets.iurada(4, steps=8000).run(made.evidence, seed=11)
    assert (found.status, len(found.x)) == ("converged", 4)
    assert found.misfit < 1e-7
    assert rho(found.x, made.x) < 0.05
    torch.testing.assert_close(found.x.norm(dim=1), torch.full((4,), 4.0).double())


@pytest.mark.parametrize("activation", ["relu", "relu_tanh"])
def test_fewer_candidates_cannot_explain_the_change_and_more_find_all_of_it(activation):
    """n - 1 end far above the floor; n + 2 reach it, every row among them and two of them anything."""
    made = planted_features(3, 10, 300, activation, seed=3)
    fewer, more = (presets.iurada(3 + k, steps=500).run(made.evidence, seed=11) for k in (-1, 2))
    assert (len(fewer.x), fewer.status) == (2, "iterations") and fewer.misfit > 1e-2
    assert (len(more.x), more.status) == (5, "converged") and more.misfit < 1e-7
    assert float(distance(more.x, made.x).max()) < 0.05


def test_tanh_features_tell_no_sign():
    made = planted_features(3, 10, 300, "tanh", seed=3)
    attack = presets.iurada(5, steps=500)
    found = attack.run(made.evidence, seed=11)
    assert found.status == "converged" and found.ambiguity.sign
    assert rho_pm(found.x, made.x) < 0.05
    turned = found.x * torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0]).double()[:, None]
    assert attack.begin(made.evidence).problem(0).at(turned).misfit == pytest.approx(found.misfit, rel=1e-6)


def test_only_random_features_are_differentiated_with_a_leak(trained):
    fixed = planted_features(3, 8, 40).evidence
    attack = presets.iurada(3, steps=1)
    assert "slope 0.02" in " ".join(attack.run(fixed).assumed)
    assert "slope" not in " ".join(attack.run(trained[1]).assumed)
    assert "slope" not in " ".join(presets.iurada(3, steps=1, leak=None).run(fixed).assumed)
    leaky, own = (a.begin(fixed).problem(0) for a in (attack, replace(attack, leak=None)))
    z = draw(3, 8, seed=9)
    assert leaky.at(z).loss == pytest.approx(own.at(z).loss, rel=1e-12)
    assert float((leaky.gradient(leaky.at(z)) - own.gradient(own.at(z))).abs().max()) > 1e-6


DEEP = {
    "two layers, cross-entropy": Case(
        data="digits", n=4, hidden=(256,), outputs=10, bias=False, norm=8.0,
        training=TrainConfig(loss="cross-entropy", lr=0.05, max_steps=500, tolerance=0.05),
    ),
    "residual network": Case(
        data="digits", n=3, net="residual", hidden=(16,), norm=8.0, training=TrainConfig(lr=0.005, max_steps=300)
    ),
    "transformer": Case(
        data="digits", n=3, net="transformer", hidden=(64,), outputs=10, activation="gelu", norm=8.0,
        training=TrainConfig(lr=0.01, max_steps=300),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("preset", [presets.iurada, partial(presets.tansley, subspace=False)])
def test_any_model_that_ends_in_a_linear_layer_is_descended_on(preset, name):
    evidence = make_victim(DEEP[name]).evidence
    attack = (
        replace(preset(4, steps=200), optimiser=Momentum(5.0))
        if preset is presets.iurada
        else preset(4, steps=200)
    )
    begun = attack.begin(evidence, seed=2)
    start = begun.problem(0).at(begun.problem(0).space.retract(begun.leaf)).misfit
    found = attack.run(evidence, seed=2)
    assert found.misfit < 0.5 * start
    u = evidence.input.encode(found.x).flatten(1)
    torch.testing.assert_close(u.norm(dim=1), torch.full((4,), 8.0).double())


def test_what_the_last_layer_lacks_is_named():
    victim = make_victim(DEEP["residual network"]).evidence
    with pytest.raises(MissingEvidence, match="whose outputs are those of a linear layer"):
        presets.iurada(3).run(replace(victim, head=None))
    frozen = {k: p for k, p in victim.final.items() if k.startswith("7")}
    with pytest.raises(MissingEvidence, match="a last layer that changed"):
        presets.iurada(3).run(replace(victim, init=victim.init | frozen))
    with pytest.raises(MissingEvidence, match="plain dense network"):
        presets.tansley(3).run(victim)


@pytest.fixture(scope="module")
def trained():
    """Five rows on the sphere in twelve dimensions, squared loss nearly to zero."""
    x = draw(5, 12, seed=1)
    x = 12**0.5 * x / x.norm(dim=1, keepdim=True)
    made = train((12, 300, 1), x=x, lr=0.002, steps=1500)
    return made, replace(made.seen, input=InputSpec((12,), sample_norm=12**0.5))


@pytest.mark.parametrize(
    "attack",
    [
        presets.loo(5, steps=600),
        presets.loo(5, both=False, steps=600),
        presets.iurada(5, steps=300),
        presets.tansley(5, steps=600),
        presets.tansley(5, subspace=False, steps=600),
        presets.tansley(5, layers="all", steps=600),
    ],
    ids=["loo both", "loo", "iurada", "tansley 2", "tansley 1", "tansley 2 all"],
)
def test_every_preset_descends_and_reports(attack, trained):
    made, evidence = trained
    begun = attack.begin(evidence, seed=2)
    start = begun.problem(0).at(begun.problem(0).space.retract(begun.leaf)).misfit
    found = attack.run(evidence, seed=2)
    assert found.misfit < 0.3 * start
    assert len(found.x) == round(attack.surplus * 5)
    assert found.certificate is None and found.ambiguity is not None
    assert torch.equal(found.importance, found.importance.sort(descending=True).values)
    again = attack.run(evidence, seed=2)
    assert torch.equal(found.x, again.x)
    if attack.rows:
        basis = torch.linalg.qr(made.x.T)[0]
        assert float((found.x - found.x @ basis @ basis.T).norm() / found.x.norm()) < 1e-6


def test_a_budget_ends_a_descent_with_what_there_is(trained):
    found = presets.loo(5).run(trained[1], budget=0.2)
    assert found.status == "stopped" and 0 < found.steps < 80_001
    assert bool(found.x.isfinite().all())


def test_the_range_of_the_features_is_a_penalty_where_it_is_known(trained):
    told = replace(trained[1], input=InputSpec((12,), low=-1.0, high=1.0))
    attack: Descent = presets.loo(5, steps=50)
    assert "its penalty was left out" in " ".join(attack.run(trained[1]).assumed)
    assert "its penalty was left out" not in " ".join(attack.run(told).assumed)
    box = attack.begin(told).problem(0).terms[0]
    # 0.1 times the mean squared violation: all twelve features are 2 beyond.
    assert float(box.value(3 * torch.ones(1, 12).double())) == pytest.approx(0.1 * 4)
