"""Stitch checks on the ends of samples."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.records import FinishReason
from rollproof.fakes.coded.policy import CodedPolicy
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, passes, unknown

A, B = ScriptedCall(tokens=(11, 12)), ScriptedCall(tokens=(13, 14, 15), reason="length")


class TestFinishReason:
    """``stitch.finish-reason``."""

    ID = "stitch.finish-reason"

    @pytest.mark.parametrize(
        ("parts", "got", "title", "hint"),
        [
            (
                (A,),
                "stop",
                "An aborted rollout is shown as a natural end (stop)",
                "A fragment counts as a complete turn",
            ),
            (
                (A,),
                "completed",
                "An aborted rollout is shown as a natural end (completed)",
                "A fragment counts as a complete turn",
            ),
            (
                (A, B),
                "stop",
                "A rollout that ended by length is shown as stop",
                "A truncated response counts as complete",
            ),
            (
                (A, B),
                "abort",
                "A rollout that ended by length is shown as abort",
                "A truncated response counts as complete",
            ),
            (
                (ScriptedCall(tokens=(11,), reason="stop"),),
                "abort",
                "A rollout that ended by stop is shown as abort",
                "complete response",
            ),
            (
                (ScriptedCall(tokens=(11,), reason="stop"),),
                None,
                "The sample carries no finish reason",
                "Declare finish_reason=False",
            ),
            (
                (A, ScriptedCall(tokens=(1, 2, 3), reason="stop")),
                "length",
                "A rollout that ended by stop is shown as length",
                "last one of the budget",
            ),
        ],
    )
    def test_each_wrong_reason_is_named(
        self, parts: tuple[ScriptedCall, ...], got: str | None, title: str, hint: str
    ) -> None:
        """What the engine said and what the sample says."""
        story = script_rollout(
            *parts, budget=5, sample={"finish_reason": None if got is None else FinishReason(got)}
        )
        finding = finds(self.ID, story)
        assert title == finding.title
        assert hint in finding.hint
        assert {self.ID} == blamed(story)

    def test_other_tokens_are_one_finding(self) -> None:
        """An abort on a stop token may be shown as a stop. stitch.tokens reports a sample without
        that token, and its finish reason is no second fault.
        """
        parts = (A, ScriptedCall(tokens=(13, 14), call={"stop_token_ids": (14,)}))
        sample = {"finish_reason": FinishReason.STOP, "response": (11, 12, 13, -1)}
        assert {"stitch.tokens"} == blamed(script_rollout(*parts, budget=5, sample=sample))

    @pytest.mark.parametrize(
        ("parts", "got"),
        [
            ((A, ScriptedCall(tokens=(13, 14, 15))), "length"),
            ((A, ScriptedCall(tokens=(13, 14, 15))), "completed"),
            ((A, ScriptedCall(tokens=(13, 14, 15))), "abort"),
            ((A, ScriptedCall(lost=True)), "abort"),
            ((A, ScriptedCall(lost=True)), "error"),
            ((ScriptedCall(lost=True),), "error"),
            (
                (
                    ScriptedCall(tokens=(11,), reason="stop"),
                    ScriptedCall(lost=True, observed=(91,)),
                ),
                "abort",
            ),
            ((ScriptedCall(reason="error"),), "abort"),
        ],
    )
    def test_right_reasons_in_unusual_ends(self, parts: tuple[ScriptedCall, ...], got: str) -> None:
        """An abort on the last token of the budget; giving up after a lost reply."""
        assert set() == blamed(
            script_rollout(
                *parts, budget=5, sample={"finish_reason": FinishReason(got)}, abort_surfaces=True
            )
        ) - {"stitch.tokens"}

    def test_a_stack_may_know_the_end_of_sequence(self) -> None:
        """An abort that came with the end-of-sequence token may be called a stop by who knows the
        token.
        """
        policy = CodedPolicy(
            seed=1, vocab=64, num_layers=1, moe_layers=(0,), num_experts=4, top_k=2, eos_every=4
        )
        story = script_rollout(
            ScriptedCall(tokens=(11, policy.eos_id)), sample={"finish_reason": FinishReason.STOP}
        )
        assert not check(self.ID, story, policy).findings
        finds(self.ID, story)

    @pytest.mark.parametrize("call", [{"stop_token_ids": (42,)}, {"end_tokens": (42,)}])
    def test_a_stack_knows_the_stop_tokens_that_it_passed(self, call: dict[str, Any]) -> None:
        """An abort that came with one of them may be called a stop, too; with another token it is
        an abort.
        """
        said = {"finish_reason": FinishReason.STOP}
        passes(self.ID, script_rollout(ScriptedCall(tokens=(11, 42), call=call), sample=said))
        finds(self.ID, script_rollout(ScriptedCall(tokens=(42, 11), call=call), sample=said))

    def test_nobody_answered(self) -> None:
        """A natural end that no engine gave."""
        story = script_rollout(ScriptedCall(lost=True), sample={"finish_reason": FinishReason.STOP})
        finding = finds(self.ID, story)
        assert "The sample ends by stop, although no engine ever answered" == finding.title
        assert "abort or error: no engine answered" == finding.expected

    @pytest.mark.parametrize("reason", ["length", "stop", "completed"])
    def test_nobody_was_asked(self, reason: str) -> None:
        """An empty sample that ends naturally without any call, in a run with all calls
        recorded.
        """
        story = TraceScript().submit().result((), finish_reason=FinishReason(reason))
        finding = finds(self.ID, story)
        assert f"The sample ends by {reason}, although no engine ever answered" == finding.title
        assert "No engine sampled this end" in finding.hint

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_giving_up_without_a_call_is_said(self, reason: str) -> None:
        """As is a budget of nothing, a request of a group (its call may count for another of it),
        and a recording.
        """
        why = "no engine call of the request was recorded"
        unknown(self.ID, TraceScript().submit().result((), finish_reason=FinishReason(reason)), why)
        unknown(self.ID, TraceScript().submit(group="g").result(()), why)
        unknown(self.ID, TraceScript(driven=False).submit().result(()), why)
        assert not check(self.ID, TraceScript().submit(max_tokens=0).result(())).findings

    def test_a_multi_turn_response_may_be_cut_by_the_environment(self) -> None:
        """The tool's words fill the response up to its limit."""
        parts = (
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(observed=(91, 92, 93), tokens=(13,), reason="stop"),
        )
        assert set() == blamed(
            script_rollout(*parts, budget=6, sample={"finish_reason": FinishReason.LENGTH})
        )

    @pytest.mark.parametrize(
        ("turns", "limits", "found"),
        [
            (((91,),), None, False),  # the answer would fill the budget
            ((), None, True),  # nobody was to answer
            ((), {"turns": 1}, True),
            (((91,),), {"turns": 1}, False),
        ],
    )
    def test_a_turn_that_leaves_no_room_for_its_answer_was_cut_or_ended(
        self, turns: tuple[tuple[int, ...], ...], limits: dict[str, int] | None, found: bool
    ) -> None:
        """The turn ended, and the conversation was cut: both reasons are right. A complete answer
        that nothing was to follow is still not truncated.
        """
        turn = ScriptedCall(tokens=(11, 12), reason="stop")
        for reason in ("length", "stop"):
            story = script_rollout(
                turn,
                budget=2,
                request={"turns": turns},
                sample={"finish_reason": FinishReason(reason)},
                multi_turn=True,
                limits=limits,
            )
            assert (found and reason == "length") == (check(self.ID, story).found > 0)

    def test_a_recording_does_not_say_whether_an_answer_was_to_follow(self) -> None:
        """Only a case lists the answers of the environment."""
        for multi_turn in (True, False):
            script = TraceScript(driven=False, multi_turn=multi_turn)
            story = script_rollout(
                ScriptedCall(tokens=(11, 12), reason="stop"),
                budget=2,
                sample={"finish_reason": FinishReason.LENGTH},
                script=script,
            )
            assert multi_turn == (check(self.ID, story).found == 0)

    def test_ends_are_counted_by_kind(self) -> None:
        """Which ends a run has seen."""
        passes(self.ID, script_rollout(A, B, budget=5), ends_by_length=1)
        passes(
            self.ID, script_rollout(ScriptedCall(tokens=(11,), reason="completed")), ends_by_stop=1
        )
        passes(self.ID, script_rollout(A, abort_surfaces=True), ends_by_abort=1)


class TestFinishLength:
    """``stitch.finish-length``."""

    ID = "stitch.finish-length"

    def test_portions_of_the_stack_limit_nothing(self) -> None:
        """The caller gave no budget and the contract no limit. In a recording, the room of the
        engine's context may have ended the sample.
        """
        parts = (
            ScriptedCall(tokens=(11, 12), call={"max_tokens": 8}),
            ScriptedCall(tokens=(13,), reason="length", call={"max_tokens": 1}),
        )
        finding = finds(self.ID, self._story(*parts, budget=None))
        assert "The sample says length after 3 tokens, although nothing limits it" == finding.title
        assert "no limit of the request or of the contract is reached" in finding.expected
        passes(self.ID, self._recorded(*parts, budget=None), ends_by_length=1)

    @pytest.mark.parametrize(("budget", "found"), [(3, False), (4, True)])
    def test_an_answer_that_leaves_no_room_ends_a_conversation(
        self, budget: int, found: bool
    ) -> None:
        """A turn of one token and an answer of two fill a budget of three, so that no token could
        follow; in a budget of four one could.
        """
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop"),
            budget=budget,
            request={"turns": ((91, 92),)},
            sample={"finish_reason": FinishReason.LENGTH},
            multi_turn=True,
        )
        if found:
            assert "The sample says length after 1 token of 4" == finds(self.ID, story).title
        else:
            passes(self.ID, story, ends_by_length=1)

    def _story(self, *parts: ScriptedCall, budget: int | None = 8) -> TraceScript:
        return script_rollout(*parts, budget=budget, sample={"finish_reason": FinishReason.LENGTH})

    def _recorded(
        self, *parts: ScriptedCall, budget: int | None = 8, **changes: Any
    ) -> TraceScript:
        script = TraceScript(driven=False)
        sample = {"finish_reason": FinishReason.LENGTH}
        return script_rollout(*parts, budget=budget, sample=sample, script=script, **changes)

    @pytest.mark.parametrize(
        ("parts", "budget", "title", "observed"),
        [
            (
                (A,),
                8,
                "The sample says length after 2 tokens of 8",
                "the last reply, to call 1, ended by abort, granted 8",
            ),
            (
                (A, ScriptedCall(tokens=(13,), reason="stop")),
                8,
                "The sample says length after 3 tokens of 8",
                "ended by stop, granted 6",
            ),
            (
                (A, ScriptedCall(tokens=(13,), reason="length", call={"max_tokens": 1})),
                8,
                "The sample says length after 3 tokens of 8",
                "ended by length, granted 1",
            ),
            (
                (A,),
                None,
                "The sample says length after 2 tokens, although nothing limits it",
                "ended by abort, granted None",
            ),
        ],
    )
    def test_an_end_before_the_budget_is_found(
        self, parts: tuple[ScriptedCall, ...], budget: int | None, title: str, observed: str
    ) -> None:
        """Given up, stopped, or granted too little: the response could have gone on."""
        finding = finds(self.ID, self._story(*parts, budget=budget))
        assert title == finding.title
        assert observed in finding.observed
        assert {self.ID} == blamed(self._story(*parts, budget=budget))

    @pytest.mark.parametrize(
        ("limits", "right"),
        [
            ({"response": 2}, True),
            ({"length": 6}, False),
            ({"turns": 1}, True),
            ({"turns": 2}, False),
        ],
        ids=str,
    )
    def test_a_declared_limit_that_was_reached_ends_by_length(
        self, limits: dict[str, int], right: bool
    ) -> None:
        """The request states no limit, the contract does: at it length is right, below it not."""
        story = script_rollout(
            A, budget=None, limits=limits, multi_turn=True, sample={"finish_reason": "length"}
        )
        assert (set() if right else {self.ID}) == blamed(story)

    def test_a_stop_within_a_cap_is_a_whole_answer(self) -> None:
        """The engine's stop on the last token of a grant below the budget: the finding names the
        budget, and what is lost.
        """
        story = self._story(ScriptedCall(tokens=(11, 12), reason="stop", call={"max_tokens": 2}))
        finding = finds(self.ID, story)
        assert (
            "The sample says length after 2 tokens of 8",
            "length only once all 8 are sampled",
        ) == (finding.title, finding.expected)
        assert "a complete answer counts as truncated" in finding.hint

    def test_a_cap_of_the_stack_is_no_budget(self) -> None:
        """Whether it held from the first call on, or each call had it: the response could have gone
        on. An abort on the last token of such a call changes nothing.
        """
        for parts in (
            (ScriptedCall(tokens=(11, 12), call={"max_tokens": 2}),),
            (ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 2}),),
            (
                ScriptedCall(tokens=(11, 12), call={"max_tokens": 4}),
                ScriptedCall(tokens=(13, 14), reason="length", call={"max_tokens": 2}),
            ),
            (
                ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 2}),
                ScriptedCall(tokens=(13, 14), reason="length", call={"max_tokens": 2}),
            ),
        ):
            assert "of 8" in finds(self.ID, self._story(*parts)).title
            assert {self.ID} == blamed(self._story(*parts))

    def test_portions_that_go_on_are_right(self) -> None:
        """Calls of two tokens each, until the budget is used up."""
        portion: dict[str, Any] = {"reason": "length", "call": {"max_tokens": 2}}
        parts = (ScriptedCall(tokens=(11, 12), **portion), ScriptedCall(tokens=(13, 14), **portion))
        passes(self.ID, self._story(*parts, budget=4), ends_by_length=1)

    def test_a_cap_of_a_recording_may_be_the_room_of_the_context(self) -> None:
        """A recording does not say how long the sequences are that its engines take."""
        capped = (
            ScriptedCall(tokens=(11, 12), call={"max_tokens": 4}),
            ScriptedCall(tokens=(13, 14), reason="length", call={"max_tokens": 2}),
        )
        passes(self.ID, self._recorded(*capped), ends_by_length=1)
        passes(self.ID, self._recorded(ScriptedCall(tokens=(11, 12), call={"max_tokens": 2})))

    @pytest.mark.parametrize(
        ("changes", "right"),
        [
            ({"script": TraceScript(case={"engine": {"max_length": 4}})}, True),
            ({"script": TraceScript(case={"engine": {"max_length": 5}})}, False),
            ({"limits": {"turn_tokens": 2}}, True),
            ({"limits": {"turn_tokens": 3}}, False),
        ],
    )
    def test_a_grant_may_keep_a_limit(self, changes: dict[str, Any], right: bool) -> None:
        """The engines' context, or the declared tokens of a turn; of one token more nothing is
        seen.
        """
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), reason="length", call={"max_tokens": 2}),
            sample={"finish_reason": FinishReason.LENGTH},
            **changes,
        )
        assert (set() if right else {self.ID}) == blamed(story)

    def test_a_template_may_fill_the_budget(self) -> None:
        """Tokens that a call sends and the sample need not hold count, too."""
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(tokens=(13, 14), observed=(91,), reason="length", call={"max_tokens": 2}),
            budget=4,
            sample={"finish_reason": FinishReason.LENGTH},
            request={"turns": ((91,),)},
            multi_turn=True,
        )
        passes(self.ID, story, ends_by_length=1)

    def test_an_engine_may_end_a_call_early(self) -> None:
        """By length before its grant is used up: at the room of its context."""
        passes(
            self.ID, self._story(A, ScriptedCall(tokens=(13,), reason="length")), ends_by_length=1
        )
        passes(
            self.ID,
            self._story(ScriptedCall(tokens=(13,), reason="length"), budget=None),
            ends_by_length=1,
        )
