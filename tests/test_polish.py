"""Polish: samples become far more exact where the recipe is known; a wrong one is named, and makes nothing worse."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from exhume.equations.coarse import Coarse
from exhume.equations.fold import fold
from exhume.equations.part import split
from exhume.equations.recipe import dynamics, gaps, labels, unknowns
from exhume.equations.span import Span
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.matching import match
from exhume.moves.gates import CHORD, clearance
from exhume.moves.polish import Polish
from exhume.moves.rate import RateSearch
from exhume.moves.refine import refine
from exhume.presets import exhume as preset
from exhume.solvers.varpro import VarPro
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.train import train as train_model
from exhume.victims.victim import Case, make_victim
from planted import NO_DECAY, UNEQUAL, affine, distance, draw, random_evidence

POLISH = Polish(rounds=6)
UNCONVERGED = TrainConfig(max_steps=64)


@cache
def digits(**changes):
    return make_victim(Case(**{"data": "digits", "n": 6, "hidden": (300,), **changes}))


@cache
def fitted(**changes):
    """What the span equation alone finds."""
    victim = digits(**changes)
    return replace(preset(victim.case.n), polish=None, read_off=None).run(victim.evidence)


def stated(victim, **recipe):
    """The same weights with another recipe stated."""
    return replace(victim.evidence, recipe=replace(victim.evidence.recipe, **recipe))


def refined(victim, evidence=None, x=None, polish=POLISH):
    """Refine candidates x [m, *shape] with the recipe that the evidence states; the sentences too."""
    evidence = victim.evidence if evidence is None else evidence
    x = fitted_of(victim).x if x is None else x
    ground, shape = survey(victim.evidence), evidence.input.shape
    space, attack = ground.space, preset(victim.case.n)
    z = space.coordinates(evidence.input.encode(x).flatten(1))
    single = attack.single(evidence, ground)
    found, notes = refine(
        polish if single is None else single.polish(polish),
        evidence.recipe,
        lambda part, smoothing: attack._objective(evidence, ground, part, smoothing),
        dynamics(evidence.recipe).bind(evidence, space),
        lambda at, lr: unknowns(evidence, at, space.expand(at).view(-1, *shape), lr),
        z,
        lambda gap: False,
    )
    ends = x if found is None else evidence.input.decode(space.expand(found.z).view(-1, *shape))
    return found, ends, " ".join(notes)


def fitted_of(victim):
    case = victim.case
    default = Case(data="digits", n=6, hidden=(300,))
    changed = {k: getattr(case, k) for k in ("n", "hidden", "activation", "bias", "training", "seed")
               if getattr(case, k) != getattr(default, k)}  # fmt: skip
    return fitted(**changed)


def errors(victim, x):
    """Distance of every training sample to its nearest candidate, as model inputs."""
    encode = victim.evidence.input.encode
    return distance(encode(x).flatten(1), encode(victim.truth.train).flatten(1))


def median(victim, x):
    return float(errors(victim, x).median())


# --- samples become exact ------------------------------------------------------------------------------------


KINDS = {
    "relu": {"training": TrainConfig(max_steps=400)},
    "two hidden layers": {"hidden": (300, 100), "n": 4, "training": TrainConfig(max_steps=400)},
    "tanh": {"activation": "tanh", "n": 4, "training": TrainConfig(max_steps=300)},
    "logistic": {"training": TrainConfig(loss="logistic", max_steps=600, tolerance=0.0)},
    "decay and momentum": {"training": TrainConfig(weight_decay=1e-2, momentum=0.9, lr=0.002, max_steps=300)},
    "float32": {"training": TrainConfig(dtype=torch.float32, max_steps=200, tolerance=0.0)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_median_error_falls_to_a_third_or_less(kind):
    victim = digits(**KINDS[kind])
    before = fitted(**KINDS[kind])
    found, x, notes = refined(victim)
    assert found is not None
    assert median(victim, before.x) > 3e-4  # there was something to polish
    assert median(victim, x) < median(victim, before.x) / 3
    assert min(found.trace) <= found.gap <= 0.5 * found.before == 0.5 * found.trace[0]
    assert "candidates were polished" in notes
    assert match(x, victim.truth).control.count == 0


def test_the_attack_polishes_and_says_so():
    kind = KINDS["relu"]
    found, before = replace(preset(6), read_off=None).run(digits(**kind).evidence), fitted(**kind)
    assert median(digits(**kind), found.x) < median(digits(**kind), before.x) / 3
    assert any("candidates were polished" in note for note in found.assumed)
    assert found.certificate is not None
    assert float(found.certificate.error_estimate.max()) < float(before.certificate.error_estimate.max()) / 3


def test_readings_stay_as_they_are_and_the_others_become_more_exact():
    victim, plain = digits(**KINDS["relu"]), fitted(**KINDS["relu"])
    fit, found = (errors(victim, attempt.x) for attempt in (plain, preset(6).run(victim.evidence)))
    read = found < 1e-9
    assert 0 < int(read.sum()) < 6
    assert float(fit[read].median()) > 3e-4
    assert float(found[~read].median()) < float(fit[~read].median()) / 3


def test_without_biases_the_scale_of_a_sample_is_left():
    """Gradients of a net without biases are homogeneous: c s phi(x) and c phi(s x) agree, so no span equation tells
    the norm of a sample, and polish, which solves span equations, improves directions only."""
    kind = {"bias": False, "training": TrainConfig(max_steps=400), "seed": 1}
    victim, before = digits(**kind), fitted(**kind)
    _, x, _ = refined(victim)
    assert median(victim, x) <= median(victim, before.x)


def test_a_convolutional_net_gets_no_worse():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 9, 1)
    ).double()  # fmt: skip
    x = draw(2, 1, 5, 5, seed=3)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    run = train_model(model, x, y, TrainConfig(lr=0.05, max_steps=40, tolerance=0.0))
    recipe = Recipe("mse", "mean", "pm1", "sgd", 0.05, 40, 0.0, 0.0)
    evidence = Evidence.from_module(
        model, input=InputSpec((1, 5, 5)), init=run.init, final=run.final, recipe=recipe
    )
    ground, attack = survey(evidence), preset(2)
    z = x.flatten(1) + 0.02 * draw(2, 25, seed=4)
    found, notes = refine(
        Polish(rounds=2, solver=VarPro(dense_limit=0, iterations=4, cg_steps=10)),
        recipe,
        lambda part, smoothing: attack._objective(evidence, ground, part, smoothing),
        dynamics(recipe).bind(evidence, ground.space),
        lambda at, lr: unknowns(evidence, at, at.view(-1, 1, 5, 5), lr),
        z,
        lambda gap: False,
    )
    assert notes
    if found is not None:
        assert float((found.z - x.flatten(1)).norm()) < float((z - x.flatten(1)).norm())


# --- the learning rate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_learning_rate_is_corrected_where_training_stopped_early(factor, seed):
    victim = digits(training=UNCONVERGED, seed=seed)
    _, x, notes = refined(victim, stated(victim, lr=0.02 * factor))
    assert median(victim, x) < 5e-4  # 2e-4, 1.5e-2 and 1.5e-2 before
    assert median(victim, x) <= median(victim, fitted_of(victim).x)
    assert f"the stated learning rate {0.02 * factor:g} contradicts" in notes
    assert float(notes.split("weights; ")[1].split(" fits")[0]) == pytest.approx(0.02, rel=0.1)


def test_a_learning_rate_that_was_not_stated_is_found():
    victim = digits(training=UNCONVERGED, seed=1)
    evidence = stated(victim, lr=None)
    assert gaps(evidence.recipe) == ()
    found, x, notes = refined(victim, evidence)
    assert found is not None
    assert median(victim, x) < 0.5 * median(victim, fitted_of(victim).x)
    assert float(notes.split("stated; ")[1].split(" fits")[0]) == pytest.approx(0.02, rel=0.1)


def test_after_convergence_no_learning_rate_is_claimed():
    victim = digits(**KINDS["relu"])
    _, x, notes = refined(victim, stated(victim, lr=0.4), polish=replace(POLISH, rounds=3))
    assert "fits them" not in notes
    assert "do not tell the right one" in notes
    assert median(victim, x) <= median(victim, fitted_of(victim).x)


def test_the_search_finds_the_smallest_gap_and_knows_a_flat_one():
    search = RateSearch()
    found = search.run(lambda lr: abs(torch.tensor(lr / 0.07).log().item()), 0.01)
    assert found.lr == pytest.approx(0.07, rel=1e-3)
    assert found.sharp
    cliff = search.run(lambda lr: torch.inf if lr > 0.05 else 0.2 + lr, 0.01)
    assert 0.0005 <= cliff.lr < 0.05
    assert not cliff.sharp
    assert search.run(lambda lr: torch.inf, 0.01).gap == torch.inf


# --- contradictions --------------------------------------------------------------------------------------------


WRONG = {
    "loss": ({"training": UNCONVERGED}, {"loss": "logistic"}),
    "loss, converged": (KINDS["relu"], {"loss": "logistic"}),
    "loss the other way": (KINDS["logistic"], {"loss": "mse"}),
    "far too few steps": ({"training": UNCONVERGED}, {"steps": 1}),
    "divergence": (KINDS["relu"], {"lr": 40.0}),
    "order": ({"training": TrainConfig(batch_size=2, lr=0.05, max_steps=400)}, {}),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_contradicting_recipe_is_named_and_changes_nothing(how):
    kind, recipe = WRONG[how]
    victim = digits(**kind)
    found, x, notes = refined(victim, stated(victim, **recipe))
    assert median(victim, x) <= median(victim, fitted_of(victim).x)
    assert "contradicts" in notes or "away from the true weights" in notes
    assert "%" in notes or "diverged" in notes
    if how != "order":
        assert found is None
        assert torch.equal(x, fitted_of(victim).x)
        assert "contradict" in notes
    else:
        assert "not on batches of 2, whose order is unknown" in notes


def test_the_attack_reports_a_contradiction_and_keeps_the_fit():
    victim = digits(**KINDS["relu"])
    found = replace(preset(6), read_off=None).run(stated(victim, lr=40.0))
    assert torch.equal(found.x, fitted(**KINDS["relu"]).x)
    assert any("diverged" in note and "contradicts" in note for note in found.assumed)


@pytest.mark.parametrize("how", ["missing", "replaced by noise", "spurious"])
def test_a_wrong_set_of_candidates_is_not_made_worse(how):
    """Judged on the samples whose candidates were right."""
    victim, x = digits(**KINDS["relu"]), fitted(**KINDS["relu"]).x
    noise = torch.rand(1, *x.shape[1:], generator=torch.Generator().manual_seed(0), dtype=x.dtype) * float(
        x.max()
    )
    start = {
        "missing": x[1:],
        "replaced by noise": torch.cat([x[1:], noise]),
        "spurious": torch.cat([x, noise]),
    }[how]
    _, end, notes = refined(victim, x=start)
    right = errors(victim, start) < 0.1
    assert int(right.sum()) >= 5
    assert float(errors(victim, end)[right].median()) <= float(errors(victim, start)[right].median())
    assert "true weights" in notes


# --- parts -----------------------------------------------------------------------------------------------------


def test_clearance_is_the_smallest_over_candidates_and_nodes():
    evidence, space = random_evidence((6, 9, 1)), affine(6, 3)
    bound = dynamics(Recipe("mse", lr=0.1, steps=3)).bind(evidence, space)
    z = draw(4, 3, seed=2)
    end, v = bound.net.final, bound.net.embed(z)
    wanted = []
    for j in range(9):
        each = []
        for node in CHORD:
            w, b = ((1 - node) * bound.net.init[k][j] + node * end[k][j] for k in ("0.weight", "0.bias"))
            each += [float(abs(w @ one + b) / (w.norm() * one.norm() / 3**0.5)) for one in v]
        wanted.append(min(each))
    torch.testing.assert_close(clearance(bound, end, z), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "kind", "wanted"),
    [
        ("mse", "pm1", [[1, -1], [-1, -1]]),
        ("mse", "01", [[1, 0], [0, 0]]),
        ("mse", "onehot", [[1, 0], [0, 1]]),
        ("mse", None, None),
        ("logistic", None, [[1, -1], [-1, -1]]),
        ("bce", "01", [[1, -1], [-1, -1]]),
        ("cross-entropy", None, [[1, 0], [0, 1]]),
    ],
)
def test_labels_are_guessed_from_the_outputs(loss, kind, wanted):
    """An identity net shows the outputs (0.7, -0.2) and (-0.6, -0.1)."""
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data.copy_(torch.eye(2))
    evidence = Evidence.from_module(model, input=InputSpec((2,)), recipe=Recipe(loss=loss, labels=kind))
    out = torch.tensor([[0.7, -0.2], [-0.6, -0.1]], dtype=torch.float64)
    found = labels(evidence, out)
    torch.testing.assert_close(found, out if wanted is None else torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("where", ["affine", "through zero"])
@pytest.mark.parametrize(
    ("what", "generic"),
    [("all", False), ("part", False), ("last layer", False), ("all", True), ("part", True)],
)
def test_a_change_as_a_vector_is_the_target_and_a_target_can_be_set(generic, where, what):
    evidence = random_evidence((6, 9, 4, 2))
    evidence = replace(evidence, chain=None) if generic else evidence
    through = affine(6, 3)
    space = through if where == "affine" else replace(through, origin=None)
    decay = replace(NO_DECAY, weight=0.9, bias=0.8)
    part = split(evidence, "all", 0.3, 0)[0] if what == "part" else None
    span = Span((0.0, 1.0), "last" if what == "last layer" else "all", UNEQUAL)
    equation, net = span.bind(evidence, space, decay, part=part), fold(evidence, space)
    change = {k: p - decay.of(net.init[k]) * net.init[k] for k, p in net.final.items()}
    torch.testing.assert_close(equation.vector(change), equation.target(), rtol=1e-12, atol=1e-13)
    t = torch.where(equation.target() == 0, 0.0, draw(len(equation.target()), seed=5))
    torch.testing.assert_close(equation.aimed_at(t).target(), t, rtol=1e-12, atol=1e-13)
    assert equation.aimed_at(t).energy == pytest.approx(float(t @ t) + equation.outside)


def test_a_coarse_simulation_bounds_what_polish_claims():
    """The sentence tells how coarse and how exact; polishing stops where the simulation is no more exact."""
    kind = {"activation": "tanh", "n": 4,
            "training": TrainConfig(lr=0.001, max_steps=3000, tolerance=0.0)}  # fmt: skip
    victim = digits(**kind)
    found, x, notes = refined(victim, polish=replace(POLISH, coarse=Coarse(limit=100, tolerance=0.01)))
    assert found is not None
    assert found.factor > 2
    assert "-fold larger steps (estimated error" in notes
    assert median(victim, x) < 0.5 * median(victim, fitted_of(victim).x)
