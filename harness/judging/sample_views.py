"""Judge each of the several samples of a request as what it is: a rollout of its own.

The prompt of such a rollout is the sample's, and its calls are those that sampled the response
(``rollproof.judging.sample_rows``). So the checks of tokens, logprobs, routes and versions judge
every sample, and none of them has to know of trees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollproof.judging.prefill_calls import set_aside_prefills
from rollproof.judging.races import set_attempts
from rollproof.judging.request_view import RequestView
from rollproof.judging.route_slices import RowPiece
from rollproof.judging.sample_rows import CallTokens, SampleRow, read_rows
from rollproof.judging.stop_cuts import cut_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollproof.judging.attempt import Attempt

__all__ = ["sample_views"]

NOT_AS_SEEN = (
    "a sample is not what its calls read and sampled (trajectory.context, trajectory.sampled), so"
    " nothing else can be judged"
)
UNCALLED = "no engine call sampled a token of a sample"
PARTLY_RECEIVED = "a sample holds a part of a reply: which part the stack received is not known"
EQUAL_CALLS = "two calls of one prompt brought the same tokens: the trace does not show which it is"


def sample_views(view: RequestView) -> list[RequestView]:
    """Return a view of each sample of a request that delivered several; of one that delivered none,
    the view itself.

    A view that cannot be judged has ``unrecorded`` set to the reason.
    """
    if view.parts is None:
        view.parts = [_sample_view(view, row) for row in read_rows(view).rows] or [view]
    for part in view.parts:
        part.neighbours = view.neighbours
    return view.parts


def _sample_view(view: RequestView, row: SampleRow) -> RequestView:
    own, reason = _own_calls(row)
    request = replace(view.request, prompt_ids=row.rollout.prompt_ids)
    if own:
        # what a sample was granted: no contract declares how samples share the caller's budget
        granted = own[0].call.max_tokens
        request = replace(request, max_tokens=granted, limit=None, max_length=None)
    part = RequestView(
        replace(view.submit, request=request),
        view.contract,
        view.history,
        view.oracle,
        view.engine,
        view.header,
    )
    part.results = [replace(result, rollout=row.rollout, earlier=()) for result in view.results[:1]]
    part.unattributed_calls = view.unattributed_calls
    part.unrecorded = view.unrecorded or reason
    if view.contract.has_routes and row.rollout.routes is not None:
        part.context_rows = list(_rows_of(row))
    set_attempts(part, [replace(attempt) for attempt in own])
    cut_turns(part)
    set_aside_prefills(part)
    return part


def _own_calls(row: SampleRow) -> tuple[list[Attempt], str]:
    """Return the calls that a sample was made of, in order, and why it cannot be judged, if so."""
    if row.unexplained.any():
        return [], NOT_AS_SEEN
    begin, end = len(row.rollout.prompt_ids), len(row.prefixes) - 1
    own = [reply for reply in row.calls if _is_held(reply, row, end)]
    received = [reply for reply in own if len(reply.ids) and reply.attempt.consumed is not None]
    if not received and not any(reply.attempt.broke for reply in own):
        return [], UNCALLED
    if len({reply.start for reply in received}) < len(received):
        return [], EQUAL_CALLS
    held = np.zeros(end, dtype=np.bool_)
    for reply in own:
        held[reply.start : reply.start + len(reply.ids)] = True
    if (row.explained & ~held[begin:]).any():
        return [], PARTLY_RECEIVED
    return _in_order(own), ""


def _in_order(own: list[CallTokens]) -> list[Attempt]:
    """Return the calls of a sample in order, without those that brought nothing to it: calls of the
    same prompt that were made when the sample had gone on were another sample's.
    """
    calls: list[Attempt] = []
    reached = -1
    for reply in sorted(own, key=_number):
        attempt = reply.attempt
        brought = len(reply.ids) and (attempt.consumed is not None or attempt.broke)
        if not brought and reply.start <= reached:
            continue
        if brought:
            reached = max(reached, reply.start)
        if not calls or calls[-1] is not attempt:
            calls.append(attempt)
    return calls


def _number(reply: CallTokens) -> int:
    return reply.attempt.number


def _is_held(reply: CallTokens, row: SampleRow, end: int) -> bool:
    """Return whether a sample holds a reply as the stack received it, as far as the sample goes.

    A call of the same prompt whose reply only begins alike made another sample, or none.
    """
    received = reply.attempt.consumed
    # how much of a broken stream arrived, the next call shows
    if received is None or reply.attempt.broke:
        return True
    size = min(len(received.output.token_ids), len(reply.ids), end - reply.start)
    return bool(reply.prefixes[size] == row.prefixes[reply.start + size])


def _rows_of(row: SampleRow) -> Iterator[RowPiece]:
    """Yield the route rows that calls captured of what the sample begins with."""
    begin = len(row.rollout.prompt_ids)
    for reply in row.earlier:
        received = reply.attempt.consumed
        output = None if received is None else received.output
        if output is None or output.routes is None:
            continue
        forwarded = reply.start + len(reply.ids) - 1
        # beyond this place the reply went on otherwise than the sample
        same = (
            reply.prefixes[: begin - reply.start + 1]
            == row.prefixes[reply.start : begin + 1][: len(reply.prefixes)]
        )
        stop = min(forwarded, reply.start + int(same.sum()) - 1, begin)
        rows = output.routes[: max(0, stop - output.routes_start)]
        yield RowPiece(output.routes_start, 0, rows)
