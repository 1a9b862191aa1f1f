"""Steps that a trainer must refuse: failures that are swallowed, and rows that it makes up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollproof.core.events.base import Event
from rollproof.core.events.replay import Outcome, Phase, Routing, Step
from rollproof.core.replay_contract import Defect
from rollproof.core.trace import Trace
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.replay.driver import record_replay
from rollproof.verification.traces import judge
from tests.support.replay_verdicts import CHECKS

_FAILURES = "failure in forward"


@pytest.fixture(scope="module")
def failures() -> Trace:
    """Steps of a reference trainer, in one of which a router call fails."""
    return record_replay(ReplayTrainer, only=[_FAILURES])


def _call(name: str, template: Routing) -> Routing:
    """A router call, from its name: the layer and the rank, ``r`` of a recompute, ``s`` of another
    sample, ``p`` of other positions.
    """
    call = replace(template, layer=int(name[0]), rank=int(name[1]))
    if "r" in name:
        call = replace(call, phase=Phase.RECOMPUTE)
    if "s" in name:
        call = replace(call, samples=call.samples + 1)
    if "p" in name:
        call = replace(call, positions=call.positions + 1)
    return call


def _swallowed(failures: Trace, calls: str, fail_at: int = 1) -> CheckResult:
    """The verdict on a step that has results although a call of it failed, after ``calls``."""
    events: list[Event] = []
    failing = False
    template = next(event for event in failures.events if isinstance(event, Routing))
    for event in failures.events:
        if isinstance(event, Step):
            failing = event.fail_at is not None
            events.append(replace(event, fail_at=fail_at) if failing else event)
        elif failing and isinstance(event, Outcome):
            events += [_call(name, template) for name in calls.split()]
            events.append(replace(event, loss=1.0, error=None))
        elif not (failing and isinstance(event, Routing)):
            events.append(event)
    return judge(failures.with_events(events), CHECKS)["replay.failures"]


@pytest.mark.parametrize(
    ("calls", "fail_at"),
    [
        ("00 10", 1),
        ("00 10 20", 1),
        ("00 10 20 00", 1),
        ("00 10 10s", 1),
        ("00 10 10p", 1),
        ("00 10 10r", 1),
        ("00 10 11", 1),
        ("00 00 10", 1),
        ("00 10", 0),
    ],
)
def test_results_after_a_failure_are_found(failures: Trace, calls: str, fail_at: int) -> None:
    """Calls of other rows, layers, ranks or passes, and those before the failure, are no second
    attempt.
    """
    result = _swallowed(failures, calls, fail_at)
    assert (Verdict.FAIL, 1) == (result.verdict, result.found)
    assert {"failures raised": 1} == dict(result.exercised)
    (finding,) = result.findings
    assert "a failure was swallowed" == finding.title
    assert (
        f"an error: one was raised in router call {fail_at} of the forward pass" == finding.expected
    )
    assert {"episode": _FAILURES, "step": "failing replay"} == dict(finding.where)


@pytest.mark.parametrize(
    ("calls", "fail_at"),
    [
        ("00 10 10", 1),
        ("00 10 20 10", 1),
        ("00 10 20 00 10 20", 1),
        ("00 10 01 11 11", 1),
        ("00 00", 0),
        ("00 10 00", 0),
    ],
)
def test_a_trainer_may_run_a_failed_step_again(failures: Trace, calls: str, fail_at: int) -> None:
    """From the call that failed, or from the start; on one rank is enough."""
    result = _swallowed(failures, calls, fail_at)
    assert Verdict.UNKNOWN is result.verdict
    assert "the trainer ran the step again after the failure" in result.reason


@pytest.mark.parametrize("calls", ["", "00", "00 01", "00 10r 20r"])
def test_a_failure_that_was_never_raised_is_not_judged(failures: Trace, calls: str) -> None:
    """The step has fewer calls than that on each rank, or of that pass."""
    result = _swallowed(failures, calls)
    assert Verdict.UNKNOWN is result.verdict
    assert "fewer forward calls of routers than the one in which the failure" in result.reason


@pytest.mark.parametrize(("sample", "position"), [(0, 0), (0, 2), (1, 0), (3, 1)])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_a_row_without_a_valid_target_is_the_routers_own(
    failures: Trace, sample: int, position: int, layer: int, own: bool
) -> None:
    """From the first token on. In the first layer other experts are found; in a later one the
    router's own choice is not known.
    """
    steps = [event for event in failures.events if isinstance(event, Step)]
    native, replayed = steps[:2]
    begin, end = replayed.index, steps[2].index
    bad = replayed.samples[sample]
    assert bad.routes is not None
    routes = bad.routes.astype(np.int32)
    routes[position, layer] = -1
    defective = replace(
        replayed,
        name="bad routes",
        defect=Defect.NEGATIVE,
        defective=bad.request_id,
        microbatches=tuple(
            tuple(replace(s, routes=routes) if s is bad else s for s in microbatch)
            for microbatch in replayed.microbatches
        ),
    )
    choices = [
        event.experts[(event.samples == sample) & (event.positions == position)]
        for event in failures.events[native.index : begin]
        if isinstance(event, Routing) and event.layer == layer
    ]
    (choice,) = (rows[0].tolist() for rows in choices if len(rows))
    other = sorted(set(range(8)) - set(choice))[:2]
    executed = choice if own else other

    def changed(event: Routing) -> Routing:
        experts = event.experts.copy()
        here = (event.samples == sample) & (event.positions == position)
        experts[here & (event.layer == layer)] = executed
        return replace(event, experts=experts)

    unusual = [
        replace(event, step="bad routes")
        if isinstance(event, Outcome)
        else changed(event)
        if isinstance(event, Routing)
        else event
        for event in failures.events[begin + 1 : end]
    ]
    events = [*failures.events[:end], defective, *unusual, *failures.events[end:]]
    result = judge(failures.with_events(events), CHECKS)["replay.targets"]
    assert {"bad routes handled": 1} == dict(result.exercised)
    if own or layer == 1:
        assert Verdict.PASS is result.verdict, result
        return
    (finding,) = result.findings
    assert "routes that are negative are accepted" == finding.title
    assert (
        f"experts {other} at position {position} of {bad.request_id}, which are neither a target"
        f" nor the router's own {sorted(choice)}" == finding.observed
    )
