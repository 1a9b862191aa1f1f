"""Counterexamples: shrunk traces on disk, for ``rollproof replay``.

``CHECK.json`` shows how a check fails; ``CHECK.2.json`` and so on show further kinds of findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollproof.core.trace import Trace
from rollproof.errors import TraceError, UsageError

__all__ = ["FOLDER", "delete_counterexamples", "write_counterexample"]

FOLDER = ".rollproof"
"""The folder for counterexamples unless another one is named; it has its own ``.gitignore``."""


def write_counterexample(folder: Path, check_id: str, trace: Trace, number: int = 1) -> Path:
    """Write the counterexample ``number`` of a check into ``folder`` and return the file.

    The folder is made if need be. The first one deletes the further ones of an earlier run. Raises
    ``TraceError``.
    """
    from rollproof.store import dump_trace

    folder.mkdir(parents=True, exist_ok=True)
    _ignore(folder)
    path = _path(folder, check_id, number)
    dump_trace(trace, path)
    if number == 1:
        for further in _further(folder, check_id):
            if _is_counterexample(further, trace.header.subject):
                further.unlink(missing_ok=True)
    return path


def delete_counterexamples(folder: Path, check_ids: Iterable[str], *, subject: str) -> None:
    """Delete the counterexamples of these checks, and the folder if nothing else is in it.

    Only a trace of a case that ran on ``subject`` is deleted, as ``write_counterexample`` leaves
    it: any other file of that name belongs to the user.
    """
    if not folder.is_dir():
        return
    for check_id in sorted(check_ids):
        for path in (_path(folder, check_id), *_further(folder, check_id)):
            if _is_counterexample(path, subject):
                path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder is not empty
        folder.rmdir()


def _ignore(folder: Path) -> None:
    """Keep ``.rollproof``, if the folder is in it, out of the user's repository."""
    root = next((path for path in (folder, *folder.parents) if path.name == FOLDER), None)
    if root is None or (root / ".gitignore").exists():
        return
    with suppress(OSError):  # it is a convenience: the counterexample counts
        (root / ".gitignore").write_text("# written by rollproof\n*\n", encoding="utf-8")


def _is_counterexample(path: Path, subject: str) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    from rollproof.store import load_trace

    try:
        header = load_trace(path).header
    except (TraceError, UsageError):
        return False
    return header.subject == subject and header.case is not None


def _path(folder: Path, check_id: str, number: int = 1) -> Path:
    return folder / (f"{check_id}.json" if number == 1 else f"{check_id}.{number}.json")


def _further(folder: Path, check_id: str) -> list[Path]:
    """Return the existing counterexamples of a check from the second on."""
    name = re.compile(rf"{re.escape(check_id)}\.\d+\.json")
    return sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
