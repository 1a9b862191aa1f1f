"""The family ``routes``: routed experts have the declared shape, are the engines' own, and reach
the right positions.
"""

from __future__ import annotations

from rollproof.invariants.routes import at_engine, content, expert_ids, shape
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    shape.routes_presence,
    shape.routes_rows,
    shape.routes_shape,
    shape.routes_dtype,
    content.routes_position,
    content.routes_layer,
    content.routes_provenance,
    content.routes_isolation,
    content.routes_captured,
    content.routes_filler,
    content.routes_content,
    content.routes_dense_columns,
    expert_ids.routes_distinct,
    expert_ids.routes_in_range,
    expert_ids.routes_live,
    at_engine.routes_engine,
    at_engine.routes_immutable,
    at_engine.routes_prefix_cache,
    at_engine.routes_handed_over,
    at_engine.routes_reply_untouched,
)
"""The checks of the family, in the order of a report."""
