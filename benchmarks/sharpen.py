"""A second fit with weights from the misfit, the output equation and signs of multipliers: what each one brings.

One row a victim and arm, all arms from the same searches: matched, close and median error of the span solve alone,
without simulated training. The last case adds noise to the last layer's weights, as an owner might before publishing.

    python benchmarks/sharpen.py --seeds 3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from common import Row, options, result, show, write
from exhume import match, presets
from exhume.attack import Search, SpanAttack
from exhume.clock import Clock
from exhume.equations.part import Part
from exhume.evidence import Evidence
from exhume.moves.sharpen import Sharpen
from exhume.moves.single import Single
from exhume.survey import Ground
from exhume.victims.victim import Case, make_victim


@dataclass(frozen=True)
class Shared(SpanAttack):
    """Our attack, whose searches are made once and shared by all arms: they do not depend on the second fit."""

    found: dict[int, Search] = field(default_factory=dict)

    def _find(
        self,
        evidence: Evidence,
        ground: Ground,
        single: Single | None,
        parts: tuple[Part, Part] | None,
        seed: int,
        clock: Clock,
        begin: Tensor,
    ) -> Search:
        if seed not in self.found:
            self.found[seed] = super()._find(evidence, ground, single, parts, seed, clock, begin)
        return self.found[seed]


NOTHING = Sharpen(weights=False, output=False, signs=False)
ARMS: dict[str, Sharpen | None] = {
    "one fit": None,
    "second fit": NOTHING,
    "weights": replace(NOTHING, weights=True),
    "output": replace(NOTHING, output=True),
    "signs": replace(NOTHING, signs=True),
    "all three": Sharpen(),
}
NOISE = 0.02  # of the noisy last layer, relative to its change


def as_it_is(evidence: Evidence, seed: int) -> Evidence:
    """The weights as trained."""
    return evidence


def noisy_last_layer(evidence: Evidence, seed: int) -> Evidence:
    """Gaussian noise on the last layer."""
    assert evidence.chain is not None and evidence.init is not None
    name, generator = evidence.chain.weights[-1], torch.Generator().manual_seed(seed)
    weight = evidence.final[name]
    size = NOISE * (weight - evidence.init[name]).square().mean().sqrt()
    noise = size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return replace(evidence, final={**evidence.final, name: weight + noise})


CASES: dict[str, tuple[Case, Callable[[Evidence, int], Evidence]]] = {
    "mnist 2000": (Case(), as_it_is),
    "mnist 400": (Case(hidden=(400,)), as_it_is),
    "digits 1000": (Case(data="digits", hidden=(1000,)), as_it_is),
    "faces 1000": (Case(data="faces", hidden=(1000,)), as_it_is),
    "mnist 300x300": (Case(hidden=(300, 300)), as_it_is),
    f"mnist 2000, {NOISE:.0%} noise on the last layer": (Case(), noisy_last_layer),
}
COLUMNS = {
    "case": "case",
    "arm": "arm",
    "matched": "matched_train",
    "close": "close_train",
    "control": "matched_control",
    "certified": "certified",
    "median error": "median_error",
}


def run(name: str, seed: int) -> list[Row]:
    case, spoil = CASES[name]
    victim = make_victim(replace(case, seed=seed))
    evidence = spoil(victim.evidence, seed)
    rows: list[Row] = []
    ours = presets.exhume(case.n)
    shared = Shared(**{f.name: getattr(ours, f.name) for f in fields(ours)})
    for arm, sharpen in ARMS.items():
        attack = replace(shared, polish=None, sharpen=sharpen)
        found = attack.run(evidence, seed, budget=60)
        rows.append(
            {**result(found, match(found, victim.truth)), "case": name, "arm": arm, "seed": seed, "n": case.n}
        )
    return rows


def main() -> None:
    chosen = options("What a second fit with what the first one told brings.", seeds=3)
    names = list(CASES)[:2] if chosen.quick else list(CASES)
    rows: list[Row] = []
    for name in names:
        for seed in range(chosen.seeds):
            rows += run(name, seed)
            Console().print(f"{name}, seed {seed} done", highlight=False)
    lines = []
    for name in names:
        for arm in ARMS:
            own = [row for row in rows if (row["case"], row["arm"]) == (name, arm)]
            line: Row = {"case": name, "arm": arm}
            for key in ("matched_train", "close_train", "matched_control", "certified"):
                line[key] = ", ".join(str(row[key]) for row in own)
            line["median_error"] = ", ".join(f"{row['median_error']:.3g}" for row in own)
            lines.append(line)
    show(f"Each of {chosen.seeds} seeds, span solve alone", lines, COLUMNS)
    if chosen.json is not None:
        write(Path(chosen.json), rows)


if __name__ == "__main__":
    main()
