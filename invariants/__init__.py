"""Invariants: the checks that rollproof ships, one module per family."""

from __future__ import annotations

from dataclasses import replace

from rollproof.checks import Check
from rollproof.invariants import batch, engines, layout, lifecycle, replay, routes, stitch, versions, weights

__all__ = ["CHECKS"]

_OWN: tuple[Check, ...] = (
    *stitch.CHECKS,
    *routes.CHECKS,
    *versions.CHECKS,
    *weights.CHECKS,
    *lifecycle.CHECKS,
    *batch.CHECKS,
    *layout.CHECKS,
    *replay.CHECKS,
    *engines.CHECKS,
)
CHECKS: tuple[Check, ...] = tuple(replace(check, also=(*check.also, "engines")) if check.id in engines.SHARED else check for check in _OWN)
"""Every check, family by family; those that are no less true of an engine driven directly judge such traces, too."""
