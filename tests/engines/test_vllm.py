"""The real vLLM on a CPU, judged by the conformance suite; the fake is held to it. Takes minutes:
`nox -s engines` runs it.

One engine process per setting of the run, and one run per session.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata

import pytest

from rollproof.core.contract import KvPolicy
from rollproof.core.engine_protocol import EngineSettings
from rollproof.core.events.rollout import Weights
from rollproof.core.trace import Trace
from rollproof.engines.calibration import differences
from rollproof.engines.engine_targets import fake_target
from rollproof.engines.vllm import vllm_cpu
from rollproof.engines.vllm.vllm_engine import offline
from rollproof.fakes.engine.engine_subject import FakeEngineSubject
from rollproof.fakes.engine.flavours import FLAVOURS
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun, judged, run_experiments
from tests.support.real_engine import (
    STALE,
    assert_only_expected_failures,
    assert_rounding,
    assert_situations,
    run_everything,
)

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
EXPECTED = (
    {"engine.identity": RELOAD}
    if vllm_cpu.is_cpu_build() and metadata.version(vllm_cpu.PACKAGE) == "0.32.0"
    else {}
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> EngineRun:
    """Every experiment on the real engine, once; nothing of it is left."""
    return run_everything("vllm", tmp_path_factory, pytestconfig)


@pytest.fixture(scope="module")
def report(run: EngineRun) -> Report:
    """The verdicts on that run."""
    return judged("vllm", run, expected=EXPECTED)


def test_every_check_passes_but_for_what_is_known(report: Report) -> None:
    """Rows, logprobs, versions and replies are as declared and as an independent forward has them;
    what fails is on record.
    """
    assert_only_expected_failures(report, EXPECTED)


def test_the_run_reaches_its_situations(report: Report) -> None:
    """Calls were preempted, prefixes cached, calls aborted before and after their first token,
    weights changed under running calls.
    """
    assert_situations(report)


def test_the_fake_does_what_the_real_engine_does(run: EngineRun) -> None:
    """In every experiment the fake shows the facts that the real engine shows, but for the one that
    the real engine fails.
    """

    def fake(settings: EngineSettings) -> FakeEngineSubject:
        return FakeEngineSubject(
            settings, offline(FLAVOURS["vllm"]) if settings.kv_tokens else "vllm"
        )

    facts = differences(run_experiments(fake_target("vllm", make=fake)).traces, run.traces)
    assert {} == {
        name: differing
        for name, differing in facts.items()
        if not (EXPECTED and name == "identity")
    }


def test_a_stale_cache_is_seen(run: EngineRun) -> None:
    """KV that an update retains, as requested, is a stale cache if the update claims that it
    cleared it: the values show it.
    """
    (retained,) = [trace for trace in run.traces if trace.header.profile == "update-abort"]
    client, engine = (
        replace(contract, kv_policy=KvPolicy.RECOMPUTE)
        for contract in (
            retained.header.contract,
            retained.header.engine or retained.header.contract,
        )
    )
    header = replace(retained.header, contract=client, engine=engine)
    events = [
        replace(event, flushed=True) if isinstance(event, Weights) else event
        for event in retained.events
    ]
    failed = {
        result.id
        for result in judged(
            "vllm", EngineRun(traces=[Trace(header=header, events=tuple(events))])
        ).failed
    }
    assert {"weights.no-stale-cache", "routes.prefix-cache"} <= failed <= STALE
    assert not {result.id for result in judged("vllm", EngineRun(traces=[retained])).failed}


def test_the_gap_in_float32_is_rounding(run: EngineRun) -> None:
    """At temperature 1 and under one version, no logprob is 1e-4 from that of the independent
    forward.
    """
    profiles = {"plain", "cached", "resent", "resumed", "crowded"}
    assert_rounding(run, profiles, lambda _, reference: reference.logprobs)
