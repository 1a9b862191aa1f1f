"""Breaking: what a stack keeps of a streamed reply whose connection broke.

A stream that breaks off has brought some of the reply's tokens, and nobody but the stack knows how
many. It may drop them and make the call again, or keep them and go on from there: both are right.
Which it did shows in its next call, or where there is none in the sample; what it keeps must be a
beginning of what was sampled. Of a reply in one piece it may have all or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import FinishReason, Span

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Reply
    from rollproof.judging.request_view import Attempt, RequestView

__all__ = ["keep_partials", "streamed"]


def streamed(attempt: Attempt) -> bool:
    """Whether the reply came in parts, of which some may have arrived without the others."""
    return attempt.call.stream not in (None, StreamMode.FINAL)


def keep_partials(view: RequestView) -> None:
    """Take what the stack kept of broken streams for replies that it received (``Attempt.kept``),
    as far as it shows by now.
    """
    for attempt in view.attempts:
        if (
            not (streamed(attempt) or attempt.broke)
            or not attempt.replies
            or attempt.consumed is not None
        ):
            continue
        later = view.attempts[attempt.number + 1 : attempt.number + 2]
        if later:
            shown, moment = later[0].call.prompt_ids, later[0].call.index
        elif view.result is not None and view.rollout is not None:
            shown, moment = view.request.prompt_ids + view.rollout.response_ids, view.result.index
        else:
            continue
        reply, sent = attempt.replies[0], attempt.call.prompt_ids
        count = (
            _common(reply.output.token_ids, shown[len(sent) :]) if shown[: len(sent)] == sent else 0
        )
        if count == len(reply.output.token_ids) and reply.delivered:
            attempt.kept = reply
        elif count and streamed(attempt):
            attempt.kept = _beginning(reply, count, min(reply.index, moment - 1))


def _beginning(reply: Reply, count: int, index: int) -> Reply:
    """The first ``count`` tokens of a reply, received at ``index``: an error ended it, and no
    routes or tags of it came whole.
    """
    output = reply.output
    sampled = [
        Span(start=one.start, end=min(one.end, count), version=one.version)
        for one in reply.true_tokens or ()
        if one.start < count
    ]
    return replace(
        reply,
        index=index,
        delivered=True,
        duplicate=False,
        true_tokens=None if reply.true_tokens is None else tuple(sampled),
        true_rows=None,
        output=replace(
            output,
            token_ids=output.token_ids[:count],
            logprobs=None if output.logprobs is None else output.logprobs[:count],
            routes=None,
            finish_reason=FinishReason.ERROR,
            version=None,
            spans=(),
        ),
    )


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    for i, (one, other) in enumerate(zip(tokens, others, strict=False)):
        if one != other:
            return i
    return min(len(tokens), len(others))
