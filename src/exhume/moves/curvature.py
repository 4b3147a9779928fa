"""Splitting matrices of all candidates: their lowest eigenpairs, what a split gains, and how far the copies go.

S_i is the Hessian in z_i of what candidate i adds to the loss while the residual r is held fixed (Shen et al. 2026;
Liu, Wu, Wang 2019 for neurons), -2 scale <r, c_i' Phi_i(z)> + prior. Two halves of a candidate at z +- eta v change
the loss by eta^2/2 v' S_i v + O(eta^4). Each candidate's potential depends on its own coordinates alone, so that one
Hessian-vector product on all coordinates gives S_i v_i for all.

Where the norm of a candidate is fixed, copies go along the sphere, z cos + v sin: S_i is then restricted to tangents,
and less (gradient . z) / |z|^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.lanczos import lanczos
from exhume.spaces import Space
from exhume.view import View

PROBE = 1e-2  # relative to |z|: where the quartic coefficient is measured


@dataclass(frozen=True, eq=False)
class Ends:
    """One end of the spectrum of each splitting matrix.

    Args:
        value: lowest eigenvalue, or largest [m].
        vector: unit eigenvector [m, q].
        residual: |S v - value v| [m].
        work: evaluations of a candidate that they took.
    """

    value: Tensor
    vector: Tensor
    residual: Tensor
    work: int


def splitting_product(view: View) -> Callable[[Tensor], Tensor]:
    """From directions v_i [m, q] to S_i v_i of all candidates, by reverse differentiation twice."""
    with torch.enable_grad():
        leaf = view.z.detach().requires_grad_()
        slope = torch.autograd.grad(view.along(leaf).sum(), leaf, create_graph=True)[0]

    def product(direction: Tensor) -> Tensor:
        if not slope.requires_grad:
            return torch.zeros_like(direction)
        with torch.enable_grad():
            moved = torch.autograd.grad((slope * direction).sum(), leaf, retain_graph=True)[0]
        return moved.detach()

    round_ = on_sphere(view.space, view.z)
    if not bool(round_.any()):
        return product
    size = view.z.norm(dim=1, keepdim=True).clamp_min(1e-300)
    normal = torch.where(round_[:, None], view.z / size, 0.0)
    bent = torch.where(round_, (slope.detach() * view.z).sum(1) / size[:, 0] ** 2, 0.0)[:, None]

    def tangent(v: Tensor) -> Tensor:
        return v - normal * (normal * v).sum(1, keepdim=True)

    return lambda v: tangent(product(tangent(v))) - bent * tangent(v)


def on_sphere(space: Space, z: Tensor) -> Tensor:
    """Which candidates cannot move outwards, being as large as they may be [m]."""
    if space.radius is None:
        return torch.zeros(len(z), dtype=torch.bool)
    return space.expand(z).norm(dim=1) >= space.radius[1] * (1 - 1e-9)


def lowest(view: View, steps: int) -> Ends:
    """The lowest eigenpair of each splitting matrix, from directions known to be near it, if any [m, q]."""
    return _end(view, splitting_product(view), steps)


def largest(view: View, steps: int) -> Ends:
    """The largest eigenpair of each splitting matrix."""
    product = splitting_product(view)
    found = _end(view, lambda v: -product(v), steps)
    return Ends(-found.value, found.vector, found.residual, found.work)


def _end(view: View, product: Callable[[Tensor], Tensor], steps: int) -> Ends:
    start = torch.randn(view.z.shape, generator=torch.Generator().manual_seed(0), dtype=view.z.dtype)
    pairs = lanczos(product, start, steps)
    work = 2 * len(view.z) * pairs.values.shape[1]  # a product costs about two gradients
    return Ends(pairs.values[:, 0], pairs.vectors[:, 0], pairs.residuals[:, 0], work)


def displacement(view: View, vector: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Where the two copies go, z +- step v, retracted [m, q]."""
    move = step[:, None] * vector
    return view.space.retract(view.z + move), view.space.retract(view.z - move)


def changes(view: View, vector: Tensor, step: Tensor) -> Tensor:
    """What L would change by if candidate i alone were split into halves at z_i +- step_i v_i, exactly [m].

    -2 scale <r, D_i> + scale |D_i|^2 + prior,  D_i = c_i'(Phi_i(z+) / 2 + Phi_i(z-) / 2 - Phi_i(z))
    """
    plus, minus = displacement(view, vector, step)
    first = (view.along(plus) + view.along(minus)) / 2 - view.along(view.z)
    return (first + view.scale * bend(view, plus, minus)).detach()


def bend(view: View, plus: Tensor, minus: Tensor) -> Tensor:
    """|D_i|^2 of each candidate [m]; one vector of equations at a time."""
    weights = view.z.new_tensor([0.5, 0.5, -1.0])[:, None]
    sizes = [
        view.equation.contribution(torch.stack(places), weights * coef).detach().square().sum()
        for *places, coef in zip(plus, minus, view.z, view.coef, strict=True)
    ]
    return torch.stack(sizes)


def quartic(view: View, vector: Tensor) -> Tensor:
    """c_i in the change eta^2/2 v' S_i v + c_i eta^4, its Gauss-Newton part |D_i|^2 / eta^4 at a small step [m]."""
    step = PROBE * view.z.norm(dim=1).clamp_min(1e-12)
    return view.scale * bend(view, *displacement(view, vector, step)) / step**4


def best_step(value: Tensor, quartic: Tensor) -> Tensor:
    """eta* = sqrt(-value / (4 c)), 0 where the value is not negative [m]."""
    return (-value / (4 * quartic.clamp_min(1e-300))).clamp_min(0).sqrt()


def predicted(value: Tensor, quartic: Tensor) -> Tensor:
    """The gain of that step, value^2 / (16 c), 0 where the value is not negative [m]."""
    return value.clamp_max(0).square() / (16 * quartic.clamp_min(1e-300))


def stability(view: View, ends: Ends) -> Tensor:
    """Scores of the split-stability certificate, -(predicted gain) / L [m].

    With all of them above -tau no split of a single candidate is predicted to lower the loss by more than a share of
    tau; and as the Hessian in all coordinates is a Gauss-Newton part plus the splitting matrices, none of its
    eigenvalues is then below the lowest of theirs.
    """
    return -predicted(ends.value, quartic(view, ends.vector)) / max(view.loss, 1e-300)
