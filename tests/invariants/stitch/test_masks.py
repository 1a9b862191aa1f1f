"""Stitch checks on the loss mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

PARTS = (
    ScriptedCall(tokens=(11, 12), reason="stop"),
    ScriptedCall(observed=(91, 92, 93), tokens=(13,)),
    ScriptedCall(tokens=(14,), reason="stop"),
)
RIGHT = (1, 1, 0, 0, 0, 1, 1)


def masked(mask: tuple[Any, ...] | None) -> TraceScript:
    """A two-turn rollout with another loss mask."""
    return script_rollout(
        *PARTS, loss_mask=True, sample={"loss_mask": None if mask is None else np.array(mask)}
    )


class TestShape:
    """``stitch.mask-shape``."""

    ID = "stitch.mask-shape"

    def test_a_mask_that_was_not_extended_is_found(self) -> None:
        """Built after the first call, kept through the resume."""
        finding = finds(self.ID, masked(RIGHT[:6]))
        assert "The loss mask has 6 entries for 7 tokens" == finding.title
        assert "6: [1, 1, 0, 0, 0, 1]" == finding.observed
        assert {self.ID} == blamed(masked(RIGHT[:6]))

    def test_a_declared_mask_must_be_there(self) -> None:
        """``None`` would train on everything."""
        assert (
            "The sample carries no loss mask, although its contract declares one"
            == finds(self.ID, masked(None)).title
        )
        assert {self.ID} == blamed(masked(None))

    def test_weights_are_no_mask(self) -> None:
        """Values other than 0 and 1."""
        finding = finds(self.ID, masked((1, 1, 0, 0, 0, 2, -1)))
        assert "2 of 7 entries of the loss mask are neither 0 nor 1" == finding.title
        assert finding.observed.endswith("at response index 5-6")

    def test_no_tokens_need_no_mask(self) -> None:
        """An empty response may come without."""
        assert set() == blamed(
            script_rollout(ScriptedCall(reason="stop"), loss_mask=True, sample={"loss_mask": None})
        )

    def test_booleans_are_zeros_and_ones(self) -> None:
        """A mask of booleans says the same."""
        passes(self.ID, masked(tuple(bool(value) for value in RIGHT)), samples_with_a_loss_mask=1)

    def test_a_contract_without_a_mask_rules_it_out(self) -> None:
        """Where a stack makes its mask later there is none to judge here."""
        for name in (self.ID, TestEnvironment.ID):
            assert Verdict.NOT_APPLICABLE == check(name, script_rollout(*PARTS)).verdict


class TestEnvironment:
    """``stitch.mask-environment``."""

    ID = "stitch.mask-environment"

    @pytest.mark.parametrize(
        ("mask", "wrong", "observed"),
        [((1,) * 7, 3, "2-4"), ((0, *RIGHT[:-1]), 1, "2"), ((*RIGHT[1:], 1), 1, "4")],
        ids=["attention mask", "shifted right", "shifted left"],
    )
    def test_trained_words_of_the_environment_are_found(
        self, mask: tuple[int, ...], wrong: int, observed: str
    ) -> None:
        """An attention mask, or one that is shifted by one token."""
        finding = finds(self.ID, masked(mask))
        assert f"{wrong} of 3 tokens of the environment would be trained on" == finding.title
        assert f"1 at response index {observed}" == finding.observed
        assert {self.ID} == blamed(masked(mask))

    def test_leaving_sampled_tokens_out_is_a_stacks_choice(self) -> None:
        """Masking old tokens of a partial rollout loses signal, and trains on nothing wrong."""
        passes(self.ID, masked((0, 0, 0, 0, 0, 1, 1)), tokens_of_the_environment=3)
        assert set() == blamed(masked((0,) * 7))

    def test_single_turns_have_no_environment(self) -> None:
        """Nothing is put to the test, and where no turns are declared nothing can be."""
        single = ScriptedCall(tokens=(11,), reason="stop")
        inapplicable(
            self.ID,
            script_rollout(single, loss_mask=True),
            "declares no turns of the environment (multi_turn)",
        )
        unknown(self.ID, script_rollout(single, loss_mask=True, multi_turn=True), "not exercised")
