"""The family ``replay``: a trainer's routers execute what the samples' routes say, and nothing else
changes.
"""

from __future__ import annotations

from rollproof.invariants.replay import executed_routes, gates, refusals, step_results
from rollproof.judging.checks import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    refusals.replay_runs,
    executed_routes.replay_forward,
    executed_routes.replay_recompute,
    executed_routes.replay_old_logprob,
    executed_routes.replay_assignments,
    executed_routes.replay_coverage,
    executed_routes.replay_free_rows,
    executed_routes.replay_recorded,
    executed_routes.replay_installs,
    step_results.replay_self_loss,
    step_results.replay_self_gradients,
    step_results.replay_recompute_results,
    step_results.replay_aftermath,
    step_results.replay_off,
    step_results.replay_models,
    gates.replay_gate_gradients,
    gates.replay_gate_slope,
    gates.replay_reference,
    gates.replay_drift,
    refusals.replay_failures,
    refusals.replay_residue,
    refusals.replay_input,
    refusals.replay_routers,
    refusals.replay_targets,
    refusals.replay_edges,
)
"""The checks of the family, in the order of a report."""
