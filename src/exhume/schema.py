"""The tables of a target file: every key typed, every unknown key an error, every problem told at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from torch import Tensor

from exhume.errors import TargetError, nearest
from exhume.functional import ACTIVATIONS

LOSSES = ("mse", "bce", "logistic", "cross-entropy", "hinge")
REDUCTIONS = ("mean", "sum")
LABELS = ("pm1", "01", "onehot", "index", "real")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "other")


class Table(BaseModel):
    """A table whose unknown keys, coercions, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


TableT = TypeVar("TableT", bound=Table)


def checked(table: type[TableT], values: Mapping[str, object], source: str, folder: Path) -> TableT:
    """Validate values against a table.

    Args:
        table: the table wanted.
        values: keys and values, as TOML gives them.
        source: what to call their origin in messages.
        folder: what file names in them are relative to.

    Raises:
        TargetError: all that is wrong, in one message.
    """
    try:
        return table.model_validate(values, context=folder)
    except ValidationError as error:
        problems = [_problem(table, details) for details in error.errors()]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise TargetError(f"{source} has {count}: {'; '.join(problems)}") from error


def _existing(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a file name, but is {value!r}")
    path = Path(str(info.context), value)
    if not path.is_file():
        raise ValueError(f"must be a file, but {value!r} does not exist in {info.context}")
    return path


def _one_of(names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be a known name, but is {value!r}, {nearest(value, names)}")
        return value

    return AfterValidator(check)


File = Annotated[Path, PlainValidator(_existing)]
Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class ModelTable(Table):
    """[model]: the weights, and how to build the module they belong to; files as absolute paths."""

    factory: str | None = None
    arch: Annotated[str, _one_of(("mlp",))] | None = None
    activation: Annotated[str, _one_of(tuple(ACTIVATIONS))] | None = None
    final: File
    init: File | None = None

    @field_validator("factory")
    @classmethod
    def _factory_file(cls, spec: str, info: ValidationInfo) -> str:
        source, _, name = spec.rpartition(":")
        if not source or not name:
            raise ValueError(f"must read 'file.py:callable' or 'package.module:callable', but is {spec!r}")
        if source.endswith(".py"):
            _existing(source, info)
        return spec

    @model_validator(mode="after")
    def _one_architecture(self) -> Self:
        if self.factory is None and self.arch is None:
            raise ValueError("must have factory = 'file.py:callable' or arch = 'mlp', but has neither")
        if self.factory is not None and self.arch is not None:
            raise ValueError("must have either factory or arch, but has both")
        if self.activation is not None and self.arch is None:
            raise ValueError("must have activation only beside arch = 'mlp', but has it beside factory")
        return self


class InputTable(Table):
    """[input]: shape and range of one sample, and what is done to it before the model sees it."""

    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    mean: Tensor | None = None
    scale: Tensor | None = None
    sample_norm: Positive | None = None

    @field_validator("shape", mode="plain")
    @classmethod
    def _positive(cls, value: Any) -> tuple[int, ...]:
        if (
            not isinstance(value, list | tuple)
            or not value
            or any(type(n) is not int or n < 1 for n in value)
        ):
            raise ValueError(f"must be a list of positive whole numbers, but is {value!r}")
        return tuple(value)

    @field_validator("high")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("low")
        if low is not None and not low < high:
            raise ValueError(f"must be above low = {low}, but is {high}")
        return high

    @field_validator("mean", "scale", mode="plain")
    @classmethod
    def _broadcastable(cls, value: Any, info: ValidationInfo) -> Tensor:
        tensor, shape = _numbers(value, info), info.data.get("shape")
        if shape is not None and not _broadcasts(tensor.shape, shape):
            raise ValueError(
                f"must broadcast to [input] shape {list(shape)}, but has shape {list(tensor.shape)}"
                " (one value a channel has shape [channels, 1, 1])"
            )
        if not tensor.isfinite().all() or (info.field_name == "scale" and (tensor == 0).any()):
            raise ValueError("must be finite and, for scale, nowhere zero, but is not")
        return tensor


class RecipeTable(Table):
    """[recipe]: what is known of the training run."""

    loss: Annotated[str, _one_of(LOSSES)] | None = None
    reduction: Annotated[str, _one_of(REDUCTIONS)] | None = None
    labels: Annotated[str, _one_of(LABELS)] | None = None
    optimizer: Annotated[str, _one_of(OPTIMIZERS)] | None = None
    lr: Positive | None = None
    steps: Count | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    batch_size: Count | None = None
    decay_share: tuple[tuple[str, Annotated[float, Field(ge=0)]], ...] | None = None


class DataTable(Table):
    """[data]: npz files with arrays x and y, for audits only; absolute paths."""

    train: File
    control: File


class AttackTable(Table):
    """[attack]: names of attacks (None: our own that apply), the number of training rows, if known, and moves."""

    names: list[str] | None = None
    samples: Count | None = None
    moves: Literal["none", "scaled", "published"] = "none"


class TargetFile(Table):
    """All tables of a target file."""

    model: ModelTable
    input: InputTable
    recipe: RecipeTable = RecipeTable()
    data: DataTable | None = None
    attack: AttackTable = AttackTable()


TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "input": InputTable,
    "recipe": RecipeTable,
    "data": DataTable,
    "attack": AttackTable,
}


def _problem(table: type[Table], details: ErrorDetails) -> str:
    """Say in one clause where a value is wrong, what was wanted and what was got."""
    names = [str(part) for part in details["loc"]]
    owner: type[Table] = table
    if table is TargetFile:
        owner = TABLES[names[0]] if len(names) > 1 else table
        names[0] = f"[{names[0]}]"
    where = " ".join(names)
    match details["type"]:
        case "extra_forbidden":
            return f"{where} is unknown, {nearest(str(details['loc'][-1]), owner.model_fields)}"
        case "missing":
            return f"{where} is missing"
        case "model_type":
            return f"{where} must be a table, but is {details['input']!r}"
        case "value_error":
            return f"{where} {details['ctx']['error']}"
    return f"{where} {details['msg'].replace('Input should', 'must')}, but is {details['input']!r}"


def _numbers(value: Any, info: ValidationInfo) -> Tensor:
    """Read a number, a nested list of numbers or a .npy file as float64."""
    wanted = "must be a number, a list of numbers or a .npy file"
    if not isinstance(value, str) and not _numeric(value):
        raise ValueError(f"{wanted}, but is {value!r}")
    source = _existing(value, info) if isinstance(value, str) else None
    try:
        array = value if source is None else np.load(source, allow_pickle=False)
        return torch.from_numpy(np.array(array, dtype=np.float64))
    except (OSError, EOFError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{wanted}, but {value!r} cannot be read ({error})") from error


def _numeric(value: Any) -> bool:
    return all(map(_numeric, value)) if isinstance(value, list) else type(value) in (int, float)


def _broadcasts(given: torch.Size, wanted: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(given, wanted) == torch.Size(wanted)
    except RuntimeError:
        return False
