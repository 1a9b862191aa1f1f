"""Released engines on a GPU, judged by the conformance suite of their CPU runs, in every setting; and under load."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollproof.checks import Verdict
from rollproof.engines.conformance import judged, run_experiments
from rollproof.gpu_suites.engines import VARIANTS, expected_of, gpu_target, on_gpu
from rollproof.gpu_suites.load import judge_load
from rollproof.gpu_suites.needs import installed
from rollproof.gpu_suites.reporting import RunReport
from rollproof.report import Report

ENGINES = [
    pytest.param("vllm", marks=pytest.mark.engine("vllm", ">=0.22")),
    pytest.param("sglang", marks=pytest.mark.engine("sglang", ">=0.5.12")),
]
pytestmark = [pytest.mark.memory(30), pytest.mark.engine("torch"), pytest.mark.engine("transformers"), pytest.mark.filterwarnings("ignore")]


def raise_for(report: Report) -> None:
    """Fail with what failed unexpectedly, and with what was listed as known and passed."""
    told = {result.id: [f"{one.title}: {one.observed}" for one in result.findings[:3]] for result in report.failed}
    assert not told, told
    failing = {result.id for result in report.results if result.verdict is Verdict.FAIL}
    assert set(report.expected) <= failing


@pytest.mark.parametrize(
    ("engine", "variant"),
    [
        pytest.param(*engine.values, one.name, marks=engine.marks, id=f"{engine.values[0]}-{one.name}")
        for engine in ENGINES
        for one in VARIANTS.values()
        if engine.values[0] in one.extra
    ],
)
def test_conformance(engine: str, variant: str, tmp_path: Path, rollproof_run: RunReport) -> None:
    """Rows, logprobs, versions, aborts, pauses and updates are as declared, and values as an independent forward has them."""
    began = time.perf_counter()
    target = gpu_target(engine, variant, tmp_path)
    with on_gpu(engine, VARIANTS[variant].dtype_of(engine)):
        run = run_experiments(target)
    report = judged(target.name, run, expected=expected_of(engine), seconds=time.perf_counter() - began)
    rollproof_run.suite(
        "engine",
        report,
        version=installed(engine).version,
        setting=VARIANTS[variant].about,
        dtype=VARIANTS[variant].dtype_of(engine),
        by_experiment={name: round(seconds, 1) for name, seconds in run.seconds.items()},
    )
    raise_for(report)
    if VARIANTS[variant].exact(engine):
        assert report.canary is not None
        assert report.canary.red


@pytest.mark.parametrize("engine", ENGINES)
def test_load(engine: str, tmp_path: Path, rollproof_run: RunReport) -> None:
    """256 calls at once, aborted at random and resumed while the weights change: every token and row is accounted for."""
    target = gpu_target(engine, "eager", tmp_path)
    with on_gpu(engine, VARIANTS["eager"].dtype_of(engine)):
        report = judge_load(target)
    rollproof_run.suite("engine", report, version=installed(engine).version)
    raise_for(report)
    assert report.exercised["aborts mid-decode"] > 20
    assert report.exercised["resumes across a weight version"] > 20
