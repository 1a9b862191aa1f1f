"""The microbatches of a step on each rank.

All microbatches of a step are padded to one width (pipeline ranks exchange buffers of a fixed
shape), and to one number of samples (expert ranks exchange equally many rows): a data-parallel rank
with fewer samples computes a sample of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollproof.core.events.replay import Step
from rollproof.core.records import IntArray, Rollout
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.megatron_setups import MegatronSetup

__all__ = ["Batch", "batches", "lengths_of", "samples_by_microbatch"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One microbatch on one rank; arrays are ``(samples, width / cp)``.

    Attributes:
        samples: those of this data-parallel rank; ``None`` is padding.
        numbers: their indexes in the step.
        layout: where rows and layers go.
        ids: token ids, 0 in padding.
        positions: positions of the tokens.
        labels: the next token of each place.
        predicted: position of the response token that a place predicts, -1 for none.
        rows: input tokens of the rows that this rank's routers see, ``(rows,)``; -1 in padding.
    """

    samples: tuple[Rollout | None, ...]
    numbers: tuple[int, ...]
    layout: Layout
    ids: IntArray
    positions: IntArray
    labels: IntArray
    predicted: IntArray
    rows: IntArray

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return lengths_of(self.samples)


def lengths_of(samples: Sequence[Rollout | None]) -> list[int]:
    """Return the tokens of each sample; 1 for padding, so that every microbatch has rows."""
    return [1 if sample is None else sample.total for sample in samples]


def samples_by_microbatch(
    setup: MegatronSetup, step: Step, dp: int
) -> list[list[tuple[int, Rollout | None]]]:
    """Return the samples of each microbatch on data-parallel rank ``dp``, with their indexes.

    Padding is ``(-1, None)``.
    """
    first = 0
    out: list[list[tuple[int, Rollout | None]]] = []
    count = max(1, *(-(-len(samples) // setup.dp) for samples in step.microbatches))
    for samples in step.microbatches:
        own = list(enumerate(samples, first))[dp :: setup.dp]
        out.append([*own, *[(-1, None)] * (count - len(own))])
        first += len(samples)
    return out


def batches(setup: MegatronSetup, step: Step, rank: Rank) -> list[Batch]:
    """Return the microbatches of a step on ``rank``."""
    out = []
    for numbered in samples_by_microbatch(setup, step, rank.dp):
        width = setup.width(
            lengths_of([sample for _, sample in numbered])
            if setup.own_widths
            else [sample.total for sample in step.samples]
        )
        out.append(_batch(setup, rank, width, setup.layout(width), numbered))
    return out


def _batch(
    setup: MegatronSetup,
    rank: Rank,
    width: int,
    layout: Layout,
    numbered: list[tuple[int, Rollout | None]],
) -> Batch:
    ids = np.full((len(numbered), width), -1, dtype=np.int64)
    predicted = np.full((len(numbered), width), -1, dtype=np.int64)
    for i, (_, sample) in enumerate(numbered):
        if sample is not None:
            tokens = sample.prompt_ids + sample.response_ids
            ids[i, : len(tokens)] = tokens
            # The place of token p predicts token p + 1.
            responses = np.arange(max(1, len(sample.prompt_ids)), len(tokens))
            predicted[i, responses - 1] = responses
    labels = np.roll(np.maximum(ids, 0), -1, axis=1)
    positions = np.broadcast_to(np.arange(width, dtype=np.int64), ids.shape)
    if setup.cp > 1:
        # an early chunk and its mirror image: causal attention costs all ranks the same
        chunks = np.split(np.arange(width), 2 * setup.cp)
        local = np.concatenate([chunks[rank.cp], chunks[-1 - rank.cp]])
        ids, predicted, labels, positions = (
            array[:, local] for array in (ids, predicted, labels, positions)
        )
    # Hidden states are (sequence, batch, hidden): rows are sequence-major, and sequence parallelism
    # divides them in order.
    rows = np.split(ids.T.reshape(-1), setup.tp)[rank.tp]
    return Batch(
        samples=tuple(sample for _, sample in numbered),
        numbers=tuple(number for number, _ in numbered),
        layout=layout,
        ids=np.ascontiguousarray(np.maximum(ids, 0)),
        positions=np.ascontiguousarray(positions),
        labels=np.ascontiguousarray(labels),
        predicted=predicted,
        rows=rows,
    )
