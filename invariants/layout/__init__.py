"""Layout: rows and layers reach the ranks, microbatches and routers that they belong to, and come
back from there.

One check for each transformation between a payload and router rows; subjects are layout functions
(``rollproof.layouts``).
"""

from __future__ import annotations

from rollproof.invariants.layout import (
    layer_columns,
    moved_samples,
    rank_rows,
    segments,
    token_rows,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *token_rows.CHECKS,
    *segments.CHECKS,
    *rank_rows.CHECKS,
    *layer_columns.CHECKS,
    *moved_samples.CHECKS,
)
"""Checks of layouts."""
