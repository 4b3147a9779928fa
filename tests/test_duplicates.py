"""Near-duplicates are no control, count once in a test, and counts are compared between equally many rows."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from exhume import cli, demo, duplicates
from exhume.duplicates import comparable
from exhume.errors import ExhumeError
from exhume.matching import MATCH, match
from exhume.metrics import relative_l2
from exhume.truth import Truth
from exhume.verdict import Finding, Policy, judge
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truth(n=6, k=6, d=40, **changes):
    return replace(Truth(draw(n, d), draw(k, d, seed=1), public_mean=torch.zeros(())), **changes)


def near(x, distance, seed=9):
    """Rows at a relative distance from x [n, d]."""
    away = draw(*x.shape, seed=seed)
    return x + distance * away * (x.norm(dim=1) / away.norm(dim=1))[:, None]


# --- control rows that are training rows -------------------------------------------------------------------


def test_control_rows_near_a_training_row_are_taken_out_and_said():
    plain = truth()
    control = torch.cat([near(plain.train[:2], 0.29), near(plain.train[2:4], 0.31), plain.control])
    left, told = comparable(replace(plain, control=control, control_label=torch.arange(10)))
    assert sorted(left.control_label.tolist()) == list(range(2, 10))
    assert "2 of 10 control rows are training rows, or within a relative distance of 0.3" in told[0]
    assert comparable(plain)[1] == ()


def test_rows_are_near_in_the_metric_of_matching():
    """Same mean, same scale: exactly the control rows that would match as candidates."""
    scale = torch.linspace(0.1, 10, 40)
    plain = truth(n=30, k=30, public_mean=draw(40, seed=5), public_scale=scale)
    blurred = plain.train + draw(30, 40, seed=7) * torch.linspace(0, 1.0, 30)[:, None] * scale
    mixed = replace(plain, control=blurred[1:])
    distance = relative_l2(mixed.control, mixed.train, mixed.public_mean, scale)
    far = (distance >= MATCH).all(0)
    assert 3 < int(far.sum()) < 27
    assert torch.equal(comparable(mixed)[0].control, mixed.control[far])


def test_the_answer_does_not_depend_on_the_blocks(monkeypatch):
    plain = truth(n=20, k=30)
    mixed = replace(plain, train=torch.cat([plain.train, near(plain.train[:5], 0.1)]))
    mixed = replace(mixed, control=torch.cat([mixed.control, near(mixed.train[7:9], 0.2)]))
    whole = comparable(mixed)
    monkeypatch.setattr(duplicates, "BLOCK", 40)
    parts = comparable(mixed)
    assert whole[1] == parts[1]
    assert torch.equal(whole[0].control, parts[0].control)
    assert torch.equal(whole[0].train_group, parts[0].train_group)


def test_a_control_of_training_rows_alone_is_refused():
    plain = truth()
    with pytest.raises(ExhumeError, match=r"all 6 of its rows are training rows.*supply other rows"):
        comparable(replace(plain, control=near(plain.train, 0.1)))


def test_beyond_the_cost_limit_fewer_rows_are_checked_and_said(monkeypatch):
    monkeypatch.setattr(duplicates, "WORK", 6 * 40 * 4)
    left, told = comparable(truth())
    assert len(left.control) == 4
    assert "Only 4 of 6 control rows" in told[0]
    assert left.train_group is not None
    monkeypatch.setattr(duplicates, "WORK", 6 * 40)
    left, told = comparable(truth())
    assert left.train_group is None
    assert "were not looked for" in told[-1]


# --- training rows that count as one -----------------------------------------------------------------------


def twins():
    """Four distinct rows; the first three times, the second twice."""
    plain = truth(n=4)
    copies = torch.cat([near(plain.train[[0, 0]], 0.05), near(plain.train[[1]], 0.05)])
    return replace(plain, train=torch.cat([plain.train, copies]))


def test_near_duplicate_training_rows_are_counted_and_said():
    left, told = comparable(twins())
    assert left.train_group.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert "5 of 7 training rows have a near-duplicate" in told[-1]
    assert "at most 4 distinct rows" in told[-1]


def test_distinct_rows_stand_beside_the_count():
    left, _ = comparable(twins())
    one = match(left.train[:1], left).train
    assert (one.count, one.distinct, one.distinct_count) == (1, 4, 1)
    three = match(left.train[[0, 4, 5]], left).train
    assert (three.n, three.count, three.distinct_count, three.independent) == (7, 3, 1, (1, 4))
    assert match(left.train[:1], twins()).train.independent == (1, 7)


def test_copies_of_one_row_are_no_evidence_by_their_number():
    """Eight candidates on eight copies of one row: one observation, however often it is counted."""
    rows = draw(8, 40)
    copies = replace(truth(n=16, k=16), train=torch.cat([near(rows[:1].expand(8, -1), 0.02), rows]))
    left, _ = comparable(copies)
    matches = match(left.train[:8], left)
    finding = Finding(FOUND, matches, ())
    assert matches.train.count == 8
    assert Finding(FOUND, match(copies.train[:8], copies), ()).p_value() < 0.01
    assert finding.p_value() > 0.1
    assert judge([finding], None, Policy(require_positive_control=False)).outcome == "no evidence"


# --- equally many rows -------------------------------------------------------------------------------------


def test_of_many_control_rows_as_many_as_training_rows_are_drawn():
    plain = truth(n=6, k=30)
    left, told = comparable(plain, seed=3)
    assert "6 of 30 control rows, drawn at random (seed 3)" in told[0]
    assert match(plain.control, left).control.n == 6
    assert not torch.equal(left.control[:6], plain.control[:6])
    assert torch.equal(left.control, comparable(plain, seed=3)[0].control)
    assert not torch.equal(left.control, comparable(plain, seed=4)[0].control)


def test_with_few_control_rows_as_many_training_rows_are_drawn():
    plain = truth(n=30, k=6)
    left, told = comparable(plain)
    assert "6 control rows for 30 training rows" in told[0]
    found = match(left.train, left)
    assert (found.train.n, found.train.count) == (30, 30)
    assert (found.compared.n, found.compared.count, found.control.n) == (6, 6, 6)
    many = draw(30, 40, seed=3)
    assert match(left.train, replace(left, control=many, control_group=None)).drawn is None
    with pytest.raises(ExhumeError, match="must label at least 30 rows, but labels 6"):
        replace(left, control=many)


def test_the_exact_test_uses_the_rows_that_were_compared():
    """Every one of 30 training rows against none of 2 control rows: of 2 and 2 rows, p = 1/6."""
    plain = truth(n=30, k=2)
    finding = Finding(FOUND, match(plain.train, plain), ())
    assert finding.p_value() == pytest.approx(1 / 6)
    assert judge([finding], None, Policy()).outcome == "inconclusive"


def test_two_training_rows_leave_enough_control_rows_to_plant():
    left, _ = comparable(truth(n=2, k=40))
    assert len(left.control_group) == 40
    assert match(left.control, left).control.n == 2


class _Found:
    attack, certificate, status, reason = "exhume", None, "converged", "It ended."


FOUND = _Found()


# --- from files --------------------------------------------------------------------------------------------


def test_an_audit_says_which_rows_it_took_out(monkeypatch, tmp_path):
    case = Case(data="digits", n=6, hidden=(200,), training=TrainConfig(max_steps=2000, tolerance=1e-6))
    target = demo.save(make_victim(case), tmp_path / "victim")
    folder = target.parent
    train, control = (np.load(folder / f"{name}.npz")["x"] for name in ("train", "control"))
    shifted = np.clip(train[1:2] * 0.95, 0, 1)
    np.savez(folder / "control.npz", x=np.concatenate([train[:1], shifted, control]))
    words = ["exhume", "audit", str(target), "--out", str(tmp_path / "out"), "--quiet", "--include-images"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(reason.startswith("2 of 8 control rows are training rows") for reason in told["reasons"])
    matched = told["attacks"][0]["matched"]
    assert (matched["control"]["count"], matched["train"]["distinct"], matched["drawn"]) == (0, 6, None)
    assert "2 of 8 control rows are training rows" in (tmp_path / "out" / "report.html").read_text()
