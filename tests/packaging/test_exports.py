from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import rollproof
from rollproof.errors import StackError
from tools.docs.api_page import PUBLIC_MODULES

ROOT = Path(__file__).parents[2]

PUBLIC = {
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
}


def modules() -> list[str]:
    """Every module of the package that imports on a plain CPU, but for the test modules of the GPU
    suites.
    """
    found = pkgutil.walk_packages(rollproof.__path__, "rollproof.")
    return [
        info.name
        for info in found
        if not info.name.startswith(("rollproof.gpu_suites.test_", "rollproof.gpu_suites.conftest"))
    ]


def test_the_top_level_names_are_these() -> None:
    """Adding or removing a public name is a decision: it changes this list."""
    assert sorted(PUBLIC) == sorted(rollproof.__all__)
    assert sorted(PUBLIC) == dir(rollproof)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_is_there(name: str) -> None:
    """Each public name can be had, and is documented."""
    assert getattr(rollproof, name).__doc__


def test_no_name_is_that_of_a_submodule() -> None:
    """A submodule of the same name would take the name's place as soon as anything imports it."""
    assert set() == PUBLIC & {info.name for info in pkgutil.iter_modules(rollproof.__path__)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    """hasattr() and from-imports behave as for any module."""
    with pytest.raises(AttributeError, match="module 'rollproof' has no attribute 'nothing'"):
        _ = rollproof.nothing
    assert not hasattr(rollproof, "nothing")


OPTIONAL = ("torch", "triton", "skyrl_gym")
"""Packages that only modules need which nobody imports without having them."""


@pytest.mark.parametrize("name", modules())
def test_every_module_lists_what_it_exports(name: str) -> None:
    """The names of __all__ exist; a module that needs an optional package says which."""
    try:
        module = importlib.import_module(name)
    except (StackError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in OPTIONAL:
            raise
        pytest.skip(str(error))

    assert module.__doc__
    assert [] == [
        export for export in getattr(module, "__all__", ()) if not hasattr(module, export)
    ]


def test_type_checkers_are_told_the_same_names() -> None:
    """Each name that is imported lazily at run time is also imported in the block that only type
    checkers read.
    """
    tree = ast.parse(inspect.getsource(rollproof))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert {
        (f"rollproof.{module}", name)
        for module, names in rollproof._HOMES.items()
        for name in names
    } == imported


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_a_public_module_lists_its_names(name: str) -> None:
    """What may be imported from a public module is its ``__all__``, and docs/api.md names it."""
    try:
        module = importlib.import_module(name)
    except (StackError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in OPTIONAL:
            raise
        pytest.skip(str(error))

    assert module.__all__
    assert f"|`{name}`|" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_users_are_shown_public_modules_only() -> None:
    """The pages, the examples and the typed uses import from no other module: those are private."""
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs" / "example").glob("*.py"),
        ROOT / "tests" / "typing" / "uses.py",
    ]
    pattern = re.compile(
        r"^ *(?:from (rollproof[\w.]*) import|import (rollproof[\w.]*))", re.MULTILINE
    )
    private = {
        (path.name, module)
        for path in files
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
        if (module := match[1] or match[2]) not in PUBLIC_MODULES
    }

    # The typed uses also hold our own adapters to the protocols.
    assert {("uses.py", "rollproof.engines.vllm.vllm_engine")} == private
