"""The comparison of a sample's routes with the rows that the engines returned, shared by all route
checks.

Every route check reads this instead of the arrays and reports only its own kind of fault, so that
one fault is blamed on one check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Contract, Filler, LayerAxis, Rows
from rollproof.core.records import IntArray
from rollproof.invariants._shared.delivery import delivery
from rollproof.invariants._shared.phrases import call_id
from rollproof.judging.route_slices import RowPiece, overlay

if TYPE_CHECKING:
    from rollproof.judging.request_view import RequestView

__all__ = ["Interval", "RouteEvidence", "filler_chance", "is_filler", "of"]

Interval: TypeAlias = "tuple[int, int]"
"""Absolute positions ``start`` (inclusive) to ``end`` (exclusive)."""
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"
_MEMO = "routes"


@dataclass(frozen=True, eq=False)
class RouteEvidence:
    """The routes of one sample and what they must be.

    contract: The contract of the subject.
    routes: ``(rows, layers, top_k)`` as delivered, ``None`` if there are none.
    start: The absolute position of row 0.
    total: The number of tokens T.
    pieces: The captured rows by position.
    cut: Whether the delivered response is a proper prefix of what the engines sampled.
    row_counts: The counts that the contract allows.
    hindrance: Why rows cannot be compared by position, or ``None``.
    shape_fits: Whether layers and top-k are as declared.
    engine_columns: The MoE columns of the engines' rows, ``None`` for all.
    alternatives: Rows of replies without tokens and of calls set aside, which are right, too.
    """

    contract: Contract
    routes: IntArray | None
    start: int
    total: int
    pieces: tuple[RowPiece, ...]
    cut: bool
    row_counts: range
    hindrance: str | None
    shape_fits: bool
    engine_columns: tuple[int, ...] | None
    alternatives: tuple[RowPiece, ...] = field(default=())

    @property
    def rows(self) -> int:
        """The number of delivered rows."""
        return 0 if self.routes is None else len(self.routes)

    @property
    def end(self) -> int:
        """The position after the last delivered row."""
        return self.start + self.rows

    @cached_property
    def columns(self) -> slice | list[int]:
        """The delivered MoE columns, as an index of the layer axis."""
        columns = self.contract.moe_columns
        return slice(None) if len(columns) == self.contract.route_layers else list(columns)

    @cached_property
    def captured(self) -> tuple[Interval, ...]:
        """Positions of delivered rows that a forward pass captured.

        If the trace holds no replies with routes: all rows, except the last one of a contract with
        T rows.
        """
        if self.hindrance is not None:
            end = min(self.end, self.total - 1) if self.contract.rows is Rows.ALL else self.end
            return ((self.start, end),) if self.start < end else ()
        parts: list[Interval] = []
        for piece in self.pieces:
            low, high = max(piece.start, self.start), min(piece.end, self.end)
            if parts and parts[-1][1] == low:
                low = parts.pop()[0]
            if low < high:
                parts.append((low, high))
        return tuple(parts)

    @cached_property
    def uncaptured(self) -> tuple[Interval, ...]:
        """Positions of delivered rows that no forward pass captured."""
        gaps, position = [], self.start
        for low, high in self.captured:
            gaps.append((position, low))
            position = max(position, high)
        gaps.append((position, self.end))
        return tuple(gap for gap in gaps if gap[0] < gap[1])

    @cached_property
    def mismatched(self) -> npt.NDArray[np.int64]:
        """Ascending positions of captured rows with other MoE columns than the engine returned.

        The order of the experts within a cell does not count: a trainer gathers by id.
        """
        parts = []
        for low, actual, expected in self.overlaps() if self.hindrance is None else ():
            # Nearly all pieces are equal: sorting is only done for rows that differ.
            if not _equal(actual, expected):
                parts.append(low + np.flatnonzero(self._differ(actual, expected)))
        return (
            self._without_alternatives(np.concatenate(parts))
            if parts
            else np.zeros(0, dtype=np.int64)
        )

    def overlaps(self) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Yield for each captured piece with delivered rows: the first position of these, the
        delivered rows and the engine's, ``(rows, layers, top_k)`` each.
        """
        for piece in self.pieces:
            low, high = max(piece.start, self.start), min(piece.end, self.end)
            if self.routes is not None and low < high:
                yield (
                    low,
                    self.routes[low - self.start : high - self.start],
                    piece.rows[low - piece.start : high - piece.start],
                )

    @property
    def readable(self) -> bool:
        """Whether shape and count are as declared, so that values can be judged even without
        replies to compare with.
        """
        return self.routes is not None and self.shape_fits and self.rows in self.row_counts

    def delivered(self, low: int, high: int) -> IntArray:
        """Return the delivered rows of positions ``low`` to ``high``: ``(rows, moe_layers,
        top_k)``.
        """
        assert self.routes is not None
        return self.routes[low - self.start : high - self.start, self.columns]

    def cells(self, rows: IntArray) -> IntArray:
        """Return the MoE columns of a reply's ``rows``, whatever layer axis the engine has."""
        return rows if self.engine_columns is None else rows[:, list(self.engine_columns)]

    def expected(self, positions: npt.NDArray[np.int64]) -> IntArray:
        """Return what the engines returned at captured ``positions`` (ascending): ``(positions,
        moe_layers, top_k)``.
        """
        return self.cells(self.returned(positions))

    def returned(self, positions: npt.NDArray[np.int64]) -> IntArray:
        """Return the same on the engines' own layer axis: ``(positions, layers, top_k)``."""
        parts = []
        for piece in self.pieces:
            inside = positions[(positions >= piece.start) & (positions < piece.end)]
            if len(inside):
                parts.append(piece.rows[inside - piece.start])
        return np.concatenate(parts)

    def is_from(self, position: int) -> bool:
        """Return whether the delivered rows are those that the engines returned from ``position``
        on.
        """
        same = self.same_from(position)
        return same is not None and bool(same.all())

    def same_from(self, position: int) -> npt.NDArray[np.bool_] | None:
        """Return ``(rows,)``: whether delivered row i is the one that the engines returned for
        ``position + i``; ``None`` if they cannot be compared.
        """
        positions = np.arange(position, position + self.rows)
        if (
            self.routes is None
            or not self.shape_fits
            or any(self.attempt_at(int(place)) is None for place in positions)
        ):
            return None
        returned = self.returned(positions)
        # Engine and sample may number their layers in ways that cannot be compared.
        if self.cells(returned).shape != self.routes[:, self.columns].shape:
            return None
        return ~self._differ(self.routes, returned)

    def attempt_at(self, position: int) -> int | None:
        """Return the attempt that captured the row of ``position``."""
        return next(
            (piece.attempt for piece in self.pieces if piece.start <= position < piece.end), None
        )

    def _without_alternatives(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Drop the positions with the row of another forward pass, which is right, too."""
        # A forward pass computed these rows as well, although nothing was sampled from it.
        for other in self.alternatives:
            inside = np.flatnonzero((positions >= other.start) & (positions < other.end))
            if len(inside):
                positions_inside = positions[inside]
                assert self.routes is not None
                differ = self._differ(
                    self.routes[positions_inside - self.start],
                    other.rows[positions_inside - other.start],
                )
                positions = np.delete(positions, inside[~differ])
        return positions

    def _differ(self, actual: IntArray, expected: IntArray) -> BoolArray:
        actual_ids, expected_ids = actual[:, self.columns], self.cells(expected)
        differ: BoolArray = (actual_ids != expected_ids).any(axis=(1, 2))
        rows_to_sort = np.flatnonzero(differ)
        differ[rows_to_sort] = (
            np.sort(actual_ids[rows_to_sort], axis=2) != np.sort(expected_ids[rows_to_sort], axis=2)
        ).any(axis=(1, 2))
        return differ


def of(view: RequestView) -> RouteEvidence:
    """Return the evidence of one request, computed once and shared by the checks."""
    evidence = view.memo.get(_MEMO)
    if evidence is None:
        evidence = view.memo[_MEMO] = _gather(view)
    assert isinstance(evidence, RouteEvidence)
    return evidence


def is_filler(
    rows: IntArray, kind: Filler, num_experts: int, before: IntArray | None = None
) -> BoolArray:
    """Return which rows ``(rows, layers, top_k)`` hold only filler of ``kind``.

    ``arange`` is 0 to k-1 in every cell (SkyRL), or a run that continues from cell to cell, modulo
    the number of experts (slime). An unsigned type shows ``minus-one`` as its largest value.
    ``previous`` needs ``before``, the row ``(1, layers, top_k)`` that precedes the first one.
    """
    if kind is Filler.PREVIOUS and before is not None and len(before):
        return np.asarray((rows == np.concatenate([before, rows[:-1]])).all(axis=(1, 2)))
    if kind is Filler.ZEROS:
        return np.asarray(~rows.any(axis=(1, 2)))
    if kind is Filler.MINUS_ONE:
        return np.asarray(
            (rows == (-1 if rows.dtype.kind == "i" else np.iinfo(rows.dtype).max)).all(axis=(1, 2))
        )
    if kind is Filler.ARANGE:
        ids = rows.astype(np.int64)
        flat = ids.reshape(len(ids), -1)
        running = (np.diff(flat, axis=1) % num_experts == 1).all(axis=1)
        per_cell: BoolArray = (ids == np.arange(rows.shape[2])).all(axis=(1, 2))
        return per_cell | running if flat.shape[1] > 1 else per_cell
    return np.zeros(len(rows), dtype=bool)


def filler_chance(kind: Filler, cells: int, top_k: int, num_experts: int) -> float:
    """Return the probability that a row of ordinary choices in ``cells`` layers looks like filler.

    Two experts of eight are two neighbours in one choice of seven: a single cell says nothing.
    """
    choices = math.perm(num_experts, min(top_k, num_experts))
    if kind is Filler.ARANGE:
        # it begins with 0 in every cell, or with any expert in the first and runs on
        return min(1.0, (1 + num_experts) * float(choices) ** -cells)
    if kind is Filler.ZEROS and top_k == 1:
        return float(num_experts) ** -cells
    return 0.0


def _gather(view: RequestView) -> RouteEvidence:
    contract, rollout, stitched = view.contract, view.rollout, view.stitched
    assert rollout is not None
    routes = rollout.routes
    pieces = stitched.pieces
    for piece in _context_rows(view, pieces):
        pieces = overlay(pieces, piece, keep=True)
    # Some stacks deliver an empty array for "no routes".
    if routes is not None and not len(routes) and not pieces:
        routes = None
    response, sampled = rollout.response_ids, stitched.response_ids
    # A response may be cut at the budget; its rows must then be cut as well (verl #6027, #6089).
    cut = len(response) < len(sampled) and sampled[: len(response)] == response
    shape_fits = routes is not None and routes.shape[1:] == (contract.route_layers, contract.top_k)
    counts = _row_counts(
        contract,
        max(0, rollout.total - rollout.routes_start),
        cut,
        _unforwarded(view, len(response)),
    )
    engine_columns, comparable = _engine_columns(view, pieces)
    hindrance = None
    if routes is None:
        hindrance = "the sample carries no routes"
    elif not pieces:
        hindrance = "the trace holds no reply with routes to compare with"
    elif stitched.broken is not None:
        hindrance = (
            f"the prompt of call {call_id(view, stitched.broken)} does not continue the sequence"
            " (the family stitch says how)"
        )
    elif not cut and response != sampled and not _ends_masked(view, len(sampled)):
        hindrance = (
            "the tokens of the sample are not those that the engines returned (the family stitch"
            " says which)"
        )
    elif not shape_fits:
        hindrance = "the shape of the routes is wrong (routes.shape)"
    elif len(routes) not in counts:
        hindrance = "the number of route rows is wrong (routes.rows)"
    elif not comparable:
        hindrance = "the engine's layers cannot be mapped to the sample's layers"
    return RouteEvidence(
        contract=contract,
        routes=routes,
        start=rollout.routes_start,
        total=rollout.total,
        pieces=pieces,
        cut=cut,
        row_counts=counts,
        hindrance=hindrance,
        shape_fits=shape_fits,
        engine_columns=engine_columns,
        alternatives=_alternatives(view, pieces),
    )


def _ends_masked(view: RequestView, length: int) -> bool:
    """Return whether a response is the sampled tokens and others that are masked out, such as an
    end token that the stack adds itself.
    """
    delivered = delivery(view)
    return delivered is not None and delivered.aligned and delivered.count == length


def _alternatives(view: RequestView, pieces: tuple[RowPiece, ...]) -> tuple[RowPiece, ...]:
    """Return the rows of received replies that sampled nothing, and of calls that are set aside."""
    pieces_without_tokens = []
    for attempt in view.attempts:
        output = attempt.consumed.output if attempt.consumed is not None else None
        if output is None or output.token_ids or output.routes is None or not pieces:
            continue
        if output.routes.shape[1:] == pieces[0].rows.shape[1:]:
            pieces_without_tokens.append(
                RowPiece(
                    output.routes_start,
                    attempt.number,
                    output.routes[: max(0, len(attempt.call.prompt_ids) - output.routes_start)],
                )
            )
    return (*pieces_without_tokens, *_context_rows(view, pieces))


def _context_rows(view: RequestView, pieces: tuple[RowPiece, ...]) -> list[RowPiece]:
    """Return the rows of calls that are set aside which the sample may hold."""
    shape = pieces[0].rows.shape[1:] if pieces else ()
    return [piece for piece in view.context_rows if piece.rows.shape[1:] == shape]


def _unforwarded(view: RequestView, length: int) -> int:
    """Return how many of the first ``length`` response tokens are the environment's at the end: no
    call that sampled anything forwarded them.
    """
    count = 0
    for run in reversed(view.stitched.runs):
        if run.attempt >= 0 and run.ids:
            break
        count += max(0, min(run.end, length) - run.start)
    return count


def _row_counts(contract: Contract, span: int, cut: bool, unforwarded: int) -> range:
    """Return the row counts that the contract allows for ``span`` tokens, of which the last
    ``unforwarded`` were never run.
    """
    # Any prefix may have been captured; routes.filler judges what follows it.
    if contract.rows is Rows.CAPTURED_PREFIX:
        return range(span + 1)
    if contract.rows is Rows.ALL:
        return range(span, span + 1)
    # A response that was cut ends in a token that was forwarded: its row is a capture and may stay.
    # The last turn of the environment may have been prefilled by a call that was aborted before its
    # first token, or by none.
    return range(max(0, span - 1 - unforwarded), span + (cut or unforwarded > 0))


def _engine_columns(
    view: RequestView, pieces: tuple[RowPiece, ...]
) -> tuple[tuple[int, ...] | None, bool]:
    """Return the MoE columns of a reply (``None``: all), and whether they can be mapped to the
    sample's.
    """
    contract = view.contract
    if not pieces:
        return None, True
    layers, top_k = pieces[0].rows.shape[1:]
    moe = contract.routed_layers
    # The engine may return all layers while the stack delivers MoE layers only; both contracts say
    # which.
    axis = (
        view.engine.layer_axis
        if view.engine is not None and view.engine.has_routes
        else contract.layer_axis
    )
    columns = moe if axis is LayerAxis.ALL else tuple(range(len(moe)))
    size = contract.num_layers if axis is LayerAxis.ALL else len(moe)
    return (None if len(columns) == size else columns), (layers, top_k) == (size, contract.top_k)


def _equal(actual: IntArray, expected: IntArray) -> bool:
    """Return whether all cells are equal, compared by 64-bit words if both are contiguous and of
    one type.
    """
    if actual.shape != expected.shape:
        return False
    if (
        actual.dtype == expected.dtype
        and actual.flags.c_contiguous
        and expected.flags.c_contiguous
        and actual.nbytes % 8 == 0
    ):
        return bool(
            # 64-bit words make the comparison of narrow ids several times cheaper.
            (actual.ravel().view(np.uint64) == expected.ravel().view(np.uint64)).all()
        )
    return bool((actual == expected).all())
