"""The router before several servers, over real loopback (what it says of itself is compared in
``test_recorded.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollproof.core.contract import Contract
from rollproof.core.events.rollout import Call, Weights
from rollproof.core.records import Request
from rollproof.fakes.http.gateway import RouterKind
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.fakes.http.serving import routing
from rollproof.fakes.http.trace_client import Teller
from tests.fakes.http.served import Served, running

PROMISED: dict[str, Any] = {
    "resume": "client",
    "abort_surfaces": False,
    "versions": "none",
    "logprobs": "none",
    "kv_policy": "recompute",
}
JSON = {"content-type": "application/json"}
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture(params=list(RouterKind))
def router(request: pytest.FixtureRequest) -> Iterator[Served]:
    with running(
        lambda: routing("sglang", ServeOptions(flavour="sglang"), 3, request.param)
    ) as server:
        yield server


def servers_called(router: Served) -> list[str]:
    first = next(iter(router.backend.values()))
    return [
        event.server_id
        for event in router.do(lambda: first.recorder.events)
        if isinstance(event, Call)
    ]


def test_calls_are_spread_and_sessions_stay(router: Served) -> None:
    """Idle workers take turns; a session stays with its worker; all calls are in one trace."""
    for _ in range(6):
        assert 200 == router.client.post("/generate", json=BODY).status_code
    assert ["s0", "s1", "s2"] * 2 == servers_called(router)
    for _ in range(3):
        router.client.post("/generate", json=BODY, headers={"x-smg-routing-key": "mine"})
    assert 1 == len(set(servers_called(router)[6:]))
    first = next(iter(router.backend.values()))
    assert ["s0", "s1", "s2"] == [
        event.server_id
        for event in router.do(lambda: first.recorder.events)
        if isinstance(event, Weights)
    ]


def test_a_dead_worker_is_left_out_and_its_connections_break(router: Served) -> None:
    """Calls go to those that live; called directly, the dead server resets the connection, as a
    process that is gone does.
    """
    url, dead = next(iter(router.backend.items()))
    router.do(dead.engine.kill)
    for _ in range(4):
        assert 200 == router.client.post("/generate", json=BODY).status_code
    assert {"s1", "s2"} == set(servers_called(router))
    with pytest.raises(Exception, match=r"reset|disconnected|closed"):
        router.client.get(f"{url}/health")


def test_requests_for_all_workers_reach_each_of_them(router: Served) -> None:
    """Slime lists the workers and aborts on each; an update of one changes no other."""
    urls: list[Any] = list(router.backend)
    for url in urls:
        assert (
            200 == router.client.post(f"{url}/abort_request", json={"abort_all": True}).status_code
        )
    router.client.post(
        f"{urls[0]}/update_weights_from_disk", json={"model_path": "one", "weight_version": "v1"}
    )
    shown = [router.client.get(f"{url}/model_info").json()["weight_version"] for url in urls]
    assert ["v1", "default", "default"] == shown


@pytest.mark.parametrize("kind", list(RouterKind))
def test_samples_are_reported_to_the_router(kind: RouterKind) -> None:
    """The stack knows one address: what it reports there is in the trace of all, also where the
    first server is dead.
    """
    options = ServeOptions(flavour="sglang", contract=Contract(rows="none", **PROMISED))
    with running(lambda: routing("sglang", options, 2, kind)) as router:
        first = next(iter(router.backend.values()))
        teller = Teller(router.url)
        teller.submit(Request(request_id="r0", prompt_ids=(5, 6, 7), max_tokens=2))
        assert 200 == router.client.post("/generate", json=BODY).status_code
        router.do(first.engine.kill)
        teller.ended("r0")
        events = router.do(lambda: first.recorder.events)
    assert ["submit", "call", "result"] == [
        event.kind for event in events if event.kind in ("submit", "call", "result")
    ]
    assert ["r0"] == [event.request_id for event in events if isinstance(event, Call)]


@pytest.mark.parametrize(
    ("kind", "path", "status"),
    [(RouterKind.GATEWAY, "/workers", 422), (RouterKind.SLIME, "/add_worker", 400)],
)
@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"url":' * 100_000, b'{"url": "\\ud800"}', b"[3]", b"\xff", b'{"url": 3}'],
)
def test_a_worker_that_cannot_be_read_is_refused(
    kind: RouterKind, path: str, status: int, body: bytes
) -> None:
    """Also where Python's own reader of JSON gives up, or reads what cannot be written again."""
    with running(lambda: routing("sglang", ServeOptions(flavour="sglang"), 1, kind)) as router:
        reply = router.client.post(path, content=body, headers=JSON)

    assert status == reply.status_code


def test_slimes_router_lists_adds_and_forwards_everything() -> None:
    """By query or by body; what it does not know goes to a worker."""
    with running(
        lambda: routing("sglang", ServeOptions(flavour="sglang"), 2, RouterKind.SLIME)
    ) as router:
        urls = list(router.backend)
        assert {"urls": urls} == router.client.get("/list_workers").json()
        assert (
            "success" == router.client.post("/add_worker", params={"url": urls[0]}).json()["status"]
        )
        assert 400 == router.client.post("/add_worker", json={}).status_code
        assert (
            400 == router.client.post("/add_worker", json={"url": "http://127.0.0.1:1"}).status_code
        )
        assert "weight_version" in router.client.get("/model_info").json()
        assert 404 == router.client.get("/nothing").status_code
