"""Known bugs of layouts: final rows, padding, packing, alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rollproof.core.records import IntArray
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike, Pair
from rollproof.layouts.layout import Layout
from rollproof.layouts.padding import Alignment, Fill, Side

__all__ = ["BUGS"]

_PLAIN = MegatronLike.layout


class _LayoutRoutesShifted(MegatronLike):
    def pair(self, layout: Layout, tokens: IntArray, routes: IntArray) -> Pair:
        fed, rows = super().pair(layout, tokens, routes)
        # labels and logprobs belong to the next token, routes to the token itself
        return fed, np.roll(rows, -1, axis=0)


class _LayoutFinalRowRepeated(MegatronLike):
    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        completed = super().complete(layout, routes, tokens)
        if len(routes):
            # the filler looks like a captured row
            completed[len(routes) :] = routes[-1]
        return completed


class _LayoutFinalRowInFront(MegatronLike):
    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        completed = super().complete(layout, routes, tokens)
        return np.roll(completed, tokens - len(routes), axis=0)


class _LayoutZeroPadding(MegatronLike):
    def filler(self, layout: Layout, rows: int, shape: tuple[int, ...]) -> IntArray:
        # all padding goes to expert 0, which overloads it
        return np.zeros((rows, *shape), dtype=np.int64)


class _LayoutPaddingOnFewExperts(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, fill=Fill.SPREAD)

    def fill(self, layout: Layout, rows: int) -> IntArray:
        return super().fill(replace(layout, fill=Fill.ARANGE), rows)


class _LayoutMisfitsCutAndFilled(MegatronLike):
    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        cut = routes[:tokens]
        return np.concatenate([cut, self.filler(layout, tokens - len(cut), routes.shape[1:])])


class _LayoutMaskDropped(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, packed=False, side=Side.LEFT)

    def unpad(self, layout: Layout, batch: IntArray, attention: IntArray) -> list[IntArray]:
        # the first rows of a line are padding
        return [line[: int(mask.sum())] for line, mask in zip(batch, attention, strict=True)]


class _LayoutPaddedOnTheRight(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, packed=False, side=Side.LEFT)

    def pad(self, layout: Layout, samples: Sequence[IntArray], prompts: Sequence[int]) -> Pair:
        return super().pad(replace(layout, side=Side.RIGHT), samples, prompts)


class _LayoutPackedWithoutAlignment(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        # context parallelism needs sequences that divide by 2 * cp
        return super().pack(replace(layout, alignment=Alignment()), samples)


class _LayoutAlignedByTensorSize(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(replace(layout, alignment=Alignment(by=("tp",))), samples)


class _LayoutAlignedByDataSize(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, alignment=Alignment(by=("tp",)))

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(replace(layout, alignment=Alignment(constant=layout.mesh.dp)), samples)


class _LayoutTotalNotAligned(MegatronLike):
    layout: ClassVar[Layout] = replace(
        _PLAIN, alignment=Alignment(by=("tp", "2cp"), constant=16, total=128, total_scales=True)
    )

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(
            replace(layout, alignment=Alignment(by=("tp", "2cp"), constant=16)), samples
        )


class _LayoutPaddingBehindTheLast(MegatronLike):
    """Puts all padding after the last sequence, against the cumulative lengths."""

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        rows, cumulative = super().pack(layout, samples)
        tight = np.concatenate(samples)
        return (
            np.concatenate([tight, self.filler(layout, len(rows) - len(tight), rows.shape[1:])]),
            cumulative,
        )


BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="layout-routes-shifted",
        summary="Routes are shifted by one place, as labels and logprobs are.",
        refs=("slime#1045",),
        kind="layouts",
        make=_LayoutRoutesShifted,
        only=("pair",),
        detected_by=("layout.no-shift",),
    ),
    KnownBug(
        id="layout-final-row-repeated",
        summary="The last token gets the row of the token before it.",
        refs=("slime#1045", "cf. verl#6473"),
        kind="layouts",
        make=_LayoutFinalRowRepeated,
        only=("complete",),
        detected_by=("layout.final-row",),
    ),
    KnownBug(
        id="layout-final-row-in-front",
        summary="The missing row is added in front of the captured ones.",
        refs=("slime#1052",),
        kind="layouts",
        make=_LayoutFinalRowInFront,
        only=("complete",),
        detected_by=("layout.final-row",),
    ),
    KnownBug(
        id="layout-zero-padding",
        summary="Padding rows contain zeros: expert 0, k times.",
        refs=("slime#941", "verl#4986", "SkyRL#1908", "verl#7524"),
        kind="layouts",
        make=_LayoutZeroPadding,
        only=("complete", "fill", "targets", "context"),
        detected_by=("layout.padding-rows", "layout.final-row"),
    ),
    KnownBug(
        id="layout-padding-on-few-experts",
        summary="Padding rows are declared to be spread, but all go to the first experts.",
        refs=("verl#7524", "prime-rl#3350"),
        kind="layouts",
        make=_LayoutPaddingOnFewExperts,
        only=("fill",),
        detected_by=("layout.padding-rows",),
    ),
    KnownBug(
        id="layout-misfits-cut-and-filled",
        summary="Rows beyond the tokens are cut and missing ones are filled, silently.",
        refs=("verl#6089", "ROLL functionals.py", "verl#7841"),
        kind="layouts",
        make=_LayoutMisfitsCutAndFilled,
        only=("complete",),
        detected_by=("layout.refuses",),
    ),
    KnownBug(
        id="layout-mask-dropped",
        summary="Unpadding takes the first rows of a line, although the padding is on the left.",
        refs=("SkyRL#1908",),
        kind="layouts",
        make=_LayoutMaskDropped,
        only=("unpad",),
        detected_by=("layout.unpadding",),
    ),
    KnownBug(
        id="layout-padded-on-the-right",
        summary="Routes are padded on the right, tokens on the left.",
        refs=("slime#1052",),
        kind="layouts",
        make=_LayoutPaddedOnTheRight,
        only=("pad",),
        detected_by=("layout.padding",),
    ),
    KnownBug(
        id="layout-packed-without-alignment",
        summary="Sequences are packed without the padding between them.",
        refs=("slime#1052",),
        kind="layouts",
        make=_LayoutPackedWithoutAlignment,
        only=("pack",),
        detected_by=("layout.alignment",),
    ),
    KnownBug(
        id="layout-padding-behind-the-last",
        summary="The padding of all sequences is after the last one.",
        refs=("slime#1052", "SkyRL#1908"),
        kind="layouts",
        make=_LayoutPaddingBehindTheLast,
        only=("pack",),
        detected_by=("layout.packing",),
    ),
    KnownBug(
        id="layout-aligned-by-tensor-size",
        summary=("Sequences are aligned to the tensor-parallel size, not to 2 * cp times it."),
        refs=("slime#1052", "miles#465"),
        kind="layouts",
        make=_LayoutAlignedByTensorSize,
        only=("pack",),
        detected_by=("layout.alignment",),
    ),
    KnownBug(
        id="layout-aligned-by-data-size",
        summary=(
            "Sequences are aligned to the data-parallel size, not to the tensor-parallel one."
        ),
        refs=("miles#496", "miles#551"),
        kind="layouts",
        make=_LayoutAlignedByDataSize,
        only=("pack",),
        detected_by=("layout.alignment",),
    ),
    KnownBug(
        id="layout-total-not-aligned",
        summary="Each sequence is aligned for FP8, but the sum of all is not.",
        refs=("cf. verl preprocess_packed_seqs", "cf. slime#1052"),
        kind="layouts",
        make=_LayoutTotalNotAligned,
        only=("pack",),
        detected_by=("layout.alignment",),
    ),
)
