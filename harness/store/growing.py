"""Reading of a trace that is still written: each look yields what was sealed since the last one."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.store.arrow_format import read_batch
from rollproof.store.json_format import JsonTrace
from rollproof.store.stream import CONTINUATION, BatchPlace, Ending, Stream, open_file

__all__ = ["GrowingTrace"]

_PREFIX = 8
"""Bytes before the schema of an Arrow stream: the mark of a message, and its length."""


class GrowingTrace:
    """A trace file whose writer is at work. Memory holds one batch.

    ending: How the file ends as of now; ``None`` before the first batch.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self.ending: Ending | None = None
        self._place: BatchPlace | None = None
        self._episodes = self._events = 0

    @property
    def closed(self) -> bool:
        """Whether the writer closed the file: nothing will follow."""
        return self.ending is not None and self.ending.closed

    def news(self) -> Iterator[Header | Event]:
        """Yield the headers and events that are new. Take all of them before the next look.

        Raises:
            UsageError: The file is gone.
            TraceError: It is damaged, is no trace, or became shorter.
        """
        if self.closed:
            return
        with open_file(self.path, "r") as file:
            start = file.read(_PREFIX)
            size = os.fstat(file.fileno()).st_size
            if self._place is not None and size < self._place.offset:
                raise TraceError(
                    f"{self.path} became shorter while it was followed: it was overwritten."
                )
            if start.lstrip()[:1] == b"{":
                # a JSON trace appears complete, or not at all
                yield from self._json()
                return
            if not self._begun(start, size):
                return
            stream = Stream(self.path, file)
            stream.episodes, stream.events = self._episodes, self._events
            if self._place is not None:
                stream.jump(self._place)
            for batch in stream.batches():
                yield from read_batch(stream, batch)
            self._place = BatchPlace(offset=stream.offset, number=stream.state.batches)
            self._episodes, self._events = stream.episodes, stream.events
            self.ending = stream.ending

    def _begun(self, start: bytes, size: int) -> bool:
        """Return whether the schema is complete. What is no trace counts as begun: reading it says
        what it is.
        """
        if not CONTINUATION.startswith(start[: len(CONTINUATION)]):
            return True
        if len(start) < _PREFIX:
            return False
        return size >= _PREFIX + int(struct.unpack_from("<i", start, len(CONTINUATION))[0])

    def _json(self) -> Iterator[Header | Event]:
        trace = JsonTrace(self.path)
        for header, events in trace.episodes():
            yield header
            yield from events
        self.ending = trace.ending
