"""Routes: the family of checks on routed experts.

By subject: ``routes_shape`` (presence, counts, shape, type), ``routes_content`` (position, layer, segment, request, filler),
``routes_values`` (what no router chooses), ``routes_engine`` (what the engine returned, and whose memory it is).
"""

from __future__ import annotations

from rollproof.checks import Check
from rollproof.invariants import routes_content, routes_engine, routes_shape, routes_values

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (*routes_shape.CHECKS, *routes_content.CHECKS, *routes_values.CHECKS, *routes_engine.CHECKS)
"""All checks of routes."""
