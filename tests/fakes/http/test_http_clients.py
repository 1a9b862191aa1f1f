"""Clients that speak HTTP in virtual time: correct ones are clean, and those of the known bugs are
detected.
"""

from __future__ import annotations

from itertools import islice

import pytest

from rollproof.core.case import ActionKind, Case
from rollproof.core.events.rollout import Call, Reply
from rollproof.fakes.clients.http_clients import (
    HttpResumeClient,
    SglangClient,
    SglangPartialStreamClient,
    SglangStreamClient,
    VllmClient,
    VllmPartialStreamClient,
    VllmStreamClient,
)
from rollproof.fakes.http.fault_plan import FaultPlan, WireFault, WireFaultKind
from rollproof.fakes.known_bugs._planting import ABORTED, EMPTY, SYNCED, act, case, request
from rollproof.verification.runner import idle_contracts, run_case
from rollproof.verification.schedules import small_scope
from rollproof.verification.traces import judge

CLIENTS = (
    SglangClient,
    SglangStreamClient,
    VllmClient,
    VllmStreamClient,
    SglangPartialStreamClient,
    VllmPartialStreamClient,
)


def clean(client: type[HttpResumeClient], schedule: Case) -> None:
    assert () == judge(run_case(client, schedule)).failed, schedule


@pytest.mark.parametrize("client", CLIENTS)
def test_a_correct_client_is_clean_over_http(client: type[HttpResumeClient]) -> None:
    """A thinned exhaustive scope of aborts, updates and deaths, all calls as bytes of HTTP."""
    flavour = client.flavours[0]
    contract, _ = idle_contracts(client, case(flavour=flavour))
    cases = list(small_scope(flavour, contract))
    for schedule in islice(cases, 0, None, max(1, len(cases) // 40)):
        clean(client, schedule)


@pytest.mark.parametrize("kind", list(WireFaultKind))
@pytest.mark.parametrize("client", CLIENTS)
def test_a_correct_client_survives_every_fault_of_the_wire(
    client: type[HttpResumeClient], kind: WireFaultKind
) -> None:
    """A connection that breaks, a body that stops early, a status 503 and a late reply are each
    made good by another call.
    """

    class Faulty(client):  # type: ignore[misc, valid-type]
        plan = FaultPlan(faults=(WireFault(do=kind, nth=(1, 3), seconds=7.0, after_engine=True),))

    for schedule in (ABORTED, EMPTY, SYNCED):
        fitting = case(*schedule.actions, flavour=client.flavours[0])
        trace = run_case(Faulty, fitting)
        assert () == judge(trace).failed
        lost = sum(isinstance(event, Reply) and not event.delivered for event in trace.events)
        assert (0 if kind is WireFaultKind.SLOW else 1) <= lost


@pytest.mark.parametrize(
    "kind", [WireFaultKind.RESET, WireFaultKind.TRUNCATE, WireFaultKind.WRONG_LENGTH]
)
@pytest.mark.parametrize("keep", [0.3, 0.95])
@pytest.mark.parametrize(
    "client",
    [SglangPartialStreamClient, SglangStreamClient, VllmPartialStreamClient, VllmStreamClient],
)
def test_tokens_of_a_broken_stream_may_be_retained_or_dropped(
    client: type[HttpResumeClient], keep: float, kind: WireFaultKind
) -> None:
    """A stack that resumes from them is as correct as one that repeats the call; in several
    turns, and across an update, too.
    """

    class Faulty(client):  # type: ignore[misc, valid-type]
        plan = FaultPlan(faults=(WireFault(do=kind, nth=(1, 2, 4), keep=keep),))

    turns = request(max_tokens=24, turns=((7, 8), (9,)))
    for schedule in (
        case(requests=(request(max_tokens=9),)),
        case(requests=(turns,)),
        case(act(ActionKind.SYNC, 5), requests=(turns,)),
    ):
        trace = run_case(
            Faulty, case(*schedule.actions, requests=schedule.requests, flavour=client.flavours[0])
        )
        assert () == judge(trace).failed
        first, second = [event.prompt_ids for event in trace.events if isinstance(event, Call)][:2]
        assert client.unfinished == (first != second)


def test_the_same_case_gives_the_same_trace() -> None:
    """HTTP in virtual time is as repeatable as a call: events are equal, byte for byte."""
    schedule = case(
        act(ActionKind.SYNC, 2),
        requests=(request(), request("r1", (31, 32))),
        flavour="sglang",
        servers=2,
    )
    first, second = (run_case(SglangStreamClient, schedule) for _ in range(2))
    assert repr(first.events) == repr(second.events)
