"""Trace: everything that happened in a run, in the order in which it happened.

Checks judge traces, not systems. A trace is a header and a sequence of events on a logical clock
(``index``), each with its virtual or wall ``time`` in seconds. What a subject or an engine *showed*
is kept apart from what is *true*: fields named ``true_*`` are the ground truth, known where
rollproof's own engine ran and ``None`` elsewhere. The kinds of events are in
``rollproof.core.events``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.core.events.corrections import Corrected
from rollproof.core.events.layouts import Laid
from rollproof.core.events.replay import Install, Outcome, Residue, Routing, Step
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Chunk,
    Fault,
    Flush,
    Gauge,
    Observation,
    Pause,
    Reference,
    Reply,
    Result,
    Resume,
    Submit,
    Unrecorded,
    Update,
    Weights,
)
from rollproof.core.events.training import Batch, Score
from rollproof.core.events.weights import Adapter, Checksums

__all__ = ["EVENT_KINDS", "SCHEMA", "Header", "Recorder", "Trace", "TraceSink"]

SCHEMA = 1
"""Version of the trace schema. Raised when a reader of the older one would misunderstand; added
fields do not raise it.
"""

_KINDS = (
    Submit,
    Call,
    Admit,
    Chunk,
    Reply,
    Reference,
    Abort,
    Pause,
    Resume,
    Weights,
    Update,
    Observation,
    Fault,
    Result,
    Gauge,
    Flush,
    Unrecorded,
    Batch,
    Score,
    Step,
    Routing,
    Install,
    Outcome,
    Residue,
    Laid,
    Corrected,
    Adapter,
    Checksums,
)
EVENT_KINDS: Mapping[str, type[Event]] = {cls.kind: cls for cls in _KINDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of a trace: the subject, its contract, the seed.

    Attributes:
        contract: The contract of the subject.
        engine: The contract of its engines, if they are known.
        coding: Parameters of the coded policy (``rollproof.fakes.coded.policy``) if one answered,
            so that a reader can rebuild the oracle.
        case: The JSON form of the case, so that it can be run again.
        recipe: How to make the subject again: ``{"subject": "module:factory"}``, or ``{"stack":
            "verl", "version": "0.9.1"}``.
        about: The kind of subject: ``rollouts``, ``batches`` (``rollproof.verification.batches``),
            ``replay`` (``rollproof.replay``), ``layouts`` (``rollproof.layouts``) or
            ``corrections`` (``rollproof.corrections``).
    """

    subject: str
    contract: Contract
    engine: Contract | None = None
    seed: int = 0
    profile: str = ""
    coding: Mapping[str, Any] | None = None
    case: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] | None = None
    made_by: str = ""
    about: str = "rollouts"
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A header and its events, in order."""

    header: Header
    events: tuple[Event, ...]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def with_events(self, events: Iterable[Event]) -> Trace:
        """Return a trace with this header and other events, re-stamped with consecutive indexes."""
        return replace(
            self, events=tuple(replace(event, index=i) for i, event in enumerate(events))
        )


class TraceSink(Protocol):
    """A store to which events are appended as they happen."""

    def append(self, event: Event) -> None:
        """Take one stamped event."""


_E = TypeVar("_E", bound=Event)


class Recorder:
    """Stamps events with index and time, stores them, and passes them to sinks. Not thread-safe:
    each run has a recorder of its own.

    With ``keep=False`` only the sinks get them, as in a server that runs for days.
    """

    def __init__(
        self, clock: Callable[[], float], sinks: Iterable[TraceSink] = (), *, keep: bool = True
    ) -> None:
        self._clock = clock
        self._sinks = tuple(sinks)
        self._events: list[Event] = []
        self._count = 0
        self._keep = keep

    def record(self, event: _E) -> _E:
        """Stamp and store ``event``; return the stamped one. A fresh event is stamped in place, an
        event of another trace is copied.
        """
        stamped = event if event.index < 0 else replace(event)
        # a recorder owns the events that it gets: copying each would cost as much as all other work
        # of recording
        object.__setattr__(stamped, "index", self._count)
        object.__setattr__(stamped, "time", self._clock())
        self._count += 1
        if self._keep:
            self._events.append(stamped)
        # sinks see an event after its stamp, in the order of the trace
        for sink in self._sinks:
            sink.append(stamped)
        return stamped

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything recorded so far, unless ``keep=False``."""
        return tuple(self._events)

    def since(self, index: int) -> Sequence[Event]:
        """Return what was recorded from ``index`` on, unless ``keep=False``."""
        return self._events[index:]

    def trace(self, header: Header) -> Trace:
        """Return the finished trace."""
        return Trace(header=header, events=self.events)
