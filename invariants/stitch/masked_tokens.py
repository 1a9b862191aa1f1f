"""Why sampled tokens may be masked out of the loss, and what a wrong mask looks like."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rollproof.core.contract import MaskedTokens
from rollproof.core.records import FinishReason
from rollproof.invariants._shared.end_tokens import ends_with_eos
from rollproof.judging.stitching import Run, Stretch

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Reply
    from rollproof.invariants._shared.delivery import Delivery
    from rollproof.judging.request_view import RequestView

__all__ = ["MaskScan", "masked_hint", "scan_masked"]

Placed = Sequence[tuple[Run, int]]

# Common enough that a stack which declares nothing may mean them. Masks of earlier calls under the
# same weights are left out: they look like a mask that was lost at a resume.
_CONVENTIONS = (
    MaskedTokens.TRUNCATED,
    MaskedTokens.ABORTED,
    MaskedTokens.OLDER_WEIGHTS,
    MaskedTokens.END,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskScan:
    """The sampled tokens of a sample by their loss mask.

    total: The number of sampled tokens.
    trained: How many have loss mask 1.
    declared: How many have 0 as the contract allows.
    undeclared: The conventions that would explain those with 0, if the contract declared any.
    unexplained: Response indexes of the others with 0.
    """

    total: int
    trained: int
    declared: int
    undeclared: tuple[MaskedTokens, ...]
    unexplained: list[int]


def scan_masked(view: RequestView, delivered: Delivery, runs: Placed) -> MaskScan:
    """Return the tokens of ``runs``, which an engine sampled, by what explains their mask."""
    mask = delivered.rollout.loss_mask
    assert mask is not None
    total = sum(len(run.ids) for run, _ in runs)
    masked = {start + i for run, start in runs for i in range(len(run.ids)) if not mask[start + i]}
    if not masked:
        return MaskScan(total=total, trained=total, declared=0, undeclared=(), unexplained=[])
    # Whatever is masked for want of a logprob is logprobs-missing's to judge.
    free = {
        start + i
        for run, start in runs
        for i, value in enumerate(run.logprobs)
        if math.isnan(value) and start + i in masked and _wants_logprobs(view)
    }
    masked -= free
    declared = view.contract.masked
    explained = {
        reason: masked.intersection(_places(reason, view, delivered, runs))
        for reason in (_CONVENTIONS if declared is None else declared)
    }
    unexplained = masked.difference(*explained.values())
    # Conventions that nobody declared explain a mask altogether, or they do not explain it.
    if declared is None and unexplained:
        unexplained, explained = masked, {}
    return MaskScan(
        total=total,
        trained=total - len(masked) - len(free),
        declared=len(free) + (0 if declared is None else len(masked - unexplained)),
        undeclared=(
            tuple(reason for reason, places in explained.items() if places)
            if declared is None
            else ()
        ),
        unexplained=sorted(unexplained),
    )


def _wants_logprobs(view: RequestView) -> bool:
    return view.request.want_logprobs and all(a.call.want_logprobs for a in view.attempts)


def _places(
    reason: MaskedTokens, view: RequestView, delivered: Delivery, runs: Placed
) -> Iterator[int]:
    """Yield the response indexes that ``reason`` lets a stack mask out."""
    mask = delivered.rollout.loss_mask
    assert mask is not None
    if reason in (MaskedTokens.TRUNCATED, MaskedTokens.ABORTED):
        # overlong filtering leaves out a sample altogether: a mask of a part has another cause
        whole = not any(mask[start : start + len(run.ids)].any() for run, start in runs)
        if whole and (_truncated if reason is MaskedTokens.TRUNCATED else _aborted)(delivered):
            yield from _all(runs)
        if reason is MaskedTokens.ABORTED:
            for first, last in _cut_turns(delivered):
                turn = [(run, start) for run, start in runs if first <= run.start < last]
                # A turn counts as a whole too: a part of it is no reaction to an abort.
                if not any(mask[start : start + len(run.ids)].any() for run, start in turn):
                    yield from _all(turn)
    elif reason is MaskedTokens.OLDER_WEIGHTS:
        newest = runs[-1][0].stretches()[-1] if runs[-1][0].ids else None
        for run, start in runs:
            for stretch in run.stretches():
                if _older(stretch, newest, view):
                    yield from range(
                        start + stretch.start - run.start, start + stretch.end - run.start
                    )
    elif reason is MaskedTokens.EARLIER_CALLS:
        resumed = _last_resume(view, runs)
        yield from _all([(run, start) for run, start in runs if run.attempt < resumed])
    elif reason is MaskedTokens.END:
        for run, start in runs:
            reply = run.reply
            # an abort, or the budget, may come right after the end token: it ended the turn
            if (
                reply is not None
                and len(run.ids) == len(reply.output.token_ids) > 0
                and (
                    reply.output.finish_reason in (FinishReason.STOP, FinishReason.COMPLETED)
                    or ends_with_eos(view, view.attempts[run.attempt])
                )
            ):
                yield start + len(run.ids) - 1


def _all(runs: Placed) -> Iterator[int]:
    for run, start in runs:
        yield from range(start, start + len(run.ids))


def _truncated(delivered: Delivery) -> bool:
    return (
        delivered.rollout.finish_reason == FinishReason.LENGTH
        or not delivered.reference.ended
        or delivered.count < len(delivered.reference.response_ids)
    )


def _aborted(delivered: Delivery) -> bool:
    unfinished = (FinishReason.ABORT, FinishReason.ERROR)
    return (
        delivered.rollout.finish_reason in unfinished
        or delivered.reference.finish_reason in unfinished
    )


def _cut_turns(delivered: Delivery) -> list[tuple[int, int]]:
    """Return the turns that ended by an abort before the environment answered, as response indexes
    ``(start, end)`` of the reference.
    """
    turns, begin = [], 0
    for answer in delivered.reference.answers:
        if answer.finish is FinishReason.ABORT:
            turns.append((begin, answer.start))
        begin = answer.end
    return turns


def _older(stretch: Stretch, newest: Stretch | None, view: RequestView) -> bool:
    """Return whether newer weights were published since: before the sample's last token, or before
    its delivery. A label that is not known may be older.
    """
    updates = view.history.updates
    current = [(update.version, update.label) for update in updates[-1:]]
    if newest is not None:
        current.append((newest.true, newest.shown))
    # A stack goes by the labels that it is shown, whatever really sampled a token.
    return any(
        (None not in (stretch.true, true) and stretch.true != true)
        or stretch.shown is None
        or stretch.shown != label
        for true, label in current
    )


def _last_resume(view: RequestView, runs: Placed) -> int:
    """Return the attempt that last continued an aborted one, -1 if none did."""
    calls = [run.attempt for run, _ in runs]
    resumes = [
        later for earlier, later in pairwise(calls) if _is_abort(view.attempts[earlier].consumed)
    ]
    return max(resumes, default=-1)


def _is_abort(reply: Reply | None) -> bool:
    return reply is not None and reply.output.finish_reason is FinishReason.ABORT


def masked_hint(view: RequestView, delivered: Delivery, runs: Placed, wrong: Sequence[int]) -> str:
    """Return what the masked tokens have in common, if it names a cause."""
    mask = delivered.rollout.loss_mask
    assert mask is not None
    wrong_set = set(wrong)
    resume = _last_resume(view, runs)
    resumed = set(_all([(run, start) for run, start in runs if _resumes(view, run)]))
    earlier = set(_all([(run, start) for run, start in runs if run.attempt < resume]))
    if any(
        mask[start : start + len(run.ids)].any()
        for run, start in delivered.placed()
        if run.attempt < 0
    ):
        return (
            "Tokens of the environment have loss mask 1 in their place: the mask is shifted against"
            " the tokens, or inverted."
        )
    if resumed and resumed == wrong_set:
        return (
            "They are exactly what resumed calls returned: a mask of what such a call sends (0, it"
            " has been counted already) must not cover what it returns."
        )
    if earlier and earlier == wrong_set:
        return (
            "They are exactly what was sampled before the last resume: declare"
            " masked=('earlier-calls',) if that is on purpose"
            " (mask_offpolicy_in_partial_rollout), or extend the mask at a resume as the tokens."
        )
    return (
        "The policy sampled them, and nothing is learned from them. Declare in `masked` what the"
        " stack leaves out on purpose."
    )


def _resumes(view: RequestView, run: Run) -> bool:
    """Return whether the run continues a turn that an abort had interrupted."""
    before = [attempt for attempt in view.attempts[: run.attempt] if attempt.consumed is not None]
    return _is_abort(before[-1].consumed if before else None)
