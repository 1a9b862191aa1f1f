"""Engines: the family ``engine``, and which checks of other families judge an engine that is driven directly, too."""

from __future__ import annotations

from rollproof.checks import Check
from rollproof.invariants import engine_calls, engine_replies, engine_values

__all__ = ["CHECKS", "SHARED"]

CHECKS: tuple[Check, ...] = (*engine_values.CHECKS, *engine_replies.CHECKS, *engine_calls.CHECKS)
"""The family ``engine``, in the order of a report."""
SHARED: frozenset[str] = frozenset(
    (
        "stitch.budget-total",
        "stitch.logprobs-length",
        "stitch.logprobs-valid",
        "routes.rows",
        "routes.shape",
        "routes.dtype",
        "routes.distinct",
        "routes.in-range",
        "routes.live",
        "routes.immutable",
        "routes.prefix-cache",
        "versions.published",
        "versions.engine-tags",
        "weights.no-admission-while-paused",
        "weights.no-token-while-paused",
        "weights.served-after-update",
        "weights.no-stale-cache",
        "lifecycle.ends-once",
        "lifecycle.no-hang",
        "lifecycle.abort-hits-target",
        "lifecycle.abort-keeps-tokens",
    )
)
"""Checks that judge what an engine does, whoever asked it: with a client of rollproof's own, nobody else can be at fault."""
