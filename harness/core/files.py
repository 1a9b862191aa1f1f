"""Files: text that is written whole or not at all, tried before a run, and kept elsewhere where its
place broke meanwhile.
"""

from __future__ import annotations

import errno
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from rollproof.errors import UsageError

__all__ = [
    "check_folder",
    "check_target",
    "folder_name",
    "is_special",
    "keep_text",
    "read_toml",
    "target_of",
    "text_bytes",
    "write_atomically",
    "write_or_keep",
]


def folder_name(name: str) -> str:
    """``name`` as the name of a folder: letters, digits, ``-_.`` stay, anything else becomes ``_``."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


def text_bytes(text: str) -> bytes:
    """``text`` in UTF-8; a lone surrogate, which an error's text may hold, as the escape that
    Python and JSON write for it.
    """
    return text.encode("utf-8", "backslashreplace")


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML file says. Raises ``ValueError`` whatever is wrong with it, also a nesting or a
    number that Python cannot read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def check_target(path: Path) -> None:
    """Try, before a long run, whether a file could be written to ``path``. Raises ``UsageError``;
    nothing is left there.
    """
    try:
        target = target_of(path)
        if target.is_dir():
            raise UsageError(f"Cannot write {path}: it is a folder. Name a file in it.")
        if not is_special(target):
            _try(target.parent)
        elif not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error


def check_folder(path: Path) -> None:
    """Try, before a long run, whether files could be written into ``path``, made if need be. Raises
    ``UsageError``; leaves nothing.
    """
    try:
        _try(path)
    except OSError as error:
        raise UsageError(
            f"Cannot write into {path}: {error.strerror or error}. Choose a folder that you may"
            " write to."
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) so that a reader, or a killed run, sees the old content or the new,
    never a part.

    Missing folders are made, and a link stays one. What is no ordinary file (a pipe, a terminal,
    ``/dev/stdout``) is written to as it is: replacing it would put a file in the place of a device.
    Raises ``UsageError`` where the place cannot be written to.
    """
    try:
        target = target_of(path)
        if is_special(target):
            target.write_bytes(text_bytes(text))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text_bytes(text))
        # mkstemp makes files that only their owner may read; a report is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def write_or_keep(path: Path, text: str) -> str | None:
    """Write as ``write_atomically`` does. Where that fails, ``keep_text``, and return what
    happened; ``None`` where all is well.
    """
    try:
        write_atomically(path, text)
    except UsageError as error:
        return f"{error} {keep_text(text, path.name)}"
    return None


def keep_text(text: str, name: str) -> str:
    """Keep ``text`` in the folder for temporary files, in a file called ``name``; returns a
    sentence that says where.
    """
    try:
        kept = Path(tempfile.mkdtemp(prefix="rollproof-")) / name
        kept.write_bytes(text_bytes(text))
    except OSError as error:
        return (
            "It could not be kept in the folder for temporary files either:"
            f" {error.strerror or error}."
        )
    return f"It was kept as {kept}."


def target_of(path: Path) -> Path:
    """Where a link to a file leads, also one into nothing; links to pipes lead to no name. Raises
    ``OSError``.
    """
    try:
        return path if is_special(path) else path.resolve()
    except RuntimeError as error:  # how Python 3.11 and 3.12 tell a link that leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error


def is_special(target: Path) -> bool:
    """Whether something stands there that is neither file nor folder."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _try(folder: Path) -> None:
    """Make and drop a nameless file in ``folder``, or in the nearest of its parents that exists.
    Raises ``OSError``.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    with tempfile.TemporaryFile(dir=place):
        pass


def _unwritable(path: Path, error: OSError) -> UsageError:
    in_the_way = error.errno == errno.EEXIST  # a file where a folder was to be made
    why = os.strerror(errno.ENOTDIR) if in_the_way else error.strerror or error
    return UsageError(
        f"Cannot write {path}: {why}. Choose a file in a folder that you may write to."
    )
