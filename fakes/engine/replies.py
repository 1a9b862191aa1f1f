"""Replies of fake engines: tokens, logprobs, routes and labels as a flavour shows them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from rollproof.core.contract import Filler, LayerAxis, Rows
from rollproof.core.events.rollout import Reply
from rollproof.core.records import EngineOutput, FinishReason, IntArray, LogprobArray, Span, Version
from rollproof.core.sampling_masks import SamplingMask
from rollproof.fakes.coded.policy import CodedPolicy, VersionSpan
from rollproof.fakes.engine.flavours import Flavour, VersionTag
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.engine.kv_cache import KeySpan, as_spans

__all__ = ["broken_stream_reply", "caller_copy", "empty_abort", "filler_rows", "reply_to"]

_NO_WEIGHTS: frozenset[Version] = frozenset()


def reply_to(call: InflightCall, policy: CodedPolicy, flavour: Flavour) -> Reply:
    """Return the reply to a call that ended and was settled."""
    assert call.ended is not None
    reason, label = call.ended
    start, stop = call.prompt_len, len(call.ids)
    keys, rows = _token_keys(call), call.rows()
    # adjacent tokens may have equal labels after an update to equal weights: one span
    labels = tuple(
        Span(start=low, end=high, version=version)
        for low, high, version in _joined(_stretches(call.labels, stop - start))
    )
    output = EngineOutput(
        token_ids=tuple(call.ids[start:]),
        logprobs=_shown_logprobs(call, keys, policy, flavour),
        routes=_shown_routes(call, rows, policy, flavour),
        finish_reason=reason,
        routes_start=call.routes_start,
        version=_shown_version(flavour, labels, call.admission_label, label),
        spans=_shown_spans(flavour, labels, label),
        cached_tokens=None if _is_bare(call, flavour) else _counted(call, flavour),
        native=flavour.native[reason],
        message=(
            (flavour.abort_message if call.decoding else flavour.queued_message)
            if reason is FinishReason.ABORT
            else ""
        ),
        sampling_mask=_shown_mask(call, keys, policy, flavour),
    )
    return Reply(
        call_id=call.call_id,
        output=output,
        true_tokens=as_spans(keys, 0, stop - start),
        true_rows=as_spans(rows, 0, stop),
        true_draw=call.drawn,
    )


def broken_stream_reply(
    call: InflightCall, version: Version, policy: CodedPolicy, flavour: Flavour, label: Version
) -> Reply:
    """Return what a stream had delivered when its server, with weights ``version``, died.

    It is an error with the tokens so far; no caller has the complete reply.
    """
    call.settle(version)
    call.ended = (FinishReason.ABORT, label)
    reply = reply_to(call, policy, flavour)
    output = replace(
        reply.output, finish_reason=FinishReason.ERROR, routes=None, native="", message=""
    )
    return replace(reply, output=output, delivered=False, true_rows=None)


def empty_abort(call_id: int, flavour: Flavour, label: Version, *, want_logprobs: bool) -> Reply:
    """Return the reply to a call that was turned away: an abort of zero tokens."""
    output = EngineOutput(
        token_ids=(),
        logprobs=np.zeros(0) if want_logprobs and flavour.empty_logprobs else None,
        routes=None,
        finish_reason=FinishReason.ABORT,
        version=_shown_version(flavour, (), label, label),
        spans=_shown_spans(flavour, (), label),
        cached_tokens=0 if flavour.queued_counts else None,
        native=flavour.native[FinishReason.ABORT],
    )
    return Reply(call_id=call_id, output=output, true_tokens=(), true_rows=())


def caller_copy(output: EngineOutput) -> EngineOutput:
    """Return the output with arrays of its own, so that a caller that changes them does not
    change the trace.
    """
    routes = output.routes
    if routes is not None:
        # a view of a read-only array cannot be made writable again, so it needs no copy
        routes = routes.copy() if routes.flags.writeable else routes.view()
    mask = output.sampling_mask
    return replace(
        output,
        logprobs=None if output.logprobs is None else output.logprobs.copy(),
        routes=routes,
        sampling_mask=None if mask is None else mask.copy(),
    )


def filler_rows(filler: Filler | None, count: int, like: IntArray) -> IntArray:
    """Return ``(count, layers, top_k)`` of a declared filler, in the layout of ``like``."""
    rows = np.zeros((count, *like.shape[1:]), dtype=like.dtype)
    if filler is Filler.MINUS_ONE:
        rows[:] = -1
    elif filler is Filler.ARANGE:
        rows[:] = np.arange(like.shape[2], dtype=like.dtype)
    elif filler is Filler.PREVIOUS:
        rows[:] = like[-1:]
    return rows


def _token_keys(call: InflightCall) -> list[KeySpan]:
    """Return the keys of the sampled tokens, the first of which is at 0."""
    return [
        KeySpan(low, high, key, _NO_WEIGHTS)
        for low, high, key in _stretches(call.keys, call.sampled)
    ]


def _versions(keys: list[KeySpan], start: int = 0) -> list[VersionSpan]:
    return [(start + span.start, start + span.stop, span.key) for span in keys]


def _is_aborted(call: InflightCall) -> bool:
    return call.ended is not None and call.ended[0] is FinishReason.ABORT


def _is_bare(call: InflightCall, flavour: Flavour) -> bool:
    """Whether the reply lacks even the keys for values that the call never got."""
    return not call.decoding and not flavour.queued_abort_keeps_keys


def _shown_logprobs(
    call: InflightCall, keys: list[KeySpan], policy: CodedPolicy, flavour: Flavour
) -> LogprobArray | None:
    if not call.want_logprobs or not (call.sampled or flavour.empty_logprobs):
        return None
    if _is_aborted(call) and call.sampled and not flavour.abort_logprobs:
        return None
    logprobs = policy.logprobs_spans(
        _versions(keys, call.prompt_len), call.ids, call.prompt_len, len(call.ids)
    )
    if call.wire is not None:
        # a server serialises them, so nobody can write to them and the trace needs no copy
        logprobs.flags.writeable = False
    return logprobs


def _shown_mask(
    call: InflightCall, keys: list[KeySpan], policy: CodedPolicy, flavour: Flavour
) -> SamplingMask | None:
    if call.masked_by is None or not call.sampled:
        return None
    # it goes the way of the other values by token
    if _is_aborted(call) and not flavour.abort_logprobs:
        return None
    return policy.sampling_mask(
        _versions(keys, call.prompt_len), call.ids, call.prompt_len, len(call.ids), call.masked_by
    )


def _shown_routes(
    call: InflightCall, rows: list[KeySpan], policy: CodedPolicy, flavour: Flavour
) -> IntArray | None:
    """Return ``(rows, layers, top_k)`` in the flavour's layout; ``None`` if it shows none."""
    bare_abort = _is_aborted(call) and not (call.sampled and flavour.abort_routes)
    stop = rows[-1].stop if rows else 0
    if not call.want_routes or bare_abort or _is_bare(call, flavour):
        return None
    if stop < len(call.ids) - 1:  # the engine has too few rows to answer
        return None
    routes = policy.routes_spans(_versions(rows), call.ids, min(call.routes_start, stop), stop)
    if flavour.layer_axis is LayerAxis.MOE:
        routes = routes[:, list(policy.moe_layers)]
    routes = np.ascontiguousarray(routes, dtype=flavour.dtype(policy.num_experts))
    if flavour.rows is Rows.ALL:
        routes = np.concatenate([routes, filler_rows(flavour.final_row, 1, routes)])
    routes.flags.writeable = flavour.writable and call.wire is None
    return routes


def _counted(call: InflightCall, flavour: Flavour) -> int | None:
    """Return tokens from the prefix cache; for a call that never ran, what the flavour shows."""
    return 0 if call.cached is None and flavour.queued_counts else call.cached


def _stretches(marks: list[tuple[int, Version]], count: int) -> list[tuple[int, int, Version]]:
    """Return marks as stretches ``(from, to, value)`` over ``count`` tokens; of two marks at the
    same place the later one counts.
    """
    ends = [*marks, (count, None)]
    return [
        (low, min(high, count), value)
        for (low, value), (high, _) in pairwise(ends)
        if low < min(high, count)
    ]


def _joined(stretches: list[tuple[int, int, Version]]) -> list[tuple[int, int, Version]]:
    joined: list[tuple[int, int, Version]] = []
    for low, high, value in stretches:
        if joined and joined[-1][2] == value:
            joined[-1] = (joined[-1][0], high, value)
        else:
            joined.append((low, high, value))
    return joined


def _shown_version(
    flavour: Flavour, labels: tuple[Span, ...], admitted: Version, now: Version
) -> Version:
    if flavour.version_tag is VersionTag.SPANS_AND_LAST:
        return labels[-1].version if labels else now
    return {VersionTag.EMISSION: now, VersionTag.ADMISSION: admitted}.get(flavour.version_tag)


def _shown_spans(flavour: Flavour, labels: tuple[Span, ...], now: Version) -> tuple[Span, ...]:
    if not flavour.shows_spans:
        return ()
    if not labels and flavour.version_tag is VersionTag.SPANS_AND_LAST:
        return (Span(start=0, end=0, version=now),)
    return labels
