"""The reference stitch: examples from the specification."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rollproof.core.contract import Provenance
from rollproof.core.records import FinishReason, Span
from tests.support.call_histories import PROMPT, History, resumed_history


class TestExamples:
    """What the specification says, case by case."""

    def test_segments_follow_each_other(self) -> None:
        """Tokens in order, each with its attempt, its logprob and its versions."""
        history = History()
        history.reply(history.call(PROMPT), (11, 12), version=4)
        history.reply(history.call((*PROMPT, 11, 12)), (13,), "stop", version=5)
        stitched = history.stitch()
        assert (11, 12, 13) == stitched.response_ids
        assert [(11, 0, 4, 4), (12, 0, 4, 4), (13, 1, 5, 5)] == [
            (t.id, t.attempt, t.shown, t.true) for t in stitched.tokens
        ]
        assert (
            [-1 / 64, -2 / 64, -1 - 1 / 64] == stitched.logprob_list == stitched.logprobs.tolist()
        )
        assert (FinishReason.STOP, 1, None) == (
            stitched.finish_reason,
            stitched.last,
            stitched.broken,
        )

    def test_the_boundary_row_comes_from_the_next_segment(self) -> None:
        """The last token of a segment was not forwarded by it."""
        history = resumed_history((11, 12), (13,))
        rows = history.stitch().rows
        assert rows is not None
        assert [0, 1, 2, 3, 1004] == rows[:, 0, 0].tolist()
        latest = history.stitch(Provenance.LATEST_PREFILL).rows
        assert latest is not None
        assert [1000, 1001, 1002, 1003, 1004] == latest[:, 0, 0].tolist()

    def test_an_empty_reply_changes_nothing(self) -> None:
        """First, in the middle or last: no token, no row, no version."""
        plain = resumed_history((11, 12), (13,)).stitch()
        for at in range(3):
            parts: list[tuple[int, ...]] = [(11, 12), (13,)]
            parts.insert(at, ())
            stitched = resumed_history(*parts).stitch()
            assert plain.response_ids == stitched.response_ids
            assert plain.rows is not None and stitched.rows is not None
            assert (plain.rows % 1000 == stitched.rows % 1000).all()
            assert {1, 2, 0} - {at} == {token.attempt for token in stitched.tokens}

    def test_a_lost_reply_counts_for_nothing(self) -> None:
        """The stack does not know what it sampled."""
        history = History()
        history.reply(history.call(PROMPT), (11,))
        history.reply(history.call((*PROMPT, 11)), (12,), delivered=False)
        history.reply(history.call((*PROMPT, 11)), (13,), "stop")
        assert (11, 13) == history.stitch().response_ids

    def test_the_second_delivery_of_a_reply_counts_for_nothing(self) -> None:
        """A duplicate is the same reply again."""
        history = resumed_history((11, 12))
        history.reply(history.attempts[0], (11, 12), duplicate=True)
        history.reply(history.call((*PROMPT, 11, 12)), (13,), "stop")
        assert (11, 12, 13) == history.stitch().response_ids

    def test_a_restart_forgets_what_came_after_it(self) -> None:
        """From the prompt nothing is left, not even rows; from the middle what had been sent."""
        history = resumed_history((11, 12, 13))
        history.reply(history.call(PROMPT), (21,), "stop")
        stitched = history.stitch()
        assert ((21,), [1000, 1001, 1002]) == (
            stitched.response_ids,
            stitched.rows[:, 0, 0].tolist(),
        )  # type: ignore[index]
        history = resumed_history((11, 12, 13))
        history.reply(history.call((*PROMPT, 11, 12)), (21,), "stop")
        stitched = history.stitch()
        assert (11, 12, 21) == stitched.response_ids
        # the row of token 12 had predicted token 13, which is gone; the second call computed it
        # anew
        assert [0, 1, 2, 3, 1004] == stitched.rows[:, 0, 0].tolist()  # type: ignore[index]

    def test_a_call_that_was_given_up_does_not_overtake(self) -> None:
        """Its reply arrives after that of its successor."""
        history = History()
        first, second = history.call(PROMPT), history.call(PROMPT)
        history.reply(second, (21,), "stop")
        history.reply(first, (11,), "stop")
        assert ((21,), 1) == (history.stitch().response_ids, history.stitch().last)

    def test_a_late_reply_is_replaced_by_its_successor(self) -> None:
        """It arrives while its successor is under way, which had sent nothing of it."""
        history = History()
        first, second = history.call(PROMPT), history.call(PROMPT)
        history.reply(first, (11, 12))
        history.reply(second, (21,), "stop")
        stitched = history.stitch()
        assert (21,) == stitched.response_ids
        assert [True, True] == [step.continues for step in stitched.steps]

    def test_turns(self) -> None:
        """Tokens of the environment are in between, sampled by no policy."""
        history = History()
        history.reply(history.call(PROMPT), (11,), "stop")
        history.observe(91, 92)
        history.reply(history.call((*PROMPT, 11, 91, 92)), (12,), "stop")
        stitched = history.stitch()
        assert [0, -1, -1, 1] == [token.attempt for token in stitched.tokens]
        assert [False, True, True, False] == [math.isnan(value) for value in stitched.logprob_list]
        assert [(0, False), (0, False)] == [(step.spent, step.ended) for step in stitched.steps]

    def test_turns_that_nobody_recorded_are_read_off_the_calls(self) -> None:
        """After a natural end, what a call adds is the environment's; after an abort, or where
        there are no turns, it is a fault.
        """
        for reason, turns, broken in (
            ("stop", True, None),
            ("length", True, None),
            ("abort", True, 1),
            ("stop", False, 1),
        ):
            history = History()
            history.reply(history.call(PROMPT), (11,), reason)
            history.reply(history.call((*PROMPT, 11, 91)), (12,), "stop")
            stitched = history.stitch(unrecorded_turns=turns)
            assert broken == stitched.broken
            assert ((11, 91, 12) if broken is None else (11,)) == stitched.response_ids
            assert (broken is None) == stitched.steps[1].turn

    def test_a_call_that_does_not_continue_breaks_the_fold(self) -> None:
        """Nothing after it can be judged; what came before stays."""
        history = resumed_history((11, 12))
        history.reply(history.call((*PROMPT, 11, 99)), (13,))
        history.reply(history.call((*PROMPT, 11, 99, 13)), (14,), "stop")
        stitched = history.stitch()
        assert (1, (11, 12)) == (stitched.broken, stitched.response_ids)
        assert (5, 5, 4) == (
            stitched.steps[1].sent,
            stitched.steps[1].delivered,
            stitched.steps[1].agree,
        )

    def test_a_wrong_call_without_a_reply_breaks_nothing(self) -> None:
        """Its step shows it; it brought no token."""
        history = resumed_history((11,))
        history.call((*PROMPT, 99))
        history.reply(history.call((*PROMPT, 11)), (12,), "stop")
        stitched = history.stitch()
        assert ((11, 12), None) == (stitched.response_ids, stitched.broken)
        assert [True, False, True] == [step.continues for step in stitched.steps]

    def test_spans_divide_a_reply(self) -> None:
        """Shown and true versions change at places of their own; what no span covers is unknown."""
        history = History()
        shown = (Span(start=0, end=2, version="a"), Span(start=2, end=5, version="b"))
        true = (Span(start=0, end=3, version=0), Span(start=3, end=4, version=1))
        history.reply(
            history.call(PROMPT), (1, 2, 3, 4, 5), output={"spans": shown}, true_tokens=true
        )
        stretches = [(s.start, s.end, s.shown, s.true) for s in history.stitch().stretches]
        assert [(0, 2, "a", 0), (2, 3, "b", 0), (3, 4, "b", 1), (4, 5, "b", None)] == stretches
        history.attempts[0].replies[0] = replace(history.attempts[0].replies[0], true_tokens=None)
        assert [(0, 2, "a", None), (2, 5, "b", None)] == [
            (s.start, s.end, s.shown, s.true) for s in history.stitch().stretches
        ]

    def test_logprobs_may_be_short_long_or_absent(self) -> None:
        """What the engine did not return is NaN; values beyond its tokens are dropped."""
        for values, want in (
            (None, [True, True]),
            (np.array([-1.0]), [False, True]),
            (np.array([-1.0, -2.0, -3.0]), [False, False]),
        ):
            history = History()
            history.reply(history.call(PROMPT), (11, 12), output={"logprobs": values})
            assert want == [math.isnan(value) for value in history.stitch().logprob_list]

    def test_what_a_turn_has_spent(self) -> None:
        """Counts from the environment's last word, and what a restart gives up does not count."""
        history = resumed_history((11, 12), (13,))
        history.reply(history.call((*PROMPT, 11, 12, 13)), (14,), "stop")
        history.observe(91)
        history.reply(history.call((*PROMPT, 11, 12, 13, 14, 91)), (21, 22))
        history.call((*PROMPT, 11, 12, 13, 14, 91, 21, 22))
        history.call((*PROMPT, 11, 12, 13, 14, 91, 21))
        history.call(PROMPT)
        assert [0, 2, 3, 0, 2, 1, 0] == [step.spent for step in history.stitch().steps]

    @pytest.mark.parametrize(("limit", "ended"), [(None, True), (3, True), (2, False)])
    def test_completed_ends_a_turn_unless_the_grant_is_used_up(
        self, limit: int | None, ended: bool
    ) -> None:
        """It may be the end of a portion."""
        history = History()
        history.reply(history.call(PROMPT, limit), (11, 12), "completed")
        history.call((*PROMPT, 11, 12))
        assert ended == history.stitch().steps[1].ended


class TestAnswers:
    """The environment's words, by the turn that they answer."""

    def test_answers_name_the_end_that_they_follow(self) -> None:
        """Two answers: one after a natural end, one after an abort."""
        history = History()
        history.reply(history.call(PROMPT), (11,), "stop")
        history.observe(91, 92)
        history.reply(history.call((*PROMPT, 11, 91, 92)), (12,), "abort")
        history.observe(93)
        history.reply(history.call((*PROMPT, 11, 91, 92, 12, 93)), (13,), "stop")
        stitched = history.stitch()
        assert [
            (1, 3, (91, 92), 0, FinishReason.STOP, True),
            (4, 5, (93,), 1, FinishReason.ABORT, True),
        ] == [(a.start, a.end, a.ids, a.attempt, a.finish, a.recorded) for a in stitched.answers]
        assert stitched.ended

    def test_pieces_of_one_answer_are_joined(self) -> None:
        """A separator that is recorded by itself belongs to the words after it."""
        history = History()
        history.reply(history.call(PROMPT), (11,), "stop")
        history.observe(90)
        history.observe(91, 92)
        stitched = history.stitch()
        assert [(90, 91, 92)] == [answer.ids for answer in stitched.answers]
        assert not stitched.ended

    def test_a_call_brings_an_answer(self) -> None:
        """Without a record, what a call adds after a natural end is the environment's."""
        history = History()
        history.reply(history.call(PROMPT), (11,), "stop")
        history.reply(history.call((*PROMPT, 11, 91)), (12,), "abort")
        (answer,) = history.stitch().answers
        assert ((91,), False) == (answer.ids, answer.recorded)

    def test_known_words_may_follow_an_abort(self) -> None:
        """A stack may take an aborted turn for ended: the words show it, other tokens do not."""
        history = History()
        history.reply(history.call(PROMPT), (11,), "abort")
        history.reply(history.call((*PROMPT, 11, 90, 91)), (12,), "stop")
        assert 1 == history.stitch().broken
        assert 1 == history.stitch(turns=((92,),)).broken
        stitched = history.stitch(turns=((91,),))
        assert (None, [(90, 91)]) == (stitched.broken, [a.ids for a in stitched.answers])

    def test_a_restart_forgets_answers(self) -> None:
        """A call that starts again sends a part of an answer, or none of it."""
        for sent, left in (((11, 91), [(91,)]), ((11,), []), ((), [])):
            history = History()
            history.reply(history.call(PROMPT), (11,), "stop")
            history.observe(91, 92)
            history.reply(history.call((*PROMPT, *sent)), (12,), "stop")
            assert left == [answer.ids for answer in history.stitch().answers]
