"""Lifecycle checks: ends, hangs, errors, counters, deaths, drops, and the calls that a stack
makes.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollproof.core.events.rollout import Update, UpdatePhase
from rollproof.core.trace import EVENT_KINDS
from rollproof.invariants import lifecycle, weights
from rollproof.judging.checks import Verdict
from rollproof.judging.registry import Registry
from rollproof.verification.traces import judge
from tests.support.trace_script import TraceScript, check, finds, opened, passes, unknown


class TestEndsOnce:
    """``lifecycle.ends-once``."""

    ID = "lifecycle.ends-once"

    def test_a_second_end_is_found(self) -> None:
        """A duplicated completion became a sample of its own."""
        finding = finds(self.ID, opened().result((3,)).result((3,)))
        assert ("a request ended twice", "a second result at event 2") == (
            finding.title,
            finding.observed,
        )

    def test_an_end_of_nobodys_request_is_found(self) -> None:
        """A result that no submission explains."""
        assert (
            "a result of 'r9' at event 1"
            == finds(self.ID, opened().result((3,), request_id="r9").result((3,))).observed
        )

    def test_no_end_is_found(self) -> None:
        """The run ended, the request did not."""
        finding = finds(self.ID, opened())
        assert ("a request never ended", {"request": "r0", "index": 0}) == (
            finding.title,
            finding.where,
        )

    def test_every_kind_of_end_counts(self) -> None:
        """A rollout, an error, a drop and a hang are ends; an id may be used again after one."""
        script = (
            opened()
            .result((3,))
            .submit()
            .result(event={"error": "E"})
            .submit()
            .result()
            .submit()
            .result(event={"hung": True})
        )
        passes(self.ID, script, requests_that_ended=4)

    def test_a_trace_that_was_cut_is_not_judged(self) -> None:
        """A killed writer leaves requests open."""
        unknown(self.ID, opened(driven=False), "may have been cut there")

    def test_final_gauges_say_that_it_was_not_cut(self) -> None:
        """Gauges are read at the end, so the trace has one."""
        finds(self.ID, opened(driven=False).gauges())

    def test_results_of_a_trace_that_began_late_are_not_judged(self) -> None:
        """Requests may have been submitted before the recording began."""
        passes(self.ID, opened(driven=False).result((3,), request_id="r9").result((3,)))

    def test_one_hang_does_not_make_two_findings(self) -> None:
        """no-hang reports what hangs; whether the others ended is not known."""
        unknown_or_pass = (
            opened()
            .submit("r1", (5, 6))
            .result((3,))
            .submit("r2", (7,))
            .result(request_id="r2", event={"hung": True})
        )
        passes(self.ID, unknown_or_pass, requests_that_ended=2)


class TestNoHang:
    """``lifecycle.no-hang``."""

    ID = "lifecycle.no-hang"

    def test_it_tells_what_was_awaited(self) -> None:
        """The runner's words, and the fate of the last call."""
        script = opened()
        script.send()
        finding = finds(
            self.ID,
            script.result(event={"hung": True, "error": "deadline; it awaits Lock.acquire"}),
        )
        assert (
            "deadline; it awaits Lock.acquire; its last call, 1 on s0, was not admitted"
            == finding.observed
        )

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ("none", "no call was ever made"),
            ("admitted", "was admitted and not answered"),
            ("answered", "was answered"),
        ],
    )
    def test_the_last_call_is_described(self, state: str, words: str) -> None:
        """Where to look first."""
        script = opened()
        if state != "none":
            call = script.call((1, 2))
            if state == "answered":
                script.reply(call, (3,))
        assert finds(self.ID, script.result(event={"hung": True})).observed.endswith(words)

    @pytest.mark.parametrize(
        ("pairs", "dead", "granted", "blamed"),
        [
            ([("s0", "s1")], "s1", 4, False),
            ([("s0", "s1")], "s0", 4, False),
            ([("s0", "s1"), ("s0", "s2")], "s1", 4, True),
            ([("s0", "s1"), ("s1", "s0")], "s1", 4, True),
            ([("s0", "s0")], "s0", 4, True),
            ([("s0", "s1")], "s1", 1, True),
        ],
        ids=[
            "only decode server",
            "only prefill server",
            "another decode server",
            "servers in turn",
            "no proxy",
            "a token a call",
        ],
    )
    def test_the_only_server_of_a_role_may_be_gone(
        self, pairs: list[tuple[str, str]], dead: str, granted: int, blamed: bool
    ) -> None:
        """A proxy cannot end a request without it, and no other stack is excused."""
        script = TraceScript()
        for number, (prefill, decode) in enumerate(pairs):
            name = f"r{number}"
            script.submit(name, (1, 2 + number))
            call = script.call((1, 2 + number), name, max_tokens=1, server=prefill)
            script.reply(call, (7,), "length")
            call = script.call((1, 2 + number), name, max_tokens=granted, server=decode)
            script.reply(call, (), "abort")
        script.fault("death", dead)
        script.call((1, 2), max_tokens=1 if dead == "s0" else granted, server=dead)
        script.result(event={"hung": True})
        for number in range(1, len(pairs)):
            script.result((7,), f"r{number}", (1, 2 + number))
        result = check(self.ID, script)
        assert blamed == (Verdict.FAIL == result.verdict)

    def test_other_ends_pass(self) -> None:
        """An error is not a hang."""
        passes(self.ID, opened().result(event={"error": "E"}), requests_that_ended=1)


class TestNoErrorWithoutFault:
    """``lifecycle.no-error-without-fault``."""

    ID = "lifecycle.no-error-without-fault"

    def test_a_legal_reply_that_made_the_stack_raise_is_found(self) -> None:
        """An abort of zero tokens is one (verl #5936)."""
        script = opened()
        call = script.call((1, 2))
        script.reply(call, (), reason="abort").result(
            event={"error": "ValueError: not enough values to unpack"}
        )
        finding = finds(self.ID, script)
        assert (
            "ValueError: not enough values to unpack; its last reply had no tokens, finish reason"
            " abort" == finding.observed
        )
        assert "verl #5936" in finding.hint

    def test_the_last_of_several_replies_is_described(self) -> None:
        """It is what the stack had in its hands when it raised."""
        script = opened()
        script.reply(script.call((1, 2)), (3, 4), reason="abort")
        script.reply(script.call((1, 2, 3, 4)), (5,), reason="length")
        finding = finds(self.ID, script.result(event={"error": "ValueError: no"}))
        assert "its last reply had 1 token, finish reason length" in finding.observed

    @pytest.mark.parametrize(
        ("error", "named"),
        [
            ("AttributeError: 'numpy.ndarray' object has no attribute 'numpy'", True),
            ("ValueError: The truth value of an array with more than one element", True),
            ("KeyError: 'global_steps'", False),
            ("RuntimeError: the queue is full", False),
        ],
    )
    def test_arrays_are_named_only_if_the_error_is_about_them(
        self, error: str, named: bool
    ) -> None:
        """Any other exception has a cause of its own (verl #7158 is about arrays)."""
        script = opened()
        call = script.call((1, 2))
        script.reply(call, (3, 4), prompt_len=2).result(event={"error": error})
        assert named == ("verl #7158" in finds(self.ID, script).hint)

    @pytest.mark.parametrize(
        ("error", "own"),
        [
            ("NameError: name 'numpy_rows' is not defined (client.py:3, in resume)", True),
            ("AttributeError: 'Client' object has no attribute 'ndarrays'", True),
            ("AttributeError: 'numpy.ndarray' object has no attribute 'lenght'", True),
            ("ModuleNotFoundError: No module named 'numpy_typing'", True),
            ("TypeError: resume() missing 1 required positional argument: 'ndarray'", True),
            ("AttributeError: 'numpy.ndarray' object has no attribute 'extend'", False),
            ("AttributeError: 'NoneType' object has no attribute 'shape'", False),
            ("IndexError: list index out of range", False),
            ("TypeError: 'NoneType' object is not subscriptable", False),
        ],
    )
    def test_a_reply_is_not_blamed_for_a_misspelt_name(self, error: str, own: bool) -> None:
        """No value of a reply causes a wrong name, attribute or call: the hint names no known
        cause, neither for an abort without tokens nor for an array of routes.
        """
        empty, routed = opened(), opened()
        empty.reply(empty.call((1, 2)), (), reason="abort").result(event={"error": error})
        routed.reply(routed.call((1, 2)), (3, 4), prompt_len=2).result(event={"error": error})
        blamed = "verl #" in finds(self.ID, empty).hint

        assert own != blamed
        if own:
            assert "verl #" not in finds(self.ID, routed).hint
            assert finds(self.ID, routed).hint.startswith("The error is the stack's own")

    def test_an_array_is_not_the_cause_where_no_reply_had_routes(self) -> None:
        """The same words about another array."""
        script = opened()
        call = script.call((1, 2))
        script.reply(call, (3, 4)).result(event={"error": "TypeError: numpy.float64"})
        assert "verl" not in finds(self.ID, script).hint

    def test_the_truth_of_an_array_of_logprobs_is_named(self) -> None:
        """`out.logprobs or []` is legal for lists, which real engines return."""
        script = opened()
        error = "ValueError: The truth value of an empty array is ambiguous"
        script.reply(script.call((1, 2)), (3,), reason="abort")
        assert "out.logprobs.tolist()" in finds(self.ID, script.result(event={"error": error})).hint

    @pytest.mark.parametrize(
        "error",
        [
            "TypeError: FakeEngine.generate() got an unexpected keyword argument 'rid' (c.py:3)",
            "TypeError: FakeEngine.generate() missing 1 required keyword-only argument: 'max'",
            "AttributeError: 'RayHandle' object has no attribute 'chat'",
        ],
    )
    def test_a_call_in_the_words_of_another_engine_is_named(self, error: str) -> None:
        """The client is right for its own engine: what is missing is a translation."""
        hint = finds(self.ID, opened().result(event={"error": error})).hint
        assert "put a small class between them" in hint

    @pytest.mark.parametrize("what", ["lost-reply", "late-reply", "duplicate-reply", "reject"])
    def test_a_fault_of_its_own_call_explains_an_error(self, what: str) -> None:
        """The request may give up; another one may not."""
        script = opened().submit("r1", (5, 6))
        call = script.call((1, 2))
        script.fault(what, "s0", call).result(event={"error": "E"})
        passes(self.ID, script)
        finds(self.ID, script.result(request_id="r1", event={"error": "E"}))

    def test_a_request_for_one_token_may_not_be_refused(self) -> None:
        """Only one for none may."""
        finds(self.ID, TraceScript().submit(max_tokens=1).result(event={"error": "E"}))

    @pytest.mark.parametrize("what", ["death", "update-failure", "update-hung"])
    def test_a_fault_of_the_fleet_explains_errors(self, what: str) -> None:
        """No server left, weights that never came."""
        passes(
            self.ID,
            opened().fault(what, "s1" if what == "death" else None).result(event={"error": "E"}),
        )

    def test_a_server_that_is_down_explains_errors_of_later_requests(self) -> None:
        """Until it is revived."""
        script = TraceScript()
        script.fault("death", "s0").submit().result(event={"error": "E"}).fault(
            "revive", "s0"
        ).submit().result(event={"error": "E"})
        finds(self.ID, script)

    def test_an_undelivered_reply_explains_an_error(self) -> None:
        """The caller was cancelled or cut off."""
        script = opened()
        call = script.call((1, 2))
        passes(self.ID, script.reply(call, (3,), delivered=False).result(event={"error": "E"}))

    def test_a_hang_is_not_an_error(self) -> None:
        """It has a check of its own."""
        passes(self.ID, opened().result(event={"error": "deadline", "hung": True}))

    def test_a_request_for_nothing_may_be_refused(self) -> None:
        """max_tokens=0 is the caller's mistake."""
        script = TraceScript()
        passes(self.ID, script.submit(max_tokens=0).result(event={"error": "ValueError"}))


class TestCountersReturn:
    """``lifecycle.counters-return``."""

    ID = "lifecycle.counters-return"

    def test_a_counter_that_leaks_is_found(self) -> None:
        """Raised on every path, lowered on some."""
        finding = finds(self.ID, opened().result((3,)).gauges(0, 2, "in flight"))
        assert (
            "counter 'in flight' did not return to its start",
            "2 when every request had ended",
        ) == (finding.title, finding.observed)

    def test_the_hint_names_a_finally_where_something_was_cut_short(self) -> None:
        """A call was aborted, or a server died."""
        for cut in ("abort", "death"):
            script = opened()
            call = script.call((1, 2))
            script.reply(call, (3,), reason="length" if cut == "death" else "abort")
            if cut == "death":
                script.fault("death", "s0")
            assert "in a `finally`" in finds(self.ID, script.result((3,)).gauges(0, 1)).hint

    def test_the_hint_names_no_finally_where_nothing_was_cut_short(self) -> None:
        """The usual path leaks."""
        finding = finds(self.ID, opened().result((3,)).gauges(0, 1))
        assert "No call was cut short" in finding.hint
        assert "finally" not in finding.hint

    def test_the_hint_names_an_update_that_nobody_awaits(self) -> None:
        """It had returned when it paused the server."""
        script = opened()
        script.add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED)).pause()
        finding = finds(self.ID, script.result((3,)).gauges(0, 1, "s0/paused"))
        assert (
            "s0 was paused at event 3, when update_weights had returned, and not resumed: the"
            " update goes on in a task that nobody awaits." == finding.hint
        )

    def test_the_hint_names_a_server_that_an_update_left_paused(self) -> None:
        """The same counter, and the update was awaited."""
        script = opened().add(Update(version=1, label=1, phase=UpdatePhase.ASKED)).pause()
        script.add(Update(version=1, label=1, phase=UpdatePhase.FAILED))
        finding = finds(self.ID, script.result((3,)).gauges(0, 1, "s0/paused"))
        assert "s0 was paused at event 2 and never resumed." == finding.hint

    def test_the_hint_names_a_call_that_still_runs(self) -> None:
        """Its request ended without it."""
        script = opened()
        call = script.call((1, 2))
        finding = finds(self.ID, script.result((3,)).gauges(0, 1, "s0/running"))
        assert finding.hint.startswith(f"Call {call} to s0 had no reply yet")

    def test_counters_that_return_pass(self) -> None:
        """They may start anywhere."""
        passes(self.ID, opened().gauges(3, 3, "a").gauges(0, 0, "b").result((3,)), counters=2)

    def test_without_an_end_there_is_no_verdict(self) -> None:
        """A counter that was read once, and a run that hung."""
        unknown(self.ID, opened().gauges(0, None), "counter 'in flight' has no value at the end")
        unknown(self.ID, opened().gauges(0, 1).result(event={"hung": True}), "a request hangs")


class TestDrops:
    """``lifecycle.drops-only-as-declared``."""

    ID = "lifecycle.drops-only-as-declared"

    def _dropped(self, reason: str = "abort", **story: object) -> TraceScript:
        script = opened(**{"partial_off": "dropped", "case": {"partial": False}, **story})
        call = script.call((1, 2))
        return script.reply(call, (3,), reason=reason).result()  # type: ignore[return-value]

    @pytest.mark.parametrize(
        ("story", "words"),
        [
            ({"partial_off": None}, "the contract does not declare partial_off='dropped'"),
            ({"partial_off": "surfaced"}, "the contract does not declare partial_off='dropped'"),
            ({"case": {"partial": True}}, "partial rollout is on"),
            ({"reason": "length"}, "its last call ended with finish reason length"),
        ],
    )
    def test_a_drop_without_leave_is_found(self, story: dict[str, object], words: str) -> None:
        """A group that loses a member unseen."""
        assert (f"a rollout or an error: {words}") == finds(
            self.ID, self._dropped(**story)
        ).expected  # type: ignore[arg-type]

    def test_a_declared_drop_passes(self) -> None:
        """Aborted, partial rollout off, declared; also if no client ever resumes, and if no case
        shows the flag.
        """
        passes(self.ID, self._dropped())
        passes(self.ID, self._dropped(resume="none", case={"partial": True}))
        passes(self.ID, self._dropped(driven=False))

    def test_a_request_that_was_never_served_may_be_dropped_then(self) -> None:
        """The update began before its first reply."""
        passes(self.ID, opened(partial_off="dropped", case={"partial": False}).result())


class TestNoOrphans:
    """``lifecycle.no-orphan-calls``."""

    ID = "lifecycle.no-orphan-calls"

    def _left(self) -> tuple[TraceScript, int]:
        """A call and its retry; the retry's reply ends the request."""
        script = opened()
        first, second = script.call((1, 2)), script.call((1, 2), server="s1")
        script.reply(second, (3, 4, 5, 6)).result((3, 4, 5, 6))
        return script, first

    def test_a_call_that_runs_on_to_its_end_is_found(self) -> None:
        """No request waits for it, and it was not aborted."""
        script, first = self._left()
        finding = finds(self.ID, script.reply(first, (3, 4, 5, 6)))
        assert "call 1 is aborted when its request ends, at event 6" == finding.expected
        assert "it ran to finish reason length, 4 tokens, at event 7" == finding.observed

    def test_a_call_that_is_aborted_or_dropped_passes(self) -> None:
        """The loser of hedged calls is aborted, before or after the end, or its caller hung up."""
        passes(self.ID, self._left()[0], requests_that_ended=1)
        script, first = self._left()
        passes(self.ID, script.reply(first, (3,), reason="abort"))
        script, first = self._left()
        passes(self.ID, script.abort(first, wanted="r0").reply(first, (3, 4, 5, 6)))

    def test_late_replies_and_deaths_are_excused(self) -> None:
        """The harness held the reply back, or killed the server."""
        script, first = self._left()
        passes(self.ID, script.fault("late-reply", "s0", first).reply(first, (3, 4, 5, 6)))
        script, first = self._left()
        passes(self.ID, script.fault("death", "s0").reply(first, (3, 4, 5, 6)))

    def test_a_request_that_hangs_is_not_judged(self) -> None:
        """Its call is still wanted."""
        script = opened()
        call = script.call((1, 2))
        passes(self.ID, script.result(event={"hung": True}).reply(call, (3, 4, 5, 6)))


class TestNoCallAfterEnd:
    """``lifecycle.no-call-after-end``."""

    ID = "lifecycle.no-call-after-end"

    def test_a_call_after_the_end_is_found(self) -> None:
        """A resume loop that outlives its request."""
        script = opened().result((3,))
        script.call((1, 2, 3))
        assert "call 1 to s0 at event 2" == finds(self.ID, script).observed

    def test_a_request_that_the_run_gave_up_has_not_ended(self) -> None:
        """It hung, polling: its stack goes on after the deadline."""
        script = opened().result(event={"hung": True})
        script.call((1, 2))
        unknown(self.ID, script, "not exercised")

    def test_an_id_that_is_used_again_is_a_new_request(self) -> None:
        """The next epoch submits the same ids."""
        script = opened().result((3,)).submit()
        script.call((1, 2))
        passes(self.ID, script.result((3,)), requests_that_ended=2)

    def test_requests_of_a_group_are_not_judged(self) -> None:
        """They share a prompt, so a call may be taken for another member's."""
        script = TraceScript()
        script.submit("r0", group="g").submit("r1", group="g").result((3,))
        script.call((1, 2))
        unknown(self.ID, script.result((3,), request_id="r1"), "not exercised")


class TestNoEmptyGrant:
    """``lifecycle.no-empty-grant``."""

    ID = "lifecycle.no-empty-grant"

    @pytest.mark.parametrize("budget", [0, -1])
    def test_a_grant_of_nothing_is_found(self, budget: int) -> None:
        """The resume loop did not see that its budget was used up."""
        script = opened()
        script.send(max_tokens=budget)
        assert f"call 1 with max_tokens={budget}" == finds(self.ID, script.result((3,))).observed

    def test_grants_of_something_pass(self) -> None:
        """No grant at all is no empty one, and a caller may ask for nothing."""
        script = opened()
        script.send(max_tokens=1)
        script.send(max_tokens=None)
        passes(self.ID, script.result((3,)), calls_with_a_budget=1)
        script = TraceScript()
        script.submit(max_tokens=0)
        script.send(max_tokens=0)
        passes(self.ID, script.result(()))


class TestBoundedAttempts:
    """``lifecycle.bounded-attempts``."""

    ID = "lifecycle.bounded-attempts"

    def _attempts(self, count: int, wait: float) -> TraceScript:
        script = opened()
        for _ in range(count):
            call = script.send()
            script.reply(call, (), reason="abort")
            script._time += wait - 2
        return script.result(event={"hung": True})  # type: ignore[return-value]

    def test_a_busy_loop_is_found(self) -> None:
        """201 calls without a wait."""
        assert (
            "201 calls in 20 s without a token" == finds(self.ID, self._attempts(250, 0.1)).observed
        )

    def test_polling_at_intervals_passes(self) -> None:
        """A second between attempts, as verl's client sleeps, is a design."""
        passes(self.ID, self._attempts(250, 1.0), replies_without_tokens=250)

    def test_a_few_quick_attempts_pass(self) -> None:
        """Retrying at once is a design too."""
        passes(self.ID, self._attempts(200, 0.0))

    def _refused(self, count: int, wait: float, **story: Any) -> TraceScript:
        script = opened(**story)
        for _ in range(count):
            script.send()
            script._time += wait - 1
        return script

    def test_calls_to_a_dead_server_count(self) -> None:
        """They raise, so that they have no reply; the server did not take them."""
        finding = finds(self.ID, self._refused(250, 0.01).result(event={"error": "E"}))
        assert "201 calls in 2 s without a token, 201 of them refused" == finding.observed
        assert "The client calls again at once when a server is dead" in finding.hint

    def test_polling_a_dead_server_passes(self) -> None:
        """Ten milliseconds between attempts are a wait, and so are growing ones."""
        script = self._refused(1000, 0.02).result(event={"error": "E"})
        passes(self.ID, script, calls_that_no_server_took=1000)

    def test_calls_that_are_made_together_are_no_loop(self) -> None:
        """300 calls in one moment, to a server that then dies."""
        script = self._refused(300, 0.0).result(event={"error": "E"})
        passes(self.ID, script, calls_that_no_server_took=1)

    def test_a_call_that_a_server_took_is_no_refusal(self) -> None:
        """It ran and died with its server, or its caller left it."""
        script = opened()
        for _ in range(250):
            script.admit(script.send())
            script._time -= 1.9
        passes(self.ID, script.send() and script.result(), calls_that_no_server_took=1)

    def test_a_recording_shows_no_refusal(self) -> None:
        """It has no admissions, so that a call without a reply may have run."""
        unknown(self.ID, self._refused(250, 0.0001, driven=False).result(), "no replies without")


def test_ids_are_unique_and_told_in_words() -> None:
    """Every check of the two families has a promise, what it needs and what exercises it."""
    registry = Registry([*weights.CHECKS, *lifecycle.CHECKS])
    assert {"weights", "lifecycle"} == {check.family for check in registry}
    assert all(
        check.promise.endswith(".") and check.needs and check.exercised_by for check in registry
    )


def test_an_empty_trace_and_one_of_every_kind_crash_nothing() -> None:
    """Of an empty trace, each check says that it does not apply, and why, or that it cannot tell;
    events that refer to nothing known crash none.
    """
    registry = Registry([*weights.CHECKS, *lifecycle.CHECKS])
    script = TraceScript(max_staleness=1, partial_off="dropped")
    results = judge(script.trace(), registry).results
    reasons = {
        result.id: result.reason for result in results if result.verdict is not Verdict.UNKNOWN
    }
    assert {
        "weights.no-admission-while-paused": "the stack pauses no server to update it",
        "weights.no-token-while-paused": (
            "no pause of this stack freezes calls that only an engine could continue"
            " (resume='client')"
        ),
        "weights.failed-update-resumes": (
            "no weight update gave up: no transfer broke, or the broken ones were repeated"
        ),
        "weights.no-load-while-running": (
            "updates need not pause their servers (updates_pause=False)"
        ),
        **dict.fromkeys(
            ("weights.adapter-loaded", "weights.adapter-current", "weights.adapter-applied"),
            "the contract declares no adapters: updates bring the model itself",
        ),
        **dict.fromkeys(
            ("weights.checksums-agree", "weights.checksums-can-differ"),
            "nobody told checksums of weights",
        ),
        **dict.fromkeys(
            ("weights.delta-base", "weights.partial-update-unserved"),
            "the contract declares no deltas",
        ),
    } == reasons
    assert {Verdict.NOT_APPLICABLE, Verdict.UNKNOWN} == {result.verdict for result in results}
    script.admit(7).reply(7, (3,)).abort(7, wanted="x").resume().pause(progress={7: 1}).weights(
        None, label=None
    )  # type: ignore[arg-type]
    script.observe(5).fault("lost-reply", "s0", 7).fault("death", "s0").fault(
        "death"
    ).gauges().result((3,))
    assert "weights" in EVENT_KINDS
    assert not [
        result for result in judge(script.trace(), registry).results if "crashed" in result.reason
    ]
