"""What the tests of real engines have in common: the run, its verdicts, and starts that fail."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Call, Reference, Reply
from rollproof.core.records import LogprobArray
from rollproof.core.subjects import EngineSubject
from rollproof.core.trace import Trace
from rollproof.engines.engine_targets import engine_target
from rollproof.errors import EngineStartError
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, run_experiments
from tests.support.engine_leftovers import leftovers
from tests.support.terminal_progress import shown

__all__ = [
    "STALE",
    "assert_interrupted_start_leaves_nothing",
    "assert_only_expected_failures",
    "assert_rounding",
    "assert_situations",
    "changed_checkpoint",
    "failed_start",
    "run_everything",
]

STALE = {"weights.no-stale-cache", "routes.prefix-cache", "engine.routes", "engine.logprobs"}
"""The checks that a stale prefix cache breaks."""


def run_everything(
    name: str, folders: pytest.TempPathFactory, configuration: pytest.Config
) -> EngineRun:
    """Run every experiment on the real engine; assert that nothing of it is left."""
    before = leftovers(name)
    progress = shown(configuration)
    run = run_experiments(
        engine_target(name, model=None, folder=folders.mktemp("models"), progress=progress),
        progress=progress,
    )
    assert set() == leftovers(name) - before
    return run


def assert_only_expected_failures(report: Report, expected: Mapping[str, str]) -> None:
    """Assert that the checks in ``expected`` fail, that all others pass, and that the canary is
    caught.
    """
    assert {} == {
        result.id: [finding.observed for finding in result.findings] for result in report.failed
    }
    assert set(expected) == {
        result.id for result in report.results if result.verdict is Verdict.FAIL
    }
    assert [] == [
        (result.id, result.reason) for result in report.results if result.verdict is Verdict.UNKNOWN
    ]
    assert report.canary is not None
    assert report.canary.red


def assert_situations(report: Report) -> None:
    """Assert that prefixes were cached, calls aborted before and after their first token, and
    weights changed under running calls.
    """
    assert () == report.notes
    exercised = {result.id: result.exercised for result in report.results}
    assert exercised["engine.routes"]["rows of cached tokens"] > 100
    assert exercised["engine.parts"]["replies aborted before the first token"] >= 2
    assert exercised["versions.engine-tags"]["replies across versions"] >= 2


def assert_rounding(
    run: EngineRun,
    profiles: set[str],
    logprobs_of: Callable[[Trace, Reference], LogprobArray],
) -> None:
    """Assert that no logprob of these experiments is 1e-4 from that of the independent forward."""
    gaps = []
    for trace in run.traces:
        if trace.header.profile not in profiles:
            continue
        calls = {event.call_id: event for event in trace.events if isinstance(event, Call)}
        replies = {event.call_id: event for event in trace.events if isinstance(event, Reply)}
        for event in trace.events:
            if isinstance(event, Reference):
                logprobs = replies[event.call_id].output.logprobs
                prompt = len(calls[event.call_id].prompt_ids)
                if logprobs is not None and len(logprobs):
                    gaps.append(np.abs(logprobs - logprobs_of(trace, event)[prompt:]))
    together = np.concatenate(gaps)
    assert len(together) > 200
    assert float(together.max()) < 1e-4


async def failed_start(engine: EngineSubject) -> str:
    """Start an engine that cannot start; return the text of the error."""
    try:
        await engine.start()
    except EngineStartError as error:
        return str(error)
    finally:
        await engine.stop()
    return "it started"


def changed_checkpoint(
    model: Path, folder: Path, *, cut_weights: bool = False, **config: Any
) -> Path:
    """Copy a checkpoint with other values in its config, or with weights that end too early."""
    shutil.copytree(model, folder)
    original: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**original, **config}))
    if cut_weights:
        weights = next(folder.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:1000])
    return folder


def assert_interrupted_start_leaves_nothing(name: str, model: Path, title: str) -> None:
    """Send Ctrl-C to ``rollproof verify`` while processes of the engine, called ``title``, start.

    Assert that it ends with code 130, without a traceback, and that nothing is left.
    """
    before = leftovers(name)
    arguments = ["-m", "rollproof", "verify", "--engine", name, "--model", str(model)]
    # a runner in the background passes an ignored SIGINT on to its children
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed,
    ) as run:
        try:
            end = time.monotonic() + 240
            while not any(title in process for process in leftovers(name) - before):
                assert run.poll() is None, run.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.2)
            run.send_signal(signal.SIGINT)
            output, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert (130, False) == (run.returncode, "Traceback" in output), output
    assert set() == leftovers(name) - before
