"""Recordings of real servers, for the fake servers to be compared with: the requests, and the parts
of the answers that are stored.

A recording is facts: keys, types and statuses; long arrays and strings are cut. ``record_sglang``
and ``record_vllm`` make them.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Exchange: TypeAlias = dict[str, Any]
Order: TypeAlias = tuple[str, str, Any]
"""Method, path and body."""
FOLDER = Path(__file__).parent / "recorded"
MAX_ITEMS, MAX_CHARACTERS = 3, 40


class Server:
    """A running server, called by plain HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send_json(self, method: str, path: str, body: Any = None) -> Exchange:
        """One exchange: what was sent and what came back; the events of a stream as a list."""
        exchange = self.send(method, path, None if body is None else json.dumps(body))
        if body is not None:
            exchange["request"] = {"method": method, "path": path, "body": body}
        return exchange

    def send(
        self, method: str, path: str, text: str | None, *, kind: str = "application/json"
    ) -> Exchange:
        """As ``ask``, with a body that is sent as it is: text that is no JSON, or of another media
        type.
        """
        sent = {} if text is None else {"text": text, "content_type": kind}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        connection.request(method, path, text, {"Content-Type": kind} if text is not None else {})
        response = connection.getresponse()
        answer = response.read().decode()
        media = (response.getheader("content-type") or "").partition(";")[0]
        received: Any = answer
        if media == "text/event-stream":
            received = ends(
                [
                    _parsed(line.removeprefix("data: "))
                    for line in answer.splitlines()
                    if line.startswith("data: ")
                ]
            )
        elif media == "application/json":
            received = _parsed(answer)
        shown = (
            [shortened(event) for event in received]
            if media == "text/event-stream"
            else shortened(received)
        )
        connection.close()
        return {
            "request": {"method": method, "path": path, **sent},
            "response": {"status": response.status, "content_type": media, "body": shown},
        }

    def during(self, call: Order, orders: Sequence[Order], pause: float = 0.5) -> list[Exchange]:
        """Requests sent while a long call runs, and how that call then ended."""
        ended: list[Exchange] = []
        running = threading.Thread(target=lambda: ended.append(self.send_json(*call)))
        running.start()
        time.sleep(pause)
        replies = []
        for order in orders:
            replies.append(self.send_json(*order))
            time.sleep(0.3)
        running.join()
        return [*replies, *ended]


def ends(events: list[Any]) -> list[Any]:
    """The first events of a stream and the last ones, which are of other kinds: a finish reason,
    usage, the mark of the end.
    """
    return events[:MAX_ITEMS] + events[MAX_ITEMS:][-MAX_ITEMS:]


def shortened(value: Any) -> Any:
    """The same keys and types with less in them: at most three items of an array, forty characters
    of a string.
    """
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value[:MAX_ITEMS]]
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return value[:MAX_CHARACTERS] + "..."
    return value


def record(
    name: str,
    server: str,
    command: Callable[[Path, int], Sequence[str]],
    exchanges: Callable[[Server, Path], Iterator[tuple[str, list[Exchange]]]],
    environment: Mapping[str, str],
) -> None:
    """Start the server of ``command`` (model, port) on a tiny model, have the ``exchanges`` with it
    and its model's second version, write ``recorded/NAME_KIND.json`` for each kind, and end it.
    ``server`` names the release.
    """
    from rollproof.fakes.tiny_models import make_pair

    with tempfile.TemporaryDirectory(prefix="rollproof-record-") as text:
        folder = Path(text)
        first, second = make_pair(folder / "models", "qwen3_moe")
        for path in (first, second):
            _add_tokenizer(path)
        port = _free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command(first, port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment, "TMPDIR": text},
            )
        try:
            ready = _ready(Server(port), process, folder / "log")
            FOLDER.mkdir(exist_ok=True)
            for kind, recorded in exchanges(ready, second):
                text_out = json.dumps({"server": server, "exchanges": recorded}, indent=1)
                (FOLDER / f"{name}_{kind}.json").write_text(
                    text_out.replace(text, "MODELS") + "\n", encoding="utf-8"
                )
                statuses = [exchange["response"]["status"] for exchange in recorded]
                print(kind, statuses, flush=True)  # noqa: T201 - what was recorded
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _add_tokenizer(folder: Path) -> None:
    """Give the checkpoint a tokenizer of one word per token, so that chats can be had."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, begin, end = "<pad>", "<bos>", "<eos>"
    words = {pad: 0, begin: 1, end: 2, **{f"w{token}": token for token in range(3, 512)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> Server:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(
                "The server ended with"
                f" {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
            )
        try:
            if server.send_json("GET", "/health")["response"]["status"] == 200:
                return server
        except OSError:
            pass
        time.sleep(1)
    sys.exit(
        f"The server was not ready within 10 minutes:\n{log.read_text(errors='replace')[-3000:]}"
    )
