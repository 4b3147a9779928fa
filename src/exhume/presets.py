"""Attacks by name, and the registry that the command line and the documentation read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exhume.attack import SpanAttack
from exhume.equations.column import Column
from exhume.equations.span import EquationWeights, Span
from exhume.moves.polish import Polish


def exhume(samples: int | None = None) -> SpanAttack:
    """Recover samples from the change of weights; this project's own attack.

    Column equation at nodes {0, 1} one sample at a time, then the span equation of all parameters at nodes
    {0, 1/2, 1} with multipliers eliminated, by variable projection and Levenberg-Marquardt; where the training
    recipe is known, simulated training polishes the result.

    Args:
        samples: number of training samples, if known.
    """
    return SpanAttack(
        name="exhume",
        equation=Span(
            nodes=(0.0, 0.5, 1.0), weights=EquationWeights(first=0.3, bias=1.0, hidden=1.0, last=3.0)
        ),
        column=Column(nodes=(0.0, 1.0)),
        polish=Polish(),
        samples=samples,
    )


@dataclass(frozen=True)
class Entry:
    """One line of the table of attacks.

    Args:
        preset: builds the attack for a number of samples.
        paper: where it was published.
        needs: what the evidence must hold.
        models: which models it applies to.
    """

    preset: Callable[[int | None], SpanAttack]
    paper: str
    needs: str
    models: str


ATTACKS: dict[str, Entry] = {
    "exhume": Entry(
        exhume,
        "this project",
        "initial and final weights",
        "any; far stronger on dense networks trained by SGD with fewer samples than input features",
    ),
}
