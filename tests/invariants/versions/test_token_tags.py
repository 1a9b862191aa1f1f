"""Version checks on spans and per-token tags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.events.rollout import Call, Weights
from rollproof.core.records import Span, Version
from rollproof.core.trace import Trace
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import check, finds, passes, unknown

OLD, NEW = (
    ScriptedCall(tokens=(11, 12, 13)),
    ScriptedCall(tokens=(21, 22), version=1, reason="stop"),
)


def spans(*parts: tuple[int, int, Version]) -> dict[str, tuple[Span, ...]]:
    """The ``spans`` field of a sample."""
    return {
        "spans": tuple(Span(start=start, end=end, version=version) for start, end, version in parts)
    }


def labelled_after(trace: Trace, *, at_once: bool = True) -> Trace:
    """The same with weights 1 loaded under the label of the old ones, and labelled by an event of
    its own: at once, or at the end.
    """
    events = list(trace.events)
    at = next(
        i for i, event in enumerate(events) if isinstance(event, Weights) and event.version == 1
    )
    published = events[at]
    assert isinstance(published, Weights)
    events[at] = replace(published, label=0)
    events.insert(at + 1 if at_once else len(events) - 1, replace(published, loaded=False))
    return trace.with_events(events)


class TestSpansCover:
    """``versions.spans-cover``."""

    ID = "versions.spans-cover"

    @pytest.mark.parametrize(
        ("parts", "title", "index"),
        [
            (((0, 2, 0), (3, 5, 1)), "1 of 5 sampled tokens lies in no span: 2", 2),
            (((0, 3, 0),), "2 of 5 sampled tokens lie in no span: 3-4", 3),
            (((1, 3, 0), (3, 5, 1)), "1 of 5 sampled tokens lies in no span: 0", 0),
            (
                ((0, 3, 0), (2, 5, 1)),
                "Span 1 begins at 2, before the one before it has ended at 3",
                2,
            ),
            (
                ((3, 5, 1), (0, 3, 0)),
                "Span 1 begins at 0, before the one before it has ended at 5",
                0,
            ),
            (
                ((0, 3, 0), (0, 2, 1)),
                "Span 1 begins at 0, before the one before it has ended at 3",
                0,
            ),
            (((0, 3, 0), (3, 6, 1)), "Span 1 (3 to 6) does not lie in the response of 5 tokens", 3),
            (
                ((-1, 3, 0), (3, 5, 1)),
                "Span 0 (-1 to 3) does not lie in the response of 5 tokens",
                0,
            ),
            (((3, 0, 0), (3, 5, 1)), "Span 0 (3 to 0) does not lie in the response of 5 tokens", 3),
        ],
    )
    def test_each_fault_is_named(
        self, parts: tuple[tuple[int, int, int], ...], title: str, index: int
    ) -> None:
        """Gap, end, start, overlap, order, not moved by what came before, out of bounds,
        backwards.
        """
        story = script_rollout(OLD, NEW, versions="span", sample=spans(*parts))
        finding = finds(self.ID, story)
        assert (title, index) == (finding.title, finding.where["index"])
        assert {self.ID} == blamed(story)

    def test_samples_without_spans_or_without_tokens_are_not_judged(self) -> None:
        """versions.present reports missing spans; where nothing was sampled none are needed."""
        unknown(self.ID, script_rollout(OLD, NEW, versions="span", sample=spans()), "exercised")
        nothing = script_rollout(
            ScriptedCall(reason="stop"), versions="span", sample=spans((0, 0, 0))
        )
        unknown(self.ID, nothing, "exercised")

    @pytest.mark.parametrize(("count", "more"), [(8, ""), (9, ", ...")])
    def test_eight_spans_are_shown(self, count: int, more: str) -> None:
        """And no more than that."""
        one = ScriptedCall(tokens=tuple(range(11, 21)), reason="stop")
        parts = [(i, i + 1, 0) for i in range(count)]
        story = script_rollout(one, budget=10, versions="span", sample=spans(*parts))
        shown = ", ".join(f"{i}-{i + 1}: version 0" for i in range(8))
        finding = finds(self.ID, story)
        assert shown + more == finding.observed
        assert "spans in order, from 0 to 10, without gap or overlap" == finding.expected

    @pytest.mark.parametrize(
        "parts",
        [
            ((0, 3, 0), (3, 5, 1)),
            ((0, 1, 0), (1, 3, 0), (3, 5, 1)),
            ((0, 3, 0), (3, 3, 7), (3, 5, 1)),
        ],
        ids=["plain", "two spans of one version", "an empty span"],
    )
    def test_correct_spans_pass(self, parts: tuple[tuple[int, int, int], ...]) -> None:
        """An empty span, of a call without tokens, is harmless."""
        passes(self.ID, script_rollout(OLD, NEW, versions="span", sample=spans(*parts)))
        assert set() == blamed(script_rollout(OLD, NEW, versions="span", sample=spans(*parts)))

    def test_the_environment_needs_no_span(self) -> None:
        """Its tokens may be covered or not."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(21,), version=1, reason="stop"),
        )
        for own in (
            ((0, 1, 0), (3, 4, 1)),
            ((0, 3, 0), (3, 4, 1)),
            ((0, 1, 0), (1, 3, None), (3, 4, 1)),
        ):
            assert set() == blamed(script_rollout(*parts, versions="span", sample=spans(*own)))


class TestSpanTags:
    """``versions.span-tags``."""

    ID = "versions.span-tags"

    def test_a_border_one_token_late_is_found(self) -> None:
        """The first token of the new weights carries the old version."""
        story = script_rollout(OLD, NEW, versions="span", sample=spans((0, 4, 0), (4, 5, 1)))
        finding = finds(self.ID, story)
        assert "1 of 5 sampled tokens carries a version that did not sample it" == finding.title
        assert "version 0 for tokens 0-2, version 1 for tokens 3-4" == finding.expected
        assert "version 0 at response index 3" == finding.observed
        assert {"request": "r0", "index": 3, "segment": 1, "version": 0} == finding.where
        assert "An older tag was kept" in finding.hint
        assert {self.ID} == blamed(story)

    def test_tokens_are_counted(self) -> None:
        """What was compared."""
        passes(
            self.ID,
            script_rollout(OLD, NEW, versions="span"),
            tokens_in_spans=5,
            samples_across_versions=1,
        )


class TestOneTagPerToken:
    """``versions.one-tag-per-token``."""

    ID = "versions.one-tag-per-token"

    def test_no_tags_are_called_none(self) -> None:
        """Not "0:" and nothing."""
        story = script_rollout(
            ScriptedCall(tokens=(11, 12), reason="stop"),
            versions="token",
            sample={"token_versions": ()},
        )
        assert "none" == finds(self.ID, story).observed

    def test_a_missing_tag_is_found(self) -> None:
        """The environment's tokens have none."""
        parts = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(observed=(91,), tokens=(21,), reason="stop"),
        )
        story = script_rollout(*parts, versions="token", sample={"token_versions": (0, 0)})
        finding = finds(self.ID, story)
        assert "The sample has 2 version tags for 3 tokens" == finding.title
        assert ("one version per response token: 3", "2: 0 and 0") == (
            finding.expected,
            finding.observed,
        )
        assert "fewer tags than tokens" == finding.kind
        assert {self.ID} == blamed(story)

    def test_a_tag_too_many_is_found(self) -> None:
        """Wrong ones as well are not compared: which token each belongs to is not known."""
        story = script_rollout(OLD, NEW, versions="token", sample={"token_versions": (1,) * 6})
        finding = finds(self.ID, story)
        assert "The sample has 6 version tags for 5 tokens" == finding.title
        assert "more tags than tokens" == finding.kind
        assert {self.ID} == blamed(story)

    def test_tags_of_the_sampled_tokens_fit_a_wrong_response(self) -> None:
        """The response lost a token, for which stitch.tokens is there; the tags did not."""
        for tags, found in (((0,) * 3, 0), ((0,) * 2, 0), ((0,), 1), ((0,) * 4, 1)):
            story = script_rollout(
                ScriptedCall(tokens=(11, 12, 13), reason="stop"),
                versions="token",
                sample={"response": (11, 13), "logprobs": None, "token_versions": tags},
            )
            assert found == check(self.ID, story).found


class TestTokenTags:
    """``versions.token-tags``."""

    ID = "versions.token-tags"

    def test_tags_of_later_weights_are_found(self) -> None:
        """All tokens carry the version at the end."""
        story = script_rollout(OLD, NEW, versions="token", sample={"token_versions": (1,) * 5})
        finding = finds(self.ID, story)
        assert "3 of 5 sampled tokens carry a version that did not sample them" == finding.title
        assert "version 1 at response index 0-2" == finding.observed
        assert "tagged with a later version" == finding.kind
        assert {"request": "r0", "index": 0, "segment": 0, "version": 1} == finding.where
        assert "AReaL #1569" in finding.hint
        assert {self.ID} == blamed(story)

    def test_the_first_wrong_tag_is_compared_with_its_own_sampler(self) -> None:
        """The tag is later than the version before it and earlier than the one that sampled the
        token.
        """
        later = ScriptedCall(tokens=(21, 22), version=2, reason="stop")
        story = script_rollout(
            OLD,
            ScriptedCall(version=1),
            later,
            versions="token",
            sample={"token_versions": (0, 0, 0, 1, 0)},
        )
        finding = finds(self.ID, story)
        assert "version 1 and 0 at response index 3-4" == finding.observed
        assert "tagged with an earlier version, or none of the engine's" == finding.kind
        assert (3, 1) == (finding.where["index"], finding.where["version"])

    def test_tags_shifted_by_one_are_found(self) -> None:
        """One token of the new weights too many."""
        finding = finds(
            self.ID,
            script_rollout(OLD, NEW, versions="token", sample={"token_versions": (0, 0, 0, 0, 1)}),
        )
        assert ("version 0 at response index 3", 3) == (finding.observed, finding.where["index"])

    def test_tags_that_leave_out_the_environment_are_told_from_late_ones(self) -> None:
        """Every tag is right, and stands as many tokens too early as the environment said."""
        turns = (
            ScriptedCall(tokens=(11,), reason="stop"),
            ScriptedCall(tokens=(12, 13), observed=(91, 92)),
            ScriptedCall(tokens=(14,), version=1, reason="stop"),
        )
        for tags, hint in (
            ((0, 0, 0, 1, None, None), "The tags are right, and not at their tokens"),
            ((0, None, None, 1, 1, 1), "The tag was published after the token was sampled"),
        ):
            story = script_rollout(*turns, versions="token", sample={"token_versions": tags})
            assert finds(self.ID, story).hint.startswith(hint)

    def test_a_label_that_the_server_still_showed_is_none_of_the_new_weights(self) -> None:
        """An update of vLLM names no version: the server shows the old label for the new weights
        until theirs is published.
        """
        label = labelled_after(
            script_rollout(OLD, NEW, versions="token", sample={"token_versions": (0,) * 5}).trace()
        )
        finding = finds(self.ID, label)
        assert "version 0 for tokens 0-2, version 1 for tokens 3-4" == finding.expected
        assert "version 0 at response index 3-4" == finding.observed
        assert set() == blamed(labelled_after(script_rollout(OLD, NEW, versions="token").trace()))

    def test_tokens_sampled_before_their_weights_had_a_label_may_carry_what_the_engine_showed(
        self,
    ) -> None:
        """Between the load and the label the stack cannot know better; once there is a label, it is
        right as well.
        """
        early = ScriptedCall(tokens=(21, 22), version=1, shown=0, reason="stop")
        for tags in ((0,) * 5, (0, 0, 0, 1, 1)):
            story = script_rollout(
                OLD, early, versions="token", sample={"token_versions": tags}
            ).trace()
            assert set() == blamed(labelled_after(story, at_once=False))

    def test_a_call_made_before_its_weights_had_a_label_may_carry_the_label_of_then(self) -> None:
        """A stack that read it when the call was sent could not know better, though the reply shows
        the label that came meanwhile.
        """
        trace = labelled_after(
            script_rollout(OLD, NEW, versions="token", sample={"token_versions": (0,) * 5}).trace(),
            at_once=False,
        )
        events = list(trace.events)
        label, call = (
            max(i for i, event in enumerate(events) if isinstance(event, kind))
            for kind in (Weights, Call)
        )
        events.insert(call + 1, events.pop(label))
        assert set() == blamed(trace.with_events(events))

    def test_weights_that_never_get_a_label_keep_the_one_that_is_shown(self) -> None:
        """A stack that leaves the labels alone."""
        story = script_rollout(
            OLD, NEW, versions="token", labels={1: 0}, sample={"token_versions": (0,) * 5}
        )
        assert set() == blamed(story)

    def test_absent_tags_are_not_wrong_ones(self) -> None:
        """A token of unknown version may say so."""
        assert set() == blamed(
            script_rollout(
                OLD, NEW, versions="token", sample={"token_versions": (0, None, 0, 1, 1)}
            )
        )

    def test_without_truth_the_engines_spans_are_believed(self) -> None:
        """A real engine that shows a version per token."""
        own = (Span(start=0, end=2, version=0), Span(start=2, end=4, version=1))
        part = ScriptedCall(
            tokens=(11, 12, 13, 14),
            reason="stop",
            output={"spans": own},
            reply={"true_tokens": None},
        )
        published = script_rollout(
            ScriptedCall(version=1, reason="stop"), request_id="warm", prompt=(9,), versions="token"
        )
        published = script_rollout(
            ScriptedCall(reason="stop"),
            request_id="warmer",
            prompt=(8,),
            versions="token",
            script=published,
        )
        story = script_rollout(
            part, versions="token", sample={"token_versions": (0, 0, 1, 0)}, script=published
        )
        assert "version 0 at response index 3" == finds(self.ID, story).observed

    @pytest.mark.parametrize("overtaken", [False, True])
    def test_without_truth_one_label_is_believed_unless_overtaken(self, overtaken: bool) -> None:
        """A label says who sampled when the server's weights did not change during the call."""
        story = script_rollout(
            ScriptedCall(reason="stop"), request_id="warm", prompt=(9,), versions="token"
        )
        story = script_rollout(
            ScriptedCall(version=1, reason="stop"),
            request_id="warmer",
            prompt=(8,),
            versions="token",
            script=story,
        )
        story.submit()
        call = story.call((1, 2))
        if overtaken:
            story.weights(2)
        story.reply(call, (11,), "stop", version=1, true_tokens=None).result(
            (11,), token_versions=(0,)
        )
        if overtaken:
            unknown(self.ID, story, "which version sampled the tokens is not known")
        else:
            finds(self.ID, story)
