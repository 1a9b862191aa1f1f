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
    "Flush",
    "Gauge",
    "Observation",
    "Pause",
    "Reference",
    "Reply",
    "Result",
    "Resume",
    "Submit",
    "Unrecorded",
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
    """The stack is about to call an engine.

    Attributes:
        request_id: The caller's request; ``""`` if the recorder cannot attribute the call.
        max_tokens: The granted budget.
        stream: How the reply is streamed, if it is.
        candidates: The requests to one of which the call belongs, or possibly to none, if that is
            not certain. ``request_id`` is then a guess, or ``""``.
        internal: Whether the stack declared that the call belongs to no request
            (``fleet.internal()``).
        end_tokens: The model's own end tokens, which end the call; empty if the call ignores them.
            ``None``: not known.
        stop_token_ids: Further tokens that end the call.
        stop_string_tokens: Tokens whose text is a stop string of the call.
        crossed: Calls with the same prompt that were answered in the instant in which this one was
            made, if those replies did not lead to it: it was made by a timer, say. Known on the
            virtual clock only.
        adapter: The name of the adapter that is to serve the call; ``None``: the base model.
        want_sampling_mask: Whether the call requests sampling masks.
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
    # requests that share a prompt (n > 1) cannot always be distinguished, and nothing is guessed
    candidates: tuple[str, ...] = ()
    internal: bool = False
    end_tokens: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_string_tokens: tuple[int, ...] = ()
    crossed: tuple[int, ...] = ()
    adapter: str | None = None
    want_sampling_mask: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit(Event):
    """An engine began to run a call (it left the queue)."""

    kind: ClassVar[str] = "admit"
    call_id: int
    server_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply(Event):
    """An engine answered a call.

    A version in ``true_rows`` or ``true_tokens`` that mixes KV of several versions is labelled
    ``"mixed"``. Weights of no version at all are labelled ``"altered"``: an adapter over a base
    model that it was not trained on, or at another scale; a delta on other weights than its own.

    Attributes:
        delivered: Whether the caller received it.
        duplicate: Whether the call was answered before.
        true_tokens: The versions that sampled the tokens, as spans over this call's tokens.
        true_rows: The versions of the forwards that computed the engine's rows, as spans over
            absolute positions.
        true_draw: The number of the draw that gave the first token; 0: what the weights choose
            without one. ``None``: not known, or no token was sampled.
    """

    kind: ClassVar[str] = "reply"
    call_id: int
    output: EngineOutput
    delivered: bool = True
    duplicate: bool = False
    true_tokens: tuple[Span, ...] | None = None
    true_rows: tuple[Span, ...] | None = None
    true_draw: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Event):
    """A part of a streamed reply, as the engine sent it.

    Attributes:
        rows: The number of route rows that came with it; ``None``: none.
    """

    kind: ClassVar[str] = "chunk"
    call_id: int
    token_ids: tuple[int, ...]
    rows: int | None = None
    finished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reference(Event):
    """The result of an independent forward under weights ``version`` over the T tokens of a call:
    its prompt and its reply.

    Attributes:
        logprobs: ``(T,)``: the log-probability of token i given those before it, at temperature 1.
        scaled: ``(T,)``: the same at the temperature of the call; NaN at temperature 0.
        routes: ``(T, num_layers, top_k)`` in the router's order; 0 in dense layers.
        margins: ``(T, num_layers)``: the relative difference between the scores of the last chosen
            expert and of the best one that was not chosen. If it is small, rounding decides.
            Infinity in dense layers.
        orders: ``(T, num_layers)``: the same for the closest two of the chosen experts.
        penalised: ``(T,)``: ``logprobs`` after the penalties of the call. Like the other two,
            ``None`` if the call has no sampling parameter beyond temperature and seed, or if the
            reference does not know their effect.
        penalised_scaled: ``(T,)``: ``penalised`` at the temperature of the call.
        processed: ``(T,)``: the log-probability under the distribution that was sampled from: after
            penalties, temperature, min-p, top-k and top-p, renormalised. -inf: the token was left
            out; NaN: rounding decides whether it was.
    """

    kind: ClassVar[str] = "reference"
    call_id: int
    version: Version
    logprobs: LogprobArray
    scaled: LogprobArray
    routes: IntArray
    margins: LogprobArray
    orders: LogprobArray
    penalised: LogprobArray | None = None
    penalised_scaled: LogprobArray | None = None
    processed: LogprobArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort(Event):
    """A server was requested to abort calls.

    Attributes:
        wanted: The id of the request, or ``"*"``.
        call_ids: The calls that were in flight.
        injected: Whether an action of the case requested it, and not the stack.
    """

    kind: ClassVar[str] = "abort"
    server_id: str
    wanted: str
    call_ids: tuple[int, ...] = ()
    injected: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause(Event):
    """A server acknowledged a pause: until its ``Resume`` nothing may be admitted.

    Attributes:
        progress: The number of tokens that each call in flight has sampled; ``None``: not known.
    """

    kind: ClassVar[str] = "pause"
    server_id: str
    mode: PauseMode
    clear_cache: bool = False
    # an engine may acknowledge a pause and go on sampling (sglang#24445)
    progress: Mapping[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Event):
    """A server was resumed; ``progress`` as in ``Pause``."""

    kind: ClassVar[str] = "resume"
    server_id: str
    progress: Mapping[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights(Event):
    """A server's weights became ``version``.

    Attributes:
        label: The label under which they were published; ``None``: no new label was published.
        loaded: ``False`` if only the label changed.
        identity: Whether the new weights equal the old ones.
        progress: As in ``Pause``.
        by_harness: Whether rollproof loaded or labelled them itself (a skew, a revival, a label of
            its own), not the stack.
        adapter: The name under which the weights were loaded as an adapter; ``None``: the base
            model has them.
        base: The weights of the base model on which the adapter was trained; ``None``: not known.
        delta_of: The weights from which the delta was made that was loaded; ``None``: all tensors
            were loaded.
        true_scale: The scale at which the server applies the adapter, as a multiple of the one with
            which it was trained.
    """

    kind: ClassVar[str] = "weights"
    server_id: str
    version: Version
    label: Version
    # vLLM and SGLang publish labels by endpoints of their own, which load nothing
    loaded: bool = True
    identity: bool = False
    flushed: bool = False
    progress: Mapping[int, int] | None = None
    # what the harness does to a server must not count as the stack's doing
    by_harness: bool = False
    adapter: str | None = None
    base: Version = None
    delta_of: Version = None
    true_scale: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush(Event):
    """A server was requested to drop its prefix cache, and said that it did."""

    kind: ClassVar[str] = "flush"
    server_id: str


class UpdatePhase(StrEnum):
    """How far a weight update has come at the trainer that requested it."""

    ASKED = "asked"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Event):
    """A trainer requested that the stack publish weights ``version`` under ``label``, or learned
    that it is done, or failed.

    The weights of the servers are in their ``Weights`` events.
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
    """A fault that the harness or the network caused.

    Attributes:
        what: ``death``, ``revive``, ``lost-reply``, ``broken-stream`` (only the client knows how
            much of the reply it received), ``duplicate-reply``, ``late-reply``, ``reject``,
            ``update-failure``, ``update-hung`` (an update that outlasted the deadline),
            ``partial-update`` (a transfer broke when it had replaced some of the tensors),
            ``retag``, ``leave`` and ``join`` (a server leaves the balancer, and joins it again).
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

    Attributes:
        rollout: The sample; the last one, if the request delivered several.
        earlier: The samples before the last, in the stack's order, if it delivered several
            (``Contract.samples``).
        hung: Whether it did not end within the virtual deadline; ``error`` then says what it
            awaited.
        caller_changed: Names of what the stack changed in the objects that the caller had passed.
        later_changed: Names of arrays of the rollout that changed after it was returned.
    """

    kind: ClassVar[str] = "result"
    request_id: str
    rollout: Rollout | None = None
    error: str | None = None
    hung: bool = False
    caller_changed: tuple[str, ...] = ()
    later_changed: tuple[str, ...] = ()
    earlier: tuple[Rollout, ...] = ()

    @property
    def samples(self) -> tuple[Rollout, ...]:
        """Every delivered sample."""
        return self.earlier if self.rollout is None else (*self.earlier, self.rollout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge(Event):
    """The value of a counter of the stack (in-flight requests, queue length).

    Attributes:
        phase: ``start`` or ``end`` of the run.
    """

    kind: ClassVar[str] = "gauge"
    name: str
    value: float
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrecorded(Event):
    """Something happened that the recorder could not record.

    A request that it concerns is not judged, nor any open request if it is not known which.

    Attributes:
        reason: Why, as a sentence for the reader of a report.
        count: How many events are missing.
        request_id: The request that they concern; ``""`` if that is not known.
        call_id: The call that they concern, if that is known.
    """

    kind: ClassVar[str] = "unrecorded"
    reason: str
    count: int = 1
    request_id: str = ""
    call_id: int | None = None
