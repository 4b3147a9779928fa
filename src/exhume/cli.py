"""The command line: exhume demo, inspect, attack, audit, attacks."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from exhume import audit as audits
from exhume import demo as demos
from exhume import report
from exhume.clock import Observer
from exhume.display import show_checkpoint, show_inspection, summarise
from exhume.errors import ExhumeError, TargetError
from exhume.inspection import inspect as inspect_evidence
from exhume.presets import ATTACKS
from exhume.report.data import Report
from exhume.targets import Target, read_target
from exhume.verdict import EXIT_CODES, Policy, read_policy

NO_POLICY = Policy()

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Recover training samples from the weights of networks you own, before somebody else does.",
)

TargetPath = Annotated[
    Path, typer.Argument(metavar="TARGET.toml", help="Target file; `exhume.snapshot` writes one.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder for the report.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random starts.")]
Budget = Annotated[str, typer.Option("--budget", help="Wall time, such as 90s, 10m or 2h.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the report in an existing folder.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Load pickles that run code; only for files you made yourself.")
]
IncludeImages = Annotated[
    bool, typer.Option("--include-images", help="Show training and control rows in the report.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors (and the JSON of --json).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on standard output.")]


class Data(StrEnum):
    """Packaged data sets of the demo."""

    mnist = "mnist"
    faces = "faces"
    digits = "digits"
    breast_cancer = "breast-cancer"


@app.command()
def demo(
    data: Annotated[Data, typer.Option("--data", help="Packaged data set.")] = Data.mnist,
    out: Out = Path("exhume-demo"),
    seed: Seed = 0,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a small victim on packaged real data, audit it and write a report."""
    folder = report.prepare(out, force=force)  # before the work, so that a wrong folder costs nothing
    console = Console(stderr=True, quiet=quiet)
    console.print(f"Training a 2,000-unit network on 20 rows of {data.value} ...")
    made = demos.victim(data.value, seed)
    console.print(f"Trained: loss {made.trained.loss:.1e} after {made.trained.steps} steps.")
    where = folder / "victim"
    suffix = 1
    while where.exists():  # earlier victims stay: nothing is overwritten
        suffix += 1
        where = folder / f"victim-{suffix}"
    target = read_target(demos.save(made, where))
    _run(
        target,
        Output(folder, True, False),
        seed,
        "75s",
        console,
        scored=True,
        include_images=True,
        as_json=as_json,
    )


@app.command()
def inspect(
    target: Annotated[Path, typer.Argument(metavar="TARGET.toml | CHECKPOINT")],
    as_json: AsJson = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Say what the weights reveal and which attacks apply."""
    if target.suffix != ".toml":
        show_checkpoint(target, as_json, trust_pickle)
        return
    read = read_target(target)
    found = inspect_evidence(read.evidence(trust_pickle=trust_pickle), read.attack.samples)
    if as_json:
        print(json.dumps(asdict(found), allow_nan=False))
    else:
        show_inspection(found)


@app.command()
def attack(
    target: TargetPath,
    name: Annotated[
        list[str] | None, typer.Option("--attack", help="Attack to run; may be repeated.")
    ] = None,
    out: Out = Path("exhume-out"),
    seed: Seed = 0,
    budget: Budget = "10m",
    moves: Annotated[
        str | None,
        typer.Option(
            "--moves",
            help="How candidates are moved: none, scaled or published; by default as the target says.",
        ),
    ] = None,
    force: Force = False,
    trust_pickle: TrustPickle = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Reconstruct samples without looking at any truth."""
    read = read_target(target)
    _run(
        read,
        Output(out, force, False),
        seed,
        budget,
        Console(stderr=True, quiet=quiet),
        names=name,
        moves=moves,
        trust_pickle=trust_pickle,
        as_json=as_json,
    )


@app.command()
def audit(
    target: TargetPath,
    out: Out = Path("exhume-out"),
    seed: Seed = 0,
    budget: Budget = "10m",
    force: Force = False,
    trust_pickle: TrustPickle = False,
    include_images: IncludeImages = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="Policy file that overrides thresholds.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep a finished report of the same weights, rows and settings.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Attack a model, score the result against its training and control rows, and judge it.

    Exit codes: 0 no evidence of leakage, 1 leak, 2 usage error, 3 inconclusive.
    """
    read = read_target(target)
    rules = Policy() if policy is None else read_policy(policy)
    code = _run(
        read,
        Output(out, force, resume),
        seed,
        budget,
        Console(stderr=True, quiet=quiet),
        scored=True,
        trust_pickle=trust_pickle,
        include_images=include_images,
        policy=rules,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
def attacks(as_json: AsJson = False) -> None:
    """List the attacks."""
    if as_json:
        rows = [
            {"name": k, "paper": e.paper, "needs": e.needs, "models": e.models} for k, e in ATTACKS.items()
        ]
        print(json.dumps(rows))
        return
    table = Table("name", "paper", "needs", "models")
    for name, entry in ATTACKS.items():
        table.add_row(name, entry.paper, entry.needs, entry.models)
    Console().print(table)


def main() -> None:
    """Entry point: errors a user can mend are one line on standard error and exit code 2."""
    try:
        app()
    except ExhumeError as error:
        print("exhume:", " ".join(str(error).split()), file=sys.stderr)  # user code may raise several lines
        sys.exit(2)
    except Exception:
        # A defect of ours must not end with 1, which says "leak".
        traceback.print_exc()
        print("exhume: this is a defect in exhume; please report it with the lines above", file=sys.stderr)
        sys.exit(2)


def seconds(text: str) -> float:
    """Read a wall time such as 90s, 10m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise TargetError(f"--budget must be a time such as 90s, 10m or 2h, but is {text!r}; correct it")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@dataclass(frozen=True)
class Output:
    """Where a report goes: the folder, whether to overwrite, whether to keep a finished one."""

    folder: Path
    force: bool
    resume: bool


def _run(
    target: Target,
    output: Output,
    seed: int,
    budget: str,
    console: Console,
    *,
    names: list[str] | None = None,
    moves: str | None = None,
    scored: bool = False,
    trust_pickle: bool = False,
    include_images: bool = False,
    policy: Policy = NO_POLICY,
    as_json: bool = False,
) -> int:
    """Run and report; returns the exit code of the verdict."""
    truth = target.truth() if scored else None
    evidence = target.evidence(trust_pickle=trust_pickle)
    plan = audits.Plan(
        names=tuple(names or target.attack.names or audits.own(evidence)),
        samples=target.attack.samples,
        seed=seed,
        budget=seconds(budget),
        policy=policy,
        moves=moves or target.attack.moves,
    )
    digest = audits.digest(evidence, plan, truth)
    folder = report.prepare(output.folder, force=output.force, resume=output.resume)
    if output.resume and (told := _finished(folder, digest)) is not None:
        console.print("The report of the same weights, rows and settings is finished; it is kept.")
        if as_json:
            print(told.to_json())
        summarise(told, folder / "report.html", console)
        return 0 if told.verdict is None else EXIT_CODES[told.verdict]
    with _progress(console) as observer:
        outcome = audits.run(evidence, plan, truth, observer, command=shlex.join(sys.argv))
    page = report.write(
        folder, outcome.report, outcome.found, truth=outcome.truth, include_images=include_images
    )
    if as_json:
        print(outcome.report.to_json())
    summarise(outcome.report, page, console)
    return 0 if outcome.verdict is None else outcome.verdict.exit_code


def _finished(folder: Path, digest: str) -> Report | None:
    """The report in a folder, if it is of the same job and every attack in it ran to its end."""
    path = folder / "report.json"
    if not path.exists():
        return None
    told = report.read(path)
    ended = all(one.status not in ("stopped", "failed") for one in told.attacks)
    return told if ended and told.digest == digest else None


@contextmanager
def _progress(console: Console) -> Iterator[Observer]:
    """A live line on a terminal, silence elsewhere; the first Ctrl-C ends the search and keeps the best result."""
    stopped = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, previous)  # a second Ctrl-C aborts

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        if not console.is_terminal or console.quiet:
            yield lambda doing, share: stopped
            return
        with console.status("starting") as status:

            def show(doing: str, share: float) -> bool:
                status.update(f"{doing}  ({share:.0%} of the budget)  Ctrl-C keeps the best result so far")
                return stopped

            yield show
    finally:
        signal.signal(signal.SIGINT, previous)


if __name__ == "__main__":
    main()
