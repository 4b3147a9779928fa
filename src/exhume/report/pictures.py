"""Pictures of a report: samples as PNG data, curves as inline SVG that takes its colours from the page."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from exhume.lineage import START
from exhume.report.data import SPECTRUM_LIMIT, TRACE_LIMIT, LifeResult, LineageResult, kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# matplotlib is given colours that no chart needs, and the page's own replace them afterwards.
PAGE_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--line)",
    "#040404": "var(--accent)",
}
INK, MUTED, LINE, ACCENT = PAGE_COLOURS
WIDTH, HEIGHT = 3.7, 2.5  # inches
LEAST_ERROR = 1e-6  # an error of zero has no place on a log axis
NOISE = 1e-18  # relative size below which a singular value is an artefact of the decomposition


def png(image: Tensor, low: float, high: float) -> str:
    """Return a data URI of one image, pixel for pixel.

    Args:
        image: [h, w], [1, h, w] or [3, h, w]; not-a-number is drawn as `low`.
        low: value drawn black.
        high: value drawn white (or full colour).
    """
    from matplotlib.image import imsave

    unit = ((image.double() - low) / ((high - low) or 1.0)).nan_to_num(nan=0.0).clamp(0.0, 1.0)
    pixels = unit.reshape(-1, *unit.shape[-2:]).permute(1, 2, 0)  # [h, w, c]
    levels = (pixels.expand(-1, -1, 3) * 255).round().byte().numpy()
    buffer = io.BytesIO()
    imsave(buffer, levels, format="png", metadata={"Software": "exhume"})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def loss_chart(trace: Sequence[float | None], length: int, key: str) -> str | None:
    """Draw the loss of each step; None if there is nothing to draw.

    Args:
        trace: thinned losses.
        length: their number before thinning.
        key: a word that no other chart of the page has.
    """
    points = _positive(trace, kept(length, TRACE_LIMIT), first=0)
    if not points:
        return None
    figure, axes = _axes("step", "loss")
    axes.plot(*zip(*points, strict=True), color=INK, linewidth=1.4, marker="o" if len(points) == 1 else None)
    _log_y(axes, [loss for _, loss in points])
    return _svg(figure, key)


def spectrum_chart(spectrum: Sequence[float | None], length: int, rank: int | None, key: str) -> str | None:
    """Draw singular values in descending order and the rank read off them; None if there is nothing to draw.

    Args:
        spectrum: thinned singular values.
        length: their number before thinning.
        rank: of the matrix, if it shows one.
        key: a word that no other chart of the page has.
    """
    points = _positive(spectrum, kept(length, SPECTRUM_LIMIT), first=1)
    if not points:
        return None
    figure, axes = _axes("number of the singular value", "singular value")
    axes.plot(*zip(*points, strict=True), color=INK, linewidth=0, marker=".", markersize=4)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    _log_y(axes, [value for _, value in points])
    axes.set_ylim(bottom=max(axes.get_ylim()[0], NOISE * max(value for _, value in points)))
    if rank:
        axes.axvline(rank + 0.5, color=ACCENT, linewidth=1.2)
        axes.annotate(
            f"rank {rank}",
            (rank + 0.5, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            color=ACCENT,
            va="top",
        )
    return _svg(figure, key)


def error_chart(
    train: Sequence[float], control: Sequence[float], thresholds: tuple[float, float], key: str
) -> str | None:
    """Draw the errors of training and control rows, best first; None if there is nothing to draw.

    Args:
        train: error of each training row that has a candidate.
        control: error of each control row that has one.
        thresholds: of a close match and of a match.
        key: a word that no other chart of the page has.
    """
    if not train and not control:
        return None
    figure, axes = _axes("rows, best first", "relative error")
    for threshold, word in zip(thresholds, ("close", "match"), strict=True):
        axes.axhline(threshold, color=LINE, linewidth=1)
        axes.annotate(word, (1.02, threshold), xycoords=("axes fraction", "data"), color=MUTED, va="center")
    _sorted_curve(axes, train, ACCENT, "o", "training rows")
    _sorted_curve(axes, control, MUTED, "x", "control rows")
    _log_y(axes, [max(error, LEAST_ERROR) for error in (*train, *control, *thresholds)])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, labelcolor=INK, borderpad=0)
    return _svg(figure, key)


def lineage_chart(lineage: LineageResult | None, key: str) -> str | None:
    """Draw the life of every candidate as a line from birth to end, tied to its parent; None without a lineage.

    Args:
        lineage: who was born of whom, at which solver step.
        key: a word that no other chart of the page has.
    """
    if lineage is None or not lineage.lives:
        return None
    figure, axes = _axes("solver step", "candidate")
    order = _family_order(lineage.lives)
    place = {candidate: i for i, candidate in enumerate(order)}
    moves = list(dict.fromkeys(life.move for life in lineage.lives if life.move != START))
    for life in lineage.lives:
        y, end = place[life.candidate], lineage.steps if life.ended is None else life.ended
        colour = INK if life.ended is None else LINE
        axes.plot([life.born, end], [y, y], color=colour, linewidth=1)
        if life.parent is not None:
            axes.plot([life.born] * 2, [place[life.parent], y], color=LINE, linewidth=0.7)
    for move, marker in zip(moves, itertools.cycle("o^sDvP")):
        born = [(life.born, place[life.candidate]) for life in lineage.lives if life.move == move]
        axes.plot(
            *zip(*born, strict=True), color=ACCENT, marker=marker, markersize=3, linewidth=0, label=move
        )
    axes.yaxis.set_major_locator(_integers())
    if moves:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, labelcolor=INK, borderpad=0
        )
    return _svg(figure, key)


def _family_order(lives: Sequence[LifeResult]) -> list[int]:
    """Candidates with their descendants beside them."""
    children: dict[int | None, list[int]] = {}
    for life in lives:
        children.setdefault(life.parent, []).append(life.candidate)
    order: list[int] = []
    todo = children.get(None, [])[::-1]
    while todo:
        one = todo.pop()
        order.append(one)
        todo += children.get(one, [])[::-1]
    return order


def _sorted_curve(axes: Axes, errors: Sequence[float], colour: str, marker: str, name: str) -> None:
    best = sorted(max(error, LEAST_ERROR) for error in errors)
    ranks = range(1, len(best) + 1)
    axes.plot(ranks, best, color=colour, marker=marker, markersize=3.5, linewidth=1, label=name)


def _positive(values: Sequence[float | None], index: Sequence[int], first: int) -> list[tuple[int, float]]:
    """Points that a log axis can show, numbered from `first`."""
    return [(i + first, v) for i, v in zip(index, values, strict=True) if v is not None and v > 0]


def _integers() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=MUTED)
    axes.set_ylabel(y, color=MUTED)
    axes.xaxis.set_major_locator(_integers())
    axes.tick_params(which="both", color=LINE, labelcolor=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    return figure, axes


def _log_y(axes: Axes, values: Sequence[float]) -> None:
    """Switch to a log scale, with plain numbers at the ticks unless there are too many decades for them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    decades = math.log10(max(values) / min(values))
    if decades < 4:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1 else (1.0, 3.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure, key: str) -> str:
    """Return an <svg> element that HTML can hold: page fonts and colours, ids of its own, no namespace."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):  # letters stay letters
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r'((?<=\bid=")|(?<=href="#)|(?<=url\(#))', f"{key}-", text)
    for colour, variable in PAGE_COLOURS.items():
        text = text.replace(colour, variable)
    return text
