"""Near-duplicates: control rows that are training rows after all, and training rows that count as one.

Two rows are near where one, taken as a candidate, would match the other (`matching.MATCH`, same centre and scale).
Distances come from products of blocks, of which only one is held; beyond `WORK` multiplications the check would
take longer than the attack, and what it leaves out is said.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from exhume.errors import ExhumeError
from exhume.matching import MATCH, centre
from exhume.truth import Truth

WORK = (
    2 * 10**12
)  # multiplications of one check, a minute or two on one core; 60,000 x 60,000 rows of 784 pass
PLANTED = 64  # control rows that are labelled in any case
BLOCK = 2**22  # distances held at once, 32 MB


def comparable(truth: Truth, seed: int = 0) -> tuple[Truth, tuple[str, ...]]:
    """Make counts of training and control rows comparable, and say in sentences what was done.

    Control rows near a training row are taken out; more control than training rows are drawn at random, the drawn
    ones first; rows of either side are labelled by group of near-duplicates.

    Args:
        truth: rows as the owner gave them.
        seed: of the draw.

    Returns:
        The same training rows with the control rows that are left, and one sentence for each thing done.

    Raises:
        ExhumeError: no control row is left.
    """
    told = []
    n, k = len(truth.train), len(truth.control)
    order, checked = torch.arange(k), max(1, WORK // truth.train.numel())
    if k > min(n, checked):
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    if checked < k:
        told.append(
            f"Only {checked} of {k} control rows, drawn at random, were compared with all {n} training rows and"
            " kept; the others were left out, since checking them would take too long."
        )
        order = order[:checked]
    train, control = _flat(truth, truth.train), _flat(truth, truth.control[order])
    near = torch.zeros(len(order), dtype=torch.bool)
    size = train.square().sum(1)
    for i in _blocks(n, len(control)):
        near |= (_squares(train[i], control) < MATCH**2 * size[i, None]).any(0)
    removed = truth.removed + int(near.sum())
    if bool(near.all()):
        raise ExhumeError(
            f"control must hold rows the model never saw, but all {removed} of its rows are training rows or within"
            f" a relative distance of {MATCH:g} of one; supply other rows of the same kind, and [input] mean if"
            " it is not stated"
        )
    if removed:
        told.append(
            f"{removed} of {k + truth.removed} control rows are training rows, or within a relative distance of"
            f" {MATCH:g} of one; they are no control and were taken out."
        )
    order = order[~near]
    if len(order) > n:
        told.append(
            f"{n} of {len(order)} control rows, drawn at random (seed {seed}), stand against the {n} training rows."
        )
    elif len(order) < n:
        told.append(
            f"There are {len(order)} control rows for {n} training rows, so the two are compared on {len(order)}"
            " training rows drawn at random."
        )
    cleaned = replace(
        truth,
        control=truth.control[order],
        control_label=None if truth.control_label is None else truth.control_label[order],
        removed=removed,
    )
    # A few more than stand against train, for the positive control plants control rows.
    groups = [_groups(rows) for rows in (train, control[~near][: max(n, PLANTED)])]
    if groups[0] is None:
        told.append(
            f"Near-duplicates among the {n} training rows were not looked for: that would take too long."
        )
        return cleaned, tuple(told)
    sizes = groups[0].bincount()
    if len(sizes) < n:
        told.append(
            f"{int(sizes[sizes > 1].sum())} of {n} training rows have a near-duplicate among the training rows; a"
            f" candidate can be matched to only one row of a group, so at most {len(sizes)} distinct rows can be"
            " recovered."
        )
    return replace(cleaned, train_group=groups[0], control_group=groups[1]), tuple(told)


def _flat(truth: Truth, rows: Tensor) -> Tensor:
    """Rows [n, d] in the units of the metric, seen from its centre."""
    unit = 1.0 if truth.public_scale is None else truth.public_scale
    return ((rows - centre(truth)[0]) / unit).flatten(1)


def _groups(rows: Tensor) -> Tensor | None:
    """Label the connected groups of near rows [n], from 0; None beyond the cost limit."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(rows)
    if n * rows.numel() // 2 > WORK:
        return None
    size, pairs = rows.square().sum(1), []
    for i in _blocks(n, n):
        first = int(i[0])  # earlier rows have met these already
        # Near in either direction: the smaller of two rows may miss the larger.
        larger = torch.maximum(size[i, None], size[first:])
        pairs.append((_squares(rows[i], rows[first:]) < MATCH**2 * larger).nonzero() + first)
    a, b = torch.cat(pairs).T.numpy()
    labels = connected_components(coo_array((a == a, (a, b)), shape=(n, n)), directed=False)[1]
    return torch.from_numpy(labels).long()


def _blocks(n: int, width: int) -> tuple[Tensor, ...]:
    """Indices of n rows in blocks whose distances to `width` others fit."""
    return torch.arange(n).split(max(1, BLOCK // width))


def _squares(rows: Tensor, others: Tensor) -> Tensor:
    """Squared distances [b, k]. Expanding the square loses digits only of distances far below the threshold."""
    product = torch.addmm(others.square().sum(1), rows, others.T, alpha=-2)
    return product + rows.square().sum(1, keepdim=True)
