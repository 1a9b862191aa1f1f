"""Files: text that is either written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rollproof.errors import UsageError

__all__ = ["folder_name", "write_atomically"]


def folder_name(name: str) -> str:
    """``name`` as the name of a folder: letters, digits, ``-_.`` stay, anything else becomes ``_``."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) so that a reader, or a killed run, sees the old content or the new, never a part.

    Missing folders are made. Raises ``UsageError`` where the place cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror or error}. Choose a file in a folder that you may write to.") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes files that only their owner may read; a report is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"Cannot write {path}: {error.strerror or error}. Choose a file in a folder that you may write to.") from error
