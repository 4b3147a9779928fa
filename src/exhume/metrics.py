"""How far candidates are from real rows: relative L2 for anything, SSIM for images."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

_SSIM_WINDOW = 3  # as in the papers whose rule is SSIM > 0.4; fits every image, and costs a fifth of 7
_CHUNK = 2**16  # elements of one batch of image pairs: more leaves the cache and takes four times as long


def relative_l2(
    candidates: Tensor, rows: Tensor, centre: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Return ||(x_hat - x) / scale|| / ||(x - centre) / scale|| for every pair, [n, m] in float64.

    Differences are taken element by element: the expanded square a^2 - 2ab + b^2 loses half the digits, and
    it loses them where it matters, at recovered samples.

    Args:
        candidates: x_hat [m, *shape].
        rows: x [n, *shape], in the same units.
        centre: subtracted from both, so only the denominator sees it; broadcastable to `shape`, default 0.
        scale: unit of each feature, broadcastable to `shape`, default 1.

    Returns:
        Distances, infinite for a candidate that is not finite and for a row that equals the centre.
    """
    x_hat, x = candidates.double(), rows.double()
    unit = torch.ones((), dtype=torch.float64) if scale is None else scale.double()
    origin = torch.zeros((), dtype=torch.float64) if centre is None else centre.double()
    numerator = torch.cdist(
        (x / unit).flatten(1), (x_hat / unit).flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    denominator = ((x - origin) / unit).flatten(1).norm(dim=1)
    return (numerator / denominator[:, None]).nan_to_num(nan=torch.inf, posinf=torch.inf)


def gauge_l2(
    candidates: Tensor,
    rows: Tensor,
    centre: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    zero: Tensor | None = None,
    sign: bool = False,
    free_scale: bool = False,
) -> Tensor:
    """Return the smallest `relative_l2` that a change of each candidate's sign or scale reaches, [n, m].

    min_s ||(zero + s (x_hat - zero) - x) / scale|| / ||(x - centre) / scale||

    with s in {1, -1} for the sign alone, s >= 0 for the scale alone, any s for both. The change acts about `zero`,
    what the model sees as zero; `centre` is only what errors are measured against, and need not be the same: a
    negative about the public mean is another image than one about zero.

    Args:
        candidates: x_hat [m, *shape].
        rows: x [n, *shape], in the same units.
        centre: as in `relative_l2`.
        scale: as in `relative_l2`.
        zero: broadcastable to `shape`, default 0.
        sign: whether s may be negative.
        free_scale: whether |s| is free.
    """
    origin = torch.zeros((), dtype=torch.float64) if zero is None else zero.double()
    x_hat, x = candidates.double(), rows.double()
    if not free_scale:
        plain = relative_l2(x_hat, x, centre, scale)
        return torch.minimum(plain, relative_l2(2 * origin - x_hat, x, centre, scale)) if sign else plain
    unit = torch.ones((), dtype=torch.float64) if scale is None else scale.double()
    v_hat, v = (((t - origin) / unit).flatten(1) for t in (x_hat, x))
    best = v_hat @ v.T / v_hat.square().sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    best = best if sign else best.clamp_min(0)
    middle = torch.zeros((), dtype=torch.float64) if centre is None else centre.double()
    size = ((x - middle) / unit).flatten(1).norm(dim=1)
    # Row by row, so that differences are taken element by element and no [n, m, d] array is held.
    distance = [(best[:, i : i + 1] * v_hat - v[i]).norm(dim=1) / size[i] for i in range(len(v))]
    return torch.stack(distance).nan_to_num(nan=torch.inf, posinf=torch.inf)


def rho(candidates: Tensor, rows: Tensor) -> float:
    """Return the mean over rows of ||x - x_hat|| / ||x||, one-to-one: the error of the weight-change papers.

    The assignment minimises that mean. Errors are not capped, signs count, and nothing is subtracted: candidates
    and rows are model inputs.

    Args:
        candidates: x_hat [m, *shape].
        rows: x [n, *shape].

    Returns:
        The mean; infinite where a row has no finite candidate of its own.
    """
    return _mean_assigned(relative_l2(candidates, rows))


def rho_pm(candidates: Tensor, rows: Tensor) -> float:
    """Return `rho` with the better of the two signs of each candidate, one sign for all its entries."""
    return _mean_assigned(gauge_l2(candidates, rows, sign=True))


def _mean_assigned(distance: Tensor) -> float:
    from scipy.optimize import linear_sum_assignment  # a third of a second to import

    if distance.shape[1] < distance.shape[0]:
        return float("inf")
    far = 1e6  # stands for infinity in the assignment only
    pairs = linear_sum_assignment(distance.clamp(max=far).numpy())
    return float(distance[pairs].mean())


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether `shape` is [h, w] or [c, h, w] with one or three channels, large enough for a 3x3 window."""
    channels, sides = shape[:-2], shape[-2:]
    return len(sides) == 2 and min(sides) >= 3 and channels in ((), (1,), (3,))


def ssim(candidates: Tensor, images: Tensor, low: float, high: float) -> Tensor:
    """Return the structural similarity of p pairs of images, [p] in float64.

    Uniform window of 3x3 pixels, borders reflected.

    Args:
        candidates: x_hat [p, c, h, w] or [p, h, w]; clamped to the range.
        images: x, same shape.
        low: smallest pixel value.
        high: largest.

    Returns:
        Similarities, at most 1; minus infinity where a candidate is not finite.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure  # half a second to import

    x_hat, x = (t.double() if t.ndim == 4 else t.double().unsqueeze(1) for t in (candidates, images))
    value = structural_similarity_index_measure(
        x_hat,
        x,
        gaussian_kernel=False,
        kernel_size=_SSIM_WINDOW,
        reduction="none",
        data_range=(low, high),
    )
    return cast(Tensor, value).reshape(-1).nan_to_num(nan=-torch.inf)


def ssim_matrix(candidates: Tensor, images: Tensor, low: float, high: float) -> Tensor:
    """Return `ssim` of every pair, [n, m], for candidates [m, *shape] and images [n, *shape]."""
    n, m = len(images), len(candidates)
    if not n * m:
        return torch.empty(n, m, dtype=torch.float64)
    first, second = torch.cartesian_prod(torch.arange(n), torch.arange(m)).unbind(1)
    at_once = max(1, _CHUNK // images[0].numel())
    parts = [
        ssim(candidates[j], images[i], low, high)
        for i, j in zip(first.split(at_once), second.split(at_once), strict=True)
    ]
    return torch.cat(parts).reshape(n, m)
