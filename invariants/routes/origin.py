"""Route strays: where the wrong rows of a sample come from.

The rows that are not what the engine returned are held against every other thing that they could
be: filler, the same row cast to a narrower type, the same position in another call's reply or under
other weights, another layer's column, another position, another request. What explains most of them
wins, so that one fault has one name even where a few rows fit another explanation by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import log2, perm
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rollproof.core.contract import Filler
from rollproof.core.records import IntArray, Version, spread
from rollproof.invariants.routes import comparison
from rollproof.invariants.routes.comparison import BoolArray, RouteEvidence, is_filler

if TYPE_CHECKING:
    from rollproof.core.events.rollout import Reply
    from rollproof.judging.request_view import RequestView

__all__ = ["Clue", "Stray", "StrayGroup", "group_of", "groups", "row_version"]

_MOST = 256
"""Wrong rows of a sample that are looked at: the first ones tell what the others would."""
_TELLING_BITS = 12.0
"""A source is named where an indifferent router would agree with it less than once in 2**12 times;
else the rows are just wrong.
"""
_MEMO = "route strays"
Positions: TypeAlias = "npt.NDArray[np.int64]"


class Stray(StrEnum):
    """What a wrong row turned out to be."""

    FILLER = "filler"
    WRAPPED = "wrapped"
    PROVENANCE = "provenance"
    LAYER = "layer"
    POSITION = "position"
    REQUEST = "request"
    VALUES = "values"
    """Nothing known, and its ids are no choice of a router (equal ones in a cell, or out of range)."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clue:
    """Where wrong rows come from: ``source`` in words, and what of it has a name or a number.

    ``attempt`` and ``version`` of the rows, ``shift`` by positions or layers, ``filler`` the kind.
    """

    source: str = ""
    attempt: int | None = None
    version: Version = None
    shift: int | None = None
    filler: Filler | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StrayGroup:
    """Wrong rows with one explanation.

    ``positions`` are the rows that it explains, ``others`` wrong rows of the same sample that it
    does not. ``layers`` is the number of MoE layers in which the rows are wrong (the most of any
    row).
    """

    kind: Stray
    positions: Positions
    layers: int
    clue: Clue
    others: Positions


@dataclass(frozen=True, eq=False)
class _Wrong:
    """The wrong rows: ``(m,)`` positions, ``(m, moe_layers, top_k)`` delivered and expected, ``(m,
    moe_layers)`` what differs.
    """

    positions: Positions
    got: IntArray
    want: IntArray
    differ: BoolArray

    def fits(self, other: IntArray) -> BoolArray:
        """Rows whose wrong columns are those of ``other``."""
        return np.asarray(((self.got == other).all(axis=2) | ~self.differ).all(axis=1))

    def group(self, kind: Stray, mine: BoolArray, clue: Clue, others: Positions) -> StrayGroup:
        """The group of the rows in ``mine``."""
        layers = int(self.differ[mine].sum(axis=1).max())
        return StrayGroup(
            kind=kind, positions=self.positions[mine], layers=layers, clue=clue, others=others
        )


_Guess: TypeAlias = "tuple[BoolArray, Clue]"


def groups(view: RequestView) -> tuple[StrayGroup, ...]:
    """The wrong rows of the sample by explanation; empty where there are none."""
    found: tuple[StrayGroup, ...] | None = view.memo.get(_MEMO)
    if found is None:
        evidence = comparison.of(view)
        found = view.memo[_MEMO] = _explain(view, evidence) if len(evidence.mismatched) else ()
    return found


def group_of(view: RequestView, kind: Stray) -> StrayGroup | None:
    """The group of one explanation, if the sample has it."""
    return next((group for group in groups(view) if group.kind is kind), None)


def row_version(reply: Reply, position: int) -> Version:
    """The version of the forward that computed the row of absolute ``position``: the true one, else
    the one that the engine showed.
    """
    if reply.true_rows is not None:
        return spread(reply.true_rows, position + 1)[position]
    return reply.output.version


def _explain(view: RequestView, evidence: RouteEvidence) -> tuple[StrayGroup, ...]:
    positions = evidence.mismatched[:_MOST]
    assert evidence.routes is not None
    got = evidence.routes[positions - evidence.start][:, evidence.columns].astype(np.int64)
    want = evidence.expected(positions).astype(np.int64)
    wrong = _Wrong(
        positions, got, want, (np.sort(got, axis=2) != np.sort(want, axis=2)).any(axis=2)
    )
    guesses = _guesses(view, evidence, wrong)
    left = np.ones(len(positions), dtype=bool)
    out: list[StrayGroup] = []
    while left.any():
        best = max(guesses, key=lambda guess: int((guess[1] & left).sum()), default=None)
        if best is None or not (best[1] & left).any():
            out += _unexplained(evidence, wrong, left)
            break
        kind, fits, clue = best
        mine = fits & left
        left &= ~mine
        rest = (
            left.copy()
            if left.sum() <= mine.sum() and not _explained(guesses, left)
            else np.zeros_like(left)
        )
        left &= ~rest
        out.append(wrong.group(kind, mine, clue, positions[rest]))
        guesses = [guess for guess in guesses if guess[0] is not kind]
    return tuple(out)


def _guesses(
    view: RequestView, evidence: RouteEvidence, wrong: _Wrong
) -> list[tuple[Stray, BoolArray, Clue]]:
    """Explanations with the rows that each explains, up to the first that explains all: none behind
    it is preferred.
    """
    found = []
    for kind, guess in _GUESSES:
        for fits, clue in guess(view, evidence, wrong):
            if _telling(evidence, wrong, fits):
                found.append((kind, fits, clue))
                if fits.all():
                    return found
    return found


def _telling(evidence: RouteEvidence, wrong: _Wrong, fits: BoolArray) -> bool:
    """Whether so many wrong cells agree that chance is ruled out, or their values are no choice at
    all.
    """
    cells = wrong.got[fits][wrong.differ[fits]]
    if not len(cells):
        return False
    k = cells.shape[1]
    impossible = (
        k > 1
        and bool((cells[:, :1] == cells).all())
        and (len(cells) > 1 or wrong.got.shape[1] == 1)
    )
    return impossible or len(cells) * _bits(evidence, k) >= _TELLING_BITS


def _bits(evidence: RouteEvidence, k: int) -> float:
    """What one cell that agrees tells."""
    return log2(perm(evidence.contract.num_experts or 1, k))


def _explained(guesses: list[tuple[Stray, BoolArray, Clue]], left: BoolArray) -> bool:
    """Whether another guess explains more than an edge of what is left."""
    return any(int((fits & left).sum()) > 2 for _, fits, _ in guesses)


def _unexplained(evidence: RouteEvidence, wrong: _Wrong, left: BoolArray) -> list[StrayGroup]:
    """Split what nothing explains into rows whose values cannot be a choice, and the rest."""
    experts = evidence.contract.num_experts or 0
    sorted_cells = np.sort(wrong.got, axis=2)
    twice = (sorted_cells[..., 1:] == sorted_cells[..., :-1]).any(axis=(1, 2))
    impossible = left & (twice | ((wrong.got < 0) | (wrong.got >= experts)).any(axis=(1, 2)))
    out = []
    for kind, mine in ((Stray.VALUES, impossible), (Stray.UNKNOWN, left & ~impossible)):
        if mine.any():
            out.append(wrong.group(kind, mine, Clue(), wrong.positions[:0]))
    return out


def _filler(_view: RequestView, evidence: RouteEvidence, wrong: _Wrong) -> Iterator[_Guess]:
    assert evidence.routes is not None
    blank = np.where(wrong.differ[..., None], wrong.got, -2)
    for kind in (Filler.ZEROS, Filler.MINUS_ONE, Filler.ARANGE):
        fits = np.zeros(len(blank), dtype=bool)
        for i, row in enumerate(blank):
            cells = row[wrong.differ[i]][None].astype(evidence.routes.dtype)
            fits[i] = is_filler(cells, kind, evidence.contract.num_experts or 1)[0]
        yield fits, Clue(filler=kind, source=f"{kind} filler")


def _wrapped(_view: RequestView, _evidence: RouteEvidence, wrong: _Wrong) -> Iterator[_Guess]:
    for name in ("uint8", "int8", "uint16", "int16"):
        cast = wrong.want.astype(name).astype(np.int64)
        if (cast != wrong.want).any():
            yield wrong.fits(cast), Clue(source=name)


def _provenance(view: RequestView, evidence: RouteEvidence, wrong: _Wrong) -> Iterator[_Guess]:
    """The same positions in other replies, then under weights that no reply used."""
    for attempt in view.attempts:
        for reply in attempt.replies:
            routes = reply.output.routes
            if routes is None or not len(routes):
                continue
            at = wrong.positions - reply.output.routes_start
            inside = (at >= 0) & (at < len(routes))
            if not inside.any() or evidence.cells(routes).shape[1:] != wrong.want.shape[1:]:
                continue
            fits = np.zeros(len(at), dtype=bool)
            rows = evidence.cells(routes[np.clip(at, 0, len(routes) - 1)])
            fits[inside] = wrong.fits(rows)[inside]
            if fits.any():
                first = int(wrong.positions[fits][0])
                yield fits, Clue(attempt=attempt.number, version=row_version(reply, first))
    if view.oracle is not None:
        moe = list(evidence.contract.moe_layers or ())
        for version in list(dict.fromkeys(update.version for update in view.history.updates))[-8:]:
            rows = view.oracle.routes(version, view.total_ids)[wrong.positions][:, moe]
            yield wrong.fits(rows), Clue(version=version)


def _layer(_view: RequestView, evidence: RouteEvidence, wrong: _Wrong) -> Iterator[_Guess]:
    """Columns that hold another layer's choice: all shifted alike, or mapped any way."""
    count = wrong.got.shape[1]
    for shift in [s for d in range(1, min(count, 9)) for s in (d, -d)]:
        low, high = max(0, -shift), min(count, count - shift)
        if high - low < (count + 1) // 2:
            continue
        same = (wrong.got[:, low:high] == wrong.want[:, low + shift : high + shift]).all(
            axis=(1, 2)
        )
        yield (
            same & wrong.differ[:, low:high].any(axis=1),
            Clue(shift=shift, source=f"shifted by {shift:+d}"),
        )
    columns = [int(column) for column in np.flatnonzero(wrong.differ.any(axis=0))]
    pairs = [
        (column, source)
        for column in columns
        if (source := _source_column(wrong, column)) is not None
    ]
    # each column was held against all others, so one of them agrees by chance so many times as
    # often
    told_bits = sum(
        int(wrong.differ[:, column].sum()) * _bits(evidence, wrong.got.shape[2]) - log2(count)
        for column, _ in pairs
    )
    if len(pairs) > 1 and 2 * len(pairs) >= len(columns) and told_bits >= _TELLING_BITS:
        moe = evidence.contract.moe_layers or ()
        told = ", ".join(
            f"layer {moe[column]}'s column holds layer {moe[source]}"
            for column, source in pairs[:4]
        )
        yield np.ones(len(wrong.got), dtype=bool), Clue(source=told)


def _source_column(wrong: _Wrong, column: int) -> int | None:
    rows = wrong.differ[:, column]
    same = (wrong.want[rows] == wrong.got[rows][:, column, None]).all(axis=(0, 2))
    return int(np.flatnonzero(same)[0]) if same.any() else None


def _position(view: RequestView, evidence: RouteEvidence, wrong: _Wrong) -> Iterator[_Guess]:
    """Rows of other positions of the same request, from any of its replies."""
    places: dict[bytes, list[int]] = {}
    for key, place in _places(view, evidence, wrong):
        places.setdefault(key, []).append(place)
    shifts: list[int | None] = []
    for position, key in zip(wrong.positions, _keys(wrong.got), strict=True):
        away = [place - int(position) for place in places.get(key, ()) if place != position]
        shifts.append(min(away, key=abs) if away else None)
    fits = np.array([shift is not None for shift in shifts])
    if fits.any():
        shift, times = Counter(shift for shift in shifts if shift is not None).most_common(1)[0]
        usual = times * 2 > int(fits.sum()) and shift == shifts[int(np.flatnonzero(fits)[0])]
        yield fits, Clue(shift=shift if usual else None)


def _request(view: RequestView, evidence: RouteEvidence, wrong: _Wrong) -> Iterator[_Guess]:
    """Rows of other requests of the run, at any position."""
    keys = _keys(wrong.got)
    for other in view.neighbours:
        known = dict(_places(other, evidence, wrong))
        fits = np.array([key in known for key in keys], dtype=bool)
        if fits.any():
            first = known[keys[int(np.flatnonzero(fits)[0])]]
            yield fits, Clue(source=f"position {first} of request {other.request.request_id}")


def _places(
    view: RequestView, evidence: RouteEvidence, wrong: _Wrong
) -> Iterator[tuple[bytes, int]]:
    """Rows that a request's replies hold, as keys, with their positions: those that may equal a
    wrong row.
    """
    hints = _hints(wrong.got)
    for attempt in view.attempts:
        for reply in attempt.replies:
            routes = reply.output.routes
            if routes is None or evidence.cells(routes[:1]).shape[1:] != wrong.want.shape[1:]:
                continue
            cells = evidence.cells(routes)
            near = np.flatnonzero(np.isin(_hints(cells), hints))
            for i, key in zip(near.tolist(), _keys(cells[near]), strict=True):
                yield key, reply.output.routes_start + i


def _hints(rows: IntArray) -> npt.NDArray[np.int64]:
    """Two ids of each row as one number: equal rows have equal hints, and few others do."""
    return rows[:, 0, 0].astype(np.int64) * (1 << 24) + rows[:, -1, -1]


def _keys(rows: IntArray) -> list[bytes]:
    return [row.tobytes() for row in np.ascontiguousarray(rows, dtype=np.int64)]


_GUESSES: tuple[
    tuple[Stray, Callable[[RequestView, RouteEvidence, _Wrong], Iterator[_Guess]]], ...
] = (
    (Stray.FILLER, _filler),
    (Stray.WRAPPED, _wrapped),
    (Stray.PROVENANCE, _provenance),
    (Stray.LAYER, _layer),
    (Stray.POSITION, _position),
    (Stray.REQUEST, _request),
)
"""In order of preference where two explain as many rows."""
