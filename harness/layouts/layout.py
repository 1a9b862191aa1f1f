"""Declare how a trainer lays out rows and layers, and compute where each of them goes.

A ``Layout`` combines a framework's conventions and a run's parallel sizes. It answers both ways:
which rows and layers a rank has (``rows``, ``routers``, ``targets``), and where a row or a layer
went (``places``, ``stage_of``, ``merge``)::

    layout = Layout(
        num_layers=4,
        num_experts=64,
        top_k=2,
        mesh=Mesh(tp=2, cp=3, sequence_parallel=True),
        alignment=Alignment(by=("tp", "2cp")),
    )
    # Source: sample and position of each local row
    layout.rows([10, 7], Rank(cp=1, tp=0))
    # {layer: (rows, top_k)} for the routers of that rank
    layout.targets(payloads, Rank(cp=1), chunk=0)

Rows and layers are independent: ``cp``, ``tp`` and ``ulysses`` of a rank decide its rows, ``pp``
and the chunk its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import LayerAxis, Provenance, Rows
from rollproof.core.records import IntArray
from rollproof.errors import LayoutError
from rollproof.layouts.merged_rows import scattered
from rollproof.layouts.mesh import Mesh, Rank
from rollproof.layouts.padding import (
    Alignment,
    Fill,
    Side,
    completed,
    cumulative_lengths,
    fill_rows,
    packed,
    padded,
)
from rollproof.layouts.pipeline import Chunks, Stages, columns_of
from rollproof.layouts.row_slices import (
    Context,
    Order,
    context_rows,
    contiguous_rows,
    flat_rows,
    padded_length,
)
from rollproof.layouts.sources import Indexes, Source, joined

__all__ = ["Layout"]

_ENUMS = {
    "layer_axis": LayerAxis,
    "held": Rows,
    "provenance": Provenance,
    "side": Side,
    "order": Order,
    "context": Context,
    "fill": Fill,
    "final": Fill,
}
_RECORDS: Mapping[str, Any] = {"mesh": Mesh, "stages": Stages, "alignment": Alignment}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A trainer's conventions and sizes.

    Plain strings are accepted for enum members. Raises ``LayoutError``.

    Attributes:
        num_layers: transformer layers of the main model.
        num_experts: experts of a MoE layer.
        top_k: experts per token.
        moe_layers: the layers with a router (default: all).
        layer_axis: whether a payload has a column for each layer, or for MoE layers only.
        held: how many rows a sample of T tokens has.
        provenance: which call's row a resumed sample retains.
        dtype: type in which ids are stored.
        mesh: parallel sizes.
        stages: how layers are divided over pipeline ranks.
        packed: a batch is one row of sequences; else it is padded and flattened.
        side: side of the padding.
        order: order in which a padded batch is flattened.
        alignment: what lengths are rounded up to.
        context: how rows are divided over context-parallel ranks.
        fill: contents of padding rows.
        final: contents of rows of tokens that were never captured.
        group: microbatch group of an interleaved schedule (default: the pipeline size).
    """

    num_layers: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...] | None = None
    layer_axis: LayerAxis = LayerAxis.ALL
    held: Rows = Rows.FORWARDED
    provenance: Provenance = Provenance.AS_SAMPLED
    dtype: str = "int16"
    mesh: Mesh = field(default_factory=Mesh)
    stages: Stages = field(default_factory=Stages)
    packed: bool = True
    side: Side = Side.RIGHT
    order: Order = Order.SEQUENCE_MAJOR
    alignment: Alignment = field(default_factory=Alignment)
    context: Context = Context.ZIGZAG
    fill: Fill = Fill.ARANGE
    final: Fill = Fill.ARANGE
    group: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _ENUMS.items():
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                raise LayoutError(
                    f"{name}={getattr(self, name)!r} is not valid; choose one of"
                    f" {[str(member) for member in kind]}."
                ) from None
        moe = tuple(range(self.num_layers)) if self.moe_layers is None else tuple(self.moe_layers)
        object.__setattr__(self, "moe_layers", moe)
        if list(moe) != sorted(set(moe)) or any(not 0 <= layer < self.num_layers for layer in moe):
            raise LayoutError(
                f"moe_layers={moe} must be ascending, distinct layers below"
                f" num_layers={self.num_layers}."
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise LayoutError(
                f"top_k={self.top_k} must be at least 1 and at most num_experts={self.num_experts}."
            )
        self.chunks()

    # Layers

    @property
    def moe(self) -> tuple[int, ...]:
        """The layers with a router, as ``moe_layers`` (never ``None``)."""
        return self.moe_layers or ()

    @property
    def columns(self) -> int:
        """Length of a payload's layer axis."""
        return self.num_layers if self.layer_axis is LayerAxis.ALL else len(self.moe)

    @property
    def column(self) -> Mapping[int, int]:
        """The payload's column of each MoE layer."""
        return columns_of(self.moe, self.layer_axis)

    def chunks(self) -> Chunks:
        """Return the layers of chunk v on pipeline rank r, dense ones too: ``chunks()[r][v]``."""
        return self.stages.layers(self.num_layers, self.mesh.pp, self.mesh.vpp)

    def routers(self, pp: int = 0, chunk: int = 0) -> tuple[int, ...]:
        """Return the MoE layers of one chunk, in the order in which its routers are built."""
        # dense layers have no router: counting them shifts every layer after one (verl#5037,
        # slime#819)
        return tuple(layer for layer in self.chunks()[pp][chunk] if layer in self.moe)

    def stage_of(self, layer: int) -> tuple[int, int, int]:
        """Return ``(pipeline rank, chunk, index of the router in the chunk)`` of a MoE layer.

        Raises ``LayoutError`` for a layer without a router.
        """
        for pp, chunks in enumerate(self.chunks()):
            for chunk in range(len(chunks)):
                if layer in (routers := self.routers(pp, chunk)):
                    return pp, chunk, routers.index(layer)
        raise LayoutError(f"Layer {layer} has no router; the layers with one are {self.moe}.")

    # Rows

    def cumulative(self, lengths: Sequence[int]) -> Indexes:
        """Return where packed sequences begin, padding included: ``(sequences + 1,)``."""
        return cumulative_lengths(
            lengths, self.alignment.multiple(self.mesh), self.alignment.total_multiple(self.mesh)
        )

    def batch(self, prompts: Sequence[int], responses: Sequence[int]) -> Source:
        """Return the source ``(batch, width)`` of a padded batch."""
        return padded(prompts, responses, self.side, self.alignment.multiple(self.mesh))

    def rows(
        self,
        lengths: Sequence[int],
        rank: Rank | None = None,
        *,
        prompts: Sequence[int] | None = None,
    ) -> Source:
        """Return the source ``(rows,)`` of the rows that a router of ``rank`` sees.

        It is that of one microbatch of samples with ``lengths`` tokens. ``prompts`` are the prompt
        lengths, which padding on both sides needs. Raises ``LayoutError`` if rows do not divide.
        """
        rank = rank or Rank()
        if not self.packed:
            return self._batch_rows(
                lengths, rank, [0] * len(lengths) if prompts is None else prompts
            )
        cumulative = self.cumulative(lengths)
        source = packed(lengths, cumulative)[
            context_rows(self.context, cumulative, self.mesh.cp, rank.cp)
        ]
        return self._sliced(source, rank)

    def captured(self, source: Source, held: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return which rows of ``source`` are in payloads of ``held`` rows each, ``(rows,)``.

        It is false in padding.
        """
        return np.asarray(
            source.filled & (source.position < np.asarray(held, dtype=np.int64)[source.sample])
        )

    def places(self, lengths: Sequence[int], sample: int, position: int) -> list[tuple[Rank, int]]:
        """Return every rank of one replica and stage that has a position of a sample, with its
        local row.
        """
        places = []
        for rank in self.mesh.row_ranks():
            source = self.rows(lengths, rank)
            here = np.flatnonzero((source.sample == sample) & (source.position == position))
            places += [(rank, int(row)) for row in here]
        return places

    # Both

    def targets(
        self,
        payloads: Sequence[IntArray],
        rank: Rank | None = None,
        chunk: int = 0,
        *,
        lengths: Sequence[int] | None = None,
    ) -> dict[int, npt.NDArray[np.int64]]:
        """Return what the routers of one chunk must select: ``{layer: (rows, top_k)}``.

        It is that of one microbatch of ``payloads``, each ``(rows, columns, top_k)``. ``lengths``
        are the samples' tokens (default: the payloads' rows); the last tokens may have no row.
        Raises ``LayoutError`` for more rows than tokens, or other columns.
        """
        rank = rank or Rank()
        tokens = [len(payload) for payload in payloads] if lengths is None else list(lengths)
        # a longer layer axis would be read without an error, as columns of other layers
        for i, payload in enumerate(payloads):
            if payload.ndim != 3 or payload.shape[1] != self.columns:
                raise LayoutError(
                    f"Payload {i} has the shape {payload.shape}, but the layout has"
                    f" {self.columns} columns."
                )
        rows_of = [
            completed(p, n, self.final, self.num_experts)[0]
            for p, n in zip(payloads, tokens, strict=True)
        ]
        source = self.rows(tokens, rank)
        rows = (
            source.take(rows_of).astype(np.int64)
            if rows_of
            else np.zeros((len(source), self.columns, self.top_k), dtype=np.int64)
        )
        padding = ~source.filled
        rows[padding] = fill_rows(
            int(padding.sum()), self.columns, self.top_k, self.fill, self.num_experts
        )
        return {layer: rows[:, self.column[layer]] for layer in self.routers(rank.pp, chunk)}

    def merge(
        self,
        recorded: Mapping[tuple[Rank, int], Mapping[int, IntArray]],
        lengths: Sequence[int],
        *,
        dp: int = 0,
    ) -> list[npt.NDArray[np.int64]]:
        """Merge what all routers of a replica recorded for one microbatch.

        ``recorded[rank, chunk]`` is ``{layer: (rows, top_k)}``. Returns one payload ``(tokens,
        columns, top_k)`` per sample; columns of dense layers are 0. Raises ``LayoutError`` if a
        rank or a layer is missing, or if ranks disagree.
        """
        # SGLang and vLLM, too, leave columns of dense layers at zero
        out = [np.zeros((length, self.columns, self.top_k), dtype=np.int64) for length in lengths]
        for layer in self.moe:
            pp, chunk, _ = self.stage_of(layer)
            pieces = []
            for rank in self.mesh.row_ranks(dp, pp):
                if layer not in recorded.get((rank, chunk), {}):
                    raise LayoutError(
                        f"Nothing was recorded for layer {layer} by {rank}, chunk {chunk}."
                    )
                pieces.append((self.rows(lengths, rank), recorded[rank, chunk][layer]))
            for rows, values in zip(out, scattered(pieces, lengths), strict=True):
                rows[:, self.column[layer]] = values
        return out

    # Plain form

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; ``from_dict`` is its inverse."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote. Raises ``LayoutError`` for unknown or missing fields."""
        names = {entry.name for entry in fields(cls)}
        if set(data) - names or {"num_layers", "num_experts", "top_k"} - set(data):
            raise LayoutError(
                "A layout needs num_layers, num_experts and top_k, and its fields are among"
                f" {sorted(names)}; these are {sorted(data)}."
            )
        values = {key: _tuples(value) for key, value in data.items()}
        try:
            for name, record in _RECORDS.items():
                if isinstance(values.get(name), Mapping):
                    values[name] = record(
                        **{key: _tuples(value) for key, value in values[name].items()}
                    )
            return cls(**values)
        except TypeError as error:
            raise LayoutError(f"This is not a layout: {error}.") from error

    def _batch_rows(self, lengths: Sequence[int], rank: Rank, prompts: Sequence[int]) -> Source:
        responses = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
        batch = self.batch(prompts, responses)
        width = batch.shape[1]
        local = context_rows(
            self.context, np.array([0, width], dtype=np.int64), self.mesh.cp, rank.cp
        )
        rows = joined(
            [self._sliced(row, rank) for row in (batch[i][local] for i in range(len(lengths)))]
        )
        return rows[flat_rows(self.order, len(lengths), len(rows) // max(1, len(lengths)))]

    def _sliced(self, source: Source, rank: Rank) -> Source:
        """Return the part of a line of rows that a rank has within its context-parallel rank."""
        # Ulysses first: under sequence parallelism a tensor-parallel rank slices what is left
        mesh = self.mesh
        if mesh.ulysses > 1:
            source = joined(
                [source, Source.padding(padded_length(len(source), mesh.ulysses) - len(source))]
            )
            source = source[contiguous_rows(len(source), mesh.ulysses, rank.ulysses)]
        if mesh.sequence_parallel:
            source = source[contiguous_rows(len(source), mesh.tp, rank.tp)]
        return source

    def all_rows(self, lengths: Sequence[int]) -> Iterator[tuple[Rank, Source]]:
        """Yield every rank of one replica and stage with its rows."""
        for rank in self.mesh.row_ranks():
            yield rank, self.rows(lengths, rank)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value
