"""An attack: what it needs, how it searches, and what it returns; it never sees a training sample."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.candidates import Candidates
from exhume.change import Decay, FirstLayer, decay_factor, decayed_target, first_layer
from exhume.equations.column import Column
from exhume.equations.span import Span
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence
from exhume.moves.prune import importance, weakest_out
from exhume.moves.restart import MultiStart
from exhume.moves.search import ColumnSearch
from exhume.objective import Objective, Point
from exhume.solvers.base import Solution
from exhume.solvers.varpro import VarPro
from exhume.spaces import Space, full
from exhume.terms import Box

Observer = Callable[[str, float], bool]
"""Called with what is being done, in words, and the share of the budget used; True ends the run early."""


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack found, and what it assumed; nothing here was compared with the truth.

    Args:
        attack: name of the attack.
        candidates: guessed samples, most important first.
        importance: rise of the misfit without each candidate, relative to the misfit [m].
        misfit: share of |t|^2 that the candidates do not explain.
        loss: misfit plus priors.
        status: "converged", "iterations", "stalled", "diverged", "stopped".
        reason: the same, as a sentence.
        steps: solver steps.
        seconds: wall time.
        seed: of the random starts.
        trace: loss after each step of the final solve.
        assumed: what the result rests on, one sentence each.
        spectrum: singular values of the first-layer change, empty if not available.
        rank: its rank, or None.
    """

    attack: str
    candidates: Candidates
    importance: Tensor
    misfit: float
    loss: float
    status: str
    reason: str
    steps: int
    seconds: float
    seed: int
    trace: tuple[float, ...]
    assumed: tuple[str, ...]
    spectrum: tuple[float, ...] = ()
    rank: int | None = None

    @property
    def x(self) -> Tensor:
        """Guessed samples in the owner's units, [m, *shape]."""
        return self.candidates.x


@dataclass(frozen=True, eq=False)
class Ground:
    """What can be read off the evidence before any search.

    Args:
        decay: what is left of the initialisation.
        first: the first-layer change, or None if the model has no recognised dense first layer.
        space: where to search.
        norm: typical norm of a model input.
        notes: what was concluded and assumed, one sentence each.
    """

    decay: Decay
    first: FirstLayer | None
    space: Space
    norm: float
    notes: tuple[str, ...]

    @property
    def reduced(self) -> bool:
        """Whether the first-layer change confines the samples to a proper subspace."""
        return self.first is not None and not self.first.flat and not self.first.full


def survey(evidence: Evidence, radius: tuple[float, float] = (0.2, 5.0)) -> Ground:
    """Measure decay, rank and row space, and choose the search space.

    Args:
        evidence: what is known.
        radius: allowed norms of a model input, relative to the estimated norm.
    """
    decay = decay_factor(evidence)
    notes = [f"kappa = {decay.weight:.6g} for weights, {decay.bias:.6g} for biases ({decay.source})"]
    size, spec = evidence.input.size, evidence.input
    first = None
    if evidence.chain is not None and evidence.init is not None:
        first = first_layer(evidence, decayed_target(evidence, decay))
        if first.flat:
            notes.append(
                f"the spectrum of the first-layer change is flat (largest drop {first.gap:.2g}): the optimiser"
                " rescaled entries (Adam-like), or rounding hides the rank; the full input space is searched"
            )
        elif first.full:
            notes.append("the first-layer change has full rank: at least as many samples as input features")
        else:
            notes.append(f"the first-layer change has rank {first.rank}: at least {first.rank} samples")
    space, norm = full(size), first.norm if first is not None else None
    if first is not None and not first.flat and not first.full:
        space = first.space
    box = spec.box()
    if spec.sample_norm is not None:
        norm, space = spec.sample_norm, space.within((spec.sample_norm, spec.sample_norm))
        notes.append(f"every model input has norm {norm:g}, as the target says")
    elif norm is not None:
        space = space.within((radius[0] * norm, radius[1] * norm))
        notes.append(f"model inputs have norms between {radius[0] * norm:.3g} and {radius[1] * norm:.3g}")
    else:
        norm = size**0.5 if box is None else 0.5 * float((box[1] - box[0]).norm())
        notes.append(f"a typical model input has norm {norm:.3g}")
    if box is not None:
        notes.append(f"features lie between {spec.low:g} and {spec.high:g}")
    return Ground(decay, first, space, norm, tuple(notes))


@dataclass(frozen=True)
class SpanAttack:
    """Recover samples by the column equation where it applies, then fit all of them jointly by the span equation.

    Args:
        name: shown in reports.
        equation: the joint equation.
        column: the one-at-a-time equation, or None to use random starts only.
        solver: of the joint equation.
        search: of the column equation.
        restart: random starts, where the column equation does not apply.
        samples: number of samples, if known; the rank of the first-layer change serves otherwise.
        box: weight of the penalty on features outside their range.
        repairs: times that candidates which fail the column equation are replaced after the joint fit.
        sharpness: slopes of the smoothed ReLU, in units of one over the typical pre-activation.
    """

    name: str
    equation: Span
    column: Column | None
    solver: VarPro = VarPro()
    search: ColumnSearch = ColumnSearch()
    restart: MultiStart = MultiStart()
    samples: int | None = None
    box: float = 1e-2
    repairs: int = 2
    sharpness: tuple[float, ...] = (6.0, 10.0, 16.0)

    def missing(self, evidence: Evidence) -> tuple[str, ...]:
        """What the attack needs and the evidence lacks."""
        gaps = []
        if evidence.init is None:
            gaps.append("the initial weights ([model] init)")
        elif all(torch.equal(evidence.init[k], p) for k, p in evidence.final.items()):
            gaps.append("final weights that differ from the initial ones")
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
            seed: of the random starts.
            budget: seconds after which the best result so far is returned.
            observer: told about progress.

        Raises:
            MissingEvidence: the evidence lacks something; all gaps are named.
        """
        gaps = self.missing(evidence)
        if gaps:
            raise MissingEvidence(
                f"attack {self.name!r} needs {' and '.join(gaps)}; provide it, or choose another attack with"
                " `exhume inspect`"
            )
        clock = _Clock(budget, observer)
        ground = survey(evidence)
        objective = self._objective(evidence, ground)
        generator = torch.Generator().manual_seed(seed)
        notes = list(ground.notes)

        runs: list[Solution[Point]] = []
        point = None
        if self.column is not None and ground.reduced:
            point, runs = self._one_at_a_time(evidence, ground, objective, generator, clock)
            if point is not None:
                notes.append(
                    "samples were sought one at a time in the column space of the first-layer change"
                )
        if point is None:
            expected = self.samples or (ground.first.rank if ground.first is not None else 0)
            if not expected:
                raise MissingEvidence(
                    f"attack {self.name!r} needs the number of samples ([attack] samples), since the model has no"
                    " recognised dense first layer to read it from; state it, or an upper bound"
                )
            notes.append(f"{expected} samples were expected, sought jointly from random starts")
            point, runs = self.restart.run(
                objective,
                self.solver,
                expected,
                ground.norm,
                generator,
                lambda loss: clock.tick("joint fit", loss),
                lambda done: clock.tick(f"random start {done} of {self.restart.starts}", None),
            )
        return self._report(evidence, ground, objective, point, runs, notes, seed, clock)

    def _objective(self, evidence: Evidence, ground: Ground) -> Objective:
        box = evidence.input.box()
        terms = () if box is None or self.box == 0 else (Box(*box, self.box),)
        return Objective(self.equation.bind(evidence, ground.space, ground.decay), ground.space, terms)

    def _one_at_a_time(
        self,
        evidence: Evidence,
        ground: Ground,
        objective: Objective,
        generator: torch.Generator,
        clock: _Clock,
    ) -> tuple[Point | None, list[Solution[Point]]]:
        """Column search, joint fit, and repair of candidates that the fit spoiled or the search missed."""
        assert self.column is not None and ground.first is not None
        column, first, space = self.column, ground.first, ground.space
        probe = space.random(64, ground.norm, generator)
        typical = column.bind(evidence, first, space, None).typical(probe)
        stages = [column.bind(evidence, first, space, s / typical) for s in self.sharpness]
        known = space.coordinates(first.exclusive)
        best: tuple[int, float, Point] | None = None
        runs: list[Solution[Point]] = []
        for _ in range(self.repairs + 1):
            z = self.search.run(
                stages,
                space,
                ground.norm,
                known,
                generator,
                lambda found, missing: clock.tick(f"search: {found} samples found, {missing} missing", None),
            )
            if len(z) == 0:
                break
            solution = self.solver.minimise(objective, z, lambda loss: clock.tick("joint fit", loss))
            # The rank is the number of samples while it is below the input size: what is beyond it is spurious.
            trimmed = weakest_out(objective, solution.point, max(first.rank, self.samples or 0))
            if len(trimmed.z) < len(solution.point.z):
                solution = self.solver.minimise(
                    objective, trimmed.z, lambda loss: clock.tick("joint fit", loss)
                )
            runs.append(solution)
            point = solution.point
            kept = stages[-1].distinct(point.z, probe) < self.search.accept
            missing = stages[-1].without(point.z).missing
            found = (int(kept.sum()), -point.loss, point)
            best = found if best is None else max(best, found, key=lambda entry: entry[:2])
            if clock.expired or (bool(kept.all()) and missing == 0):
                break
            known = point.z[kept]
        return None if best is None else best[2], runs

    def _report(
        self,
        evidence: Evidence,
        ground: Ground,
        objective: Objective,
        point: Point,
        runs: list[Solution[Point]],
        notes: list[str],
        seed: int,
        clock: _Clock,
    ) -> Reconstruction:
        weight = importance(objective, point) / max(point.misfit, 1e-300)
        order = weight.argsort(descending=True)
        u = objective.space.expand(point.z[order]).view(-1, *evidence.input.shape)
        final = min(runs, key=lambda run: run.point.loss)
        return Reconstruction(
            attack=self.name,
            candidates=Candidates(evidence.input.decode(u), point.coef[order], evidence.output(u)),
            importance=weight[order],
            misfit=point.misfit,
            loss=point.loss,
            status="stopped" if clock.expired else final.status,
            reason="The run was ended early; the best result so far is reported."
            if clock.expired
            else final.reason,
            steps=sum(run.steps for run in runs),
            seconds=clock.elapsed,
            seed=seed,
            trace=final.trace,
            assumed=tuple(notes),
            spectrum=() if ground.first is None else tuple(ground.first.spectrum.tolist()),
            rank=None if ground.first is None or ground.first.flat else ground.first.rank,
        )

    def with_samples(self, samples: int | None) -> SpanAttack:
        """The same attack for a stated number of samples."""
        return replace(self, samples=samples)


class _Clock:
    """Wall time, budget and progress of one run."""

    def __init__(self, budget: float | None, observer: Observer | None) -> None:
        self.start, self.budget, self.observer = time.perf_counter(), budget, observer
        self.stopped = False

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def expired(self) -> bool:
        return self.stopped or (self.budget is not None and self.elapsed > self.budget)

    def tick(self, doing: str, loss: float | None) -> bool:
        """Tell the observer; return True when the budget has run out."""
        if self.observer is not None:
            words = doing if loss is None else f"{doing}, loss {loss:.3g}"
            share = 0.0 if self.budget is None else min(self.elapsed / self.budget, 1.0)
            self.stopped = self.observer(words, share) or self.stopped
        return self.expired
