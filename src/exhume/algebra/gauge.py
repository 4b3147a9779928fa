"""Norm and sign of samples where the weight equations leave them open: margins, a known norm, the features' range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.evidence import Evidence

TOUCHING = 0.02  # share of the features that may lie outside their range when a sample is made to fill it
BLUR = 0.05  # relative width of what counts as touching
WIDE = 0.1  # a bound nearer to the mean than this share of the range says little about scale


@dataclass(frozen=True, eq=False)
class Gauged:
    """Model inputs u [s, d] with norm and sign, and what fixed them, in sentences."""

    u: Tensor
    said: tuple[str, ...]


def fix(
    evidence: Evidence, x: Tensor, affine: bool, scaled: bool, signed: bool, odd: bool, stationary: bool
) -> Gauged:
    """Give recovered samples the norm and sign of model inputs.

    Args:
        evidence: input specification, and the network for margins.
        x: samples [s, d], or [s, d + 1] with the bias coordinate.
        affine: whether there is a bias coordinate; then it fixes both.
        scaled: whether norms are known.
        signed: whether signs are known.
        odd: whether the activation is odd, so that an undetermined sign comes with an undetermined label.
        stationary: whether the network is trained to a stationary point without weight decay, so that the margins
            of all samples are equal.
    """
    if affine:
        return Gauged(x[:, :-1] / x[:, -1:], ("norm and sign of the samples follow from the bias",))
    spec = evidence.input
    said: list[str] = []
    if not scaled:
        x = x / x.norm(dim=1, keepdim=True)
        if spec.sample_norm is not None:
            x = x * spec.sample_norm
            said.append(f"every sample has the stated norm {spec.sample_norm:g}")
        elif stationary:
            x = by_margins(evidence, x)
            said.append("relative norms of the samples follow from equal margins, taken for granted")
    else:
        said.append("norms of the samples follow from the degrees of the activation")
    free = not scaled and spec.sample_norm is None
    if signed:
        said.append("signs of the samples follow from the degrees of the activation")
    box = spec.box()
    if box is None:
        return Gauged(x, (*said, *undetermined(scaled or not free, signed, odd)))
    if free or not signed:
        (plus, touching), (minus, mirrored) = fill(x, box), fill(-x, box)
        if not signed:
            flip = mirrored > touching if free else overflow(-x, box) < overflow(x, box)
            x = torch.where(flip[:, None], -x, x)
            plus = torch.where(flip, minus, plus)
            said.append(
                "the sign of each sample is not determined by the weights: the one that fits the range of the"
                " features was chosen"
            )
        if free:
            # With margins the norms share one factor; without, each has its own.
            x = x * (plus.median() if stationary else plus[:, None])
            said.append(
                "the norm of the samples is not determined by the weights: they were made to fill the range of"
                " the features"
            )
    return Gauged(x, tuple(said))


def by_margins(evidence: Evidence, x: Tensor) -> Tensor:
    """Relative norms from equal margins |f(x_i)|: |x_i| ~ |f(x_i / |x_i|)|^(-1/alpha), mean norm 1.

    Holds for support samples of a homogeneous network at a stationary point without weight decay (complementary
    slackness). Where a homogeneous network is probed at 2 u and u, the degree shows.

    Args:
        evidence: the network.
        x: directions [s, d].
    """
    unit = x / x.norm(dim=1, keepdim=True)
    one = evidence.output(unit.view(-1, *evidence.input.shape))[:, 0].abs().clamp_min(1e-300)
    two = evidence.output((2 * unit).view(-1, *evidence.input.shape))[:, 0].abs().clamp_min(1e-300)
    degree = float((two / one).log2().median())
    norm = one ** (-1 / degree)
    return unit * (norm / norm.mean())[:, None]


def fill(x: Tensor, box: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scale t for which t x touches the box, and the share of the features that touch it there, both [s].

    Images have many features at the end of their range (background), so the right scale and sign put many of them
    there at once. A few may lie outside.

    Args:
        x: samples [s, d].
        box: lower and upper bound [d], around zero.
    """
    low, high = box
    bound = torch.where(x > 0, high, -low).clamp_min(0.0)
    told = torch.minimum(high, -low) > WIDE * (high - low).max()
    ratio = torch.where(told, bound / x.abs().clamp_min(1e-300), torch.inf)
    reach = min(int(TOUCHING * int(told.sum())), x.shape[1] - 1)
    first = ratio.sort(dim=1).values[:, reach, None]
    near = (ratio < first * (1 + 2 * BLUR)) & (ratio > first * (1 - BLUR))
    t = torch.stack([_densest(row[at]) for row, at in zip(ratio, near, strict=True)])
    usable = torch.isfinite(t)
    return torch.where(usable, t, 1.0), near.double().mean(1) * usable


def _densest(values: Tensor) -> Tensor:
    """Centre of the shortest interval that holds a quarter of the values [k]; infinite without any."""
    if len(values) == 0:
        return values.new_tensor(torch.inf)
    ordered, part = values.sort().values, len(values) // 4
    start = int((ordered[part:] - ordered[: len(ordered) - part]).argmin())
    return ordered[start : start + part + 1].median()


def overflow(x: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """Squared distance of x [s, d] from the box, [s]."""
    return (x - x.clamp(*box)).square().sum(1)


def undetermined(scaled: bool, signed: bool, odd: bool) -> tuple[str, ...]:
    """What the weights cannot tell, one sentence each."""
    said: list[str] = []
    if not scaled:
        said.append("the norm of each sample is not determined: (c x, b / c^degree) leaves the same weights")
    if not signed and odd:
        said.append(
            "the sign of each sample is not determined: -x with the other label leaves the same weights"
        )
    if not signed and not odd:
        said.append("the sign of each sample is not determined, its label is: -x leaves the same weights")
    return tuple(said)
