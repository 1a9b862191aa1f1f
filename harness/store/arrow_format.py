"""Traces of any length in one Arrow file, appended to as they happen and read as a stream.

Any Arrow library reads the file. A killed writer leaves an unsealed tail
(``rollproof.store.stream``), which is told apart from damage: every sealed batch is read, and
``ending`` says how many bytes were lost. Appending cuts that tail off and goes on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rollproof.core.events.base import Event
from rollproof.core.trace import Header, Trace
from rollproof.errors import TraceError, UsageError
from rollproof.store.columns import Rows, read_rows
from rollproof.store.stream import (
    END,
    BatchPlace,
    Ending,
    State,
    Stream,
    open_file,
    schema_message,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TraceReader", "TraceWriter", "read_batch"]

# about what a kill may lose, and what a reader holds in memory
BATCH_BYTES = 4 << 20
BATCH_EVENTS = 256


class TraceWriter:
    """Writes episodes to a file; a ``TraceSink``.

    Args:
        path: The file. It has one writer at a time.
        header: Begins an episode. Appending without it continues the last episode.
        mode: ``"x"`` (a new file), ``"w"`` (overwrite) or ``"a"`` (append, or a new file).
        batch_bytes: Size at which a batch is flushed. What was flushed survives the process.
        batch_events: Number of events at which a batch is flushed.
        trusted: Whether rollproof itself makes the events. They are then not checked again, which
            takes twice as long as writing them.

    Raises:
        UsageError: The path or the mode is wrong.
        TraceError: The file is no trace, is damaged, locked, or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header | None = None,
        *,
        mode: Literal["x", "w", "a"] = "x",
        batch_bytes: int = BATCH_BYTES,
        batch_events: int = BATCH_EVENTS,
        trusted: bool = False,
    ) -> None:
        self.path: Path = Path(path)
        self._batch_bytes = batch_bytes
        self._batch_events = batch_events
        self._rows = Rows(trusted=trusted)
        self._file = open_file(self.path, mode)
        try:
            state = self._prepare()
            self._batches, self._episode, self._events = state.batches, state.episode, state.events
            self._begin(header)
        except BaseException:
            self._file.close()
            raise

    @property
    def episodes(self) -> int:
        """Episodes in the file, the current one included."""
        return self._episode + 1

    @property
    def events(self) -> int:
        """Events of the current episode."""
        return self._events

    def start(self, header: Header) -> None:
        """Begin a new episode. Raises ``TraceError`` for a header that cannot be stored."""
        self._ready()
        self._rows.add_header(self._episode + 1, header)
        self._episode, self._events = self._episode + 1, 0

    def append(self, event: Event) -> None:
        """Take one event of the current episode. Raises ``TraceError`` for one that cannot be
        stored; the file stays readable.
        """
        self._ready()
        self._rows.add_event(self._episode, event)
        self._events += 1
        if self._rows.size >= self._batch_bytes or len(self._rows) >= self._batch_events:
            self.flush()

    def write(self, trace: Trace) -> None:
        """Write a trace as one episode."""
        self.start(trace.header)
        for event in trace.events:
            self.append(event)

    def flush(self) -> None:
        """Pass what was taken so far to the operating system: a killed process does not lose it."""
        self._ready()
        if not len(self._rows):
            return
        self._batches += 1
        batch = self._rows.message()
        state = State(self._batches, self._episode, self._events)
        self._rows.add_seal(state.seal(zlib.crc32(batch)))
        self._put(batch, self._rows.message())

    def close(self) -> None:
        """Flush, mark the end, and close. Closing twice is harmless."""
        if self._file.closed:
            return
        try:
            self.flush()
            self._put(END)
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self) -> State:
        """Verify the batches of the file, and cut it after the last sealed one."""
        self._end = 0
        if self._file.seek(0, os.SEEK_END) == 0:
            self._put(schema_message())
            return State()
        stream = Stream(self.path, self._file)
        for _ in stream.batches():
            pass
        self._end = stream.offset
        # a killed writer may have left an unfinished batch
        self._file.truncate(self._end)
        return stream.state

    def _begin(self, header: Header | None) -> None:
        if header is not None:
            self.start(header)
            self.flush()
        elif self._episode < 0:
            raise UsageError(f"{self.path} holds no episode to continue: give a header.")

    def _ready(self) -> None:
        if self._file.closed:
            raise UsageError(f"{self.path} is closed: open it again with mode='a' to append.")

    def _put(self, *chunks: bytes | memoryview) -> None:
        try:
            # a write that failed may have moved the position
            self._file.seek(self._end)
            for chunk in chunks:
                self._file.write(chunk)
            self._file.flush()
            self._end = self._file.tell()
        except OSError as error:
            # closing tries to write what is left, and fails again
            with suppress(OSError):
                self._file.close()
            raise TraceError(
                f"{self.path} could not be written: {error}. What was flushed before is readable."
            ) from error


class TraceReader:
    """Reads a file of episodes as a stream: memory holds one batch. Each iteration starts again.

    Attributes:
        header: The header of the first episode.
        sealed: The form has checksums of its own.
        ending: How the file ended; set when an iteration has come to the end.
        offset: The bytes of the file before the batch that an iteration is at.

    Raises:
        UsageError: There is no file.
        TraceVersionError: A newer rollproof wrote the trace.
        TraceError: The file is no trace, or ends before its first header. The iteration raises it
            at damage, after everything before it was read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self.sealed: bool = True
        self.offset: int = 0
        self.ending: Ending | None = None
        rows = self._rows()
        first = next(rows, None)
        rows.close()
        if first is None:
            raise TraceError(
                f"{self.path} ends before its first header: its writer was killed before it had"
                " begun. Nothing can be read."
            )
        if not isinstance(first, Header):
            raise TraceError(f"{self.path} does not begin with a header: it is incomplete.")
        self.header = first
        self.ending = None

    def __iter__(self) -> Iterator[Event]:
        """The events of all episodes, one after the other."""
        for _, events in self.episodes():
            yield from events

    def episodes(self) -> Iterator[tuple[Header, Iterator[Event]]]:
        """Each episode's header and events. Take the events before the next episode: what is left
        of them is skipped.
        """
        rows = self._rows()
        ahead: list[Header | Event] = list(islice(rows, 1))

        def events() -> Iterator[Event]:
            for row in rows:
                if isinstance(row, Header):
                    ahead.append(row)
                    return
                yield row

        while ahead:
            header = ahead.pop()
            if not isinstance(header, Header):
                raise TraceError(f"{self.path} does not begin with a header: it is incomplete.")
            own = events()
            yield header, own
            for _ in own:
                pass

    def placed(self) -> Iterator[tuple[BatchPlace, Iterator[Header | Event]]]:
        """Yield the place of each batch, and its rows: take these before the next batch."""
        self.ending = None
        with open_file(self.path, "r") as file:
            stream = Stream(self.path, file)
            for batch in stream.batches():
                place = BatchPlace(offset=stream.offset, number=stream.state.batches - 1)
                self.offset = place.offset
                yield place, read_batch(stream, batch)
            self.ending = stream.ending

    def batches_at(
        self, places: Iterable[BatchPlace]
    ) -> Iterator[list[tuple[int, Header | Event]]]:
        """Yield the rows of some batches, each with the number of its episode.

        Raises ``TraceError`` if a batch is not where it was, or is damaged.
        """
        with open_file(self.path, "r") as file:
            stream = Stream(self.path, file)
            for place in places:
                stream.jump(place)
                batch = next(stream.batches(), None)
                if batch is None:
                    raise TraceError(
                        f"{self.path} has no batch at byte {place.offset}: it has changed."
                    )
                episodes: list[Any] = batch.column(0).to_pylist()
                rows: list[tuple[int, Header | Event]] = list(
                    zip(episodes, read_batch(stream, batch), strict=True)
                )
                yield rows

    def _rows(self) -> Generator[Header | Event]:
        for _, rows in self.placed():
            yield from rows


def read_batch(stream: Stream, batch: pa.RecordBatch) -> Iterator[Header | Event]:
    """Yield the rows of a batch, and count them."""
    rows = read_rows(batch)
    while True:
        with stream.located():
            row = next(rows, None)
        if row is None:
            return
        stream.episodes += isinstance(row, Header)
        stream.events += not isinstance(row, Header)
        yield row
