"""Managers that speak HTTP in virtual time: correct ones are clean, and those of the known bugs are
told.
"""

from __future__ import annotations

from itertools import islice

import pytest

from rollproof.core.case import ActionKind, Case
from rollproof.core.events.rollout import Call, Reply
from rollproof.fakes.clients.http_clients import (
    HttpManager,
    SglangKeeper,
    SglangManager,
    SglangStreamer,
    VllmKeeper,
    VllmManager,
    VllmStreamer,
)
from rollproof.fakes.http.fault_plan import FaultPlan, WireFault, WireFaultKind
from rollproof.fakes.known_bugs._planting import ABORTED, EMPTY, SYNCED, act, case, request
from rollproof.verification.runner import idle_contracts, run_case
from rollproof.verification.schedules import small_scope
from rollproof.verification.traces import judge

MANAGERS = (SglangManager, SglangStreamer, VllmManager, VllmStreamer, SglangKeeper, VllmKeeper)


def clean(manager: type[HttpManager], scenario: Case) -> None:
    assert () == judge(run_case(manager, scenario)).failed, scenario


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_correct_manager_is_clean_over_http(manager: type[HttpManager]) -> None:
    """A thinned exhaustive scope of aborts, updates and deaths, all calls as bytes of HTTP."""
    flavour = manager.flavours[0]
    contract, _ = idle_contracts(manager, case(flavour=flavour))
    cases = list(small_scope(flavour, contract))
    for scenario in islice(cases, 0, None, max(1, len(cases) // 40)):
        clean(manager, scenario)


@pytest.mark.parametrize("kind", list(WireFaultKind))
@pytest.mark.parametrize("manager", MANAGERS)
def test_a_correct_manager_survives_every_fault_of_the_wire(
    manager: type[HttpManager], kind: WireFaultKind
) -> None:
    """A connection that breaks, a body that stops early, a status 503 and a late reply are each
    made good by another call.
    """

    class Harmed(manager):  # type: ignore[misc, valid-type]
        plan = FaultPlan(faults=(WireFault(do=kind, nth=(1, 3), seconds=7.0, after_engine=True),))

    for scenario in (ABORTED, EMPTY, SYNCED):
        fitting = case(*scenario.actions, flavour=manager.flavours[0])
        trace = run_case(Harmed, fitting)
        assert () == judge(trace).failed
        lost = sum(isinstance(event, Reply) and not event.delivered for event in trace.events)
        assert (0 if kind is WireFaultKind.SLOW else 1) <= lost


@pytest.mark.parametrize(
    "kind", [WireFaultKind.RESET, WireFaultKind.TRUNCATE, WireFaultKind.WRONG_LENGTH]
)
@pytest.mark.parametrize("keep", [0.3, 0.95])
@pytest.mark.parametrize("manager", [SglangKeeper, SglangStreamer, VllmKeeper, VllmStreamer])
def test_what_a_broken_stream_brought_may_be_kept_or_dropped(
    manager: type[HttpManager], keep: float, kind: WireFaultKind
) -> None:
    """A stack that goes on from it is as right as one that makes the whole call again; in several
    turns, and across an update, too.
    """

    class Harmed(manager):  # type: ignore[misc, valid-type]
        plan = FaultPlan(faults=(WireFault(do=kind, nth=(1, 2, 4), keep=keep),))

    turns = request(max_tokens=24, turns=((7, 8), (9,)))
    for scenario in (
        case(requests=(request(max_tokens=9),)),
        case(requests=(turns,)),
        case(act(ActionKind.SYNC, 5), requests=(turns,)),
    ):
        trace = run_case(
            Harmed, case(*scenario.actions, requests=scenario.requests, flavour=manager.flavours[0])
        )
        assert () == judge(trace).failed
        first, second = [event.prompt_ids for event in trace.events if isinstance(event, Call)][:2]
        assert manager.unfinished == (first != second)


def test_the_same_case_gives_the_same_trace() -> None:
    """HTTP in virtual time is as repeatable as a call: events are equal, byte for byte."""
    scenario = case(
        act(ActionKind.SYNC, 2),
        requests=(request(), request("r1", (31, 32))),
        flavour="sglang",
        servers=2,
    )
    first, second = (run_case(SglangStreamer, scenario) for _ in range(2))
    assert repr(first.events) == repr(second.events)
