"""Errors for misuse: each message says what was wanted, what was got and what to do, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ExhumeError(Exception):
    """Anything a user can mend; the command line prints it as one line and exits with 2."""


class CheckpointError(ExhumeError):
    """A weight file that cannot be read, or does not fit the model."""


class TargetError(ExhumeError):
    """A target file, or a data file it names, that is wrong."""


class ModelError(ExhumeError):
    """A model that breaks an assumption of every attack, e.g. a random or batch-coupled forward pass."""


class MissingEvidence(ExhumeError):
    """An attack was asked for whose needs the evidence does not meet; the message names all gaps at once."""


class OutputError(ExhumeError):
    """An output folder that exhume would have to overwrite."""


def demand(attack: str, gaps: Sequence[str]) -> None:
    """Refuse to run an attack whose evidence has gaps.

    Raises:
        MissingEvidence: all of them are named.
    """
    if gaps:
        raise MissingEvidence(
            f"attack {attack!r} needs {' and '.join(gaps)}; provide it, or choose another attack with"
            " `exhume inspect`"
        )


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest valid name, or the list of valid names."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean {close[0]!r}?" if close else f"valid names are {', '.join(valid)}"
