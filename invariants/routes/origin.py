"""Finds where the wrong rows of a sample come from.

The rows that are not what the engine returned are compared with everything else that they could be:
columns of dense layers, filler, the same row cast to a narrower type, the same position in another
call's reply or under other weights, another layer's column, another position, another request. The
explanation of most of them wins, so that one fault has one name even if a few rows fit another
explanation by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import log2, perm
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Filler
from rollproof.core.records import IntArray, Version, spread
from rollproof.invariants._shared.phrases import listing
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.comparison import (
    BoolArray,
    RouteEvidence,
    filler_chance,
    is_filler,
)

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Reply
    from rollproof.judging.request_view import RequestView

__all__ = ["Clue", "RowOrigin", "WrongRows", "group_of", "groups", "row_version"]

_MAX_ROWS = 256
"""The number of wrong rows of a sample that are examined: the first ones show what the others
would.
"""
# Few experts agree by chance: with 8 experts and top-2 a cell carries less than 6 bits.
_MIN_BITS = 12.0
"""A source is named if a random router would agree with it less than once in 2**12 times; otherwise
the rows are only wrong.
"""
_MEMO = "wrong route rows"
Positions: TypeAlias = "npt.NDArray[np.int64]"


class RowOrigin(StrEnum):
    """Where a wrong row comes from."""

    FILLER = "filler"
    WRAPPED = "wrapped"
    PROVENANCE = "provenance"
    LAYER = "layer"
    POSITION = "position"
    REQUEST = "request"
    VALUES = "values"
    """Unknown, and its ids cannot be a router's choice (repeated in a cell, or out of range)."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clue:
    """The source of wrong rows.

    source: The source in words.
    attempt: The attempt that they come from.
    version: The version that they come from.
    shift: By how many positions or layers they are shifted.
    filler: The kind of filler that they are.
    """

    source: str = ""
    attempt: int | None = None
    version: Version = None
    shift: int | None = None
    filler: Filler | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class WrongRows:
    """Wrong rows with one explanation.

    kind: The explanation.
    positions: The rows that it explains.
    layers: The number of MoE layers in which the rows are wrong (the most of any row).
    clue: The source.
    others: Wrong rows of the same sample that it does not explain.
    """

    kind: RowOrigin
    positions: Positions
    layers: int
    clue: Clue
    others: Positions


@dataclass(frozen=True, eq=False)
class _Mismatches:
    """The wrong rows.

    positions: ``(m,)``.
    actual: The delivered rows, ``(m, moe_layers, top_k)``.
    expected: The expected rows, ``(m, moe_layers, top_k)``.
    differs: Where they differ, ``(m, moe_layers)``.
    """

    positions: Positions
    actual: IntArray
    expected: IntArray
    differs: BoolArray

    def fits(self, other: IntArray) -> BoolArray:
        """Return the rows that agree with ``other`` in their wrong columns."""
        return np.asarray(((self.actual == other).all(axis=2) | ~self.differs).all(axis=1))

    def group(
        self, kind: RowOrigin, explained: BoolArray, clue: Clue, others: Positions
    ) -> WrongRows:
        """Return the group of the rows in ``explained``."""
        layers = int(self.differs[explained].sum(axis=1).max())
        return WrongRows(
            kind=kind, positions=self.positions[explained], layers=layers, clue=clue, others=others
        )


_Explanation: TypeAlias = "tuple[BoolArray, Clue]"


def groups(view: RequestView) -> tuple[WrongRows, ...]:
    """Return the wrong rows of the sample by explanation; empty if there are none."""
    known_groups: tuple[WrongRows, ...] | None = view.memo.get(_MEMO)
    if known_groups is None:
        evidence = comparison.of(view)
        known_groups = view.memo[_MEMO] = (
            _explain(view, evidence) if len(evidence.mismatched) else ()
        )
    return known_groups


def group_of(view: RequestView, kind: RowOrigin) -> WrongRows | None:
    """Return the group of one explanation, if the sample has it."""
    return next((group for group in groups(view) if group.kind is kind), None)


def row_version(reply: Reply, position: int) -> Version:
    """Return the version of the forward pass that computed the row of ``position``: the true one,
    otherwise the one that the engine showed.
    """
    if reply.true_rows is not None:
        return spread(reply.true_rows, position + 1)[-1]
    return reply.output.version


def _explain(view: RequestView, evidence: RouteEvidence) -> tuple[WrongRows, ...]:
    positions = evidence.mismatched[:_MAX_ROWS]
    assert evidence.routes is not None
    actual = evidence.routes[positions - evidence.start][:, evidence.columns].astype(np.int64)
    expected = evidence.expected(positions).astype(np.int64)
    wrong = _Mismatches(
        positions,
        actual,
        expected,
        (np.sort(actual, axis=2) != np.sort(expected, axis=2)).any(axis=2),
    )
    explanations = _explanations(view, evidence, wrong)
    remaining = np.ones(len(positions), dtype=bool)
    out: dict[RowOrigin, WrongRows] = {}
    unexplained: list[WrongRows] = []
    while remaining.any():
        best = max(
            explanations, key=lambda explain: int((explain[1] & remaining).sum()), default=None
        )
        if best is None or not (best[1] & remaining).any():
            unexplained = _unexplained(evidence, wrong, remaining)
            break
        kind, fits, clue = best
        explained = fits & remaining
        remaining &= ~explained
        explanations = [explain for explain in explanations if explain is not best]
        if (group := out.get(kind)) is not None:
            # Rows of a third call are the same fault as those of a second.
            others = np.sort(np.concatenate([group.others, positions[explained]]))
            out[kind] = replace(group, others=others)
            continue
        rest = (
            remaining.copy()
            if remaining.sum() <= explained.sum() and not _has_explanation(explanations, remaining)
            else np.zeros_like(remaining)
        )
        remaining &= ~rest
        out[kind] = wrong.group(kind, explained, clue, positions[rest])
    return (*out.values(), *unexplained)


def _explanations(
    view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> list[tuple[RowOrigin, BoolArray, Clue]]:
    """Return explanations with the rows that each explains, up to the first that explains all."""
    results = []
    for kind, explain in _EXPLANATIONS:
        for fits, clue in explain(view, evidence, wrong):
            if _significant(evidence, wrong, fits):
                results.append((kind, fits, clue))
                # Nothing after an explanation of all rows is preferred to it.
                if fits.all():
                    return results
    return results


def _significant(evidence: RouteEvidence, wrong: _Mismatches, fits: BoolArray) -> bool:
    """Return whether so many wrong cells agree that chance is ruled out, or their values cannot be
    a choice.
    """
    cells = wrong.actual[fits][wrong.differs[fits]]
    if not len(cells):
        return False
    k = cells.shape[1]
    impossible = (
        k > 1
        and bool((cells[:, :1] == cells).all())
        and (len(cells) > 1 or wrong.actual.shape[1] == 1)
    )
    return impossible or len(cells) * _bits(evidence, k) >= _MIN_BITS


def _bits(evidence: RouteEvidence, k: int) -> float:
    """Return the information in one cell that agrees."""
    return log2(perm(evidence.contract.expert_count, k))


def _has_explanation(
    explanations: list[tuple[RowOrigin, BoolArray, Clue]], remaining: BoolArray
) -> bool:
    """Return whether another explanation covers more than an edge of what remains."""
    return any(int((fits & remaining).sum()) > 2 for _, fits, _ in explanations)


def _unexplained(
    evidence: RouteEvidence, wrong: _Mismatches, remaining: BoolArray
) -> list[WrongRows]:
    """Split what nothing explains into rows with values that cannot be a choice, and the rest."""
    experts = evidence.contract.expert_count
    sorted_cells = np.sort(wrong.actual, axis=2)
    repeated = (sorted_cells[..., 1:] == sorted_cells[..., :-1]).any(axis=(1, 2))
    impossible = remaining & (
        repeated | ((wrong.actual < 0) | (wrong.actual >= experts)).any(axis=(1, 2))
    )
    out = []
    for kind, explained in (
        (RowOrigin.VALUES, impossible),
        (RowOrigin.UNKNOWN, remaining & ~impossible),
    ):
        if explained.any():
            out.append(wrong.group(kind, explained, Clue(), wrong.positions[:0]))
    return out


def _filler(
    _view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    assert evidence.routes is not None
    wrong_cells = np.where(wrong.differs[..., None], wrong.actual, -2)
    experts, top_k = evidence.contract.expert_count, wrong.actual.shape[2]
    # The fillers of SGLang and verl (zeros), vLLM's padded tokens (-1) and SkyRL and slime
    # (arange).
    for kind in (Filler.ZEROS, Filler.MINUS_ONE, Filler.ARANGE):
        fits = np.zeros(len(wrong_cells), dtype=bool)
        by_chance = 0.0
        for i, row in enumerate(wrong_cells):
            cells = row[wrong.differs[i]][None].astype(evidence.routes.dtype)
            fits[i] = is_filler(cells, kind, experts)[0]
            by_chance += filler_chance(kind, cells.shape[1], top_k, experts)
        # ordinary choices of another token look like arange now and then
        if _exceeds_chance(int(fits.sum()), by_chance):
            yield fits, Clue(filler=kind, source=f"{kind} filler")


def _exceeds_chance(found: int, expected: float) -> bool:
    """Return whether so many rows are more than chance gives: Chernoff's bound is below 0.001."""
    if not found or found <= expected:
        return False
    if not expected:
        return True
    return found - expected - found * math.log(found / expected) < math.log(1e-3)


def _wrapped(
    _view: RequestView, _evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    # The casts of verl #5240 and #7407 and prime-rl #3051.
    for name in ("uint8", "int8", "uint16", "int16"):
        cast = wrong.expected.astype(name).astype(np.int64)
        if (cast != wrong.expected).any():
            yield wrong.fits(cast), Clue(source=name)


def _provenance(
    view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    """Try the same positions in other replies, then under weights that no reply used."""
    for attempt in view.attempts:
        for reply in attempt.replies:
            routes = reply.output.routes
            if routes is None or not len(routes):
                continue
            at = wrong.positions - reply.output.routes_start
            inside = (at >= 0) & (at < len(routes))
            if not inside.any() or evidence.cells(routes).shape[1:] != wrong.expected.shape[1:]:
                continue
            fits = np.zeros(len(at), dtype=bool)
            rows = evidence.cells(routes[np.clip(at, 0, len(routes) - 1)])
            fits[inside] = wrong.fits(rows)[inside]
            if fits.any():
                first = int(wrong.positions[fits][0])
                yield fits, Clue(attempt=attempt.number, version=row_version(reply, first))
    if view.oracle is not None:
        moe = list(evidence.contract.routed_layers)
        # Weights that no reply used: an engine or stack recomputed the rows after the sampling.
        for version in list(dict.fromkeys(update.version for update in view.history.updates))[-8:]:
            rows = view.oracle.routes(version, view.total_ids)[wrong.positions][:, moe]
            yield wrong.fits(rows), Clue(version=version)


def _layer(
    _view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    """Try columns that hold another layer's choice: all shifted by the same amount, or mapped in
    any way.
    """
    count = wrong.actual.shape[1]
    # A shift that leaves less than half of the layers explains too little to be named.
    for shift in [s for d in range(1, count // 2 + 1) for s in (d, -d)]:
        low, high = max(0, -shift), min(count, count - shift)
        equal = (wrong.actual[:, low:high] == wrong.expected[:, low + shift : high + shift]).all(
            axis=(1, 2)
        )
        yield (
            equal & wrong.differs[:, low:high].any(axis=1),
            Clue(shift=shift, source=f"shifted by {shift:+d}"),
        )
    yield from _engine_columns(evidence, wrong)
    columns = [int(column) for column in np.flatnonzero(wrong.differs.any(axis=0))]
    pairs = [
        (column, source)
        for column in columns
        if (source := _source_column(wrong, column)) is not None
    ]
    # Each column is compared with all others, so that one of them agrees by chance that many times
    # as often.
    bits = sum(
        int(wrong.differs[:, column].sum()) * _bits(evidence, wrong.actual.shape[2]) - log2(count)
        for column, _ in pairs
    )
    if len(pairs) > 1 and 2 * len(pairs) >= len(columns) and bits >= _MIN_BITS:
        moe = evidence.contract.routed_layers
        mapping = ", ".join(
            f"layer {moe[column]}'s column holds layer {moe[source]}"
            for column, source in pairs[:4]
        )
        yield np.ones(len(wrong.actual), dtype=bool), Clue(source=mapping)


def _engine_columns(evidence: RouteEvidence, wrong: _Mismatches) -> Iterator[_Explanation]:
    """Try consecutive columns of engines that have columns for dense layers, too.

    That is right for models with all dense layers first, and wrong for the others.
    """
    for columns, _dense, clue in _windows(evidence, wrong):
        yield wrong.fits(columns), clue


def _dense_columns(
    _view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    """Try consecutive columns of which only dense ones are wrong: their zeros are no filler.

    The right columns must agree, too: a layer that was not captured leaves the others in their
    places.
    """
    only = set(np.flatnonzero(wrong.differs.any(axis=0)).tolist())
    for columns, dense, clue in _windows(evidence, wrong):
        if only <= dense and len(dense) < columns.shape[1]:
            yield (wrong.actual == columns).all(axis=(1, 2)), clue


def _windows(
    evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[tuple[IntArray, set[int], Clue]]:
    """Return the engine's rows in as many consecutive columns as were delivered, and which of these
    are dense.
    """
    count = wrong.actual.shape[1]
    if evidence.engine_columns is None or isinstance(evidence.columns, list):
        return
    returned = evidence.returned(wrong.positions).astype(np.int64)
    layers = returned.shape[1]
    for first in range(layers - count + 1):
        last = first + count - 1
        dense = sorted(set(range(first, last + 1)) - set(evidence.engine_columns))
        source = f"{first} to {last} of the engine's {layers}"
        if dense:
            source += f", of which {listing(dense)} {'is' if len(dense) == 1 else 'are'} dense"
        yield (
            returned[:, first : last + 1],
            {layer - first for layer in dense},
            Clue(source=f"the columns are columns {source}"),
        )


def _source_column(wrong: _Mismatches, column: int) -> int | None:
    rows = wrong.differs[:, column]
    equal = (wrong.expected[rows] == wrong.actual[rows][:, column, None]).all(axis=(0, 2))
    return int(np.flatnonzero(equal)[0]) if equal.any() else None


def _position(
    view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    """Try rows of other positions of the same request, from any of its replies."""
    candidates: dict[bytes, list[int]] = {}
    for key, place in _candidate_rows(view, evidence, wrong):
        candidates.setdefault(key, []).append(place)
    shifts: list[int | None] = []
    for position, key in zip(wrong.positions, _keys(wrong.actual), strict=True):
        distances = [
            place - int(position) for place in candidates.get(key, ()) if place != position
        ]
        shifts.append(min(distances, key=abs) if distances else None)
    fits = np.array([shift is not None for shift in shifts])
    if fits.any():
        # One shift for most rows is an off-by-one; many shifts are a reordering, which has no
        # single number.
        shift, times = Counter(shift for shift in shifts if shift is not None).most_common(1)[0]
        common = times * 2 > int(fits.sum()) and shift == shifts[int(np.flatnonzero(fits)[0])]
        yield fits, Clue(shift=shift if common else None)


def _request(
    view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[_Explanation]:
    """Try rows of other requests of the run, at any position."""
    keys = _keys(wrong.actual)
    for other in view.neighbours:
        positions = dict(_candidate_rows(other, evidence, wrong))
        fits = np.array([key in positions for key in keys], dtype=bool)
        if fits.any():
            first = positions[keys[int(np.flatnonzero(fits)[0])]]
            yield fits, Clue(source=f"position {first} of request {other.request.request_id}")


def _candidate_rows(
    view: RequestView, evidence: RouteEvidence, wrong: _Mismatches
) -> Iterator[tuple[bytes, int]]:
    """Return rows in a request's replies that may equal a wrong row, as keys with their
    positions.
    """
    fingerprints = _fingerprints(wrong.actual)
    for attempt in view.attempts:
        for reply in attempt.replies:
            routes = reply.output.routes
            if routes is None or evidence.cells(routes[:1]).shape[1:] != wrong.expected.shape[1:]:
                continue
            cells = evidence.cells(routes)
            similar = np.flatnonzero(np.isin(_fingerprints(cells), fingerprints))
            for i, key in zip(similar.tolist(), _keys(cells[similar]), strict=True):
                yield key, reply.output.routes_start + i


def _fingerprints(rows: IntArray) -> npt.NDArray[np.int64]:
    """Return two ids of each row as one number: equal rows have equal numbers, and few others
    do.
    """
    return rows[:, 0, 0].astype(np.int64) * (1 << 24) + rows[:, -1, -1]


def _keys(rows: IntArray) -> list[bytes]:
    return [row.tobytes() for row in np.ascontiguousarray(rows, dtype=np.int64)]


_EXPLANATIONS: tuple[
    tuple[RowOrigin, Callable[[RequestView, RouteEvidence, _Mismatches], Iterator[_Explanation]]],
    ...,
] = (
    (RowOrigin.LAYER, _dense_columns),
    (RowOrigin.FILLER, _filler),
    (RowOrigin.WRAPPED, _wrapped),
    (RowOrigin.PROVENANCE, _provenance),
    (RowOrigin.LAYER, _layer),
    (RowOrigin.POSITION, _position),
    (RowOrigin.REQUEST, _request),
)
"""In order of preference if two explain as many rows."""
