"""Long runs simulated with larger steps: near the exact run, and honest about how near."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from exhume.equations.coarse import Coarse, curvature
from exhume.equations.recipe import dynamics, unknowns
from exhume.equations.risk import flatten
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim

SLOW = {
    "plain": {"lr": 0.002},
    "momentum": {"lr": 0.0004, "momentum": 0.8},
    "decay": {"lr": 0.002, "weight_decay": 0.02},
    "decay and momentum": {"lr": 0.0005, "momentum": 0.8, "weight_decay": 0.05},
    "not converged": {"lr": 1e-5, "momentum": 0.9},
    "logistic": {"lr": 0.005, "loss": "logistic"},
}


@cache
def run(how, activation="relu", steps=4000):
    """The run of a victim of six digits on its true samples, and its exact end."""
    training = TrainConfig(max_steps=steps, tolerance=0.0, **SLOW[how])
    victim = make_victim(Case(data="digits", n=6, hidden=(100,), activation=activation, training=training))
    evidence, space = victim.evidence, survey(victim.evidence).space
    u = evidence.input.encode(victim.truth.train)
    bound = dynamics(evidence.recipe).bind(evidence, space)
    at = unknowns(evidence, space.coordinates(u.flatten(1)), u, SLOW[how]["lr"])
    return bound, at, bound.simulate(at)


def off(bound, found, exact):
    """Distance of two ends, relative to the true change."""
    a, b = (flatten(end, bound.shapes) for end in (found.end, exact.end))
    return float((a - b).norm() / bound.target().norm())


@pytest.mark.parametrize(
    ("how", "activation"), [*((how, "tanh") for how in SLOW), ("plain", "relu"), ("momentum", "relu")]
)
def test_the_end_of_a_long_run_is_met_within_the_stated_error(how, activation):
    """Four thousand steps: error and estimate about 1% of the change, error at most five times the estimate.

    The estimate counts with gates that flip; for a smooth net it may be up to eight times too large.
    """
    bound, at, exact = run(how, activation)
    found = Coarse(tolerance=0.01).simulate(bound, at)
    error = off(bound, found, exact)
    assert found.factor > 4
    assert found.steps < 0.5 * bound.steps
    assert not found.diverged
    assert found.error < 0.01
    assert error < (0.02 if activation == "relu" else 0.01)
    assert error < 5 * found.error
    assert found.error < (5 if activation == "relu" else 8) * error


def test_few_steps_are_simulated_as_they_are():
    bound, at, exact = run("plain")
    for careful in (Coarse(limit=4000), Coarse(tolerance=1e-9)):
        found = careful.simulate(bound, at)
        assert (found.factor, found.error) == (1.0, 0.0)
        assert off(bound, found, exact) == 0.0
    batches = replace(bound, batch_size=2, steps=200)
    assert off(batches, Coarse(limit=10).simulate(batches, at), batches.simulate(at)) == 0.0


def test_steps_too_large_to_be_stable_are_halved():
    """The first runs, at ten times the limit of stability, overflow; the answer is as good as without them."""
    bound, at, exact = run("plain", "tanh")
    n = 4000 * 0.002 * curvature(bound, at) / 20
    bold = Coarse(stiffness=20.0, tolerance=0.01)
    found = bold.simulate(bound, at)
    assert found.factor < 4000 / n / 8
    assert off(bound, found, exact) < 0.01
    assert found.error < 0.01


def test_a_run_that_diverges_is_said_to():
    bound, at, _ = run("plain")
    found = Coarse().simulate(bound, replace(at, lr=torch.tensor(100.0, dtype=torch.float64)))
    assert found.diverged
    assert all(bool(torch.isfinite(p).all()) for p in found.end.values())


def test_the_curvature_is_the_largest_eigenvalue_at_either_end():
    """By a Hessian written down column by column."""
    bound, at, _ = run("plain", "tanh")
    v, largest = bound.net.embed(at.z), 0.0
    for weights in (bound.net.init, bound.net.final):
        theta = flatten(weights, bound.shapes)
        axes = torch.eye(len(theta), dtype=theta.dtype)
        still = torch.zeros(len(theta), *v.shape, dtype=theta.dtype)
        hessian = bound.risk.push(theta, v, at.label, axes, still, None)
        largest = max(largest, float(torch.linalg.eigvalsh(hessian).abs().max()))
    assert curvature(bound, at) == pytest.approx(largest, rel=0.02)
