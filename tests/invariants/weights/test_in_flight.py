"""Weight checks: pauses, service after an update, caches."""

from __future__ import annotations

import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Update, UpdatePhase
from rollproof.judging.checks import Finding, Verdict
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


def _updated(mode: PauseMode = PauseMode.ABORT, version: int = 1, **story: object) -> TraceScript:
    """A server with weights 0 that is updated to ``version`` while request r0 is open."""
    script = TraceScript(**story)  # type: ignore[arg-type]
    script.weights(0).submit().pause(mode).weights(version).resume()
    return script


class TestNoAdmissionWhilePaused:
    """``weights.no-admission-while-paused``."""

    ID = "weights.no-admission-while-paused"

    def test_an_admission_between_pause_and_resume_is_found(self) -> None:
        """A path around the gate admits a call while weights are replaced."""
        script = TraceScript()
        script.weights(0).submit().pause()
        call = script.send()
        script.admit(call)
        finding = finds(self.ID, script)
        assert "a call was admitted by a paused server" == finding.title
        assert "call 1 was admitted at event 4" == finding.observed
        assert {"call": 1, "server": "s0", "index": 4} == finding.where

    def test_a_call_may_be_parked_until_the_resume(self) -> None:
        """Sending is allowed, also from before the pause; running is not."""
        script = TraceScript()
        script.weights(0).submit()
        early = script.send()
        script.pause()
        late = script.send()
        script.resume()
        script.admit(early).admit(late)
        passes(self.ID, script, calls_sent_to_a_paused_server=1, calls_queued_at_a_pause=1)

    def test_another_server_goes_on(self) -> None:
        """A pause holds for its server alone."""
        script = TraceScript()
        script.weights(0).submit().pause()
        script.send()
        script.call((1, 2), server="s1")
        passes(self.ID, script)

    def test_calls_that_were_admitted_before_stay_admitted(self) -> None:
        """A frozen call is in flight, not queued: a pause over it alone does not put the promise to
        the test.
        """
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        script.pause(PauseMode.KEEP, progress={call: 1}).weights(1).resume()
        script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED))
        script.reply(call, (3, 4, 5, 6))
        unknown(self.ID, script, "not exercised")

    @pytest.mark.parametrize("driven", [True, False])
    def test_a_stack_that_pauses_no_server_is_not_judged(self, driven: bool) -> None:
        """In-flight updates load while calls run; a pause of the run itself is none of the stack's.
        A recording may lack the updates of its stack, so that its pauses may belong to them.
        """
        script = TraceScript(driven=driven)
        script.weights(0).submit().pause(PauseMode.KEEP).weights(1).resume()
        script.add(Update(version=2, label=2, phase=UpdatePhase.ASKED)).weights(2)
        script.add(Update(version=2, label=2, phase=UpdatePhase.ENDED))
        verdict = inapplicable if driven else unknown
        verdict(self.ID, script, "pauses no server" if driven else "")

    def test_a_server_that_died_while_paused_comes_back_unpaused(self) -> None:
        """Its pause died with it."""
        script = TraceScript()
        script.weights(0).submit().pause()
        script.send()
        script.fault("death", "s0").fault("revive", "s0").call((1, 2))
        passes(self.ID, script)

    @pytest.mark.parametrize(
        ("what", "server", "queued"),
        [("death", "s0", 0), ("death", "s1", 1), ("death", None, 1), ("late", "s0", 1)],
    )
    def test_the_queue_of_a_server_dies_with_it(
        self, what: str, server: str | None, queued: int
    ) -> None:
        """And no other one."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.send()
        script.fault(what, server).pause().resume().admit(call)
        counter = {"calls queued at a pause": queued} if queued else {}
        assert counter == {
            name: count for name, count in check(self.ID, script).exercised.items() if count
        }

    def test_one_resume_ends_two_pauses(self) -> None:
        """Pausing twice is idempotent (vLLM)."""
        script = TraceScript()
        script.weights(0).submit().pause()
        call = script.send()
        script.pause().resume()
        script.admit(call)
        passes(self.ID, script)


class TestNoTokenWhilePaused:
    """``weights.no-token-while-paused``."""

    ID = "weights.no-token-while-paused"

    @pytest.mark.parametrize("mode", FREEZING)
    def test_progress_during_the_pause_is_found(self, mode: PauseMode) -> None:
        """A worker that the pause did not reach goes on sampling."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(mode, progress={call: 1}).weights(1, progress={call: 1}).resume(
            progress={call: 2}
        )
        finding = finds(self.ID, script)
        assert f"1 tokens, as at the pause (mode {mode})" == finding.expected
        assert "2 tokens at event 6, before the resume" == finding.observed

    def test_a_reply_that_grew_during_the_pause_is_found(self) -> None:
        """The reply to a frozen call is compared too."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, progress={call: 1}).reply(call, (3, 4, 5, 6))
        assert "4 tokens at event 5, before the resume" == finds(self.ID, script).observed

    @pytest.mark.parametrize("mode", FREEZING)
    def test_a_frozen_call_goes_on_after_the_resume(self, mode: PauseMode) -> None:
        """No token until the resume is all that is required; a queued call has nothing to
        freeze.
        """
        script = TraceScript()
        script.weights(0).submit()
        call, queued = script.call((1, 2)), script.send((1, 2))
        held = {call: 2, queued: 0}
        script.pause(mode, progress=held).weights(1, progress=held).resume(progress=held).reply(
            call, (3, 4, 5, 6)
        )
        passes(self.ID, script, frozen_calls=2)

    def test_aborting_a_frozen_call_returns_what_it_had(self) -> None:
        """A reply during the pause is fine where it holds no new token."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, progress={call: 2}).reply(call, (3, 4), reason="abort").resume(
            progress={}
        )
        passes(self.ID, script)

    def test_one_token_is_enough_to_be_frozen(self) -> None:
        """The call had begun."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, progress={call: 1}).resume(progress={call: 1})
        passes(self.ID, script, frozen_calls=1)

    @pytest.mark.parametrize(
        ("what", "server", "found"),
        [("death", "s0", 0), ("death", "s1", 1), ("death", None, 1), ("late", "s0", 1)],
    )
    def test_a_server_that_died_froze_nothing(
        self, what: str, server: str | None, found: int
    ) -> None:
        """Its call went on elsewhere, under the same number; after another fault that is found."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, progress={call: 1}).fault(what, server)
        assert found == check(self.ID, script.reply(call, (3, 4))).found

    def test_no_progress_is_no_verdict(self) -> None:
        """A real engine that does not report its progress leaves the promise untested."""
        script = TraceScript()
        script.weights(0).submit()
        script.call((1, 2))
        script.pause(PauseMode.KEEP).resume()
        unknown(self.ID, script, "not exercised: no frozen calls occurred")

    @pytest.mark.parametrize("resume", ["client", "none"])
    def test_a_stack_that_freezes_nothing_is_exempt(self, resume: str) -> None:
        """Its pauses abort or drain, and no engine resumes anything."""
        script = TraceScript(resume=resume, partial_off="dropped")
        inapplicable(
            self.ID,
            script.weights(0).submit().pause(PauseMode.ABORT).resume(),
            f"(resume='{resume}')",
        )


class TestServedAfterUpdate:
    """``weights.served-after-update``."""

    ID = "weights.served-after-update"

    def test_old_weights_after_an_update_are_found(self) -> None:
        """An update that was acknowledged and took no effect."""
        script = _updated()
        call = script.call((1, 2))
        script.reply(call, (3, 4), version=0)
        finding = finds(self.ID, script)
        assert "version 1 on s0" == finding.expected
        assert "tokens 0 to 1 of call 1 were sampled by version 0" == finding.observed

    def test_going_back_to_older_weights_within_a_call_is_found(self) -> None:
        """A call in flight may move to newer weights, and not back."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.weights(1).reply(call, (3, 4, 5, 6), true_tokens=spans((0, 2, 1), (2, 4, 0)))
        assert (
            "tokens 2 to 3 of call 1 were sampled by version 0" == finds(self.ID, script).observed
        )

    def test_the_version_counts_from_the_admission(self) -> None:
        """A call that was sent before the update and admitted after it is served by the new
        weights.
        """
        script = TraceScript()
        script.weights(0).submit().pause()
        call = script.send()
        script.weights(1).resume()
        script.admit(call).reply(call, (3, 4), version=1)
        passes(self.ID, script, calls_served_after_an_update=1)

    def test_a_call_in_flight_may_have_both_versions(self) -> None:
        """Engine-side keep: old tokens from the old weights, new ones from the new; KV of both is
        no stale service.
        """
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP).weights(1).resume().reply(
            call, (3, 4, 5, 6), true_tokens=spans((0, 2, 0), (2, 4, "mixed"))
        )
        again = script.call((1, 2, 3, 4, 5, 6))
        script.reply(again, (7,), version=1)
        passes(self.ID, script, calls_served_after_an_update=1)

    def test_a_replica_that_waits_for_its_update_serves_what_it_has(self) -> None:
        """Updates reach replicas one after another: each is judged by its own."""
        script = TraceScript()
        script.weights(0).weights(0, "s1").submit().weights(1)
        call = script.call((1, 2), server="s1")
        script.reply(call, (3,), version=0).weights(1, "s1")
        late = script.call((1, 2, 3), server="s1")
        script.reply(late, (4,), version=1)
        passes(self.ID, script, calls_served_after_an_update=1)

    def test_an_identity_update_may_show_either_version(self) -> None:
        """Equal weights under two numbers are one."""
        script = TraceScript()
        script.weights(0).submit().weights(1, identity=True)
        call = script.call((1, 2))
        script.reply(call, (3,), version=0)
        passes(self.ID, script, calls_served_after_an_update=1)

    def test_only_the_weights_that_it_repeats_may_be_shown_for_them(self) -> None:
        """After an identity update: not those of an earlier update."""
        for shown, found in ((3, 0), (2, 0), (1, 1), (0, 1)):
            script = _updated().weights(2).weights(3, identity=True)
            script.reply(script.call((1, 2)), (3,), version=shown)
            assert found == check(self.ID, script).found

    def test_a_revived_server_is_not_judged_before_its_next_update(self) -> None:
        """It may come back with old weights or new ones."""
        script = _updated()
        script.fault("death", "s0").fault("revive", "s0")
        call = script.call((1, 2))
        script.reply(call, (3,), version=0)
        unknown(self.ID, script, "not exercised")
        script.weights(2)
        call = script.call((1, 2, 3))
        script.reply(call, (4,), version=2)
        passes(self.ID, script, calls_served_after_an_update=1)

    def test_without_truth_there_is_no_verdict(self) -> None:
        """Tags are what an engine shows; they prove nothing here."""
        script = _updated()
        call = script.call((1, 2))
        script.reply(call, (3, 4), version=0, true_tokens=None)
        unknown(self.ID, script, "only rollproof's fake engine knows")

    def test_without_an_update_it_is_not_exercised(self) -> None:
        """The weights that a server starts with are no update."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.reply(call, (3, 4))
        unknown(self.ID, script, "not exercised")


class TestNoStaleCache:
    """``weights.no-stale-cache``."""

    ID = "weights.no-stale-cache"

    def test_rows_of_old_weights_in_a_new_call_are_found(self) -> None:
        """The prefix cache served KV from before the update."""
        script = _updated()
        call = script.call((1, 2))
        script.reply(
            call,
            (3, 4),
            version=1,
            true_rows=spans((0, 1, 0), (1, 3, 1)),
            output={"cached_tokens": 1},
        )
        finding = finds(self.ID, script)
        assert (
            "rows 0 to 0 of call 1: version 0, 1 prompt tokens from the prefix cache"
            == finding.observed
        )
        assert "all computed by version 1 alone on s0" == finding.expected

    def test_mixed_tokens_are_found(self) -> None:
        """A frozen call went on over KV of its old weights."""
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP).weights(1).resume()
        script.reply(
            call,
            (3, 4),
            true_tokens=spans((0, 1, 0), (1, 2, "mixed")),
            true_rows=spans((0, 2, 0), (2, 3, "mixed")),
        )
        assert "rows 2 to 2 of call 1: version mixed" == finds(self.ID, script).observed

    def _cached(self, *, pauses: bool, **pause: bool) -> Finding:
        """A new call that was served KV of the old weights from the prefix cache."""
        script = TraceScript()
        script.weights(0).submit()
        if pauses:
            script.pause(**pause)
        script.weights(1)
        if pauses:
            script.resume()
        call = script.call((1, 2))
        script.reply(
            call,
            (3, 4),
            version=1,
            true_rows=spans((0, 1, 0), (1, 3, 1)),
            output={"cached_tokens": 1},
        )
        return finds(self.ID, script)

    def test_the_hint_names_a_pause_that_kept_the_cache(self) -> None:
        """Nothing reset it before the resume."""
        finding = self._cached(pauses=True, clear_cache=False)
        assert "The pause at event 2 kept the cache" in finding.hint
        assert "A reset before the pause is too early" in finding.hint
        assert "declare kv_policy='keep'" in finding.hint

    def test_the_hint_names_a_transfer_that_outlasted_its_pause(self) -> None:
        """The same rows, and the cache may well have been reset."""
        finding = self._cached(pauses=False)
        assert "The weights arrived at event 2, while the server was serving" in finding.hint
        assert "kept the cache" not in finding.hint

    def test_the_hint_names_a_reset_that_was_refused(self) -> None:
        """The server said that it cleared its cache."""
        finding = self._cached(pauses=True, clear_cache=True)
        assert "was to clear the cache" in finding.hint
        assert "the reset was refused while calls ran" in finding.hint

    def test_the_hint_names_the_last_load_that_replaced_the_older_weights(self) -> None:
        """They were served twice: the cache holds what it got the second time."""
        script = TraceScript()
        script.weights(0).weights(1).weights(0).submit()
        script.pause(clear_cache=False).weights(2).resume()
        script.reply(
            script.call((1, 2)),
            (3, 4),
            version=2,
            true_rows=spans((0, 1, 0), (1, 3, 2)),
            output={"cached_tokens": 1},
        )
        assert "The pause at event 4 kept the cache" in finds(self.ID, script).hint

    def test_weights_that_the_server_never_had_are_no_matter_of_its_cache(self) -> None:
        """Rows that fit no weights at all, and what they were mixed with later."""
        script = _updated()
        for prompt, span in (((1, 2), (0, 3, 7)), ((1, 2, 3), (0, 4, "mixed"))):
            call = script.call(prompt)
            script.reply(
                call, (3, 4), true_rows=spans(span), true_tokens=(), output={"cached_tokens": 1}
            )
        unknown(self.ID, script, "weights that it was never given")

    def test_a_server_that_restarts_in_the_middle_of_an_update_is_not_judged(self) -> None:
        """The update had paused it before it died, and loads into it as it serves again."""
        script = TraceScript()
        script.weights(0).submit().add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        script.pause(clear_cache=True).fault("death", "s0").fault("revive", "s0")
        script.weights(0, by_harness=True)
        call = script.call((1, 2))
        script.weights(1).resume()
        mixed = spans((0, 2, 0), (2, 3, "mixed"))
        script.reply(call, (3, 4), true_rows=mixed, true_tokens=spans((0, 2, "mixed")))
        script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED))
        again = script.call((1, 2, 3, 4))
        script.reply(again, (5,), true_rows=mixed, output={"cached_tokens": 3})
        unknown(self.ID, script, "not exercised")

    def test_an_update_after_such_a_restart_is_judged(self) -> None:
        """The next load says again what the cache may hold."""
        script = TraceScript()
        script.weights(0).submit().add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        script.pause(clear_cache=True).fault("death", "s0").fault("revive", "s0")
        script.weights(0, by_harness=True).weights(1).resume()
        script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED))
        script.pause(clear_cache=True).weights(2).resume()
        call = script.call((1, 2))
        script.reply(call, (3, 4), version=2, true_rows=spans((0, 1, 1), (1, 3, 2)))
        assert "rows 0 to 0 of call 1: version 1" == finds(self.ID, script).observed

    @pytest.mark.parametrize("what", ["update-failure", "evict", "join"])
    def test_other_faults_of_a_server_do_not_change_its_weights(self, what: str) -> None:
        """Only a server that comes back may have started with any weights."""
        script = _updated().fault(what, "s0")
        call = script.call((1, 2))
        script.reply(call, (3, 4), version=1, true_rows=spans((0, 1, 0), (1, 3, 1)))
        assert "rows 0 to 0 of call 1: version 0" == finds(self.ID, script).observed

    def test_the_hint_for_a_call_in_flight_names_the_pause_of_its_update(self) -> None:
        """And for a call that came later, the last update before it."""
        for running in (True, False):
            script = TraceScript()
            script.weights(0).submit()
            script.pause(PauseMode.KEEP, clear_cache=not running).weights(1).resume()
            call = script.call((1, 2)) if running else None
            script.pause(PauseMode.KEEP, clear_cache=False).weights(2).resume()
            call = script.call((1, 2)) if call is None else call
            script.reply(call, (3, 4), version=2, true_rows=spans((0, 2, 2), (2, 3, "mixed")))
            number = 7 if running else 5
            assert f"The pause at event {number} kept the cache" in finds(self.ID, script).hint

    def test_recomputed_kv_of_a_frozen_call_passes(self) -> None:
        """First rows of the old weights, the rest of the new ones, each computed by one version
        alone (vLLM keep, cleared).
        """
        script = TraceScript()
        script.weights(0).submit()
        call = script.call((1, 2))
        script.pause(PauseMode.KEEP, clear_cache=True).weights(1).resume()
        script.reply(
            call,
            (3, 4),
            true_tokens=spans((0, 1, 0), (1, 2, 1)),
            true_rows=spans((0, 2, 0), (2, 3, 1)),
        )
        passes(self.ID, script, calls_in_flight_during_an_update=1)

    def test_a_contract_that_keeps_the_cache_is_not_judged(self) -> None:
        """SGLang in place without a flush, declared: nothing to object to."""
        script = _updated(kv_policy="keep")
        call = script.call((1, 2))
        script.reply(call, (3, 4), version=1, true_rows=spans((0, 3, 0)))
        result = judge(script.trace(), REGISTRY)[self.ID]
        assert Verdict.NOT_APPLICABLE == result.verdict
        assert "the contract keeps the KV cache of older weights at an update" == result.reason

    @pytest.mark.parametrize("case", [{"clear_cache": False}, {"pause_mode": "in-place"}])
    def test_a_case_that_keeps_the_cache_is_not_held_against_the_stack(
        self, case: dict[str, object]
    ) -> None:
        """The default sync does what its case says."""
        script = _updated(case=case)
        call = script.call((1, 2))
        script.reply(call, (3, 4), version=1, true_rows=spans((0, 3, 0)))
        unknown(self.ID, script, "the case tells its weight syncs not to clear the cache")

    def test_a_prefix_hit_on_the_new_weights_passes(self) -> None:
        """Sharing KV within a version is what a cache is for."""
        script = _updated()
        for prompt in ((1, 2), (1, 2, 3, 4)):
            call = script.call(prompt)
            script.reply(
                call,
                (3, 4),
                version=1,
                true_rows=spans((0, len(prompt) + 1, 1)),
                output={"cached_tokens": 2},
            )
        passes(self.ID, script, calls_admitted_after_an_update=2)
