"""Snapshots: two lines in a training script leave a folder that the rest of exhume can read."""

from __future__ import annotations

import copy
import inspect
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from exhume.checkpoints import fingerprint
from exhume.errors import CheckpointError, ModelError, OutputError, TargetError
from exhume.evidence import InputSpec, Recipe
from exhume.snapshot import Snapshot, snapshot
from exhume.targets import load, read_target

SPEC = InputSpec(shape=(1, 2, 3), low=0.0, high=1.0)
RECIPE = Recipe(loss="mse", reduction="mean", optimizer="sgd", lr=1e-05, steps=3)


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), activation(), nn.Dropout(0.5), nn.Linear(5, 2))


class Tied(nn.Module):
    """Not a plain perceptron: one weight twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("gain", torch.tensor(2.0))

    def forward(self, u: Tensor) -> Tensor:
        return self.gain * self.second(torch.relu(self.first(u.flatten(1))))


TIED = f"import torch\nfrom torch import Tensor, nn\n{inspect.getsource(Tied)}"


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(4, 1, 2, 3)).square().mean().backward()
        optimizer.step()


def rng() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002


def assert_same_outputs(target: Path, init: nn.Module, final: nn.Module) -> None:
    evidence = load(target)
    u = torch.rand(5, 1, 2, 3, dtype=torch.float64)
    for model, node in ((init, 0.0), (final, 1.0)):
        wanted = copy.deepcopy(model).eval().double()(u)
        assert torch.allclose(evidence.output(u, node), wanted, atol=1e-12)


# -- round trip ---------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.ELU])
def test_a_plain_perceptron_needs_no_factory(tmp_path, activation):
    model = mlp(activation)
    init = copy.deepcopy(model)
    snap = snapshot(model, tmp_path / "audit", input=SPEC, recipe=RECIPE)
    train(model)
    target = snap.finish()
    assert target == tmp_path / "audit" / "TARGET.toml"
    assert_same_outputs(target, init, model)
    evidence = load(target)
    assert evidence.recipe == RECIPE and evidence.chain is not None
    assert (evidence.input.shape, evidence.input.low, evidence.input.high) == ((1, 2, 3), 0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_keep_their_dtype(tmp_path, dtype):
    model = mlp().to(dtype)
    snapshot(model, tmp_path, input=SPEC)
    assert all(tensor.dtype is dtype for tensor in load_file(tmp_path / "init.safetensors").values())


def test_tied_weights_and_buffers_are_saved_for_a_factory(tmp_path):
    model = Tied()
    init = copy.deepcopy(model)
    (tmp_path / "net.py").write_text(TIED)
    snap = snapshot(model, tmp_path / "audit", input=SPEC, factory="../net.py:Tied")
    train(model)
    target = snap.finish()
    assert set(load_file(tmp_path / "audit" / "final.safetensors")) == set(model.state_dict())
    assert_same_outputs(target, init, model)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, torch.compile, lambda model: torch.compile(nn.DataParallel(model))]
)
def test_wrappers_before_or_after_the_snapshot(tmp_path, wrap):
    before, after = mlp(), mlp()
    snap = snapshot(wrap(before), tmp_path / "before", input=SPEC)
    assert set(load_file(tmp_path / "before" / "init.safetensors")) == set(before.state_dict())
    train(before)
    assert load(snap.finish()).final
    snap = snapshot(after, tmp_path / "after", input=SPEC)
    train(after)
    assert load(snap.finish(wrap(after))).final


def test_a_wrapper_of_the_users_own_is_no_wrapper(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = mlp()

        def forward(self, u: Tensor) -> Tensor:
            return 3 * self.module(u)

    snapshot(Scaled(), tmp_path, input=SPEC)
    assert "module.1.weight" in load_file(tmp_path / "init.safetensors")
    assert "\n# factory" in (tmp_path / "TARGET.toml").read_text()


def test_a_lost_session_can_still_finish(tmp_path):
    model = mlp()
    snapshot(model, tmp_path, input=SPEC)
    train(model)
    assert load(Snapshot(model, tmp_path).finish()).init


# -- the target file ----------------------------------------------------


def test_mean_and_scale_become_numbers_or_files(tmp_path):
    mean = torch.rand(1, 2, 3)
    spec = InputSpec(shape=(1, 2, 3), mean=mean, scale=torch.tensor(0.25), sample_norm=28.0)
    model = mlp()
    snap = snapshot(model, tmp_path, input=spec)
    train(model)
    found = read_target(snap.finish()).input
    assert torch.equal(found.mean, mean.double()) and found.scale == 0.25 and found.sample_norm == 28.0
    assert (tmp_path / "mean.npy").exists() and not (tmp_path / "scale.npy").exists()


def test_what_is_unknown_is_left_to_fill_in(tmp_path):
    snapshot(mlp(), tmp_path, input=InputSpec(shape=(6,)))
    text = (tmp_path / "TARGET.toml").read_text()
    for key in ("low", "mean", "sample_norm", "loss", "lr", "batch_size", "[data]", "train", "samples"):
        assert f"\n# {key}" in text
    assert tomllib.loads(text)["recipe"] == {}


def test_a_model_that_weights_cannot_give_back_asks_for_a_factory(tmp_path):
    model = Tied()
    snap = snapshot(model, tmp_path, input=SPEC)
    train(model)
    target = snap.finish()
    with pytest.raises(TargetError, match=r"has neither"):
        read_target(target)
    (tmp_path / "net.py").write_text(TIED)
    text = target.read_text().replace("# factory", "factory").replace(":build", ":Tied")
    target.write_text(text)
    assert load(target).final


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.LeakyReLU(0.3), nn.Linear(5, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2), nn.Sigmoid()),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)),
    ],
    ids=["other slope", "two activations", "activated output", "batch norm", "convolution"],
)
def test_near_perceptrons_are_not_taken_for_one(tmp_path, model):
    snapshot(model, tmp_path, input=SPEC)
    assert "arch" not in tomllib.loads((tmp_path / "TARGET.toml").read_text())["model"]


# -- what stays as it was -----------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_states_stay_as_they_were(tmp_path, training):
    model = nn.Sequential(mlp(), nn.BatchNorm1d(2)).train(training)
    model(torch.rand(4, 1, 2, 3)).sum().backward()
    weights, states = fingerprint(model.state_dict()), rng()
    gradients = [p.grad.clone() for p in model.parameters()]
    snap = snapshot(model, tmp_path, input=SPEC)
    snap.finish()
    assert fingerprint(model.state_dict()) == weights and rng() == states
    assert all(module.training is training for module in model.modules())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_init_is_not_the_tensor_in_training(tmp_path):
    model = mlp()
    before = fingerprint(model.state_dict())
    snapshot(model, tmp_path, input=SPEC)
    train(model)
    assert fingerprint(load_file(tmp_path / "init.safetensors")) == before


# -- folders ------------------------------------------------------------


def test_a_second_run_replaces_an_earlier_snapshot(tmp_path):
    first = snapshot(mlp(), tmp_path, input=SPEC)
    first.finish()
    model = mlp()
    second = snapshot(model, tmp_path, input=SPEC, recipe=RECIPE)
    assert not (tmp_path / "final.safetensors").exists()  # it belonged to the first init
    train(model)
    assert load(second.finish()).recipe == RECIPE


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(OutputError, match="holds something else; choose another"):
            snapshot(mlp(), folder, input=SPEC)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_an_edited_target_is_not_overwritten(tmp_path):
    target = snapshot(mlp(), tmp_path, input=SPEC).finish()
    files = sorted(p.name for p in tmp_path.iterdir())
    target.write_text(edited := target.read_text() + "# mine\n")
    with pytest.raises(OutputError, match=r"TARGET\.toml was edited since; choose another"):
        snapshot(mlp(), tmp_path, input=SPEC)
    assert target.read_text() == edited and sorted(p.name for p in tmp_path.iterdir()) == files


# -- misuse, told before training ---------------------------------------


def _refused(
    folder: Path, kind: type[Exception], sentence: str, model: nn.Module, spec: InputSpec, recipe: Recipe
):
    with pytest.raises(kind, match=sentence):
        snapshot(model, folder, input=spec, recipe=recipe)
    assert not folder.exists()


def test_bad_arguments_write_nothing(tmp_path):
    folder, none = tmp_path / "audit", Recipe()
    _refused(
        folder, TargetError, "recipe .* loss must be .* did you mean 'mse'", mlp(), SPEC, Recipe(loss="mes")
    )
    _refused(folder, TargetError, "recipe .* lr must be greater than 0", mlp(), SPEC, Recipe(lr=-1.0))
    _refused(folder, TargetError, "high must be above low", mlp(), InputSpec(shape=(6,), low=1, high=0), none)
    _refused(
        folder, TargetError, "mean must broadcast", mlp(), InputSpec(shape=(6,), mean=torch.ones(5)), none
    )
    _refused(folder, ModelError, "must accept inputs of shape", mlp(), InputSpec(shape=(7,)), none)
    _refused(folder, ModelError, "weights that are tensors, but has none", nn.ReLU(), SPEC, none)
    _refused(folder, ModelError, "but weight, bias; run one batch", nn.LazyLinear(3), SPEC, none)
    broken = mlp()
    nn.init.constant_(broken[1].weight, torch.nan)
    _refused(folder, CheckpointError, "must be finite", broken, SPEC, none)


def test_finish_wants_the_same_network(tmp_path):
    snap = snapshot(mlp(), tmp_path, input=SPEC)
    with pytest.raises(
        CheckpointError, match=r"but differs in 1\.bias, 1\.weight, 4\.weight; give finish\(\) the model"
    ):
        snap.finish(nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2)))
    assert not (tmp_path / "final.safetensors").exists()
    (tmp_path / "init.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        snap.finish()
