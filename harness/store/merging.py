"""Join the traces of several writers (proxies, hosts) into one, ordered by cause and effect.

Their clocks differ. What one writer caused another to see bounds the difference: a request is
submitted before it is called for, a call that sends what a reply sampled comes after that reply,
and so does the sample that ends with it. Within these bounds events are ordered by the corrected
clocks, and never against a cause. A request whose calls no cause orders is unknown.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Fault,
    Reply,
    Result,
    Submit,
    Unrecorded,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.core.records import Version
from rollproof.core.trace import Header
from rollproof.errors import TraceError, UsageError
from rollproof.store import open_trace
from rollproof.store.arrow_format import TraceReader, TraceWriter

__all__ = ["MergeReport", "merge_traces"]

_PART = re.compile(r"\.\d{4,}\.arrow$")
_SHOWN = 5
_ROUNDING = 1e-6
"""Seconds that Unix time as a float may be off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What was merged.

    Attributes:
        events: Events that were written.
        writers: Names of the writers, in order of their names.
        notes: What is to know of the order, a sentence each.
    """

    events: int
    writers: tuple[str, ...]
    notes: tuple[str, ...]


_Sequence: TypeAlias = "tuple[str, int, int]"
"""The tokens of a request's sequence: its id, their number and a hash. All tokens of a run would
take gigabytes.
"""


def _sequence(request_id: str, tokens: tuple[int, ...]) -> _Sequence:
    return request_id, len(tokens), hash(tokens)


@dataclass(slots=True)
class _Writer:
    """The parts of one writer, and when it saw what, by its own clock.

    ``sampled`` are sequences that a reply ends, ``continued`` those that a call or a sample has.
    ``shift`` is added to its clock; what is right is between ``least`` and ``most``.
    """

    name: str
    paths: list[Path]
    header: Header | None = None
    submitted: dict[str, float] = field(default_factory=dict)
    called: dict[str, float] = field(default_factory=dict)
    replied: dict[str, float] = field(default_factory=dict)
    delivered: dict[str, float] = field(default_factory=dict)
    sampled: dict[_Sequence, float] = field(default_factory=dict)
    continued: dict[_Sequence, float] = field(default_factory=dict)
    requested: dict[Version, float] = field(default_factory=dict)
    updated: dict[Version, float] = field(default_factory=dict)
    loaded: dict[Version, float] = field(default_factory=dict)
    unfinished: bool = False
    last_reply: dict[str, float] = field(default_factory=dict)
    shift: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def survey(self) -> None:
        """Read what bounds the difference of its clock to others'."""
        calls: dict[int, Call] = {}
        for event in self.events():
            at = event.time
            if isinstance(event, Submit):
                self.submitted.setdefault(event.request.request_id, at)
            elif isinstance(event, Call):
                calls[event.call_id] = event
                if event.request_id:
                    self.called.setdefault(event.request_id, at)
                    sent = _sequence(event.request_id, event.prompt_ids)
                    self.continued.setdefault(sent, at)
            elif isinstance(event, Reply):
                call = calls.pop(event.call_id, None)
                tokens = event.output.token_ids
                # what did not reach its client caused nothing
                if call is not None and call.request_id and event.delivered and tokens:
                    self.replied.setdefault(call.request_id, at)
                    self.last_reply[call.request_id] = at
                    whole = _sequence(call.request_id, (*call.prompt_ids, *tokens))
                    self.sampled.setdefault(whole, at)
            elif isinstance(event, Result):
                if event.rollout is not None and event.rollout.response_ids:
                    self.delivered.setdefault(event.request_id, at)
                    self.continued.setdefault(_whole(event), at)
            elif isinstance(event, Update) and event.label is not None:
                requested = event.phase is UpdatePhase.ASKED
                (self.requested if requested else self.updated).setdefault(event.label, at)
            elif isinstance(event, Weights) and event.label is not None:
                self.loaded.setdefault(event.label, at)

    def events(self) -> Iterator[Event]:
        """Its events in order; what is in several of its parts comes once."""
        streams = [self._part(path) for path in self.paths]
        numbered = (
            ((event.time, number, event) for event in stream)
            for number, stream in enumerate(streams)
        )
        seen: dict[tuple[object, ...], None] = {}
        for at, _, event in heapq.merge(*numbered, key=lambda item: item[:2]):
            if len(self.paths) > 1 and _is_of_server(event):
                mark = (event.kind, at, repr(replace(event, index=-1)))
                if mark in seen:
                    continue
                seen[mark] = None
            yield event

    def _part(self, path: Path) -> Iterator[Event]:
        reader = open_trace(path)
        if not isinstance(reader, TraceReader):
            raise UsageError(
                f"{path} is a trace in JSON, of one run by its own clock: only the Arrow traces of"
                " recorders (rollproof proxy, record_live) are merged. Judge it by itself:"
                f" rollproof check {path}"
            )
        if reader.header.about != "rollouts":
            raise UsageError(
                f"{path} is about {reader.header.about}: only traces of rollouts are merged, and"
                " others are judged by themselves."
            )
        self.header = self.header or reader.header
        yield from reader
        if reader.ending is None or not reader.ending.closed:
            self.unfinished = True


def merge_traces(paths: Sequence[Path], target: Path) -> MergeReport:
    """Merge trace files into one.

    Args:
        paths: Files of Arrow traces; parts of one writer differ in their number alone.
        target: The new file.

    Raises:
        UsageError: The files do not go together, or ``target`` exists.
        TraceError: One cannot be read, or their events contradict each other.
    """
    writers = _writers(paths)
    for writer in writers:
        writer.survey()
    header = _header(writers)
    notes = [
        f"{writer.name} is unfinished: its writer was killed, or still runs"
        for writer in writers
        if writer.unfinished
    ]
    notes += _set_clocks(writers)
    count = 0
    with TraceWriter(target, header, trusted=True) as out:
        for event in _ordered(writers):
            object.__setattr__(event, "index", count)
            out.append(event)
            count += 1
    return MergeReport(
        events=count, writers=tuple(writer.name for writer in writers), notes=tuple(notes)
    )


def _writers(paths: Sequence[Path]) -> list[_Writer]:
    by_name: dict[str, _Writer] = {}
    for path in sorted(set(paths)):
        name = _PART.sub("", str(path)).removesuffix(".arrow")
        by_name.setdefault(name, _Writer(Path(name).name, [])).paths.append(path)
    if not by_name:
        raise UsageError("There is no trace to merge.")
    return [by_name[name] for name in sorted(by_name)]


def _header(writers: Sequence[_Writer]) -> Header:
    """Return the header of the writers that have samples."""
    owners: dict[str, str] = {}
    for writer in writers:
        for request_id in writer.submitted:
            if request_id in owners:
                raise UsageError(
                    f"Request {request_id!r} was submitted to {owners[request_id]} and to"
                    f" {writer.name}: report each request to one recorder alone."
                )
            owners[request_id] = writer.name
    first = [writer for writer in writers if writer.submitted] or list(writers)
    headers = [writer.header for writer in first if writer.header is not None]
    if not headers:
        raise TraceError("The traces have no header: nothing can be merged.")
    if any(header.contract != headers[0].contract for header in headers):
        names = ", ".join(writer.name for writer in first)
        raise UsageError(f"The contracts of {names} differ: merge traces of one stack.")
    return headers[0]


def _set_clocks(writers: Sequence[_Writer]) -> Iterator[str]:
    """Set what is added to the clock of each writer, and yield what is to say of it."""
    _forget_shared(writers)
    # one clock has to be taken for right, and nobody knows of a better one
    placed = [writers[0]]
    waiting = list(writers[1:])
    while waiting:
        # the one that is bounded best by those that have their place
        bounds = [(_bounds(placed, writer), writer) for writer in waiting]
        (low, high), writer = min(bounds, key=lambda item: item[0][1] - item[0][0])
        waiting.remove(writer)
        placed.append(writer)
        writer.least, writer.most = min(low, high), max(low, high)
        if math.isinf(low) and math.isinf(high):
            yield (
                f"nothing that {writer.name} recorded was caused by another, or causes it: it is"
                " ordered among them by its clock alone"
            )
            continue
        if low > high:
            writer.shift = (low + high) / 2
            yield (
                f"the clock of {writer.name} changed against the others by {low - high:.3f} s or"
                " more: where causes say nothing, the order is that of a clock which is wrong by as"
                " much"
            )
            continue
        # a clock that contradicts nothing is taken as it is
        if not low <= 0 <= high:
            nearest = low if low > 0 else high
            writer.shift = nearest if math.isinf(low) or math.isinf(high) else (low + high) / 2
            yield (
                f"the clock of {writer.name} is {-writer.shift:+.3f} s off that of"
                f" {writers[0].name}, and was corrected ({_range(low, high)})"
            )


def _forget_shared(writers: Sequence[_Writer]) -> None:
    """Forget the first replies of requests that several writers saw: only the first of all is known
    to come before the sample.
    """
    seen: dict[str, int] = {}
    for writer in writers:
        for name in writer.called:
            seen[name] = seen.get(name, 0) + 1
    for writer in writers:
        for name in [name for name in writer.replied if seen[name] > 1]:
            del writer.replied[name]


def _range(low: float, high: float) -> str:
    if math.isinf(low) or math.isinf(high):
        return "known from one side alone"
    return f"to {(high - low) / 2:.3f} s"


def _in_both(early: Mapping[Any, float], late: Mapping[Any, float]) -> list[Any]:
    return [name for name in early if name in late]


def _bounds(placed: Sequence[_Writer], other: _Writer) -> tuple[float, float]:
    """Return the least and the most that may be added to a writer's clock."""
    low, high = -math.inf, math.inf
    for placed_writer in placed:
        before: Sequence[tuple[Mapping[Any, float], Mapping[Any, float]]] = (
            (placed_writer.submitted, other.called),
            (placed_writer.replied, other.delivered),
            (placed_writer.sampled, other.continued),
            (placed_writer.requested, other.loaded),
            (placed_writer.loaded, other.updated),
        )
        for early, late in before:
            for name in _in_both(early, late):
                low = max(low, early[name] + placed_writer.shift - late[name])
        after: Sequence[tuple[Mapping[Any, float], Mapping[Any, float]]] = (
            (other.submitted, placed_writer.called),
            (other.replied, placed_writer.delivered),
            (other.sampled, placed_writer.continued),
            (other.requested, placed_writer.loaded),
            (other.loaded, placed_writer.updated),
        )
        for early, late in after:
            for name in _in_both(early, late):
                high = min(high, late[name] + placed_writer.shift - early[name])
    return low, high


def _ordered(writers: Sequence[_Writer]) -> Iterator[Event]:
    """Yield the events of all, none before its cause, and otherwise by the corrected clocks."""
    numbers = itertools.count(1)
    streams = [_renumbered(writer, numbers) for writer in writers]
    heads: list[Event | None] = [next(stream, None) for stream in streams]
    causes = _Causes(writers)
    while any(head is not None for head in heads):
        ready = [
            (head.time, number)
            for number, head in enumerate(heads)
            if head is not None and causes.met(number, head)
        ]
        if not ready:
            names = [
                f"{writers[number].name}: {head.kind} {_name_of(head)}"
                for number, head in enumerate(heads)
                if head is not None
            ]
            raise TraceError(
                "The traces cannot be put into one order, since each of these events waits for one"
                f" that comes later in another file: {'; '.join(names[:_SHOWN])}. Are they of one"
                " run, and does each request have an id of its own?"
            )
        _, number = min(ready)
        head = heads[number]
        assert head is not None
        doubt = causes.doubt(head)
        # before the event: a check has to know of the doubt when it sees it
        if doubt is not None:
            yield replace(doubt, time=head.time)
        causes.note(number, head)
        yield head
        heads[number] = next(streams[number], None)


class _Causes:
    """What has to come before an event of another writer, and whether it has come."""

    def __init__(self, writers: Sequence[_Writer]) -> None:
        homes: dict[str, set[int]] = {}
        for number, writer in enumerate(writers):
            for name in writer.called:
                homes.setdefault(name, set()).add(number)
        self._homes = homes
        self._writers = writers
        self._submits = {name: i for i, writer in enumerate(writers) for name in writer.submitted}
        self._sampled = {name: i for i, writer in enumerate(writers) for name in writer.sampled}
        self._requested = {
            label: i for i, writer in enumerate(writers) for label in writer.requested
        }
        self._submitted: dict[str, int] = {}
        self._replied: set[_Sequence] = set()
        self._labels: set[Version] = set()
        self._calls: dict[int, Call] = {}

    def met(self, number: int, event: Event) -> bool:
        """Return whether all that caused an event has come."""
        if isinstance(event, Call):
            home = self._submits.get(event.request_id, number)
            sent = _sequence(event.request_id, event.prompt_ids)
            return (home == number or event.request_id in self._submitted) and self._came(
                number, sent
            )
        if isinstance(event, Result) and event.rollout is not None and event.rollout.response_ids:
            return self._came(number, _whole(event))
        if isinstance(event, Weights) and event.label is not None:
            home = self._requested.get(event.label, number)
            return home == number or event.label in self._labels
        return True

    def _came(self, number: int, sequence: _Sequence) -> bool:
        home = self._sampled.get(sequence, number)
        return home == number or sequence in self._replied

    def doubt(self, event: Event) -> Unrecorded | None:
        """Return what says that no cause orders the calls and the sample of a request."""
        if isinstance(event, Call):
            homes = self._homes.get(event.request_id, set())
            prompt = self._submitted.get(event.request_id)
            is_first = prompt is None or len(event.prompt_ids) <= prompt
            certain = len(homes) < 2 or is_first
            sequence = _sequence(event.request_id, event.prompt_ids)
        elif isinstance(event, Result) and event.rollout is not None:
            homes = self._homes.get(event.request_id, set())
            here = self._submits.get(event.request_id, -1)
            certain = not event.rollout.response_ids or all(
                self._is_apart(event, here, home) for home in homes - {here}
            )
            sequence = _whole(event)
        else:
            return None
        if certain or sequence in self._sampled:
            return None
        return Unrecorded(
            reason="its calls and its sample are in traces of several clocks, and no tokens show"
            " which came first",
            request_id=event.request_id,
        )

    def _is_apart(self, event: Result, here: int, home: int) -> bool:
        """Return whether it is certain which came first, a sample or the last reply to its calls,
        by all that is known of the clocks.
        """
        writer, other = self._writers[here], self._writers[home]
        reply = other.last_reply.get(event.request_id)
        if reply is None:
            return True
        result = event.time - writer.shift
        return (
            reply + other.most <= result + writer.least + _ROUNDING
            or reply + other.least > result + writer.most
        )

    def note(self, number: int, event: Event) -> None:
        """Take an event that has come."""
        if isinstance(event, Submit):
            self._submitted[event.request.request_id] = len(event.request.prompt_ids)
        elif isinstance(event, Call):
            self._calls[event.call_id] = event
        elif isinstance(event, Reply):
            call = self._calls.pop(event.call_id, None)
            if call is not None and event.output.token_ids and event.delivered:
                tokens = (*call.prompt_ids, *event.output.token_ids)
                self._replied.add(_sequence(call.request_id, tokens))
        elif isinstance(event, Result):
            self._submitted.pop(event.request_id, None)
        elif isinstance(event, Update) and event.phase is UpdatePhase.ASKED:
            self._labels.add(event.label)


def _whole(event: Result) -> _Sequence:
    """Return the sequence that a sample has."""
    rollout = event.rollout
    assert rollout is not None
    return _sequence(event.request_id, (*rollout.prompt_ids, *rollout.response_ids))


def _renumbered(writer: _Writer, numbers: Iterator[int]) -> Iterator[Event]:
    """Yield a writer's events by the corrected clock, with numbers of calls that no other has."""
    calls: dict[int, int] = {}

    def number_of(call_id: int) -> int:
        if call_id not in calls:
            calls[call_id] = next(numbers)
        return calls[call_id]

    for event in writer.events():
        changed: dict[str, Any] = {"time": event.time + writer.shift}
        call_id = getattr(event, "call_id", None)
        if call_id is not None:
            changed["call_id"] = number_of(call_id)
        if isinstance(event, Abort):
            changed["call_ids"] = tuple(map(number_of, event.call_ids))
        progress: Mapping[int, int] | None = getattr(event, "progress", None)
        if progress:
            changed["progress"] = {number_of(call): count for call, count in progress.items()}
        yield replace(event, **changed)


def _is_of_server(event: Event) -> bool:
    """Return whether an event is in every part that was open when it happened."""
    if isinstance(event, Fault):
        return event.call_id is None
    if isinstance(event, Unrecorded):
        return event.call_id is None and not event.request_id
    return event.kind in ("weights", "pause", "resume", "abort", "flush", "update", "gauge")


def _name_of(event: Event) -> str:
    if isinstance(event, Weights):
        return f"of label {event.label!r}"
    return repr(getattr(event, "request_id", ""))
