"""Records what SGLang's own HTTP server answers, for the fake server to be compared with.

``python -m tests.fakes.http.record_sglang [KIND...]`` writes those kinds, by itself all. Needs
SGLang (`nox -s engines` makes an environment with it) and takes a few minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.fakes.http.recording import Exchange, Order, Server, record

PROMPT = list(range(5, 15))
SAMPLING = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
LONG = {**SAMPLING, "max_new_tokens": 200}
BODY = {
    "input_ids": PROMPT,
    "sampling_params": SAMPLING,
    "return_logprob": True,
    "return_routed_experts": True,
    "rid": "mine-1",
}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "w5 w6 w7"}],
    "max_tokens": 3,
    "logprobs": True,
    "return_routed_experts": True,
}
CHATS = "/v1/chat/completions"
DISK = "/update_weights_from_disk"
CHAT_ORDERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"n": 2},
    {"top_logprobs": 2},
    {"logprobs": False, "return_routed_experts": False},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "n": 2},
    {"return_meta_info": True},
    {"return_meta_info": True, "stream": True},
    {"routed_experts_start_len": 2},
    {"rid": "mine-chat", "temperature": 0.0, "seed": 3, "stop": ["w7"]},
    {"max_completion_tokens": 2},
    {"model": "another"},
    {"return_prompt_token_ids": True},
    {
        "messages": [
            {"role": "system", "content": "w4"},
            {"role": "user", "content": [{"type": "text", "text": "w5"}]},
        ]
    },
)
"""Changes of ``CHAT`` that the server takes."""
CHATS_REFUSED: tuple[Mapping[str, Any], ...] = (
    {},
    {"model": "tiny", "messages": []},
    {"model": "tiny", "messages": "w5"},
    {"model": "tiny", "messages": [{"role": "nobody", "content": "w5"}]},
    {**CHAT, "max_tokens": 0},
    {**CHAT, "max_tokens": 5000},
    {**CHAT, "temperature": -1},
    {**CHAT, "n": 0},
    {**CHAT, "top_logprobs": 2, "logprobs": False},
    {**CHAT, "messages": [{"role": "user", "content": "w5 " * 600}]},
    {**CHAT, "routed_experts_start_len": 100},
)
COMPLETION = {"model": "tiny", "prompt": "w5 w6 w7", "max_tokens": 3, "ignore_eos": True}
COMPLETION_ORDERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"prompt": PROMPT, "logprobs": 1, "return_routed_experts": True},
    {"prompt": [PROMPT, PROMPT]},
    {"prompt": ["w5", "w6 w7"], "n": 2},
    {"echo": True, "logprobs": 0},
    {"stream": True, "logprobs": 1, "return_routed_experts": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 1, "temperature": 0.0, "seed": 5, "rid": "mine-completion"},
    {"max_tokens": 0},
    {"return_meta_info": True, "return_routed_experts": True},
)
COMPLETIONS_REFUSED: tuple[Mapping[str, Any], ...] = (
    {},
    {"model": "tiny", "prompt": []},
    {"model": "tiny", "prompt": ""},
    {**COMPLETION, "max_tokens": 5000},
    {**COMPLETION, "prompt": PROMPT * 60},
    {**COMPLETION, "logprobs": -1},
)
GENERATED: tuple[Mapping[str, Any], ...] = (
    {"sampling_params": {**SAMPLING, "max_new_tokens": 0}},
    {"sampling_params": {**SAMPLING, "max_new_tokens": 1}},
    {"sampling_params": {**SAMPLING, "max_new_tokens": 5000}},
    {"sampling_params": {**SAMPLING, "temperature": -1.0}},
    {"sampling_params": {**SAMPLING, "top_p": 2.0}},
    {"sampling_params": {**SAMPLING, "no_such_parameter": 1}},
    {"no_such_field": 1},
    {"logprob_start_len": 0, "top_logprobs_num": 2},
    {"input_ids": [PROMPT, PROMPT], "rid": ["more-a", "more-b"]},
    {"input_ids": None, "text": "w5 w6"},
    {"stream": True, "sampling_params": {**SAMPLING, "n": 2}},
    {"stream": True, "input_ids": [5] * 600},
)
"""Changes of ``WHOLE``."""


def exchanges(server: Server, other: Path) -> Iterator[tuple[str, list[Exchange]]]:
    """Every kind of request by name, each as the exchanges that belong to it."""
    send_json = server.send_json
    yield (
        "generate",
        [
            send_json("POST", "/generate", BODY),
            send_json("POST", "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING}),
            send_json(
                "POST", "/generate", {**BODY, "rid": "mine-2", "routed_experts_start_len": 8}
            ),
            send_json(
                "POST", "/generate", {**BODY, "rid": "mine-3", "routed_experts_start_len": 11}
            ),
            send_json("POST", "/generate", {**BODY, "rid": "mine-4", "input_ids": []}),
            send_json("POST", "/generate", {**BODY, "rid": "mine-5", "input_ids": [5] * 600}),
            send_json(
                "POST",
                "/generate",
                {**BODY, "rid": "mine-6", "sampling_params": {**SAMPLING, "n": 2}},
            ),
        ],
    )
    yield (
        "generate_stream",
        [send_json("POST", "/generate", {**BODY, "rid": "mine-7", "stream": True})],
    )
    yield (
        "abort",
        [
            *server.during(_running("cut-1"), [("POST", "/abort_request", {"rid": "cut-1"})]),
            send_json("POST", "/abort_request", {"rid": "nobody"}),
        ],
    )
    pause = ("POST", "/pause_generation", {"mode": "retract"})
    resume = ("POST", "/continue_generation", {"torch_empty_cache": False})
    yield "pause_continue", server.during(_running("held-1"), [pause, resume])
    yield (
        "flush_cache",
        [
            send_json("POST", "/flush_cache"),
            *server.during(
                _running("held-2"),
                [("POST", "/flush_cache", None), ("POST", "/abort_request", {"abort_all": True})],
            ),
        ],
    )
    yield (
        "update_weight_version",
        [
            send_json(
                "POST", "/update_weight_version", {"new_version": "w1", "abort_all_requests": False}
            ),
            *server.during(
                _running("cut-2"), [("POST", "/update_weight_version", {"new_version": "w2"})]
            ),
            send_json("POST", "/update_weight_version", {}),
        ],
    )
    yield (
        "get_weight_version",
        [send_json("GET", "/get_weight_version"), send_json("GET", "/weight_version")],
    )
    yield (
        "update_weights_from_disk",
        [
            send_json(
                "POST",
                "/update_weights_from_disk",
                {"model_path": str(other), "weight_version": "w3"},
            ),
            send_json("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
        ],
    )
    yield "health", [send_json("GET", "/health"), send_json("GET", "/health_generate")]
    yield "loads", [send_json("GET", "/v1/loads"), send_json("GET", "/get_load")]
    yield (
        "chat",
        [
            send_json("POST", "/v1/chat/completions", CHAT),
            send_json("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        ],
    )
    yield (
        "errors",
        [
            send_json("GET", "/no_such_endpoint"),
            send_json("POST", "/generate", {}),
            send_json("GET", "/generate_nothing"),
        ],
    )
    yield "chat_more", [send_json("POST", CHATS, {**CHAT, **changed}) for changed in CHAT_ORDERS]
    yield "chat_bad", [send_json("POST", CHATS, body) for body in CHATS_REFUSED]
    yield (
        "chat_abort",
        server.during(_running("cut-3", chat=True), [("POST", "/abort_request", {"rid": "cut-3"})]),
    )
    yield (
        "completions",
        [
            send_json("POST", "/v1/completions", {**COMPLETION, **changed})
            for changed in COMPLETION_ORDERS
        ],
    )
    yield (
        "completions_bad",
        [send_json("POST", "/v1/completions", body) for body in COMPLETIONS_REFUSED],
    )
    yield (
        "generate_more",
        [
            send_json("POST", "/generate", {**BODY, "rid": f"more-{i}", **changed})
            for i, changed in enumerate(GENERATED)
        ],
    )
    yield (
        "pause_modes",
        [
            exchange
            for mode in ("abort", "retract", "in_place")
            for exchange in _paused(server, mode)
        ],
    )
    yield (
        "pause_odd",
        [
            send_json("POST", "/continue_generation", {}),
            send_json("POST", "/pause_generation", {"mode": "sleep"}),
            send_json("POST", "/pause_generation", {"mode": "abort"}),
            send_json("POST", "/pause_generation", {"mode": "in_place"}),
            send_json("POST", "/continue_generation", {"torch_empty_cache": False}),
            send_json("POST", "/pause_generation", {}),
            send_json("POST", "/continue_generation", {"torch_empty_cache": False}),
        ],
    )
    yield (
        "update_in_place",
        server.during(
            _running("held-3"),
            [
                ("POST", "/pause_generation", {"mode": "in_place"}),
                ("POST", DISK, _previous_recording(other)),
                resume,
            ],
        ),
    )
    yield (
        "weights_more",
        [
            send_json("POST", DISK, {}),
            send_json("POST", "/update_weights_from_tensor", {}),
            send_json("POST", "/update_weights_from_distributed", {}),
            send_json("POST", "/init_weights_update_group", {}),
            send_json("POST", "/begin_weight_update", {}),
            send_json("POST", "/end_weight_update", {}),
            send_json(
                "POST", "/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3}
            ),
            send_json("POST", "/get_weights_by_name", {"name": "nothing"}),
        ],
    )
    yield (
        "info",
        [
            send_json("GET", path)
            for path in (
                "/get_model_info",
                "/model_info",
                "/get_server_info",
                "/server_info",
                "/v1/models",
                "/v1/models/nobody",
                "/ping",
            )
        ],
    )
    yield (
        "bodies",
        [
            server.send("POST", "/generate", "{"),
            server.send("POST", "/generate", "[1]"),
            server.send("POST", CHATS, "{"),
            server.send("POST", CHATS, "{}", kind="text/plain"),
            send_json("GET", "/generate"),
            send_json("GET", CHATS),
            send_json("POST", "/abort_request", {}),
            send_json("POST", "/abort_request", {"abort_all": True}),
        ],
    )


def _paused(server: Server, mode: str) -> list[Exchange]:
    """A pause of a mode with a call in flight: a flush meanwhile, and the end of the pause."""
    orders: list[Order] = [
        ("POST", "/pause_generation", {"mode": mode}),
        ("POST", "/flush_cache", None),
        ("POST", "/continue_generation", {"torch_empty_cache": False}),
    ]
    return server.during(_running(f"held-{mode}"), orders)


def _previous_recording(other: Path) -> dict[str, Any]:
    return {
        "model_path": str(other),
        "weight_version": "w4",
        "flush_cache": False,
        "abort_all_requests": False,
    }


def main() -> None:
    """Start the server, send the requests, write the answers, stop it."""
    record("sglang", f"sglang {metadata.version('sglang')}", _command, exchanges, {})


def _command(model: Path, port: int) -> list[str]:
    numbers = {"--port": port, "--context-length": 512, "--max-total-tokens": 4096}
    return [
        *(
            "-m",
            "rollproof.engines.sglang.sglang_server",
            "--model-path",
            str(model),
            "--dtype",
            "float32",
            "--weight-version",
            "w0",
        ),
        *(word for name, number in numbers.items() for word in (name, str(number))),
        *("--enable-return-routed-experts", "--log-level", "warning"),
    ]


def _running(rid: str, *, chat: bool = False) -> Order:
    """A long call, to do something meanwhile."""
    if chat:
        return "POST", CHATS, {**CHAT, "rid": rid, "max_tokens": 200, "ignore_eos": True}
    return "POST", "/generate", {**BODY, "rid": rid, "sampling_params": LONG}


if __name__ == "__main__":
    main()
