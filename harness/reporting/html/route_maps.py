"""Expected and observed routes of a sample, side by side, around the place of a finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollproof.core.conventions import Rows
from rollproof.core.records import IntArray, Scalar
from rollproof.judging.request_view import RequestView

__all__ = ["route_maps"]

_POSITIONS = 48
_BEFORE = 8
"""Positions that are shown before the first one that differs."""
_LAYERS = 128
_TOP_K = 16


def route_maps(view: RequestView, where: Mapping[str, Scalar]) -> dict[str, Any] | None:
    """Return the routes that the sample should have, and those that it has.

    Expected are the rows of the reference stitch, with which the checks compare. ``None`` if there
    are none on either side, or if they are equal.

    Args:
        view: The request.
        where: The place of the finding.
    """
    rollout = view.rollout
    observed = None if rollout is None else rollout.routes
    expected = view.stitched.rows
    if rollout is None or (observed is None and expected is None):
        return None
    captured = view.stitched.row_source >= 0
    left = _by_position(expected, 0, captured)
    right = _by_position(observed, rollout.routes_start)
    positions = range(max(len(left), len(right)))
    # behind the last row that the contract allows, any row is one too many; before it a row without
    # a capture is filler
    allowed = rollout.total - (view.contract.rows is Rows.FORWARDED)
    differing = [
        p
        for p in positions
        if (p >= allowed if _at(left, p) is None else not _same(_at(left, p), _at(right, p)))
        and (_at(left, p) is not None or _at(right, p) is not None)
    ]
    if not differing:
        return None
    wrong = set(differing)
    place = where.get("position")
    centre = place if type(place) is int and 0 <= place < len(positions) else differing[0]
    begin = max(0, min(centre - _BEFORE, len(positions) - _POSITIONS))
    shown = [p for p in positions if begin <= p < begin + _POSITIONS]
    layers = max((rows.shape[1] for rows in (expected, observed) if rows is not None), default=0)
    names = _layer_names(view, layers)
    return {
        "positions": shown,
        "layers": names[:_LAYERS],
        "expected": [_cells(_at(left, p)) for p in shown],
        "observed": [_cells(_at(right, p)) for p in shown],
        "experts": view.contract.num_experts or 0,
        "prompt": len(view.request.prompt_ids),
        "wrong": [p in wrong for p in shown],
        "differing": len(differing),
        "first": differing[0],
        "total": len(positions),
        "more_layers": max(0, layers - _LAYERS),
    }


def _by_position(rows: IntArray | None, start: int, captured: Any = None) -> list[IntArray | None]:
    """Return the row at each position from 0 on; ``None`` where there is none."""
    if rows is None or start < 0 or start > 10_000_000:
        return []
    out: list[IntArray | None] = [None] * start
    out += [row if captured is None or captured[i] else None for i, row in enumerate(rows)]
    return out


def _at(rows: list[IntArray | None], position: int) -> IntArray | None:
    return rows[position] if position < len(rows) else None


def _same(left: IntArray | None, right: IntArray | None) -> bool:
    if left is None or right is None:
        return left is right
    # which slot an expert is in says nothing
    return left.shape == right.shape and bool((np.sort(left, 1) == np.sort(right, 1)).all())


def _cells(row: IntArray | None) -> list[list[int]] | None:
    return None if row is None else row[:_LAYERS, :_TOP_K].tolist()


def _layer_names(view: RequestView, layers: int) -> list[int]:
    """Return the layer of each column of the routes."""
    routed = list(view.contract.routed_layers)
    return routed if len(routed) == layers else list(range(layers))
