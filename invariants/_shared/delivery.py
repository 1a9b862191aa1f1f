"""Delivery: a delivered sample beside the rollout that the engines' replies make, and how far the
two line up.

Checks of per-token values judge only what lines up: where tokens are lost or doubled,
``stitch.tokens`` says so, and nobody else is blamed for values that cannot be told apart from their
neighbours'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.core.records import FinishReason

if TYPE_CHECKING:
    from rollproof.core.records import Rollout
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Stitched

__all__ = ["Delivery", "delivery", "missing_reason"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A sample and its reference.

    ``known`` is whether the reference can be relied on, ``why`` else the reason. ``aligned`` is
    whether the sample's tokens are the reference's, ``count`` then how many leading tokens of the
    response the two share: the sample may be cut at the budget, lack tokens of the environment at
    the end, or end with tokens that are masked out.
    """

    rollout: Rollout
    reference: Stitched
    known: bool
    aligned: bool
    count: int
    why: str = ""

    def fits(self, length: int) -> bool:
        """Whether a per-token field of ``length`` fits the response, or the reference where the
        response is wrong.
        """
        size = len(self.rollout.response_ids)
        return length == size or (
            self.known and not self.aligned and length == len(self.reference.response_ids)
        )


def delivery(view: RequestView) -> Delivery | None:
    """The sample of a request beside its reference; ``None`` where no sample was handed over.
    Worked out once.
    """
    if "delivery" not in view.memo:
        view.memo["delivery"] = _delivery(view)
    found: Delivery | None = view.memo["delivery"]
    return found


def missing_reason(view: RequestView) -> str:
    """Why there is no sample to judge."""
    return "no sample was handed over" if view.results else "the request never ended"


def _delivery(view: RequestView) -> Delivery | None:
    rollout = view.rollout
    if rollout is None:
        return None
    reference = view.stitched
    ids, got = reference.response_ids, rollout.response_ids
    why = _unreliable(view)
    if why:
        return Delivery(rollout, reference, False, False, 0, why)
    if got == ids:
        return Delivery(rollout, reference, True, True, len(ids))
    common = min(len(ids), len(got))
    if got[:common] == ids[:common] and (
        _may_end(view, common) if len(got) < len(ids) else _masked_from(rollout, common)
    ):
        return Delivery(rollout, reference, True, True, common)
    if any(not attempt.replies and not attempt.faults for attempt in view.attempts):
        return Delivery(
            rollout, reference, False, False, 0, "the outcome of an engine call was not recorded"
        )
    return Delivery(rollout, reference, True, False, 0)


def _unreliable(view: RequestView) -> str:
    """Why the reference does not tell what the sample must be; empty where it does."""
    if not view.attempts:
        return "no engine call of the request was recorded"
    if view.stitched.broken is not None:
        return (
            "a call did not continue the sequence (stitch.resume-prompt), so what follows has no"
            " reference"
        )
    for attempt in view.attempts:
        reply = attempt.consumed if attempt.partial is None else None
        if (
            reply is not None
            and reply.output.finish_reason is FinishReason.ERROR
            and reply.output.token_ids
        ):
            return "an engine returned tokens together with an error: a stack may keep or drop them"
    return ""


def _may_end(view: RequestView, length: int) -> bool:
    """A response may be cut at the budget, and may leave off what the environment said last."""
    if length in (view.request.max_tokens, view.request.limit):
        return True
    return all(run.attempt < 0 for run in view.stitched.runs if run.end > length)


def _masked_from(rollout: Rollout, length: int) -> bool:
    """Whether all tokens behind ``length`` are masked out: a synthetic end-of-sequence, the
    environment's last word.
    """
    mask = rollout.loss_mask
    return mask is not None and len(mask) == len(rollout.response_ids) and not mask[length:].any()
