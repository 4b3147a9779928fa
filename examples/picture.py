"""Make the README's picture: for each recovered digit, the nearest training row and the nearest control row.

python examples/picture.py docs/recovered.png
"""

import sys

import torch
from matplotlib.figure import Figure

import exhume
from exhume.victims.victim import Case, make_victim

victim = make_victim(Case(data="mnist", n=20, hidden=(2000,), seed=0))
found = exhume.presets.exhume(samples=20).run(victim.evidence, seed=0)


def nearest(rows: torch.Tensor) -> torch.Tensor:
    """Of `rows`, the one nearest to each candidate."""
    return rows[torch.cdist(found.x.flatten(1), rows.flatten(1)).argmin(1)]


shown = [
    ("recovered", found.x),
    ("nearest train", nearest(victim.truth.train)),
    ("nearest control", nearest(victim.truth.control)),
]
columns = 12
figure = Figure(figsize=(columns * 0.8, 2.6), layout="constrained")
grid = figure.subplots(len(shown), columns)
for row, (name, images) in zip(grid, shown, strict=True):
    for axis, image in zip(row, images[:columns], strict=True):
        axis.imshow(image[0].clamp(0, 1), cmap="gray", vmin=0, vmax=1)
        axis.set_xticks([])
        axis.set_yticks([])
    row[0].set_ylabel(name, rotation=0, ha="right", va="center")
figure.savefig(sys.argv[1], dpi=110)
