"""Routes, by content: every row is the one that the engine computed for its position, layer,
request and declared segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Filler, LayerAxis, Provenance, ResumeBy, Rows
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.comparison import BoolArray, is_filler
from rollproof.invariants.routes.origin import Stray, group_of
from rollproof.invariants.routes.route_phrases import amount, attempt_words, has_routes, needs_rows
from rollproof.judging.checks import Collector, request_check

if TYPE_CHECKING:
    from rollproof.core.records import IntArray
    from rollproof.judging.request_view import RequestView

__all__ = [
    "routes_captured",
    "routes_content",
    "routes_dense_columns",
    "routes_filler",
    "routes_isolation",
    "routes_layer",
    "routes_position",
    "routes_provenance",
]

_NEEDS = "a delivered sample with routes of the right shape and count, and the replies with routes"
_COMPARED = "rows compared"
_RESUMED = "rows of resumed samples"
_WHOLE = "rows of samples that the contract lets nobody resume"
_BESIDE = "rows compared beside other requests"


def _compared(view: RequestView, out: Collector, counter: str = _COMPARED) -> bool:
    """Count the rows that are compared; false where there are none, and then the reason is told."""
    reason = needs_rows(view)
    if reason is not None:
        out.absent(reason)
        return False
    out.exercised(counter, sum(high - low for low, high in comparison.of(view).captured))
    return True


@request_check(
    "routes.position",
    promise="Every row stands at the position of the token whose forward computed it.",
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_position(view: RequestView, out: Collector) -> None:
    if not _compared(view, out) or (group := group_of(view, Stray.POSITION)) is None:
        return
    first = int(group.positions[0])
    observed = f"rows of other positions in {amount(view, group)}"
    if group.clue.shift is not None:
        observed = (
            f"the row at position {first} is that of position {first + group.clue.shift}; so in"
            f" {amount(view, group)}"
        )
    out.finding(
        "route rows stand at the wrong positions",
        expected="row i is the row of token i of prompt + response",
        observed=observed,
        where=view.place(position=first, segment=view.segment_of(first)),
        hint=(
            "An off-by-one at a segment boundary, or rows taken by count where they should be taken"
            " by position: the forward of token i computes row i, so segment 2 starts at the row of"
            " segment 1's last token."
        ),
    )


@request_check(
    "routes.layer",
    promise="Every MoE layer's choice stands in that layer's column.",
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_layer(view: RequestView, out: Collector) -> None:
    if not _compared(view, out) or (group := group_of(view, Stray.LAYER)) is None:
        return
    contract = view.contract
    moe = contract.moe_layers or ()
    if group.clue.shift is not None:
        column = max(0, -group.clue.shift)
        observed = (
            f"columns {group.clue.source}: layer {moe[column]}'s column holds the choice of layer"
            f" {moe[column + group.clue.shift]}"
        )
        where = view.place(position=int(group.positions[0]), layer=moe[column])
    else:
        observed, where = group.clue.source, view.place(position=int(group.positions[0]))
    dense = (contract.num_layers or 0) - len(moe)
    out.finding(
        "the layers stand in the wrong columns",
        expected=(
            f"column l holds {'MoE layer number' if dense else 'layer'} l"
            f" (layer_axis='{contract.layer_axis}')"
        ),
        observed=f"{observed}; in {amount(view, group)}",
        where=where,
        hint=(
            "Engines differ in whether dense layers have a column (vLLM, SGLang: zeros;"
            " TensorRT-LLM: none). A mapping by position then shifts every MoE layer behind a dense"
            " one. Same cause: verl #5037, slime #810."
        ),
    )


@request_check(
    "routes.provenance",
    promise=(
        "Every row comes from the segment that the contract declares, boundary rows included, and"
        " was not computed anew."
    ),
    needs=_NEEDS + "; more than one call, where the contract lets the client resume",
    exercised_by=(_RESUMED, _WHOLE),
    applies=has_routes,
)
def routes_provenance(view: RequestView, out: Collector) -> None:
    group = group_of(view, Stray.PROVENANCE) if needs_rows(view) is None else None
    if group is None and not view.resumed and view.contract.resume is ResumeBy.CLIENT:
        out.absent("no sample was resumed")
        return
    if not _compared(view, out, _RESUMED if view.resumed else _WHOLE):
        return
    if group is None:
        return
    first = int(group.positions[0])
    evidence = comparison.of(view)
    declared = view.contract.provenance
    owner = evidence.attempt_at(first)
    want = "" if owner is None else attempt_words(view, owner, first)
    got = (
        f"weights {group.clue.version} (no reply holds it)"
        if group.clue.attempt is None
        else attempt_words(view, group.clue.attempt, first)
    )
    last = int(group.positions[-1])
    boundary = len(group.positions) == 1 and view.segment_of(first) != view.segment_of(first + 1)
    if boundary:
        hint = (
            "The last token of a segment is forwarded by the next call: its row belongs to that"
            " call. Keep rows [0, prompt + tokens - 1) of a segment and let the next one start"
            " there."
        )
    elif declared is Provenance.AS_SAMPLED:
        hint = (
            "The older rows were replaced by a later call's prefill: logprobs of the old weights"
            " are then paired with routes of the new ones. `routes = out.routes` on resume takes"
            " the last prefill's rows: keep `rows[:len(rows)]` and append the rest, or declare"
            " provenance='latest-prefill' if that is meant. Compare verl #6046 (ppo_kl) and #6029"
            " (the discussion)."
        )
    else:
        hint = (
            "Rows of an earlier call were kept: take the last call's whole array, or declare"
            " provenance='as-sampled'."
        )
    out.finding(
        "route rows come from another segment than declared",
        expected=f"provenance='{declared}': the row at position {first} is that of {want}",
        observed=f"it is that of {got}; so in {amount(view, group)}",
        where=view.place(position=first, segment=view.segment_of(last), version=group.clue.version),
        hint=hint,
    )


@request_check(
    "routes.isolation",
    promise="No row of a sample is another request's.",
    needs=_NEEDS + "; other requests in the same trace",
    exercised_by=_BESIDE,
    applies=has_routes,
)
def routes_isolation(view: RequestView, out: Collector) -> None:
    if not view.neighbours:
        out.absent("no other request in the trace")
        return
    if not _compared(view, out, _BESIDE) or (group := group_of(view, Stray.REQUEST)) is None:
        return
    first = int(group.positions[0])
    out.finding(
        "route rows of another request",
        expected=f"rows of request {view.request.request_id}",
        observed=(
            f"the row at position {first} is that of {group.clue.source}; so in"
            f" {amount(view, group)}"
        ),
        where=view.place(position=first),
        hint=(
            "Results were matched by order instead of by id, or a shared buffer was read after it"
            " had been written again (SGLang #34319: views of a reused buffer)."
        ),
    )


@request_check(
    "routes.captured",
    promise="No captured row is replaced by filler.",
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_captured(view: RequestView, out: Collector) -> None:
    if not _compared(view, out) or (group := group_of(view, Stray.FILLER)) is None:
        return
    first = int(group.positions[0])
    owner = comparison.of(view).attempt_at(first)
    known = "" if owner is None else f" (captured by {attempt_words(view, owner, first)})"
    boundary = view.segment_of(first) is not None and view.segment_of(first) != view.segment_of(
        first + 1
    )
    if boundary:
        hint = (
            "The row at a segment's end is filler only until the next call computes it: take it"
            " from there. Engines with T rows return filler for the last token of every call."
        )
    else:
        hint = "Padding overwrote captured rows, or a copy was shorter than its target."
    if group.clue.filler is Filler.ZEROS:
        hint += (
            " Zeros are expert 0, top_k times, and a trainer replays them (verl as_dict, SGLang"
            " #23885)."
        )
    out.finding(
        "filler stands where a row was captured",
        expected=f"the captured row at position {first}{known}",
        observed=f"{group.clue.source} in {amount(view, group)}",
        where=view.place(position=first, segment=view.segment_of(first)),
        hint=hint,
    )


@request_check(
    "routes.filler",
    promise=(
        "Where nothing was captured stands the declared filler and nothing else, and it is not"
        " counted as captured."
    ),
    needs=_NEEDS,
    exercised_by=(
        "samples without filler",
        "filler rows",
        "filler rows of zeros (a legal expert id: a trainer replays them)",
    ),
    applies=has_routes,
)
def routes_filler(view: RequestView, out: Collector) -> None:
    reason = needs_rows(view)
    if reason is not None:
        out.absent(reason)
        return
    evidence, contract = comparison.of(view), view.contract
    if not evidence.uncaptured:
        out.exercised("samples without filler")
        return
    for low, high in evidence.uncaptured:
        rows = evidence.delivered(low, high)
        kinds = [contract.filler] * len(rows)
        if contract.rows is Rows.ALL and high == evidence.total:
            kinds[-1] = contract.final_row
        if contract.rows is Rows.CAPTURED_PREFIX:
            kinds = [Filler.NONE] * len(rows)
        for kind in dict.fromkeys(kinds):
            mine = np.array([one is kind for one in kinds])
            name = (
                "filler rows of zeros (a legal expert id: a trainer replays them)"
                if kind is Filler.ZEROS
                else "filler rows"
            )
            out.exercised(name, int(mine.sum()))
            good = is_filler(
                rows,
                kind or Filler.NONE,
                contract.num_experts or 1,
                evidence.delivered(max(0, low - 1), low),
            )
            if (
                kind is Filler.PREVIOUS and evidence.attempt_at(low - 1) is not None
            ):  # a wrong row before it is for other checks to tell
                good |= is_filler(
                    rows, kind, contract.num_experts or 1, evidence.expected(np.array([low - 1]))
                )
            bad = low + np.flatnonzero(mine & ~good)
            if len(bad):
                _wrong_filler(view, out, kind, bad.tolist())


def _wrong_filler(view: RequestView, out: Collector, kind: Filler | None, bad: list[int]) -> None:
    evidence, contract = comparison.of(view), view.contract
    row = evidence.delivered(bad[0], bad[0] + 1)
    before = evidence.delivered(max(0, bad[0] - 1), bad[0])
    shown = next(
        (str(one) for one in Filler if is_filler(row, one, contract.num_experts or 1, before)[0]),
        "ids that look like a choice",
    )
    if contract.rows is Rows.CAPTURED_PREFIX:
        expected = (
            f"rows up to position {bad[0] - 1}: the prefix that was captured, and nothing behind it"
        )
        hint = (
            "An uncaptured suffix that is handed over counts as captured (SkyRL #1908): cut it, or"
            " mask it and declare rows='T'."
        )
    elif kind in (Filler.NONE, None):
        expected = "no row: the contract declares no filler"
        hint = (
            "A row that nobody computed is replayed like any other: leave it out, or declare the"
            " filler so that consumers can mask it."
        )
    else:
        expected = f"{kind} filler, as the contract declares"
        hint = "A consumer masks what it recognises as filler, and replays the rest."
    out.finding(
        "a row without a capture is not the declared filler",
        expected=expected,
        observed=(
            f"{shown} in {count(len(bad), 'row')} (position{'s' if len(bad) > 1 else ''}"
            f" {ranges(bad)})"
        ),
        where=view.place(position=bad[0]),
        hint=hint,
    )


@request_check(
    "routes.content",
    promise=(
        "Every captured row holds the experts that the engine returned; their order within a layer"
        " is the stack's."
    ),
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_content(view: RequestView, out: Collector) -> None:
    if not _compared(view, out) or (group := group_of(view, Stray.UNKNOWN)) is None:
        return
    first = int(group.positions[0])
    evidence = comparison.of(view)
    got, want = evidence.delivered(first, first + 1)[0], evidence.expected(group.positions[:1])[0]
    column = int(np.flatnonzero((np.sort(got, axis=1) != np.sort(want, axis=1)).any(axis=1))[0])
    out.finding(
        "route rows are not what the engine returned",
        expected=f"experts {want[column].tolist()} at position {first}, as the engine returned",
        observed=f"experts {got[column].tolist()}; wrong in {amount(view, group)}",
        where=view.place(
            position=first,
            layer=(view.contract.moe_layers or ())[column],
            segment=view.segment_of(first),
        ),
        hint=(
            "The rows are of no call, position, layer or request that the trace knows: a buffer"
            " written again before it was read, a decoder with another dtype or byte order, or"
            " values recomputed."
        ),
    )


def _has_dense_columns(contract: Contract) -> str | None:
    if (reason := has_routes(contract)) is not None:
        return reason
    if (
        contract.layer_axis is LayerAxis.MOE
        or len(contract.moe_layers or ()) == contract.num_layers
    ):
        return "no dense layer has a column (layer_axis, moe_layers)"
    return "top_k is 1: one id cannot be told from a filler" if contract.top_k == 1 else None


@request_check(
    "routes.dense-columns",
    promise=(
        "The column of a dense layer holds no choice of experts: what the engine returned there, or"
        " any filler."
    ),
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=_has_dense_columns,
)
def routes_dense_columns(view: RequestView, out: Collector) -> None:
    """A cell of one id repeated, of ids that count up, or the same in every row is a filler,
    declared or not.
    """
    if not _compared(view, out):
        return
    evidence, contract = comparison.of(view), view.contract
    if len(evidence.mismatched):
        out.absent("rows that another check explains")
        return
    dense = [
        layer
        for layer in range(contract.num_layers or 0)
        if layer not in (contract.moe_layers or ())
    ]
    for piece in evidence.pieces:
        low, high = max(piece.start, evidence.start), min(piece.end, evidence.end)
        if low >= high or evidence.routes is None:
            continue
        cells = evidence.routes[low - evidence.start : high - evidence.start, dense]
        own = (
            piece.rows[low - piece.start : high - piece.start, dense]
            if piece.rows.shape[1] == contract.num_layers
            else None
        )
        if own is not None and (cells == own).all():
            continue
        wide = cells.astype(np.int64)
        steps = (wide[:, :, 1:] - wide[:, :, :-1]) % (contract.num_experts or 1)
        alien = (cells != cells[:1]).any(axis=2) & (steps > 1).any(axis=2)
        if own is not None:
            alien &= (cells != own).any(axis=2)
        if alien.any():
            _report_dense(view, out, low, cells, alien, dense)
            return


def _report_dense(
    view: RequestView, out: Collector, low: int, cells: IntArray, alien: BoolArray, dense: list[int]
) -> None:
    row, column = (int(i) for i in np.argwhere(alien)[0])
    layers = [dense[i] for i in np.flatnonzero(alien.any(axis=0)).tolist()]
    out.finding(
        "the column of a dense layer holds what looks like a choice of experts",
        expected=(
            f"the engine's own value or a filler in {count(len(dense), 'dense layer')} (layer"
            f" {ranges(dense)})"
        ),
        observed=(
            f"experts {cells[row, column].tolist()} at position {low + row} in layer"
            f" {dense[column]}; so in {count(int(alien.any(axis=1).sum()), 'row')} (layer"
            f" {ranges(layers)})"
        ),
        where=view.place(
            position=low + row, layer=dense[column], segment=view.segment_of(low + row)
        ),
        hint=(
            "A dense layer has no router: a buffer was not cleared, or columns were moved. A"
            " trainer that maps columns by their order replays them in the MoE layer behind (verl"
            " #5037)."
        ),
    )
