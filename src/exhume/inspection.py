"""What a model's weights reveal before any attack, and which attacks apply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exhume.algebra.examine import Examination, examine
from exhume.algebraic import AlgebraAttack
from exhume.ambiguity import ambiguity, count_samples
from exhume.attack import SpanAttack
from exhume.descent import Descent
from exhume.evidence import Evidence
from exhume.hermite import hermite
from exhume.kkt import KKTAttack, row_space
from exhume.presets import ATTACKS
from exhume.regime import Regime, laziness, regimes
from exhume.rows import FirstRows
from exhume.survey import Ground, survey


@dataclass(frozen=True)
class Applicability:
    """Whether an attack can run.

    Args:
        name: of the attack.
        applies: whether its needs are met.
        reason: what is missing, or how it would search.
    """

    name: str
    applies: bool
    reason: str


@dataclass(frozen=True)
class Degrees:
    """Which degrees of its input the first hidden activation passes on.

    Args:
        activation: its name.
        scale: standard deviation of the pre-activations of a typical input.
        squares: squared Hermite coefficients mu_k^2, k = 0, 1, ..., at that scale.
    """

    activation: str
    scale: float
    squares: tuple[float, ...]


@dataclass(frozen=True)
class Untold:
    """What one set of equations cannot tell of a sample.

    Args:
        layers: "last layer" or "all layers".
        sign: whether x and -x may be confused.
        scale: whether x and s x may be.
        reasons: one sentence each, also for what can be told.
    """

    layers: str
    sign: bool
    scale: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """The facts of a target.

    Args:
        layers: (name, shape, parameters) of every parameter tensor.
        parameters: their number in all.
        input_shape: of one sample.
        outputs: number of outputs.
        activation: of a recognised dense network, else None.
        dtype: the coarsest dtype stored.
        rank: rank of the first-layer change, None if not available.
        kappa: share of the initial weights left, None without initial weights.
        exclusive: inputs that single neurons give away exactly.
        findings: what was concluded, one sentence each.
        attacks: which attacks apply.
        samples: number of samples that was counted with, stated or from the rank; None if neither is known.
        laziness: |theta_f - theta_0| / |theta_0|, None without initial weights.
        hermite: degrees of the first hidden activation; None if the model is no dense network with a hidden layer.
        regimes: equations against unknowns; empty where they cannot be counted, and a finding says why.
        ambiguities: what the equations cannot tell; empty if the model is no dense network.
        closed_form: whether the weights determine the samples of a polynomial network, and by which ranks.
    """

    layers: tuple[tuple[str, tuple[int, ...], int], ...]
    parameters: int
    input_shape: tuple[int, ...]
    outputs: int
    activation: str | None
    dtype: str
    rank: int | None
    kappa: float | None
    exclusive: int
    findings: tuple[str, ...]
    attacks: tuple[Applicability, ...]
    samples: int | None
    laziness: float | None
    hermite: Degrees | None
    regimes: tuple[Regime, ...]
    ambiguities: tuple[Untold, ...]
    closed_form: Examination


def inspect(evidence: Evidence, samples: int | None = None) -> Inspection:
    """Survey the evidence, count equations, and try every attack's needs against it.

    Args:
        evidence: what is known.
        samples: number of training samples, if known.
    """
    ground = survey(evidence)
    first = ground.first
    findings = list(ground.notes)
    if first is not None and len(first.exclusive):
        findings.append(
            f"{len(first.exclusive)} inputs can be read exactly off neurons that only they activated"
        )
    if evidence.chain is None:
        findings.append("the model is no plain dense network: attacks search the full input space")
    n, lazy = count_samples(ground, samples), laziness(evidence)
    if lazy is not None:
        findings.append(f"training changed the weights by {lazy:.3g} of their norm")
    findings += _uncounted(evidence, n, samples)
    closed_form = examine(evidence)
    if closed_form.identifiability is not None:
        findings.append(closed_form.sentence)
    attacks = []
    for name, entry in ATTACKS.items():
        attack = entry.preset(samples)
        gaps = attack.missing(evidence)
        how = "jointly, from random starts"
        if isinstance(attack, SpanAttack) and not gaps:
            single = attack.single(evidence, ground)
            how = how if single is None else f"one sample at a time in {single.where}"
        if isinstance(attack, Descent):
            how = f"by one descent of {attack.steps:,} steps"
        if isinstance(attack, AlgebraAttack):
            how = "in closed form, where ranks allow"
        shown = first is not None and first.rank > 0
        if isinstance(attack, KKTAttack):
            rows = (
                None
                if evidence.chain is None or evidence.input.box() is None
                else row_space(evidence, samples)
            )
            how = "by one descent"
            if rows is not None:
                how = f"corners of the box in the row space of the first layer, of rank {rows.rank}"
            shown = rows is not None
        if isinstance(attack, FirstRows):
            how = "nothing: the rows of the first layer are candidates as they are"
        if samples is None and not shown:
            how += ", if the number of samples is given ([attack] samples)"
        attacks.append(
            Applicability(name, not gaps, f"needs {' and '.join(gaps)}" if gaps else f"searches {how}")
        )
    return Inspection(
        layers=tuple((k, tuple(p.shape), p.numel()) for k, p in evidence.final.items()),
        parameters=sum(p.numel() for p in evidence.final.values()),
        input_shape=tuple(evidence.input.shape),
        outputs=evidence.outputs,
        activation=None if evidence.chain is None else evidence.chain.activation,
        dtype=str(evidence.stored_dtype).removeprefix("torch."),
        rank=None if first is None or first.flat else first.rank,
        kappa=None if evidence.init is None else ground.decay.weight,
        exclusive=0 if first is None else len(first.exclusive),
        findings=tuple(findings),
        attacks=tuple(attacks),
        samples=n,
        laziness=lazy,
        hermite=_degrees(evidence, ground),
        regimes=regimes(evidence, ground, samples),
        ambiguities=_untold(evidence, ground, samples),
        closed_form=closed_form,
    )


def _uncounted(evidence: Evidence, n: int | None, samples: int | None) -> list[str]:
    """Why equations were not counted, or which number of samples they were counted for."""
    if evidence.chain is None:
        return ["equations and ambiguities are counted for plain dense networks only"]
    if evidence.init is None:
        return ["equations are not counted: without the initial weights there is no change to explain"]
    if n is None:
        return [
            "equations are not counted: the number of samples is not stated ([attack] samples), and no rank of the"
            " first-layer change bounds it"
        ]
    return [] if samples == n else [f"equations are counted for {n} samples, as the rank shows"]


def _degrees(evidence: Evidence, ground: Ground) -> Degrees | None:
    chain = evidence.chain
    if chain is None or len(chain.weights) < 2:
        return None
    weight = evidence.at(1.0)[chain.weights[0]]
    u = ground.space.expand(ground.space.random(64, ground.norm, torch.Generator().manual_seed(0)))
    scale = float((u @ weight.T).square().mean().sqrt())
    phi = chain.activations[0]
    return Degrees(phi.name, scale, tuple(mu * mu for mu in hermite(phi, scale))) if scale > 0 else None


def _untold(evidence: Evidence, ground: Ground, samples: int | None) -> tuple[Untold, ...]:
    if evidence.chain is None:
        return ()
    told = (
        (
            f"{layers} layers" if layers == "all" else "last layer",
            ambiguity(evidence, layers, samples, ground),
        )
        for layers in ("last", "all")
    )
    return tuple(Untold(name, one.sign, one.scale, one.reasons) for name, one in told)
