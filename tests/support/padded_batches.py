"""A conversion of samples into padded rows that is right, with places where tests make it wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollproof.core.contract import Contract, Filler
from rollproof.core.records import BatchRow, Rollout
from tests.support.trace_builder import contract

__all__ = ["Padder", "padded_contract"]


def padded_contract(**changes: Any) -> Contract:
    """A batch in int32 with -1 where nothing was captured, and with loss masks."""
    return contract(**{"dtype": "int32", "filler": "minus-one", "loss_mask": True, **changes})


class Padder:
    """Pads prompts on the left and responses on the right, all fields alike, and refuses lengths
    that disagree.

    ``mark`` tells which rows are captures instead of relying on the filler. The methods are what
    tests override.
    """

    prompt_width, response_width = 8, 10

    def __init__(self, contract: Contract | None = None, mark: bool = False) -> None:
        self.contract = contract if contract is not None else padded_contract()
        self.mark = mark

    def collate(self, samples: list[Rollout]) -> list[BatchRow]:
        """One row per sample that has response tokens."""
        return [self.row(sample) for sample in samples if sample.response_ids]

    def rows(self, batch: list[BatchRow]) -> list[BatchRow]:
        """The rows as they are."""
        return batch

    def row(self, sample: Rollout) -> BatchRow:
        """One padded row."""
        self.check(sample)
        start = self.prompt_width - len(sample.prompt_ids)
        ids = sample.prompt_ids + sample.response_ids
        response = slice(self.prompt_width, self.prompt_width + len(sample.response_ids))
        mask = self.zeros()
        mask[response] = 1 if sample.loss_mask is None else sample.loss_mask
        attention = self.zeros()
        attention[start : start + len(ids)] = 1
        tokens = self.zeros()
        tokens[start : start + len(ids)] = ids
        routes, routed = self.routes(sample, start)
        return BatchRow(
            request_id=sample.request_id,
            token_ids=tokens,
            attention=attention,
            loss_mask=mask,
            logprobs=self.logprobs(sample, response),
            routes=routes,
            routed=routed,
        )

    def zeros(self) -> np.ndarray:
        """``(places,)`` int64."""
        return np.zeros(self.prompt_width + self.response_width, dtype=np.int64)

    def check(self, sample: Rollout) -> None:
        """Refuse fields of the wrong length."""
        total, response = len(sample.prompt_ids + sample.response_ids), len(sample.response_ids)
        prefix = self.contract.rows == "captured-prefix"
        if sample.routes is not None and not (
            total - 1 <= len(sample.routes) <= total or (prefix and len(sample.routes) <= total)
        ):
            raise ValueError(
                f"{sample.request_id}: {len(sample.routes)} route rows for {total} tokens"
            )
        for name in ("logprobs", "loss_mask"):
            field = getattr(sample, name)
            if field is not None and len(field) != response:
                raise ValueError(
                    f"{sample.request_id}: {len(field)} {name} for {response} response tokens"
                )

    def logprobs(self, sample: Rollout, response: slice) -> Any:
        """``(places,)`` with 0.0 where nothing counts."""
        if sample.logprobs is None:
            return None
        out = np.zeros(self.prompt_width + self.response_width)
        out[response] = sample.logprobs.astype(np.float32)
        return out

    def routes(self, sample: Rollout, start: int) -> tuple[Any, Any]:
        """``(places, layers, top_k)`` with the declared filler, and the marks."""
        if not self.contract.has_routes:
            return None, None
        shape = (
            self.prompt_width + self.response_width,
            self.contract.route_layers,
            self.contract.top_k or 0,
        )
        constant = np.array(-1 if self.contract.filler is Filler.MINUS_ONE else 0)
        fill = np.arange(shape[2]) if self.contract.filler is Filler.ARANGE else constant
        out = np.broadcast_to(fill, shape).astype(self.contract.dtypes[0])
        marks = np.zeros(shape[0], dtype=np.int64)
        if sample.routes is not None:
            out[start : start + len(sample.routes)] = sample.routes
            marks[start : start + len(sample.routes)] = 1
        return out, marks if self.mark else None
