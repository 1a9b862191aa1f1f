"""The check on the budgets of later turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.limits import RolloutLimits
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.answered_turns import expect_answers
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.invariants._shared.phrases import call_name, count
from rollproof.judging.checks import Collector, Scope, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = ["stitch_turn_budget"]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the model.

    start: The response index of its first token.
    size: The number of its tokens.
    last: The attempt with its last reply.
    """

    start: int
    size: int
    last: int


@request_check(
    "stitch.turn-budget",
    promise=(
        "A later turn of the model may sample what is left of the budget: none ends by length"
        " before that, unless at a limit of turns that the contract declares (limits.turn_tokens)."
    ),
    needs="a multi-turn request, its engine calls and replies",
    exercised_by="turns after an answer of the environment",
    scope=Scope.ONLY_SAMPLE,
)
def stitch_turn_budget(view: RequestView, out: Collector) -> None:
    """Compare the later turns that used up their grant with what was left, read as narrowly as any
    stack does.

    What the first call was granted counts as a budget: a limit of the stack's own that holds for
    all turns is its choice.
    """
    expect_answers(view, out)
    for number, turn in _later_turns(view):
        out.exercised("turns after an answer of the environment")
        attempt = view.attempts[turn.last]
        reply, granted = attempt.consumed, attempt.call.max_tokens
        if (
            reply is None
            or granted is None
            or reply.output.finish_reason is not FinishReason.LENGTH
            # length before that is the engine's own limit, such as its context
            or len(reply.output.token_ids) < granted
            or ends_with_eos(view, attempt)
        ):
            continue
        left = _left(view, turn.start)
        if left is None or turn.size >= left:
            continue
        out.finding(
            f"Turn {number} of the model was cut at {count(turn.size, 'token')}, although"
            f" {left} were left",
            kind="a later turn was cut before its budget was used up",
            expected=(
                f"{count(left, 'token')} of turn {number}, or its natural end: what is left of the"
                " budget after the environment's answer"
            ),
            observed=(
                f"it ended by length after {count(turn.size, 'token')}: max_tokens={granted} in"
                f" {call_name(attempt)}, max_tokens={view.attempts[0].call.max_tokens} in the first"
                " call"
            ),
            where=view.place(
                call=attempt.call.call_id, server=attempt.call.server_id, index=turn.start
            ),
            hint=(
                "Later turns are sampled under a smaller limit than the first one: build the"
                " parameters of every turn in the same way, or declare the limit"
                " (limits={'turn_tokens': most})."
            ),
        )
        return


def _later_turns(view: RequestView) -> Iterator[tuple[int, _Turn]]:
    """Yield the turns of the model after an answer of the environment, by their number."""
    number, turn, answered = 0, None, False
    for run in view.stitched.runs:
        if run.attempt < 0:
            if turn is not None and answered:
                yield number, turn
            number += turn is not None
            turn, answered = None, answered or bool(run.ids)
        elif turn is None:
            turn = _Turn(run.start, len(run.ids), run.attempt)
        else:
            turn = _Turn(turn.start, turn.size + len(run.ids), run.attempt)
    if turn is not None and answered:
        yield number, turn


def _left(view: RequestView, used: int) -> int | None:
    """Return how many tokens a turn that begins after ``used`` response tokens may sample by the
    narrowest reading of the budget: of all turns together, with the environment's tokens, and
    under what the first call was granted. ``None`` without any limit.
    """
    limits, prompt = view.contract.limits or RolloutLimits(), len(view.request.prompt_ids)
    total = None if limits.total is None else limits.total - prompt
    # a grant that is the limit of a turn says nothing of the next one
    first = view.attempts[0].call.max_tokens if limits.turn_tokens is None else None
    bounds = [*view.request.bounds, limits.response, total, first]
    rooms = [bound - used for bound in bounds if bound is not None]
    if limits.turn_tokens is not None:
        rooms.append(limits.turn_tokens)
    return min(rooms, default=None)
