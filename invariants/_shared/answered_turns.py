"""Whether a sample can hold answers of the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.invariants._shared.declared_limits import no_answers
from rollproof.judging.turn_samples import TURN_SAMPLES

if TYPE_CHECKING:
    from rollproof.judging.checks import Collector
    from rollproof.judging.request_view import RequestView

__all__ = ["expect_answers"]


def expect_answers(view: RequestView, out: Collector) -> None:
    """Report why the sample of a request has no answer of the environment, if it can have none."""
    reason = no_answers(view.contract) or (TURN_SAMPLES if view.earlier_turns else None)
    if reason:
        out.inapplicable(reason)
    elif not view.stitched.answers:
        # the first turn looks alike, whether the next ones are samples of their own or not
        out.skipped("no turn was answered")
