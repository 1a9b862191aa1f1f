"""Padded and packed rows: final rows, batches of one width, packed sequences, what padding contains.

An engine returns n - 1 rows for n tokens: the last sampled token was never forwarded (slime#1045,
verl ``align_r3_router_replay_data``, SkyRL's captured prefix). Row p belongs to the model row whose
*input* is token p; logprobs are shifted by one against tokens, routes are not.

Packed rows are described by *cumulative lengths* ``(sequences + 1,)``: rows ``cumulative[i]`` to
``cumulative[i] + length[i]`` belong to sequence i, and those up to ``cumulative[i + 1]`` are
padding (verl ``preprocess_thd_engine``, Megatron's THD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.errors import LayoutError
from rollproof.layouts.sources import Indexes, Source, joined

if TYPE_CHECKING:
    from rollproof.layouts.mesh import Mesh

__all__ = [
    "FACTORS",
    "Alignment",
    "Fill",
    "Side",
    "completed",
    "cumulative_lengths",
    "fill_rows",
    "packed",
    "padded",
    "unpadded",
]


class Side(StrEnum):
    """Where the tokens of a padded batch stand."""

    LEFT = "left"
    """Padding on the left: all sequences end at the last place (SkyRL)."""
    RIGHT = "right"
    """Padding on the right: all sequences begin at place 0."""
    BOTH = "both"
    """Prompts padded on the left, responses on the right: all responses begin at one place (verl)."""


class Fill(StrEnum):
    """What stands in rows that belong to no captured token."""

    ARANGE = "arange"
    """Experts 0 to k - 1 (SkyRL, NeMo-RL)."""
    SPREAD = "spread"
    """A running count modulo the number of experts: k distinct ids, every expert equally often
    (slime).
    """
    SENTINEL = "minus-one"
    """-1: the router's own choice is used (NeMo-RL)."""
    ZEROS = "zeros"
    """Expert 0, k times: only sound where such rows are masked out of replay (verl with its replay
    mask).
    """


def completed(
    routes: IntArray, tokens: int, fill: Fill, experts: int
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Rows ``(tokens, columns, k)`` for a sample of ``tokens`` tokens, and ``(tokens,)`` true where
    the row was captured.

    ``routes`` is ``(c, columns, k)`` with c <= tokens. Raises ``LayoutError`` for more rows than
    tokens.
    """
    if len(routes) > tokens:
        raise LayoutError(
            f"There are {len(routes)} rows for {tokens} tokens: cut the sample and its routes"
            " together."
        )
    missing = tokens - len(routes)
    filler = fill_rows(missing, routes.shape[1], routes.shape[2], fill, experts)
    return np.concatenate(
        [routes, filler.astype(np.result_type(routes.dtype, filler.dtype))]
    ), np.arange(tokens) < len(routes)


def fill_rows(rows: int, columns: int, top_k: int, fill: Fill, experts: int) -> IntArray:
    """``(rows, columns, top_k)`` of what ``fill`` says, in the smallest signed type. Raises
    ``LayoutError`` where k ids do not exist.
    """
    if top_k > experts:
        raise LayoutError(
            f"top_k={top_k} exceeds the {experts} experts: no row can hold so many distinct ids."
        )
    shape = (rows, columns, top_k)
    if fill is Fill.SPREAD:
        values: IntArray = (
            np.arange(rows * columns * top_k, dtype=np.int64).reshape(shape) % experts
        )
    elif fill is Fill.ARANGE:
        values = np.broadcast_to(np.arange(top_k, dtype=np.int64), shape)
    else:
        values = np.full(shape, -1 if fill is Fill.SENTINEL else 0, dtype=np.int64)
    return values.astype(np.int16 if experts <= 1 << 15 else np.int32)


def padded(
    prompts: Sequence[int], responses: Sequence[int], side: Side, multiple: int = 1
) -> Source:
    """The places ``(batch, width)`` of a padded batch of samples with so many prompt and response
    tokens.

    The width is the least that holds all samples, rounded up to ``multiple``; what is rounded up is
    padding on the right, or on the left under ``Side.LEFT``.
    """
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    left = max(prompts, default=0)
    least = left + max(responses, default=0) if side is Side.BOTH else max(lengths, default=0)
    width = -(-least // multiple) * multiple
    out = Source.padding(len(lengths), width)
    for i, length in enumerate(lengths):
        start = {Side.LEFT: width - length, Side.RIGHT: 0, Side.BOTH: left - prompts[i]}[side]
        out.sample[i, start : start + length] = i
        out.position[i, start : start + length] = np.arange(length)
    return out


def unpadded(batch: IntArray, attention: IntArray) -> list[IntArray]:
    """The rows ``(tokens, ...)`` of each sample of a batch ``(samples, width, ...)`` where
    ``attention (samples, width)`` is not 0.
    """
    if batch.shape[:2] != attention.shape:
        raise LayoutError(
            f"The batch has the places {batch.shape[:2]}, the attention mask {attention.shape}: pad"
            " them alike."
        )
    return [row[mask != 0] for row, mask in zip(batch, attention, strict=True)]


FACTORS = ("tp", "cp", "2cp", "ulysses")
"""What an alignment may name: parallel sizes of a ``Mesh``; ``2cp`` is 2 * cp, and 1 where cp is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """What lengths are rounded up to.

    A sequence's length becomes a multiple of ``lcm(constant, product of the sizes in by)``, and the
    sum of all lengths a multiple of ``lcm(total, product of the sizes in by)``, or of ``total``
    times that product where ``total_scales``; the last sequence takes the difference. verl:
    ``by=("tp", "2cp")``; for FP8 also ``constant=16, total=128, total_scales=True``; slime:
    ``by=("2cp",), total=128``.
    """

    by: tuple[str, ...] = ()
    constant: int = 1
    total: int = 1
    total_scales: bool = False

    def __post_init__(self) -> None:
        stray = sorted(set(self.by) - set(FACTORS))
        if stray or self.constant < 1 or self.total < 1:
            raise LayoutError(
                f"An alignment is by sizes among {list(FACTORS)} and to numbers >= 1, "
                f"not by {list(self.by)} to {self.constant} and {self.total}."
            )

    def sizes(self, mesh: Mesh) -> int:
        """The product of the parallel sizes that it names."""
        return math.prod(mesh.factor(name) for name in self.by)

    def multiple(self, mesh: Mesh) -> int:
        """What the length of each sequence is a multiple of, in rows."""
        return math.lcm(self.constant, self.sizes(mesh))

    def total_multiple(self, mesh: Mesh) -> int:
        """What the sum of all lengths is a multiple of, in rows."""
        if self.total_scales:
            return self.total * self.sizes(mesh)
        return math.lcm(self.total, self.sizes(mesh))


def cumulative_lengths(
    lengths: Sequence[int], multiple: int = 1, total_multiple: int = 1
) -> Indexes:
    """``(sequences + 1,)``: where each padded sequence begins; the last entry is the number of
    packed rows.
    """
    ends = np.cumsum([0, *(-(-length // multiple) * multiple for length in lengths)])
    if len(lengths):
        ends[-1] += -ends[-1] % total_multiple
    return ends.astype(np.int64)


def packed(lengths: Sequence[int], cumulative: Indexes) -> Source:
    """The packed rows ``(rows,)``. Raises ``LayoutError`` where a sequence does not fit between its
    cumulative lengths.
    """
    room = np.diff(cumulative)
    if len(room) != len(lengths) or np.any(room < np.asarray(lengths, dtype=np.int64)):
        raise LayoutError(
            f"Sequences of {list(lengths)} tokens do not fit cumulative lengths"
            f" {cumulative.tolist()}."
        )
    return joined(
        [
            part
            for i, length in enumerate(lengths)
            for part in (Source.whole(i, length), Source.padding(int(room[i]) - length))
        ]
    )
