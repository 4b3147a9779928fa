"""Two routes to |theta - sum_i l_i y_i grad f(x_i)|^2 and its gradient: Gram matrices, and double backward.

The net is that of Haim et al., 784-1000-1000-1 with biases in the first layer alone. For each number of candidates m:
value and gradient by each route, the largest relative difference of the gradients, the time of a step (least of
several, in turns) and the route that operation counts choose.

    python benchmarks/kkt_cost.py --quick
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from common import Row, options, show, write
from exhume.change import Decay
from exhume.equations.span import Span
from exhume.equations.span_dense import DenseSpan
from exhume.evidence import Evidence, InputSpec
from exhume.functional import Relaxed
from exhume.heads import Labelled, blocks
from exhume.joint import Joint
from exhume.multipliers import Floored
from exhume.smoothing import smoothed_forward
from exhume.spaces import full
from exhume.victims.nets import mlp

COLUMNS = {
    "m": "candidates",
    "Gram, ms": "gram",
    "explicit, ms": "explicit",
    "double backward, ms": "backward",
    "chosen": "chosen",
    "chosen over best": "over_best",
    "double backward over chosen": "gain",
    "difference": "difference",
}
ALPHA = 150.0


def double_backward(evidence: Evidence, row: Tensor, unit: float) -> tuple[float, Tensor]:
    """The reference: gradient of the mean margin with its graph kept, differentiated once more."""
    leaf = row.clone().requires_grad_()
    z, a = leaf.split([row.shape[1] - 1, 1], 1)
    params = {k: p.clone().requires_grad_() for k, p in evidence.at(1.0).items()}
    out = smoothed_forward(evidence.forward, Relaxed(ALPHA))(params, z)
    coef = unit * Labelled().coefficients(a, blocks(len(a), 2), lambda: out)
    found = torch.autograd.grad((coef * out).sum(), list(params.values()), create_graph=True)
    missed = [(p.detach() - g).square().sum() for p, g in zip(params.values(), found, strict=True)]
    loss = torch.stack(missed).sum()
    return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]


def timed(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least milliseconds of each job, run in turns so that a busy machine slows all alike."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(repeats):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began))
    return best


def measure(evidence: Evidence, m: int, repeats: int, seed: int) -> Row:
    """One number of candidates."""
    generator = torch.Generator().manual_seed(7000 + seed)
    size = evidence.input.size
    space = full(size)
    bound = Span(nodes=(1.0,)).bind(evidence, space, Decay(0.0, 0.0, "final weights"), Relaxed(ALPHA))
    assert isinstance(bound, DenseSpan)
    head = Labelled()
    problem = Joint(
        bound,
        space,
        1 / m,
        (),
        Floored(0.0, weight=0.0),
        lambda z, a, label: head.coefficients(a, label, lambda: z[:, :1]),
        label=blocks(m, 2),
    )
    draw = torch.randn(m, size, generator=generator, dtype=torch.float64)
    row = torch.cat([0.3 * draw, torch.rand(m, 1, generator=generator, dtype=torch.float64)], 1)

    def route(gram: bool) -> Callable[[], Tensor]:
        def job() -> Tensor:
            with mock.patch.object(DenseSpan, "gram_is_cheaper", lambda self, m: gram):
                return problem.at(row).slope

        return job

    jobs: dict[str, Callable[[], object]] = {
        "gram": route(True),
        "explicit": route(False),
        "backward": lambda: double_backward(evidence, row, 1 / m),
    }
    slope = double_backward(evidence, row, 1 / m)[1]
    apart = max(float((route(gram)() - slope).norm() / slope.norm()) for gram in (True, False))
    best = timed(jobs, repeats)
    chosen = "gram" if bound.gram_is_cheaper(m) else "explicit"
    return {
        "attack": "haim",
        "case": "784-1000-1000-1",
        "arm": chosen,
        "seed": seed,
        "n": m // 2,
        "candidates": m,
        "seconds": best[chosen] / 1e3,
        "steps": 1,
        "loss": None,
        "matched_train": None,
        "close_train": None,
        "matched_control": None,
        "median_error": None,
        "certified": None,
        **best,
        "chosen": chosen,
        "over_best": best[chosen] / min(best.values()),
        "gain": best["backward"] / best[chosen],
        "difference": apart,
    }


def main() -> None:
    chosen = options(__doc__ or "", 1)
    sizes = (50, 100, 200, 300, 400, 500, 700, 1000)
    evidence = Evidence.from_module(
        mlp((784, 1000, 1000, 1), bias="first"), input=InputSpec((784,), low=0.0, high=1.0)
    )
    rows = [
        measure(evidence, m, 5 if chosen.quick else 15, seed) for seed in range(chosen.seeds) for m in sizes
    ]
    show("A step by both routes", rows, COLUMNS)
    cheaper = [m for m in sizes if rows[sizes.index(m)]["chosen"] == "gram"]
    print(f"operation counts choose Gram matrices up to m = {max(cheaper, default=0)}")
    faster = [int(str(r["candidates"])) for r in rows if float(str(r["gram"])) < float(str(r["explicit"]))]
    print(f"Gram matrices were the faster route up to m = {max(faster, default=0)}")
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
