"""Layout of tokens: final rows, padding, packing, alignment: each row beside its own token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import count, share
from rollproof.invariants.layout.call_check import (
    LayoutCall,
    compare_parts,
    compare_rows,
    layout_check,
)
from rollproof.judging.checks import Collector
from rollproof.layouts.padding import Fill, Side, packed
from rollproof.layouts.sources import Source

__all__ = [
    "layout_alignment",
    "layout_final_row",
    "layout_no_shift",
    "layout_packing",
    "layout_padding",
    "layout_padding_rows",
    "layout_unpadding",
]


@layout_check(
    "layout.final-row",
    functions=("complete",),
    promise=(
        "A sample's rows stand at their own positions, and a token that was never captured is left"
        " to the router or gets filler."
    ),
    exercised_by=("rows compared", "tokens without a row"),
)
def layout_final_row(one: LayoutCall, out: Collector) -> None:
    tokens, held = one.call.lengths[0], (one.call.held or one.call.lengths)[0]
    rows = one.event.out[0]
    if len(rows) != tokens:
        out.finding(
            "a sample has other rows than tokens",
            expected=count(tokens, "row"),
            observed=f"{len(rows)}, from {held} captured ones",
            where=one.place(),
            hint=(
                "Engines return one row less than tokens: the last sampled token was never"
                " forwarded (slime#1045)."
            ),
        )
        return
    captured = Source.whole(0, tokens)
    captured.sample[held:] = captured.position[held:] = -1
    compare_rows(
        one,
        out,
        "rows compared",
        rows,
        captured,
        title="rows moved while the missing ones were added",
        hint="Filler goes behind the captured rows (slime#1045, slime#1052).",
        others={
            "a shift by one row": lambda: _rolled(captured, 1),
            "a shift by one row to the front": lambda: _rolled(captured, -1),
        },
    )
    mask = one.event.out[1] if len(one.event.out) > 1 else None
    out.exercised("tokens without a row", tokens - held)
    for position in range(held, tokens):
        if mask is None:
            _filler(one, out, rows[position], position)
        elif mask[position]:
            out.finding(
                "a token without a row is marked as captured",
                expected=f"the mask is 0 at position {position}",
                observed=f"1, with {_words(one, rows[position])}",
                where=one.place(position=position),
                hint=(
                    "What no engine captured is left to the router: replaying filler routes a token"
                    " by nobody's choice."
                ),
            )
            return
    if mask is not None and not mask[:held].all():
        out.finding(
            "captured rows are marked as free",
            expected=f"the mask is 1 at {count(held, 'captured position')}",
            observed=f"0 at {share(int((mask[:held] == 0).sum()), held, 'position')}",
            where=one.place(),
            hint=(
                "A mask that is one row short, or moved, lets the router choose where a recorded"
                " choice exists."
            ),
        )


def _filler(one: LayoutCall, out: Collector, row: IntArray, position: int) -> None:
    """A row of no token, which nothing marks: it must be -1, or k distinct experts, and no other
    token's row.
    """
    cells = one.call.coding.decode(row)
    if one.layout.final is Fill.SENTINEL and (row == -1).all():
        return
    fault = _fault_of_filler(one, row)
    if (cells >= 0).all() and one.layout.final is not Fill.SPREAD:
        fault = f"it repeats {one.told(row, cells)}"
    if fault:
        out.finding(
            "a token without a row is routed by another's, or by none",
            expected="a row that the router is free to ignore, or k distinct experts",
            observed=f"position {position}: {fault}",
            where=one.place(position=position),
            hint=(
                "The filler of a final row is not the row before it, and zeros are expert 0, k"
                " times (slime#941, SkyRL#1908)."
            ),
        )


def _fault_of_filler(one: LayoutCall, row: IntArray) -> str:
    """Why a filler row ``(columns, width)`` cannot be routed; side tensors of numbers show none."""
    ids, layout = row.astype(np.int64), one.layout
    if not one.call.coding.experts or not ids.size:
        return ""
    if layout.fill is Fill.SENTINEL and (ids == -1).all():
        return ""
    if (ids < 0).any() or (ids >= layout.num_experts).any():
        return f"ids {ids[0].tolist()} for {layout.num_experts} experts"
    same = (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any(axis=-1)
    if not same.any():
        return ""
    return f"experts {ids[int(np.flatnonzero(same)[0])].tolist()}, which are not distinct"


def _words(one: LayoutCall, row: IntArray) -> str:
    return one.told(row, one.call.coding.decode(row))


def _rolled(source: Source, by: int) -> Source:
    return Source(sample=np.roll(source.sample, by), position=np.roll(source.position, by))


@layout_check(
    "layout.no-shift",
    functions=("pair",),
    promise=(
        "The route row of position p stands beside the model row whose input is token p: logprobs"
        " are shifted, routes are not."
    ),
    exercised_by="pairs compared",
)
def layout_no_shift(one: LayoutCall, out: Collector) -> None:
    tokens, routes = one.event.out[0].reshape(-1), one.event.out[1]
    held = (one.call.held or one.call.lengths)[0]
    if len(tokens) != len(routes) or len(tokens) < one.call.lengths[0] - 1:
        out.finding(
            "the model is fed other tokens than there are rows",
            expected=f"at least {one.call.lengths[0] - 1} tokens with a row each",
            observed=f"{count(len(tokens), 'token')} and {count(len(routes), 'row')}",
            where=one.place(),
            hint="Tokens and routes are cut, padded and shifted together.",
        )
        return
    positions = tokens - 1
    wanted = Source(
        sample=np.where(positions < held, 0, -1), position=np.where(positions < held, positions, -1)
    )
    later = Source(
        sample=np.where(positions + 1 < held, 0, -1),
        position=np.where(positions + 1 < held, positions + 1, -1),
    )
    compare_rows(
        one,
        out,
        "pairs compared",
        routes,
        wanted,
        title="routes are shifted against the tokens that they route",
        hint=(
            "Labels and logprobs move by one place, routes do not: row p is the forward pass of"
            " token p (slime#1045)."
        ),
        others={
            "the shift of labels, applied to routes": lambda: later,
            "a shift by one to the back": lambda: _rolled(wanted, 1),
        },
    )


@layout_check(
    "layout.padding",
    functions=("pad",),
    promise="Padding puts the rows of a sample where its tokens stand, on the declared side.",
    exercised_by="rows compared",
)
def layout_padding(one: LayoutCall, out: Collector) -> None:
    batch, call, layout = one.event.out[0], one.call, one.layout
    if batch.ndim < 3 or len(batch) != len(call.lengths) or batch.shape[1] < max(call.lengths):
        out.finding(
            "a batch of another shape",
            expected=f"({len(call.lengths)}, at least {max(call.lengths)}, columns, k)",
            observed=str(batch.shape),
            where=one.place(),
            hint="One line a sample, wide enough for the longest.",
        )
        return
    starts = _starts(one, batch.shape[1])
    if starts is None:
        out.absent(
            "padding on both sides can only be judged with the attention mask: return (batch,"
            " attention)"
        )
        return
    placed = {
        side: _placed(call.lengths, _sided(one, side, batch.shape[1]), batch.shape[1])
        for side in (Side.LEFT, Side.RIGHT)
    }
    compare_rows(
        one,
        out,
        "rows compared",
        batch,
        _placed(call.lengths, starts, batch.shape[1]),
        title="padded rows do not stand where their tokens do",
        hint=(
            "One padding side for tokens, masks and routes (slime#1052); a mask must be applied to"
            " routes too (SkyRL#1908)."
        ),
        others={
            f"padding on the {side}, where padding on the {layout.side} is declared": _constant(
                placed[side]
            )
            for side in placed
        },
    )


def _constant(source: Source) -> Callable[[], Source]:
    return lambda: source


def _starts(one: LayoutCall, width: int) -> list[int] | None:
    """The place of each sample's first token, under the declared side."""
    if one.layout.side is not Side.BOTH:
        return _sided(one, one.layout.side, width)
    if len(one.event.out) < 2 or one.event.out[1].shape != (len(one.call.lengths), width):
        return None
    return [int(np.argmax(row != 0)) for row in one.event.out[1]]


def _sided(one: LayoutCall, side: Side, width: int) -> list[int]:
    return [width - length if side is Side.LEFT else 0 for length in one.call.lengths]


def _placed(lengths: tuple[int, ...], starts: list[int], width: int) -> Source:
    out = Source.padding(len(lengths), width)
    for i, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        room = min(length, width - start)
        out.sample[i, start : start + room] = i
        out.position[i, start : start + room] = np.arange(room)
    return out


@layout_check(
    "layout.unpadding",
    functions=("unpad",),
    promise="Unpadding gives back the rows of each sample, all of them and nothing else.",
    exercised_by="rows compared",
)
def layout_unpadding(one: LayoutCall, out: Collector) -> None:
    compare_parts(
        one,
        out,
        "rows compared",
        [Source.whole(i, length) for i, length in enumerate(one.call.lengths)],
        title="unpadded rows are not those of the sample",
        hint=(
            "The attention mask says which rows are a sample's; padding may be on the left"
            " (SkyRL#1908)."
        ),
    )


@layout_check(
    "layout.packing",
    functions=("pack", "unpack"),
    promise=(
        "Packed rows stand at the cumulative lengths of their sequences, in order, and come back"
        " from there."
    ),
    exercised_by="rows compared",
)
def layout_packing(one: LayoutCall, out: Collector) -> None:
    call, title = one.call, "packed rows do not stand where their sequence begins"
    hint = "Row p of sequence i stands at cumulative[i] + p (verl preprocess_thd_engine)."
    if one.event.function == "unpack":
        whole = [Source.whole(i, length) for i, length in enumerate(call.lengths)]
        compare_parts(one, out, "rows compared", whole, title=title, hint=hint)
        return
    rows, cumulative = one.event.out[0], one.layout.cumulative(call.lengths)
    if len(one.event.out) > 1 and len(one.event.out[1]) == len(cumulative):
        cumulative = one.event.out[1].astype(np.int64)
    if len(rows) != cumulative[-1]:
        out.absent("the packed rows are not as many as their layout says (layout.alignment)")
        return
    tight = np.cumsum([0, *call.lengths])
    compare_rows(
        one,
        out,
        "rows compared",
        rows,
        packed(call.lengths, cumulative),
        title=title,
        hint=hint,
        others={
            "packing without the padding between sequences": lambda: _extended(
                packed(call.lengths, tight), len(rows)
            ),
            "packing with the last sequence first": lambda: packed(call.lengths[::-1], cumulative)[
                ::-1
            ],
        },
    )


def _extended(source: Source, rows: int) -> Source:
    out = Source.padding(rows)
    out.sample[: len(source)], out.position[: len(source)] = source.sample, source.position
    return out


@layout_check(
    "layout.alignment",
    functions=("pack", "context", "ulysses"),
    promise=(
        "Lengths are rounded up to what the parallel sizes ask for, by the rule that token ids"
        " follow too."
    ),
    exercised_by="lengths compared",
)
def layout_alignment(one: LayoutCall, out: Collector) -> None:
    call, layout, mesh = one.call, one.layout, one.layout.mesh
    out.exercised("lengths compared")
    rows = len(one.event.out[0])
    if one.event.function == "ulysses":
        wanted = len(layout.rows(call.lengths, call.rank))
        rule = f"{call.lengths[0]} rows padded to a multiple of {mesh.ulysses}"
    else:
        cumulative = layout.cumulative(call.lengths)
        share_of = mesh.cp if one.event.function == "context" else 1
        wanted = int(cumulative[-1]) // share_of
        rule = (
            f"sequences padded to multiples of {layout.alignment.multiple(mesh)} (cumulative"
            f" lengths {cumulative.tolist()})"
        )
        if (
            len(one.event.out) > 1
            and one.event.function == "pack"
            and one.event.out[1].tolist() != cumulative.tolist()
        ):
            out.finding(
                "other cumulative lengths",
                expected=str(cumulative.tolist()),
                observed=str(one.event.out[1].tolist()),
                where=one.place(),
                hint=(
                    "Routes are padded by the same lcm as token ids: by tp, 2 * cp, FP8's multiple,"
                    " the bucket (slime#1052)."
                ),
            )
            return
    if rows != wanted:
        out.finding(
            "another number of rows than the tokens have",
            expected=f"{wanted} rows: {rule}",
            observed=f"{rows} rows{_multiple(one, rows)}",
            where=one.place(),
            hint=(
                "Routes are padded by the same lcm as token ids; the wrong parallel size passes"
                " while the sizes are equal (miles#496)."
            ),
        )


def _multiple(one: LayoutCall, rows: int) -> str:
    """Which other multiple would give so many rows, in words."""
    mesh = one.layout.mesh
    parts = mesh.cp if one.event.function == "context" else 1
    choices = {
        "1": 1,
        "tp": mesh.tp,
        "cp": mesh.cp,
        "2 * cp": 2 * mesh.cp,
        "tp * cp": mesh.tp * mesh.cp,
        "dp": mesh.dp,
    }
    for name, multiple in choices.items():
        if rows * parts == sum(-(-length // multiple) * multiple for length in one.call.lengths):
            return f", as multiples of {name} = {multiple} give"
    return ""


@layout_check(
    "layout.padding-rows",
    functions=("fill", "pack", "context", "ulysses", "targets"),
    promise=(
        "A row of no token holds k distinct experts, or -1 where the router is to choose: never one"
        " expert k times."
    ),
    exercised_by="padding rows",
)
def layout_padding_rows(one: LayoutCall, out: Collector) -> None:
    layout = one.layout
    if layout.fill is Fill.ZEROS:
        out.inapplicable(
            "padding rows are declared to be zeros, which only a replay mask makes sound"
        )
        return
    if not one.call.coding.experts:
        return
    rows = _rows_of_padding(one)
    out.exercised("padding rows", len(rows))
    faults = [(i, fault) for i, row in enumerate(rows) if (fault := _fault_of_filler(one, row))]
    if faults:
        out.finding(
            "padding rows cannot be routed",
            expected=f"{layout.top_k} distinct experts in every row",
            observed=f"{faults[0][1]}; so in {share(len(faults), len(rows), 'padding row')}",
            where=one.place(),
            hint=(
                "Equal ids collapse in the routing map, and a dispatcher that counts tokens * k"
                " fails or drops (slime#941, verl#4986)."
            ),
        )
    elif (
        one.event.function == "fill"
        and layout.fill is Fill.SPREAD
        and len(rows) >= layout.num_experts
    ):
        loads = np.bincount(np.concatenate(rows).reshape(-1), minlength=layout.num_experts)
        if loads.max() > 2 * max(1, loads.min()):
            out.finding(
                "padding is not spread over the experts",
                expected="every expert about as often",
                observed=(
                    f"expert {int(loads.argmax())} {int(loads.max())} times, expert"
                    f" {int(loads.argmin())} {int(loads.min())} times"
                ),
                where=one.place(),
                hint=(
                    "Padding that always goes to the same experts skews their load (verl#7524,"
                    " prime-rl#3350)."
                ),
            )


def _rows_of_padding(one: LayoutCall) -> list[IntArray]:
    """The rows ``(columns, k)`` of what was returned that hold no captured row."""
    call, event = one.call, one.event
    if event.function == "fill":
        return list(event.out[0])
    if event.function == "targets":
        source, tables = (
            one.layout.rows(call.lengths, call.rank),
            [rows for rows in event.out[1:] if rows.ndim == 2],
        )
        free = ~one.layout.captured(source, call.held or call.lengths)
        return [row[None] for rows in tables if len(rows) == len(source) for row in rows[free]]
    mesh = one.layout.mesh
    if event.function == "pack":
        source = packed(call.lengths, one.layout.cumulative(call.lengths))
    else:
        source = (
            one.layout.rows(call.lengths, call.rank)
            if not mesh.sequence_parallel
            else one.before_tensor_slice()
        )
    return list(event.out[0][~source.filled]) if len(event.out[0]) == len(source) else []
