"""Words of the route checks: how positions, rows and layers are told in a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Contract
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.origin import groups, row_version

if TYPE_CHECKING:
    from rollproof.invariants.routes.origin import StrayGroup
    from rollproof.judging.request_view import RequestView

__all__ = ["amount", "attempt_words", "has_routes", "needs_rows"]


def has_routes(contract: Contract) -> str | None:
    """Why no check of routes applies: the contract declares that the subject returns none."""
    return (
        None
        if contract.has_routes
        else "the contract declares rows='none': the subject returns no routes"
    )


def needs_rows(view: RequestView) -> str | None:
    """Why the rows of a request cannot be judged one by one; ``None`` where they can."""
    if view.rollout is None:
        return "no sample was handed over"
    return comparison.of(view).hindrance


def amount(view: RequestView, group: StrayGroup) -> str:
    """How much of a sample is wrong: ``"3 of 9 rows (positions 2-4), in 3 of 48 layers"``."""
    evidence = comparison.of(view)
    judged = sum(high - low for low, high in evidence.captured)
    moe = len(view.contract.moe_columns)
    wrong = len(group.positions)
    unread = len(evidence.mismatched) - sum(
        len(one.positions) + len(one.others) for one in groups(view)
    )
    text = (
        f"{wrong} of {count(judged, 'row')} (position{'s' if wrong > 1 else ''}"
        f" {ranges(group.positions.tolist())})"
    )
    if group.layers < moe:
        text += f", in {group.layers} of {moe} MoE layers"
    if len(group.others):
        text += (
            f"; {count(len(group.others), 'more row')} (position {ranges(group.others.tolist())})"
            " of the same sample is wrong besides"
        )
    return f"{text}; {count(unread, 'wrong row')} behind them not looked at" if unread else text


def attempt_words(view: RequestView, attempt: int, position: int) -> str:
    """``"segment 1 (call 7, version 2)"``: a call of the request and the version of its row at
    ``position``.
    """
    one = view.attempts[attempt]
    order = [segment.number for segment in view.segments]
    name = (
        f"segment {order.index(attempt)}" if attempt in order else f"the unanswered call {attempt}"
    )
    reply = one.consumed if one.consumed is not None else (one.replies[0] if one.replies else None)
    version = None if reply is None else row_version(reply, position)
    return name if version is None else f"{name} (version {version})"
