"""Snapshots: save what an audit needs of a training run, from two lines in the training script."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from exhume.checkpoints import load_state, preserved_rng, rebuild_mlp
from exhume.errors import CheckpointError, ModelError, OutputError
from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.functional import ACTIVATIONS
from exhume.schema import LABELS, LOSSES, OPTIMIZERS, REDUCTIONS, InputTable, RecipeTable, checked

TARGET, INIT, FINAL = "TARGET.toml", "init.safetensors", "final.safetensors"
SEAL = "# written by exhume.snapshot, checksum "  # tells a file that nobody edited
WRAPPERS = {  # class name: attribute that holds the wrapped module
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "GradSampleModule": "_module",
}
HINTS = {
    "low": "smallest value of any feature",
    "high": "largest value of any feature",
    "mean": "subtracted from x: a number, a list or a .npy file",
    "scale": "divides x - mean: likewise",
    "sample_norm": "norm of every model input, if each sample is normalised",
    "loss": " | ".join(LOSSES),
    "reduction": " | ".join(REDUCTIONS),
    "labels": " | ".join(LABELS),
    "optimizer": " | ".join(OPTIMIZERS),
}
NO_FACTORY = '# factory = "net.py:build"  # fill in: a function without arguments that returns the model'
FOOTER = """
# [data]  # for exhume audit: npz files with arrays x (before mean and scale) and y
# train = "train.npz"
# control = "control.npz"  # rows of the same kind that the model never saw

# [attack]
# names = ["exhume"]  # which attacks; this is the default
# samples = 20  # number of training rows, if known
"""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A training run whose start has been saved.

    Args:
        model: the module in training.
        folder: where TARGET.toml and the weights are.
    """

    model: nn.Module
    folder: Path

    def finish(self, model: nn.Module | None = None) -> Path:
        """Save the weights after training, and return the path of TARGET.toml.

        Args:
            model: the trained module, if it is not the object whose start was saved.

        Raises:
            CheckpointError: the weights have other names or shapes than those saved before training, or the
                file of those is gone.
        """
        state = _state(_bare(self.model if model is None else model))
        before = {name: tensor.shape for name, tensor in load_state(self.folder / INIT, wanted=state).items()}
        after = {name: tensor.shape for name, tensor in state.items()}
        changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
        if changed:
            raise CheckpointError(
                f"the trained model must have the weights saved in {self.folder / INIT}, but differs in"
                f" {', '.join(changed[:5])}; give finish() the model that was trained"
            )
        save_file(state, self.folder / FINAL)
        return self.folder / TARGET


def snapshot(
    model: nn.Module,
    folder: str | Path,
    *,
    input: InputSpec,
    factory: str | None = None,
    recipe: Recipe | None = None,
) -> Snapshot:
    """Save a model before its training; call `finish` on the result afterwards.

    The folder gets init.safetensors and a commented TARGET.toml now, and final.safetensors from `finish`. The
    model, its buffers and mode, and the global random states stay as they are. With several processes, call
    it in one.

    Args:
        model: the module about to be trained; wrappers such as DataParallel are looked through.
        folder: new or empty, or left by an earlier snapshot whose TARGET.toml nobody edited.
        input: what is known of the inputs; `shape` at least.
        factory: `file.py:callable` (relative to the folder) or `package.module:callable` that builds the
            model. Without it, only a plain perceptron can be rebuilt from its weights; for any other model
            the factory must be filled in in TARGET.toml by hand before exhume can read it.
        recipe: what is known of the training run; the more, the more attacks apply.

    Raises:
        OutputError: the folder holds something else.
        TargetError: a value of `input` or `recipe` is not one that a target file may have.
        ModelError: the model breaks an assumption of every attack.
    """
    model, folder = _bare(model), Path(folder)
    _check_free(folder)
    state = _state(model)
    spec = _known(asdict(input))
    numbers = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in spec.items()}
    checked(InputTable, numbers, "the input of the snapshot", folder)
    training = _known(asdict(recipe or Recipe()))
    checked(RecipeTable, training, "the recipe of the snapshot", folder)
    with preserved_rng():
        evidence = Evidence.from_module(copy.deepcopy(model).cpu(), input=input)
        activation = None if factory else _plain_activation(evidence, state)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / FINAL).unlink(missing_ok=True)  # of an earlier run: it would not belong to this init
    for name, value in spec.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            np.save(folder / f"{name}.npy", value.double().cpu().numpy())
            numbers[name] = f"{name}.npy"
    text = "\n".join(
        [
            "# Paths are relative to this file. Read it with: exhume inspect, exhume attack, exhume audit.",
            "",
            "[model]",
            *_architecture(factory, activation),
            f'final = "{FINAL}"',
            f'init = "{INIT}"',
            "",
            "[input]",
            *_lines(InputTable, numbers),
            "",
            "[recipe]  # what you know of the training run; leave out the rest",
            *_lines(RecipeTable, training),
            FOOTER,
        ]
    )
    (folder / TARGET).write_text(f"{SEAL}{_checksum(text)}\n{text}", encoding="utf-8")
    save_file(state, folder / INIT)
    return Snapshot(model, folder)


def _bare(model: nn.Module) -> nn.Module:
    """Look through wrappers by the name of their class, for some of their packages may not be installed."""
    while attribute := WRAPPERS.get(type(model).__name__):
        model = getattr(model, attribute)
    return model


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Copy the state dict to the CPU, every tensor with a storage of its own as safetensors wants it."""
    state = model.state_dict()
    odd = [
        name
        for name, value in state.items()
        if not isinstance(value, Tensor)
        or isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer)
    ]
    if odd or not state:
        raise ModelError(
            f"the model must have weights that are tensors, but {', '.join(odd[:5]) or 'has none'};"
            " run one batch through lazy layers first, and keep other state out of the state dict"
        )
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in state.items()
    }


def _plain_activation(evidence: Evidence, state: Mapping[str, Tensor]) -> str | None:
    """Name the activation with which the weights alone give the model back; None if they do not."""
    if evidence.chain is None or evidence.chain.activation not in ACTIVATIONS:
        return None
    try:
        mlp = rebuild_mlp(state, evidence.chain.activation, features=evidence.input.size)
    except CheckpointError:
        return None
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(16, *evidence.input.shape, generator=generator, dtype=torch.float64)
    rebuilt = Evidence.from_module(mlp, input=evidence.input).output(u)
    return evidence.chain.activation if torch.allclose(rebuilt, evidence.output(u), rtol=1e-8) else None


def _check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier snapshot."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    target = folder / TARGET
    head, _, text = target.read_text(encoding="utf-8").partition("\n") if target.is_file() else ("", "", "")
    if not head.startswith(SEAL):
        found = "holds something else"
    elif head != SEAL + _checksum(text):
        found = f"its {TARGET} was edited since"
    else:
        return
    raise OutputError(
        f"{folder} must be new, empty or an earlier snapshot left as it was, but {found}; choose another"
    )


def _known(values: Mapping[str, object]) -> dict[str, object]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _architecture(factory: str | None, activation: str | None) -> list[str]:
    if factory is not None:
        return [f"factory = {_toml(factory)}"]
    if activation is None:
        return [NO_FACTORY]
    return ['arch = "mlp"  # rebuilt from the weights', f'activation = "{activation}"']


def _lines(table: type[InputTable] | type[RecipeTable], values: Mapping[str, object]) -> list[str]:
    """One line for each key of a table, commented out where its value is unknown."""
    lines = []
    for key in table.model_fields:
        line = f"{key} = {_toml(values[key])}" if key in values else f"# {key} ="
        lines.append(f"{line}  # {HINTS[key]}" if key in HINTS else line)
    return lines


def _toml(value: object) -> str:
    """Strings, numbers and lists of them read the same in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=False)
