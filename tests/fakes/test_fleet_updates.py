"""Weight updates of the fleet: complete, identical, unlabelled, failing, waiting, with dead
servers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollproof.core.case import ActionKind, EngineOptions
from rollproof.core.contract import KvPolicy
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import (
    Fault,
    Pause,
    Reply,
    Result,
    Resume,
    Update,
    UpdatePhase,
    Weights,
)
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.verification.runner import run_case
from tests.support.engine_driver import on_clock
from tests.support.fleet_cases import R0, R1, act, case, fleet_of, lengths, ran, seen


def test_sync() -> None:
    """A complete weight update: pause, load, resume; the call resumes under the new weights."""
    trace = ran(act(ActionKind.SYNC))
    kinds = [event.kind for event in trace if event.kind in ("pause", "weights", "resume")]
    assert kinds == ["weights", "pause", "weights", "resume"]
    assert [(event.version, event.label) for event in seen(trace, Weights)] == [(0, 0), (1, 1)]
    assert [span.version for reply in seen(trace, Reply) for span in reply.true_tokens or ()] == [
        0,
        1,
    ]


def test_sync_goes_through_the_subject() -> None:
    """The subject's ``update_weights`` gets the label."""
    labels: list[int | None] = []

    class Own(AsSampled):
        async def update_weights(self, version: int | None) -> None:
            """Remember what was asked."""
            labels.append(version)

    run_case(
        Own,
        case(
            act(ActionKind.SYNC, 1),
            act(ActionKind.SYNC_UNLABELLED, 2),
            act(ActionKind.SYNC_IDENTITY, 3),
        ),
    )
    assert labels == [1, None, 3]


def test_sync_unlabelled() -> None:
    """Other weights, no label: what is shown afterwards is unknown."""
    trace = ran(act(ActionKind.SYNC_UNLABELLED))
    assert [(event.version, event.label) for event in seen(trace, Weights)] == [(0, 0), (1, None)]
    assert [span.version for span in seen(trace, Reply)[-1].output.spans] == [None]


def test_an_unlabelled_update_may_reach_one_server_after_the_other() -> None:
    """During an update ``None`` means its weights; the next update brings new ones."""

    async def main() -> None:
        fleet = fleet_of(servers=2)

        async def replica_by_replica(label: int | None) -> None:
            for name in fleet.servers:
                await fleet.sync(label, servers=(name,))

        fleet.set_updater(replica_by_replica)
        for version in (1, 2):
            assert await fleet.update(None)
            assert [version, version] == [server.version for server in fleet.servers.values()]

    on_clock(main)


def test_updates_that_wait_for_a_skew_ask_for_weights_in_the_order_of_training() -> None:
    """An unlabelled one does not ask for weights that a later one of those that wait is to bring:
    these would be replaced by older ones.
    """
    trace = ran(
        act(ActionKind.SKEW, 1),
        *(
            act(kind, 2, request="r1")
            for kind in (ActionKind.SYNC_UNLABELLED, ActionKind.SYNC, ActionKind.SYNC)
        ),
        requests=(R0, R1),
        servers=2,
        engine=EngineOptions(transfer_steps=4),
    )
    begun = [event for event in seen(trace, Update) if event.phase is UpdatePhase.ASKED]
    assert [None, 3, 4] == [event.label for event in begun]
    assert [2, 3, 4] == [event.version for event in begun]


def test_sync_identity() -> None:
    """The same weights under a new label, marked as such."""
    trace = ran(act(ActionKind.SYNC_IDENTITY))
    assert [(event.version, event.label, event.identity) for event in seen(trace, Weights)] == [
        (0, 0, False),
        (0, 1, True),
    ]


def test_sync_fails_and_a_later_one_works() -> None:
    """The transfer raises; the servers keep their weights, and 20 steps later an update
    succeeds.
    """
    trace = ran(act(ActionKind.SYNC_FAILS), requests=(replace(R0, max_tokens=40),), servers=2)
    faults, weights = seen(trace, Fault), seen(trace, Weights)
    assert [(fault.what, fault.server_id) for fault in faults] == [
        ("update-failure", "s1"),
        ("update-failure", None),
    ]
    assert sorted((event.version, event.server_id) for event in weights) == [
        (0, "s0"),
        (0, "s1"),
        (1, "s0"),
        (2, "s0"),
        (2, "s1"),
    ]
    assert weights[3].time - faults[0].time >= 20
    assert len(seen(trace, Pause)) == len(seen(trace, Resume)) == 4


def test_sync_twice_runs_one_after_the_other() -> None:
    """Two updates started at once do not interleave: the default procedure lets one wait."""
    trace = ran(act(ActionKind.SYNC_TWICE))
    steps = [
        (event.kind, getattr(event, "version", ""))
        for event in trace
        if event.kind in ("pause", "weights", "resume")
    ]
    assert steps[1:] == [
        ("pause", ""),
        ("weights", 1),
        ("resume", ""),
        ("pause", ""),
        ("weights", 2),
        ("resume", ""),
    ]


def test_skew() -> None:
    """New weights reach one server; the next sync brings all to the same."""
    trace = ran(act(ActionKind.SKEW, 1, server="s1"), act(ActionKind.SYNC, 3), servers=2)
    weights = [(event.server_id, event.version) for event in seen(trace, Weights)[2:]]
    assert (weights[0], sorted(weights[1:])) == (("s1", 1), [("s0", 2), ("s1", 2)])


def test_relabel() -> None:
    """Only a label is published: nothing ends, and the weights stay."""
    trace = ran(act(ActionKind.RELABEL))
    assert [(event.version, event.label, event.loaded) for event in seen(trace, Weights)] == [
        (0, 0, True),
        (0, 1, False),
    ]
    assert lengths(trace) == [4]


def test_sync_resumes_whatever_fails() -> None:
    """After a transfer that raises, no server stays paused, and the caller of the update gets the
    error.
    """

    async def main() -> None:
        fleet = fleet_of(servers=2)
        fleet.servers["s1"].fail_next_load = True
        with pytest.raises(TransferFailed):
            await fleet.sync(1)
        assert [server.paused for server in fleet.servers.values()] == [False, False]

    on_clock(main)


def test_waiting_updates_load_the_weights_they_were_called_with() -> None:
    """Several updates at once, with and without a label, load each weights once, in the order of
    the calls.
    """
    trace = ran(
        *(
            act(kind, 1, request=request)
            for kind in (ActionKind.SYNC_TWICE, ActionKind.SYNC_UNLABELLED)
            for request in ("r0", "r1")
        ),
        requests=(R0, R1),
        pause_mode=PauseMode.WAIT,
    )
    assert [event.version for event in seen(trace, Weights)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_skewed_update_may_fail_as_well() -> None:
    """A transfer that breaks while only one server is updated is a fault of the run, not the end of
    it.
    """

    async def main() -> None:
        fleet = fleet_of(servers=2)
        fleet.servers["s1"].fail_next_load = True
        assert not await fleet.skew(fleet.train(), "s1")
        assert await fleet.skew(fleet.train(), "s1")
        assert [server.version for server in fleet.servers.values()] == [0, 2]

    on_clock(main)


def test_sync_leaves_out_the_dead() -> None:
    """A dead server does not stop an update of the others, nor does one that dies in the middle."""

    async def main() -> None:
        fleet = fleet_of(servers=3)
        fleet.servers["s0"].kill()
        sync = asyncio.ensure_future(fleet.sync(1))
        await asyncio.sleep(0.5)
        fleet.servers["s1"].kill()
        await sync
        assert [server.version for server in fleet.servers.values()] == [0, 0, 1]
        await fleet.revive("s0")
        assert fleet.servers["s0"].version == 1

    on_clock(main)


def test_an_update_that_raises_is_a_fault_of_the_run() -> None:
    """An error of a subject's procedure is recorded and does not end the run."""

    class Broken(AsSampled):
        async def update_weights(self, version: int | None) -> None:
            """Raise."""
            raise OSError("no route to trainer")

    trace = run_case(Broken, case(act(ActionKind.SYNC)))
    assert [(fault.what, fault.detail) for fault in seen(trace, Fault)] == [
        ("update-failure", "OSError: no route to trainer")
    ]
    assert seen(trace, Result)[0].rollout is not None


def test_an_update_that_never_ends_is_recorded() -> None:
    """It is cancelled at the deadline and recorded; the run ends."""

    class Stuck(AsSampled):
        async def update_weights(self, version: int | None) -> None:
            """Wait for ever."""
            await asyncio.get_running_loop().create_future()

    trace = run_case(Stuck, case(act(ActionKind.SYNC), deadline=50.0))
    assert [(fault.what, fault.detail) for fault in seen(trace, Fault)] == [
        ("update-hung", "action 1: sync at r0/2")
    ]


@pytest.mark.parametrize(
    ("mode", "clear", "cache", "policy"),
    [
        (PauseMode.ABORT, True, True, KvPolicy.RECOMPUTE),
        (PauseMode.ABORT, False, False, KvPolicy.RECOMPUTE),
        (PauseMode.ABORT, False, True, KvPolicy.KEEP),
        (PauseMode.KEEP, True, False, KvPolicy.RECOMPUTE),
        (PauseMode.KEEP, False, False, KvPolicy.KEEP),
        (PauseMode.IN_PLACE, True, False, KvPolicy.KEEP),
        (PauseMode.RETRACT, False, True, KvPolicy.KEEP),
    ],
)
def test_kv_policy(mode: PauseMode, clear: bool, cache: bool, policy: KvPolicy) -> None:
    """KV of older weights is used by frozen calls, or if a prefix cache outlives the update."""

    async def main() -> None:
        fleet = fleet_of(
            pause_mode=mode, clear_cache=clear, engine=EngineOptions(prefix_cache=cache)
        )
        assert fleet.engine_contract.kv_policy is policy

    on_clock(main)


class _Slow(AsSampled):
    """An own procedure: pause, three steps, load, resume, server by server."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.pause(PauseMode.ABORT)
        for server in self.fleet.servers.values():
            await asyncio.sleep(3.0)
            await server.load(self.fleet.weights_of(version), version)
        for server in self.fleet.servers.values():
            await server.resume()


@pytest.mark.parametrize("kind", [ActionKind.SKEW, ActionKind.RELABEL])
def test_the_harness_changes_no_weights_in_the_middle_of_an_update(kind: ActionKind) -> None:
    """A skew or a label that fires during a stack's own procedure comes after its end, newer than
    it, and is recorded as the harness's.
    """
    trace = run_case(
        _Slow,
        case(
            act(ActionKind.SYNC, 1),
            act(kind, 1, request="r1"),
            requests=(R0, replace(R1, max_tokens=20)),
            servers=2,
        ),
    )
    ended = next(event for event in seen(trace, Update) if event.phase is UpdatePhase.ENDED)
    changes = seen(trace, Weights)[2:]
    before = [event for event in changes if event.index < ended.index]
    after = [event for event in changes if event.index > ended.index]
    assert [(False, 1)] * 2 == [(event.by_harness, event.label) for event in before]
    assert {(True, 2)} == {(event.by_harness, event.label) for event in after}


def test_an_update_waits_for_a_skew_that_is_under_way() -> None:
    """Its procedure finds no server paused by somebody else, and its weights are the newest."""
    trace = run_case(
        _Slow,
        case(
            act(ActionKind.SKEW, 1, server="s1"),
            act(ActionKind.SYNC, 1, request="r1"),
            requests=(R0, R1),
            servers=2,
        ),
    )
    asked = next(event for event in seen(trace, Update) if event.phase is UpdatePhase.ASKED)
    skewed = next(event for event in seen(trace, Weights) if event.by_harness)
    assert skewed.index < asked.index
    assert [2, 2] == [event.version for event in seen(trace, Weights)[-2:]]


def test_a_skew_waits_in_vain_for_an_update_that_hangs() -> None:
    """Only the update is recorded as hung."""

    class Hangs(AsSampled):
        async def update_weights(self, version: int | None) -> None:
            """Wait for an acknowledgement that never comes."""
            await asyncio.get_running_loop().create_future()

    trace = run_case(Hangs, case(act(ActionKind.SYNC, 1), act(ActionKind.SKEW, 2), deadline=100.0))
    hung = [event.detail for event in seen(trace, Fault) if event.what == "update-hung"]
    assert ["action 1: sync at r0/1"] == hung


def test_a_revival_of_the_harness_is_recorded_as_such() -> None:
    """The weights that a restarted server comes back with are no load of the stack's."""
    trace = ran(
        act(ActionKind.KILL, 1, server="s1", steps=4),
        act(ActionKind.SYNC, 1, request="r1"),
        requests=(R0, R1),
        servers=2,
    )
    assert [("s0", 1, False), ("s1", 1, True)] == [
        (event.server_id, event.version, event.by_harness) for event in seen(trace, Weights)[2:]
    ]


@pytest.mark.parametrize("claimed", [True, False])
def test_the_engine_knows_by_itself_whether_weights_are_equal(claimed: bool) -> None:
    """Whatever a caller says of a load, or does not say."""

    class Claims(AsSampled):
        async def update_weights(self, version: int | None) -> None:
            """Load with a claim of its own."""
            for server in self.fleet.servers.values():
                await server.load(self.fleet.weights_of(version), version, identity=claimed)

    trace = run_case(Claims, case(act(ActionKind.SYNC_IDENTITY, 1), act(ActionKind.SYNC, 2)))
    assert [(0, True), (2, False)] == [
        (event.version, event.identity) for event in seen(trace, Weights)[1:]
    ]
