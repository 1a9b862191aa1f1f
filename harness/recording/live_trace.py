"""What a recorder of a live run writes: events in parts, sampled, redacted and counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Call,
    Chunk,
    Fault,
    Observation,
    Reply,
    Result,
    Submit,
    Unrecorded,
)
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.recording.redaction import DROPPED_TOKENS, Redaction, RequestSample
from rollproof.store.parts import PartLimits, TraceParts

__all__ = ["Counts", "LiveTrace", "WallClock"]

_E = TypeVar("_E", bound=Event)
_FULL = "the trace had reached its largest size, or its disk was full"


class WallClock:
    """Unix time that never goes back, whatever is done to the clock of the machine."""

    def __init__(self) -> None:
        # read once: NTP or a person may set the time of day, and nothing sets the monotonic clock
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset


@dataclass(slots=True)
class Counts:
    """What a recording has, and what it lacks.

    Attributes:
        events: Events in the trace.
        requests: Requests in the trace.
        calls: Engine calls in the trace.
        samples: Samples that were delivered.
        left_out: Requests and calls that the sampling rate left out.
        dropped: Events for which the queue, the size of the trace or the disk had no room.
        unreadable: Calls and reports that the recorder could not read.
        failure: Why nothing more is written; ``""`` if that has not happened.
        first_trouble: The first thing that could not be recorded.
    """

    events: int = 0
    requests: int = 0
    calls: int = 0
    samples: int = 0
    left_out: int = 0
    dropped: int = 0
    unreadable: int = 0
    failure: str = ""
    first_trouble: str = ""

    def __str__(self) -> str:
        counted = ("event", "request", "call", "sample")
        numbers = (self.events, self.requests, self.calls, self.samples)
        text = ", ".join(
            f"{number:,} {noun}{'' if number == 1 else 's'}"
            for number, noun in zip(numbers, counted, strict=True)
        )
        if self.left_out:
            text += f"; {self.left_out:,} left out by the sampling rate"
        if self.dropped:
            text += f"; {self.dropped:,} dropped"
        if self.unreadable:
            text += f"; {self.unreadable:,} not readable"
        if self.first_trouble:
            text += f" (the first: {self.first_trouble})"
        return f"{text}. {self.failure}" if self.failure else text


class LiveTrace:
    """Writes events of a live run; for one thread.

    Nothing here raises while events come: what cannot be written is counted, and said in the trace.

    Args:
        folder: the folder of the parts.
        name: what their names begin with.
        header: the header of each part.
        limits: when a part ends.
        sample: which requests are recorded.
        redaction: what of their tokens is shown.

    Raises:
        UsageError: the folder has such a trace already.
        TraceError: the first part cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        header: Header,
        *,
        limits: PartLimits | None = None,
        sample: RequestSample | None = None,
        redaction: Redaction | None = None,
    ) -> None:
        self._redaction = redaction or Redaction()
        pad = header.contract.pad_id
        if pad is not None:
            contract = replace(header.contract, pad_id=self._redaction.token(pad))
            header = replace(header, contract=contract)
        self.contract: Contract = header.contract
        self.counts: Counts = Counts()
        self._sample = sample or RequestSample()
        self._parts = TraceParts(folder, name, header, limits)
        self._left_out_calls: dict[int, None] = {}

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return self._parts.paths

    def records(self, request_id: str) -> bool:
        """Return whether the sampling rate keeps this request."""
        return self._sample.has(request_id)

    def add(self, event: _E, at: float) -> None:
        """Write an event that happened ``at`` (Unix time), if it is one to be recorded.

        It is of rollproof's own making, so that its fields are not looked at.
        """
        if self._leaves_out(event):
            return
        self._write(event, at)
        if isinstance(event, Submit) and self._redaction.drops:
            request_id = event.request.request_id
            self._write(Unrecorded(reason=DROPPED_TOKENS, request_id=request_id), at)

    def add_unreadable(
        self, trouble: str, at: float, *, request_id: str = "", call_id: int | None = None
    ) -> None:
        """Note something that happened to a request or a call and could not be read."""
        self.counts.unreadable += 1
        self.counts.first_trouble = self.counts.first_trouble or trouble
        if request_id or call_id is not None:
            event = Unrecorded(reason=trouble, request_id=request_id, call_id=call_id)
            if not self._leaves_out(event):
                self._write(event, at)

    def add_dropped(self, count: int, at: float) -> None:
        """Note that events found no room, and that it is not known whose they were."""
        self.counts.dropped += count
        reason = f"{count} events came faster than they could be written, and were dropped"
        self._write(Unrecorded(reason=reason, count=count), at)

    def add_error(self, error: Exception, at: float) -> None:
        """Note that an event was lost to a fault of the recorder's own."""
        self.counts.unreadable += 1
        self.counts.first_trouble = self.counts.first_trouble or describe_error(error)
        self._write(Unrecorded(reason=f"the recorder failed: {describe_error(error)}"), at)

    def flush(self) -> None:
        """Bring what was written to the disk."""
        if not self.counts.failure:
            try:
                self._parts.flush()
            except TraceError as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note why nothing more can be written."""
        if not self.counts.failure:
            self.counts.failure = f"Recording has stopped: {describe_error(error)}"

    def close(self) -> None:
        """Seal the trace."""
        try:
            self._parts.close()
        except TraceError as error:
            self.fail(error)

    def _leaves_out(self, event: Event) -> bool:
        if self._sample.rate >= 1:
            return False
        call_id: int | None = getattr(event, "call_id", None)
        if isinstance(event, Call):
            # a call of no known request is drawn by itself, not always kept or always left out
            owners = event.candidates or (event.request_id or f"call {event.call_id}",)
            if any(map(self._sample.has, owners)):
                return False
            self._left_out_calls[event.call_id] = None
        elif isinstance(event, Reply | Chunk | Fault | Unrecorded) and call_id is not None:
            return call_id in self._left_out_calls
        elif isinstance(event, Submit | Result | Observation):
            if self._sample.has(_request_of(event)):
                return False
            if not isinstance(event, Submit):
                return True
        else:
            return False
        self.counts.left_out += 1
        return True

    def forget_call(self, call_id: int) -> None:
        """Note that a call has ended, and that nothing more of it will come."""
        self._left_out_calls.pop(call_id, None)

    def _write(self, event: Event, at: float) -> None:
        counts = self.counts
        if counts.failure:
            counts.dropped += 1
            return
        shown = self._redaction.event(event)
        object.__setattr__(shown, "time", at)
        # parts that are full drop an event without an error: only their count says so
        lost = self._parts.lost
        try:
            self._parts.append(shown)
        except TraceError as error:
            self.fail(error)
            counts.dropped += 1
            return
        if self._parts.lost > lost:
            counts.dropped += 1
            counts.first_trouble = counts.first_trouble or _FULL
            return
        counts.events += 1
        counts.requests += isinstance(event, Submit)
        counts.calls += isinstance(event, Call)
        counts.samples += len(event.samples) if isinstance(event, Result) else 0


def _request_of(event: Event) -> str:
    if isinstance(event, Submit):
        return event.request.request_id
    request_id: Mapping[str, str] | str = getattr(event, "request_id", "")
    return request_id if isinstance(request_id, str) else ""
