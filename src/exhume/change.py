"""What the weights reveal before any search: decay, the rank and row space of the first-layer change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, Parameters, Recipe
from exhume.linalg import rank_by_gap
from exhume.spaces import Space, subspace

FLAT_GAP = 10.0  # a smaller drop in the spectrum is no rank: Adam, or rounding that hides it


@dataclass(frozen=True)
class Decay:
    """How much of the initialisation is left in the final weights.

    Args:
        weight: kappa of weight matrices.
        bias: kappa of bias vectors.
        source: where the numbers come from, in words.
        rank: rank of the first-layer change as the eigenvalues give it, or None.
    """

    weight: float
    bias: float
    source: str
    rank: int | None = None

    def of(self, parameter: Tensor) -> float:
        """Kappa of a parameter: matrices and kernels share one, vectors another."""
        return self.weight if parameter.dim() > 1 else self.bias


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """Singular value decomposition of the change [DW_1, Db_1] of a dense first layer.

    Args:
        spectrum: singular values, descending.
        floor: what rounding of the stored weights alone can reach.
        rank: number of singular values above the gap, a lower bound on n (an equality while n <= d).
        gap: ratio of singular values there.
        columns: orthonormal basis [w, r] of the column space, the span of the samples' back-propagated signals.
        space: the inputs compatible with the row space: x with (x, 1) in it, or x in it without biases.
        norm: root mean square norm of a model input, as |DW_1| / |Db_1| estimates it; None without biases.
        exclusive: model inputs [k, d] on which several neurons agree to rounding: a sample that alone activated
            them, or a mixture of samples where the later layers did not move. To be checked before use.
        limit: largest rank the matrix can have: its width, or the features that vary (and the bias).
    """

    spectrum: Tensor
    floor: float
    rank: int
    gap: float
    columns: Tensor
    space: Space
    norm: float | None
    exclusive: Tensor
    limit: int

    @property
    def flat(self) -> bool:
        """Whether the spectrum shows no rank, as after Adam or under coarse rounding."""
        return self.gap < FLAT_GAP

    @property
    def full(self) -> bool:
        """Whether the rank is as large as the matrix allows, so that the row space says nothing."""
        return self.rank >= self.limit


def decayed_target(evidence: Evidence, decay: Decay) -> Parameters:
    """Return t = theta_f - kappa * theta_0 in float64, one kappa per decay group.

    Without initial weights t = r theta_f, the left side of the equation of a stationary point (docs/kkt.md), with r
    the weight decay of a parameter relative to that of the recipe.
    """
    final = evidence.at(1.0)
    if evidence.init is None:
        return {k: evidence.recipe.share(k) * p for k, p in final.items()}
    return {k: p - decay.of(p) * evidence.init[k].double() for k, p in final.items()}


def decay_factor(evidence: Evidence) -> Decay:
    """Measure what is left of the initialisation.

    Under SGD, with or without momentum, W_f = kappa W_0 + (combination of the inputs). Where W_0 [w, d] has full
    column rank, kappa is the eigenvalue of pinv(W_0) W_f of multiplicity d - r; for w < d, that of W_f pinv(W_0)
    of multiplicity w - r. Given kappa, the bias change must lie in the column space of the weight change, which
    fixes the bias kappa. Without enough multiplicity (n >= d) the recipe's own recursion is used, else kappa = 1.
    """
    if evidence.init is None:
        return Decay(0.0, 0.0, "no initial weights: the final weights themselves are the target")
    if evidence.chain is not None:
        measured = _measure(evidence)
        if measured is not None:
            return measured
    known = simulated_decay(evidence.recipe)
    if known is not None:
        return Decay(known, known, "computed from the recipe's learning rate, weight decay and steps")
    return Decay(1.0, 1.0, "assumed: no weight decay (it could not be measured, and the recipe gives none)")


def simulated_decay(recipe: Recipe) -> float | None:
    """Kappa of torch.optim.SGD on a parameter without gradient, by its scalar recursion."""
    if recipe.weight_decay == 0.0:
        return 1.0
    if recipe.weight_decay is None or recipe.lr is None or recipe.steps is None:
        return None
    lr, momentum, decay = recipe.lr, recipe.momentum or 0.0, recipe.weight_decay
    # One step of (kappa, velocity): velocity' = momentum velocity + decay kappa, kappa' = kappa - lr velocity'.
    step = np.array([[1 - lr * decay, -lr * momentum], [decay, momentum]])
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.matrix_power(step, recipe.steps)[0, 0])


def _measure(evidence: Evidence) -> Decay | None:
    chain = evidence.chain
    assert chain is not None and evidence.init is not None
    start = evidence.init[chain.weights[0]].double()
    end = evidence.final[chain.weights[0]].double()
    eps = torch.finfo(evidence.stored_dtype).eps
    if start.abs().max() == 0:
        return None
    # A random compression Q'MQ of M = kappa I + (rank r) keeps kappa with multiplicity k - r, at a fraction
    # of the cost of all eigenvalues.
    if start.shape[0] < start.shape[1]:
        start, end = start.T, end.T
    d = start.shape[1]
    k = min(d, 400)
    q = torch.linalg.qr(torch.randn(d, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    eigenvalues = torch.linalg.eigvals(q.T @ torch.linalg.lstsq(start, end @ q).solution)
    # Rounding of the weights moves the entries of M by about eps * cond(W_0); eigenvalues of a non-normal
    # matrix move by a moderate multiple of that.
    spread = torch.linalg.matrix_norm(start, 2) / torch.linalg.svdvals(start)[-1].clamp_min(1e-300)
    tolerance = float(1e4 * max(eps, 1e-15) * spread)
    near = (eigenvalues[:, None] - eigenvalues[None]).abs() < tolerance
    count, centre = near.sum(1).max(0)
    if int(count) < max(2, k // 20) or tolerance > 0.1:
        return None
    kappa = float(eigenvalues[near[centre]].real.median())
    kappa = 1.0 if abs(kappa - 1.0) < tolerance * 1e-2 else kappa
    bias = _bias_factor(evidence, kappa, tolerance)
    return Decay(kappa, bias, "measured: the repeated eigenvalue of pinv(W_0) W_f", rank=k - int(count))


def _bias_factor(evidence: Evidence, kappa: float, tolerance: float) -> float:
    """Kappa of the first bias: that of the weights if b_f - kappa b_0 lies in the column space of the change, else 1.

    Biases decay like weights or not at all. If they do not, signals add up with other weights in Db_1 than in
    DW_1, so that Db_1 lies in no common column space and no kappa can be measured.
    """
    chain = evidence.chain
    assert chain is not None and evidence.init is not None
    name = chain.biases[0]
    if name is None:
        return kappa
    weight = chain.weights[0]
    change = evidence.final[weight].double() - kappa * evidence.init[weight].double()
    left, values, _ = torch.linalg.svd(change, full_matrices=False)
    rank, _ = rank_by_gap(values, rounding(evidence, change, weight))
    columns = left[:, :rank]
    b0, bf = (p[name].double() for p in (evidence.init, evidence.final))
    b0, bf = (b - columns @ (columns.T @ b) for b in (b0, bf))
    missed = float((bf - kappa * b0).norm())
    return kappa if missed <= tolerance * (1 + float(b0.norm())) else 1.0


def rounding(evidence: Evidence, change: Tensor, name: str) -> float:
    """Largest singular value that rounding the stored weights of one layer can produce in its change."""
    w, d = change.shape
    size = evidence.final[name].double().pow(2).mean().sqrt()
    return float(torch.finfo(evidence.stored_dtype).eps * size * (w**0.5 + d**0.5))


def first_layer(evidence: Evidence, decay: Decay) -> FirstLayer:
    """Decompose the change of the first layer of a dense chain.

    Every step of SGD adds outer products delta (x) (x_i, 1), so the rows of [DW_1, Db_1] lie in the span of the
    (x_i, 1) and its columns in the span of the accumulated delta, for any depth, loss, batching and step count.

    Args:
        evidence: must have a dense chain.
        decay: what is left of the initialisation. Where biases and weights decay differently, the rows of DW_1
            alone are used, since a bias then adds up its signals with other weights.
    """
    if evidence.chain is None:
        raise MissingEvidence(
            "the first-layer analysis needs a plain dense network (Linear, elementwise activation, Linear, ...),"
            " but the model is another kind; use an attack that searches the full space"
        )
    target = decayed_target(evidence, decay)
    weight = target[evidence.chain.weights[0]]
    name = evidence.chain.biases[0]
    bias = None if name is None else target[name]
    joint = bias is not None and decay.weight == decay.bias
    change = torch.cat([weight, bias[:, None]], 1) if bias is not None and joint else weight
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    floor = rounding(evidence, change, evidence.chain.weights[0])
    rank, gap = rank_by_gap(values, floor)
    rows = right[:rank]
    size = evidence.input.size
    space = Space(size)
    if rank:
        space = affine(rows) if joint else subspace(rows)
    return FirstLayer(
        spectrum=values,
        floor=floor,
        rank=rank,
        gap=gap,
        columns=left[:, :rank],
        space=space,
        norm=_norm(weight, bias),
        exclusive=_exclusive(weight, bias, floor)
        if bias is not None and joint
        else weight.new_zeros(0, size),
        # A feature that is constant in the data never moves its weights, whatever the optimizer.
        limit=min(len(weight), max(1, int((weight.abs().amax(0) > floor / len(weight) ** 0.5).sum()))),
    )


def _norm(weight: Tensor, bias: Tensor | None) -> float | None:
    """Root mean square norm of an input, |DW_1| / |Db_1|: exact where the samples' signals are orthogonal."""
    if bias is None or float(bias.norm()) <= 1e-6 * float(weight.norm()):
        return None
    return float(weight.norm() / bias.norm())


def affine(rows: Tensor) -> Space:
    """The x with (x, 1) in the span of orthonormal rows [r, d + 1]: an affine set of dimension r - 1."""
    size = rows.shape[1] - 1
    last = rows[:, -1]
    if len(rows) == 0 or float(last @ last) < 1e-20:
        return Space(size)
    origin = (last / (last @ last)) @ rows
    free = torch.linalg.svd(last[None], full_matrices=True)[2][1:]
    return subspace((free @ rows)[:, :-1], origin[:-1])


def _exclusive(weight: Tensor, bias: Tensor, floor: float) -> Tensor:
    """Inputs read off neurons that a single sample activated: DW_j / Db_j = x_i exactly.

    Neurons that share a larger set of active samples have nearly equal ratios too, but only an exclusive one is
    exact for any course of training, so two ratios must agree to rounding. Where later layers stood still, or
    rounding is coarse, a shared mixture agrees as well.
    """
    usable = bias.abs() > 1e-3 * bias.abs().max()
    ratio = weight[usable] / bias[usable, None]
    noise = floor * (1 + ratio.norm(dim=1)) / bias[usable].abs()
    tolerance = torch.minimum(10 * noise, 1e-4 * ratio.norm(dim=1))
    # Equal rows are neighbours along any direction, so one sort replaces all pairs.
    probe = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
    order = (ratio @ probe).argsort()
    ratio, tolerance = ratio[order], tolerance[order]
    same = (ratio[1:] - ratio[:-1]).norm(dim=1) <= tolerance[1:] + tolerance[:-1]
    first_of_run = same & ~torch.cat([same.new_zeros(1), same[:-1]])
    return ratio[:-1][first_of_run]
