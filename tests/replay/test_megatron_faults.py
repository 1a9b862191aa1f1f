"""Faults planted on real Megatron ranks are seen by the checks that are named; odd models and
divisions are none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from rollproof.core.contract import LayerAxis
from rollproof.core.events.replay import Action, Purpose, Step
from rollproof.core.replay_contract import Recompute, ReplayMode
from rollproof.core.router_spy import Spy
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.replay.driver import record_replay
from rollproof.replay.megatron.megatron_setups import SETUPS, MegatronSetup, RouterKind
from rollproof.replay.megatron.megatron_trainer import MegatronTrainer
from rollproof.replay.process_group import RankError, Ranks
from rollproof.replay.replay_samples import make_samples, with_drawn_routes
from rollproof.verification.traces import judge

pytest.importorskip("torch", reason="megatron-core needs PyTorch")
pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None,
    reason="`pip install --no-deps megatron-core==0.16.1` (Python 3.11)",
)

SELF = ("self-replay", "drift")
RESULTS = {"replay.self-loss", "replay.self-gradients", "replay.reference"}
"""What a wrong row changes, too."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    from tests.support.megatron_faults import faulty

    with Ranks(
        faulty,
        preload=("rollproof.replay.megatron.rank_worker", "megatron.core.models.gpt.gpt_model"),
    ) as started:
        yield started


def red(ranks: Ranks, fault: str, setup: str, episodes: tuple[str, ...]) -> set[str]:
    """The checks of the family replay that fail on these episodes."""
    from tests.support.megatron_faults import Unchecked

    kind = Unchecked if fault == "Unchecked" else MegatronTrainer
    trace = record_replay(
        lambda: kind(replace(SETUPS[setup], name=f"fault:{fault}"), ranks), only=episodes
    )
    return {
        result.id
        for result in judge(trace, default_registry().select(["replay"])).results
        if result.verdict is Verdict.FAIL
    }


@pytest.mark.parametrize(
    ("fault", "setup", "episodes", "seen"),
    [
        ("Shifted", "single", SELF, {"replay.forward", *RESULTS}),
        ("SwappedLayers", "single", SELF, {"replay.forward", *RESULTS}),
        ("BatchMajor", "single", SELF, {"replay.forward", *RESULTS}),
        ("FirstMicrobatch", "single", SELF, {"replay.forward", *RESULTS}),
        ("NeverActs", "single", SELF, {"replay.forward", "replay.drift", "replay.reference"}),
        ("ZeroPadded", "single", SELF, {"replay.assignments"}),
        ("StaleQueue", "single", ("full recompute",), {"replay.residue"}),
        (
            "LeftAfterFailure",
            "single",
            ("failure in forward",),
            {"replay.residue", "replay.aftermath"},
        ),
        ("Unchecked", "single", ("bad routes",), {"replay.targets"}),
        ("Contiguous", "cp2", SELF, {"replay.forward", *RESULTS}),
        ("LocalLayers", "pp2", SELF, {"replay.forward", *RESULTS}),
        (
            "NoBackward",
            "pp2",
            ("full recompute",),
            {"replay.recompute", "replay.recompute-results"},
        ),
        ("none", "pp2", ("full recompute",), set()),
    ],
)
def test_a_published_fault_is_seen(
    ranks: Ranks, fault: str, setup: str, episodes: tuple[str, ...], seen: set[str]
) -> None:
    """The checks that are named fail, and no others; without a fault none does."""
    assert seen == red(ranks, fault, setup, episodes)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("Killed", RankError, "Rank 1 of 2 was ended by SIGKILL in its job"),
        ("Raising", ArithmeticError, "this rank cannot count"),
    ],
)
def test_a_rank_that_ends_in_the_middle_of_a_schedule_is_named(
    ranks: Ranks, fault: str, error: Any, message: str
) -> None:
    """The rank that waits for it does not wait long, and the next trainer finds ranks."""
    setup = replace(SETUPS["pp2"], name=f"fault:{fault}")
    before = _ran(MegatronTrainer("pp2", ranks), Action.NATIVE)
    start = time.monotonic()
    with pytest.raises(error, match=message):
        _ran(MegatronTrainer(setup, ranks), Action.RECORD)
    assert time.monotonic() - start < 30
    assert before.loss == _ran(MegatronTrainer("pp2", ranks), Action.NATIVE).loss


ODD = (
    MegatronSetup(name="experts in the last stage only", pp=2, moe_layers=(3,), microbatches=3),
    MegatronSetup(name="one layer a stage", pp=3, num_layers=3, moe_layers=(1,), microbatches=4),
    MegatronSetup(name="every second layer", tp=2, moe_layers=(0, 2)),
    MegatronSetup(name="four tensor ranks", tp=4, num_layers=2, moe_layers=(1,)),
    MegatronSetup(
        name="one sample of a step",
        cp=2,
        num_layers=2,
        moe_layers=(1,),
        microbatch_size=1,
        microbatches=1,
    ),
    MegatronSetup(
        name="257 experts",
        num_layers=2,
        moe_layers=(1,),
        num_experts=257,
        mode=ReplayMode.R2,
        layer_axis=LayerAxis.MOE,
    ),
    MegatronSetup(
        name="all experts chosen", num_layers=2, moe_layers=(0, 1), num_experts=4, top_k=4
    ),
    MegatronSetup(
        name="one expert chosen", num_layers=2, moe_layers=(1,), top_k=1, router=RouterKind.SIGMOID
    ),
)


@pytest.mark.parametrize("setup", ODD, ids=lambda setup: setup.name.replace(" ", "-"))
def test_odd_models_replay_what_the_plain_model_computes(
    ranks: Ranks, setup: MegatronSetup
) -> None:
    """Drawn routes, in full recompute: logprobs equal the plain model's, and nothing is left."""
    trainer = MegatronTrainer(setup, ranks)
    outcome, reference = (
        _ran(trainer, Action.REPLAY),
        trainer.reference(_step(setup, Action.REPLAY)),
    )
    for one, values in outcome.logprobs.items():
        np.testing.assert_allclose(values, reference.logprobs[one], rtol=1e-4)
    assert dict.fromkeys(trainer.residue(), 0) == trainer.residue()


def _step(setup: MegatronSetup, action: Action) -> Step:
    random, size = np.random.default_rng(1), setup.microbatch_size
    samples = [
        with_drawn_routes(setup.contract(), sample, random)
        for sample in make_samples(setup.contract(), 0)
    ]
    microbatches = tuple(tuple(samples[i : i + size]) for i in range(0, len(samples), size))
    return Step(
        episode="test",
        name=str(action),
        action=action,
        purpose=Purpose.TRAIN,
        microbatches=microbatches,
        recompute=Recompute.FULL,
    )


def _ran(trainer: MegatronTrainer, action: Action) -> Any:
    step = _step(trainer.setup, action)
    return trainer.run(step, Spy(step))
