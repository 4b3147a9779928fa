"""The dynamics equation: reduced training, simulated training, and its derivatives without an unrolled graph."""

import itertools
import weakref
from dataclasses import fields, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exhume.equations.discrepancy import Cosine, Squared, Whitened
from exhume.equations.dynamics import Dynamics
from exhume.equations.fold import fold
from exhume.equations.losses import LOSSES
from exhume.equations.reversal import backwards
from exhume.equations.simulation import Unknowns
from exhume.errors import ExhumeError, MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.spaces import full, subspace
from exhume.victims.train import TrainConfig
from exhume.victims.train import train as train_victim
from planted import affine, dense, draw, random_evidence, state

NAMES = [field.name for field in fields(Unknowns)]
SCALARS = NAMES[2:]
M, C = 5, 2


# --- the slow twin -----------------------------------------------------------------------------------------


def batch_loss(loss, reduction, out, label, weight):
    """The loss of a batch as torch writes it; sample i counts weight_i times."""
    if loss == "cross-entropy":
        each = F.cross_entropy(out, label, reduction="none")
    elif loss == "logistic":
        each = F.softplus(-label * out).sum(1) / (out.shape[1] if reduction == "mean" else 1)
    else:
        each = ((out - label) ** 2).sum(1) / (out.shape[1] if reduction == "mean" else 1)
    total = (weight * each).sum()
    return total / len(out) if reduction == "mean" else total


def unroll(evidence, space, config, unknowns, weight=None):
    """Every step of training with its graph kept; returns the full net's end and the losses before each step."""
    params = {k: p.clone().requires_grad_() for k, p in evidence.init.items()}
    velocity = {k: torch.zeros_like(p) for k, p in params.items()}
    u = space.expand(unknowns.z).view(-1, *evidence.input.shape)
    weight = torch.ones(len(u)).double() if weight is None else weight
    batches, losses = torch.arange(len(u)).split(config.batch_size or len(u)), []
    for t in range(config.steps):
        rows = batches[t % len(batches)]
        out = evidence.forward(params, u[rows])
        losses.append(batch_loss(config.loss, config.reduction, out, unknowns.label[rows], weight[rows]))
        slope = torch.autograd.grad(losses[-1], list(params.values()), create_graph=True)
        for (k, p), g in zip(params.items(), slope, strict=True):
            velocity[k] = unknowns.momentum * velocity[k] + g + unknowns.weight_decay * p
        params = {k: p - unknowns.lr * velocity[k] for k, p in params.items()}
    return params, torch.stack(losses)


def frame_of(space):
    """Orthonormal rows of the span of a space."""
    if space.origin is None:
        return space.basis
    return torch.cat([space.basis, space.origin[None] / space.origin.norm()])


def folded(evidence, space, params):
    """Parameters by name as the equation sees them: the first weight of a chain in the frame of the space."""
    if evidence.chain is None or space.basis is None:
        return dict(params)
    first = evidence.chain.weights[0]
    return {k: p @ frame_of(space).T if k == first else p for k, p in params.items()}


def flat(params):
    return torch.cat([p.flatten() for p in params.values()])


def written_down(name, change, target):
    """Each discrepancy by its formula."""
    if name == "squared":
        return (flat(change) - flat(target)).square().sum() / flat(target).square().sum()
    if name == "cosine":
        return 1 - F.cosine_similarity(flat(change), flat(target), 0)
    parts = [(change[k] - t).square().sum() / t.square().sum() for k, t in target.items()]
    return sum(parts) / len(parts)


DISCREPANCIES = {"squared": Squared(), "cosine": Cosine(), "whitened": Whitened()}


# --- problems ----------------------------------------------------------------------------------------------


def conv_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(4, C),
    ).double()  # fmt: skip


@cache
def setting(kind):
    """Evidence and a space: no equation holds there, every derivative must."""
    if kind == "conv":
        init, final = conv_net(1), conv_net(2)
        return Evidence.from_module(final, input=InputSpec((1, 4, 4)), init=state(init)), full(16)
    activation = "relu" if kind == "relu chain" else "tanh"
    return random_evidence((6, 5, 4, C), activation), affine(6, 3)


def labels(loss, m=M, outputs=C, seed=7):
    drawn = draw(m, outputs, seed=seed)
    return {"mse": drawn, "logistic": drawn.sign(), "cross-entropy": drawn.softmax(1)}[loss]


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def unknowns(space, loss, lr=0.05, momentum=0.6, decay=0.03):
    z = draw(M, space.dim, seed=5)
    return Unknowns(z, labels(loss), scalar(lr), scalar(momentum), scalar(decay))


def leaves(at):
    return Unknowns(*(getattr(at, name).clone().requires_grad_() for name in NAMES))


def inner(a, b):
    return sum((getattr(a, name) * getattr(b, name)).sum() for name in NAMES)


def direction(at, seed=20):
    return Unknowns(
        *(draw(getattr(at, n).numel(), seed=seed + i).view_as(getattr(at, n)) for i, n in enumerate(NAMES))
    )


def close(found, wanted, rtol):
    """Equal relative to the largest entry."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=rtol * float(wanted.abs().max()) + 1e-300)


KINDS = ("relu chain", "tanh chain", "conv")
BATCHES = (None, 2)


# --- training in the space of the samples --------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("through_zero", [True, False])
def test_training_the_folded_net_is_folding_the_trained_net(depth, bias, through_zero):
    """Every step of torch's own SGD, with momentum, decay and batches of which the last is smaller."""
    sizes = {1: (9, 2), 2: (9, 7, 2), 3: (9, 7, 4, 2)}[depth]
    evidence, x, y = random_evidence(sizes, "relu", bias), draw(M, 9, seed=3), draw(M, 2, seed=2)
    space = subspace(x) if through_zero else subspace(x[1:] - x[0], x[0])
    net, z = fold(evidence, space), space.coordinates(x)
    assert net.embed(z).shape == (M, M)  # the samples, or their differences and the origin
    starts = evidence.init, net.init
    whole, small = ({k: nn.Parameter(p.clone()) for k, p in start.items()} for start in starts)
    optimizer = torch.optim.SGD([*whole.values(), *small.values()], lr=0.1, momentum=0.9, weight_decay=0.05)
    for rows in torch.arange(M).split(2) * 3:
        optimizer.zero_grad()
        loss = (evidence.forward(whole, x[rows]) - y[rows]).square().mean()
        (loss + (net.forward(small, net.embed(z[rows])) - y[rows]).square().mean()).backward()
        optimizer.step()
        for k, p in folded(evidence, space, whole).items():
            torch.testing.assert_close(small[k].detach(), p.detach(), rtol=1e-12, atol=1e-12)
    out = net.forward(net.final, net.embed(z))
    torch.testing.assert_close(out, evidence.output(x), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_folded_is_left_alone():
    evidence, space = setting("conv")
    net = fold(evidence, space)
    z = draw(M, 16)
    assert net.forward is evidence.forward
    assert torch.equal(net.embed(z), z.view(M, 1, 4, 4))
    assert all(torch.equal(p, evidence.final[k]) for k, p in net.final.items())
    chain = setting("relu chain")[0]
    assert all(torch.equal(p, chain.init[k]) for k, p in fold(chain, full(6)).init.items())
    affine_conv = fold(evidence, affine(16, 3))
    torch.testing.assert_close(
        affine_conv.embed(z[:, :3]), affine(16, 3).expand(z[:, :3]).view(M, 1, 4, 4), rtol=0, atol=0
    )


# --- a true answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["chain", "conv"])
def test_the_true_samples_of_a_trained_victim_leave_no_residual(kind, batch, loss):
    model = conv_net() if kind == "conv" else dense((12, 8, 6, C))
    shape = (1, 4, 4) if kind == "conv" else (12,)
    x = draw(M, *shape, seed=3)
    y = labels(loss)
    classes = y.argmax(1)
    soft = F.one_hot(classes, C).double() if loss == "cross-entropy" else y
    recipe = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01}
    config = TrainConfig(loss=loss, max_steps=41, tolerance=0.0, batch_size=batch, **recipe)
    run = train_victim(model, x, classes if loss == "cross-entropy" else y, config)
    evidence = Evidence.from_module(model, input=InputSpec(shape), init=run.init, final=run.final)
    u = x.flatten(1)
    space = full(16) if kind == "conv" else subspace(u[1:] - u[0], u[0])
    truth = Unknowns(space.coordinates(u), soft, *(scalar(v) for v in recipe.values()))
    bound = Dynamics(loss, steps=41, batch_size=batch).bind(evidence, space)
    assert float(bound.residual(truth).norm()) < 1e-10 * float(bound.target().norm())
    for discrepancy in DISCREPANCIES.values():
        value, slope = bound.gradient(truth, discrepancy)
        assert value == bound.value(truth, discrepancy) < 1e-15
        assert all(float(getattr(slope, name).abs().max()) < 1e-8 for name in NAMES)
    elsewhere = replace(truth, z=truth.z + 0.1 * draw(*truth.z.shape))
    assert bound.value(elsewhere, Squared()) > 1e-4


# --- derivatives -------------------------------------------------------------------------------------------


CASES = [
    *itertools.product(KINDS, LOSSES, BATCHES, (3,), ("mean",)),
    *itertools.product(("relu chain", "conv"), LOSSES, BATCHES, (50,), ("mean",)),
    *itertools.product(("relu chain", "conv"), LOSSES, (2,), (3,), ("sum",)),
]


@pytest.mark.parametrize(("kind", "loss", "batch", "steps", "reduction"), CASES)
def test_the_adjoint_is_the_gradient_of_the_unrolled_run(kind, loss, batch, steps, reduction):
    """Samples, labels, learning rate, momentum and decay; the states in between partly recomputed."""
    evidence, space = setting(kind)
    at = leaves(unknowns(space, loss, lr=0.05 if reduction == "mean" else 0.005))
    config = Dynamics(loss, steps, batch, reduction)
    states = 5 * 2 * 8 * config.bind(evidence, space).equations
    bound = replace(config, memory=states).bind(evidence, space)
    end, losses = unroll(evidence, space, config, at)
    end, init, final = (folded(evidence, space, w) for w in (end, evidence.init, evidence.final))
    found = bound.simulate(at)
    assert (found.diverged, found.steps) == (False, steps)
    close(found.loss, losses.detach(), 1e-12)
    close(flat(found.end), flat(end).detach(), 1e-12)
    close(bound.residual(at), (flat(end) - flat(final)).detach(), 1e-12)
    change, target = ({k: w[k] - init[k] for k in init} for w in (end, final))
    close(bound.target(), flat(target), 1e-14)
    for name, discrepancy in DISCREPANCIES.items():
        wanted = written_down(name, change, target)
        slopes = torch.autograd.grad(wanted, [getattr(at, n) for n in NAMES], retain_graph=True)
        value, gradient = bound.gradient(at, discrepancy)
        assert value == pytest.approx(float(wanted.detach()), rel=1e-10)
        assert bound.value(at, discrepancy) == pytest.approx(value, rel=1e-10)
        for field, slope in zip(NAMES, slopes, strict=True):
            close(getattr(gradient, field), slope, 1e-8)


@pytest.mark.parametrize(("kind", "loss", "batch"), list(itertools.product(KINDS, LOSSES, BATCHES)))
def test_forward_and_reverse_are_transposes(kind, loss, batch):
    evidence, space = setting(kind)
    bound = Dynamics(loss, 11, batch).bind(evidence, space)
    at, cotangent = unknowns(space, loss), draw(bound.equations, seed=9)
    for seed in (20, 30):
        along = direction(at, seed)
        forward, reverse = cotangent @ bound.jvp(at, along), inner(bound.vjp(at, cotangent), along)
        assert float(forward) == pytest.approx(float(reverse), rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_jacobian_is_its_columns(kind):
    """Computed a few columns at a time."""
    evidence, space = setting(kind)
    bound = Dynamics("logistic", 4, 2).bind(evidence, space)
    at = unknowns(space, "logistic")
    nothing = Unknowns(*(torch.zeros_like(getattr(at, name)) for name in NAMES))
    axes = torch.eye(at.z.numel(), dtype=torch.float64).view(-1, *at.z.shape)
    columns = [bound.jvp(at, replace(nothing, z=axis)) for axis in axes]
    found = replace(bound, memory=4 * 8 * 8 * bound.equations).jacobian(at)
    torch.testing.assert_close(found, torch.stack(columns, 1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["tanh chain", "conv"])
def test_the_potential_is_the_first_variation_of_each_candidate(kind):
    """Its value is what more of a candidate would do to the end, its slope what moving the candidate does."""
    evidence, space = setting(kind)
    config = Dynamics("logistic", 7, 2)
    bound = config.bind(evidence, space)
    at, cotangent = unknowns(space, "logistic"), draw(bound.equations, seed=9)
    potential = bound.potential(at, cotangent)
    weight = torch.ones(M, dtype=torch.float64, requires_grad=True)
    end = folded(evidence, space, unroll(evidence, space, config, at, weight)[0])
    close(potential(at.z), torch.autograd.grad(cotangent @ flat(end), weight)[0], 1e-10)
    z = at.z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(potential(z).sum(), z, create_graph=True)
    close(slope.detach(), bound.vjp(at, cotangent).z, 1e-10)
    along = draw(*z.shape, seed=12)
    (bend,) = torch.autograd.grad((slope * along).sum(), z)

    def slope_at(shift):
        w = (at.z + shift * along).requires_grad_()
        return torch.autograd.grad(potential(w).sum(), w)[0]

    if kind == "tanh chain":  # smooth, so that differences of slopes show the second derivative
        close(bend, (slope_at(1e-5) - slope_at(-1e-5)) / 2e-5, 1e-6)
    else:
        assert bool(bend.any())


@pytest.mark.parametrize("loss", list(LOSSES))
def test_closed_forms_of_the_losses(loss):
    out, label = draw(M, 3, seed=1), labels(loss, outputs=3)
    for mean in (True, False):
        made, reduction = LOSSES[loss](mean), "mean" if mean else "sum"
        wanted = batch_loss(loss, reduction, out, label, torch.ones(M).double())
        close(made.scale(M, 3) * made.value(out, label).sum(), wanted, 1e-14)
    slopes = torch.func.grad(lambda f, y: made.value(f, y).sum(), (0, 1))
    close(made.slope(out, label), slopes(out, label)[0], 1e-14)
    moved = draw(4, M, 3, seed=2), draw(4, M, 3, seed=3)
    found = made.bend(out, label, *moved)
    for s in range(4):
        bent = torch.func.jvp(slopes, (out, label), (moved[0][s], moved[1][s]))[1]
        close(found[0][s], bent[0], 1e-14)
        close(found[1][s], bent[1], 1e-14)


# --- memory ------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Largest number of bytes in storages made by operations under it and alive at once."""

    def __init__(self):
        super().__init__()
        self.most, self.alive = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self.total() > self.most:  # no record unless it stands when the dead are gone
            self.alive = {k: entry for k, entry in self.alive.items() if not entry[0].expired()}
            self.most = max(self.most, self.total())
        return out

    def total(self):
        return sum(size for _, size in self.alive.values())


def peak(work):
    with Peak() as seen:
        work()
    return seen.most


@pytest.mark.parametrize("kind", ["relu chain", "conv"])
def test_memory_does_not_grow_with_the_number_of_steps(kind):
    """With room for a given number of states, a run of any length takes the same; an unrolled graph grows."""
    evidence, space = setting(kind)
    at = unknowns(space, "mse")
    bound = Dynamics("mse", 4, 2).bind(evidence, space)
    cotangent, size = draw(bound.equations), 2 * 8 * bound.equations

    def reverse(steps, states=2):
        return peak(lambda: replace(bound, steps=steps, memory=states * size).vjp(at, cotangent))

    def forward(steps):
        return peak(lambda: replace(bound, steps=steps).jvp(at, at))

    def unrolled(steps):
        leaf = leaves(at)
        config = Dynamics("mse", steps, 2)
        return peak(lambda: torch.autograd.grad(flat(unroll(evidence, space, config, leaf)[0]).sum(), leaf.z))

    long = reverse(64)
    assert long < 1.15 * reverse(4)  # after 4 steps, not all that is held later has been alive at once
    assert long == pytest.approx(reverse(16), rel=1e-3)
    assert reverse(64, 41) - long == pytest.approx(39 * size, rel=0.05)  # the budget is used, and kept
    assert forward(64) == pytest.approx(forward(4), rel=1e-3)
    assert unrolled(64) > 5 * unrolled(4)


class Number:
    """A state that can be counted."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    ("steps", "slots"), [(0, 1), (1, 1), (7, 1), (9, 2), (40, 3), (40, 8), (40, 41), (40, 99)]
)
def test_states_come_back_in_reverse_from_few_checkpoints(steps, slots):
    alive, most, made = weakref.WeakSet(), 0, 0

    def step(t, state):
        nonlocal most, made
        assert state.value == t
        made += 1
        after = Number(t + 1)
        alive.add(after)
        most = max(most, len(alive))
        return after

    start = Number(0)
    alive.add(start)
    seen = [(t, state.value) for t, state in backwards(start, steps, slots, step)]
    assert seen == [(t, t) for t in range(steps, -1, -1)]
    assert most <= slots + 3  # the state at work, its successor, and what the loop here still holds
    if slots > steps:
        assert made == steps
    if slots == 8:
        assert made < 2 * steps  # a square root of the states costs less than a second run


# --- what can go wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu chain", "conv"])
def test_a_run_that_diverges_keeps_its_last_finite_weights_and_says_so(kind):
    evidence, space = setting(kind)
    bound = Dynamics("mse", 99).bind(evidence, space)
    at = replace(unknowns(space, "mse"), lr=scalar(1e10), momentum=scalar(0.0), weight_decay=scalar(1.0))
    found = bound.simulate(at)
    assert found.diverged
    assert 0 < found.steps < 99
    assert len(found.loss) == found.steps
    assert f"step {found.steps + 1} of 99" in found.reason
    assert bool(torch.isfinite(flat(found.end)).all())
    assert bool(torch.isfinite(bound.residual(at)).all())
    edge = replace(bound, steps=found.steps)  # finite weights of a size that their squares are not
    assert not edge.simulate(at).diverged
    assert torch.equal(flat(edge.simulate(at).end), flat(found.end))
    for equation, discrepancy in (
        (bound, Squared()),
        (bound, Cosine()),
        (edge, Squared()),
        (edge, Whitened()),
    ):
        assert equation.value(at, discrepancy) == torch.inf
        value, slope = equation.gradient(at, discrepancy)
        assert value == torch.inf
        assert all(not bool(getattr(slope, name).any()) for name in NAMES)
    assert 0 <= edge.value(at, Cosine()) <= 2
    value, slope = edge.gradient(at, Cosine())
    assert value >= 0
    assert all(bool(torch.isfinite(getattr(slope, name)).all()) for name in NAMES)
    cotangent = draw(bound.equations)
    for derivative in (
        lambda: bound.vjp(at, cotangent),
        lambda: bound.jvp(at, at),
        lambda: bound.jacobian(at),
        lambda: bound.potential(at, cotangent)(at.z),
    ):
        with pytest.raises(ExhumeError, match="diverge"):
            derivative()


def test_discrepancies_at_their_edges():
    """A tensor that did not change counts for nothing; a run that did nothing has a value and a flat slope."""
    target = {"a": draw(3, 2), "b": torch.zeros(2).double(), "c": draw(4, seed=1)}
    change = {k: t + 1 for k, t in target.items()}
    used = {k: target[k] for k in "ac"}
    assert float(Whitened().value(change, target)) == float(written_down("whitened", change, used))
    still = {k: torch.zeros_like(t).requires_grad_() for k, t in target.items()}
    value = Cosine().value(still, target)
    assert float(value.detach()) == 1
    assert all(not bool(g.any()) for g in torch.autograd.grad(value, list(still.values())))
    assert float(Cosine().value({k: 3 * t for k, t in target.items()}, target)) == pytest.approx(0, abs=1e-15)
    assert float(Squared().value(still, target).detach()) == 1


def test_misuse_is_named():
    evidence, space = setting("relu chain")
    for wrong, said in (
        ({"loss": "mean squared"}, "did you mean|valid names"),
        ({"reduction": "sums"}, "did you mean 'sum'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"memory": 0}, "memory must be at least 1"),
    ):
        with pytest.raises(ExhumeError, match=said):
            Dynamics(**wrong)
    with pytest.raises(MissingEvidence, match="initial weights"):
        Dynamics().bind(replace(evidence, init=None), space)
    with pytest.raises(ExhumeError, match="agree"):
        Dynamics().bind(replace(evidence, init=evidence.final), space)
    at = unknowns(space, "mse")
    with pytest.raises(ExhumeError, match=r"shape \(5, 2\)"):
        Dynamics().bind(evidence, space).simulate(replace(at, label=at.label[:, :1]))
