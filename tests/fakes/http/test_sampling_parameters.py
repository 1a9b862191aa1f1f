"""Whatever parameter of the distribution a client sends is in the trace: one that the servers left
out would be a finding about the client.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.events.rollout import Call
from rollproof.fakes.http.serve_options import ServeOptions
from tests.fakes.http.served import served

PARAMETERS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
}
CHAT = {"messages": [{"role": "user", "content": "w5"}], **PARAMETERS}


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        ("vllm", "/inference/v1/generate", {"token_ids": [5], "sampling_params": PARAMETERS}),
        ("vllm", "/v1/completions", {"prompt": [5], **PARAMETERS}),
        ("vllm", "/v1/chat/completions", CHAT),
        ("sglang", "/generate", {"input_ids": [5], "sampling_params": PARAMETERS}),
        ("sglang", "/v1/completions", {"prompt": [5], **PARAMETERS}),
        ("sglang", "/v1/chat/completions", CHAT),
    ],
)
def test_every_parameter_of_a_call_is_recorded(
    engine: str, path: str, body: dict[str, Any]
) -> None:
    """On each endpoint that samples."""
    with served(engine, ServeOptions(flavour=engine)) as server:
        assert 200 == server.client.post(path, json={"model": "m", **body}).status_code
        (call,) = [event for event in server.backend.recorder.events if isinstance(event, Call)]
        assert PARAMETERS.items() <= dict(call.sampling).items()
