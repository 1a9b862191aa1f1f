"""Known bugs of layouts: divisions over context-parallel, tensor-parallel and Ulysses ranks, and
merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rollproof.core.records import IntArray
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank
from rollproof.layouts.row_slices import Context

__all__ = ["BUGS"]

_PLAIN = MegatronLike.layout


class _LayoutContiguousForZigzag(MegatronLike):
    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super().context(replace(layout, context=Context.CONTIGUOUS), samples, rank)


class _LayoutZigzagForContiguous(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, context=Context.CONTIGUOUS)

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super().context(replace(layout, context=Context.ZIGZAG), samples, rank)


class _LayoutEachSequenceDivided(_LayoutZigzagForContiguous):
    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super(_LayoutZigzagForContiguous, self).context(
            replace(layout, context=Context.EACH_CONTIGUOUS), samples, rank
        )


class _LayoutZigzagOverAll(MegatronLike):
    """Cuts the whole pack into chunks instead of each sequence."""

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        rows = np.concatenate(self.lines(layout, samples))
        if layout.mesh.cp == 1:
            return rows
        chunks = np.split(rows, 2 * layout.mesh.cp)
        return np.concatenate([chunks[rank.cp], chunks[-1 - rank.cp]])


class _LayoutRanksConcatenated(MegatronLike):
    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> list[IntArray]:
        # pieces must be interleaved first: rank r has chunks r and 2 * cp - 1 - r
        return self.unpack(layout, np.concatenate(pieces), lengths)


class _LayoutTensorSliceMissing(MegatronLike):
    def tensor_slice(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        # the router sees 1 / tp of the rows under sequence parallelism
        return rows


class _LayoutTensorSliceStrided(MegatronLike):
    def tensor_slice(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        return rows[rank.tp :: layout.mesh.tp]


class _LayoutUlyssesPaddedInFront(MegatronLike):
    def ulysses(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        size = layout.mesh.ulysses
        more = self.filler(layout, -len(rows) % size, rows.shape[1:])
        # token ids are padded at the end, so every row is displaced
        return np.split(np.concatenate([more, rows]), size)[rank.ulysses]


class _LayoutUlyssesNotPadded(MegatronLike):
    def ulysses(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        return np.array_split(rows, layout.mesh.ulysses)[rank.ulysses]


class _LayoutBatchMajorForSequenceMajor(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        # Megatron works on (sequence, batch, hidden)
        return batch.reshape(-1, *batch.shape[2:])


class _LayoutMergedFromOneTensorRank(MegatronLike):
    """Uses the piece of tensor-parallel rank 0 for all ranks."""

    def merge(self, layout: Layout, recorded: Any, lengths: Sequence[int]) -> list[IntArray]:
        return super().merge(
            layout, {key: recorded[replace(key[0], tp=0), key[1]] for key in recorded}, lengths
        )


class _LayoutFailsWhenShort(MegatronLike):
    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> list[IntArray]:
        # a chunk of such a sequence is padding only
        if min(lengths) < 2 * layout.mesh.cp:
            raise IndexError("index out of range in a chunk")
        return super().context_merge(layout, pieces, lengths)


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="layout-contiguous-for-zigzag",
        summary=(
            "A context-parallel rank takes one piece of all rows, although the model divides in"
            " zigzag."
        ),
        refs=("cf. slime#2175", "ms-swift#9981"),
        kind="layouts",
        make=_LayoutContiguousForZigzag,
        only=("context", "targets"),
        detected_by=("layout.context", "layout.targets"),
    ),
    KnownBug(
        id="layout-zigzag-for-contiguous",
        summary=(
            "A context-parallel rank takes zigzag chunks, although the model gives each rank one"
            " piece."
        ),
        refs=("slime#2175", "verl#7297"),
        kind="layouts",
        make=_LayoutZigzagForContiguous,
        only=("context",),
        detected_by=("layout.context",),
    ),
    KnownBug(
        id="layout-each-sequence-divided",
        summary=(
            "A context-parallel rank takes a piece of every sequence, although the model gives"
            " each rank one piece of all rows."
        ),
        refs=("cf. verl preprocess_thd_engine", "cf. slime#2175"),
        kind="layouts",
        make=_LayoutEachSequenceDivided,
        only=("context",),
        detected_by=("layout.context",),
    ),
    KnownBug(
        id="layout-zigzag-over-all",
        summary="The whole pack is cut into zigzag chunks, not each sequence.",
        refs=("cf. slime#2175",),
        kind="layouts",
        make=_LayoutZigzagOverAll,
        only=("context",),
        detected_by=("layout.context",),
    ),
    KnownBug(
        id="layout-ranks-concatenated",
        summary=(
            "Recordings of context-parallel ranks are joined in rank order, although they were"
            " divided in zigzag."
        ),
        refs=("verl#7106", "verl#7805"),
        kind="layouts",
        make=_LayoutRanksConcatenated,
        only=("context_merge", "merge"),
        detected_by=("layout.context-merge", "layout.merge"),
    ),
    KnownBug(
        id="layout-tensor-slice-missing",
        summary="Under sequence parallelism every rank gets the targets of all rows.",
        refs=("cf. Megatron-LM router_replay.py", "cf. SkyRL#1908"),
        kind="layouts",
        make=_LayoutTensorSliceMissing,
        only=("tensor_slice", "targets"),
        detected_by=("layout.tensor-slice", "layout.targets"),
    ),
    KnownBug(
        id="layout-tensor-slice-strided",
        summary="A tensor-parallel rank takes every n-th row, not one piece.",
        refs=("cf. miles#496",),
        kind="layouts",
        make=_LayoutTensorSliceStrided,
        only=("tensor_slice", "targets"),
        detected_by=("layout.tensor-slice", "layout.targets"),
    ),
    KnownBug(
        id="layout-ulysses-padded-in-front",
        summary="Rows are padded in front before the Ulysses slice, token ids at the end.",
        refs=("cf. SkyRL#1772",),
        kind="layouts",
        make=_LayoutUlyssesPaddedInFront,
        only=("ulysses",),
        detected_by=("layout.ulysses-slice",),
    ),
    KnownBug(
        id="layout-ulysses-not-padded",
        summary=(
            "Rows are divided over Ulysses ranks without padding, so that pieces differ in length."
        ),
        refs=("cf. SkyRL#1772", "cf. verl#7297"),
        kind="layouts",
        make=_LayoutUlyssesNotPadded,
        only=("ulysses",),
        detected_by=("layout.alignment",),
    ),
    KnownBug(
        id="layout-batch-major-for-sequence-major",
        summary=(
            "A batch is flattened sample by sample, although the model flattens place by place."
        ),
        refs=("miles#3146", "SkyRL#1908", "NeMo-RL router_replay.py"),
        kind="layouts",
        make=_LayoutBatchMajorForSequenceMajor,
        only=("flatten",),
        detected_by=("layout.flatten-order",),
    ),
    KnownBug(
        id="layout-merged-from-one-tensor-rank",
        summary="The recording of tensor-parallel rank 0 is used for all ranks.",
        refs=("verl#7106", "cf. miles#496"),
        kind="layouts",
        make=_LayoutMergedFromOneTensorRank,
        only=("merge",),
        detected_by=("layout.merge",),
    ),
    KnownBug(
        id="layout-fails-when-short",
        summary="A sequence shorter than 2 * cp cannot be joined again.",
        refs=("cf. verl preprocess_thd_engine",),
        kind="layouts",
        make=_LayoutFailsWhenShort,
        only=("context_merge",),
        detected_by=("layout.accepts",),
    ),
)
