"""Released engines on a GPU, judged by the conformance suite of their CPU runs, in every setting;
and under load.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollproof.core.engine_protocol import EngineSettings
from rollproof.engines.gpus import shared
from rollproof.errors import EngineDied, EngineHung, EngineStartError
from rollproof.fakes.tiny_models import make_checkpoint
from rollproof.gpu_suites.checkpoints import SIZES, few_threads
from rollproof.gpu_suites.engine_variants import (
    PARALLEL,
    VARIANTS,
    gap_engine,
    gpu_target,
    known_of,
    on_gpu,
)
from rollproof.gpu_suites.gap.engine_rollouts import Sample, bounded, prompts_of, sample
from rollproof.gpu_suites.invariance import INVARIANT, Alone, alone_and_beside
from rollproof.gpu_suites.known_engine_failures import judge_engine, spent_on
from rollproof.gpu_suites.load import judge_load
from rollproof.gpu_suites.process_faults import break_children, engine_host, engine_runs
from rollproof.gpu_suites.report.hardware import MemoryWatch
from rollproof.gpu_suites.report.run_report import RunReport
from rollproof.gpu_suites.requirements import installed
from rollproof.gpu_suites.timing import Part
from rollproof.judging.report import Report
from rollproof.verification.engines import EngineRun

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
    told = {
        result.id: [f"{one.title}: {one.observed}" for one in result.findings[:3]]
        for result in report.failed
    }
    assert not told, told


@pytest.mark.parametrize(
    ("engine", "variant"),
    [
        pytest.param(
            *engine.values,
            one.name,
            marks=[*engine.marks, *([pytest.mark.full] if one.full else [])],
            id=f"{engine.values[0]}-{one.name}",
        )
        for engine in ENGINES
        for one in VARIANTS.values()
        if engine.values[0] in one.extra
    ],
)
def test_conformance(engine: str, variant: str, tmp_path: Path, rollproof_run: RunReport) -> None:
    """Rows, logprobs, versions, aborts, pauses and updates are as declared, and values as an
    independent forward has them.
    """
    known = known_of(engine)
    with on_gpu(engine, VARIANTS[variant].dtype_of(engine)):
        with rollproof_run.spending.on(Part.MODELS), few_threads():
            target = gpu_target(engine, variant, tmp_path)
        found = judge_engine(target, known)
    rollproof_run.suite(
        "engine",
        found.report,
        spent=found.spent,
        version=installed(engine).version,
        setting=VARIANTS[variant].about,
        dtype=VARIANTS[variant].dtype_of(engine),
        by_experiment=found.seconds,
        failed_in=found.failed_in,
        known={
            name: {"failed": failed, "reason": known[name].reason}
            for name, failed in found.faults.items()
        },
        left_out={name: known[name].reason for name in found.left_out},
    )
    raise_for(found.report)
    assert found.surprises(known) == []
    if VARIANTS[variant].exact(engine):
        assert found.report.canary is not None
        assert found.report.canary.red


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_load(engine: str, tmp_path: Path, rollproof_run: RunReport) -> None:
    """256 calls at once, aborted at random and resumed while the weights change: every token and
    row is accounted for.
    """
    with rollproof_run.spending.on(Part.MODELS), few_threads():
        target, known = gpu_target(engine, "eager", tmp_path), known_of(engine).get("load")
    run = EngineRun()
    with on_gpu(engine, VARIANTS["eager"].dtype_of(engine)):
        report = judge_load(
            target, expected=dict.fromkeys(known.checks, known.reason) if known else {}, run=run
        )
    spent = spent_on(
        run, judging=report.seconds - sum(run.seconds.values()) - sum(run.spent.values())
    )
    rollproof_run.suite(
        "engine",
        report,
        spent=spent,
        version=installed(engine).version,
        dtype=VARIANTS["eager"].dtype_of(engine),
    )
    raise_for(report)
    assert report.exercised["aborts mid-decode"] > 20
    if known is None:  # else those that resume during a pause are lost
        assert report.exercised["resumes across a weight version"] > 20


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_call_is_answered_alike_alone_and_beside_others(
    engine: str, tmp_path: Path, rollproof_run: RunReport
) -> None:
    """In the engine's mode for it, to the last bit; and without the mode something differs on the
    same calls, else nothing was shown.

    Where the mode is known to keep its promise in small steps only, it is held to that.
    """
    with rollproof_run.spending.on(Part.MODELS), few_threads():
        path = make_checkpoint(tmp_path / "A", "qwen3_moe", dtype="bfloat16", **SIZES["tiny"])
    prompts = prompts_of(64, vocab=SIZES["tiny"]["vocab_size"], longest=200)
    plain = EngineSettings(
        model=path,
        dtype="bfloat16",
        max_length=512,
        max_batch=64,
        prefill_chunk=2048,
        prefix_cache=False,
    )
    mode = INVARIANT[engine]

    async def asked(settings: EngineSettings) -> Alone:
        started = gap_engine(engine, settings)
        try:
            await started.start()
            return await bounded(
                alone_and_beside(started, prompts), started, 200, "sampling alone and beside others"
            )
        finally:
            await started.stop()

    with on_gpu(engine, "bfloat16", mode.environment):
        kept = asyncio.run(asked(mode.of(plain)))
        small = kept
        if kept.differing and mode.below:  # calls and their next tokens are one step
            small = asyncio.run(
                asked(mode.of(replace(plain, prefill_chunk=mode.below - plain.max_batch)))
            )
    with on_gpu(engine, "bfloat16"):
        free = asyncio.run(asked(plain))
    rollproof_run.note(
        f"{engine} with {mode.name}: {kept.probes - len(kept.differing)} of {kept.probes} calls bit"
        " for bit the same alone and beside 63 others; without it"
        f" {free.probes - len(free.differing)}"
        + "".join(f"; call {number}: {what}" for number, what in kept.differing.items())
    )
    assert {} == small.differing
    if not free.differing:
        pytest.skip(
            "without the mode nothing differed either: this model cannot show what the mode is for"
        )
    if kept.differing and mode.known:
        pytest.xfail(mode.known)
    assert {} == kept.differing


@pytest.mark.full
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_breaks_while_it_starts(
    engine: str, how: str, tmp_path: Path, rollproof_run: RunReport
) -> None:
    """One whose processes are killed, or hang, before it is ready ends its start within a bound,
    with its log; its memory comes back.
    """
    with rollproof_run.spending.on(Part.MODELS), few_threads():
        path = make_checkpoint(tmp_path / "A", "qwen3_moe", head_dim=64)
    settings = EngineSettings(
        model=path,
        dtype="bfloat16",
        max_length=512,
        max_batch=16,
        prefill_chunk=256,
        extra={"deadline": 60.0},
    )
    watch = None if shared() else MemoryWatch(slack_gib=2.0)

    async def broken() -> None:
        started = gap_engine(engine, settings)
        start = asyncio.create_task(started.start())
        try:
            while (host := engine_host(engine)) is None or not engine_runs(host):
                assert not start.done()
                await asyncio.sleep(0.1)
            await asyncio.sleep(3.0)
            while not start.done():  # what it starts in the place of those, too
                break_children(host, how)
                await asyncio.wait([start], timeout=0.5)
            await start
        finally:
            await started.stop()

    with (
        on_gpu(engine, "bfloat16"),
        pytest.raises(EngineStartError, match="The end of its log") as told,
    ):
        asyncio.run(asyncio.wait_for(broken(), 120))
    rollproof_run.note(
        f"{engine} whose processes are {how} while it starts:"
        f" {str(told.value).partition('The end of its log')[0].strip()}"
    )
    assert watch is None or watch.missing() is None


@pytest.mark.full
@pytest.mark.parametrize(("how", "error"), [("killed", EngineDied), ("stopped", EngineHung)])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_breaks_in_the_middle(
    engine: str, how: str, error: type[Exception], tmp_path: Path, rollproof_run: RunReport
) -> None:
    """One whose processes are killed, or hang, ends the sampling within a bound, with the end of
    its log; its memory comes back.
    """
    with rollproof_run.spending.on(Part.MODELS), few_threads():
        path = make_checkpoint(tmp_path / "A", "qwen3_moe", head_dim=64)
    settings = EngineSettings(
        model=path, dtype="bfloat16", max_length=2048, max_batch=16, prefill_chunk=256
    )
    watch = None if shared() else MemoryWatch(slack_gib=2.0)

    async def broken() -> None:
        started: Any = gap_engine(engine, settings)
        try:
            await started.start()
            work = asyncio.create_task(
                bounded(
                    sample(started, prompts_of(16, vocab=512), tokens=1900), started, 20, "sampling"
                )
            )
            await asyncio.sleep(1.0)
            assert not work.done()
            break_children(started.process.pid, how)
            await work
        finally:
            await started.stop()

    with on_gpu(engine, "bfloat16"), pytest.raises(error, match="The end of its log") as told:
        asyncio.run(asyncio.wait_for(broken(), 200))
    rollproof_run.note(
        f"{engine} whose processes are {how} while it samples:"
        f" {str(told.value).partition('The end of its log')[0].strip()}"
    )
    assert watch is None or watch.missing() is None


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.gpus(2)), pytest.param(4, marks=pytest.mark.gpus(4))]
)
@pytest.mark.parametrize("divided", ["tensors", "experts"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.full
def test_routes_of_a_divided_engine(
    engine: str, divided: str, size: int, tmp_path: Path, rollproof_run: RunReport
) -> None:
    """Divided over GPUs, an engine returns as many rows as declared, and those that it returns on
    one for the same tokens.

    In float32 near-ties between experts, summed in another order, may flip a few; in bfloat16 they
    flip more of them.
    """
    dtype = VARIANTS["eager"].dtype_of(engine)
    path = make_checkpoint(
        tmp_path / "A",
        "qwen3_moe",
        head_dim=64,
        num_key_value_heads=4,
        num_attention_heads=8,
        dtype=dtype,
    )
    prompts = prompts_of(48, vocab=512, longest=120)
    settings = EngineSettings(
        model=path, dtype=dtype, max_length=256, max_batch=48, prefill_chunk=256
    )
    with on_gpu(engine, dtype):
        one, many = (
            asyncio.run(_sampled(engine, replace(settings, extra=extra), prompts))
            for extra in ({}, PARALLEL[engine][divided](size))
        )
    rows = equal = 0
    for alone, other in zip(one, many, strict=True):
        for each in (alone, other):
            assert len(each.segments[0].routes) == len(each.ids) - 1
        same = next(
            (i for i, (a, b) in enumerate(zip(alone.ids, other.ids, strict=True)) if a != b),
            len(alone.ids) - 1,
        )
        left, right = (
            np.sort(each.segments[0].routes[:same].astype(int)) for each in (alone, other)
        )
        rows += left.shape[0] * left.shape[1]
        equal += int((left == right).all(-1).sum())
    told = f"{engine} on {size} GPUs ({divided} divided, {dtype})"
    rollproof_run.note(f"{told}: {equal:,} of {rows:,} rows and layers equal those of one GPU")
    assert rows > 5_000
    assert equal >= rows * (0.9995 if dtype == "float32" else 0.95)


async def _sampled(
    name: str, settings: EngineSettings, prompts: list[tuple[int, ...]]
) -> list[Sample]:
    engine = gap_engine(name, settings)
    try:
        await engine.start()
        return await sample(engine, prompts, tokens=24)
    finally:
        await engine.stop()
