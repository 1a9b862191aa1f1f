"""``lifecycle.no-error-without-fault``: which requests a fault excuses, and how long."""

from __future__ import annotations

import pytest

from tests.support.trace_script import TraceScript, finds, passes

ID = "lifecycle.no-error-without-fault"
_ERROR = {"error": "RuntimeError: no reply"}


def _two() -> TraceScript:
    """Requests r0 on s0 and r1 on s1, each with a call in flight."""
    script = TraceScript()
    for request, server in (("r0", "s0"), ("r1", "s1")):
        script.submit(request)
        script.call((1, 2), request_id=request, server=server)
    return script


@pytest.mark.parametrize("what", ["death", "revive", "update-failure"])
def test_a_fault_of_the_fleet_excuses_all_open_requests(what: str) -> None:
    """Calls move between servers."""
    script = _two().fault(what, "s0").result(request_id="r0", event=_ERROR)
    passes(ID, script.result(request_id="r1", event=_ERROR), requests_that_ended=2)


def test_a_fault_of_a_server_excuses_the_requests_that_it_serves() -> None:
    """The request of the other server must go on."""
    script = _two().fault("late", "s0")
    script.result(request_id="r0", event=_ERROR)
    passes(ID, script, requests_that_ended=1)
    script.result(request_id="r1", event=_ERROR)
    finding = finds(ID, script)
    assert "r1" == finding.where["request"]
    assert "RuntimeError: no reply; no reply came" == finding.observed


def test_a_request_that_comes_while_a_server_is_down_may_fail() -> None:
    """Until the server is back, and not because of another fault or another server."""
    down = _two().fault("death", "s0")
    down.submit("r2")
    passes(ID, down.result(request_id="r2", event=_ERROR), requests_that_ended=1)
    back = _two().fault("death", "s0").fault("revive", "s0")
    back.submit("r2")
    assert "r2" == finds(ID, back.result(request_id="r2", event=_ERROR)).where["request"]
    other = _two().fault("death", "s0").fault("revive", "s1")
    other.submit("r2")
    passes(ID, other.result(request_id="r2", event=_ERROR), requests_that_ended=1)
    late = _two().fault("late", "s0")
    late.submit("r2")
    assert "r2" == finds(ID, late.result(request_id="r2", event=_ERROR)).where["request"]


def test_a_fault_of_a_call_excuses_its_request_only() -> None:
    """Another request on the same server is not concerned."""
    script = _two()
    script.submit("r2")
    script.call((1, 2), request_id="r2", server="s0")
    script.fault("lost", "s0", call_id=1)
    script.result(request_id="r0", event=_ERROR)
    passes(ID, script, requests_that_ended=1)
    assert "r2" == finds(ID, script.result(request_id="r2", event=_ERROR)).where["request"]
