"""Known bugs of layouts, ranks: divisions over context-parallel, tensor-parallel and Ulysses ranks,
and merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rollproof.core.records import IntArray
from rollproof.fakes.known_bugs._layout_runner import layout_bug
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike
from rollproof.layouts.context import Context
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank

__all__ = ["BUGS"]

_PLAIN = MegatronLike.layout


class _ContiguousForZigzag(MegatronLike):
    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super().context(replace(layout, context=Context.CONTIGUOUS), samples, rank)


class _ZigzagForContiguous(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, context=Context.CONTIGUOUS)

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super().context(replace(layout, context=Context.ZIGZAG), samples, rank)


class _EachForContiguous(_ZigzagForContiguous):
    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        return super(_ZigzagForContiguous, self).context(
            replace(layout, context=Context.EACH_CONTIGUOUS), samples, rank
        )


class _ZigzagOverAll(MegatronLike):
    """Cuts the whole pack into chunks, not each sequence."""

    def context(self, layout: Layout, samples: Sequence[IntArray], rank: Rank) -> IntArray:
        rows = np.concatenate(self.lines(layout, samples))
        if layout.mesh.cp == 1:
            return rows
        chunks = np.split(rows, 2 * layout.mesh.cp)
        return np.concatenate([chunks[rank.cp], chunks[-1 - rank.cp]])


class _RanksConcatenated(MegatronLike):
    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> list[IntArray]:
        return self.unpack(layout, np.concatenate(pieces), lengths)


class _Unsliced(MegatronLike):
    def tensor_slice(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        return rows


class _Strided(MegatronLike):
    def tensor_slice(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        return rows[rank.tp :: layout.mesh.tp]


class _UlyssesPaddedInFront(MegatronLike):
    def ulysses(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        size = layout.mesh.ulysses
        more = self.filler(layout, -len(rows) % size, rows.shape[1:])
        return np.split(np.concatenate([more, rows]), size)[rank.ulysses]


class _UlyssesUnpadded(MegatronLike):
    def ulysses(self, layout: Layout, rows: IntArray, rank: Rank) -> IntArray:
        return np.array_split(rows, layout.mesh.ulysses)[rank.ulysses]


class _BatchMajor(MegatronLike):
    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        return batch.reshape(-1, *batch.shape[2:])


class _FirstTensorRank(MegatronLike):
    """The piece of tensor-parallel rank 0 stands for that of all."""

    def merge(self, layout: Layout, recorded: Any, lengths: Sequence[int]) -> list[IntArray]:
        return super().merge(
            layout, {key: recorded[replace(key[0], tp=0), key[1]] for key in recorded}, lengths
        )


class _FailsWhenShort(MegatronLike):
    def context_merge(
        self, layout: Layout, pieces: Sequence[IntArray], lengths: Sequence[int]
    ) -> list[IntArray]:
        if min(lengths) < 2 * layout.mesh.cp:
            raise IndexError("index out of range in a chunk")
        return super().context_merge(layout, pieces, lengths)


BUGS: tuple[KnownBug, ...] = (
    layout_bug(
        "contiguous-for-zigzag",
        "A context-parallel rank takes one piece of all rows, where the model divides in zigzag.",
        ("cf. slime#2175", "ms-swift#9981"),
        _ContiguousForZigzag,
        "context targets",
        "context",
        "targets",
    ),
    layout_bug(
        "zigzag-for-contiguous",
        "A context-parallel rank takes zigzag chunks, where the model divides all rows in one piece"
        " each.",
        ("slime#2175", "verl#7297"),
        _ZigzagForContiguous,
        "context",
        "context",
    ),
    layout_bug(
        "each-sequence-divided",
        "A context-parallel rank takes a piece of every sequence, where the model divides all rows"
        " in one piece each.",
        ("cf. verl preprocess_thd_engine", "cf. slime#2175"),
        _EachForContiguous,
        "context",
        "context",
    ),
    layout_bug(
        "zigzag-over-all",
        "The whole pack is cut into zigzag chunks, not each sequence.",
        ("cf. slime#2175",),
        _ZigzagOverAll,
        "context",
        "context",
    ),
    layout_bug(
        "ranks-concatenated",
        "Recordings of context-parallel ranks are put behind each other in rank order, although"
        " they were divided in zigzag.",
        ("verl#7106", "verl#7805"),
        _RanksConcatenated,
        "context_merge merge",
        "context-merge",
        "merge",
    ),
    layout_bug(
        "tensor-slice-missing",
        "Under sequence parallelism every rank gets the targets of all rows.",
        ("cf. Megatron-LM router_replay.py", "cf. SkyRL#1908"),
        _Unsliced,
        "tensor_slice targets",
        "tensor-slice",
        "targets",
    ),
    layout_bug(
        "tensor-slice-strided",
        "A tensor-parallel rank takes every n-th row, not one piece.",
        ("cf. miles#496",),
        _Strided,
        "tensor_slice targets",
        "tensor-slice",
        "targets",
    ),
    layout_bug(
        "ulysses-padded-in-front",
        "Rows are padded in front before the Ulysses slice, token ids behind.",
        ("cf. SkyRL#1772",),
        _UlyssesPaddedInFront,
        "ulysses",
        "ulysses-slice",
    ),
    layout_bug(
        "ulysses-not-padded",
        "Rows are divided over Ulysses ranks without padding, so that pieces differ in length.",
        ("cf. SkyRL#1772", "cf. verl#7297"),
        _UlyssesUnpadded,
        "ulysses",
        "alignment",
    ),
    layout_bug(
        "batch-major-for-sequence-major",
        "A batch is flattened sample by sample, where the model flattens place by place.",
        ("miles#3146", "SkyRL#1908", "NeMo-RL router_replay.py"),
        _BatchMajor,
        "flatten",
        "flatten-order",
    ),
    layout_bug(
        "merged-from-one-tensor-rank",
        "The recording of tensor-parallel rank 0 is taken for that of all ranks.",
        ("verl#7106", "cf. miles#496"),
        _FirstTensorRank,
        "merge",
        "merge",
    ),
    layout_bug(
        "fails-when-short",
        "A sequence shorter than 2 * cp cannot be put together again.",
        ("cf. verl preprocess_thd_engine",),
        _FailsWhenShort,
        "context_merge",
        "accepts",
    ),
)
"""Known bugs of ranks."""
