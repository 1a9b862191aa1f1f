"""Scoring kernels: a block of logits folded into the running sums of its rows in one pass. Needs triton and a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["fold", "fold_pair"]


@triton.jit
def _fold(state, logits, own, columns, stride, lines, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    base = logits + row.to(tl.int64) * stride
    z = tl.load(base + place, mask=place < columns, other=-float("inf"))
    top, total, weighted = tl.load(state + row), tl.load(state + lines + row), tl.load(state + 2 * lines + row)
    new = tl.maximum(top, tl.max(z, 0))
    chance, keep = tl.exp(z - new), tl.exp(top - new)
    tl.store(state + row, new)
    tl.store(state + lines + row, total * keep + tl.sum(chance, 0))
    # a logit of -inf has no chance, and 0 x inf is no number
    tl.store(state + 2 * lines + row, weighted * keep + tl.sum(tl.where(chance > 0, z * chance, 0.0), 0))
    mine = tl.load(own + row)
    if (mine >= 0) & (mine < columns):
        tl.store(state + 3 * lines + row, tl.load(base + mine))


@triton.jit
def _fold_pair(state, p, q, columns, stride, other_stride, lines, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < columns
    z = tl.load(p + row.to(tl.int64) * stride + place, mask=inside, other=-float("inf"))
    y = tl.load(q + row.to(tl.int64) * other_stride + place, mask=inside, other=-float("inf"))
    top, total = tl.load(state + row), tl.load(state + lines + row)
    other_top, other_total = tl.load(state + 2 * lines + row), tl.load(state + 3 * lines + row)
    apart = tl.load(state + 4 * lines + row)
    new, other_new = tl.maximum(top, tl.max(z, 0)), tl.maximum(other_top, tl.max(y, 0))
    chance, keep = tl.exp(z - new), tl.exp(top - new)
    tl.store(state + row, new)
    tl.store(state + lines + row, total * keep + tl.sum(chance, 0))
    tl.store(state + 2 * lines + row, other_new)
    tl.store(state + 3 * lines + row, other_total * tl.exp(other_top - other_new) + tl.sum(tl.exp(y - other_new), 0))
    tl.store(state + 4 * lines + row, apart * keep + tl.sum(tl.where(chance > 0, (z - y) * chance, 0.0), 0))


def fold(state: Any, logits: Any, own: Any) -> None:
    """Take ``logits`` ``(rows, columns)`` float32 into ``state`` ``(4, rows)``; ``own`` ``(rows,)`` is each row's token in this block."""
    rows, columns = logits.shape
    width = triton.next_power_of_2(columns)
    _fold[(rows,)](state, logits, own, columns, logits.stride(0), state.stride(0), WIDTH=width, num_warps=4)


def fold_pair(state: Any, p: Any, q: Any) -> None:
    """Take two blocks of logits into ``state`` ``(5, rows)``."""
    rows, columns = p.shape
    width = triton.next_power_of_2(columns)
    _fold_pair[(rows,)](state, p, q, columns, p.stride(0), q.stride(0), state.stride(0), WIDTH=width, num_warps=4)
