"""Writes docs/http.md: how an HTTP client is judged, and what the fake servers answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.engine_backend import EngineBackend
from rollproof.fakes.http.fake_server import FakeServer
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import SERVERS
from rollproof.fakes.http.supported_fields import ANSWERED, REFUSED
from rollproof.simulation import virtual_loop

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"


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
    for name in SERVERS:
        paths = virtual_loop.run(lambda name=name: _paths(name))
        yield f"\n## {name}\n\nEndpoints: {', '.join(f'`{path}`' for path in paths)}."


def _one_step() -> Iterator[str]:
    """Yield the example of a client that is judged, with the files of docs/example.

    tests/fakes/http/test_served_example.py runs it.
    """
    yield f"""Run your client against a fake SGLang or vLLM server, and have its samples judged:

```console
$ pip install 'rollproof[serve]'
$ rollproof serve --as sglang --contract served_contract.toml --fault-plan served_plan.toml \\
    --run "python served_client.py"
```

| exit code | if |
|---|---|
| 0 | everything that arose passed (`rollproof check` of the trace, kept by `--trace FILE`, counts what did not arise as unknown) |
| 1 | a check failed, as `routes.rows` does without the client's line `routed_experts_start_len` |
| 2 | no sample was reported, a planned fault or action did not happen, the command failed, or the client left out what a check needs |

[served_client.py](example/served_client.py) has two lines for rollproof: a [hook](#what-a-hook-knows-and-what-it-does-not) on its HTTP client, and
`@rollout` on the function that makes a sample.

The command finds the address in `ROLLPROOF_URL`, the openai client by itself (`OPENAI_BASE_URL`); `--port 30000` chooses it. Without
`ROLLPROOF_URL`, as in production, nothing is added to any call. In pytest the same is a fixture, `rollproof_sglang` or `rollproof_vllm`:

```python
{(EXAMPLE / "test_served_client.py").read_text(encoding="utf-8").strip()}
```

The fixtures also take `servers=2` (with a router), `options={{"seed": 3}}`, `save="trace.json"` and `only=["routes"]`. They return the fleet:
`fleet.url` is the address, `fleet.update_weights("step-1")` does what a trainer does. `rollproof init http` writes such a test."""


def _known() -> Iterator[str]:
    yield """
## What a hook knows, and what it does not

| your client | add |
|---|---|
| httpx | `httpx.Client(event_hooks=httpx_hooks())`, `httpx.AsyncClient(event_hooks=httpx_async_hooks())` |
| openai | `OpenAI(http_client=openai_http_client())`, `AsyncOpenAI(http_client=openai_async_http_client())` |
| requests | `session.mount("http://", requests_adapter())` |
| aiohttp | `aiohttp.ClientSession(trace_configs=[aiohttp_trace()])` |
| another in Python | send `headers(url)` with each call |
| another language | [post requests and samples](#in-another-language) |

All are in `rollproof.http_clients`. A hook names the rollout in a header of each call. In a chat, SGLang returns the ids of sampled tokens as `response_token_ids` and vLLM as `token_ids`, both only if the call has
`extra_body={"return_token_ids": True}`.

- **The sample is what the decorated function returns**: a `rollproof.Rollout`, or a dictionary with its fields. Another form is read by
  `@rollout(to_record=lambda sample: {"prompt_ids": ..., "response_ids": ...})`. `None` is a sample that was dropped, an exception the end of
  the request. Without the decorator no sample is judged, and the verdict is unknown.
- **The prompt is what the first call sends**, and the budget is not known. `@rollout(to_request=...)` takes a function that returns the
  `rollproof.Request` of a call's arguments, and budgets are judged, too. It is needed if the environment answers (`Request.turns`).
- **A call belongs to the rollout in whose context it is made**, also in tasks that a rollout starts and in `asyncio.to_thread`; a thread of an
  executor has no context. A call that does not begin with the prompt leaves its request unknown: make others (a judge, a warm-up) inside
  `with internal():`."""


def _plans() -> Iterator[str]:
    yield f"""
## Fault plans

`--fault-plan FILE` (TOML or JSON) says what goes wrong:

```toml
{(EXAMPLE / "served_plan.toml").read_text(encoding="utf-8")}```

If several faults are due for a call, the first one is applied; `times` limits how often. At its end the server prints for each fault and action
whether it happened. An action happens once; with `queued = true` in `when`, while the call waits to be admitted:

| action | effect |
|---|---|
| `abort`, `evict` | ends the request's call; preempts it |
| `reject` | answers its next call with an abort and no tokens |
| `lose-reply`, `late-reply` | breaks the connection instead of replying; delays the reply by `steps` engine steps |
| `sync` | brings new weights (`step-1`, ...) to every server, and aborts the calls |
| `kill` | ends the server with all its calls; it restarts after `steps` (default 5, a step is `--step` seconds) with its weights |

After a broken stream, the client's next call (or its sample, if there is none) shows which tokens it received, and the checks hold it to that.

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
with the prompt of one open request alone."""


def _start() -> Iterator[str]:
    yield """
## A server of its own

```console
$ rollproof serve --as sglang --port 30000 --trace served.arrow
sglang on http://127.0.0.1:30000
```

After Ctrl-C, `rollproof check served.arrow` judges it. Start the client with `ROLLPROOF_URL=http://127.0.0.1:30000`.

- Events are written every second, and a trace that exists is never overwritten. They have wall-clock times, so checks of hangs stay unknown.
- Tokens are words `w5`, one each; `"model"` may be anything. The first weights are labelled `default`.
- A call's tokens depend on its prompt, the weights and `--seed` alone: sampling parameters change nothing, stop strings are never met, samples of
  `n > 1` are equal.
- A pause lasts until it is ended: calls wait for `/continue_generation` or `/resume`, after `/sleep` for `/wake_up`.
- An update identifies weights by its path or name (none: the next ones). Nothing is read from it.
- Answers, also to wrong requests, are compared with recordings of SGLang 0.5.21, vLLM 0.32.0 and sglang-router 0.3.2 (tests/fakes/http, with
  known_differences.py).
- `--workers 4 --router gateway` (or `slime`) serves four engines and a router, in one trace; each counts the calls of a fault plan by itself.
- `--host ADDRESS --token TEXT` lets other machines in ([threat model](threat-model.md#fake-servers)), which send the token as their API key.
- `--routes compact` (SGLang) or `described` (vLLM, as prime-rl has it) sends routes in another form.
- In a program: `async with rollproof.fakes.http.serving.serving("sglang") as (url, backing)`."""


def _fields() -> Iterator[str]:
    """Yield what of each request model is answered, refused and ignored."""
    yield "\n## Fields of a request\n"
    yield (
        "Fields of the real servers' request models (SGLang 0.5.21, vLLM 0.32.0) that are answered,"
        " and those that are refused with 400 unless they are null, false, 0 or empty. Every other"
        " field changes nothing of a fake's answer; a name that no model has is ignored, as by the"
        " real servers."
    )
    for server, title in (("sglang", "SGLang"), ("vllm", "vLLM")):
        # the parameters of sampling are a part of a request
        requests = {
            model: set(names)
            for model, names in ANSWERED.items()
            if model.startswith(f"{server} /")
        }
        common = set.intersection(*requests.values())
        yield f"\n**{title}** answers {_names(sorted(common))}; and\n"
        for model, names in ANSWERED.items():
            if model.startswith(f"{server} "):
                path = model.removeprefix(f"{server} ")
                yield f"- in {path}: {_names(sorted(set(names) - common))}."
        yield f"\n{title} refuses, where it does not answer it: {_names(sorted(REFUSED[server]))}."


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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
