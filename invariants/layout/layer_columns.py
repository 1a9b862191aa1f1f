"""Checks on layers: which router reads which column, which rank builds which layer, and in which
order microbatches run.
"""

from __future__ import annotations

from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import count, share
from rollproof.invariants.layout.call_check import (
    LayoutCall,
    compare_parts,
    compare_rows,
    layout_check,
)
from rollproof.judging.checks import Collector
from rollproof.layouts.functions import FUNCTIONS
from rollproof.layouts.pipeline import Operation, expected_targets
from rollproof.layouts.sources import Source

__all__ = [
    "layout_chunk_order",
    "layout_layer_map",
    "layout_recompute",
    "layout_stage_gather",
    "layout_stages",
    "layout_virtual_stages",
]


@layout_check(
    "layout.layer-map",
    functions=("select",),
    promise=(
        "The router of a layer reads the payload's column of that layer; dense layers, stages"
        " and heads do not shift it."
    ),
    exercised_by=("routers compared", "stages without MoE layers"),
)
def layout_layer_map(record: LayoutCall, out: Collector) -> None:
    """Compare the columns that the routers of a chunk read with the layers' own."""
    call, layout = record.call, record.layout
    routers = layout.routers(call.rank.pp, call.chunk)
    layers = record.event.out[0].ravel().tolist()
    out.exercised("routers compared", len(routers))
    out.exercised("stages without MoE layers", int(not routers))
    # A chunk may hold no MoE layer at all: an empty answer is right then.
    if sorted(layers) != sorted(routers):
        out.finding(
            "columns of layers that the chunk does not route",
            expected=f"layers {list(routers)}",
            observed=f"layers {sorted(layers)}",
            where=record.place(),
            hint=(
                "The routers of a chunk are the MoE layers that it builds: dense layers have none,"
                " and a chunk may have none at all."
            ),
        )
        return
    wrong = []
    for layer, value in zip(layers, record.event.out[1:], strict=True):
        column = _column(record, value)
        if column != layout.column[layer]:
            wrong.append((layer, column))
    if wrong:
        layer, column = wrong[0]
        layer_of = {captured_count: of for of, captured_count in layout.column.items()}
        owner = (
            f"that of layer {layer_of[column]}"
            if column in layer_of
            else (
                "of no MoE layer"
                if column is not None
                else "or rows of several layers, or in another order"
            )
        )
        out.finding(
            "a router reads another layer's column",
            expected=(
                f"layer {layer} reads column {layout.column[layer]} of {layout.columns} (layer"
                f" axis: {layout.layer_axis})"
            ),
            observed=(
                f"column {column}, {owner}; so for {share(len(wrong), len(routers), 'router')}"
            ),
            where=record.place(layer=layer),
            hint=(
                "Index by the global layer if the payload has all layers, and by the ordinal"
                " among MoE layers if it has only those; a multi-token-prediction layer is"
                " neither (verl#5037, NeMo-RL#3903)."
            ),
        )


def _column(record: LayoutCall, value: IntArray) -> int | None:
    """Return the payload column that a router reads; ``None`` if its rows come from none or
    several, or are not in order.
    """
    if value.ndim == 0:
        return int(value)
    if value.ndim != 2 or not len(value) or value.shape[-1] != record.call.coding.width:
        return None
    places = [record.call.coding.place(int(cell)) for cell in record.call.coding.decode(value)]
    column = places[0][2]
    return (
        column
        if places == [(0, position, column) for position in range(record.call.lengths[0])]
        else None
    )


def _chunk_layers(record: LayoutCall, out: Collector, hint: str) -> None:
    """Compare the layers, or the routers, of a chunk."""
    call, layout, actual = record.call, record.layout, record.event.out[0]
    moe = record.event.function == "routers"
    expected = (
        layout.routers(call.rank.pp, call.chunk)
        if moe
        else layout.chunks()[call.rank.pp][call.chunk]
    )
    out.exercised("chunks compared")
    out.exercised("chunks without layers", int(not expected))
    equal = (
        int(actual) == len(expected)
        if actual.ndim == 0
        else actual.ravel().tolist() == list(expected)
    )
    if not equal:
        out.finding(
            f"a chunk has other {'routers' if moe else 'layers'}",
            expected=(
                f"{list(expected)} (chunks of all ranks:"
                f" {[list(map(list, chunks)) for chunks in layout.chunks()]})"
            ),
            observed=count(int(actual), "layer")
            if actual.ndim == 0
            else str(actual.ravel().tolist()),
            where=record.place(),
            hint=hint,
        )


@layout_check(
    "layout.stages",
    functions=("stage_layers", "routers"),
    promise=(
        "Each layer is built by the pipeline rank of the declared division: even, uneven,"
        " with embedding or loss counted, custom."
    ),
    exercised_by=("chunks compared", "chunks without layers"),
)
def layout_stages(record: LayoutCall, out: Collector) -> None:
    """Compare the layers of each stage without virtual stages."""
    if record.layout.mesh.vpp == 1:
        _chunk_layers(
            record,
            out,
            "Uneven first and last stages and custom layouts shift the offset of every later"
            " stage.",
        )


@layout_check(
    "layout.virtual-stages",
    functions=("stage_layers", "routers"),
    promise=(
        "Chunk v of a pipeline rank follows chunk v of the previous rank, and chunk v - 1 of"
        " the last rank."
    ),
    exercised_by=("chunks compared", "chunks without layers"),
)
def layout_virtual_stages(record: LayoutCall, out: Collector) -> None:
    """Compare the layers of each chunk with virtual stages."""
    if record.layout.mesh.vpp > 1:
        _chunk_layers(
            record,
            out,
            "With 8 layers, pp 2 and vpp 2, rank 0 builds layers 0, 1, 4, 5: chunks alternate"
            " between ranks.",
        )
    else:
        out.inapplicable("the subject supports no virtual stages")


@layout_check(
    "layout.recompute",
    functions=("serve",),
    promise=(
        "Every forward pass and every recompute uses the target of its own microbatch, and none is"
        " left when the step ends."
    ),
    exercised_by=("router calls compared", "recomputes compared"),
)
def layout_recompute(record: LayoutCall, out: Collector) -> None:
    """Compare the target of every pass with that of its microbatch."""
    # With pipelining several microbatches are in flight, and the backward passes come in another
    # order.
    order = FUNCTIONS["serve"].arguments(record.call)["operations"]
    expected = expected_targets(order, recompute=record.call.recompute)
    actual = [(int(microbatch), int(chunk)) for microbatch, chunk in record.event.out[0]]
    passes = [operation for operation in order if record.call.recompute or not operation.backward]
    out.exercised("router calls compared", len(expected))
    out.exercised("recomputes compared", sum(operation.backward for operation in passes))
    if actual != expected:
        first = next(
            (i for i, (x, y) in enumerate(zip(actual, expected, strict=False)) if x != y),
            min(len(actual), len(expected)),
        )
        out.finding(
            "a pass uses another pass's target",
            expected=(
                f"call {first}:"
                f" {_pass_name(passes[first]) if first < len(passes) else 'none after the last'}"
            ),
            observed=(
                f"the target of microbatch {actual[first][0]}, chunk {actual[first][1]}"
                if first < len(actual)
                else "no call"
            )
            + f"; {count(len(actual), 'call')} of {len(expected)}",
            where=record.place(),
            hint=(
                "Use one queue per router, filled in forward order and emptied in backward"
                " order; a queue shared by chunks mixes them."
            ),
        )
    elif len(record.event.out) > 1 and int(record.event.out[1]):
        out.finding(
            "targets are left when the step ends",
            expected="no target left",
            observed=f"{int(record.event.out[1])} left",
            where=record.place(),
            hint=(
                "The next step replays what is left (SkyRL#1908): empty the queues at the end"
                " of every step."
            ),
        )


def _pass_name(operation: Operation) -> str:
    # A recompute belongs to the backward pass of its microbatch.
    kind = "the recompute" if operation.backward else "the forward pass"
    return f"{kind} of microbatch {operation.microbatch}, chunk {operation.chunk}"


@layout_check(
    "layout.chunk-order",
    functions=("reorder",),
    promise=(
        "Recordings in schedule order are sorted by microbatch, with the chunks of a rank in order."
    ),
    exercised_by="rows compared",
)
def layout_chunk_order(record: LayoutCall, out: Collector) -> None:
    """Compare reordered recordings with the samples."""
    layout, call = record.layout, record.call
    chunks = range(layout.mesh.vpp)
    columns = [
        layout.column[layer] for chunk in chunks for layer in layout.routers(call.rank.pp, chunk)
    ]
    compare_parts(
        record,
        out,
        "rows compared",
        [Source.whole(i, call.lengths[i]) for i in range(call.microbatches)],
        title="recordings of chunks are put together wrongly",
        hint=(
            "Recordings arrive in schedule order, chunk by chunk within a group of microbatches"
            " (verl#7106)."
        ),
        # Only the chunks of this rank were recorded.
        columns=columns,
    )


@layout_check(
    "layout.stage-gather",
    functions=("gather_stages",),
    promise="The layers that pipeline ranks recorded come together in the order of the model.",
    exercised_by="rows compared",
)
def layout_stage_gather(record: LayoutCall, out: Collector) -> None:
    """Compare gathered layers with the order of the model."""
    layout, rows = record.layout, record.event.out[0]
    if len(rows) != record.call.lengths[0]:
        out.finding(
            "gathering stages changed the number of rows",
            expected=count(record.call.lengths[0], "row"),
            observed=str(rows.shape),
            where=record.place(),
            hint="Stages are joined along the layer axis.",
        )
        return
    compare_rows(
        record,
        out,
        "rows compared",
        rows,
        Source.whole(0, len(rows)),
        title="layers of pipeline ranks are put together in another order",
        hint=(
            "With virtual stages, chunk 0 of all ranks comes before chunk 1 of any; stages may hold"
            " different numbers of MoE layers."
        ),
        columns=[layout.column[layer] for layer in layout.moe],
    )
