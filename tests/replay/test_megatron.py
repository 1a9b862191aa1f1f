"""The Megatron trainer in every configuration: what is replayed is executed, and nothing else
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import pytest

from rollproof.core.contract import LayerAxis
from rollproof.core.events.replay import Action, Outcome, Phase, Purpose, Routing, Step
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import Recompute, ReplayMode
from rollproof.core.router_spy import Spy
from rollproof.errors import UsageError
from rollproof.judging.expected_rows import ExpectedRows
from rollproof.judging.report import Report
from rollproof.layouts.payloads import Coding
from rollproof.replay.megatron.covered_setups import covering_setups
from rollproof.replay.megatron.megatron_setups import (
    OTHERS,
    SETUPS,
    Dispatcher,
    MegatronSetup,
    ReplayCodeName,
)
from rollproof.replay.megatron.megatron_trainer import MegatronTrainer, megatron_ranks
from rollproof.replay.process_group import Ranks
from rollproof.replay.replay_samples import make_samples, with_drawn_routes
from rollproof.verification.replay import judge_replay

pytest.importorskip("torch", reason="megatron-core needs PyTorch")
# Not imported: the ranks do that, and this process would only grow.
pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None,
    reason="`pip install --no-deps megatron-core==0.16.1` (Python 3.11)",
)

JUDGED = ("single", "sigmoid", "tp2-ep4", "cp2-pp2-vpp2")
"""Together they have every kind of parallelism, dispatcher, router and schedule; `nox -s trainers
-- --table` judges all setups.
"""

COVERING = sorted(covering_setups(), key=lambda row: repr((row[1].mesh, row[1].ep)))
"""One division after the other, so that its processes stay."""

each_setup = pytest.mark.parametrize("name", SETUPS, scope="module")
"""Of the module, so that all tests of a setup come one after the other, and its processes stay."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with megatron_ranks() as started:
        yield started


@pytest.fixture(scope="module")
def verl_ranks() -> Iterator[Ranks]:
    """Apart: megatron-core is judged where verl never was. It imports for long, meanwhile the first
    tests run.
    """
    with megatron_ranks(code=ReplayCodeName.VERL) as started:
        started.prepare()
        yield started


@pytest.fixture(scope="module", autouse=True)
def _prepared(request: pytest.FixtureRequest) -> None:
    """Let verl's processes begin to import, where a test that needs them was selected."""
    if find_spec("verl") is not None and any(
        "[verl-" in item.name for item in request.session.items
    ):
        request.getfixturevalue("verl_ranks")


@pytest.fixture(scope="module")
def undivided(ranks: Ranks) -> Callable[[MegatronSetup], Outcome]:
    """What one process records of the model of a setup; run once for each model."""

    @cache
    def recorded(setup: MegatronSetup) -> Outcome:
        return _run(MegatronTrainer(setup, ranks), _step(setup, Action.RECORD))[0]

    one = {
        "dp": 1,
        "cp": 1,
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "ep": 1,
        "first": None,
        "dispatcher": Dispatcher.ALLGATHER,
    }
    return lambda setup: recorded(replace(setup, name="undivided", **one))


def _step(
    setup: MegatronSetup,
    action: Action,
    samples: tuple[Rollout, ...] | None = None,
    recompute: Recompute = Recompute.NONE,
) -> Step:
    samples = samples or make_samples(setup.contract(), 0)
    size = setup.microbatch_size
    microbatches = tuple(samples[i : i + size] for i in range(0, len(samples), size))
    return Step(
        episode="test",
        name=f"{action}, {recompute}",
        action=action,
        purpose=Purpose.TRAIN,
        microbatches=microbatches,
        recompute=recompute,
    )


def _run(
    trainer: MegatronTrainer, step: Step, *, in_place: bool = False
) -> tuple[Outcome, list[Routing]]:
    spy = Spy(step)
    outcome = trainer.replay_in_place(step, spy) if in_place else trainer.run(step, spy)
    return outcome, [event for event in spy.events if isinstance(event, Routing)]


def _chosen(calls: list[Routing], phase: Phase) -> dict[tuple[int, int, int], list[list[int]]]:
    """Experts per row of each call of a phase, by rank, layer and microbatch."""
    return {
        (one.rank, one.layer, one.microbatch): np.sort(one.experts, axis=1).tolist()
        for one in calls
        if one.phase is phase
    }


@each_setup
def test_recordings_of_all_ranks_merge_to_the_undivided_one(
    ranks: Ranks, undivided: Callable[[MegatronSetup], Outcome], name: str
) -> None:
    """What tensor, context, pipeline, virtual and data-parallel ranks recorded, merged, is what one
    process records, bit for bit.
    """
    single = undivided(SETUPS[name])
    divided, _ = _run(MegatronTrainer(name, ranks), _step(SETUPS[name], Action.RECORD))
    assert sorted(single.recorded) == sorted(divided.recorded)
    assert [] == [
        one
        for one, rows in single.recorded.items()
        if not np.array_equal(rows, divided.recorded[one])
    ]
    assert pytest.approx(single.loss, rel=1e-6) == divided.loss


@each_setup
def test_replay_of_every_ranks_own_recording_changes_no_bit(ranks: Ranks, name: str) -> None:
    """Loss, logprobs and all gradients of a replay in place equal those of the recording bit for
    bit, with and without recompute.

    Every row, padding too, executes what was recorded, in the forward pass and once more where
    activations are recomputed.
    """
    trainer = MegatronTrainer(name, ranks)
    recording, calls = _run(trainer, _step(trainer.setup, Action.RECORD))
    recorded = _chosen(calls, Phase.FORWARD)
    assert (
        trainer.setup.microbatches * len(trainer.setup.moe_layers) * trainer.setup.world_size
        == len(recorded) * trainer.setup.pp
    )
    for recompute, again in (
        (Recompute.NONE, {}),
        (Recompute.SELECTIVE, recorded),
        (Recompute.FULL, recorded),
    ):
        replayed, calls = _run(
            trainer, _step(trainer.setup, Action.REPLAY, recompute=recompute), in_place=True
        )
        assert (recorded, again) == (_chosen(calls, Phase.FORWARD), _chosen(calls, Phase.RECOMPUTE))
        assert recording.loss == replayed.loss
        for before, after in (
            (recording.logprobs, replayed.logprobs),
            (recording.gradients, replayed.gradients),
        ):
            assert sorted(before) == sorted(after)
            assert [] == [one for one in before if not np.array_equal(before[one], after[one])]
        assert dict.fromkeys(trainer.residue(), 0) == trainer.residue()


@each_setup
def test_every_row_executes_the_routes_of_its_own_place(ranks: Ranks, name: str) -> None:
    """Routes that spell sample, position and layer are executed where they belong: decoded, each
    row names itself.
    """
    setup = SETUPS[name]
    samples = make_samples(setup.contract(), 0)
    columns = setup.num_layers if setup.layer_axis is LayerAxis.ALL else len(setup.moe_layers)
    longest = max(sample.total for sample in samples)
    experts = next(n for n in range(8, 100, 4) if (n - 1) ** 2 >= len(samples) * longest * columns)
    setup = replace(setup, num_experts=experts)
    coding = Coding(samples=len(samples), positions=longest, columns=columns, experts=experts)
    coded = tuple(
        replace(one, routes=coding.payload(i, one.total - 1).astype(np.int16))
        for i, one in enumerate(samples)
    )
    _, calls = _run(
        MegatronTrainer(setup, ranks), _step(setup, Action.REPLAY, coded, Recompute.FULL)
    )
    seen = {
        (call.phase, *place)
        for call in calls
        for place in _misplaced_or_seen(call, coding, setup, samples)
    }
    expected = {
        (phase, i, position, layer)
        for phase in Phase
        for i, one in enumerate(samples)
        for position in range(one.total - 1)
        for layer in setup.moe_layers
    }
    assert expected == seen


def _misplaced_or_seen(
    call: Routing, coding: Coding, setup: MegatronSetup, samples: tuple[Rollout, ...]
) -> Iterator[tuple[int, int, int]]:
    """Where each row with a target says that it belongs: its own place, or one that no row has
    (layer -1).
    """
    column = setup.layout().column[call.layer]
    rows = [
        i
        for i, (s, p) in enumerate(zip(call.samples, call.positions, strict=True))
        if s >= 0 and p < samples[s].total - 1
    ]
    for row in rows:
        own = (int(call.samples[row]), int(call.positions[row]), column)
        pair: IntArray = call.experts[row]
        recorded = {
            coding.place(int(cell))
            for order in (pair, pair[::-1])
            if (cell := coding.decode(order[None])[0]) >= 0
        }
        yield (own[0], own[1], call.layer if own in recorded else -1)


def _executed(setup: MegatronSetup, step: Step, calls: list[Routing], phase: Phase) -> bool:
    """Whether every captured row of the step executed its target, in each layer, in that phase."""
    targets = ExpectedRows(setup.contract(), step.samples)
    expected = np.where(targets.known[..., None], np.sort(targets.experts), -1)
    seen = np.full_like(targets.experts, -1)
    for call in calls:
        places, column = targets.places(call), targets.layers.index(call.layer)
        held = (places >= 0) & targets.known[places, column] & (call.phase is phase)
        seen[places[held], column] = np.sort(call.experts)[held]
    return np.array_equal(expected, seen)


@pytest.mark.parametrize(
    ("setup", "recompute"), [pytest.param(*row, id=str(number)) for number, *row in COVERING]
)
def test_rows_of_the_covering_array_execute_their_targets(
    ranks: Ranks, setup: MegatronSetup, recompute: Recompute
) -> None:
    """Every captured row executes its target, forward and in recompute; logprobs and gate gradients
    are those of the plain model.

    Targets are drawn in mode R3; in R2 they are what the trainer recorded under other weights.
    """
    samples = make_samples(setup.contract(), 0)
    trainer = MegatronTrainer(setup, ranks)
    if setup.mode is ReplayMode.R2:
        recording, _ = _run(trainer, _step(setup, Action.RECORD, samples))
        targets = tuple(replace(one, routes=recording.recorded[one.request_id]) for one in samples)
        trainer.set_weights(1)
    else:
        random = np.random.default_rng(1)
        targets = tuple(with_drawn_routes(setup.contract(), sample, random) for sample in samples)
    step = _step(setup, Action.REPLAY, targets, recompute)
    outcome, calls = _run(trainer, step)
    assert _executed(setup, step, calls, Phase.FORWARD)
    assert recompute is Recompute.NONE or _executed(setup, step, calls, Phase.RECOMPUTE)
    reference = trainer.reference(step)
    assert setup.moe_layers == tuple(outcome.gates)
    for layer, gate in outcome.gates.items():
        np.testing.assert_allclose(
            gate, reference.gates[layer], rtol=1e-3, atol=1e-3 * float(gate[0])
        )
    for one, values in outcome.logprobs.items():
        np.testing.assert_allclose(values, reference.logprobs[one], rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_peoples_code_is_driven_to_the_end(request: pytest.FixtureRequest, name: str) -> None:
    """Replay code of verl and SkyRL executes drawn routes, forward and in recompute, and leaves
    nothing behind.

    SkyRL's does not in padded microbatches.
    """
    setup = OTHERS[name]
    package = setup.code.lower()
    if find_spec(package) is None:
        pytest.skip(f"`pip install --no-deps {package}`, with what the track record names")
    samples = make_samples(setup.contract(), 0)
    random = np.random.default_rng(1)
    drawn = tuple(with_drawn_routes(setup.contract(), sample, random) for sample in samples)
    trainer = MegatronTrainer(
        setup,
        request.getfixturevalue("verl_ranks" if setup.code is ReplayCodeName.VERL else "ranks"),
    )
    step = _step(setup, Action.REPLAY, drawn, Recompute.FULL)
    outcome, calls = _run(trainer, step)
    right = name != "skyrl-padded"  # track record, 39
    assert [right, right] == [_executed(setup, step, calls, phase) for phase in Phase]
    assert sorted(one.request_id for one in samples) == sorted(outcome.logprobs)
    assert _chosen(calls, Phase.FORWARD) == _chosen(calls, Phase.RECOMPUTE)
    assert set(setup.moe_layers) == {call.layer for call in calls}
    assert dict.fromkeys(trainer.residue(), 0) == trainer.residue()


@pytest.fixture(scope="module")
def reports(ranks: Ranks) -> dict[str, Report]:
    """Setups of one process are judged next to the others, whose ranks leave time while they wait
    for each other.
    """

    def judged(own: Ranks, *, alone: bool) -> dict[str, Report]:
        names = [name for name in JUDGED if (SETUPS[name].world_size == 1) is alone]
        return {
            name: judge_replay(partial(MegatronTrainer, name, own), name=name) for name in names
        }

    with megatron_ranks() as others, ThreadPoolExecutor(1) as executor:
        single = executor.submit(judged, others, alone=True)
        return {**judged(ranks, alone=False), **single.result()}


@pytest.mark.parametrize("name", JUDGED)
def test_the_trainer_keeps_every_promise_of_replay(reports: dict[str, Report], name: str) -> None:
    """No check fails or stays unknown, and the planted fault is seen."""
    report = reports[name]
    verdicts = {
        result.id: str(result.verdict)
        for result in report.results
        if result.verdict not in ("pass", "not applicable")
    }
    assert {} == verdicts
    assert report.canary is not None and report.canary.red


def test_an_unknown_setup_is_reported_with_those_that_exist(ranks: Ranks) -> None:
    """A setup that does not exist is refused, with the list."""
    with pytest.raises(
        UsageError, match="No Megatron setup is named 'tp3'; choose one of single, dense-first"
    ):
        MegatronTrainer("tp3", ranks)
    with pytest.raises(UsageError, match="There is no variant 'other'"):
        MegatronTrainer("single", ranks).variant("other")
