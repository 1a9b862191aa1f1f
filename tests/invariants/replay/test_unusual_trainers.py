"""Replay checks on trainers that are correct and unusual: none is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.replay import Action, Outcome, Phase, Purpose, Step
from rollproof.core.records import IntArray, Rollout
from rollproof.core.replay_contract import Defect, Installs
from rollproof.core.router_spy import InjectedFailure, Spy, UnsupportedStep, sketch
from rollproof.fakes.trainers.reference_trainers import DenseFirst, OneExpert, RecordingTrainer
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch
from rollproof.judging.checks import Verdict
from rollproof.layouts import Layout, Rank, Source
from rollproof.verification.replay import judge_replay
from tests.support.replay_verdicts import declaring, results


class Silent(ReplayTrainer):
    """Reports neither gradients nor logprobs."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        return Outcome(step=outcome.step, loss=outcome.loss)


class Mute(ReplayTrainer):
    """Reports nothing."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        super().work(step, spy)
        return Outcome(step=step.name)


class _WithoutFinals(Spy):
    """Sees every row but those of final tokens."""

    def routed(self, layer: int, experts: Any, **places: Any) -> None:
        totals = np.array([*(sample.total for sample in self.step.samples), 0])
        stored = places["positions"] != totals[places["samples"]] - 1
        super().routed(
            layer,
            experts[stored],
            **{
                **places,
                "samples": places["samples"][stored],
                "positions": places["positions"][stored],
            },
        )


class Shifting(ReplayTrainer):
    """Forwards tokens 0 to T-2 alone: the last one predicts nothing."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        narrower = _WithoutFinals(step)
        try:
            return ReplayTrainer.run(self, step, narrower)
        finally:
            spy.extend(narrower.events)


class ShiftingRecorder(Shifting, RecordingTrainer):
    """As ``Shifting``, recording its own routes."""


class Noisy(ReplayTrainer):
    """Kernels that accumulate in another order each time, as the contract says."""

    noise = np.random.default_rng(0)

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        factor = 1 + 1e-7 * float(self.noise.standard_normal())
        gates = {layer: sketch * factor for layer, sketch in outcome.gates.items()}
        gradients = {name: sketch * factor for name, sketch in outcome.gradients.items()}
        return replace(
            outcome,
            loss=(outcome.loss or 0.0) * factor,
            gradients=gradients,
            gates=gates,
            logprobs={},
        )


Noisy.contract = declaring(Noisy, tolerance=1e-5, float_digits=6)


class OncePerStep(ReplayTrainer):
    """Gives each router the targets of all microbatches at once."""

    def install(
        self,
        run: Any,
        microbatch: Microbatch,
        layer: int,
        number: int,
        target: IntArray,
        *,
        keep: bool,
    ) -> None:
        run.routers[layer, number].install(target, keep=keep)
        if microbatch.number == 0:
            run.spy.installed(layer)


OncePerStep.contract = declaring(OncePerStep, installs=Installs.PER_STEP)


class Reversed(ReplayTrainer):
    """Executes the experts of a row in another order than the target holds them."""

    def targets(
        self, step: Step, microbatch: Microbatch, rank: Rank, source: Source, chunk: int
    ) -> dict[int, IntArray]:
        return {
            layer: target[:, ::-1]
            for layer, target in super().targets(step, microbatch, rank, source, chunk).items()
        }


class Normalised(OneExpert):
    """One expert per token, with the weight 1: gates have no gradient, in native routing either."""

    normalised = True


class RecordsOnly(RecordingTrainer):
    """Replays in training alone: old logprobs are recorded, and evaluations native."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        if step.action is Action.REPLAY and step.purpose is not Purpose.TRAIN:
            raise UnsupportedStep("forward-only passes are not replayed")
        return super().work(step, spy)


class Plain(ReplayTrainer):
    """Has nothing optional but other weights."""

    residue: Any = None
    nudge: Any = None
    variant: Any = None
    reference: Any = None


class Lenient(ReplayTrainer):
    """Leaves to the router what has no row, and says so."""

    def check(self, step: Step) -> None:
        if step.defect is not Defect.SHORT:
            super().check(step)


Lenient.contract = declaring(Lenient, tolerates=(Defect.SHORT,))


class Casting(ReplayTrainer):
    """Takes whole numbers of any type."""

    def check(self, step: Step) -> None:
        if step.defect is not Defect.FLOAT:
            super().check(step)

    def payload(self, sample: Rollout) -> IntArray:
        return super().payload(sample).astype(np.int64)


class Refusing(ReplayTrainer):
    """Refuses what is unusual, loudly."""

    def check(self, step: Step) -> None:
        if step.edge:
            raise ValueError(step.edge)
        super().check(step)


class RecomputesTwice(ReplayTrainer):
    """Nested checkpoints: a router is called twice in the backward pass."""

    def route(self, run: Any, microbatch: Microbatch, layer: int, x: Any, phase: Phase) -> IntArray:
        if phase is Phase.RECOMPUTE:
            for number in range(len(microbatch.sources)):
                queue = run.routers[layer, number].queue
                queue.extendleft(list(queue)[:1])
            super().route(run, microbatch, layer, x, phase)
        return super().route(run, microbatch, layer, x, phase)


class Frozen(ReplayTrainer):
    """Trains everything except its routers, and reports zeros for them."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        gates = {layer: np.zeros_like(sketch) for layer, sketch in outcome.gates.items()}
        return replace(
            outcome,
            gates=gates,
            gradients={
                name: sketch for name, sketch in outcome.gradients.items() if "gate" not in name
            },
        )

    def reference(self, step: Step) -> Outcome:
        raise UnsupportedStep("the subject has no reference")


class FrozenWithCritic(Frozen):
    """As ``Frozen``, next to other models whose gates are trained."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        if step.model == "policy":
            return outcome
        return replace(outcome, gates={layer: sketch(np.ones(4)) for layer in range(3)})


class Dropping(ReplayTrainer):
    """Dropout without a seed, and the contract says nothing of it."""

    noise = np.random.default_rng(0)

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        factor = 1 + 1e-3 * float(self.noise.standard_normal()) if step.backward else 1.0
        gates = {layer: sketch * factor for layer, sketch in outcome.gates.items()}
        gradients = {name: sketch * factor for name, sketch in outcome.gradients.items()}
        return replace(
            outcome, loss=(outcome.loss or 0.0) * factor, gradients=gradients, gates=gates
        )


class Updating(ReplayTrainer):
    """Moves a bias in every training step, as balancing without a loss does."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        if step.backward:
            self.model.weights["layers.0.gate"][:, 0] += 1e-4
        return super().work(step, spy)


class _Masking(Spy):
    """Sees padding that executes nothing."""

    def routed(self, layer: int, experts: Any, **places: Any) -> None:
        super().routed(
            layer, np.where(np.asarray(places["samples"])[:, None] < 0, -1, experts), **places
        )


class MasksPadding(DenseFirst):
    """Its dispatcher drops padding, natively and in a replay."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        own = _Masking(step)
        try:
            return super().work(step, own)
        finally:
            spy.extend(own.events)


class _Overflowing(Spy):
    """Sees what is left of a router's choice when full experts turned tokens away."""

    def routed(self, layer: int, experts: Any, **places: Any) -> None:
        left = np.array(experts)
        left[np.asarray(places["positions"]) == 1, 0] = -1
        super().routed(layer, left, **places)


class Capacity(RecordingTrainer):
    """Experts reject tokens in the recording pass, after the recording: such rows are not
    compared.
    """

    def work(self, step: Step, spy: Spy) -> Outcome:
        if step.action is not Action.RECORD:
            return super().work(step, spy)
        own = _Overflowing(step)
        try:
            return super().work(step, own)
        finally:
            spy.extend(own.events)


class Retrying(ReplayTrainer):
    """Runs a step that failed once more."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        try:
            return super().run(step, spy)
        except InjectedFailure:
            return super().run(step, spy)


class RefusesNaN(ReplayTrainer):
    """Takes no weights of NaN."""

    def set_weights(self, number: int) -> None:
        if number < 0:
            raise ValueError("weights are NaN")
        super().set_weights(number)


class NoneForZeros(ReplayTrainer):
    """Reports no gradient of an expert that did not run; one that ran for rows without a loss has a
    gradient of zeros.
    """

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        spare = {"spare": np.zeros(9)} if step.action is Action.REPLAY else {}
        return replace(outcome, gradients={**outcome.gradients, **spare} if step.backward else {})


class Fusing(ReplayTrainer):
    """Computes all microbatches in one pass."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        return super().work(replace(step, microbatches=(step.samples,)), spy)


class _InPieces(Spy):
    """Gets the rows of a call five at a time."""

    def routed(self, layer: int, experts: Any, **places: Any) -> None:
        for i in range(0, len(experts), 5):
            piece = {
                name: value[i : i + 5] if name in ("samples", "positions") else value
                for name, value in places.items()
            }
            super().routed(layer, experts[i : i + 5], **piece)


class InPieces(ReplayTrainer):
    """Calls its routers for a few rows at a time; it does not report how often they get targets."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        pieces = _InPieces(step)
        try:
            return ReplayTrainer.run(self, step, pieces)
        finally:
            spy.extend(pieces.events)


InPieces.contract = declaring(InPieces, installs=None)


class GatesAlone(ReplayTrainer):
    """Reports only gradients of gates; its reference reports all."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        return replace(super().work(step, spy), gradients={})


class EveryExpert(ReplayTrainer):
    """top_k is the number of experts: all rows are equal."""

    layout = Layout(num_layers=3, num_experts=2, top_k=2)


@pytest.mark.parametrize(
    ("made", "verdicts"),
    [
        (
            Silent,
            {
                "self-loss": "pass",
                "self-gradients": "unknown",
                "gate-gradients": "unknown",
                "drift": "pass",
                "aftermath": "pass",
            },
        ),
        (
            Mute,
            {
                "self-loss": "unknown",
                "drift": "unknown",
                "aftermath": "unknown",
                "off": "unknown",
                "forward": "pass",
            },
        ),
        (
            Shifting,
            {
                "coverage": "pass",
                "self-loss": "pass",
                "drift": "pass",
                "free-rows": "not applicable",
            },
        ),
        (ShiftingRecorder, {"coverage": "pass", "self-gradients": "pass", "forward": "pass"}),
        (
            Noisy,
            {
                "self-loss": "pass",
                "self-gradients": "pass",
                "gate-slope": "pass",
                "reference": "pass",
                "free-rows": "not applicable",
            },
        ),
        (OncePerStep, {"installs": "pass", "forward": "pass"}),
        (Reversed, {"forward": "pass", "self-gradients": "pass"}),
        (Normalised, {"gate-gradients": "unknown", "gate-slope": "unknown", "drift": "pass"}),
        (RecordsOnly, {"old-logprob": "not applicable", "recorded": "pass", "gate-slope": "pass"}),
        (
            Plain,
            {
                "residue": "not applicable",
                "gate-slope": "not applicable",
                "reference": "not applicable",
                "routers": "unknown",
                "edges": "pass",
            },
        ),
        (Lenient, {"targets": "pass"}),
        (Casting, {"targets": "pass"}),
        (Refusing, {"edges": "pass"}),
        (RecomputesTwice, {"coverage": "pass", "recompute": "pass"}),
        (Frozen, {"gate-slope": "unknown", "gate-gradients": "unknown", "self-gradients": "pass"}),
        (FrozenWithCritic, {"gate-slope": "unknown", "gate-gradients": "unknown"}),
        (
            Dropping,
            {
                "forward": "pass",
                "self-loss": "unknown",
                "aftermath": "unknown",
                "gate-slope": "unknown",
                "free-rows": "unknown",
            },
        ),
        (
            Updating,
            {"forward": "pass", "self-loss": "unknown", "aftermath": "unknown", "off": "unknown"},
        ),
        (
            MasksPadding,
            {"assignments": "pass", "gate-slope": "pass", "targets": "pass", "edges": "pass"},
        ),
        (Capacity, {"recorded": "pass", "assignments": "pass"}),
        (Retrying, {"failures": "unknown", "aftermath": "pass"}),
        (RefusesNaN, {"edges": "pass"}),
        (NoneForZeros, {"self-gradients": "pass", "aftermath": "pass"}),
        (EveryExpert, {"forward": "pass", "drift": "not applicable"}),
        (Fusing, {"forward": "pass", "installs": "pass", "reference": "pass"}),
        (InPieces, {"forward": "pass", "coverage": "pass", "failures": "pass"}),
        (GatesAlone, {"reference": "pass", "gate-slope": "pass"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_correct_but_unusual_trainer_is_not_blamed(
    made: type[ReplayTrainer], verdicts: dict[str, str]
) -> None:
    """No check fails, and those that cannot decide say so."""
    found = results(made)

    assert [] == [
        (name, result.findings) for name, result in found.items() if result.verdict is Verdict.FAIL
    ]
    assert verdicts == {name: str(found[name].verdict) for name in verdicts}


class GatesGone(ReplayTrainer):
    """Gates get no gradient under replay, and are missing among those reported."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        return replace(outcome, gates={}) if step.action is Action.REPLAY else outcome


class ScaledReplay(ReplayTrainer):
    """A replay has gradients of another size, recomputed or not."""

    def work(self, step: Step, spy: Spy) -> Outcome:
        outcome = super().work(step, spy)
        if step.action is not Action.REPLAY:
            return outcome
        gradients = {name: 2 * value for name, value in outcome.gradients.items()}
        return replace(outcome, gradients=gradients)


def test_gates_that_only_native_steps_report_are_dead() -> None:
    """A trainer that never reports gates leaves it unknown; one that loses them does not."""
    result = results(GatesGone)["gate-gradients"]
    assert Verdict.FAIL is result.verdict
    assert "the gradient of a gate is dead" == result.findings[0].title
    assert "none" == result.findings[0].observed
    assert Verdict.UNKNOWN is results(Silent)["gate-gradients"].verdict


def test_a_recomputed_self_replay_is_not_blamed_on_the_recompute_alone() -> None:
    """It differs from a native step in two ways, and the finding names the other check."""
    found = results(ScaledReplay)
    assert Verdict.FAIL is found["self-gradients"].verdict
    finding = found["recompute-results"].findings[0]
    assert "self-replay with recompute changes the results" == finding.title
    assert finding.hint.startswith("If self-replay changes them without recompute as well")


def test_a_trainer_without_a_reference_is_told_what_stays_open() -> None:
    """The method is optional, so that nothing is unknown; but nothing else shows the weights."""
    found = results(Plain, "drift")["reference"]

    assert Verdict.NOT_APPLICABLE == found.verdict
    assert found.reason.endswith(
        "(the optional method `reference`); without it, the router weights of replayed experts are"
        " compared with nothing"
    )


def test_what_does_not_repeat_is_named() -> None:
    """If a trainer does not repeat a native step, the reason names the result that differs and what
    to do.
    """
    found = results(Dropping, "self-replay")["self-loss"]

    assert found.reason.startswith(
        "step 'native repeated' repeats 'native' without any replay before it, and its loss is "
    )
    assert found.reason.endswith(
        "seed random numbers, restore state that a step updates, or declare a tolerance"
    )


def test_a_canary_is_planted_where_it_can_be_seen() -> None:
    """Where all rows execute the same experts a shift by a row changes nothing: another fault is
    planted.
    """
    canary = judge_replay(EveryExpert).canary

    assert canary is not None
    assert (True, "replay.assignments") == (canary.red, canary.expected_by)
