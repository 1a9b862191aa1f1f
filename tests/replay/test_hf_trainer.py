"""The HF trainer as a replay subject: every check of the family replay passes, in every family and layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip("transformers", minversion="5.9", reason="earlier routers select outside of their forward")

from rollproof.checks import Verdict, default_registry  # noqa: E402
from rollproof.judge import judge  # noqa: E402
from rollproof.replay.driving import record_replay  # noqa: E402
from rollproof.replay.hf.inputs import Layout  # noqa: E402
from rollproof.replay.hf.ranked import WRAPS, RankedHfTrainer, hf_ranks  # noqa: E402
from rollproof.replay.hf.trainer import HfTrainer, Setup  # noqa: E402
from rollproof.replay.judging import judge_replay  # noqa: E402
from rollproof.replay.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

WHOLE = (
    Setup(family="qwen3_moe", layout=Layout.LEFT),
    Setup(family="deepseek_v3", layout=Layout.PACKED, reentrant=True, late=True),
)
"""Judged on all episodes: both kinds of checkpointing and of router, backward within and after the context."""
BRIEF = (
    Setup(family="qwen2_moe", layout=Layout.RIGHT, late=True),
    Setup(family="olmoe", layout=Layout.PACKED, reentrant=True),
    Setup(family="mixtral", layout=Layout.RIGHT, reentrant=True),
    Setup(family="glm4_moe", layout=Layout.LEFT, late=True),
    Setup(family="gpt_oss", layout=Layout.RIGHT, reentrant=True, late=True),
    Setup(family="qwen3_moe", layout=Layout.PACKED, dtype="bfloat16"),
)
EPISODES = ("self-replay", "drift", "full recompute")
RANKED = (
    Setup(family="qwen3_moe", parallel="ddp"),
    Setup(family="deepseek_v3", parallel="ddp", layout=Layout.PACKED, reentrant=True, late=True),
    Setup(family="qwen3_moe", parallel="fsdp2", layout=Layout.RIGHT, late=True),
    Setup(family="deepseek_v3", parallel="fsdp2", reentrant=True),
    Setup(family="qwen3_moe", parallel="fsdp2, bf16"),
)
ACTED = ("replay.forward", "replay.recompute", "replay.self-gradients", "replay.drift", "replay.reference", "replay.gate-gradients")


def name(setup: Setup) -> str:
    kinds = ("reentrant", setup.reentrant), ("late", setup.late), (setup.dtype, setup.dtype != "float32"), (setup.parallel, setup.parallel)
    return " ".join([setup.family, setup.layout, *(kind for kind, is_so in kinds if is_so)])


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with hf_ranks() as started:
        yield started


@pytest.mark.parametrize("setup", WHOLE, ids=name)
def test_all_checks_pass(setup: Setup) -> None:
    """No check fails or is unknown, each has been exercised, and the canary is seen."""
    report = judge_replay(lambda: HfTrainer(setup), name=setup.family)

    assert {} == {result.id: result.reason for result in report.results if result.verdict is not Verdict.PASS}
    assert report.canary.red


@pytest.mark.parametrize("setup", BRIEF, ids=name)
def test_replay_drift_and_recompute_pass_in_every_family(setup: Setup) -> None:
    """Self-replay is bit for bit, drift changes results, gates have their gradients, recompute repeats the forward."""
    assert_sound(record_replay(lambda: HfTrainer(setup), only=EPISODES), setup)


@pytest.mark.parametrize("setup", RANKED, ids=name)
def test_two_processes_replay_as_one(ranks: Ranks, setup: Setup) -> None:
    """Under DDP and FSDP2 the same holds, and gradients equal those of one process bit for bit; a failure leaves nothing."""
    episodes = (*EPISODES, "failure in recompute", "bad routes") if setup.family == "qwen3_moe" else EPISODES

    assert_sound(record_replay(lambda: RankedHfTrainer(setup, ranks), only=episodes), setup)


def test_every_wrapper_is_tried() -> None:
    """A wrapper that is added gets a setup here."""
    assert set(WRAPS) == {setup.parallel for setup in RANKED}


def assert_sound(trace: object, setup: Setup) -> None:
    results = {result.id: result for result in judge(trace, default_registry().select(["replay"])).results}  # type: ignore[arg-type]

    assert [] == [(one.id, one.findings[:1]) for one in results.values() if one.verdict is Verdict.FAIL]
    assert {} == {one: results[one].reason for one in ACTED if results[one].verdict is not Verdict.PASS}
