"""Checks on sampling masks: the support of each token's own draw, across resumes and turns.

A trainer renormalises its probabilities over the mask (vLLM #49577, SGLang #27408, prime-rl #3431),
so a mask of another token changes the importance ratio as a wrong logprob does. Every position is
judged by one check: an absent mask by ``sampling-masks-present``, one that is not what the engine
returned by ``sampling-masks-paired``, and the engine's own by ``sampling-masks-sampled``. If the
lengths differ (``sampling-masks-length``) or the tokens are wrong (``stitch.tokens``), positions
have no meaning and the other checks do not judge.

A count above top_k is no fault: all tokens that are tied at the cutoff stay in (SGLang #34037).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract
from rollproof.core.records import FinishReason, Scalar
from rollproof.core.sampling_masks import SamplingMask, is_greedy, leaves_tokens_out
from rollproof.invariants._shared.delivery import (
    Delivery,
    existing_delivery,
    reliable_delivery,
)
from rollproof.invariants._shared.phrases import count, listing, ranges, share, verb, window
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView
    from rollproof.judging.stitching import Run

__all__ = [
    "stitch_sampling_masks_length",
    "stitch_sampling_masks_paired",
    "stitch_sampling_masks_present",
    "stitch_sampling_masks_sampled",
]

_NEEDS = "a delivered sample with one count per token, and the engines' replies"


def _no_masks(contract: Contract) -> str | None:
    if contract.sampling_masks:
        return None
    return "the contract declares no sampling masks"


@dataclass(slots=True)
class _Scan:
    """Response indexes of sampled tokens by what is wrong with their mask.

    returned: How many came with a mask.
    without: How many came without one.
    own: How many have the mask that came with them, or any if the replies have none at all.
    lost: The engine returned a mask, and the sample has none.
    wrong: The mask is not the one that the engine returned.
    invented: The engine returned none, and the sample has one.
    lacking: The engine's own mask does not hold the token.
    unreturned: The engine returned none with a reply that was to have one.
    """

    returned: int = 0
    without: int = 0
    own: int = 0
    lost: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    invented: list[int] = field(default_factory=list)
    lacking: list[int] = field(default_factory=list)
    unreturned: list[int] = field(default_factory=list)


def _scan(view: RequestView, delivered: Delivery) -> _Scan | None:
    """Classify the positions once; ``None`` if they have no meaning."""
    if "sampling mask scan" not in view.memo:
        mask = delivered.rollout.sampling_mask
        view.memo["sampling mask scan"] = (
            _classified(view, delivered, mask)
            if mask is not None
            and mask.fits
            and delivered.aligned
            and len(mask) == len(delivered.rollout.response_ids)
            else None
        )
    scan: _Scan | None = view.memo["sampling mask scan"]
    return scan


def _classified(view: RequestView, delivered: Delivery, mask: SamplingMask) -> _Scan:
    scan = _Scan()
    runs = [run for run, _ in delivered.placed() if run.attempt >= 0 and run.ids]
    parts = mask.split([(run.start, run.end) for run in runs])
    returned = [_returned(run) for run in runs]
    none_came = all(part is None for part in returned)
    for run, actual, expected in zip(runs, parts, returned, strict=True):
        # a recording may leave out what the engines returned: then nothing shows what is made up
        unknown = none_came and leaves_tokens_out(view.attempts[run.attempt].call.sampling)
        _classify(view, scan, run, actual, actual if unknown else expected)
    return scan


def _returned(run: Run) -> SamplingMask | None:
    """Return the masks that came with the tokens of a run; ``None`` if none did."""
    mask = None if run.reply is None else run.reply.output.sampling_mask
    if mask is None or not mask.fits:
        return None
    absent = SamplingMask.none(max(0, len(run.ids) - len(mask)))
    return SamplingMask.joined([mask.cut(0, len(run.ids)), absent])


def _classify(
    view: RequestView, scan: _Scan, run: Run, actual: SamplingMask, expected: SamplingMask | None
) -> None:
    has_mask = actual.counts > 0
    if expected is None:
        expected = SamplingMask.none(len(run.ids))
    came = expected.counts > 0
    same = actual.equal(expected)
    tokens = np.array(run.ids, dtype=np.int64)
    holds = actual.holds(tokens)
    invented = ~came & has_mask
    if is_greedy(view.attempts[run.attempt].call.sampling):
        # a greedy call has the one support that needs no engine
        invented &= ~(holds & (actual.counts == 1))
    scan.returned += int(came.sum())
    scan.without += int((~came).sum())
    scan.own += int((came & same).sum())
    for indexes, chosen in (
        (scan.lost, came & ~has_mask),
        (scan.wrong, came & has_mask & ~same),
        (scan.invented, invented),
        (scan.lacking, came & same & ~holds),
        (scan.unreturned, ~came & ~has_mask if _lacks_masks(view, run) else came[:0]),
    ):
        indexes.extend(_indexes(chosen, run.start))


def _lacks_masks(view: RequestView, run: Run) -> bool:
    """Return whether the engine completed a call that requested masks, without returning them."""
    # engines answer aborts on other paths, some of which have no values by token
    if view.contract.reply_gaps or run.reply is None:
        return False
    call, output = view.attempts[run.attempt].call, run.reply.output
    return (
        call.want_sampling_mask
        and leaves_tokens_out(call.sampling)
        and output.sampling_mask is None
        and output.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)
    )


def _indexes(chosen: npt.NDArray[np.bool_], start: int) -> list[int]:
    indexes: list[int] = (np.flatnonzero(chosen) + start).tolist()
    return indexes


def _scanned(view: RequestView, out: Collector) -> tuple[Delivery, _Scan] | None:
    """Return the delivery and its scan, or report what is missing."""
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return None
    scan = _scan(view, delivered)
    if scan is None:
        out.absent(
            "the sample carries no sampling masks"
            if delivered.rollout.sampling_mask is None
            else "sampling masks and tokens do not align"
        )
        return None
    return delivered, scan


@request_check(
    "stitch.sampling-masks-present",
    promise=(
        "Every call whose sampling leaves tokens out requests sampling masks, and those that the"
        " engines returned are in the sample."
    ),
    needs="calls and replies, a delivered sample",
    exercised_by=("calls that leave tokens out", "sampled tokens with a mask"),
    applies=_no_masks,
)
def stitch_sampling_masks_present(view: RequestView, out: Collector) -> None:
    """Check that masks are requested, and that the sample has what was returned."""
    truncated = [each for each in view.attempts if leaves_tokens_out(each.call.sampling)]
    out.exercised("calls that leave tokens out", len(truncated))
    without = [
        attempt
        for attempt in truncated
        if not attempt.call.want_sampling_mask
        # vLLM is told when it starts, and not by each call
        and not any(reply.output.sampling_mask is not None for reply in attempt.replies)
    ]
    if without:
        out.finding(
            f"{share(len(without), len(truncated), 'call')} that"
            f" {verb(len(truncated), 'leaves', 'leave')} tokens out"
            f" {verb(len(without), 'does', 'do')} not request sampling masks",
            kind="calls do not request sampling masks",
            expected="every attempt requests them (return_sampling_mask)",
            observed=(
                f"{verb(len(without), 'call', 'calls')}"
                f" {listing(attempt.call.call_id for attempt in without[:6])}"
                f" {verb(len(without), 'does', 'do')} not"
            ),
            where=view.place(call=without[0].call.call_id, server=without[0].call.server_id),
            hint=(
                "The option was lost on a resume: build the parameters of each attempt from the"
                " request's."
            ),
        )
        return
    delivered = reliable_delivery(view, out)
    if delivered is None:
        return
    if delivered.rollout.sampling_mask is None:
        _report_absent(view, delivered, out)
        return
    scan = _scan(view, delivered)
    if scan is None:
        return
    _report_unreturned(view, scan.unreturned, out)
    out.exercised("sampled tokens with a mask", scan.returned)
    if scan.lost:
        out.finding(
            f"{share(len(scan.lost), scan.returned, 'sampling mask')}"
            f" {verb(len(scan.lost), 'is', 'are')} missing from the sample, although the engine"
            " returned them",
            kind="sampling masks are missing from the sample",
            expected="the engine's mask for every sampled token",
            observed=f"count 0 at response index {ranges(scan.lost)}",
            where=_place(view, scan.lost[0]),
            hint=(
                "The trainer takes these tokens' probabilities among all tokens, and their ratios"
                " are biased: append the masks of each reply, as its tokens."
            ),
        )


def _report_unreturned(view: RequestView, unreturned: list[int], out: Collector) -> None:
    if unreturned:
        out.finding(
            f"The engine returned no sampling mask for {count(len(unreturned), 'token')}, although"
            " the call requested masks",
            kind="the engine returned no sampling masks",
            expected="a mask for each token of a call that leaves tokens out",
            observed=f"none at response index {ranges(unreturned)}",
            where=_place(view, unreturned[0]),
            hint=(
                "The reply lost them on its way (vLLM #53826), or the engine was started without"
                " them: refuse such samples, their ratios are biased."
            ),
        )


def _report_absent(view: RequestView, delivered: Delivery, out: Collector) -> None:
    returned = 0
    unreturned: list[int] = []
    for run, _ in delivered.placed():
        mask = _returned(run) if run.attempt >= 0 else None
        returned += 0 if mask is None else int((mask.counts > 0).sum())
        if _lacks_masks(view, run):
            unreturned += range(run.start, run.end)
    _report_unreturned(view, unreturned, out)
    out.exercised("sampled tokens with a mask", returned)
    if returned:
        out.finding(
            "The sample carries no sampling masks, although the engines returned them",
            expected=f"the masks of {count(returned, 'token')}, as the engines returned them",
            observed="sampling_mask is None",
            where=view.place(),
            hint=(
                "Without them a trainer takes probabilities among all tokens, and the ratios are"
                " biased (prime-rl #3431)."
            ),
        )


@request_check(
    "stitch.sampling-masks-length",
    promise="A sample that carries sampling masks has exactly one count per response token.",
    needs="a delivered sample with sampling masks",
    exercised_by="samples with sampling masks",
    applies=_no_masks,
)
def stitch_sampling_masks_length(view: RequestView, out: Collector) -> None:
    """Compare the number of counts with that of tokens, and their sum with that of ids."""
    delivered = existing_delivery(view, out)
    if delivered is None:
        return
    mask, tokens = delivered.rollout.sampling_mask, len(delivered.rollout.response_ids)
    if mask is None:
        out.absent("no sample carries sampling masks")
        return
    out.exercised("samples with sampling masks")
    if not mask.fits:
        out.finding(
            "The counts of sampling masks are not those of their ids",
            expected=f"counts that add up to {count(mask.token_ids.size, 'id')}",
            observed=f"{window(mask.counts.ravel().tolist())}",
            where=view.place(),
            hint="Cut, pad and join counts and ids together.",
        )
    elif not delivered.fits(len(mask)):
        out.finding(
            f"The sample has the sampling masks of {count(len(mask), 'token')}, and"
            f" {count(tokens, 'token')}",
            kind="fewer masks than tokens" if len(mask) < tokens else "more masks than tokens",
            expected=f"one count per response token: {tokens}; 0 where a token has no mask",
            observed=f"{len(mask)}: {window(mask.counts.tolist())}" if len(mask) else "none",
            where=view.place(),
            hint=(
                "Append tokens and masks together, and a count of 0 for each token of the"
                " environment; from the gap on, each mask is paired with another token."
            ),
        )


@request_check(
    "stitch.sampling-masks-paired",
    promise=(
        "Each sampling mask is the one that the engine returned with its token; a token that came"
        " without one has none."
    ),
    needs=_NEEDS,
    exercised_by=(
        "tokens of single-call samples",
        "tokens of resumed samples",
        "tokens that came without a mask",
    ),
    applies=_no_masks,
)
def stitch_sampling_masks_paired(view: RequestView, out: Collector) -> None:
    """Compare the ids of each token, in any order, with the reference stitch."""
    scanned = _scanned(view, out)
    if scanned is None:
        return
    delivered, scan = scanned
    resumed = len(view.segments) > 1
    out.exercised(
        "tokens of resumed samples" if resumed else "tokens of single-call samples",
        scan.returned - len(scan.lost),
    )
    out.exercised("tokens that came without a mask", scan.without)
    if scan.wrong:
        _report_wrong(view, delivered, scan, out)
    if scan.invented:
        first = scan.invented[0]
        mask = delivered.rollout.sampling_mask
        assert mask is not None
        out.finding(
            f"{share(len(scan.invented), scan.without, 'token')}"
            f" {verb(len(scan.invented), 'has', 'have')} a sampling mask, although the engine"
            " returned none",
            kind="sampling masks were made up",
            expected="count 0 where the engine returned none",
            observed=f"{window(mask.ids_of(first))} at response index {ranges(scan.invented)}",
            where=_place(view, first),
            hint="Leave the count 0: the token was drawn among all, or nobody knows its support.",
        )


def _report_wrong(view: RequestView, delivered: Delivery, scan: _Scan, out: Collector) -> None:
    mask = delivered.rollout.sampling_mask
    assert mask is not None
    first = scan.wrong[0]
    ids, token = mask.ids_of(first), delivered.rollout.response_ids[first]
    expected = _expected_ids(delivered, first)
    owner, hint = _owner(delivered, ids)
    out.finding(
        f"{share(len(scan.wrong), scan.returned, 'sampling mask')}"
        f" {verb(len(scan.wrong), 'is', 'are')} not what the engine returned with"
        f" {verb(len(scan.wrong), 'its token', 'their tokens')}",
        kind="sampling masks are not those of their tokens",
        expected=f"{count(len(expected), 'id')} as returned: {window(expected)}",
        observed=(
            f"{count(len(ids), 'id')}: {window(ids)}{owner}"
            f"{'' if token in ids else f', without the sampled token {token}'}; differs at response"
            f" index {ranges(scan.wrong)}"
        ),
        where=_place(view, first),
        hint=hint,
    )


def _expected_ids(delivered: Delivery, index: int) -> tuple[int, ...]:
    """Return the ids that the engine returned with a token, ascending."""
    for run, _ in delivered.placed():
        mask = _returned(run) if run.start <= index < run.end else None
        if mask is not None:
            return mask.ids_of(index - run.start)
    return ()


def _owner(delivered: Delivery, ids: tuple[int, ...]) -> tuple[str, str]:
    """Return whose mask the ids are, as a clause, and the hint that fits it."""
    for run, _ in delivered.placed():
        returned = _returned(run) if run.attempt >= 0 else None
        found = None if returned is None else returned.find(ids)
        if found is not None:
            return f", the mask of response index {run.start + found}", (
                "Append the masks of each reply when its tokens are appended; ids are cut and"
                " joined by the sums of the counts, and not by the number of tokens."
            )
    return "", (
        "A support that is reconstructed after sampling differs from the sampler's at ties and"
        " cutoffs, also if it holds the token (SGLang #36630): carry the engine's."
    )


@request_check(
    "stitch.sampling-masks-sampled",
    promise="Each sampled token is in the sampling mask that the engine returned with it.",
    needs=_NEEDS,
    exercised_by="sampled tokens with a mask of their own",
    applies=_no_masks,
)
def stitch_sampling_masks_sampled(view: RequestView, out: Collector) -> None:
    """Look for each token in its mask; those that are not the engine's are judged elsewhere."""
    scanned = _scanned(view, out)
    if scanned is None:
        return
    delivered, scan = scanned
    out.exercised("sampled tokens with a mask of their own", scan.own)
    if not scan.lacking:
        return
    mask = delivered.rollout.sampling_mask
    assert mask is not None
    first = scan.lacking[0]
    out.finding(
        f"{share(len(scan.lacking), scan.own, 'sampled token')}"
        f" {verb(len(scan.lacking), 'is', 'are')} not in"
        f" {verb(len(scan.lacking), 'its sampling mask', 'their sampling masks')}",
        kind="sampled tokens are not in their sampling masks",
        expected=f"{delivered.rollout.response_ids[first]} among the ids of its mask",
        observed=f"{window(mask.ids_of(first))}; so at response index {ranges(scan.lacking)}",
        where=_place(view, first),
        hint=(
            "The engine itself returned it: the mask is of another token or step, or was"
            " reconstructed after sampling (SGLang #36630). Renormalised over it, the token has"
            " probability 0."
        ),
    )


def _place(view: RequestView, index: int) -> Mapping[str, Scalar]:
    segment = view.segment_of(len(view.request.prompt_ids) + index)
    return view.place(index=index, segment=segment)
