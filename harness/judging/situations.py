"""Counts of the situations that a trace exercised, for the report.

A green report says little if no abort ever landed mid-decode: the counts say which situations
occurred in the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.base import Event
from rollproof.core.events.replay import Outcome, Routing, Step
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Fault,
    Observation,
    Pause,
    Reply,
    Result,
    Submit,
    Unrecorded,
    Weights,
)
from rollproof.core.events.training import Batch
from rollproof.core.records import FinishReason, Request, Rollout, Version
from rollproof.core.replay_contract import Recompute
from rollproof.judging.situation_names import FAULTS, LIMITS, PLACES

if TYPE_CHECKING:
    from rollproof.core.limits import RolloutLimits
    from rollproof.core.trace import Header

__all__ = ["ReplaySituationCounter", "SituationCounter"]

_DISTRIBUTION = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_MANY = 64
_IN_A_ROW = 3
_DEEP = -32.0
_CUT = (FinishReason.LENGTH, FinishReason.ABORT)
# Calls frozen by these pauses continue after the resume; an aborting pause ends them.
_FREEZING = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended: its calls, the versions that sampled a token of it, in order,
    and how its last reply ended and what it lacked.

    empty: How many of its last replies were aborts without tokens.
    unbegun: Whether the environment spoke last, so that no token of the turn has been sampled.
    """

    request: Request
    calls: list[int] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    aborted: bool = False
    aborts: int = 0
    empty: int = 0
    turns: int = 0
    unbegun: bool = False
    reason: FinishReason | None = None
    lacks: tuple[str, ...] = ()


@dataclass(slots=True)
class _OpenCall:
    """A call without a reply.

    frozen: Whether a pause froze it, so that its next admission is not that of a preemption.
    """

    request: str
    server: str
    max_tokens: int | None
    wants: tuple[str, ...] = ()
    admits: int = 0
    frozen: bool = False


@dataclass(slots=True)
class _Server:
    """The weights of a server (``None``: unknown) and the number of its admitted calls."""

    version: Version = None
    busy: int = 0


class SituationCounter:
    """Counts the situations of one trace. Memory holds only open requests and calls.

    Some are only known from its ``header``: the end token, options of the engines, limits.
    """

    def __init__(self, header: Header | None = None) -> None:
        coding: Mapping[str, Any] = (header.coding if header is not None else None) or {}
        case: Mapping[str, Any] = (header.case if header is not None else None) or {}
        engine: Mapping[str, Any] = case.get("engine") or {}
        self._end_token: int | None = (
            None if coding.get("eos_every") is None else coding.get("eos_id", 0)
        )
        self._slow_transfers = engine.get("transfer_steps", 1) > 1
        self._empty_text = bool(engine.get("empty_text"))
        self._slow_pauses = engine.get("pause_steps", 0) > 0
        self._limits = header.contract.limits if header is not None else None
        self._stops = header.contract.own_stops if header is not None else None
        # undeclared as in the cases: 0
        self._pad_token = (header.contract.pad_id or 0) if header is not None else None
        self._begun = False
        self._counts: dict[str, int] = {}
        self._requests: dict[str, _OpenRequest] = {}
        self._calls: dict[int, _OpenCall] = {}
        self._lost: dict[int, _OpenCall] = {}
        self._servers: dict[str, _Server] = {}
        self._out_of_step = False
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Submit: self._submit,
            Call: self._call,
            Admit: self._admit,
            Reply: self._reply,
            Abort: self._abort,
            Pause: self._pause,
            Weights: self._weights,
            Observation: self._observation,
            Fault: self._fault,
            Result: self._result,
            Batch: self._batch,
            Unrecorded: self._unrecorded,
        }

    def event(self, event: Event) -> None:
        """Count what one event shows."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    @property
    def counts(self) -> dict[str, int]:
        """How often each situation occurred, by name and sorted, without zeros."""
        return {name: count for name, count in sorted(self._counts.items()) if count}

    def _add(self, name: str, times: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + times

    def _server(self, name: str) -> _Server:
        server = self._servers.get(name)
        if server is None:
            server = self._servers[name] = _Server()
        return server

    def _submit(self, event: Submit) -> None:
        self._add("requests")
        if self._requests:
            self._add("requests in parallel with others")
        request = event.request
        if any(request.sampling.get(name) is not None for name in _DISTRIBUTION):
            self._add("requests with top-p, top-k, min-p or penalties")
        if request.group is not None and any(
            (other.request.group, other.request.prompt_ids, other.request.budget)
            == (request.group, request.prompt_ids, request.budget)
            for other in self._requests.values()
        ):
            self._add("equal requests of a group")
        self._requests[request.request_id] = _OpenRequest(request)
        if len(self._requests) == _MANY:
            self._add("64 requests at once")
        if not self._begun:
            self._begun = True
            versions = [server.version for server in self._servers.values()]
            if any(isinstance(version, int) and version > 0 for version in versions):
                self._add("starts from a later weight version")
        if self._end_token in request.prompt_ids:
            self._add("prompts with the end token inside")
        if self._limits is not None:
            self._near_limits(request, self._limits)

    def _near_limits(self, request: Request, limits: RolloutLimits) -> None:
        """Count the limits that a request comes near, as it states its sizes."""
        prompt, stated = len(request.prompt_ids), request.max_tokens
        turns = len(request.turns) + 1
        single = stated if turns == 1 else None
        sizes: Mapping[str, list[int | None]] = {
            "response": [single],
            "length": [None if single is None else prompt + single],
            "context": [None if single is None else prompt + single],
            "turns": [turns if turns > 1 or limits.turns in (1, 2) else None],
            "turn_tokens": [single],
            "answer": [len(answer) for answer in request.turns],
        }
        for name in LIMITS:
            limit: int | None = getattr(limits, name)
            for size in sizes[name]:
                place = None if size is None or limit is None else PLACES.get(size - limit)
                if place is not None:
                    self._add(f"{name} limit, {place}")

    def _near_response_limit(self, request: _OpenRequest, rollout: Rollout | None) -> None:
        """Count a response of several turns by its length: the environment decides about it."""
        response = self._limits.response if self._limits is not None else None
        if response is None or rollout is None or not request.request.turns:
            return
        missing = response - len(rollout.response_ids)
        if missing == 0 and request.turns < len(request.request.turns):
            self._add("response limit, one above")
        if missing in (0, 1):
            self._add(f"response limit, {PLACES[-missing]}")

    def _call(self, event: Call) -> None:
        self._add("engine calls")
        wants = [
            name
            for name, wanted in (("routes", event.want_routes), ("logprobs", event.want_logprobs))
            if wanted
        ]
        self._calls[event.call_id] = _OpenCall(
            event.request_id, event.server_id, event.max_tokens, tuple(wants)
        )
        self._server(event.server_id)
        request = self._requests.get(event.request_id)
        if request is None:
            return
        request.calls.append(event.call_id)
        for name in request.lacks:
            self._add(f"calls after a reply without {name}")
        request.lacks = ()
        if request.aborted:
            self._add("resumes")
            request.aborted = False

    def _admit(self, event: Admit) -> None:
        call = self._calls.get(event.call_id)
        if call is None:
            return
        call.admits += 1
        if call.admits == 1:
            self._servers[call.server].busy += 1
            if self._out_of_step:
                self._add("calls while replicas were out of step")
                if self._is_behind(self._servers[call.server].version):
                    self._add("calls on a replica with older weights")
        else:
            # A second admission is a preemption, unless a pause froze the call and its KV was
            # dropped.
            self._add("prefills again after a pause" if call.frozen else "preemptions")
        call.frozen = False

    def _is_behind(self, version: Version) -> bool:
        return isinstance(version, int) and any(
            isinstance(server.version, int) and server.version > version
            for server in self._servers.values()
        )

    def _reply(self, event: Reply) -> None:
        call = self._calls.pop(event.call_id, None)
        if call is not None and call.admits:
            self._servers[call.server].busy -= 1
        if call is None and event.call_id in self._lost:
            # It was answered in the very moment in which its server died.
            call = self._lost.pop(event.call_id)
            self._add("calls lost with their server", -1)
        if call is None:
            return
        output = event.output
        tokens = len(output.token_ids)
        self._add("tokens sampled", tokens)
        if not tokens:
            self._add("zero-token segments")
        elif self._empty_text:
            self._add("replies without text over HTTP")
        if output.cached_tokens:
            self._add("prefix-cache hits")
        if output.routes is not None:
            self._add("route rows", len(output.routes))
        if output.logprobs is not None and len(output.logprobs):
            self._add("logprobs below -32", int((output.logprobs < _DEEP).sum()))
            self._add("logprobs of exactly 0", int((output.logprobs == 0).sum()))
        self._add(_ending(call, output.finish_reason, tokens))
        lacks = tuple(name for name in call.wants if tokens and getattr(output, name) is None)
        for name in lacks:
            self._add(f"replies without {name}")
        if self._stops is not None and self._stops.first_in((), output.token_ids) is not None:
            self._add("replies with a stop sequence of the stack's own")
        request = self._requests.get(call.request)
        if request is not None and event.delivered and not event.duplicate:
            request.lacks = lacks
            self._consume(request, event)

    def _consume(self, request: _OpenRequest, reply: Reply) -> None:
        # an abort on the end token cut nothing
        ended = self._end_token is not None and reply.output.token_ids[-1:] == (self._end_token,)
        request.reason = FinishReason.STOP if ended else reply.output.finish_reason
        request.aborted = reply.output.finish_reason is FinishReason.ABORT
        request.aborts += request.aborted
        sampled_none = not reply.output.token_ids
        request.empty = request.empty + 1 if request.aborted and sampled_none else 0
        if request.empty == _IN_A_ROW:
            self._add("requests aborted three times in a row without a token")
        if request.empty and request.unbegun:
            self._add("aborts before the first token of a later turn")
        request.unbegun = request.unbegun and sampled_none
        before, sampled = len(request.versions), 0
        # Recordings have no true versions: the shown spans are the next best.
        for span in reply.true_tokens if reply.true_tokens is not None else reply.output.spans:
            if span.end > span.start and span.version is not None:
                sampled += 1
                if _is_older(span.version, request.versions):
                    self._add("resumes under older weights")
                if span.version not in request.versions:
                    request.versions.append(span.version)
        if sampled > 1:
            self._add("calls across a weight version")
        if before and sampled and request.versions[before:]:
            self._add("resumes across a weight version")

    def _abort(self, event: Abort) -> None:
        if not event.call_ids:
            self._add("aborts of nothing in flight")

    def _pause(self, event: Pause) -> None:
        self._add(f"pauses, mode {event.mode}")
        if self._slow_pauses:
            self._add("pauses that take effect later")
        if event.mode in _FREEZING:
            for call_id in event.progress or ():
                call = self._calls.get(call_id)
                if call is not None and call.admits:
                    call.frozen = True
                    self._add("calls frozen by a pause")

    def _weights(self, event: Weights) -> None:
        server = self._server(event.server_id)
        if not event.loaded:
            self._add("labels published without weights")
            return
        # The first load before any request is the start-up, not an update.
        if server.version is not None or self._requests:
            self._update(event, server)
        server.version = event.version
        self._out_of_step = len({server.version for server in self._servers.values()}) > 1

    def _update(self, event: Weights, server: _Server) -> None:
        if self._slow_transfers:
            self._add("weight transfers of several steps")
        if not self._requests:
            self._add("weight updates while idle")
        else:
            self._add(
                "weight updates while calls ran" if server.busy else "weight updates between calls"
            )
        if event.identity:
            self._add("identity updates")
        if event.label is None:
            self._add("weight updates without a label")

    def _observation(self, event: Observation) -> None:
        request = self._requests.get(event.request_id)
        if request is not None:
            request.turns += 1
            request.unbegun = True
            if request.reason in _CUT:
                self._add("answers of the environment after a cut turn")

    def _fault(self, event: Fault) -> None:
        # With a server the fault is one broken transfer; without one the entire update failed.
        if event.what == "update-failure":
            self._add(
                "failed weight updates" if event.server_id is None else "broken weight transfers"
            )
            return
        self._add(FAULTS.get(event.what, event.what))
        if event.what == "death" and event.server_id is not None:
            self._server(event.server_id).busy = 0
            lost = [
                number for number, call in self._calls.items() if call.server == event.server_id
            ]
            for call_id in lost:
                self._lost[call_id] = self._calls.pop(call_id)
                self._add("calls lost with their server")

    def _result(self, event: Result) -> None:
        request = self._requests.pop(event.request_id, None)
        if request is None:
            return
        # Calls that the stack gave up have no reply.
        for call_id in request.calls:
            self._lost.pop(call_id, None)
            call = self._calls.pop(call_id, None)
            if call is not None and call.admits:
                self._servers[call.server].busy -= 1
        if event.hung:
            self._add("requests that hung")
        elif event.error is not None:
            self._add("requests that ended with an error")
        elif event.rollout is None:
            self._add("requests dropped")
        if request.turns:
            self._add("multi-turn rollouts")
        if request.aborts > 1:
            self._add("requests aborted twice or more")
        if request.aborts > 10:
            self._add("requests aborted more than ten times")
        if request.reason in _CUT and request.turns < len(request.request.turns):
            self._add("turns cut with answers left")
        self._near_response_limit(request, event.rollout)
        if event.rollout is not None and self._end_token in event.rollout.response_ids[:-1]:
            self._add("responses with the end token inside")
        if len(request.versions) > 2:
            self._add("rollouts across two or more updates")

    def _unrecorded(self, event: Unrecorded) -> None:
        self._add("events that were not recorded", event.count)

    def _batch(self, event: Batch) -> None:
        self._add("samples in batches", len(event.samples))
        self._add(
            "samples in batches with the padding token inside",
            sum(
                self._pad_token in sample.prompt_ids + sample.response_ids
                for sample in event.samples
            ),
        )


def _is_older(version: Version, before: list[Version]) -> bool:
    """Return whether a version comes before one that sampled a token earlier."""
    return isinstance(version, int) and any(
        isinstance(earlier, int) and earlier > version for earlier in before
    )


class ReplaySituationCounter:
    """Counts the situations of one trace of a trainer with routing replay, event by event."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def event(self, event: Event) -> None:
        """Count what one event shows."""
        counts = self._counts
        if isinstance(event, Step):
            counts[f"steps, {event.action}"] += 1
            counts[f"steps, {event.purpose}"] += 1
            counts[f"steps with {event.recompute} recompute"] += (
                event.recompute is not Recompute.NONE
            )
            counts["steps under drifted weights"] += event.weights > 0
            counts["bad routes"] += event.defect is not None
            counts["steps with a failure"] += event.fail_at is not None
        elif isinstance(event, Routing):
            counts[f"rows routed in {event.phase}"] += len(event.experts)
        elif isinstance(event, Outcome):
            counts["steps skipped"] += bool(event.skipped)
            counts["steps that ended with an error"] += event.error is not None

    @property
    def counts(self) -> dict[str, int]:
        """How often each situation occurred, by name and sorted, without zeros."""
        return {name: count for name, count in sorted(self._counts.items()) if count}


def _ending(call: _OpenCall, reason: FinishReason, tokens: int) -> str:
    """Return the name of how a call ended. The budget is the one granted to the call."""
    full = call.max_tokens is not None and tokens >= call.max_tokens
    if reason is FinishReason.ABORT:
        if not tokens:
            # A recording has no Admit events, but a call that sampled tokens was admitted.
            return "aborts before the first token" if call.admits else "aborts while queued"
        return "aborts on the last token" if full else "aborts mid-decode"
    if reason is FinishReason.STOP:
        return (
            "ends of sequence on the last token" if full else "ends of sequence before the budget"
        )
    return "budgets exhausted" if full else "natural ends"
