"""A correct conversion of finished samples into a padded training batch, one method a field.

Prompts are padded on the left and responses on the right, as in verl and SkyRL, so that all
responses begin at the same place. Known bugs override its methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rollproof.core.batch_columns import Column, ColumnExtent
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
from rollproof.core.records import (
    BatchRow,
    ColumnArray,
    IntArray,
    LogprobArray,
    Rollout,
    Scalar,
)
from rollproof.core.sampling_masks import SamplingMask

__all__ = ["CollatedBatch", "Collator", "ColumnCollator", "MaskCollator"]

_A = TypeVar("_A", bound="npt.NDArray[Any]")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CollatedBatch:
    """A padded batch.

    tokens, attention, loss_mask, logprobs: ``(samples, places)``.
    routes: ``(samples, places, layers, top_k)``; ``None`` if no sample has routes.
    routed: ``(samples, places)``, 1 at captured rows; ``None`` if no sample has routes.
    columns: ``(samples, places)`` each: the further columns by name.
    values: the further values of each sample by name.
    masks: the sampling masks of each line; ``None`` for a sample without any.
    """

    ids: tuple[str, ...]
    tokens: IntArray
    attention: IntArray
    loss_mask: IntArray
    logprobs: LogprobArray
    routes: IntArray | None
    routed: IntArray | None
    columns: Mapping[str, ColumnArray] = field(default_factory=dict)
    values: tuple[Mapping[str, Scalar], ...] = ()
    masks: tuple[SamplingMask | None, ...] = ()


class Collator:
    """A ``BatchSubject``; raises ``ValueError`` if the fields of a sample do not fit its tokens."""

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
        """Return a batch with one row for each sample, in order."""
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
            columns={
                column.name: np.stack([self.column(sample, column) for sample in samples])
                for column in self.contract.columns
                if column.extent.placed
            },
            values=tuple(self.values(sample) for sample in samples),
            masks=tuple(self.sampling_mask(sample) for sample in samples),
        )

    def rows(self, batch: CollatedBatch) -> list[BatchRow]:
        """Return the rows of the batch, one for each sample."""
        return [
            BatchRow(
                request_id=name,
                token_ids=batch.tokens[i],
                attention=batch.attention[i],
                loss_mask=batch.loss_mask[i],
                logprobs=batch.logprobs[i],
                routes=None if batch.routes is None else batch.routes[i],
                routed=None if batch.routed is None else batch.routed[i],
                columns={column: values[i] for column, values in batch.columns.items()},
                values=batch.values[i],
                sampling_mask=batch.masks[i],
            )
            for i, name in enumerate(batch.ids)
        ]

    # Fields of one sample

    def check(self, sample: Rollout) -> None:
        """Raise ``ValueError`` if the fields of a sample do not fit its tokens."""
        response = len(sample.response_ids)
        expected = {"logprobs": {response}, "loss_mask": {response}, "routes": {sample.total - 1}}
        for name, lengths in expected.items():
            value = getattr(sample, name)
            # an aborted sample without tokens may have empty or missing fields
            if value is not None and len(value) not in lengths and response:
                raise ValueError(
                    f"{sample.request_id}: {len(value)} {name} for {sample.total} tokens,"
                    f" {response} of them sampled."
                )
        mask = sample.sampling_mask
        if mask is not None and len(mask) != response:
            raise ValueError(
                f"{sample.request_id}: sampling masks of {len(mask)} for {response} tokens."
            )
        for column in self.contract.columns:
            tokens = sample.total if column.extent is ColumnExtent.TOKENS else response
            if column.extent.per_token and len(sample.columns[column.name]) != tokens:
                raise ValueError(
                    f"{sample.request_id}: {len(sample.columns[column.name])} {column.name} for"
                    f" {tokens} tokens."
                )

    def start(self, sample: Rollout) -> int:
        """Return the place of the sample's first token."""
        return self.left - len(sample.prompt_ids)

    def tokens(self, sample: Rollout) -> IntArray:
        """Return ``(places,)``; padding is token 0."""
        return _place(
            np.zeros(self.width, dtype=np.int64),
            self.start(sample),
            [*sample.prompt_ids, *sample.response_ids],
        )

    def attention(self, sample: Rollout) -> IntArray:
        """Return ``(places,)``: 1 at the tokens of the sample."""
        return _place(
            np.zeros(self.width, dtype=np.int64), self.start(sample), np.ones(sample.total)
        )

    def loss_mask(self, sample: Rollout) -> IntArray:
        """Return ``(places,)``: 1 at trained tokens."""
        mask = np.ones(len(sample.response_ids)) if sample.loss_mask is None else sample.loss_mask
        return _place(np.zeros(self.width, dtype=np.int64), self.left, mask)

    def logprobs(self, sample: Rollout) -> LogprobArray:
        """Return ``(places,)``; NaN for a missing logprob."""
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
        """Return ``(places, layers, top_k)``; -1 for a row that was not captured."""
        empty = np.full(
            (self.width, self.contract.route_layers, self.contract.top_k or 1), -1, dtype=np.int16
        )
        return empty if sample.routes is None else _place(empty, self.start(sample), sample.routes)

    def routed(self, sample: Rollout) -> IntArray:
        """Return ``(places,)``: 1 at captured rows."""
        count = 0 if sample.routes is None else len(sample.routes)
        return _place(np.zeros(self.width, dtype=np.int64), self.start(sample), np.ones(count))

    def column(self, sample: Rollout, column: Column) -> ColumnArray:
        """Return ``(places,)``: the values of a further column, and its filler."""
        filler = column.filler or 0.0
        row: ColumnArray = (
            np.full(self.width, filler, dtype=np.float32)
            if column.is_float
            else np.full(self.width, int(filler), dtype=np.int64)
        )
        if column.extent.per_token:
            of_all = column.extent is ColumnExtent.TOKENS
            values = self.numbers(sample, column)
            return _place(row, self.start(sample) if of_all else self.left, values)
        value = sample.values[column.name]
        assert isinstance(value, int | float)
        trained = np.flatnonzero(self.loss_mask(sample))
        row[trained[-1:] if column.extent is ColumnExtent.LAST else trained] = value
        return row

    def numbers(self, sample: Rollout, column: Column) -> ColumnArray:
        """Return the sample's values of a column by token."""
        return sample.columns[column.name]

    def values(self, sample: Rollout) -> Mapping[str, Scalar]:
        """Return the further values of a row."""
        return {
            column.name: sample.values[column.name]
            for column in self.contract.columns
            if not column.extent.placed
        }

    def sampling_mask(self, sample: Rollout) -> SamplingMask | None:
        """Return the masks of all places: count 0 at prompt and padding."""
        mask = sample.sampling_mask
        if mask is None:
            return None
        behind = self.width - self.left - len(mask)
        return SamplingMask.joined([SamplingMask.none(self.left), mask, SamplingMask.none(behind)])


class MaskCollator(Collator):
    """A ``Collator`` of batches with sampling masks."""

    contract: Contract = replace(Collator.contract, sampling_masks=True)


class ColumnCollator(Collator):
    """A ``Collator`` of batches with further columns, one for each extent."""

    contract: Contract = replace(
        Collator.contract,
        columns=(
            Column(name="advantages", filler=0.0),
            Column(name="ref_logprobs", filler=math.nan),
            Column(name="versions", extent=ColumnExtent.TOKENS, filler=-1, dtype="int64"),
            Column(name="outcome_advantages", extent=ColumnExtent.TRAINED, filler=0.0),
            Column(name="rm_scores", extent=ColumnExtent.LAST, filler=0.0),
            Column(name="reward", extent=ColumnExtent.ROW),
            Column(name="group", extent=ColumnExtent.GROUP),
        ),
    )


def _place(row: _A, start: int, values: npt.ArrayLike) -> _A:
    """Write ``values`` into ``row`` from ``start`` on, and return it."""
    row[start : start + len(np.asarray(values))] = values
    return row
