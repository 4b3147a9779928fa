"""A victim: a small network trained on real rows, as evidence for an attack and truth for its score."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from exhume.change import decay_factor
from exhume.equations.span import Span
from exhume.errors import ModelError, nearest
from exhume.evidence import Evidence, Recipe
from exhume.objective import Objective
from exhume.spaces import full
from exhume.truth import Truth
from exhume.victims.data import Rows, Split, load, one_norm, split
from exhume.victims.deep import residual, transformer
from exhume.victims.lazy import linearised_mlp, ntk_mlp
from exhume.victims.nets import mlp, small_start
from exhume.victims.train import TrainConfig, Trained, train

LAZY = {"ntk": ntk_mlp, "linearised": linearised_mlp}
DEEP = {"residual": residual, "transformer": transformer}


@dataclass(frozen=True)
class Case:
    """A pinned victim.

    Args:
        data: name of the data set.
        n: training rows; as many control rows are drawn.
        net: "mlp", "ntk", "linearised", "residual" or "transformer", see `nets.mlp`, `lazy` and `deep`.
        hidden: widths of the hidden layers of the first three; the one width of the others.
        outputs: 1 for targets +-1, else the number of classes, which are the targets.
        activation: between layers.
        bias: whether its layers have biases, or the "first" alone of an mlp.
        norm: that every model input is brought to; None leaves them as they are.
        training: the recipe; with "cross-entropy" rows are drawn by class.
        start: standard deviation of the initial first layer; None for PyTorch's default.
        seed: of the rows and of the initialisation.
        swap: train on the control rows instead, and call the training rows control.
    """

    data: str = "mnist"
    n: int = 20
    net: str = "mlp"
    hidden: tuple[int, ...] = (2000,)
    outputs: int = 1
    activation: str = "relu"
    bias: bool | Literal["first"] = True
    norm: float | None = None
    training: TrainConfig = field(default_factory=lambda: TrainConfig(max_steps=200_000))
    start: float | None = None
    seed: int = 0
    swap: bool = False


@dataclass(frozen=True, eq=False)
class Victim:
    """A trained victim.

    Args:
        case: how it was made.
        split: its rows.
        model: architecture with the final weights.
        trained: initial and final weights.
        evidence: what an attacker has.
        truth: what the attacker lacks.
    """

    case: Case
    split: Split
    model: nn.Module
    trained: Trained
    evidence: Evidence
    truth: Truth

    def relative_change(self) -> float:
        """|theta_f - theta_0| / |theta_0|."""
        init, final = self.trained.init, self.trained.final
        change = sum(float((final[k] - init[k]).double().square().sum()) for k in init)
        return (change / sum(float(p.double().square().sum()) for p in init.values())) ** 0.5

    def misfit_at_truth(self, equation: Span) -> float:
        """Relative misfit of an equation at the true training rows, |t - Phi' c|^2 / |t|^2."""
        spec = self.evidence.input
        u = spec.encode(self.truth.train).flatten(1)
        space = full(spec.size)
        bound = equation.bind(self.evidence, space, decay_factor(self.evidence))
        return Objective(bound, space).at(u).misfit


def make_victim(case: Case) -> Victim:
    """Draw rows, train a network on them and hand out both sides."""
    by_class = case.training.loss == "cross-entropy"
    rows = split(load(case.data), case.n, case.seed, by_class=by_class)
    return train_victim(case, rows if case.norm is None else one_norm(rows, case.norm))


def build(case: Case, shape: tuple[int, ...]) -> nn.Module:
    """The network that a case names, before training, for inputs of this shape.

    Raises:
        ModelError: an unknown network, or more than one width for other than an mlp.
    """
    dtype = case.training.dtype
    sizes = (math.prod(shape), *case.hidden, case.outputs)
    if case.net == "mlp":
        return mlp(sizes, case.activation, case.bias, seed=case.seed, dtype=dtype)
    if case.net in LAZY:
        return LAZY[case.net](sizes, case.activation, bool(case.bias), seed=case.seed, dtype=dtype)
    if case.net not in DEEP:
        raise ModelError(
            f"net must be a known name, but is {case.net!r}; {nearest(case.net, ('mlp', *LAZY, *DEEP))}"
        )
    (width,) = case.hidden
    return DEEP[case.net](shape, width, case.outputs, case.activation, seed=case.seed, dtype=dtype)


def targets(case: Case, rows: Rows) -> Tensor:
    """What a network is trained to say of some rows: +-1, or class indices, or for other losses one-hot classes."""
    if case.training.loss == "cross-entropy":
        return rows.label
    return rows.y if case.outputs == 1 else F.one_hot(rows.label, case.outputs).double()


def labels(case: Case) -> str:
    """How the recipe names what `targets` are."""
    if case.training.loss == "cross-entropy":
        return "index"
    return "pm1" if case.outputs == 1 else "onehot"


def train_victim(case: Case, rows: Split) -> Victim:
    """Train a network on given rows, of the kind the case names."""
    if case.swap:
        rows = Split(train=rows.control, control=rows.train, spec=rows.spec)
    y = targets(case, rows.train)
    if case.training.loss == "cross-entropy" and case.outputs == 1:
        case = replace(case, outputs=int(y.max()) + 1)
    model = build(case, rows.spec.shape)
    if case.start is not None:
        assert isinstance(model, nn.Sequential)
        small_start(model, case.start, case.seed)
    trained = train(model, rows.spec.encode(rows.train.x), y, case.training)
    model.load_state_dict(trained.final)
    config = case.training
    evidence = Evidence.from_module(
        model,
        input=rows.spec,
        init=trained.init,
        recipe=Recipe(
            loss=config.loss,
            reduction="mean",
            labels=labels(case),
            optimizer=config.optimizer,
            lr=config.lr,
            steps=trained.steps,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            batch_size=config.batch_size or case.n,
            decay_share=config.decay_share or None,
        ),
    )
    return Victim(case, rows, model, trained, evidence, rows.truth())
