"""What the limits that a contract declares rule out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollproof.core.contract import Contract

__all__ = ["no_answers", "no_fragments", "no_larger_budgets"]


def no_answers(contract: Contract) -> str | None:
    """Return why the environment can never answer, ``None`` if it can."""
    if not contract.multi_turn:
        return "the contract declares no turns of the environment (multi_turn)"
    if contract.limits is None or contract.limits.allow_answers:
        return None
    return "the declared limits leave no room for an answer and another turn"


def no_fragments(contract: Contract) -> str | None:
    """Return why no abort can leave a part of a turn, ``None`` if one can."""
    if contract.limits is None or contract.limits.allow_fragments:
        return None
    return "by the declared limits a turn has one token, so that no abort leaves a part of one"


def no_larger_budgets(contract: Contract, ratio: int) -> str | None:
    """Return why no two budgets from 2 on are ``ratio`` times apart, ``None`` if they may be."""
    room = None if contract.limits is None else contract.limits.room
    if room is None or room >= 2 * ratio:
        return None
    return (
        f"the declared limits allow responses of at most {room} tokens, so no two budgets are"
        f" {ratio} times apart"
    )
