"""What a stack kept of a streamed reply when the connection broke.

Only the client knows how many tokens it received before a stream broke. It may drop them and make
the call again, or keep them and continue from there: both are correct. Its next call shows which of
the two it did; without a next call, the sample does. What it keeps must be a prefix of what was
sampled. If the reply came in one piece, the client may have all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollproof.core.engine_contract import StreamMode
from rollproof.core.records import FinishReason, Span

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Reply
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["assign_partial_replies", "streamed"]


def streamed(attempt: Attempt) -> bool:
    """Return whether the reply came in parts, so that some may have arrived without the others."""
    return attempt.call.stream not in (None, StreamMode.FINAL)


def assign_partial_replies(view: RequestView) -> None:
    """Set ``Attempt.partial`` to what the stack kept of broken streams, as far as it shows by
    now.
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
            shown_ids, moment = later[0].call.prompt_ids, later[0].call.index
        elif view.result is not None and view.rollout is not None:
            shown_ids, moment = (
                view.request.prompt_ids + view.rollout.response_ids,
                view.result.index,
            )
        else:
            continue
        reply, sent = attempt.replies[0], attempt.call.prompt_ids
        # Anything but a prefix leaves `partial` unset, and the checks of tokens report it.
        count = (
            _common_prefix(reply.output.token_ids, shown_ids[len(sent) :])
            if shown_ids[: len(sent)] == sent
            else 0
        )
        # All tokens arrived: the stream broke after its last token, so the reply counts in full.
        if count == len(reply.output.token_ids) and reply.delivered:
            attempt.partial = reply
        elif count and streamed(attempt):
            attempt.partial = _truncated(reply, count, min(reply.index, moment - 1))


def _truncated(reply: Reply, count: int, index: int) -> Reply:
    """Return the first ``count`` tokens of a reply as a reply that arrived at ``index``.

    Its finish reason is an error; routes and tags are dropped, since they come with the end.
    """
    output = reply.output
    spans = [
        Span(start=token.start, end=min(token.end, count), version=token.version)
        for token in reply.true_tokens or ()
        if token.start < count
    ]
    return replace(
        reply,
        index=index,
        delivered=True,
        duplicate=False,
        true_tokens=None if reply.true_tokens is None else tuple(spans),
        # Engines send routes and tags with the last chunk, so a broken stream delivered none.
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


def _common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for i, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return i
    return min(len(tokens), len(others))
