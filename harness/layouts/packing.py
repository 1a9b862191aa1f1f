"""Packing: sequences one behind the other, each padded to a multiple that the parallel layout asks
for.

Packed rows are described by *cumulative lengths* ``(sequences + 1,)``: rows ``cumulative[i]`` to
``cumulative[i] + length[i]`` belong to sequence i, and those up to ``cumulative[i + 1]`` are
padding (verl ``preprocess_thd_engine``, Megatron's THD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollproof.errors import LayoutError
from rollproof.layouts.sources import Indexes, Source, joined

if TYPE_CHECKING:
    from rollproof.layouts.mesh import Mesh

__all__ = ["FACTORS", "Alignment", "cumulative_lengths", "packed"]

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
