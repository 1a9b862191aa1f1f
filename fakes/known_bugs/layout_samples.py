"""Known bugs of layouts: microbatches, splits, filters, resumed samples, ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollproof.core.records import IntArray, Version
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike, Pair
from rollproof.layouts.layout import Layout
from rollproof.layouts.merged_rows import Segment

__all__ = ["BUGS"]

_PLAIN = MegatronLike.layout


class _LayoutRemainderDropped(MegatronLike):
    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> list[list[int]]:
        microbatches = super().microbatches(layout, lengths, most)
        # as drop_last in a data loader does
        return microbatches[:-1] if len(microbatches) > 1 else microbatches


class _LayoutLongSampleDropped(MegatronLike):
    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> list[list[int]]:
        # what fits into no bin is in none
        fitting = [i for i, length in enumerate(lengths) if length <= most]
        parts = super().microbatches(layout, [lengths[i] for i in fitting], most)
        return [[fitting[i] for i in part] for part in parts]


class _LayoutPermutationAppliedTwice(MegatronLike):
    def restore(
        self, layout: Layout, values: Sequence[Sequence[IntArray]], indexes: Sequence[Sequence[int]]
    ) -> list[IntArray]:
        flat = [value for part in values for value in part]
        # the inverse places value k at indexes[k]; this reads from there
        return [flat[i] for part in indexes for i in part]


class _LayoutBalancedWithoutRoutes(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Pair], parts: int) -> list[list[Pair]]:
        order = sorted(range(len(samples)), key=lambda i: -len(samples[i][0]))
        # tokens of sample i meet the routes at its new place
        mixed = [(samples[i][0], samples[place][1]) for place, i in enumerate(order)]
        return [mixed[part::parts] for part in range(parts)]


class _LayoutPaddingSamplesApart(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Pair], parts: int) -> list[list[Pair]]:
        lacking = -len(samples) % parts
        padding = [
            (first[0], last[1])
            for first, last in zip(
                samples[:lacking], samples[len(samples) - lacking :], strict=True
            )
        ]
        padded = [*samples, *padding]
        return [padded[part::parts] for part in range(parts)]


class _LayoutFilteredWithoutRoutes(MegatronLike):
    def keep(self, layout: Layout, samples: Sequence[Pair], kept: Sequence[int]) -> list[Pair]:
        # token i meets the routes at its place after the filter
        return [(samples[i][0], samples[place][1]) for place, i in enumerate(kept)]


class _LayoutIdsInEightBits(MegatronLike):
    def compact(self, layout: Layout, ids: IntArray) -> IntArray:
        # astype wraps silently
        return ids.astype(np.uint8)


class _LayoutSignedIds(MegatronLike):
    layout = replace(MegatronLike.layout, num_experts=160)

    def compact(self, layout: Layout, ids: IntArray) -> IntArray:
        # 160 experts fit into 8 bits, and not into 7
        return ids.astype(np.int8 if layout.num_experts <= 160 else np.int16)


class _LayoutBytesTakenForIds(MegatronLike):
    def compact(self, layout: Layout, ids: IntArray) -> IntArray:
        # each id becomes two: its low and its high byte
        return ids.astype(np.int16).view(np.uint8)


class _LayoutSegmentsConcatenated(MegatronLike):
    def join(self, layout: Layout, segments: Sequence[Segment]) -> tuple[IntArray, list[Version]]:
        # rows before a segment begin again with every segment
        return np.concatenate([segment.routes for segment in segments]), [
            s.version for s in segments for _ in s.routes
        ]


class _LayoutSegmentsReplaced(MegatronLike):
    def join(self, layout: Layout, segments: Sequence[Segment]) -> tuple[IntArray, list[Version]]:
        # the last call prefilled the earlier tokens under its own weights
        return segments[-1].routes, [segments[-1].version] * len(segments[-1].routes)


class _LayoutWritesPayload(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        packed = super().pack(layout, samples)
        for sample in samples:
            # another microbatch or rank packs the same arrays again
            sample -= 1
        return packed


class _LayoutRowsAsFloats(MegatronLike):
    def unpack(self, layout: Layout, rows: IntArray, lengths: Sequence[int]) -> Any:
        return [sample.astype(np.float32) for sample in super().unpack(layout, rows, lengths)]


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="layout-remainder-dropped",
        summary="Samples that do not fill a microbatch are left out.",
        refs=("AReno#524",),
        kind="layouts",
        make=_LayoutRemainderDropped,
        only=("microbatches",),
        detected_by=("layout.microbatches",),
    ),
    KnownBug(
        id="layout-long-sample-dropped",
        summary="A sample that is longer than a microbatch is left out.",
        refs=("own",),
        kind="layouts",
        make=_LayoutLongSampleDropped,
        only=("microbatches",),
        detected_by=("layout.microbatches",),
    ),
    KnownBug(
        id="layout-permutation-applied-twice",
        summary=(
            "Values of microbatches are restored by the permutation that divided them instead of"
            " its inverse."
        ),
        refs=("cf. verl restore_dynamic_batch", "SkyRL#1908"),
        kind="layouts",
        make=_LayoutPermutationAppliedTwice,
        only=("restore",),
        detected_by=("layout.restore",),
    ),
    KnownBug(
        id="layout-balanced-without-routes",
        summary="Tokens are sorted by length before they are split over ranks; routes are not.",
        refs=("SkyRL#1908", "AReno#524"),
        kind="layouts",
        make=_LayoutBalancedWithoutRoutes,
        only=("divide",),
        detected_by=("layout.samples",),
    ),
    KnownBug(
        id="layout-padding-samples-apart",
        summary=(
            "Samples that do not divide over ranks are padded by the tokens of the first ones,"
            " and by the routes of the last ones."
        ),
        refs=("cf. SkyRL#1908",),
        kind="layouts",
        make=_LayoutPaddingSamplesApart,
        only=("divide",),
        detected_by=("layout.samples",),
    ),
    KnownBug(
        id="layout-filtered-without-routes",
        summary="A filter drops samples from the tokens, and not from the routes.",
        refs=("SkyRL#1908", "verl#6089"),
        kind="layouts",
        make=_LayoutFilteredWithoutRoutes,
        only=("keep",),
        detected_by=("layout.samples",),
    ),
    KnownBug(
        id="layout-ids-in-eight-bits",
        summary="Expert ids are stored in eight bits, with 257 experts and more.",
        refs=("verl#7407", "ms-swift#9981", "prime-rl#3051"),
        kind="layouts",
        make=_LayoutIdsInEightBits,
        only=("compact",),
        detected_by=("layout.expert-ids",),
    ),
    KnownBug(
        id="layout-signed-ids",
        summary="Expert ids of up to 160 experts are stored in a signed byte, which holds 128.",
        refs=("own",),
        kind="layouts",
        make=_LayoutSignedIds,
        only=("compact",),
        detected_by=("layout.expert-ids",),
    ),
    KnownBug(
        id="layout-bytes-taken-for-ids",
        summary="The bytes of 16-bit ids are read as ids.",
        refs=("cf. verl merge_router_topk_indices",),
        kind="layouts",
        make=_LayoutBytesTakenForIds,
        only=("compact",),
        detected_by=("layout.expert-ids",),
    ),
    KnownBug(
        id="layout-segments-concatenated",
        summary=(
            "Each call of a resumed sample returns all rows so far, and the arrays are"
            " concatenated."
        ),
        refs=("verl#6029", "AReaL remote_inf_engine.py"),
        kind="layouts",
        make=_LayoutSegmentsConcatenated,
        only=("join",),
        detected_by=("layout.segments",),
    ),
    KnownBug(
        id="layout-segments-replaced",
        summary=(
            "The rows of the last call replace all earlier ones, which other weights sampled."
        ),
        refs=("verl#6046", "miles#3277"),
        kind="layouts",
        make=_LayoutSegmentsReplaced,
        only=("join",),
        detected_by=("layout.segments",),
    ),
    KnownBug(
        id="layout-writes-payload",
        summary="Packing changes the payload, which other ranks and passes use again.",
        refs=("verl#5519",),
        kind="layouts",
        make=_LayoutWritesPayload,
        only=("pack",),
        detected_by=("layout.input",),
    ),
    KnownBug(
        id="layout-rows-as-floats",
        summary="Unpacked ids are floats.",
        refs=("cf. verl#7158",),
        kind="layouts",
        make=_LayoutRowsAsFloats,
        only=("unpack",),
        detected_by=("layout.returns",),
    ),
)
