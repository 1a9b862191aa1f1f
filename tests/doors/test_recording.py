from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollproof
from rollproof.checks import Verdict
from rollproof.errors import ConformanceError, ExpectationError, SubjectError, TraceError, UsageError
from rollproof.recording import EngineCall, Recording
from rollproof.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.store import open_trace
from rollproof.trace import Call, Event, Reply, Result, Submit
from tests.support.building import coded_rows, contract

PROMPT = (1, 2, 3)
CONTRACT = contract(versions="none", finish_reason=True)


class Engine:
    """Answers two tokens and an abort at first, then the rest: what a stack under an existing test talks to."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompt: list[int], budget: int) -> dict[str, Any]:
        self.calls += 1
        ids = [10 + len(prompt) + i for i in range(2 if self.calls % 2 else budget)]
        rows = coded_rows(0, len(prompt) + len(ids) - 1, 0)
        reason = "abort" if self.calls % 2 else "length"
        return {"ids": ids, "logprobs": [-0.5 - 0.01 * i for i in range(len(ids))], "rows": rows, "reason": reason}


class Client:
    """A resume loop as users write it; ``repeat_rows`` is the field's most frequent fault."""

    def __init__(self, engine: Engine, *, repeat_rows: bool = False) -> None:
        self.generate = engine.generate
        self.repeat_rows = repeat_rows

    def rollout(self, prompt: list[int]) -> dict[str, Any]:
        ids: list[int] = []
        logprobs: list[float] = []
        rows: Any = None
        reason = "abort"
        while reason == "abort":
            answer = self.generate([*prompt, *ids], 4 - len(ids))
            new = answer["rows"]
            rows = new if rows is None else np.concatenate([rows, new if self.repeat_rows else new[len(rows) :]])
            ids += answer["ids"]
            logprobs += answer["logprobs"]
            reason = answer["reason"]
        return {"ids": ids, "logprobs": logprobs, "rows": rows, "reason": reason}


def to_request(prompt: list[int]) -> Request:
    return Request(request_id=f"r{prompt[0]}", prompt_ids=tuple(prompt), max_tokens=4)


def to_call(prompt: list[int], budget: int) -> EngineCall:
    return EngineCall(prompt_ids=tuple(prompt), max_tokens=budget)


def to_output(answer: dict[str, Any]) -> EngineOutput:
    return EngineOutput(
        token_ids=tuple(answer["ids"]),
        logprobs=np.array(answer["logprobs"]),
        routes=answer["rows"],
        finish_reason=FinishReason(answer["reason"]),
    )


def to_record(prompt: list[int]) -> Any:
    def record(native: dict[str, Any]) -> Rollout:
        return Rollout(
            request_id=f"r{prompt[0]}",
            prompt_ids=tuple(prompt),
            response_ids=tuple(native["ids"]),
            finish_reason=FinishReason(native["reason"]),
            logprobs=np.array(native["logprobs"]),
            routes=native["rows"],
        )

    return record


def wired(trace: Recording, client: Client, prompt: list[int]) -> Any:
    """The client's rollout function, recorded."""
    client.generate = trace.engine(client.generate, to_call=to_call, to_output=to_output)
    return trace.rollout(client.rollout, to_request=to_request, to_record=to_record(prompt))


def kinds(events: tuple[Event, ...]) -> list[str]:
    return [event.kind for event in events]


def test_a_correct_client_passes() -> None:
    """Calls, replies and results are recorded in order, judged, and nothing is raised; the canary is planted and seen."""
    with rollproof.record(CONTRACT) as trace:
        wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])

    assert ["submit", "call", "reply", "call", "reply", "result"] == kinds(trace.recorded.events)
    assert () == trace.report.failed
    assert trace.report.summary["pass"] > 10
    assert trace.report.canary is not None
    assert trace.report.canary.red


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
    """The block ends with an AssertionError whose text has the finding; the return value reached the test before."""
    with pytest.raises(ConformanceError, match=r"my test: \d+ checks: .*\n  FAIL  routes\.rows") as error:
        with rollproof.record(CONTRACT, name="my test") as trace:
            native = wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])

    assert isinstance(error.value, AssertionError)
    assert 4 == len(native["ids"])
    assert "routes.rows" in [result.id for result in trace.report.failed]


def test_async_code_and_parallel_requests_are_attributed() -> None:
    """Coroutines are awaited as before; two rollouts at once keep their calls apart though neither names its request."""

    class AsyncClient(Client):
        async def run(self, prompt: list[int]) -> dict[str, Any]:
            await asyncio.sleep(0)
            return self.rollout(prompt)

    async def main(trace: Recording) -> None:
        clients = [AsyncClient(Engine()), AsyncClient(Engine())]
        runs = []
        for client, prompt in zip(clients, ([1, 2, 3], [7, 8]), strict=True):
            client.generate = trace.engine(client.generate, to_call=to_call, to_output=to_output)
            runs.append(trace.rollout(client.run, to_request=to_request, to_record=to_record(prompt))(prompt))
        await asyncio.gather(*runs)

    with rollproof.record(CONTRACT) as trace:
        asyncio.run(main(trace))

    calls = [event for event in trace.recorded.events if isinstance(event, Call)]
    assert {("r1", (1, 2, 3)), ("r7", (7, 8))} == {
        (call.request_id, call.prompt_ids[: 3 if call.request_id == "r1" else 2]) for call in calls
    }


def test_a_handle_that_returns_an_awaitable_is_recorded_when_it_is_awaited() -> None:
    """`handle.method.remote(...)` is a plain function that returns an awaitable: the reply is recorded once it is there."""

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


def test_what_the_stack_raises_is_recorded_and_goes_on() -> None:
    """A rollout that raises ends its request with the error; an engine call that raises stays without a reply."""

    def broken(prompt: list[int], budget: int) -> Any:
        raise ConnectionError("server gone")

    client = Client(Engine())
    client.generate = broken
    recording = Recording(CONTRACT)
    with pytest.raises(ConnectionError, match="server gone"):
        wired(recording, client, [1, 2, 3])([1, 2, 3])

    assert ["submit", "call", "fault", "result"] == kinds(recording.recorded.events)
    assert isinstance(recording.recorded.events[-1], Result)
    assert "ConnectionError: server gone" == recording.recorded.events[-1].error


def test_an_exception_of_the_block_passes_and_the_trace_is_saved(tmp_path: Path) -> None:
    """The test's own failure is not replaced by verdicts; what was recorded until then is kept."""
    with pytest.raises(ZeroDivisionError):
        with rollproof.record(CONTRACT, save=tmp_path / "trace.json") as trace:
            wired(trace, Client(Engine(), repeat_rows=True), [1, 2, 3])([1, 2, 3])
            _ = 1 / 0

    assert 6 == len(list(open_trace(tmp_path / "trace.json")))


def test_a_block_that_records_nothing_is_an_error() -> None:
    """A recording that was not wired up cannot pass."""
    with pytest.raises(UsageError, match=r"Nothing was recorded: wrap the rollout function with trace\.rollout"):
        with rollproof.record(CONTRACT):
            Client(Engine()).rollout([1, 2, 3])


def test_expected_failures_are_strict() -> None:
    """A listed fault does not raise; a listed check that passes does, and so does an id that does not exist."""
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
    whole = {"request_id": "r1", "prompt_ids": (1,), "response_ids": (2,), "finish_reason": FinishReason.STOP}
    return Rollout(**{**whole, **fields})


def _called(trace: Recording, **fields: Any) -> None:
    call = EngineCall(**{"request_id": "r1", "prompt_ids": (1,), "max_tokens": 1, **fields})
    trace.engine(lambda: 1, to_call=lambda: call, to_output=len)()


def _answered(trace: Recording, **fields: Any) -> None:
    output = EngineOutput(**{"token_ids": (1,), "logprobs": None, "routes": None, "finish_reason": FinishReason.STOP, **fields})
    call = EngineCall(request_id="r1", prompt_ids=(1,), max_tokens=1)
    trace.engine(lambda: 1, to_call=lambda: call, to_output=lambda _: output)()


@pytest.mark.parametrize(
    ("misuse", "error", "told"),
    [
        (lambda trace: trace.submit(to_request([1])) or trace.submit(to_request([1])), UsageError, "Request 'r1' is already open"),
        (lambda trace: trace.result(request_id="r1"), UsageError, "Request 'r1' ends but was never submitted: .* Open are none"),
        (
            lambda trace: trace.submit(to_request([1])) or trace.result(request_id="r2"),
            UsageError,
            r"Open are \['r1'\]",
        ),
        (lambda trace: trace.submit(7), SubjectError, r"The caller of submit\(\) must return a Request, not int 7"),
        (
            lambda trace: trace.submit(Request(request_id="r", prompt_ids=[1])),
            SubjectError,
            "prompt_ids must be a tuple of ints of 64 bits",
        ),
        (lambda trace: trace.submit(Request(request_id=1, prompt_ids=(1,))), SubjectError, "request_id must be str, not 1"),
        (lambda trace: trace.result(_ending(response_ids=None)), SubjectError, "response_ids must be a tuple of ints .*, not NoneType"),
        (lambda trace: trace.result(_ending(logprobs=np.zeros((2, 2)))), SubjectError, "logprobs must be an array of rank 1 of floats"),
        (
            lambda trace: trace.result(request_id=5),
            UsageError,
            r"result\(\) was called with a value that .* hold: request_id must",
        ),
        (lambda trace: trace.pause("nope"), UsageError, r"pause\(\) takes one of the modes \['abort', .*\], not 'nope'"),
        (lambda trace: trace.observation("a", 5), SubjectError, "token_ids must be a sequence of integers, not int 5"),
        (lambda trace: trace.observation(7, [5]), UsageError, r"observation\(\) was called with a value .*: request_id must be str, not 7"),
        (lambda trace: trace.weights(1.5), UsageError, r"weights\(\) was called with a value .*: version must be int or null or str"),
        (lambda trace: trace.abort(None), UsageError, r"abort\(\) was called with a value .*: wanted must be str"),
        (lambda trace: trace.resume(server=3), UsageError, r"resume\(\) was called with a value .*: server_id must be str"),
        (lambda trace: _called(trace, sampling=[1]), SubjectError, "to_call returned an unusable EngineCall: sampling must be a mapping"),
        (lambda trace: _called(trace, prompt_ids=None), SubjectError, "prompt_ids of to_call's EngineCall must be a sequence of integers"),
        (lambda trace: _called(trace, max_tokens="4"), SubjectError, "unusable EngineCall: max_tokens must be"),
        (
            lambda trace: _answered(trace, token_ids=None),
            SubjectError,
            "to_output returned an unusable EngineOutput: token_ids must",
        ),
        (lambda trace: _answered(trace, finish_reason="done"), SubjectError, "unusable EngineOutput: finish_reason must be one of"),
        (
            lambda trace: trace.engine(7, to_call=to_call, to_output=to_output),
            UsageError,
            r"engine\(\) takes a function as `function`, not 7",
        ),
        (
            lambda trace: trace.rollout(_tokens, to_request=to_request, to_record=len),
            UsageError,
            r"rollout\(\) cannot record '_tokens': it is a generator\. Wrap the function that gathers its items",
        ),
        (
            lambda trace: trace.rollout(lambda prompt: _tokens(), to_request=to_request, to_record=len)([1]),
            UsageError,
            "A call that is recorded returned a generator. Wrap the function",
        ),
        (lambda trace: trace.result(), UsageError, "result.. needs a rollout, or the request_id"),
        (lambda trace: trace.report, UsageError, "The verdicts are there once the `with` block has ended"),
        (lambda trace: trace.engine(len, to_call=lambda x: x, to_output=len)([1]), SubjectError, "to_call must return an EngineCall"),
        (
            lambda trace: trace.engine(len, to_call=lambda x: EngineCall(prompt_ids=(1,), max_tokens=1), to_output=len)([1]),
            UsageError,
            "An engine call cannot be attributed",
        ),
        (lambda trace: trace.rollout(len, to_request=lambda x: x, to_record=len)([1]), SubjectError, "to_request must return a Request"),
        (
            lambda trace: trace.rollout(len, to_request=to_request, to_record=lambda n: n)([1]),
            SubjectError,
            "to_record must return a Rollout",
        ),
        (
            lambda trace: trace.rollout(lambda p: Client(Engine()).rollout(p), to_request=to_request, to_record=to_record([9]))([1]),
            SubjectError,
            "to_record returned the rollout of request 'r9' for request 'r1'",
        ),
    ],
)
def test_misuse_is_told(misuse: Any, error: type[Exception], told: str) -> None:
    """Each wrong call is an error of our own that says what was expected."""
    with pytest.raises(error, match=told):
        misuse(Recording(CONTRACT))


def test_a_contract_is_required() -> None:
    """What the stack promises cannot be left out or replaced by something else."""
    with pytest.raises(UsageError, match=r"record\(\) takes the Contract that the stack promises, not dict"):
        rollproof.record({})  # type: ignore[arg-type]


def test_what_happened_to_servers_can_be_told() -> None:
    """Weights, pauses, resumes, aborts and observations become events of their kind."""
    recording = Recording(CONTRACT)
    recording.weights(3, server="s1", flushed=True)
    recording.pause("keep", clear_cache=True)
    recording.resume()
    recording.abort("r1")
    recording.observation("r1", [4, 5])

    assert ["weights", "pause", "resume", "abort", "observation"] == kinds(recording.recorded.events)


@pytest.mark.parametrize("wanted", ["r1", "handle-7", "*"])
def test_an_abort_that_was_told_is_not_held_against_the_call_that_it_ended(wanted: str) -> None:
    """A recording does not know which calls an abort found, so it blames nobody for those that ended."""
    with rollproof.record(CONTRACT) as trace:
        client = Client(Engine())
        answer = client.generate

        def aborted(prompt: list[int], budget: int) -> dict[str, Any]:
            trace.abort(wanted)
            return answer(prompt, budget)

        client.generate = trace.engine(aborted, to_call=to_call, to_output=to_output)
        trace.rollout(client.rollout, to_request=to_request, to_record=to_record([1, 2, 3]))([1, 2, 3])

    assert trace.report is not None
    assert () == trace.report.failed
    assert Verdict.UNKNOWN == next(result.verdict for result in trace.report.results if result.id == "lifecycle.abort-hits-target")


def test_threads_may_record_at_once() -> None:
    """Events of many threads get distinct, consecutive indexes."""
    recording = Recording(CONTRACT)
    threads = [threading.Thread(target=lambda n=n: recording.submit(Request(request_id=f"r{n}", prompt_ids=(n,)))) for n in range(40)]
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


def test_requests_that_never_end_are_told() -> None:
    """What the block left open would go unjudged without a word."""
    with pytest.raises(UsageError, match=r"Requests \['r1'\] were submitted and never ended within the block"):
        with rollproof.record(CONTRACT) as trace:
            trace.submit(to_request([1]))


@pytest.mark.parametrize("save", [5, b"trace.json", "a\0b"])
def test_what_is_no_path_is_told_before_the_block(save: Any) -> None:
    """In our words, not in those of the file system."""
    with pytest.raises(UsageError, match=r"save must be a path, such as 'out/trace\.json', not "):
        rollproof.record(CONTRACT, save=save)


def test_a_place_that_cannot_be_written_to_is_told_before_the_block(tmp_path: Path) -> None:
    """A recording whose trace could not be saved does not begin; folders are made."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"Cannot write .*file/trace\.json: Not a directory"):
        rollproof.record(CONTRACT, save=tmp_path / "file" / "trace.json")
    with rollproof.record(CONTRACT, save=tmp_path / "deep" / "trace.json") as trace:
        wired(trace, Client(Engine()), [1, 2, 3])([1, 2, 3])

    assert 6 == len(list(open_trace(tmp_path / "deep" / "trace.json")))


def test_a_place_that_breaks_during_the_block_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's own exception, and the findings, are raised as ever, with a note; alone, the trouble is raised. The trace is kept."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(*, faulty: bool, broken: bool) -> None:
        with rollproof.record(CONTRACT, save=tmp_path / "out" / "trace.json") as trace:
            (tmp_path / "out").touch()
            wired(trace, Client(Engine(), repeat_rows=faulty), [1, 2, 3])([1, 2, 3])
            if broken:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        run(faulty=False, broken=True)
    (kept,) = tmp_path.glob("rollproof-*/trace.json")
    assert [f"The recorded trace could not be saved in its place: FileExistsError: [Errno 17] File exists: '{tmp_path}/out'"] == [
        note.removeprefix("rollproof: ").partition(". It was kept as ")[0] for note in error.value.__notes__
    ]
    assert 6 == len(list(open_trace(kept)))
    (tmp_path / "out").unlink()
    with pytest.raises(ConformanceError, match=r"routes\.rows") as findings:
        run(faulty=True, broken=False)
    assert "It was kept as " in findings.value.__notes__[0]
    (tmp_path / "out").unlink()
    with pytest.raises(TraceError, match=r"could not be saved in its place: .* It was kept as .*trace\.json"):
        run(faulty=False, broken=False)


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


class Pooled(Client):
    """Calls its engine in a thread of an executor, which has no context of the rollout."""

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        super().__init__(engine)
        self.pool = pool

    def rollout(self, prompt: list[int]) -> dict[str, Any]:
        made = self.generate
        self.generate = lambda *args: self.pool.submit(made, *args).result()
        try:
            return super().rollout(prompt)
        finally:
            self.generate = made


def _twins(trace: Recording, *, name_calls: bool) -> None:
    """Two rollouts of one prompt at once, whose calls a pool makes: the second begins when the first has made one call."""
    first, second = threading.Event(), threading.Event()
    names = {id(first): "a", id(second): "b"}

    def rollout(event: threading.Event) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            engine = Engine()

            def call(prompt: list[int], budget: int) -> EngineCall:
                return EngineCall(prompt_ids=tuple(prompt), max_tokens=budget, request_id=names[id(event)] if name_calls else None)

            def answer(prompt: list[int], budget: int) -> dict[str, Any]:
                found = engine.generate(prompt, budget)
                if event is first:
                    first.set()
                    assert second.wait(5)
                return {**found, "ids": [token + (100 if event is second else 0) for token in found["ids"]]}

            client = Client(engine)
            client.generate = trace.engine(answer, to_call=call, to_output=to_output)
            pooled = client.generate
            client.generate = lambda *args: pool.submit(pooled, *args).result()
            return client.rollout([1, 2, 3])

    def request(event: threading.Event) -> Request:
        return Request(request_id=names[id(event)], prompt_ids=(1, 2, 3), max_tokens=4)

    def record(event: threading.Event) -> Any:
        return lambda native: replace(to_record([1, 2, 3])(native), request_id=names[id(event)])

    def run(event: threading.Event) -> None:
        trace.rollout(rollout, to_request=request, to_record=record(event))(event)

    threads = [threading.Thread(target=run, args=(event,)) for event in (first, second)]
    threads[0].start()
    assert first.wait(5)
    threads[1].start()
    threads[1].join(5)
    second.set()
    threads[0].join(5)


@pytest.mark.parametrize("name_calls", [False, True])
def test_calls_that_cannot_be_attributed_are_not_judged(name_calls: bool) -> None:
    """Equal prompts and calls from threads without a context: the requests are unknown, unless calls name them; nobody is blamed."""
    with rollproof.record(CONTRACT, only=["stitch"]) as trace:
        _twins(trace, name_calls=name_calls)
    tokens = next(result for result in trace.report.results if result.id == "stitch.tokens")

    assert (Verdict.PASS if name_calls else Verdict.UNKNOWN) == tokens.verdict
    assert name_calls or "of which cannot be told whether they are this request's: give `request_id`" in tokens.reason


def test_distinct_prompts_are_attributed_from_any_thread() -> None:
    """Calls of an executor's threads are told by their prompts."""
    with ThreadPoolExecutor(2) as pool, rollproof.record(CONTRACT) as trace:
        for prompt in ([1, 2, 3], [4, 5, 6]):
            wired(trace, Pooled(Engine(), pool), prompt)(prompt)
    calls = [event for event in trace.recorded.events if isinstance(event, Call)]

    assert ["r1", "r1", "r4", "r4"] == [call.request_id for call in calls]


def test_twins_of_a_group_are_told_by_their_contexts() -> None:
    """Equal prompts are no trouble where each rollout makes its calls itself, or in tasks that it starts."""

    async def run(trace: Recording, name: str, *, child: bool) -> None:
        engine = Engine()

        async def answer(prompt: list[int], budget: int) -> dict[str, Any]:
            await asyncio.sleep(0)
            return engine.generate(prompt, budget)

        generate = trace.engine(answer, to_call=to_call, to_output=to_output)

        async def rollout(prompt: list[int]) -> dict[str, Any]:
            ids: list[int] = []
            answers: list[dict[str, Any]] = []
            while not answers or answers[-1]["reason"] == "abort":
                call = generate([*prompt, *ids], 4 - len(ids))
                answers.append(await asyncio.create_task(call) if child else await call)
                ids += answers[-1]["ids"]
            logprobs = [value for each in answers for value in each["logprobs"]]
            return {"ids": ids, "logprobs": logprobs, "rows": answers[-1]["rows"], "reason": answers[-1]["reason"]}

        def record(native: dict[str, Any]) -> Rollout:
            return replace(to_record([1, 2, 3])(native), request_id=name)

        request = Request(request_id=name, prompt_ids=(1, 2, 3), max_tokens=4)
        await trace.rollout(rollout, to_request=lambda prompt: request, to_record=record)([1, 2, 3])

    async def both(trace: Recording, *, child: bool) -> None:
        await asyncio.gather(*(run(trace, name, child=child) for name in "ab"))

    for child in (False, True):
        with rollproof.record(CONTRACT, only=["stitch.tokens"]) as trace:
            asyncio.run(both(trace, child=child))
        assert [Verdict.PASS] == [result.verdict for result in trace.report.results]
        assert [()] * 4 == [event.candidates for event in trace.recorded.events if isinstance(event, Call)]
