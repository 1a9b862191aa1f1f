"""Version checks on samples: presence, published labels, tags of samples, extremes and calls."""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.events.rollout import Weights
from rollproof.core.records import Span, Version
from rollproof.core.trace import Trace
from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, passes, unknown

OLD, NEW = (
    ScriptedCall(tokens=(11, 12, 13)),
    ScriptedCall(tokens=(21, 22), version=1, reason="stop"),
)
KINDS = ("sample", "min-max", "bounds", "call", "span", "token")


def updated(story: TraceScript, version: int = 1) -> Trace:
    """The story with an update just before the sample is handed over."""
    trace = story.trace()
    return trace.with_events(
        [
            *trace.events[:-1],
            Weights(server_id="s0", version=version, label=version),
            trace.events[-1],
        ]
    )


def warm(kind: str) -> TraceScript:
    """An earlier request, so that version 0 was published before the one that is judged."""
    return script_rollout(
        ScriptedCall(reason="stop"), request_id="warm", prompt=(9,), versions=kind
    )


@pytest.mark.parametrize("kind", KINDS)
class TestCorrect:
    """No tag check finds anything in a correctly tagged sample, however unusual."""

    def test_across_an_update(self, kind: str) -> None:
        """Two versions, two calls."""
        assert set() == blamed(script_rollout(OLD, NEW, versions=kind))

    def test_empty_calls_under_other_versions(self, kind: str) -> None:
        """A call without tokens shows a version that sampled nothing."""
        parts = (
            ScriptedCall(),
            ScriptedCall(tokens=(11,), version=1),
            ScriptedCall(version=2),
            ScriptedCall(tokens=(12,), version=2),
            ScriptedCall(version=3, reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions=kind))

    def test_labels_as_text(self, kind: str) -> None:
        """Their order is that of publication."""
        named = {0: "base", 1: "after-1", 2: "2"}
        assert set() == blamed(
            script_rollout(
                OLD, NEW, versions="token" if kind in ("min-max", "bounds") else kind, labels=named
            )
        )

    def test_numbers_spelled_as_text(self, kind: str) -> None:
        """SGLang shows ``"1"`` where a stack keeps 1."""
        parts = (
            ScriptedCall(tokens=(11,), shown="0"),
            ScriptedCall(tokens=(12,), version=1, shown="1", reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions=kind))

    def test_versions_that_go_back(self, kind: str) -> None:
        """Another replica is out of date."""
        parts = (
            ScriptedCall(tokens=(11,), version=2),
            ScriptedCall(tokens=(12,), version=1, server="s1"),
            ScriptedCall(tokens=(13,), version=2, reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions=kind))

    def test_version_zero_throughout(self, kind: str) -> None:
        """Zero is a version."""
        story = script_rollout(OLD, ScriptedCall(tokens=(14,), reason="stop"), versions=kind)
        assert set() == blamed(story)
        assert {"tags": 1, "tags of version 0": 1} == check("versions.present", story).exercised

    def test_a_lost_reply_leaves_no_trace(self, kind: str) -> None:
        """What never arrived sampled nothing that counts."""
        assert set() == blamed(
            script_rollout(
                OLD,
                ScriptedCall(tokens=(99,), version=1, lost=True),
                ScriptedCall(tokens=(21,), version=2, reason="stop"),
                versions=kind,
            )
        )

    def test_a_restart_forgets_the_first_version(self, kind: str) -> None:
        """The tokens of the first call are not in the sample."""
        parts = (
            OLD,
            ScriptedCall(version=1, lost=True),
            ScriptedCall(tokens=(21,), version=1, restart=True, reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions=kind))

    def test_turns(self, kind: str) -> None:
        """Tokens of the environment have no version."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(21,), version=1, reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions=kind, loss_mask=True))

    def test_an_update_to_equal_weights(self, kind: str) -> None:
        """Equal weights under a new label may be called by either."""
        story = script_rollout(OLD, NEW, versions=kind).trace()
        events = list(story.events)
        events.insert(-1, Weights(server_id="s0", version=1, label=7, identity=True))
        assert set() == blamed(story.with_events(events))

    def test_nothing_sampled(self, kind: str) -> None:
        """A sample without tokens has no sampler, and whatever tag it carries cannot be wrong but
        by being made up.
        """
        assert set() == blamed(script_rollout(ScriptedCall(reason="stop"), versions=kind))

    def test_an_engine_that_shows_nothing(self, kind: str) -> None:
        """The stack keeps its own books: they are judged by the truth."""
        parts = (
            ScriptedCall(tokens=(11,), shown=None),
            ScriptedCall(tokens=(21,), shown=None, version=1, reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions=kind))

    def test_one_label_for_a_call_that_two_versions_sampled(self, kind: str) -> None:
        """The stack cannot know more than its engine shows: either reading is accepted, and none
        counts as exercise.
        """
        spans = (Span(start=0, end=2, version=0), Span(start=2, end=4, version=1))
        part = ScriptedCall(
            tokens=(11, 12, 13, 14), reason="stop", version=1, reply={"true_tokens": spans}
        )
        story = script_rollout(part, versions=kind, script=warm(kind))
        assert set() == blamed(story)
        if kind != "call":
            name = {
                "sample": "sample-tag",
                "min-max": "min-max",
                "bounds": "bounds",
                "span": "span-tags",
                "token": "token-tags",
            }[kind]
            reason = (
                "not known"
                if kind in ("span", "token")
                else "the versions of some tokens are not known"
            )
            unknown(f"versions.{name}", story, reason)


class TestPresent:
    """``versions.present``."""

    ID = "versions.present"

    @pytest.mark.parametrize(
        ("kind", "sample", "gone", "observed"),
        [
            ("sample", {"version": None}, "carries no version", "version is absent"),
            ("min-max", {"max_version": None}, "carries no max version", "max version is absent"),
            (
                "min-max",
                {"min_version": None, "max_version": None},
                "carries no min version or max version",
                "min version is absent, max version is absent",
            ),
            ("call", {"call_versions": ()}, "carries no call versions", "call versions are absent"),
            ("span", {"spans": ()}, "carries no spans", "spans are absent"),
            (
                "span",
                {"spans": (Span(start=0, end=2, version=None),)},
                "names no version in its spans",
                "1 span of version None",
            ),
            (
                "token",
                {"token_versions": None},
                "carries no token versions",
                "token versions are absent",
            ),
            (
                "token",
                {"token_versions": (None, None)},
                "names no version in its token versions",
                "token versions are None for 2 sampled tokens",
            ),
            (
                "token",
                {"token_versions": ()},
                "carries no token versions",
                "token versions are empty",
            ),
        ],
    )
    def test_a_tag_that_is_not_there_is_found(
        self, kind: str, sample: dict[str, Any], gone: str, observed: str
    ) -> None:
        """Declared, shown by the engine, and absent, or there without a version."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), version=3, reason="stop"), versions=kind, sample=sample
        )
        finding = finds(self.ID, story)
        assert (
            f"The sample {gone}, although the engine showed version 3 for tokens 0-1"
            == finding.title
        )
        assert observed == finding.observed
        assert "The stack dropped the tag" in finding.hint
        if sample != {"token_versions": ()}:
            assert {self.ID} == blamed(story)

    def test_a_dropped_zero_is_explained(self) -> None:
        """``if version:`` drops it."""
        story = script_rollout(
            ScriptedCall(tokens=(11,), reason="stop"), versions="sample", sample={"version": None}
        )
        assert "Version 0 is false in a condition" in finds(self.ID, story).hint

    @pytest.mark.parametrize("first", [(), (11,)])
    def test_the_missing_tag_of_a_call_without_tokens_is_explained(
        self, first: tuple[int, ...]
    ) -> None:
        """A stack that takes the tags of all its calls also takes the one that shows none."""
        story = script_rollout(
            ScriptedCall(tokens=first),
            ScriptedCall(tokens=(12,), reason="stop"),
            versions="min-max",
            sample={"min_version": None},
        )
        assert (not first) == ("A call without tokens" in finds(self.ID, story).hint)

    def test_a_tag_that_is_lost_next_to_an_unknown_one_is_no_dropped_zero(self) -> None:
        """What the engine showed for a later call, nothing, was given to all tokens."""
        story = script_rollout(
            ScriptedCall(tokens=(11,)),
            ScriptedCall(tokens=(12, 13), version=1, shown=None, reason="stop"),
            versions="token",
            sample={"token_versions": (None, None, None)},
        )
        hint = finds(self.ID, story).hint
        assert hint.startswith("The engine showed no version for other tokens of the sample")

    def test_an_unknown_part_makes_the_whole_unknown(self) -> None:
        """One tag for the sample may be ``None`` as soon as one token's version was not shown."""
        parts = (ScriptedCall(tokens=(11,)), ScriptedCall(tokens=(12,), shown=None, reason="stop"))
        story = script_rollout(
            *parts, versions="min-max", sample={"min_version": None, "max_version": None}
        )
        unknown(self.ID, story, "the engines showed no version for some of the tokens")

    @pytest.mark.parametrize(
        ("check_id", "kind"),
        [
            (ID, "min-max"),
            ("versions.min-max", "min-max"),
            ("versions.sample-tag", "sample"),
            ("versions.token-tags", "token"),
        ],
    )
    def test_a_recording_without_updates_is_told_what_to_record(
        self, check_id: str, kind: str
    ) -> None:
        """The reason names the call that records which weights the engines had."""
        story = TraceScript(versions=kind, driven=False)
        story.submit()
        story.reply(story.call((1, 2)), (11,), "stop", version=4, true_tokens=None)
        story.result((11,), version=4, min_version=4, max_version=4, token_versions=(4,))
        unknown(check_id, story, "call `trace.weights(label)`")


class TestPublished:
    """``versions.published``."""

    ID = "versions.published"

    @pytest.mark.parametrize(
        ("kind", "sample"),
        [
            ("sample", {"version": 9}),
            ("min-max", {"max_version": 9}),
            ("call", {"call_versions": (0, 9)}),
            ("token", {"token_versions": (0, 0, 0, 1, 9)}),
            ("span", {"spans": (Span(start=0, end=3, version=0), Span(start=3, end=5, version=9))}),
        ],
    )
    def test_a_made_up_version_is_found(self, kind: str, sample: dict[str, Any]) -> None:
        """A counter runs ahead of the updates; no other check is blamed for it."""
        story = script_rollout(OLD, NEW, versions=kind, sample=sample)
        finding = finds(self.ID, story)
        assert "The sample is tagged with version 9, never published" == finding.title
        assert ("one of the published labels: 0 and 1", "9") == (finding.expected, finding.observed)
        assert {self.ID} == blamed(story)

    def test_the_first_of_several_made_up_versions_is_the_place(self) -> None:
        """All are named, in the order of the sample."""
        story = script_rollout(
            OLD, NEW, versions="token", sample={"token_versions": (0, 9, 0, 1, 7)}
        )
        finding = finds(self.ID, story)
        assert "The sample is tagged with version 9 and version 7, never published" == finding.title
        assert ("9 and 7", 9) == (finding.observed, finding.where["version"])

    def test_marks_on_the_environments_tokens_are_not_versions(self) -> None:
        """Some stacks put -1 where nothing was sampled."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(21,), reason="stop"),
        )
        assert set() == blamed(
            script_rollout(*parts, versions="token", sample={"token_versions": (0, -1, 0)})
        )

    def test_without_updates_nothing_is_known(self) -> None:
        """A trace without updates shows no labels."""
        story = TraceScript(versions="sample")
        story.submit()
        story.reply(story.call((1, 2)), (11,), "stop").result((11,), version=4)
        unknown(self.ID, story, "no version was published in the trace")


class TestSampleTag:
    """``versions.sample-tag``."""

    ID = "versions.sample-tag"

    @pytest.mark.parametrize("tag", [0, 1])
    def test_any_sampler_is_right(self, tag: int) -> None:
        """One label cannot say more."""
        passes(
            self.ID,
            script_rollout(OLD, NEW, versions="sample", sample={"version": tag}),
            samples_across_versions=1,
        )

    def test_a_tag_read_after_the_reply_is_found(self) -> None:
        """An update came between the reply and the reading."""
        story = updated(
            script_rollout(
                OLD,
                ScriptedCall(tokens=(14,), reason="stop"),
                versions="sample",
                sample={"version": 1},
            )
        )
        finding = finds(self.ID, story)
        assert (
            "The sample is tagged with version 1, which sampled none of its 4 tokens"
            == finding.title
        )
        assert "a version that sampled it: version 0 for tokens 0-3" == finding.expected
        assert "AReaL #1569" in finding.hint
        assert {"request": "r0", "version": 1} == finding.where
        assert {self.ID} == blamed(story)

    def test_a_tag_of_the_time_of_scheduling_is_found(self) -> None:
        """It was current before the first token."""
        story = script_rollout(NEW, versions="sample", sample={"version": 0}, script=warm("sample"))
        assert "a tag from the time of scheduling bounds staleness" in finds(self.ID, story).hint

    def test_a_tag_of_a_call_without_tokens_is_found(self) -> None:
        """The last call sampled nothing."""
        story = script_rollout(
            OLD, ScriptedCall(version=1, reason="stop"), versions="sample", sample={"version": 1}
        )
        assert "a call without tokens must not set the tag" in finds(self.ID, story).hint


class TestMinMax:
    """``versions.min-max``."""

    ID = "versions.min-max"

    @pytest.mark.parametrize("bounds", [(None, 1), (0, None), (0, 7), (7, 1)])
    def test_bounds_that_nobody_published_are_not_compared(
        self, bounds: tuple[int | None, int | None]
    ) -> None:
        """Both must be there, and each a label: other checks report what is missing."""
        sample = {"min_version": bounds[0], "max_version": bounds[1]}
        unknown(
            self.ID,
            script_rollout(OLD, NEW, versions="min-max", sample=sample),
            "the samples carry no published min and max version",
        )

    @pytest.mark.parametrize(
        ("parts", "low", "high", "title", "hint"),
        [
            (
                (OLD, NEW),
                1,
                1,
                "The min version of the sample is not that of its tokens",
                "Or version 0 was skipped",
            ),
            (
                (OLD, NEW),
                0,
                0,
                "The max version of the sample is not that of its tokens",
                "The tag of one call is used for all",
            ),
            (
                (OLD, NEW),
                1,
                0,
                "The min and max version of the sample are not that of its tokens",
                "Or version 0 was skipped",
            ),
            (
                (ScriptedCall(), NEW),
                0,
                1,
                "The min version of the sample is not that of its tokens",
                "No token was sampled by version 0; call 1 was aborted before its first one",
            ),
            (
                (OLD, ScriptedCall(version=1, reason="stop")),
                0,
                1,
                "The max version",
                "No token was sampled by version 1; call 2 was aborted before its first one",
            ),
            (
                (
                    ScriptedCall(tokens=(1,), version=2),
                    ScriptedCall(tokens=(2,), version=1, server="s1"),
                    ScriptedCall(tokens=(3,), version=3, reason="stop"),
                ),
                2,
                3,
                "The min version of the sample is not that of its tokens",
                "versions decrease when a replica lags behind",
            ),
        ],
    )
    def test_each_fault_is_explained(
        self, parts: tuple[ScriptedCall, ...], low: int, high: int, title: str, hint: str
    ) -> None:
        """Last only, first only, a falsy zero, a call without tokens, versions that go back."""
        story = script_rollout(
            *parts, versions="min-max", sample={"min_version": low, "max_version": high}
        )
        finding = finds(self.ID, story)
        assert finding.title.startswith(title)
        assert hint in finding.hint
        assert f"min {low}, max {high}" == finding.observed
        assert {self.ID} == blamed(story)

    def test_the_expected_text_says_who_sampled_what(self) -> None:
        """The right tags, and why."""
        story = script_rollout(
            OLD, NEW, versions="min-max", sample={"min_version": 1, "max_version": 1}
        )
        assert (
            "min 0, max 1: version 0 for tokens 0-2, version 1 for tokens 3-4"
            == finds(self.ID, story).expected
        )

    def test_numbers_are_not_compared_as_text(self) -> None:
        """10 is greater than 9."""
        parts = (
            ScriptedCall(tokens=(11,), version=9),
            ScriptedCall(tokens=(12,), version=10, reason="stop"),
        )
        assert set() == blamed(script_rollout(*parts, versions="min-max"))
        wrong = script_rollout(
            *parts, versions="min-max", sample={"min_version": 10, "max_version": 9}
        )
        assert (
            "The min and max version of the sample are not that of its tokens"
            == finds(self.ID, wrong).title
        )

    def test_names_are_ordered_by_publication(self) -> None:
        """Text has no order of its own."""
        named = {0: "zebra", 1: "ape"}
        right = {"min_version": "zebra", "max_version": "ape"}
        passes(
            self.ID,
            script_rollout(OLD, NEW, versions="min-max", labels=named, sample=right),
            samples_across_versions=1,
        )
        wrong = {"min_version": "ape", "max_version": "zebra"}
        finds(self.ID, script_rollout(OLD, NEW, versions="min-max", labels=named, sample=wrong))

    @pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (1, 1), (7, 7)])
    def test_two_labels_of_equal_weights_leave_a_choice(self, low: int, high: int) -> None:
        """Weights 0 were published as 0 and again as 7; weights 1 as 1: either name is right for
        the old tokens.
        """
        story = script_rollout(
            ScriptedCall(tokens=(11,)),
            NEW,
            versions="min-max",
            sample={"min_version": low, "max_version": high},
        ).trace()
        events = list(story.events)
        events.insert(-1, Weights(server_id="s0", version=0, label=7, loaded=False))
        expected = Verdict.FAIL if (low, high) == (7, 7) else Verdict.PASS
        assert expected == check(self.ID, story.with_events(events)).verdict

    def test_an_unknown_token_leaves_the_extremes_open(self) -> None:
        """Its version may be the smallest."""
        parts = (OLD, ScriptedCall(tokens=(21,), version=1, shown=None, reason="stop"))
        story = script_rollout(
            *parts, versions="min-max", sample={"min_version": 0, "max_version": 0}
        )
        unknown(self.ID, story, "the versions of some tokens are not known")


class TestCallTags:
    """``versions.call-tags``."""

    ID = "versions.call-tags"
    PARTS = (OLD, ScriptedCall(version=1), NEW)

    @pytest.mark.parametrize(
        ("tags", "title", "call"),
        [
            ((1, 1), "Call 1 is tagged with version 1, which sampled none of its tokens", 1),
            ((0, 0), "Call 3 is tagged with version 0, which sampled none of its tokens", 3),
            ((0,), "The sample has 1 call version for 2 calls that returned tokens", None),
            ((0, 1, 1, 1), "The sample has 4 call versions for 2 calls that returned tokens", None),
            ((0, 1, 0), "Call 3 is tagged with version 0, which sampled none of its tokens", 3),
        ],
    )
    def test_each_fault_is_named(
        self, tags: tuple[Version, ...], title: str, call: int | None
    ) -> None:
        """A wrong tag, one too few, one too many."""
        story = script_rollout(*self.PARTS, versions="call", sample={"call_versions": tags})
        finding = finds(self.ID, story)
        assert (title, call) == (finding.title, finding.where.get("call"))
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize("tags", [(0, 1), (0, 1, 1)])
    def test_a_call_without_tokens_may_be_tagged_or_not(self, tags: tuple[Version, ...]) -> None:
        """Some engines show no version for it."""
        passes(
            self.ID,
            script_rollout(*self.PARTS, versions="call", sample={"call_versions": tags}),
            tags_of_calls=2,
            samples_across_versions=1,
        )

    def test_a_call_that_was_given_up_may_be_tagged_or_not(self) -> None:
        """The list may or may not be cut when the stack starts again."""
        parts = (
            OLD,
            ScriptedCall(version=1, lost=True),
            ScriptedCall(tokens=(21,), version=1, restart=True, reason="stop"),
        )
        for tags in ((1,), (0, 1)):
            passes(self.ID, script_rollout(*parts, versions="call", sample={"call_versions": tags}))


def test_only_the_declared_tag_is_judged() -> None:
    """A contract names the finest tag; the checks of the others do not apply."""
    names = {
        "sample": "sample-tag",
        "min-max": "min-max",
        "call": "call-tags",
        "span": "span-tags",
        "token": "token-tags",
    }
    for kind in KINDS:
        for other, name in names.items():
            expected = other != kind
            assert expected == (
                check(f"versions.{name}", script_rollout(OLD, NEW, versions=kind)).verdict
                is Verdict.NOT_APPLICABLE
            )
    assert (
        Verdict.NOT_APPLICABLE
        == check("versions.present", script_rollout(OLD, NEW, versions="none")).verdict
    )
