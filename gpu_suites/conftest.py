"""Gating of the GPU suites: what a test's markers ask for and this host lacks skips it, or fails it
where a GPU is required.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollproof.engines.gpus import GpuFindings, find_gpus, shared
from rollproof.errors import RollproofError, UsageError
from rollproof.gpu_suites.gap.scorers import empty_cuda
from rollproof.gpu_suites.gpu_lock import Claim
from rollproof.gpu_suites.report.hardware import MemoryWatch, described
from rollproof.gpu_suites.report.run_report import RunReport
from rollproof.gpu_suites.requirements import MARKERS, needs_of, unmet
from rollproof.gpu_suites.timing import Part, Spending
from rollproof.gpu_suites.user_options import check_given
from rollproof.plugin import state_of

_BEGAN = time.perf_counter()
_RUN: set[str] = set()
"""Tests of this session that were not skipped."""
_CLAIM = pytest.StashKey[Claim]()
_TOLD = pytest.StashKey[bool]()
"""Whether a report was begun; absent where the options were not yet found good."""


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the markers, cuBLAS to sum in one order (without it two runs of a trainer
    differ), and CUDA of free cards alone.

    Raises ``UsageError`` for a session of several processes: each would find the cards taken by the
    others.
    """
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        raise pytest.UsageError(
            "The GPU suites run in one process, whose cards are its own: leave -n out."
            " .github/workflows/gpu.yml has shards."
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for text in MARKERS.values():
        config.addinivalue_line("markers", text)
    config.stash[_CLAIM] = Claim() if config.option.collectonly else Claim.make()


def pytest_report_header(config: pytest.Config) -> str:
    """Which cards the session takes, and which it leaves alone and why."""
    found, claim = find_gpus(), config.stash[_CLAIM]
    if found.reason is not None:
        return found.reason
    taken = ", ".join(
        f"{gpu.index} ({gpu.name or 'unknown'})"
        for gpu in found.gpus
        if gpu.taken is None and claim.refused is None
    )
    return "; ".join(
        (f"GPUs: {taken or 'none that is free'}", *(f"left alone: {why}" for why in claim.left))
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the environment as it was."""
    if _CLAIM in config.stash:
        config.stash[_CLAIM].release()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a full run has, unless it is named on the command line. Raises
    ``UsageError`` for options that name nothing.
    """
    try:
        check_given(state_of(config).settings)
    except RollproofError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_TOLD] = False
    if state_of(config).settings.full or any("::" in argument for argument in config.args):
        return
    out = [item for item in items if item.get_closest_marker("full")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture: an engine that cannot run is not even started."""
    settings, found, claim = (
        state_of(item.config).settings,
        find_gpus(),
        item.config.stash[_CLAIM],
    )
    try:
        need = needs_of(item.iter_markers())
        reason = unmet(need, found)
    except UsageError as error:
        pytest.fail(f"{item.nodeid}: {error}", pytrace=False)
    there = settings.gpus or len(found.gpus) + claim.hidden
    asked = (
        settings.trainer is not None
        and getattr(getattr(item, "callspec", None), "params", {}).get("trainer")
        == settings.trainer
    )
    if found.gpus and need.gpus > there and not (asked and settings.require_gpu):
        pytest.skip(f"needs {need.gpus} GPUs, and this run counts on {there}")
    if reason is not None:
        reason = "; ".join((reason, *claim.left))
    elif (
        reason := claim.refused
    ) is None:  # CUDA counts from the first card that it was shown, whoever came to it since
        reason = "; ".join(
            f"{gpu.taken}, and was free when this session began"
            for gpu in found.gpus[: need.gpus]
            if gpu.taken
        )
    if not reason:
        return
    if settings.require_gpu:
        pytest.fail(f"{reason}; a GPU was required (--rollproof-require-gpu)", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note that something was run."""
    if report.when == "call" and not report.skipped:
        _RUN.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where a GPU was required, a session that ran nothing is not green; a report that was asked
    for is written in any case.
    """
    folder = state_of(session.config).settings.gpu_report
    if (
        folder is not None
        and not session.config.option.collectonly
        and not session.config.stash.get(_TOLD, True)
    ):
        nothing = RunReport(described(), Path(folder), Spending(_BEGAN))
        nothing.note("Nothing was measured: no test that measures could be run.")
    required = (
        state_of(session.config).settings.require_gpu and not session.config.option.collectonly
    )
    if (
        required
        and not _RUN
        and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line(
            "\nnothing was run, and a GPU was required (--rollproof-require-gpu)", red=True
        )
    _RUN.clear()


@pytest.fixture(scope="session")
def rollproof_gpus() -> GpuFindings:
    """The GPUs of this host."""
    return find_gpus()


@pytest.fixture(scope="session")
def rollproof_run(rollproof_gpus: GpuFindings, pytestconfig: pytest.Config) -> Iterator[RunReport]:
    """What this session finds, written as it grows to the folder of ``--rollproof-gpu-report``."""
    spending = Spending(_BEGAN)
    with spending.on(Part.LIBRARIES), contextlib.suppress(ImportError):
        importlib.import_module("torch")
        _ = importlib.import_module("transformers").AutoModelForCausalLM
    folder = state_of(pytestconfig).settings.gpu_report
    pytestconfig.stash[_TOLD] = True
    run = RunReport(described(rollproof_gpus), Path(folder) if folder else None, spending)
    for why in pytestconfig.stash[_CLAIM].left:
        run.note(f"{why}: left alone")
    yield run
    run.close()


@pytest.fixture(scope="module", autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """After each suite the cards are as empty as before it, but for our own context: what an engine
    keeps, the next one lacks.
    """
    watch = None if shared() else MemoryWatch(slack_gib=2.0)
    yield
    gc.collect()
    empty_cuda()
    missing = watch.missing() if watch is not None else None
    if missing:
        pytest.fail(
            f"memory of this suite was {missing}: a process of it still runs, or holds the card",
            pytrace=False,
        )
