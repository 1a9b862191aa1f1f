"""Lifecycle checks of duplicates, late replies and retries: which replies enter a sample."""

from __future__ import annotations

from tests.support.trace_script import TraceScript, finds, passes, unknown


def _open(**story: object) -> TraceScript:
    """Request r0 with a budget of 8."""
    script = TraceScript(**story)  # type: ignore[arg-type]
    script.submit(max_tokens=8)
    return script


class TestDuplicates:
    """``lifecycle.duplicate-consumed-once``."""

    ID = "lifecycle.duplicate-consumed-once"

    def _twice(self, reason: str = "abort") -> TraceScript:
        script = _open()
        call = script.call((1, 2))
        script.reply(call, (3, 4), reason=reason).reply(
            call, (3, 4), reason=reason, duplicate=True, delivered=False
        )
        return script

    def test_tokens_twice_in_the_next_prompt_are_found(self) -> None:
        """The next call shows what the stack believes."""
        script = self._twice()
        script.call((1, 2, 3, 4, 3, 4))
        finding = finds(self.ID, script.result((3, 4, 3, 4, 5)))
        assert "the 2 tokens of call 1 once" == finding.expected
        assert "they are twice in the prompt of call 2" == finding.observed
        assert {"request": "r0", "call": 1, "position": 4, "index": 3} == finding.where

    def test_tokens_twice_in_the_sample_are_found(self) -> None:
        """After the last call."""
        assert (
            "they are twice in the sample"
            == finds(self.ID, self._twice("stop").result((3, 4, 3, 4))).observed
        )

    def test_tokens_twice_before_the_environment_are_found(self) -> None:
        """In a turn of several."""
        script = self._twice("stop").observe(9)
        script.call((1, 2, 3, 4, 3, 4, 9))
        finds(self.ID, script.result((3, 4, 3, 4, 9)))

    def test_tokens_once_pass(self) -> None:
        """The second delivery is dropped."""
        script = self._twice()
        call = script.call((1, 2, 3, 4))
        passes(self.ID, script.reply(call, (5,)).result((3, 4, 5)), duplicate_replies=1)

    def test_a_model_that_repeats_itself_passes(self) -> None:
        """The next call really sampled the same tokens."""
        script = self._twice()
        call = script.call((1, 2, 3, 4))
        passes(self.ID, script.reply(call, (3, 4)).result((3, 4, 3, 4)))

    def test_without_a_duplicate_it_is_not_exercised(self) -> None:
        """Doubled tokens of another cause are judged by the family stitch."""
        script = _open()
        call = script.call((1, 2))
        unknown(self.ID, script.reply(call, (3, 4)).result((3, 4, 3, 4)), "not exercised")


class TestRetries:
    """``lifecycle.one-reply-per-retry``."""

    ID = "lifecycle.one-reply-per-retry"

    def _retried(
        self,
        first: tuple[int, ...] = (3, 4),
        second: tuple[int, ...] = (5, 6),
        *,
        late_last: bool = False,
    ) -> TraceScript:
        """A call times out and is sent again; both replies arrive."""
        script = _open()
        first_call = script.call((1, 2))
        second_call = script.call((1, 2), server="s1")
        for call, tokens in (
            ((second_call, second), (first_call, first))
            if late_last
            else ((first_call, first), (second_call, second))
        ):
            script.reply(call, tokens, reason="stop")
        return script

    def test_both_replies_in_the_sample_are_found(self) -> None:
        """AReaL #1498: the orphan completion was kept."""
        for late_last in (False, True):
            finding = finds(self.ID, self._retried(late_last=late_last).result((5, 6, 3, 4)))
            assert "the replies of a call and of its retry were both used" == finding.title
            assert "both are in the sample" == finding.observed

    def test_either_reply_passes(self) -> None:
        """First come, first served; or the retry's; cut to a budget or not."""
        passes(self.ID, self._retried().result((3, 4)), replies_after_a_retry=1)
        passes(self.ID, self._retried().result((5, 6)))
        passes(self.ID, self._retried().result((5,)))

    def test_a_continuation_of_the_taken_reply_passes(self) -> None:
        """The next call goes on from one of them."""
        script = self._retried(late_last=True)
        call = script.call((1, 2, 5, 6))
        passes(self.ID, script.reply(call, (3, 4)).result((5, 6, 3, 4)))

    def test_an_empty_reply_was_not_used_next_to_a_late_one(self) -> None:
        """A late reply in place of the resumed call's is one reply, and the family stitch judges
        it.
        """
        script = _open()
        late, retry = script.call((1, 2)), script.call((1, 2), server="s1")
        script.reply(retry, (9,), reason="abort")
        resumed = script.call((1, 2, 9), server="s1")
        script.reply(late, (3, 4), reason="stop").reply(resumed, (), reason="abort")
        passes(self.ID, script.result((9, 3, 4)), replies_after_a_retry=1)

    def test_a_resume_that_outruns_its_hedge_passes(self) -> None:
        """The stack saw tokens of a stream, resumed from them, and sent the prompt again to be
        safe: the stream and its resume are one sequence.
        """
        script = _open()
        stream, resumed = script.call((1, 2)), script.call((1, 2, 3, 4), server="s1")
        script.call((1, 2), server="s2")
        script.reply(stream, (3, 4), reason="abort").reply(resumed, (5, 6), reason="stop")
        passes(self.ID, script.result((3, 4, 5, 6)), replies_after_a_retry=2)

    def test_a_late_reply_of_another_request_is_found(self) -> None:
        """It was matched by order of arrival."""
        script = TraceScript()
        script.submit("r0", (1, 2)).submit("r1", (7, 8))
        late = script.call((7, 8), "r1")
        script.fault("late-reply", "s0", late)
        own = script.call((1, 2), "r0")
        script.reply(late, (5, 6), reason="stop").reply(own, (3, 4), reason="stop")
        finding = finds(self.ID, script.result((5, 6)))
        assert "a late reply was used for another request" == finding.title
        assert "the tokens of call 1 of request 'r1' in the sample" == finding.observed

    def test_an_own_reply_that_came_before_a_call_was_repeated_may_be_used(self) -> None:
        """Of two candidates one is sent again; the other one's token is also that of a reply of
        another request that was lost, by chance.
        """
        script = TraceScript()
        script.submit("r0", (1, 2)).submit("r1", (7, 8))
        lost, candidate, other = script.call((7, 8), "r1"), script.call((1, 2)), script.call((1, 2))
        script.fault("lost-reply", "s0", lost).fault("lost-reply", "s0", other)
        script.reply(candidate, (0,), reason="stop").reply(lost, (0,)).reply(other, (3,))
        again = script.call((1, 2))
        script.reply(again, (3,)).result((0,))
        # each of the two requests has one of the other
        passes(self.ID, script, replies_after_a_retry=1, replies_of_other_requests=2)

    def test_stray_replies_that_nobody_else_takes_pass(self) -> None:
        """The late reply stays with its own request."""
        script = TraceScript()
        script.submit("r0", (1, 2)).submit("r1", (7, 8))
        late = script.call((7, 8), "r1")
        script.fault("late-reply", "s0", late)
        own = script.call((1, 2), "r0")
        script.reply(late, (5, 6), reason="stop").reply(own, (3, 4), reason="stop").result(
            (3, 4)
        ).result((5, 6), "r1", (7, 8))
        passes(self.ID, script, replies_of_other_requests=1)

    def test_tokens_of_another_cause_are_not_blamed_on_a_retry(self) -> None:
        """What neither reply explains is judged by the family stitch."""
        passes(self.ID, self._retried().result((3, 4, 9)))
