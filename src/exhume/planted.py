"""Positive control: the same attack on a victim of the same architecture, trained here on control rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from exhume.clock import Observer
from exhume.errors import ExhumeError
from exhume.evidence import Evidence, Recipe
from exhume.matching import match
from exhume.presets import Attack
from exhume.truth import Truth
from exhume.verdict import PositiveControl

SIZES = (4, 2)  # planted rows, tried in this order until the attack succeeds
STEPS, TOLERANCE = 2000, 1e-9
DECAY, MOMENTUM, FOLDS, SMALL = 1e-2, 0.9, 20.0, 1e-3  # of a stationary victim
APART = 7000  # between the seed of a planted victim and that of the attack on it
MOST = 40_000  # steps to a stationary point


def positive_control(
    evidence: Evidence,
    truth: Truth,
    attack: Attack,
    seed: int,
    budget: float | None = None,
    observer: Observer | None = None,
) -> PositiveControl:
    """Plant a few control rows in the audited architecture and attack it; success is a match, certified if it can be.

    The planted victim starts from the audited model's initial weights and is trained by full-batch gradient descent
    to fit random labels +-1 on every output, so it is recoverable if the attack works on such a network at all. Where
    they are not known, it starts from small random weights and is trained with decay until nothing is left of them.

    Args:
        evidence: of the audited model; its weights are not changed.
        truth: its control rows are planted, further ones serve as control of the control.
        attack: the attack to try.
        seed: of labels and random starts.
        budget: seconds for each try.
        observer: told about progress.
    """
    train = _stationary if evidence.init is None else _train
    tried = []
    control = _distinct(truth)
    for n in SIZES:
        if 2 * n > len(control):
            continue
        rows = control[:n]
        try:
            planted = train(evidence, evidence.input.encode(rows), seed)
        except ExhumeError as error:
            return PositiveControl(False, f"No victim could be planted: {error}.")
        try:
            found = replace(attack, samples=n).run(
                planted, seed=seed + APART, budget=budget, observer=observer
            )
        except (ExhumeError, RuntimeError) as error:  # what the audit itself found must not be lost to it
            tried.append(f"on {n} planted rows the attack broke off: {error}")
            continue
        unseen = control[n : 2 * n]
        matches = match(found, Truth(rows, unseen, truth.public_mean, public_scale=truth.public_scale))
        certificate = found.certificate
        certified = {} if certificate is None else dict(enumerate(certificate.certified.tolist()))
        good = sum(
            certified.get(row.candidate, certificate is None)
            for row in matches.rows
            if row.candidate is not None and row.error is not None and row.error < matches.train.threshold
        )
        outcome = f"{matches.train.count} of {n} planted rows matched, {good} of them certified, control"
        outcome += f" {matches.control.count} of {len(unseen)}"
        tried.append(outcome)
        if good > 0 and matches.train.count > matches.control.count:
            return PositiveControl(
                True, f"The attack works on such a network: on a planted victim, {outcome}."
            )
    told = "; ".join(tried) or f"it needs at least {2 * SIZES[-1]} control rows"
    return PositiveControl(
        False,
        f"The same attack failed on victims planted in this architecture ({told}), so finding nothing means nothing.",
    )


def _distinct(truth: Truth) -> Tensor:
    """Control rows; one of each group of near-duplicates, where rows are labelled."""
    if truth.control_group is None:
        return truth.control
    first: dict[int, int] = {}
    for i, label in enumerate(truth.control_group.tolist()):
        first.setdefault(label, i)
    return truth.control[list(first.values())]


def _labels(out: Tensor, generator: torch.Generator) -> Tensor:
    """Random labels +-1 for every output [n, C]."""
    return torch.randint(0, 2, out.shape, generator=generator).double() * 2 - 1


def _stationary(evidence: Evidence, u: Tensor, seed: int) -> Evidence:
    """Momentum and weight decay on squared loss until the start, small in the first layer, has shrunk by e^-20."""
    generator = torch.Generator().manual_seed(seed)
    first = None if evidence.chain is None else evidence.chain.weights[0]
    start = {
        k: (SMALL if k == first else 1.0)
        * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        / p[0].numel() ** 0.5
        if p.dim() > 1
        else p.double()
        for k, p in evidence.final.items()
    }
    y = _labels(evidence.forward(start, u), generator)
    lr = 0.05
    while (steps := round(FOLDS * (1 - MOMENTUM) / (lr * DECAY))) <= MOST:
        leaves = [p.clone().requires_grad_() for p in start.values()]
        optimizer = torch.optim.SGD(leaves, lr, MOMENTUM, weight_decay=DECAY)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (evidence.forward(dict(zip(start, leaves, strict=True)), u) - y).square().mean()
            if not bool(loss.isfinite()):
                break
            loss.backward()
            optimizer.step()
        else:
            final = {k: p.detach().to(evidence.final[k].dtype) for k, p in zip(start, leaves, strict=True)}
            recipe = Recipe(loss="mse", labels="real", weight_decay=DECAY, momentum=MOMENTUM, optimizer="sgd")
            return replace(evidence, final=final, recipe=recipe)
        lr /= 2
    raise ExhumeError("training must converge, but diverged at every learning rate")


def _train(evidence: Evidence, u: Tensor, seed: int) -> Evidence:
    """Full-batch gradient descent on squared loss from theta_0, with a step size that halves when the loss rises."""
    assert evidence.init is not None
    generator = torch.Generator().manual_seed(seed)
    params = {k: p.double().clone() for k, p in evidence.init.items()}
    y = _labels(evidence.forward(params, u), generator)
    lr, best = 0.05, float("inf")
    for _ in range(STEPS):
        leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
        loss = (evidence.forward(leaves, u) - y).square().mean()
        value = float(loss.detach())
        if not value < 2 * best:  # also when it is not a number
            lr, params, best = lr / 2, {k: p.double().clone() for k, p in evidence.init.items()}, float("inf")
            if lr < 1e-6:
                raise ExhumeError("training must converge, but diverged at every learning rate")
            continue
        if value < TOLERANCE:
            break
        best = min(best, value)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        params = {k: p.detach() - lr * g for (k, p), g in zip(leaves.items(), gradients, strict=True)}
    final = {k: p.detach().to(evidence.final[k].dtype) for k, p in params.items()}
    recipe = replace(evidence.recipe, optimizer="sgd", momentum=0.0, weight_decay=0.0, batch_size=len(u))
    return replace(evidence, final=final, recipe=recipe)
