"""Lifecycle checks of aborted calls: which ones an abort hits, what they return, that they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollproof.core.engine_contract import PauseMode, StreamMode
from rollproof.core.events.rollout import Call, Chunk
from rollproof.core.records import Span
from tests.support.trace_script import TraceScript, check, finds, opened, passes, unknown


class TestHitsTarget:
    """``lifecycle.abort-hits-target``."""

    ID = "lifecycle.abort-hits-target"

    def _two(
        self,
        first: str = "1",
        second: str = "10",
        script: TraceScript | None = None,
        **fields: object,
    ) -> tuple[TraceScript, int, int]:
        script = script or TraceScript()
        script.submit(first, (5,), **fields).submit(
            second, (5, 6) if not fields else (5,), **fields
        )
        return script, script.call((5,), first), script.call((5, 6), second)

    def test_a_prefix_match_is_found(self) -> None:
        """'1' aborts '10' (sglang #25561)."""
        script, first, tenth = self._two()
        finding = finds(self.ID, script.abort(first, tenth, wanted="1"))
        assert "only calls of '1' end" == finding.expected
        assert "call 2 of request '10' also ended" == finding.observed

    def test_an_empty_id_that_hits_anything_is_found(self) -> None:
        """It is a prefix of every id."""
        script, first, tenth = self._two()
        finding = finds(self.ID, script.abort(first, tenth, wanted=""))
        assert "an empty id aborts nothing" == finding.expected
        assert "calls 1 of request '1', 2 of request '10' also ended" == finding.observed

    def test_an_id_of_the_stacks_own_making_hits_one_request(self) -> None:
        """The meaning of 'x' is unknown, but it cannot mean two requests."""
        script, first, tenth = self._two("a", "b")
        assert (
            "call 2 of request 'b' also ended"
            == finds(self.ID, script.abort(first, tenth, wanted="x")).observed
        )

    @pytest.mark.parametrize("wanted", ["1", "7f3a", "10", "call-2"])
    def test_an_abort_of_one_request_passes(self, wanted: str) -> None:
        """By the request's id, by one of the stack's own, or by that of the call."""
        script, first, tenth = self._two()
        passes(
            self.ID,
            script.abort(tenth if wanted in ("10", "call-2") else first, wanted=wanted),
            aborts_of_one_id=1,
        )

    @pytest.mark.parametrize(
        ("called", "wanted", "meant"),
        [(False, "batch-", True), (True, "batch-", False), (False, "x", True)],
    )
    def test_several_may_be_meant_by_how_their_ids_begin(
        self, called: bool, wanted: str, meant: bool
    ) -> None:
        """SGLang allows it, if no requests are reported; calls may have other names than handles.
        It is a fault if a call had exactly that id.
        """
        script = TraceScript()
        if called:
            script.reply(script.call((4,), wanted), (9,))
        hit = [script.call((5,), "batch-1"), script.call((6,), "batch-2")]
        script.abort(*hit, wanted=wanted)
        if meant:
            passes(self.ID, script, aborts_of_one_id=1)
        else:
            assert "call" in finds(self.ID, script).observed

    def test_a_call_may_be_named_by_its_number(self) -> None:
        """Even where the number is another request's id."""
        script = TraceScript()
        script.submit("2", (5,)).submit("r", (6,))
        script.call((5,), "2")
        call = script.call((6,), "r")
        passes(self.ID, script.abort(call, wanted="2"))

    def test_a_group_may_be_aborted_as_one(self) -> None:
        """By its name, or by an id of the stack's own, if the contract says that they live
        together, and in a recording.
        """
        for wanted, script in (
            ("g", TraceScript(group_aborts=True)),
            ("batch-7", TraceScript(group_aborts=True)),
            ("batch-7", TraceScript(driven=False)),
        ):
            script, first, second = self._two("a", "b", script, group="g")
            passes(self.ID, script.abort(first, second, wanted=wanted))

    def test_siblings_that_end_with_another_are_found(self) -> None:
        """Their calls share a handle, and the contract does not say that they live together."""
        for wanted in ("batch-7", "g"):
            script, first, second = self._two("a", "b", group="g")
            finding = finds(self.ID, script.abort(first, second, wanted=wanted))
            assert "an abort ended calls of several samples of one prompt" == finding.title
            assert f"the abort of '{wanted}' ended calls of requests 'a' and 'b'" == (
                finding.observed
            )
            assert "Declare group_aborts=True" in finding.hint

    def test_a_sibling_that_is_a_guess_is_not_judged(self) -> None:
        """No task says whose call it is: it may be the named request's own."""
        script, first, second = self._two("a", "b", group="g")
        trace = script.abort(first, second, wanted="batch-7").trace()
        events = [
            replace(event, request_id="", candidates=("a", "b"))
            if isinstance(event, Call) and event.call_id == second
            else event
            for event in trace.events
        ]
        passes(self.ID, trace.with_events(events))

    def test_aborting_everything_or_nothing_names_nobody(self) -> None:
        """A star, and an id that has ended already."""
        script, first, second = self._two()
        unknown(
            self.ID,
            script.abort(first, second).abort(wanted="1").abort(99, wanted="gone"),
            "not exercised",
        )

    def test_a_collateral_abort_is_found(self) -> None:
        """The engine says that it hit one call, and another one ends as aborted with no cause of
        its own.
        """
        script, first, tenth = self._two()
        script.abort(first, wanted="1").reply(first, (3,), reason="abort").reply(
            tenth, (4,), reason="abort"
        )
        finding = finds(self.ID, script)
        assert "a call ended as aborted although only another one was" == finding.title
        assert {"call": 2, "server": "s0", "index": 6} == finding.where

    def test_a_later_fault_of_its_server_explains_no_abort(self) -> None:
        """Only a death may have ended the call before it showed."""
        script, first, tenth = self._two()
        script.abort(first, wanted="1").reply(tenth, (4,), reason="abort")
        finds(self.ID, script.fault("update-failure", "s0"))

    def test_an_abort_that_hit_nothing_explains_none(self) -> None:
        """In a driven run the calls that it hit are known; in a recording they are not."""
        for driven in (True, False):
            script, first, tenth = self._two(script=TraceScript(driven=driven))
            script.abort(first, wanted="1").abort(wanted="gone").reply(tenth, (4,), reason="abort")
            assert int(driven) == check(self.ID, script).found

    def test_the_first_call_that_was_hit_is_shown(self) -> None:
        """Of several that the id does not name, and of several samples of a prompt."""
        script, first, tenth = self._two()
        script.submit("100", (7,))
        last = script.call((7,), "100")
        finding = finds(self.ID, script.abort(first, tenth, last, wanted="1"))
        assert (2, "10") == (finding.where["call"], finding.where["request"])

    @pytest.mark.parametrize(
        "cause", ["own", "all", "pause", "late pause", "weights", "reject", "death", "other server"]
    )
    def test_another_cause_explains_an_abort(self, cause: str) -> None:
        """Aborts of pauses come before the pause is acknowledged."""
        script, first, tenth = self._two()
        script.abort(first, wanted="1", server="s1" if cause == "other server" else "s0")
        if cause == "own":
            script.abort(tenth, wanted="10")
        elif cause == "all":
            script.abort(tenth)
        elif cause == "pause":
            script.pause()
        elif cause == "weights":
            script.weights(1)
        elif cause == "reject":
            script.fault("reject", "s0", tenth)
        script.reply(tenth, (4,), reason="abort")
        if cause == "late pause":
            script.pause().resume()
        elif cause == "death":
            script.fault("death", "s0")
        passes(self.ID, script)

    def test_a_call_to_a_paused_server_may_be_turned_away(self) -> None:
        """Some engines answer with an empty abort while paused."""
        script, first, _ = self._two()
        script.pause(PauseMode.KEEP)
        late = script.send((5, 6, 7), "10")
        passes(self.ID, script.abort(first, wanted="1").reply(late, (), reason="abort"))


class TestKeepsTokens:
    """``lifecycle.abort-keeps-tokens``."""

    ID = "lifecycle.abort-keeps-tokens"

    @pytest.mark.parametrize("at", ["pause", "weights", "resume", "truth"])
    def test_lost_tokens_are_found(self, at: str) -> None:
        """An abort in the waiting queue dropped them (sglang #11673)."""
        script = opened()
        call = script.call((1, 2))
        if at == "pause":
            script.pause(PauseMode.RETRACT, progress={call: 3})
        elif at == "weights":
            script.weights(1, progress={call: 3})
        elif at == "resume":
            script.resume(progress={call: 3})
        truth = (Span(start=0, end=3, version=0),) if at == "truth" else None
        finding = finds(self.ID, script.reply(call, (), reason="abort", true_tokens=truth))
        assert ("at least 3 tokens", "0 tokens") == (finding.expected, finding.observed)

    def test_all_tokens_and_later_ones_pass(self) -> None:
        """It may have gone on before it was aborted."""
        script = opened()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, progress={call: 1}).resume().reply(
            call, (3, 4), reason="abort"
        )
        passes(self.ID, script, aborted_calls_with_known_progress=1)

    @pytest.mark.parametrize(
        ("stream", "chunks", "progress"),
        [
            (StreamMode.DELTA, ((),), 0),
            (StreamMode.CUMULATIVE, ((),), 0),
            (StreamMode.DELTA, ((3,),), 1),
            (StreamMode.DELTA, ((3, 4), (5,)), 3),
            (StreamMode.DELTA, ((3,), (), (4, 5)), 3),
            (StreamMode.CUMULATIVE, ((3,),), 1),
            (StreamMode.CUMULATIVE, ((3, 4), (3, 4, 5)), 3),
            (StreamMode.CUMULATIVE, ((3, 4, 5), (3, 4)), 3),
            (StreamMode.FINAL, ((3, 4, 5),), 3),
        ],
    )
    def test_tokens_that_were_streamed_are_not_lost(
        self, stream: StreamMode, chunks: tuple[tuple[int, ...], ...], progress: int
    ) -> None:
        """All chunks together, or the longest of those that hold everything so far."""

        def story(returned: int, *more: Chunk) -> TraceScript:
            script = opened()
            call = script.call((1, 2), stream=stream)
            script.add(*(Chunk(call_id=call, token_ids=tokens) for tokens in chunks), *more)
            script.reply(call, (3, 4, 5)[:returned], reason="abort", true_tokens=None)
            return script

        passes(self.ID, story(progress), aborted_calls_with_known_progress=1)
        if progress:
            finding = finds(self.ID, story(progress - 1))
            assert (f"at least {progress} tokens", f"{progress - 1} tokens") == (
                finding.expected,
                finding.observed,
            )
        # the chunk that ends a stream may repeat tokens
        passes(self.ID, story(progress, Chunk(call_id=1, token_ids=(9,) * 9, finished=True)))

    def test_the_largest_count_is_the_one_that_was_sampled(self) -> None:
        """Of two pauses, of the stream, and of the engine itself."""
        for first, second, truth in ((3, 1, 2), (1, 3, 2), (1, 2, 3), (2, 3, 0)):
            script = opened()
            call = script.call((1, 2))
            script.pause(PauseMode.KEEP, progress={call: first}).resume()
            script.add(Chunk(call_id=call, token_ids=(3, 4, 5)[:second]))
            spans = (Span(start=0, end=truth, version=0),) if truth else ()
            script.reply(call, (3, 4), reason="abort", true_tokens=spans)
            assert "at least 3 tokens" == finds(self.ID, script).expected

    def test_natural_ends_are_not_judged(self) -> None:
        """An engine may trim a stop string off."""
        script = opened()
        call = script.call((1, 2))
        unknown(
            self.ID,
            script.pause(PauseMode.KEEP, progress={call: 3}).reply(call, (3,), reason="stop"),
            "not exercised",
        )

    def test_unknown_progress_is_no_verdict(self) -> None:
        """A real engine that shows only its reply."""
        script = opened()
        call = script.call((1, 2))
        unknown(
            self.ID, script.reply(call, (3,), reason="abort", true_tokens=None), "not exercised"
        )


class TestAbortEnds:
    """``lifecycle.abort-ends-call``."""

    ID = "lifecycle.abort-ends-call"

    def test_a_call_that_never_answers_is_found(self) -> None:
        """Its caller waits for ever (tpu-inference #3362)."""
        script = opened()
        call = script.call((1, 2))
        finding = finds(self.ID, script.abort(call, wanted="r0").result(event={"hung": True}))
        assert "a reply to call 1, which the abort of 'r0' at event 3 hit" == finding.expected

    def test_an_answer_passes(self) -> None:
        """Also a natural one: the abort came too late."""
        script = opened()
        call = script.call((1, 2))
        passes(self.ID, script.abort(call).reply(call, (3, 4, 5, 6)), calls_aborted=1)

    def test_a_paused_or_dead_server_and_a_lost_reply_excuse(self) -> None:
        """Something else keeps the answer."""
        for cause in ("pause", "death", "lost"):
            script = opened()
            call = script.call((1, 2))
            script.abort(call)
            if cause == "pause":
                script.pause(PauseMode.KEEP)
            else:
                script.fault(
                    "death" if cause == "death" else "lost-reply",
                    "s0",
                    call if cause == "lost" else None,
                )
            unknown(self.ID, script.result(event={"hung": True}), "not exercised")

    def test_a_trace_that_may_have_been_cut_is_not_judged(self) -> None:
        """The answer may have come after the last event."""
        script = opened(driven=False)
        unknown(self.ID, script.abort(script.call((1, 2))), "may have been cut there")
