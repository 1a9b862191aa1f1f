"""Padding: rows for tokens that no engine captured, batches of one width, and what stands in
padding rows.

An engine returns n - 1 rows for n tokens: the last sampled token was never forwarded (slime#1045,
verl ``align_r3_router_replay_data``, SkyRL's captured prefix). Row p belongs to the model row whose
*input* is token p; logprobs are shifted by one against tokens, routes are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.errors import LayoutError
from rollproof.layouts.sources import Source

__all__ = ["Fill", "Side", "completed", "fill_rows", "padded", "unpadded"]


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
