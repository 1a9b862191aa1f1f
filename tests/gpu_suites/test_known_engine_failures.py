from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollproof.core.engine_protocol import EngineSettings, Query, Watch
from rollproof.core.records import EngineOutput
from rollproof.engines.engine_targets import fake_target
from rollproof.errors import EngineDied
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.gpu_suites.engine_variants import (
    KNOWN,
    VARIANTS,
    KnownFailure,
    flavour_of,
    surroundings,
)
from rollproof.gpu_suites.known_engine_failures import judge_engine
from rollproof.gpu_suites.load import Load, judge_load


class Fragile(FakeEngineSubject):
    """An engine that dies of a call for rows from the end of its prompt on."""

    dead = False

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        if query.routes_start is not None and query.routes_start >= len(query.prompt_ids):
            self.dead = True
        if self.dead:
            raise EngineDied("the engine is gone")
        return await super().generate(query, watch)

    async def resume(self) -> None:
        if self.dead:
            raise EngineDied("the engine is gone")
        await super().resume()


class NoRoutes(FakeEngineSubject):
    """An engine that loses the routes of every call of more than a few tokens."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        outputs = await super().generate(query, watch)
        return [replace(item, routes=None) if len(item.token_ids) > 4 else item for item in outputs]


def target(kind: type[FakeEngineSubject]) -> Any:
    def make(settings: EngineSettings) -> FakeEngineSubject:
        return kind(settings, "vllm-0.26")

    return fake_target("vllm-0.26", make=make)


ENDS = {name: KNOWN["vllm-0.26"][name] for name in ("offset", "refusals")}


def test_what_an_engine_does_not_survive_is_run_last_and_judged_apart() -> None:
    """Everything else passes; the known fault shows, and its double is left out with the reason."""
    found = judge_engine(target(Fragile), ENDS)
    assert () == found.report.failed
    assert {"offset": ["engine.answers"]} == found.faults
    assert ["refusals"] == found.left_out
    assert [] == found.surprises(ENDS)
    assert "crowded" in found.seconds


def test_without_knowing_the_death_is_told_with_its_experiment() -> None:
    """An engine that dies on the way fails the run, and the report says where."""
    found = judge_engine(target(Fragile), {})
    assert "engine.answers" in {result.id for result in found.report.failed}
    assert "offset" in found.failed_in["engine.answers"]


def test_a_known_fault_that_is_gone_is_told() -> None:
    """What is on record must go on failing, or be removed."""
    found = judge_engine(target(FakeEngineSubject), ENDS)
    assert ["offset: nothing failed; remove it from the known failures"] == [
        line.partition(" (")[0] for line in found.surprises(ENDS)
    ]
    seldom = {"offset": replace(ENDS["offset"], certain=False)}
    assert [] == judge_engine(target(FakeEngineSubject), seldom).surprises(seldom)


def test_another_fault_where_one_is_known_is_told() -> None:
    """A check that fails beside the known ones is no known failure."""
    failures = {"streams": KnownFailure(checks=("engine.stream",), reason="a reason")}
    (line,) = judge_engine(target(NoRoutes), failures).surprises(failures)
    assert line.startswith("streams: engine.opt-in, engine.parts")
    assert "failed, in addition to the known failures (engine.stream)" in line


def test_load_is_judged_on_a_fake_and_sees_what_is_lost() -> None:
    """Under load every call is accounted for; an engine that loses routes fails, one that dies is
    told.
    """
    few = Load(requests=24, updates=2)
    clean = judge_load(fake_target("sglang-0.5.17"), few)
    assert () == clean.failed
    assert clean.exercised["aborts mid-decode"] > 5
    assert clean.exercised["resumes across a weight version"] > 2
    assert "engine.parts" in {result.id for result in judge_load(target(NoRoutes), few).failed}

    class Dying(Fragile):
        async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
            self.dead = self.dead or query.handle.startswith("load-9-")
            return await super().generate(query, watch)

    died = judge_load(target(Dying), few)
    assert "engine.answers" in {result.id for result in died.failed}
    assert ("load broke off: the engine is gone",) == died.notes


def test_releases_and_their_surroundings(monkeypatch: Any) -> None:
    """A release's conventions follow from its version; a variable that the user has set stays."""
    assert ["vllm-0.26", "vllm", "sglang-0.5.17", "sglang"] == [
        flavour_of(*item)
        for item in (
            ("vllm", "0.26.0"),
            ("vllm", "0.32.0"),
            ("sglang", "0.5.17"),
            ("sglang", "0.5.21"),
        )
    ]
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    variables = surroundings("vllm", "float32")
    assert "VLLM_NO_USAGE_STATS" not in variables
    assert "ieee" == variables["TRITON_F32_DEFAULT"]
    assert "TRITON_F32_DEFAULT" not in surroundings("vllm", "bfloat16")
    assert "bfloat16" == VARIANTS["eager"].dtype_of("sglang")
