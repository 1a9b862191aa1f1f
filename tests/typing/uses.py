"""Uses of the public names as a user writes them; checked by mypy and pyright in `nox -s types`,
never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import assert_type

import rollproof
from rollproof import (
    Action,
    ActionKind,
    BatchConformance,
    BatchSubject,
    Case,
    CaseError,
    Check,
    CheckResult,
    Collector,
    ConformanceError,
    Contract,
    ContractError,
    EngineCall,
    EngineConformance,
    EngineOutput,
    EngineSubject,
    ExpectationError,
    FakeEngine,
    Finding,
    FinishReason,
    Fleet,
    LayoutSubject,
    PauseMode,
    Recording,
    ReplayConformance,
    ReplayLayoutConformance,
    ReplaySubject,
    Report,
    Request,
    Rollout,
    RolloutConformance,
    RolloutSubject,
    RollproofError,
    Span,
    StackError,
    SubjectError,
    Trace,
    TraceError,
    TraceVersionError,
    Trigger,
    UsageError,
    Verdict,
    conformance,
    judge_layouts,
    judge_replay,
    layout_function,
    lend,
    record,
    request_check,
    run_conformance,
    trace_check,
)
from rollproof.core.engine_protocol import EngineSettings
from rollproof.engines.vllm.vllm_engine import VllmEngine
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.layouts import Layout
from rollproof.records import IntArray
from rollproof.replay.events import Outcome, Step
from rollproof.replay.spy import Spy, UnsupportedStep

__all__ = [
    "Action",
    "ActionKind",
    "BatchConformance",
    "BatchSubject",
    "Case",
    "CaseError",
    "Check",
    "Collector",
    "ConformanceError",
    "ContractError",
    "EngineCall",
    "EngineConformance",
    "EngineOutput",
    "EngineSubject",
    "ExpectationError",
    "FakeEngine",
    "Finding",
    "FinishReason",
    "LayoutSubject",
    "PauseMode",
    "Recording",
    "ReplayConformance",
    "ReplayLayoutConformance",
    "ReplaySubject",
    "RollproofError",
    "Span",
    "StackError",
    "SubjectError",
    "Trace",
    "TraceError",
    "TraceVersionError",
    "Trigger",
    "UsageError",
    "lend",
    "request_check",
    "trace_check",
]


class MyStack:
    """A subject with async methods; it satisfies the protocol without inheriting from it."""

    contract: Contract

    async def start(self, fleet: Fleet) -> None: ...
    async def rollout(self, request: Request) -> Mapping[str, object]:
        return {"prompt": request.prompt_ids}

    async def update_weights(self, version: int | None) -> None: ...
    def to_record(self, native: Mapping[str, object]) -> Rollout:
        raise RuntimeError(native)

    async def stop(self) -> None: ...


subject: RolloutSubject = MyStack()


@conformance(MyStack, only=["stitch"])
def test_rollouts(check: CheckResult) -> None:
    """The decorator keeps the function's type."""
    assert_type(check.verdict, Verdict)


class TestMyStack(RolloutConformance):
    """A factory as class attribute."""

    subject = MyStack


def library(contract: Contract) -> int:
    """Entry points that need no pytest."""
    with record(contract) as trace:
        assert_type(trace.report, Report)
    assert_type(run_conformance(MyStack, profile="pr"), Report)
    return rollproof.run_conformance(MyStack).exit_code


class TestMyEngine(EngineConformance):
    """An engine by name, as one class attribute."""

    engine = "fake-vllm"


adapters: list[EngineSubject] = [
    VllmEngine(EngineSettings(model=Path())),
    FakeEngineSubject(EngineSettings(model=Path())),
]


class MyLayouts:
    """Layout functions: any of those in the table, and the conventions that they follow."""

    layout = Layout(num_layers=2, num_experts=64, top_k=2)

    def flatten(self, layout: Layout, batch: IntArray) -> IntArray:
        return batch.reshape(-1, *batch.shape[2:])


layouts: LayoutSubject = MyLayouts()


class TestMyLayouts(ReplayLayoutConformance):
    """A factory as class attribute."""

    subject = MyLayouts


class MyTrainer:
    """A trainer with routing replay."""

    contract: Contract

    def run(self, step: Step, spy: Spy) -> Outcome:
        raise UnsupportedStep(step)


trainer: ReplaySubject = MyTrainer()


def library_of_other_kinds() -> Report:
    """Entry points for layout functions and trainers."""
    assert_type(judge_replay(MyTrainer), Report)
    assert_type(judge_layouts(MyLayouts), Report)
    return judge_layouts(layout_function("flatten", MyLayouts().flatten, MyLayouts.layout))
