"""What `rollout` reports of a function, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollproof import Contract, Request
from rollproof.contracts import trl
from rollproof.core.events.rollout import Call, Result, Submit
from rollproof.core.report_headers import ROLLOUT_HEADER
from rollproof.errors import ConformanceError, ExtraError, SubjectError, UsageError
from rollproof.http_clients import (
    aiohttp_trace,
    headers,
    httpx_hooks,
    internal,
    openai_async_http_client,
    openai_http_client,
    requests_adapter,
    rollout,
)
from rollproof.recording.served_fleet import ServedFleet

CONTRACT = Contract(
    rows="none",  # type: ignore[arg-type]  # text, as users write it
    resume="client",  # type: ignore[arg-type]
    versions="none",  # type: ignore[arg-type]
    logprobs="none",  # type: ignore[arg-type]
    abort_surfaces=False,
    kv_policy="recompute",  # type: ignore[arg-type]
)


def fleet_of(contract: Contract = CONTRACT, **options: Any) -> ServedFleet:
    return ServedFleet("sglang", contract, **options)


def call(url: str, prompt: list[int], tokens: int = 4) -> list[int]:
    """One call of a client with the hook; the tokens of its reply."""
    with httpx.Client(event_hooks=httpx_hooks()) as client:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens}}
        sampled: list[int] = client.post(f"{url}/generate", json=body).json()["output_ids"]
    return sampled


def test_a_proxy_of_the_environment_is_not_used_for_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # discard: nobody answers there
    monkeypatch.setenv("NO_PROXY", "internal.example")
    with fleet_of() as fleet:
        assert os.environ["NO_PROXY"].split(",")[0] == "internal.example"
        rollout(sample_of)(fleet.url, [5, 6, 7])
    assert os.environ["NO_PROXY"] == "internal.example"
    assert fleet.report.exit_code != 1


def sample_of(url: str, prompt: list[int], tokens: int = 4) -> dict[str, Any]:
    return {
        "prompt_ids": prompt,
        "response_ids": call(url, prompt, tokens),
        "finish_reason": "length",
    }


def results_of(fleet: ServedFleet) -> list[Result]:
    return [event for event in fleet.recorded.events if isinstance(event, Result)]


def owners(fleet: ServedFleet) -> list[tuple[str, tuple[str, ...], bool]]:
    return [
        (event.request_id, event.candidates, event.internal)
        for event in fleet.recorded.events
        if isinstance(event, Call)
    ]


def test_without_a_fake_server_a_function_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production nothing is tagged, and what the function returns is not looked at."""
    monkeypatch.delenv("ROLLPROOF_URL", raising=False)
    monkeypatch.delenv("ROLLPROOF_SERVERS", raising=False)
    seen: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200)

    @rollout
    def generate() -> str:
        with httpx.Client(
            transport=httpx.MockTransport(answer), event_hooks=httpx_hooks()
        ) as client:
            client.get("https://example.org/v1")
        return "no sample"

    assert "no sample" == generate()
    assert [False] == [ROLLOUT_HEADER in each for each in seen]


def test_calls_of_other_hosts_are_not_tagged() -> None:
    """Only the servers of the environment learn of the rollout; its names of this machine count."""
    with fleet_of() as fleet:
        port = fleet.url.rpartition(":")[2]
        assert {} == headers(fleet.url)

        @rollout
        def generate() -> Any:
            assert {} == headers("https://api.openai.com/v1/completions")
            assert {} == headers("http://127.0.0.1:1/generate")
            assert {} == headers("no url")
            assert [ROLLOUT_HEADER] == list(headers(f"http://localhost:{port}/generate"))
            return sample_of(fleet.url, [5, 6])

        generate()


def test_the_openai_client_is_judged() -> None:
    """Sync and async, against fake vLLM servers, at the address that the environment names."""
    openai = pytest.importorskip("openai", reason="of the dependency group test")

    def to_record(completion: Any) -> dict[str, Any]:
        (choice,) = completion.choices
        return {
            "prompt_ids": choice.prompt_token_ids,
            "response_ids": choice.token_ids,
            "logprobs": choice.logprobs.token_logprobs,
            "finish_reason": choice.finish_reason,
        }

    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 6,
        "logprobs": 0,
        "extra_body": {"return_token_ids": True},
    }
    contract = replace(CONTRACT, logprobs="raw")
    with ServedFleet("vllm", contract) as fleet:
        with openai.OpenAI(http_client=openai_http_client()) as client:

            @rollout(to_record=to_record)
            def generate(prompt: list[int]) -> Any:
                return client.completions.create(prompt=prompt, **asked)

            assert "length" == generate([5, 6, 7]).choices[0].finish_reason

        async def main() -> None:
            async with openai.AsyncOpenAI(http_client=openai_async_http_client()) as client:

                @rollout(to_record=to_record)
                async def generate(prompt: list[int]) -> Any:
                    return await client.completions.create(prompt=prompt, **asked)

                await asyncio.gather(generate([5, 6, 7]), generate([5, 6, 7]))

        asyncio.run(main())
    assert {"r1", "r2", "r3"} == {result.request_id for result in results_of(fleet)}
    passed = {result.id for result in fleet.report.results if result.verdict == "pass"}
    assert {"stitch.tokens", "stitch.prompt", "stitch.logprobs-paired"} <= passed


def test_a_dropped_sample_and_an_error_end_their_requests() -> None:
    """None is a drop, an exception passes unchanged; one before the first call ends nothing."""
    with fleet_of(replace(CONTRACT, partial_off="dropped"), only=["stitch"]) as fleet:

        @rollout
        def generate(error: type[Exception] | None, first: bool) -> None:
            if first:
                call(fleet.url, [5, 6])
            if error is not None:
                raise error("too bad")

        generate(None, True)
        for first in (True, False):
            with pytest.raises(KeyError, match="too bad"):
                generate(KeyError, first)
        rollout(sample_of)(fleet.url, [5, 6])
    drop, failed, delivered = results_of(fleet)
    assert (None, None) == (drop.rollout, drop.error)
    assert "KeyError: 'too bad'" in str(failed.error)
    assert delivered.rollout is not None


def test_a_rollout_that_a_dead_server_ends_is_reported() -> None:
    """A server that is dead to its calls still takes what the client reports."""
    plan = {"actions": [{"do": "kill", "when": {"request": "r1", "tokens": 2}, "steps": 10**6}]}
    with pytest.raises(UsageError, match="no rollout delivered a sample"):
        with fleet_of(plan=plan) as fleet:
            for prompt in ([5, 6], [7, 8]):
                with pytest.raises(httpx.TransportError):
                    rollout(sample_of)(fleet.url, prompt)
    (result,) = results_of(fleet)
    assert ("r1", True) == (result.request_id, result.error is not None)


def test_a_rollout_that_its_caller_cancels_is_not_judged() -> None:
    """That is no error of the stack, and no sample that it dropped."""

    async def main(fleet: ServedFleet) -> None:
        @rollout
        async def generate() -> Any:
            call(fleet.url, [5, 6])
            await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate(), 0.5)

    with fleet_of() as fleet:
        asyncio.run(main(fleet))
        rollout(sample_of)(fleet.url, [7, 8])
    assert ["r2"] == [result.request_id for result in results_of(fleet)]


def test_an_object_with_an_async_call_is_awaited() -> None:
    """As a coroutine function is."""

    class Generate:
        async def __call__(self, url: str) -> Any:
            return await asyncio.to_thread(sample_of, url, [5, 6])

    with fleet_of(only=["stitch.tokens"]) as fleet:
        asyncio.run(rollout(Generate())(fleet.url))


def test_calls_for_another_purpose_are_no_part_of_a_sample() -> None:
    """Within `internal()` they are nobody's."""
    with fleet_of() as fleet:

        @rollout
        def generate() -> Any:
            with internal():
                call(fleet.url, [99, 98])
            sample = sample_of(fleet.url, [5, 6, 7])
            with internal():
                call(fleet.url, [5, 6, 7])
            return sample

        generate()
        with internal():
            call(fleet.url, [1])
    assert [("", (), True), ("r1", (), False), ("", (), True), ("", (), True)] == owners(fleet)
    assert "stitch.tokens" in {each.id for each in fleet.report.results if each.verdict == "pass"}


def test_a_call_with_another_prompt_leaves_its_request_unknown() -> None:
    """It may be that of a judge, or a mistake: nothing is guessed, and nothing fails."""
    with pytest.raises(UsageError, match="No check could be judged"):
        with fleet_of(only=["stitch.tokens", "stitch.resume-prompt"]) as fleet:

            @rollout
            def generate() -> Any:
                sample = sample_of(fleet.url, [5, 6, 7])
                call(fleet.url, [99, 98])
                return sample

            generate()
    assert [("r1", (), False), ("r1", ("r1",), False)] == owners(fleet)
    assert () == fleet.report.failed


def test_a_rollout_that_begins_with_a_call_for_another_purpose_is_refused() -> None:
    """The server took its prompt for that of the request; the sample shows that it is not."""
    with fleet_of() as fleet:

        @rollout
        def generate() -> Any:
            call(fleet.url, [99, 98])
            return sample_of(fleet.url, [5, 6, 7])

        with pytest.raises(UsageError, match=r"within `with internal\(\):`"):
            generate()
        rollout(sample_of)(fleet.url, [5, 6])
    assert ["r2"] == [result.request_id for result in results_of(fleet)]


def test_a_prompt_that_no_call_sent_is_a_finding() -> None:
    """A sample whose prompt is not the one that was sent."""
    with pytest.raises(ConformanceError, match=r"FAIL  stitch\.prompt"):
        with fleet_of() as fleet:

            @rollout
            def generate() -> Any:
                return {**sample_of(fleet.url, [5, 6, 7]), "prompt_ids": [6, 7]}

            generate()


def test_a_request_that_is_named_has_a_budget() -> None:
    """With `to_request` the budget is judged: a call may not sample more than is left of it."""

    def to_request(url: str, prompt: list[int], tokens: int) -> Request:
        return Request(request_id="mine", prompt_ids=tuple(prompt), max_tokens=tokens)

    with pytest.raises(ConformanceError, match=r"FAIL  stitch\.budget-granted"):
        with fleet_of() as fleet:

            @rollout(to_request=to_request)
            def generate(url: str, prompt: list[int], tokens: int) -> Any:
                return sample_of(url, prompt, tokens + 1)

            generate(fleet.url, [5, 6], 4)
    (submitted,) = [event for event in fleet.recorded.events if isinstance(event, Submit)]
    assert "mine" == submitted.request.request_id


def test_a_contract_of_several_turns_needs_the_request() -> None:
    """Only the request says what the environment answers."""
    fleet = fleet_of(replace(CONTRACT, multi_turn=True, loss_mask=True))
    with pytest.raises(UsageError, match=r"only the request says\s+how"), fleet:
        rollout(sample_of)(fleet.url, [5, 6])
    assert [] == results_of(fleet)


@pytest.mark.parametrize(
    ("native", "words"),
    [
        ("text", "got is a str without prompt_ids and response_ids"),
        ([{"prompt_ids": [1]}], "got is a list of 1 without prompt_ids"),
        ({"prompt_ids": [1], "response_ids": [2], "reward": 1.0}, "got is a dict with reward"),
        ({"prompt_ids": [1], "response_ids": "w1"}, "unusable Rollout: response_ids"),
    ],
)
def test_what_is_no_sample_is_refused(native: Any, words: str) -> None:
    """With the fields that one has; a field under another name is not taken for a lost one."""
    with pytest.raises(SubjectError, match=words), fleet_of() as fleet:

        @rollout
        def generate() -> Any:
            call(fleet.url, [1])
            return native

        generate()


def test_a_sample_without_a_call_is_refused() -> None:
    """With the host that was called instead."""
    with pytest.raises(UsageError, match=r"It called 127\.0\.0\.1:9, which is another host"):
        with fleet_of():

            @rollout
            def generate() -> Any:
                with pytest.raises(httpx.ConnectError):
                    call("http://localhost:9", [1])
                return {"prompt_ids": [1], "response_ids": [2]}

            generate()


def test_calls_of_a_client_without_a_hook_make_no_sample() -> None:
    """They reach the server, and nothing says whose they are."""
    with pytest.raises(UsageError, match="made no call to the fake servers"), fleet_of() as fleet:

        @rollout
        def generate() -> Any:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
            ids = httpx.post(f"{fleet.url}/generate", json=body).json()["output_ids"]
            return {"prompt_ids": [1], "response_ids": ids}

        generate()


def test_a_server_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report cannot be delivered."""
    monkeypatch.setenv("ROLLPROOF_URL", "http://127.0.0.1:9")

    @rollout(to_request=lambda: Request(request_id="r", prompt_ids=(1,)))
    def generate() -> None: ...

    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9 cannot be reached to report the submit"):
        generate()


def test_functions_that_return_later_are_refused() -> None:
    """A generator, a class, and what is no function."""

    def stream() -> Any:
        yield 1

    for wrong in (stream, Request, 7):
        with pytest.raises(UsageError, match=r"rollout\(\) "):
            rollout(wrong)  # type: ignore[type-var]  # what is refused


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (openai_http_client, "openai"),
        (openai_async_http_client, "openai"),
        (requests_adapter, "requests"),
        (aiohttp_trace, "aiohttp"),
    ],
)
def test_a_package_that_is_missing_is_named(
    make: Callable[[], object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install; no other hook needs it."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraError, match=f"pip install {package}"):
        make()


def test_importing_the_hooks_loads_no_client() -> None:
    """Each is loaded when its hook is made."""
    import subprocess

    program = (
        "import sys, rollproof.http_clients; print([name for name in ('httpx', 'openai', 'aiohttp',"
        " 'requests', 'starlette', 'uvicorn') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert "[]\n" == done.stdout


def test_a_preset_is_a_contract_to_serve() -> None:
    """Without routes, as TRL's."""
    with fleet_of(trl(), only=["stitch.tokens"]) as fleet:
        rollout(sample_of)(fleet.url, [5, 6])
