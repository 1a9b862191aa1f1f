"""Layout of segments: the calls of a resumed sample, joined by position."""

from __future__ import annotations

import numpy as np

from rollproof.core.contract import Provenance
from rollproof.invariants._shared.phrases import share
from rollproof.invariants.layout.call_check import LayoutCall, layout_check
from rollproof.judging.checks import Collector
from rollproof.layouts.merging import joined_segments

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
def layout_segments(one: LayoutCall, out: Collector) -> None:
    from rollproof.layouts.functions import FUNCTIONS

    segments = FUNCTIONS["join"].arguments(one.call)["segments"]
    goal, versions = joined_segments(
        segments, latest=one.layout.provenance is Provenance.LATEST_PREFILL
    )
    rows = one.event.out[0]
    out.exercised("rows compared", len(goal))
    if len(rows) != len(goal):
        out.finding(
            "a resumed sample has other rows than positions",
            expected=f"{len(goal)} rows, each position once",
            observed=(
                f"{len(rows)} rows from calls that returned"
                f" {[len(segment.routes) for segment in segments]}"
            ),
            where=one.place(),
            hint=(
                "Each call returns the rows of the whole sequence so far: they are merged by"
                " position, not concatenated (verl#6029)."
            ),
        )
        return
    wrong = (
        np.flatnonzero((rows != goal).any(axis=(1, 2)))
        if rows.shape == goal.shape
        else np.arange(len(goal))
    )
    if len(wrong):
        out.finding(
            "rows of a resumed sample are another call's",
            expected=(
                f"position {int(wrong[0])} as the call of version {versions[int(wrong[0])]}"
                " routed it"
            ),
            observed=f"another call's row at {share(len(wrong), len(goal), 'position')}",
            where=one.place(position=int(wrong[0])),
            hint=(
                "A call that resumes recomputes earlier positions under its own weights"
                " (verl#6046); the contract says whose rows count."
            ),
        )
    elif len(one.event.out) > 1 and one.event.out[1].tolist() != versions:
        out.finding(
            "the versions of rows are wrong",
            expected=str(versions),
            observed=str(one.event.out[1].tolist()),
            where=one.place(),
            hint="The version of row p is that of the weights whose forward pass made it.",
        )
