"""The batches of an Arrow trace file, each checked against its seal before it is given.

The file is one Arrow IPC stream, read message by message with pyarrow. Each batch is followed by a
batch of one row, its *seal*, with a checksum of the bytes before it.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from rollproof.core.error_text import show
from rollproof.core.trace import SCHEMA
from rollproof.errors import TraceError, TraceVersionError, UsageError
from rollproof.store.codec import newer_schema
from rollproof.store.columns import read_seal, schema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CONTINUATION",
    "END",
    "FORMAT",
    "BatchPlace",
    "Ending",
    "State",
    "Stream",
    "made_by",
    "open_file",
    "schema_message",
]

FORMAT = "rollproof-trace"
"""What both trace forms call themselves."""
CONTINUATION = b"\xff\xff\xff\xff"
"""What every message of an Arrow stream begins with."""
_END_MARK = CONTINUATION + bytes(4)
_TRAILER = b"rollproof closed"
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # Windows has neither the flag nor such pipes
END = _END_MARK + _TRAILER
"""What a closed file ends with. Arrow reads nothing behind its end mark; the text tells the mark
from cut-off payload.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a trace ended: what was read, and whether its writer closed it. ``lost`` are the bytes of
    an unfinished tail.
    """

    episodes: int
    events: int
    closed: bool
    lost: int = 0

    def __str__(self) -> str:
        read = f"{self.events} events in {self.episodes} episodes were read"
        if self.closed:
            return f"{read}."
        tail = (
            f"; {self.lost} bytes of an unfinished batch behind them were left out"
            if self.lost
            else ""
        )
        return (
            f"{read}{tail}. The writer did not close the file: it was killed, or is still at work."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlace:
    """Where a batch is in its file.

    Attributes:
        offset: The byte at which it begins.
        number: How many batches are before it.
    """

    offset: int
    number: int


@dataclass(frozen=True, slots=True)
class State:
    """What a seal says of the file so far: its batches, the number of the last episode (-1: none)
    and of the events in it.
    """

    batches: int = 0
    episode: int = -1
    events: int = 0

    def seal(self, checksum: int) -> str:
        """Return the body of the seal of a batch: a CRC-32 over the bytes of the batch and what the
        seal says, and what it says.

        Args:
            checksum: The CRC-32 of the batch.
        """
        text = f"{self.batches} {self.episode} {self.events}"
        return f"{zlib.crc32(text.encode(), checksum):08x} {text}"

    @classmethod
    def read(cls, body: str, checksum: int) -> State:
        """Read a seal. Raises ``TraceError`` if it does not belong to the batch."""
        try:
            state = cls(*map(int, body.split(" ")[1:]))
        except (ValueError, TypeError):
            state = cls()
        if state.seal(checksum) != body:
            raise TraceError("the checksum of a batch does not match its bytes")
        return state


class _CutError(Exception):
    """The file ends inside a message: its writer was killed, or is still at work."""


class _Source:
    """A file as pyarrow reads it, with a checksum of what was read of the current message."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._file.seek(0)
        self.end: int = os.fstat(file.fileno()).st_size
        self.begin_message()

    def begin_message(self) -> None:
        """Forget what was read."""
        self.checksum: int = 0
        self.cut: bool = False

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes."""
        # a hostile length must not allocate what it claims
        left = max(0, self.end - self._file.tell())
        data = self._file.read(min(size, left))
        self.cut = self.cut or len(data) < size
        self.checksum = zlib.crc32(data, self.checksum)
        return data

    def tell(self) -> int:
        """Return the offset in the file."""
        return self._file.tell()

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Read from somewhere, and stay there."""
        self._file.seek(offset)
        return self._file.read(size)


class Stream:
    """Walks a file.

    ``offset`` is the end of the last sealed batch and ``state`` what its seal says; ``episodes``
    and ``events`` are counted by whoever reads the batches.

    Raises ``TraceError`` if the file is no trace, and ``TraceVersionError`` if it is one of a
    newer schema.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.episodes = self.events = 0
        self.state: State = State()
        self._path = path
        self._source = _Source(file)
        self._closed = False
        self._read_schema()
        self.offset: int = self._source.tell()

    def jump(self, place: BatchPlace) -> None:
        """Go to a batch that an earlier walk came to: ``batches`` yields it next.

        Raises ``TraceError`` if it is behind the end of the file.
        """
        if not 0 <= place.offset <= self._source.end:
            raise TraceError(f"{self._path} has no batch at byte {place.offset}: it has changed.")
        self._source.bytes_at(place.offset, 0)
        self.offset, self.state = place.offset, State(place.number)

    @property
    def ending(self) -> Ending:
        """How the file ended, once ``batches`` is exhausted."""
        lost = 0 if self._closed else self._source.end - self.offset
        return Ending(episodes=self.episodes, events=self.events, closed=self._closed, lost=lost)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield every sealed batch. Ends quietly at an unfinished tail; raises ``TraceError`` at
        damage.
        """
        while (batch := self._sealed_batch()) is not None:
            yield batch
            self.offset = self._source.tell()

    @contextmanager
    def located(self) -> Iterator[None]:
        """Let a ``TraceError`` say in which file and where it is, and how much before it was
        read.
        """
        try:
            yield
        except TraceVersionError as error:
            raise TraceVersionError(f"{self._path}: {error}") from error
        except TraceError as error:
            raise TraceError(
                f"{self._path} is damaged behind byte {self.offset} of {self._source.end}:"
                f" {str(error).rstrip('.')}. The {self.events} events in {self.episodes} episodes"
                " before it were read and are sound."
            ) from error

    def _sealed_batch(self) -> pa.RecordBatch | None:
        """Return the next batch, or ``None`` at the end, or at an unfinished tail of a file that
        was not closed.
        """
        with self.located():
            messages = self._batch_and_seal()
            if messages is None:
                return None
            message, checksum, seal = messages
            body = read_seal(_batch(seal))
            if body is None:
                raise TraceError("a batch is not followed by its seal")
            state = State.read(body, checksum)
            if state.batches != self.state.batches + 1:
                raise TraceError(
                    f"batch {state.batches} follows batch {self.state.batches}: batches were"
                    " removed, duplicated or moved"
                )
            self.state = state
            return _batch(message)

    def _batch_and_seal(self) -> tuple[pa.Message, int, pa.Message] | None:
        """Return the message of a batch with its checksum, and that of its seal."""
        try:
            message = self._message()
            if message is None:
                return None
            checksum = self._source.checksum
            seal = self._message()
            if seal is not None:
                return message, checksum, seal
        except _CutError:
            pass
        self._check_cut()
        return None

    def _check_cut(self) -> None:
        """Accept a file that ends inside a batch, unless it was closed."""
        # a closed file is complete, so that a message that is cut there was changed
        if self._source.bytes_at(max(0, self._source.end - len(END)), len(END)) == END:
            raise TraceError("a batch claims more bytes than there are up to the end mark")

    def _message(self) -> pa.Message | None:
        """Return the next message, or ``None`` at the end of the file."""
        import pyarrow as pa

        start = self._source.tell()
        self._source.begin_message()
        # not pa.ipc.open_stream: it gives batches without their bytes, whose checksum is sealed
        try:
            file = pa.PythonFile(self._source, mode="r")  # type: ignore[arg-type]  # it only reads
            return pa.ipc.read_message(file)
        except EOFError:
            self._check_end(start)
            return None
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            if self._source.cut:
                raise _CutError from error
            raise TraceError(f"there is no Arrow message ({str(error)[:200]})") from error

    def _check_end(self, start: int) -> None:
        """Check what pyarrow takes for the end of a stream: its end mark, zeros, or nothing."""
        found = self._source.bytes_at(start, len(END) + 1)
        if found == END:
            self._closed = True
        elif found.startswith(_END_MARK) and not END.startswith(found):
            raise TraceError("there is an end mark in the middle (were two files joined?)")
        elif found:
            # an unfinished end mark, or zeros: a file system may grow a file before it writes
            raise _CutError

    def _read_schema(self) -> None:
        """Check that the file is a trace that this version reads."""
        import pyarrow as pa

        found: pa.Schema | None = None
        try:
            message = self._message()
            if message is not None and message.type == "schema":
                found = pa.ipc.read_schema(message)
        except _CutError:
            message = None
        except (TraceError, pa.ArrowException, OSError, ValueError) as error:
            raise TraceError(
                f"{self._path} is not a rollproof trace: {str(error)[:200]}."
            ) from error
        if message is None:
            raise TraceError(
                f"{self._path} ends within its first {self._source.end} bytes, before its first"
                " header: nothing can be read."
            )
        if found is None:
            raise TraceError(
                f"{self._path} is not a rollproof trace: its first message is not a schema."
            )
        metadata = found.metadata or {}
        if metadata.get(b"format") != FORMAT.encode():
            raise TraceError(
                f"{self._path} is an Arrow stream, but not a rollproof trace: its schema does not"
                " say so."
            )
        number, made_by = (
            metadata.get(key, b"").decode("ascii", "replace") for key in (b"schema", b"made_by")
        )
        if number != str(SCHEMA):
            # int() refuses more than 4,300 digits with an error of its own
            if number.isdecimal() and len(number) < 10 and int(number) > SCHEMA:
                raise TraceVersionError(f"{self._path}: {newer_schema(int(number), made_by)}")
            raise TraceError(f"{self._path} declares schema {show(number)}, which does not exist.")
        # this leaves the metadata out, which names the release that wrote the file
        if not found.equals(schema()):
            raise TraceError(
                f"{self._path} has other columns than a trace of schema {SCHEMA}: it is damaged, or"
                " no rollproof wrote it."
            )


def _batch(message: pa.Message) -> pa.RecordBatch:
    import pyarrow as pa

    if message.type != "record batch":
        raise TraceError(f"expected a batch and its seal here, not a {message.type}")
    if _is_compressed(message.metadata.to_pybytes()):
        raise TraceError(
            "a batch is compressed: rollproof did not write it, so it is not decompressed"
        )
    try:
        return pa.ipc.read_record_batch(message, schema())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"Arrow cannot read a batch ({str(error)[:200]})") from error


def _is_compressed(metadata: bytes) -> bool:
    """Say whether the body of a batch is compressed.

    pyarrow does not tell before it unfolds a body, to whatever size it claims. So this looks into
    the flatbuffer, which Arrow has verified: ``Message.header`` is field 2 of the root table, and
    ``RecordBatch.compression`` field 3 of the header
    (https://github.com/apache/arrow/blob/main/format/Message.fbs).
    """

    def slot(table: int, field: int) -> int:
        vtable = table - int(struct.unpack_from("<i", metadata, table)[0])
        (size,) = struct.unpack_from("<H", metadata, vtable)
        place = 4 + 2 * field
        return int(struct.unpack_from("<H", metadata, vtable + place)[0]) if place < size else 0

    def target(place: int) -> int:
        return place + int(struct.unpack_from("<I", metadata, place)[0])

    message = target(0)
    header = target(message + slot(message, 2))
    return slot(header, 3) != 0


def schema_message() -> bytes:
    """Return the message that a trace file begins with."""
    marks = {"format": FORMAT, "schema": str(SCHEMA), "made_by": made_by()}
    return bytes(schema().with_metadata(marks).serialize().to_pybytes())


def made_by() -> str:
    """Return the name and version of this rollproof, for readers of a trace."""
    try:
        return f"rollproof {version('rollproof')}"
    except PackageNotFoundError:
        return "rollproof"


def open_file(path: Path, mode: Literal["r", "x", "w", "a"]) -> BinaryIO:
    """Open a trace; for writing, take its lock first.

    Raises:
        UsageError: the path is wrong.
        TraceError: the file cannot be opened, or has another writer.
    """
    try:
        if mode == "r":
            return _opened(path)
        file = path.open("xb" if mode == "x" else "r+b" if path.exists() else "x+b")
    except FileNotFoundError:
        missing = "There is no trace" if mode == "r" else "There is no folder for a trace"
        raise UsageError(f"{missing} at {path}: check the path.") from None
    except FileExistsError:
        raise UsageError(
            f"{path} exists: pass mode='a' to append to it, mode='w' to overwrite it, or another"
            " path."
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder: name the trace file in it.") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be opened: {error.strerror}.") from error
    if not _lock(file):
        file.close()
        raise TraceError(
            f"{path} is being written by another process: a trace has one writer at a time. Write"
            " to a file of your own."
        )
    # not before the lock: another writer's trace would be lost
    if mode == "w":
        file.truncate(0)
    return file


def _opened(path: Path) -> BinaryIO:
    """Open a file to read it. Raises ``OSError``, and ``TraceError`` for a pipe or a device."""
    # opening a pipe to which nobody writes waits for a writer, and so may reading a device
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _NO_WAIT)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError
    raise TraceError(f"{path} is a pipe or a device: copy what it holds into a file first.")


def _lock(file: BinaryIO) -> bool:
    """Take the file for this process until it is closed; true also if the system has no such
    locks.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        # the system frees it when the process ends, in whatever way
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks
        return True
    return True
