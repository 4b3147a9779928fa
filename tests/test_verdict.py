"""The verdict: what it rests on, and that it fails honestly."""

from dataclasses import replace

import pytest
import torch

from exhume import audit, presets
from exhume.assumptions import check
from exhume.attack import Reconstruction
from exhume.errors import TargetError
from exhume.evidence import Evidence
from exhume.matching import Matches, Score
from exhume.nulls import permuted
from exhume.solvers.varpro import VarPro
from exhume.survey import survey
from exhume.verdict import Finding, Policy, PositiveControl, judge, read_policy
from exhume.victims.nets import mlp
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, Victim, make_victim

SMALL = Case(data="digits", n=8, hidden=(300,), training=TrainConfig(max_steps=20_000, tolerance=1e-8))
WORKS = PositiveControl(True, "The attack works.")


@pytest.fixture(scope="module")
def victim() -> Victim:
    return make_victim(SMALL)


def audited(evidence: Evidence, victim: Victim, policy: Policy | None = None) -> audit.Outcome:
    plan = audit.Plan(samples=victim.case.n, budget=4.0, policy=policy or Policy())
    return audit.run(evidence, plan, victim.truth)


def broken(victim: Victim, evidence: Evidence, samples: int | None = None) -> dict[str, str]:
    """Names and sentences of the assumptions that do not hold after an attack."""
    found = presets.exhume(samples or victim.case.n).run(evidence, budget=4.0)
    return {a.name: a.sentence for a in check(evidence, survey(evidence), found) if not a.holds}


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


def test_the_initial_weights_of_another_network_are_named(victim):
    other = mlp((64, 300, 1), seed=99).state_dict()
    evidence = replace(victim.evidence, init={k: other[k] for k in victim.evidence.init})
    assert "belong to another network" in broken(victim, evidence)["initial weights"]
    assert certified(victim, evidence) == 0
    assert audited(evidence, victim).verdict.exit_code == 3


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_an_optimizer_that_rescales_entries_is_named_with_and_without_a_recipe(optimizer):
    victim = make_victim(replace(SMALL, training=TrainConfig(optimizer=optimizer, lr=1e-3, max_steps=300)))
    assert f"trained by {optimizer}" in broken(victim, victim.evidence)["optimizer"]
    silent = replace(victim.evidence, recipe=replace(victim.evidence.recipe, optimizer=None))
    assert "no rank, as after Adam" in broken(victim, silent)["optimizer"]
    assert certified(victim, silent) == 0


def test_early_stopping_breaks_nothing():
    victim = make_victim(replace(SMALL, training=TrainConfig(max_steps=60)))
    assert victim.trained.loss > 1e-3
    assert broken(victim, victim.evidence) == {}
    assert audited(victim.evidence, victim).verdict.outcome == "leak"


def test_augmented_data_show_more_inputs_than_samples(victim):
    """Training on 16 noisy copies while the owner states 8 samples."""
    twice = make_victim(replace(SMALL, n=16))
    assert "augmented, or the number is wrong" in broken(twice, twice.evidence, samples=8)["optimizer"]


def test_a_frozen_first_layer_is_named(victim):
    final = dict(victim.evidence.final)
    for name in (victim.evidence.chain.weights[0], victim.evidence.chain.biases[0]):
        final[name] = victim.evidence.init[name]
    evidence = replace(victim.evidence, final=final)
    assert "did not change in training (frozen)" in broken(victim, evidence)["first layer"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_named_where_it_hides_the_rank(victim, dtype):
    """Either the rank survives, or the sentence says what hides it; nothing false is certified."""
    cast = {
        role: {k: p.to(dtype) for k, p in getattr(victim.evidence, role).items()}
        for role in ("init", "final")
    }
    evidence = replace(victim.evidence, init=cast["init"], final=cast["final"])
    outcome = audited(evidence, victim)
    told = broken(victim, evidence)
    if survey(evidence).first.flat:
        assert str(dtype).removeprefix("torch.") in told["optimizer"]
    certificate, rows = outcome.found[0].certificate, outcome.matches[0].rows
    false = certificate.recovered - sum(
        bool(certificate.certified[r.candidate]) for r in rows if r.candidate is not None and r.error < 0.3
    )
    assert false <= 1


def test_the_wrong_activation_explains_nothing(victim):
    wrong = mlp((64, 300, 1), activation="tanh", seed=0)
    evidence = Evidence.from_module(
        wrong, input=victim.evidence.input, init=victim.trained.init, final=victim.trained.final
    )
    assert certified(victim, evidence) == 0
    assert audited(evidence, victim).verdict.exit_code == 3


def test_wrong_preprocessing_is_named(victim):
    """The owner forgot to state the mean that was subtracted, so recovered pixels are negative."""
    dark = replace(victim.evidence.input, mean=None)
    found = presets.exhume(8).run(replace(victim.evidence, input=dark))
    told = {a.name: a for a in check(replace(victim.evidence, input=dark), survey(victim.evidence), found)}
    assert found.certificate.recovered == 0 or not told["input range"].holds


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


def test_far_outside_the_regime_there_is_no_evidence_and_the_control_passes():
    """120 rows on 30 hidden units: far more unknowns than equations."""
    case = Case(data="digits", n=120, hidden=(30,), training=TrainConfig(max_steps=300))
    victim = make_victim(case)
    outcome = audit.run(victim.evidence, audit.Plan(samples=120, budget=60.0), victim.truth)
    assert outcome.verdict.outcome == "no evidence", outcome.verdict.reasons
    assert any("planted victim" in reason for reason in outcome.verdict.reasons)


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
