"""The fake SGLang server: its answers, and that they come from the same fake engine."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.events.rollout import Abort, Call, Pause, Reply, Resume, Weights
from rollproof.core.trace import Trace
from rollproof.errors import UsageError
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.http.client import HttpClient
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import bound_socket, serve_in_memory, serving
from rollproof.fakes.http.sglang.server import sglang_app
from rollproof.simulation import virtual_loop
from rollproof.simulation.memory_network import Network
from rollproof.store import TraceWriter, open_trace
from rollproof.verification.traces import judge

MODEL = Model(num_layers=4, moe_layers=(1, 2, 3), num_experts=300, top_k=3, vocab=1000)
OPTIONS = ServeOptions(
    flavour="sglang",
    model=MODEL,
    engine=EngineOptions(max_batch=4, step=0.002, prefix_cache=True),
    max_body=20_000,
)
PROMPT = [5, 6, 7, 8]
BODY = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 6, "temperature": 1.0},
    "return_logprob": True,
    "return_routed_experts": True,
}

Conversation = Callable[[httpx.AsyncClient, EngineBackend], Awaitable[Any]]


async def until(happened: Callable[[], bool]) -> None:
    """Wait for something that a loaded machine may take long for."""
    for _ in range(2000):
        if happened():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within ten seconds")


def converse_with(conversation: Conversation, options: ServeOptions = OPTIONS) -> Any:
    """Have a conversation with a server on loopback."""

    async def run() -> Any:
        async with (
            serving("sglang", options) as (url, backend),
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            return await conversation(client, backend)

    return asyncio.run(run())


def test_a_reply_has_the_values_of_the_engine() -> None:
    """Ids, logprobs and base64 int32 rows are those of the coded policy, T - 1 rows over all
    layers.
    """

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        return (await client.post("/generate", json={**BODY, "rid": "a"})).json(), backend.policy

    body, policy = converse_with(converse)
    meta, ids = body["meta_info"], [*PROMPT, *body["output_ids"]]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(
        len(ids) - 1, 4, 3
    )
    np.testing.assert_array_equal(
        policy.routes_spans([(0, len(ids) - 1, 0)], ids, 0, len(ids) - 1), rows
    )
    assert body["output_ids"] == [token for _, token, _ in meta["output_token_logprobs"]]
    assert {"type": "length", "length": 6} == meta["finish_reason"]
    assert ("a", 4, 6, "default") == (
        meta["id"],
        meta["prompt_tokens"],
        meta["completion_tokens"],
        meta["weight_version"],
    )


def test_a_reply_has_only_the_requested_fields() -> None:
    """Without the switches there are no logprobs and no routes; with a start, rows begin there."""

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        bare = await client.post(
            "/generate", json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        )
        late = await client.post("/generate", json={**BODY, "routed_experts_start_len": 3})
        return bare.json()["meta_info"], late.json()["meta_info"]

    bare, late = converse_with(converse)
    assert not {"routed_experts", "output_token_logprobs"} & set(bare)
    assert (4 + 6 - 1 - 3) * 4 * 3 == np.frombuffer(
        base64.b64decode(late["routed_experts"]), "<i4"
    ).size


async def abort_six_calls(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
    long = {**BODY, "sampling_params": {"max_new_tokens": 4000}}
    calls = [
        asyncio.ensure_future(
            client.post("/generate", json={**long, "input_ids": [9, i], "rid": f"x{i}"})
        )
        for i in range(6)
    ]
    await until(
        lambda: (
            (backend.loads()["running"], backend.loads()["waiting"]) == (4, 2)
            and min(backend.engine.progress().values()) == 0
        )
    )
    await until(lambda: sorted(backend.engine.progress().values())[2] > 0)
    status = (await client.post("/abort_request", json={"rid": "x"})).status_code
    await client.post("/abort_request", json={"rid": "nobody"})
    return status, [reply.json()["meta_info"] for reply in await asyncio.gather(*calls)]


def test_an_abort_by_prefix_ends_running_and_queued_calls_with_different_keys() -> None:
    """``rid`` matches by prefix; a running call keeps all keys, a queued one has neither routes nor
    counts, as SGLang's.
    """
    status, metas = converse_with(abort_six_calls)
    assert 200 == status
    assert {"abort"} == {meta["finish_reason"]["type"] for meta in metas}
    assert [4, 2] == [
        sum("routed_experts" in meta for meta in metas),
        sum("prompt_tokens" not in meta for meta in metas),
    ]


@pytest.mark.parametrize(("untagged", "unlabelled"), [(False, 0), (True, 1)])
def test_one_of_two_aborts_in_the_queue_has_no_label_if_requested(
    untagged: bool, unlabelled: int
) -> None:
    """With ``untagged_aborts``, a client meets both replies to a call that never ran; without it,
    and for calls that ran, every reply has its label.
    """
    _, metas = converse_with(abort_six_calls, replace(OPTIONS, untagged_aborts=untagged))

    assert unlabelled == sum("weight_version" not in meta for meta in metas)


def test_an_update_is_paused_around_and_shown_in_spans() -> None:
    """A call that is in flight over an update under ``in_place`` shows both versions by token;
    calls do not run while paused.
    """

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        call = asyncio.ensure_future(
            client.post("/generate", json={**BODY, "sampling_params": {"max_new_tokens": 60}})
        )
        await until(
            lambda: bool(backend.engine.progress()) and max(backend.engine.progress().values()) > 2
        )
        await client.post("/pause_generation", json={"mode": "in_place"})
        before = backend.engine.progress()
        await asyncio.sleep(0.05)
        assert before == backend.engine.progress()
        reply = await client.post(
            "/update_weights_from_disk",
            json={"model_path": "new", "weight_version": "w1", "flush_cache": False},
        )
        assert reply.json()["success"]
        await client.post("/continue_generation", json={})
        return (
            (await call).json()["meta_info"],
            backend.recorder.events,
            (await client.get("/model_info")).json()["weight_version"],
        )

    meta, events, shown = converse_with(converse)
    assert ["default", "w1"] == [span["version"] for span in meta["weight_versions"]]
    assert 60 == meta["weight_versions"][-1]["end"]
    assert "w1" == shown
    assert [Pause, Weights, Resume] == [
        type(event) for event in events if isinstance(event, Pause | Resume | Weights)
    ][1:]


@pytest.mark.parametrize(
    ("body", "aborted"),
    [({"new_version": "w9"}, True), ({"new_version": "w9", "abort_all_requests": False}, False)],
)
def test_publishing_a_label_ends_all_requests_by_default(
    body: dict[str, Any], aborted: bool
) -> None:
    """The default of ``/update_weight_version`` ends what is in flight (miles #2372)."""

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        call = asyncio.ensure_future(
            client.post("/generate", json={**BODY, "sampling_params": {"max_new_tokens": 400}})
        )
        await until(lambda: bool(backend.engine.progress()))
        await client.post("/update_weight_version", json=body)
        return (await call).json()["meta_info"]["finish_reason"]["type"], sum(
            isinstance(event, Abort) for event in backend.recorder.events
        )

    assert ("abort" if aborted else "length", int(aborted)) == converse_with(converse)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_tells_every_token(incremental: bool) -> None:
    """Events hold all tokens so far, or only the new ones; the first says when it was sent, the
    last has routes; then the end mark.
    """

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        async with client.stream("POST", "/generate", json={**BODY, "stream": True}) as reply:
            return [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]

    lines = converse_with(
        converse, ServeOptions(flavour="sglang", model=MODEL, incremental=incremental)
    )
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "[DONE]" == lines[-1]
    reported = (
        [token for chunk in chunks for token in chunk["output_ids"]]
        if incremental
        else chunks[-1]["output_ids"]
    )
    assert 6 == len(reported)
    assert [True] + [False] * (len(chunks) - 1) == [
        "response_sent_to_client_ts" in chunk["meta_info"] for chunk in chunks
    ]
    assert [False] * (len(chunks) - 1) + [True] == [
        "routed_experts" in chunk["meta_info"] for chunk in chunks
    ]


def test_a_client_that_vanishes_from_a_stream_ends_its_call() -> None:
    """Nothing goes on running for somebody who went away."""

    async def converse(client: httpx.AsyncClient, backend: EngineBackend) -> Any:
        async with client.stream(
            "POST",
            "/generate",
            json={**BODY, "stream": True, "sampling_params": {"max_new_tokens": 2000}},
        ) as reply:
            async for _ in reply.aiter_lines():
                break
        await until(lambda: not backend.engine.in_flight)

    converse_with(converse)


def test_steps_that_take_no_time_change_nothing_but_the_time() -> None:
    """Several of them are done in one turn of the event loop: the replies are those of an engine
    that takes its time, aborts land, too.
    """

    async def converse(step: float) -> tuple[list[Any], Any]:
        engine = EngineOptions(max_batch=3, step=step, prefix_cache=True, prefill_chunk=4)
        options = replace(
            OPTIONS, engine=engine, max_length=1_000_000
        )  # long enough for the abort to come in time
        bodies = [
            {
                **BODY,
                "rid": f"r{i}",
                "input_ids": [5, 6, i],
                "sampling_params": {"max_new_tokens": 5 * i + 1},
            }
            for i in range(6)
        ]
        endless = {**BODY, "rid": "x", "sampling_params": {"max_new_tokens": 900_000}}
        async with serving("sglang", options) as (url, backend):
            client = HttpClient(int(url.rpartition(":")[2]))
            replies = await asyncio.gather(
                *(client.request("POST", "/generate", body) for body in bodies)
            )
            long = asyncio.ensure_future(client.request("POST", "/generate", endless))
            await until(lambda: any(call.sampled for call in backend.engine.in_flight))
            await client.request("POST", "/abort_request", {"rid": "x"})
            shown = [
                (reply.json()["output_ids"], reply.json()["meta_info"]["routed_experts"])
                for reply in replies
            ]
            return shown, (await long).json()["meta_info"]["finish_reason"]["type"]

    assert asyncio.run(converse(0.001)) == asyncio.run(converse(0.0))


def test_a_server_keeps_nothing_of_calls_that_have_ended() -> None:
    """It may run for days: neither the calls nor what is counted of them stay, aborted ones and
    streams neither.
    """

    def alive_objects() -> int:
        gc.collect()
        # not isinstance: it asks items for their __class__, and lazy ones of torch warn then
        return sum(issubclass(type(item), InflightCall | Reply) for item in gc.get_objects())

    async def converse() -> tuple[int, int]:
        before = alive_objects()  # of other tests
        backend = EngineBackend(ServeOptions(flavour="sglang"), keep=False)
        loop: Any = asyncio.get_running_loop()
        loop.network = Network(loop)
        serve_in_memory(loop.network, {80: sglang_app(backend)})
        client = HttpClient(80)
        for number in range(20):
            body = {
                "input_ids": [5, 6, number],
                "rid": f"r{number}",
                "stream": number % 2 == 0,
                "sampling_params": {"max_new_tokens": 3},
            }
            await client.request("POST", "/generate", body)
        schedule = backend.attribution
        assert schedule is not None
        return alive_objects() - before, len(schedule.latest) + len(schedule._rejects)

    remaining, counted = virtual_loop.run(converse)
    assert remaining <= 2  # the last call's, of which its future is not collected yet
    assert 0 == counted


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", {}, 400, "Either text, input_ids or input_embeds"),
        ("/generate", {"input_ids": "abc"}, 400, "list of token ids"),
        ("/generate", {"input_ids": [1, 1000]}, 400, "outside of the vocabulary of 1000"),
        ("/generate", {"input_ids": [True]}, 400, "list of token ids"),
        ("/generate", {"input_ids": []}, 400, "input_ids cannot be empty"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"max_new_tokens": "a"}},
            400,
            "max_new_tokens must be int",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 0}}, 400, "n must be 1 to 256"),
        ("/generate", {"input_ids": [1] * 12_000}, 413, "bytes"),
        ("/pause_generation", {"mode": "nope"}, 400, "mode must be one of"),
        ("/update_weights_from_disk", {}, 400, "model_path is required"),
        ("/update_weight_version", {}, 400, "new_version is required"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_wrong_requests_are_refused(
    path: str, body: dict[str, Any], status: int, words: str
) -> None:
    """Wrong bodies, values and paths get the status of their kind and a text that explains it."""

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        reply = await client.post(path, json=body)
        return reply.status_code, reply.text

    assert (status, True) == (lambda reported: (reported[0], words in reported[1]))(
        converse_with(converse)
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(content: bytes) -> None:
    """Malformed JSON is a 400, never a 500."""

    async def converse(client: httpx.AsyncClient, _: EngineBackend) -> Any:
        return (await client.post("/generate", content=content)).status_code

    assert 400 == converse_with(converse)


def test_a_served_run_is_judged(tmp_path: Path) -> None:
    """A served run is written as a trace in which the engine's own checks find no fault."""
    path = tmp_path / "served.arrow"

    async def run() -> None:
        with TraceWriter(path, EngineBackend.header(OPTIONS)) as writer:
            async with (
                serving("sglang", OPTIONS, sinks=[writer]) as (url, _),
                httpx.AsyncClient(base_url=url) as client,
            ):
                await asyncio.gather(
                    *(
                        client.post("/generate", json={**BODY, "input_ids": [i, 2, 3]})
                        for i in range(10, 16)
                    )
                )

    asyncio.run(run())
    header, events = next(iter(open_trace(path).episodes()))
    remaining = list(events)
    assert (6, 6) == (
        sum(isinstance(event, Call) for event in remaining),
        sum(isinstance(event, Reply) for event in remaining),
    )
    results = {
        result.id: result for result in judge(Trace(header=header, events=tuple(remaining))).results
    }
    assert [] == [name for name, result in results.items() if result.findings]


def test_a_port_in_use_is_refused() -> None:
    """A taken port, and one that does not exist, are usage errors."""
    first = bound_socket()
    port = first.getsockname()[1]
    first.listen()
    with pytest.raises(UsageError, match=f"Port {port} on 127.0.0.1 is in use"):
        bound_socket(port)
    with pytest.raises(UsageError, match="must be 0 to 65535"):
        bound_socket(70_000)
    first.close()
