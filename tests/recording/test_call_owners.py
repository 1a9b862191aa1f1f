"""Recordings: to which request an engine call belongs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

import rollproof
from rollproof.core.events.rollout import Call
from rollproof.core.records import Request, Rollout
from rollproof.judging.checks import Verdict
from rollproof.recording.recorder import EngineCall, Recording
from tests.support.recorded_stack import (
    CONTRACT,
    Client,
    Engine,
    to_call,
    to_output,
    to_record,
    wired,
)


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
    """Two rollouts of one prompt at once, whose calls a pool makes: the second begins when the
    first has made one call.
    """
    first, second = threading.Event(), threading.Event()
    names = {id(first): "a", id(second): "b"}

    def rollout(event: threading.Event) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            engine = Engine()

            def call(prompt: list[int], budget: int) -> EngineCall:
                return EngineCall(
                    prompt_ids=tuple(prompt),
                    max_tokens=budget,
                    request_id=names[id(event)] if name_calls else None,
                )

            def answer(prompt: list[int], budget: int) -> dict[str, Any]:
                output = engine.generate(prompt, budget)
                if event is first:
                    first.set()
                    assert second.wait(5)
                return {
                    **output,
                    "ids": [token + (100 if event is second else 0) for token in output["ids"]],
                }

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
    """Equal prompts and calls from threads without a context: the requests are unknown, unless
    calls name them; nobody is blamed.
    """
    with rollproof.record(CONTRACT, only=["stitch"]) as trace:
        _twins(trace, name_calls=name_calls)
    tokens = next(result for result in trace.report.results if result.id == "stitch.tokens")

    assert (Verdict.PASS if name_calls else Verdict.UNKNOWN) == tokens.verdict
    assert (
        name_calls or "cannot be attributed to a request; begin their `request_id`" in tokens.reason
    )


def test_distinct_prompts_are_attributed_from_any_thread() -> None:
    """Calls of an executor's threads are attributed by their prompts."""
    with ThreadPoolExecutor(2) as pool, rollproof.record(CONTRACT) as trace:
        for prompt in ([1, 2, 3], [4, 5, 6]):
            wired(trace, Pooled(Engine(), pool), prompt)(prompt)
    calls = [event for event in trace.recorded.events if isinstance(event, Call)]

    assert ["r1", "r1", "r4", "r4"] == [call.request_id for call in calls]


def test_equal_prompts_of_a_group_are_attributed_by_their_contexts() -> None:
    """Equal prompts are no trouble where each rollout makes its calls itself, or in tasks that it
    starts.
    """

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
            return {
                "ids": ids,
                "logprobs": logprobs,
                "rows": answers[-1]["rows"],
                "reason": answers[-1]["reason"],
            }

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
        assert [()] * 4 == [
            event.candidates for event in trace.recorded.events if isinstance(event, Call)
        ]
