"""Collating: a correct conversion of finished samples into a padded training batch, with one small
step per field.

Prompts are padded on the left and responses on the right, as verl and SkyRL do, so that all
responses begin at one place. Like ``resuming``, it is written to be read and to be broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import (
    Contract,
    Filler,
    KvPolicy,
    LayerAxis,
    Logprobs,
    MissingLogprobs,
    Provenance,
    ResumeBy,
    Rows,
    Versions,
)
from rollproof.core.records import BatchRow, IntArray, LogprobArray, Rollout

__all__ = ["CollatedBatch", "Collator"]

_A = TypeVar("_A", bound="npt.NDArray[Any]")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CollatedBatch:
    """``tokens``, ``attention``, ``loss_mask`` and ``logprobs`` are ``(samples, places)``;
    ``routes`` is ``(samples, places, layers, top_k)`` and ``routed`` ``(samples, places)``, both
    ``None`` where no sample has routes.
    """

    ids: tuple[str, ...]
    tokens: IntArray
    attention: IntArray
    loss_mask: IntArray
    logprobs: LogprobArray
    routes: IntArray | None
    routed: IntArray | None


class Collator:
    """A ``BatchSubject``. Raises ``ValueError`` for samples whose fields have lengths that do not
    fit each other.
    """

    contract: Contract = Contract(
        rows=Rows.FORWARDED,
        resume=ResumeBy.CLIENT,
        versions=Versions.MIN_MAX,
        logprobs=Logprobs.RAW,
        missing_logprobs=MissingLogprobs.MASKED,
        loss_mask=True,
        abort_surfaces=True,
        kv_policy=KvPolicy.RECOMPUTE,
        layer_axis=LayerAxis.ALL,
        num_layers=3,
        moe_layers=(0, 1, 2),
        num_experts=300,
        top_k=2,
        filler=Filler.MINUS_ONE,
        dtype="int16",
        provenance=Provenance.AS_SAMPLED,
    )

    def collate(self, samples: list[Rollout]) -> CollatedBatch:
        """Every sample becomes a row, in order."""
        for sample in samples:
            self.check(sample)
        self.left: int = max(len(sample.prompt_ids) for sample in samples)
        self.width: int = self.left + max(len(sample.response_ids) for sample in samples)
        has_routes = self.has_routes(samples)
        return CollatedBatch(
            ids=tuple(sample.request_id for sample in samples),
            tokens=np.stack([self.tokens(sample) for sample in samples]),
            attention=np.stack([self.attention(sample) for sample in samples]),
            loss_mask=np.stack([self.loss_mask(sample) for sample in samples]),
            logprobs=np.stack([self.logprobs(sample) for sample in samples]),
            routes=np.stack([self.routes(sample) for sample in samples]) if has_routes else None,
            routed=np.stack([self.routed(sample) for sample in samples]) if has_routes else None,
        )

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        """The rows of the batch, one per sample."""
        return [
            BatchRow(
                request_id=name,
                token_ids=batch.tokens[i],
                attention=batch.attention[i],
                loss_mask=batch.loss_mask[i],
                logprobs=batch.logprobs[i],
                routes=None if batch.routes is None else batch.routes[i],
                routed=None if batch.routed is None else batch.routed[i],
            )
            for i, name in enumerate(batch.ids)
        ]

    # Each field of one sample

    def check(self, sample: Rollout) -> None:
        """Refuse a sample whose fields do not fit its tokens."""
        response = len(sample.response_ids)
        wanted = {"logprobs": {response}, "loss_mask": {response}, "routes": {sample.total - 1}}
        for name, lengths in wanted.items():
            value = getattr(sample, name)
            if value is not None and len(value) not in lengths and response:
                raise ValueError(
                    f"{sample.request_id}: {len(value)} {name} for {sample.total} tokens,"
                    f" {response} of them sampled."
                )

    def start(self, sample: Rollout) -> int:
        """The place of the sample's first token."""
        return self.left - len(sample.prompt_ids)

    def tokens(self, sample: Rollout) -> IntArray:
        """``(places,)``: padding is token 0."""
        return _place(
            np.zeros(self.width, dtype=np.int64),
            self.start(sample),
            [*sample.prompt_ids, *sample.response_ids],
        )

    def attention(self, sample: Rollout) -> IntArray:
        """``(places,)``: 1 where a token of the sample stands."""
        return _place(
            np.zeros(self.width, dtype=np.int64), self.start(sample), np.ones(sample.total)
        )

    def loss_mask(self, sample: Rollout) -> IntArray:
        """``(places,)``: 1 where the loss counts."""
        mask = np.ones(len(sample.response_ids)) if sample.loss_mask is None else sample.loss_mask
        return _place(np.zeros(self.width, dtype=np.int64), self.left, mask)

    def logprobs(self, sample: Rollout) -> LogprobArray:
        """``(places,)``: NaN where there is none."""
        values = (
            np.full(len(sample.response_ids), np.nan)
            if sample.logprobs is None
            else sample.logprobs
        )
        return _place(np.full(self.width, np.nan), self.left, values)

    def has_routes(self, samples: list[Rollout]) -> bool:
        """Whether the batch has a field for routes."""
        return any(sample.routes is not None for sample in samples)

    def routes(self, sample: Rollout) -> IntArray:
        """``(places, layers, top_k)``: -1 where no row was captured."""
        empty = np.full(
            (self.width, self.contract.route_layers, self.contract.top_k or 1), -1, dtype=np.int16
        )
        return empty if sample.routes is None else _place(empty, self.start(sample), sample.routes)

    def routed(self, sample: Rollout) -> IntArray:
        """``(places,)``: 1 where a row was captured."""
        count = 0 if sample.routes is None else len(sample.routes)
        return _place(np.zeros(self.width, dtype=np.int64), self.start(sample), np.ones(count))


def _place(row: _A, start: int, values: npt.ArrayLike) -> _A:
    """Write ``values`` into ``row`` from ``start`` on; returns ``row``."""
    row[start : start + len(np.asarray(values))] = values
    return row
