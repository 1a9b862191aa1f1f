"""Trace: everything that happened in a run, in the order in which it happened.

Checks judge traces, not systems. A trace is a header and a sequence of events on a logical clock
(``index``), with the virtual or wall ``time`` in seconds beside it. What a subject or an engine
*showed* is kept apart from what is *true*: fields named ``true_*`` are the ground truth, known
where rollproof's own engine ran and ``None`` elsewhere.

A call is journaled before it is sent and its reply after it was received, so that an order in the
trace is an order in the run. ``Reply.delivered`` is false where the engine answered and nobody
received it; a ``Call`` without a ``Reply`` has an *unknown outcome* (it may have sampled tokens or
not), and checks accept both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol, TypeVar

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.events.base import Event
from rollproof.core.events.layouts import Laid
from rollproof.core.events.replay import Install, Outcome, Residue, Routing, Step
from rollproof.core.events.training import Batch, Score, Train
from rollproof.core.records import (
    EngineOutput,
    IntArray,
    LogprobArray,
    Request,
    Rollout,
    Scalar,
    Span,
    Version,
)

__all__ = [
    "EVENT_KINDS",
    "SCHEMA",
    "Abort",
    "Admit",
    "Batch",
    "Call",
    "Chunk",
    "Event",
    "Fault",
    "Gauge",
    "Header",
    "Observation",
    "Pause",
    "PauseMode",
    "Recorder",
    "Reference",
    "Reply",
    "Result",
    "Resume",
    "Score",
    "Submit",
    "Trace",
    "TraceSink",
    "Train",
    "Update",
    "UpdatePhase",
    "Weights",
]

SCHEMA = 1
"""Version of the trace schema. Raised when a reader of the older one would misunderstand; added
fields do not raise it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit(Event):
    """A caller handed a request to the stack."""

    kind: ClassVar[str] = "submit"
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Event):
    """The stack is about to call an engine. ``request_id`` is the caller's request, ``max_tokens``
    the granted budget.

    ``stream`` is how the reply was asked to be streamed, where it was. Where a recorder cannot tell
    whose call it is, ``request_id`` is ``""`` and ``candidates`` names the requests that it may be
    of: nothing is then known of what those were given.
    """

    kind: ClassVar[str] = "call"
    call_id: int
    request_id: str
    server_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int | None
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    media: str | None = None
    want_routes: bool = True
    want_logprobs: bool = True
    routes_start: int = 0
    stream: StreamMode | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit(Event):
    """An engine began to run a call (it left the queue)."""

    kind: ClassVar[str] = "admit"
    call_id: int
    server_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply(Event):
    """An engine answered a call.

    ``true_tokens`` are the versions that sampled the tokens (spans over this call's tokens),
    ``true_rows`` the versions of the forwards that computed the rows that the engine holds (spans
    over absolute positions). A version in ``true_rows`` or ``true_tokens`` that mixes KV of several
    versions is labelled ``"mixed"``. A call may be answered twice (``duplicate``); a reply that its
    caller did not receive has ``delivered=False``.
    """

    kind: ClassVar[str] = "reply"
    call_id: int
    output: EngineOutput
    delivered: bool = True
    duplicate: bool = False
    true_tokens: tuple[Span, ...] | None = None
    true_rows: tuple[Span, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Event):
    """A part of a streamed reply, as the engine sent it: its tokens, and how many route rows came
    with it (``None``: none).
    """

    kind: ClassVar[str] = "chunk"
    call_id: int
    token_ids: tuple[int, ...]
    rows: int | None = None
    finished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reference(Event):
    """What an independent forward under weights ``version`` makes of a call's prompt and the tokens
    that it returned.

    With T tokens in all: ``logprobs`` and ``scaled`` are ``(T,)``, the log-probability of token i
    given those before it, at temperature 1 and at the call's (NaN at 0); ``routes`` is ``(T,
    num_layers, top_k)`` in the router's order; ``margins`` is ``(T, num_layers)``, by which part of
    itself the score of the last chosen expert exceeds the best one left out, and ``orders`` the
    same for the closest two of the chosen: where they are small, rounding decides. Dense layers
    hold 0 and infinity.
    """

    kind: ClassVar[str] = "reference"
    call_id: int
    version: Version
    logprobs: LogprobArray
    scaled: LogprobArray
    routes: IntArray
    margins: LogprobArray
    orders: LogprobArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort(Event):
    """Somebody asked a server to abort ``call_ids`` (those that were in flight); ``wanted`` is the
    id or ``"*"`` asked for.
    """

    kind: ClassVar[str] = "abort"
    server_id: str
    wanted: str
    call_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause(Event):
    """A server acknowledged a pause: from here to its ``Resume`` nothing may be admitted.

    ``progress`` maps each call in flight to the number of tokens it has sampled, ``None`` where not
    known.
    """

    kind: ClassVar[str] = "pause"
    server_id: str
    mode: PauseMode
    clear_cache: bool = False
    progress: Mapping[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Event):
    """A server was resumed; ``progress`` as in ``Pause``."""

    kind: ClassVar[str] = "resume"
    server_id: str
    progress: Mapping[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights(Event):
    """A server's weights became ``version``, published under ``label`` (``None``: no new label was
    published).

    With ``loaded=False`` only the label changed. ``identity`` marks an update to equal weights.
    ``progress`` as in ``Pause``.
    """

    kind: ClassVar[str] = "weights"
    server_id: str
    version: Version
    label: Version
    loaded: bool = True
    identity: bool = False
    flushed: bool = False
    progress: Mapping[int, int] | None = None


class UpdatePhase(StrEnum):
    """How far a weight update has come at the trainer that asked for it."""

    ASKED = "asked"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Event):
    """A trainer asked the stack to publish weights ``version`` under ``label``, and was told that
    it is done, or failed.

    What the servers then hold is in their ``Weights`` events.
    """

    kind: ClassVar[str] = "update"
    version: Version
    label: Version
    phase: UpdatePhase


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation(Event):
    """The environment (a tool, a user turn) appended tokens to a request's sequence; they are not
    trained on.
    """

    kind: ClassVar[str] = "observation"
    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault(Event):
    """The harness or the network did harm.

    ``what`` is ``death``, ``revive``, ``lost-reply``, ``broken-stream`` (a reply that was sent, and
    of which nobody knows how much its caller received), ``duplicate-reply``, ``late-reply``,
    ``reject``, ``update-failure``, ``update-hung`` (an update that outlasted the deadline),
    ``retag``.
    """

    kind: ClassVar[str] = "fault"
    what: str
    server_id: str | None = None
    call_id: int | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Event):
    """A request ended at the caller: with a ``rollout``, with an ``error`` (class and text), or
    dropped (both ``None``).

    ``caller_changed`` names what the stack changed in the objects that the caller had handed in;
    ``later_changed`` names arrays of the rollout that changed after it was handed over. ``hung``
    marks a rollout that never ended within the virtual deadline; ``error`` then says what it
    awaited.
    """

    kind: ClassVar[str] = "result"
    request_id: str
    rollout: Rollout | None = None
    error: str | None = None
    hung: bool = False
    caller_changed: tuple[str, ...] = ()
    later_changed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge(Event):
    """A counter of the stack (in-flight requests, queue length) at some moment; ``phase`` is
    ``start`` or ``end``.
    """

    kind: ClassVar[str] = "gauge"
    name: str
    value: float
    phase: str


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
    Train,
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
