"""Samples and their rows in a batch, position by position; and the decorator for checks of
batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract, Rows
from rollproof.core.events.training import Batch
from rollproof.core.records import BatchRow, IntArray, Rollout
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.judging.checks import Applies, Check, Collector, trace_check

__all__ = ["Conversion", "Placed", "Places", "batch_check"]

Places: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, eq=False)
class Placed:
    """One sample and its row."""

    sample: Rollout
    row: BatchRow
    contract: Contract

    @cached_property
    def places(self) -> Places:
        """``(tokens,)``: the positions of the sample's tokens in the row."""
        return np.flatnonzero(self.row.attention)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sample's tokens."""
        return self.sample.prompt_ids + self.sample.response_ids

    @cached_property
    def sound(self) -> bool:
        """Whether the attended places hold the sample's tokens in order.

        Only then do places show which token is which.
        """
        return tuple(self.row.token_ids[self.places].tolist()) == self.tokens

    @cached_property
    def unattended(self) -> Places:
        """``(n,)``: the places of the sample's own tokens at which attention is 0, if the row holds
        all of its tokens next to each other; otherwise none.
        """
        ids, tokens = self.row.token_ids, np.array(self.tokens)
        if not 0 < len(tokens) <= len(ids):
            return np.zeros(0, np.int64)
        starts = np.flatnonzero(
            (np.lib.stride_tricks.sliding_window_view(ids, len(tokens)) == tokens).all(axis=1)
        )
        if not len(starts):
            return np.zeros(0, np.int64)
        own = np.arange(starts[0], starts[0] + len(tokens))
        # attention elsewhere is another fault
        if not np.isin(self.places, own).all():
            return np.zeros(0, np.int64)
        return np.asarray(own[self.row.attention[own] == 0], np.int64)

    @property
    def response_places(self) -> Places:
        """``(response,)``: the places of the response tokens."""
        return self.places[len(self.sample.prompt_ids) :]

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """``(response,)``: the response tokens that count in the sample's loss."""
        mask = self.sample.loss_mask
        return (
            np.ones(len(self.sample.response_ids), dtype=bool)
            if mask is None
            else np.asarray(mask != 0)
        )

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """``(response,)``: the response tokens that count in the loss of the row; those of the
        sample if the row has no loss mask of its length.
        """
        mask = self.row.loss_mask
        if mask is None or self.misfit("loss_mask") is not None:
            return self.trained
        return np.asarray(mask[self.response_places] != 0)

    @property
    def captured(self) -> int:
        """The number of leading tokens with a captured row: all rows of a sample with routes except
        the filler of the last token.
        """
        assert self.sample.routes is not None
        # With T rows the last one is filler: its token was never forwarded.
        final = self.contract.rows is Rows.ALL and len(self.sample.routes) >= len(self.tokens)
        return min(len(self.sample.routes), len(self.tokens)) - final

    def misfit(self, field: str) -> int | None:
        """Return the length of a per-place field if it is not the number of places, otherwise
        ``None``.
        """
        array = getattr(self.row, field)
        return None if array is None or len(array) == len(self.row.token_ids) else len(array)

    def rows_at(self, tokens: Places) -> IntArray:
        """Return the MoE columns of the row's routes at the places of ``tokens`` (indexes), as far
        as the row has them.
        """
        assert self.row.routes is not None
        places = self.places[tokens]
        return self.row.routes[places[places < len(self.row.routes)]][
            :, list(self.contract.moe_columns)
        ]


@dataclass(frozen=True, eq=False)
class Conversion:
    """A batch under a contract: its well-formed samples that became exactly one row each, with that
    row.
    """

    event: Batch
    contract: Contract

    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        """Well-formed samples with their rows; ``batch.complete`` judges missing and doubled
        ones.
        """
        rows: dict[str, list[BatchRow]] = {}
        for row in self.event.rows:
            # A conversion may reorder samples, so rows are found by id.
            rows.setdefault(row.request_id, []).append(row)
        return tuple(
            Placed(sample, rows[sample.request_id][0], self.contract)
            for sample in self.event.samples
            if sample.request_id != self.event.defective
            and len(rows.get(sample.request_id, ())) == 1
        )

    @property
    def sound(self) -> tuple[Placed, ...]:
        """Those with the right tokens: the others cannot be judged place by place."""
        return tuple(placed for placed in self.placed if placed.sound)

    @property
    def mixed(self) -> bool:
        """Whether some well-formed samples have routes and others have none."""
        return (
            len({sample.routes is None for sample in self.event.samples if sample.response_ids})
            == 2
        )

    def place(self, sample: Rollout | None = None, **more: Any) -> dict[str, Any]:
        """Return the place of a finding: the batch, the sample, and more."""
        return {
            "batch": self.event.name,
            **({} if sample is None else {"request": sample.request_id}),
            **more,
        }


class _PerBatch(EventCheck):
    """Calls ``judge`` with every conversion of the trace."""

    judge: ClassVar[Callable[[Conversion, Collector], None]]

    def on_batch(self, event: Batch, out: Collector) -> None:
        """Judge one conversion."""
        type(self).judge(Conversion(event, self.context.contract), out)


def batch_check(
    id: str,
    *,
    promise: str,
    needs: str,
    exercised_by: str | tuple[str, ...],
    applies: Applies | None = None,
) -> Callable[[Callable[[Conversion, Collector], None]], Check]:
    """Make a ``Check`` of a function ``(conversion, out)`` that is called once per batch."""

    def make(judge: Callable[[Conversion, Collector], None]) -> Check:
        fold = type(judge.__name__, (_PerBatch,), {"judge": staticmethod(judge)})
        return trace_check(
            id,
            promise=promise,
            needs=needs,
            exercised_by=exercised_by,
            applies=applies,
            about="batches",
        )(fold)

    return make
