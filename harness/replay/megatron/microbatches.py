"""Batches: the microbatches of a step as each rank has them.

All microbatches of a step are padded to one width (pipeline ranks exchange buffers of a fixed
shape), and to one number of samples (expert ranks exchange equally many rows): where a
data-parallel rank has fewer, it computes a sample of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollproof.core.events.replay import Step
from rollproof.core.records import IntArray, Rollout
from rollproof.layouts.layout import Layout
from rollproof.layouts.mesh import Rank
from rollproof.replay.megatron.megatron_setups import Setup

__all__ = ["Batch", "batches", "dealt", "lengths_of"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One microbatch as one rank has it: arrays ``(samples, width / cp)``.

    ``samples`` are those of this data-parallel rank, ``None`` where one is padding; ``numbers`` are
    their indexes in the step. ``predicted`` is the position of the response token that a place
    predicts, -1 where none; ``rows`` ``(rows,)`` are the input tokens of the rows that this rank's
    routers see, in their order, -1 in padding.
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
    """Tokens of each sample; one for padding, so that no microbatch is without rows."""
    return [1 if one is None else one.total for one in samples]


def dealt(setup: Setup, step: Step, dp: int) -> list[list[tuple[int, Rollout | None]]]:
    """The samples of each microbatch that data-parallel rank ``dp`` has, with their indexes in the
    step; ``(-1, None)`` for padding.
    """
    first = 0
    out: list[list[tuple[int, Rollout | None]]] = []
    most = max(1, *(-(-len(samples) // setup.dp) for samples in step.microbatches))
    for samples in step.microbatches:
        mine = list(enumerate(samples, first))[dp :: setup.dp]
        out.append([*mine, *[(-1, None)] * (most - len(mine))])
        first += len(samples)
    return out


def batches(setup: Setup, step: Step, rank: Rank) -> list[Batch]:
    """The microbatches of a step as ``rank`` has them."""
    out = []
    for mine in dealt(setup, step, rank.dp):
        width = setup.width(
            lengths_of([sample for _, sample in mine])
            if setup.own_widths
            else [one.total for one in step.samples]
        )
        out.append(_batch(setup, rank, width, setup.layout(width), mine))
    return out


def _batch(
    setup: Setup, rank: Rank, width: int, layout: Layout, mine: list[tuple[int, Rollout | None]]
) -> Batch:
    ids = np.full((len(mine), width), -1, dtype=np.int64)
    predicted = np.full((len(mine), width), -1, dtype=np.int64)
    for i, (_, sample) in enumerate(mine):
        if sample is not None:
            tokens = sample.prompt_ids + sample.response_ids
            ids[i, : len(tokens)] = tokens
            # The place of token p predicts token p + 1.
            responses = np.arange(max(1, len(sample.prompt_ids)), len(tokens))
            predicted[i, responses - 1] = responses
    labels = np.roll(np.maximum(ids, 0), -1, axis=1)
    positions = np.broadcast_to(np.arange(width, dtype=np.int64), ids.shape)
    if setup.cp > 1:
        # Each rank holds one chunk from the front and its mirror image from the back, so that
        # causal attention costs all the same.
        chunks = np.split(np.arange(width), 2 * setup.cp)
        kept = np.concatenate([chunks[rank.cp], chunks[-1 - rank.cp]])
        ids, predicted, labels, positions = (
            array[:, kept] for array in (ids, predicted, labels, positions)
        )
    # Hidden states are (sequence, batch, hidden): rows are sequence-major, and sequence parallelism
    # divides them in order.
    rows = np.split(ids.T.reshape(-1), setup.tp)[rank.tp]
    return Batch(
        samples=tuple(sample for _, sample in mine),
        numbers=tuple(number for number, _ in mine),
        layout=layout,
        ids=np.ascontiguousarray(np.maximum(ids, 0)),
        positions=np.ascontiguousarray(positions),
        labels=np.ascontiguousarray(labels),
        predicted=predicted,
        rows=rows,
    )
