"""Rows of the first layer as candidates: the baseline that asks what the weights show at a glance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from exhume.candidates import Candidates
from exhume.clock import Clock, Observer
from exhume.errors import demand
from exhume.evidence import Evidence
from exhume.inversion import explained
from exhume.reconstruction import Reconstruction
from exhume.spaces import full
from exhume.survey import survey


@dataclass(frozen=True)
class FirstRows:
    """Every row w_j of the first layer as an image, u_j = sign(b_j) w_j / |w_j| * |W_1| / |b_1|.

    Where one sample alone activates unit j, the equation of final weights alone has w_j = a x_i and b_j = a, so that
    the row is the sample; and |W_1| / |b_1| is a typical norm of samples. Without a bias both signs are candidates,
    at half the width of the range or at norm sqrt(d).

    Args:
        name: shown in reports.
        samples: their number, if known; not needed.
    """

    name: str = "first-rows"
    samples: int | None = None

    def missing(self, evidence: Evidence) -> tuple[str, ...]:
        """What the attack needs and the evidence lacks."""
        return () if evidence.chain is not None else ("a plain dense network",)

    def run(
        self,
        evidence: Evidence,
        seed: int = 0,
        budget: float | None = None,
        observer: Observer | None = None,
    ) -> Reconstruction:
        """Read the rows.

        Args:
            evidence: weights and input specification.
            seed: not used: nothing is drawn.
            budget: not used: nothing is searched.
            observer: told when it is done.

        Raises:
            MissingEvidence: the model is no plain dense network.
        """
        clock = Clock(budget, observer)
        demand(self.name, self.missing(evidence))
        assert evidence.chain is not None
        chain, evidence = evidence.chain, replace(evidence, init=None)
        ground, params = survey(evidence), evidence.at(1.0)
        weight, name = params[chain.weights[0]], chain.biases[0]
        rows = weight / weight.norm(dim=1, keepdim=True).clamp_min(1e-300)
        bias = None if name is None or float(params[name].norm()) == 0 else params[name]
        if bias is None:
            u = ground.norm * torch.cat([rows, -rows])
        else:
            u = bias.sign()[:, None] * rows * (weight.norm() / bias.norm())
        coef, misfit = explained(evidence, ground, full(evidence.input.size), u)
        size = coef.square().sum(1)
        order = size.argsort(descending=True)
        u = u[order].view(-1, *evidence.input.shape)
        clock.tick(f"{len(u)} rows of the first layer", misfit)
        return Reconstruction(
            attack=self.name,
            candidates=Candidates(evidence.input.decode(u), coef[order], evidence.output(u)),
            importance=size[order] / size.sum().clamp_min(1e-300),
            misfit=misfit,
            loss=misfit,
            status="converged",
            reason="Nothing was searched: the rows are candidates as they are.",
            steps=0,
            seconds=clock.elapsed,
            seed=seed,
            trace=(misfit,),
            assumed=("rows of the first layer were taken for samples, at their typical norm",),
            expected=self.samples,
        )
