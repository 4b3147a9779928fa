import copy
import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from exhume.errors import ExhumeError, ModelError
from exhume.evidence import Evidence, InputSpec
from exhume.functional import ACTIVATIONS as KNOWN
from exhume.functional import recognise
from exhume.victims import data as data_module
from exhume.victims import packaged
from exhume.victims.data import load, one_norm, split
from exhume.victims.deep import residual, transformer
from exhume.victims.in_span import leading_linear
from exhume.victims.nets import ACTIVATIONS, mlp
from exhume.victims.packaged import FASHION_VARIABLE, DataUnavailable
from exhume.victims.train import LOSSES, TrainConfig, train
from exhume.victims.victim import Case, make_victim

PACKAGED = {
    "mnist": (5000, (1, 28, 28)),
    "faces": (139, (1, 25, 25)),
    "digits": (1797, (1, 8, 8)),
    "breast-cancer": (569, (30,)),
}
load_once = cache(load)


def keys(x):
    return {row.numpy().tobytes() for row in x}


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_data_is_what_it_says(name):
    found = load_once(name)
    rows, shape = PACKAGED[name]
    assert found.x.shape == (rows, *shape)
    assert found.shape == shape
    assert (found.x.dtype, found.y.dtype) == (torch.float64, torch.int64)
    assert len(keys(found.x)) == rows
    assert set(found.target.tolist()) == {-1.0, 1.0}
    if name == "breast-cancer":
        assert found.low is None
        assert found.high is None
    else:
        assert (found.x.min(), found.x.max()) == (found.low, found.high) == (0.0, 1.0)


def test_the_target_is_parity_for_digits_and_faces_come_first():
    digits = load_once("digits")
    assert torch.equal(digits.target, 1.0 - 2.0 * (digits.y % 2))
    assert torch.equal(
        load_once("faces").target, torch.tensor([1.0] * 100 + [-1.0] * 39, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", PACKAGED)
def test_a_split_is_disjoint_balanced_and_centred_by_public_rows_only(name):
    dataset = load_once(name)
    found = split(dataset, 20, seed=3, control=31)
    assert (len(found.train.x), len(found.control.x)) == (20, 31)
    assert not keys(found.train.x) & keys(found.control.x)
    assert found.train.y.sum() == 0
    assert found.control.y.sum() == 1
    used = keys(found.train.x) | keys(found.control.x)
    public = torch.stack([row for row in dataset.x if row.numpy().tobytes() not in used])
    assert len(public) == len(dataset.x) - 51
    torch.testing.assert_close(found.spec.mean, public.mean(0))
    if name == "breast-cancer":
        seen = found.spec.encode(public)
        torch.testing.assert_close(seen.mean(0), torch.zeros(30, dtype=torch.float64), atol=1e-10, rtol=0)
        torch.testing.assert_close(seen.std(0, correction=0), torch.ones(30, dtype=torch.float64))
    else:
        assert found.spec.scale is None
    truth = found.truth()
    assert truth.public_mean is not None
    assert torch.equal(truth.train, found.train.x)


def test_a_split_depends_on_its_seed_alone_and_train_not_on_the_control():
    dataset, state = load_once("digits"), torch.random.get_rng_state()
    first = split(dataset, 10, seed=0)
    assert torch.equal(first.train.x, split(dataset, 10, seed=0, control=50).train.x)
    assert not torch.equal(first.train.x, split(dataset, 10, seed=1).train.x)
    assert torch.equal(state, torch.random.get_rng_state())


def test_labels_stay_with_their_rows():
    dataset = load_once("digits")
    label = {row.numpy().tobytes(): int(y) for row, y in zip(dataset.x, dataset.y, strict=True)}
    found = split(dataset, 10, seed=0)
    assert [label[row.numpy().tobytes()] for row in found.train.x] == found.train.label.tolist()
    assert torch.equal(found.train.y, 1.0 - 2.0 * (found.train.label % 2))


@pytest.mark.parametrize(("n", "control"), [(60, 30), (0, 5), (5, 0)])
def test_a_split_that_leaves_no_public_row_is_refused(n, control):
    with pytest.raises(ExhumeError, match="ask for"):
        split(load_once("faces"), n, seed=0, control=control)


def test_repeated_rows_are_dropped(monkeypatch):
    x = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    twice = packaged.Packaged(x, np.array([1, 0, 1]), (1,), "planted")
    monkeypatch.setitem(data_module.PACKAGED, "digits", lambda: twice)
    assert load("digits").x.tolist() == x[:2].tolist()


def test_missing_data_says_how_to_get_it(monkeypatch, tmp_path):
    with pytest.raises(ExhumeError, match="did you mean 'mnist'"):
        load("mnits")
    monkeypatch.delenv(FASHION_VARIABLE, raising=False)
    with pytest.raises(DataUnavailable, match="dataset-fashion-mnist"):
        load("fashion")
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"not an archive")
    monkeypatch.setenv(FASHION_VARIABLE, str(broken))
    with pytest.raises(DataUnavailable, match="readable"):
        load("fashion")
    with pytest.raises(DataUnavailable, match=r"pip install 'exhume\[demo\]'"):
        packaged._package("a_package_that_is_not_there")


def test_fashion_is_read_from_its_file(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "f.npz", x_train=x, y_train=np.arange(40) % 10)
    monkeypatch.setenv(FASHION_VARIABLE, str(tmp_path / "f.npz"))
    found = load("fashion")
    assert torch.equal(found.x, torch.tensor(x / 255))
    assert found.target[:3].tolist() == [1.0, -1.0, 1.0]


def test_a_net_is_recognised_and_seeded_without_the_global_generator():
    state = torch.random.get_rng_state()
    net = mlp((12, 7, 5, 2), "tanh", seed=4)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(1)
    assert torch.equal(net[1].weight, mlp((12, 7, 5, 2), seed=4)[1].weight)
    assert not torch.equal(net[1].weight, mlp((12, 7, 5, 2), seed=5)[1].weight)
    assert recognise(net, (3, 4)).activation == "tanh"
    assert net(torch.zeros(2, 3, 4, dtype=torch.float64)).shape == (2, 2)
    for a, b in zip(
        net.parameters(), mlp((12, 7, 5, 2), seed=4, dtype=torch.float32).parameters(), strict=True
    ):
        assert torch.equal(a.float(), b)
    assert all("bias" not in name for name, _ in mlp((3, 4, 1), bias=False).named_parameters())
    assert set(ACTIVATIONS) == set(KNOWN)
    with pytest.raises(ModelError, match="did you mean 'relu'"):
        mlp((3, 4, 1), "reluu")
    with pytest.raises(ModelError, match="sizes"):
        mlp((3,))


def problem(n=9, d=15, outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, 1, 3, d // 3, generator=generator, dtype=torch.float64)
    y = 2.0 * torch.randint(0, 2, (n, outputs), generator=generator).double() - 1.0
    return u, y


class Wrapped(nn.Module):
    """Hides the layers, so that every step is taken as written."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, u):
        return self.inner(u)


RECIPES = {
    "plain": TrainConfig(),
    "momentum": TrainConfig(momentum=0.9),
    "decay": TrainConfig(weight_decay=0.05),
    "momentum and decay": TrainConfig(momentum=0.9, weight_decay=0.05),
    "batches": TrainConfig(batch_size=4, momentum=0.5, weight_decay=0.02),
    "shuffled": TrainConfig(batch_size=4, shuffle=True, momentum=0.5, weight_decay=0.02),
    "logistic": TrainConfig(loss="logistic", weight_decay=0.01),
    "cross-entropy": TrainConfig(loss="cross-entropy", momentum=0.5),
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_in_the_span_of_the_data_equals_training_as_written(recipe, depth):
    config = dataclasses.replace(RECIPES[recipe], lr=0.03, max_steps=120, tolerance=0.0)
    u, y = problem(outputs=2)
    y = (y[:, 0] > 0).long() if config.loss == "cross-entropy" else y
    net = mlp((15, *(11,) * (depth - 1), 2), "tanh", seed=1)
    assert leading_linear(net, u)
    fast, slow = train(net, u, y, config), train(Wrapped(net), u, y, config)
    assert fast.steps == slow.steps == 120
    assert fast.loss == pytest.approx(slow.loss, rel=1e-9)
    for name, value in fast.final.items():
        torch.testing.assert_close(value, slow.final[f"inner.{name}"], rtol=0, atol=1e-10)
        assert not torch.equal(value, fast.init[name])


def test_the_plain_loop_is_torch_sgd_step_by_step():
    u, y = problem()
    net, config = (
        mlp((15, 6, 1), seed=2),
        TrainConfig(lr=0.05, max_steps=20, momentum=0.9, weight_decay=0.01, batch_size=4),
    )
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(20):
        start = 4 * (step % 3)
        optimizer.zero_grad()
        ((twin(u[start : start + 4]) - y[start : start + 4]) ** 2).mean().backward()
        optimizer.step()
    found = train(net, u, y, config)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(found.final[name], value, rtol=0, atol=1e-10)
    assert found.loss == pytest.approx(((twin(u) - y) ** 2).mean().item(), rel=1e-9)


def test_batches_come_in_order_unless_shuffled_by_the_seed():
    u, y = problem()
    net = mlp((15, 6, 1))
    fixed = TrainConfig(max_steps=7, batch_size=4)
    runs = [fixed, dataclasses.replace(fixed, seed=1)]
    runs += [dataclasses.replace(fixed, shuffle=True, seed=seed) for seed in (0, 0, 1)]
    first, same, shuffled, again, other = (train(net, u, y, run).final["1.weight"] for run in runs)
    assert torch.equal(first, same)
    assert torch.equal(shuffled, again)
    assert not torch.equal(first, shuffled)
    assert not torch.equal(shuffled, other)


def test_without_decay_the_change_of_the_first_layer_lies_in_the_span_of_the_data():
    u, y = problem()
    found = train(mlp((15, 8, 1), seed=0), u, y, TrainConfig(max_steps=50, momentum=0.9, batch_size=2))
    change = found.final["1.weight"] - found.init["1.weight"]
    basis = torch.linalg.qr(u.flatten(1).T)[0]
    assert (change - change @ basis @ basis.T).norm() < 1e-13 * change.norm()


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_leaves_the_span_and_is_taken_as_written(optimizer):
    u, y = problem()
    net = mlp((15, 8, 1), seed=0)
    config = TrainConfig(optimizer=optimizer, lr=0.01, max_steps=30, weight_decay=0.1)
    found = train(net, u, y, config)
    twin = copy.deepcopy(net)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    other = kind(twin.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(30):
        other.zero_grad()
        ((twin(u) - y) ** 2).mean().backward()
        other.step()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(found.final[name], value, rtol=0, atol=1e-12)


def test_float32_is_trained_in_float32():
    u, y = problem()
    found = train(mlp((15, 8, 1)), u, y, TrainConfig(dtype=torch.float32, max_steps=10))
    assert {v.dtype for v in [*found.init.values(), *found.final.values()]} == {torch.float32}


@pytest.mark.parametrize("batch_size", [None, 4])
def test_training_stops_once_the_loss_on_all_data_is_small(batch_size):
    u, y = problem(n=6, d=30)
    config = TrainConfig(lr=0.05, max_steps=5000, tolerance=1e-8, batch_size=batch_size)
    net = mlp((30, 50, 1))
    found = train(net, u, y, config)
    assert found.steps < 5000
    assert found.loss < 1e-8
    earlier = train(net, u, y, dataclasses.replace(config, max_steps=found.steps - 1))
    assert earlier.loss > 0.5e-8


def test_neither_the_model_nor_the_global_generator_is_touched():
    u, y = problem()
    net = mlp((15, 8, 1))
    net = nn.Sequential(*net[:3], nn.Dropout(0.2), net[3]).eval()
    before, state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    found, again = (train(net, u, y, TrainConfig(max_steps=5, shuffle=True, batch_size=3)) for _ in range(2))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not net.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(found.final["1.weight"], again.final["1.weight"])


def test_the_span_is_used_only_where_it_holds():
    u, _ = problem()
    net = mlp((15, 15, 1))
    tied = copy.deepcopy(net)
    tied[3] = nn.Linear(15, 15, dtype=torch.float64)
    tied[3].weight = tied[1].weight
    frozen = copy.deepcopy(net)
    frozen[1].weight.requires_grad_(False)
    assert leading_linear(net, u)
    assert not leading_linear(tied, u)
    assert not leading_linear(frozen, u)
    assert not leading_linear(net, torch.cat([u, u]))
    assert not leading_linear(net[1:], u)
    assert leading_linear(net[1:], u.flatten(1))
    assert not leading_linear(Wrapped(net), u)
    assert not leading_linear(nn.Sequential(nn.ReLU(), net[1]), u.flatten(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "msee"}, "did you mean 'mse'"),
        ({"optimizer": "sgdd"}, "did you mean 'sgd'"),
        ({"lr": -1.0}, "lr must be"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum must be 0"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(change, words):
    with pytest.raises(ExhumeError, match=words):
        TrainConfig(**change)


def test_misuse_and_divergence_are_errors():
    u, y = problem()
    net = mlp((15, 8, 1))
    with pytest.raises(ModelError, match="targets"):
        train(net, u, y[:-1], TrainConfig())
    with pytest.raises(ModelError, match="outputs"):
        train(net, u, torch.cat([y, y], 1), TrainConfig())
    with pytest.raises(ExhumeError, match="lower lr"):
        train(net, u, y, TrainConfig(lr=1e6, max_steps=2000))


def test_losses_are_their_formulas():
    out = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64).expand(5, 3)
    torch.testing.assert_close(LOSSES["mse"](out, y), ((out - y) ** 2).mean())
    torch.testing.assert_close(LOSSES["logistic"](out, y), torch.log1p(torch.exp(-y * out)).mean())
    label = torch.tensor([0, 1, 2, 0, 1])
    wanted = (torch.logsumexp(out, 1) - out[torch.arange(5), label]).mean()
    torch.testing.assert_close(LOSSES["cross-entropy"](out, label), wanted)


def test_a_benchmark_victim_interpolates():
    drawn = split(load_once("mnist"), 20, seed=0)
    found = train(mlp((784, 2000, 1)), drawn.spec.encode(drawn.train.x), drawn.train.y, TrainConfig())
    assert found.loss < 1e-10
    assert found.steps < 1000


# --- deep networks, several outputs, one norm --------------------------------------------------------------


@pytest.mark.parametrize(("build", "features"), [(residual, 49 * 8), (transformer, 8)])
def test_deep_victims_end_in_a_linear_layer(build, features):
    before = torch.get_rng_state()
    model, again, other = (build((1, 8, 8), 8, 3, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    assert all(same) and not torch.equal(next(model.parameters()), next(other.parameters()))
    evidence = Evidence.from_module(model, input=InputSpec((1, 8, 8)))
    assert evidence.chain is None and evidence.head is not None
    assert evidence.final[evidence.head.weight].shape == (3, features)


def test_a_residual_network_has_no_normalisation_and_any_square_image_gives_a_map_of_seven():
    model = residual((3, 32, 32), 2)
    assert model[0].kernel_size == (28, 28)  # as published
    assert model(torch.zeros(1, 3, 32, 32).double()).shape == (1, 1)
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.LayerNorm) for layer in model.modules())
    with pytest.raises(ModelError, match="square images"):
        residual((3, 32, 16), 2)


def test_a_transformer_starts_at_outputs_of_zero_and_tells_the_order_of_patches():
    model = transformer((1, 8, 8), 8).requires_grad_(False)
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    assert float(model(x).abs().max()) == 0
    turned = torch.cat([x[..., 4:], x[..., :4]], 3)  # left and right patches change places
    assert float((model[:-1](x) - model[:-1](turned)).abs().max()) > 1e-3


def test_rows_of_one_norm_keep_their_direction():
    rows = split(load_once("digits"), 6, 0)
    scaled = one_norm(rows, 8.0)
    u, v = (part.spec.encode(part.control.x).flatten(1) for part in (rows, scaled))
    torch.testing.assert_close(v, 8 * u / u.norm(dim=1, keepdim=True))
    assert (scaled.spec.sample_norm, scaled.spec.low, scaled.spec.high) == (8.0, None, None)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("net", ["mlp", "residual", "transformer"])
def test_classes_are_learnt_by_every_net(net, loss):
    training = TrainConfig(loss=loss, lr=0.02, max_steps=300, tolerance=0.02)
    victim = make_victim(
        Case(data="digits", n=4, net=net, hidden=(16,), outputs=10, norm=8.0, training=training)
    )
    out = victim.evidence.output(victim.evidence.input.encode(victim.truth.train))
    assert torch.equal(out.argmax(1), victim.split.train.label)
    assert victim.evidence.recipe.labels == ("index" if loss == "cross-entropy" else "onehot")


def test_a_net_must_have_a_known_name():
    with pytest.raises(ModelError, match=r"did you mean|known name"):
        make_victim(Case(data="digits", n=4, net="resnet"))
