"""Where the rows of an array come from, as two arrays of indexes.

Every transformation of the row axis (padding, packing, slicing, flattening) is described by its
result: row i is position ``position[i]`` of sample ``sample[i]``, or padding. So transformations
compose by indexing, the payload is moved once at the end, and two layouts can be compared without a
payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.records import IntArray
from rollproof.errors import LayoutError

__all__ = ["Indexes", "Source", "joined"]

Indexes: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """The sample and the position of every row.

    Both arrays have the shape of the rows, ``(rows,)`` or ``(batch, width)``. Padding is -1.
    """

    sample: Indexes
    position: Indexes

    @classmethod
    def padding(cls, *shape: int) -> Source:
        """Return rows of padding."""
        return cls(
            sample=np.full(shape, -1, dtype=np.int64), position=np.full(shape, -1, dtype=np.int64)
        )

    @classmethod
    def whole(cls, sample: int, length: int) -> Source:
        """Return all ``length`` positions of one sample."""
        return cls(
            sample=np.full(length, sample, dtype=np.int64),
            position=np.arange(length, dtype=np.int64),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self.sample.shape

    @property
    def filled(self) -> npt.NDArray[np.bool_]:
        """Which rows are no padding."""
        return self.sample >= 0

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, index: Any) -> Source:
        """Return the rows at ``index`` (any numpy index)."""
        return Source(sample=self.sample[index], position=self.position[index])

    def flat(self) -> Source:
        """Return the rows in C order on one axis."""
        return Source(sample=self.sample.reshape(-1), position=self.position.reshape(-1))

    def same(self, other: Source) -> bool:
        """Whether both have the same rows at the same places."""
        return bool(
            np.array_equal(self.sample, other.sample)
            and np.array_equal(self.position, other.position)
        )

    def take(self, payloads: Sequence[IntArray], fill: IntArray | int = 0) -> IntArray:
        """Return the rows of ``payloads``, one ``(positions, ...)`` per sample: ``(*shape, ...)``.

        Padding, and positions beyond the rows of a sample, get ``fill`` (one row, or a number).
        Raises ``LayoutError`` for a sample without a payload, and for payloads that differ in their
        other axes.
        """
        if not payloads or int(self.sample.max(initial=-1)) >= len(payloads):
            raise LayoutError(
                f"The layout has sample {int(self.sample.max(initial=-1))}, but there are only"
                f" {len(payloads)} payloads."
            )
        if len({payload.shape[1:] for payload in payloads}) > 1:
            raise LayoutError(
                "The payloads differ in their columns:"
                f" {sorted({payload.shape[1:] for payload in payloads})}."
            )
        starts = np.cumsum([0, *(len(payload) for payload in payloads)])
        rows = np.diff(starts)[self.sample]
        captured = self.filled & (self.position < rows)
        table = np.concatenate(payloads)
        # a filler of -1 does not fit the unsigned ids of a payload
        out = np.empty(
            (*self.shape, *table.shape[1:]),
            dtype=np.result_type(table.dtype, np.min_scalar_type(np.min(fill))),
        )
        out[...] = fill
        out[captured] = table[starts[self.sample[captured]] + self.position[captured]]
        return out


def joined(parts: Sequence[Source]) -> Source:
    """Concatenate the rows of ``parts``."""
    if not parts:
        return Source.padding(0)
    return Source(
        sample=np.concatenate([part.sample for part in parts]),
        position=np.concatenate([part.position for part in parts]),
    )
