"""Turn the samples of a microbatch into the inputs of a model of HF transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from rollproof.core.records import Rollout
from rollproof.layouts.padding import Side, cumulative_lengths, packed, padded
from rollproof.layouts.sources import Source
from rollproof.replay.hf.route_placement import batch_routes, packed_routes

__all__ = ["Inputs", "Layout", "lay_out"]


class Layout(StrEnum):
    """How samples become one input."""

    LEFT = "left-padded"
    RIGHT = "right-padded"
    PACKED = "packed"
    """All in one row; position ids start again at each sample."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """The model's keyword arguments (``call``), and the source of each router row."""

    call: dict[str, Any]
    source: Source
    samples: tuple[Rollout, ...]
    cumulative: Any = None

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The input token of each row, ``(rows,)``; -1 in padding."""
        return self.source.take([_tokens(sample) for sample in self.samples], fill=-1).astype(
            np.int64
        )

    def on(self, device: str) -> Inputs:
        """Move the inputs to a device."""
        call = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.call.items()
        }
        return replace(self, call=call)

    def routes(self) -> Any:
        """Return the samples' routes in the order of the rows."""
        own = [sample.routes for sample in self.samples]
        return (
            batch_routes(own, self.call["attention_mask"])
            if self.cumulative is None
            else packed_routes(own, self.cumulative)
        )

    def logprobs(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Return the logprobs of response tokens, one ``(response,)`` float64 per sample."""
        flat = logits.flatten(0, -2).double().log_softmax(-1)
        logprobs = []
        for number, sample in enumerate(self.samples):
            rows = np.flatnonzero(self.source.sample == number)  # in the order of positions
            first = len(sample.prompt_ids) - 1  # the row of token p - 1 predicts token p
            before = torch.from_numpy(rows[first : first + len(sample.response_ids)])
            logprobs.append(flat[before, torch.tensor(sample.response_ids, dtype=torch.long)])
        return logprobs


def lay_out(samples: Sequence[Rollout], layout: Layout) -> Inputs:
    """Return the inputs of a microbatch of at least one sample."""
    lengths = [sample.total for sample in samples]
    cumulative = None
    if layout is Layout.PACKED:
        cumulative = cumulative_lengths(lengths)
        source = packed(lengths, cumulative)[None]
    else:
        side = Side.LEFT if layout is Layout.LEFT else Side.RIGHT
        source = padded(
            [len(sample.prompt_ids) for sample in samples],
            [len(sample.response_ids) for sample in samples],
            side,
        )
    ids = source.take([_tokens(sample) for sample in samples], fill=0)
    call = {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "position_ids": torch.from_numpy(np.maximum(source.position, 0)),
        # with a cache transformers does not detect packing, and tokens attend across samples.
        # Checkpointing switches it off, which would change the result
        "use_cache": False,
    }
    # packed samples are found by position ids that start again, and only without a mask
    if layout is not Layout.PACKED:
        call["attention_mask"] = torch.from_numpy(source.filled.astype(np.int64))
    return Inputs(call=call, source=source.flat(), samples=tuple(samples), cumulative=cumulative)


def _tokens(sample: Rollout) -> Any:
    return np.array(sample.prompt_ids + sample.response_ids, dtype=np.int64)
