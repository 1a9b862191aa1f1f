"""Stitch checks on calls: what a resume sends, and when no further call may be made."""

from __future__ import annotations

import pytest

from rollproof.core.engine_contract import StreamMode
from rollproof.core.events.rollout import Observation
from rollproof.core.records import FinishReason
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, passes, unknown


class TestResumePrompt:
    """``stitch.resume-prompt``."""

    ID = "stitch.resume-prompt"

    def _resume(self, *sent: int, reason: str = "abort", **more: object) -> TraceScript:
        """Two calls; the second one sends ``sent``."""
        story = TraceScript(**more)  # type: ignore[arg-type]
        story.weights(0).submit(max_tokens=8)
        story.reply(story.call((1, 2), max_tokens=8), (11, 12, 13), reason)
        story.reply(story.call(sent, max_tokens=5), (21,), "stop")
        return story

    def test_an_answer_that_is_appended_again_is_named(self) -> None:
        """After an abort without tokens the environment speaks again, and nobody had asked it."""
        story = TraceScript()
        story.weights(0).submit(max_tokens=40, turns=((91, 92),))
        story.reply(story.call((1, 2), max_tokens=40), (11,), "stop")
        story.add(Observation(request_id="r0", token_ids=(91, 92)))
        story.reply(story.call((1, 2, 11, 91, 92), max_tokens=37), (), "abort")
        story.reply(story.call((1, 2, 11, 91, 92, 91, 92), max_tokens=37), (13,), "stop")
        finding = finds(self.ID, story)
        assert finding.title.startswith("Call 3 sends 2 tokens more than the prompt")
        assert finding.hint.startswith("The environment's answer was appended again")

    @pytest.mark.parametrize(
        ("sent", "title", "position", "hint"),
        [
            (
                (1, 2),
                "Call 2 throws away 3 of 3 tokens delivered before it",
                2,
                "samples those tokens again",
            ),
            (
                (1, 2, 11),
                "Call 2 throws away 2 of 3 tokens delivered before it",
                3,
                "samples those tokens again",
            ),
            (
                (1, 2, 11, 13),
                (
                    "Call 2 resumes from a sequence that differs from what was delivered, from"
                    " position 3 on"
                ),
                3,
                "never retokenised",
            ),
            (
                (1, 2, 99, 12, 13),
                (
                    "Call 2 resumes from a sequence that differs from what was delivered, from"
                    " position 2 on"
                ),
                2,
                "never retokenised",
            ),
            (
                (1, 2, 11, 12, 13, 7),
                "Call 2 sends 1 token more than the prompt and what was delivered",
                5,
                "tokens that no engine sampled",
            ),
            (
                (1, 2, 11, 12, 13, 12, 13),
                "Call 2 sends 2 tokens more than the prompt and what was delivered",
                5,
                "appended twice",
            ),
            (
                (1,),
                (
                    "Call 2 resumes from a sequence that differs from what was delivered, from"
                    " position 1 on"
                ),
                1,
                "never retokenised",
            ),
        ],
    )
    def test_each_kind_of_fault_is_named(
        self, sent: tuple[int, ...], title: str, position: int, hint: str
    ) -> None:
        """Thrown away, altered, added: the finding says which, how many and where."""
        finding = finds(self.ID, self._resume(*sent))
        assert title == finding.title
        assert {"request": "r0", "call": 2, "position": position, "server": "s0"} == finding.where
        assert hint in finding.hint
        assert finding.expected.startswith(
            "prompt (2) + delivered response (3) = 5 tokens: [1, 2, 11, 12, 13]"
        )

    def test_the_first_call_sends_the_prompt(self) -> None:
        """A prompt cut on its way to the engine is found although nothing was resumed."""
        story = TraceScript()
        story.submit(prompt=(1, 2, 3))
        story.reply(story.call((1, 3)), (11,), "stop").result((11,), prompt=(1, 2, 3))
        finding = finds(self.ID, story)
        assert "The first call does not send the request's prompt" == finding.title
        assert "2 tokens sent: [1, 3]; the first 1 agree" == finding.observed

    def test_only_the_call_is_blamed(self) -> None:
        """After a wrong context nothing can be judged, so no other check adds its own finding."""
        story = self._resume(1, 2, 11, 13)
        story.result((11, 12, 13, 21))
        assert {self.ID} == blamed(story)

    def test_a_restart_needs_an_excuse(self) -> None:
        """After a lost reply or a death a stack may start again; after an abort it may not."""
        parts = (
            ScriptedCall(tokens=(11, 12)),
            ScriptedCall(tokens=(13,), lost=True),
            ScriptedCall(tokens=(21,), restart=True, reason="stop"),
        )
        passes(self.ID, script_rollout(*parts), first_calls=1, resuming_calls=1, restarts=1)
        later = (
            *parts[:2],
            ScriptedCall(tokens=(21, 22), restart=True),
            ScriptedCall(tokens=(31,), restart=True, reason="stop"),
        )
        assert 4 == finds(self.ID, script_rollout(*later)).where["call"]

    def test_a_restart_is_the_engines_way_where_it_resumes(self) -> None:
        """A contract that does not resume on the client's side promises nothing about
        continuing.
        """
        story = self._resume(1, 2, resume="engine")
        assert Verdict.PASS == check(self.ID, story).verdict
        assert Verdict.FAIL == check(self.ID, self._resume(1, 3, resume="engine")).verdict

    def test_a_reply_that_came_too_late_is_not_known_to_the_next_call(self) -> None:
        """The stack gave the first call up before its reply arrived."""
        story = TraceScript()
        story.submit()
        first = story.call((1, 2))
        second = story.call((1, 2))
        story.reply(first, (11, 12), "abort").reply(second, (21, 22), "stop").result(
            (21, 22), finish_reason=FinishReason.STOP
        )
        assert set() == blamed(story) - {"stitch.logprobs-present", "versions.present"}

    def test_a_finding_behind_a_lost_reply_shows_what_was_known(self) -> None:
        """The expected prompt is that of the moment of the call, although the story went on."""
        story = TraceScript()
        story.submit(max_tokens=8)
        story.reply(story.call((1, 2), max_tokens=8), (11, 12), "abort")
        story.reply(story.call((1, 2, 12), max_tokens=6), (13,), "abort", delivered=False)
        story.reply(story.call((1, 2, 11, 12), max_tokens=6), (14,), "stop")
        finding = finds(self.ID, story)
        assert ("prompt (2) + delivered response (2) = 4 tokens: [1, 2, 11, 12]", 2) == (
            finding.expected,
            finding.where["call"],
        )

    def test_tokens_of_a_broken_stream_that_nobody_recorded_are_not_blamed(self) -> None:
        """The stream that counts is that of the call right before."""
        story = TraceScript()
        story.submit(max_tokens=8)
        story.reply(story.call((1, 2), max_tokens=8), (11, 12), "abort")
        story.call((1, 2, 11, 12), max_tokens=6, stream=StreamMode.DELTA)
        story.reply(story.call((1, 2, 11, 12, 13), max_tokens=5), (14,), "stop")
        passes(self.ID, story, first_calls=1, resuming_calls=1)
        whole = TraceScript()
        whole.submit(max_tokens=8)
        whole.call((1, 2), max_tokens=8, stream=StreamMode.DELTA)
        whole.reply(whole.call((1, 2), max_tokens=8), (11,), "abort")
        whole.reply(whole.call((1, 2, 11, 12), max_tokens=6), (14,), "stop")
        assert "Call 3 sends 1 token more" in finds(self.ID, whole).title

    def test_a_call_behind_one_after_the_end_is_judged(self) -> None:
        """``stitch.no-call-after-end`` reports the second call, and this check the third."""
        story = TraceScript()
        story.submit(max_tokens=8)
        story.reply(story.call((1, 2), max_tokens=8), (11, 12), "stop")
        story.reply(story.call((1, 2, 11, 12), max_tokens=6), (13,), "abort")
        story.reply(story.call((1, 2, 11, 12, 99), max_tokens=5), (14,), "stop")
        assert 3 == finds(self.ID, story).where["call"]

    def test_a_history_that_was_rendered_anew_is_found(self) -> None:
        """A chat template dropped a token of the first turn, and appended the second one."""
        story = self._resume(1, 2, 11, 13, 91, reason="stop")
        finding = finds(self.ID, story)
        assert (
            "Call 2 begins a turn on a history that differs from what was delivered, from position"
            " 3 on" == finding.title
        )
        assert "rendered again" in finding.hint
        assert "own sample" not in finding.hint
        assert {self.ID} == blamed(story)

    def test_a_history_of_another_request_is_not_blamed_on_a_template(self) -> None:
        """The call begins with the prompt of a request that is open at the same time."""
        story = TraceScript()
        story.submit("r1", prompt=(7, 8, 9))
        story.submit()
        story.reply(story.call((1, 2)), (11, 12, 13), "stop")
        story.reply(story.call((7, 8, 9, 91), max_tokens=1), (21,), "stop").result((11, 12, 13))
        hint = finds(self.ID, story).hint
        assert "history of request r1" in hint
        assert "rendered" not in hint

    @pytest.mark.parametrize(
        ("other", "sent"),
        [
            ((7, 8, 9), (1, 2, 11, 13, 91)),
            ((1, 2), (1, 2, 11, 13, 91)),
            ((1,), (1, 2, 11, 13, 91)),
        ],
        ids=["unlike", "equal", "one token"],
    )
    def test_a_history_of_its_own_is_not_that_of_another_request(
        self, other: tuple[int, ...], sent: tuple[int, ...]
    ) -> None:
        """The other prompt is not sent, is the same one, or is a token that begins many."""
        story = TraceScript()
        story.submit("r1", prompt=other)
        story.submit()
        story.reply(story.call((1, 2)), (11, 12, 13), "stop")
        story.reply(story.call(sent, max_tokens=1), (21,), "stop").result((11, 12, 13))
        hint = finds(self.ID, story).hint
        assert "history of request r1" not in hint
        assert "rendered" in hint

    def test_a_first_call_cannot_be_a_restart(self) -> None:
        """The environment spoke first, and the call sends the prompt alone."""
        story = TraceScript()
        story.submit().add(Observation(request_id="r0", token_ids=(91,)))
        story.reply(story.call((1, 2)), (11,), "stop").result((91, 11))
        assert "The first call does not send the request's prompt" == finds(self.ID, story).title

    def test_a_window_is_not_blamed_on_a_template(self) -> None:
        """The oldest tokens of the conversation were cut off."""
        story = self._resume(2, 11, 12, 13, 91, reason="stop")
        hint = finds(self.ID, story).hint
        assert "oldest tokens were cut off" in hint
        assert "rendered" not in hint

    def test_turns_are_counted_apart(self) -> None:
        """A call that brings the environment's words itself begins a turn."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(12,), reason="stop"),
        )
        passes(
            self.ID,
            script_rollout(*parts, recorded=False, driven=False),
            first_calls=1,
            calls_of_a_later_turn=1,
        )
        passes(self.ID, script_rollout(*parts), first_calls=1, resuming_calls=1)

    def test_a_driven_request_without_turns_has_no_environment(self) -> None:
        """Tokens after a natural end have no source if the case has no turns: the call should not
        have been made.
        """
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(12,), reason="stop"),
        )
        assert {"stitch.no-call-after-end"} == blamed(script_rollout(*parts, recorded=False))
        assert set() == blamed(script_rollout(*parts, recorded=False, request={"turns": ((91,),)}))

    def test_without_calls_nothing_is_known(self) -> None:
        """No call, no promise."""
        story = TraceScript()
        story.submit().result()
        unknown(self.ID, story, "no engine call of the request was recorded")


class TestNoCallAfterEnd:
    """``stitch.no-call-after-end``."""

    ID = "stitch.no-call-after-end"

    def _again(self, reason: str, grant: int = 6) -> TraceScript:
        return script_rollout(
            ScriptedCall(tokens=(11, 12), reason=reason),
            ScriptedCall(tokens=(13,), reason="stop", call={"max_tokens": grant}),
        )

    def test_asking_on_after_a_stop_is_found(self) -> None:
        """A loop that ends on the budget alone."""
        finding = finds(self.ID, self._again("stop"))
        assert "Call 2 was made after the rollout had ended" == finding.title
        assert (
            "call 2 (to server s0) sends 4 of the 4 known tokens and requests more"
            == finding.observed
        )
        assert {"request": "r0", "call": 2, "position": 4, "server": "s0"} == finding.where
        assert {self.ID} == blamed(self._again("stop"))

    def test_the_first_of_two_late_calls_is_named(self) -> None:
        """Both were made after the same end."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(tokens=(13,), reason="stop", server="s1"),
            ScriptedCall(tokens=(14,), reason="stop"),
        )
        finding = finds(self.ID, story)
        assert (2, 4, "s1") == tuple(finding.where[name] for name in ("call", "position", "server"))

    def test_completed_with_budget_left_is_an_end(self) -> None:
        """Where ``completed`` cannot mean that a portion was used up."""
        assert {self.ID} == blamed(self._again("completed"))

    @pytest.mark.parametrize("reason", ["length", "completed"])
    def test_a_portion_that_is_used_up_is_no_end(self, reason: str) -> None:
        """Some stacks grant their budget piece by piece."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), reason=reason, call={"max_tokens": 2}),
            ScriptedCall(tokens=(13,), reason="stop"),
        )
        assert set() == blamed(story)

    def test_a_turn_of_the_environment_begins_anew(self) -> None:
        """After the environment's tokens the policy may be called again."""
        passes(
            self.ID,
            script_rollout(
                ScriptedCall(tokens=(11,), reason="stop"),
                ScriptedCall(observed=(91,), tokens=(12,), reason="stop"),
            ),
            natural_ends=1,
        )

    def test_a_call_that_was_under_way_is_no_further_call(self) -> None:
        """A retry sent before the late reply arrived was not made after the end."""
        story = TraceScript()
        story.submit()
        first = story.call((1, 2))
        second = story.call((1, 2))
        story.reply(first, (11,), "stop").reply(second, (11,), "stop").result(
            (11,), finish_reason=FinishReason.STOP
        )
        assert set() == blamed(story) - {"stitch.logprobs-present", "versions.present"}

    def test_an_abort_is_no_end(self) -> None:
        """Nothing is put to the test by a rollout that never ended naturally."""
        unknown(
            self.ID,
            script_rollout(ScriptedCall(tokens=(11,)), abort_surfaces=True),
            "not exercised",
        )
