"""Checks on budgets: what each call may sample.

The budget of a multi-turn request is applied per turn. A contract does not declare whether a
stack's limit counts one turn or all of them, and the wider reading raises no false alarm.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rollproof.core.contract import Contract, ResumeBy
from rollproof.core.events.rollout import Result
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.declared_limits import no_larger_budgets
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import call_name, count, listing, share
from rollproof.invariants.stitch.attempts import not_resumed
from rollproof.judging.checks import Check, Collector, Scope, request_check, trace_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollproof.judging.attempt import Attempt
    from rollproof.judging.judge_context import JudgeContext
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Step

__all__ = [
    "no_finish_reason",
    "overgranted",
    "stitch_budget_granted",
    "stitch_budget_total",
    "stitch_budget_used",
    "stitch_zero_token_segments",
    "turn_lengths",
]


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
    out.finding(
        title,
        kind="a call states no budget" if grant is None else "a call may sample more than is left",
        expected=f"at most {budget} - {step.spent} already sampled = {left}",
        observed=(
            f"max_tokens={grant} in {call_name(attempt)}; too much in"
            f" {share(len(excessive), len(view.attempts), 'call')} of the request"
        ),
        where=view.place(call=call, server=attempt.call.server_id),
        hint=_why_too_much(view, step, grant),
    )


def _why_too_much(view: RequestView, step: Step, grant: int | None) -> str:
    """Return the likely cause of a grant that exceeds what is left."""
    if grant is None:
        return (
            "Without a stated budget the engine samples up to its context length. Set max_tokens"
            " to the configured response length on the first call, and to what is left of it on"
            " every later one (verl #7207)."
        )
    if step.spent:
        return (
            "A resume must subtract what was sampled before it; otherwise every abort"
            " lengthens the rollout (verl #7207, slime #2260)."
        )
    sibling = next(
        (
            other.request.request_id
            for other in view.neighbours
            if other.request.prompt_ids == view.request.prompt_ids and other.request.budget == grant
        ),
        None,
    )
    if sibling is not None:
        return (
            f"{grant} is the budget of {sibling}, which has the same prompt: the call may have been"
            f" made for {sibling}, and its reply delivered to another member of the group."
        )
    return "Nothing was sampled before this call: grant it the budget of its own request."


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
    scope=Scope.ONLY_SAMPLE,
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


def no_finish_reason(contract: Contract) -> str | None:
    """Return the reason why the ends of samples are not judged, if there is one."""
    return None if contract.finish_reason else "the contract declares no finish reason"


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
    return no_finish_reason(contract) or no_larger_budgets(contract, _MIN_RATIO)


stitch_budget_used: Check = trace_check(
    "stitch.budget-used",
    promise="Samples that end by length do not all end one token before their budget.",
    needs=(
        "requests of budgets three times apart whose samples end by length, and their first calls"
    ),
    exercised_by="ends by length at different budgets",
    applies=_budgets_apart,
    scope=Scope.ONLY_SAMPLE,
)(StitchBudgetUsed)
