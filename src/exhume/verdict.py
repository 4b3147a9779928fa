"""From matches and certificates to a verdict, with reasons a privacy officer can read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from scipy.stats import fisher_exact

from exhume.assumptions import Assumption
from exhume.errors import TargetError
from exhume.matching import CLOSE, Matches
from exhume.reconstruction import Reconstruction
from exhume.schema import Table, checked

EXIT_CODES = {"no evidence": 0, "leak": 1, "inconclusive": 3}


class Policy(Table):
    """When an audit fails; every key of a policy file.

    Args:
        certified_close: certified candidates that may be close to a training row.
        significance: level of the one-sided exact test of matched training rows against matched control rows.
        require_positive_control: whether "no evidence" needs the same attack to succeed on a planted victim.
        require_assumptions: whether "no evidence" needs every assumption to hold.
    """

    certified_close: Annotated[int, Field(ge=0)] = 0
    significance: Annotated[float, Field(gt=0, lt=1)] = 0.01
    require_positive_control: bool = True
    require_assumptions: bool = True


@dataclass(frozen=True)
class PositiveControl:
    """The same attack on a victim planted by the audit.

    Args:
        succeeded: whether it recovered and certified a sample of the planted victim.
        sentence: what was planted and what came out.
    """

    succeeded: bool
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of an audit.

    Args:
        outcome: "leak", "no evidence" or "inconclusive".
        reasons: one sentence each, the deciding one first.
    """

    outcome: Literal["leak", "no evidence", "inconclusive"]
    reasons: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Exit code of the command line."""
        return EXIT_CODES[self.outcome]


@dataclass(frozen=True, eq=False)
class Finding:
    """One attack's part of an audit.

    Args:
        found: the reconstruction.
        matches: its score.
        assumptions: what it rested on.
    """

    found: Reconstruction
    matches: Matches
    assumptions: tuple[Assumption, ...]

    @property
    def certified_close(self) -> int:
        """Certified candidates within the close distance of the training row assigned to them."""
        certificate = self.found.certificate
        if certificate is None:
            return 0
        rows = [row for row in self.matches.rows if row.error is not None and row.error < CLOSE]
        return sum(bool(certificate.certified[row.candidate]) for row in rows if row.candidate is not None)

    @property
    def certified_strangers(self) -> int:
        """Number of certified candidates that match no training row."""
        certificate = self.found.certificate
        if certificate is None:
            return 0
        rows, threshold = self.matches.rows, self.matches.train.threshold
        matched = sum(
            bool(certificate.certified[row.candidate])
            for row in rows
            if row.candidate is not None and row.error is not None and row.error < threshold
        )
        return certificate.recovered - matched

    def p_value(self) -> float:
        """One-sided Fisher exact test that training rows are matched more often than equally many control rows."""
        (train, n), (control, k) = self.matches.compared.independent, self.matches.control.independent
        return float(fisher_exact([[train, n - train], [control, k - control]], alternative="greater").pvalue)


def read_policy(path: Path) -> Policy:
    """Read a policy file (TOML); unknown keys are errors.

    Raises:
        TargetError: the file cannot be read, or has unknown keys or bad values.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TargetError(
            f"{path} must be a policy file in TOML, but cannot be read ({error}); correct it"
        ) from error
    return checked(Policy, values, str(path), path.resolve().parent)


def judge(
    findings: list[Finding],
    control: PositiveControl | None,
    policy: Policy,
    remarks: tuple[str, ...] = (),
) -> Verdict:
    """Apply a policy.

    Args:
        findings: one for each attack that ran.
        control: the planted victim, or None if none was tried.
        policy: the thresholds.
        remarks: how the rows were made comparable; they follow the reasons.
    """
    leaks = [reason for finding in findings for reason in _leaks(finding, policy)]
    broken = [a.sentence for finding in findings for a in finding.assumptions if not a.holds]
    strange = [sentence for finding in findings if (sentence := _strangers(finding)) is not None]
    seen = [_seen(finding) for finding in findings]
    if leaks:
        return Verdict("leak", tuple([*leaks, *strange, *broken, *remarks]))
    doubts = [*strange, *(broken if policy.require_assumptions else [])]
    if policy.require_positive_control and (control is None or not control.succeeded):
        doubts.append(
            "No planted victim was attacked, so it is not known whether the attack works on such a network."
            if control is None
            else control.sentence
        )
    doubts += [
        f"Attack {f.found.attack!r} did not run to its end: {f.found.reason}"
        for f in findings
        if f.found.status in ("stopped", "diverged")
    ]
    if doubts or not findings:
        return Verdict("inconclusive", tuple([*(doubts or ["No attack ran."]), *seen, *remarks]))
    assert control is not None or not policy.require_positive_control
    return Verdict("no evidence", tuple([*seen, *([control.sentence] if control else []), *broken, *remarks]))


def _leaks(finding: Finding, policy: Policy) -> list[str]:
    name, train = finding.found.attack, finding.matches.train
    reasons = []
    if finding.certified_close > policy.certified_close:
        reasons.append(
            f"Attack {name!r} recovered {finding.certified_close} of {train.n} training rows almost exactly (relative"
            f" error below {CLOSE:g}), and certified them from the weights alone."
        )
    p = finding.p_value()
    if p < policy.significance:
        reasons.append(f"{_counts(finding.matches)}; chance would do that with probability {p:.1g}.")
    return reasons


def _counts(matches: Matches) -> str:
    """What the exact test compares, in words."""
    (train, n), (control, k) = matches.compared.independent, matches.control.independent
    said = "" if matches.drawn is None else " drawn"
    if (n, k) != (matches.compared.n, matches.control.n):
        said += " (near-duplicates counted once)"
    return f"It matched {train} of {n} training rows{said} but {control} of {k} rows the model never saw"


def _strangers(finding: Finding) -> str | None:
    """The weights vouch for inputs that are no training rows: one side of the comparison is wrong."""
    count, certificate = finding.certified_strangers, finding.found.certificate
    if count == 0 or certificate is None:
        return None
    return (
        f"{count} of {certificate.recovered} candidates that attack {finding.found.attack!r} certified from the"
        " weights match no training row: mean, scale or the training rows in the target may be wrong, or they are"
        " blurred or false; look at them before anything is concluded."
    )


def _seen(finding: Finding) -> str:
    train, control = finding.matches.train, finding.matches.control
    certified = 0 if finding.found.certificate is None else finding.found.certificate.recovered
    drawn = finding.matches.drawn
    among = "" if drawn is None else f" ({drawn.count} of the {drawn.n} drawn)"
    return (
        f"Attack {finding.found.attack!r} matched {train.count} of {train.n} training rows{among} and"
        f" {control.count} of {control.n} control rows, and certified {certified} candidates,"
        f" {finding.certified_close} of them close to a training row."
    )
