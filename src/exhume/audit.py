"""Run attacks on a target, score them if there is truth, and put the report together."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exhume import cost, report
from exhume.assumptions import check
from exhume.checkpoints import fingerprint
from exhume.clock import Observer
from exhume.duplicates import comparable
from exhume.errors import ExhumeError, MissingEvidence, TargetError, nearest
from exhume.evidence import Evidence
from exhume.matching import Matches, match
from exhume.planted import positive_control
from exhume.presets import ATTACKS, MOVES, moving
from exhume.reconstruction import Reconstruction
from exhume.report.data import AttackResult, Report
from exhume.survey import survey
from exhume.truth import Truth
from exhume.verdict import Finding, Policy, Verdict, judge


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        names: attacks, in order.
        samples: number of training samples, if known.
        seed: of the random starts.
        budget: seconds for all attacks together; the positive control gets as much again.
        policy: when the audit fails.
        moves: how candidates are moved, see `presets.moving`.
    """

    names: tuple[str, ...] = ("exhume",)
    samples: int | None = None
    seed: int = 0
    budget: float | None = None
    policy: Policy = Policy()
    moves: str = "none"

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in ATTACKS:
                raise TargetError(
                    f"attack names must be known, but {name!r} is not; {nearest(name, ATTACKS)}"
                )
        if self.moves not in MOVES:
            raise TargetError(f"moves must be one of {', '.join(MOVES)}, but are {self.moves!r}; choose one")
        if len(set(self.names)) < len(self.names):
            raise TargetError(f"attack names must differ, but are {', '.join(self.names)}; name each once")


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything an audit found.

    Args:
        report: as plain data.
        found: reconstructions of the attacks that ran.
        matches: their scores, in the same order; empty without truth.
        verdict: None without truth.
        truth: the rows that were compared, control rows that are training rows taken out.
    """

    report: Report
    found: tuple[Reconstruction, ...]
    matches: tuple[Matches, ...]
    verdict: Verdict | None
    truth: Truth | None = None


def own(evidence: Evidence) -> tuple[str, ...]:
    """The attack of ours for what is known: the change of weights, or the final weights alone."""
    return ("kkt",) if evidence.init is None else ("exhume",)


def digest(evidence: Evidence, plan: Plan, truth: Truth | None) -> str:
    """Fingerprint of a job: weights, settings and rows; a change in any of them changes it."""
    rows = {} if truth is None else {"train": truth.train, "control": truth.control}
    parts = [fingerprint(evidence.final), fingerprint(evidence.init or {}), fingerprint(rows), repr(plan)]
    spec = evidence.input
    affine = {k: v for k, v in (("mean", spec.mean), ("scale", spec.scale)) if v is not None}
    parts += [fingerprint(affine), repr((spec.shape, spec.low, spec.high, spec.sample_norm, evidence.recipe))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def run(
    evidence: Evidence,
    plan: Plan,
    truth: Truth | None = None,
    observer: Observer | None = None,
    command: str | None = None,
    features: Sequence[str] = (),
    matcher: Callable[[Reconstruction, Truth], Matches] = match,
) -> Outcome:
    """Run every attack of the plan; one that fails stays in the report with its message.

    Args:
        evidence: what the attacker has; the truth is used only after each attack has ended.
        plan: what to run.
        truth: training and control rows, or None for an attack without score.
        observer: told about progress.
        command: the command line, for the report.
        features: names of the columns of a table.
        matcher: scores a reconstruction.

    Raises:
        MissingEvidence: no attack of the plan could run; the gaps of each are named.
        ExhumeError: no control row differs from the training rows.
    """
    job = digest(evidence, plan, truth)
    remarks: tuple[str, ...] = ()
    if truth is not None:
        truth, remarks = comparable(truth, plan.seed)
    results: list[AttackResult] = []
    found: list[Reconstruction] = []
    matches: list[Matches] = []
    errors: list[ExhumeError] = []
    for name in plan.names:
        began = time.perf_counter()
        budget = None if plan.budget is None else plan.budget / len(plan.names)
        try:
            attack = moving(ATTACKS[name].preset(plan.samples), plan.moves)
            needed = cost.estimate(
                attack, evidence, survey(evidence), 0 if truth is None else len(truth.train)
            )
            cost.refuse(needed, name, cost.available_memory(), budget)
            one = attack.run(evidence, seed=plan.seed, budget=budget, observer=observer)
        except (ExhumeError, RuntimeError) as error:
            # torch says RuntimeError; what other attacks of the plan find must not be lost to it.
            told = (
                error
                if isinstance(error, ExhumeError)
                else ExhumeError(f"attack {name!r} broke off: {error}")
            )
            results.append(report.failed_attack(name, told, time.perf_counter() - began))
            errors.append(told)
            continue
        found.append(one)
        if truth is not None:
            matches.append(matcher(one, truth))
        results.append(report.attack_result(one, matches[-1] if truth is not None else None))
    if not found:
        raise MissingEvidence("; ".join(dict.fromkeys(map(str, errors))))
    verdict = None if truth is None else _verdict(evidence, plan, truth, found, matches, remarks, observer)
    built = report.build(
        evidence,
        results,
        seed=plan.seed,
        verdict=None if verdict is None else verdict.outcome,
        reasons=() if verdict is None else verdict.reasons,
        samples=plan.samples,
        features=features,
        command=command,
        digest=job,
    )
    return Outcome(built, tuple(found), tuple(matches), verdict, truth)


def _verdict(
    evidence: Evidence,
    plan: Plan,
    truth: Truth,
    found: Sequence[Reconstruction],
    matches: Sequence[Matches],
    remarks: tuple[str, ...],
    observer: Observer | None,
) -> Verdict:
    """Judge; the positive control is run only where the verdict depends on it."""
    ground = survey(evidence)
    findings = [
        Finding(one, scored, check(evidence, ground, one)) for one, scored in zip(found, matches, strict=True)
    ]
    verdict = judge(findings, None, plan.policy, remarks)
    if verdict.outcome == "leak" or not plan.policy.require_positive_control:
        return verdict
    attack = moving(ATTACKS[found[0].attack].preset(None), plan.moves)
    control = positive_control(evidence, truth, attack, plan.seed, plan.budget, observer)
    return judge(findings, control, plan.policy, remarks)
