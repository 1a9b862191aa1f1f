"""Replay checks on trainers that leave a check nothing to judge, by contract or by their forward
pass: it is not applicable, never undecided.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.replay import Outcome, Step
from rollproof.core.records import FloatArray, IntArray, Rollout
from rollproof.core.router_spy import Spy
from rollproof.errors import ContractError
from rollproof.fakes.trainers.reference_trainers import CapturedPrefix, OneExpert
from rollproof.fakes.trainers.replay_trainer import ReplayTrainer
from rollproof.fakes.trainers.trainer_parts import Microbatch
from rollproof.layouts import Source
from tests.support.replay_verdicts import declaring, results


class _Reported(ReplayTrainer):
    """Hands over its results otherwise; so does its reference."""

    def reported(self, outcome: Outcome) -> Outcome:
        return outcome

    def run(self, step: Step, spy: Spy) -> Outcome:
        return self.reported(super().run(step, spy))

    def reference(self, step: Step) -> Outcome:
        return self.reported(super().reference(step))


class FrozenGates(_Reported):
    """Gates are not trained, and have no gradients."""

    def reported(self, outcome: Outcome) -> Outcome:
        return replace(
            outcome,
            gates={},
            gradients={
                name: value
                for name, value in outcome.gradients.items()
                if not name.endswith("gate")
            },
        )


FrozenGates.contract = declaring(FrozenGates, trains_gates=False)


class Normalised(OneExpert):
    """One expert per token, with the weight 1: its gates get no gradient, and the contract says
    so.
    """

    normalised = True


Normalised.contract = declaring(Normalised, trains_gates=False)


class FewDigits(_Reported):
    """Results in the digits that bfloat16 has."""

    def reported(self, outcome: Outcome) -> Outcome:
        assert outcome.loss is not None
        return replace(
            outcome,
            loss=float(_coarse(np.array(outcome.loss))),
            logprobs={name: _coarse(value) for name, value in outcome.logprobs.items()},
            gradients={name: _coarse(value) for name, value in outcome.gradients.items()},
            gates={layer: _coarse(value) for layer, value in outcome.gates.items()},
        )


FewDigits.contract = declaring(FewDigits, float_digits=2, tolerance=2e-2)


def _coarse(values: FloatArray) -> FloatArray:
    bits = np.asarray(values, dtype=np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


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


class ShiftingPrefix(CapturedPrefix):
    """Forwards all tokens but the last; rows without a target are those that were not captured."""

    def run(self, step: Step, spy: Spy) -> Outcome:
        narrower = _WithoutFinals(step)
        try:
            return super().run(step, narrower)
        finally:
            spy.extend(narrower.events)


class _LastRowRepeated(ShiftingPrefix):
    """Tokens after the captured prefix execute what was captured last."""

    def captured(self, microbatch: Microbatch, source: Source) -> Any:
        return source.filled

    def payload(self, sample: Rollout) -> IntArray:
        rows = super().payload(sample)
        return (
            np.concatenate([rows, np.repeat(rows[-1:], sample.total - len(rows), axis=0)])
            if len(rows)
            else rows
        )


@pytest.mark.parametrize(
    ("made", "ruled_out"),
    [
        (FrozenGates, {"gate-gradients", "gate-slope"}),
        (Normalised, {"gate-gradients", "gate-slope"}),
        (FewDigits, {"gate-slope", "free-rows"}),
        (ShiftingPrefix, set()),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_cannot_arise_is_not_applicable(
    made: type[ReplayTrainer], ruled_out: set[str]
) -> None:
    """All other checks pass, but for those that the trainers of this contract have no use for
    anyhow.
    """
    found = results(made)
    assert [] == [
        (name, str(result.verdict), result.reason)
        for name, result in found.items()
        if result.verdict not in ("pass", "not applicable")
    ]
    assert ruled_out | {"recorded"} == {
        name for name, result in found.items() if result.verdict == "not applicable"
    }


def test_rows_behind_a_captured_prefix_are_compared_without_final_tokens() -> None:
    """A trainer that leaves out final tokens is still held to the rows that were not captured."""
    assert (
        "rows without a target were replayed"
        == results(_LastRowRepeated)["free-rows"].findings[0].title
    )


def test_flags_of_the_terms_are_true_or_false() -> None:
    """Other values are refused, by name."""
    with pytest.raises(ContractError, match="trains_gates='no' must be True or False"):
        declaring(ReplayTrainer, trains_gates="no")
