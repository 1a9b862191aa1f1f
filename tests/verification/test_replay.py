"""Judging: correct trainers are clean, faulty ones are told with a witness, and a run that cannot
be trusted says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollproof.core.events.replay import Step
from rollproof.core.records import IntArray, Rollout
from rollproof.core.trace import Header, Recorder
from rollproof.errors import UsageError
from rollproof.fakes.known_bugs import KNOWN_BUGS
from rollproof.fakes.known_bugs.known_bug import KnownBug
from rollproof.fakes.trainers.reference_trainers import REFERENCES
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch, TrainerPass
from rollproof.invariants import default_registry
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import Tally
from rollproof.replay.driver import drive_episode, record_replay
from rollproof.replay.plans import episodes_for, random_episode
from rollproof.store import dump_trace, load_trace
from rollproof.verification.canary import try_canary
from rollproof.verification.kill_matrix import record_traces
from rollproof.verification.replay import PLANTS, judge_replay
from rollproof.verification.traces import judge, judge_events

CHECKS = default_registry().select(["replay"])


class Shifted(ReplayTrainer):
    """Its routes stand one position behind their tokens."""

    def payload(self, sample: Rollout) -> IntArray:
        return np.roll(super().payload(sample), 1, axis=0)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_clean(name: str) -> None:
    """Every check passes on every correct trainer, or its contract rules it out; the canary is
    caught.
    """
    report = judge_replay(REFERENCES[name], name=name)

    assert [] == [
        (result.id, result.reason)
        for result in report.results
        if result.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    ]
    assert report.canary is not None and report.canary.red
    assert 0 == report.exit_code


@pytest.mark.parametrize("name", REFERENCES)
def test_random_plans_find_nothing(name: str) -> None:
    """Whatever ran before, in whatever mode, a correct trainer is clean."""
    made, tally = REFERENCES[name], Tally(CHECKS)
    for number in range(4):
        recorder = Recorder(lambda: 0.0)
        drive_episode(made(), random_episode(made.contract, 5, number), recorder, name)
        judge_events(
            Header(subject=name, contract=made.contract, about="replay"), recorder.events, tally
        )

    assert () == tally.judgement().failed
    assert tally.judgement()["replay.aftermath"].exercised


@pytest.mark.parametrize("layers", range(1, 7))
def test_failures_come_while_targets_are_left(layers: int) -> None:
    """The router call that fails is not the last of a microbatch, unless there is only one: else
    nothing would be left to clear.
    """
    contract = replace(
        ReplayTrainer.contract, num_layers=layers, moe_layers=tuple(range(layers)), layer_axis="all"
    )
    places = [
        step.fail_at
        for episode in episodes_for(contract)
        for step in episode.steps
        if step.fail_at is not None
    ]
    assert places
    assert all(place is not None and place < max(layers - 1, 1) for place in places)


def test_random_plans_find_what_outlives_a_step() -> None:
    """The law that random plans are held to is no empty one: a queue that stays is seen."""

    class Kept(ReplayTrainer):
        def install(
            self,
            run: TrainerPass,
            microbatch: Microbatch,
            layer: int,
            number: int,
            target: IntArray,
            *,
            keep: bool,
        ) -> None:
            super().install(run, microbatch, layer, number, target, keep=True)

        def end(self, step: Step) -> None:
            for router in self.registry:
                router.action = None

    tally = Tally(CHECKS)
    for number in range(8):
        recorder = Recorder(lambda: 0.0)
        drive_episode(Kept(), random_episode(Kept.contract, 5, number), recorder)
        judge_events(
            Header(subject="kept", contract=Kept.contract, about="replay"), recorder.events, tally
        )
    assert {"replay.recompute", "replay.residue"} <= set(tally.judgement().failed)


def test_a_report_says_what_was_exercised() -> None:
    """Counts of modes, passes and rows are part of the report."""
    report = judge_replay(ReplayTrainer)

    assert {
        "steps, replay",
        "steps, off",
        "rows routed in recompute",
        "steps under drifted weights",
        "bad routes",
    } <= set(report.exercised)
    assert 16 == report.cases


def test_a_witness_shows_the_fault_alone(tmp_path: Path) -> None:
    """The first episode that shows a fault is written down, shows it again, and is deleted once the
    check passes.
    """
    report = judge_replay(Shifted, name="mine", only=["replay.forward"], witness_dir=tmp_path)
    path = tmp_path / "replay.forward.json"

    assert {str(path)} == {finding.witness for finding in report.results[0].findings}
    assert ("replay.forward",) == judge(load_trace(path), CHECKS.select(["replay.forward"])).failed
    judge_replay(ReplayTrainer, name="mine", only=["replay.forward"], witness_dir=tmp_path)
    assert not path.exists()


def test_expected_failures_are_told_apart() -> None:
    """A failure that was expected fails nothing, and is not written down."""
    report = judge_replay(
        Shifted,
        only=["replay.forward", "replay.input"],
        expected={"replay.forward": "issue 1", "routes.rows": "other"},
    )

    assert {
        "pass": 1,
        "fail": 0,
        "unknown": 0,
        "not_applicable": 0,
        "expected_fail": 1,
    } == report.summary
    assert {"replay.forward": "issue 1"} == report.expected


def test_unknown_checks_are_told() -> None:
    """A misspelt check is no check that passes."""
    with pytest.raises(UsageError, match=r"Did you mean replay\.forward"):
        judge_replay(ReplayTrainer, only=["replay.foward"])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_trace_says_the_same_after_a_round_trip(name: str, tmp_path: Path) -> None:
    """What is judged from a file is what was judged in memory."""
    trace = record_replay(REFERENCES[name], only=["drift", "bad routes", "edges"])
    dump_trace(trace, tmp_path / "trace.json")
    before, after = judge(trace, CHECKS), judge(load_trace(tmp_path / "trace.json"), CHECKS)

    assert [(one.id, one.verdict, one.exercised) for one in before.results] == [
        (one.id, one.verdict, one.exercised) for one in after.results
    ]


def test_a_canary_that_nothing_can_see_is_told() -> None:
    """Where no check that sees a planted fault runs, or it fails already, there is no canary, and
    the report says why.
    """
    trace = record_replay(Shifted, only=["self-replay"])

    assert (
        "none of the checks that ran can detect a planted fault"
        in try_canary([trace], CHECKS.select(["replay.input"]), PLANTS).reason
    )
    assert (
        "replay.forward does not pass on this run"
        in try_canary([trace], CHECKS.select(["replay.forward"]), PLANTS).reason
    )


@pytest.mark.parametrize(
    "bug", [bug for bug in KNOWN_BUGS if bug.id.startswith("replay-")][::8], ids=lambda bug: bug.id
)
def test_a_known_bug_gives_the_same_trace_each_time(bug: KnownBug) -> None:
    """Known bugs are as repeatable as references."""
    first, second = ([repr(trace.events) for trace in record_traces(bug)] for _ in range(2))
    assert first == second
