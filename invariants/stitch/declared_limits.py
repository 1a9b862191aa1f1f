"""The check on the limits that a stack declares in its contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Contract
from rollproof.invariants._shared.delivery import reliable_delivery
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.stitch.budgets import overgranted, turn_lengths
from rollproof.judging.checks import Collector, Scope, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = ["stitch_limits_kept"]


def _no_limits(contract: Contract) -> str | None:
    limits = contract.limits
    sizes = () if limits is None else (limits.response, limits.length, limits.turns)
    if limits is None or (limits.turn_tokens is None and not any(sizes)):
        return "the contract declares no limit of a sample (limits)"
    return None


@request_check(
    "stitch.limits-kept",
    promise=(
        "A sample keeps the limits that the contract declares: of the response, of prompt and"
        " response together, of the number of turns and of the tokens of one turn."
    ),
    needs="a contract with limits, the engine calls and a delivered sample",
    exercised_by="samples under declared limits",
    applies=_no_limits,
    scope=Scope.ONLY_SAMPLE,
)
def stitch_limits_kept(view: RequestView, out: Collector) -> None:
    """Compare what the limits count in the sample. ``stitch.budget-granted`` judges a call that was
    granted more than was left of the request's budget.
    """
    delivered = reliable_delivery(view, out)
    limits = view.contract.limits
    if delivered is None or limits is None:
        return
    budget = view.request.budget
    # one mistake, one finding: the grant is why the sample is too long
    if budget is not None and overgranted(view, budget):
        out.absent("a call was granted too much (stitch.budget-granted)")
        return
    out.exercised("samples under declared limits")
    turns = [length for length in turn_lengths(view) if length]
    measured = (
        ("response", limits.response, len(delivered.rollout.response_ids), "response token"),
        ("length", limits.length, delivered.rollout.total, "token"),
        ("turns", limits.turns, len(turns), "turn"),
        ("turn_tokens", limits.turn_tokens, max(turns, default=0), "sampled token"),
    )
    for name, limit, size, noun in measured:
        if limit is not None and size > limit:
            where = "one turn" if name == "turn_tokens" else "the sample"
            out.finding(
                f"There are {count(size, noun)} in {where}, {size - limit} more than limits.{name}"
                " allows",
                kind=f"more than limits.{name} allows",
                expected=f"at most {limit}, as the contract declares",
                observed=f"{size} over {count(len(view.segments), 'segment')}",
                where=view.place(),
                hint=(
                    "The environment's tokens count, too, in a response and in its length; turns"
                    " are those of the model, one more than the environment's answers. Or the"
                    " contract declares another limit than the stack is configured with."
                ),
            )
            return
