"""``weights.update-loads``: an update that has ended has brought its weights."""

from __future__ import annotations

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


def test_a_label_is_not_weights() -> None:
    """Publishing the new label alone loads nothing."""
    script = _fleet().add(_update(UpdatePhase.ASKED))
    script.weights(0, label=1, loaded=False)
    script.add(_update(UpdatePhase.ENDED))
    assert (
        "version 1 on the servers that serve after update_weights(1) has returned"
        == finds(ID, _served(script)).expected
    )


def test_weights_that_were_loaded_pass() -> None:
    """Before the update returns, or after it, as lazy stacks do."""
    eager = _fleet().add(_update(UpdatePhase.ASKED))
    eager.weights(1)
    eager.add(_update(UpdatePhase.ENDED))
    passes(ID, _served(eager), updates_that_ended=1)
    lazy = _served(_fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)))
    lazy.weights(1)
    passes(ID, lazy, updates_that_ended=1)


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


def test_a_fault_in_between_is_an_excuse() -> None:
    """A server that died may have come back with other weights."""
    script = (
        _fleet().add(_update(UpdatePhase.ASKED), _update(UpdatePhase.ENDED)).fault("death", "s0")
    )
    unknown(ID, _served(script), "a fault (death) may explain weights that were not loaded")


def test_two_updates_at_once_share_their_loads() -> None:
    """A load cannot be attributed to one of them: any load excuses both."""
    script = _fleet().add(_update(UpdatePhase.ASKED, 1), _update(UpdatePhase.ASKED, 2, 2))
    script.weights(1)
    script.add(_update(UpdatePhase.ENDED, 1), _update(UpdatePhase.ENDED, 2, 2))
    passes(ID, _served(script), updates_that_ended=1)


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
