"""The check on sampling masks in a batch: each token's own, at its place.

Masks are ragged: one that is lost, doubled or of another length moves all that come after it, so
counts and ids are padded, cut and sorted together. Tokens that do not count in the loss are not
judged: a trainer renormalises over the others.
"""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Contract
from rollproof.core.sampling_masks import SamplingMask
from rollproof.invariants._shared.phrases import count, ranges, share, window
from rollproof.invariants.batch.batch_rows import Conversion, Placed, batch_check
from rollproof.judging.checks import Collector

__all__ = ["batch_sampling_masks"]


def _no_masks(contract: Contract) -> str | None:
    if contract.sampling_masks:
        return None
    return "the contract declares no sampling masks"


@batch_check(
    "batch.sampling-masks",
    promise=(
        "Each token that counts in the loss has its own sampling mask at its place; prompt and"
        " padding have none."
    ),
    needs="Batch events whose samples have sampling masks",
    exercised_by=("sampling masks compared", "places without a sampling mask"),
    applies=_no_masks,
)
def batch_sampling_masks(batch: Conversion, out: Collector) -> None:
    """Compare the masks of rows with those of their samples."""
    for placed in batch.sound:
        expected, actual = placed.sample.sampling_mask, placed.row.sampling_mask
        places = len(placed.row.token_ids)
        if expected is None or not expected.fits or len(expected) != len(placed.response_places):
            out.absent("a sample has no sampling masks of its length")
            continue
        if actual is None:
            if expected.counts.any():
                _report_form(batch, out, placed, "the sampling masks of a sample are gone", "none")
        elif not actual.fits:
            _report_form(
                batch,
                out,
                placed,
                "counts of sampling masks are not those of their ids",
                f"{window(actual.counts.ravel().tolist())} of {count(actual.token_ids.size, 'id')}",
            )
        elif len(actual) != places:
            _report_form(
                batch,
                out,
                placed,
                "sampling masks of another length than their row",
                count(len(actual), "count"),
            )
        else:
            _compare_tokens(batch, out, placed, expected, actual)
            _compare_fillers(batch, out, placed, actual)


def _report_form(
    batch: Conversion, out: Collector, placed: Placed, title: str, observed: str
) -> None:
    out.finding(
        title,
        expected=f"{count(len(placed.row.token_ids), 'count')}, which add up to the ids",
        observed=observed,
        where=batch.place(placed.sample),
        hint="Pad, cut, stack and select counts and ids together, with the tokens.",
    )


def _compare_tokens(
    batch: Conversion, out: Collector, placed: Placed, expected: SamplingMask, actual: SamplingMask
) -> None:
    at_tokens = np.zeros(len(placed.row.token_ids), dtype=bool)
    at_tokens[placed.response_places] = True
    of_response = actual.only(at_tokens)
    counted = placed.counted
    out.exercised("sampling masks compared", int((counted & (expected.counts > 0)).sum()))
    wrong = np.flatnonzero(counted & ~of_response.equal(expected))
    if not len(wrong):
        return
    first = int(wrong[0])
    ids = of_response.ids_of(first)
    owner, hint = _owner(batch, placed, ids)
    out.finding(
        "sampling masks are not at their tokens",
        expected=f"{_shown(expected.ids_of(first))} at response index {first}",
        observed=(f"{_shown(ids)}{owner}; so at {share(len(wrong), int(counted.sum()), 'token')}"),
        where=batch.place(placed.sample, position=len(placed.sample.prompt_ids) + first),
        hint=hint,
    )


def _shown(ids: tuple[int, ...]) -> str:
    return window(ids) if ids else "none"


def _owner(batch: Conversion, placed: Placed, ids: tuple[int, ...]) -> tuple[str, str]:
    """Return whose mask the ids are, as a clause, and the hint that fits it."""
    own = placed.sample
    for sample in (own, *(other for other in batch.event.samples if other is not own)):
        mask = sample.sampling_mask
        token = mask.find(ids) if mask is not None and mask.fits else None
        if token is not None and sample is own:
            return f", the mask of response index {token}", (
                "Place masks as the tokens are, padding on the left included."
            )
        if token is not None:
            return f", the mask of response index {token} of {sample.request_id}", (
                "Sort, split and balance masks together with their rows."
            )
    return "", "Cut and join the ids by the sums of the counts, not by the number of tokens."


def _compare_fillers(
    batch: Conversion, out: Collector, placed: Placed, actual: SamplingMask
) -> None:
    padded = np.setdiff1d(np.flatnonzero(placed.row.attention == 0), placed.unattended)
    places = np.concatenate([padded, placed.places[: len(placed.sample.prompt_ids)]])
    out.exercised("places without a sampling mask", len(places))
    filled = places[actual.counts[places] > 0]
    if len(filled):
        out.finding(
            "places without a sampled token have a sampling mask",
            expected="count 0 at prompt and padding",
            observed=(
                f"{count(int(actual.counts[filled[0]]), 'id')}; so at"
                f" {count(len(filled), 'place')} ({ranges(filled.tolist())})"
            ),
            where=batch.place(placed.sample, position=int(filled.min())),
            hint=(
                "Pad the counts with 0: a trainer that replays a mask there renormalises over ids"
                " of another token."
            ),
        )
