"""Padded and packed rows: final rows, batches of one width, packed sequences, contents of padding.

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
    """Which side of a padded batch is padding."""

    LEFT = "left"
    """Padding on the left: all sequences end at the last place (SkyRL)."""
    RIGHT = "right"
    """Padding on the right: all sequences begin at place 0."""
    BOTH = "both"
    """Prompts are padded on the left, responses on the right: all responses begin at one place
    (verl).
    """


class Fill(StrEnum):
    """Contents of rows that belong to no captured token."""

    ARANGE = "arange"
    """Experts 0 to k - 1 (SkyRL, NeMo-RL)."""
    SPREAD = "spread"
    """A running count modulo the number of experts: k distinct ids, every expert equally often
    (slime).
    """
    SENTINEL = "minus-one"
    """-1: the router's own choice is used (NeMo-RL)."""
    ZEROS = "zeros"
    """Expert 0, k times: only sound if such rows are masked out of replay (verl with its replay
    mask).
    """


def completed(
    routes: IntArray, tokens: int, fill: Fill, experts: int
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Append filler to ``routes`` ``(c, columns, k)`` until there are as many rows as tokens.

    Returns ``(tokens, columns, k)``, and ``(tokens,)``: whether the row was captured. Raises
    ``LayoutError`` for more rows than tokens.
    """
    if len(routes) > tokens:
        raise LayoutError(
            f"There are {len(routes)} rows for {tokens} tokens: cut the sample and its routes"
            " together."
        )
    # behind the captured rows: the last sampled token was never forwarded, so it has none
    missing = tokens - len(routes)
    filler = fill_rows(missing, routes.shape[1], routes.shape[2], fill, experts)
    return np.concatenate(
        [routes, filler.astype(np.result_type(routes.dtype, filler.dtype))]
    ), np.arange(tokens) < len(routes)


def fill_rows(rows: int, columns: int, top_k: int, fill: Fill, experts: int) -> IntArray:
    """Return filler ``(rows, columns, top_k)`` in int16, or int32 for more experts.

    Raises ``LayoutError`` for fewer than ``top_k`` experts.
    """
    if top_k > experts:
        raise LayoutError(
            f"top_k={top_k} exceeds the {experts} experts: no row can hold so many distinct ids."
        )
    shape = (rows, columns, top_k)
    # padding rows that all name the first experts overload them (verl#7524, prime-rl#3350)
    if fill is Fill.SPREAD:
        values: IntArray = (
            np.arange(rows * columns * top_k, dtype=np.int64).reshape(shape) % experts
        )
    elif fill is Fill.ARANGE:
        values = np.broadcast_to(np.arange(top_k, dtype=np.int64), shape)
    else:
        # ids that repeat collapse in a routing map, and split sizes no longer add up (verl#4986,
        # slime#822, miles#1002)
        values = np.full(shape, -1 if fill is Fill.SENTINEL else 0, dtype=np.int64)
    return values.astype(np.int16 if experts <= 1 << 15 else np.int32)


def padded(
    prompts: Sequence[int], responses: Sequence[int], side: Side, multiple: int = 1
) -> Source:
    """Return the source ``(batch, width)`` of a padded batch, from prompt and response lengths.

    The width is the smallest that fits all samples, rounded up to ``multiple``. What is rounded up
    is padding on the right, or on the left under ``Side.LEFT``.
    """
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    left = max(prompts, default=0)
    fitting = left + max(responses, default=0) if side is Side.BOTH else max(lengths, default=0)
    width = -(-fitting // multiple) * multiple
    out = Source.padding(len(lengths), width)
    for i, length in enumerate(lengths):
        start = {Side.LEFT: width - length, Side.RIGHT: 0, Side.BOTH: left - prompts[i]}[side]
        out.sample[i, start : start + length] = i
        out.position[i, start : start + length] = np.arange(length)
    return out


def unpadded(batch: IntArray, attention: IntArray) -> list[IntArray]:
    """Return the rows ``(tokens, ...)`` of each sample of a batch ``(samples, width, ...)``.

    They are those at which ``attention`` ``(samples, width)`` is not 0.
    """
    if batch.shape[:2] != attention.shape:
        raise LayoutError(
            f"The batch has the shape {batch.shape[:2]}, the attention mask {attention.shape}: pad"
            " both in the same way."
        )
    return [row[mask != 0] for row, mask in zip(batch, attention, strict=True)]


FACTORS = ("tp", "cp", "2cp", "ulysses")
"""What an alignment may name: sizes of a ``Mesh``; ``2cp`` is 2 * cp, or 1 if cp is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """What lengths are rounded up to. ``by`` names ``tp``, ``cp``, ``ulysses`` and ``2cp``: 2 * cp,
    or 1 if cp is 1.

    A sequence's length becomes a multiple of ``lcm(constant, product of the sizes in by)``. The sum
    of all lengths becomes a multiple of ``lcm(total, product of the sizes in by)``, or with
    ``total_scales`` of ``total`` times that product; the last sequence takes the difference. verl:
    ``by=("tp", "2cp")``; for FP8 also ``constant=16, total=128, total_scales=True``; slime:
    ``by=("2cp",), total=128``.
    """

    by: tuple[str, ...] = ()
    constant: int = 1
    total: int = 1
    total_scales: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.by) - set(FACTORS))
        if unknown or self.constant < 1 or self.total < 1:
            raise LayoutError(
                f"An alignment is by sizes among {list(FACTORS)} and to numbers >= 1, "
                f"not by {list(self.by)} to {self.constant} and {self.total}."
            )

    def sizes(self, mesh: Mesh) -> int:
        """Return the product of the parallel sizes that it names."""
        return math.prod(mesh.factor(name) for name in self.by)

    def multiple(self, mesh: Mesh) -> int:
        """Return what the length of each sequence is a multiple of, in rows."""
        return math.lcm(self.constant, self.sizes(mesh))

    def total_multiple(self, mesh: Mesh) -> int:
        """Return what the sum of all lengths is a multiple of, in rows."""
        if self.total_scales:
            return self.total * self.sizes(mesh)
        return math.lcm(self.total, self.sizes(mesh))


def cumulative_lengths(
    lengths: Sequence[int], multiple: int = 1, total_multiple: int = 1
) -> Indexes:
    """Return where each padded sequence begins, ``(sequences + 1,)``.

    The last entry is the number of packed rows.
    """
    ends = np.cumsum([0, *(-(-length // multiple) * multiple for length in lengths)])
    if len(lengths):
        ends[-1] += -ends[-1] % total_multiple
    return ends.astype(np.int64)


def packed(lengths: Sequence[int], cumulative: Indexes) -> Source:
    """Return the source ``(rows,)`` of packed rows.

    Raises ``LayoutError`` if a sequence does not fit between its cumulative lengths.
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
