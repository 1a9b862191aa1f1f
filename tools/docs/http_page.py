"""docs/http.md: the faces' endpoints, and transcripts of ten kinds of requests beside what the real
servers answered.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.engine_backend import Backing, ServeOptions
from rollproof.fakes.http.in_process_client import Line
from rollproof.fakes.http.serving import FACES
from rollproof.fakes.http.supported_fields import FIELDS
from rollproof.simulation import virtual_loop

RECORDED = Path(__file__).parents[2] / "tests" / "fakes" / "http" / "recorded"
EXAMPLE = Path(__file__).parents[2] / "docs" / "example"
SHOWN: Mapping[str, tuple[tuple[str, str, int], ...]] = {
    "sglang": (
        ("tokens in, tokens out", "generate", 0),
        ("a stream", "generate_stream", 0),
        ("a completion", "completions", 1),
        ("a chat", "chat", 0),
        ("an abort", "abort", 2),
        ("a pause", "pause_odd", 2),
        ("a label", "update_weight_version", 0),
        ("weights", "update_weights_from_disk", 0),
        ("the cache", "flush_cache", 0),
        ("a start of routes that cannot be", "generate", 3),
    ),
    "vllm": (
        ("tokens in, tokens out", "generate", 0),
        ("a stream", "generate_stream", 0),
        ("a completion", "completions", 4),
        ("a chat", "chat", 1),
        ("an abort", "abort", 10),
        ("a pause", "pause_odd", 3),
        ("a label", "weight_version", 1),
        ("sleep", "sleep", 3),
        ("the cache", "reset_prefix_cache", 0),
        ("a start of routes that cannot be", "generate", 4),
    ),
}
"""Kinds of requests by face: a title, and which recorded exchange."""
_CLOCKS = ("created", "timestamp", "response_sent_to_client_ts", "e2e_latency")


def http_page() -> Iterator[str]:
    """The lines of the page."""
    yield "# The HTTP faces\n"
    yield (
        "`rollproof serve` (see [entry points](entry-points.md)) answers as these servers do. The faces are"
        " compared with recordings of the real"
    )
    yield (
        "servers (tests/http/recorded): status, media type, keys and kinds of values. What differs,"
        " and why: tests/fakes/http/unlike.py.\n"
    )
    yield from _start()
    yield from _judged()
    yield from _fields()
    for name, shown in SHOWN.items():
        yield (
            f"\n## {name}\n\nEndpoints:"
            f" {', '.join(f'`{path}`' for path in virtual_loop.run(lambda name=name: _paths(name)))}.\n"
        )
        yield (
            f"Below, {len(shown)} kinds of requests: what {_server(name)} answered, and what the"
            " face answers. The status stands"
        )
        yield (
            "before the body (`curl -i` shows it), and events of a stream without their `data:`."
            " The face was fresh each time: one that"
        )
        yield (
            "has served the prompt before counts its tokens as cached, and after a pause it answers"
            " no call. Long texts and lists are"
        )
        yield (
            "cut: the recordings keep three of a list, of the face's it is told how many more there"
            " are. Times are 0.\n"
        )
        for title, kind, number in shown:
            data = json.loads((RECORDED / f"{name}_{kind}.json").read_text(encoding="utf-8"))
            exchange = data["exchanges"][number]
            yield f"\n### {name}: {title}\n\n```console\n$ {_curl(exchange['request'])}\n```\n"
            real = exchange["response"]
            yield f"{data['server']}:\n\n```\n{real['status']}\n{_text(real['body'])}\n```\n"
            status, body = virtual_loop.run(
                lambda name=name, exchange=exchange: _asked(name, exchange["request"])
            )
            yield f"the face:\n\n```\n{status}\n{_text(body)}\n```"


def _start() -> Iterator[str]:
    yield """```console
$ pip install rollproof          # from a checkout: pip install .
$ rollproof serve --as sglang --port 30000 --trace served.arrow
sglang on http://127.0.0.1:30000
```

It serves until Ctrl-C, which ends it with exit code 0 and a whole trace; then `rollproof check served.arrow`. What was recorded goes to
the file every second: a server that was killed loses no more than the last one, and one that cannot write any more (a full disk) ends with
254 and says so. A trace that exists is never overwritten. The commands below run against such a server in another terminal (`--as vllm` for
those of vLLM): `"model"` may be anything, tokens are the coded policy's (words `w5`, one a token), and the first label is `default` where
the transcripts have `w0`.

- A pause holds until it is ended: after `/pause_generation` or `/pause`, calls wait for `/continue_generation` or `/resume`; after `/sleep`
  for `/wake_up`.
- Weights are known by the path (or the like) that an update names: the same name is the same weights again, an update without one brings
  the next. Nothing is read from it.
- `temperature`, `top_p` and their like are checked and change nothing, stop strings and stop tokens are taken and never met: what a call
  samples follows from its prompt, the weights and `--seed` alone, so that the samples of `n > 1` are equal.
- A request that is wrong has the status and the form that the real server gives it; an endpoint that is none is a 404.
- `/rollproof/submit` and `/rollproof/result` are rollproof's own: by them a stack tells of its samples ([entry points](entry-points.md))."""


def _judged() -> Iterator[str]:
    """A client that is judged through the face, with the files of docs/example;
    tests/fakes/http/test_served_example.py runs it.
    """
    yield "\n## A client, aborted and cut off on purpose\n"
    yield (
        "[served_plan.toml](example/served_plan.toml) aborts request `r1` after two tokens, and"
        " cuts the reply to the call that resumes"
    )
    yield "it:\n"
    yield f"```toml\n{(EXAMPLE / 'served_plan.toml').read_text(encoding='utf-8')}```\n"
    yield (
        "[served_client.py](example/served_client.py) resumes by sending prompt and tokens again,"
        " asks again where a reply broke off, and"
    )
    yield (
        "tells the server of its request and sample;"
        " [served_contract.toml](example/served_contract.toml) is what it promises.\n"
    )
    yield """```console
$ python served_client.py        # in another terminal, while the server below runs
r1: 2 tokens, abort
r1: IncompleteRead, asked again
r1: 6 tokens, length
$ rollproof serve --as sglang --port 30000 --contract served_contract.toml --fault-plan served_plan.toml --trace served.arrow
sglang on http://127.0.0.1:30000
^C
fault 1 (truncate): befell 1 of 3 requests to /generate with the id 'r1'
action 1 (abort of 'r1' at 2 tokens): happened
$ rollproof check served.arrow
  ...
  exercised
    route rows .................................................. 17
    tokens sampled .............................................. 14
    engine calls ................................................ 3
    budgets exhausted ........................................... 2
    prefix-cache hits ........................................... 2
    aborts mid-decode ........................................... 1
    aborts of nothing in flight ................................. 1
    lost replies ................................................ 1
    requests .................................................... 1
    resumes ..................................................... 1
  ...
```

The exit code is 2: nothing failed, and one request leaves much unknown. Take 1 for a failure. (The abort of nothing is that of Ctrl-C.)
Without its line `routed_experts_start_len` the client has the most frequent fault of the field, and `rollproof check` ends with 1:

```console
  FAIL  routes.rows
    1. 16 route rows for a sample of 12 tokens
       where     request r1, segment 1, position 5
```"""


def _fields() -> Iterator[str]:
    """What of each request model is answered, refused, and taken without effect."""
    yield "\n## Fields of a request\n"
    yield (
        "Every field of the real servers' request models is answered, or refused with 400 where it"
        " asks for something (one that is null,"
    )
    yield (
        "false, 0 or empty does not), or changes nothing of an answer of the fake. A name that no"
        " model has is passed over. The models"
    )
    yield (
        "are those of SGLang 0.5.21 and vLLM 0.32.0. Those of SGLang 0.5.17 and vLLM 0.26.0 were"
        " compared: a name that only the newer"
    )
    yield (
        "have is taken as the newer do, and what the real servers take without effect, whatever its"
        " value, is not refused."
    )
    for model, fields in FIELDS.items():
        yield f"\n**{model}**\n\n- answered: {_names(sorted(fields.answered))}"
        for word, table in ("refused", fields.refused), ("without effect", fields.idle):
            for reason in dict.fromkeys(table.values()):
                yield (
                    f"- {word}, for {reason}:"
                    f" {_names(sorted(name for name in table if table[name] == reason))}"
                )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _server(name: str) -> str:
    server: str = json.loads((RECORDED / f"{name}_generate.json").read_text(encoding="utf-8"))[
        "server"
    ]
    return server


def _line(name: str) -> tuple[Any, Line]:
    model = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
    options = ServeOptions(
        flavour=name, model=model, engine=EngineOptions(step=1.0), max_length=512, label="w0"
    )
    face = FACES[name][0](Backing(options))
    return face, Line(face)


async def _paths(name: str) -> list[str]:
    return sorted(path for path in _line(name)[0].paths if not path.startswith("/rollproof"))


async def _asked(name: str, request: Mapping[str, Any]) -> tuple[int, Any]:
    heard = await _line(name)[1].ask(request["method"], request["path"], request.get("body"))
    if heard.headers.get("content-type", "").startswith("text/event-stream"):
        return heard.status, [*heard.events(), "[DONE]"]
    text = heard.body.decode()
    return heard.status, (
        json.loads(text)
        if heard.headers.get("content-type", "").startswith("application/json")
        else text
    )


def _curl(request: Mapping[str, Any]) -> str:
    body = request.get("body")
    data = (
        ""
        if body is None
        else f" -H 'content-type: application/json' -d {shlex.quote(json.dumps(_cut(body, 12)))}"
    )
    return (  # zsh would expand a `?`
        f"curl -X {request['method']} {shlex.quote('localhost:30000' + request['path'])}{data}"
    )


def _text(body: Any) -> str:
    if isinstance(body, list):
        events = (
            body
            if len(body) <= 3
            else [body[0], f"... and {len(body) - 3} more events ...", *body[-2:]]
        )
        return "\n".join(
            _text(event) if isinstance(event, dict) else str(event) for event in events
        )
    text = json.dumps(_cut(body, 3)) if isinstance(body, dict) else str(body).strip()
    return "\n".join(textwrap.wrap(text, 130, break_long_words=False, break_on_hyphens=False))


def _cut(value: Any, most: int, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _cut(item, most, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        more = [f"... and {len(value) - most} more"] if len(value) > most else []
        return [*(_cut(item, most) for item in value[:most]), *more]
    if key in _CLOCKS:
        return 0
    if isinstance(value, float):
        return round(value, 4)
    if (
        key in ("id", "request_id")
        and isinstance(value, str)
        and len(value.rpartition("-")[2]) > 12
    ):
        return f"{value.rpartition('-')[0]}-..." if "-" in value else "..."
    return f"{value[:40].rstrip('.')}..." if isinstance(value, str) and len(value) > 40 else value
