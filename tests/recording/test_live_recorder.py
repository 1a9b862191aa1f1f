"""``record_live``: a production loop, recorded and judged afterwards."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import rollproof
from rollproof.core.events.rollout import Call, Fault, Reply, Result, Submit, Unrecorded
from rollproof.core.events.training import Batch
from rollproof.core.records import BatchRow, EngineOutput, FinishReason, Request, Rollout
from rollproof.errors import UsageError
from rollproof.judging.checks import Verdict
from rollproof.recording.live_recorder import LiveRecorder
from rollproof.recording.redaction import Redaction, RequestSample
from rollproof.store import TraceReader
from tests.fakes.http.served import served
from tests.recording.proxied import events_of, judged
from tests.recording.test_proxy import options
from tests.recording.trainer_client import SGLANG, Trainer
from tests.support.recorded_stack import CONTRACT, Client, Engine, to_call, to_output, to_request


def to_record(native: dict[str, Any]) -> Rollout:
    return Rollout(
        request_id="",
        prompt_ids=(1, 2, 3),
        response_ids=tuple(native["ids"]),
        finish_reason=FinishReason(native["reason"]),
        logprobs=np.array(native["logprobs"]),
        routes=native["rows"],
    )


def wired(recorder: LiveRecorder, client: Client) -> Any:
    client.generate = recorder.engine(client.generate, to_call=to_call, to_output=to_output)
    return recorder.rollout(client.rollout, to_request=to_request, to_record=to_record)


def output_of(ids: tuple[int, ...]) -> EngineOutput:
    return EngineOutput(
        token_ids=ids, logprobs=None, routes=None, finish_reason=FinishReason.LENGTH
    )


@pytest.mark.parametrize(("faulty", "expected"), [(False, ()), (True, ("routes.rows",))])
def test_a_loop_is_judged_afterwards(
    tmp_path: Path, faulty: bool, expected: tuple[str, ...]
) -> None:
    """A correct client is green, and one that repeats rows is not."""
    with rollproof.record_live(tmp_path, CONTRACT, name="a") as recorder:
        wired(recorder, Client(Engine(), repeat_rows=faulty))([1, 2, 3])
    (path,) = recorder.paths
    assert ["submit", "call", "reply", "call", "reply", "result"] == [
        event.kind for event in events_of(path)
    ]
    results = judged(path)
    assert expected == tuple(name for name in results.failed if name == "routes.rows")
    assert Verdict.PASS is results["stitch.tokens"].verdict
    assert "6 events, 1 request, 2 calls, 1 sample" == str(recorder.counts)


def test_several_samples_of_a_request_are_one_result(tmp_path: Path) -> None:
    """As a list, if the contract says that there may be several; otherwise the request is noted as
    not recorded, and nothing reaches the loop.
    """
    samples = [
        Rollout(
            request_id="r1",
            prompt_ids=(1,),
            response_ids=(2, number),
            finish_reason=FinishReason.STOP,
        )
        for number in range(3)
    ]
    several = replace(CONTRACT, samples="turn", multi_turn=True)
    kinds = {}
    for name, contract in (("one", CONTRACT), ("several", several)):
        with rollproof.record_live(tmp_path, contract, name=name) as recorder:
            recorder.submit(Request(request_id="r1", prompt_ids=(1,)))
            recorder.result(samples, request_id="r1")
        (path,) = recorder.paths
        events = events_of(path)
        kinds[name] = [event.kind for event in events]
    assert {"one": ["submit", "unrecorded"], "several": ["submit", "result"]} == kinds
    assert isinstance(events[1], Result)
    assert [(2, 0), (2, 1), (2, 2)] == [sample.response_ids for sample in events[1].samples]
    assert "2 events, 1 request, 0 calls, 3 samples" == str(recorder.counts)


def test_the_adapter_that_a_call_names_is_recorded(tmp_path: Path) -> None:
    """Without it, the checks of adapters would take the call for one of the base model."""

    def call(prompt: list[int]) -> rollproof.EngineCall:
        return rollproof.EngineCall(
            prompt_ids=prompt, max_tokens=2, request_id="r1", adapter="policy"
        )

    with rollproof.record_live(tmp_path, CONTRACT, name="a") as recorder:
        recorder.engine(lambda _prompt: (5,), to_call=call, to_output=output_of)([1])
    (path,) = recorder.paths
    assert ["policy"] == [event.adapter for event in events_of(path) if isinstance(event, Call)]


def test_engines_of_every_form_are_recorded(tmp_path: Path) -> None:
    """Coroutines, async generators and remote methods; what they return is unchanged."""

    def call(prompt: list[int]) -> Any:
        return rollproof.EngineCall(prompt_ids=prompt, max_tokens=2, request_id="r1")

    async def generate(prompt: list[int]) -> tuple[int, ...]:
        return (7, 8)

    async def stream(prompt: list[int]) -> AsyncIterator[tuple[int, ...]]:
        yield (7,)
        yield (7, 8)

    class Ref:
        def future(self) -> concurrent.futures.Future[tuple[int, ...]]:
            done: concurrent.futures.Future[tuple[int, ...]] = concurrent.futures.Future()
            done.set_result((7, 8))
            return done

    class Method:
        def remote(self, prompt: list[int]) -> Ref:
            return ref

    class Handle:
        generate = Method()
        other = "untouched"

    ref = Ref()

    async def main(recorder: LiveRecorder) -> None:
        wraps = {"to_call": call, "to_output": output_of}
        assert (7, 8) == await recorder.engine(generate, **wraps)([1])
        assert [(7,), (7, 8)] == [item async for item in recorder.engine(stream, **wraps)([1])]
        handle = recorder.actor(Handle(), "generate", **wraps)
        assert ref is handle.generate.remote([1])
        assert "untouched" == handle.other
        cut = recorder.engine(stream, **wraps)([1])
        await anext(cut)
        await cut.aclose()

    with rollproof.record_live(tmp_path, CONTRACT) as recorder:
        asyncio.run(main(recorder))
    events = events_of(recorder.paths[0])
    replies = [event.output.token_ids for event in events if isinstance(event, Reply)]
    assert [(7, 8)] * 3 == replies
    assert ["lost-reply"] == [event.what for event in events if isinstance(event, Fault)]


def test_nothing_that_is_wrong_reaches_the_loop(tmp_path: Path) -> None:
    """It is counted, the first reason is kept, and the requests that it concerns are unknown."""

    def broken(*_args: object, **_kwargs: object) -> Any:
        raise KeyError("ids")

    with rollproof.record_live(tmp_path, CONTRACT) as recorder:
        generate = recorder.engine(Engine().generate, to_call=broken, to_output=broken)
        assert [13, 14] == generate([1, 2, 3], 4)["ids"]
        client = Client(Engine())
        client.generate = recorder.engine(client.generate, to_call=to_call, to_output=broken)
        run = recorder.rollout(client.rollout, to_request=to_request, to_record=to_record)
        assert 4 == len(run([1, 2, 3])["ids"])
        recorder.result(request_id=None)
        recorder.pause("nonsense")
        recorder.submit(Request(request_id="x", prompt_ids=None))  # type: ignore[arg-type]
        recorder.update(1, "1", "asked")
    counts = recorder.counts
    assert "an error: to_call: KeyError" in counts.first_trouble
    assert counts.unreadable >= 5
    results = judged(*recorder.paths)
    assert () == results.failed
    assert Verdict.UNKNOWN is results["stitch.tokens"].verdict


def test_what_the_loop_changes_later_is_recorded_as_it_was(tmp_path: Path) -> None:
    """Lists that a client extends, and arrays that it writes to."""
    ids, routes = [7], np.zeros((1, 1, 1), np.uint8)
    with rollproof.record_live(tmp_path, CONTRACT) as recorder:
        recorder.submit(Request(request_id="r", prompt_ids=(1,)))
        sample = Rollout(
            request_id="r",
            prompt_ids=(1,),
            response_ids=ids,  # type: ignore[arg-type]
            finish_reason=None,
            routes=routes,
        )
        recorder.result(sample)
        ids.append(8)
        routes += 1
    (result,) = [event for event in events_of(recorder.paths[0]) if isinstance(event, Result)]
    assert result.rollout is not None
    assert (7,) == result.rollout.response_ids
    assert result.rollout.routes is not None
    assert not result.rollout.routes.any()


def test_batches_have_files_of_their_own(tmp_path: Path) -> None:
    """Of the kind that the checks of batches judge."""
    row = BatchRow(request_id="r", token_ids=np.array([1, 7]), attention=np.array([1, 1]))
    sample = Rollout(request_id="r", prompt_ids=(1,), response_ids=(7,), finish_reason=None)
    with rollproof.record_live(tmp_path, CONTRACT, name="n") as recorder:
        recorder.batch([sample], [row], name="step 1")
        recorder.batch([sample], [replace_attention(row)], name="step 2")
    path = tmp_path / "n-batches.0001.arrow"
    assert "batches" == TraceReader(path).header.about
    (batch,) = events_of(path)
    assert isinstance(batch, Batch)
    assert 1 == recorder.counts.unreadable


def replace_attention(row: BatchRow) -> BatchRow:
    return BatchRow(request_id="r", token_ids=row.token_ids, attention=np.array([1]))


def submitted(recorder: LiveRecorder, number: int) -> None:
    for index in range(number):
        request_id = f"r{index}"
        recorder.submit(Request(request_id=request_id, prompt_ids=(index, 5)))
        sample = Rollout(
            request_id=request_id, prompt_ids=(index, 5), response_ids=(9,), finish_reason=None
        )
        recorder.result(sample)


def test_a_share_of_the_requests_is_recorded_whole(tmp_path: Path) -> None:
    """On every host the same ones, and others with another seed."""
    with rollproof.record_live(tmp_path, CONTRACT, sample=0.3, seed=1) as recorder:
        submitted(recorder, 200)
    events = events_of(recorder.paths[0])
    names = [event.request.request_id for event in events if isinstance(event, Submit)]
    assert names == [event.request_id for event in events if isinstance(event, Result)]
    assert names == [f"r{i}" for i in range(200) if RequestSample(0.3, 1).has(f"r{i}")]
    assert names != [f"r{i}" for i in range(200) if RequestSample(0.3, 2).has(f"r{i}")]
    assert 30 < len(names) < 90
    assert 200 - len(names) == recorder.counts.left_out


def test_hashed_tokens_are_judged_as_before_and_dropped_ones_not_at_all(tmp_path: Path) -> None:
    """Equal tokens stay equal, also in the files of other hosts with the same key."""
    for mode in ("hash:secret", "hash:other", "drop"):
        with rollproof.record_live(tmp_path / mode, CONTRACT, redact=mode) as recorder:
            wired(recorder, Client(Engine()))([1, 2, 3])
        events = events_of(recorder.paths[0])
        call = next(event for event in events if isinstance(event, Call))
        assert (1, 2, 3) != call.prompt_ids
        assert Redaction(mode).tokens((1, 2, 3)) == call.prompt_ids
        reply = next(event for event in events if isinstance(event, Reply))
        assert reply.output.logprobs is not None
        assert -0.5 == reply.output.logprobs[0]
        results = judged(recorder.paths[0])
        verdict = Verdict.UNKNOWN if mode == "drop" else Verdict.PASS
        assert (verdict, ()) == (results["stitch.tokens"].verdict, results.failed)


def test_parts_are_judged_one_by_one(tmp_path: Path) -> None:
    """Each holds whole requests, and what a server had when it began."""
    with rollproof.record_live(tmp_path, CONTRACT, name="n", part_seconds=0.2) as recorder:
        recorder.weights("3", label="3")
        recorder.submit(Request(request_id="slow", prompt_ids=(1, 2)))
        time.sleep(0.8)
        recorder.submit(Request(request_id="fast", prompt_ids=(1, 2)))
        recorder.result(request_id="slow")
        recorder.result(request_id="fast")
    assert [tmp_path / "n.0001.arrow", tmp_path / "n.0002.arrow"] == recorder.paths[:2]
    # the second begins with the weights that the server has
    for path in recorder.paths[:2]:
        assert ["weights", "submit", "result"] == [event.kind for event in events_of(path)]
    ends = judged(*recorder.paths)["lifecycle.ends-once"]
    assert (Verdict.PASS, {"requests that ended": 2}) == (ends.verdict, dict(ends.exercised))


def test_a_full_trace_is_counted(tmp_path: Path) -> None:
    """Recording ends at its size."""
    with rollproof.record_live(tmp_path, CONTRACT, total_bytes=1) as recorder:
        recorder.submit(Request(request_id="a", prompt_ids=(1, 2)))
        time.sleep(1.2)
        recorder.submit(Request(request_id="b", prompt_ids=(1, 2)))
    assert 1 == recorder.counts.dropped
    assert "largest size" in recorder.counts.first_trouble


def test_events_that_come_too_fast_are_dropped_and_nothing_waits(tmp_path: Path) -> None:
    """Requests that were open then are unknown, later ones are judged."""
    with rollproof.record_live(tmp_path, CONTRACT, queue_bytes=20_000) as recorder:
        hold, holding = threading.Event(), threading.Event()

        def wait(at: float) -> None:
            holding.set()
            hold.wait(10)

        recorder.submit(Request(request_id="open", prompt_ids=(1, 2)))
        recorder._put(wait)
        holding.wait(10)
        for index in range(200):
            recorder.observation("open", [index])
        hold.set()
        while recorder.counts.dropped < 100:
            time.sleep(0.01)
        recorder.result(request_id="open")
        wired(recorder, Client(Engine()))([1, 2, 3])
    events = events_of(recorder.paths[0])
    (lost,) = [event for event in events if isinstance(event, Unrecorded)]
    assert lost.count == recorder.counts.dropped > 100
    assert "" == lost.request_id
    results = judged(recorder.paths[0])
    assert () == results.failed
    assert {"resumed samples": 1} == dict(results["stitch.tokens"].exercised)


def test_an_http_client_is_recorded_as_a_proxy_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls belong to the rollout that makes them, without any header."""
    monkeypatch.delenv("ROLLPROOF_URL", raising=False)
    with (
        served("sglang", options("sglang")) as server,
        rollproof.record_live(tmp_path, SGLANG) as recorder,
    ):
        trainer = Trainer(server.url, stream=True)
        recorder.http(trainer.client, engine="sglang")
        recorder.http(trainer.control, engine="sglang")
        trainer.update_sglang("1")
        run = recorder.rollout(
            trainer.generate_sglang,
            to_request=lambda prompt, budget: Request(
                request_id=f"r{prompt[0]}", prompt_ids=tuple(prompt), max_tokens=budget
            ),
            to_record=lambda native: Rollout(request_id="", **native),
        )
        threads = [threading.Thread(target=run, args=([first, 6], 12)) for first in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        trainer.update_sglang("2")
        for thread in threads:
            thread.join(30)
        trainer.close()
    results = judged(*recorder.paths)
    assert () == results.failed
    passed = {result.id for result in results.results if result.verdict is Verdict.PASS}
    assert {"stitch.tokens", "routes.rows", "versions.token-tags"} <= passed


def test_an_async_http_client_is_recorded(tmp_path: Path) -> None:
    """Whether it reads its replies at once or as a stream."""

    async def main(url: str, recorder: LiveRecorder) -> None:
        ask = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            recorder.http(client)
            assert 200 == (await client.post("/generate", json=ask)).status_code
            async with client.stream("POST", "/generate", json={**ask, "stream": True}) as reply:
                lines = [line async for line in reply.aiter_lines() if line]
            assert "data: [DONE]" == lines[-1]
            assert 404 == (await client.get("/nowhere")).status_code

    with (
        served("sglang", options("sglang")) as server,
        rollproof.record_live(tmp_path, SGLANG) as recorder,
    ):
        asyncio.run(main(server.url, recorder))
    replies = [event for event in events_of(recorder.paths[0]) if isinstance(event, Reply)]
    assert replies[0].output.token_ids == replies[1].output.token_ids
    assert 2 == len(replies) == len(replies[0].output.token_ids)


def test_a_killed_process_leaves_all_but_its_last_second(tmp_path: Path) -> None:
    """At any moment: what was flushed is read, and requests in it are whole."""
    program = textwrap.dedent(
        f"""
        import time, rollproof
        from tests.recording.test_live_recorder import CONTRACT, submitted
        recorder = rollproof.record_live({str(tmp_path)!r}, CONTRACT, name="k")
        submitted(recorder, 100)
        time.sleep(1.2)
        print("written", flush=True)
        while True:
            submitted(recorder, 10)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "written\n" == process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    reader = TraceReader(tmp_path / "k.0001.arrow")
    kinds = [event.kind for event in reader]
    assert kinds.count("result") >= 100
    assert reader.ending is not None
    assert not reader.ending.closed


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    """When the recording begins, and when something is wrapped: not later."""
    with pytest.raises(UsageError, match="takes the Contract"):
        rollproof.record_live(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sample=2 must be a share"):
        rollproof.record_live(tmp_path, CONTRACT, sample=2)
    with pytest.raises(UsageError, match="part_bytes=0 must be a number above 0"):
        rollproof.record_live(tmp_path, CONTRACT, part_bytes=0)
    with pytest.raises(UsageError, match="redact must be"):
        rollproof.record_live(tmp_path, CONTRACT, redact="nonsense")
    with rollproof.record_live(tmp_path, CONTRACT, name="n") as recorder:
        with pytest.raises(UsageError, match=r"n\.0001\.arrow exists"):
            rollproof.record_live(tmp_path, CONTRACT, name="n")
        with pytest.raises(UsageError, match="takes a function as `to_call`, not None"):
            recorder.engine(print, to_call=None, to_output=print)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="a remote method 'generate'"):
            recorder.actor(object(), "generate", to_call=print, to_output=print)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="put `rollproof proxy`"):
            recorder.http(object())
