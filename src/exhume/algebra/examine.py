"""What the closed form can do for a target, before any attack: degree, ranks with margins, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from exhume.algebra.field import Field, from_change, from_stationary, imbalance, two_layer
from exhume.algebra.identifiability import NOT, Identifiability, identify
from exhume.algebra.polynomial import coefficients
from exhume.algebra.reduction import reduce
from exhume.evidence import Evidence

UNBALANCED = 0.1  # imbalance above which final weights are no stationary point


@dataclass(frozen=True)
class Examination:
    """What `inspect` reports of the closed form.

    Args:
        identifiability: degree, N_r, ranks of K and G with margins, verdict and reason; None where the network is not
            of the kind.
        sentence: the same in words, or what the network lacks.
    """

    identifiability: Identifiability | None
    sentence: str


def polynomial(evidence: Evidence) -> tuple[float, ...] | str:
    """Coefficients of the activation of a two-layer network of one output, or what it lacks, in words."""
    gap = two_layer(evidence.chain)
    if gap is not None or evidence.chain is None:
        return gap or "a plain dense network"
    if evidence.outputs != 1:
        return f"a network of one output (it has {evidence.outputs})"
    c = coefficients(evidence.chain.activations[0].fn)
    return f"a polynomial activation (it is {evidence.chain.activation})" if c is None else c


def field_of(evidence: Evidence, units: torch.Tensor | None = None) -> Field:
    """Points and values that the evidence gives: the change of weights, or the final weights taken as stationary."""
    return from_stationary(evidence, units) if evidence.init is None else from_change(evidence, units=units)


def examine(evidence: Evidence) -> Examination:
    """Decide from weights alone whether they determine the samples in closed form.

    Args:
        evidence: what is known.
    """
    c = polynomial(evidence)
    if isinstance(c, str):
        return Examination(None, f"closed-form recovery does not apply, which needs {c}")
    degrees = tuple(q for q, value in enumerate(c) if q and value)
    field = field_of(evidence)
    if float(field.steps.norm()) == 0:
        return Examination(None, "closed-form recovery does not apply, since the first layer did not change")
    found = identify(reduce([field])[0], degrees)
    if evidence.init is None and len(degrees) == 1:
        defect = imbalance(evidence, degrees[0])
        if defect > UNBALANCED and max(degrees) > 2:
            found = replace(
                found,
                verdict=NOT,
                reason=f"the final weights are not stationary (the balance of the layers is off by {defect:.2g}), and"
                " without the initial ones nothing else is known of the field",
            )
    return Examination(found, sentence(found))


def sentence(found: Identifiability) -> str:
    """One line for people."""
    return (
        f"closed form ({found.source}): degree {found.degree},"
        f" {found.neurons} neurons in {found.dimension} dimensions,"
        f" rank K {_ranks(found.rank_kernel, found.needed_kernel, found.margin_kernel)},"
        f" rank G {_ranks(found.rank_gradient, found.needed_gradient, found.margin_gradient)}:"
        f" {found.verdict}; {found.reason}"
    )


def _ranks(rank: int | None, needed: int, margin: float) -> str:
    return f"not computed of {needed}" if rank is None else f"{rank} of {needed} (margin {margin:.1e})"
