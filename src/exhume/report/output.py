"""The output folder: never overwrite what exhume did not make, never leave half a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from exhume.errors import ExhumeError, OutputError
from exhume.reconstruction import Reconstruction
from exhume.report.data import Report
from exhume.report.html import render
from exhume.truth import Truth

MARKER = ".exhume-output"  # its presence says that exhume made the folder
JSON, HTML, TENSORS = "report.json", "report.html", "reconstructions.safetensors"


def prepare(folder: str | Path, *, force: bool = False, resume: bool = False) -> Path:
    """Make the output folder, or take one over, before any work is done; nothing in it is removed.

    A new or empty folder is always taken. One that exhume made is taken again with `force` or `resume`; any
    other only with `force`.

    Args:
        folder: where reports are to be written.
        force: overwrite the report files in it.
        resume: go on with an earlier run of exhume in it.

    Raises:
        OutputError: the folder holds something that would be overwritten, is a file, or cannot be made.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"the output {folder} must be a folder, but is a file; choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name for path in folder.iterdir()} - {MARKER}
        ours = (folder / MARKER).is_file()
    except OSError as error:
        raise _unwritable(folder, error) from error
    if held and not force and not ours:
        raise OutputError(
            f"the output folder {folder} must be new, empty or made by exhume, but holds other files"
            f" ({_listed(held)}); choose another, or pass --force to write into it"
        )
    if held and not force and not resume:
        raise OutputError(
            f"the output folder {folder} must be new or empty, but holds an earlier run; choose another, or"
            " pass --force to overwrite its report"
        )
    write_atomically(folder / MARKER, b"This folder was made by exhume.\n")
    return folder


def write(
    folder: str | Path,
    report: Report,
    reconstructions: Sequence[Reconstruction],
    *,
    truth: Truth | None = None,
    include_images: bool = False,
) -> Path:
    """Write report.json, report.html and reconstructions.safetensors, and return the path of the page.

    Args:
        folder: one that `prepare` returned.
        report: what to tell.
        reconstructions: of the attacks that ran to an end, in any order.
        truth: what they were matched with; nothing of its rows is written unless `include_images`.
        include_images: show training and control rows beside the candidates.

    Raises:
        OutputError: the folder was not prepared, or cannot be written to.
        ExhumeError: a reconstruction is not one of the report.
    """
    folder = Path(folder)
    if not (folder / MARKER).is_file():
        raise OutputError(
            f"the output folder {folder} must be one that exhume made, but holds no {MARKER};"
            " call exhume.report.prepare on it first"
        )
    _check_same_run(report, reconstructions)
    by_name = {found.attack: found for found in reconstructions}
    page = render(report, by_name, truth=truth, include_images=include_images)
    write_atomically(folder / TENSORS, pack(reconstructions, prefixed=len(report.attacks) > 1))
    write_atomically(folder / HTML, page.encode())
    write_atomically(folder / JSON, report.to_json().encode())  # last: who finds it finds the others
    return folder / HTML


def _check_same_run(report: Report, reconstructions: Sequence[Reconstruction]) -> None:
    told = {attack.name: attack.candidates for attack in report.attacks}
    for found in reconstructions:
        if told.get(found.attack) != len(found.candidates):
            raise ExhumeError(
                f"the reconstructions must be those the report tells of, but that of {found.attack!r} with"
                f" {len(found.candidates)} candidates is not; build the report from the same reconstructions"
            )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a reader sees the old content or the new.

    Args:
        path: the file, overwritten if it exists.
        content: all of it.

    Raises:
        OutputError: the folder cannot be written to.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def pack(reconstructions: Sequence[Reconstruction], *, prefixed: bool) -> bytes:
    """Return a safetensors file of all candidates: x [m, *shape], coef [m, k] and label [m, C].

    Names have prefixes where the report tells of several attacks, so that they do not change when one fails.

    Args:
        reconstructions: one for each attack that ran to an end; may be empty.
        prefixed: whether names start with that of the attack, as in `exhume.x`.
    """
    from safetensors.torch import save

    tensors = {}
    for found in reconstructions:
        prefix = f"{found.attack}." if prefixed else ""
        for name in ("x", "coef", "label"):
            tensors[prefix + name] = getattr(found.candidates, name).detach().cpu().contiguous().clone()
    return save(tensors)


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"the output {path} must be writable, but is not ({error.strerror}); choose another folder"
    )


def _listed(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (" and more" if len(names) > len(first) else "")
