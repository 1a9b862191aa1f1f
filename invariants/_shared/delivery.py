"""A delivered sample next to the rollout that the engines' replies make, and how far the two align.

Checks of per-token values judge only what aligns. If tokens are lost or doubled, ``stitch.tokens``
reports it, and no other check is blamed for values that cannot be told apart from their
neighbours'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollproof.core.records import FinishReason
from rollproof.judging.stitching import Run

if TYPE_CHECKING:
    from rollproof.core.records import Rollout
    from rollproof.judging.checks import Collector
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Stitched

_SLACK = 8
"""A form of an answer that is longer by more than its length and this is not looked for."""
_MOST_PLACES = 32

__all__ = ["Delivery", "delivery", "existing_delivery", "missing_reason", "reliable_delivery"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A sample and its reference.

    rollout: The sample.
    reference: What the engines' replies make.
    reliable: Whether the reference says what the sample must be.
    aligned: Whether the sample's tokens are the reference's.
    count: If aligned, how many leading tokens of the response the two share. The sample may be cut
        at the budget, lack tokens of the environment at the end, or end with tokens that are masked
        out.
    reason: Why the reference is not reliable.
    answers: If the sample differs from the reference in the environment's tokens alone: where it
        holds each of the reference's answers, as response indexes ``(start, end)``.
    """

    rollout: Rollout
    reference: Stitched
    reliable: bool
    aligned: bool
    count: int = 0
    reason: str = ""
    answers: tuple[tuple[int, int], ...] | None = None

    def placed(self) -> list[tuple[Run, int]]:
        """Return the runs of the reference that the sample holds, as far as it holds them, each
        with the response index of its first token in the sample.

        Empty if the two do not align. Of an answer that the sample holds in another form there is
        what the sample has.
        """
        if self.aligned:
            return [
                (
                    run
                    if run.end <= self.count
                    else replace(run, ids=run.ids[: self.count - run.start]),
                    run.start,
                )
                for run in self.reference.runs
                if run.start < self.count
            ]
        if self.answers is None:
            return []
        ids = self.rollout.response_ids
        placed = [
            (Run(start, ids[start:end], -1, None), start)
            for start, end in self.answers
            if end > start
        ]
        # each answer moves what follows it
        shifts = [
            (answer.end, end - answer.end)
            for answer, (_, end) in zip(self.reference.answers, self.answers, strict=True)
        ]
        for run in self.reference.runs:
            if run.attempt >= 0 and run.ids:
                shift = [by for begin, by in shifts if begin <= run.start]
                placed.append((run, run.start + (shift[-1] if shift else 0)))
        return sorted(placed, key=_start)

    def fits(self, length: int) -> bool:
        """Return whether a per-token field of ``length`` fits the response, or the reference if the
        response is wrong.
        """
        size = len(self.rollout.response_ids)
        return length == size or (
            self.reliable and not self.aligned and length == len(self.reference.response_ids)
        )


def delivery(view: RequestView) -> Delivery | None:
    """Return the sample of a request with its reference, computed once; ``None`` without a
    sample.
    """
    if "delivery" not in view.memo:
        view.memo["delivery"] = _delivery(view)
    known_delivery: Delivery | None = view.memo["delivery"]
    return known_delivery


def existing_delivery(view: RequestView, out: Collector) -> Delivery | None:
    """Return the delivery of a request, or report that there is no sample."""
    sample = delivery(view)
    if sample is None:
        out.absent(missing_reason(view))
    return sample


def reliable_delivery(view: RequestView, out: Collector) -> Delivery | None:
    """Return the delivery of a request, or report why the sample cannot be judged."""
    sample = existing_delivery(view, out)
    if sample is None or sample.reliable:
        return sample
    out.absent(sample.reason)
    return None


def missing_reason(view: RequestView) -> str:
    """Return why there is no sample to judge."""
    return "no sample was delivered" if view.results else "the request never ended"


def _delivery(view: RequestView) -> Delivery | None:
    rollout = view.rollout
    if rollout is None:
        return None
    reference = view.stitched
    sampled, response = reference.response_ids, rollout.response_ids
    reason = _unreliable(view)
    if reason:
        return Delivery(rollout, reference, False, False, reason=reason)
    # The usual case: one comparison of tuples.
    if response == sampled:
        return Delivery(rollout, reference, True, True, len(sampled))
    common = min(len(sampled), len(response))
    if response[:common] == sampled[:common] and (
        _may_end(view, common) if len(response) < len(sampled) else _masked_from(rollout, common)
    ):
        return Delivery(rollout, reference, True, True, common)
    answers = _answers_in(reference, rollout)
    if answers is not None:
        return Delivery(rollout, reference, True, False, answers=answers)
    # An unrecorded reply may hold the tokens in question, so a mismatch proves nothing.
    if any(not attempt.replies and not attempt.faults for attempt in view.attempts):
        reason = "the outcome of an engine call was not recorded"
        return Delivery(rollout, reference, False, False, reason=reason)
    return Delivery(rollout, reference, True, False)


def _unreliable(view: RequestView) -> str:
    """Return why the reference does not say what the sample must be; empty if it does."""
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
    """Return whether a response may end after ``length`` tokens: at the budget, or before the last
    turn of the environment.
    """
    # Stacks cut at the caller's max_tokens or at a configured limit of their own.
    if length in view.request.bounds:
        return True
    return all(run.attempt < 0 for run in view.stitched.runs if run.end > length)


def _start(placed: tuple[Run, int]) -> int:
    return placed[1]


def _answers_in(reference: Stitched, rollout: Rollout) -> tuple[tuple[int, int], ...] | None:
    """Return where the sample holds each answer of the environment, if it holds everything that was
    sampled, in order, and differs in the answers alone; otherwise ``None``.
    """
    answers, response = reference.answers, rollout.response_ids
    sampled = reference.response_ids
    # What was sampled before and after each answer.
    bounds = [
        0,
        *(bound for answer in answers for bound in (answer.start, answer.end)),
        len(sampled),
    ]
    parts = [sampled[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
    if not answers or response[: len(parts[0])] != parts[0]:
        return None
    # By the place reached: how far the answers so far are from their lengths, and where they are.
    reached: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {len(parts[0]): (0, ())}
    for answer, part in zip(answers, parts[1:], strict=True):
        further: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
        for at, (cost, spans) in reached.items():
            size = len(answer.ids)
            for found in range(at, min(at + 2 * size + _SLACK, len(response) - len(part)) + 1):
                end = found + len(part)
                if response[found:end] == part and _is_an_answer(
                    answer.ids, response[at:found], rollout, at
                ):
                    option = (cost + abs(found - at - size), (*spans, (at, found)))
                    further[end] = min(further.get(end, option), option)
        # Many places only if turns of one or two tokens repeat themselves.
        reached = dict(sorted(further.items(), key=_cost)[:_MOST_PLACES])
    ends = {
        at: option
        for at, option in reached.items()
        if at == len(response) or _masked_from(rollout, at)
    }
    return min(ends.values())[1] if ends else None


def _cost(item: tuple[int, tuple[int, Any]]) -> tuple[int, int]:
    return item[1][0], item[0]


def _is_an_answer(
    sent: tuple[int, ...], held: tuple[int, ...], rollout: Rollout, start: int
) -> bool:
    """Return whether ``held`` may be the sample's form of the answer ``sent``: no longer, or masked
    out, so that no sampled token is among them.
    """
    mask = rollout.loss_mask
    masked = (
        mask is not None
        and len(mask) == len(rollout.response_ids)
        and not mask[start : start + len(held)].any()
    )
    return len(held) <= len(sent) or masked


def _masked_from(rollout: Rollout, length: int) -> bool:
    """Return whether all tokens after the first ``length`` are masked out: a synthetic end of
    sequence, or the last turn of the environment.
    """
    mask = rollout.loss_mask
    # Some stacks append an end-of-sequence token that no engine sampled, which is harmless if it is
    # masked out.
    return mask is not None and len(mask) == len(rollout.response_ids) and not mask[length:].any()
