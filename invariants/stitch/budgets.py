"""Stitch checks on budgets and ends: what each call may sample, and whether the sample says truly
why it ended.

The budget of a multi-turn request is read per turn: whether a stack's limit counts one turn or all
of them is not declared, and the wider reading raises no false alarm.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.delivery import Delivery, delivery, missing_reason
from rollproof.invariants._shared.phrases import call_name, count, share
from rollproof.invariants.stitch.attempts import not_resumed
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import Attempt, RequestView
    from rollproof.judging.stitching import Step

__all__ = [
    "stitch_budget_granted",
    "stitch_budget_total",
    "stitch_finish_length",
    "stitch_finish_reason",
    "stitch_zero_token_segments",
]

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


@request_check(
    "stitch.budget-granted",
    promise="No call may sample more than what is left of the caller's budget.",
    needs="a request with a budget (max_tokens, or the configured limit), and its engine calls",
    exercised_by=("first calls", "resuming calls"),
)
def stitch_budget_granted(view: RequestView, out: Collector) -> None:
    """Compare each call's ``max_tokens`` with the budget less what was sampled before it."""
    budget = view.request.budget
    if budget is None:
        out.absent("no request has a budget")
        return
    over = _overgranted(view, budget)
    out.exercised("first calls", min(1, len(view.attempts)))
    out.exercised("resuming calls", max(0, len(view.attempts) - 1))
    if not over:
        return
    step, attempt = over[0]
    left, grant = budget - step.spent, attempt.call.max_tokens
    title = (
        f"Call {step.attempt} states no budget, although {count(left, 'token')} of {budget} are"
        " left"
        if grant is None
        else (
            f"Call {step.attempt} may sample {count(grant, 'token')}, but only {left} of {budget}"
            " are left"
        )
    )
    hint = (
        "Without a stated budget the engine samples up to its context length; pin the budget to the"
        " configured response length on the first call, and write what is left of it into every"
        " later one (verl #7207)."
        if grant is None
        else (
            "A resume must subtract what was sampled before it, else every abort lengthens the"
            " rollout (verl #7207, slime #2260)."
        )
    )
    out.finding(
        title,
        kind="a call states no budget" if grant is None else "a call may sample more than is left",
        expected=f"at most {budget} - {step.spent} already sampled = {left}",
        observed=(
            f"max_tokens={grant} in {call_name(attempt)}; too much in"
            f" {share(len(over), len(view.attempts), 'call')} of the request"
        ),
        where=view.place(call=step.attempt, server=attempt.call.server_id),
        hint=hint,
    )


def _overgranted(view: RequestView, budget: int) -> list[tuple[Step, Attempt]]:
    pairs = [(step, view.attempts[step.attempt]) for step in view.stitched.steps]
    return [
        (step, attempt)
        for step, attempt in pairs
        if step.agree
        == step.sent  # else how much was spent is not known, and stitch.resume-prompt says so
        and (
            attempt.call.max_tokens is None or attempt.call.max_tokens > max(0, budget - step.spent)
        )
    ]


def _was_overgranted(view: RequestView, attempt: Attempt) -> bool:
    budget = view.request.budget
    return budget is not None and any(one is attempt for _, one in _overgranted(view, budget))


@request_check(
    "stitch.budget-total",
    promise=(
        "A rollout whose calls were granted what was left (stitch.budget-granted) never holds more"
        " sampled tokens than its budget, nor a reply more than its call was granted."
    ),
    needs="a request with a budget, its engine calls and replies",
    exercised_by="replies under a budget",
)
def stitch_budget_total(view: RequestView, out: Collector) -> None:
    """Count what was sampled. Where a call was granted too much, ``budget-granted`` says so and
    this check stands back.
    """
    for attempt in view.attempts:
        reply, grant = attempt.consumed, attempt.call.max_tokens
        if reply is None or grant is None or grant < 0:
            continue
        out.exercised("replies under a budget")
        size = len(reply.output.token_ids)
        if size > grant:
            out.finding(
                f"The reply to call {attempt.number} holds {count(size, 'token')}, {size - grant}"
                " more than it was granted",
                kind="a reply holds more than its call was granted",
                expected=f"at most max_tokens={grant}",
                observed=f"{count(size, 'token')} from server {attempt.call.server_id}",
                where=view.place(call=attempt.number, server=attempt.call.server_id),
                hint=(
                    "The engine did not honour its limit; speculative decoding must cut the"
                    " accepted tokens at max_tokens."
                ),
            )
            return
    budget, reference = view.request.budget, view.stitched
    if budget is None or reference.broken is not None or _overgranted(view, budget):
        return
    most = max(_turn_lengths(view), default=0)
    if most > budget:
        out.finding(
            f"The rollout holds {count(most, 'sampled token')}, {most - budget} more than its"
            " budget",
            kind="a rollout holds more than its budget",
            expected=f"at most {budget}",
            observed=f"{most} over {count(len(view.segments), 'segment')}",
            where=view.place(),
            hint=(
                "No single call was granted too much: calls overlapped in time, or more replies"
                " were kept than were asked for."
            ),
        )
        return


def _turn_lengths(view: RequestView) -> list[int]:
    """Sampled tokens per turn."""
    lengths = [0]
    for run in view.stitched.runs:
        if run.attempt < 0:
            lengths.append(0)
        else:
            lengths[-1] += len(run.ids)
    return lengths


def _ends_declared(contract: Contract) -> str | None:
    return None if contract.finish_reason else "the contract declares no finish reason"


@request_check(
    "stitch.finish-reason",
    promise=(
        "A sample ends for the reason that its engine gave: an abort is never shown as a natural"
        " end, nor a stop as a cut."
    ),
    needs="a delivered sample, its engine calls and replies",
    exercised_by=("ends by stop", "ends by length", "ends by abort"),
    applies=_ends_declared,
)
def stitch_finish_reason(view: RequestView, out: Collector) -> None:
    """Compare the sample's reason with the last delivered reply's. ``completed`` stands for
    ``stop`` and ``length``.
    """
    found = delivery(view)
    if found is None or not (found.known or _never_asked(view, found)):
        out.absent(found.why if found else missing_reason(view))
        return
    want, got = found.reference.finish_reason, found.rollout.finish_reason
    if want is not None:
        out.exercised(
            "ends by abort"
            if want is FinishReason.ABORT
            else "ends by length"
            if want is FinishReason.LENGTH
            else "ends by stop"
        )
    if _reason_holds(view, found, want, got):
        return
    observed = f"finish reason {got!s}" if got is not None else "no finish reason"
    out.finding(
        _reason_title(want, got),
        expected=(
            f"{want!s}, as the engine said"
            if want is not None
            else "abort or error: no engine ever answered"
        ),
        observed=observed
        + (f"; the last reply is that to call {found.reference.last}" if want is not None else ""),
        where=view.place(call=found.reference.last),
        hint=_reason_hint(want, got),
    )


def _never_asked(view: RequestView, found: Delivery) -> bool:
    """Whether a sample without tokens ends naturally although no engine was asked, in a run whose
    calls were all seen.

    A call may have been taken for that of another request of a group, whose members share a prompt.
    """
    seen = view.header is not None and view.header.case is not None and view.request.group is None
    return (
        seen
        and not view.attempts
        and not found.rollout.response_ids
        and found.rollout.finish_reason in _NATURAL
    )


def _reason_holds(
    view: RequestView, found: Delivery, want: FinishReason | None, got: FinishReason | None
) -> bool:
    if got is not None and got == want:
        return True
    if got is None:
        return False
    exhausted = _exhausted(view, found)
    unanswered = any(
        attempt.number > (found.reference.last if found.reference.last is not None else -1)
        for attempt in view.attempts
    )
    if want is None:
        return got in (FinishReason.ABORT, FinishReason.ERROR) or exhausted
    if got == FinishReason.LENGTH and not exhausted:
        return True  # stitch.finish-length says so
    cut = found.count < len(found.reference.response_ids) or any(
        run.attempt < 0 for run in found.reference.runs
    )
    if got == FinishReason.LENGTH and cut:
        return True
    if want in (FinishReason.ABORT, FinishReason.ERROR):
        ended = got in (FinishReason.LENGTH, FinishReason.COMPLETED) and exhausted
        given_up = got in (FinishReason.ABORT, FinishReason.ERROR)
        return ended or given_up or (got in _NATURAL and _ends_with_eos(view, found))
    if got in (FinishReason.ABORT, FinishReason.ERROR):
        return unanswered
    return FinishReason.COMPLETED in (got, want)


def _exhausted(view: RequestView, found: Delivery) -> bool:
    """Whether the budget is used up, by the last turn, by all turns, or by the response with all
    that the environment said.
    """
    request = view.request
    lengths = _turn_lengths(view)
    most = max(lengths[-1], sum(lengths), len(found.rollout.response_ids))
    return any(limit is not None and most >= limit for limit in (request.max_tokens, request.limit))


def _ends_with_eos(view: RequestView, found: Delivery) -> bool:
    """Whether the coded policy's end-of-sequence token stands last, so that a stack may rightly
    call an abort a natural end.
    """
    eos = getattr(view.oracle, "eos_id", None)
    return eos is not None and found.rollout.response_ids[-1:] == (eos,)


def _reason_title(want: FinishReason | None, got: FinishReason | None) -> str:
    if got is None:
        return "The sample carries no finish reason"
    if want is None:
        return f"The sample ends by {got!s}, although no engine ever answered"
    if want in (FinishReason.ABORT, FinishReason.ERROR):
        return f"An aborted rollout is shown as a natural end ({got!s})"
    if got in (FinishReason.ABORT, FinishReason.ERROR):
        return f"A rollout that ended by {want!s} is shown as {got!s}"
    return f"A rollout that ended by {want!s} is shown as {got!s}"


def _reason_hint(want: FinishReason | None, got: FinishReason | None) -> str:
    if want is None and got is not None:
        return (
            "Nobody sampled an end: what is rewarded and trained on as the policy's answer is none."
            " Raise, or hand it over as aborted."
        )
    if got is None:
        return (
            "Declare finish_reason=False where samples carry none; else filters for truncated and"
            " aborted samples see nothing."
        )
    if want in (FinishReason.ABORT, FinishReason.ERROR):
        return (
            "A fragment counts as a whole turn, and is rewarded and trained on as if the policy had"
            " ended it."
        )
    if want is FinishReason.STOP and got == FinishReason.LENGTH:
        return (
            "The end-of-sequence token was the last one of the budget: ask for the engine's reason"
            " before the length, else whole answers are filtered as cut."
        )
    if want is FinishReason.LENGTH:
        return (
            "A response that was cut by its budget counts as complete: overlong filters and"
            " truncation penalties miss it."
        )
    return "Filters for aborted samples throw away a response that is whole."


@request_check(
    "stitch.finish-length",
    promise="A sample that ends by length has used up its budget.",
    needs="a delivered sample, its engine calls and replies",
    exercised_by="ends by length",
    applies=_ends_declared,
)
def stitch_finish_length(view: RequestView, out: Collector) -> None:
    """Judge the samples that say ``length``. A stack's own lower cap, granted to the first call
    already, is as good as a budget.
    """
    found = delivery(view)
    if found is None or not found.known:
        out.absent(found.why if found else missing_reason(view))
        return
    if found.rollout.finish_reason != FinishReason.LENGTH:
        return
    out.exercised("ends by length")
    budget, reference = view.request.budget, found.reference
    if not found.aligned or reference.last is None or _exhausted(view, found):
        return
    last = view.attempts[reference.last]
    reply = last.consumed
    size = _turn_lengths(view)[-1]
    first = next((step for step in reversed(reference.steps) if step.spent == 0), None)
    cap = view.attempts[first.attempt].call.max_tokens if first is not None else None
    stopped = reference.finish_reason is FinishReason.STOP
    if not stopped and cap is not None and size >= cap:
        return  # an abort on the last token of a cap cut nothing off either
    if reference.finish_reason in (FinishReason.LENGTH, FinishReason.COMPLETED):
        short = (
            reply is not None
            and last.call.max_tokens is not None
            and len(reply.output.token_ids) < last.call.max_tokens
        )
        if budget is None or cap is None or short:
            return
    bounds = [bound for bound in (budget, cap) if bound is not None and bound > size]
    limit = min(bounds) if bounds else None
    out.finding(
        f"The sample says length after {count(size, 'token')}"
        + (f" of {limit}" if limit is not None else ", although nothing limits it"),
        kind=f"says length where the engine said {reference.finish_reason!s}",
        expected=(
            f"length only once all {limit} are sampled"
            if limit is not None
            else f"{reference.finish_reason!s}, as the engine said"
        ),
        observed=(
            f"the last reply, to call {last.number}, ended by {reference.finish_reason!s}, granted"
            f" {last.call.max_tokens}"
        ),
        where=view.place(call=last.number),
        hint=(
            "The engine ended the response itself: a whole answer counts as cut, and is filtered or"
            " penalised as one."
            if stopped
            else (
                "An unfinished response counts as one that reached its limit: a cap on retries, or"
                " a loop that compares with a budget which it shrinks itself, ends it early (AReaL"
                " #858, and its bridge after 20 aborts)."
            )
        ),
    )


@request_check(
    "stitch.zero-token-segments",
    promise=(
        "A reply without tokens changes nothing: the next call asks for the same, with the same"
        " budget."
    ),
    needs="the engine calls and replies of a request",
    exercised_by="calls after a reply without tokens",
)
def stitch_zero_token_segments(view: RequestView, out: Collector) -> None:
    """Compare the call after an empty reply with the one that it answered. More than before is
    ``budget-granted``'s to judge.
    """
    if view.contract.resume is not ResumeBy.CLIENT:
        out.inapplicable(not_resumed(view.contract))
    attempts = view.attempts
    for before, after in pairwise(attempts):
        reply = before.consumed
        if (
            reply is None
            or reply.output.token_ids
            or reply.output.finish_reason is not FinishReason.ABORT
        ):
            continue
        if before.call.prompt_ids != after.call.prompt_ids or after.call.index < reply.index:
            continue  # another sequence, which stitch.resume-prompt judges
        out.exercised("calls after a reply without tokens")
        a, b = before.call.max_tokens, after.call.max_tokens
        if a is not None and b is not None and b < a and not _was_overgranted(view, before):
            out.finding(
                f"A reply without tokens changed the budget from {a} to {b}",
                kind="a reply without tokens lowered the budget",
                expected=f"call {after.number} may sample {a}, as call {before.number} might",
                observed=f"max_tokens={b} in {call_name(after)}",
                where=view.place(call=after.number, server=after.call.server_id),
                hint=(
                    "An abort before the first token costs nothing: subtract the tokens that came"
                    " back, not the attempts."
                ),
            )
            return
