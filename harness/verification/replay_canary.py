"""Canary of a replay run: a fault planted into the subject's own trace, which the checks must see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollproof.core.events.replay import Action, Outcome, Phase, Routing, Step
from rollproof.core.trace import Event, Trace
from rollproof.judging.checks import Registry
from rollproof.judging.judge import judge
from rollproof.judging.report import Canary

__all__ = ["try_canary"]


@dataclass(frozen=True, slots=True)
class _Plant:
    """A way to spoil an event of a step, and the check that must see it; ``None`` where it does not
    apply to that event.
    """

    what: str
    check_id: str
    spoil: Callable[[Step, Event], Event | None]


def _shift(step: Step, event: Event) -> Event | None:
    """The rows of a call that follow one another within a sample, moved by one."""
    if (
        not isinstance(event, Routing)
        or not _replays(step)
        or event.phase is not Phase.FORWARD
        or event.model != "policy"
    ):
        return None
    moved = np.roll(event.experts, 1, axis=0)
    return (
        None
        if len(moved) < 3 or (np.sort(moved, axis=1) == np.sort(event.experts, axis=1)).all()
        else replace(event, experts=moved)
    )


def _repeat(step: Step, event: Event) -> Event | None:
    """A row with one expert twice."""
    if not isinstance(event, Routing) or not _replays(step) or event.model != "policy":
        return None
    if not len(event.experts) or event.experts.shape[1] < 2:
        return None
    spoiled = event.experts.copy()
    spoiled[0, 1] = spoiled[0, 0]
    return replace(event, experts=spoiled)


def _other_loss(step: Step, event: Event) -> Event | None:
    if (
        not isinstance(event, Outcome)
        or event.loss is None
        or not event.done
        or not step.same_as
        or not _replays(step)
    ):
        return None
    return replace(event, loss=event.loss * 2 + 1)


def _replays(step: Step) -> bool:
    ordinary = step.defect is None and not step.edge and not step.variant and step.fail_at is None
    return ordinary and step.action is Action.REPLAY and step.model == "policy" and step.backward


_PLANTS = (
    _Plant("the experts of one router call shifted by a row", "replay.forward", _shift),
    _Plant("an expert executed twice in one row", "replay.assignments", _repeat),
    _Plant("another loss in a self-replay", "replay.self-loss", _other_loss),
)


def try_canary(trace: Trace, registry: Registry) -> Canary:
    """Plant the first fault that fits a trace which its check passes, and say whether the check
    went red.
    """
    passed_over = "no check that can see a planted fault was among those that ran"
    for plant in _PLANTS:
        if plant.check_id not in registry.ids:
            continue
        alone = Registry([registry[plant.check_id]])
        if judge(trace, alone)[plant.check_id].verdict != "pass":
            passed_over = f"{plant.check_id} does not pass on this run: fix that first"
            continue
        planted = False
        for spoiled in _spoiled(trace, plant):
            planted = True
            red = judge(spoiled, alone)[plant.check_id].found > 0
            if red:
                return Canary(planted=plant.what, expected_by=plant.check_id, red=True)
        if not planted:
            passed_over = (
                f"nothing in this run is fit for planting a fault that {plant.check_id} can see"
            )
            continue
        reason = f"{plant.check_id} did not see it: this run cannot be trusted; please report it"
        return Canary(planted=plant.what, expected_by=plant.check_id, red=False, reason=reason)
    return Canary(planted=None, expected_by=None, red=False, reason=passed_over)


def _spoiled(trace: Trace, plant: _Plant, tries: int = 8) -> Iterator[Trace]:
    """The trace with the fault in one event, one event after the other."""
    step: Step | None = None
    for number, event in enumerate(trace.events):
        step = event if isinstance(event, Step) else step
        spoiled = None if step is None else plant.spoil(step, event)
        if spoiled is not None and tries:
            tries -= 1
            yield replace(
                trace, events=(*trace.events[:number], spoiled, *trace.events[number + 1 :])
            )
