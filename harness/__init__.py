"""rollproof: proves that the rollouts of an LLM reinforcement-learning stack are what its trainer
thinks they are.

The package root stays light on purpose (it is imported by every pytest session that has rollproof
installed): public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rollproof.contracts  # noqa: F401 - an attribute, for type checkers
    from rollproof.core.batch_columns import Column as Column
    from rollproof.core.batch_columns import ColumnExtent as ColumnExtent
    from rollproof.core.case import Action as Action
    from rollproof.core.case import ActionKind as ActionKind
    from rollproof.core.case import Case as Case
    from rollproof.core.case import Trigger as Trigger
    from rollproof.core.contract import Contract as Contract
    from rollproof.core.engine_contract import PauseMode as PauseMode
    from rollproof.core.limits import RolloutLimits as RolloutLimits
    from rollproof.core.own_stops import OwnStops as OwnStops
    from rollproof.core.records import BatchRow as BatchRow
    from rollproof.core.records import EngineOutput as EngineOutput
    from rollproof.core.records import FinishReason as FinishReason
    from rollproof.core.records import Request as Request
    from rollproof.core.records import Rollout as Rollout
    from rollproof.core.records import Span as Span
    from rollproof.core.sampling_masks import SamplingMask as SamplingMask
    from rollproof.core.subjects import BatchSubject as BatchSubject
    from rollproof.core.subjects import EngineSubject as EngineSubject
    from rollproof.core.subjects import ReplaySubject as ReplaySubject
    from rollproof.core.subjects import RolloutSubject as RolloutSubject
    from rollproof.core.trace import Trace as Trace
    from rollproof.corrections.correction_subject import CorrectionSubject as CorrectionSubject
    from rollproof.corrections.correction_subject import correction_function as correction_function
    from rollproof.errors import CaseError as CaseError
    from rollproof.errors import ConformanceError as ConformanceError
    from rollproof.errors import ContractError as ContractError
    from rollproof.errors import ExpectationError as ExpectationError
    from rollproof.errors import GapError as GapError
    from rollproof.errors import RollproofError as RollproofError
    from rollproof.errors import StackError as StackError
    from rollproof.errors import SubjectError as SubjectError
    from rollproof.errors import TraceError as TraceError
    from rollproof.errors import TraceVersionError as TraceVersionError
    from rollproof.errors import UsageError as UsageError
    from rollproof.fakes.engine.fake_engine import FakeEngine as FakeEngine
    from rollproof.fakes.engine.fleet import Fleet as Fleet
    from rollproof.judging.checks import Check as Check
    from rollproof.judging.checks import CheckResult as CheckResult
    from rollproof.judging.checks import Collector as Collector
    from rollproof.judging.checks import Finding as Finding
    from rollproof.judging.checks import Verdict as Verdict
    from rollproof.judging.checks import request_check as request_check
    from rollproof.judging.checks import trace_check as trace_check
    from rollproof.judging.report import Report as Report
    from rollproof.layouts.functions import LayoutSubject as LayoutSubject
    from rollproof.layouts.functions import layout_function as layout_function
    from rollproof.pytest_plugin.decorators import BatchConformance as BatchConformance
    from rollproof.pytest_plugin.decorators import CorrectionConformance as CorrectionConformance
    from rollproof.pytest_plugin.decorators import EngineConformance as EngineConformance
    from rollproof.pytest_plugin.decorators import ReplayConformance as ReplayConformance
    from rollproof.pytest_plugin.decorators import (
        ReplayLayoutConformance as ReplayLayoutConformance,
    )
    from rollproof.pytest_plugin.decorators import RolloutConformance as RolloutConformance
    from rollproof.pytest_plugin.decorators import conformance as conformance
    from rollproof.recording.live_recorder import LiveRecorder as LiveRecorder
    from rollproof.recording.live_recorder import record_live as record_live
    from rollproof.recording.recorder import EngineCall as EngineCall
    from rollproof.recording.recorder import Recording as Recording
    from rollproof.recording.recorder import record as record
    from rollproof.simulation.mutation_guard import lend as lend
    from rollproof.verification.batches import judge_batches as judge_batches
    from rollproof.verification.corrections import judge_corrections as judge_corrections
    from rollproof.verification.layouts import judge_layouts as judge_layouts
    from rollproof.verification.replay import judge_replay as judge_replay
    from rollproof.verification.rollouts import run_conformance as run_conformance

# A name here must not be that of a submodule: importing the submodule would put the module in the
# name's place.
_HOMES = {
    "verification.batches": ("judge_batches",),
    "verification.corrections": ("judge_corrections",),
    "corrections.correction_subject": ("CorrectionSubject", "correction_function"),
    "verification.rollouts": ("run_conformance",),
    "core.batch_columns": ("Column", "ColumnExtent"),
    "core.case": ("Action", "ActionKind", "Case", "Trigger"),
    "judging.checks": (
        "Check",
        "CheckResult",
        "Collector",
        "Finding",
        "Verdict",
        "request_check",
        "trace_check",
    ),
    "core.contract": ("Contract",),
    "errors": (
        "CaseError",
        "ConformanceError",
        "ContractError",
        "ExpectationError",
        "GapError",
        "RollproofError",
        "StackError",
        "SubjectError",
        "TraceError",
        "TraceVersionError",
        "UsageError",
    ),
    "fakes.engine.fake_engine": ("FakeEngine",),
    "fakes.engine.fleet": ("Fleet",),
    "simulation.mutation_guard": ("lend",),
    "recording.live_recorder": ("LiveRecorder", "record_live"),
    "recording.recorder": ("EngineCall", "Recording", "record"),
    "core.engine_contract": ("PauseMode",),
    "core.limits": ("RolloutLimits",),
    "core.own_stops": ("OwnStops",),
    "core.records": ("BatchRow", "EngineOutput", "FinishReason", "Request", "Rollout", "Span"),
    "core.sampling_masks": ("SamplingMask",),
    "verification.layouts": ("judge_layouts",),
    "verification.replay": ("judge_replay",),
    "layouts.functions": ("LayoutSubject", "layout_function"),
    "judging.report": ("Report",),
    "core.subjects": ("BatchSubject", "EngineSubject", "ReplaySubject", "RolloutSubject"),
    "pytest_plugin.decorators": (
        "BatchConformance",
        "CorrectionConformance",
        "EngineConformance",
        "ReplayConformance",
        "ReplayLayoutConformance",
        "RolloutConformance",
        "conformance",
    ),
    "core.trace": ("Trace",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "ActionKind",
    "BatchConformance",
    "BatchRow",
    "BatchSubject",
    "Case",
    "CaseError",
    "Check",
    "CheckResult",
    "Collector",
    "Column",
    "ColumnExtent",
    "ConformanceError",
    "Contract",
    "ContractError",
    "CorrectionConformance",
    "CorrectionSubject",
    "EngineCall",
    "EngineConformance",
    "EngineOutput",
    "EngineSubject",
    "ExpectationError",
    "FakeEngine",
    "Finding",
    "FinishReason",
    "Fleet",
    "GapError",
    "LayoutSubject",
    "OwnStops",
    "PauseMode",
    "Recording",
    "ReplayConformance",
    "ReplayLayoutConformance",
    "ReplaySubject",
    "Report",
    "Request",
    "Rollout",
    "RolloutConformance",
    "RolloutLimits",
    "RolloutSubject",
    "RollproofError",
    "SamplingMask",
    "Span",
    "StackError",
    "SubjectError",
    "Trace",
    "TraceError",
    "TraceVersionError",
    "Trigger",
    "UsageError",
    "Verdict",
    "conformance",
    "correction_function",
    "judge_batches",
    "judge_corrections",
    "judge_layouts",
    "judge_replay",
    "layout_function",
    "lend",
    "record",
    "request_check",
    "run_conformance",
    "trace_check",
]


def __getattr__(name: str) -> Any:
    if name == "contracts":  # a module of public functions: `rollproof.contracts.verl()`
        return importlib.import_module("rollproof.contracts")
    if name not in _HOME:
        raise AttributeError(f"module 'rollproof' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rollproof.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
