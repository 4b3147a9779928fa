"""The certificate: each of its numbers against a slow twin, and what speaks against a candidate."""

from dataclasses import replace

import pytest
import torch

from exhume.certificate import (
    UNKNOWN,
    Certificate,
    certify,
    confused,
    copies,
    features,
    held_out_rise,
    implausible,
    nearest,
    spread,
)
from exhume.equations.part import split
from exhume.equations.span import Span
from exhume.evidence import Recipe
from exhume.objective import Objective
from exhume.spaces import full
from planted import NO_DECAY, draw, planted_span

SIZES = (5, 80, 1)


@pytest.fixture(scope="module")
def planted():
    return planted_span(SIZES, n=3, activation="tanh", size=0.5)


def bound(planted, part=None):
    return Span(nodes=(0.0,)).bind(planted.evidence, full(SIZES[0]), NO_DECAY, part=part)


def halves(planted, seed=0):
    return [bound(planted, part) for part in split(planted.evidence, "all", 0.2, seed)]


def rows(equation, z):
    """Phi as a matrix, a row for each candidate."""
    unit = torch.eye(len(z), dtype=z.dtype)
    return torch.stack([equation.contribution(z, unit[i][:, None]) for i in range(len(z))])


def test_the_rise_is_that_of_solving_again_without_the_candidate(planted):
    fit, held = halves(planted)
    z = planted.x + 0.05 * draw(3, SIZES[0], seed=9)

    def missed(keep):
        c = torch.linalg.lstsq(rows(fit, z)[keep].T, fit.target()[:, None]).solution[:, 0]
        return float((held.target() - c @ rows(held, z)[keep]).square().sum())

    base = missed([0, 1, 2])
    expected = [missed([j for j in range(3) if j != i]) / base - 1 for i in range(3)]
    rise, left = held_out_rise(fit, held, z)
    torch.testing.assert_close(rise, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-8)
    assert left == pytest.approx(base / held.energy, rel=1e-6)


def test_the_spread_is_that_of_solutions_under_noise(planted):
    """Noise of variance s^2 on every equation moves the solution by s^2 times the inverse of J'(I - P)J."""
    objective = Objective(bound(planted), full(SIZES[0]))
    point = objective.at(planted.x)
    count, unknowns = objective.equation.equations, point.z.numel() + point.coef.numel()
    held_out = 1e-6
    sigma = (held_out * objective.equation.energy / (count - unknowns)) ** 0.5
    contribution = torch.func.jacrev(lambda z: objective.equation.contribution(z, point.coef))(planted.x)
    jacobian = contribution.reshape(count, -1)
    phi = rows(objective.equation, planted.x).T
    jacobian = jacobian - phi @ torch.linalg.lstsq(phi, jacobian).solution
    covariance = sigma**2 * torch.linalg.inv(jacobian.T @ jacobian)
    expected = covariance.diagonal().view(planted.x.shape).sum(1).sqrt()
    torch.testing.assert_close(spread(objective, point, held_out), expected, rtol=1e-4, atol=0)


def test_nothing_is_said_of_the_spread_where_the_matrix_would_be_too_large(planted):
    objective = Objective(bound(planted), full(SIZES[0]))
    assert bool(spread(objective, objective.at(planted.x), 0.1, largest=10).isnan().all())


def test_the_nearest_witness_is_measured_relative_to_the_candidate():
    u, others = draw(4, 6, seed=1), draw(7, 6, seed=2)
    expected = [min(float((a - b).norm() / a.norm()) for b in others) for a in u]
    assert nearest(u, others).tolist() == pytest.approx(expected)
    assert bool(nearest(u, others[:0]).isnan().all())


def test_of_nearly_equal_candidates_the_most_probable_stays():
    u = draw(3, 6, seed=3)
    twice = torch.cat([u, u[:1] * 1.01])
    assert copies(twice, torch.tensor([0.5, 0.9, 0.9, 0.8])).tolist() == [True, False, False, False]


def test_what_was_not_computed_counts_as_badly_as_a_match_may_be():
    one, unknown = torch.ones(1), torch.tensor([torch.nan])
    same = features(one, torch.tensor([UNKNOWN]), torch.tensor([UNKNOWN]))
    assert torch.equal(features(one, unknown, unknown), same)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(loss="mse", labels="pm1"), True),
        (Recipe(loss="mse", labels="real"), False),
        (Recipe(loss="logistic", labels="pm1"), False),
        (Recipe(), False),
    ],
)
def test_outputs_far_beyond_the_labels_are_implausible_only_after_squared_loss(planted, recipe, expected):
    evidence = replace(planted.evidence, recipe=recipe)
    u = torch.randn(200, SIZES[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    beyond = evidence.output(u).abs()[:, 0] > 1.5
    assert bool(beyond.any()) and not bool(beyond.all())
    assert torch.equal(implausible(evidence, u), beyond & expected)


def judged(planted, z, others):
    fit, held = halves(planted)
    objective = Objective(bound(planted), full(SIZES[0]))
    return certify(planted.evidence, fit, held, z, objective, objective.at(z), others)


def test_planted_samples_found_twice_are_certified_and_random_ones_are_not(planted):
    noisy = planted.x + 1e-3 * draw(3, SIZES[0], seed=4)
    found = judged(planted, noisy, planted.x)
    assert found.certified.tolist() == [True] * 3
    assert float(found.probability.min()) > 0.9
    random = draw(3, SIZES[0], seed=5)
    assert judged(planted, random, draw(3, SIZES[0], seed=6)).recovered == 0


def test_the_null_is_what_random_points_leave(planted):
    found = judged(planted, planted.x + 1e-3 * draw(3, SIZES[0], seed=4), planted.x)
    assert found.held_out < 0.01 < 0.1 < found.chance
    assert "random points" in found.notes[-1]


def test_nothing_is_certified_where_held_out_equations_stay_unexplained(planted):
    """Two random candidates that an independent search agrees on to the last digit."""
    random = draw(2, SIZES[0], seed=7)
    found = judged(planted, random, random)
    assert found.held_out > 0.3
    assert found.recovered == 0


def test_polish_takes_the_certificate_from_what_it_moved_elsewhere_and_trusts_estimates_little_more():
    ones = torch.ones(2)
    before = Certificate(ones, ones, ones, ones, ones, ones.bool(), 0.1, 0.9, 0.1, ())
    after = before.polished(1e-6, torch.tensor([0.01, 0.5]))
    assert after.certified.tolist() == [True, False]
    assert after.error_estimate.tolist() == pytest.approx([0.1, 0.1])


def test_agreement_counts_only_where_candidates_are_apart():
    """Planted: three candidates in a crowd, a fourth alone; the other search came equally near to each."""
    crowd = torch.tensor([[1.0, 0.0], [1.0, 0.15], [0.85, 0.05], [-1.0, 0.0]], dtype=torch.float64)
    near = torch.full((4,), 0.1, dtype=torch.float64)
    assert confused(crowd, near).tolist() == [True, True, True, False]
    assert not confused(crowd, 0.2 * near).any()
    assert not confused(crowd, torch.full_like(near, torch.nan)).any()
    copies = torch.cat([crowd[3:], crowd[3:] + 0.01])
    assert not confused(copies, near[:2]).any()  # a copy is no other candidate
