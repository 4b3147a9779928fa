"""What the weights reveal before any search, on networks that torch.optim really trained."""

import dataclasses
from functools import cache

import pytest
import torch
from torch import nn

from exhume.change import decay_factor, decayed_target, first_layer
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.linalg import gram_solver, rank_by_gap
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import dense, distance, draw, state, stored_as, what_sgd_leaves
from planted import train as train_anew

train = cache(train_anew)

N = 8
WIDE, NARROW, DEEP = (40, 60, 1), (60, 40, 1), (40, 60, 30, 1)
SIZES = pytest.mark.parametrize("sizes", [WIDE, NARROW, DEEP], ids=lambda s: "-".join(map(str, s)))
DECAY = pytest.mark.parametrize("weight_decay", [1e-3, 1e-2])
MOMENTUM = pytest.mark.parametrize(("momentum", "lr"), [(0.0, 0.05), (0.9, 0.01)])


def look(evidence):
    decay = decay_factor(evidence)
    return decay, first_layer(evidence, decay)


def row_space(evidence, rank):
    """Orthonormal rows of [DW_1, Db_1] and what of the vectors (x_i, 1) is outside their span."""
    target = decayed_target(evidence, decay_factor(evidence))
    change = torch.cat([target["0.weight"], target["0.bias"][:, None]], 1)
    return torch.linalg.svd(change, full_matrices=False)[2][:rank]


def outside(rows, vectors):
    return float(((vectors - vectors @ rows.T @ rows).norm(dim=1) / vectors.norm(dim=1)).max())


def with_one(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def away_from(space, x):
    return float(((space.expand(space.coordinates(x)) - x).norm(dim=1) / x.norm(dim=1)).max())


# --- decay -------------------------------------------------------------------------------------------------


@SIZES
@DECAY
@MOMENTUM
@pytest.mark.parametrize("decay_biases", [True, False])
def test_kappa_of_the_weights_is_measured_exactly(sizes, weight_decay, momentum, lr, decay_biases):
    run = train(
        sizes, N, lr=lr, steps=200, momentum=momentum, weight_decay=weight_decay, decay_biases=decay_biases
    )
    decay = decay_factor(run.seen)
    assert decay.source.startswith("measured")
    assert decay.weight == pytest.approx(what_sgd_leaves(lr, 200, weight_decay, momentum), abs=1e-10)
    assert decay.weight < 0.995
    assert decay.rank == N


@SIZES
@DECAY
@MOMENTUM
def test_kappa_of_decayed_biases_and_the_rank_are_exact(sizes, weight_decay, momentum, lr):
    run = train(sizes, N, lr=lr, steps=200, momentum=momentum, weight_decay=weight_decay)
    decay, first = look(run.seen)
    assert decay.bias == decay.weight
    assert (first.rank, first.flat, first.full) == (N, False, False)
    assert first.gap > 1e9


@SIZES
@DECAY
@MOMENTUM
def test_undecayed_biases_are_seen_as_such(sizes, weight_decay, momentum, lr):
    run = train(sizes, N, lr=lr, steps=200, momentum=momentum, weight_decay=weight_decay, decay_biases=False)
    assert decay_factor(run.seen).bias == pytest.approx(1.0, abs=1e-9)


@SIZES
@DECAY
def test_undecayed_biases_do_not_raise_the_rank(sizes, weight_decay):
    run = train(sizes, N, weight_decay=weight_decay, decay_biases=False)
    assert look(run.seen)[1].rank == N


@SIZES
def test_undecayed_biases_leave_the_samples_in_the_affine_space(sizes):
    run = train(sizes, N, weight_decay=1e-2, decay_biases=False)
    assert away_from(look(run.seen)[1].space, run.x) < 1e-10


@SIZES
@MOMENTUM
def test_kappa_is_one_without_decay(sizes, momentum, lr):
    run = train(sizes, N, lr=lr, momentum=momentum)
    decay = decay_factor(run.seen)
    assert (decay.weight, decay.bias, decay.rank) == (1.0, 1.0, N)


@pytest.mark.parametrize("bias", [True, False])
@MOMENTUM
def test_kappa_comes_from_the_recipe_when_there_are_too_many_samples(momentum, lr, bias):
    """With n >= d no eigenvalue repeats; the recipe's own recursion is exact."""
    recipe = Recipe(optimizer="sgd", lr=lr, steps=100, momentum=momentum, weight_decay=1e-2)
    run = train(
        (6, 30, 1), 12, lr=lr, momentum=momentum, weight_decay=1e-2, steps=100, bias=bias, recipe=recipe
    )
    decay = decay_factor(run.seen)
    assert "recipe" in decay.source
    assert decay.weight == decay.bias == pytest.approx(what_sgd_leaves(lr, 100, 1e-2, momentum), abs=1e-12)


def test_kappa_is_assumed_and_said_to_be_when_nothing_tells_it():
    run = train((6, 30, 1), 12, weight_decay=1e-2, steps=50)
    decay = decay_factor(run.seen)
    assert (decay.weight, decay.bias) == (1.0, 1.0)
    assert decay.source.startswith("assumed")


def test_without_initial_weights_the_final_ones_are_the_target():
    evidence = dataclasses.replace(train(WIDE, N, steps=5).seen, init=None)
    decay = decay_factor(evidence)
    assert (decay.weight, decay.bias) == (0.0, 0.0)
    assert all(torch.equal(t, evidence.final[k]) for k, t in decayed_target(evidence, decay).items())


# --- row and column space ----------------------------------------------------------------------------------

HOW = {
    "full batch": {},
    "mini-batch": {"batch": 3},
    "momentum": {"momentum": 0.9, "lr": 0.01},
    "Nesterov mini-batch": {"momentum": 0.9, "lr": 0.01, "nesterov": True, "batch": 2},
    "decay": {"weight_decay": 1e-2},
    "all of them": {"weight_decay": 1e-2, "momentum": 0.9, "lr": 0.01, "batch": 3},
    "three steps": {"steps": 3},
    "tanh": {"activation": "tanh"},
    "softplus": {"activation": "softplus"},
}


@SIZES
@pytest.mark.parametrize("how", HOW)
def test_rows_contain_every_sample_and_the_affine_space_too(sizes, how):
    run = train(sizes, N, **HOW[how])
    first = look(run.seen)[1]
    assert first.rank == N
    assert outside(row_space(run.seen, N), with_one(run.x)) < 1e-10
    assert first.space.dim == N - 1
    assert away_from(first.space, run.x) < 1e-10


def test_the_affine_space_is_no_larger_than_the_samples_affine_hull():
    run = train(WIDE, N)
    space = look(run.seen)[1].space
    z = draw(5, space.dim)
    weights = torch.linalg.lstsq(run.x.T, space.expand(z).T)
    torch.testing.assert_close(run.x.T @ weights.solution, space.expand(z).T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        weights.solution.sum(0), torch.ones(5, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_without_biases_the_space_is_linear_and_nothing_is_said_of_norms():
    run = train(WIDE, N, bias=False)
    decay, first = look(run.seen)
    assert decay.bias == decay.weight == 1.0
    assert (first.rank, first.space.dim, first.space.origin, first.norm) == (N, N, None, None)
    assert away_from(first.space, run.x) < 1e-10
    assert len(first.exclusive) == 0


@SIZES
def test_columns_contain_the_accumulated_signals(sizes):
    """The signals of plain SGD, collected with a hook while it ran: DW_1 = - lr sum_t sum_i delta_i(t) x_i'."""
    collected = torch.zeros(N, sizes[1], dtype=torch.float64)

    def observe(model, x, y):
        twin = dense(sizes)
        twin.load_state_dict(model.state_dict())
        pre = []
        twin[0].register_forward_hook(lambda layer, u, out: pre.append(out))
        loss = (twin(x) - y).square().mean()
        collected.add_(torch.autograd.grad(loss, pre[0])[0])

    run = train_anew(sizes, N, steps=100, observe=observe)
    first = look(run.seen)[1]
    assert first.columns.shape == (sizes[1], N)
    assert outside(first.columns.T, collected) < 1e-10
    rebuilt = -0.05 * collected.T @ run.x
    torch.testing.assert_close(rebuilt, run.final["0.weight"] - run.init["0.weight"], rtol=1e-9, atol=1e-12)


def test_more_samples_than_features_give_a_full_rank():
    run = train((6, 30, 1), 12, steps=100)
    first = look(run.seen)[1]
    assert first.full
    assert first.rank >= 6


# --- rank by gap -------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize(
    ("dtype", "gap", "error"), [(torch.float64, 1e12, 1e-10), (torch.float32, 1e4, 1e-5)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_the_rank_is_n_in_double_and_single_precision(sizes, dtype, gap, error, weight_decay):
    run = train(sizes, N, weight_decay=weight_decay)
    decay, first = look(stored_as(run, dtype))
    assert decay.weight == pytest.approx(what_sgd_leaves(0.05, 100, weight_decay), abs=error)
    assert (first.rank, first.flat, first.full) == (N, False, False)
    assert first.gap > gap
    assert away_from(first.space, run.x) < error


@SIZES
def test_half_precision_keeps_the_rank_but_little_of_the_space(sizes):
    """In float16 rounding leaves a gap of some 30 here; the affine space is good to a percent."""
    run = train(sizes, N)
    first = look(stored_as(run, torch.float16))[1]
    assert (first.rank, first.flat) == (N, False)
    assert 10 < first.gap < 100
    assert 1e-4 < away_from(first.space, run.x) < 1e-2


@SIZES
def test_in_bfloat16_the_gap_is_gone(sizes):
    run = train(sizes, N)
    first = look(stored_as(run, torch.bfloat16))[1]
    assert first.flat
    assert first.rank <= N


@SIZES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_no_precision_gives_a_confident_rank_above_n(sizes, dtype, steps, lr):
    """Small changes drown in rounding sooner: fewer samples show, or none, but never more than there are."""
    first = look(stored_as(train(sizes, N, steps=steps, lr=lr), dtype))[1]
    assert first.flat or first.rank <= N


@SIZES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decay_in_half_precision_needs_the_recipe(sizes, dtype):
    """Kappa cannot be measured there; the recipe tells it, and without one the rank is flat or full."""
    run = train(sizes, N, weight_decay=1e-2)
    blind = stored_as(run, dtype)
    first = look(blind)[1]
    assert first.flat or first.full
    told = dataclasses.replace(blind, recipe=Recipe(optimizer="sgd", lr=0.05, steps=100, weight_decay=1e-2))
    decay, first = look(told)
    assert decay.weight == pytest.approx(what_sgd_leaves(0.05, 100, 1e-2), abs=1e-12)
    assert first.flat or first.rank <= N


ADAPTIVE = pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)


@SIZES
@ADAPTIVE
@pytest.mark.parametrize("steps", [5, 50])
def test_elementwise_rescaling_gives_no_rank(sizes, optimizer, steps):
    first = look(train(sizes, N, optimizer=optimizer, lr=3e-3, steps=steps).seen)[1]
    assert first.flat or first.full
    assert first.rank != N or first.flat


def test_adam_gives_no_rank_with_features_that_are_always_zero():
    """As the border pixels of digits are."""
    x = 3 * draw(N, 40, seed=1) / 40**0.5
    x[:, :4] = 0.0
    first = look(train_anew(WIDE, optimizer=torch.optim.Adam, lr=3e-3, steps=60, x=x).seen)[1]
    assert first.flat or first.full


def test_no_step_gives_no_rank():
    first = look(train(WIDE, N, steps=0).seen)[1]
    assert (first.rank, first.flat, first.space.dim) == (0, True, 40)
    assert len(first.exclusive) == 0


def test_rank_by_gap_counts_what_stands_above_the_floor():
    spectrum = torch.tensor([5.0, 3.0, 1.0, 1e-9, 1e-12], dtype=torch.float64)
    assert rank_by_gap(spectrum, 1e-10) == (3, pytest.approx(1e9))
    assert rank_by_gap(spectrum, 1e-3) == (3, pytest.approx(1e3))
    assert rank_by_gap(spectrum, 4.0)[0] == 1
    assert rank_by_gap(spectrum, 6.0) == (0, 1.0)
    assert rank_by_gap(spectrum[:3], 1e-6) == (3, pytest.approx(1e6))
    assert rank_by_gap(spectrum, 1e-10, largest=2)[0] <= 2
    assert rank_by_gap(spectrum[:0], 1e-10) == (0, 1.0)


def test_gram_solver_is_a_pseudo_inverse():
    rows = draw(6, 9)
    gram = rows @ rows.T
    factor = gram_solver(gram)
    torch.testing.assert_close(factor @ factor.T, torch.linalg.inv(gram), rtol=1e-9, atol=1e-9)
    twice = torch.cat([rows, rows[:2], 0 * rows[:1]])
    factor = gram_solver(twice @ twice.T)
    assert factor.shape == (9, 6)
    t = draw(9, seed=1)
    fitted = twice.T @ (factor @ (factor.T @ (twice @ t)))
    torch.testing.assert_close(fitted, rows.T @ torch.linalg.solve(gram, rows @ t), rtol=1e-9, atol=1e-9)


def test_gram_solver_does_not_care_about_units():
    rows, units = draw(6, 9), torch.logspace(-6, 6, 6, dtype=torch.float64)
    gram = rows @ rows.T
    scaled = gram_solver(units[:, None] * gram * units)
    assert scaled.shape == (6, 6)
    inverse = (scaled @ scaled.T) * units[:, None] * units
    torch.testing.assert_close(inverse, torch.linalg.inv(gram), rtol=1e-9, atol=1e-9)


# --- exclusive neurons -------------------------------------------------------------------------------------


def gated(shared, n=4, d=12, seed=0):
    """A net in which sample i alone opens neurons 3i, 3i+1, 3i+2, and pairs or all open `shared` more."""
    x = torch.eye(n, d, dtype=torch.float64) + 0.1 * draw(n, d, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    dual = torch.linalg.pinv(x).T  # dual_i x_j = [i = j]
    rows, biases = [], []
    for i in range(n):
        for _ in range(3):
            size = 1 + torch.rand((), generator=g, dtype=torch.float64)
            rows.append(size * dual[i])
            biases.append(-0.5 * size)
    for k in range(shared):
        open_to = (torch.arange(n) == k % n) | (torch.arange(n) == (k + 1) % n) | (k % 3 == 0)
        size = 1 + torch.rand(n, generator=g, dtype=torch.float64)
        rows.append(torch.where(open_to, size, 0.0) @ dual)
        biases.append(torch.tensor(-0.3, dtype=torch.float64))
    model = dense((d, len(rows), 1), seed=seed)
    with torch.no_grad():
        model[0].weight.copy_(torch.stack(rows))
        model[0].bias.copy_(torch.stack(biases))
    return model, x


def descend(model, x, steps, lr, frozen=()):
    init, y = state(model), torch.tensor([[1.0], [-2.0], [0.5], [-1.5]], dtype=torch.float64)[: len(x)]
    optim = torch.optim.SGD([p for k, p in model.named_parameters() if k not in frozen], lr=lr)
    gates = []
    for _ in range(steps):
        optim.zero_grad()
        (model(x) - y).square().mean().backward()
        optim.step()
        gates.append(model[0](x) > 0)
    assert all(torch.equal(gate, gates[0]) for gate in gates)
    return Evidence.from_module(model, input=InputSpec((x.shape[1],)), init=init)


def test_neurons_of_one_sample_give_it_away():
    model, x = gated(shared=0)
    first = look(descend(model, x, steps=20, lr=0.05))[1]
    assert len(first.exclusive) == len(x)
    assert float(distance(first.exclusive, x).max()) < 1e-8
    assert float(distance(x, first.exclusive).max()) < 1e-8


def test_neurons_of_several_samples_give_no_false_ones():
    """They share sets of two or four active samples, and their ratios DW_j / Db_j are mixtures close together."""
    model, x = gated(shared=24)
    first = look(descend(model, x, steps=20, lr=0.05))[1]
    assert len(first.exclusive) == len(x)
    assert float(distance(x, first.exclusive).max()) < 1e-8
    assert float(distance(first.exclusive, x).max()) < 1e-8


@pytest.mark.parametrize(
    ("steps", "frozen"), [(1, ()), (20, ("2.weight", "2.bias"))], ids=["one step", "frozen head"]
)
def test_mixtures_come_along_while_the_head_stands_still(steps, frozen):
    """Neurons that share samples then have equal ratios: the samples are among them, the rest are to be checked."""
    model, x = gated(shared=24)
    first = look(descend(model, x, steps, 0.05, frozen))[1]
    assert float(distance(first.exclusive, x).max()) < 1e-8
    assert float(distance(x, first.exclusive).max()) > 0.1
    assert away_from(first.space, first.exclusive) < 1e-8


def test_exclusive_neurons_survive_rounding_to_single_precision():
    model, x = gated(shared=0)
    evidence = descend(model, x, steps=20, lr=0.05)
    cast = [{k: p.float() for k, p in weights.items()} for weights in (evidence.init, evidence.final)]
    first = look(Evidence.from_module(model, input=evidence.input, init=cast[0], final=cast[1]))[1]
    assert float(distance(first.exclusive, x).max()) < 1e-4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [30, 200])
def test_random_nets_give_no_false_exclusive_samples(seed, steps):
    run = train((20, 300, 1), 6, steps=steps, seed=seed)
    exclusive = look(run.seen)[1].exclusive
    assert len(exclusive) > 0
    assert float(distance(run.x, exclusive).max()) < 1e-8


def test_digits_give_no_false_exclusive_samples_in_double_precision_and_mixtures_in_single():
    """Rounding hides what training did to the ratios of neurons that share samples; hence the check before use."""
    victim = make_victim(Case(data="digits", n=8, hidden=(400,), training=TrainConfig(max_steps=50)))
    seen, x = victim.evidence, victim.evidence.input.encode(victim.truth.train).flatten(1)
    cast = [{k: p.float() for k, p in weights.items()} for weights in (seen.init, seen.final)]
    rounded = Evidence.from_module(victim.model, input=seen.input, init=cast[0], final=cast[1])
    exact, coarse = look(seen)[1].exclusive, look(rounded)[1].exclusive
    assert float(distance(x, exact).max()) < 1e-8
    assert float(distance(coarse, exact).max()) < 1e-3
    assert len(coarse) >= len(exact) > 3


# --- the norm of an input ----------------------------------------------------------------------------------


def admitted(evidence, x):
    low, high = survey(evidence).space.radius or (0.0, torch.inf)
    return (x.norm(dim=1) >= low) & (x.norm(dim=1) <= high)


@SIZES
@pytest.mark.parametrize("how", ["full batch", "mini-batch", "momentum", "decay"])
def test_the_search_admits_every_sample(sizes, how):
    run = train(sizes, N, **HOW[how])
    assert bool(admitted(run.seen, run.x).all())


@pytest.mark.parametrize("frozen", [("0.bias",), ("0.weight", "0.bias")], ids=["bias", "whole layer"])
def test_the_search_admits_every_sample_when_parts_of_the_first_layer_stood_still(frozen):
    run = train(WIDE, N, frozen=frozen)
    assert bool(admitted(run.seen, run.x).all())


@pytest.mark.parametrize("data", ["balanced", "one-sided"])
def test_the_search_admits_every_sample_when_signals_cancel_or_align(data):
    """Nearly linear nets: labels of both signs cancel in Db_1 (norm too large), of one sign cancel in DW_1."""
    x = 0.3 * draw(30, 80, seed=1)
    model = dense((80, 100, 1), "tanh" if data == "balanced" else "softplus")
    with torch.no_grad():
        model[0].weight.mul_(0.1)
        model[0].bias.zero_()
        model[2].bias.zero_()
    init = state(model)
    y = (
        torch.tensor([1.0, -1.0] * 15).double()[:, None]
        if data == "balanced"
        else torch.ones(30, 1).double() * 30
    )
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(5):
        optim.zero_grad()
        (model(x) - y).square().mean().backward()
        optim.step()
    evidence = Evidence.from_module(model, input=InputSpec((80,)), init=init)
    assert bool(admitted(evidence, x).all())


def test_what_needs_a_dense_chain_says_so():
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 1)).double()
    evidence = Evidence.from_module(model, input=InputSpec((1, 3, 3)), init=state(model))
    with pytest.raises(MissingEvidence, match="dense network"):
        first_layer(evidence, decay_factor(evidence))
