"""Checks on the routes in a batch, and on samples that must be refused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.batch_columns import Column, ColumnExtent
from rollproof.core.contract import Contract, Filler, Rows
from rollproof.core.events.training import Batch
from rollproof.core.records import BatchRow, IntArray
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.batch.batch_rows import Conversion, Placed, Places, batch_check
from rollproof.invariants.routes.comparison import is_filler
from rollproof.invariants.routes.route_phrases import has_routes
from rollproof.judging.checks import Check, Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge_context import JudgeContext

__all__ = [
    "batch_expert_ids",
    "batch_filler",
    "batch_mixed",
    "batch_refuses",
    "batch_routes",
]

_NEEDS = "Batch events with samples that have routes"
_ZEROS = "filler rows of zeros (a legal expert id: a trainer replays them)"


def _moe(contract: Contract, routes: IntArray) -> IntArray:
    return routes[:, list(contract.moe_columns)]


def _judged(batch: Conversion) -> tuple[Placed, ...]:
    """Return the sound samples with routes if their row has routes of the right shape."""
    contract = batch.contract
    shape = (contract.route_layers, contract.top_k)
    return tuple(
        placed
        for placed in batch.sound
        if placed.sample.routes is not None
        and placed.row.routes is not None
        and placed.row.routes.shape[1:] == shape
    )


@batch_check(
    "batch.routes",
    promise=("Every captured row is at its token's place, in the sample's own row of the batch."),
    needs=_NEEDS,
    exercised_by="rows compared",
    applies=has_routes,
)
def batch_routes(batch: Conversion, out: Collector) -> None:
    """Compare the captured rows of each sample with those at its tokens' places."""
    for placed in batch.sound:
        if placed.sample.routes is None:
            continue
        if placed.row.routes is None:
            if not batch.mixed:
                out.finding(
                    "the routes of a sample are gone",
                    expected=f"{count(placed.captured, 'captured row')}",
                    observed="none",
                    where=batch.place(placed.sample),
                    hint=(
                        "The conversion must carry routed_experts like any per-token field (verl"
                        " #5368, AReno #524)."
                    ),
                )
            continue
        expected = _moe(batch.contract, placed.sample.routes[: placed.captured])
        # A flattened or reshaped array has no rows to compare.
        if placed.row.routes.shape[1:] != placed.sample.routes.shape[1:]:
            out.finding(
                "the routes have another shape",
                expected=(
                    f"(places, {placed.sample.routes.shape[1]}, {placed.sample.routes.shape[2]})"
                ),
                observed=f"{placed.row.routes.shape}",
                where=batch.place(placed.sample),
                hint="Layers and top_k come from the model config.",
            )
            continue
        out.exercised("rows compared", placed.captured)
        wrong = _wrong_rows(placed, expected)
        if batch.mixed and _is_cleared(batch):
            continue
        if len(wrong) and _wrapped(batch.contract, placed, expected) is None:
            _report_rows(batch, out, placed, expected, wrong)


def _wrong_rows(placed: Placed, expected: IntArray) -> Places:
    """Return the tokens without their captured row at their place; the order within a cell does not
    count.
    """
    actual = placed.rows_at(np.arange(len(expected)))
    wrong = (np.sort(actual, axis=2) != np.sort(expected[: len(actual)], axis=2)).any(axis=(1, 2))
    return np.concatenate([np.flatnonzero(wrong), np.arange(len(actual), len(expected))])


def _is_cleared(batch: Conversion) -> bool:
    """Return whether no row of a batch holds a capture: every place is marked as uncaptured, or
    holds the declared filler.
    """
    return all(_is_blank(batch.contract, row) for row in batch.event.rows)


def _is_blank(contract: Contract, row: BatchRow) -> bool:
    if row.routes is None or (row.routed is not None and not row.routed.any()):
        return True
    # A row of the place before is no sign of its own.
    if contract.filler in (None, Filler.NONE, Filler.PREVIOUS):
        return False
    if row.routes.shape[1:] != (contract.route_layers, contract.top_k):
        return False
    rows = _moe(contract, row.routes)
    return bool(is_filler(rows, contract.filler, contract.expert_count).all())


def _wrapped(contract: Contract, placed: Placed, expected: IntArray) -> str | None:
    """Return the narrow type to which the ids were cast, if that explains every row."""
    actual = placed.rows_at(np.arange(len(expected))).astype(np.int64)
    # Fewer than 128 experts fit into every integer type, so that nothing can wrap.
    if len(actual) < len(expected) or contract.expert_count < 128:
        return None
    for name in ("uint8", "int8", "int16", "uint16"):
        cast = expected.astype(name).astype(np.int64)
        if (cast != expected).any() and (np.sort(cast, axis=2) == np.sort(actual, axis=2)).all():
            return name
    return None


def _report_rows(
    batch: Conversion, out: Collector, placed: Placed, expected: IntArray, wrong: Places
) -> None:
    assert placed.row.routes is not None
    routes = _moe(batch.contract, placed.row.routes)
    first = int(wrong[0])
    place = int(placed.places[first])
    elsewhere = [
        i
        for i, row in enumerate(routes)
        if (np.sort(row, axis=1) == np.sort(expected[first], axis=1)).all()
    ]
    cell = None if place >= len(routes) else routes[place]
    owner = None if cell is None else _owner(batch, placed, cell)
    if owner is not None:
        observed = f"the row at place {place} is that of token {owner[1]} of {owner[0]}"
    elif cell is None:
        observed = f"no row at place {place}: the batch has {len(routes)}"
    else:
        observed = (
            f"experts {cell[0].tolist()} at place {place} instead of {expected[first][0].tolist()}"
        )
        if elsewhere:
            observed += (
                f"; token {first}'s row is at place {elsewhere[0]},"
                f" {count(abs(elsewhere[0] - place), 'place')} away"
            )
    out.finding(
        "route rows are not at their tokens",
        expected=f"the row of token {first} at place {place}, where the token is",
        observed=(
            f"{observed}; so for {len(wrong)} of {count(len(expected), 'captured row')} (token"
            f" {ranges(wrong.tolist())})"
        ),
        where=batch.place(placed.sample, position=first),
        hint=(
            "Shift routes by the same padding as the tokens, on the same side (slime #1052, #2175)."
        ),
    )


def _owner(batch: Conversion, placed: Placed, cell: IntArray) -> tuple[str, int] | None:
    """Return another sample of the batch that has this row, and its token."""
    for other in batch.event.samples:
        if other.request_id == placed.sample.request_id or other.routes is None:
            continue
        rows = _moe(batch.contract, other.routes)
        equal = np.flatnonzero((np.sort(rows, axis=2) == np.sort(cell, axis=1)).all(axis=(1, 2)))
        if len(equal):
            return other.request_id, int(equal[0])
    return None


@batch_check(
    "batch.expert-ids",
    promise="Expert ids survive the batch's integer type, up to num_experts - 1.",
    needs=_NEEDS,
    exercised_by="rows with routes",
    applies=has_routes,
)
def batch_expert_ids(batch: Conversion, out: Collector) -> None:
    """Check that the integer type of the batch holds every expert id."""
    largest = batch.contract.expert_count - 1
    for placed in _judged(batch):
        assert placed.row.routes is not None
        assert placed.sample.routes is not None
        out.exercised("rows with routes")
        dtype = placed.row.routes.dtype
        wrapped = _wrapped(
            batch.contract, placed, _moe(batch.contract, placed.sample.routes[: placed.captured])
        )
        if wrapped is None and np.iinfo(dtype).max >= largest:
            continue
        name = wrapped if wrapped is not None else dtype.name
        out.finding(
            f"{name} does not hold every expert id",
            expected=f"a type that holds ids up to {largest}",
            observed=f"{name} holds at most {np.iinfo(name).max}"
            + ("; ids were changed" if wrapped is not None else ""),
            where=batch.place(placed.sample),
            hint="Same cause: verl #5240 (uint8), #7407 (int16 wraps above 32767).",
        )


@batch_check(
    "batch.filler",
    promise=(
        "A place without a captured row holds the declared filler, or a row that the batch"
        " marks as uncaptured."
    ),
    needs=_NEEDS,
    exercised_by=(
        "places without a capture",
        "places marked as no capture",
        _ZEROS,
        "batches without such places",
    ),
    applies=has_routes,
)
def batch_filler(batch: Conversion, out: Collector) -> None:
    """Check what is at places without a captured row."""
    contract = batch.contract
    for placed in _judged(batch):
        assert placed.row.routes is not None
        assert placed.sample.routes is not None
        if len(_wrong_rows(placed, _moe(contract, placed.sample.routes[: placed.captured]))):
            out.absent(
                "rows are at the wrong place (batch.routes) or were wrapped"
                " (batch.expert-ids), so filler cannot be located"
            )
            continue
        uncaptured = np.ones(len(placed.row.routes), dtype=bool)
        uncaptured[placed.places[: placed.captured]] = False
        if not uncaptured.any():
            out.exercised("batches without such places")
            continue
        marked = (
            np.zeros(len(uncaptured), dtype=bool)
            if placed.row.routed is None
            else placed.row.routed == 0
        )
        out.exercised("places marked as no capture", int((uncaptured & marked).sum()))
        # A contract may declare one filler for padding and another for the final token.
        allowed = (
            {contract.filler}
            if contract.rows is not Rows.ALL
            else {contract.filler, contract.final_row}
        )
        allowed_rows, rows = marked.copy(), _moe(contract, placed.row.routes)
        for kind in allowed - {None, Filler.NONE}:
            fits = (
                is_filler(rows, kind, contract.expert_count, before=rows[:1])
                if kind is not None
                else marked
            )
            if kind is Filler.PREVIOUS:
                # Rows of other places may look like it by chance.
                fits = fits & np.isin(np.arange(len(rows)), placed.places[placed.captured :])
            out.exercised(
                _ZEROS if kind is Filler.ZEROS else "places without a capture",
                int((uncaptured & fits & ~marked).sum()),
            )
            allowed_rows |= fits
        wrong = np.flatnonzero(uncaptured & ~allowed_rows)
        if len(wrong):
            _report_filler(batch, out, placed, rows[wrong[0]], wrong.tolist())


def _report_filler(
    batch: Conversion, out: Collector, placed: Placed, row: IntArray, wrong: list[int]
) -> None:
    contract = batch.contract
    description = next(
        (str(kind) for kind in Filler if is_filler(row[None], kind, contract.expert_count).all()),
        f"experts {row[0].tolist()}",
    )
    out.finding(
        "a place without a capture is not the declared filler",
        expected=f"{contract.filler} filler, or rows marked as no capture",
        observed=f"{description} at {count(len(wrong), 'place')} ({ranges(wrong)})",
        where=batch.place(placed.sample, position=wrong[0]),
        hint=(
            "The row is replayed unless it is masked: declare the filler, or mark the rows"
            " (SkyRL: router_padding_mask)."
        ),
    )


class BatchMixed(EventCheck):
    """Judges only conversions that carry routes at all: ``batch.routes`` judges the others."""

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._carries = False

    def on_batch(self, event: Batch, out: Collector) -> None:
        """Judge one batch, or learn from it that routes are carried."""
        batch = Conversion(event, self.context.contract)
        # verl decides by inputs[0] whether a batch has routes at all.
        self._carries = self._carries or any(row.routes is not None for row in event.rows)
        if not batch.mixed or event.defect or not self._carries:
            return
        if event.refused is not None:
            out.exercised("mixed batches refused")
            return
        out.exercised("mixed batches")
        cleared = _is_cleared(batch)
        without_routes = [
            placed.sample.request_id
            for placed in batch.sound
            if placed.sample.routes is not None and (placed.row.routes is None or cleared)
        ]
        if without_routes:
            out.finding(
                "one sample without routes cost others theirs",
                expected="routes for every sample that has them, or an error",
                observed=f"no routes for {', '.join(without_routes[:6])}",
                where=batch.place(),
                hint=(
                    "Whether the batch has a field was decided by one sample (verl:"
                    " inputs[0]). Decide by all samples; mark or refuse the one without."
                ),
            )
        for placed in batch.sound:
            if (
                placed.sample.routes is None
                and placed.row.routes is not None
                and placed.sample.response_ids
            ):
                _report_invented(
                    batch,
                    out,
                    placed,
                    _legal_places(batch.contract, placed.row, placed.places[:-1]),
                )


batch_mixed: Check = trace_check(
    "batch.mixed",
    promise=(
        "A sample without routes does not remove the routes of others and gets none; or the"
        " batch is refused."
    ),
    needs="Batch events with samples with and without routes",
    exercised_by=("mixed batches", "mixed batches refused"),
    applies=has_routes,
    about="batches",
)(BatchMixed)


def _report_invented(
    batch: Conversion, out: Collector, placed: Placed, legal_places: Places
) -> None:
    if len(legal_places):
        out.finding(
            "a sample without routes was given some",
            expected="no routes, rows marked as uncaptured, or -1",
            observed=(
                f"{_describe(batch.contract, placed.row, legal_places)} for"
                f" {count(len(legal_places), 'token')} that no router chose"
            ),
            where=batch.place(placed.sample),
            hint=(
                "A legal expert id is replayed: the sample is trained on routes that no model"
                " chose."
            ),
        )


def _legal_places(contract: Contract, row: BatchRow, places: Places) -> Places:
    """Return those of ``places`` that hold ids of experts and are not marked as uncaptured."""
    assert row.routes is not None
    places = places[places < len(row.routes)]
    if row.routed is not None:
        places = places[row.routed[places] != 0]
    rows = _moe(contract, row.routes[places])
    return places[((rows >= 0) & (rows < contract.expert_count)).all(axis=(1, 2))]


def _describe(contract: Contract, row: BatchRow, places: Places) -> str:
    assert row.routes is not None
    cells = _moe(contract, row.routes[places])
    return (
        f"expert 0, {contract.top_k} times,"
        if not cells.any()
        else f"experts {cells[0, 0].tolist()}"
    )


@batch_check(
    "batch.refuses",
    promise=(
        "A sample whose per-token fields have the wrong length is refused, not silently"
        " padded or cut."
    ),
    needs="Batch events with a malformed sample",
    exercised_by=("malformed samples", "malformed samples refused"),
)
def batch_refuses(batch: Conversion, out: Collector) -> None:
    """Check that malformed samples are refused."""
    event = batch.event
    if not event.defect:
        return
    row = next((row for row in event.rows if row.request_id == event.defective), None)
    if event.refused is not None or row is None:
        out.exercised("malformed samples refused")
        return
    out.exercised("malformed samples")
    sample = next(sample for sample in event.samples if sample.request_id == event.defective)
    placed = Placed(sample, row, batch.contract)
    outcome = _outcome(placed)
    if outcome:
        out.finding(
            f"{event.defect}: accepted",
            expected="an error that names the sample and both lengths",
            observed=outcome,
            where=batch.place(sample),
            hint=(
                "Lengths that disagree mean that a field belongs to other tokens: silent"
                " padding or cutting trains on them. zip and padding hide it (verl as_dict;"
                " verl #6027, ROLL: only logged)."
            ),
        )


def _outcome(placed: Placed) -> str:
    """Return what became of a malformed sample that was accepted; empty if nothing false can be
    trained on.
    """
    sample, total = placed.sample, len(placed.tokens)
    # verl as_dict and ROLL cut silently, with a log line at best.
    if sample.routes is not None and len(sample.routes) > total:
        if placed.row.routes is None:
            return ""
        behind = int(placed.places[-1]) + 1 if len(placed.places) else 0
        routes = placed.row.routes
        if behind < len(routes) and np.array_equal(routes[behind], sample.routes[total]):
            return f"of {len(sample.routes)} rows those beyond the tokens stand behind the sample"
        return f"{len(sample.routes)} rows were cut to the tokens"
    if sample.routes is not None and len(sample.routes) < total - 1:
        return _outcome_of_short_routes(placed)
    for field in ("logprobs", "loss_mask"):
        sample_values = getattr(sample, field)
        if sample_values is not None and len(sample_values) != len(sample.response_ids):
            return _outcome_of_field(placed, field, len(sample_values))
    if outcome := _outcome_of_masks(placed):
        return outcome
    return next(filter(None, map(partial(_outcome_of_column, placed), placed.contract.columns)), "")


def _outcome_of_masks(placed: Placed) -> str:
    """Return what became of sampling masks that are not one for each token."""
    masks, actual = placed.sample.sampling_mask, placed.row.sampling_mask
    response = len(placed.response_places)
    if masks is None or actual is None or len(masks) == response:
        return ""
    if len(actual) != len(placed.row.token_ids):
        return f"{len(masks)} were put into the batch with {count(response, 'token')}"
    if len(masks) > response:
        return f"{len(masks)} were cut to {count(response, 'token')}"
    # a count of 0 says that there is none
    filled = int((actual.counts[placed.response_places[len(masks) :]] > 0).sum())
    return f"{count(filled, 'token')} without a mask got one" if filled else ""


def _outcome_of_column(placed: Placed, column: Column) -> str:
    """Return what became of the values of a further column that has another length."""
    values, actual = placed.sample.columns.get(column.name), placed.row.columns.get(column.name)
    tokens = placed.places if column.extent is ColumnExtent.TOKENS else placed.response_places
    if values is None or actual is None or len(values) == len(tokens):
        return ""
    if len(actual) != len(placed.row.token_ids):
        return f"{len(values)} were put into the batch with {count(len(tokens), 'token')}"
    if len(values) > len(tokens):
        return f"{len(values)} were cut to {count(len(tokens), 'token')}"
    filled = actual[tokens[len(values) :]]
    # NaN in a loss cannot be overlooked
    filled = filled[~np.isnan(filled)]
    return (
        f"{filled[0]:g} stands for {count(len(filled), 'value')} that the sample does not have"
        if len(filled)
        else ""
    )


def _outcome_of_short_routes(placed: Placed) -> str:
    assert placed.sample.routes is not None
    if placed.row.routes is None or not placed.sound:
        return ""
    legal_places = _legal_places(
        placed.contract,
        placed.row,
        placed.places[len(placed.sample.routes) : len(placed.tokens) - 1],
    )
    return (
        f"{_describe(placed.contract, placed.row, legal_places)} is at"
        f" {count(len(legal_places), 'token')} that have no row, and is replayed"
        if len(legal_places)
        else ""
    )


def _outcome_of_field(placed: Placed, field: str, length: int) -> str:
    array = getattr(placed.row, field)
    response = len(placed.sample.response_ids)
    # The field was dropped, so that nothing false can be trained on.
    if array is None:
        return ""
    if placed.misfit(field) is not None:
        return f"{length} were put into the batch with {count(response, 'token')}"
    if length > response:
        return f"{length} were cut to {count(response, 'token')}"
    if field == "loss_mask" or not placed.sound:
        return f"the mask of {length} was used for {count(response, 'token')}"
    remaining = placed.response_places[length:]
    mask = placed.row.loss_mask
    counted = (
        mask[remaining] != 0
        if mask is not None and placed.misfit("loss_mask") is None
        else np.ones(len(remaining), dtype=bool)
    )
    filled = counted & ~np.isnan(array[remaining])
    return (
        f"{array[remaining][filled][0]:g} is the value of"
        f" {count(int(filled.sum()), 'logprob')} that no engine returned"
        if filled.any()
        else ""
    )
