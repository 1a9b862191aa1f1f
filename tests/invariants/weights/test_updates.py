"""Checks of the update procedure: replicas, pauses that end, failures, and two updates at once."""

from __future__ import annotations

import pytest

from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Update, UpdatePhase
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown


def _fleet(*, servers: tuple[str, ...] = ("s0", "s1"), **story: object) -> TraceScript:
    """Servers with weights 0, and request r0 open."""
    script = TraceScript(**story)  # type: ignore[arg-type]
    for server in servers:
        script.weights(0, server)
    script.submit()
    return script


class TestUpdatesEnd:
    """``weights.updates-end``."""

    ID = "weights.updates-end"

    def test_an_update_that_hangs_is_found(self) -> None:
        """The runner gave up on it."""
        script = _fleet().fault("update-hung", detail="action 1: sync at r0/2")
        assert (
            "it did not end within the deadline (action 1: sync at r0/2)"
            == finds(self.ID, script).observed
        )

    def test_updates_that_end_pass(self) -> None:
        """The weights that a server starts with are no update."""
        passes(self.ID, _fleet().weights(1).weights(1, "s1"), updates=2)


def _serves(script: TraceScript, server: str = "s1") -> TraceScript:
    """``server`` admits one more call of a rollout."""
    return script.admit(script.send(server=server), server)


class TestEveryReplica:
    """``weights.every-replica-updated``."""

    ID = "weights.every-replica-updated"

    def test_a_replica_that_was_left_out_is_found(self) -> None:
        """It serves old weights for ever."""
        script = _fleet().pause().weights(1).resume().pause(server="s1").resume("s1")
        finding = finds(self.ID, _serves(script))
        assert "version 1 on all of ['s0', 's1']" == finding.expected
        assert "s1 still holds 0" == finding.observed

    def test_a_label_is_no_load(self) -> None:
        """A server that only shows another label has served what it serves."""
        script = _serves(_fleet().pause().weights(1).resume())
        script.weights(0, "s1", label=1, loaded=False)
        assert "s1 still holds 0" == finds(self.ID, script).observed

    def test_a_replica_that_admits_no_further_call_is_not_behind(self) -> None:
        """A stack may load each server before the next call that it sends to it."""
        silent = _fleet(servers=("s0", "s1", "s2")).weights(1)
        unknown(self.ID, silent.weights(1, "s1"), "not exercised")
        on_its_way = _fleet()
        call = on_its_way.send(server="s1")
        unknown(self.ID, on_its_way.weights(1).admit(call, "s1"), "not exercised")
        lazy = _fleet().weights(1)
        call = lazy.send(server="s1")
        passes(self.ID, lazy.weights(1, "s1").admit(call, "s1"), updates_of_several_replicas=1)

    def test_calls_count_from_the_end_of_the_update_on(self) -> None:
        """Before it, a server may serve what it has."""
        ended = Update(version=1, label=1, phase=UpdatePhase.ENDED)
        for late in (False, True):
            script = _fleet().add(Update(version=1, label=1, phase=UpdatePhase.ASKED)).weights(1)
            if not late:
                unknown(self.ID, _serves(script).add(ended), "not exercised")
            else:
                finds(self.ID, _serves(script.add(ended)))

    def test_an_update_that_has_not_ended_is_not_judged(self) -> None:
        """The trainer has not been told that it is done."""
        script = _fleet().add(Update(version=1, label=1, phase=UpdatePhase.ASKED)).weights(1)
        unknown(self.ID, _serves(script), "the trace ends in the middle of an update")

    def test_calls_of_no_rollout_do_not_count(self) -> None:
        """A stack may ask a server whether it is well."""
        script = _fleet().weights(1)
        unknown(self.ID, script.admit(script.send(request_id="", server="s1"), "s1"), "exercised")

    def test_a_replica_that_was_never_updated_is_found(self) -> None:
        """Also if its starting weights are unknown, and only its calls name it."""
        script = TraceScript()
        script.submit()
        script.call((1, 2), server="s1")
        _serves(script.weights(1))
        assert "s1 still holds the weights that it started with" == finds(self.ID, script).observed

    def test_replicas_may_differ_during_an_update(self) -> None:
        """One after another is a way to update."""
        script = _fleet()
        for server in ("s0", "s1"):
            script.pause(server=server).weights(1, server).resume(server)
        passes(self.ID, script, updates_of_several_replicas=1)

    def test_a_declared_skew_explains_one_server_ahead(self) -> None:
        """The case updated it alone; the next update reaches all."""
        case = {"actions": ({"do": "skew", "server": "s1"},)}
        unknown(self.ID, _serves(_fleet(case=case).weights(1, "s1"), "s0"), "skew")
        passes(self.ID, _fleet(case=case).weights(1, "s1").weights(2, "s1").weights(2))

    def test_a_skew_does_not_excuse_an_update_that_left_a_replica_out(self) -> None:
        """Two of three servers is no skew."""
        case = {"actions": ({"do": "skew", "server": "s1"},)}
        script = _fleet(servers=("s0", "s1", "s2"), case=case).weights(1, "s1").weights(1, "s0")
        finds(self.ID, _serves(script, "s2"))

    def test_what_the_harness_loads_is_no_update_of_the_stack(self) -> None:
        """A skew that came before the update or after it, and one server that lags behind."""
        before = _fleet().weights(1, "s1", by_harness=True).weights(2).weights(2, "s1")
        passes(self.ID, before, updates_of_several_replicas=1)
        after = _fleet().weights(1).weights(1, "s1").weights(2, by_harness=True)
        passes(self.ID, after, updates_of_several_replicas=1)
        background = _fleet().weights(2, by_harness=True).weights(1, "s1")
        passes(self.ID, background, updates_of_several_replicas=1)
        lags = _fleet(servers=("s0", "s1", "s2")).weights(1, by_harness=True)
        unknown(self.ID, lags.weights(1, "s1", by_harness=True), "not exercised")

    def test_an_update_that_left_a_skewed_server_out_is_found(self) -> None:
        """It has the older weights of the harness."""
        script = _fleet().weights(1, "s1", by_harness=True).weights(2)
        assert "s1 still holds 1" == finds(self.ID, _serves(script)).observed

    def test_a_dead_server_is_not_waited_for(self) -> None:
        """An update reaches the living."""
        script = _fleet().fault("death", "s1").weights(1)
        passes(
            self.ID,
            script.pause().resume().fault("revive", "s1").weights(1, "s1"),
            updates_of_several_replicas=1,
        )

    def test_a_server_revived_with_old_weights_waits_for_the_next_update(self) -> None:
        """Until then its death explains it."""
        script = _fleet().fault("death", "s1").weights(1).fault("revive", "s1")
        unknown(
            self.ID,
            _serves(script),
            "the revival of a server came after the last update that reached every replica",
        )
        passes(self.ID, script.weights(2).weights(2, "s1"))

    def test_a_failed_update_leaves_replicas_apart_until_one_works(self) -> None:
        """The failure is judged elsewhere."""
        script = _fleet().weights(1).fault("update-failure", "s1").fault("update-failure")
        unknown(
            self.ID,
            _serves(script),
            "a failed update came after the last update that reached every replica",
        )
        passes(self.ID, script.weights(2).weights(2, "s1"))

    def test_a_trace_that_ends_in_the_middle_is_not_judged(self) -> None:
        """A server that is still paused, or a trace that no case drove to its end."""
        unknown(
            self.ID,
            _serves(_fleet().weights(1)).pause(server="s1"),
            "the trace ends in the middle of an update",
        )
        unknown(
            self.ID,
            _serves(_fleet(driven=False).weights(1)),
            "the trace ends in the middle of an update",
        )

    def test_equal_weights_under_a_new_number_are_no_difference(self) -> None:
        """An identity update of one server leaves all with equal weights."""
        passes(self.ID, _fleet().weights(0, identity=True, label=1))


class TestEveryPause:
    """``weights.every-pause-resumes``."""

    ID = "weights.every-pause-resumes"

    def test_a_pause_without_a_resume_is_found(self) -> None:
        """Nothing failed, and there was no resume."""
        finding = finds(self.ID, _fleet().pause().weights(1))
        assert "a resume of s0 after its pause (mode abort) at event 3" == finding.expected
        assert "none until the end of the trace" == finding.observed

    def test_a_pause_of_a_failed_update_hides_no_other(self) -> None:
        """The second server was paused after the update had given up."""
        script = _fleet().pause().fault("update-failure").pause(server="s1")
        assert "s1" == finds(self.ID, script).where["server"]

    def test_requests_that_hang_on_it_are_named(self) -> None:
        """Also in a trace without a case: it hung, so it was not cut."""
        script = _fleet(driven=False).pause()
        script.send()
        script.result(event={"hung": True, "error": "deadline"})
        assert (
            "none until the end of the trace; requests ['r0'] hang on it"
            == finds(self.ID, script).observed
        )

    def test_a_trace_that_may_have_been_cut_is_not_judged(self) -> None:
        """An update that has just begun when the trace ends is no fault."""
        unknown(self.ID, _fleet(driven=False).pause(), "may have been cut there")

    def test_an_update_that_hangs_is_not_judged_here(self) -> None:
        """It has not ended, so its pause has not either."""
        unknown(self.ID, _fleet().pause().fault("update-hung"), "may have been cut there")

    def test_a_resume_or_a_death_ends_a_pause(self) -> None:
        """One resume ends several pauses of a server."""
        passes(
            self.ID,
            _fleet().pause().pause().resume().pause(server="s1").fault("death", "s1"),
            pauses=1,
        )


class TestFailedUpdate:
    """``weights.failed-update-resumes``."""

    ID = "weights.failed-update-resumes"

    def _failed(self) -> TraceScript:
        """The transfer to s1 broke, and the procedure gave up without resuming."""
        script = _fleet().pause().pause(server="s1").weights(1).fault("update-failure", "s1")
        return script.fault("update-failure", detail="TransferFailed: broke")

    def test_replicas_left_paused_are_found(self) -> None:
        """As in verl: its update has no try/finally."""
        finding = finds(self.ID, self._failed(), count=2)
        assert (
            "s0 is resumed before the update gives up at event 7 (TransferFailed: broke)"
            == finding.expected
        )
        assert "it was still paused at the end of the trace" == finding.observed
        assert "verl" in finding.hint

    def test_it_is_too_late_when_the_next_update_resumes_them(self) -> None:
        """In between callers waited for nothing."""
        script = self._failed()
        for server in ("s0", "s1"):
            script.pause(server=server).weights(2, server).resume(server)
        assert (
            "it was still paused when the next update began, at event 8"
            == finds(self.ID, script, count=2).observed
        )

    def test_hung_requests_are_named(self) -> None:
        """What it led to."""
        script = self._failed().result(event={"hung": True})
        assert (
            "it was still paused at the end of the trace; requests ['r0'] hang"
            == finds(self.ID, script, count=2).observed
        )

    def test_a_finally_passes(self) -> None:
        """The procedure resumes before it gives up."""
        script = _fleet().pause().fault("update-failure", "s0").resume().fault("update-failure")
        passes(self.ID, script, failed_updates=1)

    def test_a_procedure_that_tries_again_by_itself_has_not_failed(self) -> None:
        """Only a transfer broke; the second one worked, under the same pause or under a new one."""
        script = _fleet().pause().fault("update-failure", "s0").pause().weights(1).resume()
        inapplicable(self.ID, script, "no weight update gave up")

    def test_another_update_that_holds_the_pause_is_waited_for(self) -> None:
        """Of two at once one failed: the other resumes."""
        script = _fleet().pause().pause().fault("update-failure").weights(2).resume()
        passes(self.ID, script, failed_updates=1)


class TestLoadWhileRunning:
    """``weights.no-load-while-running``."""

    ID = "weights.no-load-while-running"

    def _running(self, **changes: object) -> tuple[TraceScript, int]:
        """A call that runs on s0 when an update is requested, in a stack that promises pauses."""
        script = _fleet(**{"updates_pause": True, **changes})
        call = script.call((1, 2))
        script.add(Update(version=1, label=1, phase=UpdatePhase.ASKED))
        return script, call

    def test_a_load_without_a_pause_is_found(self) -> None:
        """As in SkyRL#1212: calls compute with weights that have arrived in part."""
        script, call = self._running()
        finding = finds(self.ID, script.weights(1, progress={call: 2}))
        assert "a pause of s0 before it loads version 1" in finding.expected
        assert (
            f"it loaded them at event 6, while call {call} ran, without a pause" == finding.observed
        )
        assert {"call": call, "server": "s0", "index": 6} == finding.where

    def test_a_load_after_the_resume_is_found(self) -> None:
        """The pause ended before the transfer did."""
        script, call = self._running()
        script.pause(PauseMode.KEEP).resume().weights(1, progress={call: 2})
        assert (
            f"it loaded them at event 8, while call {call} ran: its pause had ended at event 7"
            == finds(self.ID, script).observed
        )

    @pytest.mark.parametrize("left", [{}, {1: 2}])
    def test_a_load_within_a_pause_passes(self, left: dict[int, int]) -> None:
        """Whether the pause froze the call or ended it."""
        script, _ = self._running()
        script.pause().pause().weights(1, progress=left).resume()
        passes(self.ID, script, loads_on_servers_that_ran_calls=1)

    def test_a_pause_of_another_server_is_none(self) -> None:
        """Each server needs its own."""
        script, call = self._running()
        script.pause(server="s1").weights(1, progress={call: 2})
        assert "s0" == finds(self.ID, script).where["server"]

    def test_a_call_that_was_answered_does_not_run(self) -> None:
        """A stack that drains its servers has no call to pause, but none was found running."""
        script, call = self._running()
        script.reply(call, (3, 4)).weights(1, progress={})
        passes(self.ID, script, loads_on_servers_that_ran_calls=1)

    def test_a_queued_call_does_not_run(self) -> None:
        """Nothing of it is computed yet."""
        script = _fleet(updates_pause=True)
        queued = script.send()
        script.weights(1, progress={queued: 0}).admit(queued)
        unknown(self.ID, script, "not exercised")

    def test_loads_of_the_harness_adapters_and_labels_are_not_judged(self) -> None:
        """The first is none of the stack's, and the others leave the weights of running calls."""
        script, call = self._running()
        for fields in ({"by_harness": True}, {"adapter": "policy"}, {"loaded": False}):
            script.weights(1, progress={call: 2}, **fields)
        unknown(self.ID, script, "not exercised")

    def test_a_server_that_died_in_the_update_is_not_judged(self) -> None:
        """It came back without a pause while the transfer to it went on."""
        script, _ = self._running()
        script.pause().fault("death", "s0").fault("revive", "s0")
        again = script.call((1, 2))
        unknown(self.ID, script.weights(1, progress={again: 1}), "not exercised")

    def test_the_next_update_is_judged_again(self) -> None:
        """The server is a living one like the others."""
        script, _ = self._running()
        script.fault("death", "s0").fault("revive", "s0")
        script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED))
        call = script.call((1, 2))
        script.add(Update(version=2, label=2, phase=UpdatePhase.ASKED))
        finds(self.ID, script.weights(2, progress={call: 1}))

    def test_without_the_progress_of_calls_the_verdict_is_unknown(self) -> None:
        """A call without a reply may have ended."""
        script, _ = self._running()
        unknown(self.ID, script.weights(1), "does not say which calls run when a server loads")

    def test_without_admissions_the_verdict_is_unknown(self) -> None:
        """A call that was sent may not have begun."""
        script = _fleet(updates_pause=True)
        call = script.send()
        unknown(self.ID, script.weights(1, progress={call: 0}), "when a server admits a call")

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"updates_pause": False}, "updates_pause=False"),
            ({"adapters": "frozen-base"}, "swapped while calls run"),
        ],
    )
    def test_stacks_without_the_promise_are_not_judged(
        self, changes: dict[str, object], reason: str
    ) -> None:
        """They may drain servers instead, or let them sample on."""
        script, call = self._running(**changes)
        inapplicable(self.ID, script.weights(1, progress={call: 2}), reason)


class TestAtOnce:
    """``weights.updates-do-not-interleave`` and ``weights.newest-update-stays``."""

    NEST = "weights.updates-do-not-interleave"
    NEWEST = "weights.newest-update-stays"

    def test_a_resume_into_the_other_update_is_found(self) -> None:
        """Both paused; the first resumed, and the second loaded into a serving engine."""
        script = _fleet().pause().pause().weights(1).resume().weights(2).resume()
        finding = finds(self.NEST, script)
        assert (
            "paused twice, resumed at event 6, loaded at event 7 while serving, resumed again at"
            " event 8" == finding.observed
        )

    def test_the_second_pause_may_come_after_the_first_load(self) -> None:
        """The order of the two loads does not matter."""
        finds(self.NEST, _fleet().pause().weights(1).pause().resume().weights(2).resume())

    def test_loads_of_unknown_weights_show_no_second_update(self) -> None:
        """A recorder at the wire sees two pauses, and not whether two updates made them."""
        script = _fleet().pause().pause().weights(None).resume().weights(None).resume()  # type: ignore[arg-type]
        for name in (self.NEST, self.NEWEST):
            unknown(name, script, "the trace does not say which weights were loaded")

    @pytest.mark.parametrize(
        "steps",
        ["PWRPWR", "PPWWRR", "PPWR", "PPWRWPWR", "PWRWR", "WRPWR", "WW", "PPWRRWR"],
        ids=[
            "in turn",
            "loads before resumes",
            "idempotent pause",
            "load without a pause",
            "needless resume",
            "boot",
            "no pauses",
            "a load without a pause afterwards",
        ],
    )
    def test_other_orders_pass(self, steps: str) -> None:
        """In turn, together, with idempotent pauses, or without pauses at all."""
        script = _fleet(case={"actions": ({"do": "sync-twice"},)})
        version = 0
        for step in steps:
            version += step == "W"
            {"P": script.pause, "W": lambda v=version: script.weights(v), "R": script.resume}[
                step
            ]()
        passes(self.NEST, script, updates_started_at_once=1)
        passes(self.NEWEST, script, updates_started_at_once=1)

    def test_an_older_update_that_overwrites_a_newer_one_is_found(self) -> None:
        """The race left the older weights in place."""
        finding = finds(
            self.NEWEST, _fleet().pause().pause().weights(2).weights(1).resume().resume()
        )
        assert "version 2, loaded at event 5, stays on s0" == finding.expected
        assert (
            "version 1 was loaded after it, at event 6, and is served to the end"
            == finding.observed
        )

    def test_each_server_is_judged_for_itself(self) -> None:
        """The race went well on s0, s2 was not part of it, and s1 was left with older weights."""
        script = _fleet().weights(0, "s2")
        for server, loads in (("s0", (1, 2)), ("s1", (2, 1))):
            script.pause(server=server).pause(server=server)
            for version in loads:
                script.weights(version, server)
            script.resume(server).resume(server)
        script.weights(2, "s2").weights(1, "s2")
        assert "s1" == finds(self.NEWEST, script).where["server"]

    def test_a_server_that_died_after_the_race_has_no_newest_weights(self) -> None:
        """What it loads when it comes back replaces nothing."""
        script = _fleet().pause().pause().weights(2).resume().resume().fault("death", "s0")
        passes(self.NEWEST, script.weights(1), updates_started_at_once=1)

    def test_weights_without_a_number_have_no_order(self) -> None:
        """Only numbers say which of two weights are newer."""
        script = _fleet().pause().pause().weights(2).weights("first", label="first")  # type: ignore[arg-type]
        passes(self.NEWEST, script.resume().resume(), updates_started_at_once=1)

    def test_the_last_load_of_the_newer_weights_is_named(self) -> None:
        """A repeated load is the one that the older update came after."""
        script = _fleet().pause().pause().weights(2).weights(2).weights(1).resume().resume()
        assert "version 2, loaded at event 6, stays on s0" == finds(self.NEWEST, script).expected

    def test_one_load_is_no_overlap(self) -> None:
        """Without pauses two loads show that both updates ran, and a single one does not."""
        script = _fleet(case={"actions": ({"do": "sync-twice"},)}).weights(1)
        unknown(self.NEST, script, "not exercised")
        unknown(self.NEWEST, script, "not exercised")

    @pytest.mark.parametrize(("what", "overlap"), [("death", False), ("update-failure", True)])
    def test_only_a_death_ends_the_pauses_of_a_server(self, what: str, overlap: bool) -> None:
        """A server that comes back is not paused, so that its next pause overlaps nothing."""
        script = _fleet().pause().fault(what, "s0").pause().weights(1).resume()
        for check_id in (self.NEST, self.NEWEST):
            assert int(overlap) == check(check_id, script).exercised.get(
                "updates started at once", 0
            )

    def test_a_death_on_another_server_ends_no_pause(self) -> None:
        """Nor does a fault of no server at all."""
        for server in ("s1", None):
            script = _fleet().pause().fault("death", server).pause().weights(1).resume()
            assert {"updates started at once": 1} == check(self.NEST, script).exercised

    def test_a_label_is_no_load_of_either_update(self) -> None:
        """Published between the resumes, or for older weights at the end."""
        between = _fleet().pause().pause().weights(1).weights(2).resume()
        between.weights(2, label=2, loaded=False).resume()
        passes(self.NEST, between, updates_started_at_once=1)
        passes(self.NEWEST, between.weights(1, loaded=False), updates_started_at_once=1)

    def test_without_an_overlap_nothing_hinders_the_verdict(self) -> None:
        """A skew, or weights that nobody named, would only be a reason if two updates met."""
        case = {"actions": ({"do": "skew", "server": "s1"},)}
        unnamed = _fleet().pause().weights(None).resume()  # type: ignore[arg-type]
        for check_id in (self.NEST, self.NEWEST):
            unknown(check_id, _fleet(case=case).pause().weights(1).resume(), "not exercised")
            unknown(check_id, unnamed, "not exercised")

    def test_a_roll_back_is_nobodys_fault(self) -> None:
        """Restoring older weights is a decision, unless two updates overlapped."""
        unknown(self.NEWEST, _fleet().weights(2).weights(1), "not exercised")

    def test_one_server_updated_on_its_own_beside_an_update_is_not_judged(self) -> None:
        """The harness made the overlap."""
        script = (
            _fleet(case={"actions": ({"do": "skew", "server": "s0"},)})
            .pause()
            .pause()
            .weights(2)
            .resume()
            .weights(1)
            .resume()
        )
        unknown(self.NEST, script, "skew")
        unknown(self.NEWEST, script, "skew")


def _update(script: TraceScript, phase: UpdatePhase) -> TraceScript:
    """The trainer asks for version 1, or learns what became of it."""
    return script.add(Update(version=1, label=1, phase=phase))


class TestOneLoad:
    """``weights.one-load-per-version``."""

    ID = "weights.one-load-per-version"

    def test_a_load_after_the_update_has_ended_is_found(self) -> None:
        """A cancelled update ran on (prime-rl #2004)."""
        script = _update(_fleet(), UpdatePhase.ASKED).weights(1)
        finding = finds(self.ID, _update(script, UpdatePhase.ENDED).weights(1, identity=True))
        assert (
            "no further load of version 1, published as 1, by s0",
            "loads at events 4 and 6",
        ) == (finding.expected, finding.observed)

    def test_an_update_may_load_as_often_as_it_likes(self) -> None:
        """It loads twice to be sure, or all servers again because one transfer broke."""
        script = _update(_fleet(), UpdatePhase.ASKED).weights(1).weights(1, identity=True)
        passes(self.ID, _update(script, UpdatePhase.ENDED), loads=2)
        # the first update still runs when the second one has ended
        both = _update(_update(_fleet(), UpdatePhase.ASKED), UpdatePhase.ASKED).weights(1)
        passes(self.ID, _update(both, UpdatePhase.ENDED).weights(1, identity=True), loads=2)

    def test_a_repair_after_a_failed_update_passes(self) -> None:
        """It reaches the servers that had loaded as well."""
        script = _update(_fleet(), UpdatePhase.ASKED).weights(1)
        passes(self.ID, _update(script, UpdatePhase.FAILED).weights(1, identity=True), loads=2)

    def test_a_repeated_load_in_a_recording_is_not_judged(self) -> None:
        """It does not say when an update ended."""
        script = _fleet(driven=False).weights(1).weights(1, identity=True)
        passes(self.ID, script, loads=1)

    def test_a_load_of_the_harness_in_between_is_a_reason(self) -> None:
        """It revived the server with the weights of the update that runs, or skewed it."""
        ended = _update(_update(_fleet(), UpdatePhase.ASKED), UpdatePhase.ENDED)
        revived = ended.weights(1, "s1", by_harness=True).weights(1, "s1")
        passes(self.ID, revived, loads=1)
        ended = _update(_update(_fleet(), UpdatePhase.ASKED).weights(1), UpdatePhase.ENDED)
        passes(self.ID, ended.weights(2, by_harness=True).weights(1), loads=2)

    def test_a_label_is_no_second_load(self) -> None:
        """The weights were published under it once they were there."""
        ended = _update(_update(_fleet(), UpdatePhase.ASKED), UpdatePhase.ENDED)
        passes(self.ID, ended.weights(1).weights(1, loaded=False), loads=1)

    def test_weights_that_nobody_named_may_be_two_parts_of_one_update(self) -> None:
        """They are in between two loads of one version, too."""
        script = _fleet().weights(None, label=1).weights(None, label=1)  # type: ignore[arg-type]
        unknown(self.ID, script, "the trace does not say which weights were loaded")
        ended = _update(_update(_fleet(), UpdatePhase.ASKED), UpdatePhase.ENDED)
        between = ended.weights(1).weights(None, label=2).weights(1)  # type: ignore[arg-type]
        assert (0, {"loads": 2}) == (
            check(self.ID, between).found,
            dict(check(self.ID, between).exercised),
        )

    @pytest.mark.parametrize(("loads", "found"), [(1, 0), (2, 1), (3, 2)])
    def test_each_further_load_is_found(self, loads: int, found: int) -> None:
        """Each server is judged for itself."""
        script = _update(_update(_fleet(), UpdatePhase.ASKED), UpdatePhase.ENDED)
        for _ in range(loads):
            script.weights(1)
        assert found == check(self.ID, script.weights(1, "s1")).found

    def test_reloads_with_a_reason_pass(self) -> None:
        """After a failure or a death, under a new label, without a label, back to older weights,
        and at the start.
        """
        script = (
            _update(_update(_fleet(), UpdatePhase.ASKED), UpdatePhase.ENDED)
            .weights(0)
            .weights(1)
            .fault("update-failure")
            .weights(1)
            .fault("death", "s1")
            .fault("revive", "s1")
            .weights(1)
        )
        script.weights(1, label=2, identity=True).weights(1, label=None).weights(
            1, label=None
        ).weights(0).weights(1)
        passes(self.ID, script, loads=9)
