"""Lifecycle checks of samples whose calls were aborted: resumed, or as declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.records import FinishReason
from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.trace_script import REGISTRY, TraceScript, check, finds, opened, passes, unknown


class TestNotSurfaced:
    """``lifecycle.aborts-do-not-surface``."""

    ID = "lifecycle.aborts-do-not-surface"

    def _aborted(
        self, tokens: tuple[int, ...] = (3,), reason: str = "abort", **story: object
    ) -> TraceScript:
        """One call, aborted; the sample is handed over after it."""
        script = opened(**story)
        call = script.call((1, 2))
        return script.reply(call, tokens, reason="abort").result(
            tokens, finish_reason=FinishReason(reason)
        )  # type: ignore[return-value]

    def test_an_abort_that_reaches_the_caller_is_found(self) -> None:
        """As finish reason abort."""
        finding = finds(self.ID, self._aborted())
        assert "an abort reached the caller" == finding.title
        assert "finish reason abort, 1 tokens after 1 calls" == finding.observed

    def test_a_fragment_under_another_name_is_found(self) -> None:
        """A cap on retries that turns an abort into length (AReaL InfBridge)."""
        finding = finds(self.ID, self._aborted(reason="length"))
        assert "an aborted fragment was delivered as finished" == finding.title
        assert (
            "finish reason length, although its last call was aborted and budget is left, 1 tokens"
            " after 1 calls" == finding.observed
        )

    def test_a_resumed_sample_passes(self) -> None:
        """Whatever happened on the way."""
        script = opened()
        first = script.call((1, 2))
        script.reply(first, (3,), reason="abort")
        second = script.call((1, 2, 3), max_tokens=3)
        passes(
            self.ID,
            script.reply(second, (4, 5, 6)).result((3, 4, 5, 6)),
            samples_that_were_aborted=1,
        )

    def test_an_abort_on_the_last_token_ends_nothing_early(self) -> None:
        """The budget is used up, and so is a sample of several grants or of several turns."""
        passes(self.ID, self._aborted((3, 4, 5, 6), reason="length"))
        script = opened()
        call = script.call((1, 2), max_tokens=2)
        passes(self.ID, script.reply(call, (3, 4), reason="abort").result((3, 4)))
        script = opened()
        call = script.call((1, 2))
        script.reply(call, (3,), reason="stop").observe(9)
        call = script.call((1, 2, 3, 9), max_tokens=3)
        passes(self.ID, script.reply(call, (4, 5), reason="abort").result((3, 9, 4, 5)))

    def test_a_complete_sample_that_says_abort_is_found(self) -> None:
        """The abort came on the last token of the budget: nobody resumes it, and filters drop it.
        Callers that are promised aborts may get this one, too.
        """
        finding = finds(self.ID, self._aborted((3, 4, 5, 6)))
        assert "a complete sample came out as aborted" == finding.title
        assert finding.expected.startswith("length: the abort came on the last one of the budget")
        assert "finish reason abort, 4 tokens" == finding.observed
        result = check(self.ID, self._aborted((3, 4, 5, 6), abort_surfaces=True))
        assert Verdict.NOT_APPLICABLE == result.verdict

    @pytest.mark.parametrize(("reason", "found"), [("stop", False), ("abort", True)])
    def test_an_abort_on_the_end_of_sequence_may_end_it(self, reason: str, found: bool) -> None:
        """The client may look at the token and say stop; one that does not look resumes."""
        finds(self.ID, self._aborted((0,)))
        trace = self._aborted((0,), reason=reason).trace()
        coding = {"eos_every": 5, "eos_id": 0}
        result = judge(
            replace(trace, header=replace(trace.header, coding=coding)),
            REGISTRY.select([self.ID]),
            oracle=_NoOracle(),
        )[self.ID]  # type: ignore[arg-type]
        assert (Verdict.FAIL if found else Verdict.PASS) == result.verdict
        if found:
            assert result.findings[0].expected.startswith("stop: the abort came on the model's")

    def test_the_loser_of_a_hedge_cuts_nothing_off(self) -> None:
        """Two calls ran at once; the sample is what the one brought that ended by itself, and the
        other was aborted for that: no sample was.
        """
        for tokens in ((), (3,)):
            script = opened()
            slow, fast = script.call((1, 2)), script.call((1, 2))
            script.reply(fast, (3, 4, 5), reason="stop").reply(slow, tokens, reason="abort")
            unknown(self.ID, script.result((3, 4, 5)), "not exercised")
            script = opened()
            slow, fast = script.call((1, 2)), script.call((1, 2))
            script.reply(slow, tokens, reason="abort").reply(fast, (3, 4, 5), reason="stop")
            unknown(self.ID, script.result((3, 4, 5)), "not exercised")
        script = opened()
        slow, fast = script.call((1, 2)), script.call((1, 2))
        lost = script.call((1, 2))
        script.reply(lost, (9,), reason="stop").reply(slow, (3,), reason="abort")
        unknown(self.ID, script.reply(fast, (3, 4), reason="stop").result((3, 4)), "not exercised")
        script = opened()
        first = script.call((1, 2))
        script.reply(first, (3,), reason="length")
        again = script.call((1, 2, 3))
        finds(
            self.ID,
            script.reply(again, (), reason="abort").result((3,), finish_reason=FinishReason.LENGTH),
        )

    @pytest.mark.parametrize(("other", "blamed"), [((3,), False), ((4,), True)])
    def test_a_candidate_that_ended_by_itself_may_be_the_sample(
        self, other: tuple[int, ...], blamed: bool
    ) -> None:
        """Two candidates of one prompt sampled the same token, and one of them was aborted and
        resumed in vain: the sample may be the other one. It is not if that one sampled another
        token.
        """
        script = opened()
        resumed, ended = script.call((1, 2)), script.call((1, 2))
        script.reply(ended, other, reason="stop").reply(resumed, (3,), reason="abort")
        again = script.call((1, 2, 3))
        script.reply(again, (), reason="abort").result((3,), finish_reason=FinishReason.STOP)
        result = check(self.ID, script)
        assert blamed == (Verdict.FAIL == result.verdict)

    def test_another_failure_may_end_it(self) -> None:
        """The resume died with its server; handing over what there is, is an answer."""
        script = opened()
        first = script.call((1, 2))
        script.reply(first, (3,), reason="abort")
        script.call((1, 2, 3))
        passes(self.ID, script.fault("death", "s0").result((3,), finish_reason=FinishReason.ABORT))

    def test_with_partial_rollout_off_it_is_not_judged(self) -> None:
        """Then partial-off-honoured is."""
        unknown(self.ID, self._aborted(case={"partial": False}), "not exercised")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"abort_surfaces": True}, "lets callers see aborts"),
            ({"resume": "none"}, "no client resumes"),
        ],
    )
    def test_contracts_that_surface_aborts_are_not_judged(
        self, changes: dict[str, object], words: str
    ) -> None:
        """Engine-side keep surfaces an operator's abort, and says so."""
        result = judge(self._aborted(**changes).trace(), REGISTRY)[self.ID]
        assert Verdict.NOT_APPLICABLE == result.verdict
        assert words in result.reason


class _NoOracle:
    """An oracle that no check here uses."""


class TestPartialOff:
    """``lifecycle.partial-off-honoured``."""

    ID = "lifecycle.partial-off-honoured"

    def _off(self, declared: str = "dropped", **story: object) -> tuple[TraceScript, int]:
        script = opened(**{"case": {"partial": False}, "partial_off": declared, **story})
        call = script.call((1, 2))
        script.reply(call, (3,), reason="abort")
        return script, call

    def test_a_resume_is_found(self) -> None:
        """Verl #6882: the flag was not honoured."""
        script, _ = self._off()
        call = script.call((1, 2, 3))
        finding = finds(self.ID, script.reply(call, (4, 5, 6)).result((3, 4, 5, 6)))
        assert (
            "an aborted sample was resumed although partial rollout is off",
            "call 2 continues it",
        ) == (finding.title, finding.observed)

    def test_a_sample_that_should_be_dropped_is_found(self) -> None:
        """It was handed over."""
        finding = finds(self.ID, self._off()[0].result((3,), finish_reason=FinishReason.ABORT))
        assert "call 1 was aborted: the sample is dropped (partial_off)" == finding.expected
        assert "a rollout, finish reason abort" == finding.observed

    def test_a_sample_that_should_surface_is_found(self) -> None:
        """It vanished."""
        assert "nothing was delivered" == finds(self.ID, self._off("surfaced")[0].result()).observed

    @pytest.mark.parametrize("resume", ["client", "none"])
    def test_what_was_declared_passes(self, resume: str) -> None:
        """Dropped, or surfaced; also if no client ever resumes, whatever the case says."""
        case = {"partial": resume == "none"}
        passes(
            self.ID,
            self._off(resume=resume, case=case)[0].result(),
            samples_aborted_with_partial_rollout_off=1,
        )
        passes(
            self.ID,
            self._off("surfaced", resume=resume, case=case)[0].result(
                (3,), finish_reason=FinishReason.ABORT
            ),
        )

    def test_an_error_passes(self) -> None:
        """Explicit enough."""
        passes(self.ID, self._off()[0].result(event={"error": "Aborted"}))

    def test_a_retry_before_the_first_token_is_no_resume(self) -> None:
        """Nothing was sampled, so nothing is mixed."""
        script = opened(case={"partial": False}, partial_off="dropped")
        first = script.call((1, 2))
        script.reply(first, (), reason="abort")
        second = script.call((1, 2))
        unknown(self.ID, script.reply(second, (3, 4, 5, 6)).result((3, 4, 5, 6)), "not exercised")

    def test_an_abort_on_the_last_token_is_not_judged(self) -> None:
        """Whether it counts as aborted is a matter of taste."""
        script = opened(case={"partial": False}, partial_off="dropped")
        call = script.call((1, 2))
        unknown(
            self.ID,
            script.reply(call, (3, 4, 5, 6), reason="abort").result((3, 4, 5, 6)),
            "not exercised",
        )

    def test_the_next_turn_is_no_resume(self) -> None:
        """The environment spoke in between."""
        script, _ = self._off("surfaced")
        script.observe(9)
        call = script.call((1, 2, 3, 9))
        passes(self.ID, script.reply(call, (4,), reason="stop").result((3, 9, 4)))

    def _moved(
        self, tokens: tuple[int, ...], reason: str = "stop", at: str = "before"
    ) -> TraceScript:
        """A call that is aborted, and one that goes on from its first token on another server, sent
        before or after that, or answered before the call was sent; ``tokens`` are delivered.
        """
        script = opened(case={"partial": False}, partial_off="dropped")
        if at == "first":
            moved = script.call((1, 2, 3), server="s1")
            script.reply(moved, (4, 5), reason=reason)
        call = script.call((1, 2))
        if at == "before":
            moved = script.call((1, 2, 3), server="s1")
        script.reply(call, (3,), reason="abort")
        if at == "after":
            moved = script.call((1, 2, 3), server="s1")
        if at != "first":
            script.reply(moved, (4, 5), reason=reason)
        script.result(tokens, finish_reason=FinishReason(reason))
        return script

    def test_a_call_that_another_one_had_replaced_cuts_nothing_off(self) -> None:
        """The stack read a stream, sent what it had read to another server, and then aborted the
        call: the sample is the other call's.
        """
        unknown(self.ID, self._moved((3, 4, 5)), "not exercised")

    @pytest.mark.parametrize(
        ("tokens", "reason", "at", "title"),
        [
            ((3,), "stop", "before", "delivered"),
            ((3, 9), "stop", "before", "delivered"),
            ((3, 4, 5), "abort", "before", "delivered"),
            ((3, 4, 5), "stop", "after", "resumed"),
            ((3, 4, 5), "stop", "first", "delivered"),
        ],
    )
    def test_another_call_that_replaced_nothing_is_no_excuse(
        self, tokens: tuple[int, ...], reason: str, at: str, title: str
    ) -> None:
        """The sample is not what it brought, it was aborted as well, it was sent after the abort,
        or it had ended before the call began.
        """
        finding = finds(self.ID, self._moved(tokens, reason, at))
        assert f"an aborted sample was {title} although partial rollout is off" == finding.title

    def test_with_the_flag_on_or_unknown_it_is_not_exercised(self) -> None:
        """A trace without a case does not show the flag."""
        for story in ({"case": {"partial": True}}, {"driven": False}):
            script, _ = self._off(**story)  # type: ignore[arg-type]
            unknown(self.ID, script.result((3,)), "not exercised")
