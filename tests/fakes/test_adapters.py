"""Adapters in fake engines: as rude as the real ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollproof.core.case import ActionKind, EngineOptions
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Reply, Weights
from rollproof.core.events.weights import Adapter, AdapterChange
from rollproof.core.records import Span
from rollproof.core.trace import Recorder
from rollproof.fakes.clients.adapter_clients import AsSampledAdapters
from rollproof.fakes.engine.exceptions import BadCall, TransferFailed
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.simulation import virtual_loop
from rollproof.verification.runner import run_case


def run_engine(work: Any, flavour: str = "vllm", **options: Any) -> list[Any]:
    """Run ``work(server)`` on the one server of a fleet; return what was recorded."""
    recorded: list[Any] = []

    async def main() -> None:
        recorder = Recorder(asyncio.get_running_loop().time)
        fleet = Fleet(case(flavour=flavour, engine=EngineOptions(**options)), recorder)
        await work(fleet.servers["s0"])
        recorded.extend(recorder.events)

    virtual_loop.run(main)
    return recorded


def sampled_by(events: list[Any]) -> list[list[Any]]:
    return [
        [span.version for span in event.true_tokens or ()]
        for event in events
        if isinstance(event, Reply)
    ]


def test_a_call_is_sampled_by_the_adapter_that_it_names() -> None:
    """The base model serves a call that names none."""

    async def work(server: Any) -> None:
        assert await server.load_adapter("a", 1) and await server.load_adapter("b", 2)
        for name in ("a", "b", None):
            await server.generate(prompt_ids=[1, 2], max_tokens=2, adapter=name)

    assert [[1], [2], [0]] == sampled_by(run_engine(work))


def test_a_name_that_is_in_use_is_kept() -> None:
    """As vLLM's ``add_lora`` does: the load is ignored, unless it replaces the adapter in place."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        assert not await server.load_adapter("a", 2)
        await server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a")
        assert await server.load_adapter("a", 2, in_place=True)
        await server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a")

    events = run_engine(work)
    assert [[1], [2]] == sampled_by(events)
    assert [(AdapterChange.IGNORED, 2)] == [
        (event.change, event.version) for event in events if isinstance(event, Adapter)
    ]


def test_sglang_refuses_a_name_that_is_in_use() -> None:
    """It must be unloaded first."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        with pytest.raises(BadCall, match="'a' is already loaded on s0: unload it first"):
            await server.load_adapter("a", 2, in_place=True)
        await server.unload_adapter("a")
        assert await server.load_adapter("a", 2)

    run_engine(work, "sglang")


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_an_adapter_that_nobody_loaded_is_refused(flavour: str) -> None:
    """A call that names it, and an unload; so is a load without a name."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        with pytest.raises(BadCall, match=r"'b' does not exist: .* on s0, which has \['a'\]"):
            await server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="b")
        with pytest.raises(BadCall, match="'b' does not exist"):
            await server.unload_adapter("b")
        with pytest.raises(BadCall, match="An adapter needs a name"):
            await server.load_adapter("", 1)

    run_engine(work, flavour)


def test_a_broken_transfer_leaves_the_adapter() -> None:
    """As it leaves the weights."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        server.fail_next_load = True
        with pytest.raises(TransferFailed):
            await server.load_adapter("a", 2, in_place=True)
        assert {"a": 1} == server.adapters

    run_engine(work)


@pytest.mark.parametrize(("flavour", "rows"), [("vllm", [1, 2]), ("sglang", [2])])
def test_the_prefix_cache_knows_an_adapter_by_name_or_by_load(
    flavour: str, rows: list[int]
) -> None:
    """VLLM gives out KV of the adapter that had the name before (#42125), SGLang does not."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        await server.generate(prompt_ids=[1, 2, 3], max_tokens=1, adapter="a")
        await server.unload_adapter("a")
        await server.load_adapter("a", 2)
        await server.generate(prompt_ids=[1, 2, 4], max_tokens=1, adapter="a")

    last = [
        event for event in run_engine(work, flavour, prefix_cache=True) if isinstance(event, Reply)
    ]
    versions = [span.version for span in last[-1].true_rows or ()]
    assert rows == [version for version in versions if version != "mixed"] + (
        [2] if "mixed" in versions else []
    )


def test_adapters_share_no_prefix_with_each_other_or_the_base_model() -> None:
    """The cache is keyed by the adapter."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        await server.load_adapter("b", 2)
        for name in ("a", "b", None):
            await server.generate(prompt_ids=[1, 2, 3], max_tokens=1, adapter=name)

    events = run_engine(work, prefix_cache=True)
    assert [0, 0, 0] == [event.output.cached_tokens for event in events if isinstance(event, Reply)]


def test_a_replaced_adapter_changes_under_running_calls() -> None:
    """They go on under the new one, over KV of the old one; by a version name of its own they do
    not.
    """

    async def work(server: Any) -> None:
        for name, in_place in (("a", True), ("b", False)):
            await server.load_adapter(name, 1)
            call = asyncio.ensure_future(
                server.generate(prompt_ids=[1, 2], max_tokens=4, adapter=name)
            )
            await asyncio.sleep(2.5)
            await server.load_adapter(name if in_place else "c", 2, in_place=in_place)
            await call

    assert [[1, "mixed"], [1]] == sampled_by(run_engine(work))


def test_wrong_scales_and_bases_are_no_version() -> None:
    """What they compute is labelled ``altered``."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1, scale=2.0)
        await server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a")
        await server.load_adapter("a", 1, in_place=True)
        await server.load(5)
        await server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a")

    events = run_engine(work)
    assert [["altered"], ["altered"]] == sampled_by(events)
    assert [None, 2.0, 1.0, None] == [
        event.true_scale for event in events if isinstance(event, Weights)
    ]


def test_sglang_unloads_when_the_calls_of_an_adapter_have_ended() -> None:
    """VLLM forgets the name at once, and lets them go on."""
    for flavour, ended in (("sglang", True), ("vllm", False)):

        async def work(server: Any, ended: bool = ended) -> None:
            await server.load_adapter("a", 1)
            call = asyncio.ensure_future(
                server.generate(prompt_ids=[1, 2], max_tokens=4, adapter="a")
            )
            await asyncio.sleep(1.5)
            await server.unload_adapter("a")
            await asyncio.sleep(0)
            assert ended is call.done()
            await call

        run_engine(work, flavour)


def test_sglang_looks_up_a_parked_call_when_it_is_resumed() -> None:
    """It is served by the adapter that has the name then, or refused; vLLM has looked it up."""
    for flavour, versions in (("sglang", [2]), ("vllm", [1])):

        async def work(server: Any) -> None:
            await server.load_adapter("a", 1)
            await server.pause(PauseMode.ABORT)
            call = asyncio.ensure_future(
                server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a")
            )
            await asyncio.sleep(1)
            await server.unload_adapter("a")
            await server.load_adapter("a", 2)
            await server.resume()
            await call

        assert [versions] == sampled_by(run_engine(work, flavour))

    async def gone(server: Any) -> None:
        await server.load_adapter("a", 1)
        await server.pause(PauseMode.ABORT)
        call = asyncio.ensure_future(server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a"))
        await asyncio.sleep(1)
        await server.unload_adapter("a")
        await server.resume()
        with pytest.raises(BadCall, match="'a' does not exist"):
            await call

    run_engine(gone, "sglang")


def test_an_evicted_adapter_is_loaded_again_by_a_call() -> None:
    """Once, and as it was."""

    async def work(server: Any) -> None:
        await server.load_adapter("a", 1)
        server.evict_adapters()
        for _ in range(2):
            await server.generate(prompt_ids=[1, 2], max_tokens=1, adapter="a")

    events = run_engine(work)
    assert [[1], [1]] == sampled_by(events)
    assert [AdapterChange.EVICTED, AdapterChange.RELOADED] == [
        event.change for event in events if isinstance(event, Adapter)
    ]


def test_a_restarted_server_gets_the_adapters_of_the_others() -> None:
    """Whoever restarts it brings them; alone, it has those of before."""
    for servers in (1, 2):
        trace = run_case(
            AsSampledAdapters,
            case(
                act(ActionKind.SYNC, 2),
                act(ActionKind.KILL, 1, "r1"),
                requests=(request(), request("r1", (14, 15)), request("r2", (16, 17))),
                arrivals=(0.0, 30.0, 60.0),
                servers=servers,
            ),
        )
        restored = [
            event
            for event in trace.events
            if isinstance(event, Weights) and event.by_harness and event.adapter is not None
        ]
        assert [("policy", 1)] == [(event.adapter, event.version) for event in restored]
        last = [event for event in trace.events if isinstance(event, Reply)][-1]
        assert (Span(start=0, end=6, version=1),) == last.true_tokens
