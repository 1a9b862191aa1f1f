"""Checks on ranks: which rows a context-parallel, tensor-parallel or Ulysses rank holds, in which
order, and how they are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from rollproof.errors import LayoutError
from rollproof.invariants._shared.phrases import count
from rollproof.invariants.layout.call_check import (
    LayoutCall,
    compare_parts,
    compare_rows,
    layout_check,
)
from rollproof.judging.checks import Collector
from rollproof.layouts.padding import Side, cumulative_lengths
from rollproof.layouts.row_slices import Context, Order, context_rows, flat_rows
from rollproof.layouts.sources import Indexes, Source

__all__ = [
    "layout_context",
    "layout_context_merge",
    "layout_flatten_order",
    "layout_merge",
    "layout_targets",
    "layout_tensor_slice",
    "layout_ulysses_slice",
]


@layout_check(
    "layout.context",
    functions=("context",),
    promise=(
        "A context-parallel rank holds the rows that the declared division (zigzag, contiguous)"
        " gives it, as it holds their tokens."
    ),
    exercised_by=("rows compared", "sequences shorter than 2 * cp"),
)
def layout_context(record: LayoutCall, out: Collector) -> None:
    """Compare the rows of a context-parallel rank with the declared division."""
    expected = record.before_tensor_slice()
    if len(record.event.out[0]) != len(expected):
        out.absent("the number of rows of a rank is not that of its layout (layout.alignment)")
        return
    out.exercised(
        "sequences shorter than 2 * cp",
        sum(length < 2 * record.layout.mesh.cp for length in record.call.lengths),
    )
    compare_rows(
        record,
        out,
        "rows compared",
        record.event.out[0],
        expected,
        title=f"a rank holds other rows than {record.layout.context} gives it",
        hint=(
            "Divide routes like token ids: zigzag by sequence, or one contiguous piece of all"
            " rows (slime#2175, ms-swift#9981)."
        ),
        others=_other_ranks(record) | _other_divisions(record),
    )


def _merged_multiple(record: LayoutCall) -> str | None:
    """Return the multiple, other than the declared one, whose padded lengths explain merged rows
    that are wrong.
    """
    layout, lengths = record.layout, record.call.lengths
    right = [Source.whole(i, length) for i, length in enumerate(lengths)]
    if not layout.packed or _holds(record, right):
        return None
    pieces = [record.before_tensor_slice(cp) for cp in range(layout.mesh.cp)]
    for name, multiple in record.other_multiples.items():
        if multiple == layout.alignment.multiple(layout.mesh):
            continue
        cumulative = cumulative_lengths(lengths, multiple)
        try:
            merged = _merged(pieces, cumulative, layout.context)
        # lengths that do not divide, or for which there are too few rows
        except (LayoutError, IndexError):
            continue
        samples = [
            merged[start : start + length]
            for start, length in zip(cumulative, lengths, strict=False)
        ]
        if _holds(record, samples):
            return f"{name} = {multiple}" if name != "1" else name
    return None


def _merged(pieces: list[Source], cumulative: Indexes, context: Context) -> Source:
    """Return packed rows of the lengths ``cumulative``, read from the rows of each rank. Raises
    ``LayoutError`` or ``IndexError`` if that cannot be.
    """
    merged = Source.padding(int(cumulative[-1]))
    for cp, piece in enumerate(pieces):
        places = context_rows(context, cumulative, len(pieces), cp)
        rows = piece[np.arange(len(places))]
        merged.sample[places], merged.position[places] = rows.sample, rows.position
    return merged


def _holds(record: LayoutCall, samples: list[Source]) -> bool:
    """Return whether the function returned exactly these samples."""
    parts, coding = record.event.out, record.call.coding
    return len(parts) == len(samples) and all(
        part.shape == (len(source), coding.columns, coding.width)
        and np.array_equal(coding.decode(part), record.cells(source))
        for part, source in zip(parts, samples, strict=True)
    )


def _other_divisions(record: LayoutCall) -> dict[str, Callable[[], Source]]:
    """Return what the rank would hold under the other divisions."""
    layout, call = record.layout, record.call
    # Without sequence parallelism, so that only the context division differs.
    plain = replace(layout.mesh, sequence_parallel=False)
    kinds = {
        kind: replace(layout, context=kind, mesh=plain)
        for kind in Context
        if kind is not layout.context
    }
    return {
        f"the {kind} division, where {layout.context} is declared": partial(
            other.rows, call.lengths, call.rank
        )
        for kind, other in kinds.items()
    }


def _other_ranks(record: LayoutCall) -> dict[str, Callable[[], Source]]:
    """Return what the other context-parallel ranks hold."""
    ranks = [cp for cp in range(record.layout.mesh.cp) if cp != record.call.rank.cp]
    return {f"what rank {cp} should hold": partial(record.before_tensor_slice, cp) for cp in ranks}


@layout_check(
    "layout.context-merge",
    functions=("context_merge",),
    promise="The rows of all context-parallel ranks come back to each sample in its own order.",
    exercised_by="rows compared",
)
def layout_context_merge(record: LayoutCall, out: Collector) -> None:
    """Compare merged rows with each sample's own order."""
    if (multiple := _merged_multiple(record)) is not None:
        lengths = len(record.call.lengths)
        out.exercised("rows compared", sum(record.call.lengths))
        out.finding(
            "rows of context-parallel ranks are merged by other padded lengths",
            expected=(
                f"{count(lengths, 'sequence')} padded to multiples of"
                f" {record.layout.alignment.multiple(record.layout.mesh)}"
            ),
            observed=f"rows as multiples of {multiple} give",
            where=record.place(),
            hint=(
                "The order is right, and the padding is not: merge by the lengths to which the"
                " rows were padded before they were divided (layout.alignment)."
            ),
        )
        return
    compare_parts(
        record,
        out,
        "rows compared",
        [Source.whole(i, length) for i, length in enumerate(record.call.lengths)],
        title="rows of context-parallel ranks are merged in another order than they were divided",
        hint=(
            "Concatenating the ranks undoes a contiguous division; after a zigzag the two"
            " chunks of each rank must be put back."
        ),
    )


@layout_check(
    "layout.tensor-slice",
    functions=("tensor_slice",),
    promise=(
        "Under sequence parallelism a tensor-parallel rank gets its one contiguous piece of the"
        " rows."
    ),
    exercised_by="rows compared",
)
def layout_tensor_slice(record: LayoutCall, out: Collector) -> None:
    """Compare the rows of a tensor-parallel rank with its piece."""
    size, rank, total = record.layout.mesh.tp, record.call.rank.tp, record.call.lengths[0]
    _slice(
        record,
        out,
        size,
        rank,
        total,
        "Megatron scatters rows in one piece per tensor-parallel rank; every rank sees total / tp"
        " rows.",
    )


@layout_check(
    "layout.ulysses-slice",
    functions=("ulysses",),
    promise=(
        "A Ulysses rank gets its one contiguous piece of the rows, which were padded as token ids"
        " are."
    ),
    exercised_by="rows compared",
)
def layout_ulysses_slice(record: LayoutCall, out: Collector) -> None:
    """Compare the rows of a Ulysses rank with its piece."""
    size, rank = record.layout.mesh.ulysses, record.call.rank.ulysses
    # Ulysses pads to a multiple of its size before it slices.
    total = -(-record.call.lengths[0] // size) * size
    if (
        len(record.event.out[0]) != total // size
        and len(record.event.out[0]) != record.call.lengths[0]
    ):
        out.absent("the number of rows of a rank is not that of its layout (layout.alignment)")
        return
    _slice(
        record,
        out,
        size,
        rank,
        total,
        "Routes go through the same pad-and-slice as token ids (verl"
        " ulysses_pad_and_slice_inputs).",
    )


def _slice(record: LayoutCall, out: Collector, size: int, rank: int, total: int, hint: str) -> None:
    """Compare a piece of ``total`` rows, of which those after the sample's are padding."""
    length = record.call.lengths[0]
    source = Source.padding(total)
    source.sample[:length], source.position[:length] = 0, np.arange(length)
    part = total // size
    rows = record.event.out[0]
    if len(rows) != part:
        out.finding(
            "a slice has the wrong length",
            expected=count(part, "row"),
            observed=f"{len(rows)}" + (": all rows, not a slice" if len(rows) >= length else ""),
            where=record.place(),
            hint=hint,
        )
        return
    others: dict[str, Callable[[], Source]] = {
        # The usual confusion: interleaved rows in place of one contiguous piece.
        "every n-th row, not one piece": lambda: source[rank::size]
    }
    others |= {
        f"the piece of rank {n}": partial(source.__getitem__, slice(n * part, (n + 1) * part))
        for n in range(size)
        if n != rank
    }
    compare_rows(
        record,
        out,
        "rows compared",
        rows,
        source[rank * part : (rank + 1) * part],
        title="a rank gets another piece of the rows",
        hint=hint,
        others=others,
    )


@layout_check(
    "layout.flatten-order",
    functions=("flatten",),
    promise="A batch is flattened in the order in which the model flattens its hidden states.",
    exercised_by=("rows compared", "batches of more than one sample"),
)
def layout_flatten_order(record: LayoutCall, out: Collector) -> None:
    """Compare the order of flattened rows with the declared one."""
    lengths, layout = record.call.lengths, record.layout
    batch = Source(
        sample=np.repeat(np.arange(len(lengths))[:, None], lengths[0], axis=1),
        position=np.repeat(np.arange(lengths[0])[None], len(lengths), axis=0),
    ).flat()
    other = Order.BATCH_MAJOR if layout.order is Order.SEQUENCE_MAJOR else Order.SEQUENCE_MAJOR
    out.exercised("batches of more than one sample", int(len(lengths) > 1))
    if len(record.event.out[0]) != len(batch):
        out.finding(
            "flattening changed the number of rows",
            expected=count(len(batch), "row"),
            observed=str(record.event.out[0].shape),
            where=record.place(),
            hint="Every place of the batch is a router row, including padding.",
        )
        return
    compare_rows(
        record,
        out,
        "rows compared",
        record.event.out[0],
        batch[flat_rows(layout.order, len(lengths), lengths[0])],
        title=f"rows are not in {layout.order} order",
        hint=(
            "Megatron's hidden states are (sequence, batch, hidden): row s * batch + b; HF's are"
            " (batch, sequence, hidden)."
        ),
        others={f"{other} order": lambda: batch[flat_rows(other, len(lengths), lengths[0])]},
    )


@layout_check(
    "layout.targets",
    functions=("targets",),
    promise=(
        "Each router of a rank gets, for each row that it sees, the recorded choice of its own"
        " layer for that row's token."
    ),
    exercised_by=("rows compared", "routers compared"),
)
def layout_targets(record: LayoutCall, out: Collector) -> None:
    """Compare the targets of each router with the recorded choices."""
    call, layout = record.call, record.layout
    tables = dict(zip(record.event.out[0].tolist(), record.event.out[1:], strict=True))
    routers = layout.routers(call.rank.pp, call.chunk)
    out.exercised("routers compared", len(routers))
    # verl#5037 and slime#819 counted dense layers as routers.
    if sorted(tables) != sorted(routers):
        out.finding(
            "targets for layers that the rank does not route",
            expected=f"layers {list(routers)}",
            observed=f"layers {sorted(tables)}",
            where=record.place(),
            hint=(
                "A stage's routers are the MoE layers that it builds; dense ones have none"
                " (verl#5037, slime#819)."
            ),
        )
        return
    source = layout.rows(call.lengths, call.rank)
    # Rows without a capture have no target: what the router gets there is layout.padding-rows's to
    # judge.
    free = ~layout.captured(source, call.held or call.lengths)
    expected = Source(
        sample=np.where(free, -1, source.sample), position=np.where(free, -1, source.position)
    )
    for layer in routers:
        rows = tables[layer]
        if rows.ndim != 2 or len(rows) != len(source):
            out.finding(
                "targets and the router's rows differ in number",
                expected=f"({len(source)}, k) for layer {layer}",
                observed=str(rows.shape),
                where=record.place(layer=layer),
                hint=(
                    "Targets are padded, sliced and scattered as the hidden states are;"
                    " gather silently accepts a short one."
                ),
            )
            return
        compare_rows(
            record,
            out,
            "rows compared",
            rows[:, None],
            expected,
            title="a router is given another row's or layer's choice",
            hint=(
                "Apply padding, packing, context and tensor slices, and the layer map in the"
                " model's order."
            ),
            others=_without_free(free, _other_batches(record) | _other_divisions(record)),
            columns=[layout.column[layer]],
            layer=layer,
        )


def _without_free(
    free: np.ndarray[tuple[int], np.dtype[np.bool_]], others: dict[str, Callable[[], Source]]
) -> dict[str, Callable[[], Source]]:
    """Return the alternatives without the rows that no forward pass captured."""

    def masked(make: Callable[[], Source]) -> Source:
        source = make()
        return Source(
            sample=np.where(free, -1, source.sample), position=np.where(free, -1, source.position)
        )

    return {name: partial(masked, make) for name, make in others.items()}


def _other_batches(record: LayoutCall) -> dict[str, Callable[[], Source]]:
    """Return a pack read as a padded batch or the reverse, a batch in the other order, or with
    padding on the other side.
    """
    layout = record.layout
    order = Order.BATCH_MAJOR if layout.order is Order.SEQUENCE_MAJOR else Order.SEQUENCE_MAJOR
    side = Side.RIGHT if layout.side is Side.LEFT else Side.LEFT
    names = {True: "pack", False: "padded batch"}
    others = {
        f"a {names[not layout.packed]}, where a {names[layout.packed]} is declared": replace(
            layout, packed=not layout.packed
        )
    }
    if not layout.packed:
        others[f"{order} order, where {layout.order} is declared"] = replace(layout, order=order)
        if layout.side is not Side.BOTH:
            others[f"padding on the {side}, where padding on the {layout.side} is declared"] = (
                replace(layout, side=side)
            )
    return {
        name: partial(other.rows, record.call.lengths, record.call.rank)
        for name, other in others.items()
    }


@layout_check(
    "layout.merge",
    functions=("merge",),
    promise=(
        "The recordings of all ranks and chunks are merged to the payload that one rank would"
        " have recorded."
    ),
    exercised_by=("rows compared", "ranks merged"),
)
def layout_merge(record: LayoutCall, out: Collector) -> None:
    """Compare merged recordings with the samples."""
    layout = record.layout
    out.exercised("ranks merged", layout.mesh.shares * layout.mesh.pp)
    columns = [layout.column[layer] for layer in layout.moe]
    expected = [Source.whole(i, length) for i, length in enumerate(record.call.lengths)]
    moe = replace(
        record.event,
        out=tuple(
            part[:, columns] if part.ndim == 3 and part.shape[1] == layout.columns else part
            for part in record.event.out
        ),
    )
    compare_parts(
        LayoutCall(moe),
        out,
        "rows compared",
        expected,
        title="merged recordings are not the samples' rows",
        hint=(
            "Gather tensor-parallel slices, undo the context division, put pipeline ranks and"
            " chunks in the order of layers (verl#7106)."
        ),
        columns=columns,
    )
