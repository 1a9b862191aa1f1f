"""A proxy sees the calls, the trainer's process has the samples: both files, joined."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollproof
from rollproof.core.contract import Contract
from rollproof.core.records import FinishReason, Request, Rollout
from rollproof.judging.checks import Verdict
from rollproof.store.merging import merge_traces
from tests.fakes.http.served import served
from tests.recording.proxied import judged, proxied
from tests.recording.test_proxy import options

CONTRACT = Contract(
    rows="none",
    resume="client",
    versions="none",
    logprobs="temperature-scaled",
    abort_surfaces=False,
    kv_policy="recompute",
)


def to_request(name: str, prompt: list[int]) -> Request:
    return Request(request_id=name, prompt_ids=tuple(prompt), max_tokens=4, want_routes=False)


def to_record(sample: dict[str, Any]) -> Rollout:
    return Rollout(request_id="", **sample)


@pytest.mark.parametrize(("lost", "failed"), [(0, ()), (1, ("stitch.tokens",))])
def test_calls_and_samples_of_two_processes_are_judged_together(
    tmp_path: Path, lost: int, failed: tuple[str, ...]
) -> None:
    """Each call names its request in a header; neither file alone has anything to judge."""

    async def main(url: str, recorder: rollproof.LiveRecorder) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:

            async def generate(name: str, prompt: list[int]) -> dict[str, Any]:
                ask = {
                    "input_ids": prompt,
                    "sampling_params": {"max_new_tokens": 4},
                    "return_logprob": True,
                }
                answer = await client.post("/generate", json=ask, headers=recorder.headers())
                reply = answer.json()
                ids = reply["output_ids"][lost:]
                pairs = reply["meta_info"]["output_token_logprobs"][lost:]
                return {
                    "prompt_ids": tuple(prompt),
                    "response_ids": tuple(ids),
                    "finish_reason": FinishReason.LENGTH,
                    "logprobs": [pair[0] for pair in pairs],
                }

            run = recorder.rollout(generate, to_request=to_request, to_record=to_record)
            # the same prompt: only the header tells them apart
            await asyncio.gather(*(run(f"r{index}", [5, 6]) for index in range(4)))
            assert {} == recorder.headers()

    with (
        served("sglang", options("sglang")) as server,
        proxied(server.url, tmp_path / "proxy") as proxy,
        rollproof.record_live(tmp_path / "trainer", CONTRACT) as recorder,
    ):
        asyncio.run(main(proxy.url, recorder))
    paths = [*proxy.proxy.paths, *recorder.paths]
    assert Verdict.PASS is not judged(*paths)["stitch.tokens"].verdict
    merge_traces(paths, tmp_path / "merged")
    results = judged(tmp_path / "merged")
    assert failed == tuple(name for name in results.failed if name == "stitch.tokens")
    assert lost or Verdict.PASS is results["stitch.tokens"].verdict
    assert lost or () == results.failed
