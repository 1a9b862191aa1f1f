"""Weight checks: pauses, service after an update, caches."""

from __future__ import annotations

import pytest

from rollproof.core.trace import PauseMode
from rollproof.judging.checks import Verdict
from rollproof.judging.judge import judge
from tests.support.engine_driver import spans
from tests.support.trace_script import (
    FREEZING,
    REGISTRY,
    Teller,
    finds,
    inapplicable,
    passes,
    unknown,
)


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
        """A frozen call is in flight, not queued: a pause over it alone does not put the promise to
        the test.
        """
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
        teller.pause(mode, progress={call: 1}).weights(1, progress={call: 1}).resume(
            progress={call: 2}
        )
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
        """Standing still until the resume is all that is asked; a queued call has nothing to
        freeze.
        """
        teller = Teller()
        teller.weights(0).submit()
        call, queued = teller.call((1, 2)), teller.send((1, 2))
        held = {call: 2, queued: 0}
        teller.pause(mode, progress=held).weights(1, progress=held).resume(progress=held).reply(
            call, (3, 4, 5, 6)
        )
        passes(self.ID, teller, frozen_calls=2)

    def test_aborting_a_frozen_call_returns_what_it_had(self) -> None:
        """A reply during the pause is fine where it holds no new token."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP, progress={call: 2}).reply(call, (3, 4), reason="abort").resume(
            progress={}
        )
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
        inapplicable(
            self.ID,
            teller.weights(0).submit().pause(PauseMode.ABORT).resume(),
            f"(resume='{resume}')",
        )


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
        teller.weights(1).reply(call, (3, 4, 5, 6), true_tokens=spans((0, 2, 1), (2, 4, 0)))
        assert (
            "tokens 2 to 3 of call 1 were sampled by version 0" == finds(self.ID, teller).observed
        )

    def test_the_version_counts_from_the_admission(self) -> None:
        """A call that was sent before the update and admitted after it is served by the new
        weights.
        """
        teller = Teller()
        teller.weights(0).submit().pause()
        call = teller.send()
        teller.weights(1).resume()
        teller.admit(call).reply(call, (3, 4), version=1)
        passes(self.ID, teller, calls_served_after_an_update=1)

    def test_a_call_in_flight_may_have_both_versions(self) -> None:
        """Engine-side keep: old tokens from the old weights, new ones from the new; KV of both is
        no stale service.
        """
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP).weights(1).resume().reply(
            call, (3, 4, 5, 6), true_tokens=spans((0, 2, 0), (2, 4, "mixed"))
        )
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
        teller.reply(
            call,
            (3, 4),
            version=1,
            true_rows=spans((0, 1, 0), (1, 3, 1)),
            output={"cached_tokens": 1},
        )
        finding = finds(self.ID, teller)
        assert (
            "rows 0 to 0 of call 1: version 0, 1 prompt tokens from the prefix cache"
            == finding.observed
        )
        assert "every one computed by version 1 alone on s0" == finding.expected

    def test_mixed_tokens_are_found(self) -> None:
        """A frozen call went on over KV of its old weights."""
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP).weights(1).resume()
        teller.reply(
            call,
            (3, 4),
            true_tokens=spans((0, 1, 0), (1, 2, "mixed")),
            true_rows=spans((0, 2, 0), (2, 3, "mixed")),
        )
        assert "rows 2 to 2 of call 1: version mixed" == finds(self.ID, teller).observed

    def test_recomputed_kv_of_a_frozen_call_passes(self) -> None:
        """First rows of the old weights, the rest of the new ones, each computed by one version
        alone (vLLM keep, cleared).
        """
        teller = Teller()
        teller.weights(0).submit()
        call = teller.call((1, 2))
        teller.pause(PauseMode.KEEP, clear_cache=True).weights(1).resume()
        teller.reply(
            call,
            (3, 4),
            true_tokens=spans((0, 1, 0), (1, 2, 1)),
            true_rows=spans((0, 2, 0), (2, 3, 1)),
        )
        passes(self.ID, teller, calls_in_flight_during_an_update=1)

    def test_a_contract_that_keeps_the_cache_is_not_judged(self) -> None:
        """SGLang in place without a flush, declared: nothing to object to."""
        teller = _updated(kv_policy="keep")
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=1, true_rows=spans((0, 3, 0)))
        result = judge(teller.trace(), REGISTRY)[self.ID]
        assert Verdict.NOT_APPLICABLE == result.verdict
        assert "the contract keeps the KV cache of older weights at an update" == result.reason

    @pytest.mark.parametrize("case", [{"clear_cache": False}, {"pause_mode": "in-place"}])
    def test_a_case_that_keeps_the_cache_is_not_held_against_the_stack(
        self, case: dict[str, object]
    ) -> None:
        """The default sync does what its case says."""
        teller = _updated(case=case)
        call = teller.call((1, 2))
        teller.reply(call, (3, 4), version=1, true_rows=spans((0, 3, 0)))
        unknown(self.ID, teller, "the case asks its syncs not to clear the cache")

    def test_a_prefix_hit_on_the_new_weights_passes(self) -> None:
        """Sharing KV within a version is what a cache is for."""
        teller = _updated()
        for prompt in ((1, 2), (1, 2, 3, 4)):
            call = teller.call(prompt)
            teller.reply(
                call,
                (3, 4),
                version=1,
                true_rows=spans((0, len(prompt) + 1, 1)),
                output={"cached_tokens": 2},
            )
        passes(self.ID, teller, calls_admitted_after_an_update=2)
