"""Invariants: the checks that rollproof ships, one module per family."""

from __future__ import annotations

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
CHECKS: tuple[Check, ...] = tuple(map(engines.shared, _OWN))
"""Every check, family by family; those that are no less true of an engine driven directly judge such traces, too."""
