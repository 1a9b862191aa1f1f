"""Counterexamples: shrunk traces on disk, one file per failing check, for ``rollproof replay``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollproof.core.trace import Trace
from rollproof.errors import TraceError, UsageError

__all__ = ["delete_counterexamples", "write_counterexample"]


def write_counterexample(folder: Path, check_id: str, trace: Trace) -> Path:
    """Write the counterexample of a check into ``folder`` and return the file.

    The folder is made if need be. Raises ``TraceError``.
    """
    from rollproof.store import dump_trace

    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, check_id)
    dump_trace(trace, path)
    return path


def delete_counterexamples(folder: Path, check_ids: Iterable[str], *, subject: str) -> None:
    """Delete the counterexamples of these checks, and the folder if nothing else is in it.

    Only a trace of a case that ran on ``subject`` is deleted, as ``write_counterexample`` leaves
    it: any other file of that name belongs to the user.
    """
    if not folder.is_dir():
        return
    for path in (_path(folder, check_id) for check_id in sorted(check_ids)):
        if _is_counterexample(path, subject):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder is not empty
        folder.rmdir()


def _is_counterexample(path: Path, subject: str) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    from rollproof.store import load_trace

    try:
        header = load_trace(path).header
    except (TraceError, UsageError):
        return False
    return header.subject == subject and header.case is not None


def _path(folder: Path, check_id: str) -> Path:
    return folder / f"{check_id}.json"
