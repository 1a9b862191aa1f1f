"""The fake servers compared with answers of the real ones (``record_sglang.py``,
``record_vllm.py``, ``record_router.py`` recorded it).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import routing
from tests.fakes.http.known_differences import (
    CHANCE,
    DISABLED,
    EXTRA,
    MISSING,
    SKIPPED,
    STATUS_ONLY,
    UNSTEADY,
)
from tests.fakes.http.recording import MAX_ITEMS, ends
from tests.fakes.http.served import Served, running, served

RECORDED = Path(__file__).parent / "recorded"
MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
ENGINE = EngineOptions(max_batch=8, step=0.001, prefix_cache=True)
OPTIONS = {
    "sglang": ServeOptions(
        flavour="sglang", model=MODEL, engine=ENGINE, max_length=512, label="w0"
    ),
    "vllm": ServeOptions(flavour="vllm", model=MODEL, engine=ENGINE, max_length=512),
}
KINDS = sorted(path.stem for path in RECORDED.glob("*.json") if path.stem not in DISABLED)
LONG = ("cut-", "held-", "across")
"""Prefixes of the ids of calls during which something else was done."""
Difference: TypeAlias = "tuple[str, str]"
"""What differs, and the entry of ``known_differences.py`` that excuses it (``""``: none does)."""


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_answered_as_the_real_server_answered_them(kind: str) -> None:
    """Status, media type, keys and kinds of values of every exchange of a kind, in its order, on
    one server.
    """
    assert [] == [f"{name}: {text}" for name, (text, excuse) in all_differences(kind) if not excuse]


def test_every_difference_that_is_accepted_is_still_there() -> None:
    """An entry of ``known_differences.py`` that excuses nothing would hide the next fault there."""
    used = {excuse for kind in KINDS for _, (_, excuse) in all_differences(kind)}
    names = {f"{kind}-{number}" for kind in KINDS for number in range(len(exchanges_of(kind)))}
    assert set() == ENTRIES - used
    assert set() == {*SKIPPED, *STATUS_ONLY, *CHANCE} - names
    assert all((RECORDED / f"{kind}.json").exists() for kind in DISABLED)


def entry(table: str, *at: str) -> str:
    return " ".join((table, *at))


ENTRIES = {
    *(entry("SKIPPED", name) for name in SKIPPED),
    *(entry("STATUS_ONLY", name) for name in STATUS_ONLY),
    *(entry("UNSTEADY", place) for place in UNSTEADY),
    *(entry("MISSING", path, place) for path, places in MISSING.items() for place in places),
    *(entry("EXTRA", path, place) for path, places in EXTRA.items() for place in places),
}


@cache
def all_differences(kind: str) -> list[tuple[str, Difference]]:
    """All differences of a kind; worked out once a session."""
    with started(kind) as server:
        return list(differences(kind, exchanges_of(kind), server))


@cache
def exchanges_of(kind: str) -> list[Mapping[str, Any]]:
    exchanges: list[Mapping[str, Any]] = json.loads((RECORDED / f"{kind}.json").read_text())[
        "exchanges"
    ]
    return exchanges


def started(kind: str) -> Any:
    server_kind = kind.partition("_")[0]
    if server_kind == "router":
        return running(lambda: routing("sglang", ServeOptions(flavour="sglang"), 2))
    return served(server_kind, OPTIONS[server_kind])


def differences(
    kind: str, exchanges: list[Mapping[str, Any]], server: Served
) -> Iterator[tuple[str, Difference]]:
    """Where the fake server differs, exchange by exchange. A long call is begun before the
    requests that were sent meanwhile.
    """
    waiting: list[tuple[str, Mapping[str, Any], threading.Thread, list[Any]]] = []
    for number, exchange in enumerate(exchanges):
        name = f"{kind}-{number}"
        for later, call in started_during(exchanges, number):
            waiting.append(begin(server, f"{kind}-{later}", call))
        if is_long(exchange):
            _, real, thread, got = waiting.pop(0)
            thread.join(60)
            yield from compared(name, real, got[0])
        else:
            yield from compared(name, exchange, send(server, exchange["request"], kind))


def started_during(
    exchanges: list[Mapping[str, Any]], number: int
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A long call that ends after this order and was begun before it: the recorder gives its orders
    right before it.
    """
    if is_long(exchanges[number]):
        return
    following = next((i for i in range(number + 1, len(exchanges)) if is_long(exchanges[i])), None)
    if following is None:
        return
    orders = ORDERS.get(str(identity(exchanges[following])), 1)
    if number == following - orders:
        yield following, exchanges[following]


ORDERS = {
    "held-1": 2,
    "held-2": 2,
    "held-3": 3,
    "held-abort": 3,
    "held-retract": 3,
    "held-in_place": 3,
    "held-wait": 3,
    "held-keep": 3,
    "held-cache": 2,
    "across": 2,
}
"""How many requests were sent during a long call, where it was more than one."""


def identity(exchange: Mapping[str, Any]) -> Any:
    body = exchange["request"].get("body")
    return (body.get("rid") or body.get("request_id")) if isinstance(body, dict) else None


def is_long(exchange: Mapping[str, Any]) -> bool:
    return exchange["request"]["path"].endswith(("/generate", "/completions")) and str(
        identity(exchange) or ""
    ).startswith(LONG)


def begin(server: Served, name: str, exchange: Mapping[str, Any]) -> Any:
    """Start a long call, and wait until it runs."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(send(server, exchange["request"], name)))
    thread.start()
    end = time.monotonic() + 20
    while (
        not (server.do(lambda: sum(server.backend.engine.progress().values())) or got)
        and time.monotonic() < end
    ):
        time.sleep(0.002)
    return name, exchange, thread, got


def send(server: Served, request: Mapping[str, Any], kind: str) -> tuple[int, str, Any]:
    path = request["path"]
    if kind == "router_workers" and path.startswith("/workers/") and "00000000" not in path:
        path = "/workers/" + server.client.get("/workers").json()["workers"][0]["id"]
    body = adapted(kind, request.get("body"), server)
    if "text" in request:
        reply = server.client.request(
            request["method"],
            path,
            content=request["text"],
            headers={"content-type": request.get("content_type", "application/json")},
        )
    else:
        reply = server.client.request(
            request["method"], path, **({} if body is None else {"json": body})
        )
    media = (reply.headers.get("content-type") or "").partition(";")[0]
    if media == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        return (
            reply.status_code,
            media,
            ends([line if line == "[DONE]" else json.loads(line) for line in lines]),
        )
    return (
        reply.status_code,
        media,
        reply.json() if media == "application/json" and reply.content else reply.text,
    )


def adapted(kind: str, body: Any, server: Served) -> Any:
    """Long calls sample more here: the fake is faster than the orders that are to meet them. A
    worker has another address.
    """
    if kind == "router_workers" and isinstance(body, dict) and "url" in body:
        return {"url": next(iter(server.backend))}
    return body


def compared(
    name: str, exchange: Mapping[str, Any], answer: tuple[int, str, Any]
) -> Iterator[tuple[str, Difference]]:
    if name in CHANCE:
        return
    real, (status, media, body) = exchange["response"], answer
    excuse_all = entry("SKIPPED", name) if name in SKIPPED else ""
    if real["status"] != status:
        yield name, (f"status {status}, not {real['status']}: {json.dumps(body)[:160]}", excuse_all)
    elif real["content_type"] != media and (real["content_type"] or real["body"]):
        if real["content_type"] or media != "text/plain":
            yield name, (f"media type {media!r}, not {real['content_type']!r}", excuse_all)
    else:
        excuse_all = excuse_all or (entry("STATUS_ONLY", name) if name in STATUS_ONLY else "")
        path = exchange["request"]["path"].partition("?")[0]
        yield from (
            (name, (text, excuse_all or excuse))
            for text, excuse in differences_in(real["body"], body, path, "")
        )


def differences_in(real: Any, ours: Any, path: str, where: str) -> Iterator[Difference]:
    """Keys that only one of them has, and values of another kind. Of arrays the items are compared
    as far as both have some.
    """
    unsteady = next((entry_at for entry_at in UNSTEADY if where.endswith(entry_at)), None)
    for text, excuse in _differences_in(real, ours, path, where):
        yield text, excuse if unsteady is None else entry("UNSTEADY", unsteady)


def _differences_in(real: Any, ours: Any, path: str, where: str) -> Iterator[Difference]:
    if isinstance(real, Mapping) and isinstance(ours, Mapping):
        for key in sorted({*real, *ours}):
            place = f"{where}.{key}" if where else key
            if key not in ours:
                yield f"lacks {place}", excused("MISSING", MISSING, path, place)
            elif key not in real:
                yield (
                    f"has {place}, which the real one has not",
                    excused("EXTRA", EXTRA, path, place),
                )
            else:
                yield from differences_in(real[key], ours[key], path, place)
    elif isinstance(real, list) and isinstance(ours, list):
        if bool(real) != bool(ours):
            yield f"{where}: {len(ours)} items, not {len(real)}", ""
        elif where == "" or where.endswith("choices"):
            if where and len(real) != min(
                len(ours), MAX_ITEMS if len(real) == MAX_ITEMS else len(ours)
            ):
                yield f"{where}: {len(ours)} items, not {len(real)}", ""
            for real_item, our_item in zip(real, ours, strict=False):
                yield from differences_in(real_item, our_item, path, where)
        elif real and ours:
            yield from differences_in(real[0], ours[0], path, f"{where}[]")
    elif kind_of(real) != kind_of(ours):
        yield (
            f"{where or 'body'} is {kind_of(ours)}, not {kind_of(real)}",
            excused("EXTRA", EXTRA, path, where),
        )


def excused(table: str, entries: Mapping[str, tuple[str, ...]], path: str, place: str) -> str:
    entry_at = next(
        (real_item for real_item in entries.get(path, ()) if place.endswith(real_item)), None
    )
    return "" if entry_at is None else entry(table, path, entry_at)


def kind_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    return "number" if isinstance(value, int | float) else type(value).__name__
