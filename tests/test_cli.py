"""The command line: what it writes, what it refuses, and how it exits."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from exhume import audit, cli, demo, presets, targets
from exhume.descent import Descent
from exhume.kkt import KKTAttack
from exhume.presets import ATTACKS
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim

CASE = Case(data="digits", n=6, hidden=(200,), training=TrainConfig(max_steps=5000, tolerance=1e-6))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return demo.save(make_victim(CASE), tmp_path_factory.mktemp("victim") / "victim")


def run(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["exhume", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_attack_writes_a_report_without_any_truth(monkeypatch, target, tmp_path, capsys):
    hidden = [(target.parent / name) for name in ("train.npz", "control.npz")]
    contents = [path.read_bytes() for path in hidden]
    try:
        for path in hidden:
            path.write_bytes(b"unreadable")
        assert run(monkeypatch, "attack", target, "--out", tmp_path / "out", "--quiet", "--json") == 0
    finally:
        for path, content in zip(hidden, contents, strict=True):
            path.write_bytes(content)
    told = json.loads(capsys.readouterr().out)
    assert told["attacks"][0]["certificate"]["recovered"] >= 5
    assert told["verdict"] is None
    assert told["attacks"][0]["matched"] is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")) == [
        "reconstructions.safetensors",
        "report.html",
        "report.json",
    ]


@pytest.mark.parametrize("name", list(ATTACKS))
def test_every_attack_is_the_same_with_truth_files_that_nobody_can_read(monkeypatch, target, tmp_path, name):
    """Unreadable by mode, and for root, whom no mode stops, by an error on every attempt to open them."""
    hidden = [target.parent / f"{role}.npz" for role in ("train", "control")]

    entry, evidence = ATTACKS[name], targets.read_target(target).evidence()
    if entry.preset(6).missing(evidence):
        assert run(monkeypatch, "attack", target, "--attack", name, "--out", tmp_path / "out", "--quiet") == 2
        return
    brief = entry.preset
    if isinstance(entry.preset(6), Descent):  # two runs that a clock ended would differ

        def brief(samples: int | None) -> Descent:
            return replace(entry.preset(samples), steps=30)

    elif name == "kkt":

        def brief(samples: int | None) -> KKTAttack:
            return presets.kkt(samples, steps=30)

    monkeypatch.setitem(ATTACKS, name, replace(entry, preset=brief))

    def attacked(out: Path) -> bytes:
        assert run(monkeypatch, "attack", target, "--attack", name, "--out", out, "--quiet") == 0
        return (out / "reconstructions.safetensors").read_bytes()

    readable = attacked(tmp_path / "readable")
    opened, loaded = Path.open, np.load

    def guarded(path: Path, *words, **named):
        if path.name in ("train.npz", "control.npz"):
            raise PermissionError(f"{path} must not be opened by an attack")
        return opened(path, *words, **named)

    def guarded_load(source, *words, **named):
        if Path(getattr(source, "name", source)).name in ("train.npz", "control.npz"):
            raise PermissionError(f"{source} must not be loaded by an attack")
        return loaded(source, *words, **named)

    monkeypatch.setattr(Path, "open", guarded)
    monkeypatch.setattr(np, "load", guarded_load)
    try:
        for path in hidden:
            path.chmod(0)
        assert attacked(tmp_path / "unreadable") == readable
        with pytest.raises(targets.TargetError, match="must not be opened"):  # the guard does guard
            targets.read_target(target).truth()
    finally:
        for path in hidden:
            path.chmod(0o644)


def test_audit_exits_with_the_verdict_and_resumes(monkeypatch, target, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(monkeypatch, "audit", target, "--out", out, "--quiet") == 1
    first = (out / "report.json").read_bytes()
    assert json.loads(first)["attacks"][0]["matched"]["train"]["count"] >= 5
    assert json.loads(first)["attacks"][0]["matched"]["control"]["count"] == 0
    assert run(monkeypatch, "audit", target, "--out", out, "--quiet") == 2  # never overwritten
    assert run(monkeypatch, "audit", target, "--out", out, "--resume") == 1
    assert "it is kept" in capsys.readouterr().err
    assert (out / "report.json").read_bytes() == first
    assert run(monkeypatch, "audit", target, "--out", out, "--resume", "--quiet", "--seed", 1) == 1
    assert (out / "report.json").read_bytes() != first  # another job: run anew


def test_inspect_tells_rank_and_applicability(monkeypatch, target, capsys):
    assert run(monkeypatch, "inspect", target, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rank"], told["activation"], told["attacks"][0]["applies"]) == (6, "relu", True)
    assert (told["samples"], told["hermite"]["activation"]) == (6, "relu")
    assert {r["layers"] for r in told["regimes"]} == {"last", "all"} and all(
        r["ratio"] for r in told["regimes"]
    )
    assert [(a["sign"], a["scale"]) for a in told["ambiguities"]] == [(False, False)] * 2
    assert run(monkeypatch, "inspect", target) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "Squared Hermite coefficients of relu by degree" in page
    assert (
        "last, row space:" in page
        and "all layers: the row space of [DW_1, Db_1] tells sign and scale" in page
    )
    assert run(monkeypatch, "inspect", target.parent / "final.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 64 * 200 + 200 + 200 + 1


def test_attacks_lists_what_is_built(monkeypatch, capsys):
    assert run(monkeypatch, "attacks", "--json") == 0
    named = [row["name"] for row in json.loads(capsys.readouterr().out)]
    changes = ["loo", "loo-quick", "iurada", "tansley-1", "tansley-2"]
    finals = ["haim", "buzaglo", "buzaglo-decay", "naive", "first-rows"]
    assert named == ["exhume", "algebra", "kkt", *changes, *finals]


def edited(target: Path, tmp_path: Path, old: str, new: str) -> Path:
    text = target.read_text()
    assert old in text
    copy = target.parent / f"{tmp_path.name}.toml"
    copy.write_text(text.replace(old, new))
    return copy


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("shape = [1, 8, 8]", "shape = [1, 9, 9]", "shape"),
        ("samples = 6", "samples = 7", "n larger than rows"),
        ("samples = 6", "sampels = 6", "samples"),
        ('train = "train.npz"', 'train = "gone.npz"', "gone.npz"),
        ("samples = 6", 'names = ["exhum"]', "exhume"),
        ("samples = 6", 'moves = "often"', "moves"),
    ],
)
def test_a_wrong_target_is_one_sentence_and_exit_2(monkeypatch, target, tmp_path, capsys, old, new, words):
    out = tmp_path / "out"
    assert run(monkeypatch, "audit", edited(target, tmp_path, old, new), "--out", out, "--quiet") == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert not out.exists()


def test_candidates_move_where_that_is_asked_for(monkeypatch, target, tmp_path, capsys):
    """By the target file, or on the command line, which has the last word; an attack without candidates fails."""
    moving = edited(target, tmp_path, "samples = 6", 'samples = 6\nmoves = "scaled"\nnames = ["loo-quick"]')
    words = ("attack", moving, "--budget", "2s", "--quiet", "--json", "--out")
    assert run(monkeypatch, *words, tmp_path / "a") == 0
    assert json.loads(capsys.readouterr().out)["attacks"][0]["lineage"]["lives"]
    assert run(monkeypatch, *words, tmp_path / "b", "--moves", "none") == 0
    assert json.loads(capsys.readouterr().out)["attacks"][0]["lineage"] is None
    for how, why in (("often", "moves must be one of"), ("published", "leave [attack] moves out")):
        assert run(monkeypatch, "attack", target, "--out", tmp_path / how, "--moves", how, "--quiet") == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["soon", "0s", "-1m", "10 parsecs"])
def test_a_wrong_budget_is_refused(monkeypatch, target, tmp_path, capsys, budget):
    assert run(monkeypatch, "attack", target, "--out", tmp_path / "out", f"--budget={budget}", "--quiet") == 2
    assert "must be a time such as" in capsys.readouterr().err


def test_a_foreign_folder_is_never_written_into(monkeypatch, target, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert run(monkeypatch, "attack", target, "--out", tmp_path, "--quiet") == 2
    assert "--force" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_first_interrupt_keeps_the_best_result(tmp_path):
    """A wider victim, interrupted while it is attacked, still writes a report."""
    victim = make_victim(Case(data="digits", n=30, hidden=(600,), training=TrainConfig(max_steps=300)))
    path = demo.save(victim, tmp_path / "victim")
    code = (
        "import os, signal, threading, torch; torch.set_num_threads(1)\n"
        "from exhume import cli, attack\n"
        "original = attack.survey\n"
        "def surveyed(*a): os.kill(os.getpid(), signal.SIGINT); return original(*a)\n"
        "attack.survey = surveyed\n"
        "cli.main()\n"
    )
    words = ["attack", str(path), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attacks"][0]["status"] == "stopped"


def test_the_demo_prints_a_verdict_and_exits_0(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(demo.CASES, "digits", CASE)
    assert run(monkeypatch, "demo", "--data", "digits", "--out", tmp_path / "out", "--quiet", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "leak"
    assert np.load(tmp_path / "out" / "victim" / "train.npz")["x"].shape[1:] == (1, 8, 8)
    assert torch.get_num_threads() == 1


def test_a_defect_of_ours_does_not_exit_with_leak(monkeypatch, target, tmp_path, capsys):
    """Exit code 1 is the verdict; a crash shows its traceback and exits with 2."""

    def broken(*_, **__):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("exhume.audit.run", broken)
    monkeypatch.setattr(
        sys, "argv", ["exhume", "audit", str(target), "--out", str(tmp_path / "o"), "--quiet"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "ZeroDivisionError" in (said := capsys.readouterr().err) and "defect in exhume" in said


def test_an_attack_that_breaks_off_leaves_the_others_in_the_report(monkeypatch, target):
    evidence = targets.load(target)

    def broken(*_, **__):
        raise torch.linalg.LinAlgError("no factor")

    monkeypatch.setattr("exhume.descent.Descent.run", broken)
    plan = audit.Plan(names=("exhume", "loo-quick"), samples=6, budget=60.0)
    ended = audit.run(evidence, plan)
    assert [one.status for one in ended.report.attacks][1] == "failed"
    assert "broke off: no factor" in ended.report.attacks[1].error
    assert len(ended.found) == 1


@pytest.mark.parametrize("name", ["mean", "scale", "sample_norm"])
def test_a_job_with_another_map_of_its_inputs_is_another_job(target, name):
    evidence = targets.load(target)
    other = replace(
        evidence, input=replace(evidence.input, **{name: 3.0 if name == "sample_norm" else torch.tensor(0.9)})
    )
    plan = audit.Plan()
    assert audit.digest(evidence, plan, None) != audit.digest(other, plan, None)
