"""Checks on rows and tokens: final rows, padding, packing and alignment keep each row with its
token.
"""

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
        "A sample's rows are at their own positions, and a token without a captured row is"
        " left to the router or gets filler."
    ),
    exercised_by=("rows compared", "tokens without a row"),
)
def layout_final_row(record: LayoutCall, out: Collector) -> None:
    """Check the rows of a sample and what its last tokens get."""
    tokens, captured_count = record.call.lengths[0], (record.call.held or record.call.lengths)[0]
    rows = record.event.out[0]
    # slime#1045: engines return one row fewer than tokens, and the difference shifted every later
    # row.
    if len(rows) != tokens:
        out.finding(
            "a sample's rows and tokens differ in number",
            expected=count(tokens, "row"),
            observed=f"{len(rows)}, from {captured_count} captured ones",
            where=record.place(),
            hint=(
                "Engines return one row less than tokens: the last sampled token was never"
                " forwarded (slime#1045)."
            ),
        )
        return
    captured = Source.whole(0, tokens)
    # The last rows are not captured, so any filler may be there.
    captured.sample[captured_count:] = captured.position[captured_count:] = -1
    title = "captured rows moved when filler was added"
    hint = "Append filler behind the captured rows (slime#1045, slime#1052)."
    if _are_lost(record, rows, captured):
        title = "captured rows were overwritten"
        hint = (
            "They are in no place any more: filler was written over them, or into the payload."
            " Append it behind the captured rows, to a copy."
        )
    compare_rows(
        record,
        out,
        "rows compared",
        rows,
        captured,
        title=title,
        hint=hint,
        others={
            "a shift by one row": lambda: _shifted(captured, 1),
            "a shift by one row to the front": lambda: _shifted(captured, -1),
        },
    )
    mask = record.event.out[1] if len(record.event.out) > 1 else None
    out.exercised("tokens without a row", tokens - captured_count)
    for position in range(captured_count, tokens):
        if mask is None:
            _filler(record, out, rows[position], position)
        elif mask[position]:
            out.finding(
                "a token without a row is marked as captured",
                expected=f"the mask is 0 at position {position}",
                observed=f"1, with {_describe_row(record, rows[position])}",
                where=record.place(position=position),
                hint=(
                    "Rows that no engine captured are left to the router: replayed filler"
                    " routes a token by a choice that no router made."
                ),
            )
            return
    if mask is not None and not mask[:captured_count].all():
        out.finding(
            "captured rows are marked as free",
            expected=f"the mask is 1 at {count(captured_count, 'captured position')}",
            observed=(
                f"0 at {share(int((mask[:captured_count] == 0).sum()), captured_count, 'position')}"
            ),
            where=record.place(),
            hint=(
                "A mask that is one row short or shifted lets the router choose although a"
                " recorded choice exists."
            ),
        )


def _filler(record: LayoutCall, out: Collector, row: IntArray, position: int) -> None:
    """Judge a row of no token that nothing marks: it must be -1 or k distinct experts, and no other
    token's row.
    """
    cells = record.call.coding.decode(row)
    if record.layout.final is Fill.SENTINEL and (row == -1).all():
        return
    fault = _fault_of_filler(record, row)
    if (cells >= 0).all() and record.layout.final is not Fill.SPREAD:
        fault = f"it repeats {record.describe(row, cells)}"
    if fault:
        out.finding(
            "a token without a row is routed by another's, or by none",
            expected="a row that the router may ignore, or k distinct experts",
            observed=f"position {position}: {fault}",
            where=record.place(position=position),
            hint=(
                "The filler of a final row is not the row before it, and zeros are expert 0, k"
                " times (slime#941, SkyRL#1908)."
            ),
        )


def _fault_of_filler(record: LayoutCall, row: IntArray) -> str:
    """Return why a filler row ``(columns, width)`` cannot be routed; side tensors of numbers show
    nothing.
    """
    ids, layout = row.astype(np.int64), record.layout
    if not record.call.coding.experts or not ids.size:
        return ""
    if layout.fill is Fill.SENTINEL and (ids == -1).all():
        return ""
    outside = ids[((ids < 0) | (ids >= layout.num_experts)).any(axis=1)]
    if len(outside):
        return f"ids {outside[0].tolist()} for {layout.num_experts} experts"
    repeated = ids[(np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1)]
    return f"experts {repeated[0].tolist()}, which are not distinct" if len(repeated) else ""


def _describe_row(record: LayoutCall, row: IntArray) -> str:
    return record.describe(row, record.call.coding.decode(row))


def _are_lost(record: LayoutCall, rows: IntArray, captured: Source) -> bool:
    """Whether some rows are not at their places, and those that should be there are nowhere."""
    if rows.shape[-1] != record.call.coding.width:
        return False
    cells, expected = record.call.coding.decode(rows), record.cells(captured)
    if cells.shape != expected.shape:
        return False
    wrong = (cells != expected).any(axis=-1) & captured.filled
    return bool(wrong.any()) and not any(
        (cells == row).all(axis=-1).any() for row in expected[wrong]
    )


def _shifted(source: Source, by: int) -> Source:
    return Source(sample=np.roll(source.sample, by), position=np.roll(source.position, by))


@layout_check(
    "layout.no-shift",
    functions=("pair",),
    promise=(
        "The route row of position p is paired with the model row whose input is token p:"
        " logprobs are shifted, routes are not."
    ),
    exercised_by="pairs compared",
)
def layout_no_shift(record: LayoutCall, out: Collector) -> None:
    """Compare the position of each row with that of its token."""
    tokens, routes = record.event.out[0].ravel(), record.event.out[1]
    captured_count = (record.call.held or record.call.lengths)[0]
    if len(tokens) != len(routes) or len(tokens) < record.call.lengths[0] - 1:
        out.finding(
            "the model's input tokens and the rows differ in number",
            expected=f"at least {record.call.lengths[0] - 1} tokens with a row each",
            observed=f"{count(len(tokens), 'token')} and {count(len(routes), 'row')}",
            where=record.place(),
            hint="Cut, pad and shift tokens and routes together.",
        )
        return
    # Token ids are 1 + position in this call, so that each names its own row.
    positions = tokens - 1
    expected = Source(
        sample=np.where(positions < captured_count, 0, -1),
        position=np.where(positions < captured_count, positions, -1),
    )
    shifted = Source(
        sample=np.where(positions + 1 < captured_count, 0, -1),
        position=np.where(positions + 1 < captured_count, positions + 1, -1),
    )
    compare_rows(
        record,
        out,
        "pairs compared",
        routes,
        expected,
        title="routes are shifted against the tokens that they route",
        hint=(
            "Labels and logprobs move by one place, routes do not: row p is the forward pass of"
            " token p (slime#1045)."
        ),
        others={
            "the shift of labels, applied to routes": lambda: shifted,
            "a shift by one to the back": lambda: _shifted(expected, 1),
        },
    )


@layout_check(
    "layout.padding",
    functions=("pad",),
    promise="Padding puts the rows of a sample where its tokens are, on the declared side.",
    exercised_by="rows compared",
)
def layout_padding(record: LayoutCall, out: Collector) -> None:
    """Compare the rows of a padded batch with the tokens' places."""
    batch, call, layout = record.event.out[0], record.call, record.layout
    if batch.ndim < 3 or len(batch) != len(call.lengths) or batch.shape[1] < max(call.lengths):
        out.finding(
            "a batch of another shape",
            expected=f"({len(call.lengths)}, at least {max(call.lengths)}, columns, k)",
            observed=str(batch.shape),
            where=record.place(),
            hint="One row of the batch per sample, long enough for the longest.",
        )
        return
    starts = _starts(record, batch.shape[1])
    if starts is None:
        out.absent(
            "padding on both sides can only be judged with the attention mask: return (batch,"
            " attention)"
        )
        return
    sources = {
        side: _padded_source(call.lengths, _starts_on(record, side, batch.shape[1]), batch.shape[1])
        for side in (Side.LEFT, Side.RIGHT)
    }
    compare_rows(
        record,
        out,
        "rows compared",
        batch,
        _padded_source(call.lengths, starts, batch.shape[1]),
        title="padded rows are not at their tokens' places",
        hint=(
            "Use one padding side for tokens, masks and routes (slime#1052); a mask must be"
            " applied to routes too (SkyRL#1908)."
        ),
        others={
            f"padding on the {side}, where padding on the {layout.side} is declared": _returning(
                sources[side]
            )
            for side in sources
        },
    )


def _returning(source: Source) -> Callable[[], Source]:
    return lambda: source


def _starts(record: LayoutCall, width: int) -> list[int] | None:
    """Return the place of each sample's first token under the declared side."""
    # Left-padded prompts with right-padded responses need the attention mask to find the first
    # token.
    if record.layout.side is not Side.BOTH:
        return _starts_on(record, record.layout.side, width)
    if len(record.event.out) < 2 or record.event.out[1].shape != (len(record.call.lengths), width):
        return None
    return [int(np.argmax(row != 0)) for row in record.event.out[1]]


def _starts_on(record: LayoutCall, side: Side, width: int) -> list[int]:
    return [width - length if side is Side.LEFT else 0 for length in record.call.lengths]


def _padded_source(lengths: tuple[int, ...], starts: list[int], width: int) -> Source:
    out = Source.padding(len(lengths), width)
    for i, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        room = min(length, width - start)
        out.sample[i, start : start + room] = i
        out.position[i, start : start + room] = np.arange(room)
    return out


@layout_check(
    "layout.unpadding",
    functions=("unpad",),
    promise="Unpadding returns all rows of each sample and nothing else.",
    exercised_by="rows compared",
)
def layout_unpadding(record: LayoutCall, out: Collector) -> None:
    """Compare unpadded rows with the samples."""
    compare_parts(
        record,
        out,
        "rows compared",
        [Source.whole(i, length) for i, length in enumerate(record.call.lengths)],
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
        "Packed rows are at the cumulative lengths of their sequences, in order, and are"
        " unpacked from there."
    ),
    exercised_by="rows compared",
)
def layout_packing(record: LayoutCall, out: Collector) -> None:
    """Compare packed and unpacked rows with the cumulative lengths."""
    call, title = record.call, "packed rows are not at the start of their sequence"
    hint = "Row p of sequence i is at cumulative[i] + p (verl preprocess_thd_engine)."
    if record.event.function == "unpack":
        samples = [Source.whole(i, length) for i, length in enumerate(call.lengths)]
        compare_parts(record, out, "rows compared", samples, title=title, hint=hint)
        return
    rows, cumulative = record.event.out[0], record.layout.cumulative(call.lengths)
    if len(record.event.out) > 1 and len(record.event.out[1]) == len(cumulative):
        # The rows follow the function's own cumulative lengths; layout.alignment judges those.
        cumulative = record.event.out[1].astype(np.int64)
    if len(rows) != cumulative[-1]:
        out.absent("the number of packed rows is not that of their layout (layout.alignment)")
        return
    unpadded = np.cumsum([0, *call.lengths])
    compare_rows(
        record,
        out,
        "rows compared",
        rows,
        packed(call.lengths, cumulative),
        title=title,
        hint=hint,
        others={
            "packing without padding between the sequences": lambda: _extended(
                packed(call.lengths, unpadded), len(rows)
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
        "Lengths are rounded up to the multiple that the parallel sizes need, by the rule for"
        " token ids."
    ),
    exercised_by="lengths compared",
)
def layout_alignment(record: LayoutCall, out: Collector) -> None:
    """Compare the number of rows with the rounded lengths."""
    call, layout, mesh = record.call, record.layout, record.layout.mesh
    out.exercised("lengths compared")
    rows = len(record.event.out[0])
    if record.event.function == "ulysses":
        expected = len(layout.rows(call.lengths, call.rank))
        rule = f"{call.lengths[0]} rows padded to a multiple of {mesh.ulysses}"
    else:
        cumulative = layout.cumulative(call.lengths)
        expected = int(cumulative[-1]) // _ranks(record)
        rule = (
            f"sequences padded to multiples of {layout.alignment.multiple(mesh)} (cumulative"
            f" lengths {cumulative.tolist()})"
        )
        if (
            len(record.event.out) > 1
            and record.event.function == "pack"
            and record.event.out[1].tolist() != cumulative.tolist()
        ):
            out.finding(
                "other cumulative lengths",
                expected=str(cumulative.tolist()),
                observed=str(record.event.out[1].tolist()),
                where=record.place(),
                hint=(
                    "Routes are padded by the same lcm as token ids: by tp, 2 * cp, FP8's multiple,"
                    " the bucket (slime#1052)."
                ),
            )
            return
    if rows != expected:
        out.finding(
            "rows and tokens differ in number",
            expected=f"{expected} rows: {rule}",
            observed=f"{rows} rows{_multiple(record, rows)}",
            where=record.place(),
            hint=(
                "Routes are padded by the same lcm as token ids; a wrong parallel size goes"
                " unnoticed while the sizes are equal (miles#496)."
            ),
        )


def _ranks(record: LayoutCall) -> int:
    """Return over how many ranks the rows that the function returns are divided."""
    return record.layout.mesh.cp if record.event.function == "context" else 1


def _multiple(record: LayoutCall, rows: int) -> str:
    """Return which other multiple would give this number of rows, in words."""
    for name, multiple in record.other_multiples.items():
        total = sum(-(-length // multiple) * multiple for length in record.call.lengths)
        if rows * _ranks(record) == total:
            return f", as multiples of {name} = {multiple} give"
    return ""


@layout_check(
    "layout.padding-rows",
    functions=("fill", "pack", "context", "ulysses", "targets"),
    promise=(
        "A row of no token holds k distinct experts, or -1 if the router is to choose: never"
        " one expert k times."
    ),
    exercised_by="padding rows",
)
def layout_padding_rows(record: LayoutCall, out: Collector) -> None:
    """Check that rows of padding can be routed."""
    layout = record.layout
    if layout.fill is Fill.ZEROS:
        out.inapplicable(
            "padding rows are declared to be zeros, which is sound only with a replay mask"
        )
        return
    if not record.call.coding.experts:
        return
    rows = _rows_of_padding(record)
    out.exercised("padding rows", len(rows))
    faults = [(i, fault) for i, row in enumerate(rows) if (fault := _fault_of_filler(record, row))]
    if faults:
        out.finding(
            "padding rows cannot be routed",
            expected=f"{layout.top_k} distinct experts in every row",
            observed=f"{faults[0][1]}; so in {share(len(faults), len(rows), 'padding row')}",
            where=record.place(),
            hint=(
                "Equal ids collapse in the routing map, and a dispatcher that counts tokens * k"
                " fails or drops (slime#941, verl#4986)."
            ),
        )
    elif (
        record.event.function == "fill"
        and layout.fill is Fill.SPREAD
        and len(rows) >= layout.num_experts
    ):
        loads = np.bincount(np.concatenate(rows).ravel(), minlength=layout.num_experts)
        # verl#7524 and prime-rl#3350: padding that goes to the same experts unbalances them.
        if loads.max() > 2 * max(1, loads.min()):
            out.finding(
                "padding is not spread over the experts",
                expected="every expert about equally often",
                observed=(
                    f"expert {int(loads.argmax())} {int(loads.max())} times, expert"
                    f" {int(loads.argmin())} {int(loads.min())} times"
                ),
                where=record.place(),
                hint=(
                    "Padding that always goes to the same experts skews their load (verl#7524,"
                    " prime-rl#3350)."
                ),
            )


def _rows_of_padding(record: LayoutCall) -> list[IntArray]:
    """Return the returned rows ``(columns, k)`` that hold no captured row."""
    call, event = record.call, record.event
    if event.function == "fill":
        return list(event.out[0])
    if event.function == "targets":
        source, tables = (
            record.layout.rows(call.lengths, call.rank),
            [rows for rows in event.out[1:] if rows.ndim == 2],
        )
        free = ~record.layout.captured(source, call.held or call.lengths)
        return [row[None] for rows in tables if len(rows) == len(source) for row in rows[free]]
    mesh = record.layout.mesh
    if event.function == "pack":
        source = packed(call.lengths, record.layout.cumulative(call.lengths))
    else:
        source = (
            record.layout.rows(call.lengths, call.rank)
            if not mesh.sequence_parallel
            else record.before_tensor_slice()
        )
    return list(event.out[0][~source.filled]) if len(event.out[0]) == len(source) else []
