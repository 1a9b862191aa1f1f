"""``weights.delta-base`` and ``weights.partial-update-unserved``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.trace_script import TraceScript, finds, inapplicable, passes, unknown

BASE, UNSERVED = "weights.delta-base", "weights.partial-update-unserved"


def _fleet(deltas: str | None = "add", **fields: Any) -> TraceScript:
    """A server with version 0, and request r0."""
    script = TraceScript(deltas=deltas)
    script.weights(0, **fields)
    script.submit()
    return script


def test_a_contract_without_deltas_rules_the_checks_out() -> None:
    """Stacks that bring all tensors pay nothing for them."""
    script = _fleet(None)
    script.weights(1)
    for name in (BASE, UNSERVED):
        inapplicable(name, script, "the contract declares no deltas")


def test_a_chain_of_deltas_passes() -> None:
    """Each is applied to the weights before it; all tensors may come in between."""
    script = _fleet()
    script.weights(1, delta_of=0)
    script.weights(2, delta_of=1)
    script.weights(3)
    script.weights(4, delta_of=3)
    passes(BASE, script, deltas=3)


def test_a_delta_on_other_weights_is_found_once() -> None:
    """Until all tensors are loaded nothing more is said of the server."""
    script = _fleet()
    script.weights(2, delta_of=1)
    script.weights(3, delta_of=2)
    finding = finds(BASE, script)
    assert (
        "a delta was applied to other weights than it was made from",
        "version 1, whole, on s0",
        "version 0, so that version 2 is not what s0 has now",
    ) == (finding.title, finding.expected, finding.observed)
    assert {"server": "s0", "version": 2, "index": 2} == finding.where
    assert "SkyRL #1902" in finding.hint
    script.weights(4)
    script.weights(6, delta_of=5)
    finds(BASE, script, count=2)


@pytest.mark.parametrize(("deltas", "found"), [("add", True), ("overwrite", False)])
def test_a_delta_that_is_applied_twice_harms_only_if_it_adds(deltas: str, found: bool) -> None:
    """New values may be written again."""
    script = _fleet(deltas)
    script.weights(1, delta_of=0)
    script.weights(1, delta_of=0)
    if found:
        assert "by a retry of an update that had got through" in finds(BASE, script).hint
    else:
        passes(BASE, script, deltas=2)


@pytest.mark.parametrize(("deltas", "found"), [("add", True), ("overwrite", False)])
def test_a_delta_over_a_part_of_itself_harms_only_if_it_adds(deltas: str, found: bool) -> None:
    """New values are written over those that a broken transfer left."""
    script = _fleet(deltas)
    script.fault("partial-update", "s0")
    script.weights(1, delta_of=0)
    if found:
        finding = finds(BASE, script)
        assert "a part of another delta over version 0" == finding.observed
        assert "Bring all tensors" in finding.hint
    else:
        passes(BASE, script, deltas=1)


def test_all_tensors_make_torn_weights_whole() -> None:
    """After them a delta may follow."""
    script = _fleet()
    script.fault("partial-update", "s0")
    script.weights(1)
    script.weights(2, delta_of=1)
    passes(BASE, script, deltas=1)


def test_a_restarted_server_is_not_judged_before_it_says_what_it_has() -> None:
    """Nobody knows what it was restarted with."""
    script = _fleet()
    script.fault("death", "s0").fault("revive", "s0")
    script.weights(2, delta_of=1)
    unknown(BASE, script, "not exercised")


def test_a_call_after_a_broken_transfer_is_found() -> None:
    """A part of the tensors is new."""
    script = _fleet()
    script.fault("partial-update", "s0")
    script.call((1, 2))
    script.call((1, 2))
    finding = finds(UNSERVED, script)
    assert (
        "a server serves weights of which a part was replaced",
        "no call on s0 between event 2, where a transfer broke, and a load that succeeds",
        "call 1 was admitted at event 4",
    ) == (finding.title, finding.expected, finding.observed)
    assert {"call": 1, "server": "s0", "index": 4} == finding.where


def test_calls_after_the_next_load_or_on_another_server_pass() -> None:
    """The server is whole again, or never was torn."""
    script = _fleet()
    script.weights(0, server="s1")
    script.fault("partial-update", "s0")
    script.call((1, 2), server="s1")
    script.weights(1)
    script.call((1, 2))
    passes(UNSERVED, script, transfers_that_broke_in_the_middle=1)


def test_a_run_in_which_no_transfer_broke_cannot_show_it() -> None:
    """The schedules have broken transfers."""
    script = _fleet()
    script.call((1, 2))
    inapplicable(UNSERVED, script, "no transfer broke in the middle")
