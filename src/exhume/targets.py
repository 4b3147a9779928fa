"""Targets: what one target file names, as evidence for attacks and as truth for audits."""

from __future__ import annotations

import tomllib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exhume.checkpoints import fingerprint, load_factory, load_state, rebuild_mlp
from exhume.errors import ExhumeError, TargetError
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.schema import AttackTable, DataTable, ModelTable, TargetFile, checked
from exhume.truth import Truth


@dataclass(frozen=True, eq=False)
class Target:
    """A target file that was read and found in order.

    Args:
        path: the file itself.
        model: where weights and architecture are.
        input: what is known of the inputs.
        recipe: what is known of the training run.
        data: files of training and control rows, for audits only.
        attack: which attacks to run, and the number of training rows if known.
    """

    path: Path
    model: ModelTable
    input: InputSpec
    recipe: Recipe
    data: DataTable | None
    attack: AttackTable

    def evidence(self, *, trust_pickle: bool = False) -> Evidence:
        """Load weights and architecture, and nothing of the data.

        Args:
            trust_pickle: allow weight files to run code when they are read.

        Raises:
            CheckpointError: a weight file cannot be read or does not fit the model.
            TargetError: the factory cannot be found, or init and final hold the same weights.
            ModelError: the factory fails, or the model breaks an assumption of every attack.
        """
        source = self.model
        if source.factory is None:
            final = load_state(source.final, trust_pickle=trust_pickle)
            model = rebuild_mlp(final, source.activation or "relu", features=self.input.size)
        else:
            model = load_factory(source.factory, self.path.parent).cpu()
            final = load_state(source.final, trust_pickle=trust_pickle, wanted=model.state_dict())
        init = None
        if source.init is not None:
            init = load_state(source.init, trust_pickle=trust_pickle, wanted=final)
            if fingerprint(init) == fingerprint(final):
                raise TargetError(
                    f"{self.path}: [model] init must hold the weights before training, but holds those of"
                    " final; name the file saved before training, or leave init out"
                )
        return Evidence.from_module(model, input=self.input, final=final, init=init, recipe=self.recipe)

    def truth(self) -> Truth:
        """Read training and control rows: owner's units (before mean and scale), [n, *shape], float64.

        Control rows that occur among the training rows are taken out and counted in `Truth.removed`.

        Raises:
            TargetError: there is no [data] table, or its files do not hold what [input] and [attack] say.
        """
        if self.data is None:
            raise TargetError(
                f"{self.path} must name training and control rows for an audit, but has no [data] table;"
                " add one with train and control"
            )
        train, train_label = _rows(self.data.train, self.input)
        control, control_label = _rows(self.data.control, self.input)
        if self.attack.samples is not None and self.attack.samples > len(train):
            raise TargetError(
                f"{self.path}: [attack] samples must be at most the {len(train)} rows of"
                f" {self.data.train.name}, but n larger than rows was given ({self.attack.samples});"
                " correct it, or leave it out"
            )
        seen = {row.numpy().tobytes() for row in train}
        kept = torch.tensor([row.numpy().tobytes() not in seen for row in control])
        if not kept.any():
            raise TargetError(
                f"{self.data.control} must hold rows the model never saw, but all {len(control)} occur in"
                f" {self.data.train.name}; supply other rows of the same kind"
            )
        try:
            # The mean and scale of [input] are public, so they centre the distances too.
            return Truth(
                train,
                control[kept],
                public_mean=self.input.mean,
                train_label=train_label,
                control_label=None if control_label is None else control_label[kept],
                public_scale=self.input.scale,
                removed=int((~kept).sum()),
            )
        except ExhumeError as error:
            raise TargetError(f"{self.path}: {error}") from error


def load(path: str | Path, *, trust_pickle: bool = False) -> Evidence:
    """Read a target file and load its evidence.

    Args:
        path: the target file.
        trust_pickle: allow weight files to run code when they are read.

    Raises:
        ExhumeError: as `read_target` and `Target.evidence` do.
    """
    return read_target(path).evidence(trust_pickle=trust_pickle)


def read_target(path: str | Path) -> Target:
    """Read and check a target file; paths in it are relative to it.

    Args:
        path: the target file.

    Raises:
        TargetError: the file cannot be read or is not TOML; or, all at once, its unknown keys, bad values and
            missing files.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TargetError(
            f"{path} must be a target file, but cannot be read ({error.strerror}); check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{path} must be valid TOML, but is not ({error}); correct it there") from error
    file = checked(TargetFile, values, str(path), path.resolve().parent)
    return Target(
        path=path,
        model=file.model,
        input=InputSpec(**dict(file.input)),
        recipe=Recipe(**dict(file.recipe)),
        data=file.data,
        attack=file.attack,
    )


def _rows(path: Path, spec: InputSpec) -> tuple[Tensor, Tensor | None]:
    """Read samples x [n, *shape] and labels y [n] or [n, C] (None if absent) from an npz file."""
    arrays = _arrays(path)
    x, y = arrays["x"], arrays.get("y")
    if x.shape[1:] not in (spec.shape, (spec.size,)):
        wanted = f"[n, {', '.join(map(str, spec.shape))}] or [n, {spec.size}]"
        raise TargetError(
            f"{path} must hold x of shape {wanted}, but has {list(x.shape)}; mend x or [input] shape"
        )
    if len(x) == 0:
        raise TargetError(f"{path} must hold at least one row, but x is empty; add rows")
    if y is not None and len(y) != len(x):
        raise TargetError(
            f"{path} must hold one y for each of the {len(x)} rows of x, but has {len(y)}; save both together"
        )
    _check_range(path, x, spec)
    return torch.from_numpy(x.reshape(len(x), *spec.shape)), None if y is None else torch.from_numpy(y)


def _check_range(path: Path, x: np.ndarray, spec: InputSpec) -> None:
    low = -np.inf if spec.low is None else spec.low
    high = np.inf if spec.high is None else spec.high
    slack = 1e-4 * (high - low if np.isfinite(high - low) else 1.0)  # rows may be stored in low precision
    if x.min() < low - slack or x.max() > high + slack:
        eight_bit = high <= 1 < x.max() <= 255 and x.min() >= 0 and (x == x.round()).all()
        advice = "divide uint8 values by 255" if eight_bit else "scale x"
        raise TargetError(
            f"{path} must hold x within [input] low = {spec.low} and high = {spec.high}, but spans"
            f" {x.min():g} to {x.max():g}; {advice}, or correct low and high"
        )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Read x, and y if it is there, as finite float64 arrays; never a pickle."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array")
            names = archive.files
            arrays = {name: archive[name] for name in ("x", "y") if name in names}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        # Only the first sentence: numpy goes on to advise unpickling.
        reason = str(error).split(". ")[0].rstrip(".")
        raise TargetError(
            f"{path} must be an npz file of numeric arrays x and y, but cannot be read ({reason});"
            " save it with numpy.savez"
        ) from error
    if "x" not in arrays:
        raise TargetError(
            f"{path} must hold arrays x and y, but holds {', '.join(names) or 'none'}; rename them"
        )
    for name, array in arrays.items():
        if array.dtype.kind not in "buif" or array.ndim == 0:
            raise TargetError(
                f"{path} must hold {name} as an array of numbers, but it has dtype {array.dtype} and shape"
                f" {list(array.shape)}; encode it as numbers"
            )
        if not np.isfinite(array).all():
            raise TargetError(
                f"{path} must hold finite numbers, but {name} has NaN or infinity; fill or drop those rows"
            )
    return {name: array.astype(np.float64) for name, array in arrays.items()}
