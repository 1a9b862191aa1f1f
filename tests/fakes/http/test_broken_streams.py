"""Streams that break off on a socket: what the client has of them is its own, and what it makes of
that is judged by what it sends next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from rollproof.core.case import EngineOptions
from rollproof.core.contract import Contract
from rollproof.core.events.rollout import Fault, Reply
from rollproof.core.records import FinishReason, Request, Rollout
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fault_plan import FaultPlan
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.trace_client import Teller
from rollproof.judging.judge import Judgement
from rollproof.verification.traces import judge
from tests.fakes.http.served import Served, served
from tests.fakes.http.test_trace_endpoints import CONTRACT, OPTIONS

BUDGET = 40
ENGINE = EngineOptions(step=0.001, prefix_cache=True)
SGLANG = replace(OPTIONS, engine=ENGINE)
VLLM = ServeOptions(
    flavour="vllm",
    model=OPTIONS.model,
    engine=ENGINE,
    contract=Contract(**{**CONTRACT, "dtype": "uint8", "logprobs": "raw"}),
)
SERVER_KINDS = [("sglang", SGLANG), ("sglang", replace(SGLANG, incremental=True)), ("vllm", VLLM)]


class Client:
    """Streams one request, breaks off its first call after ``leave`` events, and goes on: with the
    tokens that it has, or ``again``.
    """

    def __init__(self, server: Served, server_kind: str, *, incremental: bool) -> None:
        self.server, self.server_kind, self.delta = (
            server,
            server_kind,
            incremental or server_kind == "vllm",
        )
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def rollout(self, request: Request, *, leave: int | None, again: bool) -> Rollout:
        self._call(request, leave)
        if again:
            self.ids, self.logprobs = [], []
        while len(self.ids) < BUDGET:
            self._call(request, None)
        return Rollout(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            response_ids=tuple(self.ids),
            finish_reason=FinishReason.LENGTH,
            logprobs=np.array(self.logprobs),
        )

    def _call(self, request: Request, leave: int | None) -> None:
        prompt, budget = [*request.prompt_ids, *self.ids], BUDGET - len(self.ids)
        ids, logprobs, ended = [], [], False
        try:
            path, body = self._request_to(prompt, budget)
            with self.server.client.stream(
                "POST", path, json=body, headers=dict(Teller.headers(request.request_id))
            ) as reply:
                for number, event in enumerate(_events(reply)):
                    if number == leave:
                        break
                    new, values, ended = self._read(event)
                    ids, logprobs = (ids + new, logprobs + values) if self.delta else (new, values)
        except httpx.TransportError:
            pass
        assert ended or leave is not None or len(ids) < budget
        self.ids, self.logprobs = self.ids + ids, self.logprobs + logprobs

    def _request_to(self, prompt: list[int], budget: int) -> tuple[str, Any]:
        if self.server_kind == "sglang":
            return "/generate", {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": budget},
                "return_logprob": True,
                "stream": True,
            }
        return "/inference/v1/generate", {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": budget, "logprobs": 0},
            "stream": True,
        }

    def _read(self, event: Any) -> tuple[list[int], list[float], bool]:
        if self.server_kind == "sglang":
            meta = event["meta_info"]
            return (
                event["output_ids"],
                [pair[0] for pair in meta["output_token_logprobs"]],
                meta["finish_reason"] is not None,
            )
        (choice,) = event["choices"]
        logprobs = (
            [entry["logprob"] for entry in choice["logprobs"]["content"]]
            if choice["logprobs"]
            else []
        )
        return choice["token_ids"], logprobs, choice["finish_reason"] is not None


def _events(reply: httpx.Response) -> Iterator[Any]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def judged(server: Served, options: ServeOptions) -> tuple[Judgement, list[Any]]:
    trace = server.do(lambda: server.backend.recorder.trace(EngineBackend.header(options)))
    return judge(trace), list(trace.events)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("server_kind", "options"), SERVER_KINDS)
def test_a_client_that_leaves_a_stream_may_retain_its_tokens_or_start_again(
    server_kind: str, options: ServeOptions, again: bool
) -> None:
    """Wherever it leaves; the trace says that nobody received those replies completely, and the
    samples pass.
    """
    with served(server_kind, options) as server:
        teller = Teller(server.url)
        for number, leave in enumerate((0, 1, 3, 20, 38)):
            request = Request(
                request_id=f"r{number}",
                prompt_ids=(11, 12, 30 + number),
                max_tokens=BUDGET,
                want_routes=False,
            )
            teller.submit(request)
            client = Client(server, server_kind, incremental=options.incremental)
            teller.result(client.rollout(request, leave=leave, again=again))
        judgement, events = judged(server, options)
    assert () == judgement.failed, [
        result.findings for result in judgement.results if result.findings
    ]
    assert {
        "stitch.tokens",
        "stitch.resume-prompt",
        "stitch.logprobs-paired",
        "stitch.budget-granted",
    } <= {result.id for result in judgement.results if result.verdict == "pass"}
    unheard = [event for event in events if isinstance(event, Reply) and not event.delivered]
    assert 5 == len(unheard) + sum(
        isinstance(event, Fault) and event.what == "broken-stream" for event in events
    )


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["reset", "truncate", "wrong-length"])
@pytest.mark.parametrize(("server_kind", "options"), SERVER_KINDS)
def test_a_client_whose_stream_is_broken_may_retain_its_tokens_or_start_again(
    server_kind: str, options: ServeOptions, kind: str, again: bool
) -> None:
    """A planned fault of the wire; a reset may take along what had been sent before it."""
    plan = FaultPlan.from_dict({"faults": [{"do": kind, "nth": [1, 3], "keep": 0.6}]})
    with served(server_kind, options, plan=plan) as server:
        teller = Teller(server.url)
        for number in range(2):
            request = Request(
                request_id=f"r{number}",
                prompt_ids=(11, 12, 30 + number),
                max_tokens=BUDGET,
                want_routes=False,
            )
            teller.submit(request)
            teller.result(
                Client(server, server_kind, incremental=options.incremental).rollout(
                    request, leave=None, again=again
                )
            )
        judgement, events = judged(server, options)
    assert () == judgement.failed, [
        result.findings for result in judgement.results if result.findings
    ]
    assert ["lost-reply", "lost-reply"] == [
        event.what for event in events if isinstance(event, Fault)
    ]


@pytest.mark.parametrize(
    "wrong", ["stitch.tokens", "stitch.resume-prompt", "stitch.logprobs-paired"]
)
def test_a_client_with_wrong_tokens_of_a_broken_stream_is_detected(wrong: str) -> None:
    """A token of it that is lost in the sample, one that is sent twice, logprobs that are shifted
    by one.
    """

    class Wrong(Client):
        def _call(self, request: Request, leave: int | None) -> None:
            super()._call(request, leave)
            if leave is not None and wrong == "stitch.resume-prompt":
                self.ids.append(self.ids[-1])
                self.logprobs.append(self.logprobs[-1])
            if leave is not None and wrong == "stitch.logprobs-paired":
                self.logprobs = [*self.logprobs[1:], self.logprobs[0]]

        def rollout(self, request: Request, *, leave: int | None, again: bool) -> Rollout:
            sample = super().rollout(request, leave=leave, again=again)
            if wrong != "stitch.tokens":
                return sample
            assert leave is not None
            gone = leave - 1
            assert sample.logprobs is not None
            return replace(
                sample,
                response_ids=sample.response_ids[:gone] + sample.response_ids[gone + 1 :],
                logprobs=np.delete(sample.logprobs, gone),
            )

    with served("sglang", SGLANG) as server:
        teller = Teller(server.url)
        request = Request(
            request_id="r0", prompt_ids=(11, 12, 13), max_tokens=BUDGET, want_routes=False
        )
        teller.submit(request)
        teller.result(
            Wrong(server, "sglang", incremental=False).rollout(request, leave=6, again=False)
        )
        judgement, _ = judged(server, SGLANG)
    assert wrong in judgement.failed
