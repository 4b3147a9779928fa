"""The feature equation: hidden features of the samples lie in the rows of the second-layer change."""

import dataclasses

import pytest
import torch

from exhume import match, presets
from exhume.change import decay_factor
from exhume.equations.feature import Feature, leading
from exhume.errors import ExhumeError
from exhume.evidence import InputSpec
from exhume.moves.search import SubspaceSearch
from exhume.moves.single import ByFeatures, BySignals
from exhume.spaces import full
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import distance, draw, generator, random_evidence, train

N, D, WIDTH = 5, 12, 80
RIDGE = 1e-9  # the generalised eigenproblem has a ridge of 1e-10


def frozen(activation="relu", bias=True, outputs=1, n=N):
    """A net whose first layer stood still, so that the features lie in n rows exactly."""
    still = ("0.weight", "0.bias") if bias else ("0.weight",)
    run = train((D, WIDTH, 30, outputs), n, steps=30, lr=0.02, frozen=still, bias=bias, activation=activation)
    return run.seen, run.x


def moving(activation="relu", seed=0, steps=200):
    run = train((D, 120, 60, 1), N, steps=steps, lr=0.02, activation=activation, seed=seed)
    return run.seen, run.x


def bind(evidence, samples=N, feature=None, units=None, whole=False, space=None):
    feature = Feature() if feature is None else feature
    space = full(D) if space is None else space
    known = feature.rows(evidence, decay_factor(evidence), space, samples, units)
    return feature.bind(evidence, known, space, whole)


def probe_of(x, m=64):
    norm = float(x.norm(dim=1).mean())
    return full(D).random(m, norm, generator(3))


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_where_the_first_layer_stood_still_samples_score_zero_and_other_points_do_not(activation, bias):
    evidence, x = frozen(activation, bias)
    bound = bind(evidence)
    assert bound.columns.shape == (WIDTH + bias, N)
    assert float(bound.score(x).max()) < RIDGE
    assert float(bound.score(probe_of(x)).min()) > 1e-3


def test_the_score_is_the_share_of_the_features_outside_the_rows():
    """One node, written down: features of the final first layer and a constant, against the rows of the change."""
    evidence, x = moving()
    bound = bind(evidence, feature=Feature(nodes=(1.0,)), whole=True)
    init, final = evidence.at(0.0), evidence.at(1.0)
    change = torch.cat([final["2.weight"] - init["2.weight"], (final["2.bias"] - init["2.bias"])[:, None]], 1)
    rows = torch.linalg.svd(change, full_matrices=False)[2][: 4 * N].T
    points = torch.cat([x, probe_of(x, 10)])
    h = torch.relu(points @ final["0.weight"].T + final["0.bias"])
    h = torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1)
    missed = h - (h @ rows) @ rows.T
    expected = missed.square().sum(1) / h.square().sum(1)
    torch.testing.assert_close(bound.score(points), expected, rtol=1e-6, atol=1e-9)


def test_in_training_features_move_less_than_signals_do():
    """The equation the column search rests on, on the same net: its samples score far nearer to other points."""
    evidence, x = moving()
    ground = survey(evidence)
    z, probe = ground.space.coordinates(x), ground.space.random(64, ground.norm, generator(4))
    attack = presets.exhume(N)
    signals = attack.column.bind(evidence, ground.first, ground.space, None)
    features = bind(evidence, whole=True, space=ground.space)
    assert float(features.relative(z, probe).max()) < 0.1 * float(signals.relative(z, probe).median())


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("nodes", [(1.0,), (0.0, 1.0)])
@pytest.mark.parametrize("found", [0, 2])
def test_the_gradient_equals_autograd(activation, nodes, found):
    evidence, x = moving(activation)
    bound = bind(evidence, feature=Feature(nodes=nodes)).without(x[:found])
    leaf = (x[1:] + 0.3 * draw(N - 1, D, seed=6)).requires_grad_()
    value = bound.score(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    here = bound.expand(leaf.detach())
    torch.testing.assert_close(here.value, value.detach(), rtol=1e-12, atol=1e-12)
    # The features of two nodes hardly differ, and the ridge of the eigenproblem shows.
    torch.testing.assert_close(here.gradient, gradient, rtol=1e-4, atol=1e-5)


def test_units_of_its_own_are_all_that_a_part_uses():
    """Weights of the other units are changed at random: nothing may change."""
    evidence, x = moving()
    units = torch.arange(0, 120, 2)
    others = torch.arange(1, 120, 2)
    before = bind(evidence, units=units)
    final = {k: p.clone() for k, p in evidence.final.items()}
    noisy = random_evidence((D, 120, 60, 1), seed=9).final
    final["0.weight"][others] = noisy["0.weight"][others]
    final["2.weight"][:, others] = noisy["2.weight"][:, others]
    after = bind(dataclasses.replace(evidence, final=final), units=units)
    torch.testing.assert_close(after.score(x), before.score(x))


def test_found_samples_score_high_and_the_others_are_what_leads():
    evidence, x = frozen()
    rest = bind(evidence).without(x[:3])
    assert rest.missing == N - 3
    scores = rest.score(x)
    assert float(scores[:3].min()) > 0.3  # of a vector that is all rounding
    assert float(scores[3:].max()) < RIDGE
    assert bind(evidence).without(x).missing == 0
    assert bind(evidence).without(x[:0]).missing == N


def test_a_weak_sample_leads_once_the_strong_ones_are_found():
    """Its row is weaker than what the others' features moved, so that the first n rows do not hold it."""
    evidence, x = moving()
    known = Feature().rows(evidence, decay_factor(evidence), full(D), N)
    weak = N - 1
    first = Feature().bind(evidence, known, full(D))
    strong = first.vectors.at(x[:weak]).flatten(0, 1)
    basis = torch.linalg.qr(strong.T)[0]
    own = first.vectors.at(x[weak:])[0, 0]
    own = own - basis @ (basis.T @ own)
    # The same rows with the weak sample's part scaled down to a hundredth.
    inside = basis @ (basis.T @ known.rows)
    faint = dataclasses.replace(known, rows=inside + 0.01 * (known.rows - inside))
    bound = Feature().bind(evidence, faint, full(D))

    def seen(equation):
        return float((equation.columns.T @ own).square().sum() / own.square().sum())

    assert seen(bound) < 0.1
    assert seen(bound.without(x[:weak])) > 0.5


def test_leading_is_the_leading_left_singular_space():
    rows = draw(30, 8) @ torch.diag(torch.tensor([9.0, 7, 5, 3, 1e-1, 1e-2, 1e-3, 0]).double())
    expected = torch.linalg.svd(rows)[0][:, :3]
    found = leading(rows, 3)
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=1e-8, atol=1e-8)
    assert leading(rows, 100).shape[1] == 7


def test_copies_are_not_distinct():
    evidence, x = frozen()
    bound = bind(evidence)
    near = x[:1] + 1e-3 * draw(1, D, seed=8)
    found = bound.distinct(torch.cat([near, x]), probe_of(x))
    assert float(found[0]) == 1.0
    assert float(found[1:].max()) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_random_starts_end_at_samples(seed):
    """Nine in ten of random starts do, and the search ends with each sample once."""
    evidence, x = frozen()
    ground = survey(dataclasses.replace(evidence))
    assert not ground.reduced
    attack = presets.exhume(N)
    single = attack.single(evidence, ground)
    assert isinstance(single, ByFeatures)
    norm = float(x.norm(dim=1).mean())
    stages = single.stages(probe_of(x), None)
    starts = ground.space.random(40, norm, generator(seed))
    ends = single.solver.minimise(stages.sought[0].expand, ground.space.retract, starts)[0]
    assert int((distance(x, ends) < 1e-4).sum()) >= 36
    nothing = torch.zeros(0, D, dtype=torch.float64)
    z = SubspaceSearch().run(stages, ground.space, norm, nothing, generator(seed), lambda *_: False)
    assert len(z) == N
    assert float(distance(z, x).max()) < 1e-4


def test_where_it_does_not_apply_the_column_equation_is_used():
    shallow = train((D, WIDTH, 1), N, steps=30).seen
    linear = train((D, WIDTH, 30, 1), N, steps=30, lr=0.01, activation="identity").seen
    narrow = train((D, WIDTH, N - 1, 1), N, steps=30).seen
    attack = presets.exhume(N)
    for evidence in (shallow, linear, narrow):
        assert Feature().rows(evidence, decay_factor(evidence), full(D), N) is None
    assert isinstance(attack.single(shallow, survey(shallow)), BySignals)
    assert isinstance(attack.single(narrow, survey(narrow)), BySignals)
    assert attack.single(linear, survey(linear)) is None
    unknown = frozen()[0]
    assert presets.exhume().single(unknown, survey(unknown)) is None


@pytest.mark.parametrize("hidden", [(200, 100), (150, 150, 60)])
def test_deep_networks_give_up_every_digit(hidden):
    """Certified without the truth; nothing of the control rows."""
    training = TrainConfig(lr=0.02, max_steps=3000, tolerance=1e-6)
    victim = make_victim(Case(data="digits", n=12, hidden=hidden, training=training, seed=3))
    attack = dataclasses.replace(presets.exhume(), polish=None)
    found = attack.run(victim.evidence, seed=1)
    matches = match(found, victim.truth)
    assert matches.train.count == 12
    assert matches.train.close >= 11
    assert matches.control.count == 0
    assert found.certificate.recovered >= 11


def test_more_samples_than_features_are_found_from_a_stated_number():
    """The row space of the first layer tells nothing there; the second layer's does."""
    run = train((D, 300, 120, 1), 20, steps=400, lr=0.02)
    ground = survey(run.seen)
    assert not ground.reduced
    attack = dataclasses.replace(presets.exhume(20), polish=None)
    found = attack.run(run.seen, seed=1)
    assert int((distance(found.x.double(), run.x) < 0.05).sum()) >= 18


def test_as_many_candidates_are_judged_as_are_returned():
    """More samples stated than there are: copies of some may be found, and must not be lost on the way."""
    run = train((D, 300, 120, 1), 8, steps=400, lr=0.02)
    found = dataclasses.replace(presets.exhume(14), polish=None).run(run.seen, seed=2)
    certificate = found.certificate
    assert len(found.x) == len(certificate.score) == len(certificate.agreement)
    assert certificate.recovered <= 8
    certified = found.x[certificate.certified].double()
    assert float(distance(run.x, certified).max()) < 0.1
    assert int((distance(certified, run.x) < 0.1).sum()) >= 7


@pytest.mark.parametrize("low", [0.0, -0.5])
def test_without_biases_the_range_of_the_features_sets_the_scale(low):
    """Directions are what the equation tells; samples that touch the upper end of the range get their norm too."""
    x = (torch.rand(N, D, generator=generator(5), dtype=torch.float64) * (1 - low) + low).clamp(low, 1)
    x[torch.arange(N), torch.arange(N)] = 1.0
    run = train((D, 200, 80, 1), N, steps=300, lr=0.05, bias=False, x=x)
    seen = dataclasses.replace(run.seen, input=InputSpec((D,), low=low, high=1.0))
    found = dataclasses.replace(presets.exhume(N), polish=None).run(seen, seed=1)
    assert float(distance(found.x.double(), x).max()) < 0.1


def test_more_samples_stated_than_the_rows_can_hold_leaves_what_the_rank_shows():
    run = train((30, 150, 100, 1), 8, steps=300, lr=0.02)
    found = dataclasses.replace(presets.exhume(1000), polish=None).run(run.seen, seed=1)
    assert any("1000 samples were stated" in note for note in found.assumed)
    assert int((distance(found.x.double(), run.x) < 0.05).sum()) == 8


def test_where_only_the_last_of_three_layers_moved_the_search_is_joint_and_nothing_is_certified():
    """No equation belongs to a unit of the first layer, so there is nothing to hold out."""
    below = tuple(f"{2 * l}.{kind}" for l in range(2) for kind in ("weight", "bias"))
    run = train((6, 120, 100, 1), 2, steps=50, lr=0.02, frozen=below)
    found = presets.exhume(2).run(run.seen, seed=1, budget=20.0)
    assert found.certificate is None
    assert any("did not move" in note for note in found.assumed) or found.seconds > 19


@pytest.mark.parametrize(
    "start", [torch.zeros(2, 3), torch.full((1, D), torch.nan), torch.full((1, D), torch.inf)]
)
def test_a_start_that_is_no_model_input_is_refused(start):
    run = train((D, 60, 1), N, steps=20)
    with pytest.raises(ExhumeError, match=f"finite model inputs of {D} features"):
        presets.exhume().run(run.seen, start=start)
