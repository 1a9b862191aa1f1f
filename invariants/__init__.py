"""Invariants: the checks that rollproof ships, one module per family."""

from __future__ import annotations

from rollproof.invariants import engine, layout, routes
from rollproof.invariants.batch import fields
from rollproof.invariants.lifecycle import endings
from rollproof.invariants.replay import executed_routes
from rollproof.invariants.stitch import samples
from rollproof.invariants.versions import sample_tags
from rollproof.invariants.weights import in_flight
from rollproof.judging.checks import Check
from rollproof.judging.registry import Registry

__all__ = ["CHECKS", "default_registry"]

_OWN: tuple[Check, ...] = (
    *samples.CHECKS,
    *routes.CHECKS,
    *sample_tags.CHECKS,
    *in_flight.CHECKS,
    *endings.CHECKS,
    *fields.CHECKS,
    *layout.CHECKS,
    *executed_routes.CHECKS,
    *engine.CHECKS,
)
CHECKS: tuple[Check, ...] = tuple(map(engine.shared, _OWN))
"""Every check, family by family; those that are no less true of an engine driven directly judge
such traces, too.
"""


def default_registry() -> Registry:
    """Return a registry of all checks that rollproof ships."""
    return Registry(CHECKS)
