"""From what is known of a training run to a run that can be simulated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exhume.equations.dynamics import Dynamics
from exhume.equations.simulation import Unknowns
from exhume.evidence import Evidence, Recipe

LOSSES = {"mse": "mse", "logistic": "logistic", "bce": "logistic", "cross-entropy": "cross-entropy"}


def gaps(recipe: Recipe) -> tuple[str, ...]:
    """What a simulation needs and the recipe lacks, in words; a missing learning rate can be searched for."""
    found = [f"[recipe] {name}" for name in ("loss", "steps") if getattr(recipe, name) is None]
    if recipe.loss is not None and recipe.loss not in LOSSES:
        found.append(f"a loss that can be simulated, not {recipe.loss!r}")
    if recipe.optimizer not in (None, "sgd"):
        found.append(f"SGD, not {recipe.optimizer}")
    if recipe.steps is not None and recipe.steps < 1:
        found.append("at least one step")
    return tuple(found)


def dynamics(recipe: Recipe) -> Dynamics:
    """The simulated run; mini-batches become full batches.

    The order of the samples is unknown, and in one pass over the data n / b steps on batches of b samples move the
    weights, to first order in the learning rate, as far as as many steps on all of them.

    Args:
        recipe: without gaps.
    """
    assert recipe.loss is not None and recipe.steps is not None
    return Dynamics(loss=LOSSES[recipe.loss], steps=recipe.steps, reduction=recipe.reduction or "mean")


def unknowns(evidence: Evidence, z: Tensor, u: Tensor, lr: float) -> Unknowns:
    """What the run depends on: candidates z [m, q], their labels, and the numbers of the recipe.

    Args:
        evidence: with a recipe without gaps.
        z: coordinates of the candidates.
        u: the same as model inputs [m, *shape].
        lr: learning rate.
    """
    recipe = evidence.recipe
    if recipe.reduction == "sum" and recipe.batch_size is not None:
        # A step on all samples adds up all of them, one on a batch only its own.
        lr = lr * min(recipe.batch_size / len(z), 1.0)
    numbers = (lr, recipe.momentum or 0.0, recipe.weight_decay or 0.0)
    return Unknowns(z, labels(evidence, u), *torch.tensor(numbers, dtype=torch.float64).unbind())


def labels(evidence: Evidence, u: Tensor) -> Tensor:
    """Guessed targets [m, C] of model inputs u [m, *shape], from the trained network's own outputs.

    The sign, the nearer of 0 and 1, or the largest output, by the recipe's loss and labels; the output itself for
    squared loss on labels of another kind, since it has been drawn to them.
    """
    f, recipe = evidence.output(u), evidence.recipe
    largest = F.one_hot(f.argmax(1), f.shape[1]).to(f.dtype)
    if recipe.loss == "cross-entropy":
        return largest
    if recipe.loss in ("logistic", "bce") or recipe.labels == "pm1":
        return torch.where(f > 0, 1.0, -1.0).to(f.dtype)
    if recipe.labels == "onehot":
        return largest
    return (f > 0.5).to(f.dtype) if recipe.labels == "01" else f
