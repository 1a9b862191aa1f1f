"""Known bugs of batches with sampling masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollproof.core.records import BatchRow, Rollout
from rollproof.core.sampling_masks import SamplingMask
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_batches import CollatedBatch, MaskCollator

__all__ = ["BUGS"]


class _MaskBatchDropped(MaskCollator):
    def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
        return None


class _MaskBatchAtStart(MaskCollator):
    """Pads the masks behind them only, and the tokens on both sides."""

    def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
        mask = sample.sampling_mask
        if mask is None:
            return None
        return SamplingMask.joined([mask, SamplingMask.none(self.width - len(mask))])


class _MaskBatchOfLabels(MaskCollator):
    def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
        mask = super().sampling_mask(sample)
        if mask is None:
            return None
        # sharded with the tokens, and not with the labels
        end = len(mask)
        return SamplingMask.joined([mask.cut(1, end), mask.cut(0, 1)])


class _MaskBatchSortedApart(MaskCollator):
    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        order = np.argsort([-tokens.sum() for tokens in batch.attention], kind="stable")
        rows = super().rows(batch)
        return [
            replace(row, sampling_mask=rows[i].sampling_mask)
            for row, i in zip(rows, order, strict=True)
        ]


class _MaskBatchPaddedWithOnes(MaskCollator):
    """Gives each place of the padding a mask that holds the padding token."""

    def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
        mask = sample.sampling_mask
        if mask is None:
            return None
        behind = SamplingMask.from_lists([[0]] * (self.width - self.left - len(mask)))
        return SamplingMask.joined([SamplingMask.none(self.left), mask, behind])


class _MaskBatchTakesAnything(MaskCollator):
    """Fits masks to the tokens silently: cut, or repeated."""

    def fitted(self, sample: Rollout) -> Rollout:
        """Return the sample with one mask for each token."""
        mask, response = sample.sampling_mask, len(sample.response_ids)
        if mask is None or len(mask) == response:
            return sample
        doubled = SamplingMask.joined([mask] * 4)
        return replace(sample, sampling_mask=doubled.cut(0, response))

    def check(self, sample: Rollout) -> None:
        super().check(self.fitted(sample))

    def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
        return super().sampling_mask(self.fitted(sample))


_REFS = ("cf. prime-rl#3431",)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="mask-batch-dropped",
        summary="Samples have sampling masks, and the batch has none.",
        refs=("cf. prime-rl#2979",),
        kind="batches",
        make=_MaskBatchDropped,
        detected_by=("batch.sampling-masks",),
    ),
    KnownBug(
        id="mask-batch-at-start",
        summary="Masks begin at the first place of a line that begins with the prompt.",
        refs=_REFS,
        kind="batches",
        make=_MaskBatchAtStart,
        detected_by=("batch.sampling-masks",),
    ),
    KnownBug(
        id="mask-batch-of-labels",
        summary="Masks are one place before their tokens: sharded as tokens, and not as labels.",
        refs=_REFS,
        kind="batches",
        make=_MaskBatchOfLabels,
        detected_by=("batch.sampling-masks",),
    ),
    KnownBug(
        id="mask-batch-sorted-apart",
        summary="Rows stay in their order, and their masks are sorted by length.",
        refs=_REFS,
        kind="batches",
        make=_MaskBatchSortedApart,
        detected_by=("batch.sampling-masks",),
    ),
    KnownBug(
        id="mask-batch-padded-with-ones",
        summary="Padding has the mask of the padding token in place of count 0.",
        refs=_REFS,
        kind="batches",
        make=_MaskBatchPaddedWithOnes,
        detected_by=("batch.sampling-masks",),
    ),
    KnownBug(
        id="mask-batch-takes-anything",
        summary="Sampling masks of more or fewer tokens than the response are cut or repeated.",
        refs=_REFS,
        kind="batches",
        make=_MaskBatchTakesAnything,
        detected_by=("batch.refuses",),
    ),
)
