"""Simulated training: derivatives against an unrolled graph, memory, larger steps, and the learning rate read off.

Cases: "adjoint" compares every gradient with that of the unrolled run; "memory" the largest number of bytes alive
besides stored states; "coarse" the end by larger steps with the exact end; "rate" audits a victim that stopped early
with a learning rate that is wrong by a factor of 5, before and after polishing.

    python benchmarks/simulation.py --quick --json simulation.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import KEYS, Row, options, scores, show, write
from exhume import presets
from exhume.equations.coarse import Coarse
from exhume.equations.recipe import dynamics, unknowns
from exhume.equations.risk import flatten, unflatten
from exhume.equations.simulation import BoundDynamics, Unknowns
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

NAMES = [field.name for field in fields(Unknowns)]
SMALL = Case(
    data="digits", n=6, hidden=(100,), training=TrainConfig(momentum=0.5, weight_decay=1e-3, max_steps=50)
)
EARLY = Case(data="digits", n=6, hidden=(300,), training=TrainConfig(max_steps=64))
TABLE = Case(data="breast-cancer", n=12, hidden=(600,))
LONG = {
    "table, lr 0.002": replace(TABLE, training=TrainConfig(lr=0.002, max_steps=100_000, tolerance=1e-8)),
    "table, lr 0.0002": replace(TABLE, training=TrainConfig(lr=2e-4, max_steps=100_000, tolerance=1e-8)),
    "tanh digits": Case(
        data="digits", n=6, hidden=(200,), activation="tanh",
        training=TrainConfig(lr=0.002, max_steps=4000, tolerance=0.0),
    ),
    "digits, momentum": Case(
        data="digits", n=6, hidden=(200,),
        training=TrainConfig(lr=1e-4, momentum=0.8, max_steps=20_000, tolerance=0.0),
    ),
}  # fmt: skip


class Peak(TorchDispatchMode):
    """Largest number of bytes in storages made under it and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {k: entry for k, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def peak(work: Callable[[], object]) -> int:
    with Peak() as seen:
        work()
    return seen.most


def setting(case: Case) -> tuple[Victim, BoundDynamics, Unknowns]:
    """A victim, and its run on its true samples."""
    victim = make_victim(case)
    evidence = victim.evidence
    space, u = survey(evidence).space, evidence.input.encode(victim.truth.train)
    at = unknowns(evidence, space.coordinates(u.flatten(1)), u, case.training.lr)
    return victim, dynamics(evidence.recipe).bind(evidence, space), at


def unroll(bound: BoundDynamics, at: Unknowns) -> Tensor:
    """The end of the run with the graph of every step kept, [P]."""
    theta = flatten(bound.net.init, bound.shapes).requires_grad_()
    velocity, v = torch.zeros_like(theta), bound.net.embed(at.z)
    for _ in range(bound.steps):
        out = bound.net.forward(unflatten(theta, bound.shapes), v)
        loss = bound.loss.scale(*at.label.shape) * bound.loss.value(out, at.label).sum()
        slope = torch.autograd.grad(loss, theta, create_graph=True)[0]
        velocity = at.momentum * velocity + slope + at.weight_decay * theta
        theta = theta - at.lr * velocity
    return theta


def unrolled(bound: BoundDynamics, at: Unknowns, cotangent: Tensor) -> Unknowns:
    leaf = Unknowns(*(getattr(at, name).clone().requires_grad_() for name in NAMES))
    return Unknowns(*torch.autograd.grad(cotangent @ unroll(bound, leaf), [getattr(leaf, n) for n in NAMES]))


def row(case: str, arm: str, victim: Victim, seconds: float, **measured: str | int | float | None) -> Row:
    nothing: Row = dict.fromkeys(KEYS)
    training = victim.trained
    return {
        **nothing, "attack": "simulation", "case": case, "arm": arm, "seed": victim.case.seed, "n": victim.case.n,
        "seconds": seconds, "steps": training.steps, "loss": training.loss, **measured,
    }  # fmt: skip


def adjoint(seed: int) -> Iterator[Row]:
    for steps in (3, 50):
        victim, bound, at = setting(replace(SMALL, seed=seed))
        bound = replace(bound, steps=steps, memory=10 * 2 * 8 * bound.equations)
        g = torch.Generator().manual_seed(seed)
        cotangent = torch.randn(bound.equations, generator=g, dtype=torch.float64)
        start = time.perf_counter()
        found = bound.vjp(at, cotangent)
        seconds = time.perf_counter() - start
        wanted = unrolled(bound, at, cotangent)
        worst = max(
            float((getattr(found, n) - getattr(wanted, n)).abs().max() / getattr(wanted, n).abs().max())
            for n in NAMES
        )
        yield row("adjoint", f"T = {steps}", victim, seconds, steps=steps, difference=worst)


def memory(seed: int) -> Iterator[Row]:
    victim, bound, at = setting(replace(SMALL, seed=seed))
    cotangent, states = torch.ones(bound.equations, dtype=torch.float64), 2 * 2 * 8 * bound.equations
    for steps in (4, 16, 64):
        short = replace(bound, steps=steps, memory=states)
        start = time.perf_counter()
        bytes_adjoint = peak(lambda run=short: run.vjp(at, cotangent)) - states
        seconds = time.perf_counter() - start
        bytes_unrolled = peak(lambda run=short: unrolled(run, at, cotangent))
        yield row(
            "memory", f"T = {steps}", victim, seconds, steps=steps,
            bytes_adjoint=bytes_adjoint, bytes_unrolled=bytes_unrolled,
        )  # fmt: skip


def coarse(seed: int) -> Iterator[Row]:
    for name, case in LONG.items():
        victim, bound, at = setting(replace(case, seed=seed))
        start = time.perf_counter()
        exact = bound.simulate(at)
        middle = time.perf_counter()
        found = Coarse().simulate(bound, at)
        seconds = time.perf_counter() - middle
        ends = [flatten(end, bound.shapes) for end in (found.end, exact.end)]
        yield row(
            "coarse", name, victim, seconds,
            factor=found.factor,
            error=float((ends[0] - ends[1]).norm() / bound.target().norm()),
            estimate=found.error,
            speed=(middle - start) / seconds,
        )  # fmt: skip


def rate(seed: int) -> Iterator[Row]:
    victim = make_victim(replace(EARLY, seed=seed))
    right = EARLY.training.lr
    attack = presets.exhume(samples=EARLY.n)
    for factor in (5.0, 0.2):
        recipe = replace(victim.evidence.recipe, lr=right * factor)
        evidence = replace(victim.evidence, recipe=recipe)
        for arm, chosen in (("span", replace(attack, polish=None)), ("polished", attack)):
            found = chosen.run(evidence, seed=seed)
            said = " ".join(found.assumed)
            lr = float(said.split("weights; ")[1].split(" fits")[0]) if " fits them" in said else None
            certificate = found.certificate
            yield row(
                "rate", f"lr x {factor:g}, {arm}", victim, found.seconds,
                attack=found.attack,
                candidates=len(found.x),
                certified=None if certificate is None else certificate.recovered,
                lr_stated=right * factor,
                lr_found=lr,
                lr_true=right,
                **scores(found.x, victim.truth),
            )  # fmt: skip


TABLES = {
    "adjoint": {"T": "arm", "seed": "seed", "largest relative difference": "difference", "seconds": "seconds"},
    "memory": {"T": "arm", "seed": "seed", "bytes, adjoint": "bytes_adjoint", "bytes, unrolled": "bytes_unrolled"},
    "coarse": {
        "victim": "arm", "seed": "seed", "steps": "steps", "k": "factor", "error": "error", "estimate": "estimate",
        "times faster": "speed", "seconds": "seconds",
    },
    "rate": {
        "arm": "arm", "seed": "seed", "stated": "lr_stated", "found": "lr_found", "true": "lr_true",
        "train": "matched_train", "close": "close_train", "control": "matched_control", "median": "median_error",
        "certified": "certified", "seconds": "seconds",
    },
}  # fmt: skip


def main() -> None:
    chosen = options(__doc__.splitlines()[0], seeds=3)
    rows: list[Row] = []
    for part in (adjoint, memory, coarse, rate):
        for seed in range(chosen.seeds):
            rows += part(seed)
        show(part.__name__, [r for r in rows if r["case"] == part.__name__], TABLES[part.__name__])
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
