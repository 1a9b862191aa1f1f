"""Lifecycle checks: requests in flight when their server dies."""

from __future__ import annotations

import pytest

from tests.support.trace_script import TraceScript, finds, opened, passes, unknown


class TestSurvivesDeath:
    """``lifecycle.survives-death``."""

    ID = "lifecycle.survives-death"

    def _hit(self, **story: object) -> TraceScript:
        """Two tokens were delivered by an aborted call; the call that continues them dies with its
        server.
        """
        script = opened(**story)
        call = script.call((1, 2))
        script.reply(call, (3, 4), reason="abort")
        script.call((1, 2, 3, 4))
        return script.fault("death", "s0")

    def test_tokens_that_are_not_sent_on_are_lost(self) -> None:
        """What earlier calls had delivered belongs to the client."""
        script = self._hit()
        script.call((1, 2, 3), server="s1")
        finding = finds(self.ID, script)
        assert "the next call sends the 4 tokens known before s0 died" == finding.expected
        assert "call 3 sends 3 tokens, the first 3 of them unchanged" == finding.observed

    def test_a_request_that_vanishes_is_found(self) -> None:
        """Neither a rollout nor an error."""
        assert "nothing was delivered" == finds(self.ID, self._hit().result()).observed

    def test_going_on_or_giving_up_aloud_passes(self) -> None:
        """Both are answers to a death."""
        script = self._hit()
        call = script.call((1, 2, 3, 4), server="s1")
        passes(
            self.ID,
            script.reply(call, (5, 6)).result((3, 4, 5, 6)),
            **{"requests_in_flight_at_a_server's_death": 1},
        )
        passes(self.ID, self._hit().result(event={"error": "ServerDied"}))

    @pytest.mark.parametrize("resume", ["engine", "none"])
    def test_a_client_that_does_not_resume_may_start_over(self, resume: str) -> None:
        """It never promised to keep parts."""
        script = self._hit(resume=resume)
        call = script.call((1, 2), server="s1")
        passes(self.ID, script.reply(call, (3, 4, 5, 6)).result((3, 4, 5, 6)))

    def test_a_declared_drop_after_it_had_gone_on_is_not_the_deaths(self) -> None:
        """It was sent again, and aborted then."""
        script = self._hit(partial_off="dropped", case={"partial": False})
        call = script.call((1, 2, 3, 4), server="s1")
        passes(self.ID, script.reply(call, (5,), reason="abort").result())

    @pytest.mark.parametrize("late", ["", "late-reply"])
    def test_a_declared_drop_of_an_abort_that_overtook_the_death_is_not_the_deaths(
        self, late: str
    ) -> None:
        """The call was aborted before its server died, and its answer arrives after that: at the
        same instant, or late.
        """
        script = opened(partial_off="dropped", case={"partial": False})
        call = script.call((1, 2))
        if late:
            script.fault(late, "s0", call)
        script.abort(call).fault("death", "s0").reply(call, (3,), reason="abort").result()
        passes(self.ID, script, **{"requests_in_flight_at_a_server's_death": 1})

    def test_an_answer_that_was_lost_excuses_no_drop(self) -> None:
        """Its caller never saw the abort that came after the death."""
        script = opened(partial_off="dropped", case={"partial": False})
        call = script.call((1, 2))
        script.abort(call).fault("death", "s0").reply(
            call, (3,), reason="abort", delivered=False
        ).result()
        assert "a request vanished when a server died" == finds(self.ID, script).title

    @pytest.mark.parametrize(("granted", "found"), [(1, False), (2, True)])
    def test_a_token_that_may_be_a_prefill_calls_is_not_missed(
        self, granted: int, found: bool
    ) -> None:
        """A proxy throws the token of its prefill call away; nothing else may be."""
        script = opened()
        call = script.call((1, 2), max_tokens=granted)
        script.reply(call, (3,), reason="length")
        script.call((1, 2), max_tokens=granted)
        script.fault("death", "s0")
        call = script.call((1, 2), server="s1", max_tokens=granted)
        script.reply(call, (3,), reason="length").result((3,))
        if found:
            assert "tokens were lost when a server died" == finds(self.ID, script).title
        else:
            passes(self.ID, script)

    def test_a_death_elsewhere_hits_nobody(self) -> None:
        """No call of the request was on that server."""
        unknown(self.ID, opened().fault("death", "s1").result(), "not exercised")

    def test_an_answer_to_a_call_that_raced_with_the_dead_one_explains_a_drop(self) -> None:
        """It came before the death; one that came before the dead call does not."""
        for raced in (True, False):
            script = opened(partial_off="dropped", case={"partial": False})
            call = script.call((1, 2), server="s1")
            if raced:
                script.call((1, 2))
            script.reply(call, (), reason="abort")
            if not raced:
                script.call((1, 2))
            script.fault("death", "s0").result()
            (passes if raced else finds)(self.ID, script)
