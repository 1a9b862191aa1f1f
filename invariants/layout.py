"""Layout: rows and layers reach the ranks, microbatches and routers that they belong to, and come back from there.

One check for each transformation between a payload and router rows; subjects are layout functions (``rollproof.replay.layouts``).
"""

from __future__ import annotations

from rollproof.checks import Check
from rollproof.invariants import layout_layers, layout_ranks, layout_samples, layout_segments, layout_tokens

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *layout_tokens.CHECKS,
    *layout_segments.CHECKS,
    *layout_ranks.CHECKS,
    *layout_layers.CHECKS,
    *layout_samples.CHECKS,
)
"""Checks of layouts."""
