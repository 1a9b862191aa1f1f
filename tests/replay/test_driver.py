"""Driving: what a subject does is recorded, what it does not offer is skipped with the reason, what
is no subject is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.replay import Outcome, Residue, Routing, Step
from rollproof.core.progress import Progress
from rollproof.core.replay_contract import Defect
from rollproof.core.router_spy import Spy, UnsupportedStep
from rollproof.core.trace import Trace
from rollproof.errors import RoutesError, SubjectError, UsageError
from rollproof.fakes.trainers.reference_trainers import CapturedPrefix, RecordingTrainer
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.replay.driver import record_again, record_replay


def outcomes(trace: Trace) -> dict[str, Outcome]:
    """The outcome of each step, by name."""
    return {event.step: event for event in trace.events if isinstance(event, Outcome)}


def steps(trace: Trace) -> dict[str, Step]:
    """The steps, by name."""
    return {event.name: event for event in trace.events if isinstance(event, Step)}


def test_one_seed_gives_one_trace() -> None:
    """A run is repeatable, event for event; another seed draws other random episodes."""
    first, second = (
        repr(record_replay(ReplayTrainer, only=["drift", "placement"]).events) for _ in range(2)
    )
    other = record_replay(ReplayTrainer, profile="nightly", seed=1, only=["random 1.0"])

    assert first == second
    assert "random 1.0" == next(event.episode for event in other.events if isinstance(event, Step))


def test_every_episode_begins_with_a_fresh_subject() -> None:
    """The factory is called once for each episode, the first subject serving the first one."""
    made = []

    def factory() -> ReplayTrainer:
        made.append(ReplayTrainer())
        return made[-1]

    record_replay(factory, only=["self-replay", "drift", "edges"])
    assert 3 == len(made)


def test_a_self_replay_replays_the_recorded_routes() -> None:
    """The routes of a self-replay are the native choices, cut to the contract's rows; dense columns
    stay empty.
    """
    trace = record_replay(RecordingTrainer, only=["self-replay"])
    requested = steps(trace)
    calls = [event for event in trace.events if isinstance(event, Routing)]
    first = next(call for call in calls if call.layer == 2)
    native = {
        (int(s), int(p)): sorted(row)
        for s, p, row in zip(first.samples, first.positions, first.experts.tolist(), strict=True)
    }
    replayed = requested["self-replay"].samples

    for (number, position), experts in native.items():
        routes = replayed[number].routes
        assert routes is not None and experts == sorted(routes[position, 0].tolist())
    assert {"native", "self-replay", "recording", "replay of the recording"} <= set(requested)


class _Bare:
    """A subject with nothing optional, that reports no router calls."""

    contract = ReplayTrainer.contract

    def run(self, step: Step, spy: Spy) -> Outcome:
        return Outcome(step=step.name, loss=1.0)


@pytest.mark.parametrize(
    ("episode", "step", "reason"),
    [
        ("self-replay", "self-replay", "the spy did not see every row of step 'native' routed"),
        ("drift", "native, drifted", "the subject has no set_weights"),
        ("drift", "reference, drifted", "the spy did not see every row of step 'native' routed"),
        ("no-moe-layers", "replay without MoE layers", "the subject has no variants"),
        ("router fused", "replay on the router fused", "the subject has no variants"),
    ],
)
def test_steps_that_a_subject_does_not_offer_are_skipped_with_a_reason(
    episode: str, step: str, reason: str
) -> None:
    """No method is called that the subject does not have, and the trace says why."""
    assert reason in outcomes(record_replay(_Bare, only=[episode]))[step].skipped


def test_steps_that_build_on_a_failed_one_are_skipped() -> None:
    """Where a native step failed, its choices are not known."""

    class Failing(ReplayTrainer):
        def work(self, step: Step, spy: Spy) -> Outcome:
            if step.name == "native":
                raise MemoryError("out of memory")
            return super().work(step, spy)

    by_step = outcomes(record_replay(Failing, only=["self-replay"]))
    assert "MemoryError: out of memory" == by_step["native"].error
    assert (
        "step 'native', which has the routes for it, did not complete"
        == by_step["self-replay"].skipped
    )


def test_a_wrapped_injected_failure_is_recognised() -> None:
    """The harness's own failure is recognised, also where a trainer wraps it in an error of its
    own.
    """

    class Wrapping(ReplayTrainer):
        def work(self, step: Step, spy: Spy) -> Outcome:
            try:
                return super().work(step, spy)
            except RuntimeError as error:
                raise ValueError("step failed") from error

    outcome = outcomes(record_replay(Wrapping, only=["failure in forward"]))["failing replay"]
    assert outcome.injected and "ValueError: step failed" == outcome.error


def test_residue_is_reported_after_every_step() -> None:
    """What is left is recorded under the step's name, with its counts."""
    left = [
        event
        for event in record_replay(ReplayTrainer, only=["evaluation"]).events
        if isinstance(event, Residue)
    ]

    assert 7 == len(left) and all({0} == set(residue.left.values()) for residue in left)


def test_floating_point_routes_are_passed_and_recorded_as_integers() -> None:
    """A trace holds integers; the trainer gets the type that the step names."""
    dtypes: list[str] = []

    class Looking(ReplayTrainer):
        def check(self, step: Step) -> None:
            if step.defect is Defect.FLOAT:
                dtypes.extend(
                    sample.routes.dtype.name for sample in step.samples if sample.routes is not None
                )
            super().check(step)

    trace = record_replay(Looking, only=["bad routes"])
    step = steps(trace)["routes that are float"]
    assert ["uint8", "uint8", "float32", "uint8"] == dtypes
    assert {"uint8"} == {
        sample.routes.dtype.name for sample in step.samples if sample.routes is not None
    }


def test_samples_that_a_trainer_changes_reach_neither_trace_nor_next_step() -> None:
    """Samples are copies, and a change in them is reported by name."""

    class Writing(ReplayTrainer):
        def check(self, step: Step) -> None:
            for sample in step.samples:
                assert sample.routes is not None and sample.loss_mask is not None
                sample.loss_mask[:] = 0

    trace = record_replay(Writing, only=["placement"])
    assert ("loss_mask of r0", "loss_mask of r1", "loss_mask of r2", "loss_mask of r3") == outcomes(
        trace
    )["first batch"].changed
    assert all(
        sample.loss_mask is not None and sample.loss_mask.all()
        for sample in steps(trace)["first batch"].samples
    )


def _raising(error: BaseException) -> Callable[..., Any]:
    def method(*args: Any) -> Any:
        raise error

    return method


@pytest.mark.parametrize(
    ("method", "error", "step", "reason"),
    [
        (
            "set_weights",
            NotImplementedError("no noise"),
            "native, drifted",
            "no weights number 1: NotImplementedError: no noise",
        ),
        (
            "variant",
            KeyError("fused"),
            "replay on the router fused",
            "the subject has no variant 'fused': KeyError",
        ),
        ("variant", UnsupportedStep("not here"), "replay on the router fused", "not here"),
    ],
)
def test_ways_to_say_that_something_is_not_offered(
    method: str, error: Exception, step: str, reason: str
) -> None:
    """UnsupportedStep, and what Python itself has for it, skip the step."""
    made = type("Made", (ReplayTrainer,), {method: _raising(error)})

    assert reason in outcomes(record_replay(made, only=["drift", "router fused"]))[step].skipped


def test_a_router_may_be_refused_while_its_model_is_made() -> None:
    """An option that replay cannot go with is refused in the constructor: that is an error of the
    step.
    """
    made = type(
        "Made", (ReplayTrainer,), {"variant": _raising(ValueError("switch moe_router_fusion off"))}
    )

    assert (
        "ValueError: switch moe_router_fusion off"
        == outcomes(record_replay(made, only=["router fused"]))["replay on the router fused"].error
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"run": lambda self, step, spy: {"loss": 1.0}},
            r"Made.run must return an Outcome .*, not dict",
        ),
        (
            {"run": lambda self, step, spy: Outcome(step="", gates={"a": np.ones(9)})},
            "unusable Outcome for step 'native': ValueError",
        ),  # type: ignore[dict-item]
        (
            {"run": lambda self, step, spy: Outcome(step="", gates={0: np.ones((8, 6))})},
            (
                r"unusable Outcome for step 'native': ValueError: the gradient of 0 has the shape"
                r" \(8, 6\): report .*sketch\(gradient\)"
            ),
        ),
        (
            {"run": _raising(SystemExit(0))},
            r"Made\.run ends the process \(SystemExit: 0\): raise an exception instead",
        ),
        ({"__init__": _raising(SystemExit(0))}, "Made ends the process"),
        ({"residue": _raising(KeyError("gate"))}, r"Made\.residue raised KeyError: 'gate' "),
        ({"stop": _raising(OSError("busy"))}, r"Made\.stop raised OSError: busy "),
        (
            {
                "run": lambda self, step, spy: (
                    spy.extend([None]),
                    ReplayTrainer.run(self, step, spy),
                )[1]
            },
            "gave its spy a NoneType",
        ),
        (
            {"residue": lambda self: {"targets": 0.5}},
            "Made.residue must return a mapping from names to whole numbers",
        ),
        (
            {"set_weights": _raising(ValueError("shape"))},
            r"weights number 1, nudged by 0.0: ValueError: shape\. Raise UnsupportedStep",
        ),
        (
            {"variant": lambda self, name: 3},
            r"Made.variant\('fused'\) must return a ReplaySubject, not int",
        ),
        ({"contract": None}, "not a ReplaySubject: it needs a `contract` with replay terms"),
        ({"run": None}, "a method `run"),
        (
            {"__init__": _raising(OSError("no model"))},
            "Made could not be created: OSError: no model",
        ),
    ],
)
def test_a_broken_subject_protocol_is_reported(changes: dict[str, Any], message: str) -> None:
    """The report names the method, and nothing is judged."""
    made = type("Made", (ReplayTrainer,), {})
    for name, value in changes.items():
        setattr(made, name, value)
    with pytest.raises(SubjectError, match=message):
        record_replay(made, only=["drift", "router fused"])


def test_counts_of_numpy_are_counts() -> None:
    """A residue may be summed by numpy; the trace holds Python integers."""
    made = type("Made", (ReplayTrainer,), {"residue": lambda self: {"targets": np.int64(0)}})
    left = [
        event.left
        for event in record_replay(made, only=["self-replay"]).events
        if isinstance(event, Residue)
    ]

    assert left and all(
        {"targets": int} == {name: type(number) for name, number in residue.items()}
        for residue in left
    )


def test_errors_of_rollproofs_own_replay_code_are_outcomes() -> None:
    """`hf_replay` and its like refuse routes by rollproof's errors: a subject built on them
    refuses, too.
    """
    made = type("Made", (ReplayTrainer,), {"check": _raising(RoutesError("2 rows for 7 tokens"))})

    assert (
        "RoutesError: 2 rows for 7 tokens"
        == outcomes(record_replay(made, only=["bad routes"]))["routes that are short"].error
    )


def test_an_async_subject_is_driven_alike() -> None:
    """Methods may be async."""

    class Async(ReplayTrainer):
        async def run(self, step: Step, spy: Spy) -> Outcome:  # type: ignore[override]
            return ReplayTrainer.run(self, step, spy)

    driven, other = (
        outcomes(record_replay(made, only=["placement"])) for made in (Async, ReplayTrainer)
    )
    assert [outcome.loss for outcome in other.values()] == [
        outcome.loss for outcome in driven.values()
    ]


def test_a_captured_prefix_is_cut() -> None:
    """Where payloads may end early, a step gives the first rows alone."""
    requested = steps(record_replay(CapturedPrefix, only=["placement"]))

    assert {2} == {
        len(sample.routes)
        for sample in requested["a captured prefix"].samples
        if sample.routes is not None
    }


def test_a_trace_is_run_again_from_its_header() -> None:
    """The header names episodes, profile and seed, which is all that a run depends on."""
    first = record_replay(ReplayTrainer, profile="nightly", seed=2, only=["random 2.3", "edges"])

    assert repr(first.events) == repr(record_again(ReplayTrainer, first.header).events)


def test_episodes_that_do_not_exist_are_reported() -> None:
    """A misspelt episode, or a header without any, is refused; the text lists those that exist."""
    with pytest.raises(
        UsageError,
        match=r"no episodes \['self replay'\]; those of its contract are \['self-replay', 'drift'",
    ):
        record_replay(ReplayTrainer, only=["self replay"])
    header = record_replay(ReplayTrainer, only=["edges"]).header
    for case in (None, {"episodes": "edges"}, {"episodes": []}, {"episodes": [3]}):
        with pytest.raises(UsageError, match="names no episodes"):
            record_again(
                ReplayTrainer,
                type(header)(subject="x", contract=header.contract, about="replay", case=case),
            )


def test_a_subject_is_stopped_after_its_episode() -> None:
    """`stop` is called on the subject and on its variants, also where a step failed."""
    stopped: list[str] = []

    class Stopping(ReplayTrainer):
        def stop(self) -> None:
            stopped.append(type(self).__name__)

    record_replay(Stopping, only=["router fused", "failure in forward"])
    assert ["Fused", "Stopping", "Stopping"] == sorted(stopped)


def test_progress_names_each_step() -> None:
    """A trainer that takes minutes for an episode is seen at work: which of how many episodes, and
    which step.
    """
    heard: list[Progress] = []
    record_replay(_Bare, name="bare", only=["switching", "edges"], progress=heard.append)
    assert {(0, 2), (1, 2)} == {(report.done, report.total) for report in heard}
    assert [
        "bare: switching, a fresh subject",
        "bare: switching, native",
        "bare: switching, replay",
    ] == [report.what for report in heard][:3]


class _OtherNumbers(ReplayTrainer):
    """Its routers number experts from 1000."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        own_numbers = Spy(step)
        try:
            return super().run(step, own_numbers)
        finally:
            spy.extend(
                replace(event, experts=event.experts + 1000)
                if isinstance(event, Routing)
                else event
                for event in own_numbers.events
            )


def test_choices_that_are_no_experts_are_not_replayed() -> None:
    """Steps that would replay them are skipped, with the reason; the others run."""
    outcomes = {
        event.step: event
        for event in record_replay(_OtherNumbers, only=("drift",)).events
        if isinstance(event, Outcome)
    }
    reason = "a router of step 'native' chose expert 1007, but the contract declares 8 experts"
    assert (
        reason
        == outcomes["replay, drifted"].skipped
        == outcomes["replay of what was not chosen"].skipped
    )
    assert outcomes["native, drifted"].done
