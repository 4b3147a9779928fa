"""Attacks from evidence to reconstruction, on small victims trained on real digits and on planted ones."""

import copy
import dataclasses
import hashlib
import io
import math
import pickle
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from exhume.attack import SpanAttack
from exhume.descent import Descent
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.matching import match
from exhume.presets import ATTACKS
from exhume.presets import exhume as preset
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import LAST, distance, draw, on_sphere, planted_features, planted_span, state, train

legacy = np.random.get_state  # the global stream is what must not move
STATUS = {"converged", "iterations", "stalled", "diverged", "stopped"}


@cache
def digits(**changes):
    return make_victim(Case(**{"data": "digits", "n": 8, "hidden": (400,), **changes}))


def five():
    """A victim that is attacked in a fraction of a second."""
    return digits(n=5, hidden=(300,))


@cache
def found_in_five():
    return preset().run(five().evidence, seed=0)


def matched(found, victim):
    scores = match(found, victim.truth)
    return scores.train.count, scores.control.count


# --- end to end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_digits_are_recovered_and_digits_never_seen_are_not(seed):
    victim = digits(seed=seed)
    found = preset().run(victim.evidence)
    count, control = matched(found, victim)
    assert count >= 7
    assert control == 0
    assert found.rank == 8
    assert found.status in STATUS - {"diverged"}
    assert len(found.x) <= 12


def test_a_start_from_elsewhere_is_taken_up_but_never_told_to_the_witness():
    """Random features too few for random starts: from the rows themselves the first search ends there at once."""
    made = planted_features(4, 16, 128, seed=5)
    attack = replace(preset(4), polish=None)
    blind, told = attack.run(made.evidence, seed=1), attack.run(made.evidence, seed=1, start=made.x)
    assert float(distance(told.x, made.x).max()) < 1e-6
    assert told.steps < blind.steps
    wrong = attack.run(made.evidence, seed=1, start=on_sphere(4, 16, 4.0, seed=99))
    assert wrong.misfit < 10 * blind.misfit + 1e-12 or wrong.certificate.recovered == 0


def test_a_net_trained_on_the_control_rows_gives_those_instead():
    swapped = digits(seed=0, swap=True)
    found = preset().run(swapped.evidence)
    scores = match(found, digits(seed=0).truth)
    assert scores.train.count == 0
    assert scores.control.count >= 7


WAYS = {
    "no biases": {"bias": False},
    "depth 3": {"hidden": (150, 60), "n": 3},
    "momentum": {"training": TrainConfig(momentum=0.9, lr=0.005, max_steps=300)},
    "mini-batch": {"training": TrainConfig(batch_size=2, lr=0.01, max_steps=400)},
    "decay": {"training": TrainConfig(weight_decay=1e-3, max_steps=400)},
    "one step": {"training": TrainConfig(max_steps=1), "n": 3},
    "float32": {"training": TrainConfig(dtype=torch.float32, max_steps=200)},
    "two samples": {"n": 2},
    "one sample": {"n": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_train_are_seen_through(way):
    """All samples but one at most, which a larger net would give too."""
    victim = digits(**{"hidden": (300,), "n": 5, **WAYS[way]})
    found = preset().run(victim.evidence)
    count, control = matched(found, victim)
    assert count >= max(1, victim.case.n - 1)
    assert control == 0


@pytest.mark.parametrize("activation", ["leaky_relu", "identity"])
def test_the_preset_runs_on_every_piecewise_linear_net(activation):
    victim = digits(n=3, hidden=(200,), activation=activation, training=TrainConfig(max_steps=100))
    found = preset().run(victim.evidence, budget=1.0)
    assert found.x.isfinite().all()


def test_an_exact_equation_is_solved_exactly():
    planted = planted_span((16, 60, 1), n=4, node=0.0)
    found = preset().run(planted.evidence)
    assert found.misfit < 1e-16
    assert len(found.x) == 4
    assert float(distance(found.x, planted.x).max()) < 1e-8


def test_two_samples_of_known_norm_are_found():
    """Their line meets the sphere in these two points alone, so a score relative to random points says nothing."""
    planted = planted_span((16, 60, 1), n=2, node=0.0, spec=InputSpec((16,), sample_norm=4.0))
    found = preset(2).run(planted.evidence)
    assert float(distance(found.x, planted.x).max()) < 1e-6


def test_the_last_layer_of_a_deep_net_can_be_attacked():
    planted = planted_span((16, 60, 40, 1), n=2, node=1.0)
    found = SpanAttack("last", LAST, column=None, samples=2).run(planted.evidence)
    assert found.x.isfinite().all()


def test_nothing_is_certified_where_nothing_was_held_out():
    """A linear model with one output: its change is one sum of samples, which no attack can take apart."""
    run = train((30, 1), 3, steps=300, lr=0.01)
    found = preset(3).run(run.seen)
    assert float(distance(run.x, found.x).min()) > 0.3
    assert found.certificate is None or found.certificate.recovered == 0


# --- a reconstruction says what it is ----------------------------------------------------------------------


def test_a_reconstruction_is_consistent():
    found, evidence = found_in_five(), five().evidence
    m = len(found.x)
    assert found.x.shape == (m, *evidence.input.shape)
    assert (found.candidates.coef.shape, found.candidates.label.shape) == ((m, 3), (m, 1))
    assert found.importance.tolist() == sorted(found.importance.tolist(), reverse=True)
    assert 0 <= found.misfit <= found.loss < 1
    assert found.trace[-1] <= found.trace[0]
    assert all(map(math.isfinite, found.trace))
    assert (found.attack, found.seed) == ("exhume", 0)
    assert found.reason.endswith(".")
    assert found.seconds > 0
    assert found.steps > 0
    assert len(found.assumed) >= 3
    assert len(found.spectrum) == 65
    label = evidence.output(evidence.input.encode(found.x))
    torch.testing.assert_close(found.candidates.label, label, rtol=1e-8, atol=1e-8)


def test_the_same_seed_gives_the_same_result_and_another_seed_another_path():
    evidence = five().evidence
    again, other = preset().run(evidence, seed=0), preset().run(evidence, seed=1)
    first = found_in_five()
    assert torch.equal(first.x, again.x)
    assert first.trace == again.trace
    assert (first.misfit, first.steps, first.status) == (again.misfit, again.steps, again.status)
    assert first.trace != other.trace


def test_candidates_are_in_the_owners_units():
    """x = u * scale + mean, with features of very different size; the model saw u."""
    mean, scale = 5 + draw(16, seed=8), torch.logspace(-2, 2, 16, dtype=torch.float64)
    spec = InputSpec((16,), mean=mean, scale=scale)
    planted = planted_span((16, 60, 1), n=4, node=0.0, spec=spec)
    found = preset().run(planted.evidence)
    owner = planted.x * scale + mean
    assert float(distance(spec.encode(found.x), planted.x).max()) < 1e-8
    nearest = torch.cdist(owner / scale, found.x / scale).argmin(1)
    torch.testing.assert_close(found.x[nearest], owner, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        found.candidates.label, planted.evidence.output(spec.encode(found.x)), rtol=1e-9, atol=1e-9
    )


def test_shapes_are_the_owners():
    model = nn.Sequential(nn.Flatten(), *planted_span((12, 50, 1), n=3).model)
    planted = planted_span((12, 50, 1), n=3)
    rename = {k: f"{int(k[0]) + 1}{k[1:]}" for k in planted.evidence.init}
    init, final = (
        {rename[k]: p for k, p in w.items()} for w in (planted.evidence.init, planted.evidence.final)
    )
    evidence = Evidence.from_module(model, input=InputSpec((3, 2, 2)), init=init, final=final)
    found = preset().run(evidence)
    assert found.x.shape[1:] == (3, 2, 2)
    assert float(distance(found.x.flatten(1), planted.x).max()) < 1e-8


@pytest.mark.parametrize("samples", [1, 30])
def test_a_wrong_number_of_samples_does_no_harm_where_the_rank_tells_it(samples):
    found = preset(samples).run(five().evidence)
    count, control = matched(found, five())
    assert count >= 4
    assert control == 0


@pytest.mark.parametrize("samples", [1, 9])
def test_a_wrong_number_of_samples_runs_where_nothing_tells_it(samples):
    planted = planted_features(4, 16, 256)
    found = SpanAttack("planted", LAST, column=None, samples=samples).run(planted.evidence)
    assert found.x.isfinite().all()
    assert found.misfit < 1
    assert 1 <= len(found.x) <= 14


def test_no_more_samples_are_sought_than_the_equations_can_determine():
    """Sixty equations, of which 48 are fitted, against 17 unknowns a sample."""
    planted = planted_features(4, 16, 60)
    found = SpanAttack("planted", LAST, column=None, samples=9).run(planted.evidence)
    assert any("48 equations determine at most 1" in note for note in found.assumed)
    assert len(found.x) <= 2


# --- budget and progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [True, False])
def test_a_spent_budget_ends_the_run_early_with_a_result(column):
    attack = preset() if column else SpanAttack("joint", LAST, column=None, samples=4)
    evidence = five().evidence if column else planted_features(4, 16, 256).evidence
    found = attack.run(evidence, budget=0.0)
    assert found.status == "stopped"
    assert "early" in found.reason
    assert found.x.isfinite().all()
    assert 0 < found.misfit <= 1.5
    assert found.seconds < 5.0
    assert found.steps <= 4


def test_a_budget_is_kept_on_a_hard_case():
    """Twenty digits and a narrow net: without a limit this takes many times longer."""
    victim = digits(n=20, hidden=(60,), training=TrainConfig(max_steps=300))
    found = preset().run(victim.evidence, budget=0.5)
    assert found.status == "stopped"
    assert 0.5 < found.seconds < 5.0


def test_an_ample_budget_changes_nothing():
    found = preset().run(five().evidence, budget=1000.0)
    assert torch.equal(found.x, found_in_five().x)
    assert found.status == found_in_five().status


def test_the_observer_hears_what_is_done():
    heard = []
    planted = planted_span((12, 50, 1), n=3, node=0.0)
    preset().run(planted.evidence, budget=1000.0, observer=lambda words, share: heard.append((words, share)))
    assert any("search" in words for words, _ in heard)
    assert any("joint fit, loss" in words for words, _ in heard)
    assert all(0 <= share <= 1 for _, share in heard)


# --- missing evidence --------------------------------------------------------------------------------------


def test_missing_initial_weights_are_named_with_the_remedy():
    evidence = dataclasses.replace(five().evidence, init=None)
    with pytest.raises(
        MissingEvidence, match=r"'exhume' needs the initial weights \(\[model\] init\).*provide"
    ):
        preset().run(evidence)


def test_weights_that_never_moved_are_named():
    evidence = five().evidence
    with pytest.raises(MissingEvidence, match="differ from the initial"):
        preset().run(dataclasses.replace(evidence, final=evidence.init))


def test_an_unknown_number_of_samples_is_named_where_nothing_tells_it():
    evidence = dataclasses.replace(planted_span((6, 20, 1), n=2).evidence, chain=None)
    with pytest.raises(MissingEvidence, match=r"number of samples \(\[attack\] samples\)"):
        preset().run(evidence)


# --- what must not be touched ------------------------------------------------------------------------------


class Owned(nn.Module):
    """A model with buffers, in train mode, partly frozen, that the owner goes on using."""

    def __init__(self):
        super().__init__()
        self.net = planted_span((12, 50, 1), n=3).model
        self.register_buffer("calls", torch.tensor([3, 1, 4]))
        self.register_buffer(
            "noise", torch.randn(5, generator=torch.Generator().manual_seed(0)), persistent=False
        )
        self.net[0].bias.requires_grad_(False)
        self.net[1].eval()

    def forward(self, x):
        return self.net(x)


def fingerprint(model):
    """A hash of everything an owner could notice."""
    rows = [(k, t.dtype, t.requires_grad, t.grad is None, t.detach().numpy().tobytes()) for k, t in
            [*model.named_parameters(), *model.named_buffers()]]  # fmt: skip
    modes = [(k, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for k, m in
             model.named_modules()]  # fmt: skip
    storage = [t.data_ptr() for t in model.state_dict().values()]
    return hashlib.sha256(repr((rows, modes, storage)).encode()).hexdigest()


def streams():
    """The state of every global generator, and of the switches that a library might flip."""
    out = io.BytesIO()
    pickle.dump((torch.random.get_rng_state().numpy().tobytes(), legacy(), random.getstate()), out)
    switches = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    return hashlib.sha256(out.getvalue()).hexdigest(), switches


@pytest.mark.parametrize("generic", [False, True])
def test_model_buffers_mode_and_random_state_are_left_alone(generic):
    model = Owned()
    init = state(model)
    for k, p in planted_span((12, 50, 1), n=3).evidence.init.items():
        init[f"net.{k}"] = p
    kept = copy.deepcopy(init)
    before = fingerprint(model), streams()
    evidence = Evidence.from_module(model, input=InputSpec((12,)), init=init)
    assert evidence.chain is not None
    stored = {k: p.clone() for k, p in evidence.final.items()}
    if generic:
        attack = dataclasses.replace(preset(2), restart=dataclasses.replace(preset().restart, starts=1))
        attack = dataclasses.replace(attack, solver=dataclasses.replace(attack.solver, iterations=1))
        attack.run(dataclasses.replace(evidence, chain=None), seed=3)
    else:
        preset().run(evidence, seed=3)
    assert (fingerprint(model), streams()) == before
    assert all(torch.equal(init[k], kept[k]) for k in kept)
    assert all(torch.equal(evidence.final[k], p) for k, p in stored.items())


def test_training_on_after_the_evidence_was_taken_does_not_change_it():
    model = Owned()
    evidence = Evidence.from_module(model, input=InputSpec((12,)), init=state(model))
    u = draw(4, 12)
    before = evidence.output(u)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(evidence.output(u), before)


# --- every preset ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_every_preset_is_built_and_runs_on_the_planted_case(name):
    activation = "cubic" if name == "algebra" else "relu"
    spec = InputSpec((12,), sample_norm=12**0.5)
    planted = planted_span((12, 50, 1), activation, n=3, node=0.0, spec=spec)
    attack = ATTACKS[name].preset(3)
    found = attack.run(planted.evidence, seed=0, budget=2.0 if isinstance(attack, Descent) else 20.0)
    assert attack.name == found.attack == name
    assert found.status in STATUS
    assert found.x.shape[1:] == (12,)
    assert found.x.isfinite().all()
    assert math.isfinite(found.loss)
    assert found.assumed


@pytest.mark.parametrize("name", ATTACKS)
def test_every_registry_line_is_filled_in(name):
    entry = ATTACKS[name]
    assert all((entry.paper, entry.needs, entry.models))
    assert entry.preset(None).samples is None
    assert entry.preset(5) == replace(entry.preset(None), samples=5)


# --- survey ------------------------------------------------------------------------------------------------


def test_the_survey_says_what_it_saw():
    ground = survey(five().evidence)
    assert ground.reduced
    assert ground.space.dim == 4
    notes = " ".join(ground.notes)
    assert all(words in notes for words in ("kappa = 1", "rank 5", "norms between", "between 0 and 1"))


@pytest.mark.parametrize("how", ["narrow", "linear", "Adam"])
def test_the_survey_does_not_claim_more_samples_than_there_are(how):
    """Eight samples of 30 features."""
    sizes = {"narrow": (30, 5, 1), "linear": (30, 1), "Adam": (30, 40, 1)}[how]
    options = {"optimizer": torch.optim.Adam, "lr": 3e-3} if how == "Adam" else {"lr": 0.01}
    notes = survey(train(sizes, 8, steps=50, **options).seen).notes
    assert not any("at least as many samples as input features" in note for note in notes)


def test_a_stated_norm_is_a_sphere():
    planted = planted_span((12, 50, 1), n=3, spec=InputSpec((12,), sample_norm=12**0.5))
    ground = survey(planted.evidence)
    assert ground.space.radius == (12**0.5, 12**0.5)
    found = preset().run(planted.evidence)
    torch.testing.assert_close(found.x.norm(dim=1), torch.full((len(found.x),), 12**0.5).double())
