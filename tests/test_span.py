"""The span equation three ways: structured (dense chains), torch.func (any module), and one gradient at a time."""

import dataclasses
import itertools
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from exhume.change import Decay
from exhume.equations.part import split
from exhume.equations.span import EquationWeights, Span
from exhume.equations.span_dense import DenseSpan
from exhume.equations.span_module import ModuleSpan
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.objective import Objective
from exhume.spaces import full, subspace
from planted import (
    LAST,
    NO_DECAY,
    UNEQUAL,
    Naive,
    affine,
    dense,
    draw,
    planted_features,
    planted_span,
    random_evidence,
    state,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}
D, M = 4, 3
NODES = [(1.0,), (0.0, 1.0), (0.0, 0.5, 1.0)]
KAPPA = Decay(0.9, 1.0, "planted")


def spaces():
    return {"full": full(D), "affine": affine(D, 2, seed=8), "linear": subspace(draw(3, D, seed=9))}


@cache
def evidence_of(depth, activation, bias, outputs, seed=0):
    return random_evidence((D, 5, 3, outputs) if depth == 3 else (D, 5, outputs), activation, bias, seed)


def modular(evidence):
    return dataclasses.replace(evidence, chain=None)


def cases(depths, outputs, nodes, kinds):
    """All activations and biases, times what is asked."""
    return list(itertools.product(depths, ("relu", "tanh", "softplus"), (True, False), outputs, nodes, kinds))


def everywhere(gram, size):
    """G (x) I [size, size]: the Gram matrix where outputs share G."""
    return torch.kron(gram, torch.eye(size // len(gram), dtype=gram.dtype))


def assert_equal_to_the_twin(bound, twin, q):
    """Every operation of a bound equation against the one written down, at random candidates and multipliers."""
    k = len(twin.span.nodes) * twin.evidence.outputs
    z, coef, direction = draw(M, q, seed=1), draw(M, k, seed=2), draw(M, q, seed=3)
    phi, jacobian, target = twin.features(z).detach(), twin.jacobian(z, coef), twin.target()
    vector = draw(len(target), seed=4)
    assert (bound.dim, bound.multiplicity, bound.equations) == (q, k, len(target))
    same = torch.testing.assert_close
    same(bound.target(), target, **EXACT)
    same(everywhere(bound.gram(z), M * k), phi @ phi.T, **EXACT)
    same(bound.inner(z, vector), (phi @ vector).view(M, k), **EXACT)
    same(bound.contribution(z, coef), phi.T @ coef.flatten(), **EXACT)
    same(bound.potential(z, coef, vector), (coef * (phi @ vector).view(M, k)).sum(1), **EXACT)
    same(bound.jvp(z, coef, direction), jacobian @ direction.flatten(), **EXACT)
    same(bound.vjp(z, coef, vector), (jacobian.T @ vector).view(M, q), **EXACT)
    jj, jp = bound.normal(z, coef)
    same(jj, jacobian.T @ jacobian, **EXACT)
    same(jp, jacobian.T @ phi.T, **EXACT)
    same(bound.energy, twin.energy(), **EXACT)
    same(bound.outside, twin.energy() - float(target @ target), **EXACT)


@pytest.mark.parametrize(
    ("depth", "activation", "bias", "outputs", "nodes", "kind"),
    cases((2, 3), (1, 3), NODES, ("full", "affine")),
)
def test_structured_equals_written_down(depth, activation, bias, outputs, nodes, kind):
    evidence, space = evidence_of(depth, activation, bias, outputs), spaces()[kind]
    span = Span(nodes, weights=UNEQUAL)
    bound = span.bind(evidence, space, KAPPA)
    assert isinstance(bound, DenseSpan)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, KAPPA, "dense"), space.dim)


@pytest.mark.parametrize(
    ("depth", "activation", "bias", "outputs", "nodes", "kind"),
    cases((3,), (2,), NODES[2:], ("affine",)) + cases((2,), (1,), NODES[:1], ("full",)),
)
def test_generic_equals_written_down(depth, activation, bias, outputs, nodes, kind):
    evidence, space = evidence_of(depth, activation, bias, outputs), spaces()[kind]
    span = Span(nodes, weights=UNEQUAL)
    bound = span.bind(modular(evidence), space, KAPPA)
    assert isinstance(bound, ModuleSpan)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, KAPPA, "module"), space.dim)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["full", "affine", "linear"])
def test_the_only_layer_equals_written_down(kind, bias):
    evidence, space = random_evidence((D, 2), "tanh", bias), spaces()[kind]
    span = Span((0.0, 1.0), layers="last", weights=UNEQUAL)
    bound = span.bind(evidence, space, KAPPA)
    assert isinstance(bound, DenseSpan)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, KAPPA, "dense"), space.dim)


@pytest.mark.parametrize("width", [2, 12])
@pytest.mark.parametrize("nodes", NODES)
def test_narrow_and_wide_layers_take_the_same_normal_equations(width, nodes):
    """`normal` has two ways to multiply, chosen by the width of a layer against the number of nodes."""
    evidence, space = random_evidence((D, width, width, 1), "relu"), full(D)
    span = Span(nodes)
    assert_equal_to_the_twin(
        span.bind(evidence, space, NO_DECAY), Naive(evidence, span, space, NO_DECAY, "dense"), D
    )


def test_layers_may_bend_differently():
    """relu, then tanh, then a final sigmoid: first derivatives of the signals exist in some layers only."""
    first, second, third, head = (nn.Linear(a, b) for a, b in pairwise((D, 6, 5, 4, 2)))
    model = nn.Sequential(
        first, nn.ReLU(), second, nn.Tanh(), third, nn.LeakyReLU(0.3), head, nn.Sigmoid()
    ).double()
    weights = [(k, v.shape) for k, v in model.state_dict().items()]
    init, final = ({k: draw(*s, seed=i + j) / 2 for i, (k, s) in enumerate(weights)} for j in (0, 50))
    evidence = Evidence.from_module(model, input=InputSpec((D,)), init=init, final=final)
    assert evidence.chain is not None
    space, span = spaces()["affine"], Span((0.0, 1.0), weights=UNEQUAL)
    bound = span.bind(evidence, space, NO_DECAY)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, NO_DECAY, "dense"), 2)


def test_smoothing_equals_a_softplus_network():
    """The bound equation at slope beta is that of the same weights with Softplus(beta) in place of ReLU."""
    evidence = random_evidence((D, 6, 1), "relu")
    soft = dense((D, 6, 1), "relu")
    soft[1] = nn.Softplus(beta=3.0, threshold=30.0)
    twin = Evidence.from_module(soft, input=evidence.input, init=evidence.init, final=evidence.final)
    bound = Span().bind(evidence, full(D), NO_DECAY, smoothing=3.0)
    assert_equal_to_the_twin(bound, Naive(twin, Span(), full(D), NO_DECAY, "dense"), D)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunks_do_not_matter(chunk):
    evidence = random_evidence((D, 5, 2), "tanh")
    whole = Span().bind(modular(evidence), full(D), NO_DECAY)
    parts = dataclasses.replace(whole, chunk=chunk)
    z, coef = draw(5, D, seed=1), draw(5, whole.multiplicity, seed=2)
    torch.testing.assert_close(parts.gram(z), whole.gram(z), rtol=1e-13, atol=1e-13)
    for a, b in zip(parts.normal(z, coef), whole.normal(z, coef), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))


def test_generic_equals_written_down_on_a_convolutional_net():
    """The twin knows vectors and matrices only, so the equation weights are 1."""
    model = Convolutional().double().eval()
    shapes = {k: v.shape for k, v in model.state_dict().items() if v.is_floating_point()}
    init, final = (
        {**state(model), **{k: draw(*s, seed=i + j).abs() / 2 for i, (k, s) in enumerate(shapes.items())}}
        for j in (0, 50)
    )
    evidence = Evidence.from_module(model, input=InputSpec((1, 3, 3)), init=init, final=final)
    assert evidence.chain is None
    span, space = Span((0.0, 1.0)), affine(9, 4, seed=3)
    bound = span.bind(evidence, space, NO_DECAY)
    assert_equal_to_the_twin(bound, Naive(evidence, span, space, NO_DECAY, "module"), 4)


# --- parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "affine"])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_the_fitted_and_the_held_out_part_add_up_to_the_whole(depth, bias, kind):
    """Energies, Gram matrices, inner products with the target and normal matrices are sums over equations."""
    evidence, space = evidence_of(depth, "tanh", bias, 2), spaces()[kind]
    span = Span(weights=UNEQUAL)
    for seen in (evidence, modular(evidence)):
        whole = span.bind(seen, space, KAPPA)
        parts = [span.bind(seen, space, KAPPA, part=part) for part in split(seen, "all", 0.4, seed=3)]
        z, coef = draw(M, space.dim, seed=1), draw(M, whole.multiplicity, seed=2)
        same = torch.testing.assert_close
        same(sum(p.energy for p in parts), whole.energy, **EXACT)
        same(sum(p.outside for p in parts), whole.outside, **EXACT)
        same(sum(p.gram(z) for p in parts), whole.gram(z), **EXACT)
        same(sum(p.inner(z, p.target()) for p in parts), whole.inner(z, whole.target()), **EXACT)
        for i in range(2):
            same(sum(p.normal(z, coef)[i] for p in parts), whole.normal(z, coef)[i], **EXACT)
        assert all(p.energy > 0.01 * whole.energy for p in parts)


def test_a_part_holds_the_equations_of_its_units():
    """The rows of [DW_1, Db_1] and the columns of DW_2 of those hidden units."""
    evidence = evidence_of(2, "tanh", True, 2)
    fitted, held = split(evidence, "all", 0.4, seed=3)
    assert sorted([*fitted.units.tolist(), *held.units.tolist()]) == list(range(5))
    target = Span().bind(evidence, full(D), NO_DECAY, part=held).target()
    change = {k: evidence.final[k] - evidence.init[k] for k in evidence.init}
    rows = torch.cat([change["0.weight"], change["0.bias"][:, None]], 1)[held.units]
    expected = torch.cat([rows.flatten(), change["2.weight"][:, held.units].flatten()])
    torch.testing.assert_close(target, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_derivatives_of_a_part_agree_with_one_another(generic, held):
    """Forward, reverse and normal forms on the same part; the whole is checked against gradients written down."""
    evidence = evidence_of(3, "tanh", True, 2)
    seen = modular(evidence) if generic else evidence
    bound = Span(weights=UNEQUAL).bind(seen, full(D), KAPPA, part=split(seen, "all", 0.4, seed=3)[held])
    z, coef = draw(M, D, seed=1), draw(M, bound.multiplicity, seed=2)
    vector = draw(len(bound.target()), seed=4)
    jacobian = torch.stack([bound.jvp(z, coef, e.view(M, D)) for e in torch.eye(M * D, dtype=torch.float64)])
    torch.testing.assert_close(bound.vjp(z, coef, vector).flatten(), jacobian @ vector, **EXACT)
    torch.testing.assert_close(bound.normal(z, coef)[0], jacobian @ jacobian.T, **EXACT)
    step = 1e-4 * draw(M, D, seed=5)
    difference = bound.contribution(z + step, coef) - bound.contribution(z - step, coef)
    torch.testing.assert_close(difference / 2, bound.jvp(z, coef, step), rtol=1e-5, atol=1e-9)


# --- planted truths ----------------------------------------------------------------------------------------


def misfit(span, evidence, space, z, smoothing=None):
    return Objective(span.bind(evidence, space, NO_DECAY, smoothing), space).at(z).misfit


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize(
    ("node", "nodes"), [(1.0, (1.0,)), (0.0, (0.0,)), (0.0, (0.0, 1.0)), (0.0, (0.0, 0.5, 1.0))]
)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("sizes", [(6, 30, 1), (6, 20, 12, 2)])
def test_the_misfit_is_zero_at_a_planted_truth_and_not_elsewhere(sizes, activation, node, nodes, generic):
    planted = planted_span(sizes, activation, n=3, node=node)
    evidence = modular(planted.evidence) if generic else planted.evidence
    assert misfit(Span(nodes), evidence, full(6), planted.x) < 1e-20
    assert misfit(Span(nodes), evidence, full(6), planted.x + 0.1 * draw(3, 6, seed=40)) > 1e-6


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("nodes", [(0.0,), (1.0,), (0.0, 1.0)])
def test_the_misfit_of_the_last_layer_is_zero_at_planted_random_features(outputs, bias, nodes):
    """Only the last layer moved, so its gradients agree at all nodes; the Gram matrix of two nodes is singular."""
    planted = planted_features(n=4, d=8, width=60, bias=bias, outputs=outputs)
    span = Span(nodes, layers="last")
    assert misfit(span, planted.evidence, full(8), planted.x) < 1e-20
    assert misfit(span, planted.evidence, full(8), draw(4, 8, seed=3)) > 1e-3


def test_the_planted_multipliers_are_found():
    planted = planted_span((6, 30, 2), "relu", n=3, node=1.0)
    bound = Span((1.0,)).bind(planted.evidence, full(6), NO_DECAY)
    torch.testing.assert_close(
        Objective(bound, full(6)).at(planted.x).coef, planted.coef, rtol=1e-9, atol=1e-9
    )


def test_extra_candidates_get_no_weight():
    planted = planted_span((6, 60, 1), "relu", n=3, node=1.0)
    bound = Span((1.0,)).bind(planted.evidence, full(6), NO_DECAY)
    point = Objective(bound, full(6)).at(torch.cat([planted.x, draw(2, 6, seed=9)]))
    assert point.misfit < 1e-20
    assert float(point.coef[3:].abs().max()) < 1e-9


# --- laws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generic", [False, True])
def test_the_order_of_candidates_does_not_matter(generic):
    evidence = random_evidence((D, 20, 2), "tanh")
    evidence = modular(evidence) if generic else evidence
    bound = Span().bind(evidence, full(D), NO_DECAY)
    z, order = draw(3, D, seed=1), torch.tensor([2, 0, 1])
    here, there = (Objective(bound, full(D)).at(a) for a in (z, z[order]))
    assert there.misfit == pytest.approx(here.misfit, rel=1e-12)
    torch.testing.assert_close(there.coef, here.coef[order], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(there.residual, here.residual, rtol=1e-10, atol=1e-10)


def test_multiplying_the_change_multiplies_the_multipliers_and_keeps_the_misfit():
    """Gradients at node 0 do not feel the change, so the equation is linear in it."""
    planted = random_evidence((D, 20, 2), "tanh")
    final = {k: p + 6.0 * (planted.final[k] - p) for k, p in planted.init.items()}
    z, span = draw(3, D, seed=1), Span((0.0,))
    points = [
        Objective(span.bind(e, full(D), NO_DECAY), full(D)).at(z)
        for e in (planted, dataclasses.replace(planted, final=final))
    ]
    assert points[1].misfit == pytest.approx(points[0].misfit, rel=1e-10)
    assert points[1].misfit > 1e-2
    torch.testing.assert_close(points[1].coef, 6.0 * points[0].coef, rtol=1e-9, atol=1e-12)


def test_scaling_all_multipliers_scales_contribution_jvp_and_normal():
    evidence = random_evidence((D, 9, 2), "softplus")
    bound = Span().bind(evidence, full(D), NO_DECAY)
    z, coef, direction = draw(M, D, seed=1), draw(M, bound.multiplicity, seed=2), draw(M, D, seed=3)
    same = torch.testing.assert_close
    same(bound.contribution(z, -3 * coef), -3 * bound.contribution(z, coef), **EXACT)
    same(bound.jvp(z, -3 * coef, direction), -3 * bound.jvp(z, coef, direction), **EXACT)
    same(bound.normal(z, -3 * coef)[0], 9 * bound.normal(z, coef)[0], **EXACT)
    same(bound.normal(z, -3 * coef)[1], -3 * bound.normal(z, coef)[1], **EXACT)


def test_equation_weights_of_one_group_change_only_that_group():
    evidence = random_evidence((D, 5, 3, 2), "relu")
    plain = Span().bind(evidence, full(D), NO_DECAY)
    for group in ("first", "bias", "hidden", "last"):
        heavy = Span(weights=EquationWeights(**{group: 2.0})).bind(evidence, full(D), NO_DECAY)
        changed = heavy.target() / plain.target()
        assert set(changed.round(decimals=9).tolist()) == {1.0, 2.0}
        twin = Span(weights=EquationWeights(**{group: 2.0})).bind(modular(evidence), full(D), NO_DECAY)
        assert twin.energy == pytest.approx(heavy.energy, rel=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_a_subspace_that_holds_the_rows_of_the_change_costs_nothing(bias):
    """The first-layer change lies in the span of the samples: restricted to any set around it, misfit is the same."""
    planted = planted_span((7, 20, 1), "tanh", bias, n=3, node=0.0)
    space = affine(7, 5, seed=4, through=planted.x)
    span = Span((0.5, 1.0))  # not the planted node, so that there is a misfit to compare
    bound = span.bind(planted.evidence, space, NO_DECAY)
    assert bound.outside / bound.energy < 1e-12
    z = draw(3, 5, seed=6)
    u = space.expand(z)
    for inside, outside in ((space.coordinates(planted.x), planted.x), (z, u)):
        torch.testing.assert_close(space.expand(space.coordinates(outside)), outside, **EXACT)
        everywhere = misfit(span, planted.evidence, full(7), outside)
        assert misfit(span, planted.evidence, space, inside) == pytest.approx(everywhere, rel=1e-8)


@pytest.mark.parametrize("kind", ["affine", "linear"])
def test_residual_inside_and_energy_outside_add_up_to_the_whole_residual(kind):
    evidence, space = random_evidence((D, 9, 2), "relu"), spaces()[kind]
    restricted = Span(weights=UNEQUAL).bind(evidence, space, KAPPA)
    whole = Span(weights=UNEQUAL).bind(evidence, full(D), KAPPA)
    z, coef = draw(M, space.dim, seed=1), draw(M, restricted.multiplicity, seed=2)
    inside = restricted.target() - restricted.contribution(z, coef)
    everywhere = whole.target() - whole.contribution(space.expand(z), coef)
    assert restricted.outside > 1e-3
    assert float(inside @ inside) + restricted.outside == pytest.approx(
        float(everywhere @ everywhere), rel=1e-12
    )
    assert restricted.energy == pytest.approx(whole.energy, rel=1e-12)


def test_projector_gram_and_jvp_forms_of_the_loss_agree():
    """|P_perp t|^2 by an explicit projector, t't - b'K^-1 b by the Gram matrix, and the refined residual."""
    for outputs, nodes in itertools.product((1, 3), ((1.0,), (0.0, 1.0))):
        evidence, span = random_evidence((D, 25, outputs), "tanh"), Span(nodes)
        bound = span.bind(evidence, full(D), NO_DECAY)
        z, t = draw(M, D, seed=1), bound.target()
        phi = Naive(evidence, span, full(D), NO_DECAY, "dense").features(z).detach()
        basis = torch.linalg.svd(phi.T, full_matrices=False)[0]
        projected = t - basis @ (basis.T @ t)
        b = bound.inner(z, t).flatten()
        forms = [float(projected @ projected), float(t @ t - b @ torch.linalg.solve(bound.gram(z), b))]
        assert [f / float(t @ t) for f in forms] == pytest.approx(
            [Objective(bound, full(D)).at(z).misfit] * 2, rel=1e-10
        )


def test_what_cannot_be_bound_is_named_all_at_once():
    evidence = dataclasses.replace(random_evidence((D, 5, 1)), init=None, chain=None, head=None)
    with pytest.raises(MissingEvidence) as error:
        Span((0.0, 1.0), layers="last").bind(evidence, full(D), NO_DECAY, smoothing=1.0)
    assert all(words in str(error.value) for words in ("initial weights", "last layer"))
    assert "smoothing" not in str(error.value)  # any module can be smoothed


def test_the_last_layer_equation_needs_no_first_node():
    planted = planted_features(n=2, d=4, width=20)
    alone = dataclasses.replace(planted.evidence, init=None)
    bound = LAST.bind(alone, full(4), NO_DECAY)
    torch.testing.assert_close(bound.target(), planted.evidence.final["2.weight"].flatten())
