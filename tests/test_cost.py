"""What an attack will need is known before it starts, and what cannot run is refused with numbers."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from exhume import audit, cli, cost, demo, presets
from exhume.errors import MissingEvidence
from exhume.evidence import Evidence, InputSpec
from exhume.survey import survey
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim

DENSE = Case(data="digits", n=40, hidden=(600,), activation="tanh", training=TrainConfig(max_steps=200))
WIDE = Case(data="mnist", n=20, hidden=(2000,), training=TrainConfig(max_steps=100))

CHILD = """
import sys
import scipy.optimize
from exhume import cost, load, presets
from exhume.survey import survey

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

evidence, attack = load(sys.argv[1]), presets.exhume(int(sys.argv[2]))
before = kilobytes("VmRSS")
needed = cost.estimate(attack, evidence, survey(evidence))
attack.run(evidence, budget=2.0)
print(needed.memory, 1024 * (kilobytes("VmHWM") - before))
"""


@pytest.fixture(scope="module")
def victim():
    return make_victim(Case(data="digits", n=6, hidden=(100,), training=TrainConfig(max_steps=300)))


def estimate(evidence, samples=None, rows=0):
    return cost.estimate(presets.exhume(samples), evidence, survey(evidence), rows)


def module(width):
    """A network that is no plain dense chain, with init and final weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, width), nn.Tanh(), nn.Linear(width, 1)
    )
    start = {k: p.detach().clone() for k, p in model.state_dict().items()}
    final = {k: p + 0.01 * torch.randn_like(p) for k, p in start.items()}
    spec = InputSpec(shape=(1, 8, 8), low=0.0, high=1.0)
    return Evidence.from_module(model, input=spec, init=start, final=final)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("case", [DENSE, WIDE], ids=["normal matrix", "wide"])
def test_the_estimate_is_within_a_factor_of_five_of_the_measured_peak(case, tmp_path):
    target = demo.save(make_victim(case), tmp_path / "victim")
    words = [sys.executable, "-c", CHILD, str(target), str(case.n)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    told, measured = map(float, done.stdout.split())
    assert 0.2 < told / measured < 5


def test_conjugate_gradients_take_over_where_a_matrix_would_not_fit():
    """2,000 rows on 50 units are sought as a few candidates, without a matrix of all unknowns."""
    case = Case(data="mnist", n=300, hidden=(50,), training=TrainConfig(max_steps=5))
    told = estimate(make_victim(case).evidence, 300)
    unknowns = told.candidates * told.unknowns
    assert unknowns > 4000
    assert told.memory < 8 * unknowns**2 / 10


def test_distances_grow_with_rows_and_candidates(victim):
    assert estimate(victim.evidence, 6).parts["distances to the rows"] == 0
    told = estimate(victim.evidence, 6, rows=10**9)
    assert (told.largest, told.memory) == ("distances to the rows", 8 * 6 * 10**9 * told.candidates)


def test_gradients_of_other_modules_are_counted():
    narrow, wide = (estimate(module(width), 16) for width in (50, 5000))
    assert wide.largest == "gradients of single samples"
    assert wide.memory > 50 * narrow.memory


def test_too_little_memory_is_one_sentence_with_numbers(victim):
    told = estimate(victim.evidence, 6)
    with pytest.raises(cost.OverBudget) as refused:
        cost.refuse(told, "exhume", available=2.0**18, budget=None)
    words = str(refused.value)
    assert "needs about" in words
    assert "but 0.2 MiB are available; use a machine with more memory, or" in words
    assert f"{told.candidates} candidates of {told.unknowns} unknowns" in words
    cost.refuse(told, "exhume", available=None, budget=None)


def test_time_is_refused_only_far_beyond_the_budget(victim):
    told = replace(estimate(victim.evidence, 6), multiplications=3.6e12)
    cost.refuse(told, "exhume", None, budget=400.0, rate=1e9)  # an hour for one round; stopped in between
    with pytest.raises(
        cost.OverBudget, match=r"at least 60 min .* a budget of 10 s; raise --budget to about 60"
    ):
        cost.refuse(told, "exhume", None, budget=10.0, rate=1e9)


def test_the_speed_is_measured_here_and_quickly():
    assert 1e7 < cost.speed() < 1e14


def test_available_memory_is_read_or_unknown(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert cost.available_memory(path) == 64 * 1024
    assert cost.available_memory(tmp_path / "none") != 0
    assert (cost.available_memory() or 1) > 0


def test_an_audit_that_does_not_fit_is_refused_before_the_attack(victim, monkeypatch):
    monkeypatch.setattr(cost, "available_memory", lambda: 1000.0)
    monkeypatch.setattr("exhume.attack.SpanAttack.run", lambda *a, **k: pytest.fail("the attack was started"))
    with pytest.raises(MissingEvidence, match="needs about"):
        audit.run(victim.evidence, audit.Plan(samples=6), victim.truth)


def test_the_command_line_exits_2_with_the_numbers(victim, monkeypatch, tmp_path, capsys):
    target = demo.save(victim, tmp_path / "victim")
    monkeypatch.setattr(cost, "available_memory", lambda: 1000.0)
    monkeypatch.setattr(
        sys, "argv", ["exhume", "audit", str(target), "--out", str(tmp_path / "o"), "--quiet"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert message.count("\n") == 1
    assert "of memory for its" in message
    assert "MiB are available" in message
