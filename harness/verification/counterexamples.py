"""Witnesses: the shrunk counterexamples of a subject, one file a failing check, kept for
``rollproof replay``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollproof.core.trace import Trace
from rollproof.errors import TraceError, UsageError

__all__ = ["drop_witnesses", "write_witness"]


def write_witness(folder: Path, check_id: str, trace: Trace) -> Path:
    """Write the counterexample of a check into ``folder``, which is made if need be; returns the
    file. Raises ``TraceError``.
    """
    from rollproof.store import dump_trace

    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, check_id)
    dump_trace(trace, path)
    return path


def drop_witnesses(folder: Path, check_ids: Iterable[str], *, subject: str) -> None:
    """Delete the counterexamples of these checks, and the folder where nothing else is in it.

    A file is only deleted where it is a trace of a case run on ``subject``, as ``write_witness``
    leaves it: whatever else stands under that name is somebody's own.
    """
    if not folder.is_dir():
        return
    for path in (_path(folder, check_id) for check_id in sorted(check_ids)):
        if _is_witness(path, subject):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty
        folder.rmdir()


def _is_witness(path: Path, subject: str) -> bool:
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
