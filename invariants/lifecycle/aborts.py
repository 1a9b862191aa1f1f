"""Aborts: whom they hit, what they return, and what becomes of the sample (family ``lifecycle``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, PartialOff, ResumeBy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import (
    Abort,
    Call,
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
from rollproof.invariants._shared.event_check import (
    EndAwareCheck,
    EventCheck,
    case_option,
    remember,
)
from rollproof.judging.checks import Collector, request_check, trace_check
from rollproof.judging.request_view import Attempt, RequestView

if TYPE_CHECKING:
    from rollproof.judging.judge import JudgeContext

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
class _Flying:
    """A call in flight. ``caused``: something that aborts calls reached it; ``near``: an abort of
    another call that may have.
    """

    request: str
    server: str
    caused: bool = False
    near: Abort | None = None


class LifecycleAbortHitsTarget(EventCheck):
    """An id means a request, a call or a group of requests; ids of the stack's own making must hit
    one request at most.

    A recording is told that an abort was asked for, and not which calls it found: any call of the
    server may be its own.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._groups: dict[str, str | None] = {}
        self._flying: dict[int, _Flying] = {}
        self._called: dict[str, None] = {}
        self._paused: set[str] = set()
        self._suspects: dict[str, list[tuple[int, Abort]]] = {}

    def on_submit(self, event: Submit, out: Collector) -> None:
        self._groups[event.request.request_id] = event.request.group

    def on_result(self, event: Result, out: Collector) -> None:
        self._groups.pop(event.request_id, None)

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._called, event.request_id, None)
        remember(
            self._flying,
            event.call_id,
            _Flying(event.request_id, event.server_id, caused=event.server_id in self._paused),
        )

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.add(event.server_id)
        self._suspects.pop(event.server_id, None)
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
        if event.call_id in self._flying:
            self._flying[event.call_id].caused = True
        elif event.server_id is not None:
            self._excuse(event.server_id)

    def _excuse(self, server: str) -> None:
        for call in self._flying.values():
            if call.server == server:
                call.caused = True

    def on_abort(self, event: Abort, out: Collector) -> None:
        untold = not event.call_ids and self.context.header.case is None
        if event.wanted == "*" or untold:
            self._excuse(event.server_id)
            return
        hit = {
            call_id: self._flying[call_id].request
            for call_id in event.call_ids
            if call_id in self._flying
        }
        if hit:
            out.exercised("aborts of one id")
        for call_id, call in self._flying.items():
            if call_id in hit:
                call.caused = True
            elif call.server == event.server_id and not call.caused:
                call.near = event
        wrong = self._strangers(event.wanted, hit)
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
                    f" {', '.join(f'{call} of request {hit[call]!r}' for call in wrong)} ended too"
                ),
                where={
                    "request": hit[wrong[0]],
                    "call": wrong[0],
                    "server": event.server_id,
                    "index": event.index,
                },
                hint=(
                    "Ids are matched by prefix: '1' aborts '10', an empty id everything (sglang"
                    " #25561). Make ids prefix-free."
                ),
            )

    def _strangers(self, wanted: str, hit: Mapping[int, str]) -> list[int]:
        """The calls of ``hit`` that are not meant by ``wanted``; where nobody knows the id, those
        beyond the first request or group.
        """
        strange = [
            call
            for call, request in hit.items()
            if wanted not in (request, str(call), self._groups.get(request))
        ]
        if not wanted or len(strange) < len(hit) or wanted in self._groups:
            return strange
        if self._is_prefix(wanted, hit):
            return []
        first = next(iter(hit.values()), "")
        family = self._groups.get(first)
        return [
            call
            for call, request in hit.items()
            if request != first and (family is None or self._groups.get(request) != family)
        ]

    def _is_prefix(self, wanted: str, hit: Mapping[int, str]) -> bool:
        """Whether a caller may have meant several calls by how their ids begin, as SGLang allows:
        nothing else was ever called so.

        Where a stack tells of its requests, an id is one of its own making, and such a hit would be
        by chance.
        """
        return wanted not in self._called and not any(
            request in self._groups for request in hit.values()
        )

    def on_reply(self, event: Reply, out: Collector) -> None:
        call = self._flying.pop(event.call_id, None)
        if (
            call is not None
            and call.near is not None
            and not call.caused
            and event.output.finish_reason is FinishReason.ABORT
        ):
            self._suspects.setdefault(call.server, []).append((event.call_id, call.near))

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
                        "Ids are matched by prefix (sglang #25561), or the abort reached the whole"
                        " batch."
                    ),
                )


lifecycle_abort_hits_target = trace_check(
    "lifecycle.abort-hits-target",
    promise="An abort of one id ends the calls of that id and no others.",
    needs="Abort events that name an id, with calls in flight",
    exercised_by="aborts of one id",
)(LifecycleAbortHitsTarget)


class LifecycleAbortKeepsTokens(EventCheck):
    """Compares the aborted reply with the last progress known of the call, and with what the engine
    really sampled.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._progress: dict[int, int] = {}

    def _note(self, progress: Mapping[int, int] | None) -> None:
        for call, count in (progress or {}).items():
            remember(self._progress, call, count)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._note(event.progress)

    def on_weights(self, event: Weights, out: Collector) -> None:
        self._note(event.progress)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._note(event.progress)

    def on_reply(self, event: Reply, out: Collector) -> None:
        known = self._progress.pop(event.call_id, None)
        if event.duplicate or event.output.finish_reason is not FinishReason.ABORT:
            return
        true = (
            max((span.end for span in event.true_tokens), default=0)
            if event.true_tokens is not None
            else None
        )
        if known is None and true is None:
            return
        out.exercised("aborted calls with known progress")
        sampled = max(known or 0, true or 0)
        returned = len(event.output.token_ids)
        if returned < sampled:
            out.finding(
                "an aborted call lost tokens that it had sampled",
                expected=f"at least {sampled} tokens",
                observed=f"{returned} tokens",
                where={"call": event.call_id, "index": event.index},
                hint=(
                    "A call aborted in the waiting queue (after a retraction) must return what it"
                    " had (sglang #11673, vLLM #22197)."
                ),
            )


lifecycle_abort_keeps_tokens = trace_check(
    "lifecycle.abort-keeps-tokens",
    promise="An aborted call returns every token that it had sampled.",
    needs="progress of the call at a Pause, Weights or Resume event, or its true_tokens",
    exercised_by="aborted calls with known progress",
)(LifecycleAbortKeepsTokens)


class LifecycleAbortEndsCall(EndAwareCheck):
    """A call on a server that is paused, dead or concerned by a fault is excused."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._flying: dict[int, str] = {}
        self._aborted: dict[int, Abort] = {}
        self._paused: set[str] = set()

    def on_call(self, event: Call, out: Collector) -> None:
        remember(self._flying, event.call_id, event.server_id)

    def on_pause(self, event: Pause, out: Collector) -> None:
        self._paused.add(event.server_id)

    def on_resume(self, event: Resume, out: Collector) -> None:
        self._paused.discard(event.server_id)

    def on_abort(self, event: Abort, out: Collector) -> None:
        self._aborted.update(
            (call_id, event) for call_id in event.call_ids if call_id in self._flying
        )

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._flying.pop(event.call_id, None)
        if self._aborted.pop(event.call_id, None) is not None:
            out.exercised("calls aborted")

    def on_fault(self, event: Fault, out: Collector) -> None:
        super().on_fault(event, out)
        for call_id, server in list(self._flying.items()):
            if call_id == event.call_id or (event.what == "death" and server == event.server_id):
                del self._flying[call_id]
                self._aborted.pop(call_id, None)

    def finish(self, out: Collector) -> None:
        for call_id, abort in self._aborted.items():
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
                    "The engine dropped the request without an answer (tpu-inference #3362), so its"
                    " caller waits."
                ),
            )


lifecycle_abort_ends_call = trace_check(
    "lifecycle.abort-ends-call",
    promise="An aborted call ends: its caller gets an answer, and nothing is left running.",
    needs="Abort events that hit calls, in a trace that runs to its end or hangs",
    exercised_by="calls aborted",
)(LifecycleAbortEndsCall)


def _surfaces(contract: Contract) -> str | None:
    if contract.abort_surfaces:
        return "the contract lets callers see aborts"
    return (
        "nobody resumes aborted samples (resume='none')"
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
    """Neither as finish reason ``abort`` nor as a fragment that is handed over as finished."""
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
        _used_up(view, last)
        or _ends_with_eos(view, last)
        or any(attempt.consumed is None for attempt in view.attempts[last.number :])
    ):
        return
    if rollout.finish_reason is FinishReason.ABORT:
        title, observed = "an abort reached the caller", "finish reason abort"
    elif _is_abort(last) and not _outrun(view, last):
        title = "an aborted fragment was handed over as finished"
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
            "The trainer would learn from a fragment as from a whole answer. A cap on retries must"
            " not turn an abort into `length` (AReaL InfBridge)."
        ),
    )


def no_partial_flag(contract: Contract) -> str | None:
    """Why the partial-rollout flag cannot be judged under ``contract``; ``None`` where it can."""
    if contract.partial_off is None:
        return "the contract declares no way to turn partial rollout off (partial_off)"
    return (
        "the engine resumes by itself, whatever the flag says (resume='engine')"
        if contract.resume is ResumeBy.ENGINE
        else None
    )


def partial_is_off(header: Header | None, contract: Contract) -> bool:
    """Whether aborted samples must not be resumed: nobody ever does (resume='none'), or the case
    says so.
    """
    return contract.resume is ResumeBy.NONE or case_option(header, "partial") is False


@request_check(
    "lifecycle.partial-off-honoured",
    promise=(
        "With partial rollout off, a sample aborted after its first token is not resumed: it is"
        " dropped or surfaced as declared."
    ),
    needs="a case with partial=False (or resume='none'), and aborted replies with tokens",
    exercised_by="samples aborted with partial rollout off",
    applies=no_partial_flag,
)
def lifecycle_partial_off_honoured(view: RequestView, out: Collector) -> None:
    """Sending a call again that was aborted before its first token is a retry, not a partial
    rollout.
    """
    result = view.result
    if result is None or result.hung or not partial_is_off(view.header, view.contract):
        return
    aborted = next(
        (
            one
            for one in view.segments
            if _is_abort(one) and one.consumed and one.consumed.output.token_ids
        ),
        None,
    )
    if (
        aborted is None
        or _used_up(view, aborted)
        or _ends_with_eos(view, aborted)
        or _outrun(view, aborted)
    ):
        return
    out.exercised("samples aborted with partial rollout off")
    again = _next_in_turn(view, aborted)
    declared = view.contract.partial_off
    if again is not None:
        title, observed = (
            "an aborted sample was resumed although partial rollout is off",
            f"call {again.call.call_id} continues it",
        )
    elif declared is PartialOff.DROPPED and result.rollout is not None:
        title = "an aborted sample was handed over although partial rollout is off"
        observed = f"a rollout, finish reason {result.rollout.finish_reason}"
    elif declared is PartialOff.SURFACED and result.rollout is None and result.error is None:
        title, observed = (
            "an aborted sample vanished with partial rollout off",
            "nothing was handed over",
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


def _outrun(view: RequestView, aborted: Attempt) -> bool:
    """Whether the sample is what another call brought, which ran beside ``aborted`` and ended by
    itself: the winner of a hedge.
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
        if (*attempt.call.prompt_ids, *reply.output.token_ids) == view.total_ids:
            return aborted.consumed is None or attempt.call.index < aborted.consumed.index
    return False


def _used_up(view: RequestView, last: Attempt) -> bool:
    """Whether ``last`` used up its grant, or all calls the budget: then its abort ended nothing
    early.
    """
    tokens = len(last.consumed.output.token_ids) if last.consumed else 0
    if last.call.max_tokens is not None and tokens >= last.call.max_tokens:
        return True
    budget = view.request.budget
    got = sum(
        len(attempt.consumed.output.token_ids)
        for attempt in view.attempts[: last.number + 1]
        if attempt.consumed
    )
    return (
        budget is not None
        and got + sum(len(item.token_ids) for item in view.observations) >= budget
    )


def _ends_with_eos(view: RequestView, attempt: Attempt) -> bool:
    """On an abort that hit the end-of-sequence token, ending and resuming are both defensible."""
    coding = view.header.coding if view.header is not None else None
    if not coding or coding.get("eos_every") is None or attempt.consumed is None:
        return False
    return attempt.consumed.output.token_ids[-1:] == (coding.get("eos_id", 0),)


def _next_in_turn(view: RequestView, aborted: Attempt) -> Attempt | None:
    """The next call of the same turn; ``None`` where there is none, or the environment spoke before
    it.
    """
    reply = aborted.consumed
    for attempt in view.attempts[aborted.number + 1 :]:
        if reply is not None and attempt.call.index > reply.index:
            spoke = any(reply.index < item.index < attempt.call.index for item in view.observations)
            return None if spoke else attempt
    return None
