"""A fleet on HTTP servers in memory: real clients and a real server's protocol, the case's own
engines, virtual time and no sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from rollproof.core.case import Action, ActionKind, Case, Trigger
from rollproof.core.events.rollout import Call, Pause, Weights
from rollproof.core.records import Request
from rollproof.core.trace import Recorder
from rollproof.errors import UsageError
from rollproof.fakes.engine.fleet import Fleet
from rollproof.simulation import virtual_loop
from rollproof.stacks._support.http_fleet import HttpFleet

Conversation = Callable[[HttpFleet, Fleet, httpx.AsyncClient], Awaitable[Any]]
BODY: dict[str, Any] = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 3, "logprobs": 0}}


def talk(
    conversation: Conversation, *actions: Action, flavour: str = "vllm", **options: Any
) -> Any:
    """Run a conversation with two servers, in a case with the request ``r0``."""

    async def main() -> Any:
        request = Request(request_id="r0", prompt_ids=(11, 12), max_tokens=3)
        fleet = Fleet(
            Case(flavour=flavour, requests=(request,), actions=actions, servers=2),
            Recorder(lambda: 0.0),
        )
        async with httpx.AsyncClient(timeout=None, verify=False) as client:  # noqa: S113, S501 - loopback in memory
            return await conversation(HttpFleet(fleet, **options), fleet, client)

    return virtual_loop.run(main)


def test_a_call_is_answered_by_the_fleet_s_engine_and_attributed_to_its_request() -> None:
    """Coded tokens come back, and the trace holds the call."""

    async def conversation(http: HttpFleet, fleet: Fleet, client: httpx.AsyncClient) -> None:
        reply = await client.post(f"{http.router}/inference/v1/generate", json=BODY)
        assert 200 == reply.status_code
        assert 3 == len(reply.json()["choices"][0]["token_ids"])
        (call,) = [event for event in fleet.recorder.events if isinstance(event, Call)]
        assert ("r0", (11, 12), 3) == (call.request_id, call.prompt_ids, call.max_tokens)
        assert {"balancer/s0": 0.0, "balancer/s1": 0.0} == fleet.balancer.gauges()

    talk(conversation)


def test_a_session_stays_with_its_server_and_leaves_a_dead_one() -> None:
    """Until it is finished, or the server dies."""

    async def conversation(http: HttpFleet, fleet: Fleet, client: httpx.AsyncClient) -> None:
        async def serving() -> str:
            await client.post(
                f"{http.router}/inference/v1/generate", json=BODY, headers={"X-Session-ID": "a"}
            )
            return [event.server_id for event in fleet.recorder.events if isinstance(event, Call)][
                -1
            ]

        first = await serving()
        fleet.balancer.acquire(
            ["s0" if first == "s1" else "s1"]
        )  # its server is the busier one now
        assert first == await serving()
        fleet.servers[first].kill()
        assert first != await serving()

    talk(conversation)


def test_a_server_that_left_gets_no_new_calls_as_long_as_others_do() -> None:
    """Its sessions move, each call is counted where it runs, and a joined server is chosen again;
    if all have left, calls go on.
    """

    async def conversation(http: HttpFleet, fleet: Fleet, client: httpx.AsyncClient) -> None:
        async def serving(session: str) -> str:
            reply = await client.post(
                f"{http.router}/inference/v1/generate", json=BODY, headers={"X-Session-ID": session}
            )
            assert 200 == reply.status_code
            assert {"balancer/s0": 0.0, "balancer/s1": 0.0} == fleet.balancer.gauges()
            return [event.server_id for event in fleet.recorder.events if isinstance(event, Call)][
                -1
            ]

        first = await serving("a")
        (other,) = {"s0", "s1"} - {first}
        fleet.balancer.leave(first)
        assert [other, other] == [await serving("a"), await serving("b")]
        fleet.balancer.leave(other)
        assert other == await serving("a")
        fleet.balancer.join(first)
        assert [first, first] == [await serving("a"), await serving("c")]

    talk(conversation)


def test_a_server_that_dies_breaks_the_connection() -> None:
    """As a process that is gone: no status, no body."""

    async def conversation(http: HttpFleet, _fleet: Fleet, client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.TransportError):
            await client.post(f"{http.urls['s0']}/inference/v1/generate", json=BODY)

    talk(
        conversation,
        Action(when=Trigger(request="r0", tokens=1), do=ActionKind.KILL, server="s0", steps=50),
    )


def test_weights_that_a_stack_loads_are_those_of_the_update_that_runs() -> None:
    """Whatever the body calls them."""

    async def conversation(http: HttpFleet, fleet: Fleet, client: httpx.AsyncClient) -> None:
        label = fleet.train()
        http.about(label)
        await client.post(f"{http.urls['s1']}/update_weights", json={"update_info": {"names": []}})
        *_, load = [event for event in fleet.recorder.events if isinstance(event, Weights)]
        assert ("s1", fleet.weights_of(label), label) == (load.server_id, load.version, load.label)

    talk(conversation)


def test_the_router_lists_its_workers_and_finishes_sessions() -> None:
    """Slime and SkyRL call both."""

    async def conversation(http: HttpFleet, fleet: Fleet, client: httpx.AsyncClient) -> None:
        fleet.servers["s1"].kill()
        workers = (await client.get(f"{http.router}/workers")).json()["workers"]
        assert [(http.urls["s0"], True), (http.urls["s1"], False)] == [
            (worker["url"], worker["is_healthy"]) for worker in workers
        ]
        assert (
            200
            == (
                await client.post(f"{http.router}/finish_session", params={"session_id": "a"})
            ).status_code
        )

    talk(conversation, flavour="sglang")


def test_a_flavour_without_a_fake_server_is_refused() -> None:
    """TensorRT-LLM has none."""

    async def conversation(_http: HttpFleet, _fleet: Fleet, _client: httpx.AsyncClient) -> None:
        raise AssertionError("unreachable")

    with pytest.raises(
        UsageError,
        match=r"Flavour 'trtllm' has no fake HTTP server: there are \['sglang', 'vllm'\]",
    ):
        talk(conversation, flavour="trtllm")


def test_a_server_that_left_the_balancer_gets_no_new_call_and_its_own_ones_are_counted() -> None:
    """Its sessions move, what goes to all servers goes to it, and each call that runs is released
    where it was counted, also one that began before the server left.
    """

    async def conversation(http: HttpFleet, fleet: Fleet, client: httpx.AsyncClient) -> None:
        async def call() -> None:
            reply = await client.post(
                f"{http.router}/inference/v1/generate", json=BODY, headers={"X-Session-ID": "a"}
            )
            assert 200 == reply.status_code

        running = asyncio.create_task(call())
        await asyncio.sleep(1.5 * fleet.servers["s0"].options.step)
        assert fleet.servers["s0"].in_flight
        fleet.balancer.leave("s0")
        await call()
        await running
        assert {"balancer/s0": 0.0, "balancer/s1": 0.0} == fleet.balancer.gauges()
        await client.post(f"{http.router}/pause")
        await client.post(f"{http.router}/resume")
        fleet.balancer.leave("s1")
        await call()
        calls = [event.server_id for event in fleet.recorder.events if isinstance(event, Call)]
        paused = [event.server_id for event in fleet.recorder.events if isinstance(event, Pause)]
        assert (["s0", "s1"], {"s0", "s1"}) == (calls[:2], set(paused))
        assert 3 == len(calls)

    talk(conversation)
