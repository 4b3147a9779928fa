"""NTK-parametrised and linearised victims: what they are, and that the span equation holds on them."""

import pytest
import torch

from exhume.equations.span import Span
from exhume.joint import Joint
from exhume.spaces import full
from exhume.victims.lazy import linearised_mlp, ntk_mlp
from exhume.victims.nets import mlp
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim
from planted import NO_DECAY, draw


def test_an_ntk_net_is_a_standard_net_of_scaled_weights():
    sizes = (5, 30, 20, 2)
    net, twin = ntk_mlp(sizes, "tanh", seed=3), mlp(sizes, "tanh")
    with torch.no_grad():
        for own, standard in zip(net[1::2], twin[1::2], strict=True):
            standard.weight.copy_(own.weight / own.weight.shape[1] ** 0.5)
            standard.bias.copy_(own.bias)
    torch.testing.assert_close(net(draw(4, 5)), twin(draw(4, 5)))


@pytest.mark.parametrize("width", [200, 2000])
def test_outputs_of_an_ntk_net_do_not_grow_with_its_width(width):
    out = ntk_mlp((20, width, width, 1), seed=1)(draw(100, 20))
    assert 0.05 < float(out.detach().square().mean()) < 5


def test_a_linearised_net_is_affine_in_its_parameters_and_tangent_to_the_net():
    net, base = linearised_mlp((5, 30, 1), "tanh", seed=2), mlp((5, 30, 1), "tanh", seed=2)
    u, start = draw(4, 5), [p.detach().clone() for p in net.parameters()]
    torch.testing.assert_close(net(u), base(u))
    wanted = torch.autograd.grad(base(u).sum(), list(base.parameters()))
    step = [draw(*p.shape, seed=7) for p in start]
    values = []
    for size in (0.0, 1.0, 2.0):
        with torch.no_grad():
            for p, at, d in zip(net.parameters(), start, step, strict=True):
                p.copy_(at + size * d)
        values.append(net(u).detach())
        for a, b in zip(torch.autograd.grad(net(u).sum(), list(net.parameters())), wanted, strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(values[2] - values[1], values[1] - values[0])


def misfit(net, nodes, activation="relu"):
    training = TrainConfig(lr=0.05 if net != "ntk" else 0.5, max_steps=150, tolerance=0.0)
    case = Case(data="digits", n=4, net=net, hidden=(60,), activation=activation, training=training, seed=1)
    return make_victim(case).misfit_at_truth(Span(nodes=nodes))


def test_one_node_is_exact_on_a_linearised_victim_and_not_on_the_net_itself():
    assert misfit("linearised", (0.0,)) < 1e-20
    assert misfit("linearised", (1.0,)) < 1e-20
    assert misfit("mlp", (0.0,)) > 1e-4


def test_two_nodes_explain_an_ntk_victim():
    assert misfit("ntk", (0.0, 1.0), "tanh") < 0.01


def test_the_published_loss_vanishes_at_the_samples_of_a_linearised_victim():
    """By torch.func, with the multipliers that the least squares gives; and it has a gradient elsewhere."""
    training = TrainConfig(lr=0.05, max_steps=50, tolerance=0.0)
    victim = make_victim(
        Case(data="digits", n=3, net="linearised", hidden=(40,), activation="softplus", training=training)
    )
    space = full(64)
    equation = Span(nodes=(1.0,)).bind(victim.evidence, space, NO_DECAY)
    z = victim.evidence.input.encode(victim.truth.train).flatten(1)
    coef = torch.linalg.lstsq(equation.gram(z), equation.inner(z, equation.target()).flatten()[:, None])
    problem = Joint(equation, space, 1.0)
    here = torch.cat([z, coef.solution.view(3, -1)], 1)
    assert problem.at(here).misfit < 1e-18
    elsewhere = problem.at(here + 0.1)
    assert elsewhere.misfit > 1e-3
    assert float(problem.gradient(elsewhere)[:, :64].norm()) > 1e-6
