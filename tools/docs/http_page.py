"""docs/http.md: the fake servers' endpoints, and transcripts of ten kinds of requests with the
answers of the real servers and of the fakes.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.client import HttpClient
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import FakeServer
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import SERVERS, serve_in_memory
from rollproof.fakes.http.supported_fields import ANSWERED, REFUSED
from rollproof.simulation import virtual_loop
from rollproof.simulation.memory_network import Network

RECORDED = Path(__file__).parents[2] / "tests" / "fakes" / "http" / "recorded"
EXAMPLE = Path(__file__).parents[2] / "docs" / "example"
SHOWN: Mapping[str, tuple[str, int]] = {"sglang": ("generate", 0), "vllm": ("generate", 0)}
"""The request that is shown, by server: its kind, and which recorded exchange."""
_CLOCKS = ("created", "timestamp", "response_sent_to_client_ts", "e2e_latency")


def http_page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield (
        "# HTTP clients and the fake servers\n\nHow to judge a client that speaks HTTP, and the"
        " reference of the fake SGLang and vLLM servers that it is run against. To begin, take the"
        " [tutorial](tutorials/http-client.md).\n\n## In one command\n"
    )
    yield from _one_step()
    yield from _known()
    yield from _plans()
    yield from _start()
    yield from _fields()
    for name, (kind, number) in SHOWN.items():
        paths = virtual_loop.run(lambda name=name: _paths(name))
        yield f"\n## {name}\n\nEndpoints: {', '.join(f'`{path}`' for path in paths)}.\n"
        exchange, server = _exchange(name, kind, number)
        yield f"```console\n$ {_curl(exchange['request'])}\n```\n"
        real = exchange["response"]
        yield f"{server}:\n\n```\n{real['status']}\n{_text(real['body'])}\n```\n"
        status, body = virtual_loop.run(
            lambda name=name, exchange=exchange: _reply(name, exchange["request"])
        )
        yield f"The fake (long texts and lists are cut, times are 0):\n\n```\n{status}\n{_text(body)}\n```"


def _exchange(name: str, kind: str, number: int) -> tuple[Any, str]:
    """Return a recorded request with its response, and the server that answered."""
    data = json.loads((RECORDED / f"{name}_{kind}.json").read_text(encoding="utf-8"))
    return data["exchanges"][number], data["server"]


def _one_step() -> Iterator[str]:
    """Yield the example of a client that is judged, with the files of docs/example.

    tests/fakes/http/test_served_example.py runs it.
    """
    client = (EXAMPLE / "served_client.py").read_text(encoding="utf-8")
    begin = client.index("client = httpx")
    end = client.index("    tokens: list[int]")
    decorated = client[client.index("@rollout") : end]
    sample = client[client.index("    return {") : client.index("\n\nif __name__")]
    yield f"""Run your client against a fake SGLang or vLLM server, and have its samples judged:

```console
$ pip install rollproof httpx
$ rollproof serve --as sglang --contract served_contract.toml --fault-plan served_plan.toml \\
    --run "python served_client.py"
sglang on http://127.0.0.1:40925
2 tokens, abort
RemoteProtocolError, called again
6 tokens, length
fault 1 (truncate): applied to 1 of 3 requests to /generate with the id 'r1'
action 1 (abort of 'r1' at 2 tokens): happened
served sglang  [seed 0, 1 case]
  ...
  exercised 9 situations: requests 1; engine calls 3; resumes 1; aborts mid-decode 1; route rows 17; tokens sampled 14;
      ... (-v lists all)
  ...
```

The exit code is 0: everything that arose passed. It is 2 if no sample was reported, if a fault or an action of the plan did not happen, if the
command fails, or if the client left out what a check needs; situations that did not arise are listed. (`rollproof check` of the same trace, kept by
`--trace FILE`, counts them as unknown, and ends with 2.) Without the line `routed_experts_start_len` of
[served_client.py](example/served_client.py) the client has the most frequent fault of the field, and the exit code is 1:

```console
  FAIL  routes.rows
    1. 16 route rows for a sample of 12 tokens
       where     request r1, segment 1, position 5
```

Two lines of the client are there for rollproof, the hook and the decorator:

```python
{client[begin : client.index("def call")].strip()}


{decorated.rstrip()}
    ...
{sample.rstrip()}
```

The command finds the address in `ROLLPROOF_URL`, and the openai client finds it by itself (`OPENAI_BASE_URL`); for one that has it from elsewhere,
choose it: `--port 30000`. Without `ROLLPROOF_URL`, as
in production, nothing is added to any call. In pytest the same is a fixture, `rollproof_sglang` or `rollproof_vllm`
([test_served_client.py](example/test_served_client.py)):

```python
{(EXAMPLE / "test_served_client.py").read_text(encoding="utf-8").strip()}
```

The fixtures also take `servers=2` (with a router), `options={{"seed": 3}}`, `save="trace.json"` and `only=["routes"]`. They return the fleet:
`fleet.url` is the address, and `fleet.update_weights("step-1")` does what a trainer does. `rollproof init http` writes such a test. A contract says
what samples promise ([contract.md](contract.md), [served_contract.toml](example/served_contract.toml)); `--like slime` takes that of a public
stack."""


def _known() -> Iterator[str]:
    yield """
## What a hook knows, and what it does not

| your client | what to add |
|---|---|
| httpx | `httpx.Client(event_hooks=httpx_hooks())`, `httpx.AsyncClient(event_hooks=httpx_async_hooks())` |
| openai | `OpenAI(http_client=openai_http_client())`, `AsyncOpenAI(http_client=openai_async_http_client())` |
| requests | `session.mount("http://", requests_adapter())` |
| aiohttp | `aiohttp.ClientSession(trace_configs=[aiohttp_trace()])` |
| another | send `headers(url)` with each call |

All are in `rollproof.http_clients`. In a chat, SGLang returns the ids of sampled tokens as `response_token_ids` and vLLM as `token_ids`, both only
if the call has `extra_body={"return_token_ids": True}`. A hook names the rollout in a header of each call, so that retries, hedges and rollouts of one
prompt are kept apart. It sees what came over the wire, and not what your code makes of it, so it reports no sample:

- **The sample is what the decorated function returns**: a `rollproof.Rollout`, or a dictionary with its fields. Another form is read by
  `@rollout(to_record=lambda sample: {"prompt_ids": ..., "response_ids": ...})`. `None` is a sample that was dropped, and an exception is
  the end of the request. Without the decorator no sample is judged, and that is unknown, never passed.
- **The prompt is what the first call sends.** The budget is not known, since a first call may ask for a part of it. `@rollout(to_request=...)`
  takes a function that returns the `rollproof.Request` of a call's arguments: then budgets are judged, too. It is needed if the environment
  answers (`Request.turns`).
- **A call belongs to the rollout in whose context it is made**, also in the tasks that a rollout starts, and in `asyncio.to_thread`. A thread
  of an executor has no context. A call that does not begin with the prompt leaves its request unknown: make calls for another purpose
  (a judge, a warm-up) inside `with internal():`.
- A client in [another language](#in-another-language) posts its requests and samples itself."""


def _plans() -> Iterator[str]:
    yield f"""
## Fault plans

`--fault-plan FILE` (TOML or JSON) says what goes wrong:

```toml
{(EXAMPLE / "served_plan.toml").read_text(encoding="utf-8")}```

If several faults are due for a call, the first one is applied; `times` limits how often. At its end the server prints for each fault and action
whether it happened. An action happens once, to a request; with `queued = true` in `when`, while the call waits to be admitted:

| action | effect |
|---|---|
| `abort`, `evict` | ends the request's call; preempts it |
| `reject` | answers its next call with an abort and no tokens |
| `lose-reply`, `late-reply` | breaks the connection instead of replying; delays the reply by `steps` engine steps |
| `sync` | brings new weights (`step-1`, ...) to every server as a trainer does that stops the engines: calls are aborted |
| `kill` | ends the server with all its calls; it restarts after `steps` (default 5, a step is `--step` seconds) with its weights |

If a stream breaks, only the client knows how many tokens it received. Its next call shows whether it kept them (or its sample, if there is none), and
the checks hold it to that choice.

## In another language

Post each request to `/rollproof/submit` before its first call, and each sample to `/rollproof/result` at its end, as JSON in the form of a trace's
events. In Python that is:

```python
from rollproof.fakes.http.trace_client import Teller

teller = Teller("http://127.0.0.1:30000")
teller.submit(request)  # a rollproof.Request
...  # the stack's own calls; teller.headers(request_id) attributes a call by headers
teller.result(rollout)  # a rollproof.Rollout; or teller.ended(request_id, error="...")
```

The methods block (in a coroutine: `await asyncio.to_thread(teller.submit, request)`). A call belongs to the request of its headers
`x-rollproof-request` and `x-rollproof-rollout`, else of its id (the request's, or one that begins with it: `r0-2`), else of its tokens, if they begin
with the prompt of one open request alone. Without reported requests, a call that continues where an aborted one stopped belongs to the same; then
no sample is judged."""


def _start() -> Iterator[str]:
    yield """
## A server of its own

```console
$ rollproof serve --as sglang --port 30000 --trace served.arrow
sglang on http://127.0.0.1:30000
```

It serves until Ctrl-C; then `rollproof check served.arrow`. A client whose samples are to be judged is started with
`ROLLPROOF_URL=http://127.0.0.1:30000`.

- Events are written every second: a server that is killed loses those of the last one. A trace that exists is never overwritten; a full disk ends
  it with 254. They have wall-clock times, so checks of hangs stay unknown.
- Tokens are words `w5`, one each; `"model"` may be anything. The first weights are labelled `default`.
- What a call samples depends on its prompt, the weights and `--seed` alone: `temperature`, `top_p` and the like are checked and change
  nothing, stop strings are accepted and never met, the samples of `n > 1` are equal.
- A pause lasts until it is ended: calls wait for `/continue_generation` or `/resume`, after `/sleep` for `/wake_up`.
- Weights are identified by the path or name in an update: the same name is the same weights, no name the next ones. Nothing is read from it.
- A wrong request gets the real server's status and form; an unknown endpoint is a 404. Answers are compared with recordings of the real servers
  (SGLang 0.5.21, vLLM 0.32.0, sglang-router 0.3.2 in tests/fakes/http/recorded); known_differences.py there says what differs, and why.
- `--workers 4 --router gateway` (or `slime`) serves four engines and a router, in one trace; each counts the calls of a fault plan by itself.
- It answers programs of this machine, and no web pages ([threat model](threat-model.md#fake-servers)). `--host ADDRESS --token TEXT`
  lets other machines in, which send the token as their API key.
- `--routes compact` (SGLang) or `described` (vLLM, as prime-rl has it) sends routes in another form than the server's own.
- In a program: `async with rollproof.fakes.http.serving.serving("sglang") as (url, backing)`."""


def _fields() -> Iterator[str]:
    """Yield what of each request model is answered, refused and ignored."""
    yield "\n## Fields of a request\n"
    yield (
        "Fields of the real servers' request models (SGLang 0.5.21, vLLM 0.32.0) that are answered,"
        " and those that are refused with 400. A refused field that is null, false, 0 or empty is no"
    )
    yield (
        "request for anything, and passes. Every other field changes nothing of a fake's answer, and"
        " a correct client may send it; a name that no model has is ignored, as by the real servers."
    )
    for model, names in ANSWERED.items():
        yield f"\n**{model}** answers {_names(sorted(names))}."
    for server, title in (("sglang", "SGLang"), ("vllm", "vLLM")):
        yield f"\n**{title}** refuses, where it does not answer it: {_names(sorted(REFUSED[server]))}."


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _server(name: str) -> str:
    server: str = json.loads((RECORDED / f"{name}_generate.json").read_text(encoding="utf-8"))[
        "server"
    ]
    return server


def _app(name: str) -> FakeServer:
    """Return a new fake server."""
    model = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
    options = ServeOptions(
        flavour=name, model=model, engine=EngineOptions(step=1.0), max_length=512, label="w0"
    )
    return SERVERS[name][0](EngineBackend(options))


async def _paths(name: str) -> list[str]:
    paths = {route.path for route in _app(name).routes}
    return sorted(path for path in paths if not path.startswith("/rollproof"))


async def _reply(name: str, request: Mapping[str, Any]) -> tuple[int, Any]:
    loop: Any = asyncio.get_running_loop()
    loop.network = Network(loop)
    serve_in_memory(loop.network, {80: _app(name)})
    reply = await HttpClient(80).request(request["method"], request["path"], request.get("body"))
    media = reply.headers.get("content-type", "")
    if media.startswith("text/event-stream"):
        return reply.status, [*reply.events(), "[DONE]"]
    return reply.status, reply.json() if media == "application/json" else reply.body.decode()


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
