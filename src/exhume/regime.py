"""Is this model in the regime where samples can be told? Equations over unknowns, thresholds, laziness."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exhume.ambiguity import Ambiguity, count_samples, used_layers
from exhume.evidence import Evidence
from exhume.survey import Ground

LOCAL, GLOBAL = 2.0, 4.0  # ratios from which samples are told near the truth, and from random starts


@dataclass(frozen=True)
class Regime:
    """One set of equations against its unknowns.

    ratio = equations / (n * coordinates + nodes * n * C)

    Args:
        layers: "last" or "all": whose change is explained.
        reduced: whether candidates are sought in the row space of the first-layer change.
        samples: n.
        coordinates: free numbers of one candidate: the dimension of where it is sought, less one where its norm
            is given or merges with its multiplier.
        equations: p, the numbers whose change is explained.
        unknowns: candidates and multipliers.
        ratio: equations over unknowns.
        fit: n, from which any labels can be fitted by the last layer (p = n).
        law: d n, from which the samples themselves are told, by published experiments (p = d n).
        law_reduced: r n, the same in the row space of rank r; None where no rank is read.
        verdict: what follows, as a sentence.
    """

    layers: str
    reduced: bool
    samples: int
    coordinates: int
    equations: int
    unknowns: int
    ratio: float
    fit: int
    law: int
    law_reduced: int | None
    verdict: str


def regimes(
    evidence: Evidence, ground: Ground, found: Ambiguity, samples: int | None = None, nodes: int = 1
) -> tuple[Regime, ...]:
    """Count equations and unknowns for the last layer and for all layers, in the full space and in the row space.

    Args:
        evidence: weights before and after training, with a dense chain.
        ground: what was read off it.
        found: what the equations cannot tell; a free scale is one unknown less a sample.
        samples: their number, if known.
        nodes: points of weight space at which gradients are taken; the published attacks use one.

    Returns:
        One entry for each set of equations; none without a dense chain, without the initial weights, or where
        neither the number of samples is stated nor a rank can be read.
    """
    n = count_samples(ground, samples)
    if evidence.chain is None or evidence.init is None or n is None:
        return ()
    depth = len(evidence.chain.weights)
    choices = [("last", (depth - 1,))]
    if (changed := used_layers(evidence, "all")) != (depth - 1,):
        choices.append(("all", changed))
    return tuple(
        _regime(evidence, ground, name, layers, reduced, n, nodes, found.scale)
        for name, layers in choices
        for reduced in ((False, True) if ground.reduced else (False,))
        if layers
    )


def laziness(evidence: Evidence) -> float | None:
    """Return |theta_f - theta_0| / |theta_0|, None without the initial weights.

    The smaller it is, the less gradients turned in training, and the better fixed ones explain the change.
    """
    if evidence.init is None:
        return None
    start, end = (torch.cat([p.flatten() for p in evidence.at(node).values()]) for node in (0.0, 1.0))
    return float((end - start).norm() / start.norm())


def _regime(
    evidence: Evidence,
    ground: Ground,
    name: str,
    layers: tuple[int, ...],
    reduced: bool,
    n: int,
    nodes: int,
    scale_free: bool,
) -> Regime:
    d, outputs = evidence.input.size, evidence.outputs
    rank = ground.first.rank if ground.reduced and ground.first is not None else None
    fixed = scale_free or evidence.input.sample_norm is not None
    coordinates = max((ground.space.dim if reduced else d) - fixed, 0)
    equations = sum(_numbers(evidence, l, rank if reduced else None) for l in layers)
    unknowns = n * (coordinates + nodes * outputs)
    ratio = equations / unknowns
    law_reduced = None if rank is None else n * rank
    return Regime(
        name, reduced, n, coordinates, equations, unknowns, ratio, n, d * n, law_reduced,
        _verdict(ratio, equations, n, d, law_reduced),
    )  # fmt: skip


def _numbers(evidence: Evidence, layer: int, rank: int | None) -> int:
    """Entries of a layer's weight and bias; the first layer in its row space has that many columns in all."""
    chain = evidence.chain
    assert chain is not None
    weight, bias = evidence.final[chain.weights[layer]], chain.biases[layer]
    if layer == 0 and rank is not None:
        return len(weight) * rank
    return weight.numel() + (0 if bias is None else len(weight))


def _verdict(ratio: float, equations: int, n: int, d: int, law_reduced: int | None) -> str:
    if ratio < 1:
        said = "fewer equations than unknowns: candidates that fit without error mean nothing"
    elif ratio < LOCAL:
        said = "hardly more equations than unknowns: wrong candidates may fit as well"
    elif ratio < GLOBAL:
        said = "enough equations to tell samples near the truth, but random starts may miss them"
    else:
        said = "enough equations to recover samples from random starts"
    marks = [("n", n), ("r n", law_reduced), ("d n", d * n)]
    below = [f"{name} = {at:,}" for name, at in marks if at is not None and equations < at]
    return f"{said}; p = {equations:,} is {'below ' + ', '.join(below) if below else f'at or above d n = {d * n:,}'}"
