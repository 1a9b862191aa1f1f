"""Released engines on a GPU, judged by the conformance suite of their CPU runs, in every setting; and under load."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.engines.asks import EngineSettings
from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.gpu_suites.engines import VARIANTS, gap_engine, gpu_target, known_of, on_gpu
from rollproof.gpu_suites.judging import judge_engine
from rollproof.gpu_suites.load import judge_load
from rollproof.gpu_suites.needs import installed
from rollproof.gpu_suites.reporting import RunReport
from rollproof.gpu_suites.rollouts import Sample, prompts_of, sample
from rollproof.report import Report

ENGINES: list[Any] = [
    pytest.param("vllm", marks=pytest.mark.engine("vllm", ">=0.22")),
    pytest.param("sglang", marks=pytest.mark.engine("sglang", ">=0.5.12")),
]
pytestmark: list[pytest.MarkDecorator] = [
    pytest.mark.memory(30),
    pytest.mark.engine("torch"),
    pytest.mark.engine("transformers"),
    pytest.mark.filterwarnings("ignore"),
]


def raise_for(report: Report) -> None:
    """Fail with what failed."""
    told = {result.id: [f"{one.title}: {one.observed}" for one in result.findings[:3]] for result in report.failed}
    assert not told, told


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
    known = known_of(engine)
    with on_gpu(engine, VARIANTS[variant].dtype_of(engine)):
        found = judge_engine(gpu_target(engine, variant, tmp_path), known)
    rollproof_run.suite(
        "engine",
        found.report,
        version=installed(engine).version,
        setting=VARIANTS[variant].about,
        dtype=VARIANTS[variant].dtype_of(engine),
        by_experiment=found.seconds,
        failed_in=found.failed_in,
        known={name: {"failed": failed, "reason": known[name].reason} for name, failed in found.faults.items()},
        left_out={name: known[name].reason for name in found.left_out},
    )
    rollproof_run.ours(found.ours)
    raise_for(found.report)
    assert found.surprises(known) == []
    if VARIANTS[variant].exact(engine):
        assert found.report.canary is not None
        assert found.report.canary.red


@pytest.mark.parametrize("engine", ENGINES)
def test_load(engine: str, tmp_path: Path, rollproof_run: RunReport) -> None:
    """256 calls at once, aborted at random and resumed while the weights change: every token and row is accounted for."""
    target, known = gpu_target(engine, "eager", tmp_path), known_of(engine).get("load")
    with on_gpu(engine, VARIANTS["eager"].dtype_of(engine)):
        report = judge_load(target, expected=dict.fromkeys(known.checks, known.reason) if known else {})
    rollproof_run.suite("engine", report, version=installed(engine).version, dtype=VARIANTS["eager"].dtype_of(engine))
    raise_for(report)
    assert report.exercised["aborts mid-decode"] > 20
    if known is None:  # else those that resume during a pause are lost
        assert report.exercised["resumes across a weight version"] > 20


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.gpus(2)), pytest.param(4, marks=pytest.mark.gpus(4))])
@pytest.mark.engine("vllm", ">=0.22")
def test_tensor_parallel_routes(size: int, tmp_path: Path, rollproof_run: RunReport) -> None:
    """Divided over GPUs, vLLM returns the rows that it returns on one for the same tokens, in float32, and as many as declared."""
    path = make_checkpoint(tmp_path / "A", "qwen3_moe", head_dim=64, num_key_value_heads=4, num_attention_heads=8)
    prompts = prompts_of(48, vocab=512, longest=120)
    settings = EngineSettings(model=path, max_length=256, max_batch=48, prefill_chunk=256)
    parallel = {"tensor_parallel_size": size, "disable_custom_all_reduce": True}
    with on_gpu("vllm", "float32"):
        one, many = (asyncio.run(_sampled(replace(settings, extra=extra), prompts)) for extra in ({}, parallel))
    rows = equal = 0
    for alone, divided in zip(one, many, strict=True):
        for each in (alone, divided):
            assert len(each.segments[0].routes) == len(each.ids) - 1
        same = next((i for i, (a, b) in enumerate(zip(alone.ids, divided.ids, strict=True)) if a != b), len(alone.ids) - 1)
        left, right = (np.sort(each.segments[0].routes[:same].astype(int)) for each in (alone, divided))
        rows += left.shape[0] * left.shape[1]
        equal += int((left == right).all(-1).sum())
    rollproof_run.note(f"vllm on {size} GPUs (tensor parallel, float32): {equal:,} of {rows:,} rows and layers equal those of one GPU")
    assert rows > 5_000
    assert equal >= rows * 0.9995  # near-ties between experts: sums in another order may flip a few


async def _sampled(settings: EngineSettings, prompts: list[tuple[int, ...]]) -> list[Sample]:
    engine = gap_engine("vllm", settings)
    try:
        await engine.start()
        return await sample(engine, prompts, tokens=24)
    finally:
        await engine.stop()
