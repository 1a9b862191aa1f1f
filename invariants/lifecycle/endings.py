"""Checks on how requests end: once, without a hang, and with a sample."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rollproof.core.contract import PartialOff, ResumeBy
from rollproof.core.events.rollout import (
    Result,
    Submit,
)
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    RecentItems,
    case_option,
)
from rollproof.judging.checks import Check, Collector, Scope, request_check, trace_check
from rollproof.judging.request_view import RequestView
from rollproof.judging.stale_samples import is_too_old

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.judge_context import JudgeContext

__all__ = ["lifecycle_drops_only_as_declared", "lifecycle_ends_once", "lifecycle_no_hang"]


class LifecycleEndsOnce(EndAwareCheck):
    """Looks for a second end of a request, an end of an unknown one, and no end at all."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._open: dict[str, Submit] = {}
        self._ended = RecentItems()

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._open[event.request.request_id] = event

    def on_result(self, event: Result, out: Collector) -> None:
        super().on_result(event, out)
        if self._open.pop(event.request_id, None) is not None:
            self._ended.add(event.request_id)
            out.exercised("requests that ended")
        # AReaL #1498: a completion of a retried call was added as a second sample.
        elif event.request_id in self._ended:
            out.finding(
                "a request ended twice",
                expected="one result for each request",
                observed=f"a second result at event {event.index}",
                where={"request": event.request_id, "index": event.index},
                hint=(
                    "A retried or duplicated completion was delivered as a separate sample"
                    " (AReaL #1498)."
                ),
            )
        # A recording may begin in the middle of a run, after the submission.
        elif self.context.header.case is not None:
            out.finding(
                "a result of a request that was never submitted",
                expected="results of submitted requests only",
                observed=f"a result of {event.request_id!r} at event {event.index}",
                where={"request": event.request_id, "index": event.index},
            )

    def finish(self, out: Collector) -> None:
        for request_id, submit in self._open.items():
            if self.complete:
                out.finding(
                    "a request never ended",
                    expected="a rollout, an error, or a declared drop",
                    observed="none until the end of the trace",
                    where={"request": request_id, "index": submit.index},
                )
            else:
                out.absent("the trace ends while requests are open, and may have been cut there")


lifecycle_ends_once: Check = trace_check(
    "lifecycle.ends-once",
    promise="Every submitted request ends exactly once.",
    needs="Submit and Result events, in a trace that runs to its end",
    exercised_by="requests that ended",
)(LifecycleEndsOnce)


@request_check(
    "lifecycle.no-hang",
    promise="No request waits forever.",
    needs="Result events",
    exercised_by="requests that ended",
    reads_calls=False,
    scope=Scope.REQUEST,
)
def lifecycle_no_hang(view: RequestView, out: Collector) -> None:
    """Report what a hung request awaited, and what became of its last call."""
    result = view.result
    if result is None:
        return
    out.exercised("requests that ended")
    if not result.hung:
        return
    if _awaits_the_only_server_of_its_role(view):
        out.absent(
            "the only prefill or the only decode server of a proxy is gone for good: like a fleet"
            " without servers, it can end no request"
        )
        return
    last = view.attempts[-1] if view.attempts else None
    # Whether the last call was answered separates a client that waits from an engine that does.
    state = "no call was ever made"
    if view.unattributed_calls:
        state = "which calls are its own is not known"
    elif last is not None:
        answered = (
            "was answered"
            if last.consumed
            else "was admitted and not answered"
            if last.admit
            else "was not admitted"
        )
        state = f"its last call, {last.call.call_id} on {last.call.server_id}, {answered}"
    out.finding(
        "a request hangs",
        expected="a rollout or an error within the deadline",
        observed=f"{result.error or 'it never ended'}; {state}",
        where=view.place(index=result.index),
        hint=(
            "Usual causes: a server left paused by a failed update, a lost reply without a"
            " timeout, a lock held by a cancelled task."
        ),
    )


def _awaits_the_only_server_of_its_role(view: RequestView) -> bool:
    """Return whether a request calls a dead server that is the only one on which a proxy prefills,
    or the only one on which it decodes.
    """
    refused = next((call for call in reversed(view.every_call) if not call.replies), None)
    if refused is None or refused.died is None or view.unattributed_calls:
        return False
    prefilled: set[str] = set()
    decoded: set[str] = set()
    for request in (view, *view.neighbours):
        for call, later in pairwise(request.every_call):
            if _prefills(call, later):
                prefilled.add(call.call.server_id)
                decoded.add(later.call.server_id)
    # a client that takes servers in turn calls each of them in both ways
    return prefilled.isdisjoint(decoded) and {refused.call.server_id} in (prefilled, decoded)


def _prefills(call: Attempt, later: Attempt) -> bool:
    """Return whether a call samples one token for the next one, which goes on elsewhere with a
    larger budget.
    """
    reply, budget = call.consumed, later.call.max_tokens
    sent = call.call.prompt_ids
    return (
        call.call.max_tokens == 1
        and reply is not None
        and len(reply.output.token_ids) == 1
        and later.call.server_id != call.call.server_id
        and later.call.prompt_ids in (sent, sent + reply.output.token_ids)
        and (budget is None or budget > 1)
    )


@request_check(
    "lifecycle.drops-only-as-declared",
    promise=(
        "A sample is dropped only if it was aborted, partial rollout is off and the contract says"
        " that such samples are dropped, or if it is older than max_staleness allows."
    ),
    needs="Result events",
    exercised_by="requests that ended",
    scope=Scope.REQUEST,
)
def lifecycle_drops_only_as_declared(view: RequestView, out: Collector) -> None:
    """Report a sample that vanished without an error: it shrinks a group or a batch unnoticed."""
    result = view.result
    if result is None:
        return
    out.exercised("requests that ended")
    # Errors and hangs are reported by other checks of the family.
    if result.rollout is not None or result.error is not None or result.hung:
        return
    # delivered, it would break the bound (weights.staleness-bound)
    if is_too_old(view, view.attempts, result.index):
        return
    last = view.segments[-1].consumed if view.segments else None
    reason = None
    if view.contract.partial_off is not PartialOff.DROPPED:
        reason = "the contract does not declare partial_off='dropped'"
    elif view.contract.resume is ResumeBy.CLIENT and case_option(view.header, "partial") is True:
        reason = "partial rollout is on"
    elif last is not None and last.output.finish_reason is not FinishReason.ABORT:
        reason = f"its last call ended with finish reason {last.output.finish_reason}"
    if reason is not None:
        out.finding(
            "a sample was dropped although the contract does not allow it",
            expected=f"a rollout or an error: {reason}",
            observed="nothing was delivered",
            where=view.place(index=result.index),
            hint=(
                "Raise an error, or deliver what there is: a group that loses a member"
                " unnoticed changes its advantages."
            ),
        )
