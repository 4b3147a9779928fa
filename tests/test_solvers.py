"""Variable projection and batched Levenberg-Marquardt, on problems with known answers and on hostile ones."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch

from exhume.equations.span import Span
from exhume.objective import Objective
from exhume.solvers.batched import BatchedLM
from exhume.solvers.varpro import VarPro, _conjugate_gradients
from exhume.spaces import Space, full, sphere, subspace
from exhume.terms import Box
from planted import (
    LAST,
    NO_DECAY,
    Naive,
    affine,
    draw,
    on_sphere,
    planted_features,
    planted_span,
    random_evidence,
)

STATUS = {"converged", "iterations", "stalled", "diverged", "stopped"}
N, D = 4, 16
RADIUS = D**0.5


def features(activation="relu", space=None, seed=0, width=4 * N * D):
    """Random features at p = 4 d n, and the objective whose zero is the planted truth."""
    planted = planted_features(N, D, width, activation, seed=seed)
    space = sphere(D, RADIUS) if space is None else space
    return Objective(LAST.bind(planted.evidence, space, NO_DECAY), space), planted.x


def near(x, size=0.1, seed=77):
    return x + size * x.norm(dim=1, keepdim=True) * on_sphere(len(x), x.shape[1], 1.0, seed)


# --- the objective -----------------------------------------------------------------------------------------


def objectives(activation, space=None):
    """An equation of every layer at two nodes, with a box term that is partly active."""
    evidence = random_evidence((4, 12, 2), activation)
    space = full(4) if space is None else space
    box = Box(torch.full((4,), -0.5).double(), torch.full((4,), 0.5).double(), 0.3)
    bound = Span().bind(evidence, space, NO_DECAY)
    return Objective(bound, space, (box,)), Naive(evidence, Span(), space, NO_DECAY, "dense")


@pytest.mark.parametrize("activation", ["tanh", "softplus", "relu"])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("kind", ["full", "affine"])
def test_the_gradient_equals_autograd_of_the_reduced_loss(activation, terms, kind):
    space = full(4) if kind == "full" else affine(4, 3, seed=2)
    objective, naive = objectives(activation, space)
    objective = objective if terms else dataclasses.replace(objective, terms=())
    leaf = draw(2, space.dim, seed=5).requires_grad_()
    loss = naive.reduced_loss(leaf)
    if terms:
        loss = loss + objective.terms[0].value(space.expand(leaf)).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    point = objective.at(leaf.detach())
    assert point.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    torch.testing.assert_close(objective.gradient(point), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("kind", ["full", "affine"])
def test_the_hessian_is_the_projected_normal_matrix(activation, terms, kind):
    """2 J' (I - P) J / |t|^2 with P the projector on the span of the gradients, all written down."""
    space = full(4) if kind == "full" else affine(4, 3, seed=2)
    objective, naive = objectives(activation, space)
    objective = objective if terms else dataclasses.replace(objective, terms=())
    z = draw(2, space.dim, seed=5)
    point = objective.at(z)
    jacobian, phi = naive.jacobian(z, point.coef), naive.features(z).detach()
    basis = torch.linalg.qr(phi.T)[0]
    moved = jacobian - basis @ (basis.T @ jacobian)
    expected = 2 * moved.T @ moved / naive.energy()
    if terms:
        rows = torch.eye(4, dtype=torch.float64) if space.basis is None else space.basis
        for i, one in enumerate(space.expand(z)):
            violated = rows[:, one.abs() > 0.5]
            block = slice(i * space.dim, (i + 1) * space.dim)
            expected[block, block] += 2 * 0.3 / 4 * violated @ violated.T  # |high - low|^2 = 4
    torch.testing.assert_close(objective.hessian(point), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_hessian_product_is_the_hessian(activation):
    objective, _ = objectives(activation)
    point = objective.at(draw(3, 4, seed=5))
    hessian, product = objective.hessian(point), objective.hessian_product(point)
    for seed in range(3):
        v = draw(3, 4, seed=seed)
        torch.testing.assert_close(product(v).flatten(), hessian @ v.flatten(), rtol=1e-9, atol=1e-11)


def test_box_penalty_is_zero_inside_and_grows_outside():
    low, high = -torch.ones(3).double(), torch.tensor([1.0, 2.0, 3.0]).double()
    box = Box(low, high, weight=2.0)
    assert not box.value(torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, -1.0]]).double()).any()
    outside = torch.tensor([[2.0, 0.0, 5.0]]).double()
    assert float(box.value(outside)) == pytest.approx(2.0 * (1 + 4) / (4 + 9 + 16))
    leaf = outside.clone().requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda u: box.value(u).sum(), leaf)[0, :, 0]
    torch.testing.assert_close(box.curvature(outside, full(3))[0], hessian)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-5])
def test_nearly_coinciding_candidates_cost_no_accuracy(gap):
    """The Gram matrix squares the condition number, to 1e10 and more; the second pass on the residual mends that."""
    objective, x = features(space=full(D))
    assert objective.at(torch.cat([x, x[:2] + gap * draw(2, D, seed=3)])).misfit < 1e-28


def test_the_misfit_is_explicit():
    """The residual is computed explicitly: the misfit goes far below what t't - b'K^-1 b could resolve."""
    objective, x = features()
    assert objective.at(x).misfit < 1e-28


# --- variable projection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("seed", range(3))
def test_planted_features_are_recovered_from_near_by(activation, seed):
    objective, x = features(activation, seed=seed)
    solution = VarPro(tolerance=1e-9, floor=1e-26).minimise(objective, near(x))
    assert solution.point.loss < 1e-20
    assert float((solution.point.z - x).norm(dim=1).max()) < 1e-7 * RADIUS
    assert solution.status in ("converged", "stalled")
    assert solution.trace[0] > 1e-4
    assert all(b < a for a, b in zip(solution.trace, solution.trace[1:], strict=False))
    assert solution.point.loss == solution.trace[-1]


def test_all_layers_are_recovered_in_the_full_space():
    planted = planted_span((6, 60, 1), "tanh", n=3, node=1.0)
    objective = Objective(Span((1.0,)).bind(planted.evidence, full(6), NO_DECAY), full(6))
    solution = VarPro(tolerance=1e-9, floor=1e-26).minimise(objective, near(planted.x, 0.05))
    assert solution.point.loss < 1e-20
    torch.testing.assert_close(solution.point.z, planted.x, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_dense_and_conjugate_gradient_steps_lead_to_the_same_place(activation):
    objective, x = features(activation)
    start = near(x)
    dense, iterative = (
        VarPro(tolerance=1e-9, floor=1e-26, dense_limit=limit, cg_steps=200).minimise(objective, start)
        for limit in (4000, 0)
    )
    assert dense.point.loss < 1e-20
    assert iterative.point.loss < 1e-20
    torch.testing.assert_close(dense.point.z, iterative.point.z, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(dense.point.coef, iterative.point.coef, rtol=1e-7, atol=1e-8)


def test_one_conjugate_gradient_solve_is_the_dense_solve():
    objective, x = features("tanh", space=full(D))
    point = objective.at(near(x))
    iterative = VarPro(dense_limit=0, cg_steps=5000)._system(objective, point)(0.5)
    hessian, gradient = objective.hessian(point), objective.gradient(point)
    sizes = point.coef.square().sum(1)
    scale = (hessian.diagonal().mean() * sizes / sizes.mean()).repeat_interleave(D)
    exact = -torch.linalg.solve(hessian + 0.5 * scale.diag(), gradient.flatten())
    assert (
        float((iterative.flatten() - exact).norm() / exact.norm()) < 0.1
    )  # the scale is a Hutchinson estimate


@pytest.mark.parametrize("dense_limit", [4000, 0])
def test_duplicate_candidates_do_not_break_it(dense_limit):
    """The Gram matrix and the Hessian are exactly singular."""
    objective, x = features()
    start = near(torch.cat([x, x[:2], x[:1]]))
    start[4:6], start[6] = start[:2], start[0]
    solution = VarPro(tolerance=1e-9, dense_limit=dense_limit, cg_steps=200).minimise(objective, start)
    assert solution.point.loss < 1e-18
    assert solution.point.coef.isfinite().all()
    assert float(torch.cdist(solution.point.z, x).amin(0).max()) < 1e-6


def test_more_multipliers_than_equations_do_not_break_it():
    objective, _ = features(width=10)
    solution = VarPro(iterations=5).minimise(objective, on_sphere(12, D, RADIUS, seed=3))
    assert solution.point.loss < 1e-18
    assert solution.status in STATUS


def test_a_dead_candidate_does_not_break_it():
    """Its gradients vanish: a zero row in the Gram matrix, a zero block in the Hessian."""
    planted = planted_features(N, D, 4 * N * D, "relu", bias=True)
    params = planted.evidence.init
    shut = {**params, "0.bias": params["0.bias"] - 1e3}
    final = {**planted.evidence.final, "0.bias": shut["0.bias"], "0.weight": params["0.weight"]}
    evidence = dataclasses.replace(planted.evidence, init=shut, final=final)
    objective = Objective(Span((1.0,)).bind(evidence, full(D), NO_DECAY), full(D))
    solution = VarPro(iterations=3).minimise(objective, planted.x)
    assert math.isfinite(solution.point.loss)
    assert solution.point.coef.isfinite().all()


@pytest.mark.parametrize("dense_limit", [4000, 0])
@pytest.mark.parametrize(
    "space",
    [
        sphere(D, RADIUS),
        full(D).within((0.8 * RADIUS, 1.1 * RADIUS)),
        subspace(draw(9, D), 0.3 * draw(D, seed=1)).within((RADIUS, RADIUS)),
        subspace(draw(9, D), 0.3 * draw(D, seed=1)).within((2.0, 3.5)),
    ],
    ids=["sphere", "range", "sphere in an affine set", "range in an affine set"],
)
def test_the_answer_lies_in_the_space(space, dense_limit):
    objective, _ = features("tanh", space=space)
    start = space.random(5, RADIUS, torch.Generator().manual_seed(0)) * 1.7
    solution = VarPro(iterations=3, dense_limit=dense_limit, cg_steps=20).minimise(objective, start)
    norms = space.expand(solution.point.z).norm(dim=1)
    assert float(norms.min()) >= space.radius[0] * (1 - 1e-12)
    assert float(norms.max()) <= space.radius[1] * (1 + 1e-12)
    assert solution.point.loss < solution.trace[0]


def test_progress_stops_it_and_is_told_every_loss():
    objective, x = features()
    seen = []

    def progress(loss):
        seen.append(loss)
        return len(seen) == 3

    solution = VarPro().minimise(objective, near(x, 0.5), progress)
    assert (solution.status, solution.steps) == ("stopped", 3)
    assert tuple(seen) == solution.trace[1:]
    assert solution.point.loss == seen[-1]


def test_the_iteration_limit_is_kept():
    objective, x = features()
    solution = VarPro(iterations=2).minimise(objective, near(x, 0.5))
    assert (solution.status, solution.steps, len(solution.trace)) == ("iterations", 2, 3)
    assert solution.reason.endswith(".")


def test_started_at_the_answer_it_stays_there():
    objective, x = features()
    solution = VarPro().minimise(objective, x)
    assert solution.status in STATUS
    torch.testing.assert_close(solution.point.z, x, rtol=1e-12, atol=1e-12)


def test_the_same_start_gives_the_same_answer():
    objective, x = features()
    first, second = (VarPro(iterations=10).minimise(objective, near(x, 0.5)) for _ in range(2))
    assert torch.equal(first.point.z, second.point.z)
    assert first.trace == second.trace


# --- hostile problems --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Iterate:
    z: torch.Tensor
    loss: float


class Hostile:
    """The bowl |z|^2, with `bad` as its loss wherever `when(z, calls)` holds."""

    space = full(3)

    def __init__(self, bad, when):
        self.bad, self.when, self.calls = bad, when, 0

    def at(self, z):
        self.calls += 1
        return Iterate(z, self.bad if self.when(z, self.calls) else float((z * z).sum()))

    def gradient(self, point):
        return 2 * point.z

    def hessian(self, point):
        return 2 * torch.eye(point.z.numel(), dtype=point.z.dtype)

    def curvatures(self, point):
        return torch.ones(len(point.z), dtype=point.z.dtype)

    def hessian_product(self, point):
        return lambda v: 2 * v


WHEN = {
    "near the answer": lambda z, calls: float(z.norm()) < 0.5,
    "every second time": lambda z, calls: calls % 2 == 0,
    "after the start": lambda z, calls: calls > 1,
    "on one side": lambda z, calls: float(z[0, 0]) < 0.3,
}


@pytest.mark.parametrize("dense_limit", [4000, 0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("when", WHEN)
def test_nan_and_infinity_never_win(when, bad, dense_limit):
    problem = Hostile(bad, WHEN[when])
    start = torch.ones(1, 3, dtype=torch.float64)
    solution = VarPro(dense_limit=dense_limit).minimise(problem, start)
    assert math.isfinite(solution.point.loss)
    assert solution.point.loss == float((solution.point.z**2).sum()) <= 3.0
    assert solution.status in STATUS - {"diverged"}
    assert all(map(math.isfinite, solution.trace))
    assert solution.point.loss == min(solution.trace)
    if when == "every second time":
        assert solution.point.loss < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_start_without_a_finite_loss_is_called_diverged(bad):
    """Its trace holds that one loss, the only one that may not be finite."""
    solution = VarPro().minimise(Hostile(bad, lambda z, calls: True), torch.ones(1, 3, dtype=torch.float64))
    assert (solution.status, solution.steps, len(solution.trace)) == ("diverged", 0, 1)
    assert not math.isfinite(solution.trace[0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_objective_of_an_infinite_candidate_is_a_value(value):
    objective, x = features(space=full(D))
    start = x.clone()
    start[0, 0] = value
    assert VarPro().minimise(objective, start).status == "diverged"


class Saddle(Hostile):
    """A model that is wrong about the curvature: its matrix is not positive definite."""

    def hessian(self, point):
        return torch.diag(torch.tensor([2.0, -3.0, 2.0], dtype=torch.float64))

    def hessian_product(self, point):
        return lambda v: v * torch.tensor([2.0, -3.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("dense_limit", [4000, 0])
def test_an_indefinite_matrix_does_not_break_it(dense_limit):
    problem = Saddle(math.nan, lambda z, calls: not bool(z.isfinite().all()))
    solution = VarPro(dense_limit=dense_limit).minimise(problem, torch.ones(1, 3, dtype=torch.float64))
    assert solution.status in STATUS
    assert solution.point.loss <= 3.0


def test_conjugate_gradients_stop_at_a_direction_without_curvature():
    rhs, scale = draw(2, 3), torch.tensor([[2.0], [0.3]], dtype=torch.float64)
    assert not _conjugate_gradients(lambda v: 0 * v, rhs, scale, 10).any()
    weight = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)
    assert _conjugate_gradients(lambda v: weight * v, rhs, scale, 10).isfinite().all()
    solved = _conjugate_gradients(lambda v: weight.abs() * v, rhs, scale, 10, tolerance=1e-12)
    torch.testing.assert_close(solved, rhs / weight.abs(), rtol=1e-10, atol=1e-12)


# --- many small problems -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Expanded:
    value: torch.Tensor
    gradient: torch.Tensor
    curvature: torch.Tensor


def least_squares(residual):
    """Expand |r(z)|^2 for a batch, r: [q] -> [p], by autograd."""

    def expand(z):
        jacobian = torch.func.vmap(torch.func.jacrev(residual))(z)
        r = torch.func.vmap(residual)(z)
        return Expanded(
            (r * r).sum(1), 2 * torch.einsum("mpq,mp->mq", jacobian, r), 2 * jacobian.mT @ jacobian
        )

    return expand


def rosenbrock(z):
    return torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])


def stay(z):
    return z


def quadratics(m=6, q=4):
    """m problems with optima of their own; the last coordinate of z says which (it does not move)."""
    matrices = draw(m, q + 2, q, seed=1) * torch.logspace(-1, 1, m, dtype=torch.float64)[:, None, None]
    optima = draw(m, q, seed=2)

    def expand(z):
        index = z[:, -1].round().long()
        jacobian = matrices[index]
        r = torch.einsum("mpq,mq->mp", jacobian, z[:, :-1] - optima[index])
        pad = torch.nn.functional.pad
        gradient = pad(2 * torch.einsum("mpq,mp->mq", jacobian, r), (0, 1))
        return Expanded((r * r).sum(1), gradient, pad(2 * jacobian.mT @ jacobian, (0, 1, 0, 1)))

    start = torch.cat([draw(m, q, seed=3), torch.arange(m).double()[:, None]], 1)
    return expand, start, optima


def test_independent_quadratics_are_all_solved():
    expand, start, optima = quadratics()
    z, value = BatchedLM(iterations=40, tolerance=1e-12).minimise(expand, stay, start)
    torch.testing.assert_close(z[:, :-1], optima, rtol=1e-7, atol=1e-7)
    assert float(value.max()) < 1e-12
    torch.testing.assert_close(value, expand(z).value)


def test_rosenbrock_valleys_are_all_followed():
    start = torch.tensor([[2.0, 2.0], [0.0, 0.0], [1.0, 1.0], [-3.0, -4.0]], dtype=torch.float64)
    expand = least_squares(rosenbrock)
    halfway, value = BatchedLM(iterations=4).minimise(expand, stay, start)
    torch.testing.assert_close(value, expand(halfway).value, rtol=1e-12, atol=1e-12)
    assert float(value.max()) > 1e-3
    z, value = BatchedLM(iterations=200, tolerance=1e-12).minimise(expand, stay, start)
    torch.testing.assert_close(z, torch.ones_like(z), rtol=1e-6, atol=1e-6)
    assert float(value.max()) < 1e-12


def test_the_classic_rosenbrock_start_is_followed_to_the_end():
    """After good steps the damping is so small that it takes more than four rejections to get it back."""
    start = torch.tensor([[-1.2, 1.0]], dtype=torch.float64)
    _, value = BatchedLM(iterations=200, tolerance=1e-12).minimise(least_squares(rosenbrock), stay, start)
    assert float(value) < 1e-12


@pytest.mark.parametrize("which", ["quadratics", "rosenbrock"])
@pytest.mark.parametrize("iterations", [1, 30])
def test_a_problem_alone_is_solved_as_in_a_batch(which, iterations):
    if which == "quadratics":
        expand, start, _ = quadratics()
    else:
        expand, start = least_squares(rosenbrock), 2 * draw(6, 2, seed=4)
    solver = BatchedLM(iterations=iterations)
    together, values = solver.minimise(expand, stay, start)
    for i in range(len(start)):
        alone, value = solver.minimise(expand, stay, start[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(value[0], values[i], rtol=1e-10, atol=1e-14)


def test_batched_values_never_rise_and_nan_never_wins():
    """Residuals that are not a number past a wall, which the first steps cross."""

    def wall(z):
        return torch.cat([z - 3.0, 0 * torch.sqrt(2.0 - z[:1])])

    start = torch.tensor([[0.0, 0.0], [1.5, 5.0], [-4.0, 1.0]], dtype=torch.float64)
    expand = least_squares(wall)
    z, value = BatchedLM(iterations=60).minimise(expand, stay, start)
    assert z.isfinite().all()
    assert value.isfinite().all()
    assert bool((z[:, 0] < 2.0).all())
    assert bool((value < expand(start).value).all())


def test_batched_answers_lie_in_the_space():
    space = sphere(3, 2.0)
    expand = least_squares(lambda z: z - torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64))
    z, _ = BatchedLM(iterations=60, tolerance=1e-10).minimise(expand, space.retract, draw(5, 3))
    torch.testing.assert_close(z.norm(dim=1), torch.full((5,), 2.0).double())
    torch.testing.assert_close(z[:, 0], torch.full((5,), 2.0).double(), rtol=1e-3, atol=1e-3)


def test_a_flat_problem_rests():
    expand = least_squares(lambda z: 0 * z + 1.0)
    start = draw(3, 2)
    z, value = BatchedLM().minimise(expand, stay, start)
    assert torch.equal(z, start)
    assert value.tolist() == [2.0] * 3


# --- spaces ------------------------------------------------------------------------------------------------

SPACES = {
    "full": full(5),
    "subspace": subspace(draw(3, 5)),
    "affine": subspace(draw(3, 5), draw(5, seed=1)),
}


@pytest.mark.parametrize("name", SPACES)
def test_coordinates_undo_expansion(name):
    space = SPACES[name]
    z = draw(4, space.dim)
    torch.testing.assert_close(space.coordinates(space.expand(z)), z, rtol=1e-12, atol=1e-12)
    u = draw(4, 5, seed=3)
    gap = u - space.expand(space.coordinates(u))  # orthogonal: the nearest point of the set
    torch.testing.assert_close(space.coordinates(u + 7 * gap), space.coordinates(u), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SPACES)
def test_retraction_keeps_what_is_admissible_and_is_idempotent(name):
    space = SPACES[name].within((1.5, 2.5))
    z = space.retract(draw(40, space.dim))
    norms = space.expand(z).norm(dim=1)
    assert float(norms.min()) >= 1.5 - 1e-12
    assert float(norms.max()) <= 2.5 + 1e-12
    torch.testing.assert_close(space.retract(z), z, rtol=1e-13, atol=1e-13)
    assert torch.equal(SPACES[name].retract(z), z)


@pytest.mark.parametrize("name", SPACES)
def test_random_points_have_the_norm_asked_for(name):
    space = SPACES[name]
    z = space.random(50, 4.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(space.expand(z).norm(dim=1), torch.full((50,), 4.0).double())


def test_retraction_moves_the_zero_vector_onto_the_sphere():
    assert float(sphere(3, 2.0).retract(torch.zeros(1, 3).double()).norm()) == pytest.approx(2.0)


def test_an_origin_without_a_basis_is_a_translation():
    evidence = random_evidence((4, 9, 1), "tanh")
    shift = draw(4, seed=8)
    moved, plain = (Span().bind(evidence, s, NO_DECAY) for s in (Space(4, origin=shift), full(4)))
    z = draw(3, 4)
    torch.testing.assert_close(moved.gram(z), plain.gram(z + shift))
