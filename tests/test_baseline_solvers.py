"""L-BFGS, Adam and momentum SGD: the optimum of smooth problems, and an honest end on hostile ones."""

import dataclasses
import math
from dataclasses import dataclass, field

import pytest
import torch

from exhume.objective import Objective
from exhume.solvers.first_order import SGD, Adam
from exhume.solvers.lbfgs import LBFGS
from exhume.solvers.varpro import VarPro
from exhume.spaces import Space, full, sphere
from planted import LAST, NO_DECAY, distance, draw, on_sphere, planted_features

N, D = 2, 6
RADIUS = D**0.5
ALL = [LBFGS(), Adam(lr=0.05), SGD(lr=0.05)]


def named(solver):
    return type(solver).__name__


@dataclass(frozen=True)
class At:
    z: torch.Tensor
    loss: float


@dataclass(frozen=True)
class Valley:
    """(z - goal)' diag(1..q) (z - goal), with faults on request; every evaluated point is kept.

    A loss beyond `wall` is NaN; `lies` negates the gradient; `poisoned` makes it NaN.
    """

    goal: torch.Tensor
    space: Space
    wall: float = math.inf
    lies: bool = False
    poisoned: bool = False
    visited: list = field(default_factory=list)

    def _scale(self):
        return torch.arange(1, self.goal.shape[1] + 1).double()

    def at(self, z):
        assert z.isfinite().all(), "a point that is not finite must not be evaluated"
        self.visited.append(z)
        loss = float(((z - self.goal) ** 2 * self._scale()).sum())
        return At(z, math.nan if float(z.abs().max()) > self.wall else loss)

    def gradient(self, point):
        gradient = 2 * (point.z - self.goal) * self._scale()
        return gradient * (math.nan if self.poisoned else -1.0 if self.lies else 1.0)


def valley(**faults):
    return Valley(draw(2, 4, seed=1), full(4), **faults)


def planted(activation="tanh", space=None):
    """Random features; the planted samples are a zero of the objective."""
    made = planted_features(N, D, 8 * N * D, activation)
    space = sphere(D, RADIUS) if space is None else space
    return Objective(LAST.bind(made.evidence, space, NO_DECAY), space), made.x


def near(x, size=0.2):
    return x + size * on_sphere(N, D, RADIUS, seed=77)


# --- the optimum -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [LBFGS(), Adam(300, lr=0.1, final=1e-2), SGD(300, lr=3.0)], ids=named)
@pytest.mark.parametrize("kind", ["sphere", "range"])
def test_the_planted_samples_are_found(solver, kind):
    spaces = {"sphere": sphere(D, RADIUS), "range": full(D).within((0.5 * RADIUS, RADIUS))}
    objective, x = planted(space=spaces[kind])
    solution = solver.minimise(objective, near(x))
    assert solution.point.loss < (1e-10 if isinstance(solver, LBFGS) else 1e-6)
    assert float(distance(solution.point.z, x).max()) < 1e-2
    assert solution.point.loss == min(solution.trace)


def test_lbfgs_needs_few_steps_and_agrees_with_variable_projection():
    objective, x = planted()
    start = near(x)
    ours = LBFGS(floor=1e-20).minimise(objective, start)
    twin = VarPro(floor=1e-20).minimise(objective, start)
    assert ours.status == "converged" and ours.steps < 150
    torch.testing.assert_close(ours.point.z, twin.point.z, rtol=0, atol=1e-6)


def test_lbfgs_takes_a_quadratic_to_rounding_whatever_its_scale():
    """torch ignores curvature below an absolute 1e-10; a loss that small must not stop the descent."""

    @dataclass(frozen=True)
    class Tiny(Valley):
        def at(self, z):
            point = super().at(z)
            return At(z, 1e-14 * point.loss)

        def gradient(self, point):
            return 1e-14 * super().gradient(point)

    for kind in (Valley, Tiny):
        problem = kind(draw(2, 4, seed=1), full(4))
        solution = LBFGS(floor=0.0).minimise(problem, draw(2, 4, seed=2))
        torch.testing.assert_close(solution.point.z, problem.goal, rtol=0, atol=1e-7)


@pytest.mark.parametrize("space", [full(4), sphere(4, 3.0)], ids=["full", "sphere"])
def test_lbfgs_evaluates_no_point_twice(space):
    problem = Valley(draw(2, 4, seed=1), space)
    LBFGS(iterations=10).minimise(problem, draw(2, 4, seed=2))
    rows = [tuple(z.flatten().tolist()) for z in problem.visited]
    assert len(rows) == len(set(rows)) > 3


@pytest.mark.parametrize("kind", [Adam, SGD])
def test_the_learning_rate_falls_geometrically_to_its_final_share(kind):
    @dataclass(frozen=True)
    class Slope(Valley):
        def gradient(self, point):
            return torch.ones_like(point.z)

    problem = Slope(draw(1, 4, seed=1), full(4))
    fields = {"momentum": 0.0} if kind is SGD else {}
    kind(iterations=5, lr=0.1, final=1e-4, **fields).minimise(problem, draw(1, 4, seed=2))
    moves = [float((a - b).abs().max()) for a, b in zip(problem.visited, problem.visited[1:], strict=False)]
    assert moves == pytest.approx([0.1, 0.01, 1e-3, 1e-4, 1e-5], rel=1e-6)


# --- retraction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ALL, ids=named)
@pytest.mark.parametrize("start", [0.01, 100.0])
def test_only_retracted_points_are_evaluated(solver, start):
    problem = Valley(draw(2, 4, seed=1), sphere(4, 3.0))
    solver = dataclasses.replace(solver, iterations=20)
    solution = solver.minimise(problem, start * draw(2, 4, seed=2))
    for z in (*problem.visited, solution.point.z):
        torch.testing.assert_close(z.norm(dim=1), torch.full((2,), 3.0).double())


def test_lbfgs_on_a_sphere_ends_where_the_gradient_is_radial():
    """The goal lies off the sphere: the loss does not vanish, its tangential gradient does."""
    for seed in range(4):
        problem = Valley(draw(2, 4, seed=seed), sphere(4, 3.0))
        point = LBFGS(tolerance=1e-9).minimise(problem, draw(2, 4, seed=9)).point
        gradient, normal = problem.gradient(point), point.z / 3.0
        tangential = gradient - (gradient * normal).sum(1, keepdim=True) * normal
        assert float(tangential.norm()) < 1e-2 * float(gradient.norm())


# --- how a run ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_progress_stops_a_run_after_the_step_it_was_told_of(solver):
    losses = []

    def enough(loss):
        losses.append(loss)
        return len(losses) == 3

    solution = solver.minimise(valley(), 5 + draw(2, 4, seed=2), enough)
    assert (solution.status, solution.steps) == ("stopped", 3)
    assert solution.trace[1:] == tuple(losses)


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_a_run_ends_by_limit_by_floor_or_by_rest(solver):
    start = 5 + draw(2, 4, seed=2)
    short = dataclasses.replace(solver, iterations=2).minimise(valley(), start)
    assert (short.status, short.steps, len(short.trace)) == ("iterations", 2, 3)
    deep = dataclasses.replace(solver, floor=1.0, tolerance=0.0).minimise(valley(), start)
    assert deep.status == "converged" and deep.point.loss < 1.0 < min(deep.trace[:-1])
    lazy = dataclasses.replace(solver, tolerance=1.0, patience=1).minimise(valley(), start)
    assert (lazy.status, lazy.steps) == ("converged", 1)
    assert all(s.reason.endswith(".") for s in (short, deep, lazy))


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_a_start_that_is_not_finite_is_handed_back(solver):
    solution = solver.minimise(valley(wall=0.1), 5 + draw(2, 4, seed=2))
    assert (solution.status, solution.steps) == ("diverged", 0)


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_a_start_at_the_optimum_stays_there(solver):
    problem = valley()
    solution = solver.minimise(problem, problem.goal)
    assert solution.status in ("converged", "stalled") and solution.point.loss == 0.0


@pytest.mark.parametrize("solver", [Adam(lr=0.5), SGD(lr=0.4)], ids=named)
def test_nan_never_wins(solver):
    """A first-order step beyond the wall ends the run; what was found before it is kept."""
    problem = Valley(torch.full((1, 4), 2.0).double(), full(4), wall=1.5)
    solution = solver.minimise(problem, torch.zeros(1, 4).double())
    assert solution.status == "diverged"
    assert math.isfinite(solution.point.loss) and solution.point.loss == min(solution.trace)
    assert all(map(math.isfinite, solution.trace))


def test_a_line_search_steps_back_from_nan():
    goal = torch.full((1, 4), 1.4).double()
    solution = LBFGS().minimise(Valley(goal, full(4), wall=1.5), -torch.ones(1, 4).double())
    assert solution.point.loss < 1e-12


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_a_gradient_that_is_not_finite_leads_nowhere(solver):
    start = draw(2, 4, seed=2)
    solution = solver.minimise(valley(poisoned=True), start)
    assert solution.status in ("diverged", "stalled")
    torch.testing.assert_close(solution.point.z, start)


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_the_best_iterate_is_kept_when_every_step_is_uphill(solver):
    start = draw(2, 4, seed=2)
    solution = dataclasses.replace(solver, iterations=30).minimise(valley(lies=True), start)
    torch.testing.assert_close(solution.point.z, start)
    assert solution.point.loss == min(solution.trace)
    assert solution.status == ("stalled" if isinstance(solver, LBFGS) else "iterations")


@pytest.mark.parametrize("solver", ALL, ids=named)
def test_nothing_outside_is_touched(solver):
    start = draw(2, 4, seed=2)
    before, state = start.clone(), torch.get_rng_state()
    solver.minimise(valley(), start, lambda loss: loss < 1.0)
    assert torch.equal(start, before) and not start.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
