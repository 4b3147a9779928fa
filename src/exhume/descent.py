"""Published attacks on weights: one random start, one long descent by a first-order method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from exhume.ambiguity import ambiguity
from exhume.batches import Batched
from exhume.candidates import Candidates
from exhume.clock import Clock, Observer
from exhume.equations.base import Bound
from exhume.equations.span import Span, last_layer
from exhume.errors import demand
from exhume.evidence import Evidence
from exhume.functional import DenseChain, Relaxed, Smoothing, leaky_backward
from exhume.heads import Head, Outputs, blocks
from exhume.inversion import BoundScore, ClassScore, explained
from exhume.joint import Joint
from exhume.lineage import Lineage
from exhume.lineage import first as first_of
from exhume.moves.policy import Schedule
from exhume.moves.segments import Course, in_segments
from exhume.multipliers import Multipliers, Plain
from exhume.objective import Objective, Point
from exhume.optimisers import Adam, Lazy, Momentum
from exhume.reconstruction import Reconstruction
from exhume.smoothing import typical
from exhume.solvers.base import Solution
from exhume.solvers.first_order import follow
from exhume.spaces import Space, full, subspace
from exhume.survey import Ground, survey
from exhume.terms import Box, HighFrequency, Term


@dataclass(frozen=True)
class Anneal:
    """Slope of the softplus in place of ReLU at step i: beta = min(base + 10^(i / decade), most).

    Args:
        base: about the slope at the start.
        decade: steps in which the second summand grows tenfold.
        most: largest slope.
        relaxed: smooth the derivative alone, with values those of ReLU.
    """

    base: float = 10.0
    decade: float = 20_000.0
    most: float = 200.0
    relaxed: bool = False

    def at(self, step: int) -> float:
        """Beta at a step, to three digits, so that an equation is bound anew only where that matters."""
        beta = min(self.base + 10 ** (step / self.decade), self.most)
        return float(f"{beta:.3g}")

    def smoothing(self, step: int) -> Smoothing:
        """What stands in for ReLU at a step."""
        return Relaxed(self.at(step)) if self.relaxed else self.at(step)


@dataclass(frozen=True)
class Eliminated:
    """Multipliers by least squares at every step: the projection loss, relative to |t|^2."""


@dataclass(frozen=True)
class Drawn:
    """Multipliers as unknowns of their own, lambda / (m C) for m candidates and C outputs; lambda / m with a head.

    Args:
        width: the unknowns start uniform in [centre - width, centre + width], or normal with that deviation.
        centre: see `width`.
        law: "uniform" or "normal".
        kind: how lambda is written in the unknowns.
    """

    width: float = 0.5
    centre: float = 0.0
    law: Literal["uniform", "normal"] = "uniform"
    kind: Multipliers = Plain()

    def draw(self, m: int, k: int, generator: torch.Generator) -> Tensor:
        """The unknowns at the start [m, k]."""
        if self.law == "normal":
            drawn = torch.randn(m, k, generator=generator, dtype=torch.float64)
        else:
            drawn = 2 * torch.rand(m, k, generator=generator, dtype=torch.float64) - 1
        return (self.centre + self.width * drawn) / self.kind.pace


@dataclass(frozen=True)
class Solved:
    """Multipliers as unknowns of their own that start at their least-squares values, in units of their size there."""


@dataclass(frozen=True, eq=False)
class Begun:
    """A descent before its first step.

    Args:
        ground: what was read off the weights.
        problem: what is minimised at a step.
        leaf: the unknowns, overwritten step by step.
        whole: what is minimised, with all candidates in every gradient.
        smooth: its equation with matched smoothing, by the slope of the softplus where ReLU is not smoothed.
        lineage: of the candidates.
        generator: source of random numbers, after the start was drawn.
    """

    ground: Ground
    problem: Callable[[int], Any]
    leaf: Tensor
    whole: Callable[[int], Any]
    smooth: Callable[[int, float], Any]
    lineage: Lineage
    generator: torch.Generator


@dataclass(frozen=True)
class Descent:
    """A published attack.

    Args:
        name: shown in reports.
        equation: one span equation for all samples; or a score to be driven up, without an equation.
        multipliers: unknowns of their own, or eliminated.
        optimiser: takes the steps.
        steps: how many.
        samples: number of samples, if known; the rank of the first-layer change serves otherwise.
        batch: candidates moved at a step, where multipliers are unknowns; None for all.
        surplus: candidates for each sample.
        spread: standard deviation of a coordinate of the start.
        sphere: whether every model input is kept on the sphere of the known norm.
        rows: whether the search is confined to the row space of the first-layer change.
        basis: rows [r, d] that it is confined to instead, as somebody knows them who knows the data: a reference.
        box: weight of each candidate's mean squared violation of the range, in the units of |t|^2; 0 for none.
        wall: weight of the summed violation instead, of [-1, 1] where the range is not known; 0 for none.
        detail: weight of the high-frequency penalty of images, likewise.
        anneal: softplus or relaxed ReLU in place of ReLU; None for ReLU itself.
        leak: slope at which an inactive ReLU is differentiated on random features, dense layers that did not change
            below one that did; None for its own slope, as everywhere else.
        floor: stop when the loss is below this.
        head: the direction of outputs that a multiplier stands for.
        forgotten: whether the final weights themselves are explained, whatever is known of the initial ones.
        moves: when candidates are split, added, merged or removed, and by what; None for never.
    """

    name: str
    equation: Span | ClassScore
    multipliers: Eliminated | Drawn | Solved
    optimiser: Adam | Lazy | Momentum
    steps: int
    samples: int | None = None
    batch: int | None = None
    surplus: float = 1.0
    spread: float = 1.0
    sphere: bool = False
    rows: bool = False
    basis: Tensor | None = None
    box: float = 0.0
    wall: float = 0.0
    detail: float = 0.0
    anneal: Anneal | None = None
    leak: float | None = None
    floor: float = 0.0
    head: Head = Outputs()
    forgotten: bool = False
    moves: Schedule | None = None

    @property
    def signs_free(self) -> bool:
        """Whether multipliers may have either sign."""
        return not isinstance(self.multipliers, Drawn) or self.multipliers.kind.floor is None

    def missing(self, evidence: Evidence) -> tuple[str, ...]:
        """What the attack needs and the evidence lacks."""
        gaps = []
        used = last_layer(evidence) if self.equation.layers == "last" else tuple(evidence.final)
        if self.forgotten:
            pass
        elif evidence.init is None:
            gaps.append("the initial weights ([model] init)")
        elif not any(evidence.moved(k) for k in evidence.final):
            gaps.append("final weights that differ from the initial ones")
        elif used is not None and not any(evidence.moved(k) for k in used if k is not None):
            gaps.append("a last layer that changed in training")
        if self.sphere and evidence.input.sample_norm is None:
            gaps.append("the norm of every model input ([input] sample_norm)")
        if evidence.chain is None and self.rows:
            gaps.append("a plain dense network")
        elif used is None:
            gaps.append("a model whose outputs are those of a linear layer")
        if (gap := self.head.gap(evidence.outputs)) is not None:
            gaps.append(gap)
        if self.moves is not None and isinstance(self.equation, ClassScore):
            gaps.append("an equation, since moves rest on its residual")
        return tuple(gaps)

    def run(
        self,
        evidence: Evidence,
        seed: int = 0,
        budget: float | None = None,
        observer: Observer | None = None,
    ) -> Reconstruction:
        """Reconstruct samples from the evidence alone.

        Args:
            evidence: weights, forward function and input specification.
            seed: of the start.
            budget: seconds after which the last iterate is returned.
            observer: told about progress.

        Raises:
            MissingEvidence: the evidence lacks something; all gaps are named.
        """
        clock = Clock(budget, observer)
        began = self.begin(evidence, seed)
        told, said = partial(clock.tick, self.name), tuple[str, ...]()
        if self.moves is None:
            optimizer = self.optimiser.optimizer(began.leaf, began.problem(0))
            solution = follow(optimizer, began.leaf, began.problem, self.steps, self.floor, told)
            problem, lineage = began.problem(solution.steps), None
        else:
            course = self._course(began, self.moves, evidence)
            solution, lineage = in_segments(course, self.moves, self.steps, self.floor, told)
            problem = began.problem(solution.steps).of(lineage)
            state = course.state(solution.point.z, lineage, self.moves, solution.steps)
            said = (lineage.summary(solution.steps), *self.moves.told(state))
        return self._report(self._seen(evidence), began.ground, problem, solution, lineage, said, seed, clock)

    def _course(self, began: Begun, schedule: Schedule, evidence: Evidence) -> Course:
        """The descent as moves interrupt it."""
        problem: Objective | Joint = began.whole(0)
        inner = problem.inner if isinstance(problem, Joint) else problem.space
        z = began.leaf[:, : inner.dim]
        slope = schedule.slope / typical(evidence, inner.expand(z))
        return Course(
            began.leaf,
            began.lineage,
            began.problem,
            began.whole,
            lambda step: began.smooth(step, slope),
            self.optimiser.optimizer,
            began.generator,
        )

    def begin(self, evidence: Evidence, seed: int = 0) -> Begun:
        """Everything before the first step.

        Raises:
            MissingEvidence: the evidence lacks something; all gaps are named.
        """
        gaps = self.missing(evidence)
        evidence = self._seen(evidence)
        ground = survey(evidence) if evidence.init is not None or self.forgotten else None
        first = None if ground is None else ground.first
        n = self.samples or (0 if first is None or first.flat else first.rank)
        if not n and ground is not None:
            gaps = (*gaps, "the number of samples ([attack] samples)")
        demand(self.name, gaps)
        assert ground is not None
        space, generator = self._space(evidence, ground), torch.Generator().manual_seed(seed)
        draw = torch.randn(
            max(round(self.surplus * n), 1), space.dim, generator=generator, dtype=torch.float64
        )
        z = space.retract(self.spread * draw)
        lineage = first_of(blocks(len(z), evidence.outputs))
        if isinstance(self.equation, ClassScore):
            score = self.equation.bind(evidence, space, self._terms(evidence))

            def scored(step: int, slope: float = 0.0) -> BoundScore:
                return score

            return Begun(ground, scored, z, scored, scored, lineage, generator)
        problems = self._problems(self.equation, evidence, ground, space, lineage.label)
        leaf, unit = self._start(problems(self._smoothing(0), None, False).equation, space, z, generator)

        def whole(step: int) -> Any:
            return problems(self._smoothing(step), unit, False)

        def smooth(step: int, slope: float) -> Any:
            given = self._smoothing(step)
            return problems(
                given.alpha if isinstance(given, Relaxed) else given or slope, unit, True
            ).equation

        if self.batch is None or unit is None:
            return Begun(ground, whole, leaf, whole, smooth, lineage, generator)
        batched = Batched(problems(self._smoothing(0), unit, False), self.batch, generator)

        def problem(step: int) -> Batched:
            batched.whole = whole(step)
            return batched

        return Begun(ground, problem, leaf, whole, smooth, lineage, generator)

    def _seen(self, evidence: Evidence) -> Evidence:
        """The evidence without what the attack does not use."""
        return replace(evidence, init=None) if self.forgotten else evidence

    def _space(self, evidence: Evidence, ground: Ground) -> Space:
        if self.rows and self.basis is None:  # survey kept the sphere where the norm is known
            return ground.space
        space = full(evidence.input.size) if self.basis is None else subspace(self.basis)
        norm = evidence.input.sample_norm
        return space if not self.sphere or norm is None else space.within((norm, norm))

    def _smoothing(self, step: int) -> Smoothing | None:
        """What stands in for ReLU at a step."""
        return None if self.anneal is None else self.anneal.smoothing(step)

    def _problems(
        self, span: Span, evidence: Evidence, ground: Ground, space: Space, label: Tensor
    ) -> Callable[[Smoothing | None, float | None, bool], Any]:
        """What is minimised: by smoothing, unit of the multipliers (None where eliminated), and whether it is bent.

        Bent, every ReLU is the smooth one in values and derivatives; the slope of an inactive one is left out.
        """
        terms = self._terms(evidence)
        kind = self.multipliers.kind if isinstance(self.multipliers, Drawn) else Plain()
        head = None if isinstance(self.head, Outputs) else partial(self._weights, evidence, space)
        seen = evidence
        if self.leak is not None and (chain := fixed_below(evidence)) is not None:
            phis = tuple(leaky_backward(phi, self.leak) for phi in chain.activations)
            seen = replace(evidence, chain=replace(chain, activations=phis))
        bound: dict[bool, tuple[Smoothing | None, Bound]] = {}

        def problem(smoothing: Smoothing | None, unit: float | None, bent: bool) -> Objective | Joint:
            if bent not in bound or bound[bent][0] != smoothing:
                made = span.bind(evidence if bent else seen, space, ground.decay, smoothing)
                bound[bent] = smoothing, made
            equation = bound[bent][1]
            if unit is None:
                return Objective(equation, space, terms)
            unknowns = equation.multiplicity if head is None else self.head.unknowns(equation.multiplicity)
            return Joint(equation, space, unit, terms, kind, head, unknowns, None, label)

        return problem

    def _weights(
        self, evidence: Evidence, space: Space, z: Tensor, multiplier: Tensor, label: Tensor
    ) -> Tensor:
        """Weights on the gradients of the outputs [m, C], by the head at z."""
        u = space.expand(z.detach()).view(-1, *evidence.input.shape)
        return self.head.coefficients(multiplier, label, lambda: evidence.output(u))

    def _terms(self, evidence: Evidence) -> tuple[Term, ...]:
        """Priors, whose weights are for the mean over features of what they penalise."""
        terms: list[Term] = []
        box, d = evidence.input.box(), evidence.input.size
        if self.box and box is not None:
            low, high = box
            terms.append(Box(low, high, self.box / d * float((high - low).square().sum())))
        if self.wall:
            one = torch.ones(d, dtype=torch.float64)
            low, high = (-one, one) if box is None else box
            terms.append(Box(low, high, self.wall * float((high - low).square().sum())))
        if self.detail and len(evidence.input.shape) in (2, 3):
            terms.append(HighFrequency(evidence.input.shape, self.detail))
        return tuple(terms)

    def _start(
        self, equation: Bound, space: Space, z: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float | None]:
        """The unknowns at the first step, and the unit of the multipliers among them."""
        match self.multipliers:
            case Eliminated():
                return z, None
            case Drawn() as drawn if isinstance(self.head, Outputs):
                k = equation.multiplicity
                a = drawn.draw(len(z), k, generator)
                return torch.cat([z, a], 1), len(self.equation.nodes) / (len(z) * k)
            case Drawn() as drawn:
                a = drawn.draw(len(z), self.head.unknowns(equation.multiplicity), generator)
                return torch.cat([z, a], 1), 1 / len(z)
            case Solved():
                coef = Objective(equation, space).at(z).coef
                unit = float(coef.square().mean().sqrt().clamp_min(1e-30))
                return torch.cat([z, coef / unit], 1), unit

    def _report(
        self,
        evidence: Evidence,
        ground: Ground,
        problem: Objective | Joint | Batched | BoundScore,
        solution: Solution[Any],
        lineage: Lineage | None,
        said: tuple[str, ...],
        seed: int,
        clock: Clock,
    ) -> Reconstruction:
        point = solution.point
        misfit = point.misfit
        if isinstance(problem, Joint | Batched):
            space, (z, coef) = problem.space.inner, problem.parts(point.z)
        elif isinstance(problem, BoundScore):
            space, z = problem.space, point.z
            coef, misfit = explained(evidence, ground, space, z)
        else:
            assert isinstance(point, Point)
            space, z, coef = problem.space, point.z, point.coef
        weight = coef.square().sum(1)
        order = weight.argsort(descending=True)
        u = space.expand(z[order]).view(-1, *evidence.input.shape)
        notes = [
            *ground.notes,
            f"one descent of {self.steps:,} steps from one random start of"
            f" {len(z) if lineage is None else lineage.started} candidates",
            *said,
        ]
        if self.anneal is not None:
            often = f"tenfold every {self.anneal.decade:,.0f} steps, up to {self.anneal.most:g}"
            what = (
                "a smoothed derivative stood in for that of ReLU"
                if self.anneal.relaxed
                else "softplus stood in for ReLU"
            )
            grew = f"grew {often}" if self.anneal.base < self.anneal.most else f"was {self.anneal.most:g}"
            notes.append(f"{what}, with a slope that {grew}")
        if self.batch is not None:
            notes.append(f"{self.batch} candidates moved at each step")
        if self.leak is not None and fixed_below(evidence) is not None:
            notes.append(f"an inactive ReLU was differentiated as if it had slope {self.leak:g}")
        if self.box and evidence.input.box() is None:
            notes.append("the range of the features is not known: its penalty was left out")
        return Reconstruction(
            attack=self.name,
            candidates=Candidates(evidence.input.decode(u), coef[order], evidence.output(u)),
            importance=weight[order] / weight.sum().clamp_min(1e-300),
            misfit=misfit,
            loss=point.loss,
            status=solution.status,
            reason=solution.reason,
            steps=solution.steps,
            seconds=clock.elapsed,
            seed=seed,
            trace=solution.trace[:: max(len(solution.trace) // 1000, 1)],
            assumed=tuple(notes),
            spectrum=() if ground.first is None else tuple(ground.first.spectrum.tolist()),
            rank=None if ground.first is None or ground.first.flat else ground.first.rank,
            expected=self.samples,
            ambiguity=ambiguity(evidence, self.equation.layers, self.samples, replace(ground, space=space)),
            lineage=None if lineage is None else lineage.take(order, solution.steps),
        )


def fixed_below(evidence: Evidence) -> DenseChain | None:
    """The dense chain whose layers below the last did not change in training (random features), or None."""
    chain = evidence.chain
    if chain is None or any(
        evidence.moved(k) for k in (*chain.weights[:-1], *chain.biases[:-1]) if k is not None
    ):
        return None
    return chain
