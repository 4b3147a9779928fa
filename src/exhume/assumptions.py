"""What an attack rests on, checked against the weights themselves, in sentences an owner can act on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exhume.certificate import UNEXPLAINED
from exhume.change import simulated_decay
from exhume.evidence import Evidence
from exhume.reconstruction import Reconstruction
from exhume.survey import Ground

UNRELATED = (
    0.2  # cosine of initial and final first-layer weights below which they are those of different networks
)
CONTRADICTED = 1e-3  # difference of the measured and the stated share of the initial weights
OUTSIDE = 0.05  # relative violation of the stated range above which the preprocessing is in doubt


@dataclass(frozen=True)
class Assumption:
    """One thing the attack rests on.

    Args:
        name: in two or three words.
        holds: whether the weights bear it out.
        sentence: what was seen, and what can still be had or done.
    """

    name: str
    holds: bool
    sentence: str


def check(evidence: Evidence, ground: Ground, found: Reconstruction) -> tuple[Assumption, ...]:
    """Check every assumption of the span attacks.

    Args:
        evidence: what was attacked.
        ground: the survey of it.
        found: what the attack found.
    """
    start = _initial_weights(evidence, ground)
    return (
        start,
        _first_layer(evidence, ground),
        # Against weights of another network the change has full rank whatever the optimizer did.
        *([_optimizer(evidence, ground, found)] if start.holds else []),
        _dropout(evidence),
        _recipe(evidence, ground, found),
        _equation(found),
        _search(ground, found),
        _range(evidence, found),
    )


def _initial_weights(evidence: Evidence, ground: Ground) -> Assumption:
    name = "initial weights"
    if evidence.init is None:
        return Assumption(
            name, False, "The initial weights are not known, so the change that training made is not."
        )
    key = max(evidence.final, key=lambda k: evidence.final[k].numel())
    start, end = evidence.init[key].double().flatten(), evidence.final[key].double().flatten()
    cosine = float(torch.nn.functional.cosine_similarity(start, end, dim=0))
    if cosine < UNRELATED and ground.decay.rank is None:
        return Assumption(
            name,
            False,
            f"The initial weights seem to belong to another network (cosine {cosine:.2f} with the final ones, and no"
            " part of them is left in the final ones); supply those this training run started from.",
        )
    return Assumption(name, True, "The initial weights fit the final ones.")


def _first_layer(evidence: Evidence, ground: Ground) -> Assumption:
    name = "first layer"
    if evidence.chain is None:
        return Assumption(
            name,
            False,
            "The model is no plain dense network, so samples cannot be confined to the span of the first-layer"
            " change; the search covers the full input space and may miss them.",
        )
    if ground.first is not None and ground.first.rank == 0:
        return Assumption(
            name,
            False,
            "The first layer did not change in training (frozen), so it says nothing about the inputs; only the later"
            " layers were used.",
        )
    return Assumption(name, True, "The first layer is dense and was trained.")


def _optimizer(evidence: Evidence, ground: Ground, found: Reconstruction) -> Assumption:
    name = "optimizer"
    first, stated = ground.first, evidence.recipe.optimizer
    if stated not in (None, "sgd"):
        return Assumption(
            name,
            False,
            f"The network was trained by {stated}, which rescales every weight's step, so the change is no"
            " weighted sum of gradients; what the attack finds is certified or not on its own merit.",
        )
    if first is None or first.rank == 0:
        return Assumption(
            name, stated == "sgd", f"The optimizer is taken to be {stated or 'SGD, which is not stated'}."
        )
    if first.flat and evidence.stored_dtype in (torch.float16, torch.bfloat16):
        precision = str(evidence.stored_dtype).removeprefix("torch.")
        return Assumption(
            name,
            False,
            f"The weights are stored in {precision}, whose rounding hides the rank of the change; audit the float32"
            " checkpoint that they were made from.",
        )
    expected = evidence.recipe.batch_size if found.expected is None else found.expected
    below = expected is not None and expected < evidence.input.size
    if (first.flat or (first.full and below)) and stated == "sgd" and found.expected is not None:
        return Assumption(
            name,
            False,
            f"The change of the first layer has no rank, though SGD is stated: it saw far more different inputs than"
            f" the {found.expected} samples stated (augmented data, noise or dropout at the input), or the optimizer"
            " rescaled each weight; at best averages over the variants of a row can be had, certified on their own"
            " merit.",
        )
    if first.flat or (first.full and below):
        return Assumption(
            name,
            False,
            "The change of the first layer has no rank, as after Adam, AdamW or another optimizer that rescales each"
            " weight, or as with data augmented afresh in every epoch; SGD on fixed rows is assumed by this attack.",
        )
    if found.expected is not None and first.rank > found.expected and not first.full:
        return Assumption(
            name,
            False,
            f"The first layer saw at least {first.rank} different inputs, more than the {found.expected} samples"
            " stated: the data were augmented, or the number is wrong.",
        )
    return Assumption(name, True, "The change of the first layer looks like that of SGD.")


def _dropout(evidence: Evidence) -> Assumption:
    name = "one network"
    if evidence.dropout:
        return Assumption(
            name,
            False,
            "The network has dropout layers, so every step of training saw another part of it and the change is no"
            " weighted sum of gradients of the whole; samples may be missed or blurred, and what is certified should"
            " be looked at.",
        )
    return Assumption(name, True, "Every training step saw the same network.")


def _recipe(evidence: Evidence, ground: Ground, found: Reconstruction) -> Assumption:
    """What the recipe says against what the weights say; the attack itself goes by the weights."""
    name, recipe, decay = "recipe", evidence.recipe, ground.decay
    stated = simulated_decay(recipe) if recipe.optimizer in (None, "sgd") else None
    if stated is not None and decay.rank is not None and abs(stated - decay.weight) > CONTRADICTED:
        return Assumption(
            name,
            False,
            f"The weights show that {decay.weight:.3g} of the initial weights is left, the recipe says {stated:.3g}:"
            " lr, steps, momentum or weight_decay is wrong; the attack went by the weights.",
        )
    certificate, codes = found.certificate, {"pm1": (-1.0, 1.0), "01": (0.0, 1.0)}
    if certificate is not None and certificate.recovered and recipe.loss == "mse" and recipe.labels in codes:
        out = found.candidates.label[certificate.certified].flatten()[:, None]
        off = {k: float((out - out.new_tensor(v)).abs().amin(1).mean()) for k, v in codes.items()}
        other = "01" if recipe.labels == "pm1" else "pm1"
        if 2 * off[other] < off[recipe.labels] and off[other] < 0.25:
            return Assumption(
                name,
                False,
                f"The outputs at certified candidates lie near labels {other!r}, not {recipe.labels!r} as the recipe"
                " says; correct [recipe] labels. The attack does not use them.",
            )
    return Assumption(name, True, "Nothing contradicts the stated recipe.")


def _equation(found: Reconstruction) -> Assumption:
    name = "equation"
    held_out = None if found.certificate is None else found.certificate.held_out
    if held_out is not None and held_out > UNEXPLAINED:
        return Assumption(
            name,
            False,
            f"The candidates leave {held_out:.0%} of the held-out change of weights unexplained: too many samples for"
            " this network, a wrong activation or architecture in the factory, or a search that failed.",
        )
    return Assumption(name, True, "The candidates predict weights that the search never used.")


def _search(ground: Ground, found: Reconstruction) -> Assumption:
    """Inputs confined to a known span are there to be found: none certified is a failure of the attack."""
    name = "search"
    if ground.reduced and found.certificate is not None and found.certificate.recovered == 0:
        assert ground.first is not None
        return Assumption(
            name,
            False,
            f"The first layer gives away the span of the at least {ground.first.rank} inputs it saw, but no"
            " candidate in it could be certified: the activation or architecture in the factory is wrong, or the"
            " search failed; the span itself can be had.",
        )
    return Assumption(name, True, "The search found what the first layer shows, or it shows no span.")


def _range(evidence: Evidence, found: Reconstruction) -> Assumption:
    name = "input range"
    low, high = evidence.input.low, evidence.input.high
    certificate = found.certificate
    if low is None or high is None or certificate is None or certificate.recovered == 0:
        return Assumption(name, True, "Nothing contradicts the stated preprocessing.")
    x = found.x[certificate.certified].flatten(1)
    violation = ((x - high).relu() + (low - x).relu()).norm(dim=1) / ((high - low) * x.shape[1] ** 0.5)
    if float(violation.median()) > OUTSIDE:
        return Assumption(
            name,
            False,
            f"Certified candidates leave the stated range [{low:g}, {high:g}]: mean, scale or range in the target are"
            " wrong, and distances to training rows mean little until they are corrected.",
        )
    return Assumption(name, True, "Certified candidates lie in the stated range.")
