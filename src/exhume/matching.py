"""One-to-one matches between candidates and real rows, with the same count for control rows and for nulls.

A count alone says little: the control says what unrelated rows of the same kind score by chance, the nulls
what an attacker scores without any weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from exhume.ambiguity import Ambiguity
from exhume.errors import ExhumeError
from exhume.metrics import gauge_l2, is_image, relative_l2, ssim_matrix
from exhume.reconstruction import Reconstruction
from exhume.truth import Truth

MATCH, CLOSE, SSIM = 0.3, 0.1, 0.4  # a match and a close match in relative L2; the papers' rule in SSIM
SSIM_PAIRS = 50_000  # above that SSIM, which carries no claim, would cost more than the attack
_FAR = 100.0  # distances beyond this are equally hopeless


class HasSamples(Protocol):
    """Anything that carries candidates, such as a reconstruction."""

    @property
    def x(self) -> Tensor:
        """Candidates [m, *shape] in the owner's units."""


@dataclass(frozen=True)
class GaugeScore:
    """The same count where a declared ambiguity is forgiven: each candidate with the best sign or scale for its row.

    Args:
        count: rows matched below the threshold of the plain score.
        close: the same below its close threshold.
        median: median error, as in the plain score.
    """

    count: int
    close: int
    median: float | None


@dataclass(frozen=True)
class Score:
    """How many of n rows were matched.

    Args:
        n: number of rows.
        count: rows matched below `threshold`, at most one candidate each and one row a candidate.
        close: the same below `close_threshold`.
        median: median error over all n rows, in the assignment that `count` comes from (errors are not
            capped); a row without a candidate counts as infinitely far, None stands for an infinite median.
        ssim_count: images matched one-to-one above `ssim_threshold`, None for anything but images and for large
            sets. Unrelated images pass it often, so it carries no claim by itself.
        distinct: number of rows when near-duplicates count as one; None where they were not looked for.
        distinct_count: how many of those were matched.
        gauge: the count with a declared ambiguity forgiven, beside `count` and never instead of it; None where
            nothing was declared.
    """

    n: int
    count: int
    close: int
    median: float | None
    metric: str = "relative-l2"
    threshold: float = MATCH
    close_threshold: float = CLOSE
    ssim_count: int | None = None
    ssim_threshold: float = SSIM
    distinct: int | None = None
    distinct_count: int | None = None
    gauge: GaugeScore | None = None

    @property
    def independent(self) -> tuple[int, int]:
        """Matched and all rows as an exact test may count them: near-duplicates are one observation."""
        if self.distinct is None or self.distinct_count is None:
            return self.count, self.n
        return self.distinct_count, self.distinct


@dataclass(frozen=True)
class Row:
    """One training row beside the candidate assigned to it.

    Args:
        truth: index of the row in train.
        candidate: index of the candidate; None if there was none left.
        error: relative L2 distance of the two.
        ssim: their structural similarity, images only.
        feature_error: |x_hat - x| of each feature in the owner's units, tables only.
    """

    truth: int
    candidate: int | None = None
    error: float | None = None
    ssim: float | None = None
    feature_error: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Matches:
    """Scores of one set of candidates.

    Args:
        train: candidates against the training rows.
        control: the same candidates against as many control rows, or all where there are fewer.
        random: as many random candidates, with the control's mean and spread of each feature, against train.
        mean_image: the public mean against train; its centred distance is 1 by construction, its SSIM is not.
        rows: one for each training row; `train.count` of them have an error below the threshold.
        centred_by: what was subtracted before distances were taken.
        drawn: the same candidates against as many training rows as there are control rows, drawn at random, where
            those are fewer; None where all of train stands against control.
    """

    train: Score
    control: Score
    random: Score
    mean_image: Score
    rows: tuple[Row, ...]
    centred_by: str
    drawn: Score | None = None

    @property
    def compared(self) -> Score:
        """The score of training rows that stands against `control`: of equally many rows."""
        return self.train if self.drawn is None else self.drawn


def match(
    candidates: Tensor | HasSamples, truth: Truth, *, seed: int = 0, ambiguity: Ambiguity | None = None
) -> Matches:
    """Match candidates to training rows, and the same candidates to control rows.

    The distance is ||x_hat - x|| / ||x - mean||, with features divided by `truth.public_scale` if that is
    given. A candidate may match one row of train and, independently, one of control.

    Where the equations cannot tell a sample's sign or scale, a second count forgives that, for train, control and
    random candidates alike: the distance is the smallest over zero + s (x_hat - zero), s = -1 for the sign, s > 0
    for the scale. The change acts on model inputs about their zero, since that is what the equations cannot tell;
    the public mean still only sets what an error is relative to. Where the model subtracts the public mean the two
    are one point, and unrelated rows stay at right angles whatever their scale. Where it sees raw images, all point
    nearly one way, and a free scale makes a few unrelated ones match: about one face in 25.

    Args:
        candidates: x_hat [m, *shape] in the owner's units, or an object with such an `x`; m may be 0.
        truth: what to compare with.
        seed: of the random candidates, and of the training rows drawn where there are fewer control rows.
        ambiguity: what to forgive in the second count; by default what the reconstruction declares.

    Raises:
        ExhumeError: candidates and truth differ in shape.
    """
    x = candidates if isinstance(candidates, Tensor) else candidates.x
    if ambiguity is None and isinstance(candidates, Reconstruction):
        ambiguity = candidates.ambiguity
    x = x.detach().to("cpu", torch.float64)
    shape = truth.train.shape[1:]
    if x.shape[1:] != shape:
        raise ExhumeError(
            f"candidates must have the shape {tuple(shape)} of the training rows, but have"
            f" {tuple(x.shape[1:])}; check [input] shape"
        )
    origin, centred_by = centre(truth)
    n, k = len(truth.train), min(len(truth.train), len(truth.control))

    def compare(x_hat: Tensor, rows: Tensor, group: Tensor | None = None) -> _Comparison:
        distance = relative_l2(x_hat, rows, origin, truth.public_scale)
        gauge = (
            None if ambiguity is None or not ambiguity.any else _gauge(x_hat, rows, origin, truth, ambiguity)
        )
        return _Comparison(distance, _similarity(x_hat, rows, truth), assign(distance, MATCH), group, gauge)

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    random = truth.control.mean(0) + truth.control.std(0, correction=0) * noise
    found = compare(x, truth.train, truth.train_group)
    drawn = torch.randperm(n, generator=generator)[:k].sort().values
    return Matches(
        train=_score(found),
        control=_score(compare(x, truth.control[:k], _of(truth.control_group, torch.arange(k)))),
        random=_score(compare(random, truth.train)),
        mean_image=_mean_image(origin, truth),
        rows=_rows(found, x, truth.train),
        centred_by=centred_by,
        drawn=None if k == n else _score(compare(x, truth.train[drawn], _of(truth.train_group, drawn))),
    )


def _of(group: Tensor | None, index: Tensor) -> Tensor | None:
    return None if group is None else group[index]


def assign(distance: Tensor, threshold: float) -> dict[int, int]:
    """Return {row: column}, one-to-one, with as many distances below the threshold as any such choice has.

    Among those choices it is one of smallest total distance. Distances merely capped at the threshold would
    not do: two pairs at 0.29 cost more than a perfect one and a miss.

    Args:
        distance: non-negative or infinite, [n, m].
        threshold: of a match.

    Returns:
        min(n, m) pairs less those at infinite distance.
    """
    from scipy.optimize import linear_sum_assignment  # a third of a second to import

    cost = distance.clamp(max=_FAR)
    miss = _FAR * (min(distance.shape) + 1)  # more than all distances of any assignment together
    pairs = zip(*linear_sum_assignment((cost + miss * (distance >= threshold)).numpy()), strict=True)
    return {int(i): int(j) for i, j in pairs if distance[i, j].isfinite()}


def _count(distance: Tensor, threshold: float) -> int:
    return sum(bool(distance[pair] < threshold) for pair in assign(distance, threshold).items())


@dataclass(frozen=True, eq=False)
class _Comparison:
    distance: Tensor
    similarity: Tensor | None
    pairs: dict[int, int]
    group: Tensor | None = None
    gauge: GaugeScore | None = None


def _gauge(x_hat: Tensor, rows: Tensor, origin: Tensor, truth: Truth, ambiguity: Ambiguity) -> GaugeScore:
    distance = gauge_l2(
        x_hat,
        rows,
        origin,
        truth.public_scale,
        zero=ambiguity.zero,
        sign=ambiguity.sign,
        free_scale=ambiguity.scale,
    )
    errors = _errors(distance, assign(distance, MATCH))
    middle = median(errors)
    return GaugeScore(
        count=sum(error < MATCH for error in errors),
        close=_count(distance, CLOSE),
        median=middle if middle < torch.inf else None,
    )


def _errors(distance: Tensor, pairs: dict[int, int]) -> list[float]:
    return [float(distance[i, pairs[i]]) if i in pairs else torch.inf for i in range(len(distance))]


def _score(found: _Comparison) -> Score:
    n = len(found.distance)
    errors = _errors(found.distance, found.pairs)
    middle = median(errors)
    group = None if found.group is None else found.group.tolist()
    return Score(
        n=n,
        count=sum(error < MATCH for error in errors),
        close=_count(found.distance, CLOSE),
        median=middle if middle < torch.inf else None,
        ssim_count=None if found.similarity is None else _count(1 - found.similarity, 1 - SSIM),
        distinct=None if group is None else len(set(group)),
        distinct_count=None if group is None else len({group[i] for i in range(n) if errors[i] < MATCH}),
        gauge=found.gauge,
    )


def _mean_image(origin: Tensor, truth: Truth) -> Score:
    """As many copies of the mean as there are rows, each matched to its own: any assignment counts the same."""
    train, mean = truth.train, origin.expand(1, *truth.train.shape[1:])
    errors = relative_l2(mean, train, origin, truth.public_scale)[:, 0]
    similar = None if len(train) ** 2 > SSIM_PAIRS else _similarity(mean, train, truth)
    middle = median(errors.tolist())
    return Score(
        n=len(train),
        count=int((errors < MATCH).sum()),
        close=int((errors < CLOSE).sum()),
        median=middle if middle < torch.inf else None,
        ssim_count=None if similar is None else int((similar > SSIM).sum()),
    )


def _rows(found: _Comparison, x_hat: Tensor, x: Tensor) -> tuple[Row, ...]:
    def row(i: int) -> Row:
        j = found.pairs.get(i)
        if j is None:
            return Row(truth=i)
        return Row(
            truth=i,
            candidate=j,
            error=float(found.distance[i, j]),
            ssim=None if found.similarity is None else float(found.similarity[i, j]),
            feature_error=tuple((x_hat[j] - x[i]).abs().tolist()) if x.ndim == 2 else None,
        )

    return tuple(row(i) for i in range(len(x)))


def centre(truth: Truth) -> tuple[Tensor, str]:
    """Return what is subtracted before distances are taken [*shape], and what it is in words.

    It is a mean over rows outside train and the control rows in use: theirs would pull every distance along.

    Args:
        truth: what is compared with.
    """
    spare = truth.control[len(truth.train) :]
    if truth.public_mean is not None:
        return truth.public_mean, "the public mean"
    if len(spare):
        return spare.mean(0), f"the mean of {len(spare)} control rows not used for matching"
    return torch.zeros_like(truth.train[0]), "zero, as there are no public rows"


def _similarity(x_hat: Tensor, x: Tensor, truth: Truth) -> Tensor | None:
    """SSIM on the range of the real rows, or None where they are no images or too many for a number beside."""
    if not is_image(tuple(x.shape[1:])) or len(x_hat) * len(x) > SSIM_PAIRS:
        return None
    low, high = (min(truth.train.min(), truth.control.min()), max(truth.train.max(), truth.control.max()))
    return ssim_matrix(x_hat, x, float(low), float(high))
