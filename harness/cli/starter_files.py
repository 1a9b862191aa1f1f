"""Writing the files that a user starts from."""

from __future__ import annotations

import shlex
from pathlib import Path

from rollproof.core.files import check_folder, text_bytes
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
        check_folder(file.parent)
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("xb")
        try:
            with stream:
                stream.write(text_bytes(text))
        except OSError:
            # a part of it would be in the way of the next try
            file.unlink()
            raise
    except FileExistsError:
        raise UsageError(f"{file} exists, and nothing was changed: {instead}.") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}.") from None
