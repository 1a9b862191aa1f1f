"""Payloads of which every row encodes its own identity, so that a misplaced row can be named.

The cell of layer l at position p of sample s is the number ``(s * positions + p) * columns + l``,
written as an int64 side tensor or as k distinct expert ids, of which the first two encode it: to a
framework such a payload looks like real routes. The usual fillers (zeros, -1, experts 0 to k - 1)
encode no cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.errors import LayoutError

__all__ = ["Coding"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """Sizes of a coded payload: ``experts=0`` makes it a side tensor with one number per cell.

    Raises ``LayoutError`` for too few experts to encode all cells: there are
    ``(experts - 1) ** 2`` pairs with a first id other than 0.
    """

    samples: int
    positions: int
    columns: int
    experts: int = 0
    top_k: int = 2

    def __post_init__(self) -> None:
        cells = self.samples * self.positions * self.columns
        if self.experts and (
            self.top_k < 2 or self.top_k > self.experts or cells > (self.experts - 1) ** 2
        ):
            raise LayoutError(
                f"{self.experts} experts with top_k={self.top_k} cannot distinguish"
                f" {self.samples} samples x {self.positions} positions x {self.columns} columns:"
                " use more experts, fewer cells, or a side tensor (experts=0)."
            )

    @property
    def width(self) -> int:
        """Length of the last axis: top_k, or 1 for a side tensor."""
        return self.top_k if self.experts else 1

    def payload(self, sample: int, rows: int) -> IntArray:
        """Return rows 0 to ``rows`` of one sample, ``(rows, columns, width)`` int64."""
        cells = (sample * self.positions + np.arange(rows)[:, None]) * self.columns + np.arange(
            self.columns
        )
        return self.encode(cells.astype(np.int64))

    def encode(self, cells: npt.NDArray[np.int64]) -> IntArray:
        """Write numbers ``(...)`` as cells ``(..., width)``."""
        if not self.experts:
            # from 1 on: zero is a usual filler
            return cells[..., None] + 1
        # first ids from 1 on: rows of zeros, and of experts 0 to k - 1, are usual fillers
        first, second = np.divmod(cells + self.experts - 1, self.experts - 1)
        second = second + (second >= first)
        rest = np.arange(self.top_k)  # among top_k ids, at least top_k - 2 are neither of the two
        free = (rest != first[..., None]) & (rest != second[..., None])
        order = np.argsort(~free, axis=-1, kind="stable")[..., : self.top_k - 2]
        return np.concatenate([first[..., None], second[..., None], order], axis=-1)

    def decode(self, rows: IntArray) -> npt.NDArray[np.int64]:
        """Read cells ``(..., width)`` as numbers ``(...)``; -1 for anything that encodes none."""
        ids = rows.astype(np.int64)
        if not self.experts:
            cells = ids[..., 0] - 1
        else:
            first, second = ids[..., 0], ids[..., 1]
            cells = (first - 1) * (self.experts - 1) + second - (second > first)
        legal = (cells >= 0) & (cells < self.samples * self.positions * self.columns)
        cells = np.where(legal, cells, -1)
        return np.where((self.encode(np.maximum(cells, 0)) == ids).all(axis=-1), cells, -1)

    def place(self, cell: int) -> tuple[int, int, int]:
        """Return ``(sample, position, column)`` of a number."""
        row, column = divmod(int(cell), self.columns)
        return (*divmod(row, self.positions), column)
