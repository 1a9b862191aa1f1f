"""Stitch checks on budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

A, B = ScriptedCall(tokens=(11, 12)), ScriptedCall(tokens=(13, 14, 15), reason="length")


class TestGranted:
    """``stitch.budget-granted``."""

    ID = "stitch.budget-granted"

    def test_a_budget_granted_again_is_found(self) -> None:
        """The resume forgets what was sampled before it."""
        story = script_rollout(
            A, ScriptedCall(tokens=(13, 14, 15), reason="length", call={"max_tokens": 5}), budget=5
        )
        finding = finds(self.ID, story)
        assert "Call 2 may sample 5 tokens, but only 3 of 5 are left" == finding.title
        assert "at most 5 - 2 already sampled = 3" == finding.expected
        assert (
            "max_tokens=5 in call 2 (to server s0); too much in 1 of 2 calls of the request"
            == finding.observed
        )
        assert "A resume must subtract what was sampled before it" in finding.hint
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize(
        ("prompt", "budget", "words"),
        [
            ((1, 2), 9, "9 is the budget of r1, which has the same prompt: the call may have been"),
            ((1, 2), 8, "Nothing was sampled before this call: grant it the budget"),
            ((1, 3), 9, "Nothing was sampled before this call: grant it the budget"),
        ],
    )
    def test_a_first_call_with_too_much_may_be_that_of_a_sibling(
        self, prompt: tuple[int, ...], budget: int, words: str
    ) -> None:
        """If it has just what the other request with that prompt may sample."""
        script = TraceScript().weights(0).submit("r0", (1, 2), 4, group="g")
        script.submit("r1", prompt, budget, group="g")
        call = script.call((1, 2), "r0", max_tokens=9)
        script.reply(call, (11, 12), "stop").result((11, 12), "r0", (1, 2))
        assert words in finds(self.ID, script).hint

    @pytest.mark.parametrize(("grant", "found"), [(0, 1), (1, 2)])
    def test_behind_a_budget_that_was_exceeded_nothing_is_left(
        self, grant: int, found: int
    ) -> None:
        """A call may be granted no token then, which is not more than is left."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12, 13), call={"max_tokens": 9}),
            ScriptedCall(reason="length", call={"max_tokens": grant}),
            budget=2,
        )
        finding = finds(self.ID, story)
        assert 1 == finding.where["call"]
        assert f"too much in {found} of 2 calls" in finding.observed

    def test_an_overshooting_rollout_is_one_fault(self) -> None:
        """The budget was granted twice and used twice: the grant is to blame, not also its
        consequence.
        """
        story = script_rollout(
            A,
            ScriptedCall(tokens=(13, 14, 15, 16, 17), reason="length", call={"max_tokens": 5}),
            budget=5,
        )
        assert {self.ID} == blamed(story)

    def test_no_stated_budget_is_found(self) -> None:
        """The configured response length is never sent."""
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop", call={"max_tokens": None}),
            budget=None,
            request={"limit": 8},
        )
        assert (
            "Call 1 states no budget, although 8 tokens of 8 are left"
            == finds(self.ID, story).title
        )

    @pytest.mark.parametrize(("grant", "found"), [(0, False), (1, True)])
    def test_nothing_is_left_of_a_budget_that_was_used_up(self, grant: int, found: bool) -> None:
        """A call that may sample nothing is no fault, and one token is one too many."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12)),
            ScriptedCall(tokens=(), reason="length", call={"max_tokens": grant}),
            budget=2,
        )
        assert int(found) == check(self.ID, story).found

    def test_less_than_is_left_is_the_stacks_choice(self) -> None:
        """A context window may be smaller than the budget."""
        passes(
            self.ID,
            script_rollout(
                ScriptedCall(tokens=(11,), reason="stop", call={"max_tokens": 3}), budget=8
            ),
            first_calls=1,
        )

    def test_a_restart_has_its_budget_back(self) -> None:
        """What was thrown away does not count."""
        parts = (
            A,
            ScriptedCall(lost=True),
            ScriptedCall(tokens=(21, 22, 23, 24, 25), restart=True, reason="length"),
        )
        passes(self.ID, script_rollout(*parts, budget=5), first_calls=1, resuming_calls=2)

    def test_each_turn_has_the_budget(self) -> None:
        """Whether a limit counts one turn or all of them is not declared: the wider reading raises
        no false alarm.
        """
        parts = (
            ScriptedCall(tokens=(11, 12, 13), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(14, 15, 16), reason="stop"),
        )
        passes(self.ID, script_rollout(*parts, budget=3), first_calls=1, resuming_calls=1)

    def test_the_tighter_bound_holds(self) -> None:
        """A caller may ask for more than the configuration allows."""
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop", call={"max_tokens": 9}),
            budget=9,
            request={"limit": 4},
        )
        assert "Call 1 may sample 9 tokens, but only 4 of 4 are left" == finds(self.ID, story).title

    def test_without_a_budget_nothing_is_granted_too_much(self) -> None:
        """Neither stated nor configured."""
        unknown(
            self.ID, script_rollout(A, budget=None, abort_surfaces=True), "no request has a budget"
        )


class TestTotal:
    """``stitch.budget-total``."""

    ID = "stitch.budget-total"

    def test_an_engine_that_overshoots_is_found(self) -> None:
        """Accepted draft tokens were not cut."""
        story = script_rollout(ScriptedCall(tokens=(11, 12, 13, 14), reason="length"), budget=3)
        finding = finds(self.ID, story)
        assert "The reply to call 1 holds 4 tokens, 1 more than it was granted" == finding.title
        assert ("at most max_tokens=3", "4 tokens from server s0") == (
            finding.expected,
            finding.observed,
        )
        assert {self.ID} == blamed(story)

    def test_a_portion_is_held_to_its_grant(self) -> None:
        """Also where the caller states no budget at all."""
        finds(
            self.ID,
            script_rollout(
                ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 1}), budget=None
            ),
        )

    def test_a_call_without_a_limit_of_its_own_is_held_to_the_budget(self) -> None:
        """A negative grant means none in some engines."""
        part = ScriptedCall(tokens=(11, 12, 13, 14, 15, 16), reason="length")
        told = script_rollout(replace(part, call={"max_tokens": -1}), budget=4)
        finding = finds(self.ID, told)
        assert "The rollout holds 6 sampled tokens, 2 more than its budget" == finding.title

    def test_the_exact_budget_is_right(self) -> None:
        """To the last token."""
        passes(self.ID, script_rollout(A, B, budget=5), replies_under_a_budget=2)


_PORTION = ScriptedCall(tokens=(13,), call={"max_tokens": 1}, reason="length")


class TestZeroTokenSegments:
    """``stitch.zero-token-segments``."""

    ID = "stitch.zero-token-segments"

    def test_an_empty_abort_that_costs_budget_is_found(self) -> None:
        """The loop subtracts attempts, not tokens."""
        story = script_rollout(
            A,
            ScriptedCall(),
            ScriptedCall(tokens=(13,), reason="stop", call={"max_tokens": 5}),
            budget=8,
        )
        finding = finds(self.ID, story)
        assert "A reply without tokens changed the budget from 6 to 5" == finding.title
        assert "call 3 may sample 6, as call 2 might" == finding.expected
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize(
        ("later", "found"),
        [
            ((ScriptedCall(tokens=(13,), call={"max_tokens": 1}, reason="stop"),), False),
            ((ScriptedCall(tokens=(13,), call={"max_tokens": 1}, reason="length"),), True),
            ((_PORTION, ScriptedCall(tokens=(14,), reason="stop", call={"max_tokens": 5})), False),
            ((_PORTION, ScriptedCall(tokens=(14,), reason="stop", call={"max_tokens": 4})), True),
            (
                (_PORTION, ScriptedCall(tokens=(14,), reason="stop", call={"max_tokens": None})),
                False,
            ),
        ],
        ids=["natural end", "cut", "the rest", "less than the rest", "without a budget"],
    )
    def test_a_budget_in_portions_is_no_lower_one(
        self, later: tuple[ScriptedCall, ...], found: bool
    ) -> None:
        """A proxy asks its prefill server for one token, and its decode server for the others."""
        story = script_rollout(ScriptedCall(), *later, budget=6)
        if found:
            finding = finds(self.ID, story)
            assert "A reply without tokens changed the budget from 6 to 1" == finding.title
        else:
            passes(self.ID, story, calls_after_a_reply_without_tokens=1)

    def test_the_same_again_is_right(self) -> None:
        """First, in the middle, and several in a row."""
        passes(
            self.ID,
            script_rollout(ScriptedCall(), ScriptedCall(), A, ScriptedCall(), B, budget=5),
            calls_after_a_reply_without_tokens=3,
        )

    def test_a_turn_that_ended_without_tokens_is_not_repeated(self) -> None:
        """Only an abort is taken up again."""
        unresumed = script_rollout(
            ScriptedCall(reason="stop"), resume="none", partial_off="dropped"
        )
        inapplicable(self.ID, unresumed, "no client continues an aborted call (resume='none')")
        unknown(
            self.ID,
            script_rollout(
                ScriptedCall(reason="stop"),
                ScriptedCall(observed=(91,), tokens=(11,), reason="stop"),
            ),
            "not exercised",
        )
