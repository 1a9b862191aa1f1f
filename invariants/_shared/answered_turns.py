"""Whether a sample can hold answers of the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollproof.core.contract import Samples
from rollproof.invariants._shared.declared_limits import no_answers
from rollproof.judging.turn_samples import TURN_SAMPLES

if TYPE_CHECKING:
    from rollproof.judging.checks import Collector
    from rollproof.judging.request_view import RequestView

__all__ = ["expect_answers"]


def expect_answers(view: RequestView, out: Collector) -> None:
    """Report why the sample of a request has no answer of the environment, if it can have none."""
    contract = view.contract
    of_turns = view.earlier_turns or contract.samples is Samples.TURN
    reason = no_answers(contract) or (TURN_SAMPLES if of_turns else None)
    if reason:
        out.inapplicable(reason)
    elif not view.stitched.answers:
        # the first turn looks alike, whether the next ones are samples of their own or not
        out.skipped("no turn was answered")
