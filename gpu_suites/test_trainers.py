"""Real trainers on GPUs: the replay checks of the CPU runs over NCCL.

The recordings of all ranks merge to that of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.replay import Action, Outcome, Purpose, Step
from rollproof.core.replay_contract import Recompute
from rollproof.core.router_spy import Spy
from rollproof.engines.gpus import shared
from rollproof.gpu_suites.gap.scorers import empty_cuda
from rollproof.gpu_suites.known_engine_failures import COARSE, require_pass
from rollproof.gpu_suites.report.hardware import MemoryWatch
from rollproof.gpu_suites.report.run_report import RunReport
from rollproof.gpu_suites.timing import Part, Stopwatch
from rollproof.gpu_suites.trainer_setups import MEGATRON_SETUPS, single_process, summing_on_gpus
from rollproof.judging.report import Report
from rollproof.replay.megatron.megatron_setups import MegatronSetup
from rollproof.replay.process_group import RankError, Ranks
from rollproof.replay.replay_samples import make_samples
from rollproof.verification.replay import judge_replay

pytestmark: list[pytest.MarkDecorator] = [
    pytest.mark.memory(8),
    pytest.mark.engine("torch", ">=2.6"),
    pytest.mark.filterwarnings("ignore"),
]
megatron: pytest.MarkDecorator = pytest.mark.engine("megatron", ">=0.16")
transformers: pytest.MarkDecorator = pytest.mark.engine("transformers", ">=5")

HF: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_moe packed bf16": {"layout": "packed", "dtype": "bfloat16"},
    "deepseek_v3 packed, reentrant, late": {
        "family": "deepseek_v3",
        "layout": "packed",
        "reentrant": True,
        "late": True,
    },
    "gpt_oss right-padded, late": {"family": "gpt_oss", "layout": "right-padded", "late": True},
    "qwen3_moe packed bf16, varlen": {"layout": "packed", "dtype": "bfloat16", "varlen": True},
    "qwen3_moe, attention compiled": {"compiled": True},
}
"""Trainers on one GPU: families, layouts, dtypes, and kinds of gradient checkpointing."""
DEFAULT: tuple[str, ...] = ("single", "tp2", "ep2-alltoall", "tp2-pp2-ep2")
"""Setups of Megatron without ``--rollproof-full``: one on one GPU, two on two, one on four."""
RANKED: dict[str, dict[str, Any]] = {
    "fsdp2": {"parallel": "fsdp2"},
    "fsdp2 in bf16": {"parallel": "fsdp2", "mixed": True},
    "ddp": {"parallel": "ddp"},
}


def timed(make: Callable[[], Any], name: str, run: RunReport, **more: Any) -> Report:
    """Judge a trainer, and add the report to ``run`` with the trainer's seconds."""
    seconds: list[float] = []

    def made() -> Any:
        began = time.perf_counter()
        trainer = make()
        seconds.append(time.perf_counter() - began)
        return Stopwatch(trainer, seconds)

    report = judge_replay(made, name=name)
    theirs = sum(seconds)
    run.suite(
        "trainer",
        report,
        spent={Part.TRAINING: theirs, Part.JUDGING: report.seconds - theirs},
        **more,
    )
    return report


@pytest.fixture(scope="module")
def repeatable() -> Iterator[None]:
    """Let torch sum in a fixed order."""
    # atomic sums flip near-ties, and nothing could be compared bit for bit
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    empty_cuda()


@transformers
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.full] if {"compiled", "varlen"} & set(options) else []
        )
        for name, options in HF.items()
    ],
)
@pytest.mark.usefixtures("repeatable")
def test_hf(name: str, rollproof_run: RunReport) -> None:
    """``hf_replay`` keeps every promise of replay on a GPU."""
    from rollproof.replay.hf.hf_replay_trainer import HfTrainer
    from rollproof.replay.hf.hf_setups import Setup
    from rollproof.replay.hf.inputs import Layout

    options: dict[str, Any] = {**HF[name], "device": "cuda"}
    if "layout" in options:
        options["layout"] = Layout(options["layout"])
    report = timed(lambda: HfTrainer(Setup(**options)), f"hf {name}", rollproof_run)
    require_pass(report, COARSE if options.get("dtype") == "bfloat16" else frozenset())


@transformers
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.gpus(2)), pytest.param(4, marks=pytest.mark.gpus(4))],
)
@pytest.mark.parametrize("name", RANKED)
def test_hf_on_several(name: str, ranks: int, rollproof_run: RunReport) -> None:
    """The same holds under FSDP2 and DDP over NCCL."""
    from rollproof.replay.hf.hf_setups import Setup
    from rollproof.replay.hf.ranked_trainer import RankedHfTrainer, hf_ranks

    options: dict[str, Any] = {**RANKED[name], "device": "cuda", "samples": ranks}
    with hf_ranks(cuda=True) as started:
        report = timed(
            lambda: RankedHfTrainer(Setup(**options), started, ranks),
            f"hf {name} on {ranks}",
            rollproof_run,
        )
    require_pass(report, COARSE if options.get("mixed") else frozenset())


@pytest.mark.full
@pytest.mark.gpus(2)
@pytest.mark.parametrize("how", ["raises", "is killed", "never comes"])
def test_a_rank_that_fails_ends_the_others(how: str) -> None:
    """It ends the others, which wait for it in a collective of NCCL, within a bound and with its
    name. Its memory is released, and new ranks run.
    """
    watch = None if shared() else MemoryWatch(slack_gib=2.0)
    with Ranks(summing_on_gpus, limit_s=15, grace_s=1, cuda=True) as ranks:
        assert [3.0, 3.0] == ranks.run("add", world_size=2)
        began = time.monotonic()
        with pytest.raises(RankError) as error:
            ranks.run(how, world_size=2)
        assert time.monotonic() - began < 60
        assert error.value.rank == 1 or how == "never comes"
        assert [3.0, 3.0] == ranks.run("add", world_size=2)
    assert watch is None or watch.missing() is None


def _by_gpus() -> list[Any]:
    return [
        pytest.param(
            setup,
            id=name,
            marks=[
                pytest.mark.gpus(setup.world_size),
                *([] if name in DEFAULT else [pytest.mark.full]),
            ],
        )
        for name, setup in MEGATRON_SETUPS.items()
    ]


@pytest.fixture(scope="module")
def megatron_on_gpus() -> Iterator[Any]:
    """Ranks that all tests of Megatron share."""
    from rollproof.replay.megatron.megatron_trainer import megatron_ranks

    with megatron_ranks(cuda=True) as started:
        yield started


@megatron
@pytest.mark.parametrize("setup", _by_gpus())
def test_megatron(setup: MegatronSetup, megatron_on_gpus: Any, rollproof_run: RunReport) -> None:
    """megatron-core's ``RouterReplay`` keeps every promise of replay over NCCL, with and without
    recompute. The merged recordings of all ranks are that of one GPU, id for id, and their replay
    in place changes no bit of a logprob.
    """
    from rollproof.replay.megatron.megatron_trainer import MegatronTrainer

    require_pass(
        timed(
            lambda: MegatronTrainer(setup, megatron_on_gpus),
            f"megatron {setup.name}",
            rollproof_run,
            parallel=setup.words,
        )
    )
    with rollproof_run.spending.on(Part.TRAINING):
        divided, again = _recorded(MegatronTrainer(setup, megatron_on_gpus))
    assert [] == [
        sample
        for sample in divided.logprobs
        if not np.array_equal(divided.logprobs[sample], again.logprobs[sample])
    ]
    if setup.world_size > 1:
        single, _ = _recorded(MegatronTrainer(single_process(setup), megatron_on_gpus))
        assert sorted(single.recorded) == sorted(divided.recorded)
        assert [] == [
            sample
            for sample, rows in single.recorded.items()
            if not np.array_equal(rows, divided.recorded[sample])
        ]
        assert pytest.approx(single.loss, rel=1e-5) == divided.loss


def _recorded(trainer: Any) -> tuple[Outcome, Outcome]:
    """Run a recording step, and its replay in place with full recompute."""
    samples = make_samples(trainer.contract, 0)
    size = trainer.setup.microbatch_size
    step = Step(
        episode="merge",
        name="record",
        action=Action.RECORD,
        purpose=Purpose.TRAIN,
        microbatches=tuple(samples[i : i + size] for i in range(0, len(samples), size)),
    )
    recording = trainer.run(step, Spy(step))
    replay = replace(step, name="replay", action=Action.REPLAY, recompute=Recompute.FULL)
    return recording, trainer.replay_in_place(replay, Spy(replay))
