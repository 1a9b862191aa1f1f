"""Checks on how often a sampled token is in the samples of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.records import FinishReason
from rollproof.invariants._shared.delivery import missing_reason
from rollproof.invariants._shared.phrases import call_name, count, listing, verb
from rollproof.invariants.trajectory.sample_contexts import one_sample
from rollproof.judging.checks import Collector, Scope, request_check
from rollproof.judging.sample_rows import are_among, read_rows
from rollproof.judging.stale_samples import is_too_old

if TYPE_CHECKING:
    from rollproof.core.contract import Contract
    from rollproof.core.events.rollout import Reply
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.sample_rows import CallTokens, SampleRows

__all__ = ["trajectory_complete", "trajectory_trained_once"]

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.COMPLETED)


def _may_repeat(contract: Contract) -> str | None:
    if contract.repeats_tokens:
        return "the contract lets a token be trained in several samples (repeats_tokens)"
    return one_sample(contract)


def _may_drop(contract: Contract) -> str | None:
    if contract.drops_samples:
        return "the contract lets what was sampled be in no sample (drops_samples)"
    return one_sample(contract)


@request_check(
    "trajectory.trained-once",
    promise="No sampled token is trained in two samples, unless the contract says repeats_tokens.",
    needs="a request that delivered several samples, and its engine calls",
    exercised_by="trained tokens of requests with several samples",
    applies=_may_repeat,
    scope=Scope.REQUEST,
)
def trajectory_trained_once(view: RequestView, out: Collector) -> None:
    """Count how often each token is trained, and how often it was sampled in its place."""
    if view.rollout is None:
        out.absent(missing_reason(view))
        return
    rows = read_rows(view)
    trained = [row.keys[row.trained & row.explained] for row in rows.rows]
    if len(trained) < 2:
        return
    keys, times = np.unique(np.concatenate(trained), return_counts=True)
    out.exercised("trained tokens of requests with several samples", len(keys))
    repeated = keys[times > 1]
    if not len(repeated):
        return
    # calls of one prompt may bring the same tokens, each of which is trained
    every, sampled = np.unique(
        np.concatenate([reply.prefixes[1:] for reply in rows.replies]), return_counts=True
    )
    repeated = repeated[times[times > 1] > sampled[np.searchsorted(every, repeated)]]
    if not len(repeated):
        return
    holders = [
        row.number
        for row, own in zip(rows.rows, trained, strict=True)
        if np.isin(repeated, own).any()
    ]
    first = rows.rows[holders[0]]
    index = int(np.flatnonzero(np.isin(first.keys, repeated) & first.trained)[0])
    out.finding(
        f"{count(len(repeated), 'sampled token')} of a request"
        f" {verb(len(repeated), 'is', 'are')} trained more than once",
        kind="sampled tokens are trained more than once",
        expected="loss mask 1 in one sample for each token that was sampled",
        observed=f"samples {listing(holders)} train the same tokens",
        where=view.place(index=index, position=len(first.rollout.prompt_ids) + index),
        hint=(
            "A later sample holds earlier turns, or a fork what came before it, with loss mask 1:"
            " move them into its prompt or mask them. If that is the method, declare"
            " repeats_tokens=True."
        ),
    )


@request_check(
    "trajectory.complete",
    promise=(
        "Every turn that was sampled for a request is in one of its samples, unless the contract"
        " says drops_samples."
    ),
    needs="a request that may deliver several samples, and its engine calls",
    exercised_by="sampled replies",
    applies=_may_drop,
    scope=Scope.REQUEST,
)
def trajectory_complete(view: RequestView, out: Collector) -> None:
    """Look for received replies that no sample holds.

    What a stack samples again (after an abort, a lost reply, an update) replaces what it had.
    """
    if view.rollout is None or view.result is None:
        out.absent(missing_reason(view))
        return
    rows = read_rows(view)
    if not rows.as_seen:
        out.absent("a sample is not what calls read and sampled: it may hold what no other does")
        return
    held = np.unique(np.concatenate([row.keys[row.explained] for row in rows.rows]))
    driven = view.header is not None and view.header.case is not None
    missing = []
    for reply in rows.replies:
        size = _due(rows, reply, driven=driven)
        out.exercised("sampled replies", int(size > 0))
        if size and not are_among(reply.prefixes[1 : size + 1], held).all():
            missing.append(reply)
    if not missing or is_too_old(view, [reply.attempt for reply in missing], view.result.index):
        return
    first = missing[0]
    out.finding(
        f"{count(len(missing), 'reply|replies')} of the engine"
        f" {verb(len(missing), 'is', 'are')} in no sample of the request",
        kind="replies are in no sample of their request",
        expected=f"the {count(len(first.ids), 'token')} of {call_name(first.attempt)} in a sample",
        observed=f"{count(len(rows.rows), 'sample')} without them",
        where=view.place(
            call=first.attempt.call.call_id, server=first.attempt.call.server_id, index=first.start
        ),
        hint=(
            "Turns before a fork or a compaction were lost with the history that they were in, or"
            " only the last turn was delivered. Calls that are not trained (a judge, a summary)"
            " belong into fleet.internal(); if samples are dropped on purpose, declare"
            " drops_samples=True."
        ),
    )


def _due(rows: SampleRows, reply: CallTokens, *, driven: bool) -> int:
    """Return how many tokens of a reply must be in a sample: those that the stack received and did
    not sample again.
    """
    received = reply.attempt.consumed
    if received is None or reply.attempt.broke:
        return 0
    size = min(len(received.output.token_ids), len(reply.ids))
    goes_on = bool(rows.after(reply.prefixes[size]))
    if received.output.finish_reason not in _NATURAL and not goes_on:
        return 0
    # a proxy throws the token of its prefill call away, and decodes from the same prompt
    if reply.attempt.call.max_tokens == 1 and len(rows.after(reply.prefixes[0])) > 1:
        return 0
    if _was_retried(rows, reply, received, driven=driven):
        return 0
    # a later call that begins inside of the reply replaces the rest of it
    inside = reply.prefixes[1:size]
    for place in rows.sent(inside):
        if any(other.attempt.number > reply.attempt.number for other in rows.after(inside[place])):
            return place + 1
    return size


def _was_retried(rows: SampleRows, reply: CallTokens, received: Reply, *, driven: bool) -> bool:
    """Return whether the call was made again before its reply came, because of a fault. A recording
    does not show faults.
    """
    again = any(
        other.attempt.call.index < received.index
        for other in rows.after(reply.prefixes[0])
        if other.attempt.number > reply.attempt.number
    )
    return again and (bool(reply.attempt.faults) or reply.attempt.died is not None or not driven)
