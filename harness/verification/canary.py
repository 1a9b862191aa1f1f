"""Self-test of a run (the canary): a fault planted into the run's own trace.

Its check must find it. A run whose canary stays green cannot be trusted: this very set-up could
not have failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Result
from rollproof.core.records import Rollout
from rollproof.core.trace import Trace
from rollproof.judging.checks import Verdict
from rollproof.judging.registry import Registry
from rollproof.judging.report import Canary
from rollproof.verification.traces import judge

__all__ = ["NONE_CLEAN", "SAMPLE_PLANTS", "Plant", "replaced", "try_canary"]

NONE_CLEAN = "every trace of this run already has findings: fix them first"
"""Why no fault was planted into a run of which nothing is clean."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault to plant, and the check that must find it.

    ``spoil`` yields copies of a trace with the fault in one place each, none where it fits nowhere.
    """

    fault: str
    check_id: str
    spoil: Callable[[Trace], Iterator[Trace]]


def try_canary(traces: Iterable[Trace], registry: Registry, plants: Iterable[Plant]) -> Canary:
    """Plant the first fault that fits into one of the clean ``traces`` and judge it.

    A trace that the fault's check does not pass is left out: where the check decides nothing (a
    death took its reference away, say) it cannot find a planted fault either.
    """
    # where most happened, a fault fits most often
    clean = sorted(traces, key=lambda trace: -len(trace.events))
    usable = [plant for plant in plants if plant.check_id in registry.ids]
    passing = False
    for plant in usable:
        alone = Registry([registry[plant.check_id]])
        planted = False
        for trace in clean:
            if _verdict(trace, alone) is not Verdict.PASS:
                continue
            passing = True
            for spoiled in plant.spoil(trace):
                planted = True
                if _verdict(spoiled, alone) is Verdict.FAIL:
                    return Canary(planted=plant.fault, expected_by=plant.check_id, red=True)
        if planted:
            reason = (
                f"{plant.check_id} did not detect it: this run cannot be trusted; please report it"
            )
            return Canary(planted=plant.fault, expected_by=plant.check_id, red=False, reason=reason)
    if not clean:
        reason = NONE_CLEAN
    elif not usable:
        reason = "none of the checks that ran can detect a planted fault"
    elif not passing:
        reason = f"{usable[0].check_id} does not pass on this run: fix that first"
    else:
        reason = "no clean trace of this run was suitable for planting a fault"
    return Canary(planted=None, expected_by=None, red=False, reason=reason)


def replaced(trace: Trace, place: int, event: Event) -> Trace:
    """Return the trace with another event at ``place``."""
    return replace(trace, events=(*trace.events[:place], event, *trace.events[place + 1 :]))


def _verdict(trace: Trace, alone: Registry) -> Verdict:
    return judge(trace, alone).results[0].verdict


def _in_samples(
    spoil: Callable[[Rollout], Rollout | None],
) -> Callable[[Trace], Iterator[Trace]]:
    """Plant a fault of a delivered sample: into each sample of a trace in turn."""

    def spoil_each(trace: Trace) -> Iterator[Trace]:
        for place, event in enumerate(trace.events):
            if isinstance(event, Result) and event.rollout is not None:
                spoiled = spoil(event.rollout)
                if spoiled is not None:
                    yield replaced(trace, place, replace(event, rollout=spoiled))

    return spoil_each


def _repeat_rows(rollout: Rollout) -> Rollout | None:
    if rollout.routes is None or len(rollout.routes) < 2:
        return None
    return replace(rollout, routes=np.concatenate([rollout.routes, rollout.routes]))


def _shift_rows(rollout: Rollout) -> Rollout | None:
    if rollout.routes is None or len(rollout.routes) < 3:
        return None
    if (rollout.routes[1:] == rollout.routes[:-1]).all(axis=(1, 2)).any():
        return None  # two rows alike: shifted, they would be right
    return replace(rollout, routes=np.concatenate([rollout.routes[:1], rollout.routes[:-1]]))


def _drop_logprob(rollout: Rollout) -> Rollout | None:
    if rollout.logprobs is None or not len(rollout.logprobs):
        return None
    return replace(rollout, logprobs=rollout.logprobs[:-1])


def _repeat_token(rollout: Rollout) -> Rollout | None:
    if not rollout.response_ids:
        return None
    return replace(rollout, response_ids=(*rollout.response_ids, rollout.response_ids[-1]))


SAMPLE_PLANTS = (
    Plant(
        "the routes of a sample appended to themselves, as concatenation on resume does",
        "routes.rows",
        _in_samples(_repeat_rows),
    ),
    Plant(
        "the routes of a sample shifted by one token", "routes.position", _in_samples(_shift_rows)
    ),
    Plant(
        "the last logprob of a sample dropped",
        "stitch.logprobs-length",
        _in_samples(_drop_logprob),
    ),
    Plant("the last token of a sample repeated", "stitch.tokens", _in_samples(_repeat_token)),
)
"""Faults of delivered samples, the field's most frequent first."""
