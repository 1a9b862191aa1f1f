"""The trace of a proxy before a fake server, judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollproof.core.case import EngineOptions, Model
from rollproof.core.events.rollout import (
    Abort,
    Call,
    Flush,
    Pause,
    Reply,
    Result,
    Resume,
    Submit,
    Weights,
)
from rollproof.fakes.http.serve_options import ServeOptions
from rollproof.judging.checks import Verdict
from tests.fakes.http.served import Served, served
from tests.recording.proxied import Proxied, judged, proxied
from tests.recording.trainer_client import SGLANG, VLLM, Trainer

MODEL = Model(num_layers=3, moe_layers=(0, 1, 2), num_experts=8, top_k=2, vocab=512)
CONTRACTS = {"sglang": SGLANG, "vllm": VLLM}


def options(kind: str) -> ServeOptions:
    engine = EngineOptions(max_batch=16, step=0.01, prefix_cache=True)
    return ServeOptions(flavour=kind, model=MODEL, engine=engine, max_length=512)


@pytest.fixture(params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with served(request.param, options(request.param)) as running:
        yield request.param, running


def run(
    kind: str,
    proxy: Proxied,
    monkeypatch: pytest.MonkeyPatch,
    *,
    updates: int = 2,
    **client: object,
) -> None:
    """Make four samples while weights are updated: each is aborted and resumed."""
    monkeypatch.setenv("ROLLPROOF_URL", proxy.url)
    trainer = Trainer(proxy.url, **client)  # type: ignore[arg-type]
    generate = trainer.generate_sglang if kind == "sglang" else trainer.generate_vllm
    update = trainer.update_sglang if kind == "sglang" else trainer.update_vllm
    update("1")
    threads = [threading.Thread(target=generate, args=([5, 6, 7 + i], 24)) for i in range(4)]
    for thread in threads:
        thread.start()
    for number in range(updates):
        wait_for_tokens(proxy)
        update(str(number + 2))
    for thread in threads:
        thread.join(30)
    trainer.close()


def wait_for_tokens(proxy: Proxied) -> None:
    """Wait until calls have sampled something, and their clients went on after the last abort."""
    time.sleep(0.08)
    assert proxy.proxy.counts.events


@pytest.mark.parametrize("stream", [False, True])
def test_a_correct_client_is_judged_green(
    server: tuple[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Aborts, pauses and updates included, whether its replies are streamed or not."""
    kind, running = server
    with proxied(running.url, tmp_path, CONTRACTS[kind]) as proxy:
        run(kind, proxy, monkeypatch, stream=stream)
    results = judged(*proxy.proxy.paths)
    assert () == results.failed
    passed = [result.id for result in results.results if result.verdict is Verdict.PASS]
    assert {
        "stitch.tokens",
        "stitch.logprobs-paired",
        "stitch.resume-prompt",
        "routes.rows",
        "routes.content",
        "versions.published",
        "versions.token-tags",
        "lifecycle.ends-once",
        "weights.every-pause-resumes",
    } <= set(passed)
    kinds = [type(event) for event in proxy.trace]
    assert 4 == kinds.count(Submit) == kinds.count(Result)
    assert 3 == kinds.count(Pause) == kinds.count(Resume)
    assert kinds.count(Call) == kinds.count(Reply) > 4
    assert 0 == proxy.proxy.counts.unreadable == proxy.proxy.counts.dropped


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("routes twice", "routes.rows"),
        ("stale tag", "versions.token-tags"),
        ("token lost", "stitch.resume-prompt"),
    ],
)
def test_a_fault_of_the_client_is_found(
    server: tuple[str, Served],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    check: str,
) -> None:
    """By the check that is about it."""
    kind, running = server
    with proxied(running.url, tmp_path, CONTRACTS[kind]) as proxy:
        run(kind, proxy, monkeypatch, updates=1, fault=fault)
    assert check in judged(*proxy.proxy.paths).failed


def test_control_requests_become_events(tmp_path: Path) -> None:
    """In order, with what they say; an update shows first that its weights are not known."""
    with (
        served("sglang", options("sglang")) as running,
        proxied(running.url, tmp_path) as proxy,
        httpx.Client(base_url=proxy.url, trust_env=False) as client,
    ):
        client.post("/abort_request", json={"rid": "r1-2"})
        client.post("/abort_request", json={"abort_all": True})
        client.post("/pause_generation", json={"mode": "in_place"})
        client.post("/pause_generation", json={"mode": "nonsense"})
        client.post("/update_weights_from_disk", json={"model_path": "m", "weight_version": "7"})
        client.post("/update_weights_from_disk", json={})
        client.post("/flush_cache")
        client.post("/update_weight_version", json={"new_version": "8"})
        client.post("/continue_generation", json={})
    events = [
        event
        for event in proxy.trace
        if isinstance(event, Abort | Pause | Resume | Flush | Weights)
    ]
    assert [
        ("abort", "r1-2"),
        ("abort", "*"),
        ("pause", "in-place"),
        ("weights", None, True),
        ("weights", "7", True),
        ("weights", None, True),
        ("flush", "s0"),
        ("abort", "*"),
        ("weights", "8", False),
        ("resume", "s0"),
    ] == [_short(event) for event in events]
    fault = next(event for event in proxy.trace if event.kind == "fault")
    assert "update-failure" == fault.what  # type: ignore[attr-defined]


def _short(event: object) -> tuple[object, ...]:
    if isinstance(event, Abort):
        return event.kind, event.wanted
    if isinstance(event, Pause):
        return event.kind, str(event.mode)
    if isinstance(event, Weights):
        return event.kind, event.label, event.loaded
    assert isinstance(event, Resume | Flush)
    return event.kind, event.server_id
