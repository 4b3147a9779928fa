"""A second fit uses only what is true at the samples, and helps where the first one's weights were wrong."""

import itertools
from dataclasses import replace

import pytest
import torch

from exhume.equations.fold import fold
from exhume.equations.span import EquationWeights, Span
from exhume.evidence import Recipe
from exhume.linalg import free_of_signs
from exhume.moves.sharpen import estimated, fitted, signs
from exhume.objective import Objective
from exhume.solvers.varpro import VarPro
from exhume.spaces import full, subspace
from exhume.terms import Fitted
from planted import NO_DECAY, affine, draw, planted_span, random_evidence, train


def best_subset(gram, right, wanted):
    """The slow twin: of all sets of unknowns that may be non-zero, the feasible one with the lowest value."""
    best = (0.0, torch.zeros_like(right))
    for kept in itertools.product([False, True], repeat=len(right)):
        kept = torch.tensor(kept)
        if not bool(kept.any()):
            continue
        c = torch.zeros_like(right)
        c[kept] = torch.linalg.solve(gram[kept][:, kept], right[kept])
        value = float(c @ gram @ c - 2 * right @ c)
        if bool((c * wanted >= 0).all()) and value < best[0]:
            best = (value, c)
    return best[1]


@pytest.mark.parametrize("seed", range(8))
def test_signs_are_eliminated_as_by_trying_every_subset(seed):
    phi, t = draw(6, 9, seed=seed), draw(9, seed=seed + 50)
    wanted = torch.tensor([1.0, -1.0, 0.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    gram, right = phi @ phi.T, phi @ t
    expected = best_subset(gram, right, wanted)
    assert torch.equal(free_of_signs(gram, right, wanted), expected != 0)


def test_an_objective_with_signs_keeps_them_and_its_gradient_is_exact():
    made = planted_span((6, 12, 2), "tanh", n=3)
    equation = Span(nodes=(0.0, 1.0)).bind(made.evidence, full(6), NO_DECAY)
    wanted = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    objective = Objective(equation, full(6), (), lambda z: wanted.expand(len(z), -1))
    z = draw(4, 6, seed=5)
    point, free = objective.at(z), replace(objective, signs=None).at(z)
    assert bool((point.coef * wanted >= 0).all()) and not bool((free.coef * wanted >= 0).all())
    assert point.loss > free.loss
    direction, step = draw(4, 6, seed=6), 1e-6
    slope = (objective.at(z + step * direction).loss - objective.at(z - step * direction).loss) / (2 * step)
    assert float((objective.gradient(point) * direction).sum()) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("space", [full(5), affine(5, 3)], ids=["full", "affine"])
def test_the_output_equation_is_zero_at_labels_and_its_curvature_is_gauss_newtons(space):
    evidence = random_evidence((5, 8, 2), "tanh")
    params = evidence.at(1.0)
    goal = evidence.output(space.expand(draw(4, space.dim, seed=3)))
    term = Fitted(lambda u: evidence.forward(params, u), lambda _: goal, 3.0)
    z = draw(4, space.dim, seed=3)
    assert float(term.value(space.expand(z)).sum()) < 1e-24
    # Where the residual is zero, Gauss-Newton is the Hessian.
    whole = torch.autograd.functional.hessian(lambda z: term.value(space.expand(z)).sum(), z)
    index = torch.arange(4)
    torch.testing.assert_close(
        term.curvature(space.expand(z), space), whole[index, :, index], rtol=1e-10, atol=1e-12
    )
    direction = draw(4, space.dim, seed=4)
    product = term.curvature_product(space.expand(z), space, direction)
    expected = (term.curvature(space.expand(z), space) @ direction[..., None])[..., 0]
    torch.testing.assert_close(product, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("through", [None, 4], ids=["full", "subspace"])
def test_weights_are_one_over_the_noise_of_each_group(through):
    """Planted: noise of another size in each group; the weights tell the sizes to 15%."""
    evidence = random_evidence((8, 300, 200, 1))
    space = full(8) if through is None else subspace(draw(through, 8, seed=1), draw(8, seed=2))
    net = fold(evidence, space)
    sizes = {"net.0": 3.0, "bias": 1.0, "2.weight": 0.1, "4.weight": 0.02}
    noise = {
        k: sizes["bias" if p.dim() == 1 else {"0": "net.0", "2": "2.weight", "4": "4.weight"}[k[0]]]
        * draw(*p.shape, seed=len(k) + p.numel())
        for k, p in net.init.items()
    }
    # Whatever the weights were before.
    for weights in (EquationWeights(), EquationWeights(first=0.3, bias=2.0, hidden=0.7, last=5.0)):
        bound = Span(weights=weights).bind(evidence, space, NO_DECAY)
        found = estimated(bound, net, bound.vector(noise))
        assert found.bias == 1.0
        assert found.first == pytest.approx(1 / 3, rel=0.15)
        assert found.hidden == pytest.approx(10, rel=0.15)
        assert found.last == pytest.approx(50, rel=0.15)


def test_a_second_fit_with_the_misfits_weights_is_nearer_where_one_layer_is_noisy():
    """Planted: noise on the last layer alone; weights that trust it most are made right."""
    made = planted_span((10, 150, 1), "tanh", n=4)
    evidence, space = made.evidence, full(10)
    last = evidence.chain.weights[-1]
    noisy = {**evidence.final, last: evidence.final[last] + 0.01 * draw(1, 150, seed=9)}
    evidence = replace(evidence, final=noisy)
    wrong = Span(nodes=(0.0,), weights=EquationWeights(first=0.3, last=10.0))
    errors = []
    for _ in range(2):
        bound = wrong.bind(evidence, space, NO_DECAY)
        point = VarPro().minimise(Objective(bound, space), made.x).point
        errors.append(float((point.z - made.x).norm() / made.x.norm()))
        wrong = replace(wrong, weights=estimated(bound, fold(evidence, space), point.residual))
    assert errors[1] < 0.3 * errors[0]


def test_signs_are_those_of_the_multipliers_at_the_samples_of_a_trained_net():
    recipe = Recipe(loss="mse", labels="pm1")
    trained = train((6, 200, 1), n=5, lr=0.003, steps=2000, recipe=recipe)
    nodes = (0.0, 1.0)
    wanted = signs(trained.seen, full(6), nodes, trained.x)
    assert wanted.shape == (5, 2) and bool((wanted[:, 1] == 0).all())
    equation = Span(nodes=nodes).bind(trained.seen, full(6), NO_DECAY)
    found = Objective(equation, full(6)).at(trained.x).coef
    assert torch.equal(found[:, 0].sign(), wanted[:, 0])


def test_no_output_equation_where_outputs_are_not_drawn_to_labels():
    u = draw(3, 6, seed=1)
    for recipe in (Recipe(), Recipe(loss="logistic", labels="pm1"), Recipe(loss="mse", labels="real")):
        evidence = replace(random_evidence((6, 9, 1)), recipe=recipe)
        assert fitted(evidence, u, 1.0, 1.0) is None
    evidence = replace(random_evidence((6, 9, 1)), recipe=Recipe(loss="mse", labels="pm1"))
    assert fitted(evidence, u, 1.0, 1.0) is not None


def test_free_signs_where_the_recipe_tells_none():
    evidence = random_evidence((6, 9, 2))
    assert float(signs(evidence, full(6), (0.0, 1.0), draw(3, 6, seed=2)).abs().sum()) == 0
    told = replace(evidence, recipe=Recipe(loss="cross-entropy"))
    wanted = signs(told, full(6), (0.0, 1.0), draw(3, 6, seed=2)).view(3, 2, 2)
    assert bool((wanted[:, 0].sum(1) == 0).all()) and bool((wanted[:, 1] == 0).all())
