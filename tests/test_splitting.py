"""Splitting candidates, and its rivals: what a split changes, when it is made, and what is left unchanged."""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import hessian

from exhume import match, presets, report
from exhume.ambiguity import Ambiguity
from exhume.audit import Plan
from exhume.change import Decay
from exhume.equations.span import Span
from exhume.errors import ExhumeError, MissingEvidence, TargetError
from exhume.evidence import Evidence, InputSpec
from exhume.functional import Relaxed
from exhume.heads import Labelled, RunnerUp, blocks
from exhume.joint import Joint
from exhume.lanczos import lanczos
from exhume.lineage import first
from exhume.metrics import rho, rho_pm
from exhume.moves.base import State
from exhume.moves.curvature import (
    best_step,
    changes,
    displacement,
    lowest,
    predicted,
    quartic,
    splitting_product,
    stability,
)
from exhume.moves.grow import Block, Grow, Reseed
from exhume.moves.growth import Growth
from exhume.moves.mirror import Mirror
from exhume.moves.policy import Policy, Routine, published, scaled, stable
from exhume.moves.reduce import Merge, Prune
from exhume.moves.split import SignedSplit, Split, halves
from exhume.multipliers import Floored, Plain, Squares
from exhume.objective import Objective
from exhume.optimisers import Adam, Lazy, Momentum, PerShare, inherited
from exhume.solvers.first_order import follow
from exhume.solvers.varpro import VarPro
from exhume.spaces import full, sphere
from exhume.survey import survey
from exhume.terms import Box
from exhume.truth import Truth
from exhume.victims.features import random_features
from planted import NO_DECAY, dense, draw, generator, planted_span, random_evidence

ALONE = Decay(0.0, 0.0, "final weights alone")
M, D = 5, 4
BOX = Box(-0.3 * torch.ones(D).double(), 0.4 * torch.ones(D).double(), 0.5)
LOSSES = ("haim", "buzaglo", "loo", "projected")


def problem(kind, activation="softplus", smoothing=None, terms=(BOX,), floor=0.3):
    """Small smooth problems of each kind that is attacked."""
    space = full(D)
    if kind == "projected":
        evidence = random_evidence((D, 12, 2), activation)
        return Objective(Span((0.0, 1.0)).bind(evidence, space, NO_DECAY, smoothing), space, terms)
    if kind == "loo":
        evidence = random_evidence((D, 12, 1), activation)
        equation = Span((0.0, 1.0)).bind(evidence, space, NO_DECAY, smoothing)
        return Joint(equation, space, 1 / M, terms, Plain(), None, 2)
    head, outputs = (Labelled(), 1) if kind == "haim" else (RunnerUp(), 3)
    evidence = replace(random_evidence((D, 9, 7, outputs), activation), init=None)
    equation = Span((1.0,)).bind(evidence, space, ALONE, smoothing)
    return Joint(
        equation,
        space,
        1 / M,
        terms,
        Floored(floor) if kind == "haim" else Squares(floor),
        lambda z, a, label: head.coefficients(a, label, lambda: evidence.output(z.detach())),
        1,
        None,
        blocks(M, outputs),
    )


def start(made, m=M, seed=1):
    z = 0.7 * draw(m, D, seed=seed)
    if isinstance(made, Objective):
        return z
    return torch.cat([z, 0.2 + draw(m, made.unknowns, seed=seed + 1).abs()], 1)


def state(made, row=None, period=10, most=40, refits=True):
    row = start(made) if row is None else row
    label = (
        made.label if isinstance(made, Joint) and len(made.label) else torch.zeros(len(row), dtype=torch.long)
    )
    return State(row, first(label), made, made.equation, 0, period, most, 1.4, generator(7), refits)


def every(view):
    """The splitting matrices in full, by the definition [m, q, q]."""

    def of(one, i):
        def along(z):
            others = view.z.detach()
            return view.along(torch.where(torch.arange(len(others))[:, None] == i, z, others)).sum()

        return hessian(along)(one)

    return torch.stack([of(one, i) for i, one in enumerate(view.z)])


# --- T1 to T3: what a split changes -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSES)
def test_two_halves_along_the_bottom_eigenvector_change_the_loss_by_half_eta_squared_lambda(kind):
    """T1, by the loss of the whole set of candidates, not by the formula of one; multipliers as they were."""
    made = problem(kind)
    before = state(made, refits=False)
    view = before.view
    pairs = lowest(view, D)
    eta = 1e-3
    for i in range(M):
        step = torch.where(torch.arange(M) == i, eta, 0.0).double()
        change = halves(before, torch.tensor([i]), pairs.vector, step, "split")
        expected = 0.5 * eta**2 * float(pairs.value[i])
        if isinstance(made, Joint):
            found = made.of(change.lineage).at(change.row).loss - before.loss
        else:  # solving for the multipliers of the halves would lower the loss further: their split is held
            found = float(changes(view, pairs.vector, step)[i])
        assert abs(expected) > 1e-12
        # A difference of two losses near 1 is exact to about 1e-15.
        assert found == pytest.approx(expected, rel=1e-5, abs=2e-14)


@pytest.mark.parametrize("kind", ["haim", "buzaglo", "loo"])
def test_the_hessian_is_a_gauss_newton_part_and_the_splitting_matrices(kind):
    """T2: in all coordinates, 2 G'G + blkdiag(S_i), with G = d(Phi' c)/dz."""
    made = problem(kind)
    row = start(made)
    view = made.view(row)
    q = view.z.numel()

    def loss(z):
        missed = made._missed(z.view_as(view.z), view.coef)
        return missed + view.penalty(z.view_as(view.z)).sum()

    whole = hessian(loss)(view.z.flatten())
    jacobian = torch.stack(
        [view.equation.jvp(view.z, view.coef, e.view_as(view.z)) for e in torch.eye(q).double()], 1
    )
    parts = 2 * jacobian.T @ jacobian + torch.block_diag(*every(view))
    torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-12)
    assert float(torch.linalg.eigvalsh(whole)[0]) >= float(torch.linalg.eigvalsh(every(view)).min()) - 1e-12


@pytest.mark.parametrize("kind", LOSSES)
def test_one_product_gives_all_splitting_matrices(kind):
    """T3: the same as a matrix of second derivatives for each candidate, priors included."""
    view = state(problem(kind)).view
    product = splitting_product(view)
    found = torch.stack([product(e.expand(M, D)) for e in torch.eye(D).double()], 2)
    torch.testing.assert_close(found, every(view), rtol=1e-9, atol=1e-12)


def test_lanczos_finds_the_ends_of_every_spectrum():
    """Also where a Krylov space is exhausted early: the spectra hold multiple eigenvalues and zeros."""
    basis = torch.linalg.qr(draw(3, 12, 12))[0]
    values = torch.stack([torch.linspace(-2, 5, 12), torch.tensor([0.0] * 10 + [3.0, 4.0]), torch.zeros(12)])
    matrices = basis @ values.double().diag_embed() @ basis.mT
    pairs = lanczos(lambda v: (matrices @ v[:, :, None])[..., 0], draw(3, 12, seed=5), 12)
    torch.testing.assert_close(pairs.values[:, 0], values.double().amin(1), rtol=0, atol=1e-9)
    torch.testing.assert_close(pairs.values[:, -1], values.double().amax(1), rtol=0, atol=1e-9)
    missed = (matrices @ pairs.vectors.mT).mT - pairs.values[..., None] * pairs.vectors
    assert float(missed.norm(dim=2).max()) < 1e-8
    few = lanczos(lambda v: (matrices @ v[:, :, None])[..., 0], draw(3, 12, seed=5), 4)
    missed = (matrices @ few.vectors.mT).mT - few.values[..., None] * few.vectors
    torch.testing.assert_close(few.residuals, missed.norm(dim=2), rtol=1e-6, atol=1e-9)


# --- T4: a split at no distance ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSES)
def test_a_split_at_no_distance_changes_no_loss(kind):
    """T4: outside the box, below the floor, and twice in a row; so also for candidates split again."""
    made = problem(kind, floor=0.9)
    before = state(made, refits=False)
    assert float(before.view.penalty(before.view.z).min()) > 0
    now = before
    for chosen in ([0, 3], [1, 5]):
        change = halves(
            now, torch.tensor(chosen), draw(len(now.row), D), torch.zeros(len(now.row)).double(), "split"
        )
        now = replace(now, row=change.row, lineage=change.lineage)
        assert now.loss == pytest.approx(before.loss, rel=1e-12)
    assert len(now.row) == M + 4
    assert float(now.lineage.share.sum()) == M
    assert now.lineage.share.min() == 0.25


@pytest.mark.parametrize("kind", ["haim", "buzaglo"])
def test_labels_follow_children(kind):
    made = problem(kind)
    before = state(made)
    change = halves(before, torch.tensor([0, M - 1]), draw(M, D), torch.full((M,), 0.1).double(), "split")
    parents = before.lineage.label[change.source]
    assert torch.equal(change.lineage.label, parents)
    assert change.lineage.label.tolist()[-4:] == [
        0,
        0,
        before.lineage.label.max(),
        before.lineage.label.max(),
    ]
    assert [life.parent for life in change.lineage.lives if life.move == "split"] == [0, 0, M - 1, M - 1]


# --- T5: ReLU --------------------------------------------------------------------------------------------------


def relu_view(smoothing):
    evidence = random_evidence((D, 12, 7, 1), "relu")
    equation = Span((1.0,)).bind(evidence, full(D), NO_DECAY, smoothing)
    made = Joint(equation, full(D), 1 / M, (), Plain())
    return made.view(torch.cat([0.7 * draw(M, D, seed=1), 0.2 + draw(M, 1, seed=2).abs()], 1))


def differences(view, eta=1e-4):
    """v' S v by finite differences of the values along an axis [m, q]."""
    axes = torch.eye(D).double()
    return torch.stack(
        [
            (view.along(view.z + eta * e) + view.along(view.z - eta * e) - 2 * view.along(view.z)) / eta**2
            for e in axes
        ],
        1,
    )


def test_relu_has_no_curvature_and_a_matched_softplus_has_that_of_its_values():
    """T5: the Hessian of a ReLU whose derivative alone is smoothed is not that of its values."""
    assert float(splitting_product(relu_view(None))(draw(M, D)).abs().max()) == 0.0
    assert float(differences(relu_view(None)).abs().max()) < 1e-6  # nothing bends within a region of activity
    for smoothing, agrees in ((8.0, True), (Relaxed(8.0), False)):
        view = relu_view(smoothing)
        product = splitting_product(view)
        found = torch.stack([product(e.expand(M, D))[:, i] for i, e in enumerate(torch.eye(D).double())], 1)
        apart = float((found - differences(view)).abs().max() / found.abs().max())
        assert (apart < 1e-4) == agrees


# --- T6: a strict minimum --------------------------------------------------------------------------------------


def stuck():
    """A strict minimum of too few candidates, by Newton's steps on gradients; smooth, so that it is one."""
    made = planted_span((D, 15, 1), "softplus", n=4, node=1.0)
    equation = Span((1.0,)).bind(made.evidence, full(D), NO_DECAY)
    for seed in range(20):
        problem = Objective(equation, full(D))
        z = draw(2, D, seed=seed)
        point = VarPro(iterations=300, tolerance=1e-12).minimise(problem, z).point
        coef = point.coef

        def loss(z, coef=coef):
            return (equation.target() - equation.contribution(z.view(2, D), coef)).square().sum()

        curvature = hessian(loss)(point.z.flatten())
        values = lowest(problem.view(point.z), D).value
        if float(torch.linalg.eigvalsh(curvature)[0]) > 0 and float(values.min()) < 0 and point.loss > 1e-6:
            return problem, point
    raise AssertionError("no strict minimum of negative splitting matrix was met")


def test_a_split_leaves_a_strict_minimum_that_noise_does_not():
    """T6: the Hessian is positive, a splitting matrix is not; noise returns to the same loss, the halves do not."""
    problem, point = stuck()
    solver = VarPro(iterations=300, tolerance=1e-12)
    for seed in range(5):
        noisy = solver.minimise(problem, point.z + 0.01 * draw(2, D, seed=100 + seed)).point
        assert noisy.loss == pytest.approx(point.loss, rel=1e-6)
    made = Split(worth=0.0, at_once=1).propose(state(problem, point.z))
    assert made is not None and made.gain > 0
    after = solver.minimise(problem.of(made.lineage), made.row).point
    assert after.loss < 0.9 * point.loss


def test_the_closed_form_step_is_the_best_of_its_model_and_its_gain_is_seen():
    """Delta(eta) = lambda eta^2 / 2 + c eta^4, at eta* = sqrt(-lambda / 4c), is -lambda^2 / 16c."""
    problem, point = stuck()
    view = problem.view(point.z)
    pairs = lowest(view, D)
    fourth = quartic(view, pairs.vector)
    step, gain = best_step(pairs.value, fourth), predicted(pairs.value, fourth)
    i = int(gain.argmax())
    model = 0.5 * pairs.value * step**2 + fourth * step**4
    torch.testing.assert_close(-model[i], gain[i])
    found = -changes(view, pairs.vector, step)
    assert float(found[i]) == pytest.approx(float(gain[i]), rel=0.5)
    for factor in (0.3, 3.0):
        assert float(-changes(view, pairs.vector, factor * step)[i]) < float(found[i])


def test_stable_candidates_are_certified_and_others_are_not():
    problem, point = stuck()
    scores = stability(problem.view(point.z), lowest(problem.view(point.z), D))
    assert torch.equal(stable(state(problem, point.z), D), scores) and float(scores.min()) < 0
    assert f"more than {-float(scores.min()):.2g} of it" in Policy().told(state(problem, point.z))[0]
    truth = planted_span((D, 15, 1), "softplus", n=4, node=1.0)
    there = Objective(Span((1.0,)).bind(truth.evidence, full(D), NO_DECAY), full(D))
    moved = there.view(truth.x)
    assert float(lowest(moved, D).value.abs().max()) < 1e-8  # no residual, nothing to split for


# --- T7: the optimiser -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimiser", [Adam(0.01), Lazy(0.01), Momentum(0.02)], ids=["adam", "lazy", "momentum"]
)
@pytest.mark.parametrize("kind", ["haim", "buzaglo", "loo"])
def test_tied_copies_go_where_the_whole_candidate_would(optimiser, kind):
    """T7: with the remapped state and gradients per share, 30 steps after a split at no distance."""
    made = problem(kind)
    leaf = start(made)
    optimizer = optimiser.optimizer(leaf, made)
    row = follow(optimizer, leaf, lambda step: made, 20, 0.0, None).point.z
    before = state(made, row, refits=False)
    change = halves(before, torch.tensor([0, 3]), draw(M, D), torch.zeros(M).double(), "split")
    again = change.row.clone()
    other = inherited(optimiser.optimizer(again, made), again, optimizer, change.source)
    share = change.lineage.share
    pieces = follow(other, again, lambda s: PerShare(made.of(change.lineage), share), 30, 0.0, None)
    leaf.copy_(row)
    whole = follow(optimizer, leaf, lambda step: made, 30, 0.0, None)
    torch.testing.assert_close(pieces.point.z, whole.point.z[change.source], rtol=1e-6, atol=1e-8)
    assert pieces.point.loss == pytest.approx(whole.point.loss, rel=1e-8)


# --- the moves, and what they claim ------------------------------------------------------------------------------


def moves(kind):
    some = [Split(worth=0.0, rest=0), Grow(starts=8, steps=20), Merge(apart=10.0, rise=1e3), Prune(rise=0.5)]
    return [*some, SignedSplit(worth=0.0)] if kind in ("loo", "projected") else some


@pytest.mark.parametrize("kind", LOSSES)
def test_the_gain_a_move_claims_is_that_of_the_losses_computed_anew(kind):
    made = problem(kind)
    before = state(made).settled
    claimed = 0
    for move in moves(kind):
        found = move.propose(before)
        if found is None:
            continue
        claimed += 1
        after = made.of(found.lineage).at(found.row).loss
        assert found.gain == pytest.approx(
            made.of(before.lineage).at(before.row).loss - after, rel=1e-9, abs=1e-14
        )
        assert len(found.lineage) == len(found.row) == len(found.source) == len(found.lineage.share)
        assert found.cost >= found.work > 0 or len(found.row) < len(before.row)
    assert claimed >= 3


def test_a_fresh_candidate_gains_what_its_block_says():
    """b'(G_zz - G_zX G_XX^+ G_Xz)^-1 b against the fall of the loss when it is added, for blocks of four."""
    made = problem("projected")
    before = state(made)
    z = draw(3, D, seed=9)
    block = Block(before, before.view)
    gains = block.fall(z, torch.zeros(3, dtype=torch.long)) - block.penalty(z)
    for one, gain in zip(z, gains, strict=True):
        after = made.at(torch.cat([before.row, one[None]])).loss
        assert float(gain) == pytest.approx(before.loss - after, rel=1e-6)


@pytest.mark.parametrize("floor", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["haim", "buzaglo"])
def test_multipliers_keep_their_sign_and_their_floor(kind, floor):
    """Solved for, and of fresh candidates, whichever of them the residual would like negative."""
    made = problem(kind, floor=floor)
    before = state(made).settled
    for move in (Split(worth=0.0, rest=0), Grow(starts=8, steps=10), Reseed(share=10.0)):
        found = move.propose(before)
        if found is not None:
            of = made.multipliers.of(found.row[:, D:])
            assert float(of.min()) >= floor - 1e-5
    row = made.refitted(start(made))
    assert float(made.multipliers.of(row[:, D:]).min()) >= floor - 1e-5
    assert made.at(row).loss <= made.at(start(made)).loss
    assert SignedSplit(worth=0.0).propose(before) is None


@pytest.mark.parametrize("kind", ["haim", "loo"])
def test_solved_multipliers_are_the_best_there_are(kind):
    """No small change of any of them lowers the misfit, but into the floor."""
    made = problem(kind, floor=0.2)
    row = made.refitted(start(made))
    q = row.clone()
    low = made.multipliers.floor
    for i in range(M):
        for j in range(D, row.shape[1]):
            for step in (1e-3, -1e-3):
                other = q.clone()
                other[i, j] += step
                if low is None or float(made.multipliers.of(other[i, j])) >= low:
                    assert made.at(other).misfit >= made.at(row).misfit - 1e-12


@pytest.mark.parametrize("kind", LOSSES)
def test_halves_merged_again_are_the_candidate_they_were(kind):
    """T13: coordinates, multipliers, share, label and loss."""
    made = problem(kind)
    before = state(made, refits=False)
    chosen, eta = torch.tensor([1, 3]), torch.full((M,), 1e-3).double()
    change = halves(before, chosen, lowest(before.view, D).vector, eta, "split")
    split = replace(before, row=change.row, lineage=change.lineage, step=5)
    found = Merge(apart=0.1, rise=10.0).propose(split)
    order = torch.tensor([0, 2, 4, 1, 3])  # those that were left alone, then the pairs
    torch.testing.assert_close(found.row, before.row[order], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.lineage.share, torch.ones(M).double())
    assert torch.equal(found.lineage.label, before.lineage.label[order])
    assert made.of(found.lineage).at(found.row).loss == pytest.approx(before.loss, rel=1e-6)


def test_candidates_of_different_labels_are_not_merged():
    made = problem("haim")
    row = start(made)
    row[:, :D] = row[0, :D]
    found = Merge(apart=0.1, rise=1e3).propose(state(made, row, refits=False))
    assert found.lineage.label.bincount().tolist() == [
        2,
        1,
    ]  # three of one label and two of the other, in pairs


def test_unneeded_candidates_are_removed_and_drawn_anew():
    planted = planted_span((D, 30, 1), "tanh", n=3, node=1.0)
    made = Objective(Span((1.0,)).bind(planted.evidence, full(D), NO_DECAY), full(D))
    extra = state(made, torch.cat([planted.x + 1e-4, 3 * draw(2, D, seed=4)]))
    fewer = Prune(rise=0.9).propose(extra)
    assert len(fewer.row) < 5 and fewer.gain >= -0.9 * extra.loss
    assert fewer.lineage.ids == tuple(i for i in range(5) if i in fewer.lineage.ids)
    exact = state(made, torch.cat([planted.x, 3 * draw(2, D, seed=4)]))
    assert Prune().propose(exact).lineage.ids == (0, 1, 2)
    again = Reseed(share=1e6).propose(exact)
    assert again.lineage.ids == (0, 1, 2, 5, 6) and again.source.tolist() == [0, 1, 2, -1, -1]


@pytest.mark.parametrize("kind", ["haim", "projected"])
def test_caps_are_kept(kind):
    """Room, part of the candidates, number at once, and the rest of the newborn."""
    made = problem(kind)
    before = state(made, most=M + 1)
    every = Split(worth=0.0, part=1.0, rest=0)
    assert len(every.propose(before).row) <= M + 1
    assert every.propose(replace(before, most=M)) is None
    assert Grow(starts=4, steps=2, at_once=3).propose(replace(before, most=M)) is None
    free = replace(before, most=40)
    assert len(replace(every, part=0.4).propose(free).row) <= M + 2
    assert len(replace(every, at_once=1).propose(free).row) == M + 1
    first_round = every.propose(free)
    young = replace(free, row=first_round.row, lineage=first_round.lineage, step=5)
    again = Split(worth=0.0, part=1.0, rest=1).propose(young)
    newborn = {life.candidate for life in first_round.lineage.lives if life.move == "split"}
    assert again is None or not newborn & {life.parent for life in again.lineage.lives if life.born == 5}


def test_copies_stay_on_the_sphere():
    evidence = random_evidence((D, 12, 1), "softplus")
    space = sphere(D, 1.3)
    made = Objective(Span((1.0,)).bind(evidence, space, NO_DECAY), space)
    before = state(made, space.retract(draw(M, D, seed=1)))
    pairs = lowest(before.view, D)
    assert float((pairs.vector * before.row).sum(1)[pairs.value < -1e-6].abs().max()) < 1e-8
    step = torch.full((M,), 1e-3).double()
    torch.testing.assert_close(
        changes(before.view, pairs.vector, step), 0.5e-6 * pairs.value, rtol=1e-3, atol=1e-13
    )
    for z in displacement(before.view, pairs.vector, 100 * step):
        torch.testing.assert_close(z.norm(dim=1), torch.full((M,), 1.3).double())
    found = Split(worth=0.0, rest=0).propose(before)
    torch.testing.assert_close(found.row.norm(dim=1), torch.full((len(found.row),), 1.3).double())


def test_the_policy_takes_what_gains_most_for_its_cost():
    made = problem("projected")
    before = state(made)
    options = (Split(worth=0.0, rest=0), Grow(starts=8, steps=20), SignedSplit(worth=0.0))
    rates = {move.name: (p.gain / p.cost if (p := move.propose(before)) else 0.0) for move in options}
    moved = Policy(moves=options, reductions=(), least=0.0).moved(state(made))
    newest = moved.state.lineage.lives[-1].move
    assert newest == max(rates, key=rates.get)
    assert moved.state.loss < before.loss
    assert moved.state.lineage.work > 0
    assert len(Policy(moves=options, reductions=(), least=1.0).moved(state(made)).state.row) == M


# --- descents ----------------------------------------------------------------------------------------------------


def attacked(name):
    if name in ("haim", "buzaglo"):
        model = dense((D, 30, 3 if name == "buzaglo" else 1), "relu")
        return Evidence.from_module(model, input=InputSpec((D,)))
    made = planted_span((D, 30, 1), "relu", n=3, node=1.0)
    return replace(made.evidence, input=replace(made.evidence.input, sample_norm=2.0))


@pytest.mark.parametrize("name", ["haim", "buzaglo", "loo", "iurada"])
def test_a_descent_whose_moves_never_come_is_the_descent_without(name):
    preset = presets.ATTACKS[name].preset(3)
    attack = replace(preset, steps=40)
    evidence = attacked(name)
    plain = attack.run(evidence, seed=3)
    never = replace(attack, moves=Policy(period=15, plateau=-math.inf)).run(evidence, seed=3)
    torch.testing.assert_close(never.x, plain.x, rtol=0, atol=0)
    assert never.loss == plain.loss and never.trace == plain.trace and plain.lineage is None
    assert len(never.lineage.lives) == len(plain.x)


@pytest.mark.parametrize("name", ["haim", "buzaglo", "loo", "iurada"])
@pytest.mark.parametrize("schedule", [scaled(10), published(10)], ids=["scaled", "published"])
def test_moves_work_with_every_descent(name, schedule):
    attack = replace(presets.ATTACKS[name].preset(3), steps=45)
    if name in ("haim", "buzaglo"):  # their published rates are for other weights
        attack = replace(attack, optimiser=Momentum(1e-4), spread=0.5)
    schedule = replace(schedule, plateau=1.0) if isinstance(schedule, Policy) else schedule
    if isinstance(schedule, Routine):
        schedule = replace(schedule, move=replace(schedule.move, threshold=0.0))
    found = replace(attack, moves=schedule).run(attacked(name), seed=3)
    assert bool(found.x.isfinite().all()) and found.steps == 45
    assert found.lineage.ids and len(found.lineage) == len(found.x) == len(found.candidates.label)
    assert sum(life.ended is None for life in found.lineage.lives) == len(found.x)
    assert any("candidate-steps" in line for line in found.assumed)


def test_moves_also_work_in_batches():
    attack = replace(presets.loo(3, steps=40, batch=2), moves=replace(scaled(10), plateau=1.0))
    found = attack.run(attacked("loo"), seed=3)
    assert len(found.x) == len(found.lineage) and found.steps == 40


def test_candidate_steps_are_the_sum_of_lives_and_work():
    start_ = first(torch.zeros(2, dtype=torch.long))
    later = start_.born(
        torch.tensor([0, 0]), torch.full((2,), 0.5).double(), torch.zeros(2).long(), 10, "split"
    )
    assert later.ids == (1, 2, 3)
    assert later.worked(7).steps(30) == 10 + 30 + 2 * 20 + 7
    assert later.take(torch.tensor([0]), 20).steps(30) == 10 + 30 + 2 * 10


# --- growth, command line, report ---------------------------------------------------------------------------------


def features(n=4, d=8, p=400, seed=0):
    return random_features(n, d, p, seed=seed)


def test_candidates_grown_one_by_one_are_the_samples_and_their_number_is_found():
    """Nobody says how many there are."""
    victim = features()
    attack = replace(presets.exhume(None), restart=Growth())
    found = attack.run(victim.evidence, seed=3)
    assert len(found.x) == 4
    assert rho(found.x, victim.train) < 1e-6
    assert found.expected is None and found.lineage is not None
    assert len(found.lineage) == 4 and found.lineage.lives[0].move == "start"
    assert any("nothing told how many" in line for line in found.assumed)


def test_moving_is_for_attacks_with_candidates_to_move():
    assert presets.moving(presets.haim(3), "none").moves is None
    assert isinstance(presets.moving(presets.exhume(3), "scaled").restart, Growth)
    assert isinstance(presets.moving(presets.kkt(3), "published").descent.moves, Routine)
    names = [move.name for move in presets.moving(presets.loo(3), "scaled").moves.moves]
    assert "signed split" in names
    assert "signed split" not in [m.name for m in presets.moving(presets.haim(3), "scaled").moves.moves]
    refused = ((presets.algebra(3), "scaled"), (presets.exhume(3), "published"), (presets.naive(3), "scaled"))
    for attack, how in refused:
        with pytest.raises(ExhumeError, match="leave \\[attack\\] moves out"):
            presets.moving(attack, how)
    with pytest.raises(TargetError, match="moves must be one of"):
        Plan(moves="often")


def test_a_score_is_no_equation_to_move_candidates_by():
    with pytest.raises(MissingEvidence, match="an equation, since moves rest on its residual"):
        replace(presets.naive(3, steps=4), moves=scaled(2)).run(attacked("haim"), seed=3)


def test_the_report_draws_the_lineage_and_keeps_it_as_plain_data(tmp_path):
    victim = features()
    found = presets.moving(presets.exhume(4), "scaled").run(victim.evidence, seed=3)
    *lives, last = found.lineage.lives
    named = replace(found, lineage=replace(found.lineage, lives=(*lives, replace(last, move="<i>odd"))))
    told = report.build(victim.evidence, [report.attack_result(named)], seed=3)
    page = report.write(report.prepare(tmp_path / "out"), told, [named]).read_text()
    assert "Where the candidates came from" in page
    assert "<i>odd" not in page and "&lt;i&gt;odd" in page
    again = report.read(tmp_path / "out" / "report.json").attacks[0].lineage
    assert again.ids == found.lineage.ids
    assert [life.born for life in again.lives] == [life.born for life in found.lineage.lives]
    assert again.cost == found.lineage.steps(found.steps)
    plain = replace(found, lineage=None)
    told = report.build(victim.evidence, [report.attack_result(plain)], seed=3)
    page = report.write(report.prepare(tmp_path / "plain"), told, [plain]).read_text()
    assert "Where the candidates came from" not in page


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_error_forgives_order_and_where_it_is_told_sign_and_scale(sign):
    """T12: one-to-one whatever the order; rho_pm forgives the sign, and a declared ambiguity sign and scale."""
    x = draw(6, 10, seed=1)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    assert rho(x[order], x) < 1e-12
    assert rho_pm(sign * x[order], x) < 1e-12
    assert (rho(sign * x[order], x) < 1e-12) == (sign > 0)
    truth = Truth(train=x, control=draw(6, 10, seed=2), public_mean=torch.zeros(10).double())
    plain = match(2.5 * sign * x[order], truth)
    forgiving = match(2.5 * sign * x[order], truth, ambiguity=Ambiguity(True, True, ()))
    assert plain.train.count == 0
    assert forgiving.train.gauge.count == 6 and forgiving.control.gauge.count == 0


def test_mirrored_candidates_are_turned_over():
    """relu(t) - relu(-t) = t: with the linear part of one more candidate a mirrored set fits almost as well."""
    victim = random_features(5, 12, 600, seed=1)
    ground = survey(victim.evidence)
    made = Objective(Span((1.0,)).bind(victim.evidence, ground.space, ground.decay), ground.space)
    wrong = victim.train * torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0]).double()[:, None]
    before = state(made, wrong + 0.01 * draw(5, 12))
    found = Mirror().turned(before)
    assert rho(found.row, victim.train) < 0.02
    assert made.at(found.row).loss < made.at(before.row).loss
    assert found.source.tolist() == [0, 2, -1, -1, -1]
    assert Mirror().turned(replace(before, row=victim.train)) is None
