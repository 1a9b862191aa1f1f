"""Gating of the GPU suites.

A test that needs more than this host has is skipped, or fails if a GPU is required.
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
from rollproof.gpu_suites.requirements import MARKERS, needs_of, unmet_need
from rollproof.gpu_suites.timing import Part, Spending
from rollproof.gpu_suites.user_options import check_options
from rollproof.plugin import state_of

_BEGAN = time.perf_counter()
# Tests of this session that were not skipped
_RUN: set[str] = set()
_CLAIM = pytest.StashKey[Claim]()
# Whether a report was begun; absent until the options are checked
_REPORT_BEGUN = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and claim the free GPUs.

    Raises ``UsageError`` for a session of several processes.
    """
    # each process of a session would find the GPUs taken by the others
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        raise pytest.UsageError(
            "The GPU suites run in one process, which claims its GPUs: leave -n out."
            " .github/workflows/gpu.yml has shards."
        )
    # with this cuBLAS sums in one order; without it two runs of a trainer differ
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for text in MARKERS.values():
        config.addinivalue_line("markers", text)
    config.stash[_CLAIM] = Claim() if config.option.collectonly else Claim.make()


def pytest_report_header(config: pytest.Config) -> str:
    """Say which GPUs the session takes, and which it skips and why."""
    findings, claim = find_gpus(), config.stash[_CLAIM]
    if findings.reason is not None:
        return findings.reason
    taken = ", ".join(
        f"{gpu.index} ({gpu.name or 'unknown'})"
        for gpu in findings.gpus
        if gpu.taken is None and claim.refused is None
    )
    skipped = [f"left alone: {reason}" for reason in claim.left]
    return "; ".join((f"GPUs: {taken or 'none that is free'}", *skipped))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the environment."""
    if _CLAIM in config.stash:
        config.stash[_CLAIM].release()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of full runs, unless they are named on the command line.

    Raises ``UsageError`` for options that cannot be used.
    """
    try:
        check_options(state_of(config).settings)
    except RollproofError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_REPORT_BEGUN] = False
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.rollproof)  # failures are annotated on GitHub Actions
    if state_of(config).settings.full or any("::" in argument for argument in config.args):
        return
    deselected = [item for item in items if item.get_closest_marker("full")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture: an engine that cannot run is not even started."""
    settings, findings = state_of(item.config).settings, find_gpus()
    claim = item.config.stash[_CLAIM]
    try:
        need = needs_of(item.iter_markers())
        reason = unmet_need(need, findings)
    except UsageError as error:
        pytest.fail(f"{item.nodeid}: {error}", pytrace=False)
    available = settings.gpus or len(findings.gpus) + claim.hidden
    trainer = getattr(getattr(item, "callspec", None), "params", {}).get("trainer")
    requested = settings.trainer is not None and trainer == settings.trainer
    if findings.gpus and need.gpus > available and not (requested and settings.require_gpu):
        pytest.skip(f"needs {need.gpus} GPUs, and this run counts on {available}")
    if reason is not None:
        reason = "; ".join((reason, *claim.left))
    elif claim.refused is not None:
        reason = claim.refused
    else:
        # CUDA numbers the GPUs that it was shown at first, even if another process took one since
        reason = "; ".join(
            f"{gpu.taken}, and was free when this session began"
            for gpu in findings.gpus[: need.gpus]
            if gpu.taken
        )
    if not reason:
        return
    # a green run in which everything was skipped would prove nothing
    if settings.require_gpu:
        pytest.fail(f"{reason}; a GPU was required (--rollproof-require-gpu)", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record that a test was run."""
    if report.when == "call" and not report.skipped:
        _RUN.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that ran nothing if a GPU is required, and write a requested report."""
    folder = state_of(session.config).settings.gpu_report
    if (
        folder is not None
        and not session.config.option.collectonly
        and not session.config.stash.get(_REPORT_BEGUN, True)
    ):
        report = RunReport(described(), Path(folder), Spending(_BEGAN))
        report.note("Nothing was measured: no test that measures could be run.")
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
    """The report of this session, written as it grows to ``--rollproof-gpu-report``."""
    spending = Spending(_BEGAN)
    with spending.on(Part.LIBRARIES), contextlib.suppress(ImportError):
        importlib.import_module("torch")
        # transformers imports its models on first use, which would count as a trainer's time
        _ = importlib.import_module("transformers").AutoModelForCausalLM
    folder = state_of(pytestconfig).settings.gpu_report
    pytestconfig.stash[_REPORT_BEGUN] = True
    run = RunReport(described(rollproof_gpus), Path(folder) if folder else None, spending)
    for reason in pytestconfig.stash[_CLAIM].left:
        run.note(f"{reason}: left alone")
    yield run
    run.close()


@pytest.fixture(scope="module", autouse=True)
def _require_memory_back() -> Iterator[None]:
    """Fail a suite if memory is missing after it, except for this process's CUDA context."""
    # memory that one engine retains is missing for the next one
    watch = None if shared() else MemoryWatch(slack_gib=2.0)
    yield
    # models in reference cycles hold GPU memory until then
    gc.collect()
    empty_cuda()
    missing = watch.missing() if watch is not None else None
    if missing:
        pytest.fail(
            f"memory of this suite was {missing}: a process of it still runs, or holds the card",
            pytrace=False,
        )
