"""The dynamics equation: the final weights are the end of a training run on the candidates.

theta_f = theta_T(z, y, lr, momentum, decay),  theta_0 the initial weights, theta_{t+1} one step of SGD after theta_t
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exhume.equations.fold import fold
from exhume.equations.losses import LOSSES
from exhume.equations.risk import DenseRisk, ModuleRisk, Risk
from exhume.equations.simulation import BoundDynamics
from exhume.errors import ExhumeError, nearest
from exhume.evidence import Evidence
from exhume.spaces import Space

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Dynamics:
    """Configuration of the dynamics equation: SGD on batches in the order of the candidates.

    Args:
        loss: "mse", "logistic" or "cross-entropy".
        steps: number of updates T.
        batch_size: samples of an update; None for all. The last batch of an epoch may be smaller.
        reduction: "mean" over samples (and outputs, except for "cross-entropy") or "sum".
        memory: bytes that stored states may take; what does not fit is recomputed.

    Raises:
        ExhumeError: an unknown name, or a number out of range.
    """

    loss: str = "mse"
    steps: int = 100
    batch_size: int | None = None
    reduction: str = "mean"
    memory: int = 512 * 2**20

    def __post_init__(self) -> None:
        for name, valid in (("loss", tuple(LOSSES)), ("reduction", REDUCTIONS)):
            if (value := getattr(self, name)) not in valid:
                raise ExhumeError(f"{name} must be a known name, but is {value!r}; {nearest(value, valid)}")
        for name in ("steps", "batch_size", "memory"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ExhumeError(f"{name} must be at least 1, but is {value}; change it")

    def bind(self, evidence: Evidence, space: Space) -> BoundDynamics:
        """Fix the evidence; a dense chain is reduced to the space exactly (see `fold`).

        Raises:
            MissingEvidence: the initial weights are unknown.
            ExhumeError: the weights did not change.
        """
        net = fold(evidence, space)
        if all(torch.equal(net.init[k], p) for k, p in net.final.items()):
            raise ExhumeError(
                "the dynamics equation needs weights that training changed, but initial and final ones agree"
                " in the search space; check both checkpoints"
            )
        shapes = {k: p.shape for k, p in net.init.items()}
        loss = LOSSES[self.loss](mean=self.reduction == "mean")
        risk: Risk = ModuleRisk(net.forward, shapes, loss)
        if net.chain is not None:
            risk = DenseRisk(net.chain, shapes, loss)
        return BoundDynamics(
            net, shapes, loss, risk, evidence.outputs, self.steps, self.batch_size, self.memory
        )
