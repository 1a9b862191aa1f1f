"""The checks that rollproof ships, one package per family."""

from __future__ import annotations

from rollproof.invariants import (
    batch,
    correction,
    engine,
    layout,
    lifecycle,
    replay,
    routes,
    stitch,
    trajectory,
    versions,
    weights,
)
from rollproof.judging.checks import Check
from rollproof.judging.registry import Registry

__all__ = ["CHECKS", "default_registry"]

CHECKS: tuple[Check, ...] = tuple(
    engine.shared(check)
    for family in (
        stitch,
        trajectory,
        routes,
        versions,
        weights,
        lifecycle,
        batch,
        layout,
        replay,
        correction,
        engine,
    )
    for check in family.CHECKS
)
"""All checks in the order of a report. Those that hold for an engine that is driven directly judge
such traces as well (``engine.SHARED``).
"""


def default_registry() -> Registry:
    """Return a registry of all checks that rollproof ships."""
    return Registry(CHECKS)
