"""The check on segments: the calls of a resumed sample are joined by position."""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Provenance
from rollproof.invariants._shared.phrases import share
from rollproof.invariants.layout.call_check import LayoutCall, layout_check
from rollproof.judging.checks import Collector
from rollproof.layouts.merged_rows import joined_segments

__all__ = [
    "layout_segments",
]


@layout_check(
    "layout.segments",
    functions=("join",),
    promise=(
        "The calls of a resumed sample give each position one row, by the weights that the contract"
        " declares."
    ),
    exercised_by="rows compared",
)
def layout_segments(record: LayoutCall, out: Collector) -> None:
    """Compare joined rows with those of the calls that count."""
    from rollproof.layouts.functions import FUNCTIONS

    segments = FUNCTIONS["join"].arguments(record.call)["segments"]
    expected, versions = joined_segments(
        segments, latest=record.layout.provenance is Provenance.LATEST_PREFILL
    )
    rows = record.event.out[0]
    out.exercised("rows compared", len(expected))
    if len(rows) != len(expected):
        out.finding(
            "a resumed sample's rows and positions differ in number",
            expected=f"{len(expected)} rows, each position once",
            observed=(
                f"{len(rows)} rows from calls that returned"
                f" {[len(segment.routes) for segment in segments]}"
            ),
            where=record.place(),
            hint=(
                "Each call returns the rows of the entire sequence so far: merge them by"
                " position, do not concatenate them (verl#6029)."
            ),
        )
        return
    # verl#6029 concatenated the arrays, verl#6046 mixed the weights of two calls.
    wrong = (
        np.flatnonzero((rows != expected).any(axis=(1, 2)))
        if rows.shape == expected.shape
        else np.arange(len(expected))
    )
    if len(wrong):
        out.finding(
            "rows of a resumed sample belong to another call",
            expected=(
                f"position {int(wrong[0])} as the call of version {versions[int(wrong[0])]}"
                " routed it"
            ),
            observed=f"another call's row at {share(len(wrong), len(expected), 'position')}",
            where=record.place(position=int(wrong[0])),
            hint=(
                "A resuming call recomputes earlier positions with its own weights"
                " (verl#6046); the contract says which rows count."
            ),
        )
    elif len(record.event.out) > 1 and record.event.out[1].tolist() != versions:
        out.finding(
            "the versions of rows are wrong",
            expected=str(versions),
            observed=str(record.event.out[1].tolist()),
            where=record.place(),
            hint="The version of row p is that of the weights that computed it.",
        )
