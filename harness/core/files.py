"""Write text files completely or not at all, try their place before a run, and save the text
elsewhere if that place has become unwritable.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollproof.errors import UsageError

__all__ = [
    "check_folder",
    "check_target",
    "folder_name",
    "is_special",
    "keep_text",
    "locked",
    "module_of",
    "read_toml",
    "replace_file",
    "target_of",
    "text_bytes",
    "write_atomically",
    "write_or_keep",
]


def folder_name(name: str) -> str:
    """Return a folder's name: letters, digits and ``-_.`` stay, anything else becomes ``_``."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


def module_of(file: Path) -> tuple[Path, str]:
    """Return the folder in which Python finds a file as a module, and the module's name there, as
    pytest determines them: folders with ``__init__.py`` are packages.
    """
    folder, names = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def text_bytes(text: str) -> bytes:
    """Encode ``text`` in UTF-8, and a lone surrogate as Python and JSON escape it."""
    # the text of an error may hold undecodable bytes of a file name
    return text.encode("utf-8", "backslashreplace")


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ValueError`` for any fault, also for a nesting or a number that Python
    cannot read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def check_target(path: Path) -> None:
    """Raise ``UsageError`` if no file could be written to ``path``, before a long run. Leaves
    nothing there.
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
    """Raise ``UsageError`` if no files could be written into ``path``, which need not exist, before
    a long run. Leaves nothing there.
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

    Missing folders are made, and a link stays a link. Raises ``UsageError`` if the file cannot be
    written.
    """
    try:
        target = target_of(path)
        if is_special(target):
            # replacing a pipe, a terminal or /dev/stdout would put a file in the place of a device
            target.write_bytes(text_bytes(text))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text_bytes(text))
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock of ``path`` while its content is read, changed and written again: of several
    processes that do so one goes on at a time. Without an effect if the system has no such locks.
    """
    handle = _folder_to_lock(path)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)  # which frees it


def _folder_to_lock(path: Path) -> int | None:
    try:
        import fcntl

        # of the folder: the file is replaced, and with it its lock, and a file for the lock alone
        # would stay behind
        folder = target_of(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None  # what is wrong with the folder is said when the file is written
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def replace_file(target: Path, data: bytes, *, sync: bool = False) -> None:
    """Put a file with ``data`` in the place of ``target``, completely or not at all.

    Args:
        target: a file, or nothing; a link is replaced by a file.
        data: all of the file.
        sync: also a crash of the machine leaves the old file or the new one.

    Raises:
        OSError: it cannot be written; nothing was changed.
    """
    # Next to the target, since only within one file system is replacing atomic. mkstemp opens a
    # name that nobody can guess, and follows no link: others may write into the folder, too.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read; a report is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_or_keep(path: Path, text: str) -> str | None:
    """Write as ``write_atomically`` does. If that fails, call ``keep_text``, and return what
    happened; else ``None``.
    """
    try:
        write_atomically(path, text)
    except UsageError as error:
        return f"{error} {keep_text(text, path.name)}"
    return None


def keep_text(text: str, name: str) -> str:
    """Save ``text`` in the folder for temporary files, in a file called ``name``; return a sentence
    that says where.
    """
    try:
        path = Path(tempfile.mkdtemp(prefix="rollproof-")) / name
        path.write_bytes(text_bytes(text))
    except OSError as error:
        return (
            "It could not be kept in the folder for temporary files either:"
            f" {error.strerror or error}."
        )
    return f"It was kept as {path}."


def target_of(path: Path) -> Path:
    """Follow a link to a file, also to a missing one; links to pipes lead to no name. Raises
    ``OSError``.
    """
    if is_special(path):
        return path
    try:
        target = path.resolve()
    except RuntimeError as error:
        # raised by Python 3.11 and 3.12 for a link that leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    try:
        # later ones return such a link, which a file would then replace
        if stat.S_ISLNK(target.lstat().st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    except FileNotFoundError:
        pass
    return target


def is_special(target: Path) -> bool:
    """Return whether there is something that is neither file nor folder."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _try(folder: Path) -> None:
    """Make and drop a nameless file in ``folder``, or in the nearest of its parents that exists.
    Raises ``OSError``.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        if existing.is_symlink():
            # raises: nothing can be made in the place of a link that leads nowhere, or to itself
            existing.stat()
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    with tempfile.TemporaryFile(dir=existing):
        pass


def _unwritable(path: Path, error: OSError) -> UsageError:
    # EEXIST: there is a file where a folder should be made
    exists = error.errno == errno.EEXIST
    reason = os.strerror(errno.ENOTDIR) if exists else error.strerror or error
    return UsageError(
        f"Cannot write {path}: {reason}. Choose a file in a folder that you may write to."
    )
