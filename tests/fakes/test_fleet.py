"""The fleet attributes calls to requests, and applies each action of a case at its trigger."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollproof.core.case import ActionKind, EngineOptions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import (
    Abort,
    Admit,
    Call,
    Fault,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.core.records import FinishReason, Request
from rollproof.core.trace import Recorder
from rollproof.errors import CaseError, UsageError
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.fakes.engine.balancer import Balancer
from rollproof.fakes.engine.exceptions import ReplyLost, ServerDied, TransferFailed
from rollproof.fakes.engine.fleet import CURRENT_REQUEST, Fleet
from rollproof.verification.runner import run_case
from tests.support.engine_driver import on_clock
from tests.support.fleet_cases import R0, R1, act, case, fleet_of, lengths, ran, seen

# Triggers


def test_at_a_token() -> None:
    """An action fires when its request has sampled that many tokens, over all its calls."""
    trace = ran(act(ActionKind.ABORT, 1), act(ActionKind.ABORT, 3))
    assert lengths(trace) == [1, 2, 1]


def test_before_the_first_token() -> None:
    """0 means at the admission, before the call's first token."""
    trace = ran(act(ActionKind.ABORT, 0))
    assert lengths(trace) == [0, 4]
    assert len(seen(trace, Admit)) == 2


def test_in_the_queue() -> None:
    """A queued trigger fires before the admission: the first call never runs."""
    trace = ran(act(ActionKind.ABORT, 0, queued=True))
    assert lengths(trace) == [0, 4]
    assert [event.call_id for event in seen(trace, Admit)] == [2]


@pytest.mark.parametrize("arrival", [0.0, 1.0, 2.0, 2.5])
def test_in_the_queue_of_a_server_that_is_busy(arrival: float) -> None:
    """The action fires before the admission, also if the call comes at the moment of a step."""
    trace = ran(
        act(ActionKind.ABORT, 0, queued=True, request="r1"),
        requests=(R0, R1),
        arrivals=(0.0, arrival),
    )
    hit = next(event.call_id for event in seen(trace, Call) if event.request_id == "r1")
    assert hit not in [event.call_id for event in seen(trace, Admit)]
    assert [event.call_ids for event in seen(trace, Abort)] == [(hit,)]


def test_in_the_queue_of_a_resume() -> None:
    """With a token count, a queued trigger waits for a call after that many tokens."""
    trace = ran(act(ActionKind.ABORT, 2), act(ActionKind.ABORT, 1, queued=True))
    assert lengths(trace) == [2, 0, 2]


def test_one_action_a_moment() -> None:
    """Two aborts at the same token abort the call, and then the resumed call before its first
    token.
    """
    trace = ran(act(ActionKind.ABORT, 2), act(ActionKind.ABORT, 2), act(ActionKind.ABORT, 2))
    assert lengths(trace) == [2, 0, 0, 2]


@pytest.mark.parametrize(
    ("race", "reason", "hit"), [(True, FinishReason.ABORT, (1,)), (False, FinishReason.LENGTH, ())]
)
def test_on_the_last_token(race: bool, reason: FinishReason, hit: tuple[int, ...]) -> None:
    """In a race the action wins over the natural end; otherwise the call has ended, and the abort
    finds nothing.
    """
    trace = ran(act(ActionKind.ABORT, 4, race=race))
    assert [
        (reply.output.finish_reason, len(reply.output.token_ids)) for reply in seen(trace, Reply)
    ] == [(reason, 4)]
    assert [event.call_ids for event in seen(trace, Abort)] == [hit]


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT, PauseMode.WAIT])
def test_a_race_with_a_pause_that_keeps_the_call(mode: PauseMode) -> None:
    """A call that is frozen on its last token ends after the resume, without another token."""
    trace = ran(act(ActionKind.SYNC, 4, race=True), pause_mode=mode)
    assert lengths(trace) == [4]
    assert seen(trace, Reply)[0].output.finish_reason is FinishReason.LENGTH
    assert len(seen(trace, Resume)) == 1


def test_a_trigger_fires_once() -> None:
    """Nothing fires twice, and actions that never came due are still waiting."""

    async def main() -> None:
        fleet = fleet_of(act(ActionKind.EVICT, 1), act(ActionKind.EVICT, 9))
        await fleet.servers["s0"].generate(prompt_ids=(11, 12), max_tokens=4)
        await fleet.servers["s0"].generate(prompt_ids=(11, 12), max_tokens=4)
        assert [action.when.tokens for action in fleet.schedule.waiting] == [9]
        assert len(seen(fleet, Admit)) == 3

    on_clock(main)


# Actions


def test_kill() -> None:
    """The server dies with its calls and comes back after ``steps``; the client starts over from
    its tokens.
    """
    trace = ran(act(ActionKind.KILL, steps=6))
    assert [(fault.what, fault.time) for fault in seen(trace, Fault)] == [
        ("death", 2.0),
        ("revive", 8.0),
    ]
    result = seen(trace, Result)[0]
    assert result.rollout is not None
    assert len(result.rollout.response_ids) == 4
    assert lengths(trace) == [4]


def test_a_server_that_missed_an_update_comes_back_with_it() -> None:
    """After a revival no call is served by weights that were replaced while the server was dead."""
    trace = ran(
        act(ActionKind.KILL, 1, server="s1", steps=9),
        act(ActionKind.SYNC, 2),
        requests=(replace(R0, max_tokens=20),),
        servers=2,
    )
    assert [(event.server_id, event.version) for event in seen(trace, Weights)[2:]] == [
        ("s0", 1),
        ("s1", 1),
    ]


def test_lose_reply() -> None:
    """The engine replied but the reply was lost; the caller sees a broken connection ``steps``
    later.
    """
    trace = ran(act(ActionKind.LOSE_REPLY, steps=3))
    first, second = seen(trace, Reply)
    assert (first.delivered, second.delivered) == (False, True)
    assert seen(trace, Call)[1].time >= first.time + 3
    assert [(fault.what, fault.call_id) for fault in seen(trace, Fault)] == [("lost-reply", 1)]


def test_duplicate_reply() -> None:
    """The second copy is recorded as not delivered."""
    trace = ran(act(ActionKind.DUPLICATE_REPLY))
    assert [(reply.delivered, reply.duplicate) for reply in seen(trace, Reply)] == [
        (True, False),
        (False, True),
    ]


def test_late_reply() -> None:
    """The reply arrives ``steps`` after the engine made it; the action may fire on the last
    token.
    """
    trace = ran(act(ActionKind.LATE_REPLY, 4, steps=5))
    assert [reply.time for reply in seen(trace, Reply)] == [9.0]


def test_reject() -> None:
    """The next call of the request gets an empty reply, and is not admitted."""
    trace = ran(act(ActionKind.REJECT, 1), act(ActionKind.ABORT, 2))
    assert lengths(trace) == [2, 0, 2]
    assert [event.call_id for event in seen(trace, Admit)] == [1, 3]
    assert [(fault.what, fault.call_id) for fault in seen(trace, Fault)] == [("reject", 2)]


def test_evict() -> None:
    """The call prefills again, and ends as if nothing had happened."""
    trace = ran(act(ActionKind.EVICT), engine=EngineOptions(prefill_chunk=1))
    assert [event.call_id for event in seen(trace, Admit)] == [1, 1]
    assert seen(trace, Reply)[0].output.token_ids == seen(ran(), Reply)[0].output.token_ids


@pytest.mark.parametrize("kind", list(ActionKind))
@pytest.mark.parametrize("tokens", [0, 2, 4])
def test_every_action_leaves_every_counter_where_it_was(kind: ActionKind, tokens: int) -> None:
    """The request ends after every action, and gauges of servers, balancer and client are zero
    again.
    """
    trace = ran(act(kind, tokens), requests=(R0, R1), servers=2)
    assert all(
        result.rollout is not None and len(result.rollout.response_ids) == 4
        for result in seen(trace, Result)
    )
    values = {event.value for event in trace if event.kind == "gauge"}
    assert values == {0.0}


@pytest.mark.parametrize("kind", list(ActionKind))
def test_one_case_one_trace(kind: ActionKind) -> None:
    """The same case twice gives equal traces, byte for byte."""
    first, second = (
        repr(
            ran(act(kind, 2), requests=(R0, R1), servers=2, engine=EngineOptions(prefix_cache=True))
        )
        for _ in range(2)
    )
    assert first == second


# Whose call it is


@pytest.mark.parametrize(
    ("prompt", "owner"),
    [
        ((11, 12), "r0"),
        ((11, 13, 5, 6), "r1"),
        ((11, 12, 13), "r2"),
        ((11, 12, 13, 1), "r2"),
        ((11,), ""),
        ((9, 9), ""),
    ],
)
def test_calls_are_attributed_by_their_prompt(prompt: tuple[int, ...], owner: str) -> None:
    """Without a task, a call belongs to the request with the longest prompt that the call starts
    with.
    """

    async def main() -> None:
        fleet = fleet_of(requests=(R0, R1, Request(request_id="r2", prompt_ids=(11, 12, 13))))
        await fleet.servers["s0"].generate(prompt_ids=prompt, max_tokens=1)
        assert [call.request_id for call in seen(fleet, Call)] == [owner]

    on_clock(main)


def test_calls_are_attributed_by_their_task() -> None:
    """``CURRENT_REQUEST`` reaches calls made through handles, unless the prompt contradicts it;
    actions have no request. A worker that serves several rollouts runs in the context of the one
    that started it.
    """
    current: list[str | None] = []

    class Nosy(AsSampled):
        async def update_weights(self, version: int | None) -> None:
            """Record the request that this runs for."""
            current.append(CURRENT_REQUEST.get())

    async def main() -> None:
        fleet = fleet_of()
        CURRENT_REQUEST.set("somebody")
        await fleet.ray_handles()["s0"].generate.remote(prompt_ids=(1, 2), max_tokens=1)
        assert [call.request_id for call in seen(fleet, Call)] == ["somebody"]
        await fleet.ray_handles()["s0"].generate.remote(prompt_ids=R0.prompt_ids, max_tokens=1)
        assert [call.request_id for call in seen(fleet, Call)] == ["somebody", "r0"]

    on_clock(main)
    run_case(Nosy, case(act(ActionKind.SYNC)))
    assert current == [None]


def _twins(*names: str) -> tuple[Request, ...]:
    return tuple(replace(R0, request_id=name, group="g") for name in names)


async def _acting(fleet: Fleet, prompt_ids: tuple[int, ...], **fields: Any) -> str:
    """Make a call, and return the request whose actions it triggers."""
    call = asyncio.ensure_future(
        fleet.servers["s0"].generate(prompt_ids=prompt_ids, max_tokens=2, **fields)
    )
    await asyncio.sleep(0)
    acting = fleet.servers["s0"].in_flight[-1].request_id
    await call
    return acting


def test_twins_differ_by_their_tokens() -> None:
    """In no task a call with the prompt of several requests belongs to one of them, and triggers
    the actions of one that has none in flight; a call that continues tokens goes with them.
    """

    async def main() -> None:
        fleet = fleet_of(requests=_twins("a", "b"))
        for request in fleet.case.requests:
            fleet.recorder.record(Submit(request=request))
        prompt = R0.prompt_ids
        first = asyncio.ensure_future(_acting(fleet, prompt))
        await asyncio.sleep(0.5)
        assert "b" == await _acting(fleet, prompt)
        assert "a" == await first
        tokens = [reply.output.token_ids for reply in seen(fleet, Reply)]
        assert tokens[0][0] != tokens[1][0]
        assert "a" == await _acting(fleet, (*prompt, *tokens[0]))
        assert "b" == await _acting(fleet, (*prompt, *tokens[1]))
        assert [("", ("a", "b"))] * 4 == [
            (call.request_id, call.candidates) for call in seen(fleet, Call)
        ]

    on_clock(main)


def test_a_twin_whose_reply_was_lost_calls_again() -> None:
    """Its engine ended that call, but the reply was lost: of two requests that may start over, it
    is this one.
    """

    async def main() -> None:
        fleet = fleet_of(requests=_twins("a", "b"))
        for request in fleet.case.requests:
            fleet.recorder.record(Submit(request=request))
        assert "a" == await _acting(fleet, R0.prompt_ids)
        assert "b" == await _acting(fleet, R0.prompt_ids)
        lost = seen(fleet, Call)[0].call_id
        fleet.recorder.record(Fault(what="lost-reply", server_id="s0", call_id=lost))
        assert "a" == await _acting(fleet, R0.prompt_ids)

    on_clock(main)


@pytest.mark.parametrize("handle", ["b", "b-1", "b_1", "b:1", "b/1", "b.1", "b#1#"])
def test_a_handle_names_the_request_of_a_call(handle: str) -> None:
    """A handle that is the id of a request, or begins with it and a separator, decides between
    requests with one prompt.
    """

    async def main() -> None:
        fleet = fleet_of(requests=_twins("a", "b"))
        assert "b" == await _acting(fleet, R0.prompt_ids, request_id=handle)
        assert [("b", ())] == [(call.request_id, call.candidates) for call in seen(fleet, Call)]

    on_clock(main)


@pytest.mark.parametrize("handle", ["bb", "b1", "b~1", "1-b", ""])
def test_another_handle_names_no_request(handle: str) -> None:
    """A handle that only resembles the id of a request says nothing."""

    async def main() -> None:
        fleet = fleet_of(requests=_twins("a", "b"))
        for request in fleet.case.requests:
            fleet.recorder.record(Submit(request=request))
        await _acting(fleet, R0.prompt_ids, request_id=handle)
        assert [("", ("a", "b"))] == [
            (call.request_id, call.candidates) for call in seen(fleet, Call)
        ]

    on_clock(main)


def test_an_internal_call_belongs_to_no_request() -> None:
    """Inside ``fleet.internal()`` neither task nor prompt nor handle attribute a call; after it
    they do.
    """

    async def main() -> None:
        fleet = fleet_of()
        CURRENT_REQUEST.set("r0")
        with fleet.internal():
            await fleet.servers["s0"].generate(
                prompt_ids=R0.prompt_ids, max_tokens=1, request_id="r0"
            )
        await fleet.servers["s0"].generate(prompt_ids=R0.prompt_ids, max_tokens=1)
        assert [("", True), ("r0", False)] == [
            (call.request_id, call.internal) for call in seen(fleet, Call)
        ]

    on_clock(main)


def test_an_internal_block_may_be_left_in_another_task() -> None:
    """It raises nothing, there or here: the block is that of the task that entered it, and of
    those begun inside.
    """

    async def main() -> None:
        fleet = fleet_of()
        inside: list[bool] = []

        async def call() -> None:
            await fleet.servers["s0"].generate(prompt_ids=R0.prompt_ids, max_tokens=1)
            inside.append(seen(fleet, Call)[-1].internal)

        async def leave() -> None:
            block.__exit__(None, None, None)
            await call()

        async def enter() -> None:
            block.__enter__()
            await asyncio.create_task(call())
            await asyncio.create_task(leave())
            await call()

        block = fleet.internal()
        await asyncio.create_task(enter())
        block.__exit__(None, None, None)
        await call()
        assert [True, False, True, False] == inside

    on_clock(main)


def test_internal_blocks_nest_and_may_be_entered_again() -> None:
    """Calls are internal until the outermost block is left, also with ``async with``."""

    async def main() -> None:
        fleet = fleet_of()
        block = fleet.internal()
        inside: list[bool] = []

        async def call() -> None:
            await fleet.servers["s0"].generate(prompt_ids=R0.prompt_ids, max_tokens=1)
            inside.append(seen(fleet, Call)[-1].internal)

        for _ in range(2):
            async with block:
                with block, fleet.internal():
                    await call()
                await call()
            await call()
        assert [True, True, False] * 2 == inside

    on_clock(main)


def test_an_internal_block_that_is_never_left_is_that_of_its_fleet() -> None:
    """The next case has a fleet of its own, whose calls it does not make internal."""

    async def main() -> None:
        forgotten, fleet = fleet_of(), fleet_of()
        forgotten.internal().__enter__()
        for each in (forgotten, fleet):
            await each.servers["s0"].generate(prompt_ids=R0.prompt_ids, max_tokens=1)
        assert [True] == [call.internal for call in seen(forgotten, Call)]
        assert [False] == [call.internal for call in seen(fleet, Call)]

    on_clock(main)


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        ({}, 3),
        ({"temperature": 1.0}, 3),
        ({"temperature": 0}, 1),
        ({"top_k": 1}, 1),
        ({"seed": 5}, 1),
        ({"sampling_seed": 5}, 1),
    ],
)
def test_samples_of_one_prompt_are_drawn_apart(sampling: dict[str, Any], count: int) -> None:
    """Each call that begins a sample gets a draw of its own, but greedy calls and those with the
    same seed; every token but the first is the policy's.
    """

    async def main() -> None:
        fleet = fleet_of(requests=_twins("a", "b", "c"))
        server = fleet.servers["s0"]
        replies = await asyncio.gather(
            *(
                server.generate(prompt_ids=R0.prompt_ids, max_tokens=4, sampling=sampling)
                for _ in range(3)
            )
        )
        assert count == len({reply.token_ids for reply in replies})
        for reply in replies:
            ids = (*R0.prompt_ids, *reply.token_ids)
            drawn = fleet.policy.choices(0, ids, len(R0.prompt_ids) + 1).tolist()
            assert drawn == list(reply.token_ids[1:])
        for event in seen(fleet, Reply):
            assert event.true_draw is not None
            first = fleet.policy.drawn(0, R0.prompt_ids, event.true_draw)
            assert first == event.output.token_ids[0]

    on_clock(main)


def test_two_seeds_draw_apart() -> None:
    """A seed is a draw of its own."""

    async def main() -> None:
        fleet = fleet_of(requests=_twins("a", "b"))
        first, second = [
            await fleet.servers["s0"].generate(
                prompt_ids=R0.prompt_ids, max_tokens=4, sampling={"seed": seed}
            )
            for seed in (5, 6)
        ]
        assert first.token_ids != second.token_ids

    on_clock(main)


def test_a_call_belongs_to_no_twin_that_comes_later() -> None:
    """Of requests with equal prompts, one that was not submitted yet has no calls."""

    async def main() -> None:
        twins = tuple(replace(R0, request_id=name, group="g") for name in ("a", "b"))
        fleet = fleet_of(requests=twins)
        fleet.recorder.record(Submit(request=twins[1]))
        await fleet.servers["s0"].generate(prompt_ids=(11, 12), max_tokens=1)
        fleet.recorder.record(Result(request_id="b", error="x"))
        fleet.recorder.record(Submit(request=twins[0]))
        await fleet.servers["s0"].generate(prompt_ids=(11, 12), max_tokens=1)
        assert [call.request_id for call in seen(fleet, Call)] == ["b", "a"]

    on_clock(main)


# Small parts


def test_balancer_gives_to_the_least_loaded() -> None:
    """Ties go in order; servers to avoid are used if no other is left; a release without an acquire
    raises.
    """
    balancer = Balancer(("s0", "s1", "s2"))
    assert [
        balancer.acquire(),
        balancer.acquire(),
        balancer.acquire(avoid={"s2"}),
        balancer.acquire(),
    ] == ["s0", "s1", "s0", "s2"]
    balancer.release("s1")
    assert balancer.acquire() == "s1"
    assert balancer.load == {"s0": 2, "s1": 1, "s2": 1}
    assert Balancer(("s0",)).acquire(avoid={"s0"}) == "s0"
    with pytest.raises(UsageError, match="'s9' has no acquired call to release"):
        balancer.release("s9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flavour": "nobody"}, "No engine flavour is named 'nobody'"),
        (
            {"engine": EngineOptions(max_batch=0)},
            "engine.max_batch=0 must be a whole number of at least 1",
        ),
        (
            {"engine": EngineOptions(prefill_chunk=0)},
            "engine.prefill_chunk=0 must be a whole number of at least 1",
        ),
        ({"engine": EngineOptions(step=0.0)}, "engine.step=0.0 must be above 0"),
        (
            {"actions": (act(ActionKind.KILL, server="s7"),)},
            r"names server 's7'; the case has \['s0'\]",
        ),
    ],
)
def test_a_case_that_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the wrong value of the case."""

    async def main() -> None:
        with pytest.raises(CaseError, match=message):
            Fleet(replace(case(), **changes), Recorder(lambda: 0.0))

    on_clock(main)


def test_failures_are_what_a_real_client_would_catch() -> None:
    """They are subclasses of builtins and not rollproof's own errors: a stack that lets them pass
    is judged, not excused.
    """
    assert issubclass(ServerDied, ConnectionError)
    assert issubclass(ReplyLost, ConnectionError)
    assert issubclass(TransferFailed, RuntimeError)


def test_an_unknown_server_is_refused() -> None:
    """The error lists the servers."""

    async def main() -> None:
        with pytest.raises(UsageError, match=r"no server 's5'; it has \['s0'\]"):
            await fleet_of().sync(1, servers=("s5",))

    on_clock(main)
