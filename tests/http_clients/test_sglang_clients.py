"""Clients that report their samples by a drop-in hook and nothing else, on real loopback."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from rollproof.core.events.rollout import Call, Submit, Weights
from rollproof.errors import ConformanceError
from rollproof.recording.served_fleet import ServedFleet
from tests.http_clients.sglang_clients import (
    CONTRACT,
    AiohttpClient,
    AsyncHttpxClient,
    CumulativeAsDelta,
    CutStreamIsStop,
    HttpxClient,
    LayersFirst,
    ReasonAsText,
    RequestsClient,
    RetryCountsBoth,
    StreamingClient,
)

PROMPTS = ([5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11])
ABORTS = {"actions": [{"do": "abort", "when": {"request": "r2", "tokens": 3}}]}
BREAKS: dict[str, Any] = {"faults": [{"do": "reset", "path": "/generate", "nth": [2]}]}
UPDATES = {
    "actions": [
        {"do": "sync", "when": {"request": "r1", "tokens": 2}},
        {"do": "sync", "when": {"request": "r3", "tokens": 3}},
    ]
}
FAULTS: dict[str, Any] = {
    "actions": ABORTS["actions"],
    "faults": [{"do": "status", "path": "/generate", "nth": [1], "after_engine": True}],
}


@pytest.mark.parametrize(
    ("client", "plan"),
    [
        (HttpxClient, ABORTS),
        (HttpxClient, FAULTS),
        (HttpxClient, UPDATES),
        (StreamingClient, ABORTS),
        (StreamingClient, BREAKS),
        (RequestsClient, ABORTS),
    ],
)
def test_a_correct_client_passes(client: type[HttpxClient], plan: dict[str, Any]) -> None:
    """Whatever the plan does to its calls; equal prompts of several rollouts are kept apart."""
    with ServedFleet("sglang", CONTRACT, plan=plan) as fleet:
        with closing(client(fleet.url)) as served:
            for prompt in PROMPTS:
                served.generate(prompt, 8)
    assert ["r1", "r2", "r3"] == [
        event.request.request_id for event in fleet.recorded.events if isinstance(event, Submit)
    ]
    passed = {result.id for result in fleet.report.results if result.verdict == "pass"}
    assert {"stitch.tokens", "stitch.logprobs-paired", "routes.content", "routes.rows"} <= passed


@pytest.mark.parametrize("client", [AsyncHttpxClient, AiohttpClient])
def test_correct_rollouts_that_run_at_once_pass(client: type[AsyncHttpxClient]) -> None:
    """Calls of tasks that a rollout starts are its own, also if another rollout has the prompt."""

    async def rollouts(url: str) -> None:
        served = client(url)
        await asyncio.gather(*(served.generate(prompt, 8) for prompt in PROMPTS))
        await served.close()

    with ServedFleet("sglang", CONTRACT, plan=ABORTS, servers=2) as fleet:
        asyncio.run(rollouts(fleet.url))
    calls = [event for event in fleet.recorded.events if isinstance(event, Call)]
    assert {"r1", "r2", "r3"} == {call.request_id for call in calls}
    assert not any(call.candidates for call in calls)


def test_a_plan_updates_the_weights_of_every_server() -> None:
    """Under labels of their own; a client that resumes has tokens of both weights."""
    with ServedFleet("sglang", CONTRACT, plan=UPDATES, servers=2) as fleet:
        fleet.update_weights("step-1")
        with closing(HttpxClient(fleet.url)) as served:
            for prompt in PROMPTS:
                served.generate(prompt, 8)
    loads = [event for event in fleet.recorded.events if isinstance(event, Weights)]
    assert ["default", "step-1", "step-2", "step-3"] == [
        load.label for load in loads if load.server_id == "s0"
    ]
    assert [0, 1, 2, 3] == [load.version for load in loads if load.server_id == "s1"]
    assert 2 == fleet.report.exercised["aborts mid-decode"]
    assert 5 == fleet.report.exercised["engine calls"]
    assert 2 == sum("(sync of 'r" in line and "happened" in line for line in fleet.plan_lines)


def test_correct_rollouts_of_threads_pass() -> None:
    """A thread has a context of its own, and so its rollout."""
    with ServedFleet("sglang", CONTRACT, plan=ABORTS) as fleet:
        with closing(HttpxClient(fleet.url)) as served, ThreadPoolExecutor(3) as threads:
            list(threads.map(served.generate, PROMPTS, [8, 8, 8]))
    assert 3 == fleet.report.exercised["requests"]


@pytest.mark.parametrize(
    ("client", "plan", "detected_by"),
    [
        (CumulativeAsDelta, {}, "stitch.tokens"),
        (CutStreamIsStop, BREAKS, "stitch.finish-reason"),
        (RetryCountsBoth, BREAKS, "stitch.tokens"),
        (LayersFirst, {}, "routes.content"),
        (ReasonAsText, ABORTS, "lifecycle.aborts-do-not-surface"),
    ],
)
def test_a_known_bug_is_detected(
    client: type[HttpxClient], plan: dict[str, Any], detected_by: str
) -> None:
    """By the check that detects it in virtual time, with nothing but the hook."""
    with pytest.raises(ConformanceError, match=f"FAIL  {detected_by}"):
        with ServedFleet("sglang", CONTRACT, plan=plan) as fleet:
            with closing(client(fleet.url)) as served:
                for prompt in PROMPTS:
                    served.generate(prompt, 8)
