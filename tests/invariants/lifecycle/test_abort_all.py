"""``lifecycle.end-spares-others``: an abort of everything at the end of each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollproof.core.case import ActionKind
from rollproof.core.records import Request, Rollout
from rollproof.core.trace import Trace
from rollproof.fakes.clients.reference_clients import AsSampled, PartialOffSurfaced
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.verification.runner import run_case
from rollproof.verification.traces import judge
from tests.support.trace_script import check, finds, passes, unknown

ID = "lifecycle.end-spares-others"
THREE = (request(max_tokens=3), request("r1", (31, 32, 33)), request("r2", (41, 42), max_tokens=9))


async def sweep(fleet: Fleet) -> None:
    """Abort everything."""
    for server in fleet.servers.values():
        await server.abort()


class Sweeps(AsSampled):
    """Aborts all calls when ``due``, called with the number of ended rollouts, says so."""

    due: Callable[[int], bool] = staticmethod(lambda ended: True)

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        self.ended = getattr(self, "ended", 0) + 1
        if type(self).due(self.ended):
            await sweep(self.fleet)
        return rollout


class EndOfBatch(Sweeps):
    """Two rollouts make a batch."""

    due = staticmethod(lambda ended: ended % 2 == 0)


class BeforeUpdates(AsSampled):
    """Has no pause, and aborts everything before it loads."""

    async def update_weights(self, version: int | None) -> None:
        await sweep(self.fleet)
        await self.fleet.sync(version)


class AbortsAreEnds(BeforeUpdates, PartialOffSurfaced):
    """As above, and nothing is resumed."""


def test_each_end_that_aborts_others_is_found() -> None:
    """Two requests ended while others ran, and each time the others' calls were aborted."""
    trace = run_case(Sweeps, case(requests=THREE))
    finding = finds(ID, trace)
    assert "the end of a request aborts the calls of others" == finding.title
    assert finding.observed.startswith(
        "each of 2 requests that ended while others ran is accompanied by an abort of all calls: "
    )
    assert "at the end of r0, server s0 ended the call of r1 too" in finding.observed
    assert "r1" == finding.where["request"]
    assert (ID,) == judge(trace).failed


@pytest.mark.parametrize(
    "trace",
    [run_case(AsSampled, case(requests=THREE)), run_case(EndOfBatch, case(requests=THREE))],
    ids=["no abort", "end of a batch"],
)
def test_aborts_of_everything_in_their_place_pass(trace: Trace) -> None:
    """At the end of a batch."""
    passes(ID, trace)


def test_what_happens_during_an_update_is_the_updates() -> None:
    """Two updates, each at the end of a request."""
    actions = (act(ActionKind.SYNC, 3), act(ActionKind.SYNC, 6, "r1"))
    trace = run_case(BeforeUpdates, case(*actions, requests=THREE))
    assert 0 == check(ID, trace).found


def test_aborts_after_an_update_are_not_the_updates() -> None:
    """An update that has ended excuses nothing that comes later."""
    trace = run_case(Sweeps, case(act(ActionKind.SYNC, 1), requests=THREE))
    assert "each of 2 requests" in finds(ID, trace).observed


def test_a_request_that_was_aborted_itself_did_not_set_the_abort_off() -> None:
    """With partial rollout off, all end by the abort of an update."""
    trace = run_case(AbortsAreEnds, case(act(ActionKind.SYNC, 2), requests=THREE))
    assert 0 == check(ID, trace).found


def test_members_of_a_group_may_end_each_other() -> None:
    """As soon as enough of a group are there."""
    group = tuple(request(f"r{i}", (11, 12, 13), max_tokens=3 + 3 * i, group="g") for i in range(3))
    assert 0 == check(ID, run_case(Sweeps, case(requests=group))).found


class Later(Sweeps):
    """Aborts everything at every end but the first."""

    due = staticmethod(lambda ended: ended > 1)


def test_a_stack_that_spares_others_once_does_not_do_it_by_design() -> None:
    """Two of three ends that others outlive come with an abort, and the first does not."""
    four = (*THREE, request("r3", (51, 52), max_tokens=12))
    assert "each of 3 requests" in finds(ID, run_case(Sweeps, case(requests=four))).observed
    passes(ID, run_case(Later, case(requests=four)), requests_that_ended_while_others_ran=3)


def test_once_may_be_the_end_of_a_batch() -> None:
    """Two requests: one ends while the other runs."""
    assert 0 == check(ID, run_case(Sweeps, case(requests=THREE[:2]))).found


def test_a_recording_cannot_tell() -> None:
    """The clock of a recording always moves."""
    trace = run_case(Sweeps, case(requests=THREE))
    unknown(
        ID,
        replace(trace, header=replace(trace.header, case=None)),
        "the clock of a recording does not show",
    )
