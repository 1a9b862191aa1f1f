"""Writing the files that a user starts from."""

from __future__ import annotations

import shlex
from pathlib import Path

from rollproof.core.error_text import describe_error
from rollproof.errors import UsageError

__all__ = ["shell_path", "write_new_file"]


def shell_path(file: Path) -> str:
    """Return the path of a file as a shell takes it."""
    return shlex.quote(file.as_posix())


def write_new_file(file: Path, text: str, *, instead: str) -> None:
    """Write a file that does not exist yet, in a folder that need not exist either.

    ``instead`` is what the error advises for a file that exists. Raises ``UsageError``.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file} exists, and nothing was changed: {instead}.") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {describe_error(error)}.") from None
