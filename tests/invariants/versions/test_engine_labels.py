"""Version checks on what engines show, and on weights without a label."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from rollproof.core.events.rollout import Weights
from rollproof.core.records import Span
from rollproof.core.trace import Trace
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_builder import contract
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

KINDS = ("sample", "min-max", "call", "span", "token")
OLD = ScriptedCall(tokens=(11, 12, 13))


class TestEngineTags:
    """``versions.engine-tags``."""

    ID = "versions.engine-tags"

    def _overtaken(
        self,
        shown: int,
        true: tuple[tuple[int, int, int], ...] = ((0, 4, 0),),
        header: Any = None,
        **output: Any,
    ) -> TraceScript:
        """Weights 1 are loaded while the call runs."""
        story = TraceScript(versions="none", header=header)
        story.weights(0).submit(max_tokens=4)
        call = story.call((1, 2))
        story.weights(1)
        spans = tuple(Span(start=start, end=end, version=version) for start, end, version in true)
        return story.reply(
            call, (11, 12, 13, 14), version=shown, true_tokens=spans, output=output
        ).result((11, 12, 13, 14))  # type: ignore[return-value]

    def test_a_label_that_sampled_nothing_is_found(self) -> None:
        """Read when the reply was made, after an update."""
        story = self._overtaken(1)
        finding = finds(self.ID, story)
        assert "The engine shows version 1 for 4 tokens that it did not sample" == finding.title
        assert "version 0 for tokens 0-3" == finding.expected
        assert "version 1 for tokens 0-3, in the reply to call 1" == finding.observed
        assert {
            "request": "r0",
            "call": 1,
            "server": "s0",
            "index": 0,
            "version": 1,
        } == finding.where

    @pytest.mark.parametrize("shown", [0, 1])
    def test_either_label_of_a_mixed_call_is_right(self, shown: int) -> None:
        """One label cannot say more."""
        passes(self.ID, self._overtaken(shown, ((0, 2, 0), (2, 4, 1))), replies_across_versions=1)

    def test_spans_are_held_to_every_token(self) -> None:
        """A border one token late."""
        spans = (Span(start=0, end=3, version=0), Span(start=3, end=4, version=1))
        finding = finds(self.ID, self._overtaken(1, ((0, 2, 0), (2, 4, 1)), spans=spans))
        assert "The engine shows version 0 for 1 token that it did not sample" == finding.title
        assert 2 == finding.where["index"]

    def test_the_first_of_two_wrong_spans_is_named(self) -> None:
        """Both are exchanged."""
        spans = (Span(start=0, end=2, version=1), Span(start=2, end=4, version=0))
        finding = finds(self.ID, self._overtaken(1, ((0, 2, 0), (2, 4, 1)), spans=spans))
        assert "The engine shows version 1 for 4 tokens that it did not sample" == finding.title
        assert (0, 1) == (finding.where["index"], finding.where["version"])

    @pytest.mark.parametrize("read", ["emission", "admission"])
    def test_an_engine_that_declares_its_reading_is_not_held_to_more(self, read: str) -> None:
        """Which moment a single label speaks of is a convention; a label that was never served is a
        fault under each.
        """
        engine = {"engine": contract(rows="none", versions="sample", tag_read=read)}
        passes(self.ID, self._overtaken(1, header=engine), replies_under_one_version=1)
        finds(self.ID, self._overtaken(5, header=engine))

    @pytest.mark.parametrize(
        ("shown", "excused"), [(0, True), (1, True), (2, True), (8, False), (9, False)]
    )
    def test_a_declared_reading_lies_between_admission_and_reply(
        self, shown: int, excused: bool
    ) -> None:
        """Labels that were replaced before the admission, or come after the reply, do not count."""
        engine = contract(versions="sample", rows="none", tag_read="emission")
        story = TraceScript(versions="none", header={"engine": engine})
        story.weights(8).weights(0).submit(max_tokens=4)
        call = story.call((1, 2))
        story.weights(1).weights(2)
        spans = (Span(start=0, end=2, version=0), Span(start=2, end=4, version=2))
        story.reply(call, (11, 12, 13, 14), version=shown, true_tokens=spans)
        story.result((11, 12, 13, 14)).weights(9)
        assert (0 if excused else 1) == check(self.ID, story).found

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_stack_is_not_blamed_for_its_engine(self, kind: str) -> None:
        """It relays what it was shown; only the engine is named."""
        part = ScriptedCall(tokens=(11, 12), shown=1, reason="stop")
        sample = {
            "version": 1,
            "min_version": 1,
            "max_version": 1,
            "call_versions": (1,),
            "spans": (Span(start=0, end=2, version=1),),
            "token_versions": (1, 1),
        }
        story = script_rollout(
            part,
            versions=kind,
            sample=sample,
            script=script_rollout(
                ScriptedCall(version=1, reason="stop"), request_id="w", prompt=(9,), versions=kind
            ),
        )
        assert {self.ID} == blamed(story)

    def test_it_is_judged_whatever_became_of_the_sample(self) -> None:
        """A dropped sample's replies were shown too."""
        story = TraceScript(versions="none")
        story.weights(0).submit()
        call = story.call((1, 2))
        story.weights(1).reply(
            call, (11,), "abort", version=1, true_tokens=(Span(start=0, end=1, version=0),)
        ).result()
        finds(self.ID, story)

    @pytest.mark.parametrize("check_id", [ID, "versions.unknown-stays-unknown"])
    def test_engines_that_declare_no_labels_are_exempt(self, check_id: str) -> None:
        """By their own contract they show none; if one does nevertheless, it is not judged."""
        mute = {"engine": contract(rows="none", versions="none")}
        story = script_rollout(
            ScriptedCall(tokens=(11,), shown=None, reason="stop"), versions="token", header=mute
        )
        inapplicable(check_id, story, "the engines show no version")

    def test_engines_without_labels_or_truth_are_not_judged(self) -> None:
        """Nothing was shown, or nothing is known."""
        unknown(
            self.ID,
            script_rollout(ScriptedCall(tokens=(11,), shown=None, reason="stop"), versions="none"),
            "not exercised",
        )
        unknown(
            self.ID,
            script_rollout(
                ScriptedCall(tokens=(11,), reply={"true_tokens": None}, reason="stop"),
                versions="none",
            ),
            "not exercised",
        )

    @pytest.mark.parametrize(
        ("shown", "own", "excused"),
        [(1, True, True), (7, True, False), (9, True, False), (0, False, False), (7, False, False)],
    )
    def test_only_labels_of_the_calls_own_server_until_its_reply_are_read(
        self, shown: int, own: bool, excused: bool
    ) -> None:
        """Another server got 7, and this one 9 behind the reply; or this one got none at all."""
        engine = contract(versions="sample", rows="none", tag_read="emission")
        story = TraceScript(versions="none", header={"engine": engine})
        story.weights(3, "s1").weights(0, "s1")
        if own:
            story.weights(3).weights(0)
        story.submit(max_tokens=4)
        call = story.call((1, 2))
        if own:
            story.weights(1)
        story.weights(7, "s1")
        spans = (Span(start=0, end=4, version=3),)
        story.reply(call, (11, 12, 13, 14), version=shown, true_tokens=spans)
        if own:
            story.weights(9)
        story.result((11, 12, 13, 14))
        assert (0 if excused else 1) == check(self.ID, story).found

    @pytest.mark.parametrize(
        ("wrong", "first", "tokens"), [((5, 1, 6), 0, 3), ((0, 5, 6), 1, 2), ((0, 1, 6), 2, 1)]
    )
    def test_the_first_of_several_wrong_spans_is_named(
        self, wrong: tuple[int, int, int], first: int, tokens: int
    ) -> None:
        """And the tokens of all are counted."""
        spans = tuple(Span(start=i, end=i + 1, version=label) for i, label in enumerate(wrong))
        story = TraceScript(versions="none").weights(0).submit(max_tokens=3)
        call = story.call((1, 2))
        story.weights(1).weights(2)
        true = tuple(Span(start=i, end=i + 1, version=i) for i in range(3))
        story.reply(call, (11, 12, 13), version=2, true_tokens=true, output={"spans": spans})
        finding = finds(self.ID, story.result((11, 12, 13)))
        if wrong == (5, 1, 6):
            tokens = 2
        plural = "s" * (tokens > 1)
        assert (
            f"The engine shows version {wrong[first]} for {tokens} token{plural} that it did not"
            " sample"
        ) == finding.title
        assert (first, wrong[first]) == (finding.where["index"], finding.where["version"])


def unlabelled(
    kind: str, shown: Any, sample: dict[str, Any] | None = None, mixed: bool = False
) -> Trace:
    """Weights 1 are loaded without a label; tokens that they sampled are shown as ``shown``."""
    first = (OLD,) if mixed else (ScriptedCall(),)
    story = script_rollout(
        *first,
        ScriptedCall(tokens=(21, 22), version=1, shown=shown, reason="stop"),
        versions=kind,
        labels={1: None},
        sample=sample,
    )
    return story.trace()


class TestUnlabelledUpdate:
    """``versions.unlabelled-update``."""

    ID = "versions.unlabelled-update"
    TAGS: ClassVar[dict[str, Any]] = {
        "version": 0,
        "min_version": 0,
        "max_version": 0,
        "call_versions": (0,),
        "spans": (Span(start=0, end=2, version=0),),
        "token_versions": (0, 0),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_old_label_on_new_weights_is_found_once(self, kind: str) -> None:
        """The engine keeps its label, the stack relays it: one finding, one check."""
        trace = unlabelled(kind, 0, self.TAGS)
        finding = finds(self.ID, trace)
        assert (
            "2 tokens of weights that were loaded without a label are tagged version 0"
            == finding.title
        )
        assert finding.observed.startswith(
            "version 0 shown by the engine, which names other weights, at response index 0-1"
        )
        assert "update_weights() without global_steps" in finding.hint
        assert {self.ID} == blamed(trace)

    def test_an_honest_engine_says_that_it_does_not_know(self) -> None:
        """No label, no tag, no finding: that is the promise kept, and counts as exercise."""
        trace = unlabelled("token", None, {"token_versions": (0, 0, 0, None, None)}, mixed=True)
        assert set() == blamed(trace)
        passes(self.ID, trace, tokens_of_unlabelled_weights=2)

    def test_a_guess_of_the_stack_is_no_exercise(self) -> None:
        """Where the engine honestly shows nothing, the stack's own label is
        unknown-stays-unknown's: this check does not pass for it.
        """
        trace = unlabelled("token", None, {"token_versions": (0, 0, 0, 0, 0)}, mixed=True)
        assert {TestUnknownStaysUnknown.ID} == blamed(trace)
        unknown(self.ID, trace, "not exercised")

    def test_a_stack_that_keeps_its_own_books_is_found(self) -> None:
        """The engines show nothing at all, and the stack's counter was not raised."""
        parts = (
            ScriptedCall(tokens=(11,), shown=None),
            ScriptedCall(tokens=(21,), version=1, shown=None, reason="stop"),
        )
        story = script_rollout(
            *parts, versions="token", labels={1: None}, sample={"token_versions": (0, 0)}
        )
        finding = finds(self.ID, story)
        assert (
            "1 token of weights that were loaded without a label is tagged version 0"
            == finding.title
        )
        assert (
            "version 0 in the sample, which names other weights, at response index 1"
            == finding.observed
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_label_that_comes_later_is_right(self, kind: str) -> None:
        """The weights were published after they had been loaded."""
        trace = script_rollout(
            ScriptedCall(),
            ScriptedCall(tokens=(21,), version=1, shown=None, reason="stop"),
            versions=kind,
            labels={1: None},
        ).trace()
        events = list(trace.events)
        events.insert(-1, Weights(server_id="s0", version=1, label=5, loaded=False))
        assert set() == blamed(trace.with_events(events))

    def test_without_such_an_update_nothing_is_put_to_the_test(self) -> None:
        """Every version had its label."""
        unknown(
            self.ID, script_rollout(OLD, abort_surfaces=True, versions="token"), "not exercised"
        )


class TestUnknownStaysUnknown:
    """``versions.unknown-stays-unknown``."""

    ID = "versions.unknown-stays-unknown"
    PARTS = (
        ScriptedCall(tokens=(11, 12)),
        ScriptedCall(tokens=(21,), version=1, shown=None),
        ScriptedCall(tokens=(31,), version=2, reason="stop"),
    )

    @pytest.mark.parametrize("guess", [0, 2])
    @pytest.mark.parametrize("kind", ["token", "span"])
    def test_a_guess_is_found(self, kind: str, guess: int) -> None:
        """Zero, or the newest, in place of what the engine did not say."""
        tags = (0, 0, guess, 2)
        spans = tuple(Span(start=i, end=i + 1, version=tag) for i, tag in enumerate(tags))
        story = script_rollout(
            *self.PARTS, versions=kind, sample={"token_versions": tags, "spans": spans}
        )
        finding = finds(self.ID, story)
        assert (
            f"1 of 4 tokens is tagged version {guess}, although the engine showed no version for it"
            == finding.title
        )
        assert "no version, or the true one: version 1 for token 2" == finding.expected
        assert (2, 2, guess) == (
            finding.where["index"],
            finding.where["call"],
            finding.where["version"],
        )
        assert {self.ID} == blamed(story)

    @pytest.mark.parametrize("guesses", [(2, 0), (0, 2), (1, 0), (0, 3)])
    def test_the_first_of_two_guesses_is_named(self, guesses: tuple[int, int]) -> None:
        """All of them are counted and listed."""
        parts = (
            ScriptedCall(tokens=(11,)),
            ScriptedCall(tokens=(21,), version=1, shown=None),
            ScriptedCall(tokens=(31,), version=2),
            ScriptedCall(tokens=(41, 42), version=3, shown=None, reason="stop"),
        )
        tags = (0, guesses[0], 2, guesses[1], guesses[1])
        story = script_rollout(*parts, versions="token", sample={"token_versions": tags})
        wrong = [
            (index, tag, size)
            for index, tag, size, true in ((1, guesses[0], 1, 1), (3, guesses[1], 2, 3))
            if tag != true
        ]
        finding = finds(self.ID, story)
        tokens = sum(size for _, _, size in wrong)
        it = "it" if tokens == 1 else "them"
        assert (
            f"{tokens} of 5 tokens {'is' if tokens == 1 else 'are'} tagged version {wrong[0][1]},"
            f" although the engine showed no version for {it}"
        ) == finding.title
        assert wrong[0][:2] == (finding.where["index"], finding.where["version"])
        assert "version " + " and ".join(str(tag) for _, tag, _ in wrong) == finding.observed

    def test_a_token_between_two_spans_has_no_tag(self) -> None:
        """The spans before and after it end and begin there, and say nothing of it."""
        spans = (Span(start=0, end=2, version=0), Span(start=3, end=4, version=2))
        story = script_rollout(*self.PARTS, versions="span", sample={"spans": spans})
        passes(self.ID, story, tokens_without_a_shown_version=1)

    @pytest.mark.parametrize("tag", [None, 1])
    def test_unknown_and_true_are_right(self, tag: int | None) -> None:
        """A stack may know better than its engine says."""
        passes(
            self.ID,
            script_rollout(
                *self.PARTS, versions="token", sample={"token_versions": (0, 0, tag, 2)}
            ),
            tokens_without_a_shown_version=1,
        )

    @pytest.mark.parametrize("kind", ["sample", "min-max", "call"])
    def test_a_whole_sample_of_unknown_version(self, kind: str) -> None:
        """Weights that served before the first label was published."""
        part = ScriptedCall(tokens=(11,), shown=None, reason="stop")
        guess = {"version": 1, "min_version": 1, "max_version": 1, "call_versions": (1,)}
        shown = script_rollout(
            ScriptedCall(tokens=(5,), version=1, reason="stop"),
            request_id="w",
            prompt=(9,),
            versions=kind,
            header={"engine": _ENGINE},
        )
        story = script_rollout(part, versions=kind, labels={0: None}, sample=guess, script=shown)
        finding = finds(self.ID, story)
        assert (
            "1 of 1 token is tagged version 1, although the engine showed no version for it"
            == finding.title
        )
        assert (
            "no version, or the true one: weights without a label for token 0" == finding.expected
        )
        assert "update_weights() without global_steps" in finding.hint
        assert {self.ID} == blamed(story)

    def test_engines_that_show_nothing_leave_it_to_the_stack(self) -> None:
        """Then the checks of the tags themselves judge."""
        parts = (
            ScriptedCall(tokens=(11,), shown=None),
            ScriptedCall(tokens=(21,), version=1, shown=None, reason="stop"),
        )
        story = script_rollout(*parts, versions="token", sample={"token_versions": (1, 1)})
        assert {"versions.token-tags"} == blamed(story)
        assert not check(self.ID, story).exercised


_ENGINE = contract(rows="none", versions="sample")
