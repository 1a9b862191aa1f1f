"""Published faults of HF replays, planted on a real model: the named checks see them, and the same
code without the fault is clean.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rollproof.replay.hf needs PyTorch")
transformers = pytest.importorskip(
    "transformers",
    minversion="5.24",
    reason="tried with 5.24; routers of DeepSeek-V3 up to 5.12 select outside of their forward",
)

from rollproof.invariants import default_registry  # noqa: E402
from rollproof.judging.checks import Verdict  # noqa: E402
from rollproof.replay.driver import record_replay  # noqa: E402
from rollproof.replay.hf.hf_replay_trainer import HfTrainer  # noqa: E402
from rollproof.replay.hf.hf_setups import Setup  # noqa: E402
from rollproof.verification.traces import judge  # noqa: E402
from tests.support import hf_faults  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

SELF = ("self-replay", "drift")
RESULTS = {"replay.self-loss", "replay.self-gradients", "replay.reference", "replay.free-rows"}
"""What a wrong row changes, too: the same fault seen in results."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def red(replay: Any, episodes: tuple[str, ...], **setup: Any) -> set[str]:
    """The checks of the family replay that fail on these episodes."""
    trace = record_replay(lambda: HfTrainer(Setup(**setup), replay=replay), only=episodes)
    return {
        result.id
        for result in judge(trace, default_registry().select(["replay"])).results
        if result.verdict is Verdict.FAIL
    }


@pytest.mark.parametrize(
    ("fault", "episodes", "kills", "also"),
    [
        (hf_faults.Shifted, SELF, {"replay.forward"}, RESULTS),
        (hf_faults.SwappedLayers, SELF, {"replay.forward"}, RESULTS),
        (hf_faults.SequenceMajor, SELF, {"replay.forward"}, RESULTS),
        (
            hf_faults.Native,
            SELF,
            {"replay.forward", "replay.drift"},
            {"replay.installs", "replay.reference"},
        ),
        (hf_faults.ZerosExecuted, SELF, {"replay.assignments", "replay.free-rows"}, RESULTS),
        (hf_faults.Narrow, SELF, {"replay.assignments"}, RESULTS | {"replay.forward"}),
        (
            hf_faults.DeadGate,
            SELF,
            {"replay.gate-gradients", "replay.gate-slope"},
            {"replay.reference"},
        ),
        (hf_faults.DetachedGate, SELF, {"replay.gate-gradients"}, {*RESULTS, "replay.gate-slope"}),
        (hf_faults.DoubleSoftmax, SELF, {"replay.self-loss", "replay.reference"}, RESULTS),
        (
            hf_faults.LeftAfterFailure,
            ("failure in forward",),
            {"replay.residue", "replay.aftermath"},
            set(),
        ),
        (hf_faults.EveryModel, ("model reference",), {"replay.models"}, {"replay.installs"}),
        (
            hf_faults.CachedTarget,
            ("full recompute",),
            {"replay.recompute", "replay.recompute-results"},
            set(),
        ),
        (hf_faults.Plain, ("bad routes",), {"replay.targets"}, set()),
    ],
)
def test_a_published_fault_is_seen(
    fault: Any, episodes: tuple[str, ...], kills: set[str], also: set[str]
) -> None:
    """The checks that are named fail, and no other one than those that see the same fault from
    elsewhere.
    """
    failed = red(fault, episodes)

    assert kills == kills & failed
    assert set() == failed - kills - also


@pytest.mark.parametrize(
    "episodes", [SELF, ("failure in forward", "model reference", "full recompute")]
)
def test_the_replay_that_they_are_made_of_is_clean(episodes: tuple[str, ...]) -> None:
    """Without a fault, the same plain replay fails nothing in the same episodes."""
    assert set() == red(hf_faults.Plain, episodes)


def test_a_target_that_is_gone_before_the_backward_pass_is_seen() -> None:
    """Reentrant checkpointing raises nothing when a recompute routes natively: gradients are wrong
    in silence, and the check says so.
    """
    setup = {"reentrant": True, "late": True}

    assert {"replay.recompute", "replay.recompute-results"} == red(
        hf_faults.Plain, ("full recompute",), **setup
    )
