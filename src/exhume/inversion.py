"""Model inversion: inputs that the network puts far into a class, whatever it was trained on; a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from exhume.equations.span import Span
from exhume.evidence import Evidence
from exhume.heads import blocks
from exhume.objective import Objective
from exhume.spaces import Space
from exhume.survey import Ground
from exhume.terms import Term


@dataclass(frozen=True, eq=False)
class ScorePoint:
    """The score at model inputs.

    Args:
        z: coordinates [m, q].
        loss: the negative score plus the terms.
        misfit: 1, since no equation is solved.
        slope: gradient of the loss [m, q].
    """

    z: Tensor
    loss: float
    slope: Tensor
    misfit: float = 1.0


@dataclass(frozen=True, eq=False)
class BoundScore:
    """A class score of fixed weights, to be minimised with its sign changed.

    Args:
        evidence: the network.
        space: where the candidates live.
        terms: priors.
    """

    evidence: Evidence
    space: Space
    terms: tuple[Term, ...]

    def at(self, z: Tensor) -> ScorePoint:
        """Evaluate value and gradient."""
        evidence = self.evidence
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            u = self.space.expand(leaf)
            f = evidence.forward(evidence.at(1.0), u.view(-1, *evidence.input.shape)).reshape(len(z), -1)
            priors = [term.value(u).sum() for term in self.terms]
            loss = torch.stack([-score(f), *priors]).sum()
            slope = torch.autograd.grad(loss, leaf)[0]
        return ScorePoint(z, float(loss.detach()), slope)

    def gradient(self, point: ScorePoint) -> Tensor:
        """dF/dz."""
        return point.slope


@dataclass(frozen=True)
class ClassScore:
    """sum_y mean over the candidates of class y of (-f or f) with one output, of f_y with several.

    The classical inversion that Haim et al. 2022 compare with: mean f over candidates of class +1, less that over
    class -1.
    """

    nodes: ClassVar[tuple[float, ...]] = (1.0,)
    layers: ClassVar[str] = "all"

    def bind(self, evidence: Evidence, space: Space, terms: tuple[Term, ...]) -> BoundScore:
        """Fix the evidence."""
        return BoundScore(evidence, space, terms)


def score(f: Tensor) -> Tensor:
    """The score of outputs f [m, C], with candidates in equal blocks of classes."""
    m, outputs = f.shape
    if outputs == 1:
        return (2.0 / m) * ((2.0 * blocks(m, 2) - 1.0) * f[:, 0]).sum()
    return (outputs / m) * f.gather(1, blocks(m, outputs)[:, None]).sum()


def explained(evidence: Evidence, ground: Ground, space: Space, z: Tensor) -> tuple[Tensor, float]:
    """Multipliers [m, C] and misfit of the equation of final weights alone at candidates that did not solve it."""
    equation = Span(nodes=(1.0,)).bind(evidence, space, ground.decay)
    point = Objective(equation, space).at(z)
    return point.coef, point.misfit
