"""What an audit says of a network that cannot remember its rows: 2,000 of them on 50 hidden units.

Prints one row a seed, with verdict and exit code, and the sentence of the positive control.

    python benchmarks/far_outside.py --seeds 5 --json far_outside.json
"""

from __future__ import annotations

from rich.console import Console

from common import Row, options, result, show, write
from exhume import audit
from exhume.victims.train import TrainConfig
from exhume.victims.victim import Case, make_victim

FULL = Case(data="mnist", n=2000, hidden=(50,), training=TrainConfig(max_steps=300))
QUICK = Case(data="digits", n=200, hidden=(30,), training=TrainConfig(max_steps=300))
BUDGET = 120.0

COLUMNS = {
    "case": "case",
    "seed": "seed",
    "n": "n",
    "candidates": "candidates",
    "seconds": "seconds",
    "train": "matched_train",
    "close": "close_train",
    "control": "matched_control",
    "of": "control_rows",
    "certified": "certified",
    "verdict": "verdict",
    "exit code": "exit_code",
}


def run(case: Case) -> tuple[Row, tuple[str, ...]]:
    victim = make_victim(case)
    plan = audit.Plan(samples=case.n, seed=case.seed, budget=BUDGET)
    outcome = audit.run(victim.evidence, plan, victim.truth)
    found, matches, verdict = outcome.found[0], outcome.matches[0], outcome.verdict
    assert verdict is not None
    told = next((reason for reason in verdict.reasons if "planted" in reason), None)
    row: Row = {
        **result(found, matches),
        "case": f"{case.data} {case.hidden[0]} {case.activation}",
        "seed": case.seed,
        "n": case.n,
        "control_rows": matches.control.n,
        "train_loss": victim.trained.loss,
        "verdict": verdict.outcome,
        "exit_code": verdict.exit_code,
        "positive_control": told,
    }
    return row, verdict.reasons


def main() -> None:
    chosen = options(__doc__ or "", seeds=5)
    case = QUICK if chosen.quick else FULL
    console = Console()
    rows = []
    for seed in range(chosen.seeds):
        row, reasons = run(Case(case.data, case.n, case.hidden, training=case.training, seed=seed))
        rows.append(row)
        console.print(f"seed {seed}: {row['verdict']}, exit code {row['exit_code']}", highlight=False)
        for reason in reasons:
            console.print(f"- {reason}", markup=False, highlight=False)
        if chosen.json is not None:
            write(chosen.json, rows)
    show("Audits far outside the regime", rows, COLUMNS)


if __name__ == "__main__":
    main()
