"""Phrases of the route checks: how findings name positions, rows and layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Contract
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.origin import groups, row_version

if TYPE_CHECKING:
    from rollproof.invariants.routes.origin import WrongRows
    from rollproof.judging.request_view import RequestView

__all__ = ["amount", "attempt_words", "has_routes", "needs_rows"]


def has_routes(contract: Contract) -> str | None:
    """Return why no check of routes applies: the contract declares that the subject returns
    none.
    """
    return (
        None
        if contract.has_routes
        else "the contract declares rows='none': the subject returns no routes"
    )


def needs_rows(view: RequestView) -> str | None:
    """Return why the rows of a request cannot be compared one by one, or ``None`` if they can."""
    if view.rollout is None:
        return "no sample was delivered"
    return comparison.of(view).hindrance


def amount(view: RequestView, group: WrongRows) -> str:
    """Return how much of a sample is wrong: ``"3 of 9 rows (positions 2-4), in 3 of 48
    layers"``.
    """
    evidence = comparison.of(view)
    compared = sum(high - low for low, high in evidence.captured)
    moe = len(view.contract.moe_columns)
    wrong = len(group.positions)
    unexamined = len(evidence.mismatched) - sum(
        len(other.positions) + len(other.others) for other in groups(view)
    )
    text = (
        f"{wrong} of {count(compared, 'row')} (position{'s' if wrong > 1 else ''}"
        f" {ranges(group.positions.tolist())})"
    )
    if group.layers < moe:
        text += f", in {group.layers} of {moe} MoE layers"
    others = len(group.others)
    if others:
        text += (
            f"; {count(others, 'more row')} (position{'s' if others > 1 else ''}"
            f" {ranges(group.others.tolist())}) of the same sample"
            f" {'are' if others > 1 else 'is'} also wrong"
        )
    return (
        f"{text}; {count(unexamined, 'wrong row')} after them not examined" if unexamined else text
    )


def attempt_words(view: RequestView, attempt: int, position: int) -> str:
    """Return the segment of a call and the version of its row: ``"segment 1 (version 2)"``."""
    call = view.attempts[attempt]
    order = [segment.number for segment in view.segments]
    segment = (
        f"segment {order.index(attempt)}"
        if attempt in order
        else f"the unanswered call {call.call.call_id}"
    )
    reply = (
        call.consumed if call.consumed is not None else (call.replies[0] if call.replies else None)
    )
    version = None if reply is None else row_version(reply, position)
    return segment if version is None else f"{segment} (version {version})"
