"""Known bugs of layouts, rows: final rows, padding, packing, alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rollproof.core.records import IntArray
from rollproof.fakes.known_bugs._layout_runner import layout_bug
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike, Pair
from rollproof.layouts.layout import Layout
from rollproof.layouts.packing import Alignment
from rollproof.layouts.padding import Fill, Side

__all__ = ["BUGS"]

_PLAIN = MegatronLike.layout


class _ShiftedRoutes(MegatronLike):
    def pair(self, layout: Layout, tokens: IntArray, routes: IntArray) -> Pair:
        fed, rows = super().pair(layout, tokens, routes)
        return fed, np.roll(rows, -1, axis=0)


class _RepeatsLastRow(MegatronLike):
    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        whole = super().complete(layout, routes, tokens)
        if len(routes):
            whole[len(routes) :] = routes[-1]
        return whole


class _FillerInFront(MegatronLike):
    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        whole = super().complete(layout, routes, tokens)
        return np.roll(whole, tokens - len(routes), axis=0)


class _ZeroFiller(MegatronLike):
    def filler(self, layout: Layout, rows: int, shape: tuple[int, ...]) -> IntArray:
        return np.zeros((rows, *shape), dtype=np.int64)


class _SameExperts(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, fill=Fill.SPREAD)

    def fill(self, layout: Layout, rows: int) -> IntArray:
        return super().fill(replace(layout, fill=Fill.ARANGE), rows)


class _CutsAndFills(MegatronLike):
    def complete(self, layout: Layout, routes: IntArray, tokens: int) -> IntArray:
        cut = routes[:tokens]
        return np.concatenate([cut, self.filler(layout, tokens - len(cut), routes.shape[1:])])


class _IgnoresMask(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, packed=False, side=Side.LEFT)

    def unpad(self, layout: Layout, batch: IntArray, attention: IntArray) -> list[IntArray]:
        return [line[: int(mask.sum())] for line, mask in zip(batch, attention, strict=True)]


class _PadsRight(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, packed=False, side=Side.LEFT)

    def pad(self, layout: Layout, samples: Sequence[IntArray], prompts: Sequence[int]) -> Pair:
        return super().pad(replace(layout, side=Side.RIGHT), samples, prompts)


class _PacksTightly(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(replace(layout, alignment=Alignment()), samples)


class _AlignsByTensorSize(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(replace(layout, alignment=Alignment(by=("tp",))), samples)


class _AlignsByDataSize(MegatronLike):
    layout: ClassVar[Layout] = replace(_PLAIN, alignment=Alignment(by=("tp",)))

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(replace(layout, alignment=Alignment(constant=layout.mesh.dp)), samples)


class _ForgetsTotal(MegatronLike):
    layout: ClassVar[Layout] = replace(
        _PLAIN, alignment=Alignment(by=("tp", "2cp"), constant=16, total=128, total_scales=True)
    )

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        return super().pack(
            replace(layout, alignment=Alignment(by=("tp", "2cp"), constant=16)), samples
        )


class _LinesWithoutPadding(MegatronLike):
    """All padding stands behind the last sequence, beside cumulative lengths that say otherwise."""

    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        rows, cumulative = super().pack(layout, samples)
        tight = np.concatenate(samples)
        return (
            np.concatenate([tight, self.filler(layout, len(rows) - len(tight), rows.shape[1:])]),
            cumulative,
        )


BUGS: tuple[KnownBug, ...] = (
    layout_bug(
        "routes-shifted",
        "Routes are shifted by one place, as labels and logprobs are.",
        ("slime#1045",),
        _ShiftedRoutes,
        "pair",
        "no-shift",
    ),
    layout_bug(
        "final-row-repeated",
        "The last token is given the row of the token before it.",
        ("slime#1045", "cf. verl#6473"),
        _RepeatsLastRow,
        "complete",
        "final-row",
    ),
    layout_bug(
        "final-row-in-front",
        "The missing row is added in front of the captured ones.",
        ("slime#1052",),
        _FillerInFront,
        "complete",
        "final-row",
    ),
    layout_bug(
        "zero-padding",
        "Rows of no token hold zeros: expert 0, k times.",
        ("slime#941", "verl#4986", "SkyRL#1908", "verl#7524"),
        _ZeroFiller,
        "complete fill targets context",
        "padding-rows",
        "final-row",
    ),
    layout_bug(
        "padding-on-few-experts",
        "Padding rows are declared to be spread, and all go to the first experts.",
        ("verl#7524", "prime-rl#3350"),
        _SameExperts,
        "fill",
        "padding-rows",
    ),
    layout_bug(
        "misfits-cut-and-filled",
        "Rows beyond the tokens are cut, and missing ones filled, in silence.",
        ("verl#6089", "ROLL functionals.py", "verl#7841"),
        _CutsAndFills,
        "complete",
        "refuses",
    ),
    layout_bug(
        "mask-dropped",
        "Unpadding takes the first rows of a line, and the padding is on the left.",
        ("SkyRL#1908",),
        _IgnoresMask,
        "unpad",
        "unpadding",
    ),
    layout_bug(
        "padded-on-the-right",
        "Routes are padded on the right, tokens on the left.",
        ("slime#1052",),
        _PadsRight,
        "pad",
        "padding",
    ),
    layout_bug(
        "packed-without-alignment",
        "Sequences are packed without the padding between them.",
        ("slime#1052",),
        _PacksTightly,
        "pack",
        "alignment",
    ),
    layout_bug(
        "padding-behind-the-last",
        "The padding of all sequences stands behind the last one.",
        ("slime#1052", "SkyRL#1908"),
        _LinesWithoutPadding,
        "pack",
        "packing",
    ),
    layout_bug(
        "aligned-by-tensor-size",
        "Sequences are aligned to the tensor-parallel size, not to 2 * cp times it.",
        ("slime#1052", "miles#465"),
        _AlignsByTensorSize,
        "pack",
        "alignment",
    ),
    layout_bug(
        "aligned-by-data-size",
        "Sequences are aligned to the data-parallel size, not to the tensor-parallel one.",
        ("miles#496", "miles#551"),
        _AlignsByDataSize,
        "pack",
        "alignment",
    ),
    layout_bug(
        "total-not-aligned",
        "Each sequence is aligned for FP8, and the sum of all is not.",
        ("cf. verl preprocess_packed_seqs", "cf. slime#1052"),
        _ForgetsTotal,
        "pack",
        "alignment",
    ),
)
"""Known bugs of rows."""
