"""Stitch checks on calls: what a resume sends, when no further call may be made, what stays the
same.
"""

from __future__ import annotations

import pytest

from rollproof.core.engine_contract import StreamMode
from rollproof.core.events.rollout import Observation
from rollproof.core.records import FinishReason
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown


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


class TestParameters:
    """``stitch.sampling-params`` and ``stitch.media``."""

    ID = "stitch.sampling-params"

    def _call(self, **sampling: object) -> ScriptedCall:
        return ScriptedCall(tokens=(11,), call={"sampling": sampling})

    def test_a_parameter_lost_on_resume_is_found(self) -> None:
        """The temperature of the second call is the engine's default."""
        finding = finds(
            self.ID,
            script_rollout(
                self._call(temperature=0.7, top_p=0.9), self._call(top_p=0.9), abort_surfaces=True
            ),
        )
        assert "Call 2 changes 1 sampling parameter: temperature" == finding.title
        assert ("temperature=0.7, as in call 1", "temperature=(absent)") == (
            finding.expected,
            finding.observed,
        )
        assert {self.ID} == blamed(
            script_rollout(self._call(temperature=0.7), self._call(), abort_surfaces=True)
        )

    def test_a_value_of_the_stack_in_place_of_the_callers_is_not_forwarded(self) -> None:
        """Where both name a parameter that means the same everywhere, and the stack declares that
        it forwards; the calls agree, so none changes a parameter.
        """
        story = script_rollout(
            self._call(temperature=1.0),
            self._call(temperature=1.0),
            request={"sampling": {"temperature": 0.7}},
            abort_surfaces=True,
            sampling="forwarded",
        )
        finding = finds("stitch.sampling-forwarded", story)
        assert "No call carries temperature as the caller gave it" == finding.title
        assert "temperature=0.7 on every call (sampling='forwarded')" == finding.expected
        assert "temperature=1.0 in call 1" == finding.observed
        assert {"stitch.sampling-forwarded"} == blamed(story)

    @pytest.mark.parametrize("values", [(1.0, 0.7), (0.7, 1.0)])
    def test_a_value_that_only_some_calls_replace_is_changed(
        self, values: tuple[float, float]
    ) -> None:
        """One cause, one check: calls that differ from each other break stitch.sampling-params."""
        first, second = values
        story = script_rollout(
            self._call(temperature=first),
            self._call(temperature=second),
            request={"sampling": {"temperature": 0.7}},
            abort_surfaces=True,
            sampling="forwarded",
        )
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize("sampling", [None, "own"])
    def test_a_stack_may_choose_its_own(self, sampling: str | None) -> None:
        """A temperature of the stack's configuration is no fault if every call has it; undeclared,
        the reason says what to declare.
        """
        requested = {"sampling": {"temperature": 0.7}}
        story = script_rollout(
            self._call(temperature=1.0),
            self._call(temperature=1.0),
            request=requested,
            abort_surfaces=True,
            sampling=sampling,
        )
        passes(self.ID, story, first_calls=1, resuming_calls=1)
        if sampling is None:
            unknown(
                "stitch.sampling-forwarded",
                story,
                "the caller gave temperature=0.7, and no call carries it: declare",
            )
        lost = script_rollout(
            self._call(temperature=1.0),
            self._call(),
            request=requested,
            abort_surfaces=True,
            sampling=sampling,
        )
        assert {self.ID} == blamed(lost)

    def test_what_a_stack_may_change_is_not_judged(self) -> None:
        """Budgets shrink, seeds differ per call, and a stack spells its own options in its own
        way.
        """
        first = self._call(max_tokens=8, seed=1, logprobs=0, cache_salt="0", temperature=1)
        second = self._call(max_tokens=7, seed=2, logprobs=0, cache_salt="1", temperature=1.0)
        story = script_rollout(
            first,
            second,
            request={"sampling": {"logprobs": True, "temperature": 1.0}},
            abort_surfaces=True,
        )
        passes(self.ID, story, first_calls=1, resuming_calls=1)

    def test_parameters_that_no_call_carries_are_found_where_forwarding_is_declared(self) -> None:
        """The whole rollout is sampled with the engine's defaults; a value that changes nothing may
        be left out.
        """
        requested = {"sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "seed": 3}}
        story = script_rollout(
            self._call(stop="x"),
            self._call(stop="x"),
            request=requested,
            abort_surfaces=True,
            sampling="forwarded",
        )
        finding = finds("stitch.sampling-forwarded", story)
        assert (
            "No call carries 2 sampling parameters that the caller gave: temperature and top_k"
            == finding.title
        )
        assert "temperature=0.7, top_k=20 on every call (sampling='forwarded')" == finding.expected
        assert "2 calls without; the first carries stop='x'" == finding.observed
        assert {"stitch.sampling-forwarded"} == blamed(story)

    @pytest.mark.parametrize("sampling", [None, "forwarded"])
    def test_a_parameter_that_is_carried_is_forwarded(self, sampling: str | None) -> None:
        """A stack shows it, whatever it declares; one that is lost on the way is another check's
        subject.
        """
        requested = {"sampling": {"temperature": 0.7}}
        both = script_rollout(
            self._call(temperature=0.7),
            self._call(temperature=0.7),
            request=requested,
            abort_surfaces=True,
            sampling=sampling,
        )
        passes("stitch.sampling-forwarded", both, parameters_of_callers=1)
        lost = script_rollout(
            self._call(temperature=0.7),
            self._call(),
            request=requested,
            abort_surfaces=True,
            sampling=sampling,
        )
        assert {self.ID} == blamed(lost)

    def test_what_the_first_call_carries_is_shown(self) -> None:
        """With its server; the second call has others."""
        story = script_rollout(
            self._call(stop="x"),
            ScriptedCall(tokens=(12,), server="s1", call={"sampling": {"stop": "y"}}),
            request={"sampling": {"top_k": 20}},
            abort_surfaces=True,
            sampling="forwarded",
        )
        finding = finds("stitch.sampling-forwarded", story)
        assert "2 calls without; the first carries stop='x'" == finding.observed
        assert ("s0", 1) == (finding.where["server"], finding.where["call"])

    def test_the_value_of_the_first_call_is_shown(self) -> None:
        """No call has the caller's value, and the place is the first call."""
        story = script_rollout(
            self._call(temperature=1.0),
            self._call(temperature=0.5),
            request={"sampling": {"temperature": 0.7}},
            abort_surfaces=True,
            sampling="forwarded",
        )
        finding = finds("stitch.sampling-forwarded", story)
        assert "temperature=1.0 in call 1" == finding.observed

    @pytest.mark.parametrize(
        ("name", "neutral", "other"),
        [
            ("top_p", 1.0, 0.0),
            ("top_p", 1.0, 2.0),
            ("top_k", -1, 1),
            ("top_k", 0, -2),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1.0, 0.0),
            ("repetition_penalty", 1.0, 2.0),
            ("presence_penalty", 0.0, 1.0),
            ("presence_penalty", 0.0, -1.0),
            ("frequency_penalty", 0.0, 1.0),
            ("frequency_penalty", 0.0, -1.0),
            ("temperature", 1.0, 2.0),
            ("temperature", 0.0, -1.0),
            ("ignore_eos", False, True),
        ],
    )
    def test_a_value_that_changes_nothing_may_be_left_out(
        self, name: str, neutral: object, other: object
    ) -> None:
        """It is the engines' default; any other value of the same parameter is not."""
        for value in (neutral, other):
            story = script_rollout(
                self._call(),
                request={"sampling": {name: value}},
                abort_surfaces=True,
                sampling="forwarded",
            )
            if value == neutral:
                unknown("stitch.sampling-forwarded", story, "not exercised")
            else:
                finds("stitch.sampling-forwarded", story)

    def test_an_undeclared_stack_is_asked(self) -> None:
        """It may rename the parameter, or choose its own: there is no finding, and the reason says
        what to declare.
        """
        requested = {"sampling": {"temperature": 0.7}}
        story = script_rollout(self._call(t=0.7), request=requested, abort_surfaces=True)
        unknown(
            "stitch.sampling-forwarded",
            story,
            "declare sampling='forwarded' to have that judged, or sampling='own'",
        )
        own = script_rollout(
            self._call(t=0.7), request=requested, abort_surfaces=True, sampling="own"
        )
        inapplicable("stitch.sampling-forwarded", own, "the contract declares sampling='own'")

    @pytest.mark.parametrize(
        "requested", [{}, {"temperature": 0}, {"temperature": None}, {"max_new_tokens": 4}]
    )
    def test_what_can_be_spelled_in_many_ways_is_not_looked_for(
        self, requested: dict[str, object]
    ) -> None:
        """Greedy sampling, nothing at all, and budgets."""
        story = script_rollout(
            self._call(), request={"sampling": requested}, abort_surfaces=True, sampling="forwarded"
        )
        unknown("stitch.sampling-forwarded", story, "not exercised")

    @pytest.mark.parametrize(
        ("call", "right"),
        [
            ({"temperature": 0.0}, True),
            ({"temperature": 1e-5}, True),
            ({"temperature": 1.0, "top_k": 1}, True),
            ({"temperature": 1.0}, False),
        ],
    )
    def test_greedy_may_be_spelled_in_another_way(
        self, call: dict[str, float], right: bool
    ) -> None:
        """A temperature that engines take for 0, or the first rank alone; 1 is not greedy."""
        story = script_rollout(
            self._call(**call),
            request={"sampling": {"temperature": 0.0}},
            abort_surfaces=True,
            sampling="forwarded",
        )
        assert (set() if right else {"stitch.sampling-forwarded"}) == blamed(story)

    @pytest.mark.parametrize(("media", "verb"), [(None, "drops"), ("other.png", "changes")])
    def test_media_must_travel_with_every_attempt(self, media: str | None, verb: str) -> None:
        """The resuming call continues another conversation than the one it began."""
        parts = (
            ScriptedCall(tokens=(11,), call={"media": "a.png"}),
            ScriptedCall(tokens=(12,), reason="stop", call={"media": media}),
        )
        story = script_rollout(*parts, request={"media": "a.png"})
        finding = finds("stitch.media", story)
        assert f"Call 2 {verb} the request's media" == finding.title
        assert "verl #4842" in finding.hint
        assert {"stitch.media"} == blamed(story)

    def test_media_kept_pass_and_no_media_is_no_exercise(self) -> None:
        """A run without media says nothing about them."""
        part = ScriptedCall(tokens=(11,), reason="stop", call={"media": "a.png"})
        passes("stitch.media", script_rollout(part, request={"media": "a.png"}), calls_with_media=1)
        unknown(
            "stitch.media",
            script_rollout(ScriptedCall(tokens=(11,), reason="stop")),
            "not exercised: no calls with media occurred",
        )
