"""Scoring kernels: a block of logits folded into the running sums of its rows in one pass. Needs triton and a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["fold", "fold_pair"]

_WIDTH = 2048


@triton.jit
def _fold(state, logits, own, columns, stride, state_stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.program_id(0)
    top = tl.load(state + row)
    total = tl.load(state + state_stride + row)
    weighted = tl.load(state + 2 * state_stride + row)
    base = logits + row.to(tl.int64) * stride
    for begin in range(0, columns, WIDTH):
        place = begin + tl.arange(0, WIDTH)
        z = tl.load(base + place, mask=place < columns, other=-float("inf"))
        new = tl.maximum(top, tl.max(z, 0))
        chance = tl.exp(z - new)
        keep = tl.exp(top - new)
        total = total * keep + tl.sum(chance, 0)
        weighted = weighted * keep + tl.sum(tl.where(chance > 0, z * chance, 0.0), 0)
        top = new
    tl.store(state + row, top)
    tl.store(state + state_stride + row, total)
    tl.store(state + 2 * state_stride + row, weighted)
    mine = tl.load(own + row)
    if (mine >= 0) & (mine < columns):
        tl.store(state + 3 * state_stride + row, tl.load(base + mine))


@triton.jit
def _fold_pair(state, p, q, columns, stride, other_stride, state_stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.program_id(0)
    top = tl.load(state + row)
    total = tl.load(state + state_stride + row)
    other_top = tl.load(state + 2 * state_stride + row)
    other_total = tl.load(state + 3 * state_stride + row)
    apart = tl.load(state + 4 * state_stride + row)
    base, other = p + row.to(tl.int64) * stride, q + row.to(tl.int64) * other_stride
    for begin in range(0, columns, WIDTH):
        place = begin + tl.arange(0, WIDTH)
        z = tl.load(base + place, mask=place < columns, other=-float("inf"))
        y = tl.load(other + place, mask=place < columns, other=-float("inf"))
        new, other_new = tl.maximum(top, tl.max(z, 0)), tl.maximum(other_top, tl.max(y, 0))
        chance = tl.exp(z - new)
        keep = tl.exp(top - new)
        total = total * keep + tl.sum(chance, 0)
        apart = apart * keep + tl.sum(tl.where(chance > 0, (z - y) * chance, 0.0), 0)
        other_total = other_total * tl.exp(other_top - other_new) + tl.sum(tl.exp(y - other_new), 0)
        top, other_top = new, other_new
    tl.store(state + row, top)
    tl.store(state + state_stride + row, total)
    tl.store(state + 2 * state_stride + row, other_top)
    tl.store(state + 3 * state_stride + row, other_total)
    tl.store(state + 4 * state_stride + row, apart)


def fold(state: Any, logits: Any, own: Any) -> None:
    """Take ``logits`` ``(rows, columns)`` float32 into ``state`` ``(4, rows)``; ``own`` ``(rows,)`` is each row's token in this block."""
    rows, columns = logits.shape
    _fold[(rows,)](state, logits, own, columns, logits.stride(0), state.stride(0), WIDTH=_WIDTH, num_warps=8)


def fold_pair(state: Any, p: Any, q: Any) -> None:
    """Take two blocks of logits into ``state`` ``(5, rows)``."""
    rows, columns = p.shape
    _fold_pair[(rows,)](state, p, q, columns, p.stride(0), q.stride(0), state.stride(0), WIDTH=_WIDTH, num_warps=8)
