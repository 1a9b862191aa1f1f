"""``weights.update-loads``: an update that has ended has brought its weights."""

from __future__ import annotations

import pytest

from rollproof.core.events.rollout import Update, UpdatePhase
from tests.support.trace_script import TraceScript, finds, passes, unknown

ID = "weights.update-loads"


def _update(phase: UpdatePhase, version: int = 1, label: int | None = 1) -> Update:
    return Update(version=version, label=label, phase=phase)


def _served(script: TraceScript, server: str = "s0") -> TraceScript:
    script.submit(f"after-{server}", prompt=(7, len(server), int(server[1:])))
    script.call((7, len(server), int(server[1:])), f"after-{server}", server=server)
    return script


def _fleet() -> TraceScript:
    script = TraceScript()
    script.weights(0)
    script.submit()
    return script


def test_an_update_that_does_nothing_is_found() -> None:
    """It returned, the server went on to serve, and never loaded anything."""
    script = _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED))
    finding = finds(ID, _served(script))
    assert "an update ended, and no server was given its weights" == finding.title
    assert "s0 went on to serve version 0; nothing was loaded" == finding.observed
    assert "free_cache_engine" in finding.hint
    assert {"version": 1, "server": "s0", "call": 1, "index": 6} == finding.where


def test_a_label_is_not_weights() -> None:
    """Publishing the new label alone loads nothing."""
    script = _fleet().add(_update(UpdatePhase.ASKED))
    script.weights(0, label=1, loaded=False)
    script.add(_update(UpdatePhase.ENDED))
    finding = finds(ID, _served(script))
    assert "an update ended, and only its label was published" == finding.title
    assert (
        "version 1 on the servers that serve after update_weights(1) has returned"
        == finding.expected
    )
    assert "s0 went on to serve version 0, now as 1; nothing was loaded" == finding.observed
    assert "verl #7495" in finding.hint


def test_another_label_is_not_that_of_the_update() -> None:
    """A label that no update was asked for, and an update without a label."""
    for label, shown in ((1, 7), (None, None)):
        script = _fleet().add(_update(UpdatePhase.ASKED, label=label))
        script.weights(0, label=shown, loaded=False)
        script.add(_update(UpdatePhase.ENDED, label=label))
        finding = finds(ID, _served(script))
        assert "an update ended, and no server was given its weights" == finding.title


def test_weights_that_were_loaded_pass() -> None:
    """Before the update returns, or before the next call is admitted, as lazy stacks do."""
    eager = _fleet().add(_update(UpdatePhase.ASKED))
    eager.weights(1)
    eager.add(_update(UpdatePhase.ENDED))
    passes(ID, _served(eager), updates_that_ended=1)
    lazy = _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED))
    call = lazy.send()
    lazy.weights(1)
    passes(ID, lazy.admit(call), updates_that_ended=1)


def test_a_call_that_was_on_its_way_when_the_update_ended_is_not_judged() -> None:
    """A lazy stack had looked for new weights before it was sent; the next call shows them."""
    script = _fleet()
    call = script.send()
    script.add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)).admit(call)
    script.weights(1)
    passes(ID, _served(script), updates_that_ended=1)


def test_older_weights_that_were_asked_for_later_may_replace_newer_ones() -> None:
    """An update without a label takes the newest weights, and updates that wait have labels of
    older ones: whoever runs them in order loads older weights after newer ones. Weights that are
    older than all of these are still too old.
    """
    for loaded, found in ((3, False), (2, True)):
        script = _fleet().add(
            _update(UpdatePhase.ASKED, 4, None),
            _update(UpdatePhase.ASKED, 3, 3),
            _update(UpdatePhase.ASKED, 4, 4),
        )
        script.weights(4, label=None)
        script.add(_update(UpdatePhase.ENDED, 4, None))
        script.weights(loaded)
        _served(script, "s0").weights(4)
        script.add(_update(UpdatePhase.ENDED, 3, 3), _update(UpdatePhase.ENDED, 4, 4))
        (finds if found else passes)(ID, _served(script, "s00"))


def test_a_call_that_waited_for_the_update_is_judged() -> None:
    """The server was paused for the update, and resumed without its weights."""
    script = _fleet().add(_update(UpdatePhase.ASKED)).pause()
    call = script.send()
    script.resume().add(_update(UpdatePhase.ENDED)).admit(call)
    assert "s0 went on to serve version 0; nothing was loaded" == finds(ID, script).observed


def test_weights_that_come_after_the_update_has_returned_are_found() -> None:
    """Nobody awaited the transfer, and a call was admitted in between."""
    script = _served(_fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)))
    script.weights(1)
    finding = finds(ID, script)
    assert "an update returned before its weights were loaded" == finding.title
    assert "version 1 on s0 when update_weights(1) returns" == finding.expected
    assert (
        "s0 admitted call 1 under version 0, and loaded version 1 only at event 7"
        == finding.observed
    )
    assert "nobody awaits" in finding.hint


def test_the_load_of_a_later_update_does_not_make_it_late() -> None:
    """The first update was never carried out: another hint."""
    script = _served(_fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)))
    script.add(_update(UpdatePhase.ASKED, 2, 2)).weights(2).add(_update(UpdatePhase.ENDED, 2, 2))
    assert "an update ended, and no server was given its weights" == finds(ID, script).title


def test_other_weights_than_asked_for_are_found() -> None:
    """The previous checkpoint, under the new label."""
    script = _fleet().add(_update(UpdatePhase.ASKED, 1, 1)).weights(0, label=1)
    finding = finds(ID, _served(script.add(_update(UpdatePhase.ENDED, 1, 1))))
    assert "an update ended, and other weights were loaded than it asked for" == finding.title
    assert "s0 loaded version 0 at event 3, shown as 1" == finding.observed
    assert "a link to the latest one" in finding.hint


def test_a_transfer_that_broke_is_no_success() -> None:
    """The stack caught its error, and went on."""
    script = _fleet().add(_update(UpdatePhase.ASKED)).fault("update-failure", "s0")
    finding = finds(ID, _served(script.add(_update(UpdatePhase.ENDED))))
    assert "an update ended as a success although a transfer had broken" == finding.title
    assert (
        "s0 went on to serve version 0; the transfer to it broke while the update ran"
        == finding.observed
    )
    assert "error of the transfer was caught" in finding.hint


def test_a_transfer_that_was_repeated_passes() -> None:
    """The second one worked."""
    script = _fleet().add(_update(UpdatePhase.ASKED)).fault("update-failure", "s0").weights(1)
    passes(ID, _served(script.add(_update(UpdatePhase.ENDED))), updates_that_ended=1)


def _pair() -> TraceScript:
    script = TraceScript()
    script.weights(0).weights(0, "s1").submit()
    return script


def test_a_server_that_was_left_out_is_found_at_its_first_call() -> None:
    """The other one has the weights."""
    script = _pair().add(_update(UpdatePhase.ASKED)).weights(1).add(_update(UpdatePhase.ENDED))
    finding = finds(ID, _served(_served(script), "s1"))
    assert "an update ended before it had reached every server" == finding.title
    assert "s1 went on to serve version 0; s0 had loaded version 1 or newer" == finding.observed


def test_a_server_that_serves_no_more_rollouts_needs_no_weights() -> None:
    """Its transfer broke, and the stack only looks whether it is well."""
    script = _pair().add(_update(UpdatePhase.ASKED)).fault("update-failure", "s1").weights(1)
    script.add(_update(UpdatePhase.ENDED))
    script.call((9,), "", server="s1")
    passes(ID, _served(script), updates_that_ended=1)


@pytest.mark.parametrize(("away", "back"), [("death", "revive"), ("leave", "join")])
def test_a_server_that_was_away_meanwhile_is_not_judged(away: str, back: str) -> None:
    """The update could not know that it would come back; the next one reaches it."""
    before = _pair().fault(away, "s1").add(_update(UpdatePhase.ASKED)).weights(1)
    before.add(_update(UpdatePhase.ENDED)).fault(back, "s1")
    passes(ID, _served(before, "s1").weights(1), updates_that_ended=1)
    during = _pair().add(_update(UpdatePhase.ASKED)).fault(away, "s1").fault(back, "s1")
    during.weights(1).add(_update(UpdatePhase.ENDED))
    passes(ID, _served(during, "s1"), updates_that_ended=1)
    during.add(_update(UpdatePhase.ASKED, 2, 2)).weights(2).add(_update(UpdatePhase.ENDED, 2, 2))
    during.submit("again", prompt=(8, 8))
    during.call((8, 8), "again", server="s1")
    assert "an update ended before it had reached every server" == finds(ID, during).title


def test_a_server_that_lost_the_weights_with_its_life_is_not_judged() -> None:
    """It had them, died, and came back with those that it started with."""
    script = _pair().add(_update(UpdatePhase.ASKED)).weights(1).weights(1, "s1")
    script.add(_update(UpdatePhase.ENDED)).fault("death", "s1").fault("revive", "s1")
    script.weights(0, "s1", by_harness=True)
    passes(ID, _served(script, "s1"), updates_that_ended=1)


def test_newer_weights_do_as_well() -> None:
    """Two updates, merged into one load of the newer weights; and a skew of the harness."""
    for harness, counted in ((False, 2), (True, 1)):
        script = _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ASKED, 2, 2))
        script.weights(2, by_harness=harness)
        script.add(_update(UpdatePhase.ENDED), _update(UpdatePhase.ENDED, 2, 2))
        passes(ID, _served(script), updates_that_ended=counted)


def test_a_call_that_had_begun_before_the_update_may_be_admitted_again() -> None:
    """A preempted call goes on under the weights that it began with."""
    script = _fleet()
    call = script.call((1, 2))
    script.add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)).admit(call)
    unknown(ID, script, "not exercised")


def test_an_update_that_nothing_follows_is_not_judged() -> None:
    """A lazy stack would have loaded the weights with the next request."""
    unknown(
        ID, _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)), "not exercised"
    )


def test_a_failed_update_is_not_judged() -> None:
    """It says itself that there are no new weights."""
    unknown(
        ID,
        _served(_fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.FAILED))),
        "not exercised",
    )


def test_equal_weights_need_no_load() -> None:
    """An update to weights that the server holds may do nothing."""
    passes(
        ID,
        _served(_fleet().add(_update(UpdatePhase.ASKED, 0), _update(UpdatePhase.ENDED, 0))),
        updates_that_ended=1,
    )


def test_a_death_after_the_update_is_an_excuse() -> None:
    """A server that died may have come back with other weights."""
    script = (
        _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)).fault("death", "s0")
    )
    unknown(ID, _served(script), "not exercised")


def test_an_update_that_is_merged_with_an_older_one_is_found() -> None:
    """Both return after a load of the older weights."""
    script = _fleet().add(_update(UpdatePhase.ASKED, 1), _update(UpdatePhase.ASKED, 2, 2))
    script.weights(1)
    script.add(_update(UpdatePhase.ENDED, 1), _update(UpdatePhase.ENDED, 2, 2))
    finding = finds(ID, _served(script))
    assert "an update ended, and weights of an older one were loaded" == finding.title
    assert "s0 loaded version 1 at event 4, shown as 1" == finding.observed
    assert "merge them into one load of the newest weights" in finding.hint


def test_an_update_that_returns_because_one_runs_is_found() -> None:
    """The first one ends later; nobody carries out the second one."""
    script = _fleet().add(_update(UpdatePhase.ASKED, 1)).weights(1)
    script.add(_update(UpdatePhase.ASKED, 2, 2), _update(UpdatePhase.ENDED, 2, 2))
    script.add(_update(UpdatePhase.ENDED, 1))
    finding = finds(ID, _served(script))
    assert "an update that was asked for during another one was never carried out" == finding.title
    assert "s0 went on to serve version 1; nothing newer was loaded" == finding.observed


def test_an_update_during_which_another_one_was_asked_for_is_told_so() -> None:
    """The first one did nothing, whether the second one came during it or after it."""
    during = _fleet().add(_update(UpdatePhase.ASKED, 1), _update(UpdatePhase.ASKED, 2, 2))
    during.add(_update(UpdatePhase.ENDED, 1))
    titles = [finds(ID, _served(during)).title]
    after = _fleet().add(_update(UpdatePhase.ASKED, 1), _update(UpdatePhase.ENDED, 1))
    after.add(_update(UpdatePhase.ASKED, 2, 2))
    titles.append(finds(ID, _served(after)).title)
    assert [
        "an update that was asked for during another one was never carried out",
        "an update ended, and no server was given its weights",
    ] == titles


def test_weights_that_are_overwritten_by_older_ones_are_found() -> None:
    """Two transfers without a lock: the older one takes longer."""
    script = _fleet().add(_update(UpdatePhase.ASKED, 1), _update(UpdatePhase.ASKED, 2, 2))
    script.weights(2).weights(1)
    script.add(_update(UpdatePhase.ENDED, 2, 2), _update(UpdatePhase.ENDED, 1))
    finding = finds(ID, _served(script))
    assert "older weights replaced those of an update that had ended" == finding.title
    assert (
        "s0 loaded version 1 at event 5, shown as 1, after it had version 2 or newer"
        == finding.observed
    )


REASON = "weights.no-failure-without-fault"


def test_an_update_that_raises_in_a_sound_fleet_is_found() -> None:
    """The error is the stack's own, and is quoted."""
    script = (
        _fleet()
        .add(_update(UpdatePhase.ASKED))
        .fault("update-failure", detail="IndexError: list index out of range")
    )
    finding = finds(REASON, script.add(_update(UpdatePhase.FAILED)))
    assert (
        "update_weights(1) raised, though nothing was broken",
        "IndexError: list index out of range",
    ) == (
        finding.title,
        finding.observed,
    )


def test_updates_that_work_pass() -> None:
    """One labelled update, and it ended."""
    passes(
        REASON,
        _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)),
        updates_while_nothing_was_broken=1,
    )


def test_a_broken_transfer_and_a_refused_label_are_no_findings() -> None:
    """A server's own failure explains the update's; refusing ``None`` is a choice; of two updates
    at once one may be turned away.
    """
    broken = (
        _fleet()
        .add(_update(UpdatePhase.ASKED))
        .fault("update-failure", "s0")
        .fault("update-failure")
    )
    unknown(REASON, broken.add(_update(UpdatePhase.FAILED)), "not exercised")
    unlabelled = (_update(UpdatePhase.ASKED, label=None), _update(UpdatePhase.FAILED, label=None))
    unknown(REASON, _fleet().add(*unlabelled), "not exercised")
    twice = (
        _update(UpdatePhase.ASKED),
        _update(UpdatePhase.ASKED, 2, 2),
        _update(UpdatePhase.FAILED, 2, 2),
    )
    unknown(REASON, _fleet().add(*twice), "not exercised")
