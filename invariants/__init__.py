"""Invariants: the checks that rollproof ships, one module per family."""

from __future__ import annotations

from rollproof.checks import Check
from rollproof.invariants import batch, layout, lifecycle, replay, routes, stitch, versions, weights

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *stitch.CHECKS,
    *routes.CHECKS,
    *versions.CHECKS,
    *weights.CHECKS,
    *lifecycle.CHECKS,
    *batch.CHECKS,
    *layout.CHECKS,
    *replay.CHECKS,
)
