"""The family ``trajectory``: the several samples of a request are what its calls read and
sampled.
"""

from __future__ import annotations

from rollproof.invariants.trajectory import sample_contexts, token_counts
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    sample_contexts.trajectory_context,
    sample_contexts.trajectory_sampled,
    sample_contexts.trajectory_turns,
    token_counts.trajectory_trained_once,
    token_counts.trajectory_complete,
)
"""The checks of the family, in the order of a report."""
