"""The verdict: what it rests on, and that it fails honestly."""

from dataclasses import replace

import pytest
import torch

from exhume import audit, presets
from exhume.errors import TargetError
from exhume.evidence import Evidence
from exhume.matching import Matches, Score
from exhume.nulls import permuted
from exhume.reconstruction import Reconstruction
from exhume.solvers.varpro import VarPro
from exhume.verdict import Finding, Policy, PositiveControl, judge, read_policy
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

SMALL = Case(data="digits", n=8, hidden=(300,), training=TrainConfig(max_steps=20_000, tolerance=1e-8))
WORKS = PositiveControl(True, "The attack works.")


@pytest.fixture(scope="module")
def victim() -> Victim:
    return make_victim(SMALL)


def audited(evidence: Evidence, victim: Victim, policy: Policy | None = None) -> audit.Outcome:
    plan = audit.Plan(samples=victim.case.n, budget=60.0, policy=policy or Policy())
    return audit.run(evidence, plan, victim.truth)


def certified(victim: Victim, evidence: Evidence) -> int:
    found = presets.exhume(victim.case.n).run(evidence, budget=4.0)
    assert found.certificate is not None
    return found.certificate.recovered


# --- leaks -------------------------------------------------------------------------------------------------


def test_a_model_that_gives_its_rows_away_is_a_leak(victim):
    outcome = audited(victim.evidence, victim)
    assert outcome.verdict is not None
    assert (outcome.verdict.outcome, outcome.verdict.exit_code) == ("leak", 1)
    assert "training rows almost exactly" in outcome.verdict.reasons[0]
    assert outcome.report.verdict == "leak"
    assert outcome.report.attacks[0].certificate.recovered >= 7
    assert outcome.matches[0].control.count == 0


def test_roles_swapped_the_leak_is_of_the_other_rows(victim):
    other = make_victim(replace(SMALL, swap=True))
    found = presets.exhume(8).run(other.evidence)
    assert audit.match(found, other.truth).train.count >= 7
    assert audit.match(found, victim.truth).train.count == 0


# --- honest failure ----------------------------------------------------------------------------------------


def test_a_permuted_change_certifies_nothing(victim):
    for seed in range(2):
        assert certified(victim, permuted(victim.evidence, seed)) == 0


# --- no evidence, inconclusive -----------------------------------------------------------------------------


def finding(train: int = 0, control: int = 0, n: int = 20, status: str = "converged") -> Finding:
    score = Score(n=n, count=train, close=0, median=1.0)
    other = Score(n=n, count=control, close=0, median=1.0)
    matches = Matches(train=score, control=other, random=other, mean_image=other, rows=(), centred_by="zero")
    found = Reconstruction(
        attack="exhume",
        candidates=None,
        importance=torch.zeros(0),
        misfit=1.0,
        loss=1.0,
        status=status,
        reason="It ended.",
        steps=1,
        seconds=1.0,
        seed=0,
        trace=(1.0,),
        assumed=(),
    )
    return Finding(found, matches, ())


@pytest.mark.parametrize(
    ("train", "control", "outcome"),
    [
        (0, 0, "no evidence"),
        (1, 0, "no evidence"),
        (5, 0, "no evidence"),
        (6, 0, "leak"),
        (12, 10, "no evidence"),
    ],
)
def test_matches_leak_where_an_exact_test_says_so(train, control, outcome):
    """Fisher: 5 of 20 against 0 of 20 has p = 0.024, 6 of 20 against 0 has p = 0.0101... of one side."""
    p = finding(train, control).p_value()
    expected = "leak" if p < 0.01 else "no evidence"
    assert judge([finding(train, control)], WORKS, Policy()).outcome == expected
    assert outcome == expected or p == pytest.approx(0.01, abs=0.005)


def test_nothing_found_means_nothing_without_a_positive_control():
    assert judge([finding()], WORKS, Policy()).exit_code == 0
    assert judge([finding()], None, Policy()).exit_code == 3
    failed = PositiveControl(False, "It failed on planted victims.")
    verdict = judge([finding()], failed, Policy())
    assert (verdict.exit_code, verdict.reasons[0]) == (3, failed.sentence)
    assert judge([finding()], None, Policy(require_positive_control=False)).exit_code == 0


def test_an_attack_that_was_cut_short_is_inconclusive():
    assert judge([finding(status="stopped")], WORKS, Policy()).exit_code == 3
    assert judge([], WORKS, Policy()).exit_code == 3


def test_a_sabotaged_solver_makes_every_verdict_inconclusive(victim, monkeypatch):
    """The solver returns its start: nothing is found, nor on the planted victim, so nothing is concluded."""
    # Samples that single neurons give away need no solver.
    monkeypatch.setattr(
        "exhume.change._exclusive", lambda weight, bias, floor: weight.new_zeros(0, weight.shape[1])
    )
    monkeypatch.setattr(VarPro, "minimise", lambda self, problem, z, progress=None: _stuck(problem, z))
    monkeypatch.setattr(
        "exhume.solvers.batched.BatchedLM.minimise", lambda self, e, r, z: (z, z.new_ones(len(z)))
    )
    assert audited(victim.evidence, victim).verdict.exit_code == 3


def _stuck(problem, z):
    from exhume.solvers.base import Solution

    point = problem.at(z)
    return Solution(point, "converged", "Sabotaged.", 0, (point.loss,))


# --- policies ----------------------------------------------------------------------------------------------


def test_a_policy_overrides_thresholds(tmp_path, victim):
    path = tmp_path / "policy.toml"
    path.write_text("certified_close = 20\nsignificance = 1e-30\nrequire_positive_control = false\n")
    assert audited(victim.evidence, victim, read_policy(path)).verdict.outcome == "no evidence"


def test_an_unknown_policy_key_names_the_nearest(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("significanse = 0.05\n")
    with pytest.raises(TargetError, match="significance"):
        read_policy(path)
