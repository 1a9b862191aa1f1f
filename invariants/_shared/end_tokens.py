"""Tokens that end a call, whatever the engine says of the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["ends_with_eos"]


def ends_with_eos(view: RequestView, attempt: Attempt) -> bool:
    """Return whether an abort hit a token that ends the call: the end of sequence, or a stop token
    that the stack passed. Ending and resuming are both defensible then.
    """
    if attempt.consumed is None:
        return False
    last, call = attempt.consumed.output.token_ids[-1:], attempt.call
    if last and last[0] in (*(call.end_tokens or ()), *call.stop_token_ids):
        return True
    coding = view.header.coding if view.header is not None else None
    if not coding or coding.get("eos_every") is None or call.end_tokens is not None:
        return False
    return last == (coding.get("eos_id", 0),)
