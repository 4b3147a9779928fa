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
