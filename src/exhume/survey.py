"""What can be read off the evidence before any search: decay, rank, row space, and where to search."""

from __future__ import annotations

from dataclasses import dataclass

from exhume.change import Decay, FirstLayer, decay_factor, first_layer
from exhume.evidence import Evidence
from exhume.spaces import Space, full

THROUGH_ZERO = 0.02  # an affine space of samples this near zero, in units of their norm, passes through it


@dataclass(frozen=True, eq=False)
class Ground:
    """What can be read off the evidence before any search.

    Args:
        decay: what is left of the initialisation.
        first: the first-layer change, or None if the model has no recognised dense first layer.
        space: where to search.
        norm: typical norm of a model input.
        notes: what was concluded and assumed, one sentence each.
    """

    decay: Decay
    first: FirstLayer | None
    space: Space
    norm: float
    notes: tuple[str, ...]

    @property
    def reduced(self) -> bool:
        """Whether the first-layer change confines the samples to a proper subspace."""
        return self.first is not None and not self.first.flat and not self.first.full


def survey(evidence: Evidence, radius: tuple[float, float] = (0.2, 5.0)) -> Ground:
    """Measure decay, rank and row space, and choose the search space.

    Args:
        evidence: what is known.
        radius: allowed norms of a model input, relative to the smaller and the larger estimate of it.
    """
    decay = decay_factor(evidence)
    notes = [f"kappa = {decay.weight:.6g} for weights, {decay.bias:.6g} for biases ({decay.source})"]
    size, spec = evidence.input.size, evidence.input
    first = None
    if evidence.chain is not None and evidence.init is not None:
        first = first_layer(evidence, decay)
        if first.rank == 0:
            notes.append(
                "the first layer did not change: it was frozen, and the full input space is searched"
            )
        elif first.flat:
            notes.append(
                f"the spectrum of the first-layer change is flat (largest drop {first.gap:.2g}): the optimiser"
                " rescaled entries (Adam-like), or rounding hides the rank; the full input space is searched"
            )
        elif first.full:
            notes.append(
                f"the first-layer change has the largest rank it can have, {first.rank}: that many samples or"
                " more, or an optimizer that rescales entries"
            )
        else:
            notes.append(f"the first-layer change has rank {first.rank}: at least {first.rank} samples")
    space, norms = full(size), None if first is None or first.norm is None else (first.norm,) * 3
    if first is not None and not first.flat and not first.full:
        space, norms = first.space, _norms(first)
    box = spec.box()
    if spec.sample_norm is not None:
        norm, space = spec.sample_norm, space.within((spec.sample_norm, spec.sample_norm))
        notes.append(f"every model input has norm {norm:g}, as the target says")
    elif norms is not None:
        low, norm, high = radius[0] * norms[0], norms[1], radius[1] * norms[2]
        space = space.within((low, high))
        notes.append(f"model inputs have norms between {low:.3g} and {high:.3g}")
    else:
        norm = size**0.5 if box is None else 0.5 * float((box[1] - box[0]).norm())
        notes.append(f"a typical model input has norm {norm:.3g}")
    if box is not None:
        notes.append(f"features lie between {spec.low:g} and {spec.high:g}")
    return Ground(decay, first, space, norm, tuple(notes))


def _norms(first: FirstLayer) -> tuple[float, float, float] | None:
    """The smaller, the likely and the larger estimate of the norm of a model input; None without biases.

    |DW_1| / |Db_1| is exact where the samples' signals are orthogonal, and far off where they cancel (nearly linear
    nets). sqrt(r) times the distance of the samples' affine space from zero is exact where the samples themselves
    are orthogonal, too small where they point apart, and says nothing where that space passes through zero.
    """
    if first.norm is None or first.space.origin is None:
        return None if first.norm is None else (first.norm,) * 3
    signals, samples = first.norm, first.rank**0.5 * float(first.space.origin.norm())
    if samples < THROUGH_ZERO * signals:
        return (signals,) * 3
    likely = min(max(signals, samples), 2.5 * samples)
    return min(signals, samples), likely, max(likely, samples)
