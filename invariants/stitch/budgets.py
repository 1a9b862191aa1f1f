"""Checks on budgets and ends: what each call may sample, and whether the sample says why it ended.

The budget of a multi-turn request is applied per turn. A contract does not declare whether a
stack's limit counts one turn or all of them, and the wider reading raises no false alarm.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.events.rollout import Result
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.declared_limits import no_larger_budgets
from rollproof.invariants._shared.delivery import (
    Delivery,
    delivery,
    missing_reason,
    reliable_delivery,
)
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import call_id, call_name, count, listing, share
from rollproof.invariants.stitch.attempts import not_resumed
from rollproof.judging.checks import Check, Collector, request_check, trace_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollproof.judging.attempt import Attempt
    from rollproof.judging.judge_context import JudgeContext
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Step

__all__ = [
    "overgranted",
    "stitch_budget_granted",
    "stitch_budget_total",
    "stitch_budget_used",
    "stitch_finish_length",
    "stitch_finish_reason",
    "stitch_zero_token_segments",
    "turn_lengths",
]

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


@request_check(
    "stitch.budget-granted",
    promise="No call may sample more than what is left of the caller's budget.",
    needs="a request with a budget (max_tokens, or the configured limit), and its engine calls",
    exercised_by=("first calls", "resuming calls"),
)
def stitch_budget_granted(view: RequestView, out: Collector) -> None:
    """Compare each call's ``max_tokens`` with the budget minus what was sampled before it."""
    budget = view.request.budget
    if budget is None:
        out.absent("no request has a budget")
        return
    # verl and slime had it: the resume loop passed max_tokens of the request to every call, so that
    # each abort made the rollout longer (verl #7207, slime #2260).
    excessive = overgranted(view, budget)
    out.exercised("first calls", min(1, len(view.attempts)))
    out.exercised("resuming calls", max(0, len(view.attempts) - 1))
    if not excessive:
        return
    step, attempt = excessive[0]
    left, grant, call = budget - step.spent, attempt.call.max_tokens, attempt.call.call_id
    title = (
        f"Call {call} states no budget, although {count(left, 'token')} of {budget} are left"
        if grant is None
        else (
            f"Call {call} may sample {count(grant, 'token')}, but only {left} of {budget} are left"
        )
    )
    hint = (
        "Without a stated budget the engine samples up to its context length. Set max_tokens"
        " to the configured response length on the first call, and to what is left of it on"
        " every later one (verl #7207)."
        if grant is None
        else (
            "A resume must subtract what was sampled before it; otherwise every abort"
            " lengthens the rollout (verl #7207, slime #2260)."
        )
    )
    out.finding(
        title,
        kind="a call states no budget" if grant is None else "a call may sample more than is left",
        expected=f"at most {budget} - {step.spent} already sampled = {left}",
        observed=(
            f"max_tokens={grant} in {call_name(attempt)}; too much in"
            f" {share(len(excessive), len(view.attempts), 'call')} of the request"
        ),
        where=view.place(call=call, server=attempt.call.server_id),
        hint=hint,
    )


def overgranted(view: RequestView, budget: int) -> list[tuple[Step, Attempt]]:
    """Return the calls that were granted more than was left of the budget."""
    pairs = [(step, view.attempts[step.attempt]) for step in view.stitched.steps]
    return [
        (step, attempt)
        for step, attempt in pairs
        # Otherwise it is not known how much was spent, and stitch.resume-prompt reports it.
        if step.agree == step.sent
        and (
            attempt.call.max_tokens is None or attempt.call.max_tokens > max(0, budget - step.spent)
        )
    ]


def _wasovergranted(view: RequestView, attempt: Attempt) -> bool:
    budget = view.request.budget
    return budget is not None and any(other is attempt for _, other in overgranted(view, budget))


@request_check(
    "stitch.budget-total",
    promise=(
        "A reply has at most the tokens that its call was granted. If no call was granted too much"
        " (stitch.budget-granted), the sampled tokens of the rollout stay within its budget."
    ),
    needs="a request with a budget, its engine calls and replies",
    exercised_by="replies under a budget",
)
def stitch_budget_total(view: RequestView, out: Collector) -> None:
    """Count the sampled tokens. ``stitch.budget-granted`` judges calls that were granted too
    much.
    """
    for attempt in view.attempts:
        reply, grant = attempt.consumed, attempt.call.max_tokens
        if reply is None or grant is None or grant < 0:
            continue
        out.exercised("replies under a budget")
        size = len(reply.output.token_ids)
        # Speculative decoding accepts several tokens at once and must cut them at max_tokens.
        if size > grant:
            out.finding(
                f"The reply to call {attempt.call.call_id} holds {count(size, 'token')},"
                f" {size - grant} more than it was granted",
                kind="a reply holds more than its call was granted",
                expected=f"at most max_tokens={grant}",
                observed=f"{count(size, 'token')} from server {attempt.call.server_id}",
                where=view.place(call=attempt.call.call_id, server=attempt.call.server_id),
                hint=(
                    "The engine did not respect max_tokens; speculative decoding must cut the"
                    " accepted tokens at max_tokens."
                ),
            )
            return
    budget, reference = view.request.budget, view.stitched
    if budget is None or reference.broken is not None or overgranted(view, budget):
        return
    longest = max(turn_lengths(view), default=0)
    if longest > budget:
        out.finding(
            f"The rollout holds {count(longest, 'sampled token')}, {longest - budget} more than its"
            " budget",
            kind="a rollout holds more than its budget",
            expected=f"at most {budget}",
            observed=f"{longest} over {count(len(view.segments), 'segment')}",
            where=view.place(),
            hint=(
                "No single call was granted too much: calls overlapped in time, or the stack"
                " kept more replies than it had requested."
            ),
        )
        return


def turn_lengths(view: RequestView) -> list[int]:
    """Return the number of sampled tokens per turn."""
    lengths = [0]
    for run in view.stitched.runs:
        if run.attempt < 0:
            lengths.append(0)
        else:
            lengths[-1] += len(run.ids)
    return lengths


def _no_finish_reason(contract: Contract) -> str | None:
    return None if contract.finish_reason else "the contract declares no finish reason"


@request_check(
    "stitch.finish-reason",
    promise=(
        "A sample has the finish reason that its engine returned: an abort is never shown as"
        " a natural end, nor a stop as a truncation."
    ),
    needs="a delivered sample, its engine calls and replies",
    exercised_by=("ends by stop", "ends by length", "ends by abort"),
    applies=_no_finish_reason,
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
    unanswered = any(
        attempt.number > (delivered.reference.last if delivered.reference.last is not None else -1)
        for attempt in view.attempts
    )
    # No reply arrived: only an abort, an error or a used-up budget is a truthful reason.
    if engine_reason is None:
        return sample_reason in (FinishReason.ABORT, FinishReason.ERROR) or exhausted
    if sample_reason == FinishReason.LENGTH and not exhausted:
        return True  # stitch.finish-length reports it
    cut = delivered.count < len(delivered.reference.response_ids) or any(
        run.attempt < 0 for run in delivered.reference.runs
    )
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


def _exhausted(view: RequestView, delivered: Delivery) -> bool:
    """Return whether the budget is used up: by the last turn, by all turns, or by the response with
    the environment's tokens.
    """
    # A budget may be per turn or for all turns; both are checked.
    lengths = turn_lengths(view)
    longest = max(lengths[-1], sum(lengths), len(delivered.rollout.response_ids))
    return any(longest >= bound for bound in _bounds(view))


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
    return (
        reply is not None and last == reply.output.token_ids[-1:] and ends_with_eos(view, attempt)
    )


def _reason_title(engine_reason: FinishReason | None, sample_reason: FinishReason | None) -> str:
    if sample_reason is None:
        return "The sample carries no finish reason"
    if engine_reason is None:
        return f"The sample ends by {sample_reason!s}, although no engine ever answered"
    if engine_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return f"An aborted rollout is shown as a natural end ({sample_reason!s})"
    if sample_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return f"A rollout that ended by {engine_reason!s} is shown as {sample_reason!s}"
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
    applies=_no_finish_reason,
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
    last = view.attempts[reference.last]
    reply = last.consumed
    size = turn_lengths(view)[-1]
    first = next((step for step in reversed(reference.steps) if step.spent == 0), None)
    # A stack's own lower cap that its first call was already granted is as good as a budget.
    cap = view.attempts[first.attempt].call.max_tokens if first is not None else None
    # A stop on the last token of a cap is still a stop.
    stopped = reference.finish_reason is FinishReason.STOP
    if not stopped and cap is not None and size >= cap:
        # An abort on the last token of a cap cut nothing off either.
        return
    if reference.finish_reason in (FinishReason.LENGTH, FinishReason.COMPLETED):
        ended_early = (
            reply is not None
            and last.call.max_tokens is not None
            and len(reply.output.token_ids) < last.call.max_tokens
        )
        if budget is None or cap is None or ended_early:
            return
    bounds = [bound for bound in (budget, cap) if bound is not None and bound > size]
    limit = min(bounds) if bounds else None
    out.finding(
        f"The sample says length after {count(size, 'token')}"
        + (f" of {limit}" if limit is not None else ", although nothing limits it"),
        kind=f"says length, but the engine said {reference.finish_reason!s}",
        expected=(
            f"length only once all {limit} are sampled"
            if limit is not None
            else f"{reference.finish_reason!s}, as the engine returned"
        ),
        observed=(
            f"the last reply, to call {last.call.call_id}, ended by {reference.finish_reason!s},"
            f" granted {last.call.max_tokens}"
        ),
        where=view.place(call=last.call.call_id),
        hint=(
            "The engine ended the response itself: a complete answer counts as truncated, and"
            " is filtered or penalised."
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
        "A reply without tokens changes nothing: the next call sends the same prompt with the"
        " same budget."
    ),
    needs="the engine calls and replies of a request",
    exercised_by="calls after a reply without tokens",
)
def stitch_zero_token_segments(view: RequestView, out: Collector) -> None:
    """Compare the call after an empty reply with the call that it answered.
    ``stitch.budget-granted`` judges a larger budget.
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
            # Another sequence: stitch.resume-prompt judges it.
            continue
        out.exercised("calls after a reply without tokens")
        budget_before, budget_after = before.call.max_tokens, after.call.max_tokens
        if (
            budget_before is not None
            and budget_after is not None
            and budget_after < budget_before
            and not _wasovergranted(view, before)
            and not _only_a_portion(before, attempts[after.number :])
        ):
            out.finding(
                f"A reply without tokens changed the budget from {budget_before} to {budget_after}",
                kind="a reply without tokens lowered the budget",
                expected=(
                    f"call {after.call.call_id} may sample {budget_before}, as call"
                    f" {before.call.call_id} might"
                ),
                observed=f"max_tokens={budget_after} in {call_name(after)}",
                where=view.place(call=after.call.call_id, server=after.call.server_id),
                hint=(
                    "An abort before the first token costs nothing: subtract the returned"
                    " tokens, not the attempts."
                ),
            )
            return


def _only_a_portion(before: Attempt, later: Sequence[Attempt]) -> bool:
    """Return whether the calls after an empty reply sample what its call might have: in portions,
    as by a proxy whose prefill server samples one token, or one that ended naturally when it was
    used up.
    """
    assert before.call.max_tokens is not None
    reach = len(before.call.prompt_ids) + before.call.max_tokens
    for attempt in later:
        budget, reply = attempt.call.max_tokens, attempt.consumed
        if budget is None or len(attempt.call.prompt_ids) + budget >= reach:
            return True
        if (
            reply is not None
            and reply.output.finish_reason is FinishReason.STOP
            and len(reply.output.token_ids) == budget
        ):
            return True
    return False


# A single sample may have met a cap of the stack's own, which is as good as a budget
# (``stitch.finish-length``). A cap does not move with the budget: if requests of very different
# budgets all end one token early, the budget was counted wrongly.
_MIN_RATIO = 3
"""The ratio of two budgets from which on a cap in proportion to the budget, rounded, does not fall
one token short of both by chance.
"""


class StitchBudgetUsed(EventCheck):
    """Stores the smallest and the greatest budget that was missed by one token, until a budget was
    used in full or missed by more.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._budgets: set[int] = set()
        self._missed: dict[int, tuple[str, int]] = {}
        self._samples = 0
        self._budget_met = False

    def on_result(self, event: Result, out: Collector) -> None:
        view, rollout = self.context.open.get(event.request_id), event.rollout
        if (
            view is None
            or rollout is None
            or view.undecided_calls
            or rollout.finish_reason != FinishReason.LENGTH
            or view.observations
            or not view.attempts
        ):
            return
        budget, grant, size = (
            view.request.budget,
            view.attempts[0].call.max_tokens,
            len(rollout.response_ids),
        )
        if budget is None or budget < 2 or grant is None:
            return
        self._budgets = (
            {min(budget, *self._budgets), max(budget, *self._budgets)}
            if self._budgets
            else {budget}
        )
        if grant == size == budget - 1:
            self._samples += 1
            self._missed.setdefault(budget, (event.request_id, len(view.request.prompt_ids)))
            self._missed = {
                budget: self._missed[budget] for budget in {min(self._missed), max(self._missed)}
            }
        else:
            self._budget_met = True

    def finish(self, out: Collector) -> None:
        if not self._budgets or max(self._budgets) < _MIN_RATIO * min(self._budgets):
            out.absent("no two requests of a trace ended by length at budgets three times apart")
            return
        out.exercised("ends by length at different budgets")
        if self._budget_met or len(self._missed) < 2:
            return
        low, high = sorted(self._missed)
        (_, short_prompt), (request_id, long_prompt) = self._missed[low], self._missed[high]
        # One budget alone proves nothing: a cap of the stack may happen to lie one below it.
        if high < _MIN_RATIO * low or low + short_prompt == high + long_prompt:
            # Prompts and grants with the same sum were cut at the length of the context.
            return
        out.finding(
            f"All {count(self._samples, 'sample')} that end by length end one token before their"
            " budget",
            kind="all samples that end by length end one token before their budget",
            expected=f"{listing((low, high))} tokens, the callers' budgets",
            observed=(
                f"{listing((low - 1, high - 1))} tokens: the first call is already granted one less"
            ),
            where={"request": request_id},
            hint=(
                "A comparison with `<` in place of `<=`, or a position reserved for a token"
                " that never comes, cuts off the last token of every answer."
            ),
        )


def _budgets_apart(contract: Contract) -> str | None:
    return _no_finish_reason(contract) or no_larger_budgets(contract, _MIN_RATIO)


stitch_budget_used: Check = trace_check(
    "stitch.budget-used",
    promise="Samples that end by length do not all end one token before their budget.",
    needs=(
        "requests of budgets three times apart whose samples end by length, and their first calls"
    ),
    exercised_by="ends by length at different budgets",
    applies=_budgets_apart,
)(StitchBudgetUsed)
