"""The check on samples that end by length one token before their budget, whatever the budget is.

A single sample may have met a cap of the stack's own, which is as good as a budget
(``stitch.finish-length``). A cap does not move with the budget: if requests of very different
budgets all end one token early, the budget was counted wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Contract
from rollproof.core.events.rollout import Result
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import count, listing
from rollproof.judging.checks import Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge import JudgeContext

__all__ = [
    "stitch_budget_used",
]

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


def _ends_declared(contract: Contract) -> str | None:
    return None if contract.finish_reason else "the contract declares no finish reason"


stitch_budget_used = trace_check(
    "stitch.budget-used",
    promise="Samples that end by length do not all end one token before their budget.",
    needs=(
        "requests of budgets three times apart whose samples end by length, and their first calls"
    ),
    exercised_by="ends by length at different budgets",
    applies=_ends_declared,
)(StitchBudgetUsed)
