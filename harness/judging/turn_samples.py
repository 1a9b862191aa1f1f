"""Judge a sample of one turn as what it is: a rollout whose prompt is the conversation so far.

Some stacks hand over each turn of a conversation as a sample of its own (step-wise training). The
prompt of such a sample is the request's, the turns before and the environment's answers: exactly
what the first call of the turn sent. The calls of earlier turns made other samples, which the stack
hands over apart, or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.judging.races import set_attempts
from rollproof.judging.route_slices import cut_pieces

if TYPE_CHECKING:
    from rollproof.core.records import Request
    from rollproof.judging.request_view import RequestView

__all__ = ["TURN_SAMPLES", "take_turn"]

TURN_SAMPLES = (
    "each turn is a sample of its own (step-wise): what earlier turns and the environment's answers"
    " became is in other samples (samples='turn' declares that the request delivers them all)"
)


def take_turn(view: RequestView) -> None:
    """Reduce a request to the turn of its sample, if that is the sample of a turn."""
    rollout, request = view.rollout, view.request
    if rollout is None or not view.contract.multi_turn:
        return
    context, prompt = rollout.prompt_ids, len(request.prompt_ids)
    if len(context) <= prompt or context[:prompt] != request.prompt_ids:
        return
    first = next((a.number for a in view.attempts if a.call.prompt_ids == context), 0)
    answers = [answer for answer in view.stitched.answers if answer.end <= len(context) - prompt]
    if not first or not answers or answers[-1].end != len(context) - prompt:
        return
    begin, granted = view.attempts[first].call.index, view.attempts[first].call.max_tokens
    view.earlier_turns = len(context) - prompt
    # a budget may be per turn or for all of them: what the turn was granted shows which
    left = None if request.budget is None else request.budget - view.earlier_turns
    shared = left is not None and granted is not None and granted <= left
    request = _of_turn(request, context, view.earlier_turns if shared else 0)
    # the turn's first call computes these rows again: a sample may have the one or the other
    view.context_rows = [
        replace(piece, attempt=0) for piece in cut_pieces(view.stitched.pieces, len(context))
    ]
    view.set_aside += view.attempts[:first]
    view.observations[:] = [said for said in view.observations if said.index > begin]
    view.submit = replace(
        view.submit, request=replace(request, turns=request.turns[len(answers) :])
    )
    set_attempts(view, view.attempts[first:])


def _of_turn(request: Request, context: tuple[int, ...], used: int) -> Request:
    """Return the request of a turn, with ``used`` tokens of its budget spent."""
    return replace(
        request,
        prompt_ids=context,
        max_tokens=None if request.max_tokens is None else request.max_tokens - used,
        limit=None if request.limit is None else request.limit - used,
    )
