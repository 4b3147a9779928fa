"""Polish by indirect inference: a simulated run tells what the feature equation errs by."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from exhume import match, presets
from exhume.equations.fold import fold, unfold
from exhume.equations.recipe import dynamics, unknowns
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import distance


@cache
def victim(seed=0):
    training = TrainConfig(max_steps=400)
    return make_victim(Case(data="digits", n=6, hidden=(300, 200), training=training, seed=seed))


@cache
def found(seed=0, polish=True, **recipe):
    """What the attack finds, with another recipe stated if asked for."""
    evidence = victim(seed).evidence
    evidence = replace(evidence, recipe=replace(evidence.recipe, **recipe))
    attack = replace(presets.exhume(6), read_off=None)
    return (attack if polish else replace(attack, polish=None)).run(evidence, seed=7)


def errors(seed, x):
    encode = victim(seed).evidence.input.encode
    return distance(encode(x).flatten(1), encode(victim(seed).truth.train).flatten(1))


def test_unfolding_is_the_inverse_of_folding():
    evidence = victim().evidence
    space = survey(evidence).space
    back = unfold(evidence, space, fold(evidence, space).final)
    for name, weight in evidence.at(1.0).items():
        torch.testing.assert_close(back[name], weight, rtol=1e-12, atol=1e-12)


def test_the_samples_are_placed_in_simulated_weights_where_they_are_in_the_true_ones():
    """Training on the samples themselves, in simulation, ends at the true weights, so T(z) = z_0 exactly."""
    evidence = victim().evidence
    ground = survey(evidence)
    single = presets.exhume(6).single(evidence, ground)
    z = ground.space.coordinates(evidence.input.encode(victim().truth.train).flatten(1))
    shape = evidence.input.shape
    polish = single.polish(presets.exhume(6).polish)
    bound = dynamics(evidence.recipe).bind(evidence, ground.space)
    u = ground.space.expand(z).view(-1, *shape)
    end = polish.coarse.simulate(bound, unknowns(evidence, z, u, evidence.recipe.lr))
    true = {k: p for k, p in fold(evidence, ground.space).final.items()}
    simulated, real = single.again(end.end, z), single.again(true, z)
    assert float((simulated - real).norm() / real.norm()) < 1e-6
    assert float((real - z).norm() / z.norm()) > 1e-4  # there is an error to correct


@pytest.mark.parametrize("seed", range(3))
def test_errors_fall_to_a_third(seed):
    before, after = errors(seed, found(seed, polish=False).x), errors(seed, found(seed).x)
    assert float(before.max()) < 0.05
    assert float(after.median()) < float(before.median()) / 3
    assert float(after.max()) < float(before.max())
    assert any("candidates were polished" in note for note in found(seed).assumed)
    assert match(found(seed), victim(seed).truth).control.count == 0


def test_stated_errors_fall_with_the_errors():
    before, after = found(polish=False).certificate, found().certificate
    assert after.recovered == 6
    assert float(after.error_estimate.max()) < float(before.error_estimate.max()) / 2


@pytest.mark.parametrize("wrong", [{"loss": "logistic"}, {"steps": 20}])
def test_a_recipe_that_contradicts_the_weights_changes_nothing(wrong):
    said = found(**wrong)
    assert any("contradict" in note or "left as they were" in note for note in said.assumed)
    torch.testing.assert_close(said.x, found(polish=False).x)


def test_what_gains_nothing_in_the_weights_is_no_evidence():
    """Mini-batches in random order, which the simulation takes for full batches: either the gap falls, or z stays."""
    training = TrainConfig(max_steps=400, batch_size=2, shuffle=True)
    case = Case(data="digits", n=6, hidden=(300, 200), training=training, seed=5)
    evidence = make_victim(case).evidence
    attack = presets.exhume(6)
    before = replace(attack, polish=None).run(evidence, seed=7)
    after = attack.run(evidence, seed=7)
    gain = float((before.certificate.error_estimate / after.certificate.error_estimate).max())
    moved = not torch.equal(before.x, after.x)
    assert gain < 4
    assert moved == (gain > 1)


def test_frozen_layers_are_not_simulated():
    evidence = victim().evidence
    final = {**evidence.final, "1.bias": evidence.init["1.bias"]}
    said = presets.exhume(6).run(replace(evidence, final=final), seed=7)
    assert any("1.bias did not move" in note for note in said.assumed)
