"""Train a small victim on packaged real data and leave behind what an audit of it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from exhume.snapshot import snapshot
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

CASES = {
    "mnist": Case(data="mnist"),
    "faces": Case(data="faces"),
    "digits": Case(data="digits"),
    "breast-cancer": Case(
        data="breast-cancer",
        activation="tanh",
        training=TrainConfig(lr=0.002, max_steps=200_000, tolerance=1e-8),
    ),
}


def victim(data: str, seed: int) -> Victim:
    """Train the demo's victim: one hidden layer of 2,000 units, 20 real rows, full-batch gradient descent."""
    return make_victim(replace(CASES[data], seed=seed))


def save(made: Victim, folder: Path) -> Path:
    """Write the victim as an owner would: weights before and after, rows, and TARGET.toml, which is returned."""
    made.model.load_state_dict(made.trained.init)
    started = snapshot(made.model, folder, input=made.evidence.input, recipe=made.evidence.recipe)
    made.model.load_state_dict(made.trained.final)
    target = started.finish()
    for name, rows in (("train", made.split.train), ("control", made.split.control)):
        np.savez(folder / f"{name}.npz", x=rows.x.numpy(), y=rows.y.numpy())
    data = '\n[data]\ntrain = "train.npz"\ncontrol = "control.npz"\n'
    attack = f"\n[attack]\nsamples = {made.case.n}\n"
    target.write_text(target.read_text(encoding="utf-8") + data + attack, encoding="utf-8")
    return target
