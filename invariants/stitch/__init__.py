"""The family ``stitch``: a sample is exactly what the engines sampled and delivered."""

from __future__ import annotations

from rollproof.invariants.stitch import (
    attempts,
    budgets,
    declared_limits,
    environment,
    finish_reasons,
    logprobs,
    masks,
    samples,
    sampling_masks,
    turn_budgets,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    samples.stitch_prompt,
    samples.stitch_request_id,
    samples.stitch_tokens,
    samples.stitch_sampled_by_engine,
    environment.stitch_environment_tokens,
    samples.stitch_matches_unbroken,
    samples.stitch_caller_objects,
    samples.stitch_handed_over,
    attempts.stitch_resume_prompt,
    attempts.stitch_no_call_after_end,
    attempts.stitch_sampling_params,
    attempts.stitch_sampling_forwarded,
    attempts.stitch_media,
    logprobs.stitch_logprobs_present,
    logprobs.stitch_logprobs_length,
    logprobs.stitch_logprobs_valid,
    logprobs.stitch_logprobs_paired,
    logprobs.stitch_logprobs_missing,
    sampling_masks.stitch_sampling_masks_present,
    sampling_masks.stitch_sampling_masks_length,
    sampling_masks.stitch_sampling_masks_paired,
    sampling_masks.stitch_sampling_masks_sampled,
    masks.stitch_mask_shape,
    masks.stitch_mask_environment,
    masks.stitch_mask,
    budgets.stitch_budget_granted,
    budgets.stitch_budget_total,
    finish_reasons.stitch_finish_reason,
    finish_reasons.stitch_finish_length,
    budgets.stitch_zero_token_segments,
    budgets.stitch_budget_used,
    turn_budgets.stitch_turn_budget,
    declared_limits.stitch_limits_kept,
)
"""The checks of the family, in the order of a report."""
