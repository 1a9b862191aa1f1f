"""The gap between real engines and real trainers: replay lowers it, and wrong replay raises it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollproof.engines.gpus import GpuFindings
from rollproof.gpu_suites.checkpoints import fits, make_models, user_models
from rollproof.gpu_suites.engine_variants import NO_FLOAT32, VARIANTS
from rollproof.gpu_suites.gap.gap_matrix import Cell, Routed, measure_cell
from rollproof.gpu_suites.gap.ranked_scorer import Division, RankedScorer, scorer_ranks
from rollproof.gpu_suites.gap.sampled_units import Rollouts
from rollproof.gpu_suites.gap.scorers import HfScorer, Scorer, UserScorer
from rollproof.gpu_suites.report.run_report import RunReport
from rollproof.gpu_suites.requirements import free_gpus, needs_of, unmet_need
from rollproof.gpu_suites.timing import Part
from rollproof.gpu_suites.trainer_setups import GAP_MEGATRON, GAP_RANKED, GAP_TRAINERS
from rollproof.plugin import state_of

LIMITS: dict[str, dict[Routed, str]] = {
    "bfloat16": {Routed.NATIVE: "moe-bf16", Routed.R2: "moe-bf16", Routed.R3: "moe-bf16-r3"},
    "float16": {Routed.NATIVE: "moe-bf16", Routed.R2: "moe-bf16", Routed.R3: "moe-bf16-r3"},
    "float32": {Routed.NATIVE: "tiny-fp32", Routed.R2: "tiny-fp32", Routed.R3: "tiny-fp32"},
}
ENGINES: dict[str, pytest.MarkDecorator] = {
    "vllm": pytest.mark.engine("vllm", ">=0.22"),
    "sglang": pytest.mark.engine("sglang", ">=0.5.12"),
}


def _gpus(sizes: Mapping[str, Any]) -> int:
    return math.prod(int(sizes.get(name, 1)) for name in ("dp", "cp", "tp", "pp"))


def _cells() -> Iterator[tuple[str, str, str]]:
    """Yield engine, dtype and trainer of each cell."""
    # trainers on several GPUs are measured in bfloat16 only: in float32 one GPU shows the same
    for engine in ENGINES:
        for trainer in GAP_TRAINERS:
            yield engine, "bfloat16", trainer
        yield engine, "float16", "hf"
        if engine not in NO_FLOAT32:
            yield from ((engine, "float32", trainer) for trainer in ("hf", "megatron"))


def _cell(engine: str, dtype: str, trainer: str, *, requested: bool = False) -> Any:
    marks = [ENGINES[engine]]
    if trainer in GAP_MEGATRON:
        marks += [
            pytest.mark.engine("megatron", ">=0.16"),
            pytest.mark.gpus(_gpus(GAP_MEGATRON[trainer])),
        ]
    if trainer in GAP_RANKED:
        division, gpus = GAP_RANKED[trainer]
        marks += [pytest.mark.gpus(gpus), *([] if requested else [pytest.mark.full])]
        marks += [pytest.mark.engine("deepspeed", ">=0.19")] if division is Division.ULYSSES else []
    if dtype != "bfloat16":
        marks.append(pytest.mark.full)
    return pytest.param(engine, dtype, trainer, marks=marks, id=f"{engine}-{dtype}-{trainer}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate the cells of the matrix; with ``--rollproof-trainer`` those of one trainer."""
    if not {"engine", "dtype", "trainer"} <= set(metafunc.fixturenames):
        return
    name = state_of(metafunc.config).settings.trainer  # check_options has yet to check it
    if name is None or name in GAP_TRAINERS:
        cells = [
            _cell(*cell, requested=name is not None)
            for cell in _cells()
            if name is None or cell[2] == name
        ]
    else:
        cells = [_cell(engine, "bfloat16", name) for engine in ENGINES]
    metafunc.parametrize(("engine", "dtype", "trainer"), cells)


pytestmark: list[pytest.MarkDecorator] = [
    pytest.mark.memory(40),
    pytest.mark.engine("torch"),
    pytest.mark.engine("transformers"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def rollouts(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    rollproof_gpus: GpuFindings,
    rollproof_run: RunReport,
) -> Rollouts:
    """Samples of a generated model, or of the one that ``--rollproof-model`` names."""
    folder, own = tmp_path_factory.mktemp("models"), state_of(request.config).settings.model
    if own is None:
        with rollproof_run.spending.on(Part.MODELS):
            checkpoints = make_models("tiny", folder)
        return Rollouts(
            checkpoints=checkpoints,
            spending=rollproof_run.spending,
            planned=_planned(request, rollproof_gpus),
        )
    free = min((gpu.free for gpu in free_gpus(rollproof_gpus) if gpu.free is not None), default=0)
    reason = fits(Path(own), free)
    if reason is not None and state_of(request.config).settings.require_gpu:
        pytest.fail(f"{reason}; a GPU was required (--rollproof-require-gpu)", pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    return Rollouts(checkpoints=user_models(Path(own), folder), spending=rollproof_run.spending)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, rollproof_run: RunReport) -> Rollouts:
    """Samples of a generated model of 3.4 GB."""
    with rollproof_run.spending.on(Part.MODELS):
        checkpoints = make_models("mid", tmp_path_factory.mktemp("larger"))
    return Rollouts(checkpoints=checkpoints, spending=rollproof_run.spending, across=False)


def _planned(request: pytest.FixtureRequest, gpus: GpuFindings) -> frozenset[tuple[str, str]]:
    """Return the engines and dtypes with tests that this session can run."""
    planned = set()
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if (
            item.path == request.path
            and "engine" in params
            and unmet_need(needs_of(item.iter_markers()), gpus) is None
        ):
            planned.add((params["engine"], params.get("dtype", "bfloat16")))
    return frozenset(planned)


@pytest.fixture(scope="module")
def scorer_of(rollouts: Rollouts) -> Iterator[Callable[..., Scorer]]:
    """A function that makes trainers; their ranks are started once and closed with the module."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        ranks: dict[str, Any] = {}

        def started(kind: str, start: Callable[..., Any]) -> Any:
            if kind not in ranks:
                ranks[kind] = stack.enter_context(start(cuda=True))
            return ranks[kind]

        def make(name: str, dtype: str) -> Scorer:
            if name == "hf":
                return HfScorer(rollouts.checkpoints, dtype)
            if name in GAP_RANKED:
                division, size = GAP_RANKED[name]
                return RankedScorer(
                    division, rollouts.checkpoints, dtype, started("hf", scorer_ranks), size
                )
            if name not in GAP_MEGATRON:
                return UserScorer(name, rollouts.checkpoints, dtype)
            from rollproof.gpu_suites.gap.megatron_scorer import MegatronScorer
            from rollproof.replay.megatron.megatron_trainer import megatron_ranks

            return MegatronScorer(
                rollouts.checkpoints,
                dtype,
                started("megatron", megatron_ranks),
                **GAP_MEGATRON[name],
            )

        yield make


def test_replay_lowers_the_gap_and_wrong_replay_raises_it(
    engine: str,
    dtype: str,
    trainer: str,
    rollouts: Rollouts,
    scorer_of: Callable[..., Scorer],
    rollproof_run: RunReport,
) -> None:
    """Replay lowers k3 and mean |d|, wrong replay raises them, with intervals that exclude 1;
    self-replay is exact.
    """
    samples = rollouts.of(engine, dtype)["uninterrupted"]
    scorer = scorer_of(trainer, dtype)
    try:
        cell = measure_cell(engine, samples, scorer, limits=LIMITS[dtype])
    finally:
        scorer.close()
    rollproof_run.cell(cell)
    check_cell(cell)


@pytest.mark.full
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=mark) for name, mark in ENGINES.items()]
)
def test_a_larger_model(engine: str, larger: Rollouts, rollproof_run: RunReport) -> None:
    """The same holds with 1.7 billion parameters in 16 layers."""
    samples = larger.of(engine, "bfloat16")["uninterrupted"]
    scorer = HfScorer(larger.checkpoints, "bfloat16")
    try:
        cell = measure_cell(
            engine, samples, scorer, limits=LIMITS["bfloat16"], about="1.7 billion parameters"
        )
    finally:
        scorer.close()
    rollproof_run.cell(cell)
    check_cell(cell)


@pytest.mark.full
@ENGINES["vllm"]
def test_another_attention(rollouts: Rollouts, rollproof_run: RunReport) -> None:
    """The same holds with FlashAttention in the engine."""
    flash = Rollouts(
        checkpoints=rollouts.checkpoints,
        spending=rollproof_run.spending,
        across=False,
        extra=VARIANTS["flash"].extra["vllm"],
    )
    samples = flash.of("vllm", "bfloat16")["uninterrupted"]
    scorer = HfScorer(flash.checkpoints, "bfloat16")
    try:
        cell = measure_cell(
            "vllm", samples, scorer, limits=LIMITS["bfloat16"], about="FlashAttention"
        )
    finally:
        scorer.close()
    rollproof_run.cell(cell)
    check_cell(cell)


def check_cell(cell: Cell) -> None:
    """Assert what every cell must show."""
    assert cell.effect.tokens >= 35_000
    assert cell.effect.sequences >= 64
    assert cell.controls_harm
    if cell.dtype == "bfloat16":
        # in float32 hardly any choice differs, and there is nothing to lower
        assert cell.helps
    assert cell.self_replay in (0.0, None)


@pytest.mark.parametrize("kind", ["recompute", "keep"])
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=mark) for name, mark in ENGINES.items()]
)
def test_the_gap_across_a_weight_update(
    engine: str,
    kind: str,
    rollouts: Rollouts,
    scorer_of: Callable[..., Scorer],
    rollproof_run: RunReport,
) -> None:
    """Tokens of resumed samples, scored under their own version, are no worse than others; over
    retained KV they are.
    """
    samples = rollouts.of(engine, "bfloat16")[kind]
    scorer = scorer_of("hf", "bfloat16")
    try:
        cell = measure_cell(
            engine,
            samples,
            scorer,
            modes=(Routed.NATIVE, Routed.R3),
            about=f"across an update, KV {kind}",
        )
    finally:
        scorer.close()
    rollproof_run.cell(cell)
    assert sum(len(sample.segments) > 1 for sample in samples) >= 32
    seam = {bucket.label: bucket for bucket in cell.reports[Routed.R3].buckets["since_resume"]}
    assert seam["before any"].tokens > 1000
    after, before = seam["8+"], seam["before any"]
    if kind == "recompute":
        assert after.k3.value < 3 * before.k3.value
    else:
        assert after.k3.value > 3 * before.k3.value
