"""The family ``correction``: importance weights, masks, metrics and losses that correct for
off-policy rollouts are those that the contract declares.

Subjects are corrections (``rollproof.corrections``); the reference is computed in float64.
"""

from __future__ import annotations

from rollproof.invariants.correction import (
    correction_calls,
    importance_weights,
    loss_values,
    rejected_tokens,
    weight_scopes,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    importance_weights.correction_weights,
    importance_weights.correction_precision,
    importance_weights.correction_direction,
    importance_weights.correction_bounds,
    importance_weights.correction_identity,
    importance_weights.correction_missing,
    importance_weights.correction_finite,
    weight_scopes.correction_rows,
    weight_scopes.correction_padding,
    weight_scopes.correction_normalisation,
    weight_scopes.correction_groups,
    rejected_tokens.correction_mask,
    rejected_tokens.correction_versions,
    loss_values.correction_detached,
    loss_values.correction_loss,
    loss_values.correction_gradient,
    loss_values.correction_metrics,
    correction_calls.correction_accepts,
    correction_calls.correction_returns,
    correction_calls.correction_input,
)
"""The checks of the family, in the order of a report."""
