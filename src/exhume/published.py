"""The published attacks, each as its paper has it: what they differ in is the fields of a `Descent`."""

from __future__ import annotations

from torch import Tensor

from exhume.descent import Anneal, Descent, Drawn, Eliminated, Solved
from exhume.equations.span import Span
from exhume.heads import EveryClass, Labelled, RunnerUp
from exhume.inversion import ClassScore
from exhume.multipliers import Floored, Plain, Squares
from exhume.optimisers import Adam, Lazy, Momentum

LOO_STEPS = 80_001  # of the published code


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
    momentum is 0.9 at a rate of one over the largest curvature at the start, a quarter of what is stable there.

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
        optimiser=Momentum(1.0, stiff=True),
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
