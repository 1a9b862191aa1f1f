"""Checks of rejection: which tokens and sequences are no longer trained."""

from __future__ import annotations

from rollproof.core.contract import Contract
from rollproof.core.correction_terms import Pair
from rollproof.core.events.corrections import Purpose
from rollproof.core.records import FloatArray
from rollproof.corrections.expected_correction import BoolArray
from rollproof.invariants._shared.phrases import listing, share
from rollproof.invariants.correction.corrected_batch import (
    CorrectedBatch,
    compare_weights,
    correction_check,
    first_place,
    follows_from_pair,
)
from rollproof.judging.checks import Collector

__all__ = ["correction_mask", "correction_versions"]


def _rejects(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is not None and not terms.rejections:
        return "the contract declares no rejections"
    return None


def compare_kept(
    batch: CorrectedBatch,
    out: Collector,
    *,
    dropped: str,
    kept: str,
    titles: tuple[str, str],
    rule: str,
    hint: str,
) -> None:
    """Compare what is rejected, by the mask, by a weight of 0, or both.

    Args:
        batch: The batch.
        out: Takes the finding.
        dropped: Counts the tokens that must be rejected.
        kept: Counts those that must be kept.
        titles: Of a token that is kept, and of one that is rejected by mistake.
        rule: The declared rule, in words.
        hint: The hint of the finding.
    """
    event, expected, terms = batch.event, batch.expected, batch.terms
    sure = expected.trained & ~expected.undecided
    out.exercised(dropped, int((sure & expected.rejected).sum()))
    out.exercised(kept, int((sure & ~expected.rejected).sum()))
    channels: list[tuple[str, FloatArray, BoolArray]] = []
    if event.kept is not None:
        channels.append(("mask", event.kept, sure))
    if event.weights is not None and terms.rejects_weights:
        # a weight that underflows is 0 as well
        clear = expected.rejected | (expected.clamped.value > 4 * expected.clamped.error)
        channels.append(("weight", event.weights, sure & clear))
    for name, values, chosen in channels:
        shows = values != 0
        for wrong, title, words in (
            (chosen & expected.rejected & shows, titles[0], f"{name} 0: {rule}"),
            (chosen & ~expected.rejected & ~shows, titles[1], f"{name} above 0: {rule}"),
        ):
            if not wrong.any():
                continue
            at = first_place(wrong)
            log = expected.log_ratio.value
            if batch.other_pair is not None:
                title = "tokens are rejected by another pair of logprobs"
                hint = follows_from_pair(batch.other_pair[0])
            out.finding(
                title,
                expected=words,
                observed=(
                    f"{name} {values[at]:.6g} at a log ratio of {log[at]:.4g}"
                    f" (sequence: sum {log[at[0]].sum():.4g}); wrong for"
                    f" {share(int(wrong.sum()), int(chosen.sum()), 'trained token')}"
                ),
                where=batch.place(at),
                hint=hint,
            )
            return


@correction_check(
    "correction.mask",
    Purpose.REJECTION,
    promise=(
        "A token or a sequence is rejected exactly if a declared statistic is outside its bounds,"
        " and then in the declared way: by the mask, by a weight of 0, or by both."
    ),
    exercised_by=("tokens to be rejected", "tokens to be kept"),
    applies=_rejects,
)
def correction_mask(batch: CorrectedBatch, out: Collector) -> None:
    """Compare what is rejected with the declared bounds."""
    compare_kept(
        batch,
        out,
        dropped="tokens to be rejected",
        kept="tokens to be kept",
        titles=(
            "a token outside the declared bounds is kept",
            "a token within the declared bounds is rejected",
        ),
        rule=listing(batch.terms.rejections),
        hint=(
            "Look at the sign of the statistic (k1 is -log r), at bounds of one side only, at a"
            " comparison with the ratio where its logarithm is meant, and at sums or means over the"
            " sequence."
        ),
    )


def _reads_versions(contract: Contract) -> str | None:
    terms = contract.correction
    if terms is None or terms.max_staleness is not None or terms.pair is Pair.INTERPOLATED_ROLLOUT:
        return None
    return "by the contract, nothing depends on versions"


@correction_check(
    "correction.versions",
    Purpose.STALE,
    promise=(
        "Tokens are rejected or interpolated by the version of the weights that sampled each of"
        " them, as the contract declares."
    ),
    exercised_by=(
        "tokens that are too old",
        "tokens that are not too old",
        "weights by version",
    ),
    applies=_reads_versions,
)
def correction_versions(batch: CorrectedBatch, out: Collector) -> None:
    """Compare rejection and interpolation by version."""
    terms = batch.terms
    if terms.max_staleness is not None:
        compare_kept(
            batch,
            out,
            dropped="tokens that are too old",
            kept="tokens that are not too old",
            titles=("a token that is too old is kept", "a token that is not too old is rejected"),
            rule=(
                f"max_staleness={terms.max_staleness}, stale='{terms.stale}', current version"
                f" {batch.event.current_version}"
            ),
            hint=(
                "A resumed sample has tokens of several versions: look at the version of each"
                " token, not at that of the sample's first or last one."
            ),
        )
    if terms.pair is Pair.INTERPOLATED_ROLLOUT and terms.weights:
        expected = batch.expected
        compare_weights(
            batch,
            out,
            "weights by version",
            expected.trained & ~expected.rejected & ~expected.at_bound,
            title="a weight is interpolated by another version",
            hint="The share is (v - 1 - u) / (v - u) for a token of version u, 0 if u is current.",
        )
