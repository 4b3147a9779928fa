"""Attacks by name, and the registry that the command line and the documentation read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from exhume.algebraic import AlgebraAttack
from exhume.attack import SpanAttack
from exhume.descent import Anneal, Descent, Eliminated
from exhume.equations.column import Column
from exhume.equations.feature import Feature
from exhume.equations.span import EquationWeights, Span
from exhume.errors import ExhumeError
from exhume.inversion import ClassScore
from exhume.kkt import KKTAttack
from exhume.moves.corners import Corners
from exhume.moves.growth import Growth
from exhume.moves.guide import Leverage
from exhume.moves.policy import published, scaled
from exhume.moves.polish import Polish
from exhume.optimisers import Adam
from exhume.published import buzaglo, buzaglo_decay, haim, iurada, loo, naive, tansley
from exhume.rows import FirstRows

Attack = SpanAttack | Descent | AlgebraAttack | KKTAttack | FirstRows
__all__ = [
    "ATTACKS",
    "MOVES",
    "Attack",
    "Entry",
    "algebra",
    "buzaglo",
    "buzaglo_decay",
    "exhume",
    "haim",
    "iurada",
    "kkt",
    "loo",
    "moving",
    "naive",
    "tansley",
]

MOVES = ("none", "scaled", "published")


def exhume(samples: int | None = None) -> SpanAttack:
    """Recover samples from the change of weights; this project's own attack.

    With two hidden layers, the feature equation at nodes {0, 1}, one sample at a time. With one, the column equation
    likewise, then the span equation of all parameters at nodes {0, 1/2, 1} with multipliers eliminated, by variable
    projection and Levenberg-Marquardt. Where the training recipe is known, simulated training polishes the result.

    Args:
        samples: number of training samples, if known.
    """
    return SpanAttack(
        name="exhume",
        equation=Span(
            nodes=(0.0, 0.5, 1.0), weights=EquationWeights(first=0.3, bias=1.0, hidden=1.0, last=3.0)
        ),
        column=Column(nodes=(0.0, 1.0)),
        feature=Feature(nodes=(0.0, 1.0)),
        polish=Polish(),
        samples=samples,
    )


def algebra(samples: int | None = None) -> AlgebraAttack:
    """Recover the samples of a polynomial two-layer network in closed form, where the weights determine them.

    Args:
        samples: number of training samples, if known.
    """
    return AlgebraAttack(samples=samples)


def kkt(samples: int | None = None, *, steps: int = 3000) -> KKTAttack:
    """Recover samples from final weights alone; this project's own attack.

    Corners of the box in the row space of the first layer, where it shows a rank; else a descent on the equation of
    final weights alone, with multipliers eliminated and a smoothed derivative of ReLU whose slope grows from 10 to
    200.

    Args:
        samples: number of training samples, if known.
        steps: of the descent.
    """
    return KKTAttack(
        name="kkt",
        corners=Corners(),
        leverage=Leverage(),
        descent=Descent(
            name="kkt",
            equation=Span(nodes=(1.0,)),
            multipliers=Eliminated(),
            optimiser=Adam(0.02),
            steps=steps,
            surplus=2.0,
            spread=0.1,
            box=0.1,
            anneal=Anneal(10.0, steps / 2.3, 200.0, relaxed=True),
            forgotten=True,
        ),
        samples=samples,
    )


def moving(attack: Attack, moves: str) -> Attack:
    """The same attack with its candidates moved while it runs (`docs/splitting.md`).

    "scaled": verified splits, growth, merging and pruning; an attack with random starts grows its candidates instead.
    "published": sample splitting as published, for descents alone.

    Args:
        attack: a preset.
        moves: "none", "scaled" or "published".

    Raises:
        ExhumeError: the attack has no candidates that this could move.
    """
    if moves == "none":
        return attack
    if isinstance(attack, SpanAttack) and moves == "scaled":
        return replace(attack, restart=Growth())
    if isinstance(attack, KKTAttack):
        descent = moving(attack.descent, moves)
        assert isinstance(descent, Descent)
        return replace(attack, descent=descent)
    if isinstance(attack, Descent) and not isinstance(attack.equation, ClassScore):
        if moves == "published":
            return replace(attack, moves=published(min(20_000, max(attack.steps // 4, 1))))
        return replace(attack, moves=scaled(max(attack.steps // 40, 1), signs_free=attack.signs_free))
    raise ExhumeError(
        f"moves {moves!r} need an attack whose candidates can be moved so, but {attack.name!r} is none;"
        " leave [attack] moves out, or name another attack"
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

    preset: Callable[[int | None], Attack]
    paper: str
    needs: str
    models: str


ATTACKS: dict[str, Entry] = {
    "exhume": Entry(
        exhume,
        "this project",
        "initial and final weights",
        "any; far stronger on dense networks trained by SGD: fewer samples than features, or two hidden layers",
    ),
    "algebra": Entry(
        algebra,
        "this project, after Shen et al. 2026",
        "initial and final weights, or final weights at a stationary point",
        "two layers of one output with a polynomial activation of degree 3 or more",
    ),
    "kkt": Entry(
        kkt,
        "this project",
        "final weights; the number of samples where their rank does not tell",
        "dense networks trained with decay or from a small start, on features that reach the ends of their range",
    ),
    "loo": Entry(
        loo,
        "Loo, Hasani, Lechner, Amini 2024",
        "initial and final weights, number of samples",
        "dense networks; full schedule, for a fast machine",
    ),
    "loo-quick": Entry(
        lambda samples: loo(samples, steps=4000),
        "the same, its schedule compressed to 4,000 steps",
        "initial and final weights, number of samples",
        "dense networks",
    ),
    "iurada": Entry(
        iurada,
        "Iurada, Bombari, Tommasi, Mondelli 2026",
        "initial and final weights, number of samples, norm of every input",
        "any that ends in a linear layer, by its change",
    ),
    "tansley-1": Entry(
        lambda samples: tansley(samples, subspace=False),
        "Tansley, Makhlouf, Massart, Cartis 2026, Algorithm 1",
        "initial and final weights, number of samples, norm of every input",
        "any that ends in a linear layer, by its change",
    ),
    "tansley-2": Entry(
        tansley,
        "Tansley, Makhlouf, Massart, Cartis 2026, Algorithm 2",
        "initial and final weights whose first layer changed, norm of every input",
        "dense networks, by the last layer, in the row space of the first",
    ),
    "haim": Entry(
        haim,
        "Haim, Vardi, Yehudai, Shamir, Irani 2022",
        "final weights, number of samples",
        "homogeneous ReLU networks of one output, at a margin or a stationary point",
    ),
    "buzaglo": Entry(
        buzaglo,
        "Buzaglo, Haim, Yehudai, Vardi, Oz, Nikankin, Irani 2023",
        "final weights, number of samples",
        "classifiers of several outputs, at a margin or a stationary point",
    ),
    "buzaglo-decay": Entry(
        buzaglo_decay,
        "the same, weight decay and any loss",
        "final weights, number of samples",
        "any network trained with weight decay to a stationary point",
    ),
    "naive": Entry(
        naive,
        "class inversion, baseline of Haim et al. 2022",
        "final weights, number of samples",
        "any; a baseline that is expected to fail",
    ),
    "first-rows": Entry(
        lambda samples: FirstRows(samples=samples),
        "rows of the first layer, baseline of Haim et al. 2022",
        "final weights",
        "dense networks; a baseline",
    ),
}
