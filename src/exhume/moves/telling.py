"""What simulated training says, in sentences; a recipe that contradicts the weights is named."""

from __future__ import annotations

from exhume.moves.polish import Polished
from exhume.moves.rate import Fitted


def told(found: Polished, recipe: str) -> str:
    """What polishing did.

    Args:
        found: what it reached.
        recipe: what training was simulated with, in words.
    """
    how = f"simulated with {recipe}"
    if found.factor > 1:
        how += f" and with {found.factor:.0f}-fold larger steps (estimated error {share(found.error)} of the change)"
    if found.diverged:
        return (
            f"training on the candidates, {how}, diverged: the recipe contradicts the weights (learning rate,"
            " momentum, decay, steps or loss), or candidates are wrong; they were not polished"
        )
    if not found.better and found.near:
        return (
            f"training on the candidates, {how}, ends {share(found.gap)} of the change away from the true weights,"
            " as near as the simulation can tell: there was nothing to polish"
        )
    if len(found.trace) == 1:
        return (
            f"training on the candidates, {how}, ends {share(found.before)} of the change away from the true weights:"
            " the recipe contradicts them (loss, learning rate, steps, labels, order), or candidates are missing or"
            " wrong; they were not polished"
        )
    if not found.better:
        return (
            f"training on the candidates, {how}, stays {share(found.gap)} of the change away from the true weights"
            f" ({share(found.before)} before polishing): a candidate is missing or wrong, or the recipe is not exact;"
            " the candidates were left as they were"
        )
    return (
        f"candidates were polished until training on them, {how}, ended {share(found.gap)} of the change away from"
        f" the true weights ({share(found.before)} before)"
    )


def rate_told(fitted: Fitted, stated: float | None) -> str:
    """What the weights say of the learning rate.

    Args:
        fitted: the rate that fits.
        stated: the rate that does not; None if none was stated.
    """
    if stated is None:
        begin, but = "no learning rate was stated", "and"
    else:
        begin, but = f"the stated learning rate {stated:g} contradicts the weights", "but"
    if not fitted.sharp:
        return (
            f"{begin}, {but} the weights do not tell the right one, since training had nearly converged:"
            f" {fitted.lr:.3g} served in the simulation"
        )
    return (
        f"{begin}; {fitted.lr:.3g} fits them, if the number of steps is right (their product is what the weights"
        " tell)"
    )


def rate_in_vain(fitted: Fitted, found: Polished, stated: Polished | None) -> str:
    """That a search for the learning rate helped, but not enough.

    Args:
        fitted: the best rate.
        found: what polishing reached with it.
        stated: what it reached with the stated one, if any.
    """
    begin = "no learning rate was stated"
    if stated is not None and stated.diverged:
        begin = "training on the candidates, simulated with the stated recipe, diverged"
    elif stated is not None:
        begin = (
            f"training on the candidates, simulated with the stated recipe, ends {share(stated.before)} of the change"
            " away from the true weights"
        )
    return (
        f"{begin}, and the best learning rate, {fitted.lr:.3g}, leaves {share(found.gap)}: the recipe contradicts the"
        " weights in more than the rate (loss, steps, labels, order), or candidates are missing or wrong; they were"
        " left as they were"
    )


def none_fits() -> str:
    """That no learning rate brings the simulated run near the true weights."""
    return (
        "no learning rate was stated, and with none does training on the candidates end near the true weights: the"
        " rest of the recipe contradicts them, or candidates are missing or wrong; they were not polished"
    )


def ended() -> str:
    """That no time was left."""
    return "simulated training was ended early, before it could refine the candidates; they were left as they were"


def too_long(steps: int, needed: float, most: int) -> str:
    """That a run is too long to be simulated.

    Args:
        steps: of the run.
        needed: gradients that the shortest simulation takes.
        most: gradients allowed.
    """
    return (
        f"training was not simulated: its {steps:,} steps take at least {needed:,.0f} gradients, more than the"
        f" {most:,} that one simulation may take; the candidates were not polished"
    )


def share(value: float) -> str:
    """A part of the change, in percent with two digits."""
    return f"{100 * value:.2g}%" if value < 1 else f"{100 * value:.0f}%"
