"""Stitch checks on logprobs: every position is blamed on the one check that its fault belongs
to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollproof.core.events.rollout import Result
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_builder import contract
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

PARTS = (
    ScriptedCall(tokens=(11, 12, 13)),
    ScriptedCall(tokens=(21, 22), version=1),
    ScriptedCall(tokens=(31, 32, 33), version=1, reason="length"),
)
TRUE = np.array([-0.25, -0.75, -1.25, -0.625, -1.125, -0.875, -1.375, -1.875])


def spoiled(change: Callable[[np.ndarray], Any], *parts: ScriptedCall, **more: Any) -> TraceScript:
    """The resumed rollout with ``change`` made to its logprobs."""
    return script_rollout(*(parts or PARTS), sample={"logprobs": change(TRUE.copy())}, **more)


def put(index: int | slice, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Set a value."""

    def change(values: np.ndarray) -> np.ndarray:
        values[index] = value
        return values

    return change


def test_the_told_values_are_these() -> None:
    """The helper's formula and the table above agree, so that the tests below spoil what they
    say.
    """
    passes("stitch.logprobs-paired", spoiled(lambda values: values), tokens_of_resumed_samples=8)


@pytest.mark.parametrize("large", [False, True], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize(
    ("value", "check_id"),
    [
        (np.nan, "stitch.logprobs-present"),
        (np.inf, "stitch.logprobs-valid"),
        (-np.inf, "stitch.logprobs-valid"),
        (0.5, "stitch.logprobs-valid"),
        (0.0, "stitch.logprobs-paired"),
        (-9999.0, "stitch.logprobs-paired"),
        (-1.2501, "stitch.logprobs-paired"),
    ],
)
def test_each_wrong_value_is_blamed_on_one_check(value: float, check_id: str, large: bool) -> None:
    """Absent, impossible or another's: one fault, one finding, on both ways of comparing."""
    if large:
        part = ScriptedCall(tokens=tuple(range(100, 300)), reason="length")
        values = -(0.25 + 0.5 * np.arange(200))
        values[2] = value
        story = script_rollout(part, budget=200, sample={"logprobs": values})
    else:
        story = spoiled(put(2, value))
    assert {check_id} == blamed(story)
    assert 2 == finds(check_id, story).where["index"]


@pytest.mark.parametrize(("by", "found"), [(5e-5, set()), (1e-4, {"stitch.logprobs-paired"})])
def test_what_32_bits_round_is_no_difference(by: float, found: set[str]) -> None:
    """The values of many tokens, at a logprob of -75: 32 bits round it by less than a millionth."""
    part = ScriptedCall(tokens=tuple(range(100, 300)), reason="length")
    values = -(0.25 + 0.5 * np.arange(200))
    values[150] -= by
    assert found == blamed(script_rollout(part, budget=200, sample={"logprobs": values}))


@pytest.mark.parametrize(("by", "found"), [(1e-6, set()), (1e-5, {"stitch.logprobs-paired"})])
def test_what_32_bits_round_of_a_few_tokens_is_no_difference(by: float, found: set[str]) -> None:
    """The values of a short sample, at a logprob of -1."""
    assert found == blamed(spoiled(put(2, TRUE[2] - by)))


@pytest.mark.parametrize("count", [3, 100], ids=["few tokens", "many tokens"])
def test_tokens_without_logprobs_have_none_to_compare(count: int) -> None:
    """The engine omitted those of the first call."""
    parts = (
        ScriptedCall(tokens=tuple(range(100, 100 + count)), logprobs=False),
        ScriptedCall(tokens=(11, 12), reason="stop"),
    )
    story = script_rollout(*parts, budget=200, missing_logprobs="nan")
    assert set() == blamed(story)
    passes(
        "stitch.logprobs-present",
        story,
        sampled_tokens_with_a_logprob=2,
        calls_that_request_logprobs=2,
    )


@pytest.mark.parametrize("large", [False, True], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_response_that_was_cut_has_the_first_logprobs_of_its_last_call(
    cut: int, large: bool
) -> None:
    """The budget cut the tokens and the logprobs of the second turn alike."""
    count = 100 if large else 5
    parts = (
        ScriptedCall(tokens=(11, 12, 13), reason="stop"),
        ScriptedCall(observed=(91,), tokens=tuple(range(200, 200 + count)), reason="stop"),
    )
    response = (11, 12, 13, 91, *range(200, 200 + count - cut))
    right = np.concatenate(
        [
            -(0.25 + 0.5 * np.arange(3)),
            [np.nan],
            -(0.25 + 0.5 * np.arange(count - cut) + 0.125 * 4),
        ]
    )
    sample = {"response": response, "finish_reason": "length"}
    limits = {"response": len(response)}
    for spoilt in (False, True):
        values = right.copy()
        values[-1] -= spoilt
        story = script_rollout(
            *parts,
            budget=len(response),
            limits=limits,
            multi_turn=True,
            sample={**sample, "logprobs": values},
        )
        assert ({"stitch.logprobs-paired"} if spoilt else set()) == blamed(story)


class TestPresent:
    """``stitch.logprobs-present``."""

    ID = "stitch.logprobs-present"

    def test_none_in_place_of_values_is_found(self) -> None:
        """The engine returned them, the sample lacks them."""
        finding = finds(self.ID, script_rollout(*PARTS, sample={"logprobs": None}))
        assert "The sample carries no logprobs, although the engines returned them" == finding.title
        assert "8 logprobs, as the engines returned them" == finding.expected
        assert {self.ID} == blamed(script_rollout(*PARTS, sample={"logprobs": None}))

    def test_single_lost_values_are_counted(self) -> None:
        """A list that was padded to length."""
        finding = finds(self.ID, spoiled(put(slice(0, 3), np.nan)))
        assert (
            "3 of 8 logprobs are missing from the sample, although the engine returned them"
            == finding.title
        )
        assert "NaN at response index 0-2" == finding.observed

    def test_a_single_lost_value_is_one(self) -> None:
        """Its sentence has a verb of its own."""
        assert (
            "1 of 8 logprobs is missing from the sample, although the engine returned them"
            == finds(self.ID, spoiled(put(0, np.nan))).title
        )

    def test_a_call_that_does_not_ask_is_found(self) -> None:
        """The option got lost on a resume, and the engine cannot be blamed."""
        parts = (
            PARTS[0],
            ScriptedCall(
                tokens=(21,), reason="stop", logprobs=False, call={"want_logprobs": False}
            ),
        )
        story = script_rollout(*parts)
        assert (
            "1 of 2 calls does not request logprobs, although the request wants them"
            == finds(self.ID, story).title
        )
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize(
        ("calls", "observed"), [(3, "calls 2 and 3"), (9, "calls 2, 3, 4, 5, 6 and 7")]
    )
    def test_the_calls_that_do_not_ask_are_named(self, calls: int, observed: str) -> None:
        """Up to six of them, and the place is the first."""
        parts = [
            ScriptedCall(
                tokens=(10 + number,),
                logprobs=False,
                server=f"s{number}",
                call={"want_logprobs": number == 0},
            )
            for number in range(calls)
        ]
        finding = finds(self.ID, script_rollout(*parts, budget=20))
        assert f"{observed} do not" == finding.observed
        assert finding.title.startswith(f"{calls - 1} of {calls} calls do not request logprobs")
        assert {"request": "r0", "call": 2, "server": "s1"} == finding.where

    def test_nobody_asked(self) -> None:
        """Where no request wants logprobs there is nothing to carry."""
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop", call={"want_logprobs": False}),
            request={"want_logprobs": False},
            sample={"logprobs": None},
        )
        unknown(self.ID, story, "no request wanted logprobs")

    def test_a_contract_without_logprobs_rules_all_out(self) -> None:
        """Not applicable, listed apart."""
        for name in ("present", "length", "valid", "paired", "missing"):
            result = check(f"stitch.logprobs-{name}", script_rollout(*PARTS, logprobs="none"))
            assert (Verdict.NOT_APPLICABLE, "the contract declares logprobs='none'") == (
                result.verdict,
                result.reason,
            )


class TestLength:
    """``stitch.logprobs-length``."""

    ID = "stitch.logprobs-length"

    def test_one_too_few_is_found(self) -> None:
        """The last value was dropped."""
        finding = finds(self.ID, spoiled(lambda values: values[:-1]))
        assert "The sample has 7 logprobs for 8 tokens" == finding.title
        assert "one logprob per response token: 8" == finding.expected
        assert {self.ID} == blamed(spoiled(lambda values: values[:-1]))

    def test_an_empty_list_is_none(self) -> None:
        """Not "0:" and nothing; a list with values shows them."""
        assert "none" == finds(self.ID, spoiled(lambda values: values[:0])).observed
        assert finds(self.ID, spoiled(lambda values: values[:2])).observed.startswith("2: [-")

    def test_a_segment_without_logprobs_explains_the_gap(self) -> None:
        """verl: tokens of a reply without logprobs are appended, and no logprobs with them."""
        parts = (PARTS[0], ScriptedCall(tokens=(21, 22), logprobs=False, version=1), PARTS[2])
        story = script_rollout(
            *parts, sample={"logprobs": np.delete(TRUE, [3, 4])}, missing_logprobs="nan"
        )
        finding = finds(self.ID, story)
        assert "The sample has 6 logprobs for 8 tokens" == finding.title
        assert finding.hint.startswith(
            "The engine returned no logprobs for segment 1, and the stack appended nothing in their"
            " place"
        )
        assert {self.ID} == blamed(story)

    def test_an_empty_list_for_none_is_found(self) -> None:
        """``[]`` says that there are no tokens; ``None`` says that there are no logprobs."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), logprobs=False, reason="stop"),
            sample={"logprobs": np.zeros(0)},
            missing_logprobs="nan",
        )
        assert "The sample has no logprobs for 2 tokens" == finds(self.ID, story).title
        assert {self.ID} == blamed(story)

    def test_an_empty_list_without_tokens_is_right(self) -> None:
        """Nothing was sampled."""
        passes(
            self.ID,
            script_rollout(ScriptedCall(reason="stop"), sample={"logprobs": np.zeros(0)}),
            samples_with_logprobs=1,
        )

    def test_it_needs_no_reference(self) -> None:
        """The two lengths are compared even where no call was recorded."""
        story = TraceScript()
        story.submit().result((1, 2), logprobs=np.array([-1.0]))
        finds(self.ID, story)


class TestValid:
    """``stitch.logprobs-valid``."""

    ID = "stitch.logprobs-valid"

    def test_a_flipped_sign_is_one_finding_about_all(self) -> None:
        """All values positive: made on the way, as the engine's were not."""
        finding = finds(self.ID, spoiled(lambda values: -values))
        assert "8 of 8 logprobs cannot be the logarithm of a probability" == finding.title
        assert (
            "0.25 at response index 0 (in all: 0-7); the engine returned -0.25" == finding.observed
        )
        assert "a flipped sign" in finding.hint

    def test_what_the_engine_itself_returned_is_said_so(self) -> None:
        """The stack only passed it on."""
        part = ScriptedCall(tokens=(11,), reason="stop", output={"logprobs": np.array([-np.inf])})
        finding = finds(self.ID, script_rollout(part, sample={"logprobs": np.array([-np.inf])}))
        assert "The engine itself returned it" in finding.hint

    def test_rounding_above_zero_is_allowed(self) -> None:
        """Log-softmax in 32 bits may end a hair above zero."""
        part = ScriptedCall(tokens=(11,), reason="stop", output={"logprobs": np.array([1e-6])})
        assert set() == blamed(script_rollout(part, sample={"logprobs": np.array([1e-6])}))

    def test_tokens_of_the_environment_may_hold_anything(self) -> None:
        """No policy sampled them."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(12,), reason="stop"),
        )
        assert set() == blamed(
            script_rollout(*parts, sample={"logprobs": np.array([-0.25, 7.0, np.inf, -0.625])})
        )


class TestPaired:
    """``stitch.logprobs-paired``."""

    ID = "stitch.logprobs-paired"

    @pytest.mark.parametrize(
        ("change", "title", "hint"),
        [
            (
                lambda v: np.roll(v, 1),
                "8 of 8 logprobs are not what the engine returned with their tokens",
                "are 1 token too late",
            ),
            (
                lambda v: np.roll(v, -1),
                "8 of 8 logprobs are not what the engine returned with their tokens",
                "are 1 token too early",
            ),
            (
                put(3, -5.0),
                "1 of 8 logprobs is not what the engine returned with its token",
                "Append tokens and logprobs together, segment by segment",
            ),
            (
                put(slice(2, 5), 0.0),
                "3 of 8 logprobs are not what the engine returned with their tokens",
                "All of them are 0: a default",
            ),
            (
                put(2, -9999.0),
                "1 of 8 logprobs is not what the engine returned with its token",
                "-9999 looks like a default",
            ),
            (
                lambda v: v / 0.7,
                "8 of 8 logprobs are not what the engine returned with their tokens",
                "engine's values times 1.429",
            ),
            (lambda v: v * (1 + 2**-12), "8 of 8 logprobs are not", "cast to float16"),
            (lambda v: v * (1 + 2**-9), "8 of 8 logprobs are not", "cast to bfloat16"),
        ],
    )
    def test_each_cause_is_named(
        self, change: Callable[[np.ndarray], np.ndarray], title: str, hint: str
    ) -> None:
        """Shift, default, factor, rounding: the hint says which it looks like."""
        finding = finds(self.ID, spoiled(change))
        assert finding.title.startswith(title)
        assert hint in finding.hint

    @pytest.mark.parametrize(
        ("factor", "hint"),
        [
            (1 / 0.7, "engine's values divided by the request's temperature 0.7"),
            (0.7, "engine's values multiplied by the request's temperature 0.7"),
            (0.6, "Append tokens and logprobs together"),
        ],
    )
    def test_the_temperature_of_the_request_is_recognised(self, factor: float, hint: str) -> None:
        """In a single value, too, unless the factor is another number."""
        value = np.array([-2.5])
        part = ScriptedCall(tokens=(11,), reason="stop", output={"logprobs": value})
        story = script_rollout(
            part,
            request={"sampling": {"temperature": 0.7}},
            sample={"logprobs": value * factor},
            logprobs="raw",
        )
        assert hint in finds(self.ID, story).hint

    def test_a_replaced_zero_is_recognised(self) -> None:
        """Only the certain token differs, as after `value or default`; next to another wrong value
        it proves nothing.
        """
        returned, said = np.array([-2.5, 0.0]), "exactly 0 in the engine's reply"
        part = ScriptedCall(tokens=(11, 12), reason="stop", output={"logprobs": returned})
        wrong = script_rollout(part, sample={"logprobs": np.array([-2.5, -1e-4])})
        assert said in finds(self.ID, wrong).hint
        both = script_rollout(part, sample={"logprobs": np.array([-9.0, -1e-4])})
        assert said not in finds(self.ID, both).hint

    @pytest.mark.parametrize(
        ("error", "named"),
        [
            (2**-8 * 1.01, ""),
            (2**-8, "bfloat16"),
            (2**-11 * 1.01, "bfloat16"),
            (2**-11, "float16"),
        ],
    )
    def test_rounding_has_the_error_of_its_type(self, error: float, named: str) -> None:
        """8 and 11 bits of precision; the errors have both signs, so that no factor explains
        them.
        """
        signs = np.array([1, -1, 1, -1, 1, -1, 1, -1])
        hint = finds(self.ID, spoiled(lambda values: values * (1 + error * signs))).hint
        if named:
            assert f"as by a cast to {named} (" in hint
        else:
            assert hint.startswith("Append tokens and logprobs together")

    @pytest.mark.parametrize(("shift", "words"), [(2, "late"), (-2, "early")])
    @pytest.mark.parametrize("spoilt", [0, 1])
    def test_a_shift_by_two_is_named(self, shift: int, words: str, spoilt: int) -> None:
        """Four of five values are enough; what a shift moves out of the sample does not count."""

        def change(values: np.ndarray) -> np.ndarray:
            out = np.full(8, -9.0)
            if shift > 0:
                out[2:] = values[:-2]
            else:
                out[:-2] = values[2:]
            out[3 : 3 + spoilt] = -7.0
            return out

        hint = finds(self.ID, spoiled(change)).hint
        assert hint.startswith(f"The values are 2 tokens too {words} from response index 0 on")

    def test_a_shift_of_a_third_of_the_values_is_none(self) -> None:
        """Two of six moved values are wrong for another reason."""

        def change(values: np.ndarray) -> np.ndarray:
            moved = np.roll(values, 1)
            moved[[2, 5]] = -7.0, -8.0
            return moved

        assert "too late" not in finds(self.ID, spoiled(change)).hint

    def test_one_moved_value_is_no_shift(self) -> None:
        """It may be equal to its neighbour by chance; two are not."""

        def change(count: int) -> Callable[[np.ndarray], np.ndarray]:
            def changed(values: np.ndarray) -> np.ndarray:
                values[3 : 3 + count] = TRUE[2 : 2 + count]
                return values

            return changed

        assert "too late" not in finds(self.ID, spoiled(change(1))).hint
        assert "1 token too late from response index 3" in finds(self.ID, spoiled(change(2))).hint

    def test_a_default_is_seen_in_the_first_wrong_value(self) -> None:
        """Other values may be wrong after it."""
        for values, named in (((0.0, -5.0), True), ((-5.0, 0.0), False)):
            hint = finds(self.ID, spoiled(put(slice(2, 4), values))).hint
            assert named is hint.startswith("0 looks like a default")

    @pytest.mark.parametrize(("factors", "named"), [((2, 2), False), ((2, 2, 2), True)])
    def test_a_factor_needs_three_values(self, factors: tuple[float, ...], named: bool) -> None:
        """Two values have the same factor by chance now and then."""
        values = TRUE[4 : 4 + len(factors)] * factors
        hint = finds(self.ID, spoiled(put(slice(4, 4 + len(factors)), values))).hint
        assert named is hint.startswith("They are the engine's values times 2:")

    def test_a_factor_is_that_of_all_values(self) -> None:
        """One wrong value of another factor is not scaled."""
        for last, named in ((2.0001, True), (2.001, False)):
            values = TRUE[4:7] * (2, 2, last)
            hint = finds(self.ID, spoiled(put(slice(4, 7), values))).hint
            assert named is hint.startswith("They are the engine's values times 2:")

    def test_values_of_another_request_are_traced_back(self) -> None:
        """Two replies were mixed up."""
        theirs = np.array([-3.0, -4.0])
        part = ScriptedCall(tokens=(41, 42), reason="stop", output={"logprobs": theirs})
        story = script_rollout(part, request_id="r1", prompt=(3,), sample={"logprobs": theirs})
        mixed = script_rollout(
            ScriptedCall(tokens=(11, 12), reason="stop"), sample={"logprobs": theirs}, script=story
        )
        assert "They are the values of request r1" in finds(self.ID, mixed).hint

    def test_values_of_other_weights_are_traced_back(self) -> None:
        """The tokens were scored again after an update."""
        policy = CodedPolicy(
            seed=3, vocab=64, num_layers=1, moe_layers=(0,), num_experts=4, top_k=2
        )
        old, new = (policy.logprobs(version, (1, 2, 11, 12, 13), 2) for version in (0, 1))
        parts = (
            ScriptedCall(tokens=(11, 12, 13), output={"logprobs": old}),
            ScriptedCall(version=1),
            ScriptedCall(reason="stop", version=1),
        )
        result = check(self.ID, script_rollout(*parts, sample={"logprobs": new}), policy)
        assert (
            "They are what weights 1 would give, which did not sample these tokens"
            in result.findings[0].hint
        )

    def test_a_stack_that_converts_is_not_compared(self) -> None:
        """Raw values in, temperature-scaled ones out: equality is not the promise."""
        story = spoiled(
            lambda values: values / 0.7,
            header={"engine": contract(rows="none")},
            logprobs="temperature-scaled",
        )
        unknown(
            self.ID,
            story,
            "the engines return raw logprobs, and the stack delivers temperature-scaled ones",
        )

    @pytest.mark.parametrize(("size", "version"), [(64, 1), (65, None)])
    def test_the_version_of_a_long_sample_is_not_looked_up(
        self, size: int, version: int | None
    ) -> None:
        """It is found token by token; the values are compared nevertheless, as of one call."""
        part = ScriptedCall(tokens=tuple(range(100, 100 + size)), version=1, reason="length")
        right = script_rollout(part, budget=size)
        counted = check(self.ID, right).exercised
        assert {"tokens of single-call samples": size} == dict(counted)
        rollout = next(e.rollout for e in right.trace().events if isinstance(e, Result))
        assert rollout is not None and rollout.logprobs is not None
        wrong = put(size - 1, -5.0)(rollout.logprobs.copy())
        finding = finds(self.ID, script_rollout(part, budget=size, sample={"logprobs": wrong}))
        assert (size - 1, version) == (finding.where["index"], finding.where.get("version"))

    def test_the_segment_and_version_are_named(self) -> None:
        """A fault in the third segment is placed there."""
        finding = finds(self.ID, spoiled(put(6, -5.0)))
        assert {"request": "r0", "index": 6, "segment": 2, "version": 1} == finding.where
        assert "[..., -1.25, -0.625, -1.125, -0.875, -1.375, -1.875]" in finding.expected


class TestMissing:
    """``stitch.logprobs-missing``."""

    ID = "stitch.logprobs-missing"
    PARTS = (
        ScriptedCall(tokens=(11, 12)),
        ScriptedCall(tokens=(21, 22), logprobs=False),
        ScriptedCall(tokens=(31,), reason="stop"),
    )

    def _story(
        self, values: tuple[float, float], mask: tuple[int, ...] | None = None, **more: Any
    ) -> TraceScript:
        sample: dict[str, Any] = {"logprobs": np.array([-0.25, -0.75, *values, -0.75])}
        if mask is not None:
            sample["loss_mask"] = np.array(mask)
        return script_rollout(*self.PARTS, sample=sample, loss_mask=mask is not None, **more)

    @pytest.mark.parametrize("fill", [0.0, -9999.0, -1.5])
    @pytest.mark.parametrize("rule", ["never", "nan", "masked"])
    def test_a_made_up_value_is_found(self, fill: float, rule: str) -> None:
        """Whatever the convention, a number that no engine returned must not be trained on."""
        story = self._story((fill, fill), (1, 1, 1, 1, 1), missing_logprobs=rule)
        finding = finds(self.ID, story)
        assert "2 of 5 logprobs were made up: the engine returned none" == finding.title
        assert finding.observed.startswith(f"{fill:.6g} at response index 2-3")
        assert (2, 1) == (finding.where["index"], finding.where["segment"])
        assert {self.ID} == blamed(story)

    def test_declared_marks_are_right(self) -> None:
        """NaN where NaN is declared; anything under loss mask 0 where masking is declared."""
        nan = float("nan")
        assert set() == blamed(self._story((nan, nan), missing_logprobs="nan"))
        assert set() == blamed(self._story((0.0, nan), (1, 1, 0, 0, 1), missing_logprobs="masked"))
        counters = {"tokens that came without a logprob": 2}
        assert counters == check(self.ID, self._story((nan, nan), missing_logprobs="nan")).exercised

    def test_nan_is_no_mark_where_masking_is_declared(self) -> None:
        """A token without a logprob would be trained on."""
        finding = finds(
            self.ID,
            self._story((float("nan"), float("nan")), (1, 1, 0, 1, 1), missing_logprobs="masked"),
        )
        assert "The engine returned no logprob for 1 of 5 tokens" == finding.title
        assert 3 == finding.where["index"]

    def test_an_engine_that_never_omits_must_not(self) -> None:
        """The contract says that it always returns one."""
        story = self._story((float("nan"), float("nan")))
        finding = finds(self.ID, story)
        assert "The engine returned no logprob for 2 of 5 tokens" == finding.title
        assert "missing_logprobs='nan' or 'masked'" in finding.hint
        assert {self.ID} == blamed(story)

    def test_no_logprobs_at_all_mark_every_token_missing(self) -> None:
        """``None`` is honest where missing values may be NaN, and wrong where tokens must be
        masked.
        """
        part = ScriptedCall(tokens=(11, 12), logprobs=False, reason="stop")
        assert set() == blamed(
            script_rollout(part, sample={"logprobs": None}, missing_logprobs="nan")
        )
        assert {self.ID} == blamed(
            script_rollout(
                part, sample={"logprobs": None}, missing_logprobs="masked", loss_mask=True
            )
        )

    def test_a_run_without_gaps_does_not_put_a_mark_to_the_test(self) -> None:
        """Where nothing was missing, nothing is known of how it would be marked."""
        unknown(self.ID, script_rollout(*PARTS, missing_logprobs="nan"), "not exercised")
        engine = {"engine": contract(rows="none")}
        inapplicable(
            self.ID,
            script_rollout(*PARTS, missing_logprobs="nan", header=engine),
            "every token comes with a logprob",
        )
        passes(self.ID, script_rollout(*PARTS), sampled_tokens=8)
