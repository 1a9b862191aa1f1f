"""Known bugs of conversions, as released stacks have or had them: fields that padding, splitting,
merging and balancing tear apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollproof.core.records import BatchRow, IntArray, LogprobArray, Rollout
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_batches import Collator, PaddedBatch
from rollproof.verification.batches import record_batches

__all__ = ["BUGS"]


class _EndAligned(Collator):
    """Fields of the response stand at its end, whatever their length."""

    def check(self, sample: Rollout) -> None:
        """None is looked at."""

    def logprobs(self, sample: Rollout) -> LogprobArray:
        values, count = sample.logprobs, len(sample.response_ids)
        if values is None or len(values) >= count:
            return super().logprobs(
                replace(sample, logprobs=None if values is None else values[:count])
            )
        return super().logprobs(
            replace(sample, logprobs=np.concatenate([np.zeros(count - len(values)), values]))
        )

    def loss_mask(self, sample: Rollout) -> IntArray:
        mask, count = sample.loss_mask, len(sample.response_ids)
        if mask is None:
            return super().loss_mask(sample)
        return super().loss_mask(
            replace(
                sample,
                loss_mask=np.concatenate(
                    [np.zeros(max(0, count - len(mask)), dtype=np.int64), mask[:count]]
                ),
            )
        )

    def routes(self, sample: Rollout) -> IntArray:
        return super().routes(
            sample
            if sample.routes is None
            else replace(sample, routes=sample.routes[: sample.total])
        )

    def routed(self, sample: Rollout) -> IntArray:
        return super().routed(
            sample
            if sample.routes is None
            else replace(sample, routes=sample.routes[: sample.total])
        )


class _ZeroesMissing(Collator):
    """A sample without routes gets rows of zeros, which count as captured."""

    def routes(self, sample: Rollout) -> IntArray:
        return super().routes(self._made_up(sample))

    def routed(self, sample: Rollout) -> IntArray:
        return super().routed(self._made_up(sample))

    def _made_up(self, sample: Rollout) -> Rollout:
        if sample.routes is not None or not sample.response_ids:
            return sample
        shape = (sample.total - 1, self.contract.route_layers, self.contract.top_k or 1)
        return replace(sample, routes=np.zeros(shape, dtype=np.int16))


class _PartEdited(Collator):
    """``edited`` changes the rows of a batch after the conversion."""

    def rows(self, batch: PaddedBatch) -> list[BatchRow]:
        return self.edited(super().rows(batch))

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        raise NotImplementedError(f"{type(self).__name__} must say what it does to the rows")


class _SecondShardWithoutRoutes(_PartEdited):
    """Two shards are merged by the fields of the first; the routes of the second are lost on the
    way.
    """

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        half = (len(rows) + 1) // 2
        return [*rows[:half], *(replace(row, routes=None, routed=None) for row in rows[half:])]


def _by_length(rows: Iterable[BatchRow]) -> list[int]:
    """The order in which a balancer takes rows: the longest first."""
    lengths = [int(np.sum(row.attention)) for row in rows]
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


class _BalancedApart(_PartEdited):
    """Rows are balanced over the ranks by length, and ``field`` stays in the order of the samples."""

    field = "logprobs"

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        changes: list[dict[str, Any]] = [
            {self.field: getattr(rows[i], self.field)} for i in range(len(rows))
        ]
        return [
            replace(rows[i], **change) for i, change in zip(_by_length(rows), changes, strict=True)
        ]


class _RoutesBalancedApart(_BalancedApart):
    field = "routes"


class _MaskOfAnother(_PartEdited):
    """A filter zeroes the mask of the sample beside the one that it means."""

    def edited(self, rows: list[BatchRow]) -> list[BatchRow]:
        if len(rows) < 2 or rows[1].loss_mask is None:
            return rows
        return [rows[0], replace(rows[1], loss_mask=np.zeros_like(rows[1].loss_mask)), *rows[2:]]


class _ZigzagKept(Collator):
    """Rows were divided in zigzag over two context ranks, and put together as if each rank had one
    stretch.
    """

    def routes(self, sample: Rollout) -> IntArray:
        rows = sample.routes
        if rows is None:
            return super().routes(sample)
        parts = np.array_split(np.arange(len(rows)), 4)
        return super().routes(
            replace(sample, routes=rows[np.concatenate([parts[0], parts[3], parts[1], parts[2]])])
        )


class _TrainsOnMissing(Collator):
    """A logprob that is missing becomes 0.0, and its token is trained on."""

    def logprobs(self, sample: Rollout) -> LogprobArray:
        return super().logprobs(
            sample
            if sample.logprobs is None
            else replace(sample, logprobs=np.nan_to_num(sample.logprobs))
        )

    def loss_mask(self, sample: Rollout) -> IntArray:
        if sample.loss_mask is None or sample.logprobs is None:
            return super().loss_mask(sample)
        return super().loss_mask(
            replace(sample, loss_mask=np.where(np.isnan(sample.logprobs), 1, sample.loss_mask))
        )


class _TrainsOnPrompt(Collator):
    """The mask begins at the last prompt token: labels and tokens are mixed up."""

    def loss_mask(self, sample: Rollout) -> IntArray:
        mask = super().loss_mask(sample)
        mask[self.left - 1] = 1
        return mask


def _bug(
    name: str,
    summary: str,
    refs: tuple[str, ...],
    make: type[Collator],
    *kills: str,
    also: tuple[str, ...] = (),
) -> KnownBug:
    return KnownBug(
        id=name,
        summary=summary,
        refs=refs,
        record=partial(record_batches, make, name=name),
        kills=kills,
        also=also,
    )


BUGS: tuple[KnownBug, ...] = (
    _bug(
        "batch-aligned-with-end",
        "Logprobs and masks that are too short are aligned with the end of the response.",
        ("SkyRL preprocess.py (0.3.0, 0.4.0)",),
        _EndAligned,
        "batch.refuses",
    ),
    _bug(
        "batch-missing-routes-made-up",
        "A sample without routes gets expert 0, top_k times, in every row, marked as captured.",
        ("SkyRL preprocess.py (0.3.0)", "cf. SkyRL#1908"),
        _ZeroesMissing,
        "batch.mixed",
    ),
    _bug(
        "batch-merge-loses-routes",
        "The shards of two ranks are merged, and the routes of the second are lost.",
        ("AReno#524",),
        _SecondShardWithoutRoutes,
        "batch.mixed",
        also=("batch.routes",),
    ),
    _bug(
        "batch-logprobs-balanced-apart",
        "Samples are balanced over the ranks by length, and their logprobs stay in the old order.",
        ("cf. slime utils/data.py (local_raw_reward)",),
        _BalancedApart,
        "batch.logprobs",
    ),
    _bug(
        "batch-routes-balanced-apart",
        "Samples are balanced over the ranks by length, and their routes stay in the old order.",
        ("cf. AReno#524", "cf. miles#496"),
        _RoutesBalancedApart,
        "batch.routes",
    ),
    _bug(
        "batch-filter-hits-neighbour",
        "A filter zeroes the loss mask of the sample beside the one that it means.",
        ("cf. slime#2124", "cf. SkyRL generators/utils.py (apply_overlong_filtering)"),
        _MaskOfAnother,
        "batch.loss-mask",
    ),
    _bug(
        "batch-zigzag-not-undone",
        "Rows that were divided in zigzag over context ranks are put together one rank after the"
        " other.",
        ("slime#2175",),
        _ZigzagKept,
        "batch.routes",
    ),
    _bug(
        "batch-missing-logprob-trained",
        "A logprob that is missing becomes 0.0, a probability of 1, and its token is trained on.",
        ("OpenRLHF agent.py (0.11.2)", "vime#70"),
        _TrainsOnMissing,
        "batch.loss-mask",
        also=("batch.logprobs",),
    ),
    _bug(
        "batch-prompt-trained",
        "The loss mask begins one token early, on the last token of the prompt.",
        ("cf. verl#3805",),
        _TrainsOnPrompt,
        "batch.loss-mask",
    ),
)
"""Known bugs of conversions."""
