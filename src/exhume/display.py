"""What the command line prints: summaries of reports, inspections and bare checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exhume.checkpoints import load_state
from exhume.inspection import Inspection
from exhume.report.data import Group, Report


def summarise(told: Report, page: Path, console: Console) -> None:
    """Print counts beside their controls, the verdict with its reasons, and where the page is."""
    table = Table("attack", "candidates", "train", "control", "random", "seconds", "status")
    for one in told.attacks:
        groups = None if one.matched is None else (one.matched.train, one.matched.control, one.matched.random)
        counts = ["-"] * 3 if groups is None else [_counts(g) for g in groups]
        spent = "-" if one.seconds is None else f"{one.seconds:.1f}"
        table.add_row(one.name, str(one.candidates), *counts, spent, escape(one.error or one.status))
    console.print(table)
    if told.verdict is not None:
        console.print(f"Verdict: {told.verdict}", markup=False)
    for reason in told.reasons:
        console.print(f"- {reason}", markup=False, highlight=False)
    console.print(f"Report: {page}")


def _counts(group: Group) -> str:
    forgiven = "" if group.gauge is None else f"; {group.gauge.count} up to what the equations cannot tell"
    return f"{group.count}/{group.n} ({group.close} close{forgiven})"


def show_inspection(found: Inspection) -> None:
    """Print layers, findings and which attacks apply."""
    console = Console()
    layers = Table("parameter", "shape", "numbers")
    for name, shape, count in found.layers:
        layers.add_row(escape(name), str(list(shape)), f"{count:,}")
    console.print(layers)
    activation = found.activation or "not a plain dense network"
    console.print(
        f"{found.parameters:,} parameters ({found.dtype}), input {list(found.input_shape)}, {found.outputs} outputs,"
        f" activation: {activation}",
        highlight=False,
    )
    for sentence in found.findings:
        console.print(f"- {sentence}", markup=False, highlight=False)
    _show_regime(found, console)
    table = Table("attack", "applies", "how, or what is missing")
    for one in found.attacks:
        table.add_row(one.name, "yes" if one.applies else "no", escape(one.reason))
    console.print(table)


def _show_regime(found: Inspection, console: Console) -> None:
    """Degrees of the activation, equations against unknowns, and what equations cannot tell."""
    if found.hermite is not None:
        degrees = "  ".join(f"{k}: {square:.4f}" for k, square in enumerate(found.hermite.squares))
        console.print(
            f"Squared Hermite coefficients of {found.hermite.activation} by degree, for pre-activations of standard"
            f" deviation {found.hermite.scale:.3g}:\n  {degrees}",
            markup=False,
            highlight=False,
        )
    if found.regimes:
        counts = Table("equations", "sought in", "p", "unknowns", "p / unknowns")
        for one in found.regimes:
            where = f"{'row space' if one.reduced else 'all inputs'}, {one.coordinates} each"
            counts.add_row(one.layers, where, f"{one.equations:,}", f"{one.unknowns:,}", f"{one.ratio:.3g}")
        console.print(counts)
    for one in found.regimes:
        where = "row space" if one.reduced else "all inputs"
        console.print(f"- {one.layers}, {where}: {one.verdict}", markup=False, highlight=False)
    for told in found.ambiguities:
        for sentence in told.reasons:
            console.print(f"- {told.layers}: {sentence}", markup=False, highlight=False)


def show_checkpoint(path: Path, as_json: bool, trust_pickle: bool) -> None:
    """Print what a bare checkpoint tells, shapes only, and what a target file would add."""
    state = load_state(path, trust_pickle=trust_pickle)
    rows = [
        {"name": k, "shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
        for k, p in state.items()
    ]
    if as_json:
        print(json.dumps({"tensors": rows, "parameters": sum(p.numel() for p in state.values())}))
        return
    console = Console()
    table = Table("tensor", "shape", "dtype")
    for row in rows:
        table.add_row(escape(str(row["name"])), str(row["shape"]), str(row["dtype"]))
    console.print(table)
    console.print(f"{sum(p.numel() for p in state.values()):,} numbers.", highlight=False)
    console.print(
        "A target file that names the architecture, the input shape and, if you have them, the initial weights"
        " tells which attacks apply; `exhume.snapshot` writes one."
    )
