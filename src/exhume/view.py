"""A set of candidates as a move sees it, whichever way their multipliers are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equations.base import Bound
from exhume.spaces import Space
from exhume.terms import Term


@dataclass(frozen=True, eq=False)
class View:
    """L = scale |t - sum_i c_i' Phi_i(z_i)|^2 + sum_i share_i terms(u_i) + what depends on multipliers alone.

    Args:
        equation: a bound equation.
        space: where the candidates live.
        terms: priors.
        share: weights of the priors [m].
        z: coordinates [m, q].
        coef: c, weights on the gradients [m, k].
        residual: t - Phi' c [P].
        scale: of the squared residual.
        loss: L.
    """

    equation: Bound
    space: Space
    terms: Sequence[Term]
    share: Tensor
    z: Tensor
    coef: Tensor
    residual: Tensor
    scale: float
    loss: float

    def penalty(self, z: Tensor) -> Tensor:
        """share_i terms(u_i) of each candidate [m]; differentiable."""
        u = self.space.expand(z)
        return torch.stack([z.new_zeros(len(z)), *(self.share * term.value(u) for term in self.terms)]).sum(0)

    def along(self, z: Tensor) -> Tensor:
        """What each candidate adds to L while the residual is held fixed, -2 scale <r, c_i' Phi_i> + penalty [m].

        Its gradient is that of L, and its Hessian the candidate's splitting matrix.
        """
        return -2 * self.scale * self.equation.potential(z, self.coef, self.residual) + self.penalty(z)
