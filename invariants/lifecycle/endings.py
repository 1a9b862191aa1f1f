"""Checks on how requests end: once, without a hang, and with an error only after a fault."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.contract import PartialOff, Provenance, ResumeBy
from rollproof.core.error_text import error_kind
from rollproof.core.events.rollout import (
    Call,
    Fault,
    Gauge,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Unrecorded,
    Update,
    UpdatePhase,
)
from rollproof.core.records import EngineOutput, FinishReason
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    EventCheck,
    RecentItems,
    case_option,
    remember,
)
from rollproof.invariants._shared.phrases import count
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import Check, Collector, request_check, trace_check
from rollproof.judging.request_view import UNATTRIBUTED_CALLS, RequestView
from rollproof.judging.stale_samples import is_too_old
from rollproof.judging.stitching import stitch

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "lifecycle_counters_return",
    "lifecycle_drops_only_as_declared",
    "lifecycle_ends_once",
    "lifecycle_no_error_without_fault",
    "lifecycle_no_hang",
    "lifecycle_survives_death",
]

# Faults of the fleet concern every open request, faults of a call only that one.
_FLEET_FAULTS = frozenset({"death", "revive", "update-failure", "update-hung"})
_BALANCING = frozenset({"leave", "join"})
_CUTS = frozenset({"death", "lost-reply", "broken-stream", "reject", "update-failure"})


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
)
def lifecycle_no_hang(view: RequestView, out: Collector) -> None:
    """Report what a hung request awaited, and what became of its last call."""
    result = view.result
    if result is None:
        return
    out.exercised("requests that ended")
    if not result.hung:
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


class LifecycleNoErrorWithoutFault(EventCheck):
    """A stack must accept every legal engine reply: an empty abort, a read-only array, no
    logprobs.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._open: dict[str, bool] = {}
        self._calls: dict[int, tuple[tuple[str, ...], str]] = {}
        self._down: set[str] = set()

    def on_submit(self, event: Submit, out: Collector) -> None:
        budget = event.request.budget
        self._open[event.request.request_id] = bool(self._down) or (
            # A caller that requests no tokens may get an error.
            budget is not None and budget <= 0
        )

    def on_call(self, event: Call, out: Collector) -> None:
        # any of the requests that the call may be for may fail with it
        owners = (event.request_id, *event.candidates)
        remember(self._calls, event.call_id, (owners, event.server_id))

    def on_reply(self, event: Reply, out: Collector) -> None:
        if not event.delivered:
            self._excuse(event.call_id)

    def on_unrecorded(self, event: Unrecorded, out: Collector) -> None:
        # what was not recorded may have been the fault
        if event.call_id is not None:
            self._excuse(event.call_id)
        if event.request_id in self._open:
            self._open[event.request_id] = True

    def on_fault(self, event: Fault, out: Collector) -> None:
        # a replica outside the balancer goes on with its calls: nothing that may fail
        if event.what in _BALANCING:
            return
        if event.server_id is not None:
            if event.what == "death":
                self._down.add(event.server_id)
            elif event.what == "revive":
                self._down.discard(event.server_id)
        # Only the request of that call may fail.
        if event.call_id is not None and event.what not in _FLEET_FAULTS:
            self._excuse(event.call_id)
        elif event.what in _FLEET_FAULTS or event.server_id is None:
            self._open = dict.fromkeys(self._open, True)
        else:
            for call_id, (_, server) in self._calls.items():
                if server == event.server_id:
                    self._excuse(call_id)

    def _excuse(self, call_id: int) -> None:
        for request_id in self._calls.get(call_id, ((), ""))[0]:
            if request_id in self._open:
                self._open[request_id] = True

    def on_result(self, event: Result, out: Collector) -> None:
        excused = self._open.pop(event.request_id, None)
        if excused is None:
            return
        view = self.context.open.get(event.request_id)
        attempts = view.attempts if view is not None else []
        for attempt in attempts:
            self._calls.pop(attempt.call.call_id, None)
        out.exercised("requests that ended")
        if event.error is None or event.hung or excused:
            return
        replies = [attempt.consumed.output for attempt in attempts if attempt.consumed]
        last = (
            f"its last reply had {count(len(replies[-1].token_ids), 'token')}, finish reason"
            f" {replies[-1].finish_reason}"
            if replies
            else "no reply came"
        )
        out.finding(
            "a request failed although nothing went wrong",
            kind=f"a request failed: {error_kind(event.error)}",
            expected="a rollout: no server died, no reply was lost, no update failed",
            observed=f"{event.error}; {last}",
            where={"request": event.request_id, "index": event.index},
            hint=_cause_of(event.error, replies[-1] if replies else None),
        )


def _cause_of(error: str, last: EngineOutput | None) -> str:
    """Return the known cause that the error and the last reply show, if they show one."""
    if _OF_FAKE.search(error):
        return (
            "Your client calls its servers in another form than the fake server's methods have: put"
            " a small class between them that translates arguments and replies"
            " (docs/how-to/adapter.md)."
        )
    if _is_own(error):
        last = None
    if last is not None and (
        (last.routes is not None and _ARRAY.search(error))
        # `out.logprobs or []`
        or (last.logprobs is not None and _TRUTH.search(error))
    ):
        return (
            "A legal engine reply made the stack raise: it takes routes or logprobs for a list or a"
            " tensor, and the engine returned a numpy array (verl #7158). If your engine returns"
            " lists, convert them where your adapter reads the reply: `out.logprobs.tolist()`."
        )
    if last is not None and last.finish_reason is FinishReason.ABORT and not last.token_ids:
        return (
            "The last reply is an abort without tokens, which is legal: an engine answers so for a"
            " call that it had not begun (verl #5936, vime #49)."
        )
    return "The error is the stack's own: its class and text say where it was raised."


def _is_own(error: str) -> bool:
    """Whether the class and the text of an error say that no value of a reply can have caused it:
    a misspelt name, a wrong call.
    """
    kind = error.partition(":")[0]
    if kind == "AttributeError":
        lacking = _LACKING.search(error)
        if lacking is None or lacking[1] not in _OF_REPLIES:
            return True
        return lacking[1] == "numpy.ndarray" and lacking[2] not in _OF_LISTS_AND_TENSORS
    return kind in _MISSPELT or (kind == "TypeError" and _WRONG_CALL.search(error) is not None)


_MISSPELT = frozenset(
    ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
)
_OF_FAKE = re.compile(
    r"(FakeEngine|RayHandle)(\.\w+\(\) (got|missing|takes)|' object has no attribute)"
)
_WRONG_CALL = re.compile(r"(keyword|positional) argument")
_LACKING = re.compile(r"'([\w.]+)' object has no attribute '(\w+)'")
_OF_REPLIES = frozenset(("numpy.ndarray", "NoneType", "list", "tuple"))
"""Types of the values in a reply."""
_OF_LISTS_AND_TENSORS = frozenset(
    (*dir(list), "clone", "cpu", "detach", "device", "dim", "is_cuda", "numel", "numpy", "to")
)
"""Attributes that a stack may expect of routes which an engine returns as an array."""
_TRUTH = re.compile(r"truth value of an (empty )?array", re.IGNORECASE)
_ARRAY = re.compile(r"ndarray|numpy|truth value of an array", re.IGNORECASE)


lifecycle_no_error_without_fault: Check = trace_check(
    "lifecycle.no-error-without-fault",
    promise="A request ends with an error only after a fault that concerned it.",
    needs="Result, Fault and Call events",
    exercised_by="requests that ended",
)(LifecycleNoErrorWithoutFault)


class LifecycleCountersReturn(EndAwareCheck):
    """In-flight counts of load balancers, staleness managers and semaphores leak on untested
    paths.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._updates = 0
        self._returned = False
        self._paused: dict[str, tuple[Pause, bool]] = {}
        self._calls: dict[int, str] = {}
        self._cut_short = False

    def on_gauge(self, event: Gauge, out: Collector) -> None:
        super().on_gauge(event, out)
        if event.phase == "start":
            self._start[event.name] = event.value
        elif event.phase == "end":
            self._end[event.name] = event.value

    def on_update(self, event: Update, out: Collector) -> None:
        self._updates += 1 if event.phase is UpdatePhase.ASKED else -1
        self._returned = self._returned or event.phase is UpdatePhase.ENDED

    def on_pause(self, event: Pause, out: Collector) -> None:
        unawaited = self._returned and not self._updates
        self._paused.setdefault(event.server_id, (event, unawaited))

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.pop(event.server_id, None)

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._calls, event.call_id, event.server_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._calls.pop(event.call_id, None)
        if event.output.finish_reason is FinishReason.ABORT:
            self._cut_short = True

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        self._cut_short = self._cut_short or event.what in _CUTS
        if event.what == "death" and event.server_id is not None:
            self._paused.pop(event.server_id, None)
            self._calls = {
                call: server for call, server in self._calls.items() if server != event.server_id
            }

    def on_result(self, event: Result, out: Collector) -> None:
        super().on_result(event, out)
        self._cut_short = self._cut_short or event.error is not None

    def _hint(self, name: str) -> str:
        """Return what the trace says about why a counter did not return."""
        server, _, counted = name.rpartition("/")
        pause, unawaited = self._paused.get(server, (None, False))
        if pause is not None and counted in ("paused", "running", "waiting"):
            return (
                f"{server} was paused at event {pause.index}, when update_weights had returned, and"
                " not resumed: the update goes on in a task that nobody awaits."
                if unawaited
                else f"{server} was paused at event {pause.index} and never resumed."
            )
        open_calls = [call for call, where in self._calls.items() if where == server]
        if counted in ("running", "waiting") and open_calls:
            return (
                f"Call {open_calls[0]} to {server} had no reply yet when every request had ended:"
                " abort or await the calls that a request gives up."
            )
        if self._cut_short:
            return (
                "It is incremented on every path and decremented on some: decrement it in a"
                " `finally`, once per increment."
            )
        return (
            "No call was cut short and nothing failed in this run: it is incremented more often"
            " than decremented, or decremented only later."
        )

    def finish(self, out: Collector) -> None:
        if self.hung:
            out.absent("a request hangs, so the counters are not final")
            return
        for name, start in self._start.items():
            end = self._end.get(name)
            if end is None:
                out.absent(f"counter {name!r} has no value at the end")
                continue
            out.exercised("counters")
            # Gauges are floats: an exact comparison would report rounding.
            if abs(end - start) > 1e-9:
                out.finding(
                    f"counter {name!r} did not return to its start",
                    # The prefix of a gauge names an instance, which differs from run to run.
                    kind=f"counter {name.rpartition('/')[2]!r} did not return to its start",
                    expected=f"{start:g}, as at the start",
                    observed=f"{end:g} when every request had ended",
                    hint=self._hint(name),
                )


lifecycle_counters_return: Check = trace_check(
    "lifecycle.counters-return",
    promise="Every counter of the stack has the same value at the end as at the start.",
    needs="Gauge events at start and end",
    exercised_by="counters",
)(LifecycleCountersReturn)


class LifecycleSurvivesDeath(EventCheck):
    """The tokens of the dead call are lost; the client has what earlier calls delivered, and must
    send it.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._in_flight: dict[int, str] = {}
        self._deaths: dict[int, Fault] = {}
        self._open: dict[str, RequestView] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._in_flight, event.call_id, event.server_id)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._in_flight.pop(event.call_id, None)

    def on_fault(self, event: Fault, out: Collector) -> None:
        if event.what != "death":
            return
        self._open.update(self.context.open)
        dead = event.server_id
        for call_id in [call for call, where in self._in_flight.items() if where == dead]:
            del self._in_flight[call_id]
            remember(self._deaths, call_id, event)

    def on_result(self, event: Result, out: Collector) -> None:
        view = self._open.pop(event.request_id, None)
        if view is not None:
            self._judge(view, event, out)

    def finish(self, out: Collector) -> None:
        for view in self._open.values():
            self._judge(view, None, out)

    def _judge(self, view: RequestView, event: Result | None, out: Collector) -> None:
        """Judge a request that was open at a death.

        Only its end shows which calls were its own, and which made its sample.
        """
        if view.unattributed_calls:
            out.absent(UNATTRIBUTED_CALLS)
            return
        deaths = [
            (attempt, death)
            for attempt in view.attempts
            if (death := self._deaths.pop(attempt.call.call_id, None)) is not None
        ]
        out.exercised("requests in flight at a server's death", len(deaths))
        unanswered, begin = None, 0
        resumes = self.context.contract.resume is ResumeBy.CLIENT
        for attempt, death in deaths:
            later = next((a.call for a in view.attempts if a.call.index > death.index), None)
            # An answer, late or to another call, explains what the stack does then.
            if later is None or not _answered(view, death.index, later.index):
                # the reply to a call that raced with this one may have come before the death
                unanswered, begin = death, attempt.call.index
                # what an undecided race brought may be known or not
                if later is not None and resumes and not view.undecided_race:
                    self._compare(view, attempt, death, later, out)
        if unanswered is None or event is None or _answered(view, begin, event.index):
            return
        if event.error is not None or event.rollout is not None:
            return
        server = str(unanswered.server_id)
        out.finding(
            "a request vanished when a server died",
            expected=f"a rollout or an explicit error after the death of {server}",
            observed="nothing was delivered",
            where={"request": event.request_id, "server": server, "index": event.index},
        )

    def _compare(
        self, view: RequestView, dead: Attempt, death: Fault, event: Call, out: Collector
    ) -> None:
        """Compare the first call after a death with what the client knew: only this one shows what
        it kept.
        """
        known_ids = _known_before(view, death.index)
        if known_ids is None or event.prompt_ids[: len(known_ids)] == known_ids:
            return
        common = next(
            (
                i
                for i, (sent, expected) in enumerate(zip(event.prompt_ids, known_ids, strict=False))
                if sent != expected
            ),
            min(len(event.prompt_ids), len(known_ids)),
        )
        out.finding(
            "tokens were lost when a server died",
            expected=(
                f"the next call sends the {len(known_ids)} tokens known before"
                f" {dead.call.server_id} died"
            ),
            observed=(
                f"call {event.call_id} sends {len(event.prompt_ids)} tokens, the first"
                f" {common} of them unchanged"
            ),
            where={
                "request": view.request.request_id,
                "call": event.call_id,
                "server": dead.call.server_id,
                "index": event.index,
            },
            hint=(
                "Only the dead call's own tokens are lost: store what earlier calls"
                " delivered outside of the try block that is retried."
            ),
        )


def _answered(view: RequestView, begin: int, end: int) -> bool:
    """Return whether a reply reached the stack between two events."""
    return any(
        reply.delivered and begin < reply.index < end
        for attempt in (*view.attempts, *view.set_aside)
        for reply in attempt.replies
    )


def _known_before(view: RequestView, index: int) -> tuple[int, ...] | None:
    """Return the prompt and what had been delivered before an event; ``None`` if the calls until
    then do not continue each other.
    """
    known = stitch(
        view.request.prompt_ids,
        [
            replace(
                attempt,
                replies=[reply for reply in attempt.replies if reply.index < index],
                partial=attempt.partial
                if attempt.partial is not None and attempt.partial.index < index
                else None,
            )
            for attempt in view.attempts
            if attempt.call.index < index
        ],
        [words for words in view.observations if words.index < index],
        Provenance.AS_SAMPLED,
    )
    return None if known.broken is not None else (*view.request.prompt_ids, *known.response_ids)


lifecycle_survives_death: Check = trace_check(
    "lifecycle.survives-death",
    promise=(
        "When a server dies, its requests end with a rollout or an explicit error, and tokens that"
        " were delivered before are kept."
    ),
    needs="Fault death events with calls in flight on the server",
    exercised_by="requests in flight at a server's death",
)(LifecycleSurvivesDeath)


@request_check(
    "lifecycle.drops-only-as-declared",
    promise=(
        "A sample is dropped only if it was aborted, partial rollout is off and the contract says"
        " that such samples are dropped, or if it is older than max_staleness allows."
    ),
    needs="Result events",
    exercised_by="requests that ended",
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
