"""The family ``weights``: updates, pauses and caches around the weights that sample."""

from __future__ import annotations

from rollproof.invariants.weights import (
    adapters,
    checksums,
    deltas,
    in_flight,
    loading,
    serving,
    update_races,
    updates,
)
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    in_flight.weights_no_admission_while_paused,
    in_flight.weights_no_token_while_paused,
    in_flight.weights_label_only_keeps_calls,
    in_flight.weights_staleness_bound,
    in_flight.weights_one_version_per_sample,
    serving.weights_served_after_update,
    serving.weights_no_stale_cache,
    serving.weights_identity_update_changes_nothing,
    updates.weights_updates_end,
    updates.weights_every_replica_updated,
    updates.weights_every_pause_resumes,
    updates.weights_failed_update_resumes,
    updates.weights_no_load_while_running,
    update_races.weights_updates_do_not_interleave,
    update_races.weights_newest_update_stays,
    update_races.weights_one_load_per_version,
    loading.weights_no_failure_without_fault,
    loading.weights_update_loads,
    adapters.weights_adapter_loaded,
    adapters.weights_adapter_current,
    adapters.weights_adapter_applied,
    checksums.weights_checksums_agree,
    checksums.weights_checksums_can_differ,
    deltas.weights_delta_base,
    deltas.weights_partial_update_unserved,
)
"""The checks of the family, in the order of a report."""
