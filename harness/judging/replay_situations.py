"""Scenarios of a trainer: what a trace of replay exercised, counted for the report."""

from __future__ import annotations

from collections import Counter

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Outcome, Routing, Step
from rollproof.core.replay_contract import Recompute

__all__ = ["ReplayScenarios"]


class ReplayScenarios:
    """Counts the situations of one trace, event by event."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def event(self, event: Event) -> None:
        """Take one event."""
        counts = self._counts
        if isinstance(event, Step):
            counts[f"steps, {event.action}"] += 1
            counts[f"steps, {event.purpose}"] += 1
            counts[f"steps with {event.recompute} recompute"] += (
                event.recompute is not Recompute.NONE
            )
            counts["steps under drifted weights"] += event.weights > 0
            counts["bad routes"] += event.defect is not None
            counts["steps with a failure"] += event.fail_at is not None
        elif isinstance(event, Routing):
            counts[f"rows routed in {event.phase}"] += len(event.experts)
        elif isinstance(event, Outcome):
            counts["steps skipped"] += bool(event.skipped)
            counts["steps that ended with an error"] += event.error is not None

    @property
    def counts(self) -> dict[str, int]:
        """How often each situation occurred, by name, sorted by name; what never occurred is left
        out.
        """
        return {name: count for name, count in sorted(self._counts.items()) if count}
