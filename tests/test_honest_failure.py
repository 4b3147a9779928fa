"""Audits of what the attack cannot know: each names the broken assumption, and none claims what is not so.

Every case goes through `audit.run`, and some from files through the command line.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from exhume import audit, cli, demo
from exhume.evidence import Evidence, Recipe
from exhume.survey import survey
from exhume.victims.nets import mlp
from exhume.victims.train import TrainConfig, train
from exhume.victims.victim import Case, Victim, make_victim

SMALL = Case(data="digits", n=8, hidden=(300,), training=TrainConfig(max_steps=20_000, tolerance=1e-8))
LEAK, INCONCLUSIVE = 1, 3
ENOUGH = 60.0  # seconds for what ends by itself, on any machine; what cannot succeed is cut short


@pytest.fixture(scope="module")
def victim() -> Victim:
    return make_victim(SMALL)


def audited(evidence: Evidence, victim: Victim, budget: float = 1.5) -> audit.Outcome:
    return audit.run(evidence, audit.Plan(samples=victim.case.n, budget=budget), victim.truth)


def false_claims(outcome: audit.Outcome) -> int:
    """Certified candidates that match no training row."""
    certificate, rows = outcome.found[0].certificate, outcome.matches[0].rows
    matched = {row.candidate for row in rows if row.error is not None and row.error < 0.3}
    return sum(real and j not in matched for j, real in enumerate(certificate.certified.tolist()))


def says(outcome: audit.Outcome, code: int, words: str) -> None:
    """The verdict has this exit code, and a reason with these words; nothing false is certified."""
    assert outcome.verdict.exit_code == code, outcome.verdict
    assert any(words in reason for reason in outcome.verdict.reasons), outcome.verdict.reasons
    assert false_claims(outcome) == 0


def trained_with(victim: Victim, model: nn.Module, steps: int) -> Evidence:
    """The victim's rows, taught to another model by gradient descent."""
    spec = victim.evidence.input
    done = train(model, spec.encode(victim.truth.train), victim.split.train.y, TrainConfig(max_steps=steps))
    return Evidence.from_module(
        model, input=spec, final=done.final, init=done.init, recipe=Recipe(optimizer="sgd")
    )


class Noise(nn.Module):
    """Augmentation: fresh noise on every input in training, nothing in evaluation."""

    def forward(self, u):
        return u + 0.3 * torch.randn_like(u) if self.training else u


class Augmented(nn.Module):
    """A dense network behind augmentation, which is no layer of the model that is released."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.noise, self.net = Noise(), net

    def forward(self, u):
        return self.net(self.noise(u))


def test_the_initial_weights_of_another_network(victim):
    other = mlp((64, 300, 1), seed=99).state_dict()
    evidence = replace(victim.evidence, init={k: other[k] for k in victim.evidence.init})
    outcome = audited(evidence, victim)
    says(outcome, INCONCLUSIVE, "supply those this training run started from")
    assert not any("Adam" in reason for reason in outcome.verdict.reasons)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_an_optimizer_that_rescales_entries_with_and_without_a_recipe(optimizer):
    victim = make_victim(replace(SMALL, training=TrainConfig(optimizer=optimizer, lr=1e-3, max_steps=300)))
    says(audited(victim.evidence, victim), INCONCLUSIVE, f"trained by {optimizer}")
    silent = replace(victim.evidence, recipe=replace(victim.evidence.recipe, optimizer=None))
    says(audited(silent, victim), INCONCLUSIVE, "no rank, as after Adam")


def test_early_stopping_breaks_nothing():
    victim = make_victim(replace(SMALL, training=TrainConfig(max_steps=60)))
    assert victim.trained.loss > 1e-3
    outcome = audited(victim.evidence, victim, ENOUGH)
    says(outcome, LEAK, "recovered 8 of 8 training rows")
    assert len(outcome.verdict.reasons) == 2


def test_dropout(victim):
    base = mlp((64, 300, 1))
    evidence = trained_with(victim, nn.Sequential(*base[:3], nn.Dropout(0.5), base[3]), steps=3000)
    assert evidence.dropout
    says(audited(evidence, victim), INCONCLUSIVE, "has dropout layers")


def test_augmentation(victim):
    """Noise drawn afresh in every step: the first layer saw thousands of inputs, of which 8 are stated."""
    model = Augmented(mlp((64, 300, 1)))
    spec = victim.evidence.input
    u = spec.encode(victim.truth.train)
    done = train(model, u, victim.split.train.y, TrainConfig(max_steps=300))
    weights = [{k.removeprefix("net."): p for k, p in state.items()} for state in (done.final, done.init)]
    evidence = Evidence.from_module(
        model.net, input=spec, final=weights[0], init=weights[1], recipe=Recipe(optimizer="sgd")
    )
    says(
        audited(evidence, victim), INCONCLUSIVE, "more different inputs than the 8 samples stated (augmented"
    )


def test_more_inputs_than_stated():
    victim = make_victim(replace(SMALL, n=16))
    outcome = audit.run(victim.evidence, audit.Plan(samples=8, budget=12.0), victim.truth)
    says(outcome, LEAK, "the data were augmented, or the number is wrong")


def test_a_frozen_first_layer(victim):
    model = mlp((64, 300, 1))
    model[1].requires_grad_(False)
    says(audited(trained_with(victim, model, 1000), victim), INCONCLUSIVE, "first layer did not change")


def test_float16_still_leaks(victim):
    says(audited(rounded(victim, torch.float16), victim, ENOUGH), LEAK, "recovered 8 of 8 training rows")


def test_bfloat16_hides_the_rank(victim):
    evidence = rounded(victim, torch.bfloat16)
    assert survey(evidence).first.flat
    outcome = audited(evidence, victim)
    told = " ".join(outcome.verdict.reasons)
    assert (outcome.verdict.exit_code, "audit the float32 checkpoint" in told) == (INCONCLUSIVE, True)
    # Such coarse weights can vouch for a blurred sample; then the verdict says that it matches no training row.
    assert false_claims(outcome) == 0 or f"{false_claims(outcome)} of" in told


def rounded(victim: Victim, dtype: torch.dtype) -> Evidence:
    init, final = (
        {k: p.to(dtype) for k, p in s.items()} for s in (victim.trained.init, victim.trained.final)
    )
    return replace(victim.evidence, init=init, final=final)


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_the_wrong_activation(victim, activation):
    evidence = Evidence.from_module(
        mlp((64, 300, 1), activation),
        input=victim.evidence.input,
        init=victim.trained.init,
        final=victim.trained.final,
        recipe=victim.evidence.recipe,
    )
    says(audited(evidence, victim), INCONCLUSIVE, "activation or architecture in the factory is wrong")


def test_the_wrong_scale_inside_the_range(victim):
    """Ten times too small: nothing leaves the range and nothing matches, but the certificates vouch for inputs."""
    spec = replace(victim.evidence.input, scale=torch.tensor(0.1))
    outcome = audited(replace(victim.evidence, input=spec), victim, ENOUGH)
    assert outcome.verdict.exit_code == INCONCLUSIVE
    assert "certified from the weights match no training row" in outcome.verdict.reasons[0]


def test_a_mean_that_is_not_stated(victim):
    spec = replace(victim.evidence.input, mean=None)
    outcome = audited(replace(victim.evidence, input=spec), victim, ENOUGH)
    assert outcome.verdict.exit_code == INCONCLUSIVE
    assert any("leave the stated range [0, 1]: mean, scale" in reason for reason in outcome.verdict.reasons)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": "01"}, "lie near labels 'pm1', not '01'"),
        ({"lr": 0.1, "steps": 300, "weight_decay": 0.1}, "lr, steps, momentum or weight_decay is wrong"),
    ],
)
def test_a_wrong_recipe_is_named_and_changes_nothing(victim, changes, words):
    evidence = replace(victim.evidence, recipe=replace(victim.evidence.recipe, **changes))
    outcome = audited(evidence, victim, ENOUGH)
    says(outcome, LEAK, words)
    assert outcome.matches[0].train.count == 8


def test_far_outside_the_regime_there_is_no_evidence_and_the_control_passes():
    """120 rows on 30 units, a stand-in for benchmarks/far_outside.py (2,000 rows on 50 units)."""
    case = Case(data="digits", n=120, hidden=(30,), training=TrainConfig(max_steps=300))
    victim = make_victim(case)
    outcome = audit.run(victim.evidence, audit.Plan(samples=120, budget=60.0), victim.truth)
    says(outcome, 0, "The attack works on such a network: on a planted victim")
    assert any("equations determine at most" in note for note in outcome.report.attacks[0].assumed)


# --- from files, through the command line ------------------------------------------------------------------


def command(monkeypatch, target: Path, out: Path, budget: str = "1.5s") -> tuple[int, str]:
    """Exit code and reasons of `exhume audit`."""
    monkeypatch.setattr(
        sys, "argv", ["exhume", "audit", str(target), "--out", str(out), "--quiet", "--budget", budget]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), " ".join(json.loads((out / "report.json").read_text())["reasons"])


@pytest.fixture
def files(victim, tmp_path) -> Path:
    return demo.save(victim, tmp_path / "victim")


def rewrite(target: Path, old: str, new: str) -> None:
    text = target.read_text()
    assert old in text
    target.write_text(text.replace(old, new))


def test_files_with_the_initial_weights_of_another_network(monkeypatch, files, tmp_path):
    other = {k: p.contiguous() for k, p in mlp((64, 300, 1), seed=99).state_dict().items()}
    save_file(other, files.parent / "init.safetensors")
    code, told = command(monkeypatch, files, tmp_path / "out")
    assert (code, "belong to another network" in told) == (INCONCLUSIVE, True)


def test_files_without_the_mean(monkeypatch, files, tmp_path):
    rewrite(files, "mean =", "# mean =")
    code, told = command(monkeypatch, files, tmp_path / "out", f"{ENOUGH:g}s")
    assert (code, "leave the stated range" in told) == (INCONCLUSIVE, True)


def test_files_with_the_wrong_activation(monkeypatch, files, tmp_path):
    rewrite(files, 'activation = "relu"', 'activation = "tanh"')
    code, told = command(monkeypatch, files, tmp_path / "out")
    assert (code, "activation or architecture in the factory is wrong" in told) == (INCONCLUSIVE, True)


def test_files_of_a_network_trained_by_adam(monkeypatch, tmp_path):
    victim = make_victim(replace(SMALL, training=TrainConfig(optimizer="adam", lr=1e-3, max_steps=300)))
    code, told = command(monkeypatch, demo.save(victim, tmp_path / "victim"), tmp_path / "out")
    assert (code, "trained by adam" in told) == (INCONCLUSIVE, True)
