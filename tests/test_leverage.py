"""The leverage equation, the search it guides, and the linear programs below that."""

from dataclasses import replace

import pytest
import torch
from scipy.optimize import linprog

from exhume import presets
from exhume.equations.leverage import bind_leverage
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.kkt import row_space
from exhume.metrics import relative_l2
from exhume.moves.guide import Leverage, by_leverage
from exhume.moves.polytope import Programs, polytope
from exhume.spaces import full, subspace
from exhume.victims.nets import mlp
from planted import draw, generator

D, N, WIDTH = 40, 8, 90
BOX = torch.zeros(D).double(), torch.ones(D).double()


def images(seed=0, n=N):
    """Rows in [0, 1], about half of whose features are 0."""
    return (0.8 * draw(n, D, seed=seed)).clamp(0, 1)


def planted(x, fall=1.0, biased=True, seed=0):
    """Weights with [W_1, b_1] = sum_i delta_i (x_i, 1) and W_2 = sum_i e_i h(x_i)', e_i falling off as fall^i."""
    model = mlp((D, WIDTH, WIDTH, 4), seed=seed)
    delta, outer = draw(len(x), WIDTH, seed=seed + 1), draw(len(x), WIDTH, seed=seed + 2)
    outer = outer * fall ** torch.arange(len(x)).double()[:, None]
    with torch.no_grad():
        model[1].weight.copy_(delta.T @ x)
        model[1].bias.copy_(delta.sum(0))
        h = (x @ model[1].weight.T + model[1].bias).relu()
        model[3].weight.copy_(outer.T @ h)
        model[3].bias.copy_(outer.sum(0) if biased else draw(WIDTH, seed=seed + 3))
    share = None if biased else (("3.bias", 0.0),)
    spec = InputSpec((D,), low=0.0, high=1.0)
    return Evidence.from_module(model, input=spec, recipe=Recipe(labels="real", decay_share=share))


def hull(x):
    return subspace(x[1:] - x[0], x[0])


def features(evidence, x, biased):
    p = {k: v.double() for k, v in evidence.final.items()}
    h = (x @ p["1.weight"].T + p["1.bias"]).relu()
    rows = p["3.weight"]
    if biased:
        return torch.cat([h, h.new_ones(len(h), 1)], 1), torch.cat([rows, p["3.bias"][:, None]], 1)
    return h, rows


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("eps", [1e-1, 1e-3])
def test_it_is_what_ridge_regression_on_the_rows_leaves(biased, eps):
    """min_a |h - W' a|^2 + eps^2 |a|^2 by an augmented least-squares problem, over |h|^2."""
    x = images()
    evidence, points = planted(x, biased=biased), draw(5, D, seed=7)
    bound = bind_leverage(evidence, full(D), N, 1e-6)
    h, rows = features(evidence, points, biased)
    width = eps * torch.linalg.matrix_norm(rows, 2)
    augmented = torch.cat([rows.T, width * torch.eye(len(rows), dtype=h.dtype)])
    right = torch.cat([h.T, torch.zeros(len(rows), len(h), dtype=h.dtype)])
    left = right - augmented @ torch.linalg.lstsq(augmented, right, driver="gelsd").solution
    naive = left.square().sum(0) / h.square().sum(1)
    torch.testing.assert_close(bound.at(eps).value(points), naive, rtol=1e-8, atol=1e-14)


def test_training_samples_have_none_and_other_points_do():
    x = images()
    bound = bind_leverage(planted(x), full(D), N, 1e-6).at(1e-6)
    assert float(bound.value(x).max()) < 1e-10 < 1e-3 < float(bound.value(images(seed=9)).min())


def test_its_expansion_is_that_of_gauss_newton():
    x = images()
    space = hull(x)
    bound = bind_leverage(planted(x), space, N, 1e-6).without(space.coordinates(x[:2])).at(1e-3)
    z = space.coordinates(images(seed=3, n=3))
    expansion = bound.expand(z)
    leaf = z.clone().requires_grad_()
    torch.testing.assert_close(
        expansion.gradient, torch.autograd.grad(bound.value(leaf).sum(), leaf)[0], rtol=1e-8, atol=1e-12
    )
    for i in range(len(z)):

        def residual(one):
            h = bound.vectors.at(one[None])[0, 0]
            h = h - bound.found @ (bound.found.T @ h)
            return bound.root.T @ (h / h.norm())

        jacobian = torch.autograd.functional.jacobian(residual, z[i])
        torch.testing.assert_close(expansion.curvature[i], 2 * jacobian.T @ jacobian, rtol=1e-8, atol=1e-12)


def test_what_was_found_is_projected_out():
    x = images()
    space = hull(x)
    bound = bind_leverage(planted(x), space, N, 1e-6)
    rest = bound.without(space.coordinates(x[:3]))
    z = space.coordinates(x)
    assert float(rest.at(1e-5).value(z[3:]).max()) < 1e-7  # the others are samples still
    h = rest.vectors.at(z[:3])[:, 0]
    assert float((h - (h @ rest.found) @ rest.found.T).norm()) < 1e-9 * float(h.norm())
    assert float((rest.rows @ rest.found).abs().max()) < 1e-10


def test_a_condensed_second_layer_tells_nothing():
    x = images()
    assert bind_leverage(planted(x, fall=0.1), full(D), N, 1e-6) is None
    assert bind_leverage(planted(x, fall=0.1), full(D), N, 1e-9) is not None
    evidence = planted(x)
    frozen = replace(evidence, recipe=Recipe(labels="real", decay_share=(("3.*", 0.0),)))
    assert bind_leverage(frozen, full(D), N, 1e-6) is None
    flat = Evidence.from_module(mlp((D, WIDTH, 4)), input=InputSpec((D,)))
    assert bind_leverage(flat, full(D), N, 1e-6) is None
    assert by_leverage(Leverage(), replace(evidence, input=InputSpec((D,))), full(D), N, 1.0) is None


def test_descents_on_it_end_near_samples_and_not_at_those_known():
    """From random starts of the hull: more than half of 40 within a tenth of a sample."""
    x = images()
    evidence, space = planted(x, fall=0.5), hull(x)
    guide = by_leverage(Leverage(), evidence, space, N, float(x.norm(dim=1).mean()))
    z = guide.starts(space.coordinates(x[:0]), generator(1))
    near = torch.cdist(space.expand(z), x).amin(1) / x.norm(dim=1).mean() < 0.1
    assert int(near.sum()) > 20
    assert guide.fits(space.coordinates(x[:1])[0]) and not guide.fits(
        space.coordinates(images(seed=5)[:1])[0]
    )
    rest = guide.starts(space.coordinates(x[:6]), generator(1))
    towards = torch.cdist(space.expand(rest), x).argmin(1)
    assert int((towards >= 6).sum()) > 30


def test_the_attack_finds_samples_by_corners_and_leverage():
    x = images()
    evidence = planted(x, fall=0.5)
    assert row_space(evidence, N).rank == N
    guided = presets.kkt(N).run(evidence, seed=3)
    assert float(relative_l2(guided.x, x).amin(1).max()) < 1e-8
    # The second layer of other samples: no corner fits it, and none is certified though the first layer tells them.
    final = dict(evidence.final) | {"3.weight": planted(images(seed=4), fall=0.5).final["3.weight"]}
    other = presets.kkt(N).run(replace(evidence, final=final), seed=3)
    assert float(relative_l2(other.x, x).amin(1).max()) < 1e-8
    assert other.certificate.recovered == 0


# --- linear programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_programs_agree_with_scipy_one_after_the_other(seed, capfd):
    x = images(seed=seed)
    corner = polytope(hull(x), *BOX, 1e-6, 1e-3)
    sides = torch.cat([corner.columns.T, -corner.columns.T]).numpy()
    ends = torch.cat([corner.high + 1e-6, 1e-6 - corner.low]).numpy()
    for direction in draw(6, N - 1, seed=seed + 20):
        reached = corner.programs.top(direction)
        naive = linprog(-direction.numpy(), A_ub=sides, b_ub=ends, bounds=(None, None))
        assert float(direction @ reached) == pytest.approx(-naive.fun, rel=1e-6)
    assert capfd.readouterr().out == ""


def test_a_program_without_a_solution_gives_none():
    columns = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()
    unbounded = Programs(columns, torch.zeros(2).double(), torch.ones(2).double())
    assert unbounded.top(torch.tensor([0.0, 1.0]).double()) is None
    assert float(unbounded.top(torch.tensor([1.0, 0.0]).double())[0]) == pytest.approx(1.0)
    empty = Programs(columns, torch.tensor([0.0, 2.0]).double(), torch.tensor([1.0, 3.0]).double())
    assert empty.top(torch.tensor([1.0, 0.0]).double()) is None


def test_violated_bounds_are_not_active():
    corner = polytope(hull(images()), *BOX, 1e-6, 1e-3)
    far = 100 * draw(N - 1, seed=2)
    assert corner.active(far) <= 2
