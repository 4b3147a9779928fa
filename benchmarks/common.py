"""What every benchmark shares: its options, its environment, strict JSON and printed tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student
from torch import Tensor

import exhume
from exhume.matching import Matches
from exhume.reconstruction import Reconstruction
from exhume.truth import Truth

Value = str | int | float | bool | None
Row = dict[str, Value]
# "arm" beside these where arms are compared; "certified" is null where there is no certificate.
KEYS = (
    "attack",
    "case",
    "seed",
    "n",
    "candidates",
    "seconds",
    "steps",
    "loss",
    "matched_train",
    "close_train",
    "matched_control",
    "median_error",
    "certified",
)


def options(description: str, seeds: int) -> argparse.Namespace:
    """Read --quick, --seeds and --json from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short version")
    parser.add_argument("--seeds", type=int, metavar="K", help=f"number of seeds (default {seeds}, quick 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file")
    chosen = parser.parse_args()
    if chosen.seeds is None:
        chosen.seeds = 1 if chosen.quick else seeds
    return chosen


def result(found: Reconstruction, matches: Matches) -> Row:
    """The keys that every row takes from an attack and its score."""
    return {
        "attack": found.attack,
        "candidates": len(found.x),
        "seconds": found.seconds,
        "steps": found.steps,
        "loss": found.loss,
        "matched_train": matches.train.count,
        "close_train": matches.train.close,
        "matched_control": matches.control.count,
        "median_error": matches.train.median,
        "certified": None if found.certificate is None else found.certificate.recovered,
    }


def environment() -> Row:
    """What the numbers depend on; no paths and no host names."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "exhume": exhume.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit, marked if files were changed since; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def scores(x: Tensor, truth: Truth, seed: int = 0) -> Row:
    """The four keys of a row that compare candidates x [m, *shape] with the truth."""
    matches = exhume.match(x, truth, seed=seed)
    return {
        "matched_train": matches.train.count,
        "close_train": matches.train.close,
        "matched_control": matches.control.count,
        "median_error": matches.train.median,
    }


def write(path: Path, rows: Sequence[Mapping[str, Value]]) -> None:
    """Write {"environment": ..., "rows": ...} as strict JSON; a number that is not finite becomes null.

    Raises:
        ValueError: a row lacks one of `KEYS`.
    """
    for row in rows:
        if missing := [key for key in KEYS if key not in row]:
            raise ValueError(f"a row must have all of {', '.join(KEYS)}, but lacks {', '.join(missing)}")
    clean = [{key: None if _infinite(value) else value for key, value in row.items()} for row in rows]
    text = json.dumps({"environment": environment(), "rows": clean}, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _infinite(value: Value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def show(title: str, rows: Sequence[Mapping[str, Value]], columns: Mapping[str, str]) -> None:
    """Print rows as a table.

    Args:
        title: above the table.
        rows: what to print.
        columns: header of each column, and the key it shows.
    """
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(columns):
        table.add_column(header, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(_text(row.get(key)) for key in columns.values()))
    # A pipe has no width: wide enough that no table is folded.
    Console(width=None if Console().is_terminal else 180).print(table)


def _text(value: Value) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and 95% interval of paired differences (Student)."""
    values = np.array(differences)
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)
