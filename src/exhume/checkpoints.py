"""Weight files: read them without running their code, and make the network that they belong to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from exhume.errors import CheckpointError, ModelError, TargetError, nearest
from exhume.functional import ACTIVATIONS, Elementwise

CONTAINERS = ("state_dict", "model_state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.", "_module.")  # DataParallel, torch.compile, Opacus
LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # what torch.save wrote before its zip format
LIGHTNING = ("model.", "net.")  # usual attribute names of the network inside a LightningModule

Shapes = Mapping[str, tuple[int, ...]]


def load_state(
    path: str | Path, *, trust_pickle: bool = False, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a weight file on the CPU.

    Args:
        path: a safetensors file, or anything `torch.save` wrote: a state dict, a dict that holds one under
            `state_dict`, `model_state_dict` or `model`, or (with `trust_pickle`) a whole module.
        trust_pickle: allow a pickle to run code; without it such a file is refused.
        wanted: the names of the model. Prefixes that every name carries are taken off (`module.`,
            `_orig_mod.`, `_module.`, nested too), and Lightning's `model.` and `net.` where that gives
            exactly these names; names that match already are left alone.

    Raises:
        CheckpointError: the file is missing, damaged, needs code, or holds something else than tensors.
    """
    path = Path(path)
    state = _tensors(_unwrapped(_read(path, trust_pickle)), path)
    *_, bare = _unprefixed(state, WRAPPERS)
    if wanted is None:
        return bare
    return next((s for s in _unprefixed(state, WRAPPERS + LIGHTNING) if s.keys() == set(wanted)), bare)


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes, whatever the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rebuild_mlp(state: Mapping[str, Tensor], activation: str, *, features: int | None = None) -> nn.Module:
    """Build the plain multi-layer perceptron that a state dict belongs to, with the same names and values.

    Args:
        state: `NAME.weight` [out, in] for every layer, and `NAME.bias` [out] for some. Layers whose names
            differ only in a number keep that order; otherwise the order must follow from the shapes.
        activation: name of the function between layers, a key of `exhume.functional.ACTIVATIONS`.
        features: number d of input features, if known; it can settle which layer is first.

    Returns:
        A module that flattens its input [m, *shape] and returns [m, C].

    Raises:
        CheckpointError: other tensors are present, or no single order of the layers chains.
        TargetError: the activation is not known.
    """
    if activation not in ACTIVATIONS:
        raise TargetError(
            f"the activation must be a known name, but is {activation!r}; {nearest(activation, ACTIVATIONS)}"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    weights = {n: s for n, s in shapes.items() if len(s) == 2 and n.rpartition(".")[2] == "weight"}
    biases = {n.removesuffix("weight") + "bias": s[:1] for n, s in weights.items()}
    stray = {n: s for n, s in shapes.items() if n not in weights and biases.get(n) != s}
    if stray or not weights or not all(t.is_floating_point() for t in state.values()):
        raise CheckpointError(
            "a plain perceptron must have only floating-point NAME.weight [out, in] and NAME.bias [out], but"
            f" the weights hold {_listed(stray or shapes)}; give a factory for this model"
        )
    layers = [name.rpartition(".")[0] for name in _chain(weights, features)]
    mlp = _assemble(layers, shapes, ACTIVATIONS[activation])
    mlp.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    return mlp


def load_factory(spec: str, base: Path) -> nn.Module:
    """Import a callable, call it without arguments, and return the module it makes.

    Args:
        spec: `file.py:callable` with the file relative to `base`, or `package.module:callable`.
        base: folder that relative files, and packages not installed, are looked up in.

    Raises:
        TargetError: no such file or callable.
        ModelError: the code fails, needs a missing package, or returns something else than a module.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise TargetError(f"a factory must read 'file.py:name' or 'module:name', but is {spec!r}; correct it")
    file = Path(base, source) if source.endswith(".py") else None
    if file is not None and not file.is_file():
        raise TargetError(f"the factory file must exist, but {file} does not; check [model] factory")
    try:
        with preserved_rng(), _importing(base if file is None else file.parent):
            module = importlib.import_module(source) if file is None else _run(file)
            model = _function(module, name, spec)()
    except TargetError:
        raise
    except (Exception, SystemExit) as error:  # a factory is the owner's code and can raise anything
        raise ModelError(
            f"factory {spec!r} must build the model, but raised {type(error).__name__} ({error}); mend it"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"factory {spec!r} must return a torch.nn.Module, but returned {type(model).__name__};"
            " return the model itself"
        )
    return model


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the global random states of torch, numpy and Python as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state others share
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


def _read(path: Path, trust_pickle: bool) -> object:
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} must be a weight file, but {fault}; check the path")
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if not head:
            raise CheckpointError(f"{path} must hold weights, but is empty; save or copy it again")
        if head.startswith((b"PK", LEGACY_TORCH)):
            return _read_torch(path, trust_pickle)
        if path.suffix == ".safetensors" or head[8:9] == b"{":
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    raise CheckpointError(
        f"{path} must be a safetensors file or a torch checkpoint, but starts with {head!r};"
        " save model.state_dict() with safetensors or torch.save"
    )


def _read_torch(path: Path, trust_pickle: bool) -> object:
    try:
        with warnings.catch_warnings(), path.open("rb") as file:  # torch.load would go by the name of a path
            warnings.simplefilter("ignore")  # TorchScript archives and old storages announce themselves
            return torch.load(file, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:  # a damaged or hostile pickle can raise anything
        if not trust_pickle and "weights_only" in str(error):
            needed = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{path} must hold tensors alone, but needs {needed[1] if needed else 'code'} to unpickle;"
                " save model.state_dict() instead, or pass --trust-pickle (trust_pickle=True) if you trust it"
            ) from error
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = re.split(r"(?<=\w)\. |\n", str(error) or type(error).__name__)[0]
    return CheckpointError(f"{path} must be a whole weight file, but is unreadable ({reason}); save it again")


def _unwrapped(content: object) -> object:
    """Take the state dict out of a module or of the dict a trainer wrapped it in."""
    if isinstance(content, nn.Module):
        return content.state_dict()
    if isinstance(content, Mapping):
        for key in CONTAINERS:
            if isinstance(content.get(key), Mapping | nn.Module):
                return _unwrapped(content[key])
    return content


def _tensors(content: object, path: Path) -> dict[str, Tensor]:
    """Check that the content is a non-empty dict of dense tensors by name."""
    if not isinstance(content, Mapping) or not content:
        kind = "an empty dict" if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"{path} must hold tensors by name, but holds {kind}; save model.state_dict()")
    wrong = [
        f"{name!r} ({type(value).__name__})"
        for name, value in content.items()
        if not (isinstance(name, str) and isinstance(value, Tensor))
        or value.layout is not torch.strided
        or value.is_quantized
    ]
    if wrong:
        raise CheckpointError(
            f"{path} must hold dense tensors by name, or a dict of them under {', '.join(CONTAINERS)},"
            f" but has {', '.join(wrong[:5])}{' and more' if len(wrong) > 5 else ''}; save model.state_dict()"
        )
    return {name: value.detach() for name, value in content.items()}


def _unprefixed(state: dict[str, Tensor], prefixes: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield the state, then the state after each removal of a prefix that every name carries."""
    yield state
    for prefix in prefixes:
        if all(name.startswith(prefix) for name in state):
            yield from _unprefixed({n.removeprefix(prefix): t for n, t in state.items()}, prefixes)
            return


class _Perceptron(nn.Module):
    """Named linear layers applied in a given order, with one activation between them."""

    def __init__(self, layers: Sequence[str], activation: Elementwise):
        super().__init__()
        self._layers, self._activation = tuple(layers), activation

    def forward(self, u: Tensor) -> Tensor:
        a = self.get_submodule(self._layers[0])(u.flatten(1))
        for name in self._layers[1:]:
            a = self.get_submodule(name)(self._activation(a))
        return a


def _assemble(layers: Sequence[str], shapes: Shapes, activation: Elementwise) -> nn.Module:
    """Nest linear layers without values (so that no random number is drawn) under their dotted names."""

    def linear(name: str) -> nn.Linear:
        out, inputs = shapes[f"{name}.weight".lstrip(".")]
        return nn.Linear(inputs, out, bias=f"{name}.bias".lstrip(".") in shapes, device="meta")

    if layers == [""]:  # the state dict of a bare nn.Linear
        layer = linear("")
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(1),))
        return layer
    root = _Perceptron(layers, activation)
    for name in sorted(layers):
        parent: nn.Module = root
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, linear(name))
    return root


def _chain(weights: Shapes, features: int | None) -> list[str]:
    """Order the layers so that the outputs of each are the inputs of the next."""
    families: dict[str, list[str]] = {}
    for name in sorted(weights, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]):
        families.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    found = _orders(list(families.values()), weights, features)
    if not found and len(set(weights.values())) == len(weights):  # equal shapes could swap: never unique
        found = _orders([[name] for name in weights], weights, features)
    if len(found) == 1:
        return found[0]
    start = "" if features is None else f" from {features} input features"
    raise CheckpointError(
        f"the dense layers must chain{start} in one order only, but {'several' if found else 'no'} orders of"
        f" {_listed(weights)} do; give a factory for this model, or check [input] shape"
    )


def _orders(families: list[list[str]], weights: Shapes, features: int | None) -> list[list[str]]:
    """Return up to two orders that chain, in which the members of a family keep theirs."""

    @functools.cache
    def extend(done: tuple[int, ...], width: int | None) -> list[list[str]]:
        if sum(done) == len(weights):
            return [[]]
        found = []
        for i, family in enumerate(families):
            if done[i] < len(family) and width in (None, weights[family[done[i]]][1]):
                name = family[done[i]]
                rest = extend((*done[:i], done[i] + 1, *done[i + 1 :]), weights[name][0])
                found += [[name, *names] for names in rest]
        return found[:2]

    return extend((0,) * len(families), features)


def _listed(shapes: Shapes) -> str:
    shown = [f"{name} {list(shape)}" for name, shape in itertools.islice(shapes.items(), 8)]
    return (", ".join(shown) or "nothing") + (f" and {len(shapes) - 8} more" if len(shapes) > 8 else "")


@contextlib.contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """Let files in `folder` import each other for a while, leaving no path, sibling or byte code behind."""
    entry, before, write = str(folder.resolve()), set(sys.modules), sys.dont_write_bytecode
    importlib.invalidate_caches()
    sys.path.insert(0, entry)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = write
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
        # Another target may have a different file of the same name.
        for name in set(sys.modules) - before:
            place = Path(entry, *name.split("."))
            if getattr(sys.modules[name], "__file__", None) in (f"{place}.py", str(place / "__init__.py")):
                del sys.modules[name]


def _run(file: Path) -> ModuleType:
    """Run a file as a module of its own, whatever other modules are called."""
    name = "_exhume_factory_" + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look their module up while the file runs
    importlib.machinery.SourceFileLoader(name, str(file)).exec_module(module)
    return module


def _function(module: ModuleType, name: str, spec: str) -> Callable[[], object]:
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, nn.Module):
        own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
        raise TargetError(
            f"factory {spec!r} must name a function without arguments, but there is none called {name!r};"
            f" {nearest(name, [k for k, v in own.items() if callable(v)])}"
        )
    return found
