"""Checks on samples whose calls were aborted: resumed, or dropped or surfaced as declared."""

from __future__ import annotations

from rollproof.core.contract import Contract, PartialOff, ResumeBy
from rollproof.core.records import FinishReason, Rollout
from rollproof.core.trace import Header
from rollproof.invariants._shared.declared_limits import no_fragments
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.invariants._shared.event_check import case_option
from rollproof.invariants._shared.phrases import count
from rollproof.judging.attempt import Attempt
from rollproof.judging.checks import Collector, request_check
from rollproof.judging.request_view import RequestView

__all__ = [
    "lifecycle_aborts_do_not_surface",
    "lifecycle_partial_off_honoured",
    "no_partial_flag",
    "partial_is_off",
]


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
        " abort, not even of a sample that was complete when its call was aborted."
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
    # a later call was never answered: the stack did resume, and had to give up
    if any(attempt.consumed is None for attempt in view.attempts[last.number :]):
        return
    stopped = ends_with_eos(view, last)
    if stopped or _budget_used(view, last):
        if rollout.finish_reason is FinishReason.ABORT:
            _report_complete(view, out, rollout, "stop" if stopped else "length")
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


def _report_complete(view: RequestView, out: Collector, rollout: Rollout, reason: str) -> None:
    """Report a sample that says ``abort`` although the abort came on its last token."""
    last = view.segments[-1]
    ended = "the model's natural end" if reason == "stop" else "the last one of the budget"
    out.finding(
        "a complete sample came out as aborted",
        expected=f"{reason}: the abort came on {ended}, and nothing is left to resume",
        observed=f"finish reason abort, {count(len(rollout.response_ids), 'token')}",
        where=view.place(segment=len(view.segments) - 1, call=last.call.call_id),
        hint=(
            "Filters for aborted samples drop a complete response. Once a call was aborted, look at"
            " what is left of the budget before you pass its finish reason on."
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
        hint=(
            "The switch is often read in one of two code paths (verl #6882, slime #2092). If your"
            " stack has no switch for partial rollout, leave partial_off out of its contract."
        ),
    )


def _is_abort(attempt: Attempt) -> bool:
    return (
        attempt.consumed is not None and attempt.consumed.output.finish_reason is FinishReason.ABORT
    )


def _hedge_won(view: RequestView, aborted: Attempt) -> bool:
    """Return whether the sample is the result of another call that ended by itself: of one that
    overlapped ``aborted`` (a hedge), or of a candidate that may be the sample as well.
    """
    assert aborted.consumed is not None
    for attempt in (*view.segments, *(view.set_aside if view.undecided_race else ())):
        reply = attempt.consumed
        if reply is None or _is_abort(attempt):
            continue
        overlaps = attempt.call.index < aborted.consumed.index and reply.index > aborted.call.index
        if (overlaps or view.undecided_race) and (
            *attempt.call.prompt_ids,
            *reply.output.token_ids,
        ) == view.total_ids:
            return True
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
