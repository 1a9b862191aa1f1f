"""The sizes of a parallel layout, and the ranks of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product

from rollproof.errors import LayoutError

__all__ = ["Mesh", "Rank"]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Rank:
    """A rank, by its index on each axis of the mesh."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0
    ulysses: int = 0

    def __str__(self) -> str:
        named = [
            f"{field.name} {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name)
        ]
        return ", ".join(named) or "the first rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Sizes of data, context, tensor, pipeline and Ulysses parallelism.

    ``vpp`` is the number of model chunks on a pipeline rank. With ``sequence_parallel`` a router
    sees rows that are sliced over the tensor-parallel ranks (Megatron's SP). Expert parallelism
    moves no rows before the router, so it is no part of a layout.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ulysses: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("dp", "cp", "tp", "pp", "vpp", "ulysses")}
        bad = {
            name: size
            for name, size in sizes.items()
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        }
        if bad:
            raise LayoutError(f"The sizes of a mesh are whole numbers >= 1, not {bad}.")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"vpp={self.vpp} needs pp > 1: model chunks alternate between pipeline ranks."
            )
        # Megatron's ModelParallelConfig refuses it, too
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError(
                "sequence_parallel=True needs tp > 1: rows are sliced over the tensor-parallel"
                " ranks."
            )

    def factor(self, name: str) -> int:
        """Return the size that an ``Alignment`` names."""
        # zigzag gives each rank two chunks; without context parallelism nothing is cut
        if name == "2cp":
            return 2 * self.cp if self.cp > 1 else 1
        size: int = getattr(self, name)
        return size

    @property
    def shares(self) -> int:
        """The number of ranks over which the rows of a microbatch are divided."""
        return self.cp * self.ulysses * (self.tp if self.sequence_parallel else 1)

    def row_ranks(self, dp: int = 0, pp: int = 0) -> Iterator[Rank]:
        """Yield the ranks of one replica and pipeline stage, context-parallel rank first."""
        for cp, tp, ulysses in product(range(self.cp), range(self.tp), range(self.ulysses)):
            yield Rank(dp=dp, pp=pp, cp=cp, tp=tp, ulysses=ulysses)

    def ranks(self) -> Iterator[Rank]:
        """Yield all ranks."""
        for dp, pp in product(range(self.dp), range(self.pp)):
            yield from self.row_ranks(dp, pp)
