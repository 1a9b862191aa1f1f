"""Describes a response that is not cut as the stack's own stop sequences say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollproof.invariants._shared.phrases import call_name, window

if TYPE_CHECKING:
    from rollproof.judging.attempt import Attempt, StopCut
    from rollproof.judging.request_view import RequestView

__all__ = ["StopFault", "describe_stop_fault"]


@dataclass(frozen=True, slots=True)
class StopFault:
    """What a finding about a cut says."""

    kind: str
    title: str
    hint: str


def describe_stop_fault(
    view: RequestView, response: tuple[int, ...], start: int
) -> StopFault | None:
    """Return what is wrong with the cut at which a response begins to differ from the reference;
    ``None`` if it differs elsewhere.

    Args:
        view: The request.
        response: The response of the sample.
        start: The index of the first difference.
    """
    if view.contract.own_stops is None:
        return None
    for attempt in view.attempts:
        if attempt.cut is not None:
            fault = _at_cut(view, attempt, attempt.cut, response, start)
            if fault is not None:
                return fault
    return None


def _at_cut(
    view: RequestView, attempt: Attempt, cut: StopCut, response: tuple[int, ...], start: int
) -> StopFault | None:
    stops = view.contract.own_stops
    assert stops is not None
    sent = len(attempt.call.prompt_ids) - len(view.request.prompt_ids)
    end = sent + len(cut.reply.output.token_ids) - cut.reaches_back
    size, shown = len(cut.sequence), window(cut.sequence, 0)
    if stops.kept and start == end - size and _is_answer_or_end(view, response, start):
        return StopFault(
            kind="a stop sequence is missing",
            title=f"The response lacks the stop sequence {shown} at which it was cut",
            hint=(
                "The policy sampled it, so the loss needs it: keep it, or declare"
                " own_stops={..., 'kept': False} if later turns do not see it either."
            ),
        )
    if start != end:
        return None
    held = response[start : start + size]
    if not stops.kept and held == cut.sequence and _is_answer_or_end(view, response, end + size):
        return StopFault(
            kind="a stop sequence is in the sample",
            title=f"The response holds the stop sequence {shown}, before which it should end",
            hint="own_stops declares kept=False: cut before the sequence, or declare kept=True.",
        )
    later = (cut.dropped if stops.kept else cut.sequence + cut.dropped)[:1]
    if later and response[start : start + 1] == later:
        return StopFault(
            kind="a response goes on after a stop sequence",
            title=(
                f"The response goes on after the stop sequence {shown}, which {call_name(attempt)}"
                " completed"
            ),
            hint=(
                "The stack cuts at this sequence (own_stops), here it did not. Usual causes: the"
                " last one is searched instead of the first; each reply is searched by itself,"
                " and the sequence began before an abort; the text is searched, and its tokens are"
                " cut at another place."
            ),
        )
    return None


def _is_answer_or_end(view: RequestView, response: tuple[int, ...], index: int) -> bool:
    """Return whether the response ends there, or an answer of the environment begins."""
    rest = response[index:]
    return not rest or any(
        bool(words) and rest[: len(words)] == words[: len(rest)] for words in view.turns
    )
