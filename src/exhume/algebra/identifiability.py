"""Whether the weight equations determine the samples of a polynomial two-layer network: ranks, counts, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exhume.algebra.field import Field
from exhume.algebra.interpolation import Interpolant, componentwise, gradient_field, slices
from exhume.algebra.pencil import Directions, directions
from exhume.algebra.polynomial import count
from exhume.algebra.reduction import Reduced

IDENTIFIABLE, PARTIAL, NOT = "identifiable", "partial", "not identifiable"
OFF = (
    1e-8,
    0.02,
)  # least and most of the slices' energy that may lie off the diagonal, between them as noise allows


@dataclass(frozen=True)
class Identifiability:
    """What the weight equations determine.

    Args:
        verdict: "identifiable", "partial" or "not identifiable".
        reason: in one sentence.
        degrees: that occur in the activation, without the constant.
        neurons: number of points m.
        dimension: of the range of the values, r.
        needed_kernel: N_r, the rank that the kernel matrix K must have.
        rank_kernel: the rank it has; None where it was too large to compute.
        margin_kernel: smallest over largest singular value of its square root.
        needed_gradient: the rank that the gradient-field matrix G must have.
        rank_gradient: the rank it has; likewise.
        margin_gradient: of its square root, likewise.
        source: where points and values come from.
    """

    verdict: str
    reason: str
    degrees: tuple[int, ...]
    neurons: int
    dimension: int
    needed_kernel: int
    rank_kernel: int | None
    margin_kernel: float
    needed_gradient: int
    rank_gradient: int | None
    margin_gradient: float
    source: str

    @property
    def degree(self) -> int:
        """Of the activation."""
        return max(self.degrees)


@dataclass(frozen=True, eq=False)
class Interpolation:
    """Both interpolations of one field, and the one to use."""

    kernel: Interpolant | None
    gradient: Interpolant | None

    @property
    def best(self) -> Interpolant | None:
        """The gradient field, which needs fewer points and is symmetric, unless only the kernel is determined."""
        both = [i for i in (self.gradient, self.kernel) if i is not None]
        return next((i for i in both if i.determined), both[0] if both else None)


def interpolate(field: Field, degrees: Sequence[int]) -> Interpolation:
    """Interpolate a field in white coordinates both ways."""
    return Interpolation(componentwise(field, degrees), gradient_field(field, degrees))


def identify(reduced: Reduced, degrees: Sequence[int], found: Interpolation | None = None) -> Identifiability:
    """Decide what a field determines, before any search.

    Degree 2 gives one matrix X diag(b) X', whose factors are not unique, and degree 1 one vector. From degree 3 on,
    the symmetric tensor is determined where rank K = N_r or rank G is full, and its decomposition is unique where
    the samples are linearly independent.

    Args:
        reduced: the field.
        degrees: q with c_q != 0 in the activation, without 0.
        found: the interpolations of its middle node, if they exist already.
    """
    m, r = reduced.white.steps.shape
    found = found or interpolate(reduced.white.middle(), degrees)
    kernel, gradient = found.kernel, found.gradient
    verdict, reason = _verdict(reduced, degrees, found)
    return Identifiability(
        verdict,
        reason,
        tuple(degrees),
        m,
        r,
        sum(count(r, q - 1) for q in degrees),
        None if kernel is None else kernel.rank,
        0.0 if kernel is None else kernel.margin,
        sum(count(r, q) for q in degrees),
        None if gradient is None else gradient.rank,
        0.0 if gradient is None else gradient.margin,
        reduced.field.source,
    )


def _allowed(interpolant: Interpolant, pencil: Directions) -> float:
    """Off-diagonal energy that noise in the values explains: it grows through interpolation and pencil."""
    grown = 10 * (interpolant.noise or 0.0) * pencil.condition / interpolant.margin
    return min(max(grown**2, OFF[0]), OFF[1])


def _hope(equations: int, samples: int, degrees: Sequence[int]) -> str:
    """What too few equations for the tensor mean for the samples."""
    unknowns = samples * samples + (samples if len(degrees) > 1 else 0)
    others = ", so that others fit the weights as well"
    if equations <= unknowns:
        return others
    return f"{others}; {samples} samples have {unknowns} unknowns, so that a search may still pin some down"


def _verdict(reduced: Reduced, degrees: Sequence[int], found: Interpolation) -> tuple[str, str]:
    m, r = reduced.white.steps.shape
    q = reduced.field.steps.shape[1]
    degree = max(degrees)
    if degree == 1:
        return NOT, "degree 1: any samples with the same weighted sum fit the weights"
    if degree == 2:
        return NOT, "degree 2: the weights fix X diag(b) X' alone, and that factorisation is not unique"
    if m <= q:
        return NOT, f"{m} neurons cannot show whether there are more than {m} samples"
    best = found.best
    tensor = sum(count(r, k) for k in degrees)
    if m * r < tensor:
        return (
            NOT,
            f"{m} neurons give {m * r} equations for the {tensor} numbers of the tensor{_hope(m * r, q, degrees)}",
        )
    if best is None:
        return PARTIAL, f"{m} neurons in {r} dimensions are too many equations to test their rank"
    if not best.determined:
        lack = f"{m} neurons give {best.rank} independent equations for the {best.unknowns} numbers of the tensor"
        return NOT, f"{lack}{_hope(best.rank, q, degrees)}"
    where = f"{m} neurons determine the tensor in {r} dimensions"
    if r < q:
        return PARTIAL, f"{where}, but there are at least {q} samples, the rank of the values"
    pencil = directions(slices(best, 0))
    if pencil is None or pencil.off > _allowed(best, pencil):
        return PARTIAL, (
            f"{where}, but {r} independent samples do not explain it: there are more samples than dimensions, or they"
            " are dependent"
        )
    return IDENTIFIABLE, f"{where}, and its decomposition into independent samples is unique"
