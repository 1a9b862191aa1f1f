"""Checks on calls: every one is answered, or refused as declared, and a pause holds them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import EngineTerms, PausedCalls, Refusal
from rollproof.core.events.rollout import Abort, Call, Chunk, Fault, Pause, Reply, Result, Resume
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants.engine.engine_replies import is_served, refusal_of
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "BROKEN_OFF",
    "engine_answers",
    "engine_paused_calls",
    "engine_refusals",
    "pauses",
]

BROKEN_OFF = "broken-off"
"""The ``Fault.what`` of an experiment that could not be completed."""


class _Calls(EventCheck):
    """Tracks the calls, their requests, and what the engine declares about them."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        terms = (context.header.engine or context.contract).engine
        assert terms is not None
        self.terms: EngineTerms = terms
        self.calls: dict[int, Call] = {}
        self.paused: Pause | None = None
        self.sent_paused: dict[int, Call] = {}

    def on_call(self, event: Call, out: Collector) -> None:
        self.calls[event.call_id] = event
        if self.paused is not None:
            self.sent_paused[event.call_id] = event

    def on_pause(self, event: Pause, out: Collector) -> None:
        self.paused = event

    def on_resume(self, event: Resume, out: Collector) -> None:
        self.paused = None

    def latest_of(self, request_id: str) -> Call | None:
        """Return the last call of a request."""
        return next(
            (call for call in reversed(self.calls.values()) if call.request_id == request_id), None
        )


class EngineAnswers(_Calls):
    """Every call has one reply, unless the engine refused it. A broken-off experiment is also the
    engine's fault.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._replies: dict[int, int] = {}
        self._refused: set[int] = set()

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._replies[event.call_id] = self._replies.get(event.call_id, 0) + 1
        call, sampled = self.calls.get(event.call_id), len(event.output.token_ids)
        if (
            call is None
            or event.output.finish_reason is not FinishReason.LENGTH
            or not is_served(self.terms, call)
        ):
            return
        room = self.terms.room_after(len(call.prompt_ids))
        if room is None:
            # Not every engine uses the last positions of the context.
            room = self.terms.max_length - 1 - len(call.prompt_ids)
        length = room if call.max_tokens is None else min(room, call.max_tokens)
        if sampled < length:
            out.finding(
                "a call ended by length before it had the length",
                expected=f"{length} tokens, or another finish reason",
                observed=(
                    f"{sampled} tokens after a prompt of {len(call.prompt_ids)}; the engine"
                    f" takes {self.terms.max_length} in total"
                ),
                where={"call": event.call_id, "server": call.server_id, "request": call.request_id},
                hint=(
                    "The engine counts the budget from another position, or dropped the last"
                    " tokens: a client takes the sample for complete."
                ),
            )

    def on_result(self, event: Result, out: Collector) -> None:
        call = self.latest_of(event.request_id)
        if event.error is not None and not event.hung and call is not None:
            self._refused.add(call.call_id)

    def on_fault(self, event: Fault, out: Collector) -> None:
        # An engine that dies or hangs on a declared feature broke its contract, even if no reply
        # was wrong.
        if event.what == BROKEN_OFF:
            out.finding(
                "an experiment could not be completed",
                expected="an engine that does what its contract offers",
                observed=event.detail,
                where={"server": event.server_id, "index": event.index},
                hint=(
                    "The engine died or hung, or a call, a pause or an update raised: the end of"
                    " its log is in the text."
                ),
            )

    def finish(self, out: Collector) -> None:
        for number, call in self.calls.items():
            # Refusals are engine.refusals's to judge.
            if number in self._refused:
                continue
            out.exercised("calls")
            replies = self._replies.get(number, 0)
            if replies != 1:
                out.finding(
                    (
                        "a call was not answered"
                        if not replies
                        else "a call was answered more than once"
                    ),
                    expected="one reply to each call, even to an aborted one",
                    observed=(
                        f"{replies} replies to call {number} ({len(call.prompt_ids)} prompt tokens,"
                        f" budget {call.max_tokens})"
                    ),
                    where={"call": number, "server": call.server_id, "request": call.request_id},
                    hint=(
                        "An abort that returns nothing loses the sampled tokens (vLLM #22197). Of a"
                        " call for several samples, one sample was dropped."
                    ),
                )


class EngineRefusals(_Calls):
    """Judges calls that cannot be served, and whether the others are served."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._replies: dict[int, Reply] = {}
        self._errors: dict[int, str] = {}

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._replies[event.call_id] = event

    def on_result(self, event: Result, out: Collector) -> None:
        call = self.latest_of(event.request_id)
        if event.error is not None and not event.hung and call is not None:
            self._errors[call.call_id] = event.error

    def finish(self, out: Collector) -> None:
        for number, call in self.calls.items():
            declared = refusal_of(self.terms, call)
            if (
                declared is None
                and number in self.sent_paused
                and self.terms.paused_calls is PausedCalls.RAISE
            ):
                continue
            outcome = self._outcome(number)
            if outcome is None:
                continue
            if declared is not None:
                out.exercised("calls that cannot be served")
            if not _as_declared(declared, outcome):
                out.finding(
                    (
                        "a call that can be served was refused"
                        if declared is None
                        else "a call that cannot be served is not answered as declared"
                    ),
                    expected="a reply" if declared is None else _describe(declared),
                    observed=self._errors.get(number) or _describe(outcome),
                    where={"call": number, "server": call.server_id, "request": call.request_id},
                    hint=(
                        f"The call has {len(call.prompt_ids)} prompt tokens, a budget of"
                        f" {call.max_tokens}, and requests rows from {call.routes_start} on;"
                        f" the engine takes {self.terms.max_length} tokens. A client that"
                        " expects the declared answer crashes, or trains on an empty sample."
                    ),
                )

    def _outcome(self, number: int) -> Refusal | None:
        """Return how a call ended: ``IGNORED`` if it was served, ``None`` if it was not
        answered.
        """
        reply = self._replies.get(number)
        if number in self._errors:
            return Refusal.ERROR
        if reply is None:
            return None
        if reply.output.token_ids:
            return Refusal.IGNORED
        return Refusal.ABORT if reply.output.finish_reason is FinishReason.ABORT else Refusal.EMPTY


def _as_declared(declared: Refusal | None, outcome: Refusal) -> bool:
    # An abort without tokens is also the end of a call that was aborted.
    return outcome in (Refusal.IGNORED, Refusal.ABORT) if declared is None else outcome is declared


def _describe(refusal: Refusal) -> str:
    return {
        Refusal.ERROR: "an error",
        Refusal.ABORT: "an abort without tokens",
        Refusal.EMPTY: "a reply without tokens that ended by length",
        Refusal.IGNORED: "a reply with tokens",
    }[refusal]


class EnginePausedCalls(_Calls):
    """A call that is sent to a paused engine is parked, rejected or refused, as declared."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._aborted: set[int] = set()

    def on_abort(self, event: Abort, out: Collector) -> None:
        self._aborted.update(number for number in event.call_ids if number in self.sent_paused)

    def on_chunk(self, event: Chunk, out: Collector) -> None:
        self._check_paused(event.call_id, len(event.token_ids), out)

    def on_reply(self, event: Reply, out: Collector) -> None:
        self._check_paused(event.call_id, len(event.output.token_ids), out)
        call = self.sent_paused.pop(event.call_id, None)
        if call is None:
            return
        out.exercised("calls sent to a paused engine")
        rejected = event.output.finish_reason is FinishReason.ABORT and not event.output.token_ids
        # Engines differ here, by release and pause mode, so the contract says which answer is
        # right.
        if self.terms.paused_calls is not PausedCalls.PARK and not rejected:
            self._report(
                event.call_id, call, f"a reply of {len(event.output.token_ids)} tokens", out
            )
        if (
            self.terms.paused_calls is PausedCalls.PARK
            and rejected
            and event.call_id not in self._aborted
        ):
            self._report(event.call_id, call, "an abort without tokens", out)
        # A call held back by a pause may not be registered yet, so that an abort misses it.
        if event.call_id in self._aborted and event.output.finish_reason is not FinishReason.ABORT:
            self._report_forgotten(event, call, out)

    def on_result(self, event: Result, out: Collector) -> None:
        call = self.latest_of(event.request_id)
        if (
            call is None
            or event.error is None
            or event.hung
            or call.call_id not in self.sent_paused
        ):
            return
        del self.sent_paused[call.call_id]
        out.exercised("calls sent to a paused engine")
        if self.terms.paused_calls is not PausedCalls.RAISE:
            self._report(call.call_id, call, event.error, out)

    def _check_paused(self, number: int, tokens: int, out: Collector) -> None:
        if tokens and self.paused is not None and number in self.sent_paused:
            self._report(
                number, self.sent_paused.pop(number), f"{tokens} tokens before the resume", out
            )

    def _report_forgotten(self, event: Reply, call: Call, out: Collector) -> None:
        out.finding(
            "the abort of a call that waited for the end of a pause was forgotten",
            expected="an abort: the call had not begun when it was aborted",
            observed=(
                f"{len(event.output.token_ids)} tokens, sampled after the resume; it ended by"
                f" {event.output.finish_reason}"
            ),
            where={"call": event.call_id, "server": call.server_id, "request": call.request_id},
            hint=(
                "Calls that arrive during a pause are held back before the engine registers"
                " them, and an abort searches only registered calls. A caller that gave up the"
                " request, or sent it elsewhere, now has it sampled twice."
            ),
        )

    def _report(self, number: int, call: Call, observed: str, out: Collector) -> None:
        declared = {
            PausedCalls.PARK: "it waits for the resume",
            PausedCalls.REJECT: "an abort without tokens",
            PausedCalls.RAISE: "an error",
        }
        out.finding(
            "a call sent to a paused engine is not treated as declared",
            expected=(
                f"{declared[self.terms.paused_calls]} (paused_calls='{self.terms.paused_calls}')"
            ),
            observed=observed,
            where={"call": number, "server": call.server_id, "request": call.request_id},
            hint=(
                "A call that runs during a pause samples from weights that are being replaced; one"
                " that is dropped is lost to its caller."
            ),
        )


def pauses(contract: Contract) -> str | None:
    """Return why pauses cannot be judged: the engine declares none."""
    return (
        "the engine declares no pause modes"
        if contract.engine is not None and not contract.engine.pause_modes
        else None
    )


engine_answers: Check = trace_check(
    "engine.answers",
    promise=(
        "Every call, even an aborted one, gets one reply; none ends by length before its"
        " budget; and the engine does everything that its contract offers."
    ),
    needs="Call, Reply and Result events of an experiment",
    exercised_by="calls",
    about="engines",
)(EngineAnswers)
engine_refusals: Check = trace_check(
    "engine.refusals",
    promise=("A call that cannot be served is answered as declared, and no other call is refused."),
    needs=(
        "calls without a budget or a prompt, longer than the context, or with an offset beyond"
        " the prompt"
    ),
    exercised_by="calls that cannot be served",
    about="engines",
)(EngineRefusals)
engine_paused_calls: Check = trace_check(
    "engine.paused-calls",
    promise=(
        "A call sent to a paused engine is parked, rejected or refused, as declared; if it is"
        " aborted meanwhile, it does not run."
    ),
    needs="calls between a Pause and its Resume",
    exercised_by="calls sent to a paused engine",
    applies=pauses,
    about="engines",
)(EnginePausedCalls)
