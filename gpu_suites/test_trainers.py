"""Real trainers on GPUs: the replay checks, as the CPU runs have them, over NCCL; recordings of all ranks merge to that of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.gpu_suites.reporting import RunReport
from rollproof.gpu_suites.trainers import MEGATRON_SETUPS, single_process
from rollproof.replay.events import Action, Outcome, Purpose, Step
from rollproof.replay.judging import judge_replay
from rollproof.replay.megatron.setups import Setup
from rollproof.replay.samples import make_samples
from rollproof.replay.spy import Spy
from rollproof.replay.terms import Recompute
from rollproof.report import Report

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.memory(8), pytest.mark.engine("torch", ">=2.6"), pytest.mark.filterwarnings("ignore")]
megatron: pytest.MarkDecorator = pytest.mark.engine("megatron", ">=0.16")
transformers: pytest.MarkDecorator = pytest.mark.engine("transformers", ">=5")

HF: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_moe packed bf16": {"layout": "packed", "dtype": "bfloat16"},
    "deepseek_v3 packed, reentrant, late": {"family": "deepseek_v3", "layout": "packed", "reentrant": True, "late": True},
    "gpt_oss right-padded, late": {"family": "gpt_oss", "layout": "right-padded", "late": True},
}
"""Trainers on one GPU: families, layouts, dtypes, and kinds of gradient checkpointing."""
RANKED: dict[str, dict[str, Any]] = {
    "fsdp2": {"parallel": "fsdp2"},
    "fsdp2 in bf16": {"parallel": "fsdp2", "mixed": True},
    "ddp": {"parallel": "ddp"},
}


def told(report: Report) -> None:
    """Fail with what failed, and where a canary was missed."""
    failed = {result.id: [f"{one.title}: {one.observed}" for one in result.findings[:3]] for result in report.failed}
    assert not failed, failed
    assert report.canary is not None
    assert report.canary.red


@pytest.fixture(scope="module")
def repeatable() -> Iterator[None]:
    """Sums in a fixed order: atomic ones flip near-ties, and what must repeat to the last bit could not be judged."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@transformers
@pytest.mark.parametrize("name", HF)
@pytest.mark.usefixtures("repeatable")
def test_hf(name: str, rollproof_run: RunReport) -> None:
    """``hf_replay`` keeps every promise of replay on a GPU."""
    from rollproof.replay.hf.inputs import Layout
    from rollproof.replay.hf.setups import Setup as HfSetup
    from rollproof.replay.hf.trainer import HfTrainer

    options: dict[str, Any] = {**HF[name], "device": "cuda"}
    if "layout" in options:
        options["layout"] = Layout(options["layout"])
    report = judge_replay(lambda: HfTrainer(HfSetup(**options)), name=f"hf {name}")
    rollproof_run.suite("trainer", report)
    told(report)


@transformers
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.gpus(2)), pytest.param(4, marks=pytest.mark.gpus(4))])
@pytest.mark.parametrize("name", RANKED)
def test_hf_on_several(name: str, ranks: int, rollproof_run: RunReport) -> None:
    """So it does under FSDP2 and DDP over NCCL."""
    from rollproof.replay.hf.ranked import RankedHfTrainer, hf_ranks
    from rollproof.replay.hf.setups import Setup as HfSetup

    options: dict[str, Any] = {**RANKED[name], "device": "cuda", "samples": ranks}
    with hf_ranks(cuda=True) as started:
        report = judge_replay(lambda: RankedHfTrainer(HfSetup(**options), started, ranks), name=f"hf {name} on {ranks}")
    rollproof_run.suite("trainer", report)
    told(report)


def _by_gpus() -> list[Any]:
    return [pytest.param(one, id=name, marks=pytest.mark.gpus(one.world_size)) for name, one in MEGATRON_SETUPS.items()]


@pytest.fixture(scope="module")
def megatron_on_gpus() -> Iterator[Any]:
    """Ranks that all tests of Megatron share."""
    from rollproof.replay.megatron.subject import megatron_ranks

    with megatron_ranks(cuda=True) as started:
        yield started


@megatron
@pytest.mark.parametrize("setup", _by_gpus())
def test_megatron(setup: Setup, megatron_on_gpus: Any, rollproof_run: RunReport) -> None:
    """megatron-core's ``RouterReplay`` keeps every promise of replay over NCCL, without recompute and with both kinds of it.

    What all ranks recorded, merged, is what one GPU records, id for id; replayed in place it changes no logprob by a bit.
    """
    from rollproof.replay.megatron.subject import MegatronTrainer

    report = judge_replay(lambda: MegatronTrainer(setup, megatron_on_gpus), name=f"megatron {setup.name}")
    rollproof_run.suite("trainer", report, parallel=setup.words)
    told(report)
    divided, again = _recorded(MegatronTrainer(setup, megatron_on_gpus))
    assert [] == [one for one in divided.logprobs if not np.array_equal(divided.logprobs[one], again.logprobs[one])]
    if setup.world_size > 1:
        single, _ = _recorded(MegatronTrainer(single_process(setup), megatron_on_gpus))
        assert sorted(single.recorded) == sorted(divided.recorded)
        assert [] == [one for one, rows in single.recorded.items() if not np.array_equal(rows, divided.recorded[one])]
        assert pytest.approx(single.loss, rel=1e-5) == divided.loss


def _recorded(trainer: Any) -> tuple[Outcome, Outcome]:
    """A recording step, and its replay in place with full recompute."""
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
