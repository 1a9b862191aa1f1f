"""Stitch checks on the environment's words in calls and sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollproof.judging.checks import Verdict
from tests.support.scripted_rollouts import ScriptedCall, blamed, script_rollout
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

ID = "stitch.environment-tokens"
WORDS = (91, 92, 93)


def said(
    words: tuple[int, ...],
    turns: tuple[tuple[int, ...], ...] = (WORDS,),
    *,
    request: dict[str, Any] | None = None,
    later: tuple[int, ...] = (13,),
    **more: Any,
) -> TraceScript:
    """Two turns of the model with ``words`` between them; the request declares ``turns``."""
    parts = (
        ScriptedCall(tokens=(11, 12), reason="stop"),
        ScriptedCall(observed=words, tokens=later, reason="stop"),
    )
    return script_rollout(
        *parts, **{"budget": 40, "request": {"turns": turns, **(request or {})}, **more}
    )


def held(response: tuple[int, ...], mask: tuple[int, ...] | None = None) -> TraceScript:
    """The same with another response."""
    sample: dict[str, Any] = {"response": response, "logprobs": np.zeros(len(response))}
    if mask is not None:
        sample["loss_mask"] = np.array(mask)
    return said(WORDS, sample=sample, loss_mask=mask is not None)


class TestCalls:
    """What the calls carry."""

    def test_the_answer_of_another_turn_is_named(self) -> None:
        """Answers that are counted by calls skip one after an abort."""
        finding = finds(ID, said((94, 95), (WORDS, (94, 95))))
        assert "Turn 0 of the environment is answered by that of turn 1" == finding.title
        assert finding.hint.startswith("The answers are counted by something else")

    def test_a_garbled_turn_is_found(self) -> None:
        """Tool output that was retokenised."""
        finding = finds(ID, said((91, 99, 93)))
        assert "Turn 0 of the environment was changed" == finding.title
        assert ("3 tokens: [91, 92, 93]", "3 tokens: [91, 99, 93]") == (
            finding.expected,
            finding.observed,
        )
        assert 2 == finding.where["index"]
        assert "retokenised" in finding.hint
        assert {ID} == blamed(said((91, 99, 93), loss_mask=True))

    def test_the_declared_words_pass(self) -> None:
        """Recorded or not, the words are what the request says."""
        passes(ID, said(WORDS), turns_of_the_environment=1)
        passes(ID, said(WORDS, recorded=False), turns_of_the_environment=1)

    def test_a_recorded_template_passes(self) -> None:
        """Role marks around a turn are the stack's to choose, if it records them."""
        passes(ID, said((7, *WORDS, 8)), turns_of_the_environment=1)

    def test_an_unrecorded_template_must_be_declared(self) -> None:
        """Tokens that only a call shows may be anything: they pass if declared, fail if ruled
        out, and are asked for otherwise.
        """
        around = (7, *WORDS, 8)
        unknown(ID, said(around, recorded=False, multi_turn=True), "declare answer_template=True")
        passes(
            ID,
            said(around, recorded=False, multi_turn=True, answer_template=True),
            turns_of_the_environment=1,
        )
        story = said(around, recorded=False, multi_turn=True, answer_template=False)
        finding = finds(ID, story)
        assert "Turn 0 of the environment has 2 tokens around its words" == finding.title

    @pytest.mark.parametrize("recorded", [True, False])
    @pytest.mark.parametrize(
        ("before", "count"),
        [((1, 2), 2), ((1, 2, 11, 12), 2), ((11, 12), 2)],
        ids=["prompt", "all", "own turn"],
    )
    def test_a_repeated_conversation_is_found(
        self, before: tuple[int, ...], count: int, recorded: bool
    ) -> None:
        """The conversation is appended to itself, whoever recorded it."""
        more = {} if recorded else {"multi_turn": True, "answer_template": True}
        finding = finds(ID, said((*before, *WORDS), recorded=recorded, **more))
        assert f"Turn 0 of the environment repeats {count} tokens said before" == finding.title
        assert "open-instruct #1233" in finding.hint

    @pytest.mark.parametrize("before", [(11, 12), (91, 92, 93), (13, 14), (12, 91)])
    def test_whatever_was_said_before_may_be_repeated(self, before: tuple[int, ...]) -> None:
        """A turn of the policy or of the environment, the first or a later one; not the end of one
        and the beginning of the next.
        """
        parts = (
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(observed=WORDS, tokens=(13, 14), reason="stop"),
            ScriptedCall(observed=(*before, 81, 82), tokens=(15,), reason="stop"),
        )
        story = script_rollout(*parts, budget=40, request={"turns": (WORDS, (81, 82))})
        if before == (12, 91):
            passes(ID, story, turns_of_the_environment=2)
            return
        title = f"Turn 1 of the environment repeats {len(before)} tokens said before"
        assert title == finds(ID, story).title

    def test_a_template_of_one_known_token_is_no_repetition(self) -> None:
        """A separator may be a token that occurred before."""
        passes(ID, said((12, *WORDS)), turns_of_the_environment=1)

    def test_a_prompt_of_one_token_is_not_repeated(self) -> None:
        """Its token may be the separator too."""
        passes(ID, said((1, *WORDS), prompt=(1,)), turns_of_the_environment=1)

    def test_what_was_said_after_an_answer_is_not_repeated_in_it(self) -> None:
        """A template may hold the tokens that the policy says next."""
        passes(ID, said((7, 13, 14, *WORDS), later=(13, 14)), turns_of_the_environment=1)
        parts = (
            ScriptedCall(tokens=(11, 12), reason="stop"),
            ScriptedCall(observed=(7, 13, 14, *WORDS), tokens=(13, 14), reason="stop"),
            ScriptedCall(observed=(81, 82), tokens=(15,), reason="stop"),
        )
        story = script_rollout(*parts, budget=40, request={"turns": (WORDS, (81, 82))})
        passes(ID, story, turns_of_the_environment=2)

    def test_a_limit_of_the_answers_own_length_cuts_nothing(self) -> None:
        """Between both ends nothing is left out, so that there is no place for a mark."""
        limits = {"answer": 3, "answer_keeps": "both"}
        marked = said((91, 7, 92, 93), multi_turn=True, limits=limits, recorded=False)
        assert 1 == check(ID, marked).found

    def test_a_declared_total_may_cut_an_answer(self) -> None:
        """Prompt and response together: two tokens of the prompt, two of the policy, two words."""
        for total, cut in ((7, True), (8, False)):
            story = said((91, 92), multi_turn=True, limits={"length": total})
            assert int(not cut) == check(ID, story).found

    def test_missing_words_are_found(self) -> None:
        """Tokens of both ends, which no limit cuts."""
        finding = finds(ID, said((92, 93), ((91, 92, 93, 94),)))
        assert "2 of 4 tokens of turn 0 of the environment are missing" == finding.title
        assert "separator" in finding.hint

    @pytest.mark.parametrize(
        ("words", "title"),
        [
            ((91, 92, 93, 95), "1 of 5 tokens of turn 0 of the environment is missing"),
            ((92, 93, 95), "2 of 5 tokens of turn 0 of the environment are missing"),
        ],
    )
    def test_how_many_words_are_missing(self, words: tuple[int, ...], title: str) -> None:
        """One is, two are."""
        assert title == finds(ID, said(words, ((91, 92, 93, 94, 95),))).title

    def test_a_limit_is_asked_for_where_one_may_be(self) -> None:
        """An answer that was cut at one side may have met a limit of the stack's own."""
        unknown(ID, said((91, 92), multi_turn=True), "declare it as limits={'answer': tokens")
        unknown(ID, said((92, 93), multi_turn=True), "declare it as limits={'answer': tokens")
        finds(ID, said((91, 92), multi_turn=True, limits={"response": 99}))

    def test_the_budget_may_cut_an_answer(self) -> None:
        """An answer that leaves no room for another token ends where the budget does."""
        passes(ID, said((91, 92), budget=5), turns_of_the_environment=1)

    @pytest.mark.parametrize(
        ("keeps", "words"), [("start", (91, 92)), ("end", (92, 93)), ("both", (91, 93))]
    )
    def test_a_declared_limit_cuts_on_its_side(self, keeps: str, words: tuple[int, ...]) -> None:
        """The declared part passes, and every other one is found."""
        limits = {"answer": 2, "answer_keeps": keeps}
        passes(
            ID,
            said(words, multi_turn=True, limits=limits),
            turns_of_the_environment=1,
            answers_cut_as_declared=1,
        )
        for other in {(91, 92), (92, 93), (91, 93)} - {words}:
            finding = finds(ID, said(other, multi_turn=True, limits=limits))
            assert "an answer was cut on the wrong side" == finding.kind
            assert f"answer_keeps='{keeps}'" in finding.hint
        for recorded in (True, False):
            whole = finds(ID, said(WORDS, recorded=recorded, multi_turn=True, limits=limits))
            assert "an answer is longer than the declared limit" == whole.kind

    def test_a_mark_between_two_ends_passes(self) -> None:
        """The mark between the two ends that verl keeps is "...(truncated)..."."""
        limits = {"answer": 2, "answer_keeps": "both"}
        passes(ID, said((91, 8, 8, 93), multi_turn=True, limits=limits), turns_of_the_environment=1)
        finds(ID, said((93, 8, 8, 91), multi_turn=True, limits=limits))

    def test_a_stack_without_turns_is_not_judged(self) -> None:
        """It declares none, and needs none; one that appends some nevertheless is judged by
        them.
        """
        inapplicable(
            ID,
            script_rollout(ScriptedCall(tokens=(11,), reason="stop")),
            "declares no turns of the environment (multi_turn)",
        )
        finds(ID, said((91, 99, 93)))


class TestSample:
    """What the sample holds of what the calls carried."""

    def test_a_separator_that_only_the_engine_got_is_found(self) -> None:
        """The next turn was sampled after a token that the trainer does not see."""
        finding = finds(ID, held((11, 12, 92, 93, 13)))
        assert "The sample lacks 1 of 3 tokens of turn 0 of the environment" == finding.title
        assert "the 3 tokens that the engine was sent: [91, 92, 93]" == finding.expected
        assert ("2 tokens: [92, 93]", 2) == (finding.observed, finding.where["index"])
        assert {ID} == blamed(held((11, 12, 92, 93, 13)))

    def test_other_words_are_found(self) -> None:
        """The sample holds the answer retokenised."""
        finding = finds(ID, held((11, 12, 91, 99, 93, 13)))
        assert "The sample holds turn 0 of the environment in another form" == finding.title

    def test_a_longer_form_is_the_environments_if_it_is_masked(self) -> None:
        """A separator that only the sample holds; with loss mask 1 it would be a sampled token."""
        response = (11, 12, 7, 91, 92, 93, 13)
        finds(ID, held(response, (1, 1, 0, 0, 0, 0, 1)))
        assert {ID} == blamed(held(response, (1, 1, 0, 0, 0, 0, 1)))
        assert {"stitch.tokens"} == blamed(held(response, (1, 1, 1, 0, 0, 0, 1)))

    @pytest.mark.parametrize(
        "response",
        [(11, 91, 92, 93, 13), (11, 12, 91, 92, 93), (11, 12, 91, 92, 93, 99), (91, 92, 93, 13)],
        ids=["end lost", "turn lost", "turn replaced", "start lost"],
    )
    def test_sampled_tokens_are_another_checks(self, response: tuple[int, ...]) -> None:
        """A sample that lacks what was sampled is stitch.tokens' to report."""
        assert {"stitch.tokens"} == blamed(held(response))

    def test_short_turns_are_told_apart(self) -> None:
        """Turns of one token each that repeat: the nearest lengths win over the first match."""
        parts = (
            ScriptedCall(tokens=(5,), reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(5,), reason="stop"),
            ScriptedCall(observed=(93,), tokens=(5,), reason="stop"),
        )
        story = script_rollout(
            *parts,
            budget=40,
            request={"turns": ((91, 92), (93,))},
            sample={"response": (5, 92, 5, 5), "logprobs": np.zeros(4)},
        )
        assert {ID} == blamed(story)
        assert "1 of 2 tokens of turn 0" in finds(ID, story).title

    def test_a_later_answer_is_compared_too(self) -> None:
        """The sample holds the first one as it was sent, and lacks a token of the second."""
        parts = (
            ScriptedCall(tokens=(5,), reason="stop"),
            ScriptedCall(observed=(91, 92), tokens=(6,), reason="stop"),
            ScriptedCall(observed=(93, 94), tokens=(7,), reason="stop"),
        )
        story = script_rollout(
            *parts,
            budget=40,
            request={"turns": ((91, 92), (93, 94))},
            sample={"response": (5, 91, 92, 6, 94, 7), "logprobs": np.zeros(6)},
        )
        finding = finds(ID, story)
        assert "The sample lacks 1 of 2 tokens of turn 1 of the environment" == finding.title

    def test_a_recording_is_judged_by_its_calls(self) -> None:
        """Its requests declare no turns; calls and sample are compared all the same."""
        passes(ID, said(WORDS, turns=(), multi_turn=True), turns_of_the_environment=1)
        assert (
            Verdict.FAIL
            == check(ID, said(WORDS, turns=(), sample={"response": (11, 12, 92, 93, 13)})).verdict
        )
