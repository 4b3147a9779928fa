"""Attacks by name, and the registry that the command line and the documentation read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from exhume.algebraic import AlgebraAttack
from exhume.attack import SpanAttack
from exhume.descent import Anneal, Descent, Drawn, Eliminated, Solved
from exhume.equations.column import Column
from exhume.equations.feature import Feature
from exhume.equations.span import EquationWeights, Span
from exhume.errors import ExhumeError
from exhume.heads import EveryClass, Labelled, RunnerUp
from exhume.inversion import ClassScore
from exhume.kkt import KKTAttack
from exhume.moves.corners import Corners
from exhume.moves.growth import Growth
from exhume.moves.guide import Leverage
from exhume.moves.policy import published, scaled
from exhume.moves.polish import Polish
from exhume.multipliers import Floored, Plain, Squares
from exhume.optimisers import Adam, Lazy, Momentum
from exhume.rows import FirstRows

Attack = SpanAttack | Descent | AlgebraAttack | KKTAttack | FirstRows
LOO_STEPS = 80_001  # of the published code
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


def haim(
    samples: int | None = None,
    *,
    spread: float = 0.03497673778414215,
    lr: float = 0.03052419903283405,
    rate: float = 1e-4,
    least: float = 0.4470505589528116,
    alpha: float = 149.86555429083975,
    steps: int = 50_000,
) -> Descent:
    """The attack of Haim, Vardi, Yehudai, Shamir and Irani (NeurIPS 2022) on the weights of a binary classifier.

    min_{x, l} |theta - 1/m sum_i l_i y_i grad f(x_i)|^2 + sum_i sum_pixels box(x_i)^2 + 5 sum_i relu(least - l_i)^2

    with m = 2n candidates from N(0, spread^2), half of each label, l from U(0, 1), the derivative of ReLU replaced by
    sigmoid(alpha u), and gradient descent with momentum 0.9. The defaults are those of a published run on MNIST; the
    paper searched over all of them with an oracle. Deviations: the box is the stated range of the features, where one
    is stated; float64.

    Args:
        samples: number of training samples n; an upper bound will do.
        spread: standard deviation of the start.
        lr: learning rate of the samples.
        rate: learning rate of the multipliers.
        least: floor of the multipliers.
        alpha: sharpness of the derivative.
        steps: 50,000 in the paper's code.
    """
    return Descent(
        name="haim",
        equation=Span(nodes=(1.0,)),
        multipliers=Drawn(0.5, 0.5, kind=Floored(least, (rate / lr) ** 0.5)),
        optimiser=Momentum(lr),
        steps=steps,
        samples=samples,
        surplus=2.0,
        spread=spread,
        wall=1.0,
        anneal=Anneal(alpha, most=alpha, relaxed=True),
        head=Labelled(),
        forgotten=True,
    )


def buzaglo(
    samples: int | None = None,
    *,
    every: bool = False,
    squares: bool = False,
    spread: float = 6.22770037826723e-05,
    lr: float = 0.0013623494019067482,
    rate: float = 0.4793320031112019,
    least: float = 0.20320890155329197,
    alpha: float = 39.51743620751245,
    steps: int = 50_000,
) -> Descent:
    """The attack of Buzaglo, Haim, Yehudai, Vardi, Oz, Nikankin and Irani (NeurIPS 2023) on many classes.

    min_{x, l} |theta - 1/m sum_i l_i grad (f_y - max_{j != y} f_j)(x_i)|^2 + sum_i sum_pixels box(x_i)^2
               + 5 sum_i relu(least - l_i)^2

    with the runner-up j frozen while differentiating, and all else as in `haim`. The defaults are those of a
    published run on CIFAR-10.

    Args:
        samples: number of training samples n; an upper bound will do.
        every: one multiplier for each other class, as the theorem has it, rather than for the runner-up alone.
        squares: multipliers a^2 + least, as in the workshop version, rather than free ones with a penalty.
        spread: standard deviation of the start.
        lr: learning rate of the samples.
        rate: learning rate of the multipliers.
        least: floor of the multipliers.
        alpha: sharpness of the derivative.
        steps: 50,000 in the paper's code.
    """
    pace = (rate / lr) ** 0.5
    return Descent(
        name="buzaglo",
        equation=Span(nodes=(1.0,)),
        multipliers=Drawn(0.5, 0.5, kind=Squares(least, pace) if squares else Floored(least, pace)),
        optimiser=Momentum(lr),
        steps=steps,
        samples=samples,
        surplus=2.0,
        spread=spread,
        wall=1.0,
        anneal=Anneal(alpha, most=alpha, relaxed=True),
        head=EveryClass() if every else RunnerUp(),
        forgotten=True,
    )


def buzaglo_decay(
    samples: int | None = None,
    *,
    spread: float = 0.01974952888330726,
    lr: float = 0.9517516442495262,
    rate: float = 1e-4,
    alpha: float = 90.28906727946568,
    steps: int = 50_000,
) -> Descent:
    """The attack of Buzaglo et al. (NeurIPS 2023) on weights trained with weight decay, on any loss, without labels.

    min_{x, s} |t - 1/(m C) sum_i sum_c s_ic grad f_c(x_i)|^2 + sum_i sum_pixels box(x_i)^2

    with t the weights (zero where a parameter did not decay), s of free sign from N(0, 1), one for each output, and
    all else as in `haim`. The defaults are those of a published run on CIFAR-10 regression.

    Args:
        samples: number of training samples n; an upper bound will do.
        spread: standard deviation of the start.
        lr: learning rate of the samples.
        rate: learning rate of the multipliers.
        alpha: sharpness of the derivative.
        steps: 50,000 in the paper's code.
    """
    return Descent(
        name="buzaglo-decay",
        equation=Span(nodes=(1.0,)),
        multipliers=Drawn(1.0, law="normal", kind=Plain((rate / lr) ** 0.5)),
        optimiser=Momentum(lr),
        steps=steps,
        samples=samples,
        surplus=2.0,
        spread=spread,
        wall=1.0,
        anneal=Anneal(alpha, most=alpha, relaxed=True),
        forgotten=True,
    )


def naive(
    samples: int | None = None, *, spread: float = 0.03, lr: float = 0.03, steps: int = 5000
) -> Descent:
    """Class inversion, the baseline of Haim et al. 2022: inputs within the range, far inside a class.

    max_x mean f over candidates of class +1 - mean f over class -1 - sum_i sum_pixels box(x_i)^2

    Args:
        samples: number of training samples n.
        spread: standard deviation of the start.
        lr: learning rate.
        steps: how many.
    """
    return Descent(
        name="naive",
        equation=ClassScore(),
        multipliers=Eliminated(),
        optimiser=Momentum(lr),
        steps=steps,
        samples=samples,
        surplus=2.0,
        spread=spread,
        wall=1.0,
        floor=float("-inf"),
        forgotten=True,
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
        free = not isinstance(attack.multipliers, Drawn) or attack.multipliers.kind.floor is None
        return replace(attack, moves=scaled(max(attack.steps // 40, 1), signs_free=free))
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
