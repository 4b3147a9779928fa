"""Closed-form recovery: what determines the samples is recovered to rounding, what does not is never certified."""

import math
from dataclasses import replace

import pytest
import scipy.linalg
import torch

from exhume import match
from exhume.algebra.examine import examine, sentence
from exhume.algebra.field import (
    Field,
    from_change,
    from_checkpoints,
    from_gradient,
    from_stationary,
    from_values,
)
from exhume.algebra.gauge import by_margins, fill, fix, undetermined
from exhume.algebra.identifiability import IDENTIFIABLE, NOT, PARTIAL, identify
from exhume.algebra.interpolation import componentwise, gradient_field, slices
from exhume.algebra.moments import averages, derivatives, model_of, moment_starts
from exhume.algebra.pencil import diagonalise, directions
from exhume.algebra.polish import Model, polish
from exhume.algebra.polynomial import coefficients, count, monomials, slope_of
from exhume.algebra.recovery import recover
from exhume.algebra.reduction import reduce
from exhume.algebraic import AlgebraAttack
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.functional import ACTIVATIONS, Activation, recognise
from exhume.victims.nets import Polynomial, mlp
from exhume.victims.stationary import stationary
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim

CUBIC = (0.0, 0.0, 0.0, 1.0)
EXCEPTIONS = ((5, 3), (3, 4), (4, 4), (5, 4))


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=drawn(seed), dtype=torch.float64)


def power(alpha):
    return (0.0,) * alpha + (1.0,)


def planted(c, s, d, m, seed=0, affine=False, noise=0.0):
    """Samples, coefficients of both signs, and the field they make at random points."""
    x = normal(s, d, seed=seed)
    x = torch.cat([x, torch.ones(s, 1, dtype=x.dtype)], 1) if affine else x
    b = normal(s, seed=seed + 1)
    b = b.sign() * (0.5 + b.abs())
    w = normal(m, x.shape[1], seed=seed + 2) / d**0.5
    values = (slope_of(c).first(w @ x.T) * b) @ x
    values = values + noise * values.square().mean().sqrt() * normal(*values.shape, seed=seed + 3)
    return x, b, from_values(w, values, affine)


def worst(found, x, scaled=True, signed=True):
    """Largest relative error, over all samples, of the nearest found one; up to what is not determined."""
    if not scaled:
        found, x = (v / v.norm(dim=1, keepdim=True) for v in (found, x))
    found = found if signed else torch.cat([found, -found])
    return float((torch.cdist(x, found).amin(1) / x.norm(dim=1)).max())


# ---- polynomials and interpolation


@pytest.mark.parametrize("c", [(0, 0, 1.0), CUBIC, (0.5, -1.0, 0, 0.25, 2.0), (0, 1.0, 0, 0.5)])
def test_a_polynomial_activation_is_recognised(c):
    assert coefficients(Polynomial(c)) == pytest.approx(c, abs=1e-9)


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n not in ("cubic", "quadratic", "identity")])
def test_any_other_activation_is_not(name):
    assert coefficients(ACTIVATIONS[name]) is None


def test_derivatives_by_horner_are_those_of_autograd():
    c, t = (0.3, -1.0, 0.5, 2.0, 0.1), normal(7).requires_grad_()
    first = torch.autograd.grad(Polynomial(c)(t).sum(), t, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), t)[0]
    assert torch.allclose(slope_of(c).first(t), first, atol=1e-12)
    assert torch.allclose(slope_of(c).second(t), second, atol=1e-12)


def test_monomials_with_their_scale_make_powers_of_inner_products():
    w, v = normal(5, 4), normal(6, 4, seed=1)
    table = monomials(4, 3)
    kernel = (table.at(w) * table.scale) @ (table.at(v) * table.scale).T
    assert torch.allclose(kernel, (w @ v.T) ** 3, atol=1e-12)
    assert len(table.index) == count(4, 3)


@pytest.mark.parametrize("fit", [componentwise, gradient_field])
def test_the_jacobian_of_an_interpolant_is_that_of_autograd(fit):
    _, _, field = planted((0, 0, 1.0, 0.5, 0.2), 3, 3, 40)
    found, v = fit(field, (2, 3, 4)), normal(4, 3, seed=9)
    twin = torch.stack([torch.autograd.functional.jacobian(lambda u: found.at(u[None])[0], one) for one in v])
    assert torch.allclose(found.jacobian(v), twin, atol=1e-10)
    assert torch.allclose(found.at(field.points[0]), field.steps, atol=1e-10)


def test_the_kernel_of_the_paper_is_the_slow_twin():
    """f(w) = F' K+ k(w), with K_jk = (w_j . w_k)^(alpha - 1)."""
    _, _, field = planted(CUBIC, 4, 4, 15)
    w, at = field.points[0], normal(6, 4, seed=5)
    twin = ((at @ w.T) ** 2) @ torch.linalg.pinv((w @ w.T) ** 2, rtol=1e-12) @ field.steps
    found = componentwise(field, (3,))
    assert torch.allclose(found.at(at), twin, atol=1e-8)
    assert found.rank == int(torch.linalg.matrix_rank((w @ w.T) ** 2)) == count(4, 2)


def test_the_gram_matrix_of_the_gradient_field_is_the_slow_twin():
    """G_jk = k'(s) I + k''(s) w_k w_j', f(w) = sum_j beta_j k'(t_j) + w_j (beta_j . w) k''(t_j)."""
    alpha, (_, _, field) = 4, planted(power(4), 3, 3, 7)
    w, at, eye = field.points[0], normal(5, 3, seed=5), torch.eye(3, dtype=torch.float64)
    s = w @ w.T
    gram = alpha * s[:, :, None, None] ** 3 * eye + alpha * 3 * torch.einsum("jk,ka,jb->jkab", s**2, w, w)
    gram = gram.transpose(1, 2).reshape(21, 21)
    beta = (torch.linalg.pinv(gram, rtol=1e-12) @ field.steps.flatten()).view(7, 3)
    t = at @ w.T
    twin = alpha * t**3 @ beta + alpha * 3 * (t**2 * (at @ beta.T)) @ w
    found = gradient_field(field, (alpha,))
    assert torch.allclose(found.at(at), twin, atol=1e-6)
    assert found.rank == int(torch.linalg.matrix_rank(gram, rtol=1e-12)) == count(3, 4)


@pytest.mark.parametrize("r,alpha", [(3, 3), (4, 3), (6, 4), (3, 5), *EXCEPTIONS])
def test_the_fewest_points_are_those_of_the_theory(r, alpha):
    """N_r for the kernel, ceil(binom / r) for the gradient field, one more for the four exceptional pairs."""
    few = math.ceil(count(r, alpha) / r) + ((r, alpha) in EXCEPTIONS)
    for fit, needed in ((componentwise, count(r, alpha - 1)), (gradient_field, few)):
        enough, short = (fit(planted(power(alpha), r, r, m)[2], (alpha,)) for m in (needed, needed - 1))
        assert enough.determined and not short.determined
        assert enough.margin > 1e-8 > short.margin


def test_asymmetry_tells_that_the_kernel_interpolation_failed():
    v = normal(8, 4, seed=3)
    good, bad = (componentwise(planted(CUBIC, 4, 4, m)[2], (3,)).asymmetry(v) for m in (10, 9))
    assert good < 1e-10 and bad > 1e-2


# ---- pencil


def planted_slices(s, r, seed=0, noise=0.0):
    z, d = normal(s, r, seed=seed), normal(12, s, seed=seed + 1)
    out = torch.einsum("ls,sa,sb->lab", d, z, z)
    e = normal(*out.shape, seed=seed + 2)
    return z, out + noise * (e + e.transpose(1, 2))


def test_the_pencil_returns_samples_and_not_their_duals():
    z, stack = planted_slices(4, 6)
    found = directions(stack)
    assert found.z.shape == z.shape and found.gap > 1e8
    assert worst(found.z, z, scaled=False, signed=False) < 1e-10


def test_tensorly_decomposes_the_same_slices_into_the_same_directions():
    tensorly = pytest.importorskip("tensorly")
    from tensorly.decomposition import parafac

    _, stack = planted_slices(3, 5, seed=4)
    _, factors = parafac(
        tensorly.tensor(stack.numpy()), rank=3, n_iter_max=2000, tol=1e-14, init="svd", random_state=0
    )
    twin = torch.from_numpy(factors[1]).T.double()
    assert worst(directions(stack).z, twin, scaled=False, signed=False) < 1e-5


def test_joint_diagonalisation_beats_a_single_pair_under_noise():
    z, stack = planted_slices(5, 5, seed=2, noise=1e-3)
    values, vectors = scipy.linalg.eig(stack[0].numpy(), stack[1].numpy())
    assert abs(values.imag).max() == 0
    pair = (stack[1] @ torch.from_numpy(vectors)).T
    refined, off = diagonalise(stack, pair.T)
    assert off < 1e-3
    assert worst(refined.T, z, False, False) < worst(pair, z, False, False)


def test_the_pencil_of_degrees_two_and_three_has_the_projections_of_the_samples_as_eigenvalues():
    """(M_3(v), T_2): scale and sign are fixed outright."""
    c = (0.0, 0.0, 1.0, 0.5)
    x, _, field = planted(c, 4, 4, 40)
    found, v = gradient_field(field, (2, 3)), normal(1, 4, seed=8)
    second, third = (found.jacobian(v, (q,))[0] for q in (2, 3))
    values = scipy.linalg.eig(third.numpy(), second.numpy())[0].real
    wanted = x @ v[0] * 6 * c[3] / (2 * c[2])
    assert sorted(values) == pytest.approx(sorted(wanted.tolist()), rel=1e-8)


# ---- polish


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_jacobian_of_the_residual_is_that_of_autograd(nodes):
    x, b = normal(3, 4), normal(nodes, 3, seed=1)
    field = Field(normal(nodes, 5, 4, seed=2), normal(nodes, 5, seed=3), normal(5, 4, seed=4), False, "")
    model = Model((field, replace(field, steps=normal(5, 4, seed=5))), slope_of((0, 1.0, 0, 0.5)))
    b = torch.cat([b, 2 * b])
    by_x, by_b = torch.autograd.functional.jacobian(model.residual, (x, b))
    found = model.jacobian(x, b)
    assert torch.allclose(found[0], by_x.flatten(1), atol=1e-10)
    assert torch.allclose(found[1], by_b.flatten(1), atol=1e-10)


def test_polish_reaches_rounding_and_its_deviation_is_the_error_under_noise():
    x, _, clean = planted(CUBIC, 4, 4, 60)
    start = x * (1 + 0.05 * normal(4, 4, seed=7))
    assert worst(polish(Model((clean,), slope_of(CUBIC), None, True), start).x, x, scaled=False) < 1e-12
    _, _, field = planted(CUBIC, 4, 4, 60, noise=1e-3)
    fit = polish(Model((field,), slope_of(CUBIC), None, True), start)
    error = torch.nn.functional.normalize(fit.x) - torch.nn.functional.normalize(x)
    ratio = error.norm(dim=1) / fit.deviation
    assert 0.2 < float(ratio.median()) < 3


# ---- recovery


@pytest.mark.parametrize("alpha", [3, 4, 5])
def test_any_independent_samples_are_recovered_from_values_at_random_weights(alpha):
    """From the fewest points, where the kernel of the paper does not suffice."""
    x, _, field = planted(power(alpha), 4, 9, math.ceil(count(4, alpha) / 4) + (alpha == 4))
    found = recover([field], power(alpha), starts=0)
    told = found.identifiability
    assert told.verdict == IDENTIFIABLE and told.rank_kernel < told.needed_kernel
    assert worst(found.x, x, scaled=False, signed=False) < 1e-8
    assert bool(found.certified.all()) and not found.scaled and not found.signed


def test_a_bias_fixes_scale_and_sign():
    x, b, field = planted(CUBIC, 5, 12, 60, affine=True)
    found = recover([field], CUBIC, starts=0)
    assert worst(found.x, x) < 1e-10
    order = torch.cdist(x, found.x).argmin(1)
    assert torch.allclose(found.b[0, order], b, rtol=1e-8)


@pytest.mark.parametrize(
    "c,signed",
    [((0, 0, 1.0, 0.5), True), ((0, 1.0, 0, 0.5), False), ((0, 0, 1.0, 0, 0.5), False), ((0, 1, 1, 1), True)],
)
def test_two_degrees_fix_the_scale_and_two_parities_the_sign(c, signed):
    x, _, field = planted(c, 4, 9, 60)
    found = recover([field], c, starts=0)
    assert found.scaled and found.signed is signed
    assert worst(found.x, x, signed=signed) < 1e-8


def test_more_samples_than_dimensions_need_many_starts():
    x, _, field = planted(CUBIC, 6, 5, 40)
    found = recover([field], CUBIC, samples=6, starts=40)
    assert found.identifiability.verdict == PARTIAL
    assert worst(found.x, x, scaled=False, signed=False) < 1e-8
    assert int(found.certified.sum()) == 6


def test_more_samples_than_the_tensor_has_numbers_for_are_not_certified():
    """Four samples of a cubic form in three variables: 12 unknowns, 10 numbers; the Jacobian is singular."""
    _, _, field = planted(CUBIC, 4, 3, 40)
    found = recover([field], CUBIC, samples=4, starts=8)
    assert found.fit.residual < 1e-7 and not bool(found.certified.any())


def test_no_more_neurons_than_samples_show_nothing():
    """Two steps span two dimensions, in which two samples always fit."""
    _, _, field = planted(CUBIC, 5, 9, 2)
    found = recover([field], CUBIC, starts=8)
    assert found.identifiability.verdict == NOT and not bool(found.certified.any())


def test_below_the_rank_condition_samples_are_certified_one_by_one_where_starts_agree():
    x, _, field = planted(CUBIC, 6, 10, 8)
    found = recover([field], CUBIC, starts=60)
    assert identify(reduce([field])[0], (3,)).verdict == NOT
    assert found.identifiability.verdict == PARTIAL and found.searched.good >= 3
    assert worst(x, found.x[found.certified], scaled=False, signed=False) < 1e-6
    assert int(found.certified.sum()) == 6


def test_noise_in_the_values_makes_an_error_of_its_size():
    x, _, field = planted(CUBIC, 4, 4, 60, noise=1e-4)
    found = recover([field], CUBIC, starts=0)
    assert found.identifiability.verdict == IDENTIFIABLE
    assert worst(found.x, x, False, False) < 1e-3


# ---- what must not be certified


@pytest.mark.parametrize("alpha", [1, 2])
def test_degree_one_and_two_are_never_identifiable(alpha):
    _, _, field = planted(power(alpha), 3, 6, 50)
    found = recover([field], power(alpha))
    assert found.identifiability.verdict == NOT and f"degree {alpha}" in found.identifiability.reason
    assert len(found.x) == 0


def test_a_residual_of_zero_with_a_singular_jacobian_certifies_nothing():
    _, _, field = planted(CUBIC, 5, 5, 4)
    found = recover([field], CUBIC, samples=5, starts=8)
    assert found.fit.residual < 1e-7 and found.fit.sharpness < 1e-7
    assert not bool(found.certified.any()) and found.identifiability.verdict == NOT


def test_dependent_samples_through_the_pencil_are_not_certified():
    _, _, field = planted(CUBIC, 4, 3, 40)
    found = recover([field], CUBIC, samples=3, starts=0)
    assert (
        found.identifiability.verdict == PARTIAL
        and "more samples than dimensions" in found.identifiability.reason
    )
    assert not bool(found.certified.any())


# ---- exact stationary points


@pytest.mark.parametrize("alpha", [3, 4, 5])
@pytest.mark.parametrize("orthonormal", [True, False])
def test_networks_on_z_eigenvectors_are_stationary(alpha, orthonormal):
    x = torch.linalg.qr(normal(9, 3))[0].T if orthonormal else normal(3, 9)
    b = torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64)
    assert max(stationary(x, b, alpha).defects()) < 1e-12


@pytest.mark.parametrize("alpha", [3, 4, 5])
def test_orthonormal_samples_are_recovered_from_a_stationary_point(alpha):
    x, b = torch.linalg.qr(normal(9, 3))[0].T, torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64)
    net = stationary(x, b, alpha)
    found = recover([Field(net.w[None], net.a[None], net.w, False, "")], power(alpha), starts=0)
    assert found.identifiability.verdict == IDENTIFIABLE
    assert worst(found.x, x, scaled=False, signed=False) < 1e-8
    assert len(net.w) == (13 if alpha == 4 else 7)


def test_mixed_signs_of_even_degree_leave_other_tensors():
    """The verdict is right: a tensor that is not the true one has the same gradients at every neuron."""
    x, b = torch.linalg.qr(normal(9, 4))[0].T, torch.tensor([1.0, -0.7, 1.3, -0.6], dtype=torch.float64)
    net = stationary(x, b, 4)
    reduced = reduce([Field(net.w[None], net.a[None], net.w, False, "")])[0]
    told = identify(reduced, (4,))
    assert told.verdict == NOT and told.rank_gradient < told.needed_gradient
    z = normal(4, 4, seed=2)
    added = 4 * ((reduced.white.points[0] @ z.T) ** 3 @ z) * reduced.white.gain[0][:, None]
    other = gradient_field(replace(reduced.white, steps=-added), (4,))
    p = other.jacobian(normal(3, 4, seed=3)) + torch.einsum(
        "li,ia,ib->lab", 12 * (normal(3, 4, seed=3) @ z.T) ** 2, z, z
    )
    assert other.residual < 1e-10 and float(p.norm()) > 1e-2


# ---- norm and sign


def test_margins_give_relative_norms():
    net = mlp((6, 40, 1), "cubic", bias=False)
    evidence = Evidence.from_module(net, input=InputSpec((6,)))
    x = normal(5, 6)
    x = x * (evidence.output(x).abs() ** (-1 / 3))
    found = by_margins(evidence, 7 * torch.nn.functional.normalize(x))
    ratio = found.norm(dim=1) / x.norm(dim=1)
    assert torch.allclose(ratio, ratio.mean().expand(5), rtol=1e-8)


def test_images_fill_their_range_at_one_scale_and_sign():
    g = drawn(0)
    pixels = torch.rand(4, 200, generator=g, dtype=torch.float64) * (
        torch.rand(4, 200, generator=g, dtype=torch.float64) > 0.6
    )
    mean = pixels.mean(0).clamp(0.2, 0.6)
    spec = InputSpec((200,), 0.0, 1.0, mean=mean)
    u = spec.encode(pixels)
    sign = torch.tensor([1.0, -1, -1, 1], dtype=torch.float64)
    evidence = Evidence.from_module(mlp((200, 3, 1), "cubic", bias=False), input=spec)
    fixed = fix(evidence, 3 * sign[:, None] * u, False, False, False, True, False)
    assert torch.allclose(fixed.u, u, atol=1e-8) and any("sign" in s for s in fixed.said)
    assert torch.allclose(fill(u / 5, spec.box())[0], torch.full((4,), 5.0, dtype=torch.float64))


def test_without_a_range_the_open_norm_and_sign_are_stated():
    assert len(undetermined(False, False, True)) == 2 and undetermined(True, True, False) == ()
    assert "its label is" in undetermined(True, False, False)[0]


# ---- evidence


def small(activation="cubic", steps=10, bias=True, width=150):
    training = TrainConfig(lr=0.02, max_steps=steps)
    return make_victim(
        Case(data="digits", n=5, hidden=(width,), activation=activation, bias=bias, training=training)
    )


def encoded(victim):
    return victim.evidence.input.encode(victim.truth.train).flatten(1)


def test_cubic_networks_are_recognised_with_any_module():
    assert recognise(mlp((5, 7, 1), "cubic"), (5,)).activation == "cubic"
    net = mlp((5, 7, 1), "relu")
    net[2] = Polynomial((0, 1.0, 0.5, 0.2))
    chain = recognise(net, (5,))
    assert coefficients(chain.activations[0].fn) == pytest.approx((0, 1.0, 0.5, 0.2))


def test_one_gradient_gives_the_samples_to_rounding_with_the_sign_of_their_labels():
    victim = small(steps=1)
    evidence, u = victim.evidence, encoded(victim)
    params = {k: p.double().clone().requires_grad_() for k, p in evidence.init.items()}
    y = victim.split.train.y
    loss = (evidence.forward(params, u)[:, 0] - y).square().mean()
    gradient = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    found = recover([from_gradient(evidence.chain, evidence.init, gradient)], CUBIC, starts=0)
    inputs = found.x[:, :-1] / found.x[:, -1:]
    assert worst(inputs, u) < 1e-8
    assert torch.equal(found.b[0, torch.cdist(u, inputs).argmin(1)].sign(), y)
    once = recover([from_change(evidence)], CUBIC, starts=0)
    assert once.identifiability.source == "one step from the initial weights"
    assert worst(once.x[:, :-1] / once.x[:, -1:], u) < 1e-8


def test_three_nodes_follow_training_better_than_the_midpoint_and_checkpoints_too():
    victim = small(steps=40)
    evidence, u = victim.evidence, encoded(victim)

    def error(fields):
        found = recover(fields, CUBIC, starts=0)
        return worst(found.x[:, :-1] / found.x[:, -1:], u)

    middle, three = (error([from_change(evidence, nodes)]) for nodes in ((0.5,), (0.0, 0.5, 1.0)))
    halfway = small(steps=20).trained.final
    both = error(from_checkpoints(evidence.chain, [evidence.init, halfway, evidence.final]))
    assert three < 0.5 * middle < 0.1 and both < 0.6 * middle


def test_final_weights_alone_are_taken_for_stationary_only_where_layers_balance():
    victim = small()
    evidence = replace(victim.evidence, init=None)
    told = examine(evidence).identifiability
    assert told.verdict == NOT and "not stationary" in told.reason
    assert torch.equal(from_stationary(evidence).points[0], from_stationary(evidence).steps)


def test_the_attack_recovers_and_certifies_and_its_control_is_empty():
    victim = small(bias=False)
    found = AlgebraAttack(starts=0).run(victim.evidence, seed=0)
    scored = match(found, victim.truth)
    assert scored.train.close == 5 and scored.control.count == 0 and scored.train.median < 0.05
    assert found.certificate.recovered >= 4
    assert any("sign of each sample is not determined" in s for s in found.assumed)
    start = AlgebraAttack(starts=0).starts_for(victim.evidence)
    assert worst(start, encoded(victim)) < 0.1


@pytest.mark.parametrize(
    "activation,lack", [("relu", "a polynomial activation"), ("quadratic", "degree 3 or more")]
)
def test_the_attack_says_what_it_lacks(activation, lack):
    evidence = small(activation).evidence
    assert lack in AlgebraAttack().missing(evidence)[0]
    with pytest.raises(MissingEvidence, match=lack):
        AlgebraAttack().run(evidence)


def test_an_attack_without_samples_ends_with_a_sentence():
    """Two neurons and no starts: nothing is found, and that is a value."""
    victim = small(width=3)
    found = AlgebraAttack(starts=0).run(victim.evidence, seed=0)
    assert not found.certificate or found.certificate.recovered == 0
    assert "not identifiable" in found.reason or len(found.x) == 0


def test_inspection_reports_ranks_margins_and_a_verdict():
    told = examine(small().evidence).identifiability
    assert (told.degree, told.verdict) == (3, IDENTIFIABLE)
    assert told.rank_kernel == told.needed_kernel == count(5, 2) and told.margin_kernel > 1e-3
    assert told.rank_gradient == told.needed_gradient == count(5, 3) and told.margin_gradient > 1e-3
    assert "rank K 15 of 15" in sentence(told)
    assert examine(small("quadratic").evidence).identifiability.verdict == NOT
    assert examine(small("relu").evidence).identifiability is None


# ---- other activations


def test_moments_start_a_tanh_network_near_its_samples_and_polish_finishes():
    victim = small("tanh", steps=1, width=600)
    field, u = from_change(victim.evidence), encoded(victim)
    reduced, y = moment_starts(field)
    model = model_of(reduced, derivatives(victim.evidence.chain.activations[0]))

    def inputs(at):
        return (at @ reduced.basis.T)[:, :-1] / (at @ reduced.last)[:, None]

    assert worst(inputs(y), u) < 0.3
    assert worst(inputs(polish(model, y).x), u) < 1e-6


def test_published_averages_converge_to_the_slices_with_the_width():
    """Stein's identity: mean f (w (w . v) - v) is the degree-3 slice of a cubic field, error like 1 / sqrt(m)."""
    x = torch.nn.functional.normalize(normal(3, 3))
    v = torch.eye(3, dtype=torch.float64)
    true = torch.einsum("li,ia,ib->lab", v @ x.T, x, x)
    errors = []
    for m in (1_000, 100_000):
        w = normal(m, 3, seed=m)
        field = from_values(w, (3 * (w @ x.T) ** 2) @ x)
        third = averages(field, v)[:3]
        scale = (third * true).sum() / third.square().sum()
        errors.append(float((scale * third - true).norm() / true.norm()))
    assert errors[1] < 0.3 * errors[0] and errors[1] < 0.1


def test_slices_are_the_weighted_outer_products_of_the_samples():
    x, b, field = planted(CUBIC, 3, 3, 20)
    v = normal(4, 3, seed=6)
    twin = torch.einsum("li,ia,ib->lab", 6 * (v @ x.T) * b, x, x)
    assert torch.allclose(gradient_field(field, (3,)).jacobian(v), twin, atol=1e-9)
    assert torch.allclose(
        slices(gradient_field(field, (3,)), 0).flatten(1).norm(dim=1), torch.ones(16).double()
    )


def test_derivatives_of_an_activation_are_its_own():
    t = normal(5)
    found = derivatives(Activation("tanh", torch.tanh))
    assert torch.allclose(found.first(t), 1 - torch.tanh(t) ** 2, atol=1e-12)
    assert torch.allclose(found.second(t), -2 * torch.tanh(t) * (1 - torch.tanh(t) ** 2), atol=1e-12)
