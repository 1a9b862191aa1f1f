"""Checks on the engine's rows: it computed them itself, with the weights that sampled, in memory
that nothing else writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, KvPolicy, LayerAxis, Provenance
from rollproof.core.records import Span, Version
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.routes.route_phrases import has_routes
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollproof.core.events.rollout import Reply
    from rollproof.core.oracle import Oracle
    from rollproof.core.records import IntArray
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = [
    "routes_engine",
    "routes_handed_over",
    "routes_immutable",
    "routes_prefix_cache",
    "routes_reply_untouched",
]

_MIXED = "mixed"
_ALTERED = "altered"


def _engine_contract(view: RequestView) -> Contract:
    """Return the contract of the engines, or the subject's if the trace has none."""
    return view.engine if view.engine is not None and view.engine.has_routes else view.contract


def _replies(view: RequestView) -> Iterator[tuple[Attempt, Reply, IntArray]]:
    for attempt in view.attempts:
        for reply in attempt.replies:
            if reply.output.routes is not None and len(reply.output.routes):
                yield attempt, reply, reply.output.routes


@request_check(
    "routes.engine",
    promise=(
        "Every row that an engine returns is what its weights choose for that token, as the"
        " coded policy computes it."
    ),
    needs="a coded trace whose replies say which weights computed the rows (true_rows)",
    exercised_by="engine rows compared",
    applies=has_routes,
)
def routes_engine(view: RequestView, out: Collector) -> None:
    """Compare the rows of every reply with the coded policy's."""
    oracle = view.oracle
    if oracle is None:
        out.absent("the trace is not coded: it does not say what each row must be")
        return
    for attempt, reply, routes in _replies(view):
        # A duplicated reply holds the same array: one finding is enough.
        if reply.true_rows is None or reply.duplicate:
            continue
        ids = attempt.call.prompt_ids + reply.output.token_ids
        for span in reply.true_rows:
            low, high = (
                max(span.start, reply.output.routes_start),
                min(span.end, reply.output.routes_start + len(routes), len(ids)),
            )
            # Rows over KV of several versions are the choice of none of them.
            if low >= high or span.version in (None, _MIXED, _ALTERED):
                continue
            rows = routes[low - reply.output.routes_start : high - reply.output.routes_start]
            out.exercised("engine rows compared", high - low)
            _compare(
                view,
                out,
                oracle,
                attempt,
                ids,
                Span(start=low, end=high, version=span.version),
                rows,
            )


def _compare(
    view: RequestView,
    out: Collector,
    oracle: Oracle,
    attempt: Attempt,
    ids: tuple[int, ...],
    span: Span,
    rows: IntArray,
) -> None:
    expected_rows = oracle.routes(span.version, ids[: span.end], span.start)
    contract = _engine_contract(view)
    moe = list(contract.routed_layers)
    all_layers = contract.layer_axis is LayerAxis.ALL
    if np.array_equal(rows, expected_rows if all_layers else expected_rows[:, moe]):
        return
    expected_rows = expected_rows[:, moe]
    actual_rows = rows[:, moe] if all_layers and rows.shape[1] == contract.num_layers else rows
    if actual_rows.shape != expected_rows.shape:
        observed, first, column = f"rows of shape {rows.shape[1:]}", span.start, 0
    else:
        differs = (np.sort(actual_rows, axis=2) != np.sort(expected_rows, axis=2)).any(axis=2)
        if not differs.any():
            return
        wrong = span.start + np.flatnonzero(differs.any(axis=1))
        row, column = (int(i) for i in np.argwhere(differs)[0])
        first = span.start + row
        observed = (
            f"experts {actual_rows[row, column].tolist()}; wrong in {len(wrong)} of"
            f" {count(len(differs), 'row')} (position {ranges(wrong.tolist())}), in"
            f" {int(differs.sum(axis=1).max())} of {len(moe)} MoE layers"
        )
    out.finding(
        "an engine returned rows that its weights did not choose",
        expected=(
            f"experts {expected_rows[first - span.start, column].tolist()} at position"
            f" {first}, computed by version {span.version}"
        ),
        observed=observed,
        where=view.place(
            call=attempt.call.call_id,
            position=first,
            layer=moe[column],
            version=span.version,
            server=attempt.call.server_id,
        ),
        hint=(
            "The capture was read from a slot or buffer that another forward pass had"
            " written: views of a reused buffer (SGLang #34319), rows not moved with the KV"
            " (SGLang #26975), padded rows (vLLM #43737)."
        ),
    )


@request_check(
    "routes.immutable",
    promise=(
        "The row that predicted a sampled token stays that of the weights that sampled it: a"
        " recompute does not overwrite it."
    ),
    needs=(
        "replies that say which weights sampled the tokens and computed the rows (true_tokens,"
        " true_rows)"
    ),
    exercised_by="rows that predicted a sampled token",
    applies=has_routes,
)
def routes_immutable(view: RequestView, out: Collector) -> None:
    """Compare the versions of rows with those that sampled the next token."""
    contract = _engine_contract(view)
    if contract.provenance is not Provenance.AS_SAMPLED:
        out.inapplicable(
            f"the {'engines declare' if contract is view.engine else 'contract declares'}"
            " provenance='latest-prefill'"
        )
        out.absent(
            "the engine declares that a recompute replaces its rows (provenance='latest-prefill')"
        )
        return
    for attempt, reply, routes in _replies(view):
        if reply.true_rows is None or reply.true_tokens is None:
            continue
        sent = len(attempt.call.prompt_ids)
        end = reply.output.routes_start + len(routes)
        # Row p predicts token p + 1, hence the offset of one.
        for token, row in _overlaps(reply.true_tokens, reply.true_rows, sent - 1):
            low, high = max(row.start, reply.output.routes_start), min(row.end, end)
            if low >= high or {_MIXED, _ALTERED} & {token.version, row.version}:
                continue
            out.exercised("rows that predicted a sampled token", high - low)
            if token.version == row.version:
                continue
            out.finding(
                "rows of sampled tokens were recomputed",
                expected=(
                    f"rows {low}-{high - 1} of version {token.version}, which sampled the tokens"
                    f" {low + 1}-{high}"
                ),
                observed=(
                    f"rows of version {row.version}: {count(high - low, 'row')} of {len(routes)}"
                ),
                where=view.place(
                    call=attempt.call.call_id,
                    position=low,
                    version=row.version,
                    server=attempt.call.server_id,
                ),
                hint=(
                    "A retract or preemption prefilled the sequence again and overwrote the"
                    " rows, while the logprobs stayed: old logprobs are paired with new"
                    " routes. Same cause: miles #3277, SGLang #39633."
                ),
            )


def _overlaps(
    tokens: tuple[Span, ...], rows: tuple[Span, ...], offset: int
) -> Iterator[tuple[Span, Span]]:
    """Return spans of tokens with each span of rows, cut to those that predicted them (may be none,
    so that it ends before it starts), in absolute positions of rows.
    """
    for token in tokens:
        for row in rows:
            low, high = max(token.start + offset, row.start), min(token.end + offset, row.end)
            if token.version is not None and row.version is not None:
                yield token, Span(start=low, end=high, version=row.version)


@request_check(
    "routes.prefix-cache",
    promise=(
        "If an update invalidates the KV cache, no call admitted after it gets rows of older"
        " weights."
    ),
    needs=(
        "replies that say which weights computed the rows (true_rows), and the weight updates of"
        " the servers"
    ),
    exercised_by="replies admitted after an update",
    applies=lambda contract: (
        has_routes(contract)
        or (
            "kv_policy='keep': rows of older weights are declared"
            if contract.kv_policy is KvPolicy.KEEP
            else None
        )
    ),
)
def routes_prefix_cache(view: RequestView, out: Collector) -> None:
    """Look for rows of older weights in replies admitted after an update."""
    for attempt, reply, routes in _replies(view):
        if reply.true_rows is None or attempt.admit is None:
            continue
        # Only loads count: a published label alone changes no weights.
        loaded = [
            update
            for update in view.history.updates
            if update.server_id == attempt.admit.server_id
            and update.adapter == attempt.call.adapter
            and update.loaded
            and update.index < attempt.admit.index
        ]
        # Before the first update there is no older version that a cache could hold.
        if len({update.version for update in loaded}) < 2:
            continue
        out.exercised("replies admitted after an update")
        older = {update.version for update in loaded} - {loaded[-1].version}
        # weights.served-after-update judges what old weights computed after the cached part.
        end = reply.output.routes_start + len(routes)
        end = end if reply.output.cached_tokens is None else min(end, reply.output.cached_tokens)
        stale_spans = [
            span for span in reply.true_rows if span.version in older and span.start < end
        ]
        if stale_spans:
            low, high, version = _bounds(stale_spans)
            out.finding(
                "rows of older weights came out of a prefix cache",
                expected=(
                    f"rows of version {loaded[-1].version}, in service when the call was admitted"
                ),
                observed=(
                    f"rows {low}-{high - 1} of version {version}, of {count(len(routes), 'row')}"
                ),
                where=view.place(
                    call=attempt.call.call_id,
                    position=low,
                    version=version,
                    server=attempt.admit.server_id,
                ),
                hint=(
                    "Rows and KV of the old weights serve the new ones: key the cache by version"
                    " (cache_salt), or flush it when no call runs under the old weights any more,"
                    " which is after the transfer if that outlasts the pause"
                    " (weights.no-stale-cache). Reports: NeMo-RL #4018, SkyRL #2246, miles #2782."
                ),
            )


def _bounds(spans: list[Span]) -> tuple[int, int, Version]:
    return spans[0].start, spans[-1].end, spans[0].version


def _was_run(view: RequestView) -> bool:
    """Return whether rollproof's runner ran the request: a recording compares no arrays."""
    return view.header is not None and view.header.case is not None


@request_check(
    "routes.handed-over",
    promise=("Delivered routes do not change later: they share no memory with an engine."),
    needs="a delivered sample with routes that is compared again at the end of the run",
    exercised_by="samples looked at again",
    applies=has_routes,
)
def routes_handed_over(view: RequestView, out: Collector) -> None:
    """Report routes that changed after delivery."""
    if view.rollout is None or view.rollout.routes is None or view.result is None:
        out.absent("no sample carried routes")
        return
    changed = any("route" in name for name in view.result.later_changed)
    if not changed and not _was_run(view):
        out.absent("a recording does not compare the sample again at the end of the run")
        return
    out.exercised("samples looked at again")
    if changed:
        out.finding(
            "routes changed after delivery",
            expected="an array that only the sample holds",
            observed=(
                "other values at the end of the run: the array is a view of memory that was"
                " overwritten"
            ),
            where=view.place(),
            hint=(
                "Copy the rows out of the engine's buffer before you deliver them. Same"
                " cause: SGLang #34319."
            ),
        )


@request_check(
    "routes.reply-untouched",
    promise="The routes of an engine's reply are not written to.",
    needs="a finished request whose calls returned routes",
    exercised_by="replies with routes",
    applies=has_routes,
)
def routes_reply_untouched(view: RequestView, out: Collector) -> None:
    """Report routes of replies that the stack changed."""
    replies = sum(1 for _ in _replies(view))
    if view.result is None or not replies:
        out.absent("no reply with routes")
        return
    changed = [name for name in view.result.caller_changed if "route" in name.partition(":")[0]]
    if not changed and not _was_run(view):
        out.absent("a recording does not compare replies with what the engine returned")
        return
    out.exercised("replies with routes", replies)
    if changed:
        out.finding(
            "the stack wrote into the routes of a reply",
            expected="the arrays that the engine returned, as they were",
            observed="; ".join(changed[:4]),
            where=view.place(),
            hint=(
                "Engines return read-only arrays and views of shared buffers: copy them"
                " before you write. Compare verl #5519."
            ),
        )
