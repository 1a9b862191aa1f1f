"""Checks on the ends of samples: whether a sample says why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollproof.core.limits import RolloutLimits
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.delivery import (
    Delivery,
    delivery,
    missing_reason,
    reliable_delivery,
)
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.invariants._shared.event_check import case_option
from rollproof.invariants._shared.phrases import call_id, count
from rollproof.invariants.stitch.budgets import no_finish_reason, turn_lengths
from rollproof.judging.checks import Collector, Scope, request_check

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["stitch_finish_length", "stitch_finish_reason"]

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


@request_check(
    "stitch.finish-reason",
    promise=(
        "A sample has the finish reason that its engine returned: an abort is never shown as"
        " a natural end, nor a stop as a truncation."
    ),
    needs="a delivered sample, its engine calls and replies",
    exercised_by=("ends by stop", "ends by length", "ends by abort"),
    applies=no_finish_reason,
)
def stitch_finish_reason(view: RequestView, out: Collector) -> None:
    """Compare the sample's reason with that of the last delivered reply. ``completed`` stands for
    ``stop`` and ``length``.
    """
    delivered = delivery(view)
    if delivered is None or not (delivered.reliable or _ended_without_call(view, delivered)):
        out.absent(delivered.reason if delivered else missing_reason(view))
        return
    engine_reason, sample_reason = (
        delivered.reference.finish_reason,
        delivered.rollout.finish_reason,
    )
    if engine_reason is not None:
        out.exercised(
            "ends by abort"
            if engine_reason is FinishReason.ABORT
            else "ends by length"
            if engine_reason is FinishReason.LENGTH
            else "ends by stop"
        )
    if _reason_is_right(view, delivered, engine_reason, sample_reason):
        return
    observed = (
        f"finish reason {sample_reason!s}" if sample_reason is not None else "no finish reason"
    )
    number = delivered.reference.last
    last = None if number is None else call_id(view, number)
    out.finding(
        _reason_title(engine_reason, sample_reason),
        expected=(
            f"{engine_reason!s}, as the engine returned"
            if engine_reason is not None
            else "abort or error: no engine answered"
        ),
        observed=observed
        + (f"; the last reply is that to call {last}" if engine_reason is not None else ""),
        where=view.place(call=last),
        hint=_reason_hint(engine_reason, sample_reason),
    )


def _ended_without_call(view: RequestView, delivered: Delivery) -> bool:
    """Return whether a sample without tokens ends naturally although no engine was called."""
    # A call may have been attributed to another request of a group, whose members share a prompt.
    all_calls_recorded = (
        view.header is not None and view.header.case is not None and view.request.group is None
    )
    return (
        all_calls_recorded
        and not view.attempts
        and not delivered.rollout.response_ids
        and delivered.rollout.finish_reason in _NATURAL
    )


def _reason_is_right(
    view: RequestView,
    delivered: Delivery,
    engine_reason: FinishReason | None,
    sample_reason: FinishReason | None,
) -> bool:
    if sample_reason is not None and sample_reason == engine_reason:
        return True
    if sample_reason is None:
        return False
    # Whether a limit counts one turn, all turns or the environment's tokens too is not declared:
    # the widest reading raises no false alarm.
    exhausted = _exhausted(view, delivered)
    last = delivered.reference.last
    unanswered = any(last is None or attempt.number > last for attempt in view.attempts)
    # No reply arrived: only an abort, an error or a used-up budget is a truthful reason.
    if engine_reason is None:
        return sample_reason in (FinishReason.ABORT, FinishReason.ERROR) or exhausted
    if sample_reason == FinishReason.LENGTH and not exhausted:
        return True  # stitch.finish-length reports it
    # the next answer had no room: the turn ended, and the rollout was cut
    if sample_reason == FinishReason.LENGTH and _may_go_on(view, delivered):
        return True
    cut = delivered.count < len(delivered.reference.response_ids) or _filled(view, delivered)
    # the stack cut the sample, or the environment's words filled it: no engine could say so
    if sample_reason == FinishReason.LENGTH and cut:
        return True
    if engine_reason in (FinishReason.ABORT, FinishReason.ERROR):
        ended = sample_reason in (FinishReason.LENGTH, FinishReason.COMPLETED) and exhausted
        given_up = sample_reason in (FinishReason.ABORT, FinishReason.ERROR)
        return ended or given_up or (sample_reason in _NATURAL and _ends_with_eos(view, delivered))
    # The stack may have given up a later call that was never answered.
    if sample_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return unanswered
    return FinishReason.COMPLETED in (sample_reason, engine_reason)


def _filled(view: RequestView, delivered: Delivery) -> bool:
    """Return whether the environment's words may have filled the response: not if the model had the
    last turn, after all the answers that there are, and no limit on turns was reached.
    """
    runs, turns = delivered.reference.runs, view.request.turns
    if not any(run.attempt < 0 for run in runs):
        return False
    all_answered = bool(turns) and len(delivered.reference.answers) >= len(turns)
    return not all_answered or runs[-1].attempt < 0 or _ended_by_limit(view, delivered)


def _exhausted(view: RequestView, delivered: Delivery) -> bool:
    """Return whether the budget is used up: by the last turn, by all turns, or by the response with
    the environment's tokens.
    """
    # A budget may be per turn or for all turns; both are checked.
    lengths = turn_lengths(view)
    longest = max(lengths[-1], sum(lengths), len(delivered.rollout.response_ids))
    turn = (view.contract.limits or RolloutLimits()).turn_tokens
    return any(longest >= bound for bound in _bounds(view)) or (
        turn is not None and lengths[-1] >= turn
    )


def _bounds(view: RequestView) -> list[int]:
    """Return the limits of a response: the request's, and those that the contract declares."""
    limits = view.contract.limits or RolloutLimits()
    total = None if limits.total is None else limits.total - len(view.request.prompt_ids)
    declared = [bound for bound in (limits.response, total) if bound is not None]
    return [*view.request.bounds, *declared]


def _ended_by_limit(view: RequestView, delivered: Delivery) -> bool:
    """Return whether a limit ended the conversation after a natural end of a turn: that of turns,
    or one that the next words of the environment would have reached.
    """
    limits, answered = view.contract.limits or RolloutLimits(), len(delivered.reference.answers)
    if limits.turns is not None and answered + 1 >= limits.turns:
        return True
    if answered >= len(view.request.turns):
        return False
    words = limits.cut_answer(view.request.turns[answered])
    used = len(delivered.rollout.response_ids) + len(words)
    return any(used >= bound for bound in _bounds(view))


def _may_go_on(view: RequestView, delivered: Delivery) -> bool:
    """Return whether the environment would have answered the last turn, had there been room."""
    if view.header is None or view.header.case is None:
        # only a case lists the answers that were still to come
        return view.contract.multi_turn
    answered = len(delivered.reference.answers)
    return answered < len(view.request.turns) and _ended_by_limit(view, delivered)


def _ends_with_eos(view: RequestView, delivered: Delivery) -> bool:
    """Return whether a token that ends a call comes last, so that a stack may rightly call an abort
    a natural end.
    """
    last = delivered.rollout.response_ids[-1:]
    eos = getattr(view.oracle, "eos_id", None)
    if eos is not None and last == (eos,):
        return True
    if delivered.reference.last is None:
        return False
    attempt = view.attempts[delivered.reference.last]
    reply = attempt.consumed
    # other tokens are what stitch.tokens reports
    shown = not delivered.aligned or (reply is not None and last == reply.output.token_ids[-1:])
    return reply is not None and shown and ends_with_eos(view, attempt)


def _reason_title(engine_reason: FinishReason | None, sample_reason: FinishReason | None) -> str:
    if sample_reason is None:
        return "The sample carries no finish reason"
    if engine_reason is None:
        return f"The sample ends by {sample_reason!s}, although no engine ever answered"
    if engine_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return f"An aborted rollout is shown as a natural end ({sample_reason!s})"
    return f"A rollout that ended by {engine_reason!s} is shown as {sample_reason!s}"


def _reason_hint(engine_reason: FinishReason | None, sample_reason: FinishReason | None) -> str:
    if engine_reason is None and sample_reason is not None:
        return (
            "No engine sampled this end: the trainer rewards an answer that the policy did"
            " not give. Raise an error, or deliver the sample as aborted."
        )
    if sample_reason is None:
        return (
            "Declare finish_reason=False if samples carry none; otherwise filters for"
            " truncated and aborted samples find nothing."
        )
    if engine_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return (
            "A fragment counts as a complete turn: it is rewarded and trained on as if the"
            " policy had ended it."
        )
    if engine_reason is FinishReason.STOP and sample_reason == FinishReason.LENGTH:
        return (
            "The end-of-sequence token was the last one of the budget: read the engine's"
            " reason before you compare lengths; otherwise complete answers are filtered as"
            " truncated."
        )
    if engine_reason is FinishReason.LENGTH:
        return (
            "A truncated response counts as complete: overlong filters and truncation"
            " penalties miss it."
        )
    return "Filters for aborted samples drop a complete response."


@request_check(
    "stitch.finish-length",
    promise=(
        "A sample that ends by length has used up its budget, or ended at another limit that its"
        " contract declares."
    ),
    needs="a delivered sample, its engine calls and replies",
    exercised_by="ends by length",
    applies=no_finish_reason,
    scope=Scope.ONLY_SAMPLE,
)
def stitch_finish_length(view: RequestView, out: Collector) -> None:
    """Judge the samples that say ``length``."""
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    if delivered.rollout.finish_reason != FinishReason.LENGTH:
        return
    out.exercised("ends by length")
    budget, reference = view.request.budget, delivered.reference
    if (
        not delivered.aligned
        or reference.last is None
        or _exhausted(view, delivered)
        or _ended_by_limit(view, delivered)
    ):
        return
    last, size = view.attempts[reference.last], turn_lengths(view)[-1]
    if _cut_by_engine(last) or _within_room(view, last):
        return
    first = next((step for step in reversed(reference.steps) if step.spent == 0), None)
    cap = view.attempts[first.attempt].call.max_tokens if first is not None else None
    # A stop on the last token of a cap is still a stop.
    stopped = reference.finish_reason is FinishReason.STOP
    own = reference.finish_reason in (FinishReason.LENGTH, FinishReason.COMPLETED)
    if not _room_is_recorded(view):
        # The room of the context is as good as a budget, and the first call's cap may be it.
        if not stopped and cap is not None and size >= cap:
            return
        if own and (budget is None or cap is None):
            return
    # what a stack grants in portions of its own limits nothing
    bounds = [bound for bound in (budget, None if own else cap) if bound is not None]
    limit = min((bound for bound in bounds if bound > size), default=None)
    out.finding(
        f"The sample says length after {count(size, 'token')}"
        + (f" of {limit}" if limit is not None else ", although nothing limits it"),
        kind=(
            "says length after a call that was granted less than what was left"
            if own
            else f"says length, but the engine said {reference.finish_reason!s}"
        ),
        expected=(
            f"length only once all {limit} are sampled"
            if limit is not None
            else "calls until the model ends: no limit of the request or of the contract is reached"
            if own
            else f"{reference.finish_reason!s}, as the engine returned"
        ),
        observed=(
            f"the last reply, to call {last.call.call_id}, ended by {reference.finish_reason!s},"
            f" granted {last.call.max_tokens}"
        ),
        where=view.place(call=last.call.call_id),
        hint=_length_hint(stopped, own),
    )


def _length_hint(stopped: bool, own: bool) -> str:
    if stopped:
        return (
            "The engine ended the response itself: a complete answer counts as truncated, and"
            " is filtered or penalised."
        )
    if own:
        return (
            "An answer is cut short. If calls sample in portions, the length of a portion ends"
            " nothing: call again with what is left. A limit of your stack's own is declared"
            " (limits={'response': most})."
        )
    return (
        "An unfinished response counts as one that reached its limit: a cap on retries, or"
        " a loop that compares with a budget which it shrinks itself, ends it early (AReaL"
        " #858, and its bridge after 20 aborts)."
    )


def _cut_by_engine(last: Attempt) -> bool:
    """Return whether the engine ended the call by length before its grant: at a limit of its own,
    such as its context.
    """
    reply, granted = last.consumed, last.call.max_tokens
    return (
        reply is not None
        and reply.output.finish_reason in (FinishReason.LENGTH, FinishReason.COMPLETED)
        and (granted is None or len(reply.output.token_ids) < granted)
    )


def _room_is_recorded(view: RequestView) -> bool:
    """Return whether the trace says how long a sequence the engines take: that of a case does."""
    return view.header is not None and view.header.case is not None


def _within_room(view: RequestView, last: Attempt) -> bool:
    """Return whether the last call filled its request's room with tokens that the sample need not
    hold (of a chat template, say), or the context of the engine.
    """
    sampled = 0 if last.consumed is None else len(last.consumed.output.token_ids)
    length, prompt = len(last.call.prompt_ids) + sampled, len(view.request.prompt_ids)
    context = case_option(view.header, "engine")
    longest = context.get("max_length") if isinstance(context, Mapping) else None
    if isinstance(longest, int) and length >= longest:
        return True
    return any(length - prompt >= bound for bound in _bounds(view))
