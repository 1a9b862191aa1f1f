"""Canary: a fault planted into the subject's own trace, which the checks must see; proof that this
very run could fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollproof.core.events.rollout import Result
from rollproof.core.records import Rollout
from rollproof.core.trace import Trace
from rollproof.judging.checks import Registry, Verdict
from rollproof.judging.judge import Tally, judge_events
from rollproof.judging.report import Canary

__all__ = ["NONE_CLEAN", "Plant", "plants", "try_canary"]

NONE_CLEAN = "every trace of this run already has findings: fix them first"
"""Why no fault was planted into a run of which nothing is clean."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A way to spoil a delivered sample, and the check that must see it. ``spoil`` gives ``None``
    where it does not apply.
    """

    what: str
    check_id: str
    spoil: Callable[[Rollout], Rollout | None]


def _repeat_rows(rollout: Rollout) -> Rollout | None:
    if rollout.routes is None or len(rollout.routes) < 2:
        return None
    return replace(rollout, routes=np.concatenate([rollout.routes, rollout.routes]))


def _shift_rows(rollout: Rollout) -> Rollout | None:
    if (
        rollout.routes is None
        or len(rollout.routes) < 3
        or (rollout.routes[1:] == rollout.routes[:-1]).all(axis=(1, 2)).any()
    ):
        return None
    return replace(rollout, routes=np.concatenate([rollout.routes[:1], rollout.routes[:-1]]))


def _drop_logprob(rollout: Rollout) -> Rollout | None:
    if rollout.logprobs is None or not len(rollout.logprobs):
        return None
    return replace(rollout, logprobs=rollout.logprobs[:-1])


def _repeat_token(rollout: Rollout) -> Rollout | None:
    if not rollout.response_ids:
        return None
    return replace(rollout, response_ids=(*rollout.response_ids, rollout.response_ids[-1]))


def plants() -> tuple[Plant, ...]:
    """The faults that can be planted, the field's most frequent one first."""
    return (
        Plant(
            "the routes of a sample appended to themselves, as concatenation on resume does",
            "routes.rows",
            _repeat_rows,
        ),
        Plant("the routes of a sample shifted by one token", "routes.position", _shift_rows),
        Plant("the last logprob of a sample dropped", "stitch.logprobs-length", _drop_logprob),
        Plant("the last token of a sample repeated", "stitch.tokens", _repeat_token),
    )


def try_canary(clean: Iterable[Trace], registry: Registry) -> Canary:
    """Plant the first fault that fits one of the clean traces, judge it, and say whether the check
    went red.
    """
    traces = sorted(clean, key=lambda trace: -len(trace.events))
    for plant in plants():
        if plant.check_id not in registry.ids:
            continue
        alone = Registry([registry[plant.check_id]])
        tried = False
        for trace in traces:
            if _verdict(trace, alone) is not Verdict.PASS:
                # where the check decides nothing (a death took the reference away) it cannot see a
                # fault either
                continue
            for spoiled in _spoiled(trace, plant):
                tried = True
                if _verdict(spoiled, alone) is Verdict.FAIL:
                    return Canary(planted=plant.what, expected_by=plant.check_id, red=True)
        if tried:
            reason = (
                f"{plant.check_id} did not see it: this run cannot be trusted; please report it"
            )
            return Canary(planted=plant.what, expected_by=plant.check_id, red=False, reason=reason)
    reason = "no clean trace of this run was fit for planting a fault" if traces else NONE_CLEAN
    return Canary(planted=None, expected_by=None, red=False, reason=reason)


def _verdict(trace: Trace, alone: Registry) -> Verdict:
    tally = Tally(alone)
    judge_events(trace.header, trace.events, tally)
    return tally.judgement().results[0].verdict


def _spoiled(trace: Trace, plant: Plant) -> Iterator[Trace]:
    """The trace with the fault in one of its samples, one sample after the other."""
    for i, event in enumerate(trace.events):
        if isinstance(event, Result) and event.rollout is not None:
            spoiled = plant.spoil(event.rollout)
            if spoiled is not None:
                yield replace(
                    trace,
                    events=(
                        *trace.events[:i],
                        replace(event, rollout=spoiled),
                        *trace.events[i + 1 :],
                    ),
                )
