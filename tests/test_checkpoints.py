"""Weight files: whatever a trainer writes is read, whatever is wrong is one clear sentence."""

from __future__ import annotations

import argparse
import collections
import itertools
import pickle
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from exhume.checkpoints import fingerprint, load_factory, load_state, rebuild_mlp
from exhume.errors import CheckpointError, ExhumeError, ModelError, TargetError
from exhume.functional import ACTIVATIONS, recognise


class Net(nn.Module):
    """Picklable by reference, as user classes are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3, 2)

    def forward(self, u: Tensor) -> Tensor:
        return self.net(u)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def rng() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002


# -- reading ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.ckpt", "noextension"])
def test_reads_what_was_saved_in_its_own_dtype(tmp_path, name, dtype):
    state = mlp(4, 3, 2).to(dtype).state_dict()
    (save_file if name.endswith("safetensors") else torch.save)(state, tmp_path / name)
    assert same(load_state(tmp_path / name), state)


def test_content_decides_where_the_extension_misleads(tmp_path):
    state = mlp(4, 3, 2).state_dict()
    save_file(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.safetensors")
    torch.save(state, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    assert all(same(load_state(tmp_path / name), state) for name in ("a.pt", "b.safetensors", "c.pth"))


def test_tensors_come_detached_and_tied_ones_twice(tmp_path):
    weight = nn.Parameter(torch.ones(3, 3))
    torch.save({"a": weight, "b": weight}, tmp_path / "w.pt")
    state = load_state(tmp_path / "w.pt")
    assert set(state) == {"a", "b"} and torch.equal(state["a"], state["b"])
    assert not any(tensor.requires_grad for tensor in state.values())


@pytest.mark.parametrize("container", ["state_dict", "model_state_dict", "model"])
def test_takes_the_state_dict_out_of_a_container(tmp_path, container):
    state = mlp(4, 3, 2).state_dict()
    torch.save({"epoch": 3, container: state, "optimizer": {"lr": 0.1}}, tmp_path / "w.pt")
    assert same(load_state(tmp_path / "w.pt"), state)


WRAPPERS = ["module.", "_orig_mod.", "_module.", "module._orig_mod.", "_orig_mod._module.module."]


@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("given", [True, False])
def test_takes_off_the_prefixes_of_wrappers(tmp_path, prefix, given):
    state = mlp(4, 3, 2).state_dict()
    torch.save({"state_dict": prefixed(state, prefix)}, tmp_path / "w.pt")
    assert same(load_state(tmp_path / "w.pt", wanted=state if given else None), state)


@pytest.mark.parametrize("prefix", ["model.", "net.", "model._orig_mod.", "_orig_mod.model.", "model.net."])
def test_takes_off_lightning_prefixes_only_to_match_the_wanted_names(tmp_path, prefix):
    state = mlp(4, 3, 2).state_dict()
    lightning = {"pytorch-lightning_version": "2.5", "state_dict": prefixed(state, prefix), "loops": {}}
    torch.save(lightning, tmp_path / "last.ckpt")
    assert same(load_state(tmp_path / "last.ckpt", wanted=state.keys()), state)
    kept = prefix.replace("_orig_mod.", "") if prefix.startswith("_orig_mod.") else prefix
    assert same(load_state(tmp_path / "last.ckpt"), prefixed(state, kept))
    assert same(load_state(tmp_path / "last.ckpt", wanted={"other"}), prefixed(state, kept))


def test_a_prefix_that_one_name_lacks_stays(tmp_path):
    state = {**prefixed(mlp(4, 3).state_dict(), "module."), "temperature": torch.ones(())}
    torch.save(state, tmp_path / "w.pt")
    assert same(load_state(tmp_path / "w.pt"), state)


def test_names_that_match_already_stay(tmp_path):
    state = prefixed(mlp(4, 3).state_dict(), "module.")  # the module itself has an attribute `module`
    torch.save(state, tmp_path / "w.pt")
    assert same(load_state(tmp_path / "w.pt", wanted=state), state)


def test_real_wrappers_are_seen_through(tmp_path):
    model = mlp(4, 3, 2)
    wrapped = torch.compile(nn.DataParallel(model))
    torch.save(wrapped.state_dict(), tmp_path / "w.pt")
    assert set(wrapped.state_dict()) != set(model.state_dict())
    assert same(load_state(tmp_path / "w.pt"), model.state_dict())


# -- pickles ------------------------------------------------------------


def _traced(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, its files are about
        torch.jit.trace(mlp(4, 3, 2), torch.zeros(1, 4)).save(path)


NEEDS_CODE = {
    "module": lambda path: torch.save(Net(), path),
    "old module": lambda path: torch.save(Net(), path, _use_new_zipfile_serialization=False),
    "module in a dict": lambda path: torch.save({"model": Net()}, path),
    "hyper-parameters": lambda path: torch.save(
        {"state_dict": Net().state_dict(), "hparams": argparse.Namespace(lr=0.1)}, path
    ),
    "TorchScript": _traced,
}


@pytest.mark.parametrize("write", NEEDS_CODE.values(), ids=NEEDS_CODE.keys())
def test_a_pickle_that_needs_code_is_refused_and_loads_when_trusted(tmp_path, write):
    path = tmp_path / "w.pt"
    write(path)
    with pytest.raises(CheckpointError, match=r"tensors alone, but needs .* --trust-pickle"):
        load_state(path)
    assert len(load_state(path, trust_pickle=True)) == 4


def test_refusal_runs_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"state_dict": Trap()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="--trust-pickle"):
        load_state(tmp_path / "w.pt")
    assert not (tmp_path / "sprung").exists()


def test_a_trusted_pickle_without_its_class(tmp_path, monkeypatch):
    torch.save(Net(), tmp_path / "w.pt")
    monkeypatch.delattr(sys.modules[__name__], "Net")
    with pytest.raises(CheckpointError, match=r"unreadable \(.*Net.*save it again"):
        load_state(tmp_path / "w.pt", trust_pickle=True)


# -- bad files ------------------------------------------------------------


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _halved(state: object, path: Path, old: bool = False) -> None:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=not old)
    _half(path)


STATE = mlp(4, 3, 2).state_dict()
BAD = {
    "missing": ("w.pt", lambda path: None, "does not exist; check the path"),
    "folder": ("w", lambda path: path.mkdir(), "is a folder; check the path"),
    "empty": ("w.pt", lambda path: path.touch(), "is empty; save or copy it again"),
    "empty safetensors": ("w.safetensors", lambda path: path.touch(), "is empty"),
    "text": (
        "w.pt",
        lambda path: path.write_text("hello world, all"),
        r"starts with b'hello world, all'; save",
    ),
    "text as safetensors": ("w.safetensors", lambda path: path.write_text("hello world"), "unreadable"),
    "git-lfs pointer": (
        "w.pt",
        lambda path: path.write_text("version https://git-lfs"),
        "starts with b'version",
    ),
    "truncated": ("w.pt", lambda path: _halved(STATE, path), r"is unreadable \(.*\); save it again"),
    "old truncated": ("w.pt", lambda path: _halved(STATE, path, old=True), "unreadable"),
    "truncated safetensors": ("w.safetensors", lambda path: _halved(STATE, path), "unreadable"),
    "other pickle": ("w.pkl", lambda path: path.write_bytes(pickle.dumps(STATE)), "starts with"),
    "npz": ("w.npz", lambda path: np.savez(path, x=np.ones(3)), "unreadable"),
    "tensor": ("w.pt", lambda path: torch.save(torch.ones(3), path), "by name, but holds Tensor"),
    "list": ("w.pt", lambda path: torch.save([torch.ones(3)], path), "by name, but holds list"),
    "empty dict": ("w.pt", lambda path: torch.save({}, path), "holds an empty dict"),
    "empty container": ("w.pt", lambda path: torch.save({"state_dict": {}}, path), "an empty dict"),
    "numbers": (
        "w.pt",
        lambda path: torch.save({"a": 1, "b": torch.ones(1)}, path),
        r"but has 'a' \(int\); save",
    ),
    "optimiser": (
        "w.pt",
        lambda path: torch.save({"state": {}, "param_groups": []}, path),
        r"'state' \(dict\)",
    ),
    "numbered": ("w.pt", lambda path: torch.save({0: torch.ones(1)}, path), r"but has 0 \(Tensor\)"),
    "sparse": ("w.pt", lambda path: torch.save({"a": torch.eye(3).to_sparse()}, path), "dense tensors"),
}


@pytest.mark.parametrize(("name", "write", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_files_get_one_sentence(tmp_path, name, write, sentence):
    path = tmp_path / name
    write(path)
    for trust in (False, True):
        with pytest.raises(CheckpointError, match=sentence) as caught:
            load_state(path, trust_pickle=trust)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# -- rebuilding ------------------------------------------------------------


class Named(nn.Module):
    """Layers under names of their own, registered in another order than they run."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name in sorted(layers):
            self.add_module(name, layers[name])
        self.order = list(layers)

    def forward(self, u: Tensor) -> Tensor:
        a = u.flatten(1)
        for name in self.order[:-1]:
            a = torch.relu(self.get_submodule(name)(a))
        return self.get_submodule(self.order[-1])(a)


def _named(*names: str, widths: tuple[int, ...]) -> Named:
    pairs = zip(names, itertools.pairwise(widths), strict=True)
    return Named(**{name: nn.Linear(*pair) for name, pair in pairs})


REBUILDABLE = {
    "sequential": mlp(6, 5, 5, 5, 2),
    "twelve equal layers": mlp(*[6] * 13),  # 10 sorts before 2 as a string
    "nested": nn.Sequential(collections.OrderedDict(net=mlp(6, 5, 2))),
    "deep": nn.Sequential(collections.OrderedDict(body=mlp(6, 5, 4), relu=nn.ReLU(), head=nn.Linear(4, 2))),
    "no biases": nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False)),
    "one bias": nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)),
    "linear": nn.Linear(6, 3),
    "words": _named("input", "hidden", "output", widths=(6, 5, 5, 2)),
    "backwards words": _named("z", "y", "x", widths=(6, 5, 4, 2)),
    "backwards numbers": _named("fc3", "fc2", "fc1", widths=(6, 5, 4, 2)),
    "words and numbers": _named("stem", "fc1", "fc2", "out", widths=(6, 5, 5, 5, 2)),
}


@pytest.mark.parametrize("model", REBUILDABLE.values(), ids=REBUILDABLE.keys())
def test_rebuilds_outputs_and_names(tmp_path, model):
    save_file(model.state_dict(), tmp_path / "w.safetensors")  # forgets the order of the names
    state = load_state(tmp_path / "w.safetensors")
    before = rng()
    rebuilt = rebuild_mlp(state, "relu", features=6)
    assert rng() == before
    assert same(dict(rebuilt.state_dict()), state)
    u = torch.randn(7, 6)
    assert torch.equal(rebuilt(u), model(u))
    assert torch.equal(rebuilt(u.reshape(7, 1, 2, 3)), model(u))
    assert recognise(rebuilt, (1, 2, 3)) is not None
    with torch.no_grad():
        next(rebuilt.parameters()).add_(1.0)
    assert same(state, load_state(tmp_path / "w.safetensors"))  # a copy, not a view


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name):
    model = mlp(4, 5, 2)
    u = torch.randn(3, 4)
    wanted = model[2](ACTIVATIONS[name](model[0](u)))
    assert torch.equal(rebuild_mlp(model.state_dict(), name)(u), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_kept(dtype):
    state = mlp(4, 3, 2).to(dtype).state_dict()
    assert all(p.dtype is dtype for p in rebuild_mlp(state, "relu").parameters())


def test_features_settle_which_layer_is_first():
    model = _named("dec", "enc", widths=(4, 9, 4))
    with pytest.raises(CheckpointError, match=r"several orders of .*dec\.weight \[9, 4\].*factory"):
        rebuild_mlp(model.state_dict(), "relu")
    u = torch.randn(3, 4)
    assert torch.equal(rebuild_mlp(model.state_dict(), "relu", features=4)(u), model(u))


NOT_PLAIN = {
    "conv": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)), r"0\.weight \[2, 1, 3, 3\]"),
    "batch norm": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), r"1\.weight \[3\]"),
    "own parameter": (nn.ParameterDict({"W": torch.ones(3, 4)}), r"W \[3, 4\]"),
    "bias of another size": (
        nn.ParameterDict({"weight": torch.ones(3, 4), "bias": torch.ones(4)}),
        r"bias \[4\]",
    ),
    "whole numbers": ({"0.weight": torch.ones(3, 4, dtype=torch.int8)}, r"0\.weight \[3, 4\]"),
    "nothing": ({}, "the weights hold nothing"),
    "equal words": (_named("encoder", "decoder", widths=(4, 4, 4)), "several orders"),
}


@pytest.mark.parametrize(("model", "found"), NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_anything_else_asks_for_a_factory(model, found):
    state = model.state_dict() if isinstance(model, nn.Module) else model
    with pytest.raises(CheckpointError, match=rf"{found}.*factory"):
        rebuild_mlp(state, "relu")


def test_layers_that_do_not_chain():
    state = {"0.weight": torch.ones(3, 4), "2.weight": torch.ones(2, 5)}
    with pytest.raises(CheckpointError, match=r"no orders of 0\.weight \[3, 4\], 2\.weight \[2, 5\]"):
        rebuild_mlp(state, "relu")
    with pytest.raises(CheckpointError, match=r"from 7 input features.*check \[input\] shape"):
        rebuild_mlp(mlp(4, 3, 2).state_dict(), "relu", features=7)


def test_many_square_layers_that_do_not_chain_fail_fast():
    state = {f"{part}.{i}.weight": torch.ones(2, 2) for part in "qkvo" for i in range(12)}
    with pytest.raises(CheckpointError, match="no orders"):
        rebuild_mlp({**state, "vocabulary.weight": torch.ones(2, 9), "head.weight": torch.ones(3, 9)}, "relu")


def test_a_misspelt_activation():
    with pytest.raises(TargetError, match="'reul'; did you mean 'relu'"):
        rebuild_mlp(STATE, "reul")


# -- factories ------------------------------------------------------------

NET = """
import random, numpy, torch
from dataclasses import dataclass
from layers import WIDTH

@dataclass
class Config:
    width: int = WIDTH

def build():
    random.random(), numpy.random.rand()
    return torch.nn.Linear(4, Config().width)

def tensor(): return torch.ones(3)
def broken(): raise KeyError("depth")
def leave(): raise SystemExit(3)
def needs(width): return torch.nn.Linear(4, width)
module = torch.nn.Linear(1, 1)
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "layers.py").write_text("WIDTH = 3")
    return tmp_path


def test_a_factory_file_with_a_sibling_leaves_no_trace(base):
    path, modules, states = list(sys.path), set(sys.modules), rng()
    model = load_factory("net.py:build", base)
    assert isinstance(model, nn.Linear) and model.out_features == 3
    assert rng() == states and sys.path == path
    assert not {"net", "layers"} & (set(sys.modules) - modules)
    assert sorted(p.name for p in base.iterdir()) == ["layers.py", "net.py"]


def test_two_targets_may_have_files_of_the_same_names(base, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "net.py").write_text(NET)
    (other / "layers.py").write_text("WIDTH = 5")
    widths = [load_factory("net.py:build", folder).out_features for folder in (base, other, base)]
    assert widths == [3, 5, 3]


def test_a_factory_in_a_package(base):
    (base / "pkg").mkdir()
    (base / "pkg" / "__init__.py").touch()
    (base / "pkg" / "net.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2)")
    assert isinstance(load_factory("pkg.net:build", base), nn.Linear)
    assert isinstance(load_factory("torch.nn:Identity", base), nn.Identity)


BAD_FACTORIES = {
    "net.py": (TargetError, r"'file\.py:name' or 'module:name'"),
    "net.py:": (TargetError, r"'file\.py:name'"),
    "nte.py:build": (TargetError, r"nte\.py does not; check"),
    "net.py:biuld": (TargetError, "none called 'biuld'; did you mean 'build'"),
    "net.py:module": (TargetError, "function without arguments"),
    "net.py:tensor": (ModelError, "must return a torch.nn.Module, but returned Tensor"),
    "net.py:broken": (ModelError, r"raised KeyError \('depth'\)"),
    "net.py:leave": (ModelError, "raised SystemExit"),
    "net.py:needs": (ModelError, "raised TypeError .*width"),
    "no.such.package:build": (ModelError, "No module named 'no'"),
}


@pytest.mark.parametrize("spec", BAD_FACTORIES)
def test_bad_factories_get_one_sentence(base, spec):
    kind, sentence = BAD_FACTORIES[spec]
    path, states = list(sys.path), rng()
    with pytest.raises(ExhumeError, match=sentence) as caught:
        load_factory(spec, base)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert sys.path == path and rng() == states


def test_a_factory_with_a_syntax_error(base):
    (base / "bad.py").write_text("def build(:")
    with pytest.raises(ModelError, match=r"raised SyntaxError .*bad\.py, line 1"):
        load_factory("bad.py:build", base)


# -- fingerprint ------------------------------------------------------------


def test_fingerprint_sees_every_change_and_no_order():
    state = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(1),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    digest = fingerprint(state)
    assert len(digest) == 64 and digest == fingerprint(dict(reversed(state.items())))
    assert digest == fingerprint({**state, "a": state["a"].T.contiguous().T})
    changes = [
        {**state, "a": state["a"] + torch.eye(2, 3) * 1e-6},
        {**state, "a": state["a"].reshape(3, 2)},
        {**state, "a": state["a"].double()},
        {"A": state["a"], "b": state["b"], "c": state["c"]},
        {"a": state["a"], "b": state["b"]},
    ]
    assert len({digest, *map(fingerprint, changes)}) == 6
