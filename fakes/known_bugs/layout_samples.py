"""Known bugs of layouts, samples: microbatches, splits, filters, resumed samples, ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollproof.core.records import IntArray, Version
from rollproof.fakes.known_bugs._layout_runner import layout_bug
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_layouts import MegatronLike, Pair
from rollproof.layouts.layout import Layout
from rollproof.layouts.merging import Segment

__all__ = ["BUGS"]

_PLAIN = MegatronLike.layout


class _DropsRemainder(MegatronLike):
    def microbatches(self, layout: Layout, lengths: Sequence[int], most: int) -> list[list[int]]:
        made = super().microbatches(layout, lengths, most)
        return made[:-1] if len(made) > 1 else made


class _AppliesTwice(MegatronLike):
    def restore(
        self, layout: Layout, values: Sequence[Sequence[IntArray]], indexes: Sequence[Sequence[int]]
    ) -> list[IntArray]:
        flat = [value for part in values for value in part]
        return [flat[i] for part in indexes for i in part]


class _BalancesTokens(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Pair], parts: int) -> list[list[Pair]]:
        order = sorted(range(len(samples)), key=lambda i: -len(samples[i][0]))
        mixed = [(samples[i][0], samples[place][1]) for place, i in enumerate(order)]
        return [mixed[part::parts] for part in range(parts)]


class _PadsApart(MegatronLike):
    def divide(self, layout: Layout, samples: Sequence[Pair], parts: int) -> list[list[Pair]]:
        lacking = -len(samples) % parts
        padding = [
            (first[0], last[1])
            for first, last in zip(
                samples[:lacking], samples[len(samples) - lacking :], strict=True
            )
        ]
        whole = [*samples, *padding]
        return [whole[part::parts] for part in range(parts)]


class _FiltersTokens(MegatronLike):
    def keep(self, layout: Layout, samples: Sequence[Pair], kept: Sequence[int]) -> list[Pair]:
        return [(samples[i][0], samples[place][1]) for place, i in enumerate(kept)]


class _EightBits(MegatronLike):
    def compact(self, layout: Layout, ids: IntArray) -> IntArray:
        return ids.astype(np.uint8)


class _BytesAsIds(MegatronLike):
    def compact(self, layout: Layout, ids: IntArray) -> IntArray:
        return ids.astype(np.int16).view(np.uint8)


class _Concatenates(MegatronLike):
    def join(self, layout: Layout, segments: Sequence[Segment]) -> tuple[IntArray, list[Version]]:
        return np.concatenate([segment.routes for segment in segments]), [
            s.version for s in segments for _ in s.routes
        ]


class _KeepsLastCall(MegatronLike):
    def join(self, layout: Layout, segments: Sequence[Segment]) -> tuple[IntArray, list[Version]]:
        return segments[-1].routes, [segments[-1].version] * len(segments[-1].routes)


class _WritesInput(MegatronLike):
    def pack(self, layout: Layout, samples: Sequence[IntArray]) -> Pair:
        packed = super().pack(layout, samples)
        for sample in samples:
            sample -= 1
        return packed


class _FloatPack(MegatronLike):
    def unpack(self, layout: Layout, rows: IntArray, lengths: Sequence[int]) -> Any:
        return [sample.astype(np.float32) for sample in super().unpack(layout, rows, lengths)]


BUGS: tuple[KnownBug, ...] = (
    layout_bug(
        "remainder-dropped",
        "Samples that do not fill a microbatch are left out.",
        ("AReno#524",),
        _DropsRemainder,
        "microbatches",
        "microbatches",
    ),
    layout_bug(
        "permutation-applied-twice",
        "Values of microbatches are put back by the permutation that divided them, not by its"
        " inverse.",
        ("cf. verl restore_dynamic_batch", "SkyRL#1908"),
        _AppliesTwice,
        "restore",
        "restore",
    ),
    layout_bug(
        "balanced-without-routes",
        "Tokens are sorted by length before they are split over ranks, routes are not.",
        ("SkyRL#1908", "AReno#524"),
        _BalancesTokens,
        "divide",
        "samples",
    ),
    layout_bug(
        "padding-samples-apart",
        "Samples that do not divide over ranks are padded by the tokens of the first ones, and by"
        " the routes of the last ones.",
        ("cf. SkyRL#1908",),
        _PadsApart,
        "divide",
        "samples",
    ),
    layout_bug(
        "filtered-without-routes",
        "A filter drops samples from the tokens, and not from the routes.",
        ("SkyRL#1908", "verl#6089"),
        _FiltersTokens,
        "keep",
        "samples",
    ),
    layout_bug(
        "ids-in-eight-bits",
        "Expert ids are kept in eight bits, with 257 experts and more.",
        ("verl#7407", "ms-swift#9981", "prime-rl#3051"),
        _EightBits,
        "compact",
        "expert-ids",
    ),
    layout_bug(
        "bytes-taken-for-ids",
        "The bytes in which 16-bit ids travel are taken for ids.",
        ("cf. verl merge_router_topk_indices",),
        _BytesAsIds,
        "compact",
        "expert-ids",
    ),
    layout_bug(
        "segments-concatenated",
        "Each call of a resumed sample returns all rows so far, and they are put behind each"
        " other.",
        ("verl#6029", "AReaL remote_inf_engine.py"),
        _Concatenates,
        "join",
        "segments",
    ),
    layout_bug(
        "segments-replaced",
        "The rows of the last call replace all earlier ones, which other weights sampled.",
        ("verl#6046", "miles#3277"),
        _KeepsLastCall,
        "join",
        "segments",
    ),
    layout_bug(
        "writes-payload",
        "Packing changes the payload, which other ranks and passes use again.",
        ("verl#5519",),
        _WritesInput,
        "pack",
        "input",
    ),
    layout_bug(
        "rows-as-floats",
        "Unpacked ids are floats.",
        ("cf. verl#7158",),
        _FloatPack,
        "unpack",
        "returns",
    ),
)
"""Known bugs of samples."""
