"""Replay checks: findings name the origin of wrong rows, and what cannot be judged is reported as
such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.replay import Action, Outcome, Routing, Step
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import Defect
from rollproof.core.router_spy import Spy
from rollproof.fakes.trainers.reference_trainers import (
    CapturedPrefix,
    DenseFirst,
    Interleaved,
    ManyExperts,
    RecordingTrainer,
)
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch
from rollproof.judging.checks import Verdict
from rollproof.layouts import Layout, Rank, Source
from rollproof.replay.driver import record_replay
from rollproof.verification.kill_matrix import known_bugs, record_traces
from rollproof.verification.traces import judge
from tests.support.replay_verdicts import CHECKS, declaring, results


def _shift(by: int) -> Callable[[Any, Rollout], IntArray]:
    def payload(self: ReplayTrainer, sample: Rollout) -> IntArray:
        return np.roll(ReplayTrainer.payload(self, sample), by, axis=0)

    return payload


def _narrow(self: ReplayTrainer, sample: Rollout) -> IntArray:
    return ReplayTrainer.payload(self, sample).astype(np.uint8)


class OtherLayers(ReplayTrainer):
    """Layers get the routes of their neighbours."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {layer: right[max(0, layer - 1)] for layer in right}


class OneExpertRecorded(RecordingTrainer):
    """A single expert for all tokens, so that every row that it records is expert 0."""

    layout = replace(RecordingTrainer.layout, num_experts=1, top_k=1)


def test_rows_of_the_first_expert_are_rows() -> None:
    """Expert 0 everywhere is not a row that was dropped."""
    assert Verdict.PASS == results(OneExpertRecorded, "self-replay")["recorded"].verdict


class Swapped(ReplayTrainer):
    """The first two MoE layers get one another's routes."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return {layer: right[{0: 1, 1: 0}.get(layer, layer)] for layer in right}


class Backwards(DenseFirst):
    """A list of layers that was built from the end."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        right = super().targets(step, microbatch, rank, source, chunk)
        return dict(zip(right, reversed(right.values()), strict=True))


class OtherSamples(ReplayTrainer):
    """Samples get the routes of the next sample."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        samples = [
            replace(sample, routes=other.routes)
            for sample, other in zip(microbatch.samples, step.samples[1:], strict=False)
        ]
        fitted = [
            replace(
                sample,
                routes=(
                    None
                    if sample.routes is None
                    else np.resize(sample.routes, (sample.total - 1, *sample.routes.shape[1:]))
                ),
            )
            for sample in samples
        ]
        return super().targets(
            step,
            self.microbatch(microbatch.number, tuple(fitted), microbatch.first),
            rank,
            source,
            chunk,
        )


class Stale(ReplayTrainer):
    """Every step gets the routes of the first one that fits."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.kept = getattr(self, "kept", {})
        for sample in step.samples:
            if sample.routes is not None:
                self.kept.setdefault((sample.request_id, sample.total), sample.routes)

    def payload(self, sample: Rollout) -> IntArray:
        events: IntArray = self.kept[sample.request_id, sample.total]
        return events


class Native(ReplayTrainer):
    """Routers choose for themselves."""

    def begin(self, step: Step) -> None:
        """No router replays."""


class Zeros(CapturedPrefix):
    """Every target is expert 0."""

    def payload(self, sample: Rollout) -> IntArray:
        return super().payload(sample) * 0


@pytest.mark.parametrize(
    ("made", "episode", "origin", "hint"),
    [
        (
            type("Before", (ReplayTrainer,), {"payload": _shift(1)}),
            "placement",
            "are the target of the position before",
            "slime#1045",
        ),
        (
            type("After", (ReplayTrainer,), {"payload": _shift(-1)}),
            "placement",
            "are the target of the position after",
            "slime#1045",
        ),
        (OtherLayers, "placement", "are the target of the MoE layer before", "verl#5037"),
        (
            Swapped,
            "placement",
            (
                "another MoE layer (layer 0 executes that of layer 1, layer 1 executes that of"
                " layer 0)"
            ),
            "verl#5037",
        ),
        (Backwards, "placement", "are the target of another MoE layer (layer ", "verl#5037"),
        (
            OtherSamples,
            "placement",
            "are the target of the same position in the sample after",
            "reach its microbatch",
        ),
        (Stale, "placement", "are the target of step 'first batch'", "SkyRL#1908"),
        (Native, "switching", "are what the router chooses by itself", "verl#7340"),
        (
            type("Narrow", (ManyExperts,), {"payload": _narrow}),
            "placement",
            "are the target wrapped into uint8",
            "verl#7407",
        ),
        (Zeros, "placement", "are rows of only expert 0", "verl#4986"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_finding_says_where_wrong_rows_come_from(
    made: type[ReplayTrainer], episode: str, origin: str, hint: str
) -> None:
    """The place, the amount and the origin of what was executed are in the finding."""
    findings = results(made, episode)["forward"].findings
    wrong_rows = next(finding for finding in findings if origin in finding.observed)

    assert hint in wrong_rows.hint
    assert {"episode", "step", "request", "position", "layer", "rank", "recompute"} == set(
        wrong_rows.where
    )
    assert "wrong, in" in wrong_rows.observed


def test_wrong_rows_without_an_origin_say_so() -> None:
    """Where nothing explains the rows, no origin is made up."""

    class Random(ReplayTrainer):
        def payload(self, sample: Rollout) -> IntArray:
            right = super().payload(sample)
            return (right + 1) % 8

    finding = results(Random, "placement")["forward"].findings[0]
    assert "of these" not in finding.observed and finding.hint.startswith("Follow one row")


@pytest.mark.parametrize(
    ("bug", "check", "hint"),
    [
        (
            "replay-recompute-native",
            "replay.recompute",
            "The forward pass executed the targets: they were cleared",
        ),
        (
            "replay-old-logprobs-native",
            "replay.old-logprob",
            "Where replay.forward passes, training steps execute their targets",
        ),
    ],
)
def test_wrong_rows_of_one_kind_of_pass_say_which(bug: str, check: str, hint: str) -> None:
    """Where no origin is known, what the other passes did says where to look."""
    trace = next(record_traces(known_bugs([bug])[0]))

    assert judge(trace, CHECKS)[check].findings[0].hint.startswith(hint)


def test_a_check_sees_a_trace_cut_anywhere() -> None:
    """A trace that ends within a step is judged up to there, and nothing crashes."""
    trace = record_replay(ReplayTrainer, only=["full recompute"])
    for end in range(1, len(trace.events), 7):
        judged = judge(trace.with_events(trace.events[:end]), CHECKS)
        assert () == judged.failed
        assert not [result.id for result in judged.results if "crashed" in result.reason]


def test_hostile_places_are_padding() -> None:
    """Samples, positions and layers that do not exist are no rows of anything, and widths that
    differ crash nothing.
    """
    trace = record_replay(ReplayTrainer, only=["self-replay"])
    hostile = [
        {"samples": np.array([99]), "positions": np.array([0])},
        {"samples": np.array([0]), "positions": np.array([-5])},
        {"samples": np.array([0]), "positions": np.array([999])},
        {"layer": 77, "samples": np.array([0]), "positions": np.array([0])},
    ]
    for changes in hostile:
        for experts in (
            np.array([[0, 1]]),
            np.zeros((1, 0), dtype=np.int64),
            np.array([[0, 1, 2, 3]]),
        ):
            events = [
                replace(event, **changes, experts=experts) if isinstance(event, Routing) else event
                for event in trace.events
            ]
            judged = judge(trace.with_events(events), CHECKS)
            assert not [result.id for result in judged.results if "crashed" in result.reason]


def test_a_trace_of_rollouts_is_not_judged_by_replay_checks() -> None:
    """The family is about trainers alone."""
    trace = record_replay(Interleaved, only=["edges"])
    judged = judge(replace(trace, header=replace(trace.header, about="rollouts")), CHECKS)

    assert {Verdict.NOT_APPLICABLE} == {result.verdict for result in judged.results}
    assert "it judges replay, and this trace is about rollouts" == judged["replay.forward"].reason


def test_a_contract_without_terms_rules_the_family_out() -> None:
    """A trace of a trainer with a contract without replay terms is not judged, and crashes
    nothing.
    """
    trace = record_replay(ReplayTrainer, only=["edges"])
    bare = replace(
        trace, header=replace(trace.header, contract=replace(trace.header.contract, replay=None))
    )
    judged = judge(bare, CHECKS)

    assert {Verdict.NOT_APPLICABLE} == {result.verdict for result in judged.results}
    assert "the contract declares no replay terms" == judged["replay.recompute"].reason


def test_coverage_names_what_was_never_routed() -> None:
    """A layer without visible calls is reported with its tokens."""
    trace = record_replay(DenseFirst, only=["self-replay"])
    events = [
        event for event in trace.events if not (isinstance(event, Routing) and event.layer == 2)
    ]
    finding = judge(trace.with_events(events), CHECKS)["replay.coverage"].findings[0]

    assert ("tokens that a layer never routed", 2) == (finding.title, finding.where["layer"])
    assert "0 of 30 tokens routed" == finding.observed


def test_a_layout_with_one_layer_and_sample_has_no_other_to_blame() -> None:
    """Origins that do not exist are not tried."""

    class Small(ReplayTrainer):
        layout = Layout(num_layers=1, num_experts=8, top_k=2)
        microbatches = 1

        def payload(self, sample: Rollout) -> IntArray:
            return np.roll(super().payload(sample), 1, axis=0)

    assert Verdict.FAIL is results(Small, "placement")["forward"].verdict


class NothingToLearn(ReplayTrainer):
    """Leaves a sample without response tokens to its routers: nothing of it enters the loss."""

    def captured(self, microbatch: Microbatch, source: Source) -> Any:
        answered = np.array([bool(sample.response_ids) for sample in microbatch.samples] + [False])
        return super().captured(microbatch, source) & answered[source.sample]


class Forgetful(ReplayTrainer):
    """Leaves every sample of a microbatch in which one has no response to its routers."""

    def captured(self, microbatch: Microbatch, source: Source) -> Any:
        return super().captured(microbatch, source) & all(
            sample.response_ids for sample in microbatch.samples
        )


def test_a_sample_without_response_may_be_left_to_its_routers() -> None:
    """A mask may leave it native by design, as verl's for R3 does; leaving other samples' rows
    native is a fault.
    """
    assert Verdict.PASS is results(NothingToLearn, "edges")["edges"].verdict
    edges = results(Forgetful, "edges")["edges"]

    assert Verdict.FAIL is edges.verdict
    assert "with a valid target executed other experts" in edges.findings[0].observed


class Clipping(ReplayTrainer):
    """Makes experts of ids that are none."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        if step.defect not in (Defect.TOO_LARGE, Defect.NEGATIVE):
            return super().run(step, spy)
        fitted = tuple(
            tuple(replace(sample, routes=np.clip(sample.routes, 0, 7)) for sample in part)
            for part in step.microbatches
        )
        return super().run(replace(step, microbatches=fitted), spy)


def test_ids_that_are_made_to_fit_are_found() -> None:
    """A row without a target is the router's own, where the contract says so: an id cut down to a
    valid one is none.
    """
    found = results(Clipping, "bad routes")["targets"]

    assert Verdict.FAIL is found.verdict
    assert "which are neither a target nor the router's own" in found.findings[0].observed


@pytest.mark.parametrize(("tolerance", "verdict"), [(1e-8, Verdict.FAIL), (1e-5, Verdict.PASS)])
def test_rows_without_a_target_are_not_judged_where_scores_are_rounded(
    tolerance: float, verdict: Verdict
) -> None:
    """Under a tolerance that is wider than float64 rounds, two runs may break a near tie
    differently, so that no choice is called wrong.
    """

    class Rounded(Clipping):
        pass

    Rounded.contract = declaring(Rounded, tolerance=tolerance, float_digits=6)
    assert verdict is results(Rounded, "bad routes")["targets"].verdict


def test_an_unusual_step_without_samples_is_handled() -> None:
    """A trace may hold a step of nothing: no row of it is wrong, and the check does not crash."""
    trace = record_replay(ReplayTrainer, only=["edges"])
    events = list(trace.events)
    place = next(i for i, event in enumerate(events) if isinstance(event, Step) and event.edge)
    step = events[place]
    assert isinstance(step, Step)
    end = next(i for i in range(place, len(events)) if isinstance(events[i], Outcome))
    emptied = trace.with_events([*events[:place], replace(step, microbatches=((),)), *events[end:]])
    found = judge(emptied, CHECKS)["replay.edges"]
    assert (Verdict.PASS, "") == (found.verdict, found.reason)


class OneMore(ReplayTrainer):
    """Executes one expert in addition to the target's in replayed steps."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        own = Spy(step)
        try:
            return super().work(step, own)
        finally:
            more = step.action is Action.REPLAY
            calls = [
                (
                    replace(
                        sample,
                        experts=np.concatenate([sample.experts, 7 - sample.experts[:, :1]], axis=1),
                    )
                    if more and isinstance(sample, Routing)
                    else sample
                )
                for sample in own.events
            ]
            spy.extend(calls)


def test_rows_with_an_expert_too_many_say_so() -> None:
    """The finding shows the experts of a row, or that there are too many: never an internal
    mark.
    """
    found = results(OneMore, "placement")

    assert found["forward"].findings[0].observed.startswith("more than 2 experts; ")
    assert "[-2" not in str(found["forward"].findings)
    assert Verdict.FAIL is found["assignments"].verdict
