"""A victim: a small network trained on real rows, as evidence for an attack and truth for its score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from exhume.change import decay_factor
from exhume.equations.span import Span
from exhume.evidence import Evidence, Recipe
from exhume.objective import Objective
from exhume.spaces import full
from exhume.truth import Truth
from exhume.victims.data import Split, load, split
from exhume.victims.nets import mlp, small_start
from exhume.victims.train import TrainConfig, Trained, train


@dataclass(frozen=True)
class Case:
    """A pinned victim.

    Args:
        data: name of the data set.
        n: training rows; as many control rows are drawn.
        hidden: widths of the hidden layers.
        activation: between them.
        bias: whether layers have biases, or the "first" alone.
        training: the recipe; with "cross-entropy" the net has an output for each class, and rows are drawn by class.
        start: standard deviation of the initial first layer; None for PyTorch's default.
        seed: of the rows and of the initialisation.
        swap: train on the control rows instead, and call the training rows control.
    """

    data: str = "mnist"
    n: int = 20
    hidden: tuple[int, ...] = (2000,)
    activation: str = "relu"
    bias: bool | Literal["first"] = True
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
    return train_victim(case, split(load(case.data), case.n, case.seed, by_class=by_class))


def train_victim(case: Case, rows: Split) -> Victim:
    """Train a network on given rows, of the kind the case names."""
    if case.swap:
        rows = Split(train=rows.control, control=rows.train, spec=rows.spec)
    size = rows.spec.size
    dtype = case.training.dtype
    classes = case.training.loss == "cross-entropy"
    y = rows.train.label if classes else rows.train.y
    outputs = int(y.max()) + 1 if classes else 1
    model = mlp((size, *case.hidden, outputs), case.activation, case.bias, seed=case.seed, dtype=dtype)
    if case.start is not None:
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
            labels="index" if classes else "pm1",
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
