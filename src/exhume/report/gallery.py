"""The gallery: each recovered candidate, and beside it the nearest real rows where they may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.matching import match
from exhume.metrics import is_image
from exhume.reconstruction import Reconstruction
from exhume.report.data import AttackResult, Sample, Target
from exhume.report.pictures import png
from exhume.truth import Truth

IMAGE_CARDS, TABLE_CARDS, FEATURES = 60, 12, 40  # what a reader still looks at; the tensors hold the rest
SMALL = 100  # pixels: below this an enlarged image shows its pixels instead of a blur


@dataclass(frozen=True)
class Picture:
    """One image: a data URI, and what it shows."""

    uri: str
    alt: str


@dataclass(frozen=True)
class Value:
    """One feature of a table: its name, the recovered value, and that of the training row, if shown."""

    feature: str
    recovered: str
    train: str | None


@dataclass(frozen=True)
class Card:
    """One candidate.

    Args:
        number: counted from 1, most important first.
        matched: whether its training row is within the threshold; None without truth.
        certified: whether it is certified; None without a certificate.
        caption: error and certificate, in words.
        pictures: recovered, nearest training row, nearest control row; images only.
        values: features; anything but images.
    """

    number: int
    matched: bool | None
    certified: bool | None
    caption: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """The candidates of one attack.

    Args:
        cards: the most important candidates.
        hidden: how many more there are.
        hidden_features: how many features of each card are left out.
        images: whether the candidates are drawn.
        beside: whether real rows are shown.
        small: whether the images are so small that their pixels should show.
    """

    cards: tuple[Card, ...]
    hidden: int
    hidden_features: int
    images: bool
    beside: bool
    small: bool


def gallery(found: Reconstruction, result: AttackResult, target: Target, shown: Truth | None) -> Gallery:
    """Lay out the candidates of one attack.

    Args:
        found: the candidates.
        result: the same attack in the report.
        target: gives range and names of the features.
        shown: rows to show beside them; None shows no real row.
    """
    x = found.x.detach().to("cpu", torch.float64)
    shape = tuple(x.shape[1:])
    images = is_image(shape)
    samples = result.per_sample[: IMAGE_CARDS if images else TABLE_CARDS]
    x = x[: len(samples)]
    threshold = None if result.matched is None else result.matched.train.threshold
    beside = _rows_beside(x, samples, threshold, shown) if shown is not None else ()
    content = _pictures(x, beside, target) if images else _values(x, beside, target)
    cards = tuple(
        Card(
            number=sample.candidate + 1,
            matched=None if threshold is None else _is_match(sample, threshold),
            certified=sample.certified,
            caption=_caption(sample, threshold),
            pictures=pictures,
            values=values,
        )
        for sample, (pictures, values) in zip(samples, content, strict=True)
    )
    return Gallery(
        cards=cards,
        hidden=len(result.per_sample) - len(samples),
        hidden_features=0 if images else max(0, x[0].numel() - FEATURES) if len(x) else 0,
        images=images,
        beside=shown is not None,
        small=images and max(shape[-2:]) < SMALL,
    )


def control_errors(found: Reconstruction, truth: Truth) -> tuple[float, ...]:
    """Return the error of each control row that has a candidate: a match with train and control exchanged.

    Rows are flattened, since their structural similarity is not wanted here. The centre stays what it was:
    the public mean, or that of the control rows which stand against no training row.
    """
    n = len(truth.train)
    used, spare = truth.control[:n], truth.control[n:]
    centre = spare.mean(0) if truth.public_mean is None and len(spare) else truth.public_mean
    exchanged = Truth(
        train=used.flatten(1),
        control=truth.train[: len(used)].flatten(1),
        public_mean=_flat(centre),
        public_scale=_flat(truth.public_scale),
    )
    rows = match(found.x.flatten(1), exchanged).rows
    return tuple(row.error for row in rows if row.error is not None)


def _flat(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.flatten()


def _is_match(sample: Sample, threshold: float) -> bool:
    return sample.error is not None and sample.error < threshold


def _rows_beside(
    x: Tensor, samples: Sequence[Sample], threshold: float | None, truth: Truth
) -> tuple[Tensor, Tensor]:
    """The matched training row of each candidate, else the nearest; and the nearest control row."""
    scale = torch.ones((), dtype=x.dtype) if truth.public_scale is None else truth.public_scale

    def nearest(rows: Tensor) -> Tensor:
        finite = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return torch.cdist((finite / scale).flatten(1), (rows / scale).flatten(1)).argmin(1)

    train = nearest(truth.train)
    for j, sample in enumerate(samples):
        if threshold is not None and sample.truth is not None and _is_match(sample, threshold):
            train[j] = sample.truth
    return truth.train[train], truth.control[nearest(truth.control)]


Content = list[tuple[tuple[Picture, ...], tuple[Value, ...]]]


def _pictures(x: Tensor, beside: tuple[Tensor, ...], target: Target) -> Content:
    finite = x[x.isfinite()]
    low = target.low if target.low is not None else float(finite.min()) if len(finite) else 0.0
    high = target.high if target.high is not None else float(finite.max()) if len(finite) else 1.0
    names = ("recovered candidate", "nearest training row", "nearest control row")

    def row(j: int) -> tuple[Picture, ...]:
        return tuple(
            Picture(png(images[j], low, high), f"{name} {j + 1}" if images is x else name)
            for name, images in zip(names, (x, *beside), strict=False)
        )

    return [(row(j), ()) for j in range(len(x))]


def _values(x: Tensor, beside: tuple[Tensor, ...], target: Target) -> Content:
    flat = x.flatten(1)[:, :FEATURES]
    train = beside[0].flatten(1) if beside else None
    names = target.features or tuple(f"feature {k + 1}" for k in range(flat.shape[1]))

    def row(j: int) -> tuple[Value, ...]:
        return tuple(
            Value(name, f"{flat[j, k]:.4g}", None if train is None else f"{train[j, k]:.4g}")
            for k, name in enumerate(names[: flat.shape[1]])
        )

    return [((), row(j)) for j in range(len(x))]


def _caption(sample: Sample, threshold: float | None) -> tuple[str, ...]:
    words = []
    if threshold is not None:
        words.append(f"error {sample.error:.2g}" if _is_match(sample, threshold) else "no match")
    if sample.certified is not None:
        words.append("certified" if sample.certified else "not certified")
    if not words and sample.importance is not None:
        words.append(f"importance {sample.importance:.2g}")
    return tuple(words)
