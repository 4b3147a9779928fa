"""Train a small network fast; for plain SGD the first layer is trained in the span of the data."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exhume.errors import ExhumeError, ModelError, nearest
from exhume.victims.in_span import InSpan, leading_linear

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "logistic": lambda out, y: F.softplus(-y * out).mean(),
    "cross-entropy": F.cross_entropy,
}
OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class TrainConfig:
    """A training recipe.

    Args:
        loss: "mse", mean over samples and outputs of (f - y)^2; "logistic", mean of log(1 + exp(-y f)) with
            y = +-1; or "cross-entropy" with class indices.
        lr: learning rate.
        max_steps: updates at most.
        tolerance: stop as soon as the loss on all data, looked at before every epoch, is below this.
        batch_size: samples of an update; None for all. The last batch of an epoch may be smaller.
        shuffle: draw a new order every epoch; otherwise batches come in the order of the data.
        momentum: of SGD.
        weight_decay: L2 penalty as in torch.optim, decoupled for "adamw".
        optimizer: "sgd", "adam" or "adamw".
        dtype: of parameters and data.
        seed: of the order, and of layers that draw random numbers.
        loss_scaled: divide every step by the loss, which is gradient descent on its logarithm: exponentially small
            losses, and the directions they lead to, are reached in thousands of steps instead of millions.
        decay_share: patterns of parameter names, and their weight decay relative to `weight_decay`; the first that
            fits counts.

    Raises:
        ExhumeError: an unknown name, a number out of range, or momentum for an optimizer that has its own.
    """

    loss: str = "mse"
    lr: float = 0.02
    max_steps: int = 3000
    tolerance: float = 1e-10
    batch_size: int | None = None
    shuffle: bool = False
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    seed: int = 0
    loss_scaled: bool = False
    decay_share: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name, valid in (("loss", LOSSES), ("optimizer", OPTIMIZERS)):
            value = getattr(self, name)
            if value not in valid:
                raise ExhumeError(f"{name} must be a known name, but is {value!r}; {nearest(value, valid)}")
        for name in ("lr", "max_steps", "tolerance", "momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ExhumeError(
                    f"{name} must be a finite number >= 0, but is {getattr(self, name)}; change it"
                )
        if self.batch_size is not None and self.batch_size < 1:
            raise ExhumeError(f"batch_size must be at least 1, but is {self.batch_size}; None takes all data")
        if self.loss_scaled and self.tolerance < 1e-250:
            raise ExhumeError(
                "tolerance must be at least 1e-250 with loss_scaled, which divides by the loss, but is"
                f" {self.tolerance}; change it"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ExhumeError(f"momentum must be 0 for {self.optimizer}, but is {self.momentum}; use sgd")


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run.

    Args:
        init: state dict before training, in the dtype of the run.
        final: state dict after.
        loss: on all data, after.
        steps: updates made.
        seconds: wall-clock time.
    """

    init: dict[str, Tensor]
    final: dict[str, Tensor]
    loss: float
    steps: int
    seconds: float


def train(model: nn.Module, u: Tensor, y: Tensor, config: TrainConfig) -> Trained:
    """Train a copy of the model.

    Under SGD in float64 with fewer samples than features, a first Linear layer is trained in the span of the
    data: the same weights to rounding, at a small part of the cost. In float32 the rounding is part of the
    victim, so there every step is taken as written.

    Args:
        model: never changed.
        u: model inputs (after mean and scale), [n, *shape].
        y: targets, [n] or [n, C]; for "cross-entropy" class indices [n].
        config: the recipe.

    Raises:
        ExhumeError: the loss stopped being finite.
        ModelError: targets do not fit the inputs or the outputs.
    """
    began = time.perf_counter()
    twin = copy.deepcopy(model).to(config.dtype).train()
    init = _snapshot(twin)
    device = next(twin.parameters()).device
    u, y = u.to(device, config.dtype), y.to(device)
    if len(u) != len(y):
        raise ModelError(
            f"each sample must have a target, but there are {len(u)} samples and {len(y)} targets;"
            " check that they belong together"
        )
    y = y if config.loss == "cross-entropy" else y.to(config.dtype).reshape(len(u), -1)
    spanned = config.optimizer == "sgd" and config.dtype == torch.float64
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        if spanned and (found := leading_linear(twin, u)):
            first, rest = found
            layer = InSpan(first, u.flatten(1))
            names = {id(p): name for name, p in twin.named_parameters()}
            loss, steps = _descend(
                nn.Sequential(layer, *rest), layer.rows, y, config, names, names[id(first.weight)]
            )
            first.weight.data = layer.weight()
        else:
            names = {id(p): name for name, p in twin.named_parameters()}
            loss, steps = _descend(twin, u, y, config, names)
    return Trained(init, _snapshot(twin), loss, steps, time.perf_counter() - began)


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _descend(
    model: nn.Module, u: Tensor, y: Tensor, config: TrainConfig, names: dict[int, str], otherwise: str = ""
) -> tuple[float, int]:
    """Train in place; return the final loss on all data and the number of updates."""
    optimizer = _optimizer(model, config, names, otherwise)
    size = min(config.batch_size or len(u), len(u))
    epoch = math.ceil(len(u) / size)
    for step, batch in zip(range(config.max_steps), _batches(len(u), size, config), strict=False):
        loss = _loss(model, u[batch], y[batch], config)
        if step % epoch == 0:
            overall = _finite(loss.item() if epoch == 1 else _evaluate(model, u, y, config), step)
            if overall < config.tolerance:
                return overall, step
        optimizer.zero_grad()
        (loss.log() if config.loss_scaled else loss).backward()
        optimizer.step()
    return _finite(_evaluate(model, u, y, config), config.max_steps), config.max_steps


def _optimizer(
    model: nn.Module, config: TrainConfig, names: dict[int, str], otherwise: str
) -> torch.optim.Optimizer:
    """The optimiser; parameters go by their `names` by identity, and by `otherwise` if they have none."""
    params: list[dict[str, object]] = []
    for p in (p for p in model.parameters() if p.requires_grad):
        name = names.get(id(p), otherwise)
        share = next((share for pattern, share in config.decay_share if fnmatch(name, pattern)), 1.0)
        params.append({"params": [p], "weight_decay": share * config.weight_decay})
    match config.optimizer:
        case "adam":
            return torch.optim.Adam(params, config.lr)
        case "adamw":
            return torch.optim.AdamW(params, config.lr)
        case _:
            return torch.optim.SGD(params, config.lr, config.momentum)


def _batches(n: int, size: int, config: TrainConfig) -> Iterator[Tensor | slice]:
    """Endless batches of `size` samples, the last of each epoch possibly smaller."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        if config.shuffle:
            yield from torch.randperm(n, generator=generator).split(size)
        else:
            yield from (slice(i, i + size) for i in range(0, n, size))


def _loss(model: nn.Module, u: Tensor, y: Tensor, config: TrainConfig) -> Tensor:
    out = model(u).reshape(len(u), -1)
    if config.loss != "cross-entropy" and out.shape != y.shape:
        raise ModelError(
            f"targets must have the shape {tuple(out.shape)} of the outputs, but have {tuple(y.shape)};"
            " give one target for each output"
        )
    return LOSSES[config.loss](out, y)


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise ExhumeError(f"training must stay finite, but its loss was {loss} after {step} steps; lower lr")
    return loss


def _evaluate(model: nn.Module, u: Tensor, y: Tensor, config: TrainConfig) -> float:
    model.eval()
    with torch.no_grad():
        loss = _loss(model, u, y, config).item()
    model.train()
    return loss
