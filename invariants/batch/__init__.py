"""The family ``batch``: the conversion of finished samples into training rows carries every
per-token field to its place.
"""

from __future__ import annotations

from rollproof.invariants.batch import batch_routes, fields, further_columns, sampling_masks
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    fields.batch_accepts,
    fields.batch_complete,
    fields.batch_tokens,
    fields.batch_padding,
    fields.batch_loss_mask,
    fields.batch_logprobs,
    further_columns.batch_columns,
    further_columns.batch_column_filler,
    further_columns.batch_values,
    sampling_masks.batch_sampling_masks,
    fields.batch_input,
    batch_routes.batch_routes,
    batch_routes.batch_expert_ids,
    batch_routes.batch_filler,
    batch_routes.batch_mixed,
    batch_routes.batch_refuses,
)
"""The checks of the family, in the order of a report."""
