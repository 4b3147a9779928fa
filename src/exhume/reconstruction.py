"""What an attack returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exhume.ambiguity import Ambiguity
from exhume.candidates import Candidates
from exhume.certificate import Certificate
from exhume.lineage import Lineage


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack found, and what it assumed; nothing here was compared with the truth.

    Args:
        attack: name of the attack.
        candidates: guessed samples, most important first.
        importance: rise of the misfit without each candidate, relative to the misfit [m].
        misfit: share of |t|^2 that the candidates do not explain.
        loss: misfit plus priors.
        status: "converged", "iterations", "stalled", "diverged", "stopped".
        reason: the same, as a sentence.
        steps: solver steps.
        seconds: wall time.
        seed: of the random starts.
        trace: loss after each step of the final solve.
        assumed: what the result rests on, one sentence each.
        spectrum: singular values of the first-layer change, empty if not available.
        rank: its rank, or None.
        certificate: which candidates are real, as far as the weights alone can tell.
        expected: the number of samples the attack was told, or None.
        ambiguity: what its equations cannot tell of a sample, or None if it declares nothing.
        lineage: where every candidate came from, in the order of the candidates; None where none was moved.
    """

    attack: str
    candidates: Candidates
    importance: Tensor
    misfit: float
    loss: float
    status: str
    reason: str
    steps: int
    seconds: float
    seed: int
    trace: tuple[float, ...]
    assumed: tuple[str, ...]
    spectrum: tuple[float, ...] = ()
    rank: int | None = None
    certificate: Certificate | None = None
    expected: int | None = None
    ambiguity: Ambiguity | None = None
    lineage: Lineage | None = None

    @property
    def x(self) -> Tensor:
        """Guessed samples in the owner's units, [m, *shape]."""
        return self.candidates.x
