"""Stages: which layers a pipeline rank builds, chunk by chunk.

With virtual stages, chunk v of rank r follows chunk v of rank r - 1, and chunk v + 1 of rank 0
follows chunk v of the last rank: with 8 layers, pp 2 and vpp 2, rank 0 builds ``(0, 1), (4, 5)``
(Megatron ``get_transformer_layer_offset``). So layers are dealt out by counting through the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rollproof.errors import LayoutError

__all__ = ["Chunks", "Stages"]

Chunks = tuple[tuple[tuple[int, ...], ...], ...]
"""The layers of chunk v on pipeline rank r: ``chunks[r][v]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """How layers are divided over pipeline ranks: evenly, unless something is set.

    ``first`` and ``last`` are the layers of the first and the last rank (Megatron's
    ``num_layers_in_first_pipeline_stage``); the others share the rest. ``embedding`` and ``loss``
    count the embedding and the loss as a layer of the first and the last chunk
    (``account_for_embedding_in_pipeline_split``). ``custom[r][v]`` are explicit counts; a stage may
    be empty.
    """

    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    custom: tuple[tuple[int, ...], ...] | None = None

    def counts(self, num_layers: int, pp: int, vpp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Layers of each chunk, ``counts[r][v]``. Raises ``LayoutError`` where they do not come
        out.
        """
        if self.custom is not None:
            return self._custom(num_layers, pp, vpp)
        uneven = self.first is not None or self.last is not None
        if uneven and (self.embedding or self.loss):
            raise LayoutError(
                "Counting the embedding or the loss as a layer cannot be combined with uneven"
                " stages."
            )
        slots = num_layers + self.embedding + self.loss
        rest = slots - (self.first or 0) - (self.last or 0)
        others = pp - (self.first is not None) - (self.last is not None)
        if rest < 0 or (others == 0 and rest) or (others > 0 and rest % others) or others < 0:
            raise LayoutError(
                f"{rest} layers do not divide over {others} of {pp} pipeline ranks ({self})."
            )
        share = rest // others if others else 0
        ranks = [share] * pp
        if self.first is not None:
            ranks[0] = self.first
        if self.last is not None:
            ranks[-1] = self.last
        if any(count % vpp for count in ranks):
            raise LayoutError(f"Stages of {ranks} layers do not divide over {vpp} chunks each.")
        counts = [[count // vpp] * vpp for count in ranks]
        counts[0][0] -= self.embedding
        counts[-1][-1] -= self.loss
        return tuple(tuple(chunks) for chunks in counts)

    def layers(self, num_layers: int, pp: int, vpp: int = 1) -> Chunks:
        """The layers of each chunk. Raises ``LayoutError``."""
        return _dealt(self, num_layers, pp, vpp)

    def _custom(self, num_layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
        custom: Sequence[Sequence[int]] = self.custom or ()
        if (
            len(custom) != pp
            or any(len(chunks) != vpp for chunks in custom)
            or sum(map(sum, custom)) != num_layers
        ):
            raise LayoutError(
                f"Custom stages {self.custom} must hold {pp} x {vpp} counts that add up to"
                f" {num_layers} layers."
            )
        if any(count < 0 for chunks in custom for count in chunks):
            raise LayoutError(f"Custom stages {self.custom} hold a negative count.")
        return tuple(tuple(chunks) for chunks in custom)


@lru_cache(maxsize=1024)
def _dealt(stages: Stages, num_layers: int, pp: int, vpp: int) -> Chunks:
    """Every router of every rank asks for the chunks of all: they are counted through once per
    layout.
    """
    counts = stages.counts(num_layers, pp, vpp)
    out: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    start = 0
    for chunk in range(vpp):
        for rank in range(pp):
            out[rank].append(tuple(range(start, start + counts[rank][chunk])))
            start += counts[rank][chunk]
    return tuple(tuple(chunks) for chunks in out)
