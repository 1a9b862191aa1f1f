"""End tokens that the coded policy samples, whatever the engine says of the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt
    from rollproof.judging.request_view import RequestView

__all__ = ["ends_with_eos"]


def ends_with_eos(view: RequestView, attempt: Attempt) -> bool:
    """Return whether an abort hit the end-of-sequence token: ending and resuming are both
    defensible then.
    """
    coding = view.header.coding if view.header is not None else None
    if not coding or coding.get("eos_every") is None or attempt.consumed is None:
        return False
    return attempt.consumed.output.token_ids[-1:] == (coding.get("eos_id", 0),)
