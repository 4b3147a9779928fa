"""What single neurons give away is reported as it is, and what they do not is not."""

import pytest
import torch

from exhume import match, presets
from exhume.equations.part import split
from exhume.equations.span import Span
from exhume.moves.readings import ReadOff
from exhume.spaces import full
from exhume.survey import survey
from exhume.victims.data import load
from exhume.victims.data import split as deal
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, train_victim
from planted import NO_DECAY, draw, planted_span

SIZES = (5, 80, 1)


@pytest.fixture(scope="module")
def planted():
    return planted_span(SIZES, n=3, activation="tanh", size=0.5)


def paired(planted, exclusive, z):
    parts = split(planted.evidence, "all", 0.2, 0)
    fit, held = (Span(nodes=(0.0,)).bind(planted.evidence, full(SIZES[0]), NO_DECAY, part=p) for p in parts)
    return ReadOff().run(full(SIZES[0]), exclusive, fit, held, z)


def test_a_sample_that_is_read_off_replaces_the_candidate_near_it(planted):
    bent = planted.x + 0.05 * draw(3, SIZES[0], seed=9)
    read = paired(planted, planted.x[[2, 0]], bent)
    torch.testing.assert_close(read.place(bent)[[0, 2]], planted.x[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(read.place(bent)[1], bent[1], rtol=0, atol=0)


def test_a_mixture_that_neurons_share_replaces_no_candidate(planted):
    mixture = 0.9 * planted.x[:1] + 0.1 * planted.x[1:2]
    near = (mixture - planted.x[0]).norm() / mixture.norm()
    assert near < 0.3
    assert len(paired(planted, mixture, planted.x).index) == 0


def test_a_reading_spoilt_by_rounding_replaces_no_better_candidate(planted):
    spoilt = planted.x * (1 + 1e-4 * draw(*planted.x.shape, seed=3))
    assert len(paired(planted, spoilt, planted.x).index) == 0


def test_a_reading_far_from_every_candidate_replaces_none(planted):
    assert len(paired(planted, -planted.x, planted.x).index) == 0
    assert len(paired(planted, planted.x, planted.x[:0]).index) == 0


def test_an_attack_far_past_convergence_reports_readings_to_rounding():
    """There the misfit that the equation has of its own moves every candidate by some percent."""
    training = TrainConfig(lr=0.5, max_steps=5000, tolerance=1e-9, loss="logistic")
    victim = train_victim(
        Case(data="digits", n=12, hidden=(300,), training=training), deal(load("digits"), 12, 0)
    )
    first = survey(victim.evidence).first
    assert first is not None and len(first.exclusive) == 4
    found = presets.exhume(None).run(victim.evidence, seed=1000, budget=20.0)
    u, rows = (victim.evidence.input.encode(x).flatten(1) for x in (found.x, victim.truth.train))
    apart = torch.cdist(rows, u) / rows.norm(dim=1, keepdim=True)
    read = apart.amin(1) < 1e-9
    assert int(read.sum()) == 4
    assert float(apart.amin(1)[~read].median()) > 0.02
    assert any("alone activated show" in said for said in found.assumed)
    assert bool(found.certificate.certified[apart[read].argmin(1)].all())
    assert match(found, victim.truth).control.count == 0
