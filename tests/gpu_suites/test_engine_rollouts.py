"""How the gap's suite samples: engines of one dtype at once, each started once; what breaks ends
alone, and is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollproof.core.engine_protocol import EngineSettings, Query, Watch
from rollproof.core.records import EngineOutput
from rollproof.errors import EngineDied, EngineHung, EngineStartError
from rollproof.fakes.engine.engine_subject import MODEL, FakeEngineSubject
from rollproof.gpu_suites.gap import sampled_units as suite
from rollproof.gpu_suites.timing import Part, Spending
from rollproof.simulation import virtual_loop

FLAVOURS = {"vllm": "vllm-0.26", "sglang": "sglang-0.5.17"}


class Steady(FakeEngineSubject):
    """An engine that counts its starts and stops."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        super().__init__(settings, FLAVOURS[name], 0)
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")
        await super().start()

    async def stop(self) -> None:
        self.events.append("stop")
        await super().stop()


class Dying(Steady):
    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        raise EngineDied("it is gone. The end of its log:\nCUDA error")


class Hanging(Steady):
    process = SimpleNamespace(log_tail=lambda: "waiting for a lock")

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        await asyncio.sleep(3600)
        return []


class NotStarting(Steady):
    async def start(self) -> None:
        raise EngineStartError("no room\nmore")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fakes in the place of engines, by name: a class to be made, then what was made."""
    made: dict[str, Any] = dict.fromkeys(FLAVOURS, Steady)

    def make(name: str, settings: EngineSettings) -> Steady:
        made[name] = made[name](name, settings)
        engine: Steady = made[name]
        return engine

    monkeypatch.setattr(suite, "gap_engine", make)
    monkeypatch.setattr(suite, "model_of", lambda _: MODEL)
    monkeypatch.setattr(suite, "SEQUENCES", 6)
    monkeypatch.setattr(suite, "TOKENS", 8)
    monkeypatch.setattr(suite, "PATIENCE", 500.0)
    monkeypatch.setattr(
        asyncio, "run", lambda work: virtual_loop.run(lambda: work)
    )  # fakes live on a virtual clock
    return made


def rollouts() -> suite.Rollouts:
    planned = frozenset((name, "bfloat16") for name in FLAVOURS)
    return suite.Rollouts(
        checkpoints={"A": Path(), "B": Path()}, spending=Spending(), planned=planned
    )


def test_both_engines_sample_at_once_and_each_is_started_once(engines: dict[str, Any]) -> None:
    """Whole samples, and samples across an update with KV computed anew and kept."""
    found = rollouts()
    for name in FLAVOURS:
        kinds = found.of(name, "bfloat16")
        assert {"uninterrupted", "recompute", "keep"} == set(kinds)
        assert [8] * 6 == [len(rollout.response_ids) for rollout in kinds["uninterrupted"]]
        assert ["start", "stop"] == engines[name].events
    spent = found.spending.to_dict()
    assert spent[Part.SAMPLING] >= 0.0
    assert set(map(str, Part)) == set(spent)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Dying, EngineDied, "CUDA error"),
        (
            Hanging,
            EngineHung,
            r"sampling was not done after 500 s. The end of its log:\nwaiting for a lock",
        ),
        (NotStarting, EngineStartError, "no room"),
    ],
)
def test_an_engine_that_breaks_is_told_once_and_the_other_is_measured(
    engines: dict[str, Any], kind: type[Steady], error: type[Exception], words: str
) -> None:
    """It ends within a bound, with the end of its log; every engine is stopped; the second test of
    it is skipped with the reason.
    """
    engines["vllm"] = kind
    found = rollouts()
    assert [8] * 6 == [
        len(rollout.response_ids) for rollout in found.of("sglang", "bfloat16")["uninterrupted"]
    ]
    with pytest.raises(error, match=words):
        found.of("vllm", "bfloat16")
    with pytest.raises(pytest.skip.Exception, match="vllm in bfloat16 sampled nothing: "):
        found.of("vllm", "bfloat16")
    assert {"stop"} == {engine.events[-1] for engine in engines.values()}


class Interrupted(Steady):
    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        raise KeyboardInterrupt


def test_an_interrupt_stops_every_engine(engines: dict[str, Any]) -> None:
    """Ctrl-C while engines sample is the caller's, after they have ended."""
    engines["sglang"] = Interrupted
    with pytest.raises(KeyboardInterrupt):
        rollouts().of("vllm", "bfloat16")
    assert {"stop"} == {engine.events[-1] for engine in engines.values()}
