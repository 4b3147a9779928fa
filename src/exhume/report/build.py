"""From reconstructions and matches to plain report data; nothing but numbers, names and sentences passes."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from exhume.errors import ExhumeError
from exhume.evidence import Evidence
from exhume.matching import Matches, Score
from exhume.reconstruction import Reconstruction
from exhume.regime import laziness
from exhume.report.data import (
    SPECTRUM_LIMIT,
    TRACE_LIMIT,
    AmbiguityResult,
    AttackResult,
    CertificateResult,
    Group,
    Layer,
    LifeResult,
    LineageResult,
    MatchedResult,
    Outcome,
    Report,
    Sample,
    Target,
    kept,
)
from exhume.report.knowledge import knowledge

LIBRARIES = ("torch", "numpy", "scipy")


def attack_result(found: Reconstruction, matches: Matches | None = None) -> AttackResult:
    """Describe what an attack found.

    Args:
        found: its reconstruction.
        matches: of the same candidates with the truth, if there is one.
    """
    return AttackResult(
        name=found.attack,
        status=found.status,
        reason=found.reason,
        seconds=found.seconds,
        steps=found.steps,
        loss=found.loss,
        misfit=found.misfit,
        candidates=len(found.candidates),
        assumed=found.assumed,
        trace=_thinned(found.trace, TRACE_LIMIT),
        trace_length=len(found.trace),
        spectrum=_thinned(found.spectrum, SPECTRUM_LIMIT),
        spectrum_length=len(found.spectrum),
        rank=found.rank,
        certificate=_certificate(found),
        matched=None if matches is None else _matched(matches),
        per_sample=_samples(found, matches),
        error=None,
        ambiguity=_ambiguity(found),
        lineage=_lineage(found),
    )


def failed_attack(name: str, error: Exception | str, seconds: float | None = None) -> AttackResult:
    """Describe an attack that raised an error; it stays in the report beside those that ran.

    Args:
        name: of the attack.
        error: what it raised, or the message.
        seconds: wall time until then, if measured.
    """
    message = str(error) or type(error).__name__
    return AttackResult(
        name=name,
        status="failed",
        reason="The attack ended with an error, so it says nothing about the model.",
        seconds=seconds,
        steps=None,
        loss=None,
        misfit=None,
        candidates=0,
        assumed=(),
        trace=(),
        trace_length=0,
        spectrum=(),
        spectrum_length=0,
        rank=None,
        certificate=None,
        matched=None,
        per_sample=(),
        error=message,
    )


def build(
    evidence: Evidence,
    attacks: Sequence[AttackResult],
    *,
    seed: int,
    verdict: Outcome | None = None,
    reasons: Sequence[str] = (),
    samples: int | None = None,
    features: Sequence[str] = (),
    command: str | None = None,
    digest: str = "",
    created: datetime.date | None = None,
) -> Report:
    """Put a report together.

    Args:
        evidence: what the attacks were given.
        attacks: what each of them did, failed ones included.
        seed: of the run.
        verdict: None when nothing was audited.
        reasons: for the verdict, one sentence each.
        samples: number of training rows that the attacks were told, if any.
        features: names of the columns of a table.
        command: command line to repeat the run.
        digest: fingerprint of weights, rows and settings.
        created: by default today (UTC).

    Raises:
        ExhumeError: there is not one name for each feature.
        ValueError: two attacks have the same name.
    """
    if features and len(features) != evidence.input.size:
        raise ExhumeError(
            f"features must name each of the {evidence.input.size} features of a sample, but has"
            f" {len(features)} names; correct them, or leave them out"
        )
    return Report(
        exhume_version=_version("exhume"),
        created=created or datetime.datetime.now(datetime.UTC).date(),
        seed=seed,
        command=command,
        digest=digest,
        versions={"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
        verdict=verdict,
        reasons=tuple(reasons),
        target=_target(evidence, features),
        knowledge=knowledge(evidence, samples),
        attacks=tuple(attacks),
    )


def _target(evidence: Evidence, features: Sequence[str]) -> Target:
    layers = tuple(
        Layer(name=name, shape=tuple(p.shape), parameters=p.numel()) for name, p in evidence.final.items()
    )
    return Target(
        parameters=sum(layer.parameters for layer in layers),
        layers=layers,
        activation=None if evidence.chain is None else evidence.chain.activation,
        input_shape=tuple(evidence.input.shape),
        low=evidence.input.low,
        high=evidence.input.high,
        features=tuple(features),
        outputs=evidence.outputs,
        dtype=str(evidence.stored_dtype).removeprefix("torch."),
        relative_change=laziness(evidence),
    )


def _ambiguity(found: Reconstruction) -> AmbiguityResult | None:
    told = found.ambiguity
    return None if told is None else AmbiguityResult(sign=told.sign, scale=told.scale, reasons=told.reasons)


def _lineage(found: Reconstruction) -> LineageResult | None:
    told = found.lineage
    if told is None:
        return None
    lives = tuple(LifeResult(**asdict(life)) for life in told.lives)
    return LineageResult(ids=told.ids, lives=lives, steps=found.steps, cost=told.steps(found.steps))


def _certificate(found: Reconstruction) -> CertificateResult | None:
    certificate = found.certificate
    if certificate is None:
        return None
    return CertificateResult(
        recovered=certificate.recovered,
        false_rate=certificate.false_rate,
        scores=_list(certificate.score),
        certified=tuple(certificate.certified.tolist()),
        error_estimate=_list(certificate.error_estimate),
        notes=certificate.notes,
    )


def _matched(matches: Matches) -> MatchedResult:
    return MatchedResult(
        train=_group(matches.train),
        control=_group(matches.control),
        random=_group(matches.random),
        mean_image=_group(matches.mean_image),
        centred_by=matches.centred_by,
        drawn=None if matches.drawn is None else _group(matches.drawn),
    )


def _group(score: Score) -> Group:
    return Group(**asdict(score))


def _samples(found: Reconstruction, matches: Matches | None) -> tuple[Sample, ...]:
    """One entry a candidate; errors of single features stay out, as with it they would give the row away."""
    rows = {} if matches is None else {row.candidate: row for row in matches.rows}
    certificate = found.certificate

    def sample(j: int) -> Sample:
        row = rows.get(j)
        return Sample(
            candidate=j,
            truth=None if row is None else row.truth,
            error=None if row is None else row.error,
            ssim=None if row is None else row.ssim,
            importance=float(found.importance[j]),
            label=_list(found.candidates.label[j]),
            score=None if certificate is None else float(certificate.score[j]),
            certified=None if certificate is None else bool(certificate.certified[j]),
        )

    return tuple(sample(j) for j in range(len(found.candidates)))


def _list(values: Tensor) -> tuple[float, ...]:
    return tuple(values.double().flatten().tolist())


def _thinned(values: Sequence[float], limit: int) -> tuple[float, ...]:
    return tuple(values[i] for i in kept(len(values), limit))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
