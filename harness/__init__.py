"""rollproof: proves that the rollouts of an LLM reinforcement-learning stack are what its trainer thinks they are.

The package root stays light on purpose (it is imported by every pytest session that has rollproof installed): public
names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollproof.batching import judge_batches as judge_batches
    from rollproof.campaign import run_conformance as run_conformance
    from rollproof.case import Action as Action
    from rollproof.case import ActionKind as ActionKind
    from rollproof.case import Case as Case
    from rollproof.case import Trigger as Trigger
    from rollproof.checks import Check as Check
    from rollproof.checks import CheckResult as CheckResult
    from rollproof.checks import Collector as Collector
    from rollproof.checks import Finding as Finding
    from rollproof.checks import Verdict as Verdict
    from rollproof.checks import request_check as request_check
    from rollproof.checks import trace_check as trace_check
    from rollproof.contract import Contract as Contract
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
    from rollproof.fakes.engine import FakeEngine as FakeEngine
    from rollproof.fakes.fleet import Fleet as Fleet
    from rollproof.lending import lend as lend
    from rollproof.recording import EngineCall as EngineCall
    from rollproof.recording import Recording as Recording
    from rollproof.recording import record as record
    from rollproof.records import BatchRow as BatchRow
    from rollproof.records import EngineOutput as EngineOutput
    from rollproof.records import FinishReason as FinishReason
    from rollproof.records import Request as Request
    from rollproof.records import Rollout as Rollout
    from rollproof.records import Span as Span
    from rollproof.replay.layouts.judging import judge_layouts as judge_layouts
    from rollproof.replay.layouts.subject import LayoutSubject as LayoutSubject
    from rollproof.replay.layouts.subject import layout_function as layout_function
    from rollproof.report import Report as Report
    from rollproof.subjects import BatchSubject as BatchSubject
    from rollproof.subjects import EngineSubject as EngineSubject
    from rollproof.subjects import ReplaySubject as ReplaySubject
    from rollproof.subjects import RolloutSubject as RolloutSubject
    from rollproof.suites import BatchConformance as BatchConformance
    from rollproof.suites import EngineConformance as EngineConformance
    from rollproof.suites import ReplayConformance as ReplayConformance
    from rollproof.suites import ReplayLayoutConformance as ReplayLayoutConformance
    from rollproof.suites import RolloutConformance as RolloutConformance
    from rollproof.suites import conformance as conformance
    from rollproof.trace import PauseMode as PauseMode
    from rollproof.trace import Trace as Trace

# A name here must not be that of a submodule: importing the submodule would put the module in the name's place.
_HOMES = {
    "batching": ("judge_batches",),
    "campaign": ("run_conformance",),
    "case": ("Action", "ActionKind", "Case", "Trigger"),
    "checks": ("Check", "CheckResult", "Collector", "Finding", "Verdict", "request_check", "trace_check"),
    "contract": ("Contract",),
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
    "fakes.engine": ("FakeEngine",),
    "fakes.fleet": ("Fleet",),
    "lending": ("lend",),
    "recording": ("EngineCall", "Recording", "record"),
    "records": ("BatchRow", "EngineOutput", "FinishReason", "Request", "Rollout", "Span"),
    "replay.layouts.judging": ("judge_layouts",),
    "replay.layouts.subject": ("LayoutSubject", "layout_function"),
    "report": ("Report",),
    "subjects": ("BatchSubject", "EngineSubject", "ReplaySubject", "RolloutSubject"),
    "suites": (
        "BatchConformance",
        "EngineConformance",
        "ReplayConformance",
        "ReplayLayoutConformance",
        "RolloutConformance",
        "conformance",
    ),
    "trace": ("PauseMode", "Trace"),
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
    "ConformanceError",
    "Contract",
    "ContractError",
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
    "PauseMode",
    "Recording",
    "ReplayConformance",
    "ReplayLayoutConformance",
    "ReplaySubject",
    "Report",
    "Request",
    "Rollout",
    "RolloutConformance",
    "RolloutSubject",
    "RollproofError",
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
    "judge_batches",
    "judge_layouts",
    "layout_function",
    "lend",
    "record",
    "request_check",
    "run_conformance",
    "trace_check",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollproof' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rollproof.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
