"""What the attacker of a report knew, read off the evidence: every result is relative to it."""

from __future__ import annotations

from dataclasses import asdict

from exhume.evidence import Evidence, InputSpec, Recipe
from exhume.report.data import Knowledge


def knowledge(evidence: Evidence, samples: int | None = None) -> tuple[Knowledge, ...]:
    """List what the attacks were given and what they were not.

    Args:
        evidence: what the attacks were given.
        samples: number of training rows that they were told, if any.
    """
    return (
        Knowledge(item="trained weights", known=True, detail="all of them, as stored"),
        Knowledge(
            item="initial weights",
            known=evidence.init is not None,
            detail="all of them, so the change made by training is known"
            if evidence.init is not None
            else "only the final weights could be used",
        ),
        Knowledge(item="architecture", known=True, detail=_architecture(evidence)),
        _input_range(evidence.input),
        Knowledge(item="preprocessing", known=True, detail=_preprocessing(evidence.input)),
        Knowledge(
            item="number of training rows",
            known=samples is not None,
            detail="estimated from the weights where they show it" if samples is None else f"{samples}",
        ),
        Knowledge(item="labels", known=False, detail="guessed from the model's own outputs"),
        _recipe(evidence.recipe),
        Knowledge(item="training rows", known=False, detail="never shown to an attack, in no run"),
    )


def _architecture(evidence: Evidence) -> str:
    if evidence.chain is None:
        return "a function from weights and inputs to outputs"
    widths = [evidence.input.size, *(evidence.final[name].shape[0] for name in evidence.chain.weights)]
    return f"dense layers {'–'.join(map(str, widths))}, activation {evidence.chain.activation}"


def _input_range(spec: InputSpec) -> Knowledge:
    ends = [
        f"{word} {value:g}" for word, value in (("from", spec.low), ("to", spec.high)) if value is not None
    ]
    return Knowledge(item="input range", known=bool(ends), detail=" ".join(ends) or "any number was allowed")


def _preprocessing(spec: InputSpec) -> str:
    steps = [
        words
        for words, value in (
            ("a mean is subtracted", spec.mean),
            ("features are divided by a scale", spec.scale),
        )
        if value is not None
    ]
    if spec.sample_norm is not None:
        steps.append(f"every sample has norm {spec.sample_norm:g}")
    return ", ".join(steps) or "none: the model sees the samples as they are"


def _recipe(recipe: Recipe) -> Knowledge:
    fields = {name.replace("_", " "): value for name, value in asdict(recipe).items()}
    stated = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
    lacking = ", ".join(name for name, value in fields.items() if value is None)
    detail = f"{stated}; not known: {lacking}" if stated and lacking else stated or "nothing of it"
    return Knowledge(item="training recipe", known=bool(stated), detail=detail)
