"""Closed-form recovery of the samples of polynomial two-layer networks: what it needs, reaches and refuses.

Prints one table a question: networks at an exact stationary point, the smallest width that recovers, error against
noise, one gradient query and one short training run on MNIST, cases that must not be certified, and starts for other
activations and attacks.

    python benchmarks/algebra.py --json algebra.json --plot docs/algebra.png
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

from common import Row, result, scores, show, write
from exhume import match
from exhume.algebra.examine import examine
from exhume.algebra.field import Field, from_change, from_gradient, from_values
from exhume.algebra.gauge import fix
from exhume.algebra.identifiability import IDENTIFIABLE, NOT
from exhume.algebra.interpolation import componentwise, gradient_field, slices
from exhume.algebra.moments import averaged_starts, derivatives, model_of, moment_starts
from exhume.algebra.pencil import directions
from exhume.algebra.polish import Model, polish
from exhume.algebra.polynomial import count, slope_of
from exhume.algebra.recovery import Recovered, recover
from exhume.algebra.reduction import Reduced, reduce
from exhume.algebra.search import start
from exhume.algebraic import AlgebraAttack
from exhume.equations.span import Span
from exhume.evidence import Evidence
from exhume.moves.restart import MultiStart
from exhume.objective import Objective
from exhume.solvers.varpro import VarPro
from exhume.survey import survey
from exhume.victims.packaged import DataUnavailable
from exhume.victims.stationary import stationary
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

EXCEPTIONS = ((5, 3), (3, 4), (4, 4), (5, 4))  # (r, alpha) where general double points fail to be independent
NOISES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small grids, one seed")
    parser.add_argument("--seeds", type=int, metavar="K", help="default 5, quick 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw error against noise")
    chosen = parser.parse_args()
    chosen.seeds = chosen.seeds or (1 if chosen.quick else 5)
    return chosen


def power(alpha: int) -> tuple[float, ...]:
    return (0.0,) * alpha + (1.0,)


def errors(x: Tensor, truth: Tensor) -> list[float]:
    """Relative error of the nearest of x [k, d] to each row of truth [n, d]; infinite without any."""
    if len(x) == 0:
        return [math.inf] * len(truth)
    return (torch.cdist(truth, x).amin(1) / truth.norm(dim=1)).tolist()


def up_to_scale(x: Tensor, truth: Tensor) -> list[float]:
    """The same between unit vectors, up to sign: what a homogeneous activation without bias determines."""
    unit = truth / truth.norm(dim=1, keepdim=True)
    x = x / x.norm(dim=1, keepdim=True)
    return errors(torch.cat([x, -x]), unit)


def row(case: str, seed: int, found: Tensor, error: list[float], control: list[float], certified: int) -> Row:
    """The keys that every row has, for samples that are not images."""
    return {
        "attack": "algebra",
        "case": case,
        "seed": seed,
        "n": len(error),
        "candidates": len(found),
        "seconds": 0.0,
        "steps": 0,
        "loss": None,
        "matched_train": sum(e < 0.3 for e in error),
        "close_train": sum(e < 0.1 for e in error),
        "matched_control": sum(e < 0.3 for e in control),
        "median_error": median(error),
        "max_error": max(error),
        "certified": certified,
    }


def rows_of(s: int, d: int, g: torch.Generator, orthonormal: bool) -> Tensor:
    """Unit samples [s, d], orthonormal or as random directions of a random s-dimensional subspace lie."""
    basis = torch.linalg.qr(torch.randn(d, s, generator=g, dtype=torch.float64))[0].T
    if orthonormal:
        return basis
    x = torch.randn(s, s, generator=g, dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True) @ basis


def weights_of(s: int, g: torch.Generator, mixed: bool) -> Tensor:
    b = 0.5 + torch.rand(s, generator=g, dtype=torch.float64)
    return b * (torch.tensor([(-1.0) ** i for i in range(s)], dtype=torch.float64) if mixed else 1.0)


def field_at(x: Tensor, b: Tensor, w: Tensor, c: Sequence[float]) -> Field:
    return from_values(w, (slope_of(c).first(w @ x.T) * b) @ x)


# ---- 1. exact stationary points


def at_stationary_points(seeds: int, quick: bool) -> Iterator[Row]:
    """Orthonormal samples, mixed signs, random samples; the verdict, and a second tensor where one fits."""
    sizes = (3, 4) if quick else (3, 4, 5)
    for kind in ("orthonormal +", "orthonormal +-", "random"):
        for s in sizes:
            for alpha in (3, 4, 5):
                for seed in range(seeds if kind == "random" else 1):
                    yield stationary_row(kind, s, alpha, seed)


def stationary_row(kind: str, s: int, alpha: int, seed: int) -> Row:
    g = torch.Generator().manual_seed(1000 * s + 100 * alpha + seed)
    x = rows_of(s, 20, g, kind.startswith("orthonormal"))
    net = stationary(x, weights_of(s, g, kind != "orthonormal +"), alpha)
    first, second = net.defects()
    field = Field(net.w[None], net.a[None], net.w, False, "stationary point")
    began = time.perf_counter()
    found = recover([field], power(alpha), starts=0)
    seconds = time.perf_counter() - began
    told = found.identifiability
    reduced = reduce([field])[0]
    other, distance = another(reduced, x @ reduced.basis @ reduced.chart.T, net.b, alpha, g)
    control = rows_of(s, 20, g, kind.startswith("orthonormal"))
    certain = bool(told.verdict == IDENTIFIABLE)
    error = up_to_scale(found.x, x)
    right = max(error) < 1e-8 if certain else other < 1e-10 and distance > 1e-3
    return {
        **row(
            kind,
            seed,
            found.x,
            error,
            up_to_scale(found.x, control),
            int(found.certified.sum()),
        ),
        "seconds": seconds,
        "s": s,
        "alpha": alpha,
        "neurons": len(net.w),
        "defect": max(first, second),
        "dimension": told.dimension,
        "rank_kernel": f"{told.rank_kernel}/{told.needed_kernel}",
        "rank_gradient": f"{told.rank_gradient}/{told.needed_gradient}",
        "verdict": told.verdict,
        "other_residual": None if certain else other,
        "other_distance": None if certain else distance,
        "right": right,
    }


def another(reduced: Reduced, x: Tensor, b: Tensor, alpha: int, g: torch.Generator) -> tuple[float, float]:
    """Residual of the tensor nearest to a random one that fits the weights, and its distance from the true tensor.

    Where the rank test fails the first is zero and the second is not: a witness that the weights do not decide.
    """
    white = reduced.white
    r = len(reduced.chart)
    z, beta = torch.randn(r, r, generator=g, dtype=torch.float64), weights_of(r, g, True)
    size = b.abs().mean() * x.norm(dim=1).mean() ** alpha / (beta.abs() * z.norm(dim=1) ** alpha)
    beta = beta * size
    points = white.points[0]
    added = (slope_of(power(alpha)).first(points @ z.T) * beta) @ z * white.gain[0][:, None]
    fitted = gradient_field(replace(white, steps=white.steps - added), (alpha,))
    assert fitted is not None
    v = torch.randn(8, r, generator=g, dtype=torch.float64)
    true = hessians(x, b, alpha, v)
    found = fitted.jacobian(v) + hessians(z, beta, alpha, v)
    scale = float((white.steps - added).norm() / white.steps.norm())
    return fitted.residual * scale, float((found - true).norm() / true.norm())


def hessians(x: Tensor, b: Tensor, alpha: int, v: Tensor) -> Tensor:
    return torch.einsum("li,ia,ib->lab", alpha * (alpha - 1) * (v @ x.T) ** (alpha - 2) * b, x, x)


def at_random_weights(seeds: int, quick: bool) -> Iterator[Row]:
    """Any samples are recovered from values at random points, as few as the gradient field needs."""
    for s in (4,) if quick else (4, 6):
        for alpha in (3, 4, 5):
            for seed in range(seeds):
                g = torch.Generator().manual_seed(seed + 77)
                x, b = rows_of(s, 20, g, False), weights_of(s, g, True)
                m = math.ceil(count(s, alpha) / s) + ((s, alpha) in EXCEPTIONS)
                w = torch.randn(m, 20, generator=g, dtype=torch.float64)
                began = time.perf_counter()
                found = recover([field_at(x, b, w, power(alpha))], power(alpha), starts=0)
                told = found.identifiability
                control = rows_of(s, 20, g, False)
                yield {
                    **row(
                        "random weights",
                        seed,
                        found.x,
                        up_to_scale(found.x, x),
                        up_to_scale(found.x, control),
                        int(found.certified.sum()),
                    ),
                    "seconds": time.perf_counter() - began,
                    "s": s,
                    "alpha": alpha,
                    "neurons": m,
                    "rank_kernel": f"{told.rank_kernel}/{told.needed_kernel}",
                    "rank_gradient": f"{told.rank_gradient}/{told.needed_gradient}",
                    "verdict": told.verdict,
                }


# ---- 2. smallest width, and noise


def closed(field: Field, alpha: int, gradient: bool) -> Tensor | None:
    """Directions by one interpolation and the pencil alone, in y coordinates."""
    reduced = reduce([field], field.steps.shape[1])[0]
    fitted = (gradient_field if gradient else componentwise)(reduced.white, (alpha,))
    found = None if fitted is None else directions(slices(fitted, 0), len(reduced.chart))
    if found is None:
        return None
    return torch.linalg.solve(reduced.chart, found.z.T).T @ reduced.basis.T


def smallest(r: int, alpha: int, gradient: bool, seeds: int) -> int:
    """Fewest points from which every seed recovers r samples to 1e-6."""
    needed = math.ceil(count(r, alpha) / r) if gradient else count(r, alpha - 1)
    for m in range(max(r, needed - 3), needed + 6):
        worst = 0.0
        for seed in range(seeds):
            g = torch.Generator().manual_seed(seed + 31 * r + alpha)
            x, b = torch.randn(r, r, generator=g, dtype=torch.float64), weights_of(r, g, True)
            w = torch.randn(m, r, generator=g, dtype=torch.float64)
            found = closed(field_at(x, b, w, power(alpha)), alpha, gradient)
            worst = max(worst, math.inf if found is None else max(up_to_scale(found, x)))
            if worst > 1e-6:
                break
        if worst <= 1e-6:
            return m
    return 0


def widths(seeds: int, quick: bool) -> Iterator[Row]:
    grid = (
        [(3, 3), (5, 3), (4, 4)]
        if quick
        else [(r, 3) for r in (3, 4, 5, 6, 8, 10)]
        + [(r, 4) for r in (3, 4, 5, 6, 7)]
        + [(3, 5), (4, 5), (5, 5)]
    )
    for r, alpha in grid:
        began = time.perf_counter()
        kernel, gradient = (smallest(r, alpha, which, max(seeds, 2)) for which in (False, True))
        star = math.ceil(count(r, alpha) / r)
        yield {
            **row("smallest width", 0, torch.zeros(r, 1), [0.0] * r, [], 0),
            "seconds": time.perf_counter() - began,
            "median_error": None,
            "r": r,
            "alpha": alpha,
            "kernel": kernel,
            "kernel_theory": count(r, alpha - 1),
            "gradient": gradient,
            "gradient_theory": star + ((r, alpha) in EXCEPTIONS),
            "exception": (r, alpha) in EXCEPTIONS,
        }


def noisy(seeds: int, quick: bool) -> Iterator[Row]:
    """Error against noise, for both interpolations, before and after the polish."""
    r, draws = 6, 3 if quick else max(3 * seeds, 9)
    for alpha in (3,) if quick else (3, 4):
        m = 2 * count(r, alpha - 1)
        for noise in NOISES:
            for gradient in (False, True):
                for seed in range(draws):
                    g = torch.Generator().manual_seed(seed + 500)
                    x, b = rows_of(r, r, g, False), weights_of(r, g, True)
                    w = torch.randn(m, r, generator=g, dtype=torch.float64)
                    clean = field_at(x, b, w, power(alpha))
                    size = float(clean.steps.square().mean().sqrt())
                    draw = torch.randn(m, r, generator=g, dtype=torch.float64)
                    field = replace(clean, steps=clean.steps + noise * size * draw)
                    began = time.perf_counter()
                    before = closed(field, alpha, gradient)
                    if before is None:
                        before = torch.randn(r, r, generator=g, dtype=torch.float64)
                    before = before / before.norm(dim=1, keepdim=True)
                    fit = polish(Model((field,), slope_of(power(alpha)), None, True), before)
                    control = rows_of(r, r, g, False)
                    yield {
                        **row(
                            "noise",
                            seed,
                            fit.x,
                            up_to_scale(fit.x, x),
                            up_to_scale(fit.x, control),
                            0,
                        ),
                        "seconds": time.perf_counter() - began,
                        "arm": "gradient field" if gradient else "kernel",
                        "alpha": alpha,
                        "noise": noise,
                        "before": median(up_to_scale(before, x)),
                        "after": median(up_to_scale(fit.x, x)),
                    }


def curve(rows: Sequence[Row]) -> list[Row]:
    """Medians over draws, and the slope over the noises."""
    out: list[Row] = []
    for alpha in sorted({int(str(r["alpha"])) for r in rows}):
        for arm in ("kernel", "gradient field"):
            line: Row = {"arm": arm, "alpha": alpha}
            for key in ("before", "after"):
                logs = []
                for noise in NOISES:
                    values = [
                        float(str(r[key]))
                        for r in rows
                        if (r["arm"], r["alpha"], r["noise"]) == (arm, alpha, noise)
                    ]
                    line[f"{key} {noise:g}"] = median(values)
                    logs.append([math.log(noise), math.log(median(values))])
                t = torch.tensor(logs, dtype=torch.float64)
                t = t - t.mean(0)
                line[f"{key} slope"] = float((t[:, 0] @ t[:, 1]) / t[:, 0].square().sum())
            out.append(line)
    return out


def plot(path: Path, lines: Sequence[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    alphas = sorted({int(str(line["alpha"])) for line in lines})
    figure, axes = plt.subplots(1, len(alphas), figsize=(4.6 * len(alphas), 3.8), squeeze=False, sharey=True)
    for axis, alpha in zip(axes[0], alphas, strict=True):
        for line in lines:
            if line["alpha"] != alpha:
                continue
            colour = "tab:blue" if line["arm"] == "gradient field" else "tab:orange"
            for key, style, words in (("before", "--", "pencil"), ("after", "-", "after polish")):
                ys = [float(str(line[f"{key} {noise:g}"])) for noise in NOISES]
                axis.loglog(
                    NOISES, ys, style, color=colour, marker="o", ms=3, label=f"{line['arm']}, {words}"
                )
        axis.loglog(NOISES, NOISES, ":", color="grey", label="slope 1")
        axis.set_title(f"degree {alpha}, 6 samples in 6 dimensions", fontsize=10)
        axis.set_xlabel("relative noise of the values")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("median relative error")
    axes[0][0].legend(fontsize=7, handlelength=3.5)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- 3 and 4. MNIST


def mnist(seed: int, width: int, steps: int, activation: str = "cubic", bias: bool = True) -> Victim:
    training = TrainConfig(lr=0.02, max_steps=steps, tolerance=1e-10)
    return make_victim(
        Case(
            data="mnist",
            n=10,
            hidden=(width,),
            activation=activation,
            bias=bias,
            training=training,
            seed=seed,
        )
    )


def queried(victim: Victim) -> Field:
    """The gradient of the mean squared loss at the initial weights, as one query returns it."""
    evidence, spec = victim.evidence, victim.evidence.input
    assert evidence.init is not None and evidence.chain is not None
    params = {k: p.double().clone().requires_grad_() for k, p in evidence.init.items()}
    out = evidence.forward(params, spec.encode(victim.truth.train).double())
    loss = (out[:, 0] - victim.split.train.y).square().mean()
    gradients = torch.autograd.grad(loss, list(params.values()))
    init = {k: p.detach() for k, p in params.items()}
    return from_gradient(evidence.chain, init, dict(zip(params, gradients, strict=True)))


def gradient_query(seeds: int, quick: bool) -> Iterator[Row]:
    for bias in (True, False):
        for width in (100,) if quick else (100, 1000):
            for seed in range(seeds):
                made = mnist(seed, width, 1, bias=bias)
                began = time.perf_counter()
                found = recover([queried(made)], power(3), starts=0)
                u = fix(made.evidence, found.x, bias, found.scaled, found.signed, True, False).u
                yield image_row("gradient query", made, u, found, time.perf_counter() - began, width, bias)


def image_row(
    case: str, made: Victim, u: Tensor, found: Recovered, seconds: float, width: int, bias: bool
) -> Row:
    spec = made.evidence.input
    x = spec.decode(u.view(-1, *spec.shape))
    truth = spec.encode(made.truth.train).flatten(1)
    error = errors(u, truth)
    told = found.identifiability
    return {
        **row(case, made.case.seed, u, error, [], int(found.certified.sum())),
        **scores(x, made.truth),
        "seconds": seconds,
        "width": width,
        "bias": bias,
        "median_error": median(error),
        "max_error": max(error),
        "scale_free_max": max(up_to_scale(u, truth)),
        "dimension": told.dimension,
        "rank_kernel": f"{told.rank_kernel}/{told.needed_kernel}",
        "rank_gradient": f"{told.rank_gradient}/{told.needed_gradient}",
        "verdict": told.verdict,
    }


def weight_change(seeds: int, quick: bool) -> Iterator[Row]:
    """The attack as registered, and beside it the closed form at the midpoint alone."""
    grid = [(20, True)] if quick else [(5, True), (20, True), (20, False), (50, True), (3000, True)]
    for steps, bias in grid:
        for seed in range(seeds):
            made = mnist(seed, 1000, steps, bias=bias)
            truth = made.evidence.input.encode(made.truth.train).flatten(1)
            common: Row = {
                "train_steps": made.trained.steps,
                "train_loss": made.trained.loss,
                "relative_change": made.relative_change(),
                "bias": bias,
                "width": 1000,
            }
            began = time.perf_counter()
            middle = recover([from_change(made.evidence, (0.5,))], power(3), starts=0)
            u = fix(made.evidence, middle.x, bias, middle.scaled, middle.signed, True, False).u
            yield {
                **image_row("weight change", made, u, middle, time.perf_counter() - began, 1000, bias),
                **common,
                "arm": "midpoint",
            }
            found = AlgebraAttack(starts=0).run(made.evidence, seed=seed)
            error = errors(made.evidence.input.encode(found.x).flatten(1), truth)
            told = examine(made.evidence).identifiability
            yield {
                **result(found, match(found, made.truth)),
                **common,
                "case": "weight change",
                "seed": seed,
                "n": 10,
                "arm": "attack (three nodes)",
                "max_error": max(error),
                "verdict": None if told is None else told.verdict,
            }


# ---- 5. what must not be certified


def refused(seeds: int, quick: bool) -> Iterator[Row]:
    for seed in range(seeds):
        g = torch.Generator().manual_seed(seed + 900)
        x, b = torch.randn(5, 5, generator=g, dtype=torch.float64), weights_of(5, g, True)
        w = torch.randn(60, 5, generator=g, dtype=torch.float64)
        for alpha in (1, 2):
            field = field_at(x, b, w, power(alpha))
            yield refused_row(f"degree {alpha}", seed, recover([field], power(alpha)), x, g)
        few = field_at(x, b, w[:4], power(3))
        found = recover([few], power(3), samples=5, starts=5 if quick else 20)
        yield refused_row("singular Jacobian, residual 0", seed, found, x, g)
        # Six samples in five dimensions: the pencil gives five directions, of which none is a sample.
        crowd = torch.randn(6, 5, generator=g, dtype=torch.float64)
        field = field_at(crowd, weights_of(6, g, True), w, power(3))
        yield refused_row(
            "dependent samples, pencil", seed, recover([field], power(3), samples=5, starts=0), crowd, g
        )
        # The same with starts: what is certified then must be right.
        found = recover([field], power(3), starts=40)
        yield refused_row("dependent samples, starts", seed, found, crowd, g)


def refused_row(case: str, seed: int, found: Recovered, x: Tensor, g: torch.Generator) -> Row:
    control = torch.randn(x.shape, generator=g, dtype=x.dtype)
    error = up_to_scale(found.x, x)
    sure = up_to_scale(x, found.x[found.certified]) if bool(found.certified.any()) else []
    return {
        **row(case, seed, found.x, error, up_to_scale(found.x, control), int(found.certified.sum())),
        "loss": None if found.fit is None else found.fit.residual,
        "sharpness": None if found.fit is None else found.fit.sharpness,
        "verdict": found.identifiability.verdict,
        "certified_wrong": sum(e > 1e-6 for e in sure),
        "why": found.why,
    }


# ---- starts for other activations and attacks


def other_activations(seeds: int, quick: bool) -> Iterator[Row]:
    """One gradient query at random weights: moments as fitted, moments as published, random starts."""
    for activation in ("tanh",) if quick else ("tanh", "softplus", "gelu", "relu"):
        for seed in range(min(seeds, 3)):
            made = mnist(seed, 1000, 1, activation)
            field = queried(made)
            chain = made.evidence.chain
            assert chain is not None
            slope = derivatives(chain.activations[0])
            reduced, fitted = moment_starts(field, seed)
            model = model_of(reduced, slope)
            _, averaged = averaged_starts(field, seed)
            drawn = start(model, 10, len(reduced.basis.T), torch.Generator().manual_seed(seed))
            for arm, y in (("moments, fitted", fitted), ("moments, averaged", averaged), ("random", drawn)):
                began = time.perf_counter()
                truth = made.evidence.input.encode(made.truth.train).flatten(1)
                if y is None:
                    y = start(model, 10, len(reduced.basis.T), torch.Generator().manual_seed(seed))
                    arm = f"{arm} (none: random)"
                fit = polish(model, y, None, 60)

                def inputs(at: Tensor) -> Tensor:
                    return (at @ reduced.basis.T)[:, :-1] / (at @ reduced.last)[:, None]  # noqa: B023

                spec = made.evidence.input
                yield {
                    **row("other activations", seed, fit.x, errors(inputs(fit.x), truth), [], 0),
                    **scores(spec.decode(inputs(fit.x).view(-1, *spec.shape)), made.truth),
                    "arm": arm,
                    "activation": activation,
                    "seconds": time.perf_counter() - began,
                    "steps": fit.evaluations,
                    "loss": fit.residual,
                    "start_error": median(errors(inputs(y), truth)),
                    "median_error": median(errors(inputs(fit.x), truth)),
                }


def other_attacks(seeds: int, quick: bool) -> Iterator[Row]:
    """The joint span equation from the closed form, and from random starts."""
    for seed in range(min(seeds, 3)):
        made = mnist(seed, 1000, 3000)
        evidence: Evidence = made.evidence
        ground = survey(evidence)
        bound = Span(nodes=(0.0, 0.25, 0.5, 0.75, 1.0)).bind(evidence, ground.space, ground.decay)
        objective = Objective(bound, ground.space)
        truth = evidence.input.encode(made.truth.train).flatten(1)

        def from_closed_form() -> Tensor:
            u = AlgebraAttack(starts=0).starts_for(evidence, seed)  # noqa: B023
            return VarPro().minimise(objective, ground.space.coordinates(u)).point.z  # noqa: B023

        def from_random() -> Tensor:
            g = torch.Generator().manual_seed(seed)  # noqa: B023
            run = MultiStart().run
            return run(objective, VarPro(), 10, ground.norm, g, lambda _: False, lambda _: False)[0].z  # noqa: B023

        arms: dict[str, Callable[[], Tensor]] = {"closed form": from_closed_form, "random": from_random}
        for arm, solve in arms.items():
            began = time.perf_counter()
            u = ground.space.expand(solve())
            yield {
                **row("start of the span fit", seed, u, errors(u, truth), [], 0),
                **scores(evidence.input.decode(u.view(-1, *evidence.input.shape)), made.truth),
                "arm": arm,
                "seconds": time.perf_counter() - began,
                "loss": objective.at(ground.space.coordinates(u)).misfit,
                "median_error": median(errors(u, truth)),
            }


def main() -> None:
    chosen = options()
    console = Console()
    seeds, quick = chosen.seeds, chosen.quick
    rows: list[Row] = []

    def section(title: str, made: Iterator[Row], columns: dict[str, str]) -> list[Row]:
        try:
            got = list(made)
        except DataUnavailable as missing:
            console.print(f"Skipped {title}: {missing}", markup=False)
            return []
        rows.extend(got)
        show(title, got, columns)
        return got

    ranks = {"rank K": "rank_kernel", "rank G": "rank_gradient", "verdict": "verdict"}
    common = {
        "max error": "max_error",
        "certified": "certified",
        "control": "matched_control",
        "s": "seconds",
    }
    points = section(
        "1. Exact stationary points",
        at_stationary_points(seeds, quick),
        {
            "case": "case", "n": "s", "alpha": "alpha", "seed": "seed", "neurons": "neurons", "defect": "defect",
            "r": "dimension", **ranks, "another tensor: residual": "other_residual", "distance": "other_distance",
            "right": "right", **common,
        },
    )  # fmt: skip
    wrong = [r for r in points if not r["right"]]
    refusals = [r for r in points if r["verdict"] == NOT]
    console.print(
        f"{len(points)} cases, largest defect {max(float(str(r['defect'])) for r in points):.1e};"
        f" {len(points) - len(refusals)} identifiable, {len(refusals)} not; {len(wrong)} verdicts wrong"
    )
    section(
        "1b. Values at random weights, as few as the gradient field needs",
        at_random_weights(seeds, quick),
        {"case": "case", "n": "s", "alpha": "alpha", "seed": "seed", "neurons": "neurons", **ranks, **common},
    )
    section(
        "2. Smallest number of neurons that recovers",
        widths(seeds, quick),
        {
            "r": "r", "alpha": "alpha", "kernel": "kernel", "N_r": "kernel_theory", "gradient field": "gradient",
            "m*": "gradient_theory", "exceptional": "exception", "s": "seconds",
        },
    )  # fmt: skip
    noises = list(noisy(seeds, quick))
    rows.extend(noises)
    lines = curve(noises)
    for key in ("before", "after"):
        show(
            f"2b. Median error against noise, {'pencil alone' if key == 'before' else 'after polish'}",
            lines,
            {
                "degree": "alpha",
                "arm": "arm",
                **{f"{v:g}": f"{key} {v:g}" for v in NOISES},
                "slope": f"{key} slope",
            },
        )
    if chosen.plot is not None:
        plot(chosen.plot, lines)
    section(
        "3. One gradient query at random weights, MNIST, 10 samples, cubic",
        gradient_query(seeds, quick),
        {
            "width": "width", "bias": "bias", "seed": "seed", "r": "dimension", **ranks, "median": "median_error",
            "up to scale": "scale_free_max", "train": "matched_train", **common,
        },
    )  # fmt: skip
    section(
        "4. Weight change of a training run, MNIST, 10 samples, cubic, width 1000, lr 0.02",
        weight_change(seeds, quick),
        {
            "arm": "arm", "bias": "bias", "seed": "seed", "steps": "train_steps", "loss": "train_loss",
            "|change|/|init|": "relative_change", "verdict": "verdict", "median": "median_error",
            "train": "matched_train", "close": "close_train", **common,
        },
    )  # fmt: skip
    section(
        "5. What must not be certified",
        refused(seeds, quick),
        {
            "case": "case", "seed": "seed", "verdict": "verdict", "residual": "loss", "sharpness": "sharpness",
            "max error": "max_error", "certified": "certified", "of these wrong": "certified_wrong",
        },
    )  # fmt: skip
    section(
        "6. Starts for other activations: one gradient query, MNIST, 10 samples, width 1000",
        other_activations(seeds, quick),
        {
            "activation": "activation", "start": "arm", "seed": "seed", "error of the start": "start_error",
            "residual": "loss", "median": "median_error", "close": "close_train", "control": "matched_control",
            "s": "seconds",
        },
    )  # fmt: skip
    section(
        "7. Starts for the span equation: weight change of converged runs, as in 4",
        other_attacks(seeds, quick),
        {
            "start": "arm", "seed": "seed", "misfit": "loss", "median": "median_error", "train": "matched_train",
            "close": "close_train", "control": "matched_control", "s": "seconds",
        },
    )  # fmt: skip
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
