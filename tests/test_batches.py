"""Descents on a few candidates at a time: the sum that is kept, the gradient that is taken, the optimiser."""

import pytest
import torch

from exhume import presets
from exhume.batches import REBUILT, Batched
from exhume.equations.span import Span
from exhume.joint import Joint
from exhume.solvers.lazy_adam import LazyAdam
from exhume.spaces import full
from exhume.terms import Box
from planted import NO_DECAY, distance, draw, generator, planted_span, random_evidence

UNIT = 0.3


def problem(terms=()):
    equation = Span((0.0, 1.0)).bind(random_evidence((5, 12, 7, 2), "softplus"), full(5), NO_DECAY)
    return Joint(equation, full(5), UNIT, terms)


def rows(m=6):
    return torch.cat([draw(m, 5, seed=1), draw(m, 4, seed=2)], 1)


def test_value_is_that_of_all_and_the_gradient_that_of_a_batch():
    box = Box(-0.5 * torch.ones(5).double(), 0.7 * torch.ones(5).double(), 2.0)
    whole, row = problem((box,)), rows()
    found = Batched(whole, 2, generator(3)).at(row)
    expected = whole.at(row)
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    assert found.misfit == pytest.approx(expected.misfit, rel=1e-10)
    moving = (found.slope != 0).any(1)
    assert int(moving.sum()) == 2
    torch.testing.assert_close(found.slope[moving], expected.slope[moving])


def test_the_running_sum_is_that_of_the_rows_as_they_are_now():
    """Whatever moved in between, and also when it is added up anew."""
    whole, row = problem(), rows()
    batched = Batched(whole, 2, generator(4))
    for step in range(5):
        batched._count = REBUILT if step == 3 else batched._count
        row = row.index_add(0, torch.tensor([step]), 0.1 * draw(1, 9, seed=step))
        assert batched.at(row).loss == pytest.approx(whole.at(row).loss, rel=1e-9)


def test_every_candidate_has_its_turn():
    batched, row = Batched(problem(), 2, generator(5)), rows()
    turns = torch.stack([(batched.at(row).slope != 0).any(1) for _ in range(30)])
    assert bool(turns.any(0).all())
    assert bool((turns.sum(1) == 2).all())


def test_lazy_adam_is_adam_where_there_are_gradients_and_rests_where_there_are_none():
    start, gradients = draw(4, 3), [draw(4, 3, seed=s) for s in range(1, 9)]
    lazy, plain = start.clone(), start[:2].clone()
    optimizer, twin = LazyAdam(lazy, 0.02), torch.optim.Adam([plain], 0.02)
    for step, gradient in enumerate(gradients):
        some = gradient.clone()
        some[2:] = 0
        if step % 2:  # the first two rows rest as well: their next step must be as if nothing had been
            optimizer.zero_grad()
            lazy.grad = torch.zeros_like(lazy)
            optimizer.step()
        lazy.grad, plain.grad = some, gradient[:2].clone()
        optimizer.step()
        twin.step()
    torch.testing.assert_close(lazy[:2], plain)
    assert torch.equal(lazy[2:], start[2:])


def test_a_batched_descent_finds_planted_samples():
    made = planted_span((6, 60, 1), "tanh", n=3, node=1.0)
    attack = presets.loo(3, both=False, steps=1500, batch=2)
    found = attack.run(made.evidence, seed=1)
    assert found.trace[-1] < 0.01 * found.trace[0]
    assert int((distance(found.x.double(), made.x) < 0.3).sum()) >= 2
    assert any("2 candidates moved at each step" in note for note in found.assumed)
