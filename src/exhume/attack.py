"""An attack: what it needs, how it searches, and what it returns; it never sees a training sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from exhume.ambiguity import ambiguity
from exhume.candidates import Candidates
from exhume.certificate import WITNESS, Certificate, certify
from exhume.clock import Clock, Observer
from exhume.equations.column import Column
from exhume.equations.feature import Feature
from exhume.equations.fold import fold
from exhume.equations.part import Part, split
from exhume.equations.recipe import dynamics, gaps, unknowns
from exhume.equations.span import Span
from exhume.errors import ExhumeError, MissingEvidence, demand
from exhume.evidence import Evidence
from exhume.lineage import Lineage
from exhume.moves.growth import Growth
from exhume.moves.polish import Polish, Polished
from exhume.moves.prune import importance, weakest_out
from exhume.moves.readings import Readings, ReadOff
from exhume.moves.refine import refine
from exhume.moves.restart import MultiStart
from exhume.moves.search import SubspaceSearch
from exhume.moves.sharpen import Sharpen, estimated, fitted, signs
from exhume.moves.single import ByFeatures, BySignals, Single, jointly
from exhume.objective import Objective, Point
from exhume.reconstruction import Reconstruction
from exhume.smoothing import typical
from exhume.solvers.base import Solution
from exhume.solvers.varpro import VarPro
from exhume.survey import Ground, survey
from exhume.terms import Box, Term


@dataclass(frozen=True, eq=False)
class Search:
    """One search on one part of the equations.

    Args:
        point: the candidates after their joint fit.
        distinct: number of candidates that add a signal of their own; 0 where signals were not used.
        runs: every solution on the way.
        how: how it went, as a sentence.
        parts: the equations used and those left out, or None if all were used.
        single: the equation they were found by, or None for random starts.
        lineage: where they came from, if they were grown.
    """

    point: Point
    distinct: int
    runs: tuple[Solution[Point], ...]
    how: str
    parts: tuple[Part, Part] | None
    single: Single | None
    lineage: Lineage | None = None


@dataclass(frozen=True)
class SpanAttack:
    """Recover samples one at a time where an equation for that applies, else or then jointly by the span equation.

    Args:
        name: shown in reports.
        equation: the joint equation.
        column: a one-at-a-time equation, or None to do without.
        feature: another, which is preferred where it applies, or None to do without.
        solver: of the joint equation.
        search: of the one-at-a-time equation.
        restart: random starts, or growth, where no one-at-a-time equation applies.
        samples: number of samples, if known; the rank of the first-layer change serves otherwise.
        box: weight of the penalty on features outside their range.
        priors: further penalties.
        repairs: times that candidates which fail the one-at-a-time equation are replaced after the joint fit.
        sharpen: what a second fit uses besides the equation, or None for no second fit.
        read_off: keeps what single neurons give away as it is; None leaves it to the fit.
        polish: refinement by simulated training, where the recipe is known; None for none.
        held_out: share of the hidden units left out of search and fit, and predicted for the certificate.
        sharpness: slopes of the smoothed ReLU, in units of one over the typical pre-activation.
    """

    name: str
    equation: Span
    column: Column | None
    feature: Feature | None = None
    solver: VarPro = VarPro()
    search: SubspaceSearch = SubspaceSearch()
    restart: MultiStart | Growth = MultiStart()
    samples: int | None = None
    box: float = 1e-2
    priors: tuple[Term, ...] = ()
    repairs: int = 2
    sharpen: Sharpen | None = None
    read_off: ReadOff | None = ReadOff()
    polish: Polish | None = None
    held_out: float = 0.2
    sharpness: tuple[float, ...] = (6.0, 10.0, 16.0)

    def missing(self, evidence: Evidence) -> tuple[str, ...]:
        """What the attack needs and the evidence lacks."""
        missing = []
        if evidence.init is None:
            missing.append("the initial weights ([model] init)")
        elif not any(evidence.moved(k) for k in evidence.final):
            missing.append("final weights that differ from the initial ones")
        return tuple(missing)

    def run(
        self,
        evidence: Evidence,
        seed: int = 0,
        budget: float | None = None,
        observer: Observer | None = None,
        start: Tensor | None = None,
    ) -> Reconstruction:
        """Reconstruct samples from the evidence alone.

        Args:
            evidence: weights, forward function and input specification.
            seed: of the random starts.
            budget: seconds after which the best result so far is returned.
            observer: told about progress.
            start: model inputs to start from beside random ones [k, d], as another attack found them.

        Raises:
            MissingEvidence: the evidence lacks something; all gaps are named.
        """
        demand(self.name, self.missing(evidence))
        clock = Clock(budget, observer)
        ground = survey(evidence)
        notes = list(ground.notes)
        # The witness must not have been told what to find.
        begin = ground.space.retract(ground.space.coordinates(_rows(start, evidence)))
        single = self.single(evidence, ground)
        # Two searches from other starts on other equations: the better one is reported, the other bears witness.
        searches = [
            self._find(
                evidence, ground, single, split(evidence, self.equation.layers, self.held_out, s), s, part, z
            )
            for s, part, z in ((seed, clock.part(0.5), begin), (seed + WITNESS, clock, begin[:0]))
            if s == seed or not clock.expired
        ]
        found = max(searches, key=lambda search: (search.distinct, -search.point.loss))
        point = found.point
        notes.append(found.how)
        if ground.reduced and ground.first is not None and len(point.z) < ground.first.rank:
            notes.append(
                f"{len(point.z)} candidates were found, fewer than the {ground.first.rank} samples there must be"
            )
        chain = evidence.chain
        if self.samples is None and not ground.reduced and chain is not None and len(chain.weights) > 2:
            notes.append(
                "the first layer does not tell how many samples there are: with [attack] samples stated, they would"
                " be sought by their hidden features"
            )
        seen = self.samples if single is None else single.samples
        if self.samples is not None and self.samples != seen:
            notes.append(
                f"{self.samples} samples were stated, but the first-layer change shows {seen}: as many as it shows"
                " were sought"
            )
        # The final fit uses all equations; what it rests on was decided without the held-out ones.
        everything = self._objective(evidence, ground, None)
        place = jointly if found.single is None else found.single.fit
        final = place(everything, point.z, None, self._solver(evidence), partial(clock.tick, "final fit"))
        if self.sharpen is not None and not clock.expired:
            everything = self._sharpened(self.sharpen, evidence, ground, everything, final.point)
            final = place(
                everything, final.point.z, None, self._solver(evidence), partial(clock.tick, "second fit")
            )
        certificate, read = None, Readings.none(point.z)
        if found.parts is not None:
            fit, held = (self._objective(evidence, ground, part).equation for part in found.parts)
            others = [ground.space.expand(search.point.z) for search in searches if search is not found]
            if ground.reduced and ground.first is not None:
                others.append(ground.first.exclusive)
                if self.read_off is not None:
                    read = self.read_off.run(ground.space, ground.first.exclusive, fit, held, point.z)
            witnesses = torch.cat([point.z.new_zeros(0, evidence.input.size), *others])
            placed = everything.at(read.place(final.point.z))
            certificate = certify(evidence, fit, held, read.place(point.z), everything, placed, witnesses)
        if len(read.z):
            notes.append(
                f"{len(read.z)} of the candidates are what neurons that one sample alone activated show"
            )
        # Polish takes candidates to be where the equation puts them, so readings are put back only after it.
        ends = final.point.z
        polished = self._polish(evidence, ground, found.single, final.point, notes, clock)
        if polished is not None:
            before, after = (ground.space.expand(read.place(z)) for z in (ends, polished.z))
            by = (after - before).norm(dim=1) / after.norm(dim=1).clamp_min(1e-30)
            if certificate is not None:
                certificate = certificate.polished(polished.left, by)
            ends = polished.z
        if polished is not None or len(read.z):
            final = replace(final, point=everything.at(read.place(ends)))
        runs = [run for search in searches for run in search.runs]
        lineage = found.lineage
        return self._report(
            evidence, ground, everything, final, runs, lineage, certificate, notes, seed, clock
        )

    def _sharpened(
        self, sharpen: Sharpen, evidence: Evidence, ground: Ground, objective: Objective, point: Point
    ) -> Objective:
        """The joint objective with what a first fit has told."""
        space, terms, equation = ground.space, objective.terms, self.equation
        if sharpen.weights:
            weights = estimated(objective.equation, fold(evidence, space), point.residual)
            equation = replace(equation, weights=weights)
        held = partial(signs, evidence, space, equation.nodes) if sharpen.signs else None
        found = Objective(equation.bind(evidence, space, ground.decay), space, terms, held)
        if not sharpen.output:
            return found
        noise = float(found.at(point.z).residual.square().mean().sqrt())
        term = fitted(evidence, space.expand(point.z), noise, found.equation.energy)
        return found if term is None else replace(found, terms=(*terms, term))

    def _polish(
        self,
        evidence: Evidence,
        ground: Ground,
        single: Single | None,
        point: Point,
        notes: list[str],
        clock: Clock,
    ) -> Polished | None:
        """Refine by simulated training where the recipe is known; say what came of it."""
        if self.polish is None:
            return None
        if clock.expired:
            notes.append("training was not simulated, since no time was left")
            return None
        still = [name for name in evidence.final if not evidence.moved(name)]
        if still:
            notes.append(
                f"training was not simulated, since {', '.join(still)} did not move and may have been frozen"
            )
            return None
        missing = gaps(evidence.recipe)
        if missing:
            notes.append(f"training was not simulated, which needs {', '.join(missing)}")
            return None
        space, shape = ground.space, evidence.input.shape
        polish = self.polish if single is None else single.polish(self.polish)
        found, said = refine(
            polish,
            evidence.recipe,
            lambda part, smoothing: self._objective(evidence, ground, part, smoothing),
            dynamics(evidence.recipe).bind(evidence, space),
            lambda z, lr: unknowns(evidence, z, space.expand(z).view(-1, *shape), lr),
            point.z,
            lambda gap: clock.tick(f"simulated training ends {gap:.2g} from the true weights", None),
        )
        notes.extend(said)
        return found

    def single(self, evidence: Evidence, ground: Ground) -> Single | None:
        """The equation that samples are sought by one at a time, or None where there is none."""
        space, first = ground.space, ground.first if ground.reduced else None
        shown = 0 if first is None else first.rank
        # More may have been stated than there are, and more than the rows can hold: then what the rank shows.
        for samples in sorted({max(shown, self.samples or 0), shown}, reverse=True):
            if self.feature is not None:
                features = ByFeatures(self.feature, evidence, ground.decay, space, samples)
                if features.applies:
                    return features
        bent = evidence.chain is not None and not evidence.chain.smoothed(1.0).piecewise_linear
        if self.column is not None and first is not None and bent:
            return BySignals(self.column, evidence, first, space, self.sharpness)
        return None

    def _find(
        self,
        evidence: Evidence,
        ground: Ground,
        single: Single | None,
        parts: tuple[Part, Part] | None,
        seed: int,
        clock: Clock,
        begin: Tensor,
    ) -> Search:
        """Search and joint fit on the first part of the equations, or on all."""
        generator = torch.Generator().manual_seed(seed)
        part = None if parts is None else parts[0]
        objective = self._objective(evidence, ground, part)
        if single is not None:
            found, runs = self._one_at_a_time(single, ground, part, objective, generator, clock, begin)
            if found is not None:
                how = f"samples were sought one at a time in {single.where}"
                if isinstance(self.restart, Growth):
                    how += ", where no candidates are moved"
                return Search(found[2], found[0], tuple(runs), how, parts, single)
        first = ground.first
        expected = self.samples or (0 if first is None or first.flat else first.rank)
        if isinstance(self.restart, Growth):
            return self._grown(
                self.restart, evidence, ground, parts, objective, expected, generator, clock, begin
            )
        if not expected:
            raise MissingEvidence(
                f"attack {self.name!r} needs the number of samples ([attack] samples), since it cannot be read off"
                " this model's first layer; state it, or an upper bound"
            )
        how = f"{expected} samples were expected, and sought jointly from random starts"
        equation = objective.equation
        # With fewer equations than unknowns every set of candidates fits, and none means anything.
        most = max(1, equation.equations // (2 * (equation.dim + equation.multiplicity)))
        restart = self.restart
        if expected > most:
            restart = replace(restart, starts=1)
            how = (
                f"{expected} samples were expected, but {equation.equations} equations determine at most {most}"
                f" of {equation.dim} features each: so many were sought, jointly from random starts"
            )
        point, runs = restart.run(
            objective,
            self._solver(evidence),
            min(expected, most),
            ground.norm,
            generator,
            lambda loss: clock.tick("joint fit", loss),
            lambda done: clock.tick(f"random start {done} of {restart.starts}", None),
            begin,
        )
        return Search(point, 0, tuple(runs), how, parts, None)

    def _grown(
        self,
        growth: Growth,
        evidence: Evidence,
        ground: Ground,
        parts: tuple[Part, Part] | None,
        objective: Objective,
        expected: int,
        generator: torch.Generator,
        clock: Clock,
        begin: Tensor,
    ) -> Search:
        """Candidates grown one by one, as many as expected, or as pay where nothing tells how many there are."""
        equation = objective.equation
        most = max(1, equation.equations // (2 * (equation.dim + equation.multiplicity)))
        probe = ground.space.expand(ground.space.random(64, ground.norm, generator))
        slope = growth.policy.slope / typical(evidence, probe)
        grown = growth.run(
            objective,
            self._objective(evidence, ground, None if parts is None else parts[0], slope).equation,
            self._solver(evidence),
            expected or None,
            most,
            ground.norm,
            generator,
            lambda loss: clock.tick("joint fit", loss),
            lambda m: clock.tick(f"{m} candidates grown", None),
            begin,
        )
        told = f"{expected} samples were expected" if expected else "nothing told how many samples there are"
        if expected > most:
            told += f", but {equation.equations} equations determine at most {most} of {equation.dim} features each"
        how = f"{told}; candidates were grown one by one ({grown.lineage.summary(grown.step)})"
        return Search(grown.point, 0, grown.solutions, how, parts, None, grown.lineage)

    def _solver(self, evidence: Evidence) -> VarPro:
        """Without structure every column of a dense Jacobian costs a pass through the model: CG from the start."""
        return self.solver if evidence.chain is not None else replace(self.solver, dense_limit=0)

    def _objective(
        self, evidence: Evidence, ground: Ground, part: Part | None, smoothing: float | None = None
    ) -> Objective:
        box = evidence.input.box()
        terms = self.priors if box is None or self.box == 0 else (*self.priors, Box(*box, self.box))
        equation = self.equation.bind(evidence, ground.space, ground.decay, smoothing, part)
        if equation.energy == 0:
            raise MissingEvidence(
                f"attack {self.name!r} needs layers that changed in training, but those it uses did not; use"
                " all layers"
            )
        return Objective(equation, ground.space, terms)

    def _one_at_a_time(
        self,
        single: Single,
        ground: Ground,
        part: Part | None,
        objective: Objective,
        generator: torch.Generator,
        clock: Clock,
        begin: Tensor,
    ) -> tuple[tuple[int, float, Point] | None, list[Solution[Point]]]:
        """Search, joint fit, and repair of candidates that the fit spoiled or the search missed.

        Returns the number of distinct samples, the negative loss and the point of the best round; and all solutions.
        """
        space, units = ground.space, None if part is None else part.units
        probe = space.random(64, ground.norm, generator)
        stages = single.stages(probe, units)
        last = stages.sought[-1]
        known = begin
        if ground.reduced and ground.first is not None:
            known = torch.cat([space.coordinates(ground.first.exclusive), begin])
        known = known[last.relative(known, probe) < self.search.accept] if len(known) else known
        told = partial(clock.tick, "joint fit")
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
            solution = single.fit(objective, z, units, self.solver, told)
            # The rank is the number of samples while it is below the input size: what is beyond it is spurious.
            trimmed = weakest_out(objective, solution.point, max(single.samples, self.samples or 0))
            if len(trimmed.z) < len(solution.point.z):
                solution = single.fit(objective, trimmed.z, units, self.solver, told)
            runs.append(solution)
            point = solution.point
            kept = stages.placed.distinct(point.z, probe) < self.search.accept
            missing = last.without(point.z).missing
            found = (int(kept.sum()), -point.loss, point)
            best = found if best is None else max(best, found, key=lambda entry: entry[:2])
            if clock.expired or (bool(kept.all()) and missing == 0):
                break
            known = point.z[kept]
        return best, runs

    def _report(
        self,
        evidence: Evidence,
        ground: Ground,
        objective: Objective,
        final: Solution[Point],
        runs: Sequence[Solution[Point]],
        lineage: Lineage | None,
        certificate: Certificate | None,
        notes: list[str],
        seed: int,
        clock: Clock,
    ) -> Reconstruction:
        point = final.point
        weight = importance(objective, point) / max(point.misfit, 1e-300)
        order = weight.argsort(descending=True)
        u = objective.space.expand(point.z[order]).view(-1, *evidence.input.shape)
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
            steps=sum(run.steps for run in [*runs, final]),
            seconds=clock.elapsed,
            seed=seed,
            trace=final.trace,
            assumed=tuple(notes),
            spectrum=() if ground.first is None else tuple(ground.first.spectrum.tolist()),
            rank=None if ground.first is None or ground.first.flat else ground.first.rank,
            certificate=None if certificate is None else certificate.take(order),
            expected=self.samples,
            ambiguity=ambiguity(evidence, self.equation.layers, self.samples, ground),
            lineage=None if lineage is None else lineage.take(order, 0),
        )


def _rows(start: Tensor | None, evidence: Evidence) -> Tensor:
    """Model inputs to start from, [k, d] in float64; none if none are given."""
    size = evidence.input.size
    if start is None:
        return torch.zeros(0, size).double()
    rows = torch.as_tensor(start).double()
    if (rows.numel() and rows[0].numel() != size) or not bool(rows.isfinite().all()):
        raise ExhumeError(
            f"start must be finite model inputs of {size} features each, but has the shape {tuple(rows.shape)}"
            f"{'' if bool(rows.isfinite().all()) else ' and holds NaN or infinity'}; give [k, {size}]"
        )
    return rows.reshape(-1, size)
