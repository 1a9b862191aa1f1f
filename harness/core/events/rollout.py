"""Events of a rollout run: what callers asked, what engines answered, and what happened to both.

A call is journaled before it is sent and its reply after it was received, so that an order in the
trace is an order in the run. ``Reply.delivered`` is false where the engine answered and nobody
received it; a ``Call`` without a ``Reply`` has an *unknown outcome* (it may have sampled tokens or
not), and checks accept both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.events.base import Event
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
    "Abort",
    "Admit",
    "Call",
    "Chunk",
    "Fault",
    "Gauge",
    "Observation",
    "Pause",
    "Reference",
    "Reply",
    "Result",
    "Resume",
    "Submit",
    "Update",
    "UpdatePhase",
    "Weights",
]


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
