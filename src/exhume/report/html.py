"""The report as one offline page: no script, no resource outside the file, every name escaped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from exhume.reconstruction import Reconstruction
from exhume.report.data import AmbiguityResult, AttackResult, Group, Report
from exhume.report.gallery import Gallery, control_errors, gallery
from exhume.report.pictures import error_chart, lineage_chart, loss_chart, spectrum_chart
from exhume.truth import Truth

if TYPE_CHECKING:
    from jinja2 import Template

VERDICTS = {  # class in the style sheet, headline
    "leak": ("leak", "Leak: training rows can be recovered from these weights."),
    "no evidence": ("no-evidence", "No evidence of leakage with these attacks."),
    "inconclusive": ("inconclusive", "Inconclusive: this run cannot tell."),
}
UNJUDGED = ("unscored", "Not judged: matches were counted, but no policy was applied.")
UNSCORED = ("unscored", "Not scored: no truth was given.")
COLUMNS = ("train", "control", "random", "mean_image")


@dataclass(frozen=True)
class Section:
    """One attack on the page; charts are not escaped: they hold only numbers and words of this package.

    Args:
        result: its entry in the report.
        gallery: its candidates, None if it failed.
        loss: chart of the loss of each step.
        spectrum: chart of the singular values of the first-layer change.
        errors: chart of the errors of training and control rows.
        lineage: chart of where the candidates came from.
    """

    result: AttackResult
    gallery: Gallery | None
    loss: str | None
    spectrum: str | None
    errors: str | None
    lineage: str | None

    @property
    def groups(self) -> tuple[Group, ...]:
        """Scores of training rows, control rows, random candidates and mean, side by side."""
        matched = self.result.matched
        return () if matched is None else tuple(getattr(matched, name) for name in COLUMNS)


def render(
    report: Report,
    reconstructions: Mapping[str, Reconstruction],
    *,
    truth: Truth | None = None,
    include_images: bool = False,
) -> str:
    """Return the page.

    Args:
        report: what it tells.
        reconstructions: by name of the attack; one that failed has none.
        truth: for the curve of control errors, and for real rows beside the candidates.
        include_images: show those rows.
    """
    sections = tuple(
        _section(i, result, report, reconstructions.get(result.name), truth, include_images)
        for i, result in enumerate(report.attacks)
    )
    scored = any(result.matched is not None for result in report.attacks)
    style, headline = VERDICTS[report.verdict] if report.verdict else UNJUDGED if scored else UNSCORED
    return _template().render(
        report=report,
        sections=sections,
        style=style,
        headline=headline,
        scored=scored,
        row_word="image" if any(s.gallery is not None and s.gallery.images for s in sections) else "row",
    )


def _section(
    index: int,
    result: AttackResult,
    report: Report,
    found: Reconstruction | None,
    truth: Truth | None,
    include_images: bool,
) -> Section:
    errors = None
    if result.matched is not None:
        train = [sample.error for sample in result.per_sample if sample.error is not None]
        control = () if truth is None or found is None else control_errors(found, truth)
        group = result.matched.train
        errors = error_chart(train, control, (group.close_threshold, group.threshold), f"errors{index}")
    shown = truth if include_images else None
    return Section(
        result=result,
        gallery=None if found is None else gallery(found, result, report.target, shown),
        loss=loss_chart(result.trace, result.trace_length, f"loss{index}"),
        spectrum=spectrum_chart(result.spectrum, result.spectrum_length, result.rank, f"spectrum{index}"),
        errors=errors,
        lineage=lineage_chart(result.lineage, f"lineage{index}"),
    )


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("exhume.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"number": _number, "duration": _duration, "count": _count, "shape": _shape, "gauge": _gauge}
    environment.filters |= filters
    return environment.get_template("report.html.j2")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _count(value: int) -> str:
    return f"{value:,}"


def _shape(value: tuple[int, ...]) -> str:
    return " × ".join(map(str, value)) or "scalar"


def _gauge(value: AmbiguityResult | None) -> str:
    """What is forgiven, in words."""
    return " and ".join(name for name in ("sign", "scale") if getattr(value, name, False)) or "ambiguity"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
