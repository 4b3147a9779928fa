"""What an attack will need before it starts: memory at its peak, and the least time until it can be ended.

With m candidates of q coordinates, k multipliers each (nodes times outputs), P parameters and widths w_1, ..., w_L of
all layers, 8 bytes a number:

weights          (nodes + 4) P                                  weights at each node, the change, its singular vectors
column search    starts q (5 w_1 + 2 (w_2 + ... + w_L)) + 8 starts q^2      Jacobians and curvatures of one round
feature search   4 starts q w_1 + 8 starts q^2 + 3 w_1 w_2                  the same, and the second-layer change
normal matrix    5 (m q)^2 + 4 nodes m q (w_1 + ... + w_L)      only up to `VarPro.dense_limit` unknowns, CG beyond
Gram matrix      4 (m k)^2 + 2 m k (w_1 + ... + w_L)
gradients        4 min(m, 16) k P                               of a model that is no plain dense network
distances        6 n m                                          rows against candidates, after the attack

Search and fit also hold the weights at each node, the first layer's folded into the q coordinates.

An attack that runs out of its budget returns its best result, but only between steps: `seconds` is what one round of
search, one step of each fit and the certificate take, whatever the budget.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exhume.algebraic import AlgebraAttack
from exhume.attack import SpanAttack
from exhume.descent import Descent
from exhume.errors import ExhumeError
from exhume.evidence import Evidence
from exhume.kkt import KKTAttack
from exhume.moves.growth import Growth
from exhume.rows import FirstRows
from exhume.survey import Ground

NUMBER = 8  # bytes
OVERRUN = 10.0  # times the budget that a single round may take
EIGEN = 30  # multiplications of a symmetric eigenvalue problem, relative to k^3, at the speed of a product
GIB = 2**30


class OverBudget(ExhumeError):
    """A job that needs more memory or time than there is; the message holds the numbers."""


@dataclass(frozen=True)
class Cost:
    """What an attack will need.

    Args:
        parts: numbers held at once in each phase of the attack, by name; phases follow one another.
        multiplications: that are done before the attack can be ended.
        candidates: sought at once in the joint fit.
        unknowns: of each candidate.
        advice: what would lower the cost.
    """

    parts: dict[str, float]
    multiplications: float
    candidates: int
    unknowns: int
    advice: str

    @property
    def memory(self) -> float:
        """Peak in bytes: that of the largest phase."""
        return NUMBER * max(self.parts.values())

    @property
    def largest(self) -> str:
        """The phase that needs it."""
        return max(self.parts, key=lambda name: self.parts[name])


def estimate(
    attack: SpanAttack | Descent | AlgebraAttack | KKTAttack | FirstRows,
    evidence: Evidence,
    ground: Ground,
    rows: int = 0,
) -> Cost:
    """Estimate what an attack will allocate, by the formulas above; nothing is allocated.

    Args:
        attack: its search, fit and number of samples.
        evidence: the shapes of its weights.
        ground: rank and search space.
        rows: training rows the candidates will be matched with, 0 without truth.
    """
    if isinstance(attack, Descent):
        return _descent(attack, evidence, ground, rows)
    if isinstance(attack, AlgebraAttack):
        return _closed_form(attack, evidence, ground, rows)
    if isinstance(attack, FirstRows):
        return _rows(evidence, rows)
    if isinstance(attack, KKTAttack):
        return _descent(replace(attack.descent, samples=attack.samples), evidence, ground, rows)
    chain, nodes = evidence.chain, len(attack.equation.nodes)
    total = sum(p.numel() for p in evidence.final.values())
    widths = [] if chain is None else [evidence.final[name].shape[0] for name in chain.weights]
    q, k, first = ground.space.dim, nodes * evidence.outputs, ground.first
    smooth = chain is not None and not chain.smoothed(1.0).piecewise_linear
    weights = float(nodes * total) * min(1.0, q / evidence.input.size)
    parts, work, advice = {"weights": float((nodes + 4) * total)}, 0.0, "fewer [attack] samples"
    m = max(first.rank if first is not None and ground.reduced else 0, attack.samples or 0)
    room = 0 if attack.feature is None else attack.feature.room(evidence, ground.space, m)
    if attack.feature is not None and room:
        starts, rounds = max(12, round(attack.search.starts * m)), 2 * attack.search.solver.iterations
        parts["feature search"] = (
            weights + starts * q * 4.0 * widths[0] + 8.0 * starts * q**2 + 3.0 * widths[0] * widths[1]
        )
        work += rounds * starts * q * widths[0] * (len(attack.feature.nodes) + 2.0 * q + 2.0 * room)
    elif attack.column is not None and ground.reduced and smooth and first is not None:
        # As many candidates as the rank shows, whatever number of samples is stated.
        m, advice = first.rank, "a narrower network or fewer training samples"
        # Samples that single neurons give away are not searched for.
        starts = max(12, round(attack.search.starts * max(m - len(first.exclusive), 0)))
        jacobian = starts * q * (5.0 * widths[0] + 2.0 * sum(widths[1:]))
        parts["column search"] = weights + jacobian + 8.0 * starts * q**2
        rounds = len(attack.sharpness) * attack.search.solver.iterations
        work += rounds * starts * q * len(attack.column.nodes) * (2.0 * q * widths[0] + m * widths[0])
    else:
        expected = attack.samples or (first.rank if first is not None else 0)
        most = max(1, total // (2 * (q + k)))
        if isinstance(attack.restart, Growth):
            m = min(expected, most) or most
        else:
            m = max(round(attack.restart.surplus * min(expected, most)), min(expected, most) + 1)
    unknowns, gram = m * q, float(m * k)
    if chain is None:
        parts["gradients of single samples"] = weights + 4.0 * min(m, 16) * k * total
        work += 4.0 * gram * total * max(1, m // 16)
    else:
        fit = 4.0 * gram**2 + 2.0 * gram * sum(widths)
        work += gram**2 * sum(widths)
        if unknowns <= attack.solver.dense_limit:
            fit += 5.0 * unknowns**2 + 4.0 * nodes * unknowns * sum(widths)
            work += nodes**2 * unknowns**2 * float(max(widths))
        else:
            work += attack.solver.cg_steps * 6.0 * m * nodes * total
        parts["joint fit"] = weights + fit
    work += (m + 4) * EIGEN * gram**3  # the certificate removes one candidate after the other
    parts["distances to the rows"] = 6.0 * rows * m
    return Cost(parts, work, m, q, advice)


def _descent(attack: Descent, evidence: Evidence, ground: Ground, rows: int) -> Cost:
    """One step of a descent: it can be ended at any step, so no budget is too small for the others."""
    total, nodes = sum(p.numel() for p in evidence.final.values()), len(attack.equation.nodes)
    n = attack.samples or (ground.first.rank if ground.first is not None else 0)
    grown = 1.0 if attack.moves is None else attack.moves.most
    m, d = max(round(grown * attack.surplus * n), 1), evidence.input.size
    activations = m * nodes * (d + sum(p.shape[0] for p in evidence.final.values() if p.dim() > 1))
    terms = m * nodes * (1 if attack.equation.layers == "last" else evidence.outputs)
    parts = {
        "weights": float((nodes + 4) * total),
        "descent": float((nodes + 3) * total + 12 * activations + 4 * terms**2),
        "distances to the rows": 6.0 * rows * m,
    }
    return Cost(
        parts, 6.0 * m * nodes * total, m, ground.space.dim if attack.rows else d, "fewer [attack] samples"
    )


def _closed_form(attack: AlgebraAttack, evidence: Evidence, ground: Ground, rows: int) -> Cost:
    """The Gram matrix of as many kernel rows as there are neurons, and its eigenvalues."""
    total = sum(p.numel() for p in evidence.final.values())
    n = attack.samples or (ground.first.rank if ground.first is not None else 0)
    chain = evidence.chain
    width = 0 if chain is None else evidence.final[chain.weights[0]].shape[0]
    size = float(min(width, 2000) * ground.space.dim)
    parts = {
        "weights": 4.0 * total,
        "closed form": 4.0 * total + 2.0 * size * width,
        "distances": 6.0 * rows * n,
    }
    return Cost(parts, float(width) ** 2 * ground.space.dim, n, ground.space.dim, "a narrower network")


def _rows(evidence: Evidence, rows: int) -> Cost:
    """The Gram matrix of all rows, both signs."""
    total, d = sum(p.numel() for p in evidence.final.values()), evidence.input.size
    m = 0 if evidence.chain is None else 2 * evidence.final[evidence.chain.weights[0]].shape[0]
    gram = float(m * evidence.outputs)
    parts = {
        "weights": 5.0 * total,
        "Gram matrix": 4.0 * gram**2 + 12.0 * m * d,
        "distances to the rows": 6.0 * rows * m,
    }
    return Cost(parts, EIGEN * gram**3, m, 0, "a narrower network")


def refuse(
    cost: Cost, name: str, available: float | None, budget: float | None, rate: float | None = None
) -> None:
    """Raise if an attack cannot run here.

    Args:
        cost: its estimate.
        name: of the attack.
        available: bytes of memory, None if unknown: then nothing is refused for memory.
        budget: seconds, None for no limit.
        rate: multiplications a second; measured where it matters.

    Raises:
        OverBudget: it needs more memory than there is, or far more time than the budget allows.
    """
    what = f"{cost.candidates} candidates of {cost.unknowns} unknowns"
    if available is not None and cost.memory > available:
        raise OverBudget(
            f"attack {name!r} needs about {_size(cost.memory)} of memory for its {cost.largest} ({what}), but"
            f" {_size(available)} are available; use a machine with more memory, or {cost.advice}"
        )
    if budget is None:
        return
    seconds = cost.multiplications / (rate or speed())
    if seconds > OVERRUN * budget:
        raise OverBudget(
            f"attack {name!r} needs at least {_time(seconds)} for one round ({what}), but has a budget of"
            f" {_time(budget)}; raise --budget to about {_time(seconds)}, or use {cost.advice}"
        )


def speed(size: int = 384, repeats: int = 3) -> float:
    """Measure multiplications a second of a float64 matrix product here, in some hundredths of a second."""
    a = torch.ones(size, size, dtype=torch.float64)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return size**3 / best


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Return bytes of memory that a new allocation can have, or None where the system does not tell."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _size(number: float) -> str:
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / 2**20:,.1f} MiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"
