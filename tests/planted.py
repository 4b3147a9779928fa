"""Problems whose answer is known exactly, and slow obvious twins of what the package computes cleverly.

Everything is float64 and drawn from its own generator; the global one is never touched.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from exhume.change import Decay
from exhume.equations.span import EquationWeights, Span
from exhume.evidence import Evidence, InputSpec
from exhume.spaces import full, subspace
from exhume.victims.nets import Polynomial, ReluTanh

ACTIVATIONS = {
    "cubic": lambda: Polynomial((0.0, 0.0, 0.0, 1.0)),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
    "relu_tanh": ReluTanh,
}
NO_DECAY = Decay(1.0, 1.0, "planted")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    """Independent standard normal numbers."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def on_sphere(n, d, radius, seed=0):
    """n points on a sphere in R^d."""
    x = draw(n, d, seed=seed)
    return radius * x / x.norm(dim=1, keepdim=True)


def distance(a, b):
    """Distance of each row of b to the nearest row of a, relative to its own norm."""
    return (torch.cdist(b, a).amin(1) / b.norm(dim=1)) if len(a) else torch.full((len(b),), torch.inf)


def dense(sizes, activation="relu", bias=True, seed=0):
    """A dense chain with pre-activations of size 1 on inputs of norm sqrt(d), and biases of size 0.3."""
    g = generator(seed)
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(fan_out, fan_in, generator=g, dtype=torch.float64) / fan_in**0.5)
            if bias:
                linear.bias.copy_(0.3 * torch.randn(fan_out, generator=g, dtype=torch.float64))
        layers += [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def state(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def with_weights(model, weights):
    model.load_state_dict(weights)
    return model


# --- the slow twin -----------------------------------------------------------------------------------------


def sample_gradient(evidence, node, u, output):
    """grad_theta f_output(u; theta_node) by name, for one input u [d]; differentiable in u."""
    final, init = evidence.final, evidence.init or evidence.final
    params = {k: ((1 - node) * init[k] + node * final[k]).double().requires_grad_() for k in final}
    out = evidence.forward(params, u.view(1, *evidence.input.shape))[0, output]
    found = torch.autograd.grad(out, list(params.values()), create_graph=True, allow_unused=True)
    return {
        k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), found, strict=True)
    }


@dataclass(frozen=True, eq=False)
class Naive:
    """The span equation with every gradient written down, one at a time.

    layout "dense": for each kept layer, rows [W_j, b_j]; in a subspace the first W expressed in [basis, origin].
    layout "module": parameters in the order of the state dict.
    """

    evidence: Evidence
    span: Span
    space: object
    decay: Decay
    layout: str

    def flatten(self, tree):
        w = self.span.weights
        names = list(tree)
        matrices = [k for k in names if tree[k].dim() > 1]
        kept = matrices if self.span.layers == "all" else matrices[-1:]
        size = {
            k: w.last if k == matrices[-1] else w.first if k == matrices[0] else w.hidden for k in matrices
        }
        parts = []
        if self.layout == "module":
            return torch.cat([size.get(k, w.bias) * tree[k].flatten() for k in names])
        for k in kept:
            block = size[k] * tree[k]
            if k == matrices[0] and self.space.basis is not None:
                block = block @ self.frame.T
            bias = k.replace("weight", "bias")
            if bias in tree:
                block = torch.cat([block, w.bias * tree[bias][:, None]], 1)
            parts.append(block.flatten())
        return torch.cat(parts)

    @property
    def frame(self):
        """Orthonormal rows of the linear span of the space, the direction of the origin last (0 if none)."""
        origin = self.space.origin
        last = torch.zeros(1, self.space.size).double() if origin is None else (origin / origin.norm())[None]
        return torch.cat([self.space.basis, last])

    def change(self):
        final, init = (
            {k: p.double() for k, p in w.items()} for w in (self.evidence.final, self.evidence.init)
        )
        return {k: final[k] - self.decay.of(p) * p for k, p in init.items()}

    def target(self):
        return self.flatten(self.change())

    def energy(self):
        """|t|^2 with nothing cut off."""
        everywhere = replace(self, space=full(self.space.size))
        return float(everywhere.target().square().sum())

    def features(self, z):
        """Phi [m k, P], k = (node, output)."""
        u = self.space.expand(z)
        outputs = self.evidence.outputs
        rows = [
            self.flatten(sample_gradient(self.evidence, node, one, c))
            for one in u
            for node in self.span.nodes
            for c in range(outputs)
        ]
        return torch.stack(rows)

    def contribution(self, z, coef):
        return self.features(z).T @ coef.flatten()

    def jacobian(self, z, coef):
        """d contribution / d z, [P, m q]."""
        leaf = z.clone().requires_grad_()
        out = self.contribution(leaf, coef)
        basis = torch.eye(len(out), dtype=out.dtype)
        found = torch.autograd.grad(out, leaf, basis, is_grads_batched=True, allow_unused=True)[0]
        return found.flatten(1).detach()

    def reduced_loss(self, z):
        """min_c |t - Phi' c|^2 / |t|^2, differentiable in z; Phi must have full row rank."""
        phi, t = self.features(z), self.target()
        coef = torch.linalg.solve(phi @ phi.T, phi @ t)
        outside = self.energy() - float(t @ t)
        return ((t - phi.T @ coef).square().sum() + outside) / self.energy()


# --- problems ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Planted:
    """Evidence together with the samples x [n, d] and multipliers [n, C] that explain it exactly at `node`."""

    model: nn.Module
    evidence: Evidence
    x: torch.Tensor
    coef: torch.Tensor
    node: float


def random_evidence(sizes, activation="relu", bias=True, seed=0, step=0.3):
    """Two unrelated sets of weights of one architecture: no equation holds, every formula must still."""
    init = state(dense(sizes, activation, bias, seed))
    other = state(dense(sizes, activation, bias, seed + 1000))
    model = with_weights(dense(sizes, activation, bias, seed), {k: init[k] + step * other[k] for k in init})
    return Evidence.from_module(model, input=InputSpec((sizes[0],)), init=init)


def planted_span(
    sizes, activation="relu", bias=True, n=3, seed=0, node=0.0, size=0.1, radius=None, spec=None
):
    """Weights whose change is exactly sum_i sum_c coef_ic grad f_c(x_i; theta_node), at node 0 or 1.

    At node 0 theta_0 is drawn and theta_f follows, at node 1 the other way round.
    """
    x = on_sphere(n, sizes[0], sizes[0] ** 0.5 if radius is None else radius, seed + 1)
    sign = draw(n, sizes[-1], seed=seed + 2).sign()
    coef = size * sign * (1 + torch.rand(n, sizes[-1], generator=generator(seed + 3), dtype=torch.float64))
    model = dense(sizes, activation, bias, seed)
    drawn = state(model)
    spec = InputSpec((sizes[0],)) if spec is None else spec
    here = Evidence.from_module(model, input=spec)
    change = {k: torch.zeros_like(p) for k, p in drawn.items()}
    for i in range(n):
        for c in range(sizes[-1]):
            for k, g in sample_gradient(here, 1.0, x[i], c).items():
                change[k] += float(coef[i, c]) * g.detach()
    sign = 1.0 if node == 0.0 else -1.0
    derived = {k: drawn[k] + sign * change[k] for k in drawn}
    init, final = (drawn, derived) if node == 0.0 else (derived, drawn)
    model = with_weights(model, final)
    return Planted(model, Evidence.from_module(model, input=spec, init=init), x, coef, node)


def planted_features(n=4, d=16, width=256, activation="relu", bias=False, seed=0, outputs=1, spec=None):
    """Random features: only the last layer moved, by sum_i coef_i phi(x_i), so nodes 0 and 1 agree."""
    whole = planted_span((d, width, outputs), activation, bias, n, seed, size=1.0, spec=spec)
    init, final = whole.evidence.init, whole.evidence.final
    last = list(init)[-2:] if bias else list(init)[-1:]
    final = {k: final[k] if k in last else init[k] for k in init}
    model = with_weights(whole.model, final)
    spec = InputSpec((d,), sample_norm=d**0.5) if spec is None else spec
    return Planted(model, Evidence.from_module(model, input=spec, init=init), whole.x, whole.coef, 0.0)


LAST = Span(nodes=(1.0,), layers="last")
UNEQUAL = EquationWeights(first=0.3, bias=1.7, hidden=0.8, last=3.0)


def affine(d, q, seed=0, through=None):
    """A random affine set of dimension q in R^d away from zero, or the linear span of rows and more."""
    if through is None:
        return subspace(draw(q, d, seed=seed), 0.5 * draw(d, seed=seed + 1))
    return subspace(torch.cat([through, draw(q - len(through), d, seed=seed)]))


# --- real training -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """Weights before and after torch.optim's own training on inputs x [n, d], squared loss."""

    model: nn.Module
    init: dict
    final: dict
    x: torch.Tensor
    seen: Evidence


def train(
    sizes,
    n=8,
    *,
    optimizer=torch.optim.SGD,
    lr=0.05,
    steps=100,
    batch=None,
    weight_decay=0.0,
    decay_biases=True,
    frozen=(),
    x=None,
    bias=True,
    activation="relu",
    recipe=None,
    observe=None,
    seed=0,
    **options,
):
    """Train a dense chain of these sizes; `frozen` names parameters, `observe` is called before every step."""
    x = 3 * draw(n, sizes[0], seed=seed + 1) / sizes[0] ** 0.5 if x is None else x
    y = draw(len(x), sizes[-1], seed=seed + 2).sign()
    model = dense(sizes, activation, bias, seed)
    init = state(model)
    groups = [
        {
            "params": [p for k, p in model.named_parameters() if p.dim() == dim and k not in frozen],
            "weight_decay": wd,
        }
        for dim, wd in ((2, weight_decay), (1, weight_decay if decay_biases else 0.0))
    ]
    optim = optimizer([g for g in groups if g["params"]], lr=lr, **options)
    batch = batch or len(x)
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(x)
        optim.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        if observe is not None:
            observe(model, x[rows], y[rows])
        optim.step()
    final = state(model)
    return Trained(
        model,
        init,
        final,
        x,
        Evidence.from_module(model, input=InputSpec((sizes[0],)), init=init, recipe=recipe),
    )


def stored_as(trained, dtype):
    """The same run as an attacker sees it whose copy of both checkpoints was rounded to `dtype`."""
    cast = [{k: p.to(dtype) for k, p in weights.items()} for weights in (trained.init, trained.final)]
    return Evidence.from_module(trained.model, input=trained.seen.input, init=cast[0], final=cast[1])


def what_sgd_leaves(lr, steps, weight_decay, momentum=0.0):
    """Kappa of torch.optim.SGD, by running it on a parameter that no loss depends on."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optim = torch.optim.SGD([p], lr=lr, weight_decay=weight_decay, momentum=momentum)
    for _ in range(steps):
        p.grad = torch.zeros_like(p)
        optim.step()
    return float(p.detach())
