"""Batch routes: what routes become in a batch, and what becomes of samples that must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollproof.core.contract import Contract, Filler, Rows
from rollproof.core.events.training import Batch
from rollproof.core.records import BatchRow, IntArray
from rollproof.invariants._shared.event_check import EventCheck
from rollproof.invariants._shared.phrases import count, ranges
from rollproof.invariants.batch.batch_rows import Conversion, Placed, Places, batch_check
from rollproof.invariants.routes.comparison import is_filler
from rollproof.invariants.routes.route_phrases import has_routes
from rollproof.judging.checks import Collector, trace_check

if TYPE_CHECKING:
    from rollproof.judging.judge import JudgeContext

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
    """Sound samples with routes whose row has routes of the right shape."""
    contract = batch.contract
    shape = (contract.route_layers, contract.top_k)
    return tuple(
        one
        for one in batch.sound
        if one.sample.routes is not None
        and one.row.routes is not None
        and one.row.routes.shape[1:] == shape
    )


@batch_check(
    "batch.routes",
    promise="Every captured row stands at its token's place, in the sample's own row of the batch.",
    needs=_NEEDS,
    exercised_by="rows compared",
    applies=has_routes,
)
def batch_routes(batch: Conversion, out: Collector) -> None:
    for one in batch.sound:
        if one.sample.routes is None:
            continue
        if one.row.routes is None:
            if not batch.mixed:
                out.finding(
                    "the routes of a sample are gone",
                    expected=f"{count(one.captured, 'captured row')}",
                    observed="none",
                    where=batch.place(one.sample),
                    hint=(
                        "The conversion must carry routed_experts like any per-token field (verl"
                        " #5368, AReno #524)."
                    ),
                )
            continue
        want = _moe(batch.contract, one.sample.routes[: one.captured])
        if one.row.routes.shape[1:] != one.sample.routes.shape[1:]:
            out.finding(
                "the routes have another shape",
                expected=f"(places, {one.sample.routes.shape[1]}, {one.sample.routes.shape[2]})",
                observed=f"{one.row.routes.shape}",
                where=batch.place(one.sample),
                hint="Layers and top_k come from the model config.",
            )
            continue
        out.exercised("rows compared", one.captured)
        bad = _wrong_rows(one, want)
        if len(bad) and _wrapped(batch.contract, one, want) is None:
            _report_rows(batch, out, one, want, bad)


def _wrong_rows(one: Placed, want: IntArray) -> Places:
    """Tokens whose captured row does not stand at their place; the order within a cell does not
    count.
    """
    got = one.rows_at(np.arange(len(want)))
    bad = (np.sort(got, axis=2) != np.sort(want[: len(got)], axis=2)).any(axis=(1, 2))
    return np.concatenate([np.flatnonzero(bad), np.arange(len(got), len(want))])


def _wrapped(contract: Contract, one: Placed, want: IntArray) -> str | None:
    """The narrow type through which the ids went, if that explains every row."""
    got = one.rows_at(np.arange(len(want))).astype(np.int64)
    if len(got) < len(want) or (contract.num_experts or 0) < 128:
        return None
    for name in ("uint8", "int8", "int16", "uint16"):
        cast = want.astype(name).astype(np.int64)
        if (cast != want).any() and (np.sort(cast, axis=2) == np.sort(got, axis=2)).all():
            return name
    return None


def _report_rows(
    batch: Conversion, out: Collector, one: Placed, want: IntArray, bad: Places
) -> None:
    assert one.row.routes is not None
    routes = _moe(batch.contract, one.row.routes)
    first = int(bad[0])
    place = int(one.places[first])
    found = [
        i
        for i, row in enumerate(routes)
        if (np.sort(row, axis=1) == np.sort(want[first], axis=1)).all()
    ]
    cell = None if place >= len(routes) else routes[place]
    whose = None if cell is None else _owner(batch, one, cell)
    if whose is not None:
        observed = f"the row at place {place} is that of token {whose[1]} of {whose[0]}"
    elif cell is None:
        observed = f"no row at place {place}: the batch has {len(routes)}"
    else:
        observed = (
            f"experts {cell[0].tolist()} at place {place} instead of {want[first][0].tolist()}"
        )
        if found:
            observed += (
                f"; token {first}'s row stands at place {found[0]}, {abs(found[0] - place)}"
                " places off"
            )
    out.finding(
        "route rows do not stand at their tokens",
        expected=f"the row of token {first} at place {place}, where the token stands",
        observed=(
            f"{observed}; so for {len(bad)} of {count(len(want), 'captured row')} (token"
            f" {ranges(bad.tolist())})"
        ),
        where=batch.place(one.sample, position=first),
        hint=(
            "Routes must be shifted by the same padding as the tokens, on the same side (slime"
            " #1052, #2175)."
        ),
    )


def _owner(batch: Conversion, one: Placed, cell: IntArray) -> tuple[str, int] | None:
    """Another sample of the batch that has this row, and its token."""
    for other in batch.event.samples:
        if other.request_id == one.sample.request_id or other.routes is None:
            continue
        rows = _moe(batch.contract, other.routes)
        same = np.flatnonzero((np.sort(rows, axis=2) == np.sort(cell, axis=1)).all(axis=(1, 2)))
        if len(same):
            return other.request_id, int(same[0])
    return None


@batch_check(
    "batch.expert-ids",
    promise="Expert ids survive the batch's integer type, up to num_experts - 1.",
    needs=_NEEDS,
    exercised_by="rows with routes",
    applies=has_routes,
)
def batch_expert_ids(batch: Conversion, out: Collector) -> None:
    largest = (batch.contract.num_experts or 1) - 1
    for one in _judged(batch):
        assert one.row.routes is not None and one.sample.routes is not None
        out.exercised("rows with routes")
        dtype = one.row.routes.dtype
        wrapped = _wrapped(
            batch.contract, one, _moe(batch.contract, one.sample.routes[: one.captured])
        )
        if wrapped is None and np.iinfo(dtype).max >= largest:
            continue
        name = wrapped if wrapped is not None else dtype.name
        out.finding(
            f"{name} does not hold every expert id",
            expected=f"a type that holds ids up to {largest}",
            observed=f"{name} holds at most {np.iinfo(name).max}"
            + ("; ids came out as others" if wrapped is not None else ""),
            where=batch.place(one.sample),
            hint="Same cause: verl #5240 (uint8), #7407 (int16 wraps above 32767).",
        )


@batch_check(
    "batch.filler",
    promise=(
        "Where no row was captured stands the declared filler, or a row that the batch marks as"
        " none."
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
    contract = batch.contract
    for one in _judged(batch):
        assert one.row.routes is not None and one.sample.routes is not None
        if len(_wrong_rows(one, _moe(contract, one.sample.routes[: one.captured]))):
            out.absent(
                "rows that stand in the wrong place (batch.routes) or were wrapped"
                " (batch.expert-ids) leave filler nowhere certain"
            )
            continue
        empty = np.ones(len(one.row.routes), dtype=bool)
        inside = one.places[: one.captured]
        empty[inside[inside < len(empty)]] = False
        if not empty.any():
            out.exercised("batches without such places")
            continue
        marked = np.zeros(len(empty), dtype=bool) if one.row.routed is None else one.row.routed == 0
        out.exercised("places marked as no capture", int((empty & marked).sum()))
        allowed = (
            {contract.filler}
            if contract.rows is not Rows.ALL
            else {contract.filler, contract.final_row}
        )
        good, rows = marked.copy(), _moe(contract, one.row.routes)
        for kind in allowed - {None, Filler.NONE}:
            fits = (
                is_filler(rows, kind, contract.num_experts or 1, before=rows[:1])
                if kind is not None
                else marked
            )
            if kind is Filler.PREVIOUS:  # which rows of other places may look like by chance
                fits = fits & np.isin(np.arange(len(rows)), one.places[one.captured :])
            out.exercised(
                _ZEROS if kind is Filler.ZEROS else "places without a capture",
                int((empty & fits & ~marked).sum()),
            )
            good |= fits
        bad = np.flatnonzero(empty & ~good)
        if len(bad):
            _report_filler(batch, out, one, rows[bad[0]], bad.tolist())


def _report_filler(
    batch: Conversion, out: Collector, one: Placed, row: IntArray, bad: list[int]
) -> None:
    contract = batch.contract
    shown = next(
        (str(kind) for kind in Filler if is_filler(row[None], kind, contract.num_experts or 1)[0]),
        f"experts {row[0].tolist()}",
    )
    out.finding(
        "a place without a capture is not the declared filler",
        expected=f"{contract.filler} filler, or rows marked as no capture",
        observed=f"{shown} at {count(len(bad), 'place')} ({ranges(bad)})",
        where=batch.place(one.sample, position=bad[0]),
        hint=(
            "What stands there is replayed unless it is masked: declare the filler, or mark the"
            " rows (SkyRL: router_padding_mask)."
        ),
    )


class BatchMixed(EventCheck):
    """Only a conversion that carries routes elsewhere can lose them here: one that never does is
    for ``batch.routes`` to name.
    """

    def __init__(self, context: JudgeContext) -> None:
        super().__init__(context)
        self._carries = False

    def on_batch(self, event: Batch, out: Collector) -> None:
        """Judge one batch, or learn from it that routes are carried."""
        batch = Conversion(event, self.context.contract)
        self._carries = self._carries or any(row.routes is not None for row in event.rows)
        if not batch.mixed or event.defect or not self._carries:
            return
        if event.refused is not None:
            out.exercised("mixed batches refused")
            return
        out.exercised("mixed batches")
        losers = [
            one.sample.request_id
            for one in batch.sound
            if one.sample.routes is not None and one.row.routes is None
        ]
        if losers:
            out.finding(
                "one sample without routes cost others theirs",
                expected="routes for every sample that has them, or an error",
                observed=f"no routes for {', '.join(losers[:6])}",
                where=batch.place(),
                hint=(
                    "Whether the batch has a field was decided by one sample (verl: inputs[0])."
                    " Decide by all; mark or refuse that one."
                ),
            )
        for one in batch.sound:
            if one.sample.routes is None and one.row.routes is not None and one.sample.response_ids:
                _report_gift(batch, out, one, _legal(batch.contract, one.row, one.places[:-1]))


batch_mixed = trace_check(
    "batch.mixed",
    promise=(
        "A sample without routes costs no other sample theirs, and is given none; or the batch is"
        " refused."
    ),
    needs="Batch events with samples with and without routes",
    exercised_by=("mixed batches", "mixed batches refused"),
    applies=has_routes,
    about="batches",
)(BatchMixed)


def _report_gift(batch: Conversion, out: Collector, one: Placed, legal: Places) -> None:
    if len(legal):
        out.finding(
            "a sample without routes was given some",
            expected="no routes, rows marked as none, or -1",
            observed=(
                f"{_told(batch.contract, one.row, legal)} for {count(len(legal), 'token')} that no"
                " router chose"
            ),
            where=batch.place(one.sample),
            hint=(
                "A legal expert id is replayed: the sample is trained on routes that no model"
                " chose."
            ),
        )


def _legal(contract: Contract, row: BatchRow, places: Places) -> Places:
    """Those of ``places`` that hold ids of experts and are not marked as no capture."""
    assert row.routes is not None
    places = places[places < len(row.routes)]
    if row.routed is not None:
        places = places[row.routed[places] != 0]
    rows = _moe(contract, row.routes[places])
    return places[((rows >= 0) & (rows < (contract.num_experts or 1))).all(axis=(1, 2))]


def _told(contract: Contract, row: BatchRow, places: Places) -> str:
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
        "A sample whose per-token fields have the wrong length is refused, not padded or cut in"
        " silence."
    ),
    needs="Batch events with a malformed sample",
    exercised_by=("malformed samples", "malformed samples refused"),
)
def batch_refuses(batch: Conversion, out: Collector) -> None:
    event = batch.event
    if not event.defect:
        return
    row = next((row for row in event.rows if row.request_id == event.defective), None)
    if event.refused is not None or row is None:
        out.exercised("malformed samples refused")
        return
    out.exercised("malformed samples")
    sample = next(sample for sample in event.samples if sample.request_id == event.defective)
    one = Placed(sample, row, batch.contract)
    made = _made_of(one)
    if made:
        out.finding(
            f"{event.defect}: accepted",
            expected="an error that names the sample and both lengths",
            observed=made,
            where=batch.place(sample),
            hint=(
                "Lengths that disagree mean that a field belongs to other tokens: a silent pad or"
                " cut trains on that. zip and padding hide it (verl as_dict; verl #6027, ROLL: only"
                " logged)."
            ),
        )


def _made_of(one: Placed) -> str:
    """What became of a malformed sample that was accepted; empty where nothing false can be trained
    on.
    """
    sample, total = one.sample, len(one.tokens)
    if sample.routes is not None and len(sample.routes) > total:
        return (
            f"{len(sample.routes)} rows were cut to the tokens"
            if one.row.routes is not None
            else ""
        )
    if sample.routes is not None and len(sample.routes) < total - 1:
        return _made_of_short_routes(one)
    for field in ("logprobs", "loss_mask"):
        given = getattr(sample, field)
        if given is not None and len(given) != len(sample.response_ids):
            return _made_of_field(one, field, len(given))
    return ""


def _made_of_short_routes(one: Placed) -> str:
    assert one.sample.routes is not None
    if one.row.routes is None or not one.sound:
        return ""
    legal = _legal(one.contract, one.row, one.places[len(one.sample.routes) : len(one.tokens) - 1])
    return (
        f"{_told(one.contract, one.row, legal)} stands at {count(len(legal), 'token')} that have no"
        " row, and is replayed"
        if len(legal)
        else ""
    )


def _made_of_field(one: Placed, field: str, given: int) -> str:
    array = getattr(one.row, field)
    response = len(one.sample.response_ids)
    if array is None:
        return ""
    if one.misfit(field) is not None:
        return f"{given} went into the batch beside {count(response, 'token')}"
    if given > response:
        return f"{given} were cut to {count(response, 'token')}"
    if field == "loss_mask" or not one.sound:
        return f"the mask of {given} was taken for {count(response, 'token')}"
    rest = one.response_places[given:]
    masked = one.row.loss_mask is not None and one.misfit("loss_mask") is None
    counts = (
        one.row.loss_mask[rest] != 0
        if masked and one.row.loss_mask is not None
        else np.ones(len(rest), dtype=bool)
    )
    filled = counts & ~np.isnan(array[rest])
    return (
        f"{array[rest][filled][0]:g} stands for {count(int(filled.sum()), 'logprob')} that nobody"
        " returned"
        if filled.any()
        else ""
    )
