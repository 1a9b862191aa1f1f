"""Checks on the content of routes: every row is the engine's row of its position, layer, request
and declared segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Filler, LayerAxis, Provenance, ResumeBy, Rows
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.comparison import BoolArray, filler_chance, is_filler
from rollproof.invariants.routes.origin import RowOrigin, group_of
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
_UNRESUMED = "rows of samples that no client may resume"
_WITH_OTHERS = "rows compared with other requests in the trace"


def _compared(view: RequestView, out: Collector, counter: str = _COMPARED) -> bool:
    """Count the rows that are compared; if there are none, report why and return false."""
    reason = needs_rows(view)
    if reason is not None:
        out.absent(reason)
        return False
    out.exercised(counter, sum(high - low for low, high in comparison.of(view).captured))
    return True


@request_check(
    "routes.position",
    promise="Every row is at the position of the token whose forward pass computed it.",
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_position(view: RequestView, out: Collector) -> None:
    """Report rows of other positions."""
    if not _compared(view, out) or (group := group_of(view, RowOrigin.POSITION)) is None:
        return
    first = int(group.positions[0])
    observed = f"rows of other positions in {amount(view, group)}"
    if group.clue.shift is not None:
        observed = (
            f"the row at position {first} is that of position {first + group.clue.shift}; so in"
            f" {amount(view, group)}"
        )
    out.finding(
        "route rows are at the wrong positions",
        expected="row i is the row of token i of prompt + response",
        observed=observed,
        where=view.place(position=first, segment=view.segment_of(first)),
        hint=(
            "An off-by-one at a segment boundary, or rows taken by count instead of by"
            " position: the forward pass of token i computes row i, so segment 2 starts at the"
            " row of segment 1's last token."
        ),
    )


@request_check(
    "routes.layer",
    promise="The choice of every MoE layer is in that layer's column.",
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_layer(view: RequestView, out: Collector) -> None:
    """Report rows with the choice of other layers."""
    if not _compared(view, out) or (group := group_of(view, RowOrigin.LAYER)) is None:
        return
    contract = view.contract
    moe = contract.routed_layers
    if group.clue.shift is not None:
        column = max(0, -group.clue.shift)
        observed = (
            f"columns {group.clue.source}: layer {moe[column]}'s column holds the choice of layer"
            f" {moe[column + group.clue.shift]}"
        )
        where = view.place(position=int(group.positions[0]), layer=moe[column])
    else:
        observed, where = group.clue.source, view.place(position=int(group.positions[0]))
    # vLLM and SGLang return zero columns for dense layers, TensorRT-LLM returns none: a mapping by
    # position shifts every later layer.
    dense = contract.layer_count - len(moe)
    out.finding(
        "the layers are in the wrong columns",
        expected=(
            f"column l holds {'MoE layer number' if dense else 'layer'} l"
            f" (layer_axis='{contract.layer_axis}')"
        ),
        observed=f"{observed}; in {amount(view, group)}",
        where=where,
        hint=(
            "Engines differ in whether dense layers have a column (vLLM, SGLang: zeros;"
            " TensorRT-LLM: none). A mapping by position then shifts every MoE layer after a"
            " dense one: index the columns by moe_layers. Same cause: verl #5037, slime #810."
        ),
    )


@request_check(
    "routes.provenance",
    promise=(
        "Every row comes from the segment that the contract declares, boundary rows included,"
        " and was not recomputed."
    ),
    needs=_NEEDS + "; more than one call, if the contract lets the client resume",
    exercised_by=(_RESUMED, _UNRESUMED),
    applies=has_routes,
)
def routes_provenance(view: RequestView, out: Collector) -> None:
    """Report rows of another segment, or of weights that no reply used."""
    group = group_of(view, RowOrigin.PROVENANCE) if needs_rows(view) is None else None
    if group is None and not view.resumed and view.contract.resume is ResumeBy.CLIENT:
        return  # other samples of the run may be resumed: it is no reason for all of them
    if not _compared(view, out, _RESUMED if view.resumed else _UNRESUMED):
        return
    if group is None:
        return
    first = int(group.positions[0])
    evidence = comparison.of(view)
    declared = view.contract.provenance
    owner = evidence.attempt_at(first)
    expected = "" if owner is None else attempt_words(view, owner, first)
    actual = (
        f"weights {group.clue.version} (no reply holds it)"
        if group.clue.attempt is None
        else attempt_words(view, group.clue.attempt, first)
    )
    last = int(group.positions[-1])
    # The row of a segment's last token is computed by the next call, so a fault there alone is an
    # off-by-one at the seam.
    boundary = len(group.positions) == 1 and view.segment_of(first) != view.segment_of(first + 1)
    # in a case that was shrunk it may be the only row of its segment, and show no more than that
    only = first == 0 or view.segment_of(first - 1) != view.segment_of(first)
    if boundary and only and declared is Provenance.AS_SAMPLED:
        hint = (
            "On resume keep all rows that are there and append those of the new tokens alone,"
            " `new[len(rows):]`: here they were replaced by a later call's, or the last one was. If"
            " the later rows are meant, declare provenance='latest-prefill'. Compare verl #6046"
            " (ppo_kl) and #6029 (the discussion)."
        )
    elif boundary and declared is Provenance.AS_SAMPLED:
        hint = (
            "The last token of a segment is forwarded by the next call: its row belongs to that"
            " call. Keep rows [0, prompt + tokens - 1) of a segment and let the next one start"
            " there."
        )
    # verl #6046 and #6029 discuss both conventions: each is right if the trainer knows which one it
    # gets.
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
        expected=f"provenance='{declared}': the row at position {first} is that of {expected}",
        observed=f"it is that of {actual}; so in {amount(view, group)}",
        where=view.place(position=first, segment=view.segment_of(last), version=group.clue.version),
        hint=hint,
    )


@request_check(
    "routes.isolation",
    promise="No row of a sample belongs to another request.",
    needs=_NEEDS + "; other requests in the same trace",
    exercised_by=_WITH_OTHERS,
    applies=has_routes,
)
def routes_isolation(view: RequestView, out: Collector) -> None:
    """Report rows of other requests."""
    if not view.neighbours:
        out.absent("the trace has no other request")
        return
    if (
        not _compared(view, out, _WITH_OTHERS)
        or (group := group_of(view, RowOrigin.REQUEST)) is None
    ):
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
            "Results were matched by order instead of by id, or a shared buffer was read"
            " after it had been overwritten (SGLang #34319: views of a reused buffer)."
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
    """Report filler at positions with a captured row."""
    if not _compared(view, out) or (group := group_of(view, RowOrigin.FILLER)) is None:
        return
    first = int(group.positions[0])
    owner = comparison.of(view).attempt_at(first)
    captured_by = "" if owner is None else f" (captured by {attempt_words(view, owner, first)})"
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
        "filler replaced a captured row",
        expected=f"the captured row at position {first}{captured_by}",
        observed=f"{group.clue.source} in {amount(view, group)}",
        where=view.place(position=first, segment=view.segment_of(first)),
        hint=hint,
    )


@request_check(
    "routes.filler",
    promise=(
        "A position without a captured row holds the declared filler and nothing else, and"
        " does not count as captured."
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
    """Check what is at positions without a captured row."""
    reason = needs_rows(view)
    if reason is not None:
        out.absent(reason)
        return
    # Consumers mask filler by its declared value, so that another one is replayed as a choice.
    evidence, contract = comparison.of(view), view.contract
    experts = contract.expert_count
    if not evidence.uncaptured:
        out.exercised("samples without filler")
        return
    for low, high in evidence.uncaptured:
        rows = evidence.delivered(low, high)
        before = evidence.delivered(low - 1, low)
        kinds = [contract.filler] * len(rows)
        if contract.rows is Rows.ALL and high == evidence.total:
            # With T rows the last one may have a filler of its own. An end token that the stack
            # adds itself follows a token that was not forwarded either.
            last = len(view.request.prompt_ids) + len(view.stitched.response_ids) - 1
            final = is_filler(rows, contract.final_row or Filler.NONE, experts, before)
            final &= np.arange(low, high) >= last
            final[-1] = True
            kinds = [
                contract.final_row if is_final else contract.filler for is_final in final.tolist()
            ]
        if contract.rows is Rows.CAPTURED_PREFIX:
            kinds = [Filler.NONE] * len(rows)
        for kind in dict.fromkeys(kinds):
            of_kind = np.array([declared is kind for declared in kinds])
            name = (
                "filler rows of zeros (a legal expert id: a trainer replays them)"
                if kind is Filler.ZEROS
                else "filler rows"
            )
            out.exercised(name, int(of_kind.sum()))
            matches = is_filler(rows, kind or Filler.NONE, experts, before)
            # If the row before it is wrong, other checks report that.
            if kind is Filler.PREVIOUS and evidence.attempt_at(low - 1) is not None:
                matches |= is_filler(rows, kind, experts, evidence.expected(np.array([low - 1])))
            wrong = low + np.flatnonzero(of_kind & ~matches)
            if len(wrong):
                _wrong_filler(view, out, kind, wrong.tolist())


def _wrong_filler(view: RequestView, out: Collector, kind: Filler | None, wrong: list[int]) -> None:
    evidence, contract = comparison.of(view), view.contract
    first = wrong[0]
    row, before = evidence.delivered(first, first + 1), evidence.delivered(first - 1, first)
    description = next(
        (
            str(filler)
            for filler in Filler
            if is_filler(row, filler, contract.expert_count, before).all()
            # an ordinary choice looks like arange now and then
            and filler_chance(filler, row.shape[1], row.shape[2], contract.expert_count) < 1e-3
        ),
        "ids that look like a choice",
    )
    if contract.rows is Rows.CAPTURED_PREFIX:
        expected = f"rows up to position {first - 1}: the captured prefix, and nothing after it"
        hint = (
            "An uncaptured suffix that is delivered counts as captured (SkyRL #1908): cut it,"
            " or mask it and declare rows='T'."
        )
    elif kind in (Filler.NONE, None):
        expected = "no row: the contract declares no filler"
        hint = (
            "A row that no forward pass computed is replayed like any other: leave it out, or"
            " declare the filler so that consumers can mask it."
        )
    else:
        expected = f"{kind} filler, as the contract declares"
        hint = "A consumer masks what it recognises as filler and replays the rest."
    out.finding(
        "a row without a capture is not the declared filler",
        expected=expected,
        observed=(
            f"{description} in {count(len(wrong), 'row')} (position{'s' if len(wrong) > 1 else ''}"
            f" {ranges(wrong)})"
        ),
        where=view.place(position=first),
        hint=hint,
    )


@request_check(
    "routes.content",
    promise=(
        "Every captured row holds the experts that the engine returned; their order within a"
        " layer does not matter."
    ),
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=has_routes,
)
def routes_content(view: RequestView, out: Collector) -> None:
    """Report rows of unknown origin."""
    if not _compared(view, out) or (group := group_of(view, RowOrigin.UNKNOWN)) is None:
        return
    first = int(group.positions[0])
    evidence = comparison.of(view)
    (actual,), (expected,) = (
        evidence.delivered(first, first + 1),
        evidence.expected(group.positions[:1]),
    )
    # The order within a cell does not count: a trainer gathers by id.
    column = int(
        np.flatnonzero((np.sort(actual, axis=1) != np.sort(expected, axis=1)).any(axis=1))[0]
    )
    out.finding(
        "route rows are not what the engine returned",
        expected=f"experts {expected[column].tolist()} at position {first}, as the engine returned",
        observed=f"experts {actual[column].tolist()}; wrong in {amount(view, group)}",
        where=view.place(
            position=first,
            layer=view.contract.routed_layers[column],
            segment=view.segment_of(first),
        ),
        hint=(
            "The rows match no call, position, layer or request of the trace: a buffer was"
            " overwritten before it was read, a decoder used another dtype or byte order, or"
            " the values were recomputed."
        ),
    )


def _has_dense_columns(contract: Contract) -> str | None:
    if (reason := has_routes(contract)) is not None:
        return reason
    if contract.layer_axis is LayerAxis.MOE or len(contract.routed_layers) == contract.num_layers:
        return "no dense layer has a column (layer_axis, moe_layers)"
    return (
        "top_k is 1: one id cannot be distinguished from a filler" if contract.top_k == 1 else None
    )


@request_check(
    "routes.dense-columns",
    promise=(
        "The column of a dense layer holds no choice of experts, but what the engine returned"
        " there or any filler."
    ),
    needs=_NEEDS,
    exercised_by=_COMPARED,
    applies=_has_dense_columns,
)
def routes_dense_columns(view: RequestView, out: Collector) -> None:
    """Look for cells that look like a choice. A cell of one repeated id, of ids that count up, or
    equal in every row is a filler, declared or not.
    """
    if not _compared(view, out):
        return
    evidence, contract = comparison.of(view), view.contract
    if len(evidence.mismatched):
        out.absent("rows that another check explains")
        return
    dense = [layer for layer in range(contract.layer_count) if layer not in contract.routed_layers]
    for low, rows, engine_rows in evidence.overlaps():
        cells = rows[:, dense]
        ids = cells.astype(np.int64)
        steps = (ids[:, :, 1:] - ids[:, :, :-1]) % contract.expert_count
        # What differs between rows and is neither one repeated id nor counting up cannot be a
        # filler.
        suspicious = (cells != cells[:1]).any(axis=2) & (steps > 1).any(axis=2)
        if engine_rows.shape[1] == contract.num_layers:
            suspicious &= (cells != engine_rows[:, dense]).any(axis=2)
        if suspicious.any():
            _report_dense(view, out, low, cells, suspicious, dense)
            return


def _report_dense(
    view: RequestView,
    out: Collector,
    low: int,
    cells: IntArray,
    suspicious: BoolArray,
    dense: list[int],
) -> None:
    row, column = (int(i) for i in np.argwhere(suspicious)[0])
    layers = [dense[i] for i in np.flatnonzero(suspicious.any(axis=0)).tolist()]
    out.finding(
        "the column of a dense layer holds what looks like a choice of experts",
        expected=(
            f"the engine's own value or a filler in {count(len(dense), 'dense layer')} (layer"
            f" {ranges(dense)})"
        ),
        observed=(
            f"experts {cells[row, column].tolist()} at position {low + row} in layer"
            f" {dense[column]}; so in {count(int(suspicious.any(axis=1).sum()), 'row')} (layer"
            f" {ranges(layers)})"
        ),
        where=view.place(
            position=low + row, layer=dense[column], segment=view.segment_of(low + row)
        ),
        hint=(
            "A dense layer has no router: a buffer was not cleared, or columns were moved. A"
            " trainer that maps columns by their order replays them in the next MoE layer"
            " (verl #5037)."
        ),
    )
