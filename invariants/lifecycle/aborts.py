"""Checks on aborts of engine calls: which calls they hit, what those return, and that they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Chunk,
    Fault,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    EventCheck,
    remember,
)
from rollproof.invariants._shared.phrases import listing
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "lifecycle_abort_ends_call",
    "lifecycle_abort_hits_target",
    "lifecycle_abort_keeps_tokens",
]


@dataclass(slots=True)
class _OpenCall:
    """A call in flight.

    request: Its request.
    server: Its server.
    caused: Whether something that aborts calls reached it.
    certain: Whether it belongs to a request, at least by the task that made it.
    suspect: An abort of another call that may have hit it.
    """

    request: str
    server: str
    caused: bool = False
    certain: bool = True
    suspect: Abort | None = None


class LifecycleAbortHitsTarget(EventCheck):
    """An id names a request, a call or a group; ids that the stack made up must hit at most one
    request. An abort of several requests of a group needs a contract that says so (group_aborts).
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._groups: dict[str, str | None] = {}
        self._in_flight: dict[int, _OpenCall] = {}
        self._called: dict[str, None] = {}
        # a recording has no such rule: it shows requests of stacks whose contract is older
        self._together = context.contract.group_aborts or context.header.case is None
        self._paused: set[str] = set()
        self._suspects: dict[str, list[tuple[int, Abort]]] = {}

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._groups[event.request.request_id] = event.request.group

    def on_result(self, event: Result, out: Collector) -> None:
        self._groups.pop(event.request_id, None)

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._called, event.request_id, None)
        remember(
            self._in_flight,
            event.call_id,
            _OpenCall(
                event.request_id,
                event.server_id,
                caused=event.server_id in self._paused,
                certain=event.request_id not in ("", *event.candidates),
            ),
        )

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.add(event.server_id)
        self._suspects.pop(event.server_id, None)
        # Such a pause aborts everything on its server, so that no single abort is to blame.
        if event.mode is PauseMode.ABORT:
            self._excuse(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.discard(event.server_id)

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._suspects.pop(event.server_id, None)
        self._excuse(event.server_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.server_id is not None and event.what == "death":
            self._suspects.pop(event.server_id, None)
        # A fault of a call explains its abort.
        if event.call_id in self._in_flight:
            self._in_flight[event.call_id].caused = True
        elif event.server_id is not None:
            self._excuse(event.server_id)

    def _excuse(self, server: str) -> None:
        for call in self._in_flight.values():
            if call.server == server:
                call.caused = True

    def on_abort(self, event: Abort, out: Collector) -> None:
        # A recording shows that an abort was requested, and not which calls it found: any call of
        # the server may be its own.
        unknown_calls = not event.call_ids and self.context.header.case is None
        # An abort of all calls explains every aborted reply of its server.
        if event.wanted == "*" or unknown_calls:
            self._excuse(event.server_id)
            return
        aborted = {
            call_id: self._in_flight[call_id].request
            for call_id in event.call_ids
            if call_id in self._in_flight
        }
        if aborted:
            out.exercised("aborts of one id")
        for call_id, call in self._in_flight.items():
            if call_id in aborted:
                call.caused = True
            elif call.server == event.server_id and not call.caused:
                call.suspect = event
        # SGLang matches ids by prefix: "1" aborts "10", and an empty id aborts everything (sglang
        # #25561).
        known = {call: aborted[call] for call in aborted if self._in_flight[call].certain}
        wrong = self._unrelated(event.wanted, known)
        siblings = [] if wrong or self._together else self._siblings(known)
        if siblings:
            out.finding(
                "an abort ended calls of several samples of one prompt",
                expected="only calls of one request end (group_aborts=False)",
                observed=(
                    f"the abort of {event.wanted!r} ended calls of requests"
                    f" {listing(dict.fromkeys(map(repr, known.values())))}"
                ),
                where={
                    "request": known[siblings[0]],
                    "call": siblings[0],
                    "server": event.server_id,
                    "index": event.index,
                },
                hint=(
                    "The samples of a prompt share a handle, or its beginning: give each call a"
                    " handle of its own. Declare group_aborts=True if one abort is meant to end"
                    " them all."
                ),
            )
        if wrong:
            out.finding(
                "an abort hit a call that it did not name",
                expected=(
                    f"only calls of {event.wanted!r} end"
                    if event.wanted
                    else "an empty id aborts nothing"
                ),
                observed=(
                    f"call{'s' if len(wrong) > 1 else ''}"
                    f" {', '.join(f'{call} of request {aborted[call]!r}' for call in wrong)} also"
                    " ended"
                ),
                where={
                    "request": aborted[wrong[0]],
                    "call": wrong[0],
                    "server": event.server_id,
                    "index": event.index,
                },
                hint=(
                    "Ids are matched by prefix: '1' aborts '10', an empty id everything (sglang"
                    " #25561). Make ids prefix-free."
                ),
            )

    def _unrelated(self, wanted: str, aborted: Mapping[int, str]) -> list[int]:
        """Return the aborted calls that ``wanted`` does not name; if the id is unknown, those
        after the first request or group.
        """
        unrelated = [
            call
            for call, request in aborted.items()
            if wanted not in (request, str(call), self._groups.get(request))
        ]
        if not wanted or len(unrelated) < len(aborted) or wanted in self._groups:
            return unrelated
        if self._is_prefix(wanted, aborted):
            return []
        first = next(iter(aborted.values()), "")
        group = self._groups.get(first)
        return [
            call
            for call, request in aborted.items()
            if request != first and (group is None or self._groups.get(request) != group)
        ]

    def _siblings(self, aborted: Mapping[int, str]) -> list[int]:
        """Return the calls of a group's other requests that an abort also ended."""
        first = next(iter(aborted.values()), "")
        group = self._groups.get(first)
        if group is None:
            return []
        return [
            call
            for call, request in aborted.items()
            if request != first and self._groups.get(request) == group
        ]

    def _is_prefix(self, wanted: str, aborted: Mapping[int, str]) -> bool:
        """Return whether a caller may have named several calls by the prefix of their ids, as
        SGLang allows.
        """
        # In a stack that reports its requests, an id is one that it made up, and such a hit would
        # be by chance.
        return wanted not in self._called and not any(
            request in self._groups for request in aborted.values()
        )

    def on_reply(self, event: Reply, out: Collector) -> None:
        call = self._in_flight.pop(event.call_id, None)
        if (
            call is not None
            and call.suspect is not None
            and not call.caused
            and event.output.finish_reason is FinishReason.ABORT
        ):
            self._suspects.setdefault(call.server, []).append((event.call_id, call.suspect))

    def finish(self, out: Collector) -> None:
        """Report the collateral calls that no later pause or load of their server explains."""
        for server, suspects in self._suspects.items():
            for call_id, abort in suspects:
                out.finding(
                    "a call ended as aborted although only another one was",
                    expected=(
                        f"the abort of {abort.wanted!r} at event {abort.index} ends only its own"
                        " calls"
                    ),
                    observed=(
                        f"call {call_id} ended with finish reason abort, and nothing else"
                        " aborted it"
                    ),
                    where={"call": call_id, "server": server, "index": abort.index},
                    hint=(
                        "Ids are matched by prefix (sglang #25561), or the abort reached the"
                        " entire batch."
                    ),
                )


lifecycle_abort_hits_target: Check = trace_check(
    "lifecycle.abort-hits-target",
    promise="An abort of one id ends the calls of that id and no others.",
    needs="Abort events that name an id, with calls in flight",
    exercised_by="aborts of one id",
)(LifecycleAbortHitsTarget)


class LifecycleAbortKeepsTokens(EventCheck):
    """Compares the aborted reply with the last known progress of the call, and with what the engine
    really sampled.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._progress: dict[int, int] = {}
        self._streams: dict[int, StreamMode] = {}

    def _note(self, progress: Mapping[int, int] | None) -> None:
        for call, count in (progress or {}).items():
            remember(self._progress, call, count)

    def on_call(self, event: Call, out: Collector) -> None:
        if event.stream is not None:
            self._streams[event.call_id] = event.stream

    def on_chunk(self, event: Chunk, out: Collector) -> None:
        # The chunk that ends a stream may repeat a token: engine.stream judges that.
        if event.finished:
            return
        before, tokens = self._progress.get(event.call_id, 0), len(event.token_ids)
        delta = self._streams.get(event.call_id) is StreamMode.DELTA
        remember(self._progress, event.call_id, before + tokens if delta else max(before, tokens))

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._note(event.progress)

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._note(event.progress)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._note(event.progress)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._streams.pop(event.call_id, None)
        progress = self._progress.pop(event.call_id, None)
        if event.duplicate or event.output.finish_reason is not FinishReason.ABORT:
            return
        sampled_tokens = (
            max((span.end for span in event.true_tokens), default=0)
            if event.true_tokens is not None
            else None
        )
        if progress is None and sampled_tokens is None:
            return
        out.exercised("aborted calls with known progress")
        # The engine's own count and the progress at a pause are both lower bounds of what was
        # sampled.
        sampled = max(progress or 0, sampled_tokens or 0)
        returned = len(event.output.token_ids)
        if returned < sampled:
            out.finding(
                "an aborted call lost tokens that it had sampled",
                expected=f"at least {sampled} tokens",
                observed=f"{returned} tokens",
                where={"call": event.call_id, "index": event.index},
                hint=(
                    "A call that is aborted in the waiting queue (after a retraction) must"
                    " return what it had sampled (sglang #11673, vLLM #22197)."
                ),
            )


lifecycle_abort_keeps_tokens: Check = trace_check(
    "lifecycle.abort-keeps-tokens",
    promise="An aborted call returns every token that it had sampled.",
    needs=(
        "progress of the call at a Pause, Weights or Resume event, its chunks, or its true_tokens"
    ),
    exercised_by="aborted calls with known progress",
)(LifecycleAbortKeepsTokens)


class LifecycleAbortEndsCall(EndAwareCheck):
    """A call on a server that is paused, dead or concerned by a fault is excused."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._in_flight: dict[int, str] = {}
        self._aborted: dict[int, Abort] = {}
        self._paused: set[str] = set()

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._in_flight, event.call_id, event.server_id)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.discard(event.server_id)

    def on_abort(self, event: Abort, out: Collector) -> None:
        self._aborted.update(
            (call_id, event) for call_id in event.call_ids if call_id in self._in_flight
        )

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._in_flight.pop(event.call_id, None)
        if self._aborted.pop(event.call_id, None) is not None:
            out.exercised("calls aborted")

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        for call_id, server in list(self._in_flight.items()):
            if call_id == event.call_id or (event.what == "death" and server == event.server_id):
                del self._in_flight[call_id]
                self._aborted.pop(call_id, None)

    def finish(self, out: Collector) -> None:
        for call_id, abort in self._aborted.items():
            # A paused server answers after its resume.
            if abort.server_id in self._paused:
                continue
            if not self.complete and not self.hung:
                out.absent("the trace ends after an abort, and may have been cut there")
                continue
            out.finding(
                "an aborted call never ended",
                expected=(
                    f"a reply to call {call_id}, which the abort of {abort.wanted!r} at event"
                    f" {abort.index} hit"
                ),
                observed="none until the end of the trace",
                where={"call": call_id, "server": abort.server_id, "index": abort.index},
                hint=(
                    "The engine dropped the request without a reply (tpu-inference #3362), so"
                    " its caller waits."
                ),
            )


lifecycle_abort_ends_call: Check = trace_check(
    "lifecycle.abort-ends-call",
    promise="An aborted call ends: its caller gets a reply, and nothing is left running.",
    needs="Abort events that hit calls, in a trace that runs to its end or hangs",
    exercised_by="calls aborted",
)(LifecycleAbortEndsCall)
