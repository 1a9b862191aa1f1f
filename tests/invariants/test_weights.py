"""Weight checks: pauses, service after an update, caches, labels, staleness."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from rollproof.checks import Verdict
from rollproof.judge import judge
from rollproof.records import Span
from rollproof.trace import PauseMode, Weights
from tests.support.telling import REGISTRY, Teller, finds, inapplicable, passes, unknown

FREEZING = (PauseMode.KEEP, PauseMode.RETRACT, PauseMode.IN_PLACE)


def _spans(*parts: tuple[int, int, int | str]) -> tuple[Span, ...]:
    return tuple(Span(start=start, end=end, version=version) for start, end, version in parts)


def _updated(mode: PauseMode = PauseMode.ABORT, version: int = 1, **story: object) -> Teller:
    """A server with weights 0 that is updated to ``version`` while request r0 is open."""
    teller = Teller(**story)  # type: ignore[arg-type]
    teller.weights(0).submit().pause(mode).weights(version).resume()
    return teller


class TestNoAdmissionWhilePaused:
    """``weights.no-admission-while-paused``."""

    ID = "weights.no-admission-while-paused"

    def test_an_admission_between_pause_and_resume_is_found(self) -> None:
        """A path around the gate admits a call while weights are replaced."""
        teller = Teller()
        teller.weights(0).submit().pause()
        call = teller.send()
        teller.admit(call)
        finding = finds(self.ID, teller)
        assert "a call was admitted by a paused server" == finding.title
        assert "call 1 was admitted at event 4" == finding.observed
        assert {"call": 1, "server": "s0", "index": 4} == finding.where

    def test_a_call_may_be_parked_until_the_resume(self) -> None:
        """Sending is allowed, also from before the pause; running is not."""
        teller = Teller()
        teller.weights(0).submit()
        early = teller.send()
        teller.pause()
        late = teller.send()
        teller.resume()
        teller.admit(early).admit(late)
        passes(self.ID, teller, calls_sent_to_a_paused_server=1, calls_queued_at_a_pause=1)

    def test_another_server_goes_on(self) -> None:
        """A pause holds for its server alone."""
        teller = Teller()
        teller.weights(0).submit().pause()
        teller.send()
        teller.call((1, 2), server="s1")
        passes(self.ID, teller)

    def test_calls_that_were_admitted_before_stay_admitted(self) -> None:
        """A frozen call is in flight, not queued: a pause over it alone does not put the promise to the test."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP, progress={call: 1}).resume().reply(call, (3, 4, 5, 6))
        unknown(self.ID, teller, "not exercised")

    def test_a_server_that_died_while_paused_comes_back_unpaused(self) -> None:
        """Its pause died with it."""
        teller = Teller()
        teller.weights(0).submit().pause()
        teller.send()
        teller.fault("death", "s0").fault("revive", "s0").call((1, 2))
        passes(self.ID, teller)

    def test_one_resume_ends_two_pauses(self) -> None:
        """Pausing twice is idempotent (vLLM)."""
        teller = Teller()
        teller.weights(0).submit().pause()
        call = teller.send()
        teller.pause().resume()
        teller.admit(call)
        passes(self.ID, teller)


class TestNoTokenWhilePaused:
    """``weights.no-token-while-paused``."""

    ID = "weights.no-token-while-paused"

    @pytest.mark.parametrize("mode", FREEZING)
    def test_progress_during_the_pause_is_found(self, mode: PauseMode) -> None:
        """A worker that the pause did not reach goes on sampling."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(mode, progress={call: 1}).weights(1, progress={call: 1}).resume(progress={call: 2})
        finding = finds(self.ID, teller)
        assert f"1 tokens, as at the pause (mode {mode})" == finding.expected
        assert "2 tokens at event 6, before the resume" == finding.observed

    def test_a_reply_that_grew_during_the_pause_is_found(self) -> None:
        """The reply to a frozen call is compared too."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP, progress={call: 1}).reply(call, (3, 4, 5, 6))
        assert "4 tokens at event 5, before the resume" == finds(self.ID, teller).observed

    @pytest.mark.parametrize("mode", FREEZING)
    def test_a_frozen_call_goes_on_after_the_resume(self, mode: PauseMode) -> None:
        """Standing still until the resume is all that is asked; a queued call has nothing to freeze."""
        teller = Teller()
        teller.weights(0).submit()
        call, queued = teller.call((1, 2)), teller.send((1, 2))
        held = {call: 2, queued: 0}
        teller.pause(mode, progress=held).weights(1, progress=held).resume(progress=held).reply(call, (3, 4, 5, 6))
        passes(self.ID, teller, frozen_calls=2)

    def test_aborting_a_frozen_call_returns_what_it_had(self) -> None:
        """A reply during the pause is fine where it holds no new token."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP, progress={call: 2}).reply(call, (3, 4), reason="abort").resume(progress={})
        passes(self.ID, teller)

    def test_no_progress_is_no_verdict(self) -> None:
        """A real engine that does not tell its progress leaves the promise untested."""
        teller = Teller()
        teller.weights(0).submit()
        teller.call((1, 2))
        teller.pause(PauseMode.KEEP).resume()
        unknown(self.ID, teller, "not exercised: no frozen calls occurred")

    @pytest.mark.parametrize("resume", ["client", "none"])
    def test_a_stack_that_freezes_nothing_is_exempt(self, resume: str) -> None:
        """Its pauses abort or drain, and no engine resumes anything."""
        teller = Teller(resume=resume, partial_off="dropped")
        inapplicable(self.ID, teller.weights(0).submit().pause(PauseMode.ABORT).resume(), f"(resume='{resume}')")


class TestServedAfterUpdate:
    """``weights.served-after-update``."""

    ID = "weights.served-after-update"

    def test_old_weights_after_an_update_are_found(self) -> None:
        """An update that was acknowledged and took no effect."""
        teller = _updated()
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=0)
        finding = finds(self.ID, teller)
        assert "version 1 on s0" == finding.expected
        assert "tokens 0 to 1 of call 1 were sampled by version 0" == finding.observed

    def test_going_back_to_older_weights_within_a_call_is_found(self) -> None:
        """A call in flight may move to newer weights, and not back."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.weights(1).reply(call, (3, 4, 5, 6), true_tokens=_spans((0, 2, 1), (2, 4, 0)))
        assert "tokens 2 to 3 of call 1 were sampled by version 0" == finds(self.ID, teller).observed

    def test_the_version_counts_from_the_admission(self) -> None:
        """A call that was sent before the update and admitted after it is served by the new weights."""
        teller = Teller()
        teller.weights(0).submit().pause()
        call = teller.send()
        teller.weights(1).resume()
        teller.admit(call).reply(call, (3, 4), version=1)
        passes(self.ID, teller, calls_served_after_an_update=1)

    def test_a_call_in_flight_may_have_both_versions(self) -> None:
        """Engine-side keep: old tokens from the old weights, new ones from the new; KV of both is no stale service."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP).weights(1).resume().reply(call, (3, 4, 5, 6), true_tokens=_spans((0, 2, 0), (2, 4, "mixed")))
        again = teller.call((1, 2, 3, 4, 5, 6))
        teller.reply(again, (7,), version=1)
        passes(self.ID, teller, calls_served_after_an_update=1)

    def test_a_replica_that_waits_for_its_update_serves_what_it_has(self) -> None:
        """Updates reach replicas one after another: each is judged by its own."""
        teller = Teller()
        teller.weights(0).weights(0, "s1").submit().weights(1)
        call = teller.call((1, 2), server="s1")
        teller.reply(call, (3,), version=0).weights(1, "s1")
        late = teller.call((1, 2, 3), server="s1")
        teller.reply(late, (4,), version=1)
        passes(self.ID, teller, calls_served_after_an_update=1)

    def test_an_identity_update_may_show_either_version(self) -> None:
        """Equal weights under two numbers are one."""
        teller = Teller()
        teller.weights(0).submit().weights(1, identity=True)
        call = teller.call((1, 2))
        teller.reply(call, (3,), version=0)
        passes(self.ID, teller, calls_served_after_an_update=1)

    def test_a_revived_server_is_not_judged_before_its_next_update(self) -> None:
        """It may come back with old weights or new ones."""
        teller = _updated()
        teller.fault("death", "s0").fault("revive", "s0")
        call = teller.call((1, 2))
        teller.reply(call, (3,), version=0)
        unknown(self.ID, teller, "not exercised")
        teller.weights(2)
        call = teller.call((1, 2, 3))
        teller.reply(call, (4,), version=2)
        passes(self.ID, teller, calls_served_after_an_update=1)

    def test_without_truth_there_is_no_verdict(self) -> None:
        """Tags are what an engine shows; they prove nothing here."""
        teller = _updated()
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=0, true_tokens=None)
        unknown(self.ID, teller, "only rollproof's own engine knows")

    def test_without_an_update_it_is_not_exercised(self) -> None:
        """The weights that a server starts with are no update."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.reply(call, (3, 4))
        unknown(self.ID, teller, "not exercised")


class TestNoStaleCache:
    """``weights.no-stale-cache``."""

    ID = "weights.no-stale-cache"

    def test_rows_of_old_weights_in_a_new_call_are_found(self) -> None:
        """The prefix cache served KV from before the update."""
        teller = _updated()
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=1, true_rows=_spans((0, 1, 0), (1, 3, 1)), output={"cached_tokens": 1})
        finding = finds(self.ID, teller)
        assert "rows 0 to 0 of call 1: version 0, 1 prompt tokens from the prefix cache" == finding.observed
        assert "every one computed by version 1 alone on s0" == finding.expected

    def test_mixed_tokens_are_found(self) -> None:
        """A frozen call went on over KV of its old weights."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP).weights(1).resume()
        teller.reply(call, (3, 4), true_tokens=_spans((0, 1, 0), (1, 2, "mixed")), true_rows=_spans((0, 2, 0), (2, 3, "mixed")))
        assert "rows 2 to 2 of call 1: version mixed" == finds(self.ID, teller).observed

    def test_recomputed_kv_of_a_frozen_call_passes(self) -> None:
        """First rows of the old weights, the rest of the new ones, each computed by one version alone (vLLM keep, cleared)."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP, clear_cache=True).weights(1).resume()
        teller.reply(call, (3, 4), true_tokens=_spans((0, 1, 0), (1, 2, 1)), true_rows=_spans((0, 2, 0), (2, 3, 1)))
        passes(self.ID, teller, calls_in_flight_during_an_update=1)

    def test_a_contract_that_keeps_the_cache_is_not_judged(self) -> None:
        """SGLang in place without a flush, declared: nothing to object to."""
        teller = _updated(kv_policy="keep")
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=1, true_rows=_spans((0, 3, 0)))
        result = judge(teller.trace(), REGISTRY)[self.ID]
        assert Verdict.NOT_APPLICABLE == result.verdict
        assert "the contract keeps the KV cache of older weights at an update" == result.reason

    @pytest.mark.parametrize("case", [{"clear_cache": False}, {"pause_mode": "in-place"}])
    def test_a_case_that_keeps_the_cache_is_not_held_against_the_stack(self, case: dict[str, object]) -> None:
        """The default sync does what its case says."""
        teller = _updated(case=case)
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=1, true_rows=_spans((0, 3, 0)))
        unknown(self.ID, teller, "the case asks its syncs not to clear the cache")

    def test_a_prefix_hit_on_the_new_weights_passes(self) -> None:
        """Sharing KV within a version is what a cache is for."""
        teller = _updated()
        for prompt in ((1, 2), (1, 2, 3, 4)):
            call = teller.call(prompt)
            teller.reply(call, (3, 4), version=1, true_rows=_spans((0, len(prompt) + 1, 1)), output={"cached_tokens": 2})
        passes(self.ID, teller, calls_admitted_after_an_update=2)


class TestLabelOnly:
    """``weights.label-only-keeps-calls``."""

    ID = "weights.label-only-keeps-calls"

    def _label(self, teller: Teller, call: int, *, aborts: bool = True, same_time: bool = True) -> Teller:
        """A label is published, and the endpoint aborts what is in flight at the same instant."""
        teller.weights(0, label=1, loaded=False)
        if same_time:
            teller._time -= 1
        teller.abort(*((call,) if aborts else ()))
        return teller

    def test_a_label_that_aborts_everything_is_found(self) -> None:
        """As in miles #2372, where 16 of 16 requests died at each publication."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        self._label(teller, call).reply(call, (3,), reason="abort")
        finding = finds(self.ID, teller)
        assert "call 1 goes on: only the label 1 was published, no weights were loaded" == finding.expected
        assert "it ended with finish reason abort after 1 tokens" == finding.observed
        assert "abort_all_requests=False" in finding.hint

    def test_a_label_that_leaves_calls_alone_passes(self) -> None:
        """The call ends as it would have."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.weights(0, label=1, loaded=False).reply(call, (3, 4, 5, 6))
        passes(self.ID, teller, calls_in_flight_when_only_a_label_was_published=1)

    def test_an_abort_that_opens_a_pause_is_the_pauses(self) -> None:
        """A stack may publish the label and begin its update at the same instant."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        self._label(teller, call).reply(call, (3,), reason="abort").pause().weights(1).resume()
        again = teller.call((1, 2, 3))
        teller.reply(again, (4, 5, 6))
        passes(self.ID, teller)

    def test_an_operator_that_aborts_later_is_not_the_label(self) -> None:
        """Another instant, another cause."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        self._label(teller, call, same_time=False).reply(call, (3,), reason="abort")
        passes(self.ID, teller)

    def test_an_operator_that_aborts_one_request_at_that_instant_is_not_the_label(self) -> None:
        """The endpoint aborts all, not one by its id."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.weights(0, label=1, loaded=False)
        teller._time -= 1
        teller.abort(call, wanted="r0").reply(call, (3,), reason="abort")
        passes(self.ID, teller)


class TestStaleness:
    """``weights.staleness-bound``."""

    ID = "weights.staleness-bound"

    def _aged(self, updates: int, *, servers: tuple[str, ...] = ("s0",), mask: list[int] | None = None, **fields: object) -> Teller:
        """A sample of weights 0 and then of the newest ones, delivered after ``updates`` updates; the bound is 1."""
        teller = Teller(max_staleness=1, loss_mask=mask is not None)
        for server in ("s0", "s1"):
            teller.weights(0, server)
        teller.submit()
        call = teller.call((1, 2))
        teller.reply(call, (3,), reason="abort")
        for version in range(1, updates + 1):
            for server in servers:
                teller.weights(version, server, **fields)
        call = teller.call((1, 2, 3))
        teller.reply(call, (4, 5, 6), version=updates)
        teller.result((3, 4, 5, 6), loss_mask=None if mask is None else np.array(mask))
        return teller

    def test_the_oldest_token_decides(self) -> None:
        """A sample that ends under the newest weights is as old as its first token."""
        finding = finds(self.ID, self._aged(2, servers=("s0", "s1")))
        assert "at most 1 updates behind the newest weights" == finding.expected
        assert "its oldest trained token was sampled by version 0, 2 updates behind" == finding.observed

    def test_within_the_bound_it_passes(self) -> None:
        """As old as allowed."""
        passes(self.ID, self._aged(1, servers=("s0", "s1")), samples_older_than_the_newest_weights=1)

    def test_tokens_that_are_not_trained_on_may_be_older(self) -> None:
        """Masking off-policy tokens is a way to keep the bound (slime)."""
        unknown(self.ID, self._aged(2, servers=("s0", "s1"), mask=[0, 1, 1, 1]), "not exercised")

    def test_an_update_that_is_still_on_its_way_does_not_count(self) -> None:
        """While a replica has not been reached (or is skewed), nobody can sample by the new weights everywhere."""
        unknown(self.ID, self._aged(2, servers=("s0",)), "not exercised")

    def test_weights_without_a_label_are_not_published(self) -> None:
        """Nobody is held to weights that were not announced."""
        unknown(self.ID, self._aged(2, servers=("s0", "s1"), label=None), "not exercised")

    def test_equal_weights_are_not_newer(self) -> None:
        """Identity updates do not age a sample."""
        unknown(self.ID, self._aged(3, servers=("s0", "s1"), identity=True), "not exercised")

    def test_a_label_published_after_the_load_counts(self) -> None:
        """Load and publication may be two steps (TRL, verl)."""
        teller = Teller(max_staleness=0)
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.reply(call, (3,)).weights(1, label=None).add(Weights(server_id="s0", version=1, label=1, loaded=False)).result((3,))
        assert "0, 1 updates behind" in finds(self.ID, teller).observed


class TestOneVersion:
    """``weights.one-version-per-sample``."""

    ID = "weights.one-version-per-sample"
    OFF: ClassVar[dict[str, object]] = {"case": {"partial": False}, "partial_off": "dropped"}

    def _crossing(self, mode: PauseMode | None, spans: tuple[Span, ...] = _spans((0, 2, 0), (2, 4, 1)), **update: object) -> Teller:
        """One call in flight across an update, under a pause of ``mode`` or under none."""
        teller = Teller(**self.OFF)  # type: ignore[arg-type]
        teller.weights(0).submit()
        call = teller.call((1, 2))
        if mode is not None:
            teller.pause(mode)
        teller.weights(1, **update)
        if mode is not None:
            teller.resume()
        teller.reply(call, (3, 4, 5, 6), true_tokens=spans).result((3, 4, 5, 6))
        return teller

    def test_a_call_that_was_not_drained_is_found(self) -> None:
        """labs-molt #124: the tail of the pool crossed the update."""
        finding = finds(self.ID, self._crossing(None))
        assert "version 0 for the whole turn" == finding.expected
        assert "from response token 2 on it was sampled by version 1" == finding.observed
        assert {"request": "r0", "position": 4, "version": 1, "call": 1} == finding.where

    def test_a_resume_across_an_update_is_found(self) -> None:
        """Two calls, two versions, one sample."""
        teller = Teller(**self.OFF)  # type: ignore[arg-type]
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.reply(call, (3,), reason="abort").pause().weights(1).resume()
        call = teller.call((1, 2, 3))
        teller.reply(call, (4, 5, 6), version=1).result((3, 4, 5, 6))
        assert "from response token 1 on it was sampled by version 1" == finds(self.ID, teller).observed

    @pytest.mark.parametrize("mode", FREEZING)
    def test_a_pause_that_freezes_is_a_choice(self, mode: PauseMode) -> None:
        """Whoever freezes calls across an update wants mixed samples."""
        passes(self.ID, self._crossing(mode))

    def test_equal_weights_are_one_version(self) -> None:
        """An identity update mixes nothing."""
        passes(self.ID, self._crossing(None, identity=True), samples_delivered_with_partial_rollout_off=1)

    def test_turns_may_have_different_versions(self) -> None:
        """Between two turns nothing is in flight."""
        teller = Teller(**self.OFF)  # type: ignore[arg-type]
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.reply(call, (3,), reason="stop").observe(9).weights(1)
        call = teller.call((1, 2, 3, 9))
        teller.reply(call, (4,), reason="stop", version=1).result((3, 9, 4))
        passes(self.ID, teller)

    def test_with_partial_rollout_on_it_is_not_exercised(self) -> None:
        """Then mixing is what partial rollout is for."""
        teller = Teller(partial_off="dropped")
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.weights(1).reply(call, (3, 4), true_tokens=_spans((0, 1, 0), (1, 2, 1))).result((3, 4))
        unknown(self.ID, teller, "not exercised")


class TestIdentityUpdate:
    """``weights.identity-update-changes-nothing``."""

    ID = "weights.identity-update-changes-nothing"

    class Flat:
        """An oracle that gives every token the logprob ``-(version + 0.5)``."""

        def logprobs(self, version: int, ids: tuple[int, ...], start: int) -> np.ndarray:
            return np.full(len(ids) - start, -(version + 0.5))

        def routes(self, version: int, ids: tuple[int, ...], start: int = 0) -> np.ndarray:
            raise AssertionError("not asked for")

    def _story(self, logprobs: list[float], **update: object) -> Teller:
        teller = Teller()
        teller.weights(0).submit()
        teller.weights(**{"version": 0, "label": 1, "identity": True, **update})  # type: ignore[arg-type]
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), output={"logprobs": np.array(logprobs)}).result((3, 4))
        return teller

    def _verdict(self, teller: Teller) -> tuple[Verdict, str]:
        result = judge(teller.trace(), REGISTRY.select([self.ID]), self.Flat())[self.ID]  # type: ignore[arg-type]
        return result.verdict, result.findings[0].observed if result.findings else result.reason

    def test_other_values_after_equal_weights_are_found(self) -> None:
        """A load that is not repeatable."""
        assert (Verdict.FAIL, "logprob -2.5000 at token 1 of the call (1 of 2 tokens differ)") == self._verdict(self._story([-0.5, -2.5]))

    def test_equal_values_pass(self) -> None:
        """Missing logprobs are not compared."""
        assert (Verdict.PASS, "") == self._verdict(self._story([-0.5, np.nan]))

    def test_a_real_update_is_not_judged(self) -> None:
        """New weights give new values."""
        verdict, reason = self._verdict(self._story([-9.0, -9.0], identity=False, version=1))
        assert Verdict.UNKNOWN == verdict
        assert "not exercised" in reason

    def test_a_request_that_also_saw_a_real_update_is_not_judged(self) -> None:
        """Then nobody can say which values are right."""
        teller = self._story([-0.5, -0.5])
        trace = teller.trace()
        events = [*trace.events[:2], Weights(server_id="s0", version=5, label=5), *trace.events[2:]]
        result = judge(trace.with_events(events), REGISTRY.select([self.ID]), self.Flat())[self.ID]  # type: ignore[arg-type]
        assert Verdict.UNKNOWN == result.verdict
