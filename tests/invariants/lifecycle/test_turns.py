"""Lifecycle checks on conversations: which turns the environment answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, script_rollout
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

TURNS = ((91, 92), (93,))


def story(*parts: ScriptedCall, **more: Any) -> TraceScript:
    """A multi-turn rollout whose request declares ``TURNS``."""
    return script_rollout(
        *parts, **{"budget": 40, "request": {"turns": TURNS}, "multi_turn": True, **more}
    )


CUT = (
    ScriptedCall(tokens=(11, 12), reason="stop"),
    ScriptedCall(observed=TURNS[0], tokens=(13, 14)),
    ScriptedCall(observed=TURNS[1], tokens=(15,), reason="stop"),
)


class TestCutTurns:
    """``lifecycle.cut-turns-not-answered``."""

    ID = "lifecycle.cut-turns-not-answered"

    def test_an_answer_to_a_cut_turn_is_found(self) -> None:
        """The middle turn was aborted, and the sample ends by ``stop``."""
        finding = finds(self.ID, story(*CUT))
        assert "The environment answered turn 1, which an abort had cut off" == finding.title
        assert finding.expected.startswith("call 2 ended by abort: its turn is resumed before")
        assert (
            "1 token of the environment follow, 2 of 2 tokens of the cut turn have loss mask 1, and"
            " the sample ends by stop" == finding.observed
        )
        assert {"request": "r0", "call": 2, "server": "s0", "index": 6} == finding.where

    def test_an_answer_to_a_turn_at_its_limit_is_found(self) -> None:
        """The contract says that such a turn is the last one; a turn that ended by itself at the
        limit, or one that the contract lets the environment answer, passes.
        """
        cut = (
            ScriptedCall(tokens=(11, 12), reason="length"),
            ScriptedCall(observed=TURNS[0], tokens=(14,), reason="stop"),
        )
        finding = finds(self.ID, story(*cut, limits={"turn_tokens": 2}))
        assert "The environment answered turn 0, which was cut at its limit" == finding.title
        assert (
            "the turn of 2 tokens is the last one: limits.turn_tokens=2, answers_cut_turns=False"
            == finding.expected
        )
        assert "call 1 ended by length, and 2 tokens of the environment follow" == finding.observed
        passes(self.ID, story(*cut, limits={"turn_tokens": 2, "answers_cut_turns": True}))
        ended = (ScriptedCall(tokens=(11, 12), reason="stop"), cut[1])
        passes(self.ID, story(*ended, limits={"turn_tokens": 2}))

    def test_a_resumed_turn_passes(self) -> None:
        """The abort was resumed, then the environment answered."""
        parts = (
            ScriptedCall(tokens=(11, 12)),
            ScriptedCall(tokens=(13,), reason="stop"),
            ScriptedCall(observed=TURNS[0], tokens=(14,), reason="stop"),
        )
        passes(self.ID, story(*parts), answers_of_the_environment=1)

    def test_a_cut_turn_that_is_masked_out_passes(self) -> None:
        """Nothing is learned from the fragment; stitch.mask asks for the declaration."""
        mask = np.array((1, 1, 0, 0, 0, 0, 0, 1))
        passes(
            self.ID,
            story(*CUT, loss_mask=True, sample={"loss_mask": mask}),
            answers_of_the_environment=2,
            cut_turns_that_are_masked_out=1,
        )
        mask[4] = 1
        finding = finds(self.ID, story(*CUT, loss_mask=True, sample={"loss_mask": mask}))
        assert "1 of 2 tokens of the cut turn" in finding.observed

    def test_tokens_of_the_environment_are_none_of_a_turn(self) -> None:
        """The sample holds the first answer with two tokens more, so that the second one is as far
        from its beginning as the cut turn in the reference. That it counts in the loss is
        stitch.mask's to judge.
        """
        parts = (
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(13,), reason="stop"),
            ScriptedCall(observed=(93,), tokens=(14, 15, 16, 17)),
            ScriptedCall(observed=(94,), tokens=(18,), reason="stop"),
        )
        ids = (11, 12, 91, 97, 98, 92, 13, 93, 14, 15, 16, 17, 94, 18)
        mask = np.array([1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1])
        sample = {"response": ids, "loss_mask": mask, "logprobs": None}
        request = {"turns": ((91, 92), (93,), (94,))}
        passes(
            self.ID,
            story(*parts, loss_mask=True, sample=sample, request=request),
            answers_of_the_environment=3,
            cut_turns_that_are_masked_out=1,
        )
        for place in range(8, 12):
            mask = mask.copy()
            mask[place] = 1
            more = {**sample, "loss_mask": mask}
            finding = finds(self.ID, story(*parts, loss_mask=True, sample=more, request=request))
            assert f"{place - 7} of 4 tokens of the cut turn" in finding.observed

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_a_sample_that_says_so_passes(self, reason: str) -> None:
        """Surfaced as unfinished, the trainer can leave it out."""
        passes(self.ID, story(*CUT, sample={"finish_reason": reason}), answers_of_the_environment=2)

    def test_an_abort_that_cut_nothing_passes(self) -> None:
        """It came with the last token of the grant."""
        full = ScriptedCall(observed=TURNS[0], tokens=(13, 14), call={"max_tokens": 2})
        passes(self.ID, story(CUT[0], full, CUT[2]), answers_of_the_environment=2)

    @pytest.mark.parametrize(
        ("wanted", "injected", "verdict"),
        [("h1", False, "pass"), ("h1", True, "fail"), ("*", False, "fail")],
        ids=["own", "of the case", "of all"],
    )
    def test_a_call_that_the_stack_stopped_itself_passes(
        self, wanted: str, injected: bool, verdict: str
    ) -> None:
        """A stack that reads a stream may stop it at a complete tool call."""
        out = TraceScript(multi_turn=True)
        out.submit(max_tokens=40, turns=TURNS)
        call = out.call((1, 2), max_tokens=40)
        out.abort(call, wanted=wanted, injected=injected).reply(call, (11, 12), "abort")
        out.observe(*TURNS[0])
        out.reply(out.call((1, 2, 11, 12, 91, 92), max_tokens=36), (13,), "stop")
        out.result((11, 12, 91, 92, 13), finish_reason="stop")
        assert Verdict(verdict) == check(self.ID, out).verdict

    def test_single_turns_are_not_judged(self) -> None:
        """No environment, no answer."""
        inapplicable(self.ID, script_rollout(CUT[0]), "declares no turns of the environment")


ENDED = (
    ScriptedCall(tokens=(11, 12), reason="stop"),
    ScriptedCall(observed=TURNS[0], tokens=(13, 14), reason="stop"),
)


class TestEndedTurns:
    """``lifecycle.ended-turns-answered``."""

    ID = "lifecycle.ended-turns-answered"

    def test_an_answer_that_nobody_fetched_is_found(self) -> None:
        """The environment had one more answer, and the budget room for it."""
        finding = finds(self.ID, story(*ENDED))
        assert (
            "The rollout ended after 2 turns of the model, although the environment had an answer"
            == finding.title
        )
        assert (
            "1 token of the environment after call 2, then another turn: 1 answer left, 34 tokens"
            " of the budget left" == finding.expected
        )
        assert "a sample of 6 tokens, finish reason stop" == finding.observed
        assert "lost looks like a final answer (vLLM #46079)" in finding.hint

    def test_a_resumed_turn_hints_at_the_parser(self) -> None:
        """The turn came in two calls, and the tool call may have begun in the first."""
        parts = (ENDED[0], ScriptedCall(observed=TURNS[0], tokens=(13,)), ENDED[0])
        assert "Parse the text of the complete turn" in finds(self.ID, story(*parts)).hint

    def test_a_conversation_to_its_end_passes(self) -> None:
        """Every answer was fetched."""
        last = ScriptedCall(observed=TURNS[1], tokens=(15,), reason="stop")
        passes(self.ID, story(*ENDED, last), conversations_to_the_last_turn=1)

    @pytest.mark.parametrize(("budget", "found"), [(7, 0), (8, 1), (None, 1)])
    def test_the_budget_may_end_it(self, budget: int | None, found: int) -> None:
        """Six tokens, an answer of one, and no token left to say something after it."""
        # the budget of all turns, although each call is granted more
        parts = [ScriptedCall(**{**_fields(part), "call": {"max_tokens": 40}}) for part in ENDED]
        if found:
            finds(self.ID, story(*parts, budget=budget))
        else:
            passes(self.ID, story(*parts, budget=budget), conversations_that_the_budget_ended=1)

    @pytest.mark.parametrize(
        "limits", [{"turns": 2}, {"response": 7}, {"length": 9}, {"context": 9}]
    )
    def test_a_declared_limit_may_end_it(self, limits: dict[str, int]) -> None:
        """Turns, response, length and context of the stack's own configuration."""
        assert Verdict.PASS == check(self.ID, story(*ENDED, limits=limits)).verdict
        more = {name: size + 1 for name, size in limits.items()}
        finds(self.ID, story(*ENDED, limits=more))

    def test_a_stack_that_grants_less_is_taken_at_its_word(self) -> None:
        """A response length of its own shows in the first grant."""
        parts = (ScriptedCall(**{**_fields(ENDED[0]), "call": {"max_tokens": 7}}), ENDED[1])
        assert Verdict.PASS == check(self.ID, story(*parts)).verdict

    def test_a_template_takes_room(self) -> None:
        """Tokens around the first answer are expected around the next one."""
        parts = (ENDED[0], ScriptedCall(**{**_fields(ENDED[1]), "observed": (7, 91, 92, 8)}))
        assert Verdict.PASS == check(self.ID, story(*parts, budget=11)).verdict
        finds(self.ID, story(*parts, budget=12))

    @pytest.mark.parametrize(("budget", "found"), [(4, 0), (5, 1)])
    def test_a_stack_without_a_template_puts_nothing_around_the_words(
        self, budget: int, found: int
    ) -> None:
        """Two tokens, an answer of two, and one token to say something after it."""
        parts = [ScriptedCall(**{**_fields(ENDED[0]), "call": {"max_tokens": 40}})]
        told = story(*parts, budget=budget, answer_template=False)
        assert found == check(self.ID, told).found

    @pytest.mark.parametrize(
        ("answer", "budget", "found"), [((7, 8), 66 + 2, False), ((7, 8), 66 + 3, True)]
    )
    def test_a_template_that_no_answer_shows_yet_may_take_ample_room(
        self, answer: tuple[int, ...], budget: int, found: bool
    ) -> None:
        """Before the first answer nothing says how much is put around the words."""
        script = script_rollout(
            ENDED[0],
            budget=budget,
            request={"turns": (answer,)},
            multi_turn=True,
            loss_mask=True,
        )
        if found:
            finds(self.ID, script)
        else:
            unknown(self.ID, script, "not exercised")

    def test_an_answer_that_lost_a_token_shows_no_template(self) -> None:
        """Less than the words is a fault of its own, and no reason to expect room."""
        cut = ScriptedCall(**{**_fields(ENDED[1]), "observed": TURNS[0][:1]})
        # six tokens less one, and one for an answer: one more would be room without a template
        unknown(self.ID, story(ENDED[0], cut, budget=7), "not exercised")

    @pytest.mark.parametrize("reason", ["length", "abort", "error"])
    def test_other_ends_are_judged_elsewhere(self, reason: str) -> None:
        """A sample that says it did not end naturally."""
        unknown(self.ID, story(*ENDED, sample={"finish_reason": reason}), "not exercised")

    @pytest.mark.parametrize("reason", ["length", "abort"])
    def test_an_engine_that_cut_the_turn_ends_it(self, reason: str) -> None:
        """Only a natural end is answered."""
        cut = ScriptedCall(observed=TURNS[0], tokens=(13, 14), reason=reason)
        unknown(self.ID, story(ENDED[0], cut), "not exercised")

    def test_a_call_without_a_reply_may_have_been_the_next_turn(self) -> None:
        """The answer was fetched, and the call that brought it was lost."""
        lost = ScriptedCall(tokens=(15,), reason="stop", lost=True)
        unknown(self.ID, story(*ENDED, lost, sample={"finish_reason": "stop"}), "not exercised")

    def test_single_turns_are_not_judged(self) -> None:
        """No environment, no answer."""
        inapplicable(self.ID, script_rollout(ENDED[0]), "declares no turns of the environment")


def _fields(part: ScriptedCall) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__dataclass_fields__}
