"""A trace of any length in a folder, in parts that are judged one by one.

Each part (``NAME.0001.arrow``, ``NAME.0002.arrow``, ...) is a whole trace: all events of a request
are in the part that was written when it was submitted, and what happens to a server is in every
part that is open. A part is sealed when the last of its requests has ended.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Call,
    Observation,
    Pause,
    Result,
    Resume,
    Submit,
    Unrecorded,
    Weights,
)
from rollproof.core.files import folder_name
from rollproof.core.trace import Header
from rollproof.errors import TraceError, UsageError
from rollproof.store.arrow_format import TraceWriter

__all__ = ["PartLimits", "TraceParts"]

_MAX_OPEN = 4
"""Parts that wait for their requests, the current one among them."""
_MAX_CALLS = 1 << 17
"""Calls without a reply that are remembered; older ones belong to the current part."""
_CUT = "its part of the trace was closed before it ended: it lasted longer than several parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLimits:
    """When a new part begins, and when nothing more is written.

    Attributes:
        part_bytes: The size of a part at which the next one begins.
        part_seconds: The age of a part at which the next one begins.
        total_bytes: The size of all parts at which recording ends; ``None``: no limit.
    """

    part_bytes: int = 1 << 30
    part_seconds: float = 3600.0
    total_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("part_bytes", "part_seconds", "total_bytes"):
            value: object = getattr(self, name)
            if value is None and name == "total_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UsageError(f"{name}={value!r} must be a number above 0.")


@dataclass(slots=True, eq=False)
class _Part:
    writer: TraceWriter
    began: float
    count: int = 0
    own: int = 0
    open: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _ServerState:
    """What a new part has to begin with, so that it can be judged alone."""

    weights: Weights | None = None
    pause: Pause | None = None


class TraceParts:
    """Appends events to the parts of one trace. Not thread-safe.

    Args:
        folder: Where the parts are; it is created.
        name: What their names begin with.
        header: The header of each part.
        limits: When a new part begins.
        clock: Seconds, for the age of a part.

    Attributes:
        events: Events that were written; one that is in several parts counts once.
        bytes: Bytes of all parts, as far as they were flushed.
        lost: Events that were not written, because the limit of all parts was reached.
        paths: The files, in order.

    Raises:
        UsageError: There are parts of that name already, or the folder cannot be made.
        TraceError: A file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        header: Header,
        limits: PartLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._name, self._header = folder, folder_name(name), header
        self._limits = limits or PartLimits()
        self._clock = clock
        self._is_full = False
        self._parts: list[_Part] = []
        self._sealed_bytes = 0
        self._requests: dict[str, _Part] = {}
        self._calls: OrderedDict[int, tuple[_Part, ...]] = OrderedDict()
        self._servers: dict[str, _ServerState] = {}
        self.events: int = 0
        self.lost: int = 0
        self.paths: list[Path] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"The trace folder {folder} cannot be made: {error.strerror or error}."
            ) from error
        found = sorted(folder.glob(f"{self._name}.[0-9]*.arrow"))
        if found:
            raise UsageError(
                f"{found[0]} exists: a trace that exists is never continued or overwritten. Name"
                " another folder, or give this trace another name."
            )
        self._begin()

    @property
    def bytes(self) -> int:
        return self._sealed_bytes + sum(_size(part) for part in self._parts)

    def append(self, event: Event) -> None:
        """Write one event, whose time is set; its index is that in its part.

        Raises:
            TraceError: The file cannot be written, or no trace can hold the event.
        """
        parts = list(self._places(event))
        if not parts:
            self.lost += 1
            return
        self.events += 1
        for part in parts:
            object.__setattr__(event, "index", part.count)
            part.writer.append(event if len(parts) == 1 else replace(event))
            part.count += 1
            part.own += 1
        self._note(event, parts)
        # no other event leaves an older part without an open request
        if isinstance(event, Result):
            self._end_parts()

    def flush(self) -> None:
        """Pass what was taken to the operating system, and begin a new part if it is time."""
        if not self._parts:
            return
        for part in self._parts:
            part.writer.flush()
        limit = self._limits.total_bytes
        self._is_full = limit is not None and self.bytes > limit
        current = self._parts[-1]
        old = self._clock() - current.began > self._limits.part_seconds
        # one that holds nothing but what it began with goes on
        if current.own and (old or _size(current) > self._limits.part_bytes):
            self._begin()
            self._end_parts()

    def close(self) -> None:
        """Seal every part. Closing twice is harmless."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.writer.close()
            self._sealed_bytes += _size(part)

    def _begin(self) -> None:
        number = len(self.paths) + 1
        path = self._folder / f"{self._name}.{number:04d}.arrow"
        part = _Part(TraceWriter(path, self._header, trusted=True), self._clock())
        self.paths.append(path)
        self._parts.append(part)
        for state in self._servers.values():
            for event in (state.weights, state.pause):
                if event is not None:
                    part.writer.append(replace(event, index=part.count))
                    part.count += 1

    def _end_parts(self) -> None:
        """Seal parts that nobody waits for, and the oldest one if too many wait."""
        while len(self._parts) > _MAX_OPEN:
            self._cut(self._parts[0])
        for part in [part for part in self._parts[:-1] if not part.open]:
            part.writer.close()
            self._sealed_bytes += _size(part)
            self._parts.remove(part)

    def _cut(self, part: _Part) -> None:
        for request_id in part.open:
            del self._requests[request_id]
            event = Unrecorded(reason=_CUT, request_id=request_id, index=part.count)
            part.writer.append(event)
            part.count += 1
        part.open.clear()
        part.writer.close()
        self._sealed_bytes += _size(part)
        self._parts.remove(part)

    def _places(self, event: Event) -> Iterator[_Part]:
        """Yield the parts that an event belongs to; none if there is no room."""
        if not self._parts or self._is_full:
            return
        requests: tuple[str, ...] = ()
        parts: list[_Part] = []
        if isinstance(event, Call):
            requests = (event.request_id, *event.candidates)
        elif isinstance(event, Observation | Result | Unrecorded):
            requests = (event.request_id,)
        call_id: int | None = getattr(event, "call_id", None)
        if isinstance(event, Call | Observation | Result | Submit):
            parts = [self._requests[name] for name in requests if name in self._requests]
        elif call_id is not None:
            parts = [part for part in self._calls.get(call_id, ()) if part in self._parts]
        elif isinstance(event, Unrecorded) and event.request_id in self._requests:
            parts = [self._requests[event.request_id]]
        elif not isinstance(event, Unrecorded) or not event.request_id:
            parts = self._parts
        seen: list[_Part] = []
        for part in parts or self._parts[-1:]:
            if part not in seen:
                seen.append(part)
                yield part

    def _note(self, event: Event, parts: Sequence[_Part]) -> None:
        part = parts[-1]
        if isinstance(event, Submit):
            part.open.add(event.request.request_id)
            self._requests[event.request.request_id] = part
        elif isinstance(event, Result):
            part.open.discard(event.request_id)
            self._requests.pop(event.request_id, None)
        elif isinstance(event, Call):
            self._calls[event.call_id] = tuple(parts)
            if len(self._calls) > _MAX_CALLS:
                self._calls.popitem(last=False)
        elif isinstance(event, Weights):
            self._server(event.server_id).weights = event
        elif isinstance(event, Pause):
            self._server(event.server_id).pause = event
        elif isinstance(event, Resume):
            self._server(event.server_id).pause = None

    def _server(self, server_id: str) -> _ServerState:
        return self._servers.setdefault(server_id, _ServerState())


def _size(part: _Part) -> int:
    try:
        return part.writer.path.stat().st_size
    except OSError as error:
        raise TraceError(f"{part.writer.path} has vanished: {error.strerror}.") from error
