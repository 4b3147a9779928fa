"""The report as plain data: what report.json holds, and how it is read back."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from exhume.errors import ExhumeError

Outcome = Literal["leak", "no evidence", "inconclusive"]

TRACE_LIMIT, SPECTRUM_LIMIT = 500, 1000  # values kept of a loss curve and of a spectrum


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: both become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encodable(value: object) -> object:
    """A path may hold bytes that no UTF-8 file can: they become question marks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Text = Annotated[str, BeforeValidator(_encodable)]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Layer(_Plain):
    """One parameter tensor of the audited model.

    Args:
        name: its key in the state dict.
        shape: its shape.
        parameters: number of entries.
    """

    name: Text
    shape: tuple[int, ...]
    parameters: int


class Target(_Plain):
    """The audited model.

    Args:
        parameters: number of parameters.
        layers: one line for each parameter tensor.
        activation: between dense layers; None for a model that is no plain dense chain.
        input_shape: shape of one sample.
        low: smallest value a feature can take, if known.
        high: largest.
        features: names of the columns of a table, or empty.
        outputs: number of outputs.
        dtype: the coarsest dtype among the stored weights.
        relative_change: |theta_f - theta_0| / |theta_0|, None without the initial weights.
    """

    parameters: int
    layers: tuple[Layer, ...]
    activation: Text | None
    input_shape: tuple[int, ...]
    low: Number
    high: Number
    features: tuple[Text, ...]
    outputs: int
    dtype: Text
    relative_change: Number


class Knowledge(_Plain):
    """One thing an attacker may know.

    Args:
        item: what.
        known: whether the attacker of this report knew it.
        detail: a phrase with the value, or with what was done without it.
    """

    item: Text
    known: bool
    detail: Text


class CertificateResult(_Plain):
    """Evidence of recovery that uses no truth.

    Args:
        recovered: number of candidates certified.
        false_rate: expected share of false certificates.
        scores: score of each candidate.
        certified: whether it passes.
        error_estimate: expected relative L2 error.
        notes: what the certificate rests on, one sentence each.
    """

    recovered: int
    false_rate: Number
    scores: tuple[Number, ...]
    certified: tuple[bool, ...]
    error_estimate: tuple[Number, ...]
    notes: tuple[Text, ...]


class GaugeGroup(_Plain):
    """The count with a declared ambiguity forgiven; fields as in `exhume.matching.GaugeScore`."""

    count: int
    close: int
    median: Number


class Group(_Plain):
    """How many of n rows were matched; fields as in `exhume.matching.Score`."""

    n: int
    count: int
    close: int
    median: Number
    metric: Text
    threshold: float
    close_threshold: float
    ssim_count: int | None
    ssim_threshold: float
    distinct: int | None = None
    distinct_count: int | None = None
    gauge: GaugeGroup | None = None


class MatchedResult(_Plain):
    """The score of one attack beside its control and its nulls.

    Args:
        train: candidates against the training rows.
        control: the same candidates against rows the model never saw.
        random: random candidates against the training rows.
        mean_image: the public mean against the training rows.
        centred_by: what was subtracted before distances were taken.
        drawn: the same candidates against as many training rows as there are control rows, where those are fewer.
    """

    train: Group
    control: Group
    random: Group
    mean_image: Group
    centred_by: Text
    drawn: Group | None = None


class AmbiguityResult(_Plain):
    """What the equations of an attack cannot tell of a sample; fields as in `exhume.ambiguity.Ambiguity`."""

    sign: bool
    scale: bool
    reasons: tuple[Text, ...]


class Sample(_Plain):
    """One candidate; without truth, `truth`, `error` and `ssim` are None.

    Args:
        candidate: its index, most important first.
        truth: index of the training row assigned to it, if any; a match only where `error` is below the
            threshold.
        error: relative L2 distance of the two.
        ssim: their structural similarity, images only.
        importance: relative rise of the misfit without it.
        label: guessed label, one number an output.
        score: of its certificate, if there is one.
        certified: whether it is certified.
    """

    candidate: int
    truth: int | None
    error: Number
    ssim: Number
    importance: Number
    label: tuple[Number, ...]
    score: Number
    certified: bool | None


class LifeResult(_Plain):
    """One candidate from its birth to its end; fields as in `exhume.lineage.Life`."""

    candidate: int
    parent: int | None
    born: int
    move: Text
    ended: int | None


class LineageResult(_Plain):
    """Where the candidates of an attack that moved them came from.

    Args:
        ids: number of each candidate, most important first.
        lives: every candidate there ever was, in order of birth.
        steps: solver steps until the end.
        cost: candidate-steps, with what the moves took.
    """

    ids: tuple[int, ...]
    lives: tuple[LifeResult, ...]
    steps: int
    cost: int


class AttackResult(_Plain):
    """What one attack did; one that failed has an `error` and no numbers.

    Args:
        name: of the attack, unique in a report.
        status: how it ended, in a word; "failed" if it raised an error.
        reason: the same, as a sentence.
        seconds: wall time.
        steps: solver steps.
        loss: misfit plus priors.
        misfit: share of the target that the candidates do not explain.
        candidates: their number.
        assumed: what the result rests on, one sentence each.
        trace: loss after each step, thinned to `TRACE_LIMIT`.
        trace_length: number of losses before thinning.
        spectrum: singular values of the first-layer change, thinned to `SPECTRUM_LIMIT`.
        spectrum_length: number of singular values before thinning.
        rank: of the first-layer change, if it shows one.
        certificate: evidence without truth, if the attack gives any.
        matched: score against the truth, None without it.
        per_sample: one entry for each candidate.
        error: message of the error that ended the attack.
        ambiguity: what its equations cannot tell of a sample, if it says so.
        lineage: where its candidates came from, if they were moved.
    """

    name: Text
    status: Text
    reason: Text
    seconds: Number
    steps: int | None
    loss: Number
    misfit: Number
    candidates: int
    assumed: tuple[Text, ...]
    trace: tuple[Number, ...]
    trace_length: int
    spectrum: tuple[Number, ...]
    spectrum_length: int
    rank: int | None
    certificate: CertificateResult | None
    matched: MatchedResult | None
    per_sample: tuple[Sample, ...]
    error: Text | None
    ambiguity: AmbiguityResult | None = None
    lineage: LineageResult | None = None


class Report(_Plain):
    """One run of exhume on one model.

    Args:
        schema_version: of this layout.
        exhume_version: version of the package that wrote it.
        created: date (UTC).
        seed: of the random starts.
        command: command line to repeat the run, if there was one.
        digest: fingerprint of weights, rows and settings; empty if unknown.
        versions: of the interpreter and the libraries that the numbers depend on.
        verdict: None when nothing was audited.
        reasons: for the verdict, one sentence each.
        target: the audited model.
        knowledge: what the attacker was assumed to know.
        attacks: one entry for each attack, in the order they ran.
    """

    schema_version: Literal[1] = 1
    exhume_version: Text
    created: datetime.date
    seed: int
    command: Text | None
    digest: str = ""
    versions: dict[str, str]
    verdict: Outcome | None
    reasons: tuple[Text, ...]
    target: Target
    knowledge: tuple[Knowledge, ...]
    attacks: tuple[AttackResult, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [attack.name for attack in self.attacks]
        if len(set(names)) < len(names):
            raise ValueError(f"attacks must have different names, but are {', '.join(names)}")
        return self

    def to_json(self) -> str:
        """Return strict JSON: no NaN, no infinity."""
        return json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"


def read(path: str | Path) -> Report:
    """Read a report back.

    Args:
        path: a report.json.

    Raises:
        ExhumeError: the file cannot be read, is not strict JSON, or does not hold a report of this version.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise ExhumeError(
            f"{path} must be a report.json, but cannot be read ({error.strerror}); check the path"
        ) from error
    except ValueError as error:
        raise ExhumeError(
            f"{path} must be strict JSON, but is not ({error}); use the report.json that exhume wrote"
        ) from error
    try:
        return Report.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise ExhumeError(
            f"{path} must be a report of schema version 1, but {where} is wrong ({first['msg']});"
            " write it again with this version of exhume"
        ) from error


def kept(length: int, limit: int) -> tuple[int, ...]:
    """Return the indices that thinning a list to `limit` >= 2 values keeps: evenly spread, with both ends."""
    if length <= limit:
        return tuple(range(length))
    return tuple(round(i * (length - 1) / (limit - 1)) for i in range(limit))


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")
