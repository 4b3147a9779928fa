"""What a model's weights reveal before any attack, and which attacks apply."""

from __future__ import annotations

from dataclasses import dataclass

from exhume.evidence import Evidence
from exhume.presets import ATTACKS
from exhume.survey import survey


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


def inspect(evidence: Evidence) -> Inspection:
    """Survey the evidence and try every attack's needs against it."""
    ground = survey(evidence)
    first = ground.first
    findings = list(ground.notes)
    if first is not None and len(first.exclusive):
        findings.append(
            f"{len(first.exclusive)} inputs can be read exactly off neurons that only they activated"
        )
    if evidence.chain is None:
        findings.append("the model is no plain dense network: attacks search the full input space")
    attacks = []
    for name, entry in ATTACKS.items():
        gaps = entry.preset(None).missing(evidence)
        how = "one sample at a time in the column space" if ground.reduced else "jointly, from random starts"
        if first is None or first.rank == 0:
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
    )
