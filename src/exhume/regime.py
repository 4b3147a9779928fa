"""Is this model in the regime where samples can be told? Equations over unknowns, thresholds, laziness."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from exhume.ambiguity import ambiguity, count_samples, used_layers
from exhume.evidence import Evidence
from exhume.spaces import full
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
        fit: n, the p of the last layer above which it fits any labels (the threshold p = n).
        law: d n, the p of the last layer above which published experiments find the samples (p = d n).
        law_reduced: n r, the same in the row space of rank r; None where no rank is read.
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
    evidence: Evidence, ground: Ground, samples: int | None = None, nodes: int = 1
) -> tuple[Regime, ...]:
    """Count equations and unknowns for the last layer and for all layers, in the full space and in the row space.

    Args:
        evidence: weights before and after training, with a dense chain.
        ground: what was read off it.
        samples: their number, if known.
        nodes: points of weight space at which gradients are taken; the published attacks use one.

    Returns:
        One entry for each set of equations; none without a dense chain, without the initial weights, or where
        neither the number of samples is stated nor a rank can be read.
    """
    n = count_samples(ground, samples)
    if evidence.chain is None or evidence.init is None or n is None:
        return ()
    places = [(False, replace(ground, space=full(evidence.input.size)))]
    if ground.reduced:
        places.append((True, ground))
    counted = []
    for layers in ("last", "all"):
        for reduced, place in places:
            free = ambiguity(evidence, layers, samples, place).scale
            counted.append(_regime(evidence, place, layers, reduced, n, nodes, free))
    return tuple(counted)


def laziness(evidence: Evidence) -> float | None:
    """Return |theta_f - theta_0| / |theta_0|, None without the initial weights.

    The smaller it is, the less gradients turned in training, and the better fixed ones explain the change.
    """
    if evidence.init is None:
        return None
    start, end = (torch.cat([p.flatten() for p in evidence.at(node).values()]) for node in (0.0, 1.0))
    return float((end - start).norm() / start.norm())


def _regime(
    evidence: Evidence, ground: Ground, layers: str, reduced: bool, n: int, nodes: int, scale_free: bool
) -> Regime:
    d, outputs = evidence.input.size, evidence.outputs
    rank = ground.first.rank if ground.reduced and ground.first is not None else None
    coordinates = max(ground.space.dim - (scale_free or evidence.input.sample_norm is not None), 0)
    used = used_layers(evidence, layers)
    equations = sum(_numbers(evidence, l, rank if reduced else None) for l in used)
    unknowns = n * (coordinates + nodes * outputs)
    law_reduced = None if rank is None else n * rank
    marks = [("n", n), ("n r", law_reduced) if reduced and law_reduced is not None else ("d n", d * n)]
    ratio = equations / unknowns
    return Regime(
        layers=layers,
        reduced=reduced,
        samples=n,
        coordinates=coordinates,
        equations=equations,
        unknowns=unknowns,
        ratio=ratio,
        fit=n,
        law=d * n,
        law_reduced=law_reduced,
        verdict=_verdict(ratio, equations, marks if layers == "last" else []),
    )


def _numbers(evidence: Evidence, layer: int, rank: int | None) -> int:
    """Entries of a layer's weight and bias; the first layer in its row space has that many columns in all."""
    chain = evidence.chain
    assert chain is not None
    weight, bias = evidence.final[chain.weights[layer]], chain.biases[layer]
    if layer == 0 and rank is not None:
        return len(weight) * rank
    return weight.numel() + (0 if bias is None else len(weight))


def _verdict(ratio: float, equations: int, marks: list[tuple[str, int]]) -> str:
    if ratio < 1:
        said = "fewer equations than unknowns, so that candidates which fit exactly mean nothing"
    elif ratio < LOCAL:
        said = "hardly more equations than unknowns, so that wrong candidates may fit as well"
    elif ratio < GLOBAL:
        said = "enough equations to tell samples near the truth, but random starts may miss them"
    else:
        said = "enough equations to find samples from random starts, where fixed gradients explain the change"
    reached = [f"{'above' if equations > at else 'not above'} {name} = {at:,}" for name, at in marks]
    return said + (f"; p = {equations:,} is {' and '.join(reached)}" if reached else "")
