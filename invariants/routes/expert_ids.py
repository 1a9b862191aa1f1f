"""Checks on expert ids: values that no router can have chosen, whoever wrote them."""

from __future__ import annotations

from math import comb, log2
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Filler, Rows
from rollproof.core.records import IntArray
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.comparison import BoolArray, RouteEvidence, is_filler
from rollproof.invariants.routes.duplicate_experts import has_repeats, repeats
from rollproof.invariants.routes.origin import RowOrigin, group_of
from rollproof.invariants.routes.route_phrases import has_routes
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = [
    "routes_distinct",
    "routes_in_range",
    "routes_live",
]

_NEEDS = "a delivered sample with routes of the right shape and count"
_ROWS = "rows read"
_MIN_BITS = 64.0
"""A coincidence of a random router must be rarer than 2**-64 to count as a fault."""
_MIN_DISTINCT_TOKENS = 4
"""The number of distinct token ids that must be exceeded: a prompt of one repeated token may well
choose the same experts everywhere.
"""


_BLOCK_ROWS = 64
"""The number of rows per block; the first blocks nearly always decide."""


def _readable(view: RequestView, out: Collector) -> RouteEvidence | None:
    if view.rollout is None:
        out.absent("no sample was delivered")
        return None
    evidence = comparison.of(view)
    if not evidence.readable:
        out.absent("no sample carried routes of the right shape and count")
        return None
    return evidence


def _judged_rows(
    view: RequestView, evidence: RouteEvidence, low: int, high: int
) -> tuple[IntArray, BoolArray]:
    """Return the delivered rows and which of them these checks judge: captured ones, except for
    rows that another check explains.
    """
    rows = evidence.delivered(low, high)
    judged = np.ones(len(rows), dtype=bool)
    wrong = evidence.mismatched
    if len(wrong):
        values = group_of(view, RowOrigin.VALUES)
        others = np.setdiff1d(wrong, values.positions) if values is not None else wrong
        judged[others[(others >= low) & (others < high)] - low] = False
    filler = view.contract.filler
    if filler not in (None, Filler.NONE):
        # A row that an engine itself filled, or a row of a trace without replies: not captured, and
        # declared as such.
        assert filler is not None
        judged &= ~is_filler(rows, filler, view.contract.expert_count)
    return rows, judged


@request_check(
    "routes.distinct",
    promise="The top_k experts of a token in a layer are distinct.",
    needs=_NEEDS,
    exercised_by=_ROWS,
    applies=lambda contract: (
        has_routes(contract)
        or ("top_k is 1: one expert is always distinct" if contract.top_k == 1 else None)
    ),
)
def routes_distinct(view: RequestView, out: Collector) -> None:
    """Look for cells that name an expert twice."""
    evidence = _readable(view, out)
    if evidence is None:
        return
    experts = view.contract.expert_count
    for low, high in evidence.captured:
        out.exercised(_ROWS, high - low)
        # The exact search sorts; this one reads memory once and never misses a repetition.
        if not has_repeats(evidence.delivered(low, high), experts):
            continue
        rows, judged = _judged_rows(view, evidence, low, high)
        wrong = repeats(rows) & judged[:, None]
        if not len(evidence.mismatched):
            wrong[:, _dead_columns(evidence)] = False
        if wrong.any():
            _report_cells(
                view,
                out,
                low,
                rows,
                wrong,
                "a token has the same expert twice in one layer",
                f"{rows.shape[2]} distinct experts",
            )


@request_check(
    "routes.in-range",
    promise="Every expert id lies between 0 and num_experts - 1.",
    needs=_NEEDS,
    exercised_by=_ROWS,
    applies=has_routes,
)
def routes_in_range(view: RequestView, out: Collector) -> None:
    """Look for ids of experts that do not exist."""
    evidence = _readable(view, out)
    if evidence is None:
        return
    assert evidence.routes is not None
    experts = view.contract.expert_count
    limits = np.iinfo(evidence.routes.dtype)
    for low, high in evidence.captured:
        out.exercised(_ROWS, high - low)
        block = evidence.routes[low - evidence.start : high - evidence.start]
        # Minimum and maximum decide without an allocation; a type too narrow for a wrong id needs
        # no look at all.
        if (limits.max < experts or int(block.max()) < experts) and (
            limits.min == 0 or int(block.min()) >= 0
        ):
            continue
        rows, judged = _judged_rows(view, evidence, low, high)
        wrong = ((rows < 0) | (rows >= experts)).any(axis=2) & judged[:, None]
        if wrong.any():
            _report_cells(
                view,
                out,
                low,
                rows,
                wrong,
                "an expert id does not exist",
                f"ids from 0 to {experts - 1}",
            )


def _report_cells(
    view: RequestView,
    out: Collector,
    low: int,
    rows: IntArray,
    wrong: BoolArray,
    title: str,
    expected: str,
) -> None:
    first, column = (int(i) for i in np.argwhere(wrong)[0])
    positions = low + np.flatnonzero(wrong.any(axis=1))
    moe = view.contract.routed_layers
    layers = int(wrong.sum(axis=1).max())
    cell = rows[first, column].tolist()
    out.finding(
        title,
        expected=expected,
        observed=(
            f"experts {cell} at position {low + first}; so in {count(len(positions), 'row')}"
            f" of {len(rows)} (position{'s' if len(positions) > 1 else ''}"
            f" {ranges(positions.tolist())}), in {layers} of {len(moe)} MoE layers"
        ),
        where=view.place(
            position=low + first, layer=moe[column], segment=view.segment_of(low + first)
        ),
        hint=_value_hint(view.contract, cell),
    )


def _value_hint(contract: Contract, cell: list[int]) -> str:
    experts = contract.expert_count
    if not any(cell):
        return (
            "Zeros are a buffer that was never written: prompt rows that were never finalised"
            " (SGLang #23885), padded tokens (vLLM #43737), or padding taken for a capture"
            " (slime #941). A dropless dispatcher cannot place one expert top_k times (verl"
            " #4986)."
        )
    if any(expert < 0 for expert in cell):
        return (
            "A kernel marks padded tokens with a negative id (VLLM_MOE_SKIP_PADDING): declare"
            " filler='minus-one', or drop the rows."
        )
    if any(expert >= experts for expert in cell):
        return (
            "An id beyond the last expert is a fused shared expert that was not cut off (SGLang"
            " #36515), or a misread dtype."
        )
    return (
        "The ids are not what a top-k returns: wrapped by a narrow type, read with the wrong top_k,"
        " or mixed from two tokens."
    )


@request_check(
    "routes.live",
    promise="No MoE layer is zero in all rows, and the rows of a sample are not all equal.",
    needs=_NEEDS + "; enough rows to rule out chance",
    exercised_by=_ROWS,
    applies=has_routes,
)
def routes_live(view: RequestView, out: Collector) -> None:
    """Look for layers of zeros, and for samples with one row for all tokens."""
    evidence = _readable(view, out)
    if evidence is None:
        return
    captured = sum(high - low for low, high in evidence.captured)
    if evidence.hindrance is not None and _only_filler(evidence):
        out.absent("no reply had routes, and every row is the declared filler")
        return
    if not captured or len(evidence.mismatched):
        out.absent("no rows, or rows that another check explains")
        return
    out.exercised(_ROWS, captured)
    moe = view.contract.routed_layers
    zero_layers = _dead_columns(evidence)
    # With top_k 1 a layer of zeros is one expert that is always chosen, which a small trace can
    # show by chance.
    if view.contract.top_k == 1 and not _beyond_chance(
        view, captured * log2(view.contract.expert_count)
    ):
        zero_layers = []
    if zero_layers:
        out.finding(
            "MoE layers with only expert 0",
            expected=f"choices of {view.contract.top_k} experts in each of {len(moe)} MoE layers",
            observed=(
                f"expert 0 in all {captured} rows of {len(zero_layers)} of {len(moe)} MoE"
                f" layers (layer {ranges(moe[c] for c in zero_layers)})"
            ),
            where=view.place(layer=moe[zero_layers[0]], position=evidence.captured[0][0]),
            hint=(
                "The capture never ran there: a monolithic MoE kernel bypasses it (vLLM #44116,"
                " #54730), a pipeline stage was not gathered (slime #395), or the layer is dense"
                " (declare moe_layers)."
            ),
        )
    elif (
        captured > 1
        and _all_equal(evidence)
        and _beyond_chance(view, (captured - 1) * len(moe) * _choice_bits(view.contract))
    ):
        out.finding(
            "all route rows of a sample are equal",
            expected="choices that differ between tokens",
            observed=f"one and the same row {captured} times, in all {len(moe)} MoE layers",
            where=view.place(position=evidence.captured[0][0]),
            hint=_hint_for_equal_rows(view),
        )


def _hint_for_equal_rows(view: RequestView) -> str:
    """Return why all rows of a sample may be equal, as far as the replies show."""
    if view.uncalled:
        return (
            "No engine was called for this sample (stitch.sampled-by-engine): one row was made up"
            " for all tokens."
        )
    returned = [
        reply.output.routes
        for attempt in view.attempts
        for reply in attempt.replies
        if reply.output.routes is not None and len(reply.output.routes) > 1
    ]
    if any((rows != rows[:1]).any() for rows in returned):
        return (
            "The rows that the engines returned differ from token to token: one token's row was"
            " copied to all, or all were made up."
        )
    return (
        "The buffer was captured once, for example under a CUDA graph (SGLang #12162), or one"
        " token's row was copied to all."
    )


def _only_filler(evidence: RouteEvidence) -> bool:
    """Return whether the replies may lack routes, and every row but the last of T is the declared
    filler.
    """
    contract, rows = evidence.contract, evidence.rows - (evidence.contract.rows is Rows.ALL)
    if not contract.reply_gaps or contract.filler is None:
        return False
    shown = evidence.delivered(evidence.start, evidence.start + rows)
    return bool(is_filler(shown, contract.filler, contract.expert_count).all())


def _dead_columns(evidence: RouteEvidence) -> list[int]:
    """Return the MoE columns with zeros in all captured cells."""
    alive: BoolArray = np.zeros(len(evidence.contract.moe_columns), dtype=bool)
    for low, high in evidence.captured:
        # A living layer shows within a few rows, so the rest is not read.
        for start in range(low, high, _BLOCK_ROWS):
            alive |= np.bitwise_or.reduce(
                evidence.delivered(start, min(high, start + _BLOCK_ROWS)), axis=0
            ).any(axis=1)
            if alive.all():
                return []
    return np.flatnonzero(~alive).tolist()


def _all_equal(evidence: RouteEvidence) -> bool:
    first = evidence.delivered(evidence.captured[0][0], evidence.captured[0][0] + 1)
    for low, high in evidence.captured:
        for start in range(low, high, _BLOCK_ROWS):
            if (evidence.delivered(start, min(high, start + _BLOCK_ROWS)) != first).any():
                return False
    return True


def _choice_bits(contract: Contract) -> float:
    return log2(comb(contract.expert_count, contract.choice_count))


def _beyond_chance(view: RequestView, bits: float) -> bool:
    return bits >= _MIN_BITS and len(set(view.total_ids)) > _MIN_DISTINCT_TOKENS
