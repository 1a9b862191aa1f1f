"""The real vLLM on a CPU, judged by the conformance suite; the fake is held to it. Takes minutes: `nox -s engines` runs it.

One engine process per setting of the run, and one run per session.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from rollproof.checks import Verdict
from rollproof.engines import vllm_cpu
from rollproof.engines.asks import EngineSettings
from rollproof.engines.calibration import differences
from rollproof.engines.conformance import EngineRun, judged, run_experiments
from rollproof.engines.targets import engine_target, fake_target
from rollproof.engines.vllm import offline
from rollproof.fakes.engine_subject import FakeEngineSubject
from rollproof.fakes.flavours import FLAVOURS
from rollproof.report import Report
from rollproof.trace import Call, Reference, Reply

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("vllm", "torch", "transformers"))
pytestmark = [
    # looked for, not imported: an engine never lives in the process that judges it
    pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed here (`nox -s engines` installs it)"),
    pytest.mark.skipif(not vllm_cpu.is_cpu_build(), reason="this vLLM is not the build for CPUs; gpu_suites/ judges it on a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
RELOAD = "vLLM 0.32 on a CPU: weights that are loaded a second time compute something else (docs/track-record.md)"
EXPECTED = {"engine.identity": RELOAD} if vllm_cpu.is_cpu_build() and metadata.version(vllm_cpu.PACKAGE) == "0.32.0" else {}


def _children() -> set[str]:
    """Command lines of the processes that this one has started and that still run."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(parent) == os.getpid() and line:
            found.add(line)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Every experiment on the real engine, once; no process, shared memory or temporary folder of it is left."""
    temporary = tmp_path_factory.mktemp("temporary")
    before, shared = _children(), _shared_memory()
    patch = pytest.MonkeyPatch()
    patch.setattr(tempfile, "tempdir", str(temporary))
    try:
        done = run_experiments(engine_target("vllm", model=None, folder=tmp_path_factory.mktemp("models")))
    finally:
        patch.undo()
    assert [] == sorted(path.name for path in temporary.iterdir())
    assert set() == _children() - before
    assert set() == {path for path in _shared_memory() - shared if not _in_use(path)}
    return done


def _shared_memory() -> set[Path]:
    folder = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
    return set(folder.iterdir()) if folder.is_dir() else set()


def _in_use(path: Path) -> bool:
    """Whether a process that runs has it mapped or open: then it is somebody else's."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (entry / "maps").read_text() or any(os.readlink(fd) == str(path) for fd in (entry / "fd").iterdir()):  # noqa: PTH115 - text
                return True
        except OSError:
            continue
    return False


@pytest.fixture(scope="module")
def report(run: EngineRun) -> Report:
    """The verdicts on that run."""
    return judged("vllm", run, expected=EXPECTED)


def test_every_check_passes_but_for_what_is_known(report: Report) -> None:
    """Rows, logprobs, versions and replies are as declared and as an independent forward has them; what fails is on record."""
    assert {} == {result.id: [finding.observed for finding in result.findings] for result in report.failed}
    assert set(EXPECTED) == {result.id for result in report.results if result.verdict is Verdict.FAIL}
    assert [] == [(result.id, result.reason) for result in report.results if result.verdict is Verdict.UNKNOWN]
    assert report.canary is not None
    assert report.canary.red


def test_what_the_run_is_for_came_about(run: EngineRun, report: Report) -> None:
    """Calls were preempted, prefixes cached, calls aborted before and after their first token, weights changed under running calls."""
    assert () == report.notes
    exercised = {result.id: result.exercised for result in report.results}
    assert exercised["engine.routes"]["rows of cached tokens"] > 100
    assert exercised["engine.parts"]["replies aborted before the first token"] >= 2
    assert exercised["versions.engine-tags"]["replies across versions"] >= 2


def test_the_fake_does_what_the_real_engine_does(run: EngineRun) -> None:
    """In every experiment the fake shows the facts that the real engine shows, but for the one that the real engine fails."""

    def fake(settings: EngineSettings) -> FakeEngineSubject:
        return FakeEngineSubject(settings, offline(FLAVOURS["vllm"]) if settings.kv_tokens else "vllm")

    found = differences(run_experiments(fake_target("vllm", make=fake)).traces, run.traces)
    assert {} == {name: told for name, told in found.items() if not (EXPECTED and name == "identity")}


def test_the_gap_in_float32_is_rounding(run: EngineRun) -> None:
    """At temperature 1 and under one version, no logprob is 1e-4 from that of the independent forward."""
    gaps = []
    for trace in run.traces:
        if trace.header.profile not in ("plain", "cached", "resent", "resumed", "crowded"):
            continue
        calls = {event.call_id: event for event in trace.events if isinstance(event, Call)}
        replies = {event.call_id: event for event in trace.events if isinstance(event, Reply)}
        for event in trace.events:
            if isinstance(event, Reference):
                output = replies[event.call_id].output
                sent = len(calls[event.call_id].prompt_ids)
                if output.logprobs is not None and len(output.logprobs):
                    gaps.append(np.abs(output.logprobs - event.logprobs[sent:]))
    together = np.concatenate(gaps)
    assert len(together) > 200
    assert float(together.max()) < 1e-4
