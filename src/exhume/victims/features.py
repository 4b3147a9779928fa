"""Random features: a victim whose first layer is fixed and whose last layer is fitted exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exhume.evidence import Evidence, InputSpec
from exhume.truth import Truth
from exhume.victims.nets import ACTIVATIONS


@dataclass(frozen=True, eq=False)
class FeatureVictim:
    """A fitted random-feature model and its rows.

    Args:
        evidence: what an attacker has: the features, and the last layer before (zero) and after.
        train: rows it was fitted on [n, d], of norm sqrt(d).
        control: as many rows it never saw.
        loss: |phi(V x_i)' theta - y_i|^2 over |y|^2, which is rounding from p = n on.
    """

    evidence: Evidence
    train: Tensor
    control: Tensor
    loss: float

    def truth(self) -> Truth:
        """What `exhume.match` compares with; rows on a sphere have mean zero."""
        return Truth(
            train=self.train, control=self.control, public_mean=torch.zeros(self.train.shape[1]).double()
        )


def random_features(n: int, d: int, p: int, activation: str = "relu", seed: int = 0) -> FeatureVictim:
    """Fit theta = argmin |theta| with phi(V x_i)' theta = y_i, V ~ N(0, 1/d), x_i uniform on |x| = sqrt(d).

    The targets are a linear function of the rows with noise, y_i = x_i' g + e_i, g ~ N(0, I / d), e_i ~ N(0, 1/4)
    (the synthetic setting of Iurada et al. 2026).

    Args:
        n: rows.
        d: features of a row.
        p: random features.
        activation: phi.
        seed: of everything; the generator is the victim's own, so that no attack's draws coincide with it.
    """
    generator = torch.Generator().manual_seed(7919 * (seed + 1) + 104729)
    rows = torch.randn(2 * n, d, generator=generator, dtype=torch.float64)
    rows = rows * d**0.5 / rows.norm(dim=1, keepdim=True)
    slope = torch.randn(d, generator=generator, dtype=torch.float64) / d**0.5
    y = rows[:n] @ slope + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    features = torch.randn(p, d, generator=generator, dtype=torch.float64) / d**0.5
    model = nn.Sequential(
        nn.utils.skip_init(nn.Linear, d, p, bias=False, dtype=torch.float64),
        ACTIVATIONS[activation](),
        nn.utils.skip_init(nn.Linear, p, 1, bias=False, dtype=torch.float64),
    )
    with torch.no_grad():
        phi = model[1](rows[:n] @ features.T)
    fitted = torch.linalg.lstsq(phi, y[:, None], driver="gelsd").solution.T
    init = {"0.weight": features, "2.weight": torch.zeros_like(fitted)}
    model.load_state_dict({"0.weight": features, "2.weight": fitted})
    evidence = Evidence.from_module(model, input=InputSpec((d,), sample_norm=d**0.5), init=init)
    loss = float((phi @ fitted[0] - y).square().sum() / y.square().sum())
    return FeatureVictim(evidence, rows[:n], rows[n:], loss)
