"""Weight checks: labels, staleness, one version a sample, updates to equal weights."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Update, UpdatePhase, Weights
from rollproof.core.records import Span
from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.engine_driver import spans
from tests.support.trace_script import (
    FREEZING,
    REGISTRY,
    TraceScript,
    check,
    finds,
    inapplicable,
    passes,
    unknown,
)


class TestLabelOnly:
    """``weights.label-only-keeps-calls``."""

    ID = "weights.label-only-keeps-calls"

    def _label(
        self, script: TraceScript, call: int, *, aborts: bool = True, same_time: bool = True
    ) -> TraceScript:
        """A label is published, and the endpoint aborts what is in flight at the same instant."""
        script.weights(0, label=1, loaded=False)
        if same_time:
            script._time -= 1
        script.abort(*((call,) if aborts else ()))
        return script

    def test_a_label_that_aborts_everything_is_found(self) -> None:
        """As in miles #2372, where 16 of 16 requests died at each publication."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        self._label(script, call).reply(call, (3,), reason="abort")
        finding = finds(self.ID, script)
        assert (
            "call 1 goes on: only the label 1 was published, no weights were loaded"
            == finding.expected
        )
        assert "it ended with finish reason abort after 1 tokens" == finding.observed
        assert "abort_all_requests=False" in finding.hint

    def test_a_label_that_leaves_calls_alone_passes(self) -> None:
        """The call ends as it would have."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.weights(0, label=1, loaded=False).reply(call, (3, 4, 5, 6))
        passes(self.ID, script, calls_in_flight_when_only_a_label_was_published=1)

    def test_an_abort_that_opens_a_pause_is_the_pauses(self) -> None:
        """A stack may publish the label and begin its update at the same instant."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        self._label(script, call).reply(call, (3,), reason="abort").pause().weights(1).resume()
        again = script.call((1, 2, 3))
        script.reply(again, (4, 5, 6))
        passes(self.ID, script)

    @pytest.mark.parametrize("first", ["abort", "end"])
    def test_an_abort_at_the_end_of_a_request_is_not_the_labels(self, first: str) -> None:
        """A stack that aborts everything when a request ends does so at the instant of a label,
        too, now and then: lifecycle.end-spares-others has the better name for it.
        """
        script = TraceScript()
        script.weights(0).submit().submit(request_id="r1")
        call, other = script.call((1, 2)), script.call((1, 2), request_id="r1")
        script.reply(other, (3, 4, 5, 6))
        if first == "end":
            script.result((3, 4, 5, 6), request_id="r1")
            script._time -= 1
        self._label(script, call)
        script._time -= 1
        script.reply(call, (3,), reason="abort")
        if first == "abort":
            script._time -= 1
            script.result((3, 4, 5, 6), request_id="r1")
        passes(self.ID, script)

    def test_the_end_of_the_aborted_request_itself_excuses_nothing(self) -> None:
        """A stack without partial rollout drops the sample at once."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        self._label(script, call)
        script._time -= 1
        script.reply(call, (3,), reason="abort")
        script._time -= 1
        script.result()
        finds(self.ID, script)

    def test_an_operator_that_aborts_later_is_not_the_label(self) -> None:
        """Another instant, another cause."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        self._label(script, call, same_time=False).reply(call, (3,), reason="abort")
        passes(self.ID, script)

    def test_an_operator_that_aborts_one_request_at_that_instant_is_not_the_label(self) -> None:
        """The endpoint aborts all, not one by its id."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.weights(0, label=1, loaded=False)
        script._time -= 1
        script.abort(call, wanted="r0").reply(call, (3,), reason="abort")
        passes(self.ID, script)


class TestStaleness:
    """``weights.staleness-bound``."""

    ID = "weights.staleness-bound"

    def _aged(
        self,
        updates: int,
        *,
        servers: tuple[str, ...] = ("s0",),
        mask: list[int] | None = None,
        **fields: object,
    ) -> TraceScript:
        """A sample of weights 0 and then of the newest ones, delivered after ``updates`` updates;
        the bound is 1.
        """
        script = TraceScript(max_staleness=1, loss_mask=mask is not None)
        for server in ("s0", "s1"):
            script.weights(0, server)
        script.submit()
        call = script.call((1, 2))
        script.reply(call, (3,), reason="abort")
        for version in range(1, updates + 1):
            for server in servers:
                script.weights(version, server, **fields)
        call = script.call((1, 2, 3))
        script.reply(call, (4, 5, 6), version=updates)
        script.result((3, 4, 5, 6), loss_mask=None if mask is None else np.array(mask))
        return script

    def test_the_oldest_token_decides(self) -> None:
        """A sample that ends under the newest weights is as old as its first token."""
        finding = finds(self.ID, self._aged(2, servers=("s0", "s1")))
        assert "at most 1 updates behind the newest weights" == finding.expected
        assert (
            "its oldest trained token was sampled by version 0, 2 updates behind"
            == finding.observed
        )

    def test_within_the_bound_it_passes(self) -> None:
        """As old as allowed."""
        passes(
            self.ID, self._aged(1, servers=("s0", "s1")), samples_older_than_the_newest_weights=1
        )

    def test_tokens_that_are_not_trained_on_may_be_older(self) -> None:
        """Masking off-policy tokens is a way to keep the bound (slime)."""
        unknown(self.ID, self._aged(2, servers=("s0", "s1"), mask=[0, 1, 1, 1]), "not exercised")

    def test_an_update_that_is_still_on_its_way_does_not_count(self) -> None:
        """While a replica has not been reached (or is skewed), the new weights cannot be sampled
        everywhere.
        """
        unknown(self.ID, self._aged(2, servers=("s0",)), "not exercised")

    def test_weights_without_a_label_are_not_published(self) -> None:
        """Unannounced weights do not count for staleness."""
        unknown(self.ID, self._aged(2, servers=("s0", "s1"), label=None), "not exercised")

    def test_equal_weights_are_not_newer(self) -> None:
        """Identity updates do not age a sample."""
        unknown(self.ID, self._aged(3, servers=("s0", "s1"), identity=True), "not exercised")

    def test_a_label_published_after_the_load_counts(self) -> None:
        """Load and publication may be two steps (TRL, verl)."""
        script = TraceScript(max_staleness=0)
        script.weights(0).submit()
        call = script.call((1, 2))
        script.reply(call, (3,)).weights(1, label=None).add(
            Weights(server_id="s0", version=1, label=1, loaded=False)
        ).result((3,))
        assert "0, 1 updates behind" in finds(self.ID, script).observed


class TestOneVersion:
    """``weights.one-version-per-sample``."""

    ID = "weights.one-version-per-sample"
    OFF: ClassVar[dict[str, object]] = {"case": {"partial": False}, "partial_off": "dropped"}

    def _crossing(
        self,
        mode: PauseMode | None,
        spans: tuple[Span, ...] = spans((0, 2, 0), (2, 4, 1)),
        **update: object,
    ) -> TraceScript:
        """One call in flight across an update, under a pause of ``mode`` or under none."""
        script = TraceScript(**self.OFF)  # type: ignore[arg-type]
        script.weights(0).submit()
        call = script.call((1, 2))
        if mode is not None:
            script.pause(mode)
        script.weights(1, **update)
        if mode is not None:
            script.resume()
        script.reply(call, (3, 4, 5, 6), true_tokens=spans).result((3, 4, 5, 6))
        return script

    def test_a_call_that_was_not_drained_is_found(self) -> None:
        """labs-molt #124: the tail of the pool crossed the update."""
        finding = finds(self.ID, self._crossing(None))
        assert "version 0 for the entire turn" == finding.expected
        assert "from response token 2 on it was sampled by version 1" == finding.observed
        assert {"request": "r0", "position": 4, "version": 1, "call": 1} == finding.where

    def test_a_resume_across_an_update_is_found(self) -> None:
        """Two calls, two versions, one sample."""
        script = TraceScript(**self.OFF)  # type: ignore[arg-type]
        script.weights(0).submit()
        call = script.call((1, 2))
        script.reply(call, (3,), reason="abort").pause().weights(1).resume()
        call = script.call((1, 2, 3))
        script.reply(call, (4, 5, 6), version=1).result((3, 4, 5, 6))
        assert (
            "from response token 1 on it was sampled by version 1"
            == finds(self.ID, script).observed
        )

    @pytest.mark.parametrize("mode", FREEZING)
    def test_a_pause_that_freezes_is_a_choice(self, mode: PauseMode) -> None:
        """A stack that freezes calls across an update chooses mixed samples."""
        passes(self.ID, self._crossing(mode))

    @pytest.mark.parametrize(
        ("frozen", "version", "found"), [("s0", 1, 0), ("s1", 1, 1), ("s0", 2, 1)]
    )
    def test_a_pause_excuses_its_server_and_the_weights_that_came_in_it(
        self, frozen: str, version: int, found: int
    ) -> None:
        """Another server's pause, or other weights, excuse nothing."""
        script = TraceScript(**self.OFF)  # type: ignore[arg-type]
        script.weights(0).weights(0, "s1").submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, frozen).weights(1, frozen).resume(frozen).weights(2)
        script.reply(call, (3, 4, 5, 6), true_tokens=spans((0, 2, 0), (2, 4, version)))
        assert found == check(self.ID, script.result((3, 4, 5, 6))).found

    def test_equal_weights_are_one_version(self) -> None:
        """An identity update mixes nothing."""
        passes(
            self.ID,
            self._crossing(None, identity=True),
            samples_delivered_with_partial_rollout_off=1,
        )

    def test_turns_may_have_different_versions(self) -> None:
        """Between two turns nothing is in flight."""
        script = TraceScript(**self.OFF)  # type: ignore[arg-type]
        script.weights(0).submit()
        call = script.call((1, 2))
        script.reply(call, (3,), reason="stop").observe(9).weights(1)
        call = script.call((1, 2, 3, 9))
        script.reply(call, (4,), reason="stop", version=1).result((3, 9, 4))
        passes(self.ID, script)

    def test_with_partial_rollout_on_it_is_not_exercised(self) -> None:
        """Then mixing is what partial rollout is for."""
        script = TraceScript(partial_off="dropped")
        script.weights(0).submit()
        call = script.call((1, 2))
        script.weights(1).reply(call, (3, 4), true_tokens=spans((0, 1, 0), (1, 2, 1))).result(
            (3, 4)
        )
        unknown(self.ID, script, "not exercised")


class TestIdentityUpdate:
    """``weights.identity-update-changes-nothing``."""

    ID = "weights.identity-update-changes-nothing"

    class Flat:
        """An oracle that gives every token the logprob ``-(version + 0.5)``."""

        def logprobs(self, version: int, ids: tuple[int, ...], start: int) -> np.ndarray:
            return np.full(len(ids) - start, -(version + 0.5))

        def routes(self, version: int, ids: tuple[int, ...], start: int = 0) -> np.ndarray:
            raise AssertionError("not asked for")

    def _story(self, logprobs: list[float], **update: object) -> TraceScript:
        script = TraceScript()
        script.weights(0).submit()
        script.weights(**{("version"): 0, ("label"): 1, ("identity"): True, **update})  # type: ignore[arg-type]
        call = script.call((1, 2))
        script.reply(call, (3, 4), output={"logprobs": np.array(logprobs)}).result((3, 4))
        return script

    def _verdict(self, script: TraceScript) -> tuple[Verdict, str]:
        result = judge(script.trace(), REGISTRY.select([self.ID]), self.Flat())[self.ID]  # type: ignore[arg-type]
        return result.verdict, result.findings[0].observed if result.findings else result.reason

    def test_other_values_after_equal_weights_are_found(self) -> None:
        """A load that is not repeatable."""
        assert (
            Verdict.FAIL,
            "logprob -2.5000 at token 1 of the call (1 of 2 tokens differ)",
        ) == self._verdict(self._story([-0.5, -2.5]))

    def test_equal_values_pass(self) -> None:
        """Missing logprobs are not compared."""
        assert (Verdict.PASS, "") == self._verdict(self._story([-0.5, np.nan]))

    @pytest.mark.parametrize(
        ("version", "end", "logprob", "verdict"),
        [
            (0, UpdatePhase.ENDED, -0.5, Verdict.PASS),
            (0, UpdatePhase.ENDED, -2.5, Verdict.FAIL),
            # it may have been about to load something
            (0, UpdatePhase.FAILED, -0.5, Verdict.UNKNOWN),
            # other weights, which a stack must load
            (1, UpdatePhase.ENDED, -0.5, Verdict.UNKNOWN),
        ],
    )
    def test_a_stack_may_skip_a_load_of_equal_weights(
        self, version: int, end: UpdatePhase, logprob: float, verdict: Verdict
    ) -> None:
        """The update has ended, and the replies after it are looked at."""
        script = TraceScript()
        script.weights(0).submit()
        script.add(Update(version=version, label=1, phase=UpdatePhase.ASKED))
        script.add(Update(version=version, label=1, phase=end))
        call = script.call((1, 2))
        script.reply(call, (3,), output={"logprobs": np.array([logprob])}).result((3,))
        assert verdict == self._verdict(script)[0]

    def test_an_update_that_loaded_before_the_request_is_no_skipped_one(self) -> None:
        """Its end alone is within the request."""
        script = TraceScript()
        script.weights(0).add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        script.weights(1, label=1).submit()
        script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED))
        call = script.call((1, 2))
        script.reply(call, (3,), output={"logprobs": np.array([-1.5])}).result((3,))
        assert Verdict.UNKNOWN == self._verdict(script)[0]

    def test_a_stack_without_logprobs_is_not_judged(self) -> None:
        """Its calls request none, so no run could ever compare any."""
        script = TraceScript(logprobs="none")
        script.weights(0).submit()
        inapplicable(self.ID, script, "the contract declares logprobs='none'")

    @pytest.mark.parametrize(
        ("logprobs", "sampling", "judged"),
        [
            ("raw", {"temperature": 0.7}, True),
            ("temperature-scaled", {"temperature": 0.7}, False),
            ("temperature-scaled", {"temperature": 1.0}, True),
            ("temperature-scaled", {"temperature": 0.0}, False),
            ("temperature-scaled", {}, True),
        ],
    )
    def test_only_unscaled_logprobs_are_compared(
        self, logprobs: str, sampling: dict[str, float], judged: bool
    ) -> None:
        """The oracle knows no others."""
        script = TraceScript(logprobs=logprobs)
        script.weights(0).submit(sampling=sampling).weights(0, label=1, identity=True)
        call = script.call((1, 2))
        script.reply(call, (3,), output={"logprobs": np.array([-0.5])}).result((3,))
        assert (Verdict.PASS if judged else Verdict.UNKNOWN) == self._verdict(script)[0]

    @pytest.mark.parametrize("values", [None, [], [-0.5]])
    @pytest.mark.parametrize("tokens", [(), (3, 4)])
    def test_a_reply_that_cannot_be_compared_hides_no_later_one(
        self, tokens: tuple[int, ...], values: list[float] | None
    ) -> None:
        """It has no tokens, no logprobs, or another number of them."""
        script = TraceScript()
        script.weights(0).submit().weights(0, label=1, identity=True)
        logprobs = None if values is None else np.array(values)
        first = script.call((1, 2))
        script.reply(first, tokens, "abort", output={"logprobs": logprobs})
        second = script.call((1, 2, *tokens))
        script.reply(second, (5,), output={"logprobs": np.array([-2.5])}).result((*tokens, 5))
        assert (
            Verdict.FAIL,
            "logprob -2.5000 at token 0 of the call (1 of 1 tokens differ)",
        ) == self._verdict(script)

    def test_a_real_update_is_not_judged(self) -> None:
        """New weights give new values."""
        verdict, reason = self._verdict(self._story([-9.0, -9.0], identity=False, version=1))
        assert Verdict.UNKNOWN == verdict
        assert "not exercised" in reason

    def test_a_request_that_also_saw_a_real_update_is_not_judged(self) -> None:
        """It is not known then which values are right."""
        script = self._story([-0.5, -0.5])
        trace = script.trace()
        events = [*trace.events[:2], Weights(server_id="s0", version=5, label=5), *trace.events[2:]]
        result = judge(trace.with_events(events), REGISTRY.select([self.ID]), self.Flat())[self.ID]  # type: ignore[arg-type]
        assert Verdict.UNKNOWN == result.verdict
