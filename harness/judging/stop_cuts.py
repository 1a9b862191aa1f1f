"""What a stack keeps of replies that it cuts at stop sequences of its own (``Contract.own_stops``).

The first sequence in a turn counts, also if it begins in one reply and ends in the next. Checks see
the reply as it is cut, ended by ``stop``: with it they compare samples and later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.records import FinishReason, Span
from rollproof.judging.attempt import StopCut

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Reply
    from rollproof.core.own_stops import OwnStops
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["cut_at_stops", "cut_turns"]


def cut_at_stops(attempt: Attempt, stops: OwnStops, before: Sequence[int] = ()) -> None:
    """Set ``Attempt.cut`` if a stop sequence ends in the reply of a call.

    Args:
        attempt: A call.
        stops: The stop sequences that the contract declares.
        before: What was sampled before in the same turn.
    """
    attempt.cut = None
    reply = attempt.received
    found = None if reply is None else stops.first_in(before, reply.output.token_ids)
    if reply is None or found is None:
        return
    end, sequence = found
    # a sequence may begin in the reply before: then nothing of this one is kept
    kept = end if stops.kept else max(0, end - len(sequence))
    attempt.cut = StopCut(
        reply=_shortened(reply, kept, len(attempt.call.prompt_ids), _finish(reply, end)),
        sequence=sequence,
        dropped=reply.output.token_ids[end:],
        reaches_back=0 if stops.kept else max(0, len(sequence) - end),
    )


def cut_turns(view: RequestView) -> None:
    """Cut the replies of an ended request again, now with what was sampled before in their turns.

    A stack may resume a turn that holds a stop already, and cut it when the turn is complete: the
    last reply of the turn is then the one that is cut, with what came before it.
    """
    stops = view.contract.own_stops
    if stops is None:
        return
    turns: dict[tuple[int, ...], tuple[tuple[int, ...], Attempt]] = {}
    for attempt in view.attempts:
        sent = attempt.call.prompt_ids
        sampled, before = turns.get(sent, ((), None))
        cut_at_stops(attempt, stops, sampled)
        reply = attempt.received
        if reply is None:
            continue
        if before is not None and before.cut is not None:
            earlier, before.cut, attempt.past_stop = before.cut, None, True
            over = 0 if stops.kept else len(earlier.sequence)
            attempt.cut = StopCut(
                reply=_shortened(reply, 0, len(sent), FinishReason.STOP),
                sequence=earlier.sequence,
                dropped=earlier.dropped + reply.output.token_ids,
                reaches_back=len(earlier.dropped) + over,
            )
        # by all tokens so far: a call that sends exactly these goes on with the turn
        turns[sent + reply.output.token_ids] = (sampled + reply.output.token_ids, attempt)


def _finish(reply: Reply, end: int) -> FinishReason:
    """Return how the turn ended: by ``stop``, unless the reply ends with the sequence anyway."""
    finish = reply.output.finish_reason
    if end == len(reply.output.token_ids) and finish is FinishReason.LENGTH:
        # both a stop and the budget end it: which one is said is the stack's choice
        return FinishReason.COMPLETED
    return FinishReason.STOP


def _shortened(reply: Reply, count: int, sent: int, finish: FinishReason) -> Reply:
    """Return the first ``count`` tokens of a reply, with their logprobs, rows and tags."""
    output = reply.output
    if count == len(output.token_ids):
        return replace(reply, output=replace(output, finish_reason=finish))
    # the last token has no row: no forward pass has taken it as an input
    rows = max(0, sent + count - 1 - output.routes_start)
    return replace(
        reply,
        true_tokens=None if reply.true_tokens is None else _spans(reply.true_tokens, count),
        output=replace(
            output,
            token_ids=output.token_ids[:count],
            logprobs=None if output.logprobs is None else output.logprobs[:count],
            routes=None if output.routes is None else output.routes[:rows],
            finish_reason=finish,
            spans=_spans(output.spans, count),
        ),
    )


def _spans(spans: Sequence[Span], count: int) -> tuple[Span, ...]:
    return tuple(
        Span(start=span.start, end=min(span.end, count), version=span.version)
        for span in spans
        if span.start < count
    )
