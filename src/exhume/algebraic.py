"""The attack `algebra`: samples of polynomial two-layer networks in closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.algebra.examine import field_of, polynomial
from exhume.algebra.gauge import Gauged, fix
from exhume.algebra.recovery import Recovered, recover
from exhume.candidates import Candidates
from exhume.certificate import WITNESS, Certificate, certify
from exhume.clock import Clock, Observer
from exhume.equations.part import Part, split
from exhume.equations.span import Span
from exhume.errors import demand
from exhume.evidence import Evidence
from exhume.moves.prune import importance
from exhume.objective import Objective
from exhume.reconstruction import Reconstruction
from exhume.spaces import full
from exhume.survey import survey

CERTIFICATE = (
    "A certified candidate is determined by the weight equations (ranks, residual, stiffness), and passes the tests"
    " on held-out units as well; the calibration of the latter is that of the span attacks."
)


@dataclass(frozen=True)
class AlgebraAttack:
    """Recover samples from the change of weights, or from stationary weights, without search where ranks allow.

    Two recoveries on different parts of the hidden units: the first is reported, the second bears witness, and the
    units that the first did not use are predicted for the certificate.

    Args:
        name: shown in reports.
        samples: their number, if known.
        starts: random starts where the closed form does not suffice.
        held_out: share of the hidden units left out.
    """

    name: str = "algebra"
    samples: int | None = None
    starts: int = 20
    held_out: float = 0.2

    def missing(self, evidence: Evidence) -> tuple[str, ...]:
        """What the attack needs and the evidence lacks."""
        c = polynomial(evidence)
        if isinstance(c, str):
            return (c,)
        missing = []
        if len(c) <= 3:
            missing.append(
                f"an activation of degree 3 or more (degree {len(c) - 1} never determines the samples)"
            )
        if not any(evidence.moved(k) for k in evidence.final):
            missing.append("final weights that differ from the initial ones")
        return tuple(missing)

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
            seed: of slices and starts.
            budget: seconds after which no further start is made.
            observer: told about progress.

        Raises:
            MissingEvidence: the evidence lacks something; all gaps are named.
        """
        clock = Clock(budget, observer)
        parts = split(evidence, "all", self.held_out, seed)
        found, gauged = self._recover(evidence, None if parts is None else parts[0].units, seed, clock)
        clock.tick(f"closed form: {len(found.x)} samples", None)
        notes = [found.identifiability.reason, *gauged.said, f"certificate: {found.why}"]
        if len(gauged.u) == 0:
            return self._nothing(evidence, notes, seed, clock)
        witness = split(evidence, "all", self.held_out, seed + WITNESS)
        others = self._recover(
            evidence, None if witness is None else witness[0].units, seed + WITNESS, clock.part(0.5)
        )[1].u
        return self._report(evidence, found, gauged, others, parts, notes, seed, clock)

    def starts_for(self, evidence: Evidence, seed: int = 0) -> Tensor:
        """Recovered model inputs [s, d] from all units, as a start for other attacks; they need no certificate."""
        return self._recover(evidence, None, seed, Clock(None, None))[1].u

    def _recover(
        self, evidence: Evidence, units: Tensor | None, seed: int, clock: Clock
    ) -> tuple[Recovered, Gauged]:
        demand(self.name, self.missing(evidence))
        c = polynomial(evidence)
        assert not isinstance(c, str)
        field = field_of(evidence, units)
        found = recover([field], c, self.samples, seed, self.starts, lambda: clock.expired)
        odd = all(q % 2 for q, value in enumerate(c) if value)
        free = evidence.init is None and not evidence.recipe.weight_decay
        gauged = fix(evidence, found.x, field.affine, found.scaled, found.signed, odd, free)
        return found, gauged

    def _report(
        self,
        evidence: Evidence,
        found: Recovered,
        gauged: Gauged,
        others: Tensor,
        parts: tuple[Part, Part] | None,
        notes: list[str],
        seed: int,
        clock: Clock,
    ) -> Reconstruction:
        ground = survey(evidence)
        space = full(evidence.input.size)
        if ground.reduced:
            space = replace(ground.space, radius=None)
        span = Span(nodes=(1.0,) if evidence.init is None else (0.0, 0.5, 1.0))

        def objective(part: Part | None) -> Objective:
            return Objective(span.bind(evidence, space, ground.decay, None, part), space)

        everything = objective(None)
        z = space.coordinates(gauged.u)
        point = everything.at(z)
        certificate: Certificate | None = None
        if parts is not None:
            fit, held = (objective(part).equation for part in parts)
            certificate = certify(evidence, fit, held, z, everything, point, others)
            certificate = replace(
                certificate,
                certified=certificate.certified & found.certified,
                notes=(*certificate.notes, CERTIFICATE),
            )
        weight = importance(everything, point) / max(point.misfit, 1e-300)
        order = weight.argsort(descending=True)
        u = gauged.u[order].view(-1, *evidence.input.shape)
        first = ground.first
        return Reconstruction(
            attack=self.name,
            candidates=Candidates(evidence.input.decode(u), point.coef[order], evidence.output(u)),
            importance=weight[order],
            misfit=point.misfit,
            loss=point.loss,
            status="stopped" if clock.expired else "converged",
            reason=f"{found.identifiability.verdict}: {found.why}",
            steps=0 if found.fit is None else found.fit.evaluations,
            seconds=clock.elapsed,
            seed=seed,
            trace=(point.loss,),
            assumed=tuple([*ground.notes, *notes]),
            spectrum=() if first is None else tuple(first.spectrum.tolist()),
            rank=None if first is None or first.flat else first.rank,
            certificate=None if certificate is None else certificate.take(order),
            expected=self.samples,
        )

    def _nothing(self, evidence: Evidence, notes: list[str], seed: int, clock: Clock) -> Reconstruction:
        """No samples: how the run ended is a value."""
        empty = torch.zeros(0, dtype=torch.float64)
        return Reconstruction(
            attack=self.name,
            candidates=Candidates(
                empty.view(0, *(1 for _ in evidence.input.shape)).expand(0, *evidence.input.shape),
                empty.view(0, 1),
                empty.view(0, 1),
            ),
            importance=empty,
            misfit=1.0,
            loss=1.0,
            status="stopped" if clock.expired else "stalled",
            reason="The weight equations gave no samples.",
            steps=0,
            seconds=clock.elapsed,
            seed=seed,
            trace=(),
            assumed=tuple(notes),
            expected=self.samples,
        )
