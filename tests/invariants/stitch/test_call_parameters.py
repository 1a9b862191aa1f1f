"""Stitch checks on what calls carry of the request: sampling parameters and media."""

from __future__ import annotations

import pytest

from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import finds, inapplicable, passes, unknown


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
