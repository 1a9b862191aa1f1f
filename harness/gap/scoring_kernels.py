"""Kernels that compute the product of hidden states and head, and the softmax's sums, in one pass.

For Hopper GPUs; needs triton.

A tile of 128 tokens and 256 entries of the vocabulary is multiplied in registers and folded there,
so that logits never reach memory. The product is summed over pieces of 1,024 of the width: the
matrix unit's own accumulation loses digits over longer ones (a KL, a difference of logits, does not
show it). The maximum and the sums of each tile are merged afterwards, in float32.
"""

# triton compiles the functions below, and has no types for what they take
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["fits", "head_kl", "states"]

_ROWS, _COLUMNS, _DEPTH = 128, 256, 64
# Columns of a tile when two products are in registers at once
_NARROW = 128
_PIECE = 1024
# Rows, and tiles at a time, of the kernel that merges the tiles
_FOLDED = 32


@triton.jit
def _product(
    a,
    b,
    row,
    column,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(0, WIDTH, PIECE):
        part = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(piece, piece + PIECE, BK):
            part = tl.dot(a.load([row * BM, k]), b.load([column * BN, k]).T, part)
        total += part
    return total


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    first = tile // (GROUP * column_tiles) * GROUP
    size = min(row_tiles - first, GROUP)
    inside = tile % (GROUP * column_tiles)
    return first + inside % size, inside // size


@triton.jit
def _states(
    a,
    b,
    own,
    out,
    picked,
    n,
    entries,
    scale,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(n, BM), tl.cdiv(entries, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        product = _product(a, b, row, column, WIDTH, PIECE, BM, BN, BK)
        rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        z = tl.where(columns[None, :] < entries, product, -float("inf"))
        top = tl.max(z, 1)
        chance = tl.exp((z - top[:, None]) * scale)
        line = out + column.to(tl.int64) * 3 * n + rows
        tl.store(line, top * scale, mask=rows < n)
        tl.store(line + n, tl.sum(chance, 1), mask=rows < n)
        # beyond the vocabulary the product is 0 and the chance is 0
        tl.store(line + 2 * n, tl.sum(product * chance, 1) * scale, mask=rows < n)
        mine = tl.load(own + rows, mask=rows < n, other=-1)
        here = (mine >= column * BN) & (mine < column * BN + BN)
        tl.store(
            picked + rows,
            tl.sum(tl.where(columns[None, :] == mine[:, None], product, 0.0), 1) * scale,
            mask=here,
        )


@triton.jit
def _fold(out, result, n, tiles, BR: tl.constexpr, BT: tl.constexpr):
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    top = tl.full((BR,), -float("inf"), tl.float32)
    total, weighted = tl.zeros((BR,), tl.float32), tl.zeros((BR,), tl.float32)
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)
        inside = (tile[:, None] < tiles) & (rows[None, :] < n)
        line = out + tile[:, None].to(tl.int64) * 3 * n + rows[None, :]
        tops = tl.load(line, mask=inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        keep, before = tl.exp(tops - higher[None, :]), tl.exp(top - higher)
        total = total * before + tl.sum(tl.load(line + n, mask=inside, other=0.0) * keep, 0)
        weighted = weighted * before + tl.sum(
            tl.load(line + 2 * n, mask=inside, other=0.0) * keep, 0
        )
        top = higher
    tl.store(result + rows, top, mask=rows < n)
    tl.store(result + n + rows, total, mask=rows < n)
    tl.store(result + 2 * n + rows, weighted, mask=rows < n)


@triton.jit
def _kl(
    a,
    b,
    other_a,
    other_b,
    out,
    n,
    entries,
    scale,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(n, BM), tl.cdiv(entries, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        row, column = _place(tile, row_tiles, column_tiles, GROUP)
        z = _product(a, b, row, column, WIDTH, WIDTH, BM, BN, BK)
        y = _product(other_a, other_b, row, column, OTHER, OTHER, BM, BN, BK)
        rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        inside = columns[None, :] < entries
        # far enough down for a chance of 0, and finite: 0 x (inf - inf) is no number
        z, y = tl.where(inside, z, -1e30), tl.where(inside, y, -1e30)
        top, other_top = tl.max(z, 1), tl.max(y, 1)
        chance = tl.exp((z - top[:, None]) * scale)
        line = out + column.to(tl.int64) * 5 * n + rows
        tl.store(line, top * scale, mask=rows < n)
        tl.store(line + n, tl.sum(chance, 1), mask=rows < n)
        tl.store(line + 2 * n, other_top * scale, mask=rows < n)
        tl.store(line + 3 * n, tl.sum(tl.exp((y - other_top[:, None]) * scale), 1), mask=rows < n)
        tl.store(line + 4 * n, tl.sum((z - y) * chance, 1) * scale, mask=rows < n)


def fits(*operands: Any) -> bool:
    """Whether the kernels can read these matrices.

    They must be in half precision, on a GPU of capability 9 or newer, with contiguous and aligned
    rows.
    """
    return all(
        item.is_cuda
        and item.dtype in (torch.bfloat16, torch.float16)
        and item.stride(1) == 1
        and item.stride(0) * item.element_size() % 16 == 0
        and item.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(item.device)[0] >= 9
        for item in operands
    )


def states(hidden: Any, head: Any, own: Any, scale: float) -> Any:
    """``(4, n)`` float32: maximum, sum of exp, sum of logit x exp, and the logit of each own token.

    That logit is 0 if the token is not in this head.
    """
    n, entries, tiles = hidden.shape[0], head.shape[0], triton.cdiv(head.shape[0], _COLUMNS)
    out = torch.empty((tiles, 3, n), dtype=torch.float32, device=hidden.device)
    result = torch.zeros((4, n), dtype=torch.float32, device=hidden.device)
    operands = (_tiles(hidden, _ROWS), _tiles(head, _COLUMNS), own.to(torch.int32))
    width = hidden.shape[1]
    sizes = _sizes(hidden, columns=_COLUMNS, group=16, stages=3)
    _launch(
        _states,
        (*operands, out, result[3], n, entries, scale),
        WIDTH=width,
        PIECE=min(_PIECE, width),
        **sizes,
    )
    fold: Any = _fold
    fold[(triton.cdiv(n, _FOLDED),)](out, result, n, tiles, BR=_FOLDED, BT=_FOLDED)
    return result


def head_kl(hidden: Any, head: Any, other_hidden: Any, other_head: Any, scale: float) -> Any:
    """``(n,)`` float32: KL of the first distribution from the second."""
    n, entries, tiles = hidden.shape[0], head.shape[0], triton.cdiv(head.shape[0], _NARROW)
    out = torch.empty((tiles, 5, n), dtype=torch.float32, device=hidden.device)
    operands = (
        _tiles(hidden, _ROWS),
        _tiles(head, _NARROW),
        _tiles(other_hidden, _ROWS),
        _tiles(other_head, _NARROW),
    )
    sizes = _sizes(hidden, columns=_NARROW, group=8, stages=4)
    _launch(
        _kl,
        (*operands, out, n, entries, scale),
        WIDTH=hidden.shape[1],
        OTHER=other_hidden.shape[1],
        **sizes,
    )
    top, other = out[:, 0].amax(dim=0), out[:, 2].amax(dim=0)
    keep, other_keep = (out[:, 0] - top).exp_(), (out[:, 2] - other).exp_()
    total, other_total = (out[:, 1] * keep).sum(dim=0), (out[:, 3] * other_keep).sum(dim=0)
    return (out[:, 4] * keep).sum(dim=0) / total - (top + total.log()) + (other + other_total.log())


def _launch(
    kernel: Any, operands: tuple[Any, ...], *, PROGRAMS: int, num_stages: int, **sizes: Any
) -> None:
    """Launch with as many stages as fit."""
    # for a width of one step the compiler buffers more than a multiprocessor's memory holds
    for stages in range(num_stages, 0, -1):
        try:
            kernel[(PROGRAMS,)](*operands, PROGRAMS=PROGRAMS, num_stages=stages, **sizes)
        except OutOfResources:
            if stages == 1:
                raise
        else:
            return


def _tiles(matrix: Any, rows: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, _DEPTH])


def _sizes(tensor: Any, *, columns: int, group: int, stages: int) -> dict[str, int]:
    """Return the sizes of a launch: one program a multiprocessor."""
    # `group` row tiles go through the vocabulary together, so that a tile of the head is read from
    # memory once for all of them
    programs = int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)
    fixed = {"BM": _ROWS, "BK": _DEPTH, "num_warps": 8}
    return {**fixed, "BN": columns, "GROUP": group, "PROGRAMS": programs, "num_stages": stages}
