"""What a sample shows of a reply beside its tokens: logprobs, route rows and version tags.

Replies of the same tokens differ in these if other weights sampled them, so they tell which of
several replies a stack used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.records import EngineOutput, Rollout, Version, spread

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["values_of"]


def values_of(view: RequestView, call: Attempt, start: int) -> tuple[int, int, bool]:
    """Return how many logprobs and route rows of a reply the sample holds at its tokens' places,
    and whether it has the reply's version tags.

    Args:
        view: The request.
        call: A call with a reply that was received.
        start: The position of the reply's first token in prompt and response.
    """
    rollout, reply = view.rollout, call.consumed
    assert reply is not None
    tokens = reply.output.token_ids
    if rollout is None or not tokens or view.total_ids[start : start + len(tokens)] != tokens:
        return 0, 0, False
    first = start - len(rollout.prompt_ids)
    # its tokens lie in the sample's prompt, where a sample has no logprobs to compare
    if first < 0:
        return 0, 0, False
    return (
        _equal_logprobs(rollout, reply.output, first),
        _equal_rows(rollout, reply.output, start),
        _has_versions(rollout, reply.output, first),
    )


def _equal_logprobs(rollout: Rollout, output: EngineOutput, first: int) -> int:
    if rollout.logprobs is None or output.logprobs is None:
        return 0
    held = rollout.logprobs[first : first + len(output.token_ids)]
    common = min(len(held), len(output.logprobs))
    # no tolerance: the same tokens under the next weights have logprobs that are nearly the same,
    # and which of two such replies was used is the question here
    return int(np.sum(held[:common] == output.logprobs[:common]))


def _equal_rows(rollout: Rollout, output: EngineOutput, start: int) -> int:
    """Return how many rows are equal, from that of the last token that the call sent on."""
    if rollout.routes is None or output.routes is None:
        return 0
    # rows of the prompt may stem from an earlier call, so they do not show which reply was used
    begin = max(start - 1, rollout.routes_start, output.routes_start)
    held = rollout.routes[begin - rollout.routes_start :]
    rows = output.routes[begin - output.routes_start :]
    if held.shape[1:] != rows.shape[1:]:
        return 0
    common = min(len(held), len(rows))
    return int(np.sum(np.all(held[:common] == rows[:common], axis=(1, 2))))


def _has_versions(rollout: Rollout, output: EngineOutput, first: int) -> bool:
    count = len(output.token_ids)
    shown = spread(output.spans, count) if output.spans else [output.version] * count
    tags: list[Version] | None = None
    if rollout.token_versions is not None:
        tags = list(rollout.token_versions)
    elif rollout.spans:
        tags = spread(rollout.spans, len(rollout.response_ids))
    if tags is not None:
        return tags[first : first + count] == shown
    # a tag of the whole sample says nothing of a part of it
    if count < len(rollout.response_ids):
        return False
    labels = {
        rollout.version,
        rollout.min_version,
        rollout.max_version,
        *rollout.call_versions,
    } - {None}
    return labels <= set(shown) and (bool(labels) or set(shown) == {None})
