from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rollproof
from rollproof.core.events.rollout import Call, Reply, Result, Submit, Weights
from rollproof.core.events.weights import Checksums
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.errors import ConformanceError, ExpectationError, SubjectError, UsageError
from rollproof.judging.checks import Verdict
from rollproof.recording.recorder import EngineCall, Recording
from tests.support.recorded_stack import (
    CONTRACT,
    Client,
    Engine,
    kinds,
    to_call,
    to_output,
    to_record,
    to_request,
    wired,
)


def test_a_correct_client_passes() -> None:
    """Calls, replies and results are recorded in order, judged, and nothing is raised; the canary
    is planted and seen.
    """
    with rollproof.record(CONTRACT) as trace:
        wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])

    assert ["submit", "call", "reply", "call", "reply", "result"] == kinds(trace.recorded.events)
    assert () == trace.report.failed
    assert trace.report.summary["pass"] > 10
    assert trace.report.canary is not None
    assert trace.report.canary.red


def test_several_samples_of_a_request_are_one_result() -> None:
    """A list of them, if the contract says that there may be several; all of one request."""

    def sample(request_id: str, *ids: int) -> Rollout:
        return Rollout(
            request_id=request_id,
            prompt_ids=(1,),
            response_ids=ids,
            finish_reason=FinishReason.STOP,
        )

    contract = replace(CONTRACT, samples="turn", multi_turn=True)
    with pytest.raises(ConformanceError):
        with rollproof.record(contract, only=["trajectory.sampled"]) as trace:
            trace.submit(rollproof.Request(request_id="r1", prompt_ids=(1,)))
            with pytest.raises(SubjectError, match="samples of the requests"):
                trace.result([sample("r1", 2), sample("r2", 3)])
            trace.result([sample("r1", 2), sample("r1", 3)])
    assert ["trajectory.sampled"] == [result.id for result in trace.report.failed]
    (result,) = [event for event in trace.recorded.events if isinstance(event, Result)]
    assert [(2,), (3,)] == [each.response_ids for each in result.samples]


def test_nothing_is_planted_where_nothing_is_clean() -> None:
    """The canary of a run whose checks for it fail already says what to do first."""
    with pytest.raises(ConformanceError):
        with rollproof.record(CONTRACT, only=["routes.rows"]) as trace:
            wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])

    assert trace.report.canary is not None
    assert (None, "every trace of this run already has findings: fix them first") == (
        trace.report.canary.planted,
        trace.report.canary.reason,
    )


def test_a_faulty_client_raises_with_the_findings() -> None:
    """The block ends with an AssertionError whose text has the finding; the return value reached
    the test before.
    """
    with pytest.raises(
        ConformanceError, match=r"my test: \d+ checks: .*\n  FAIL  routes\.rows"
    ) as error:
        with rollproof.record(CONTRACT, name="my test") as trace:
            native = wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])

    assert isinstance(error.value, AssertionError)
    assert 4 == len(native["ids"])
    assert "routes.rows" in [result.id for result in trace.report.failed]


def test_async_code_and_parallel_requests_are_attributed() -> None:
    """Coroutines are awaited as before; two rollouts at once keep their calls apart though neither
    names its request.
    """

    class AsyncClient(Client):
        async def run(self, prompt: list[int]) -> dict[str, Any]:
            await asyncio.sleep(0)
            return self.rollout(prompt)

    async def main(trace: Recording) -> None:
        clients = [AsyncClient(Engine()), AsyncClient(Engine())]
        runs = []
        for client, prompt in zip(clients, ([1, 2, 3], [7, 8]), strict=True):
            client.generate = trace.engine(client.generate, to_call=to_call, to_output=to_output)
            runs.append(
                trace.rollout(client.run, to_request=to_request, to_record=to_record(prompt))(
                    prompt
                )
            )
        await asyncio.gather(*runs)

    with rollproof.record(CONTRACT) as trace:
        asyncio.run(main(trace))

    calls = [event for event in trace.recorded.events if isinstance(event, Call)]
    assert {("r1", (1, 2, 3)), ("r7", (7, 8))} == {
        (call.request_id, call.prompt_ids[: 3 if call.request_id == "r1" else 2]) for call in calls
    }


def test_a_handle_that_returns_an_awaitable_is_recorded_when_it_is_awaited() -> None:
    """`handle.method.remote(...)` is a plain function that returns an awaitable: the reply is
    recorded once it is there.
    """

    def remote(prompt: list[int], budget: int) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(Engine().generate(prompt, budget))
        return future

    async def main(trace: Recording) -> None:
        trace.submit(Request(request_id="r0", prompt_ids=(1, 2), max_tokens=2))
        await trace.engine(remote, to_call=to_call, to_output=to_output)([1, 2], 2)

    recording = Recording(CONTRACT)
    asyncio.run(main(recording))

    assert ["submit", "call", "reply"] == kinds(recording.recorded.events)


def test_an_exception_of_the_stack_is_recorded_and_raised() -> None:
    """A rollout that raises ends its request with the error; an engine call that raises stays
    without a reply.
    """

    def broken(prompt: list[int], budget: int) -> Any:
        raise ConnectionError("server gone")

    client = Client(Engine())
    client.generate = broken
    recording = Recording(CONTRACT)
    with pytest.raises(ConnectionError, match="server gone"):
        wired(recording, client, [1, 2, 3])([1, 2, 3])

    assert ["submit", "call", "fault", "result"] == kinds(recording.recorded.events)
    assert isinstance(recording.recorded.events[-1], Result)
    line = broken.__code__.co_firstlineno + 1
    expected = f"ConnectionError: server gone (test_recorder.py:{line}, in broken)"
    assert expected == recording.recorded.events[-1].error


def test_a_block_that_records_nothing_is_an_error() -> None:
    """A recording that was not wired up cannot pass."""
    with pytest.raises(
        UsageError, match=r"Nothing was recorded: wrap the rollout function with trace\.rollout"
    ):
        with rollproof.record(CONTRACT):
            Client(Engine()).rollout([1, 2, 3])


def test_expected_failures_are_strict() -> None:
    """A listed fault does not raise; a listed check that passes does, and so does an id that does
    not exist.
    """
    with pytest.raises(ConformanceError) as error:
        with rollproof.record(CONTRACT) as trace:
            wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])
    failing = {result.id: "known" for result in trace.report.failed}

    assert "routes.rows" in str(error.value)
    with rollproof.record(CONTRACT, expected=failing) as trace:
        wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])
    with pytest.raises(ExpectationError, match=r"Expected to fail, but passing: routes\.rows\."):
        with rollproof.record(CONTRACT, expected={"routes.rows": "known"}) as trace:
            wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])
    with pytest.raises(UsageError, match=r"No check or family is named 'routes\.row'"):
        rollproof.record(CONTRACT, expected={"routes.row": "known"})


async def _tokens() -> AsyncIterator[int]:
    yield 1


def _ending(**fields: Any) -> Rollout:
    base = {
        "request_id": "r1",
        "prompt_ids": (1,),
        "response_ids": (2,),
        "finish_reason": FinishReason.STOP,
    }
    return Rollout(**{**base, **fields})


def _called(trace: Recording, **fields: Any) -> None:
    call = EngineCall(**{"request_id": "r1", "prompt_ids": (1,), "max_tokens": 1, **fields})
    trace.engine(lambda: 1, to_call=lambda: call, to_output=len)()


def _answered(trace: Recording, **fields: Any) -> None:
    output = EngineOutput(
        **{
            "token_ids": (1,),
            "logprobs": None,
            "routes": None,
            "finish_reason": FinishReason.STOP,
            **fields,
        }
    )
    call = EngineCall(request_id="r1", prompt_ids=(1,), max_tokens=1)
    trace.engine(lambda: 1, to_call=lambda: call, to_output=lambda _: output)()


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (
            lambda trace: trace.submit(to_request([1])) or trace.submit(to_request([1])),
            UsageError,
            "Request 'r1' is already open",
        ),
        (
            lambda trace: trace.result(request_id="r1"),
            UsageError,
            "Request 'r1' ends but was never submitted: .* Open requests: none",
        ),
        (
            lambda trace: trace.submit(to_request([1])) or trace.result(request_id="r2"),
            UsageError,
            r"Open requests: \['r1'\]",
        ),
        (
            lambda trace: trace.submit(7),
            SubjectError,
            r"The caller of submit\(\) must return a Request, not int 7",
        ),
        (
            lambda trace: trace.submit(Request(request_id="r", prompt_ids=[1, "2"])),
            SubjectError,
            r"prompt_ids\[1\] must be integers, not str '2'",
        ),
        (
            lambda trace: trace.submit(Request(request_id=1, prompt_ids=(1,))),
            SubjectError,
            "request_id must be str, not 1",
        ),
        (
            lambda trace: trace.result(_ending(response_ids=5)),
            SubjectError,
            "response_ids must be a sequence of integers, not int 5",
        ),
        (
            lambda trace: trace.result(_ending(logprobs=np.zeros((2, 2)))),
            SubjectError,
            "logprobs must be numbers or None on one axis",
        ),
        (
            lambda trace: trace.result(request_id=5),
            UsageError,
            r"result\(\) was called with a value that .* hold: request_id must",
        ),
        (
            lambda trace: trace.pause("nope"),
            UsageError,
            r"pause\(\) takes one of the modes \['abort', .*\], not 'nope'",
        ),
        (
            lambda trace: trace.observation("a", 5),
            SubjectError,
            "token_ids must be a sequence of integers, not int 5",
        ),
        (
            lambda trace: trace.observation(7, [5]),
            UsageError,
            r"observation\(\) was called with a value .*: request_id must be str, not 7",
        ),
        (
            lambda trace: trace.weights(1.5),
            UsageError,
            r"weights\(\) was called with a value .*: version must be int or str or null",
        ),
        (
            lambda trace: trace.abort(None),
            UsageError,
            r"abort\(\) was called with a value .*: wanted must be str",
        ),
        (
            lambda trace: trace.resume(server=3),
            UsageError,
            r"resume\(\) was called with a value .*: server_id must be str",
        ),
        (
            lambda trace: _called(trace, sampling=[1]),
            SubjectError,
            "to_call returned an unusable EngineCall: sampling must be a mapping",
        ),
        (
            lambda trace: _called(trace, prompt_ids=None),
            SubjectError,
            "prompt_ids of to_call's EngineCall must be a sequence of integers",
        ),
        (
            lambda trace: _called(trace, max_tokens="4"),
            SubjectError,
            "unusable EngineCall: max_tokens must be",
        ),
        (
            lambda trace: _answered(trace, token_ids=7),
            SubjectError,
            "to_output returned an unusable EngineOutput: token_ids must",
        ),
        (
            lambda trace: _answered(trace, finish_reason="done"),
            SubjectError,
            "unusable EngineOutput: finish_reason must be one of",
        ),
        (
            lambda trace: trace.engine(7, to_call=to_call, to_output=to_output),
            UsageError,
            r"engine\(\) takes a function as `function`, not 7",
        ),
        (
            lambda trace: trace.rollout(_tokens, to_request=to_request, to_record=len),
            UsageError,
            (
                r"rollout\(\) cannot record '_tokens': it is a generator\. Wrap the function that"
                r" collects its items"
            ),
        ),
        (
            lambda trace: trace.rollout(
                lambda prompt: _tokens(), to_request=to_request, to_record=len
            )([1]),
            UsageError,
            "A recorded call returned a generator. Wrap the function",
        ),
        (lambda trace: trace.result(), UsageError, "result.. needs a rollout, or the request_id"),
        (
            lambda trace: trace.report,
            UsageError,
            "There are no verdicts before the `with` block has ended",
        ),
        (
            lambda trace: trace.engine(len, to_call=lambda x: x, to_output=len)([1]),
            SubjectError,
            "to_call must return an EngineCall",
        ),
        (
            lambda trace: trace.engine(
                len, to_call=lambda x: EngineCall(prompt_ids=(1,), max_tokens=1), to_output=len
            )([1]),
            UsageError,
            "An engine call cannot be attributed",
        ),
        (
            lambda trace: trace.rollout(len, to_request=lambda x: x, to_record=len)([1]),
            SubjectError,
            "to_request must return a Request",
        ),
        (
            lambda trace: trace.rollout(len, to_request=to_request, to_record=lambda n: n)([1]),
            SubjectError,
            "to_record must return a Rollout",
        ),
        (
            lambda trace: trace.rollout(
                lambda p: Client(Engine()).rollout(p),
                to_request=to_request,
                to_record=to_record([9]),
            )([1]),
            SubjectError,
            "to_record returned the rollout of request 'r9' for request 'r1'",
        ),
    ],
)
def test_misuse_is_refused_with_a_message(
    misuse: Any, error: type[Exception], message: str
) -> None:
    """Each wrong call is an error of our own that says what was expected."""
    with pytest.raises(error, match=message):
        misuse(Recording(CONTRACT))


def test_a_contract_is_required() -> None:
    """What the stack promises cannot be left out or replaced by something else."""
    with pytest.raises(
        UsageError, match=r"record\(\) takes the Contract that the stack promises, not dict"
    ):
        rollproof.record({})  # type: ignore[arg-type]


def test_server_events_can_be_recorded() -> None:
    """Weights, pauses, resumes, aborts and observations become events of their kind."""
    recording = Recording(CONTRACT)
    recording.weights(3, server="s1", flushed=True)
    recording.pause("keep", clear_cache=True)
    recording.resume()
    recording.abort("r1")
    recording.observation("r1", [4, 5])

    assert ["weights", "pause", "resume", "abort", "observation"] == kinds(
        recording.recorded.events
    )


@pytest.mark.parametrize("wanted", ["r1", "handle-7", "*"])
def test_a_recorded_abort_does_not_blame_the_call_that_it_ended(wanted: str) -> None:
    """A recording does not know which calls an abort ended, so it blames nobody for those that
    ended.
    """
    with rollproof.record(CONTRACT) as trace:
        client = Client(Engine())
        answer = client.generate

        def aborted(prompt: list[int], budget: int) -> dict[str, Any]:
            trace.abort(wanted)
            return answer(prompt, budget)

        client.generate = trace.engine(aborted, to_call=to_call, to_output=to_output)
        trace.rollout(client.rollout, to_request=to_request, to_record=to_record([1, 2, 3]))(
            [1, 2, 3]
        )

    assert trace.report is not None
    assert () == trace.report.failed
    assert Verdict.UNKNOWN == next(
        result.verdict
        for result in trace.report.results
        if result.id == "lifecycle.abort-hits-target"
    )


def test_threads_may_record_at_once() -> None:
    """Events of many threads get distinct, consecutive indexes."""
    recording = Recording(CONTRACT)
    threads = [
        threading.Thread(
            target=lambda n=n: recording.submit(Request(request_id=f"r{n}", prompt_ids=(n,)))
        )
        for n in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert list(range(40)) == [event.index for event in recording.recorded.events]
    assert all(isinstance(event, Submit) for event in recording.recorded.events)


def test_the_reply_is_stamped_behind_its_call() -> None:
    """Wall time never runs backwards within a recording."""
    with rollproof.record(CONTRACT) as trace:
        wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])
    times = [event.time for event in trace.recorded.events]

    assert sorted(times) == times
    assert any(isinstance(event, Reply) for event in trace.recorded.events)


def test_a_handle_names_its_request() -> None:
    """The id of the request and a separator begin it, as on the fakes."""
    with rollproof.record(CONTRACT) as trace:
        wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])
        owners = [trace._owners_of(handle, (1, 2, 3)) for handle in ("r1-2", "r1", "other")]

    assert [("r1",), ("r1",), ("other",)] == owners


def test_requests_that_never_end_are_reported() -> None:
    """What the block left open would go unjudged without a word."""
    with pytest.raises(
        UsageError, match=r"Requests \['r1'\] were submitted and never ended within the block"
    ):
        with rollproof.record(CONTRACT) as trace:
            trace.submit(to_request([1]))


def test_an_engine_call_that_raises_excuses_the_error_of_its_request() -> None:
    """A stack whose engine is gone may hand over an error: nothing is wrong with it."""

    def gone(prompt: list[int], budget: int) -> Any:
        raise ConnectionError("server gone")

    client = Client(Engine())
    client.generate = gone
    with rollproof.record(CONTRACT, only=["lifecycle"]) as trace:
        with pytest.raises(ConnectionError):
            wired(trace, client, [1, 2, 3])([1, 2, 3])

    assert () == trace.report.failed


def test_checksums_and_adapters_can_be_told() -> None:
    """They are events of the trace, and a call says which adapter it names."""
    recording = Recording(CONTRACT)
    recording.weights(3, adapter="policy", base=0)
    recording.weights(4, delta_of=3)
    recording.checksums({"a": "1"}, version=4)
    recording.checksums({"a": "2"}, server="s1", adapter="policy")
    first, second, trainer, server = recording.recorded.events
    assert isinstance(first, Weights) and isinstance(second, Weights)
    assert ("policy", 0, None) == (first.adapter, first.base, first.delta_of)
    assert (None, None, 3) == (second.adapter, second.base, second.delta_of)
    assert isinstance(trainer, Checksums) and isinstance(server, Checksums)
    assert (4, None, {"a": "1"}) == (trainer.version, trainer.server_id, trainer.digests)
    assert (None, "s1", "policy") == (server.version, server.server_id, server.adapter)


@pytest.mark.parametrize(
    ("digests", "version", "message"),
    [
        ({}, 1, r"takes the checksum of each tensor by its name, not a dict of 0"),
        ("abc", 1, "takes the checksum of each tensor by its name, not 'abc'"),
        ({"a": 7}, 1, "takes texts: that of tensor 'a' is 7"),
        ({"a": ""}, 1, "takes texts: that of tensor 'a' is ''"),
        ({"a": "1"}, None, "of a trainer needs the version of its weights"),
    ],
)
def test_checksums_that_cannot_be_compared_are_refused(
    digests: Any, version: int | None, message: str
) -> None:
    """The message names the tensor."""
    with pytest.raises(UsageError, match=message):
        Recording(CONTRACT).checksums(digests, version=version)
