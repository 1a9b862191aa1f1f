"""``weights.adapter-loaded``, ``weights.adapter-current`` and ``weights.adapter-applied``."""

from __future__ import annotations

from typing import Any, cast

from rollproof.core.events.rollout import Update, UpdatePhase
from rollproof.core.events.weights import Adapter, AdapterChange
from rollproof.core.oracle import Oracle
from rollproof.judging.checks import CheckResult
from tests.support.trace_script import TraceScript, check, finds, inapplicable, passes, unknown

LOADED, CURRENT, APPLIED = (f"weights.adapter-{name}" for name in ("loaded", "current", "applied"))


def _fleet(**contract: Any) -> TraceScript:
    """A server with base model 0, and request r0."""
    script = TraceScript(**{"adapters": "moving-base", **contract})
    script.weights(0)
    script.submit()
    return script


def _change(change: AdapterChange, **fields: Any) -> Adapter:
    return Adapter(**{"server_id": "s0", "name": "policy", "change": change, **fields})


def _updated(version: int = 1, **fields: Any) -> TraceScript:
    """The same after an update that brought the adapter ``policy``."""
    script = _fleet()
    script.add(Update(version=version, label=version, phase=UpdatePhase.ASKED))
    script.weights(version, **{"adapter": "policy", "base": 0, "true_scale": 1.0, **fields})
    script.add(Update(version=version, label=version, phase=UpdatePhase.ENDED))
    return script


def test_a_contract_without_adapters_rules_the_checks_out() -> None:
    """Stacks whose updates bring the model pay nothing for them."""
    script = _fleet(adapters=None)
    script.call((1, 2))
    for name in (LOADED, CURRENT, APPLIED):
        inapplicable(name, script, "the contract declares no adapters")


def _driven(script: TraceScript) -> CheckResult:
    """What the check says of the trace of a run that the harness drove, whole from its begin."""
    return check(LOADED, script, cast(Oracle, object()))


def test_a_name_that_no_adapter_has_is_found() -> None:
    """It was never brought to the server."""
    script = _fleet()
    script.call((1, 2), adapter="policy")
    (finding,) = _driven(script).findings
    assert "a call names an adapter that its server does not have" == finding.title
    assert "no adapter: s0 was given none" == finding.expected
    assert "call 1 names 'policy'" == finding.observed
    assert "The adapter was never brought to this server." == finding.hint
    assert {"call": 1, "server": "s0", "index": 2} == finding.where


def test_an_adapter_that_a_recording_does_not_show_is_unknown() -> None:
    """It may have been loaded before the recording began, also beside one that is shown."""
    for script in (_fleet(), _updated()):
        script.call((1, 2), adapter="judge")
        unknown(LOADED, script, "the trace has no load of adapter 'judge' on s0")


def test_an_adapter_that_was_unloaded_is_found() -> None:
    """The finding says when it was."""
    script = _updated().add(_change(AdapterChange.UNLOADED))
    script.call((1, 2), adapter="policy")
    finding = finds(LOADED, script)
    assert "call 1 names 'policy', which was unloaded at event 5" == finding.observed
    assert "TRL #7017" in finding.hint


def test_an_adapter_of_another_server_does_not_count() -> None:
    """Each server has adapters of its own."""
    script = _updated()
    script.weights(0, server="s1")
    script.call((1, 2), adapter="policy", server="s1")
    (finding,) = _driven(script).findings
    assert "no adapter: s1 was given none" == finding.expected


def test_an_adapter_that_is_there_passes() -> None:
    """Also one that was evicted: the server loads it again."""
    script = _updated().add(_change(AdapterChange.EVICTED))
    script.call((1, 2), adapter="policy")
    passes(LOADED, script, calls_that_name_an_adapter=1)


def test_a_server_that_was_restarted_is_not_judged() -> None:
    """Whoever restarts it may give it adapters without a word."""
    script = _updated()
    script.fault("death", "s0").fault("revive", "s0")
    script.call((1, 2), adapter="policy")
    unknown(LOADED, script, "not exercised")


def test_a_request_by_the_base_model_after_an_update_is_found() -> None:
    """The adapter is there, and the call does not name it."""
    script = _updated()
    script.submit("r1", prompt=(3,))
    script.call((3,), "r1")
    finding = finds(CURRENT, script)
    assert "a request that began after an update is served by older weights" == finding.title
    assert "version 1 or newer; s0 has 'policy' of version 1" == finding.expected
    assert "call 1 names the base model, which is version 0" == finding.observed
    assert "lora_request" in finding.hint


def test_a_request_by_an_older_adapter_is_found() -> None:
    """Its name was not changed with the update."""
    script = _updated()
    script.weights(2, adapter="policy-2", base=0)
    script.add(Update(version=2, label=2, phase=UpdatePhase.ENDED))
    script.submit("r1", prompt=(3,))
    script.call((3,), "r1", adapter="policy")
    finding = finds(CURRENT, script)
    assert "call 1 names adapter 'policy', which is version 1" == finding.observed
    assert (
        "version 2 or newer; s0 has 'policy' of version 1, 'policy-2' of version 2"
        == finding.expected
    )
    assert "AReaL #1021" in finding.hint


def test_a_request_that_began_before_the_update_may_go_on_as_it_began() -> None:
    """Only the first call of a request is judged, and only of those that began later."""
    script = _updated()
    script.call((1, 2))
    script.submit("r1", prompt=(3,))
    script.call((3,), "r1", adapter="policy")
    script.weights(2, adapter="policy-2", base=0)
    script.add(Update(version=2, label=2, phase=UpdatePhase.ENDED))
    script.call((3, 4), "r1", adapter="policy")
    passes(CURRENT, script, requests_after_an_update=1)


def test_a_server_that_got_nothing_is_judged_elsewhere() -> None:
    """No call can name what the server does not have: ``weights.update-loads`` finds it."""
    script = _fleet()
    script.add(Update(version=1, label=1, phase=UpdatePhase.ENDED))
    script.submit("r1", prompt=(3,))
    script.call((3,), "r1")
    unknown(CURRENT, script, "not exercised")


def test_a_server_that_may_have_missed_the_update_is_not_judged() -> None:
    """It died, or left the balancer, or its transfer broke."""
    for fault in ("death", "leave", "update-failure"):
        script = _updated()
        script.fault(fault, "s0")
        script.submit("r1", prompt=(3,))
        script.call((3,), "r1")
        unknown(CURRENT, script, "not exercised")


def test_the_base_model_counts_after_a_merge() -> None:
    """When the adapter was merged, calls name none."""
    script = _updated()
    script.weights(2)
    script.add(Update(version=2, label=2, phase=UpdatePhase.ENDED))
    script.add(_change(AdapterChange.UNLOADED))
    script.submit("r1", prompt=(3,))
    script.call((3,), "r1")
    passes(CURRENT, script, requests_after_an_update=1)


def test_an_adapter_over_another_base_model_is_found_once() -> None:
    """Each load is reported once, however many calls it serves."""
    script = _updated()
    script.weights(2)
    for _ in range(3):
        script.call((1, 2), adapter="policy")
    finding = finds(APPLIED, script)
    assert "an adapter serves over another base model than it was trained on" == finding.title
    assert "base model 0 below version 1 of adapter 'policy'" == finding.expected
    assert "s0 has base model 2" == finding.observed
    assert {"call": 1, "server": "s0", "version": 1, "index": 3} == finding.where


def test_a_scale_that_is_applied_twice_is_found() -> None:
    """When it is loaded, or loaded again."""
    script = _updated(true_scale=2.0)
    script.call((1, 2), adapter="policy")
    finding = finds(APPLIED, script)
    assert (
        "an adapter is applied at another scale than it was trained with",
        "the scale of adapter 'policy', once",
        "2 times that scale on s0",
    ) == (finding.title, finding.expected, finding.observed)
    again = _updated().add(
        _change(AdapterChange.EVICTED),
        _change(AdapterChange.RELOADED, version=1, true_scale=0.5),
    )
    again.call((1, 2), adapter="policy")
    assert "0.5 times that scale on s0" == finds(APPLIED, again).observed


def test_adapters_at_their_scale_pass() -> None:
    """Also if nobody knows base or scale, as in a recording."""
    for fields in ({}, {"base": None}, {"true_scale": None}):
        script = _updated(**fields)
        script.call((1, 2), adapter="policy")
        passes(APPLIED, script, calls_by_an_adapter=1)


def test_an_adapter_that_no_call_names_is_not_judged() -> None:
    """At a wrong scale it does no harm."""
    script = _updated(true_scale=2.0)
    script.call((1, 2))
    unknown(APPLIED, script, "not exercised")


def test_an_ignored_load_is_named_by_update_loads() -> None:
    """The server has an adapter of that name, and keeps it."""
    script = _updated()
    script.add(
        Update(version=2, label=2, phase=UpdatePhase.ASKED),
        _change(AdapterChange.IGNORED, version=2),
        Update(version=2, label=2, phase=UpdatePhase.ENDED),
    )
    script.submit("r1", prompt=(3,))
    script.call((3,), "r1", adapter="policy")
    finding = finds("weights.update-loads", script)
    assert "an update ended, and its adapter was ignored" == finding.title
    assert "SkyRL #1606" in finding.hint
    assert 0 == check(CURRENT, script).found
