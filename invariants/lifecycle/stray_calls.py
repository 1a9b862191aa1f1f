"""Checks on which calls a stack may make, and which it may leave running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import Abort, Admit, Call, Fault, Reply, Result, Submit
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import EventCheck, RecentItems, case_option, remember
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import Check, Collector, Scope, request_check, trace_check
from rollproof.judging.request_view import RequestView

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "lifecycle_bounded_attempts",
    "lifecycle_no_call_after_end",
    "lifecycle_no_empty_grant",
    "lifecycle_no_orphan_calls",
]

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)
_MANY_ATTEMPTS = 200
_REFUSAL = 0.015
"""What a refused call takes at most if nobody waits, in steps: a fake engine takes 0.01."""


@dataclass(slots=True)
class _OpenCall:
    """A call without a reply.

    request: Its request.
    server: Its server.
    admitted: Whether the server admitted it.
    outlived: The end of its request, if that ended before the call.
    """

    request: str
    server: str
    admitted: bool = False
    outlived: Result | None = None


class LifecycleNoOrphanCalls(EventCheck):
    """A call may end aborted or unseen after its caller gave up; one that runs to its natural end
    was forgotten.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._open: dict[int, _OpenCall] = {}
        # a recording of calls alone says nothing of admissions
        self._shows_admissions = context.header.case is not None
        self._ended = 0

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._open, event.call_id, _OpenCall(event.request_id, event.server_id))

    def finish(self, out: Collector) -> None:
        if self._shows_admissions:
            out.exercised("requests that ended", self._ended)
        else:
            out.absent("the trace does not say when a server admits a call")

    def on_admit(self, event: Admit, out: Collector) -> None:
        self._shows_admissions = True
        call = self._open.get(event.call_id)
        if call is not None:
            call.admitted = True

    def on_abort(self, event: Abort, out: Collector) -> None:
        for call_id in event.call_ids:
            self._open.pop(call_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.call_id is not None:
            self._open.pop(event.call_id, None)
        elif event.what == "death":
            # what a dead server ran has ended with it, and no abort could reach it
            self._open = {
                call_id: call
                for call_id, call in self._open.items()
                if call.server != event.server_id
            }

    def on_result(self, event: Result, out: Collector) -> None:
        self._ended += 1
        view = self.context.open.get(event.request_id)
        for attempt in view.attempts if view is not None else ():
            call = self._open.get(attempt.call.call_id)
            # A queued call that was never admitted costs nothing, and a hung request was given up
            # by the run. A call whose owner is a guess may be that of a request that goes on.
            goes_on = any(name in self.context.open for name in attempt.call.candidates)
            if call is not None and call.admitted and not event.hung and not goes_on:
                call.outlived = event
            elif call is not None:
                del self._open[attempt.call.call_id]

    def on_reply(self, event: Reply, out: Collector) -> None:
        call = self._open.pop(event.call_id, None)
        # A call that ends by an abort was given up in time.
        if call is None or call.outlived is None or event.output.finish_reason not in _NATURAL:
            return
        out.finding(
            "an engine kept running a call of a request that had ended",
            expected=(
                f"call {event.call_id} is aborted when its request ends, at event"
                f" {call.outlived.index}"
            ),
            observed=(
                f"it ran to finish reason {event.output.finish_reason},"
                f" {len(event.output.token_ids)} tokens, at event {event.index}"
            ),
            where={
                "request": call.request,
                "call": event.call_id,
                "server": call.server,
                "index": event.index,
            },
            hint=(
                "A retry left the first call running: abort it on the server or cancel it"
                " when its caller gives up."
            ),
        )


lifecycle_no_orphan_calls: Check = trace_check(
    "lifecycle.no-orphan-calls",
    promise="When a request has ended, no engine keeps running its calls.",
    needs="Admit, Reply and Result events",
    exercised_by="requests that ended",
)(LifecycleNoOrphanCalls)


class LifecycleNoCallAfterEnd(EventCheck):
    """Looks for calls of requests that have ended."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._ended = RecentItems()

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._ended.discard(event.request.request_id)

    def on_result(self, event: Result, out: Collector) -> None:
        view = self.context.open.get(event.request_id)
        # Requests of a group share their prompt, so that a call may be attributed to the wrong one
        # of them. A request that hung was given up by the run, and its stack continues.
        if view is not None and view.request.group is None and not event.hung:
            self._ended.add(event.request_id)
            out.exercised("requests that ended")

    def on_call(self, event: Call, out: Collector) -> None:
        # The trace attributes a call to a request by its id or its prompt; a guess may be wrong.
        if event.request_id in self._ended and not event.candidates:
            out.finding(
                "a call was made for a request that had ended",
                expected="no call after the request's result",
                observed=f"call {event.call_id} to {event.server_id} at event {event.index}",
                where={
                    "request": event.request_id,
                    "call": event.call_id,
                    "server": event.server_id,
                    "index": event.index,
                },
                hint="A resume loop or a retry outlives the request that it belongs to.",
            )


lifecycle_no_call_after_end: Check = trace_check(
    "lifecycle.no-call-after-end",
    promise="No call is made for a request that has ended.",
    needs="Call and Result events",
    exercised_by="requests that ended",
)(LifecycleNoCallAfterEnd)


@request_check(
    "lifecycle.no-empty-grant",
    promise="No call requests zero or fewer tokens.",
    needs="Call events with max_tokens",
    exercised_by="calls with a budget",
)
def lifecycle_no_empty_grant(view: RequestView, out: Collector) -> None:
    """Look for calls without budget. A caller that requests no tokens is excused."""
    calls = [attempt.call for attempt in view.attempts if attempt.call.max_tokens is not None]
    out.exercised("calls with a budget", len(calls))
    budget = view.request.budget
    # The caller requested nothing, so that the stack passes it on.
    if budget is not None and budget <= 0:
        return
    for call in calls:
        if call.max_tokens is not None and call.max_tokens <= 0:
            out.finding(
                "a call requests no tokens",
                expected="a budget of at least 1 token, or no call",
                observed=f"call {call.call_id} with max_tokens={call.max_tokens}",
                where=view.place(call=call.call_id, server=call.server_id, index=call.index),
                hint=(
                    "SGLang and vLLM refuse it with an error: stop the resume loop when the"
                    " budget is used up."
                ),
            )


@request_check(
    "lifecycle.bounded-attempts",
    promise=("A request does not retry without a wait while its calls return no tokens."),
    needs="replies without tokens, or calls that a server refused, with the time of each call",
    exercised_by=("replies without tokens", "calls that no server took"),
    scope=Scope.REQUEST,
)
def lifecycle_bounded_attempts(view: RequestView, out: Collector) -> None:
    """Look for runs of empty attempts. Polling a paused or dead server at intervals is a design;
    200 empty replies closer together than engine steps, or 200 refused calls with nothing between
    them, are a busy loop.
    """
    # A recording has no step time: a millisecond is shorter than any real engine step.
    options = case_option(view.header, "engine")
    step = float(options["step"]) if options else 1e-3
    run: list[Attempt] = []
    refused = 0
    shortest = 0.0
    for attempt in view.attempts:
        reply = attempt.consumed
        # Calls that are made together wait for one another's server, not in a loop.
        together = bool(run) and run[-1].call.time >= attempt.call.time
        if reply is None and options and attempt.admit is None:
            if together:
                continue
            out.exercised("calls that no server took")
            refused += 1
            shortest += _REFUSAL * step
        elif reply is None or reply.output.token_ids:
            run, refused, shortest = [], 0, 0.0
            continue
        else:
            out.exercised("replies without tokens")
            shortest += step / 2
        run.append(attempt)
        if len(run) <= _MANY_ATTEMPTS:
            continue
        waited = attempt.call.time - run[0].call.time
        if waited < shortest:
            out.finding(
                "a request retries in a busy loop",
                expected=(
                    f"at most {_MANY_ATTEMPTS} empty attempts in a row, or a wait between them"
                ),
                observed=f"{len(run)} calls in {waited:g} s without a token"
                + (f", {refused} of them refused" if refused else ""),
                where=view.place(
                    call=attempt.call.call_id,
                    server=attempt.call.server_id,
                    index=attempt.call.index,
                ),
                hint=(
                    "The client calls again at once when a server is dead or refuses: wait"
                    " between attempts, or call another server."
                    if refused > len(run) / 2
                    else "The client retries immediately while the server is paused: wait for the"
                    " resume, or sleep between attempts."
                ),
            )
            return
