"""Released clients of vLLM's server, unmodified, against a fake server over real HTTP. They are
skipped where they are not installed.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rollproof.core.contract import Contract
from rollproof.core.records import FinishReason, Request, Rollout
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.trace_client import Teller
from rollproof.verification.traces import judge
from tests.fakes.http.served import Served, served
from tests.fakes.http.test_trace_endpoints import OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore")  # a framework's own warnings are not ours to fix
PROMISED = Contract(
    rows="none",
    resume="engine",
    versions="none",
    logprobs="raw",
    abort_surfaces=True,
    kv_policy="keep",
    finish_reason=False,
)
VLLM = ServeOptions(flavour="vllm", model=OPTIONS.model, engine=OPTIONS.engine, contract=PROMISED)


def trl_client(url: str) -> Any:
    """TRL's ``VLLMClient``; it requires vLLM to be installed, of which it uses the transfer of
    weights alone.
    """
    pytest.importorskip(
        "trl", reason="trl is not installed: see harness/stacks/trl/requirements.txt"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.generation import vllm_client
    with mock.patch.object(vllm_client, "is_vllm_available", return_value=True):
        return vllm_client.VLLMClient(base_url=url)


def judgement(server: Served, requests: list[Request], answer: Any) -> Any:
    """The verdicts of a client's answer to these requests, one sample each."""
    teller = Teller(server.url)
    for number, request in enumerate(requests):
        logprobs = [values[0] for values in answer["logprobs"][number]]
        assert [[token] for token in answer["completion_ids"][number]] == answer[
            "logprob_token_ids"
        ][number]
        rollout = Rollout(
            request_id=request.request_id,
            prompt_ids=tuple(answer["prompt_ids"][number]),
            response_ids=tuple(answer["completion_ids"][number]),
            finish_reason=FinishReason.LENGTH,
            logprobs=np.array(logprobs),
        )
        teller.result(rollout)
    return judge(server.do(lambda: server.backend.recorder.trace(EngineBackend.header(VLLM))))


@pytest.mark.parametrize("chat", [False, True])
def test_trls_client_reads_replies_correctly(chat: bool) -> None:
    """Ids, logprobs, budgets and sampling parameters, of prompts in ids and of conversations;
    several prompts at once.
    """
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_ids=(11 + i, 12, 13),
            max_tokens=5,
            want_routes=False,
            sampling={"temperature": 0.7},
        )
        for i in range(3)
    ]
    with served("vllm", VLLM) as server:
        client = trl_client(server.url)
        for request in requests:
            Teller(server.url).submit(request)
        if chat:
            words = [
                [{"role": "user", "content": " ".join(f"w{token}" for token in request.prompt_ids)}]
                for request in requests
            ]
            answer = client.chat(words, max_tokens=5, temperature=0.7)
        else:
            answer = client.generate(
                [list(request.prompt_ids) for request in requests], max_tokens=5, temperature=0.7
            )
        verdicts = judgement(server, requests, answer)
    assert () == verdicts.failed, [
        result.findings for result in verdicts.results if result.findings
    ]
    assert {
        "stitch.prompt",
        "stitch.tokens",
        "stitch.logprobs-paired",
        "stitch.budget-granted",
        "stitch.sampling-params",
    } <= {result.id for result in verdicts.results if result.verdict == "pass"}


def test_the_other_requests_of_trls_client_are_answered() -> None:
    """Scores of given sequences, several samples of a prompt, its requests before it joins a
    transfer; the transfer itself needs a GPU.
    """
    with served("vllm", VLLM) as server:
        client = trl_client(server.url)
        scored = client.get_sequence_logprobs([[5, 6, 7, 8]], [2], top_logprobs=1)
        several = client.generate([[5, 6, 7]], n=3, max_tokens=4)
        assert {"backend": "nccl"} == client.get_server_info()["weight_transfer_config"]
        assert 1 == client.get_world_size()
        policy = server.backend.policy
    assert policy.logprobs(0, [5, 6, 7, 8], 2).tolist() == [
        values[0] for values in scored["actual_logprobs"][0]
    ]
    assert [[7], [8]] == scored["actual_token_ids"][0]
    assert ([[5, 6, 7]], 3) == (several["prompt_ids"], len(several["completion_ids"]))
