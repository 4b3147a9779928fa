"""The equation of the last layer: a product of multipliers and features, one elimination for all outputs.

Its slow twins write down every gradient of C w numbers, or the projector of n C rows.
"""

import dataclasses
from functools import cache

import pytest
import torch
from torch import nn

from exhume.attack import SpanAttack
from exhume.certificate import held_out_rise
from exhume.change import Decay, decayed_target
from exhume.equations.part import split
from exhume.equations.span import EquationWeights, Span
from exhume.equations.span_dense import bind_dense
from exhume.equations.span_last import LastSpan
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.moves.prune import importance
from exhume.objective import Objective
from exhume.spaces import full
from planted import LAST, NO_DECAY, UNEQUAL, Naive, affine, distance, draw, random_evidence, state
from test_span import EXACT, assert_equal_to_the_twin

M = 3
KAPPA = Decay(0.9, 1.0, "planted")


class Residual(nn.Module):
    """Convolution, one residual block, linear head; 9 features of the input, 12 of the head."""

    def __init__(self, outputs, bias=True):
        super().__init__()
        self.stem, self.block = nn.Conv2d(1, 3, 2), nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(12, outputs, bias=bias)

    def features(self, x):
        h = torch.tanh(self.stem(x))
        return (h + torch.tanh(self.block(h))).flatten(1)

    def forward(self, x):
        return self.head(self.features(x))


@cache
def residual(outputs, bias=True):
    """Unrelated weights before and after."""
    model = Residual(outputs, bias).double()
    shapes = {k: v.shape for k, v in model.state_dict().items()}
    init, final = ({k: draw(*s, seed=i + j) / 2 for i, (k, s) in enumerate(shapes.items())} for j in (0, 50))
    return Evidence.from_module(model, input=InputSpec((1, 3, 3)), init=init, final=final)


def features(evidence, z, node=1.0):
    """[h, 1] of a residual net, by running it: [m, 13], or [m, 12] without a bias."""
    weights = evidence.at(node)
    model = Residual(len(weights["head.weight"]), "head.bias" in weights).double()
    model.load_state_dict(weights)
    h = model.features(z.view(-1, 1, 3, 3)).detach()
    return torch.cat([h, torch.ones(len(z), 1).double()], 1) if "head.bias" in weights else h


# --- against every gradient written down -------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [(1.0,), (0.0, 1.0), (0.0, 0.5, 1.0)])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["full", "affine"])
@pytest.mark.parametrize("sizes", [(4, 5), (4, 5, 3)])
def test_a_dense_net_equals_written_down(sizes, kind, bias, outputs, nodes):
    evidence = random_evidence((*sizes, outputs), "tanh", bias)
    space, span = {"full": full(4), "affine": affine(4, 2, seed=8)}[kind], Span(nodes, "last", UNEQUAL)
    bound = span.bind(evidence, space, KAPPA)
    assert isinstance(bound, LastSpan)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, KAPPA, "dense"), space.dim)


@pytest.mark.parametrize("nodes", [(1.0,), (0.0, 1.0)])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("space", [full(9), affine(9, 4, seed=3)], ids=["full", "affine"])
def test_a_residual_net_equals_written_down(space, bias, outputs, nodes):
    evidence, span = residual(outputs, bias), Span(nodes, "last", UNEQUAL)
    bound = span.bind(evidence, space, KAPPA)
    assert isinstance(bound, LastSpan)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, KAPPA, "dense"), space.dim)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_misfit_is_what_the_projector_of_all_n_c_rows_leaves(outputs):
    """The published form: Phi = I_C (x) H, of n C rows and C w columns, and P t off its rows."""
    evidence, z = residual(outputs), draw(M, 9, seed=1)
    phi = torch.kron(torch.eye(outputs).double(), features(evidence, z))
    bound = LAST.bind(evidence, full(9), NO_DECAY)
    t = bound.target()
    basis = torch.linalg.svd(phi.T, full_matrices=False)[0]
    left = t - basis @ (basis.T @ t)
    point = Objective(bound, full(9)).at(z)
    assert point.misfit == pytest.approx(float(left @ left) / float(t @ t), rel=1e-10)
    torch.testing.assert_close(point.residual, left, **EXACT)
    assert point.factor.shape == (M, M)  # one elimination for all outputs


# --- one factor for all outputs ----------------------------------------------------------------------------


def pair(outputs, nodes=(0.0, 1.0)):
    """The same last layer twice: with a shared factor, and through Gram matrices of all multipliers."""
    evidence, space = random_evidence((4, 9, outputs), "tanh"), full(4)
    shared = Span(nodes, "last").bind(evidence, space, KAPPA)
    params, target = [evidence.at(v) for v in nodes], decayed_target(evidence, KAPPA)
    whole = bind_dense(evidence.chain, params, target, space, [(1, 1.0, 1.0)])
    return Objective(shared, space), Objective(whole, space)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("signed", [False, True])
def test_a_shared_factor_changes_nothing(outputs, signed):
    objectives = pair(outputs)
    if signed:

        def signs(z):
            return draw(len(z), 2 * outputs, seed=7).sign()

        objectives = [dataclasses.replace(one, signs=signs) for one in objectives]
    z, direction = draw(4, 4, seed=1), draw(4, 4, seed=2)
    (a, b), same = (one.at(z) for one in objectives), torch.testing.assert_close
    assert a.misfit == pytest.approx(b.misfit, rel=1e-10)
    same(a.coef, b.coef, rtol=1e-7, atol=1e-8)
    ours, theirs = objectives
    same(ours.gradient(a), theirs.gradient(b), rtol=1e-7, atol=1e-8)
    same(ours.hessian(a), theirs.hessian(b), rtol=1e-7, atol=1e-8)
    same(ours.hessian_product(a)(direction), theirs.hessian_product(b)(direction), rtol=1e-7, atol=1e-8)
    same(importance(ours, a), importance(theirs, b), rtol=1e-7, atol=1e-8)


def test_the_hessian_and_its_product_agree_on_a_residual_net():
    objective = Objective(LAST.bind(residual(3), full(9), NO_DECAY), full(9))
    point, direction = objective.at(draw(M, 9, seed=1)), draw(M, 9, seed=2)
    product = (objective.hessian(point) @ direction.flatten()).view(M, 9)
    torch.testing.assert_close(objective.hessian_product(point)(direction), product, **EXACT)


def test_coinciding_candidates_share_their_importance_out():
    """A Gram matrix that is singular for all outputs at once."""
    objective, whole = pair(3, (1.0,))
    z = draw(3, 4, seed=1)
    z = torch.cat([z, z[:1]])
    point = objective.at(z)
    assert point.factor.shape == (4, 3)
    torch.testing.assert_close(
        importance(objective, point), importance(whole, whole.at(z)), rtol=1e-6, atol=1e-9
    )


def test_the_held_out_rise_is_that_of_solving_again_for_every_output():
    evidence = residual(3)
    fit, held = (LAST.bind(evidence, full(9), NO_DECAY, part=p) for p in split(evidence, "last", 0.3, 0))
    z = draw(M, 9, seed=1)

    def missed(kept):
        def rows(bound):
            unit = torch.eye(M * 3).double().view(M * 3, M, 3)
            return torch.stack([bound.contribution(z, one) for one in unit])[kept]

        c = torch.linalg.lstsq(rows(fit).T, fit.target()[:, None], driver="gelsd").solution[:, 0]
        return float((held.target() - c @ rows(held)).square().sum())

    base = missed(slice(None))
    without = [[k for k in range(3 * M) if k // 3 != i] for i in range(M)]
    rise, left = held_out_rise(fit, held, z)
    expected = [missed(kept) / base - 1 for kept in without]
    torch.testing.assert_close(rise, torch.tensor(expected).double(), rtol=1e-6, atol=1e-8)
    assert left == pytest.approx(base / held.energy, rel=1e-8)


# --- derivatives, laws, planted truths ---------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_gradient_is_that_of_differences(outputs):
    objective = Objective(LAST.bind(residual(outputs), full(9), NO_DECAY), full(9))
    z, step = draw(M, 9, seed=1), 1e-5 * draw(M, 9, seed=2)
    slope = float((objective.gradient(objective.at(z)) * step).sum())
    difference = (objective.at(z + step).loss - objective.at(z - step).loss) / 2
    assert slope == pytest.approx(difference, rel=1e-6)


def test_the_gradient_is_that_of_the_loss_written_down():
    evidence, space = residual(3), affine(9, 4, seed=3)
    objective = Objective(Span((0.0, 1.0), "last").bind(evidence, space, NO_DECAY), space)
    z = draw(2, 4, seed=1).requires_grad_()
    twin = Naive(evidence, Span((0.0, 1.0), "last"), space, NO_DECAY, "dense")
    loss = twin.reduced_loss(z)
    point = objective.at(z.detach())
    assert point.loss == pytest.approx(float(loss.detach()), rel=1e-8)
    torch.testing.assert_close(
        objective.gradient(point), torch.autograd.grad(loss, z)[0], rtol=1e-7, atol=1e-9
    )


def planted_head(outputs=3, n=3):
    """The last layer of a residual net moved by A' [h, 1], by nothing else."""
    evidence, x, a = residual(outputs), draw(n, 9, seed=1), draw(n, outputs, seed=2)
    move = a.T @ features(evidence, x)
    init = evidence.final | {
        "head.weight": evidence.final["head.weight"] - move[:, :-1],
        "head.bias": evidence.final["head.bias"] - move[:, -1],
    }
    return dataclasses.replace(evidence, init=init), x, a


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("nodes", [(1.0,), (0.0, 1.0)])
def test_the_misfit_is_zero_at_a_planted_truth_and_not_elsewhere(nodes, outputs):
    evidence, x, a = planted_head(outputs)
    bound = Span(nodes, "last").bind(evidence, full(9), NO_DECAY)
    assert bound.multiplicity == outputs  # only the head moved: its features are the same at every node
    point = Objective(bound, full(9)).at(x)
    assert point.misfit < 1e-20
    torch.testing.assert_close(point.coef, a, rtol=1e-8, atol=1e-10)
    assert Objective(bound, full(9)).at(x + 0.1 * draw(3, 9, seed=4)).misfit > 1e-4


def test_a_planted_residual_net_is_recovered():
    """9 unknown features and 3 multipliers against 39 equations, from random starts."""
    evidence, x, _ = planted_head(outputs=3, n=1)
    found = SpanAttack("last", LAST, column=None, samples=1).run(evidence, seed=5)
    assert found.misfit < 1e-16
    assert float(distance(found.x.flatten(1), x).max()) < 1e-6


def test_the_order_of_candidates_and_of_outputs_does_not_matter():
    evidence, z, order, turn = residual(3), draw(M, 9, seed=1), [2, 0, 1], [1, 2, 0]
    turned = dataclasses.replace(
        evidence,
        **{
            role: {k: p[turn] if k.startswith("head") else p for k, p in getattr(evidence, role).items()}
            for role in ("init", "final")
        },
    )
    here = Objective(LAST.bind(evidence, full(9), NO_DECAY), full(9)).at(z)
    there = Objective(LAST.bind(turned, full(9), NO_DECAY), full(9)).at(z[order])
    assert there.misfit == pytest.approx(here.misfit, rel=1e-12)
    torch.testing.assert_close(there.coef, here.coef[order][:, turn], rtol=1e-8, atol=1e-10)


def test_multiplying_the_change_multiplies_the_multipliers_and_keeps_the_misfit():
    evidence, z = residual(3), draw(M, 9, seed=1)
    init = {k: p - 5 * (p - evidence.init[k]) for k, p in evidence.final.items()}
    one, five = (
        Objective(LAST.bind(e, full(9), NO_DECAY), full(9)).at(z)
        for e in (evidence, dataclasses.replace(evidence, init=init))
    )
    assert five.misfit == pytest.approx(one.misfit, rel=1e-10) and one.misfit > 1e-2
    torch.testing.assert_close(five.coef, 5 * one.coef, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "evidence", [residual(3), random_evidence((9, 12, 7, 3), "tanh")], ids=["conv", "dense"]
)
def test_the_fitted_and_the_held_out_features_add_up_to_the_whole(evidence):
    z = draw(M, 9, seed=1)
    coef = draw(M, 3, seed=2)
    span = Span((1.0,), "last", EquationWeights(last=3.0, bias=1.7))
    whole = span.bind(evidence, full(9), KAPPA)
    parts = [span.bind(evidence, full(9), KAPPA, part=part) for part in split(evidence, "last", 0.4, seed=3)]
    same = torch.testing.assert_close
    same(sum(p.energy for p in parts), whole.energy, **EXACT)
    same(sum(p.gram(z) for p in parts), whole.gram(z), **EXACT)
    same(sum(p.inner(z, p.target()) for p in parts), whole.inner(z, whole.target()), **EXACT)
    for i in range(2):
        same(sum(p.normal(z, coef)[i] for p in parts), whole.normal(z, coef)[i], **EXACT)
    assert all(p.energy > 0.01 * whole.energy for p in parts)


def test_what_did_not_move_gives_no_equation():
    evidence = residual(2)
    frozen = dataclasses.replace(evidence, init=evidence.init | {"head.bias": evidence.final["head.bias"]})
    assert LAST.bind(evidence, full(9), NO_DECAY).equations == 2 * 13
    assert LAST.bind(frozen, full(9), NO_DECAY).equations == 2 * 12


# --- which layer that is -----------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A head whose outputs, or whose weight, something else uses as well."""

    def __init__(self, how):
        super().__init__()
        self.body, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        if how == "tied":
            self.body.weight = self.head.weight

    def forward(self, x):
        h = torch.tanh(self.body(x))
        match self.how:
            case "twice":
                return self.head(torch.tanh(self.head(h)))
            case "skip":
                return self.head(h) + h
            case "softmax":
                return self.head(h).softmax(1)
            case "clip":
                return self.head(h).clamp(-1e3, 1e3)
            case "tokens":
                return self.head(h.view(-1, 1, 4)).mean(1)
            case "functional":
                return nn.functional.linear(h, self.head.weight, self.head.bias)
            case "squeezed":
                return self.head(h).view(-1, 2, 2)
            case _:
                return self.head(h)


@pytest.mark.parametrize("how", ["tied", "twice", "skip", "softmax", "tokens", "functional"])
def test_a_head_that_is_not_the_last_word_is_refused(how):
    model = Wrapped(how).double()
    init = {k: torch.zeros_like(p) for k, p in state(model).items()}
    evidence = Evidence.from_module(model, input=InputSpec((4,)), init=init)
    assert evidence.head is None
    with pytest.raises(MissingEvidence, match="whose outputs are those of a linear layer"):
        LAST.bind(dataclasses.replace(evidence, chain=None), full(4), NO_DECAY)


@pytest.mark.parametrize("how", ["plain", "squeezed"])
def test_a_head_is_found_and_the_model_is_left_as_it_was(how):
    model = Wrapped(how).double()
    evidence = Evidence.from_module(model, input=InputSpec((4,)))
    assert (evidence.head.weight, evidence.head.bias) == ("head.weight", "head.bias")
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    u = draw(5, 4)
    h = torch.tanh(model.body(u)).detach()
    torch.testing.assert_close(evidence.head.features(evidence.at(1.0), u), h)
    params = {k: 2 * p for k, p in evidence.at(1.0).items()}
    h = torch.tanh(2 * model.body(u)).detach()
    torch.testing.assert_close(evidence.head.features(params, u), h)


def test_a_dense_net_has_the_same_features_either_way():
    evidence = random_evidence((6, 8, 5, 2), "tanh")
    z = draw(M, 6, seed=1)
    chain, module = (
        Span((0.0, 1.0), "last").bind(e, full(6), NO_DECAY)
        for e in (evidence, dataclasses.replace(evidence, chain=None))
    )
    torch.testing.assert_close(chain.gram(z), module.gram(z), **EXACT)
