"""What the equations cannot tell of a sample: its sign, its scale."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from exhume.dense import DenseNode, dense_node
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence
from exhume.survey import Ground, survey

TOLD = 0.01  # share of the part beyond degree one that must tell x from -x: less drowns in the misfit
BENT = 1e-3  # squared sine of the angle between the gradients at x and 2 x that tells the scale
LINEAR = 1e-6  # share of the gradients beyond degree one below which they are linear in the sample
_PROBES, _DIMENSIONS, _HEADS = 128, 8, 8


@dataclass(frozen=True)
class Ambiguity:
    """Changes of a sample that leave the equations (nearly) satisfied once the multipliers are fitted again.

    A gauge is  u -> s u  for model inputs u, that is  x -> zero + s (x - zero):  s in {1, -1} for the sign, s > 0
    for the scale.

    Args:
        sign: s = -1 is not ruled out.
        scale: s > 0 is not ruled out.
        reasons: one sentence each, also for what can be told.
        zero: the sample that the model sees as zero, in the owner's units, broadcastable to a sample; None is 0.
    """

    sign: bool
    scale: bool
    reasons: tuple[str, ...]
    zero: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def any(self) -> bool:
        """Whether anything is ambiguous."""
        return self.sign or self.scale


@dataclass(frozen=True)
class Parity:
    """Shares of E|g(u)|^2 of the gradients g of the outputs, for inputs u on a sphere; they add up to one.

    Args:
        constant: degree 0.
        linear: degree 1.
        even: even degrees from 2.
        odd: odd degrees from 3.
        bent: mean squared sine of the angle between g(u) and g(2 u); zero where g is homogeneous.
    """

    constant: float
    linear: float
    even: float
    odd: float
    bent: float

    @property
    def beyond(self) -> float:
        """Share beyond degree one: what tells one sample from a mixture of others."""
        return self.even + self.odd


def ambiguity(
    evidence: Evidence, layers: str = "all", samples: int | None = None, ground: Ground | None = None
) -> Ambiguity:
    """Say whether the span equation can tell sign and scale of a sample.

    The gradients at -u and u differ by twice their odd part, or, with the opposite multiplier, by twice their even
    part. Of either, degrees 0 and 1 can be made up by the other samples (the linear part only if these are as many
    as there are features), higher ones not. Where gradients are homogeneous, s u with its multiplier divided by
    the same power of s is as good as u.

    Args:
        evidence: with the final weights, at which the gradients are taken.
        layers: "all" layers that changed, or the "last" alone, as in the span equation.
        samples: their number n; by default the rank of the first-layer change, if it shows one.
        ground: what was read off the evidence; its space is where candidates are sought.

    Returns:
        True where something is not ruled out as far as is known, with the reasons. The equations alone are meant:
        a range of feature values may rule out more.
    """
    zero = evidence.input.mean
    if evidence.chain is None:
        why = "whether sign and scale of a sample can be told is known for plain dense networks only"
        return Ambiguity(False, False, (why,), zero)
    ground = survey(evidence) if ground is None else ground
    if ground.space.origin is not None:
        why = "the row space of [DW_1, Db_1] tells sign and scale: (x, 1) lies in it, (-x, 1) and (s x, 1) do not"
        return Ambiguity(False, False, (why,), zero)
    used = used_layers(evidence, layers)
    found = parity(evidence, used, ground)
    n = count_samples(ground, samples)
    # Few numbers, whatever the sample: they are left out of the gradients, and weighed by their count.
    spare = (
        evidence.outputs
        if evidence.chain.biases[-1] is not None and len(evidence.chain.biases) - 1 in used
        else 0
    )
    sign, why_sign = _sign(evidence, found, n, ground, spare)
    scale, why_scale = _scale(evidence, found, n, ground, spare)
    return Ambiguity(sign, scale, (why_sign, why_scale), zero)


def count_samples(ground: Ground, samples: int | None) -> int | None:
    """The number of samples: as stated, at least the rank the first-layer change shows; None if neither is known."""
    shown = ground.first.rank if ground.reduced and ground.first is not None else 0
    return max(samples or 0, shown) or None


def used_layers(evidence: Evidence, layers: str) -> tuple[int, ...]:
    """Indices of the dense layers whose change enters the equations: the last, or those that changed (else all).

    Args:
        evidence: with a dense chain.
        layers: "all" or "last".

    Raises:
        MissingEvidence: the model is no plain dense network.
    """
    chain = evidence.chain
    if chain is None:
        raise MissingEvidence(
            "layers can be chosen in plain dense networks only, but the model is another kind; use all parameters"
        )
    depth = len(chain.weights)
    if layers == "last":
        return (depth - 1,)
    start, end = evidence.init, evidence.final
    moved = (
        l for l, k in enumerate(chain.weights) if start is not None and not torch.equal(start[k], end[k])
    )
    return tuple(moved) or tuple(range(depth))


def parity(evidence: Evidence, used: tuple[int, ...], ground: Ground) -> Parity:
    """Split the gradients by degree in the sample, on random inputs of typical norm.

    Only inner products of gradients are needed: with Q an orthonormal basis of the linear functions on the m
    probes and K_o, K_e the Gram matrices of the odd and even parts, tr Q' K_o Q is the linear part, and
    tr K_o less that is the odd rest. The last bias is left out: C numbers, whatever the sample.

    Args:
        evidence: with a dense chain.
        used: layers whose gradients are meant, see `used_layers`.
        ground: gives the typical norm and the subspace to draw from. Probes lie in a random part of it of 8
            dimensions at most, so that few suffice to split off the linear functions.
    """
    chain, space = evidence.chain, ground.space
    assert chain is not None
    generator = torch.Generator().manual_seed(0)
    k, m = min(_DIMENSIONS, space.dim), _PROBES
    frame = torch.linalg.qr(torch.randn(space.dim, k, generator=generator, dtype=torch.float64))[0].T
    z = torch.randn(m, k, generator=generator, dtype=torch.float64)
    if k > 1:  # on a sphere degrees do not mix; in one dimension it would be two points
        z = z / z.norm(dim=1, keepdim=True)
    u = ground.norm * (z @ frame if space.basis is None else z @ frame @ space.basis)
    node = dense_node(chain, evidence.at(1.0), None, None)
    gram = _gram(node, chain.biases, used, torch.cat([u, -u, 2 * u]))
    here, across = gram[:m, :m] + gram[m : 2 * m, m : 2 * m], gram[:m, m : 2 * m] + gram[m : 2 * m, :m]
    odd, even = (here - across) / 4, (here + across) / 4
    q = torch.linalg.qr(z)[0]
    rest_odd = float((odd.trace() - (q.T @ odd @ q).trace()).clamp_min(0)) / (m - k)
    rest_even = float((even.trace() - even.mean() * m).clamp_min(0)) / (m - 1)
    total_odd, total_even = float(odd.trace()) / m, float(even.trace()) / m
    total = max(total_odd + total_even, torch.finfo(torch.float64).tiny)
    once, twice, both = (
        block.diagonal() for block in (gram[:m, :m], gram[2 * m :, 2 * m :], gram[:m, 2 * m :])
    )
    bent = 1 - both.square() / (once * twice).clamp_min(torch.finfo(torch.float64).tiny)
    return Parity(
        constant=max(total_even - rest_even, 0.0) / total,
        linear=max(total_odd - rest_odd, 0.0) / total,
        even=rest_even / total,
        odd=rest_odd / total,
        bent=float(bent.clamp(0, 1).mean()),
    )


def _gram(node: DenseNode, biases: tuple[str | None, ...], used: tuple[int, ...], u: Tensor) -> Tensor:
    """Inner products of the gradients of the outputs before their activation, which multipliers absorb."""
    _, right, slope = node.forward(u)
    last, outputs = len(biases) - 1, slope[-1].shape[1]
    if used == (last,):  # the gradients are the hidden features: no signal is needed
        return right[last] @ right[last].T
    heads = torch.eye(outputs, dtype=u.dtype)
    if outputs > _HEADS:
        heads = torch.randn(_HEADS, outputs, generator=torch.Generator().manual_seed(1), dtype=u.dtype)
    slope[-1] = torch.ones_like(slope[-1])
    gram = u.new_zeros(len(u), len(u))
    inner = [
        a @ a.T + (b is not None and l < last) for l, (a, b) in enumerate(zip(right, biases, strict=False))
    ]
    for head in heads:  # one at a time, since a signal is as large as a hidden layer
        left = node.lefts(slope, head.expand(len(u), 1, -1))
        for l in used:
            gram += inner[l] * (left[l][:, 0] @ left[l][:, 0].T)
    return gram


def _sign(evidence: Evidence, found: Parity, n: int | None, ground: Ground, spare: int) -> tuple[bool, str]:
    if found.beyond < LINEAR:
        return True, "sign: the gradients are linear in x, so they tell what the samples span, and no sample"
    odd = found.odd / found.beyond
    if odd > 1 - TOLD:
        if found.constant >= TOLD * found.beyond:
            if n == 1:
                return False, "sign: -x differs from x by a constant, which no other sample can make up"
            return True, "sign: -x differs from x by a constant alone, which other samples make up"
        weak = f", but for the {spare} numbers of the last bias" if spare else ""
        return True, f"sign: the gradients are odd in x, so -x with the opposite multiplier is as good{weak}"
    if odd >= TOLD:
        return False, f"sign: {odd:.2g} of the part beyond degree one is odd, which tells x from -x"
    if found.linear < TOLD * found.beyond:
        return True, "sign: the gradients are even in x, so -x is as good"
    d, said = evidence.input.size, "sign: -x differs from x by a linear part alone, which"
    if n is None:
        return True, f"{said} {d} samples or more nearly make up; their number is not known"
    shown = ground.first.rank if ground.reduced and ground.first is not None else d
    if n >= d or n > shown:
        return True, f"{said} {n} samples in {min(d, shown)} dimensions nearly make up"
    return False, f"{said} {n} samples in {d} dimensions cannot make up"


def _scale(evidence: Evidence, found: Parity, n: int | None, ground: Ground, spare: int) -> tuple[bool, str]:
    radius = ground.space.radius
    if evidence.input.sample_norm is not None or (radius is not None and radius[0] == radius[1]):
        return False, "scale: the norm of every model input is given"
    if found.beyond < LINEAR:
        return True, "scale: the gradients are linear in x, so they tell what the samples span, and no sample"
    if found.bent >= BENT:
        return False, "scale: the gradients at x and 2 x have different directions"
    if n is not None and n <= spare:
        return False, f"scale: the {spare} numbers of the last bias tell the scales of {n} samples"
    return True, "scale: the gradients are homogeneous in x, so s x with a multiplier to match is as good"
