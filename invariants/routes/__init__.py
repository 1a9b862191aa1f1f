"""Routes: the family of checks on routed experts.

By subject: ``routes_shape`` (presence, counts, shape, type), ``routes_content`` (position, layer,
segment, request, filler), ``routes_values`` (what no router chooses), ``routes_engine`` (what the
engine returned, and whose memory it is).
"""

from __future__ import annotations

from rollproof.invariants.routes import at_engine, content, expert_ids, shape
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (*shape.CHECKS, *content.CHECKS, *expert_ids.CHECKS, *at_engine.CHECKS)
"""All checks of routes."""
