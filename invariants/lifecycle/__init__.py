"""The family ``lifecycle``: every request ends once, nothing is lost or left running, and nothing
fails without a reason.
"""

from __future__ import annotations

from rollproof.invariants.lifecycle import (
    abort_all,
    aborted_samples,
    aborts,
    consumption,
    counters,
    endings,
    server_deaths,
    stray_calls,
    turns,
    unexplained_errors,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    endings.lifecycle_ends_once,
    endings.lifecycle_no_hang,
    unexplained_errors.lifecycle_no_error_without_fault,
    counters.lifecycle_counters_return,
    server_deaths.lifecycle_survives_death,
    endings.lifecycle_drops_only_as_declared,
    stray_calls.lifecycle_no_orphan_calls,
    stray_calls.lifecycle_no_call_after_end,
    stray_calls.lifecycle_no_empty_grant,
    stray_calls.lifecycle_bounded_attempts,
    aborts.lifecycle_abort_hits_target,
    aborts.lifecycle_abort_keeps_tokens,
    aborts.lifecycle_abort_ends_call,
    aborted_samples.lifecycle_aborts_do_not_surface,
    aborted_samples.lifecycle_partial_off_honoured,
    turns.lifecycle_cut_turns_not_answered,
    turns.lifecycle_ended_turns_answered,
    abort_all.lifecycle_end_spares_others,
    consumption.lifecycle_duplicate_consumed_once,
    consumption.lifecycle_one_reply_per_retry,
)
"""The checks of the family, in the order of a report."""
