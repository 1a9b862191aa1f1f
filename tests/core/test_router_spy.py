"""The spy identifies rows by tokens or places, sketches gradients, and raises planned failures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.replay import Action, Install, Phase, Purpose, Routing, Step
from rollproof.core.router_spy import InjectedFailure, Spy, direction, identify, ids_of_map, sketch
from rollproof.errors import SubjectError
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.replay.replay_samples import make_samples

SAMPLES = make_samples(ReplayTrainer.contract, 0)
STEP = Step(
    episode="e",
    name="s",
    action=Action.NATIVE,
    purpose=Purpose.TRAIN,
    microbatches=(SAMPLES[:2], SAMPLES[2:]),
)


def test_tokens_identify_sample_and_position() -> None:
    """Every token of a step is its own, so it says which row it is; any other token is padding."""
    tokens = [token for sample in SAMPLES for token in sample.prompt_ids + sample.response_ids]
    samples, positions = identify([*tokens, 0, -1], SAMPLES)

    assert len(set(tokens)) == len(tokens)
    assert [i for i, sample in enumerate(SAMPLES) for _ in range(sample.total)] + [
        -1,
        -1,
    ] == samples.tolist()
    assert [p for sample in SAMPLES for p in range(sample.total)] + [-1, -1] == positions.tolist()


def test_a_routing_map_becomes_ids() -> None:
    """Ids ascend; rows with fewer experts than top_k hold -1, and a row with more makes all as
    wide.
    """
    assert [[1, 2], [0, -1]] == ids_of_map([[0, 1, 1], [1, 0, 0]], 2).tolist()
    assert [[0, 1, 2], [2, -1, -1]] == ids_of_map([[1, 1, 1], [0, 0, 1]], 2).tolist()
    assert (0, 2) == ids_of_map(np.zeros((0, 4)), 2).shape


def test_calls_are_recorded_with_phase_rank_and_microbatch() -> None:
    """What a spy takes says where and when it was."""
    spy = Spy(STEP, rank=3)
    spy.microbatch = 1
    spy.installed(2)
    spy.routed(2, [[0, 1]], samples=[0], positions=[4])
    with spy.recomputing():
        spy.routed(2, [[0, 1]], tokens=[SAMPLES[1].prompt_ids[0]], model="mtp", microbatch=0)
    spy.routed(2, [[0, 1]], samples=[0], positions=[4])

    install, first, second, third = spy.events
    assert isinstance(install, Install) and (2, 1, 3) == (
        install.layer,
        install.microbatch,
        install.rank,
    )
    assert isinstance(first, Routing) and (Phase.FORWARD, 3, 1) == (
        first.phase,
        first.rank,
        first.microbatch,
    )
    assert isinstance(second, Routing) and (Phase.RECOMPUTE, "mtp", 0) == (
        second.phase,
        second.model,
        second.microbatch,
    )
    assert ([1], [0]) == (second.samples.tolist(), second.positions.tolist())
    assert isinstance(third, Routing) and Phase.FORWARD is third.phase


def test_arrays_that_do_not_fit_are_refused() -> None:
    """A call is refused if its rows are not identified, or are not as many as its experts."""
    spy = Spy(STEP)
    with pytest.raises(
        SubjectError, match="needs the rows' tokens, or their samples and positions"
    ):
        spy.routed(0, [[0, 1]])
    with pytest.raises(SubjectError, match=r"got experts int64 \(1, 2\), samples int64 \(2,\)"):
        spy.routed(0, [[0, 1]], samples=[0, 1], positions=[0, 1])
    with pytest.raises(SubjectError, match="integer experts"):
        spy.routed(0, [[0.0, 1.0]], samples=[0], positions=[0])


def test_a_failure_is_raised_in_the_call_that_the_step_names() -> None:
    """Calls are counted from 0 in the phase that is named, and the call is recorded before it
    fails.
    """
    spy = Spy(replace(STEP, fail_at=1, fail_in=Phase.RECOMPUTE))
    for _ in range(3):
        spy.routed(0, [[0, 1]], samples=[0], positions=[0])
    with spy.recomputing():
        spy.routed(0, [[0, 1]], samples=[0], positions=[0])
        with pytest.raises(
            InjectedFailure, match="in router call 1 of the recompute pass of step 's'"
        ):
            spy.routed(0, [[0, 1]], samples=[0], positions=[0])
    assert 5 == len(spy.events)


def test_the_first_product_of_a_sketch_is_the_slope_along_the_direction() -> None:
    """A gate's gradient and a nudge of its weight meet in one number."""
    gradient = np.random.default_rng(1).standard_normal((8, 6))

    assert float((gradient * direction((8, 6))).sum()) == pytest.approx(
        float(sketch(gradient)[1]), rel=1e-12
    )
    assert float(np.linalg.norm(gradient)) == pytest.approx(float(sketch(gradient)[0]), rel=1e-12)


def test_the_distance_of_sketches_estimates_the_distance_of_arrays() -> None:
    """Over many pairs the estimate is right to a few per cent, and equal arrays have equal
    sketches.
    """
    random = np.random.default_rng(2)
    distances, estimates = [], []
    for _ in range(200):
        first, second = random.standard_normal((2, 40))
        distances.append(float(((first - second) ** 2).sum()))
        estimates.append(float(np.mean((sketch(first)[1:] - sketch(second)[1:]) ** 2)))

    assert np.mean(estimates) == pytest.approx(np.mean(distances), rel=0.1)
    assert sketch(np.arange(9.0)).tolist() == sketch(np.arange(9.0).reshape(3, 3)).tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer": "x"}, "got layer 'x', microbatch 0, model 'policy'"),
        ({"layer": 1.5}, "got layer 1.5"),
        ({"microbatch": None, "model": 5}, "model 5"),
        ({"samples": [2**40]}, "in the range of int32"),
        ({"experts": [[2**40, 1]]}, "in the range of int32"),
        ({"positions": [0.5]}, "positions float64"),
    ],
)
def test_values_that_no_event_holds_are_refused(values: dict[str, Any], message: str) -> None:
    """What an event would store as something else (2**40 as 0, half a position as 0) is refused."""
    spy = Spy(STEP)
    with pytest.raises(SubjectError, match=re.escape(message)):
        spy.routed(**{"layer": 0, "experts": [[0, 1]], "samples": [0], "positions": [0], **values})

    assert [] == spy.events


def test_whole_numbers_of_numpy_are_taken() -> None:
    """A layer that was counted with numpy is stored as one of Python."""
    spy = Spy(STEP)
    spy.routed(np.int64(1), [[0, 1]], samples=[0], positions=[0], microbatch=np.int32(1))  # type: ignore[arg-type]

    (call,) = spy.events
    assert isinstance(call, Routing) and (int, int) == (type(call.layer), type(call.microbatch))
