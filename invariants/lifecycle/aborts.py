"""Checks on aborts: which calls they hit, what they return, and what becomes of the sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, PartialOff, ResumeBy
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
from rollproof.core.trace import Header
from rollproof.invariants._shared.declared_limits import no_fragments
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    EventCheck,
    case_option,
    remember,
)
from rollproof.invariants._shared.phrases import listing
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import Check, Collector, request_check, trace_check
from rollproof.judging.request_view import RequestView

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "lifecycle_abort_ends_call",
    "lifecycle_abort_hits_target",
    "lifecycle_abort_keeps_tokens",
    "lifecycle_aborts_do_not_surface",
    "lifecycle_partial_off_honoured",
    "no_partial_flag",
    "partial_is_off",
]


@dataclass(slots=True)
class _OpenCall:
    """A call in flight.

    request: Its request.
    server: Its server.
    caused: Whether something that aborts calls reached it.
    near: An abort of another call that may have hit it.
    certain: Whether it belongs to a request, at least by the task that made it.
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
        """Return the calls of ``hit`` that ``wanted`` does not name; if the id is unknown, those
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
        tokens = len(event.token_ids)
        if self._streams.get(event.call_id) is StreamMode.DELTA:
            tokens += self._progress.get(event.call_id, 0)
        remember(self._progress, event.call_id, max(tokens, self._progress.get(event.call_id, 0)))

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


def _surfaces(contract: Contract) -> str | None:
    if contract.abort_surfaces:
        return "the contract lets callers see aborts"
    return (
        "no client resumes aborted samples (resume='none')"
        if contract.resume is ResumeBy.NONE
        else None
    )


@request_check(
    "lifecycle.aborts-do-not-surface",
    promise=(
        "With partial rollout on, an aborted sample is resumed until it ends: no caller sees an"
        " abort."
    ),
    needs="aborted replies",
    exercised_by="samples that were aborted",
    applies=_surfaces,
)
def lifecycle_aborts_do_not_surface(view: RequestView, out: Collector) -> None:
    """Report the finish reason ``abort``, and a fragment that is delivered as finished."""
    rollout, segments = view.rollout, view.segments
    if (
        rollout is None
        or not any(_is_abort(attempt) for attempt in segments)
        or partial_is_off(view.header, view.contract)
    ):
        return
    out.exercised("samples that were aborted")
    last = segments[-1]
    if (
        _budget_used(view, last)
        or ends_with_eos(view, last)
        or any(attempt.consumed is None for attempt in view.attempts[last.number :])
    ):
        return
    # Filters downstream drop aborted samples, so an abort that surfaces shrinks the batch.
    if rollout.finish_reason is FinishReason.ABORT:
        title, observed = "an abort reached the caller", "finish reason abort"
    elif _is_abort(last) and not _hedge_won(view, last):
        title = "an aborted fragment was delivered as finished"
        observed = (
            f"finish reason {rollout.finish_reason}, although its last call was aborted and budget"
            " is left"
        )
    else:
        return
    out.finding(
        title,
        expected="the sample is resumed until an engine ends it (abort_surfaces=False)",
        observed=f"{observed}, {len(rollout.response_ids)} tokens after {len(segments)} calls",
        where=view.place(segment=len(segments) - 1, call=last.call.call_id),
        hint=(
            "The trainer would learn from a fragment as if it were a complete answer. A cap"
            " on retries must not turn an abort into `length` (AReaL InfBridge)."
        ),
    )


def no_partial_flag(contract: Contract) -> str | None:
    """Return why the partial-rollout flag cannot be judged under ``contract``, or ``None``."""
    if contract.partial_off is None:
        return "the contract does not declare that partial rollout can be turned off (partial_off)"
    return (
        "the engine resumes by itself, whatever the flag says (resume='engine')"
        if contract.resume is ResumeBy.ENGINE
        else None
    )


def partial_is_off(header: Header | None, contract: Contract) -> bool:
    """Return whether aborted samples must not be resumed: no client ever does (resume='none'), or
    the case says so.
    """
    return contract.resume is ResumeBy.NONE or case_option(header, "partial") is False


def _no_part(contract: Contract) -> str | None:
    return no_partial_flag(contract) or no_fragments(contract)


@request_check(
    "lifecycle.partial-off-honoured",
    promise=(
        "With partial rollout off, a sample aborted after its first token is not resumed: it is"
        " dropped or surfaced as declared."
    ),
    needs="a case with partial=False (or resume='none'), and aborted replies with tokens",
    exercised_by="samples aborted with partial rollout off",
    applies=_no_part,
)
def lifecycle_partial_off_honoured(view: RequestView, out: Collector) -> None:
    """Check that no aborted sample with tokens is resumed."""
    result = view.result
    # What hangs is lifecycle.no-hang's to judge.
    if result is None or result.hung or not partial_is_off(view.header, view.contract):
        return
    aborted = next(
        (
            attempt
            for attempt in view.segments
            # To send a call again that was aborted before its first token is a retry, not a partial
            # rollout.
            if _is_abort(attempt) and attempt.consumed and attempt.consumed.output.token_ids
        ),
        None,
    )
    if (
        aborted is None
        or _budget_used(view, aborted)
        or ends_with_eos(view, aborted)
        or _hedge_won(view, aborted)
    ):
        return
    out.exercised("samples aborted with partial rollout off")
    # verl #6882 and slime #2092 read the flag in one of two code paths.
    next_call = _next_in_turn(view, aborted)
    declared = view.contract.partial_off
    if next_call is not None:
        title, observed = (
            "an aborted sample was resumed although partial rollout is off",
            f"call {next_call.call.call_id} continues it",
        )
    elif declared is PartialOff.DROPPED and result.rollout is not None:
        title = "an aborted sample was delivered although partial rollout is off"
        observed = f"a rollout, finish reason {result.rollout.finish_reason}"
    elif declared is PartialOff.SURFACED and result.rollout is None and result.error is None:
        title, observed = (
            "an aborted sample vanished with partial rollout off",
            "nothing was delivered",
        )
    else:
        return
    out.finding(
        title,
        expected=f"call {aborted.call.call_id} was aborted: the sample is {declared} (partial_off)",
        observed=observed,
        where=view.place(call=aborted.call.call_id, index=result.index),
        hint="The flag is read in one of two code paths (verl #6882, slime #2092).",
    )


def _is_abort(attempt: Attempt) -> bool:
    return (
        attempt.consumed is not None and attempt.consumed.output.finish_reason is FinishReason.ABORT
    )


def _hedge_won(view: RequestView, aborted: Attempt) -> bool:
    """Return whether the sample is the result of another call that overlapped ``aborted`` and ended
    by itself (a hedge).
    """
    for attempt in view.segments:
        reply = attempt.consumed
        if (
            reply is None
            or attempt is aborted
            or _is_abort(attempt)
            or reply.index < aborted.call.index
        ):
            continue
        # Hedged calls: the stack used the reply of the other call, which had ended by itself.
        if (*attempt.call.prompt_ids, *reply.output.token_ids) == view.total_ids:
            return aborted.consumed is None or attempt.call.index < aborted.consumed.index
    return False


def _budget_used(view: RequestView, last: Attempt) -> bool:
    """Return whether ``last`` used up its grant, or all calls the budget: then its abort ended
    nothing early.
    """
    tokens = len(last.consumed.output.token_ids) if last.consumed else 0
    if last.call.max_tokens is not None and tokens >= last.call.max_tokens:
        return True
    budget = view.request.budget
    sampled = sum(
        len(attempt.consumed.output.token_ids)
        for attempt in view.attempts[: last.number + 1]
        if attempt.consumed
    )
    return (
        budget is not None
        and sampled + sum(len(item.token_ids) for item in view.observations) >= budget
    )


def _next_in_turn(view: RequestView, aborted: Attempt) -> Attempt | None:
    """Return the next call of the same turn, ``None`` if there is none or the environment came
    first.
    """
    reply = aborted.consumed
    for attempt in view.attempts[aborted.number + 1 :]:
        if reply is not None and attempt.call.index > reply.index:
            observed = any(
                reply.index < item.index < attempt.call.index for item in view.observations
            )
            return None if observed else attempt
    return None
