"""Layout of layers: which router reads which column, which rank builds which layer, and in which
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
from rollproof.layouts.pipeline import Operation, wanted_targets
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
        "The router of a layer reads the payload's column of that layer: dense layers, stages and"
        " heads shift nothing."
    ),
    exercised_by=("routers compared", "stages without MoE layers"),
)
def layout_layer_map(one: LayoutCall, out: Collector) -> None:
    call, layout = one.call, one.layout
    routers = layout.routers(call.rank.pp, call.chunk)
    layers = one.event.out[0].reshape(-1).tolist()
    out.exercised("routers compared", len(routers))
    out.exercised("stages without MoE layers", int(not routers))
    if sorted(layers) != sorted(routers):
        out.finding(
            "columns for other layers than the chunk's routers",
            expected=f"layers {list(routers)}",
            observed=f"layers {sorted(layers)}",
            where=one.place(),
            hint=(
                "The routers of a chunk are the MoE layers that it builds: dense layers have none,"
                " and a chunk may have none at all."
            ),
        )
        return
    wrong = []
    for layer, value in zip(layers, one.event.out[1:], strict=True):
        column = _column(one, value)
        if column != layout.column[layer]:
            wrong.append((layer, column))
    if wrong:
        layer, column = wrong[0]
        whose = {held: of for of, held in layout.column.items()}
        owner = (
            f"that of layer {whose[column]}"
            if column in whose
            else (
                "of no MoE layer"
                if column is not None
                else "or rows of several, or in another order"
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
            where=one.place(layer=layer),
            hint=(
                "Index by the global layer where the payload has all layers, by the ordinal among"
                " MoE layers where it has only those; a multi-token-prediction layer is neither"
                " (verl#5037, NeMo-RL#3903)."
            ),
        )


def _column(one: LayoutCall, value: IntArray) -> int | None:
    """The payload column that a router reads; ``None`` where its rows come from none or several, or
    not in order.
    """
    if value.ndim == 0:
        return int(value)
    if value.ndim != 2 or value.shape[-1] != one.call.coding.width:
        return None
    places = [one.call.coding.place(int(cell)) for cell in one.call.coding.decode(value)]
    column = places[0][2] if places else -1
    return (
        column
        if places == [(0, position, column) for position in range(one.call.lengths[0])]
        else None
    )


def _chunk_layers(one: LayoutCall, out: Collector, hint: str) -> None:
    """Compare the layers, or the routers, of a chunk."""
    call, layout, got = one.call, one.layout, one.event.out[0]
    moe = one.event.function == "routers"
    wanted = (
        layout.routers(call.rank.pp, call.chunk)
        if moe
        else layout.chunks()[call.rank.pp][call.chunk]
    )
    out.exercised("chunks compared")
    out.exercised("chunks without layers", int(not wanted))
    same = int(got) == len(wanted) if got.ndim == 0 else got.reshape(-1).tolist() == list(wanted)
    if not same:
        out.finding(
            f"a chunk has other {'routers' if moe else 'layers'}",
            expected=(
                f"{list(wanted)} (chunks of all ranks:"
                f" {[list(map(list, chunks)) for chunks in layout.chunks()]})"
            ),
            observed=count(int(got), "layer") if got.ndim == 0 else str(got.reshape(-1).tolist()),
            where=one.place(),
            hint=hint,
        )


@layout_check(
    "layout.stages",
    functions=("stage_layers", "routers"),
    promise=(
        "Each layer is built by the pipeline rank that the division says: even, uneven, with"
        " embedding or loss counted, custom."
    ),
    exercised_by=("chunks compared", "chunks without layers"),
)
def layout_stages(one: LayoutCall, out: Collector) -> None:
    if one.layout.mesh.vpp == 1:
        _chunk_layers(
            one,
            out,
            "Uneven first and last stages and custom layouts shift the offset of every later"
            " stage.",
        )


@layout_check(
    "layout.virtual-stages",
    functions=("stage_layers", "routers"),
    promise=(
        "Chunk v of a pipeline rank follows chunk v of the rank before it, and chunk v - 1 of the"
        " last rank."
    ),
    exercised_by=("chunks compared", "chunks without layers"),
)
def layout_virtual_stages(one: LayoutCall, out: Collector) -> None:
    if one.layout.mesh.vpp > 1:
        _chunk_layers(
            one,
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
def layout_recompute(one: LayoutCall, out: Collector) -> None:
    order = FUNCTIONS["serve"].arguments(one.call)["operations"]
    wanted = wanted_targets(order, recompute=one.call.recompute)
    used = [(int(microbatch), int(chunk)) for microbatch, chunk in one.event.out[0]]
    done = [operation for operation in order if one.call.recompute or not operation.backward]
    out.exercised("router calls compared", len(wanted))
    out.exercised("recomputes compared", sum(operation.backward for operation in done))
    if used != wanted:
        first = next(
            (i for i, (a, b) in enumerate(zip(used, wanted, strict=False)) if a != b),
            min(len(used), len(wanted)),
        )
        out.finding(
            "a pass uses another pass's target",
            expected=(
                f"call {first}:"
                f" {_pass_name(done[first]) if first < len(done) else 'none, the step has ended'}"
            ),
            observed=(
                f"the target of microbatch {used[first][0]}, chunk {used[first][1]}"
                if first < len(used)
                else "no call"
            )
            + f"; {count(len(used), 'call')} of {len(wanted)}",
            where=one.place(),
            hint=(
                "One queue per router, filled in forward order and emptied in backward order; a"
                " queue shared by chunks mixes them."
            ),
        )
    elif len(one.event.out) > 1 and int(one.event.out[1]):
        out.finding(
            "targets are left when the step ends",
            expected="no target left",
            observed=f"{int(one.event.out[1])} left",
            where=one.place(),
            hint=(
                "What a step leaves is replayed by the next one (SkyRL#1908): empty the queues at"
                " the end of every step."
            ),
        )


def _pass_name(operation: Operation) -> str:
    what = "the recompute" if operation.backward else "the forward pass"
    return f"{what} of microbatch {operation.microbatch}, chunk {operation.chunk}"


@layout_check(
    "layout.chunk-order",
    functions=("reorder",),
    promise=(
        "Recordings in schedule order come out by microbatch, the chunks of a rank behind each"
        " other."
    ),
    exercised_by="rows compared",
)
def layout_chunk_order(one: LayoutCall, out: Collector) -> None:
    layout, call = one.layout, one.call
    chunks = range(layout.mesh.vpp)
    columns = [
        layout.column[layer] for chunk in chunks for layer in layout.routers(call.rank.pp, chunk)
    ]
    compare_parts(
        one,
        out,
        "rows compared",
        [Source.whole(i, call.lengths[i]) for i in range(call.microbatches)],
        title="recordings of chunks are put together wrongly",
        hint=(
            "Recordings arrive in schedule order, chunk by chunk within a group of microbatches"
            " (verl#7106)."
        ),
        columns=columns,
    )


@layout_check(
    "layout.stage-gather",
    functions=("gather_stages",),
    promise="The layers that pipeline ranks recorded come together in the order of the model.",
    exercised_by="rows compared",
)
def layout_stage_gather(one: LayoutCall, out: Collector) -> None:
    layout, rows = one.layout, one.event.out[0]
    if len(rows) != one.call.lengths[0]:
        out.finding(
            "gathering stages changed the number of rows",
            expected=count(one.call.lengths[0], "row"),
            observed=str(rows.shape),
            where=one.place(),
            hint="Stages are joined along the layer axis.",
        )
        return
    compare_rows(
        one,
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
