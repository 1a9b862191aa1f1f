"""Route evidence: how the routes of two sides differ, and whether other rows or layers fit better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollproof.core.records import IntArray
from rollproof.gap.agreement import Selections, selections
from rollproof.gap.diagnosis.shifts import (
    ENOUGH,
    STEPS,
    Shift,
    lost_shift,
    moved_layers,
    moved_tokens,
    route_shift,
)
from rollproof.gap.token_pairs import BoolArray, TokenPairs

__all__ = ["RouteEvidence", "route_evidence"]

_SLOTS = 8
_MANY_SLOTS = 24
"""Slots of a row of which no healthy one has as many wrong as chance has, where a token has several
experts a layer.
"""
_HANDFUL = 5
_ROWS = 20
_ALMOST = 0.9
"""A sequence of at least so many rows, of which so many agree no better than chance, is another
request's: healthy ones never are.
"""
_MOST = 1 << 22
"""Slots that are looked at: more change no conclusion, and cost seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteEvidence:
    """Slot mismatch of the routes as they stand, after shifting them by tokens or layers, and where
    it sits.

    ``token_shift`` and ``layer_shift`` map a shift to the mismatch that is left when the trainer's
    rows are moved by it; ``shift`` is one that mends a part of the tokens or layers. ``polluted``
    is the share of tokens whose rows agree no better than chance, ``healthy`` the mismatch of the
    others; NaN where a token has so few slots (``_SLOTS``) that one flip could look so. ``strange``
    counts the sequences of which hardly a row agrees better, and ``rare`` single rows that agree no
    better where hardly any are between those and the good. ``dull_layers`` are leading layers of
    the axis whose rows hold no selection (one expert several times, or negative).
    """

    mismatch: float
    token_shift: dict[int, float]
    layer_shift: dict[int, float]
    shift: Shift | None
    polluted: float
    healthy: float
    strange: int
    rare: int
    dull_layers: int


def route_evidence(pairs: TokenPairs) -> RouteEvidence | None:
    """The evidence of the routes of ``pairs``; ``None`` where a side has none, or too few."""
    rollout, trainer = pairs.routes.get("rollout_routes"), pairs.routes.get("trainer_routes")
    if (
        rollout is None
        or trainer is None
        or rollout.shape != trainer.shape
        or len(rollout) * rollout.shape[1] < ENOUGH
    ):
        return None
    most = max(1, _MOST // (rollout.shape[1] * rollout.shape[2]))
    rollout, trainer, owner = rollout[:most], trainer[:most], pairs.owner[:most]
    left, right = selections(rollout, trainer)
    top_k = left.top_k
    common, whole = left.overlap(right)
    captured = whole.mean(axis=0) > 0.05
    missed, rows = ((top_k - common) * whole).sum(axis=1), whole.sum(axis=1)
    told = rows > 0
    row = np.divide(missed, rows * top_k, out=np.zeros(len(left)), where=told)
    chance = 1 - top_k / (int(max(rollout.max(), trainer.max())) + 1)
    lost = told & (row > 0.7 * chance)
    well = told & ~lost
    many = left.layers * top_k >= _SLOTS
    known, gone = (
        np.bincount(owner, weights=one, minlength=pairs.n_sequences) for one in (told, lost)
    )
    return RouteEvidence(
        mismatch=_missed(left, right),
        token_shift={step: _missed(*moved_tokens(left, right, owner, step)) for step in STEPS},
        layer_shift={
            step: _missed(*moved_layers(left, right, step))
            for step in STEPS
            if abs(step) < left.layers
        },
        shift=route_shift(left, right, pairs)
        or (lost_shift(left, right, lost, pairs) if many else None),
        polluted=float(lost.mean()) if many else float("nan"),
        healthy=float(row[well].mean()) if well.any() else float("nan"),
        strange=int(((known >= _ROWS) & (gone > _ALMOST * known)).sum()) if many else 0,
        rare=(
            _rare(lost, told & (row > 0.35 * chance), owner)
            if top_k > 1 and left.layers * top_k >= _MANY_SLOTS
            else 0
        ),
        dull_layers=int(np.argmax(captured)) if captured.any() else left.layers,
    )


def _rare(lost: BoolArray, poor: BoolArray, owner: IntArray) -> int:
    """Lost rows, but for the last of each sequence, which may be a filler; 0 where they are a
    handful, or the tail of poor ones.
    """
    inner = int((lost[:-1] & (owner[:-1] == owner[1:])).sum())
    return inner if inner >= _HANDFUL and 4 * int((poor & ~lost).sum()) <= inner else 0


def _missed(left: Selections, right: Selections) -> float:
    common, whole = left.overlap(right)
    return float(1 - common[whole].mean() / left.top_k) if whole.any() else float("nan")
