"""Trace: everything that happened in a run, in the order in which it happened.

Checks judge traces, not systems. A trace is a header and a sequence of events on a logical clock
(``index``), each with its virtual or wall ``time`` in seconds. What a subject or an engine *showed*
is kept apart from what is *true*: fields named ``true_*`` are the ground truth, known where
rollproof's own engine ran and ``None`` elsewhere. The kinds of events are in
``rollproof.core.events``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from rollproof.core.contract import Contract
from rollproof.core.events.base import Event
from rollproof.core.events.layouts import Laid
from rollproof.core.events.replay import Install, Outcome, Residue, Routing, Step
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Chunk,
    Fault,
    Gauge,
    Observation,
    Pause,
    Reference,
    Reply,
    Result,
    Resume,
    Submit,
    Update,
    Weights,
)
from rollproof.core.events.training import Batch, Score

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
    Batch,
    Score,
    Step,
    Routing,
    Install,
    Outcome,
    Residue,
    Laid,
)
EVENT_KINDS: Mapping[str, type[Event]] = {cls.kind: cls for cls in _KINDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a trace says about itself: who was run, under which contract, from which seed.

    ``contract`` is the subject's, ``engine`` that of the engines below it where they are known.
    ``coding`` holds the parameters of the coded policy (``rollproof.fakes.coded.policy``) where one
    answered, so that a reader can rebuild the oracle; ``case`` the JSON form of the case that was
    run, so that it can be run again. ``recipe`` says how to make the subject again (``{"subject":
    "module:factory"}``, ``{"stack": "verl", "version": "0.9.1"}``). ``about`` is what the trace
    tells of: ``rollouts``, ``batches`` (``rollproof.verification.batches``), ``replay``
    (``rollproof.replay``) or ``layouts`` (``rollproof.layouts``).
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
        """The same header over other events, re-stamped with consecutive indexes."""
        return replace(
            self, events=tuple(replace(event, index=i) for i, event in enumerate(events))
        )


class TraceSink(Protocol):
    """Something that events can be appended to as they happen (a trace store)."""

    def append(self, event: Event) -> None:
        """Take one stamped event."""


_E = TypeVar("_E", bound=Event)


class Recorder:
    """Stamps events with index and time, keeps them, and hands them on to sinks. Not thread-safe:
    one run, one recorder.

    With ``keep=False`` only the sinks have them: for a server that runs for days.
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
        """Stamp and keep ``event``; returns the stamped one. A fresh event is stamped in place, one
        of another trace is copied.
        """
        stamped = event if event.index < 0 else replace(event)
        # a recorder owns what it is handed: copying every event would cost as much as all else that
        # a run records
        object.__setattr__(stamped, "index", self._count)
        object.__setattr__(stamped, "time", self._clock())
        self._count += 1
        if self._keep:
            self._events.append(stamped)
        for sink in self._sinks:
            sink.append(stamped)
        return stamped

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything recorded so far, where it is kept."""
        return tuple(self._events)

    def trace(self, header: Header) -> Trace:
        """The finished trace."""
        return Trace(header=header, events=self.events)
