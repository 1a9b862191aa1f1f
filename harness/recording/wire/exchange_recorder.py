"""Exchanges with an engine's HTTP server as events of a trace."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rollproof.core.call_ownership import Caller, CallOwner, Owners, named_request
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Fault,
    Flush,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.core.record_validation import validate_request, validate_rollout
from rollproof.core.records import EngineOutput, Request, Rollout, Version
from rollproof.core.report_headers import INTERNAL, OWNER_HEADER, ROLLOUT_HEADER
from rollproof.errors import UsageError
from rollproof.recording.live_trace import LiveTrace
from rollproof.recording.wire.control_calls import Control, ControlKind, control_of, succeeded
from rollproof.recording.wire.exchange import TOO_LONG, Exchange, How
from rollproof.recording.wire.sampling_calls import (
    SAMPLING_PATHS,
    SamplingRequest,
    WireCall,
    read_request,
)
from rollproof.recording.wire.sampling_replies import (
    PartialOutput,
    RefusedReply,
    UnreadableReply,
    outputs_of,
    streamed_outputs,
)

__all__ = ["ExchangeRecorder"]

_OWNER, _ROLLOUT = OWNER_HEADER.encode(), ROLLOUT_HEADER.encode()
_MAX_ENDED = 1 << 16
"""Requests that are remembered after their end: a call may come late."""
_ELSEWHERE: Caller = (None, (0, 0))
_PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-")
_NO_PROMPT = (
    "its prompt is text, which only the server's tokenizer can read: have the client send token ids"
)


@dataclass(slots=True)
class _Running:
    """The calls of an exchange that is under way."""

    request: SamplingRequest
    calls: list[tuple[int, WireCall, CallOwner]]


@dataclass(slots=True)
class _Server:
    """What is known of the labels of a server.

    Attributes:
        stale: whether weights were loaded since its label was published: then it shows that of
            other weights.
        labels: that it is known to have had.
    """

    stale: bool = False
    labels: set[Version] = field(default_factory=set)


class ExchangeRecorder:
    """Turns exchanges into events; for one thread.

    Args:
        trace: takes the events.
        engine: ``sglang`` or ``vllm``; empty: not known.
        owners: open requests that others of this thread report, too.
        call_numbers: numbers for calls, if others of this trace take some, too.
    """

    def __init__(
        self,
        trace: LiveTrace,
        engine: str = "",
        *,
        owners: Owners | None = None,
        call_numbers: Iterator[int] | None = None,
    ) -> None:
        self._trace = trace
        self._contract = trace.contract
        self._engine = engine
        self._owners = Owners() if owners is None else owners
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._opened_by_call: dict[str, list[tuple[int, ...]]] = {}
        self._running: dict[int, _Running] = {}
        self._answered: OrderedDict[int, list[int]] = OrderedDict()
        self._handles: dict[str, str] = {}
        self._controls: dict[int, Control] = {}
        self._servers: dict[str, _Server] = {}
        self._call_numbers = itertools.count(1) if call_numbers is None else call_numbers

    def show_label(self, server_id: str, label: Version, at: float) -> None:
        """Note the label that a server has when the recording begins."""
        self._server(server_id).labels.add(label)
        self._trace.add(Weights(server_id=server_id, version=None, label=label), at)

    def begun(self, exchange: Exchange) -> None:
        """Take a request that is about to be sent to the server."""
        form = SAMPLING_PATHS.get(exchange.path)
        if form is not None and exchange.method in ("POST", "PUT"):
            self._begin_calls(exchange, form)
            return
        control = control_of(exchange, self._engine)
        if control is not None:
            self._controls[exchange.number] = control
            self._begin_control(exchange, control)

    def ended(self, exchange: Exchange) -> None:
        """Take the end of an exchange that was begun."""
        running = self._running.pop(exchange.number, None)
        if running is not None:
            self._end_calls(exchange, running)
        control = self._controls.pop(exchange.number, None)
        if control is not None:
            self._end_control(exchange, control)

    def submit(self, request: Request, at: float, rollout: str | None = None) -> None:
        """Take a request that a client reports.

        Raises:
            UsageError: it was reported before.
            SubjectError: its fields do not make a request.
        """
        if rollout is not None:
            request = replace(request, request_id=rollout)
        request = validate_request(request, "The caller of /rollproof/submit")
        if request.request_id in self._owners or request.request_id in self._ended:
            raise UsageError(
                f"Request {request.request_id!r} was submitted before: give each rollout an id of"
                " its own."
            )
        self._open(request, at)

    def result(
        self,
        request_id: str,
        rollout: Rollout | None,
        error: str | None,
        at: float,
        named: str | None = None,
    ) -> None:
        """Take the end of a request that a client reports; ``named`` is the rollout of its header.

        Raises:
            UsageError: the request is not open.
            SubjectError: the fields of ``rollout`` do not make a sample.
        """
        request_id = named or request_id
        if request_id not in self._owners:
            raise UsageError(
                f"Request {request_id!r} is not open: no call of it came through this proxy, and it"
                " was not submitted (or it has ended)."
            )
        if rollout is not None:
            rollout = validate_rollout(
                replace(rollout, request_id=request_id),
                "The caller of /rollproof/result",
                self._contract.dtypes,
            )
        others = self._opened_by_call.pop(request_id, ())
        prompt = () if rollout is None else tuple(rollout.prompt_ids)
        if prompt and any(ids[: len(prompt)] == prompt for ids in others):
            self._trace.add_unreadable(
                "its first call had another prompt than its sample: make calls for another purpose"
                " within `with internal():`",
                at,
                request_id=request_id,
            )
        self._owners.end(request_id)
        self._ended[request_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        self._trace.add(Result(request_id=request_id, rollout=rollout, error=error), at)

    def unsure(self, exchange: Exchange) -> None:
        """Take that the client of an exchange that was complete may not have read its end."""
        for call_id in self._answered.pop(exchange.number, ()):
            fault = Fault(
                what="broken-stream",
                server_id=exchange.server_id,
                call_id=call_id,
                detail="the client left at the end of the reply",
            )
            self._trace.add(fault, exchange.ended)

    def forget(self, exchange: Exchange) -> None:
        """Take that an exchange has ended, and that there was no room for its end."""
        running = self._running.pop(exchange.number, None)
        for call_id, call, _ in running.calls if running is not None else ():
            self._handles.pop(call.rid, None)
            self._owners.answered(call_id)
            self._trace.forget_call(call_id)
        control = self._controls.pop(exchange.number, None)
        if control is not None and control.kind is ControlKind.LOAD:
            self._server(exchange.server_id).stale = True

    def _begin_calls(self, exchange: Exchange, form: str) -> None:
        try:
            request = read_request(form, exchange.request_json(), exchange.headers)
        except ValueError as error:
            self._trace.add_unreadable(f"a request to {exchange.path}: {error}", exchange.began)
            return
        calls = []
        for call in request.calls:
            owner = self._owner(exchange, call)
            call_id = next(self._call_numbers)
            self._owners.asks(call_id, owner.request_id)
            if call.rid:
                self._handles[call.rid] = owner.request_id
            calls.append((call_id, call, owner))
            event = Call(
                call_id=call_id,
                request_id=owner.request_id,
                server_id=exchange.server_id,
                prompt_ids=call.prompt_ids or (),
                max_tokens=call.max_tokens,
                sampling=call.sampling,
                want_routes=call.routes,
                want_logprobs=call.logprobs,
                routes_start=call.routes_start,
                stream=request.stream,
                candidates=owner.candidates,
                internal=owner.internal,
                stop_token_ids=call.stop_token_ids,
                want_sampling_mask=call.sampling_mask,
            )
            self._trace.add(event, exchange.began)
            if call.prompt_ids is None:
                self._trace.add_unreadable(_NO_PROMPT, exchange.began, call_id=call_id)
        self._running[exchange.number] = _Running(request, calls)

    def _owner(self, exchange: Exchange, call: WireCall) -> CallOwner:
        """Return the request of a call: the client says it, the handle says it, or the tokens
        suggest it.
        """
        prompt = call.prompt_ids
        named = exchange.headers.get(_OWNER)
        if named is not None:
            return CallOwner(request_id=named.decode("latin-1"))
        rollout = exchange.headers.get(_ROLLOUT, b"").decode("latin-1")
        # before the tokens are asked: such a call may begin like an open request
        if rollout == INTERNAL:
            return CallOwner(internal=True)
        if rollout:
            return self._owner_in_rollout(rollout, prompt, exchange.began)
        by_handle = named_request(call.rid, self._owners)
        if by_handle is not None:
            return CallOwner(request_id=by_handle)
        if prompt is not None and self._owners.ids:
            try:
                candidates = self._owners.of(prompt, exchange.caller or _ELSEWHERE)
            except UsageError:
                candidates = ()
            if len(candidates) == 1:
                return CallOwner(request_id=candidates[0])
            if candidates:
                return CallOwner(candidates=candidates)
        return CallOwner(request_id=call.rid)

    def _owner_in_rollout(
        self, rollout: str, prompt: tuple[int, ...] | None, at: float
    ) -> CallOwner:
        if rollout in self._ended:
            return CallOwner(request_id=rollout)
        if rollout not in self._owners:
            # what a later call adds may be an answer of the environment, or a mistake: only the
            # request says which
            if prompt is None or self._contract.multi_turn:
                return CallOwner(request_id=rollout)
            # no budget: the first call may ask for a part of it
            self._open(Request(request_id=rollout, prompt_ids=prompt), at)
            self._opened_by_call[rollout] = []
        if prompt is None or rollout in self._owners.beginning(prompt):
            return CallOwner(request_id=rollout)
        # a rollout may call a judge
        if rollout in self._opened_by_call:
            self._opened_by_call[rollout].append(prompt)
        return CallOwner(candidates=(rollout,))

    def _open(self, request: Request, at: float) -> None:
        self._owners.begin(request)
        self._trace.add(Submit(request=request), at)

    def _end_calls(self, exchange: Exchange, running: _Running) -> None:
        outputs: list[PartialOutput | None] = [None] * len(running.calls)
        trouble = refusal = ""
        if exchange.how is not How.UNREACHED and 200 <= exchange.status < 300:
            try:
                outputs = [*self._read(exchange, running.request)]
            except RefusedReply as error:
                refusal = str(error)
            except UnreadableReply as error:
                trouble = str(error)
        for (call_id, call, _owner), partial in zip(running.calls, outputs, strict=True):
            self._handles.pop(call.rid, None)
            if refusal or exchange.how is How.UNREACHED or not 200 <= exchange.status < 300:
                self._end_failed_call(exchange, call_id, refusal)
                tokens: tuple[int, ...] = ()
            else:
                tokens = self._end_call(exchange, call_id, call, partial, trouble)
            self._owners.answered(call_id, tokens)
            self._trace.forget_call(call_id)
        if exchange.how is How.COMPLETE:
            self._answered[exchange.number] = [call_id for call_id, _, _ in running.calls]
            if len(self._answered) > _MAX_ENDED:
                self._answered.popitem(last=False)

    def _read(self, exchange: Exchange, request: SamplingRequest) -> Iterable[PartialOutput]:
        if exchange.events is not None:
            if exchange.reply_too_long:
                raise UnreadableReply(TOO_LONG)
            return streamed_outputs(request, exchange.events)
        # a reply in one piece that broke is no JSON: its client has nothing of it
        if exchange.how in (How.BROKEN, How.LEFT):
            return [PartialOutput(reason="") for _ in request.calls]
        return outputs_of(request, exchange.reply_bytes())

    def _end_failed_call(self, exchange: Exchange, call_id: int, refusal: str) -> None:
        """Record a call that no engine answered with a sample."""
        is_certain = bool(refusal or exchange.status) or exchange.how is How.UNREACHED
        fault = Fault(
            what="reject" if is_certain else "lost-reply",
            server_id=exchange.server_id,
            call_id=call_id,
            detail=refusal or exchange.detail or f"HTTP {exchange.status}",
        )
        self._trace.add(fault, exchange.ended)

    def _end_call(
        self,
        exchange: Exchange,
        call_id: int,
        call: WireCall,
        partial: PartialOutput | None,
        trouble: str,
    ) -> tuple[int, ...]:
        """Record how one call ended; returns the tokens that certainly reached its client."""
        at, server = exchange.ended, exchange.server_id
        is_whole = exchange.how is How.COMPLETE
        has_end = partial is not None and partial.reason is not None
        output: EngineOutput | None = None
        if partial is not None and (is_whole or exchange.events is not None):
            try:
                output = partial.output(call, self._contract)
            except UnreadableReply as error:
                trouble = str(error)
        if is_whole and not has_end and not trouble:
            # the server closed an unfinished stream in order
            is_whole, exchange.detail = False, "the stream ended without a finish reason"
        if output is not None:
            output = self._with_labels(output, server, at)
            # of a stream that a client left, it may have read everything that passed
            arrived = is_whole or (has_end and exchange.events is not None)
            self._trace.add(Reply(call_id=call_id, output=output, delivered=arrived), at)
        if not is_whole:
            what = "lost-reply" if exchange.events is None else "broken-stream"
            detail = exchange.detail or str(exchange.how)
            self._trace.add(Fault(what=what, server_id=server, call_id=call_id, detail=detail), at)
        if trouble:
            self._trace.add_unreadable(trouble, at, call_id=call_id)
        return output.token_ids if output is not None and is_whole else ()

    def _with_labels(self, output: EngineOutput, server_id: str, at: float) -> EngineOutput:
        """Return an output without labels that are those of other weights, and note new ones."""
        server = self._server(server_id)
        if server.stale:
            return replace(output, version=None, spans=())
        shown = [output.version, *(span.version for span in output.spans)]
        for label in dict.fromkeys(shown):
            if label is not None and label not in server.labels:
                # published by a way that the recorder does not see
                server.labels.add(label)
                self._trace.add(Weights(server_id=server_id, version=None, label=label), at)
        return output

    def _begin_control(self, exchange: Exchange, control: Control) -> None:
        at, server = exchange.began, exchange.server_id
        wanted = ("*",) if control.aborts_all else control.wanted
        for rid in wanted:
            in_flight = tuple(
                call_id
                for running in self._running.values()
                for call_id, _, _ in running.calls
                if rid == "*"
            )
            owner = self._handles.get(rid) or self._handles.get(_without_prefix(rid), rid)
            self._trace.add(Abort(server_id=server, wanted=owner or rid, call_ids=in_flight), at)
        if control.kind is ControlKind.LOAD:
            # from here on its weights may be the new ones, and are not known
            self._trace.add(Weights(server_id=server, version=None, label=None), at)
        elif control.kind is ControlKind.LABEL:
            state = self._server(server)
            state.stale = False
            state.labels.add(control.label)
            event = Weights(server_id=server, version=None, label=control.label, loaded=False)
            self._trace.add(event, at)

    def _end_control(self, exchange: Exchange, control: Control) -> None:
        at, server = exchange.ended, exchange.server_id
        if not succeeded(exchange):
            if control.kind is ControlKind.LOAD:
                # an update that failed may have loaded a part
                self._server(server).stale = True
                detail = exchange.detail or f"HTTP {exchange.status} of {exchange.path}"
                self._trace.add(Fault(what="update-failure", server_id=server, detail=detail), at)
            return
        if control.kind is ControlKind.PAUSE:
            pause = Pause(server_id=server, mode=control.mode, clear_cache=control.clear_cache)
            self._trace.add(pause, at)
        elif control.kind is ControlKind.RESUME:
            self._trace.add(Resume(server_id=server), at)
        elif control.kind is ControlKind.CACHE:
            self._trace.add(Flush(server_id=server), at)
        elif control.kind is ControlKind.LOAD:
            state = self._server(server)
            state.stale = control.label is None
            if control.label is not None:
                state.labels.add(control.label)
            event = Weights(
                server_id=server,
                version=None,
                label=control.label,
                flushed=control.clear_cache,
            )
            self._trace.add(event, at)

    def _server(self, server_id: str) -> _Server:
        return self._servers.setdefault(server_id, _Server())


def _without_prefix(rid: str) -> str:
    """Return the handle that a client chose, of the one that vLLM's endpoints made of it."""
    for prefix in _PREFIXES:
        if rid.startswith(prefix):
            return rid.removeprefix(prefix)
    return rid
