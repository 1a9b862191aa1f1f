"""Which weights sampled a token, where the trace has only the label that the engine showed."""

from __future__ import annotations

import pytest

from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.scripted_rollouts import REGISTRY
from tests.support.trace_script import TraceScript

_CHECK = "versions.sample-tag"


def _tagged(*, before: str = "", during: str = "", after: str = "") -> TraceScript:
    """One call on s0 that shows version 0, in a sample tagged 7; an update of the named server
    comes right before the call, while it runs, or after its reply.
    """
    script = TraceScript(versions="sample")
    script.weights(0, "s0").weights(7, "s1").submit("r0", (1, 2), 4)
    if before:
        script.weights(0, before)
    call = script.call((1, 2), max_tokens=4)
    if during:
        script.weights(7, during)
    script.reply(call, (3,), "stop", true_tokens=None, output={"version": 0})
    if after:
        script.weights(7, after)
    script.result((3,), finish_reason="stop", version=7)
    return script


@pytest.mark.parametrize(
    ("updates", "verdict"),
    [
        ({}, Verdict.FAIL),
        ({"before": "s0"}, Verdict.FAIL),
        ({"during": "s1"}, Verdict.FAIL),
        ({"after": "s0"}, Verdict.FAIL),
        ({"during": "s0"}, Verdict.UNKNOWN),
    ],
    ids=str,
)
def test_a_label_is_certain_unless_its_server_was_updated_during_the_call(
    updates: dict[str, str], verdict: Verdict
) -> None:
    """An update of another server, before the call or after its reply, says nothing of it."""
    result = judge(_tagged(**updates).trace(), REGISTRY)[_CHECK]
    assert verdict == result.verdict, result.reason
    assert "crashed" not in result.reason
