"""Samples as corners of the box in the row space of final weights, and the attack built on them."""

from dataclasses import replace

import pytest
import torch

from exhume import audit, match, presets
from exhume.descent import Descent
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.kkt import margin, row_space
from exhume.metrics import relative_l2
from exhume.moves.corners import Corners, independent
from exhume.planted import positive_control
from exhume.spaces import subspace
from exhume.victims.nets import mlp
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import draw, generator

D, N = 60, 6
BOX = torch.zeros(D).double(), torch.ones(D).double()


def images(n=N, d=D, seed=0):
    """Rows in [0, 1], about half of whose features are 0 and a tenth 1."""
    return (0.8 * draw(n, d, seed=seed)).clamp(0, 1)


def hull(x):
    """The affine hull of rows."""
    return subspace(x[1:] - x[0], x[0])


def search(space, seed=1, corners=Corners()):  # noqa: B008
    return corners.run(space, *BOX, generator(seed), lambda done: False)


@pytest.mark.parametrize("affine", [True, False])
def test_samples_are_the_most_active_corners(affine):
    """In their affine hull, and in the linear span once a public mean is subtracted."""
    x, mean = images(), 0.0 if affine else images(50, seed=9).mean(0)
    space = hull(x) if affine else subspace(x - mean)
    found = Corners().run(space, BOX[0] - mean, BOX[1] - mean, generator(1), lambda done: False)
    kept = independent(found.z, 0.01)
    best = space.expand(found.z[kept])[:N] + mean
    assert float(torch.cdist(x, best).amin(1).max()) < 1e-9
    assert int(found.active[kept][:N].min()) > 3 * space.dim


def test_a_space_without_samples_has_no_active_corners():
    """The null: in a random space of the same dimension a corner has as many active bounds as dimensions."""
    space = subspace(draw(N - 1, D, seed=5), images().mean(0))
    found = Corners().run(space, BOX[0] - 1, BOX[1] + 1, generator(1), lambda done: False)
    assert len(found.z) > N and int(found.active.max()) <= N
    same = Corners().run(subspace(draw(N - 1, D, seed=5)), *BOX, generator(1), lambda done: False)
    assert float(same.z.abs().max()) < 1e-2  # such a space meets the box at zero alone


def test_a_row_space_known_to_some_precision_is_enough():
    x = images()
    space = subspace(hull(x).basis + 1e-6 * draw(N - 1, D, seed=3), x[0])
    found = search(space)
    best = space.expand(found.z[independent(found.z, 0.01)])[:N]
    assert float(torch.cdist(x, best).amin(1).max()) < 1e-3


def test_dependent_corners_come_after_those_they_depend_on():
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    assert independent(z, 1e-6).tolist() == [0, 1, 4]


def test_a_search_can_be_ended():
    found = Corners().run(hull(images()), *BOX, generator(1), lambda done: done == 2)
    assert len(found.z) == 2


# --- the attack --------------------------------------------------------------------------------------------


def planted(x, decayed=True, seed=0, spec=None, sizes=1.0):
    """A net of random weights but for the first layer, sum_i delta_i (x_i, 1), the bias of which may not decay."""
    model = mlp((D, 40, 1), seed=seed)
    delta = sizes * draw(len(x), 40, seed=seed + 1)
    delta = delta if decayed else delta - delta.mean(0)
    with torch.no_grad():
        model[1].weight.copy_(delta.T @ x)
        model[1].bias.copy_(delta.sum(0) if decayed else draw(40, seed=seed + 2))
    spec = InputSpec((D,), low=0.0, high=1.0) if spec is None else spec
    recipe = Recipe(labels="real", decay_share=None if decayed else (("*.bias", 0.0),))
    return Evidence.from_module(model, input=spec, recipe=recipe)


def test_the_row_space_is_the_hull_of_the_samples_where_the_bias_decays():
    x = images()
    found = row_space(planted(x), None)
    assert (found.rank, found.space.dim, found.whole) == (N, N - 1, True)
    z = found.space.coordinates(x - found.space.origin)
    torch.testing.assert_close(found.space.expand(z), x, rtol=0, atol=1e-9)
    other = row_space(planted(x, decayed=False), None)
    assert (other.rank, other.whole, other.space.origin) == (N - 1, False, None)
    assert row_space(Evidence.from_module(mlp((D, 40, 1)), input=InputSpec((D,))), None) is None


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_few_samples_are_found_too(n):
    """A point, a segment and a triangle have corners as well."""
    x = images(n)
    found = presets.kkt().run(planted(x), seed=3)
    assert found.rank == n
    assert float(relative_l2(found.x, x).amin(1).max()) < 1e-8


def test_weak_samples_after_a_large_drop_count():
    """Two samples of a million times the weight of the others do not make a rank of two."""
    x = images()
    sizes = torch.tensor([1.0, 1.0, *[1e-6] * (N - 2)]).double()[:, None]
    evidence = planted(x, sizes=sizes)
    assert row_space(evidence, None).rank == N
    found = presets.kkt().run(evidence, seed=3)
    assert float(relative_l2(found.x, x).amin(1).max()) < 1e-4


def test_a_known_number_of_samples_bounds_the_rank():
    assert row_space(planted(images()), N - 2) is None  # there is no drop among so few
    assert row_space(planted(images()), 2 * N).rank == N


def test_leftovers_of_the_initialisation_are_no_rank():
    model = mlp((D, 40, 1))
    evidence, x = planted(images()), images()
    kept = {k: p + 1e-7 * model.state_dict()[k] for k, p in evidence.final.items()}
    found = row_space(replace(evidence, final=kept), None)
    assert found.rank == N and 1e4 < found.gap < 1e9
    again = presets.kkt().run(replace(evidence, final=kept))
    assert float(relative_l2(again.x, x).amin(1).max()) < 1e-4


def test_samples_are_found_without_initial_weights_whatever_the_range_of_the_inputs():
    x = images()
    mean, scale = x.mean(0), torch.tensor(-0.5).double()
    spec = InputSpec((D,), low=0.0, high=1.0, mean=mean, scale=scale)
    found = presets.kkt().run(planted(spec.encode(x), spec=spec), seed=3)
    assert len(found.x) == found.rank == N
    assert float(relative_l2(found.x, x).amin(1).max()) < 1e-8
    assert any("active bounds" in note for note in found.assumed)


def test_without_a_range_or_a_rank_a_descent_is_made():
    attack = presets.kkt(N, steps=5)
    bare = planted(images(), spec=InputSpec((D,)))
    assert any("no corners" in note for note in attack.run(bare).assumed)
    flat = Evidence.from_module(mlp((D, 40, 1)), input=InputSpec((D,), low=0.0, high=1.0))
    found = attack.run(flat)
    assert found.attack == "kkt" and len(found.x) == 2 * N and found.certificate is None
    module = attack.run(replace(flat, chain=None))
    torch.testing.assert_close(module.x, found.x, rtol=1e-6, atol=1e-8)
    with pytest.raises(MissingEvidence, match="number of samples"):
        presets.kkt().run(flat)
    assert isinstance(attack.descent, Descent) and attack.descent.forgotten


def test_margins():
    assert margin(torch.tensor([[-2.0], [3.0]])).tolist() == [2.0, 3.0]
    assert margin(torch.tensor([[1.0, 5.0, 3.0], [0.0, -1.0, -4.0]])).tolist() == [2.0, 1.0]


DECAY = TrainConfig(lr=0.05, momentum=0.9, weight_decay=0.01, max_steps=6000, tolerance=0.0)


@pytest.mark.parametrize("loss", ["mse", "logistic", "cross-entropy"])
def test_digits_are_recovered_from_decayed_weights_and_certified(loss):
    n = 10 if loss == "cross-entropy" else 8
    training = replace(DECAY, loss=loss)
    victim = make_victim(Case(data="digits", n=n, hidden=(60,), bias="first", training=training, seed=1))
    found = presets.kkt(n).run(victim.evidence, seed=1001)
    matches = match(found, victim.truth)
    assert matches.train.close >= n - 2 and matches.control.count == 0
    error = relative_l2(found.x, victim.truth.train, victim.truth.public_mean).amin(0)
    assert found.certificate.recovered >= n / 2
    assert bool((error[found.certificate.certified] < 0.3).all())
    bare = replace(victim.evidence, init=None)
    assert torch.equal(presets.kkt(n).run(bare, seed=1001).x, found.x)


def test_other_weights_give_no_certificate():
    """The null: the row space of the samples, but each unit's last weight belongs to another."""
    victim = make_victim(Case(data="digits", n=8, hidden=(60,), bias="first", training=DECAY, seed=1))
    order = torch.randperm(60, generator=generator(3))
    final = dict(victim.evidence.final)
    final["3.weight"] = final["3.weight"][:, order]
    found = presets.kkt(8).run(replace(victim.evidence, final=final), seed=1001)
    assert found.certificate.recovered == 0


def test_an_audit_without_initial_weights_runs_this_attack_and_finds_the_leak():
    victim = make_victim(Case(data="digits", n=8, hidden=(60,), bias="first", training=DECAY, seed=1))
    bare = replace(victim.evidence, init=None)
    assert (audit.own(bare), audit.own(victim.evidence)) == (("kkt",), ("exhume",))
    outcome = audit.run(bare, audit.Plan(names=audit.own(bare), samples=8, budget=60.0), victim.truth)
    assert outcome.verdict.outcome == "leak"
    assert outcome.matches[0].control.count == 0


def test_a_positive_control_whose_attack_breaks_off_has_failed_and_says_so(monkeypatch):
    victim = make_victim(Case(data="digits", n=8, hidden=(60,), training=TrainConfig(max_steps=50), seed=1))

    def broken(self, *_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(presets.kkt()), "run", broken)
    control = positive_control(victim.evidence, victim.truth, presets.kkt(), seed=2)
    assert not control.succeeded and "broke off: no memory" in control.sentence


def test_a_planted_victim_without_initial_weights_is_recovered():
    victim = make_victim(Case(data="digits", n=8, hidden=(60,), bias="first", training=DECAY, seed=1))
    bare = replace(victim.evidence, init=None)
    control = positive_control(bare, victim.truth, presets.kkt(), seed=2, budget=60.0)
    assert control.succeeded and "on a planted victim" in control.sentence
