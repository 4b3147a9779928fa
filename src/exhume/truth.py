"""What the owner has and an attacker lacks: training rows, and rows of the same kind the model never saw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exhume.errors import ExhumeError


@dataclass(frozen=True, eq=False)
class Truth:
    """Training rows, and control rows of the same kind that the model never saw; float64 on the CPU.

    Args:
        train: training rows in the owner's units (before mean and scale), [n, *shape]; arrays are converted.
        control: rows the model never saw, [k, *shape]; the first n stand against train, the rest centre
            distances where `public_mean` is not given.
        public_mean: mean over rows outside both, broadcastable to `shape`.
        train_label: labels of train, [n] or [n, C].
        control_label: labels of control, [k] or [k, C].
        public_scale: unit of each feature, broadcastable to `shape`; tables need it, or the feature with the
            largest numbers decides every match.
        removed: control rows taken out before, since they were training rows.
        train_group: label of the group of near-duplicates that each row of train belongs to, [n]; see
            `exhume.duplicates`. Without labels nothing is known of duplicates.
        control_group: the same of the first rows of control, at least of those that stand against train.

    Raises:
        ExhumeError: shapes disagree, values are not finite, or a control row occurs in train.
    """

    train: Tensor
    control: Tensor
    public_mean: Tensor | None = None
    train_label: Tensor | None = None
    control_label: Tensor | None = None
    public_scale: Tensor | None = None
    removed: int = 0
    train_group: Tensor | None = None
    control_group: Tensor | None = None

    def __post_init__(self) -> None:
        shape = torch.as_tensor(self.train).shape[1:]
        for name in ("train", "control"):
            object.__setattr__(self, name, _checked_rows(name, getattr(self, name), shape))
        for name in ("public_mean", "public_scale"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checked_public(name, getattr(self, name), shape))
        if self.public_scale is not None and (self.public_scale <= 0).any():
            raise ExhumeError(
                "public_scale must be positive, but has an entry <= 0; give constant features unit 1"
            )
        for name in ("train", "control"):
            label, rows = getattr(self, f"{name}_label"), len(getattr(self, name))
            if label is not None and len(label) != rows:
                raise ExhumeError(
                    f"{name}_label must hold one label for each of the {rows} {name} rows, but holds"
                    f" {len(label)}; check that samples and labels belong together"
                )
        for name, least in (("train", len(self.train)), ("control", min(len(self.train), len(self.control)))):
            group = getattr(self, f"{name}_group")
            if group is not None and len(group) < least:
                raise ExhumeError(
                    f"{name}_group must label at least {least} rows, but labels {len(group)}; make it anew with"
                    " exhume.duplicates.comparable"
                )
        seen = {row.numpy().tobytes() for row in self.train}
        both = sum(row.numpy().tobytes() in seen for row in self.control)
        if both:
            raise ExhumeError(
                f"control must hold rows the model never saw, but {both} of its {len(self.control)} rows"
                " occur in train; remove them"
            )


def _checked_rows(name: str, rows: Tensor | np.ndarray, shape: torch.Size) -> Tensor:
    rows = torch.as_tensor(rows)
    if not len(rows):
        raise ExhumeError(
            f"{name} must hold at least one row, but is empty; an audit needs both train and control"
        )
    if rows.shape[1:] != shape:
        raise ExhumeError(
            f"{name} must have rows of shape {tuple(shape)} as train does, but has {tuple(rows.shape[1:])};"
            " check that the files belong together"
        )
    return _finite(name, rows)


def _checked_public(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    try:
        return _finite(name, value.broadcast_to(shape))
    except RuntimeError as error:
        raise ExhumeError(
            f"{name} must be broadcastable to one row of shape {tuple(shape)}, but has {tuple(value.shape)};"
            " give a scalar or one value for each feature"
        ) from error


def _finite(name: str, value: Tensor) -> Tensor:
    if not torch.isfinite(value).all():
        raise ExhumeError(f"{name} must be finite, but holds NaN or infinity; fill or drop missing values")
    return value.detach().to("cpu", torch.float64)
