"""The column equation where signals do not move in training, so that it holds exactly at the samples."""

import dataclasses

import pytest
import torch

from exhume.change import decay_factor, first_layer
from exhume.equations.column import Column
from exhume.errors import MissingEvidence
from planted import draw, planted_span, sample_gradient, train

N, D = 4, 12
RIDGE = 1e-9  # the generalised eigenproblem has a ridge of 1e-10, so a zero score is some 1e-10,
NEARLY_PARALLEL = 1e-8  # and some 1e-9 where the signals of nodes and outputs hardly differ
ACCEPT = 0.4  # relative score that a search takes for a sample


def still(depth=2, activation="relu", n=N):
    """A net of which only the first layer moved, by so little that no gate changed."""
    sizes = {2: (D, 40, 1), 3: (D, 40, 20, 1)}[depth]
    later = tuple(f"{2 * l}.{kind}" for l in range(1, depth) for kind in ("weight", "bias"))
    gates = []

    def observe(model, x, y):
        h, here = x, []
        for layer in model:
            h = layer(h)
            here.append(h > 0)
        gates.append(here[:-1])

    run = train(sizes, n, steps=10, lr=2e-5, frozen=later, observe=observe, activation=activation)
    if activation == "relu":
        assert all(torch.equal(a, b) for a, b in zip(gates[0], gates[-1], strict=True))
    return run.seen, run.x


def bent(activation="tanh", outputs=1):
    """A net with one gradient step at theta_0, so that node 0 holds the true signals."""
    planted = planted_span((D, 40, outputs), activation, n=N, node=0.0)
    return planted.evidence, planted.x


def bind(evidence, nodes=(0.0, 1.0), smoothing=None, equation=Column):
    first = first_layer(evidence, decay_factor(evidence))
    assert first.rank == N
    return equation(nodes).bind(evidence, first, first.space, smoothing), first.space


def probe_of(space, x, m=64):
    return space.random(m, float(x.norm(dim=1).mean()), torch.Generator().manual_seed(0))


def written_down(evidence, bound, nodes, u):
    """The score of one input by forming its signals [k, w] one by one: gradients with respect to the first bias."""
    signals = torch.stack(
        [sample_gradient(evidence, v, u, c)["0.bias"] for v in nodes for c in range(evidence.outputs)]
    )
    total, inside = signals @ signals.T, signals @ bound.columns
    missed = total - inside @ inside.T
    return float(torch.linalg.eigvals(torch.linalg.solve(total, missed).detach()).real.min())


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("nodes", [(0.0,), (1.0,), (0.0, 1.0)])
def test_the_score_of_a_sample_is_zero_and_of_other_points_is_not(depth, nodes):
    evidence, x = still(depth)
    bound, space = bind(evidence, nodes)
    z = space.coordinates(x)
    assert float(bound.score(z).max()) < RIDGE
    elsewhere = bound.score(probe_of(space, x, 500))
    assert (
        float((elsewhere < 1e-6).double().mean()) < 0.02
    )  # a point with all the gates of a sample is as good
    assert float(elsewhere.median()) > 0.1
    assert float(elsewhere.max()) <= 1 + 1e-9


@pytest.mark.parametrize("activation", ["tanh", "softplus"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_score_of_a_sample_is_zero_with_several_outputs_and_bent_activations(activation, outputs):
    """Mixing in node 1 or more outputs cannot hurt: the best mixture is taken."""
    evidence, x = bent(activation, outputs)
    for nodes in ((0.0,), (0.0, 1.0)):
        bound, space = bind(evidence, nodes)
        assert float(bound.score(space.coordinates(x)).max()) < NEARLY_PARALLEL
        assert float(bound.score(draw(50, space.dim)).median()) > 1e-4


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_score_equals_the_one_written_down(outputs):
    evidence, x = bent("tanh", outputs)
    bound, space = bind(evidence, nodes := (0.0, 1.0))
    z = space.coordinates(x) + 0.5 * draw(N, space.dim, seed=5)
    expected = [written_down(evidence, bound, nodes, u) for u in space.expand(z)]
    assert bound.score(z).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_the_score_grows_with_the_distance_from_a_sample():
    evidence, x = bent("tanh")
    bound, space = bind(evidence)
    z, step = space.coordinates(x), draw(N, space.dim, seed=3)
    scores = torch.stack([bound.score(z + size * step) for size in (0.0, 0.05, 0.2, 0.8)])
    assert bool((scores[1:] > 2 * scores[:-1]).all())


def test_a_sharper_smoothing_brings_the_score_of_a_sample_nearer_to_zero():
    evidence, x = still()
    scores = []
    for sharpness in (5.0, 30.0, 300.0):
        bound, space = bind(evidence, smoothing=sharpness)
        scores.append(float(bound.score(space.coordinates(x)).max()))
    assert scores[0] > 3 * scores[1] > 9 * scores[2]


SMOOTH = [("tanh", None), ("softplus", None), ("relu", 3.0), ("relu", 30.0)]


@pytest.mark.parametrize(("activation", "smoothing"), SMOOTH)
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("nodes", [(1.0,), (0.0, 1.0)])
@pytest.mark.parametrize("found", [0, 2])
def test_the_gradient_equals_autograd(activation, smoothing, outputs, nodes, found):
    """Of the score itself, best mixture and projection included."""
    evidence, x = bent(activation, outputs)
    bound, space = bind(evidence, nodes, smoothing)
    bound = bound.without(space.coordinates(x[:found]))
    leaf = (space.coordinates(x[1:]) + 0.3 * draw(3, space.dim, seed=6)).requires_grad_()
    value = bound.score(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    here = bound.expand(leaf.detach())
    torch.testing.assert_close(here.value, value.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(here.gradient, gradient, rtol=1e-5, atol=1e-7)


def test_the_curvature_is_that_of_the_residual_it_squares():
    """2 J'J with J the derivative of P_perp F'e / |F'e| at the best e, by autograd; positive semi-definite."""
    evidence, x = bent("tanh", 2)
    bound, space = bind(evidence)
    z = space.coordinates(x) + 0.3 * draw(N, space.dim, seed=6)
    here = bound.expand(z)
    _, mixture = bound.best_mixture(z)

    def residual(one, e):
        signal = e @ bound.vectors.at(one[None])[0]
        signal = signal / signal.norm()
        return signal - bound.columns @ (bound.columns.T @ signal)

    for i in range(N):
        jacobian = torch.autograd.functional.jacobian(lambda one, e=mixture[i]: residual(one, e), z[i])
        torch.testing.assert_close(here.curvature[i], 2 * jacobian.T @ jacobian, rtol=1e-8, atol=1e-8)
        assert float(torch.linalg.eigvalsh(here.curvature[i])[0]) > -1e-9


@pytest.mark.parametrize("depth", [2, 3])
def test_a_found_sample_scores_high_and_leaves_the_others_at_zero(depth):
    evidence, x = still(depth)
    bound, space = bind(evidence)
    z = space.coordinates(x)
    rest = bound.without(z[:2])
    assert (bound.missing, rest.missing) == (N, N - 2)
    scores = rest.score(z)
    assert float(scores[:2].min()) > 0.5  # of a signal that is all rounding
    assert float(scores[2:].max()) < RIDGE
    both = bound.without(z[:1]).without(z[1:2])  # one after the other is the same
    torch.testing.assert_close(both.score(z[2:]), scores[2:], rtol=1e-6, atol=1e-9)
    assert bound.without(z[:0]) is bound


def test_nothing_is_missing_when_all_are_found():
    evidence, x = still()
    bound, space = bind(evidence)
    rest = bound.without(space.coordinates(x))
    assert rest.missing == 0
    assert float(rest.score(draw(10, space.dim)).min()) > 0.99


def test_a_stranger_uses_up_no_direction():
    """One whose signal is more than 30 degrees from the column space: it scores above sin^2 30 = 1/4."""
    evidence, x = still()
    bound, space = bind(evidence)
    probe = probe_of(space, x, 20)
    strangers = probe[bound.score(probe) > 0.26]
    assert len(strangers) > 3
    assert all(bound.without(one[None]).missing == N for one in strangers)


def test_a_duplicate_is_found_once():
    evidence, x = still()
    bound, space = bind(evidence)
    z = space.coordinates(x)
    assert bound.without(torch.cat([z[:1], z[:1], z[:1] + 1e-9])).missing == N - 1


def test_distinct_is_near_zero_for_samples_and_near_one_for_a_duplicate_or_a_stranger():
    evidence, x = still()
    bound, space = bind(evidence)
    z, probe = space.coordinates(x), probe_of(space, x)
    assert float(bound.distinct(z, probe).max()) < 10 * RIDGE
    twice = bound.distinct(torch.cat([z, z[:1]]), probe)
    assert float(twice[1:-1].max()) < ACCEPT / 100
    assert float(twice[[0, -1]].min()) > ACCEPT
    far = probe[bound.score(probe).argmax()][None]
    stranger = bound.distinct(torch.cat([z, far]), probe)
    assert float(stranger[:N].max()) < ACCEPT / 100
    assert float(stranger[N]) > ACCEPT


def test_relative_is_the_score_in_units_of_chance():
    evidence, x = still()
    bound, space = bind(evidence)
    probe = probe_of(space, x, 65)
    relative = bound.relative(probe, probe)
    assert float(relative.median()) == pytest.approx(1.0)
    assert float(bound.relative(space.coordinates(x), probe).max()) < 10 * RIDGE


def test_a_dead_candidate_scores_one_and_breaks_nothing():
    """No unit is active there, so no signal exists at any node."""
    evidence, x = still()
    bound, space = bind(evidence, smoothing=30.0)
    nodes = bound.vectors.nodes
    shut = [dataclasses.replace(v, biases=(v.biases[0] - 100.0, *v.biases[1:])) for v in nodes]
    dead = dataclasses.replace(bound, vectors=dataclasses.replace(bound.vectors, nodes=tuple(shut)))
    z = space.coordinates(x)
    torch.testing.assert_close(dead.score(z), torch.ones(N, dtype=torch.float64))
    here = dead.expand(z)
    assert all(part.isfinite().all() for part in (here.value, here.gradient, here.curvature))
    assert dead.without(z).columns.isfinite().all()


def test_a_piecewise_linear_signal_has_no_slope_and_says_so():
    evidence, x = still()
    bound, space = bind(evidence, smoothing=None)
    with pytest.raises(MissingEvidence, match="smoothing"):
        bound.expand(space.coordinates(x))


def test_typical_is_the_size_of_a_pre_activation():
    evidence, x = still()
    bound, space = bind(evidence)
    pre = [x @ p["0.weight"].T + p["0.bias"] for p in (evidence.at(0.0), evidence.at(1.0))]
    expected = float(torch.stack(pre).square().mean().sqrt())
    assert bound.typical(space.coordinates(x)) == pytest.approx(expected, rel=1e-10)
