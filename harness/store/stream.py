"""Stream: the sealed batches of a trace file, one after the other, each checked before it is given."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from rollproof.core.trace import SCHEMA
from rollproof.errors import TraceError, TraceVersionError, UsageError
from rollproof.store.codec import newer_schema
from rollproof.store.columns import read_seal, schema
from rollproof.store.frames import END, Cut, Frame, read_frame
from rollproof.store.values import show

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMAT", "Ending", "State", "Stream", "made_by", "open_file", "schema_frame"]

FORMAT = "rollproof-trace"
"""What both trace forms call themselves."""
_MAX_SEAL = 1 << 14


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


@dataclass(frozen=True, slots=True)
class State:
    """What a seal says of the file so far: its batches, the number of the last episode (-1: none)
    and of the events in it.
    """

    batches: int = 0
    episode: int = -1
    events: int = 0

    def seal(self, frame: bytes | memoryview) -> str:
        """The body of the seal behind ``frame``: a CRC-32 over the frame and what the seal says,
        and what it says.
        """
        text = f"{self.batches} {self.episode} {self.events}"
        return f"{zlib.crc32(text.encode(), zlib.crc32(frame)):08x} {text}"

    @classmethod
    def read(cls, body: str, frame: bytes) -> State:
        """Raises ``TraceError`` where the seal does not belong to ``frame``."""
        try:
            state = cls(*map(int, body.split(" ")[1:]))
        except (ValueError, TypeError):
            state = cls()
        if state.seal(frame) != body:
            raise TraceError("the checksum of a batch does not match its bytes")
        return state


class Stream:
    """Walks a file. ``offset`` is the end of the last sealed batch; ``episodes`` and ``events``
    count what the reader gave on.

    Raises ``TraceError`` where the file is no trace, and ``TraceVersionError`` where it is one of a
    newer schema.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.episodes = self.events = 0
        self._path = path
        self._file = file
        self._end = os.fstat(file.fileno()).st_size
        self._closed = False
        self.offset: int = self._read_schema()

    @property
    def ending(self) -> Ending:
        """How the file ended, once ``batches`` is exhausted."""
        lost = 0 if self._closed else self._end - self.offset
        return Ending(episodes=self.episodes, events=self.events, closed=self._closed, lost=lost)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every sealed batch. Ends quietly at an unfinished tail; raises ``TraceError`` at damage."""
        number = 0
        while (pair := self._pair()) is not None:
            number += 1
            with self.located():
                batch = self._numbered(pair, number)
            yield batch
            self.offset = pair[1].offset + pair[1].size

    def last_state(self) -> State:
        """Hop over the batches; the state after the last sealed one. Raises as ``batches``."""
        last = None
        while (pair := self._pair()) is not None:
            last = pair
            self.offset = pair[1].offset + pair[1].size
        if last is None:
            return State()
        with self.located():
            return self._checked(*last)[1]

    @contextmanager
    def located(self) -> Iterator[None]:
        """Within, a ``TraceError`` says in which file and where it is, and how much before it was
        read.
        """
        try:
            yield
        except TraceVersionError as error:
            raise TraceVersionError(f"{self._path}: {error}") from error
        except TraceError as error:
            raise TraceError(
                f"{self._path} is damaged behind byte {self.offset} of {self._end}:"
                f" {str(error).rstrip('.')}. The {self.events} events in {self.episodes} episodes"
                " before it were read and are sound."
            ) from error

    def _pair(self) -> tuple[Frame, Frame] | None:
        """The next batch and its seal; ``None`` at the end, or at an unfinished tail of a file that
        was not closed.
        """
        with self.located():
            try:
                return self._frames()
            except Cut:
                if ends_closed(self._file, self._end):
                    raise TraceError(
                        "a batch claims more bytes than there are up to the end mark"
                    ) from None
                return None

    def _frames(self) -> tuple[Frame, Frame] | None:
        frame = read_frame(self._file, self.offset, self._end)
        if frame is None:
            self._closed = self.offset < self._end
            return None
        seal = read_frame(self._file, frame.offset + frame.size, self._end)
        if seal is None:
            raise Cut
        if frame.schema or seal.schema or seal.size > _MAX_SEAL:
            raise TraceError("a batch and its seal should stand here")
        return frame, seal

    def _checked(self, frame: Frame, seal: Frame) -> tuple[bytes, State]:
        data = self._bytes(frame)
        body = read_seal(_batch(self._bytes(seal)))
        if body is None:
            raise TraceError("a batch is not followed by its seal")
        return data, State.read(body, data)

    def _numbered(self, pair: tuple[Frame, Frame], number: int) -> pa.RecordBatch:
        data, state = self._checked(*pair)
        if state.batches != number:
            raise TraceError(
                f"batch {state.batches} stands where batch {number} should: batches were cut out,"
                " doubled or moved"
            )
        return _batch(data)

    def _bytes(self, frame: Frame) -> bytes:
        self._file.seek(frame.offset)
        data = self._file.read(frame.size)
        if len(data) < frame.size:
            raise TraceError("the file became shorter while it was read")
        return data

    def _read_schema(self) -> int:
        """Check that the file is a trace that this version reads; the end of its schema."""
        import pyarrow as pa

        frame, found = None, None
        try:
            frame = read_frame(self._file, 0, self._end)
            found = (
                pa.ipc.read_schema(pa.py_buffer(self._bytes(frame)))
                if frame is not None and frame.schema
                else None
            )
        except Cut:
            frame = None
        except (TraceError, pa.ArrowException, OSError, ValueError) as error:
            raise TraceError(
                f"{self._path} is not a rollproof trace: {str(error)[:200]}."
            ) from error
        if frame is None:
            raise TraceError(
                f"{self._path} ends within its first {self._end} bytes, before its first header:"
                " nothing can be read."
            )
        if found is None:
            raise TraceError(
                f"{self._path} is not a rollproof trace: its first message is no schema."
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
            if number.isdecimal() and len(number) < 10 and int(number) > SCHEMA:
                raise TraceVersionError(f"{self._path}: {newer_schema(int(number), made_by)}")
            raise TraceError(
                f"{self._path} says that it has schema {show(number)}, which never was."
            )
        if not found.equals(schema()):
            raise TraceError(
                f"{self._path} has other columns than a trace of schema {SCHEMA}: it is damaged, or"
                " no rollproof wrote it."
            )
        return frame.size


def schema_frame() -> bytes:
    """The message that a trace file begins with."""
    marks = {"format": FORMAT, "schema": str(SCHEMA), "made_by": made_by()}
    return bytes(schema().with_metadata(marks).serialize().to_pybytes())


def made_by() -> str:
    """Name and version of this rollproof, for readers of a trace."""
    try:
        return f"rollproof {version('rollproof')}"
    except PackageNotFoundError:
        return "rollproof"


def ends_closed(file: BinaryIO, end: int) -> bool:
    """Whether a file of ``end`` bytes was closed by its writer."""
    file.seek(max(0, end - len(END)))
    return file.read(len(END)) == END


def open_file(path: Path, mode: Literal["r", "x", "w", "a"]) -> BinaryIO:
    """Open a trace; for writing, take its lock first. Raises ``UsageError`` on wrong paths,
    ``TraceError`` on all other failures.
    """
    try:
        if mode == "r":
            return path.open("rb")
        file = path.open("xb" if mode == "x" else "r+b" if path.exists() else "x+b")
    except FileNotFoundError:
        what = "There is no trace" if mode == "r" else "There is no folder for a trace"
        raise UsageError(f"{what} at {path}: check the path.") from None
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
    if mode == "w":
        file.truncate(0)
    return file


def _lock(file: BinaryIO) -> bool:
    """Take the file for this process until it is closed; true also where the system has no such
    locks.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _batch(frame: bytes) -> pa.RecordBatch:
    import pyarrow as pa

    try:
        return pa.ipc.read_record_batch(pa.py_buffer(frame), schema())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"Arrow cannot read a batch ({str(error)[:200]})") from error
