"""Attacks by name, and the registry that the command line and the documentation read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from exhume.algebraic import AlgebraAttack
from exhume.attack import SpanAttack
from exhume.descent import Adam, Anneal, Descent, Drawn, Eliminated, Lazy, Momentum, Solved
from exhume.equations.column import Column
from exhume.equations.feature import Feature
from exhume.equations.span import EquationWeights, Span
from exhume.moves.polish import Polish

Attack = SpanAttack | Descent | AlgebraAttack
LOO_STEPS = 80_001  # of the published code


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


def loo(
    samples: int | None = None, *, both: bool = True, steps: int = LOO_STEPS, batch: int | None = None
) -> Descent:
    """The attack of Loo, Hasani, Lechner and Amini (ICLR 2024) on the change of all weights.

    min_{x, a} |theta_f - theta_0 - 1/(m C) sum_v sum_i sum_c a_vic grad f_c(x_i; theta_v)|^2 + 0.1 sum_i box(x_i)

    with 2n candidates drawn from 0.2 N(0, 1), multipliers from U(-0.5, 0.5), softplus in place of ReLU with slope
    min(10 + 10^(i / 20000), 200) at step i, and Adam at rate 0.02 on both. Deviations: the schedule is compressed in
    time where fewer steps are asked for; float64; the box is the stated range of the features.

    Args:
        samples: number of training samples n; an upper bound will do.
        both: nodes theta_f and theta_0 with multipliers of their own; theta_f alone otherwise.
        steps: 80,001 in the paper's code.
        batch: candidates moved at each step, for many samples; None for all. As in the paper's code, ReLU is then
            itself throughout, and Adam leaves alone what is not in the batch.
    """
    return Descent(
        name="loo" if steps == LOO_STEPS else "loo-quick",
        equation=Span(nodes=(1.0, 0.0) if both else (1.0,)),
        multipliers=Drawn(0.5),
        optimiser=Adam(0.02) if batch is None else Lazy(0.02),
        steps=steps,
        samples=samples,
        batch=batch,
        surplus=2.0,
        spread=0.2,
        box=0.1,
        anneal=Anneal(10.0, 20_000 * steps / LOO_STEPS, 200.0) if batch is None else None,
    )


def iurada(
    samples: int | None = None, *, lr: float = 20.0, steps: int = 1_000_000, leak: float | None = 0.02
) -> Descent:
    """The attack of Iurada, Bombari, Tommasi and Mondelli (ICLR 2026) on the change of the last layer.

    min_x |DW P|^2 / |DW|^2,  P the projection off the candidates' features h(x_i; theta_f),  |x_i| = sample_norm

    with DW [C, w] the change of the last weight, n candidates from N(0, 1), momentum 0.9, the sphere after each step,
    and stop at 1e-7. Any model serves that ends in a linear layer; of the other layers theta_f alone is used, but for
    measuring weight decay. Deviations: n x n least squares shared by all outputs in place of n C x n C, an eigenvalue
    cut-off and a second pass in them, float64; slopes are taken at the candidates, where the paper's code takes those
    of relu + tanh at the training samples, which no attacker has.

    Args:
        samples: number of training samples n, or how many candidates to seek.
        lr: 20 for 100 features, 2000 for CIFAR-10 in the paper's code.
        steps: 1,000,000 in the paper's code.
        leak: slope at which an inactive ReLU is differentiated on random features; trained layers are differentiated
            as they are, as in the paper.
    """
    return Descent(
        name="iurada",
        equation=Span(nodes=(1.0,), layers="last"),
        multipliers=Eliminated(),
        optimiser=Momentum(lr),
        steps=steps,
        samples=samples,
        sphere=True,
        leak=leak,
        floor=1e-7,
    )


def tansley(
    samples: int | None = None,
    *,
    subspace: bool = True,
    basis: Tensor | None = None,
    layers: str = "last",
    steps: int = 100_000,
) -> Descent:
    """The attack of Tansley, Makhlouf, Massart and Cartis (2026): Algorithm 1, and in a subspace Algorithm 2.

    min_{x, a} |theta_f - theta_0 - sum_i sum_c a_ic grad f_c(x_i; theta_f)|^2,  |x_i| = sample_norm

    by projected gradient descent on both; Algorithm 2 searches the row space of the first-layer change, which a plain
    dense network has; Algorithm 1 takes any model, by the last layer one that ends in a linear layer. The paper's
    settings are not published in anything readable; here multipliers start at their least-squares values, and
    momentum is 0.9 at a rate of 0.1 over the largest curvature at the start.

    Args:
        samples: number of training samples n.
        subspace: Algorithm 2 rather than 1.
        basis: rows [r, d] that Algorithm 2 searches in place of those it reads off, for reference.
        layers: "last" (as in the paper's Algorithm 2) or "all".
        steps: most steps.
    """
    return Descent(
        name="tansley-2" if subspace else "tansley-1",
        equation=Span(nodes=(1.0,), layers=layers),
        multipliers=Solved(),
        optimiser=Momentum(0.1, stiff=True),
        steps=steps,
        samples=samples,
        sphere=True,
        rows=subspace,
        basis=basis,
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
}
