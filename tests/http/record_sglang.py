"""Records what SGLang's own HTTP server answers, for the faces of the fakes to be compared with: ``python -m tests.http.record_sglang``.

Needs SGLang (`nox -s engines` makes an environment with it) and takes a few minutes on a CPU. A recording is facts: keys, types and
statuses; long arrays and strings are cut.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"
KEPT_ITEMS, KEPT_CHARACTERS = 3, 40
PROMPT = list(range(5, 15))
SAMPLING = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
LONG = {**SAMPLING, "max_new_tokens": 200}
WHOLE = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "return_routed_experts": True, "rid": "mine-1"}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "w5 w6 w7"}],
    "max_tokens": 3,
    "logprobs": True,
    "return_routed_experts": True,
}


class Server:
    """The running server, asked by plain HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One exchange: what was sent and what came back; the events of a stream as a list."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json"} if sent else {})
        response = connection.getresponse()
        text = response.read().decode()
        kind = (response.getheader("content-type") or "").partition(";")[0]
        received: Any = text
        if kind == "text/event-stream":
            received = [_parsed(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        elif kind == "application/json":
            received = _parsed(text)
        connection.close()
        return {
            "request": {"method": method, "path": path, **({} if body is None else {"body": body})},
            "response": {"status": response.status, "content_type": kind, "body": shortened(received)},
        }


def shortened(value: Any) -> Any:
    """The same keys and types with less in them: at most three items of an array, forty characters of a string."""
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value[:KEPT_ITEMS]]
    if isinstance(value, str) and len(value) > KEPT_CHARACTERS:
        return value[:KEPT_CHARACTERS] + "..."
    return value


def exchanges(server: Server, other: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Every kind of request by name, each as the exchanges that belong to it."""
    ask = server.ask
    yield (
        "generate",
        [
            ask("POST", "/generate", WHOLE),
            ask("POST", "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING}),
            ask("POST", "/generate", {**WHOLE, "rid": "mine-2", "routed_experts_start_len": 8}),
            ask("POST", "/generate", {**WHOLE, "rid": "mine-3", "routed_experts_start_len": 11}),
            ask("POST", "/generate", {**WHOLE, "rid": "mine-4", "input_ids": []}),
            ask("POST", "/generate", {**WHOLE, "rid": "mine-5", "input_ids": [5] * 600}),
            ask("POST", "/generate", {**WHOLE, "rid": "mine-6", "sampling_params": {**SAMPLING, "n": 2}}),
        ],
    )
    yield "generate_stream", [ask("POST", "/generate", {**WHOLE, "rid": "mine-7", "stream": True})]
    yield (
        "abort",
        [*_beside(server, "cut-1", [("POST", "/abort_request", {"rid": "cut-1"})]), ask("POST", "/abort_request", {"rid": "nobody"})],
    )
    pause = ("POST", "/pause_generation", {"mode": "retract"})
    resume = ("POST", "/continue_generation", {"torch_empty_cache": False})
    yield "pause_continue", _beside(server, "held-1", [pause, resume])
    yield (
        "flush_cache",
        [
            ask("POST", "/flush_cache"),
            *_beside(server, "held-2", [("POST", "/flush_cache", None), ("POST", "/abort_request", {"abort_all": True})]),
        ],
    )
    yield (
        "update_weight_version",
        [
            ask("POST", "/update_weight_version", {"new_version": "w1", "abort_all_requests": False}),
            *_beside(server, "cut-2", [("POST", "/update_weight_version", {"new_version": "w2"})]),
            ask("POST", "/update_weight_version", {}),
        ],
    )
    yield "get_weight_version", [ask("GET", "/get_weight_version"), ask("GET", "/weight_version")]
    yield (
        "update_weights_from_disk",
        [
            ask("POST", "/update_weights_from_disk", {"model_path": str(other), "weight_version": "w3"}),
            ask("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
        ],
    )
    yield "health", [ask("GET", "/health"), ask("GET", "/health_generate")]
    yield "loads", [ask("GET", "/v1/loads"), ask("GET", "/get_load")]
    yield "chat", [ask("POST", "/v1/chat/completions", CHAT), ask("POST", "/v1/chat/completions", {**CHAT, "stream": True})]
    yield "errors", [ask("GET", "/no_such_endpoint"), ask("POST", "/generate", {}), ask("GET", "/generate_nothing")]


def _beside(server: Server, rid: str, orders: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    """Orders given while a long call runs, and how that call then ended."""
    ended: list[dict[str, Any]] = []
    call = threading.Thread(target=lambda: ended.append(server.ask("POST", "/generate", {**WHOLE, "rid": rid, "sampling_params": LONG})))
    call.start()
    time.sleep(0.5)
    given = []
    for method, path, body in orders:
        given.append(server.ask(method, path, body))
        time.sleep(0.3)
    call.join()
    return [*given, *ended]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tokenizer(folder: Path) -> None:
    """Give the checkpoint a tokenizer of one word per token, so that chats can be had."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, begin, end = "<pad>", "<bos>", "<eos>"
    words = {pad: 0, begin: 1, end: 2, **{f"w{token}": token for token in range(3, 512)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Start the server, ask, write, end it."""
    from rollproof.fakes.tiny_models import make_pair

    with tempfile.TemporaryDirectory(prefix="rollproof-record-") as name:
        first, second = make_pair(Path(name) / "models", "qwen3_moe")
        for folder in (first, second):
            _tokenizer(folder)
        port = _free_port()
        arguments = [
            "--model-path",
            str(first),
            "--port",
            str(port),
            "--dtype",
            "float32",
            "--context-length",
            "512",
            "--weight-version",
            "w0",
        ]
        arguments += ["--max-total-tokens", "4096", "--enable-return-routed-experts", "--log-level", "warning"]
        log = (Path(name) / "log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "rollproof.engines.sglang_server", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": name},
        )
        try:
            server = _ready(Server(port), process, Path(name) / "log")
            FOLDER.mkdir(exist_ok=True)
            for kind, recorded in exchanges(server, second):
                text = json.dumps({"server": f"sglang {metadata.version('sglang')}", "exchanges": recorded}, indent=1)
                (FOLDER / f"sglang_{kind}.json").write_text(text.replace(name, "MODELS") + "\n", encoding="utf-8")
                print(kind, [one["response"]["status"] for one in recorded])  # noqa: T201 - what was recorded
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> Server:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"The server ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
        try:
            if server.ask("GET", "/health")["response"]["status"] == 200:
                return server
        except OSError:
            pass
        time.sleep(1)
    sys.exit(f"The server was not ready within 10 minutes:\n{log.read_text(errors='replace')[-3000:]}")


if __name__ == "__main__":
    main()
