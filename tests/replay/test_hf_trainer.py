"""The HF trainer as a replay subject: every check of the family replay passes, in every family and
layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)

from rollproof.core.events.replay import Action, Purpose, Step  # noqa: E402
from rollproof.core.router_spy import Spy  # noqa: E402
from rollproof.core.trace import Trace  # noqa: E402
from rollproof.errors import UsageError  # noqa: E402
from rollproof.invariants import default_registry  # noqa: E402
from rollproof.judging.checks import Verdict  # noqa: E402
from rollproof.replay.driver import record_replay  # noqa: E402
from rollproof.replay.hf.hf_replay_trainer import HfTrainer  # noqa: E402
from rollproof.replay.hf.hf_setups import SETUPS, Setup, setup_named  # noqa: E402
from rollproof.replay.hf.inputs import Layout  # noqa: E402
from rollproof.replay.hf.model_families import FAMILIES  # noqa: E402
from rollproof.replay.hf.ranked_trainer import WRAPS, RankedHfTrainer, hf_ranks  # noqa: E402
from rollproof.replay.process_group import Ranks  # noqa: E402
from rollproof.replay.replay_samples import make_samples  # noqa: E402
from rollproof.verification.replay import judge_replay  # noqa: E402
from rollproof.verification.traces import judge  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

WHOLE = ("qwen3_moe, left-padded", "deepseek_v3, packed, reentrant, late")
"""Judged on all episodes, and the others on these; `python -m tools.judge_table hf FILE` judges
every setup on all.
"""
EPISODES = ("self-replay", "drift", "full recompute")
BRIEF = [name for name, setup in SETUPS.items() if not setup.parallel and name not in WHOLE]
RANKED = [name for name, setup in SETUPS.items() if setup.parallel]
ACTED = (
    "replay.forward",
    "replay.recompute",
    "replay.self-gradients",
    "replay.drift",
    "replay.reference",
    "replay.gate-gradients",
)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with hf_ranks() as started:
        yield started


@pytest.mark.parametrize("name", WHOLE)
def test_all_checks_pass(name: str) -> None:
    """No check fails or is unknown, each has been exercised, and the canary is seen."""
    report = judge_replay(lambda: HfTrainer(setup_named(name)), name=name)

    assert {} == {
        result.id: result.reason for result in report.results if result.verdict is not Verdict.PASS
    }
    assert report.canary.red


@pytest.mark.parametrize("name", BRIEF)
def test_replay_drift_and_recompute_pass_in_every_family(name: str) -> None:
    """Self-replay is bit for bit, drift changes results, gates have their gradients, recompute
    repeats the forward.
    """
    assert_sound(record_replay(lambda: HfTrainer(setup_named(name)), only=EPISODES))


@pytest.mark.parametrize("name", RANKED)
def test_two_processes_replay_as_one(ranks: Ranks, name: str) -> None:
    """Under DDP and FSDP2 the same holds, and gradients equal those of one process bit for bit; a
    failure leaves nothing.
    """
    setup = setup_named(name)
    episodes = (
        (*EPISODES, "failure in recompute", "bad routes")
        if setup.family == "qwen3_moe"
        else EPISODES
    )

    assert_sound(
        record_replay(lambda: RankedHfTrainer(setup, ranks), only=episodes),
        reference=not setup.mixed,
    )


@pytest.mark.parametrize("parallel", WRAPS)
def test_a_step_repeated_on_four_processes_is_the_same(ranks: Ranks, parallel: str) -> None:
    """To the last bit, from the first step on: DDP would put gradients into other buckets after it,
    and sums of four depend on theirs.
    """
    trainer = RankedHfTrainer(Setup(parallel=parallel, samples=4), ranks, 4)
    samples = make_samples(trainer.contract, 0)
    step = Step(
        episode="repeated",
        name="native",
        action=Action.NATIVE,
        purpose=Purpose.TRAIN,
        microbatches=(samples[:4], samples[4:8]),
    )

    first, again = (trainer.run(step, Spy(step)) for _ in range(2))
    assert {} == {
        name: one
        for name, one in first.gradients.items()
        if not np.array_equal(one, again.gradients[name])
    }
    assert first.loss == again.loss


def test_every_family_layout_and_wrapper_is_in_a_setup() -> None:
    """What is added is judged; families with linear attention take too long on a CPU, and are tried
    by hf_replay's own tests alone.
    """
    slow = {"qwen3_next", "qwen3_5_moe_text"}

    assert set(FAMILIES) - slow == {setup.family for setup in SETUPS.values()}
    assert set(Layout) == {setup.layout for setup in SETUPS.values()}
    assert set(WRAPS) == {setup.parallel for setup in SETUPS.values()} - {""}


def test_an_unknown_setup_is_reported() -> None:
    """The names are listed."""
    with pytest.raises(UsageError, match="No setup of HF trainers is named 'gpt'; choose among"):
        setup_named("gpt")


def assert_sound(trace: Trace, *, reference: bool = True) -> None:
    results = {
        result.id: result for result in judge(trace, default_registry().select(["replay"])).results
    }

    assert [] == [
        (one.id, one.findings[:1]) for one in results.values() if one.verdict is Verdict.FAIL
    ]
    acted = [one for one in ACTED if reference or one != "replay.reference"]
    assert {} == {
        one: results[one].reason for one in acted if results[one].verdict is not Verdict.PASS
    }
