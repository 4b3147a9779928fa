"""Target files: what is right is read exactly, and all that is wrong is told at once."""

from __future__ import annotations

import io
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from exhume.errors import CheckpointError, TargetError
from exhume.evidence import InputSpec, Recipe
from exhume.schema import InputTable, RecipeTable
from exhume.targets import load, read_target

MODEL = '[model]\narch = "mlp"\nfinal = "final.safetensors"\n'
INPUT = "[input]\nshape = [1, 2, 3]\n"
FULL = """
[model]
factory = "net.py:build"
final = "final.safetensors"
init = "init.safetensors"
[input]
shape = [1, 2, 3]
low = 0
high = 1.0
mean = "mean.npy"
scale = [[[2.0, 1, 1]]]
sample_norm = 28.0
[recipe]
loss = "mse"
reduction = "mean"
labels = "pm1"
optimizer = "sgd"
lr = 0.02
steps = 3000
momentum = 0.9
weight_decay = 0
batch_size = 20
[data]
train = "train.npz"
control = "control.npz"
[attack]
names = ["exhume"]
samples = 4
"""


def net(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_file(net(1).state_dict(), tmp_path / "final.safetensors")
    save_file(net(0).state_dict(), tmp_path / "init.safetensors")
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))\n"
    )
    np.save(tmp_path / "mean.npy", np.full((1, 2, 3), 0.5, dtype=np.float32))
    random = np.random.default_rng(0)
    for name, n in (("train", 4), ("control", 5)):
        np.savez(tmp_path / f"{name}.npz", x=random.random((n, 1, 2, 3), dtype=np.float32), y=np.arange(n))
    return tmp_path


def write(base: Path, text: str) -> Path:
    path = base / "TARGET.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(base: Path, text: str) -> str:
    with pytest.raises(TargetError) as caught:
        read_target(write(base, text))
    assert "\n" not in str(caught.value) and "TARGET.toml" in str(caught.value)
    return str(caught.value)


# -- reading ------------------------------------------------------------


def test_every_key_arrives(base):
    target = read_target(write(base, FULL))
    assert target.model.factory == "net.py:build"
    assert (target.model.final, target.model.init) == (base / "final.safetensors", base / "init.safetensors")
    assert target.input.shape == (1, 2, 3) and (target.input.low, target.input.high) == (0, 1)
    assert target.input.sample_norm == 28.0
    assert torch.equal(target.input.mean, torch.full((1, 2, 3), 0.5, dtype=torch.float64))
    assert torch.equal(target.input.scale, torch.tensor([[[2.0, 1, 1]]], dtype=torch.float64))
    assert target.recipe == Recipe("mse", "mean", "pm1", "sgd", 0.02, 3000, 0.9, 0, 20)
    assert (target.data.train, target.data.control) == (base / "train.npz", base / "control.npz")
    assert target.attack.names == ["exhume"] and target.attack.samples == 4


def test_almost_everything_is_optional(base):
    target = read_target(write(base, MODEL + INPUT))
    assert target.recipe == Recipe() and target.data is None and target.attack.names is None
    assert target.model.init is None and target.input.mean is None and target.input.low is None


def test_tables_and_plain_data_have_the_same_fields():
    for table, plain in ((InputTable, InputSpec), (RecipeTable, Recipe)):
        assert list(table.model_fields) == [field.name for field in fields(plain)]


def test_a_target_is_frozen(base):
    target = read_target(write(base, FULL))
    with pytest.raises(FrozenInstanceError):
        target.path = base
    with pytest.raises(ValueError, match="frozen"):
        target.attack.samples = 3


def test_paths_are_relative_to_the_file_and_may_be_absolute(base, monkeypatch):
    monkeypatch.chdir(base.parent)
    absolute = MODEL.replace("final.s", (base / "final.s").as_posix())
    for text in (MODEL, absolute):
        write(base, text + INPUT)
        assert read_target(Path(base.name, "TARGET.toml")).model.final == base / "final.safetensors"


def test_a_byte_order_mark_is_harmless(base):
    assert read_target(write(base, "\ufeff" + MODEL + INPUT)).input.shape == (1, 2, 3)


@pytest.mark.parametrize("value", ["0.5", "1", "[0.5]", "[1, 2, 3]", "[[[1], [2]]]", '"mean.npy"'])
def test_means_that_broadcast(base, value):
    mean = read_target(write(base, MODEL + INPUT + f"mean = {value}")).input.mean
    assert torch.broadcast_to(mean, (1, 2, 3)).dtype is torch.float64


# -- what is wrong ------------------------------------------------------


def test_all_problems_in_one_message(base):
    (base / "init.safetensors").unlink()
    message = refusal(
        base,
        FULL.replace("momentum =", "momentun =").replace("[1, 2, 3]", "[]").replace("control.npz", "c.npz"),
    )
    assert "has 4 problems" in message
    for fragment in (
        "[model] init must be a file, but 'init.safetensors' does not exist",
        "[input] shape must be a list of positive whole numbers, but is []",
        "[recipe] momentun is unknown, did you mean 'momentum'?",
        "[data] control must be a file, but 'c.npz' does not exist",
    ):
        assert fragment in message


MISTAKES = {
    "misspelt table": (MODEL + INPUT + "[recipie]", "[recipie] is unknown, did you mean 'recipe'?"),
    "misspelt key": (MODEL + INPUT + "hihg = 1.0", "[input] hihg is unknown, did you mean 'high'?"),
    "key outside": ("final = 'a'\n" + MODEL + INPUT, "[final] is unknown"),
    "no input": (MODEL, "[input] is missing"),
    "no final": ("[model]\narch = 'mlp'\n" + INPUT, "[model] final is missing"),
    "no table": ("model = 3\n" + INPUT, "[model] must be a table, but is 3"),
    "a list of tables": (MODEL + INPUT + "[[recipe]]\nlr = 1.0", "[recipe] must be a table"),
    "no architecture": ("[model]\nfinal = 'final.safetensors'\n" + INPUT, "or arch = 'mlp', but has neither"),
    "two": (MODEL + "factory = 'net.py:build'\n" + INPUT, "either factory or arch, but has both"),
    "no callable": (FULL.replace("net.py:build", "net.py"), "must read 'file.py:callable'"),
    "no such factory file": (
        FULL.replace("net.py", "nte.py"),
        "[model] factory must be a file, but 'nte.py'",
    ),
    "folder": (MODEL.replace("final.safetensors", ".") + INPUT, "[model] final must be a file, but '.'"),
    "number as file": (MODEL + INPUT + "[data]\ntrain = 3\ncontrol = 'control.npz'", "a file name, but is 3"),
    "unknown arch": (MODEL.replace("mlp", "cnn") + INPUT, "'cnn', valid names are mlp"),
    "unknown activation": (MODEL + "activation = 'reul'\n" + INPUT, "'reul', did you mean 'relu'?"),
    "stray activation": (
        FULL.replace("[input]", "activation = 'relu'\n[input]"),
        "must have activation only beside arch",
    ),
    "shape a number": (MODEL + "[input]\nshape = 6", "positive whole numbers, but is 6"),
    "shape of zero": (MODEL + "[input]\nshape = [0, 3]", "positive whole numbers, but is [0, 3]"),
    "shape of floats": (MODEL + "[input]\nshape = [2.0]", "positive whole numbers, but is [2.0]"),
    "shape of booleans": (MODEL + "[input]\nshape = [true]", "positive whole numbers, but is [True]"),
    "empty range": (MODEL + INPUT + "low = 1\nhigh = 1", "[input] high must be above low = 1"),
    "boolean": (MODEL + INPUT + "low = true", "[input] low must be a valid number, but is True"),
    "text": (MODEL + INPUT + "low = '0'", "[input] low must be a valid number, but is '0'"),
    "nan": (MODEL + INPUT + "low = nan", "[input] low must be a finite number, but is nan"),
    "infinity": (MODEL + INPUT + "high = inf", "[input] high must be a finite number, but is inf"),
    "mean too long": (
        MODEL + INPUT + "mean = [1, 2]",
        "must broadcast to [input] shape [1, 2, 3], but has shape [2]",
    ),
    "mean too deep": (MODEL + INPUT + "mean = [[[[1]]]]", "but has shape [1, 1, 1, 1]"),
    "ragged mean": (
        MODEL + INPUT + "mean = [[1], [1, 2]]",
        "mean must be a number, a list of numbers or a .npy",
    ),
    "boolean in mean": (MODEL + INPUT + "mean = [1, true]", "or a .npy file, but is [1, True]"),
    "nan in mean": (MODEL + INPUT + "mean = nan", "mean must be finite"),
    "mean file": (MODEL + INPUT + "mean = 'm.npy'", "mean must be a file, but 'm.npy' does not exist"),
    "mean no array": (MODEL + INPUT + "mean = 'net.py'", "but 'net.py' cannot be read"),
    "scale": (MODEL + INPUT + "scale = [1, 0, 1]", "nowhere zero"),
    "norm": (MODEL + INPUT + "sample_norm = 0", "sample_norm must be greater than 0, but is 0"),
    "loss": (
        MODEL + INPUT + "[recipe]\nloss = 'msee'",
        "[recipe] loss must be a known name, but is 'msee', did you",
    ),
    "reduction": (MODEL + INPUT + "[recipe]\nreduction = 'average'", "valid names are mean, sum"),
    "labels": (MODEL + INPUT + "[recipe]\nlabels = 'one-hot'", "did you mean 'onehot'?"),
    "optimizer": (MODEL + INPUT + "[recipe]\noptimizer = 'adamm'", "did you mean 'adam"),
    "lr": (MODEL + INPUT + "[recipe]\nlr = 0", "[recipe] lr must be greater than 0, but is 0"),
    "steps": (
        MODEL + INPUT + "[recipe]\nsteps = 10.0",
        "[recipe] steps must be a valid integer, but is 10.0",
    ),
    "momentum": (MODEL + INPUT + "[recipe]\nmomentum = 1", "[recipe] momentum must be less than 1, but is 1"),
    "decay": (
        MODEL + INPUT + "[recipe]\nweight_decay = -1e-4",
        "must be greater than or equal to 0, but is -0.0001",
    ),
    "batch": (
        MODEL + INPUT + "[recipe]\nbatch_size = true",
        "batch_size must be a valid integer, but is True",
    ),
    "no control": (MODEL + INPUT + "[data]\ntrain = 'train.npz'", "[data] control is missing"),
    "names": (
        MODEL + INPUT + "[attack]\nnames = 'haim'",
        "[attack] names must be a valid list, but is 'haim'",
    ),
    "name": (MODEL + INPUT + "[attack]\nnames = [1]", "[attack] names 0 must be a valid string, but is 1"),
    "samples": (MODEL + INPUT + "[attack]\nsamples = 0", "[attack] samples must be greater than 0, but is 0"),
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(base, text, sentence):
    message = refusal(base, text)
    assert "has 1 problem: " in message and sentence in message


def test_files_that_are_no_target(base):
    assert "at line 2" in refusal(base, "[model]\narch mlp")
    (base / "TARGET.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TargetError, match="valid TOML"):
        read_target(base / "TARGET.toml")
    for path in (base / "other.toml", base):
        with pytest.raises(TargetError, match=r"cannot be read .*check the path"):
            read_target(path)


# -- evidence -----------------------------------------------------------


def test_evidence_from_a_factory_computes_the_model(base):
    evidence = load(write(base, FULL))
    x = torch.rand(3, 1, 2, 3, dtype=torch.float64)
    u = (x - 0.5) / torch.tensor([2.0, 1, 1], dtype=torch.float64)
    assert torch.equal(evidence.input.encode(x), u)
    assert torch.allclose(evidence.output(u), net(1).double()(u), atol=1e-12)
    assert torch.allclose(evidence.output(u, node=0), net(0).double()(u), atol=1e-12)
    assert evidence.recipe.lr == 0.02 and evidence.chain is not None


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_evidence_rebuilt_from_weights(base, prefix):
    state = {prefix + name: tensor for name, tensor in net(1).state_dict().items()}
    save_file(state, base / "final.safetensors")
    text = MODEL + 'init = "init.safetensors"\nactivation = "relu"\n' + INPUT
    evidence = load(write(base, text))
    u = torch.rand(3, 1, 2, 3, dtype=torch.float64)
    assert torch.allclose(evidence.output(u), net(1).double()(u), atol=1e-12)
    assert set(evidence.init) == set(evidence.final) == set(net(0).state_dict())


def test_evidence_needs_no_data_beyond_their_names(base):
    (base / "train.npz").write_text("not read")
    assert load(write(base, FULL)).final


def test_a_lightning_checkpoint_with_a_factory(base):
    state = {f"model.{name}": tensor for name, tensor in net(1).state_dict().items()}
    torch.save({"state_dict": state, "epoch": 1}, base / "last.ckpt")
    evidence = load(write(base, FULL.replace("final.safetensors", "last.ckpt")))
    assert set(evidence.final) == set(net(1).state_dict())


def test_pickles_need_trust(base):
    torch.save(net(1), base / "final.pt")
    path = write(base, MODEL.replace("final.safetensors", "final.pt") + INPUT)
    with pytest.raises(CheckpointError, match="--trust-pickle"):
        load(path)
    assert load(path, trust_pickle=True).final


def test_weights_that_contradict_the_target(base):
    with pytest.raises(CheckpointError, match=r"7 input features.*check \[input\] shape"):
        load(write(base, MODEL + "[input]\nshape = [7]"))
    with pytest.raises(
        TargetError, match="init must hold the weights before training, but holds those of final"
    ):
        load(write(base, FULL.replace("init.safetensors", "final.safetensors")))
    save_file({"0.weight": torch.ones(2, 6)}, base / "init.safetensors")
    with pytest.raises(CheckpointError, match="the init weights must have the model's keys"):
        load(write(base, FULL))


# -- truth --------------------------------------------------------------


def test_truth_is_what_was_saved(base):
    truth = read_target(write(base, FULL)).truth()
    with np.load(base / "train.npz") as saved:
        assert torch.equal(truth.train, torch.from_numpy(saved["x"]).double())
        assert torch.equal(truth.train_label, torch.from_numpy(saved["y"]).double())
    assert truth.train.dtype is torch.float64 and truth.train.shape == (4, 1, 2, 3)
    assert truth.control.shape == (5, 1, 2, 3) and truth.control_label.shape == (5,)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64, np.bool_])
def test_flat_rows_of_any_dtype_and_no_labels(base, dtype):
    rows = np.arange(24).reshape(4, 6) % 5 == 0
    np.savez(base / "train.npz", x=rows.astype(dtype))
    truth = read_target(write(base, FULL)).truth()
    assert torch.equal(truth.train, torch.from_numpy(rows).double().reshape(4, 1, 2, 3))
    assert truth.train_label is None


def test_compressed_and_one_hot(base):
    np.savez_compressed(base / "train.npz", x=np.eye(6), y=np.eye(6))
    assert read_target(write(base, FULL)).truth().train_label.shape == (6, 6)


X = np.linspace(0, 1, 24).reshape(4, 1, 2, 3)
BAD_ROWS = {
    "no x": ({"X_train": X, "y": np.ones(4)}, "must hold arrays x and y, but holds X_train, y"),
    "shape": ({"x": X.reshape(4, 2, 3)}, r"of shape \[n, 1, 2, 3\] or \[n, 6\], but has \[4, 2, 3\]"),
    "one row": ({"x": X[0]}, r"but has \[1, 2, 3\]"),
    "scalar": ({"x": np.ones(())}, r"shape \[\]; encode it as numbers"),
    "empty": ({"x": X[:0]}, "at least one row"),
    "nan": ({"x": X * np.nan}, "finite numbers, but x has NaN"),
    "infinite y": ({"x": X, "y": np.full(4, np.inf)}, "finite numbers, but y has NaN or infinity"),
    "labels": ({"x": X, "y": np.ones(3)}, "one y for each of the 4 rows of x, but has 3"),
    "words": ({"x": X, "y": np.array(list("abcd"))}, "hold y as an array of numbers, but it has dtype <U1"),
    "complex": ({"x": X + 0j}, "dtype complex128"),
    "objects": ({"x": np.array([X, None], dtype=object)}, "cannot be read .*Object arrays"),
    "uint8": (
        {"x": (X * 255).astype(np.uint8)},
        r"low = 0.0 and high = 1.0, but spans 0 to 255; divide uint8 .* by 255",
    ),
    "standardised": ({"x": X * 4 - 2}, "spans -2 to 2; scale x, or correct low and high"),
    "too few": ({"x": X[:3]}, r"at most the 3 rows of train\.npz, but n larger than rows was given \(4\)"),
}


@pytest.mark.parametrize(("arrays", "sentence"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_bad_rows_get_one_sentence(base, arrays, sentence):
    np.savez(base / "train.npz", **arrays)
    with pytest.raises(TargetError, match=sentence) as caught:
        read_target(write(base, FULL)).truth()
    assert "\n" not in str(caught.value)


def _bytes(**arrays: np.ndarray) -> bytes:
    np.savez(file := io.BytesIO(), **arrays)
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"text", _bytes(x=X)[:200], b"\x80\x04N."], ids=len)
def test_files_that_are_no_npz(base, content):
    (base / "control.npz").write_bytes(content)
    with pytest.raises(TargetError, match=r"control\.npz must be an npz file .*numpy\.savez"):
        read_target(write(base, FULL)).truth()


def test_a_single_array_is_no_npz(base):
    np.save(base / "x.npy", X)
    with pytest.raises(TargetError, match="single array"):
        read_target(write(base, FULL.replace("train.npz", "x.npy"))).truth()


def test_rounding_at_the_ends_of_the_range_is_forgiven(base):
    np.savez(base / "train.npz", x=X * (1 + 2e-5))
    assert read_target(write(base, FULL)).truth().train.max() > 1


def test_control_rows_that_were_trained_on(base):
    with np.load(base / "train.npz") as saved:
        np.savez(base / "control.npz", x=np.concatenate([saved["x"][:2], X.astype(np.float32)]))
    truth = read_target(write(base, FULL)).truth()
    assert (len(truth.control), truth.removed) == (4, 2)
    with np.load(base / "train.npz") as saved:
        np.savez(base / "control.npz", x=saved["x"])
    with pytest.raises(TargetError, match=r"occur in train\.npz; supply other rows"):
        read_target(write(base, FULL)).truth()


def test_an_audit_needs_data(base):
    with pytest.raises(TargetError, match=r"no \[data\] table; add one with train and control"):
        read_target(write(base, MODEL + INPUT)).truth()
