"""Which weights sampled a token, where the trace has only the label that the engine showed."""

from __future__ import annotations

import pytest

from rollproof.core.records import Span
from rollproof.judging.checks import Verdict
from rollproof.verification.traces import judge
from tests.support.scripted_rollouts import REGISTRY
from tests.support.trace_script import TraceScript, unknown

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


@pytest.mark.parametrize(
    ("own_label", "tag", "verdict"),
    [
        ("after the call", 0, Verdict.UNKNOWN),
        ("after the call", 5, Verdict.FAIL),
        ("before the call", 0, Verdict.FAIL),
        ("elsewhere", 0, Verdict.UNKNOWN),
        ("elsewhere", 5, Verdict.FAIL),
    ],
)
def test_an_old_label_is_not_blamed_until_the_server_has_one_for_the_new_weights(
    own_label: str, tag: int, verdict: Verdict
) -> None:
    """A server loads version 1 and still shows 0. A stack that read 0 with the call is not
    blamed, if the server had no label for version 1 yet; the reply shows the label of its end.
    """
    script = TraceScript(versions="sample")
    script.weights(0, "s0").weights(5, "s1").submit("r0", (1, 2), 4)
    script.weights(1, "s0", label=0)
    if own_label == "before the call":
        script.weights(1, "s0", label=1)
    elif own_label == "elsewhere":
        script.weights(1, "s1", label=1)
    call = script.call((1, 2), max_tokens=4)
    if own_label == "after the call":
        script.weights(1, "s0", label=1)
    sampled = (Span(start=0, end=1, version=1),)
    script.reply(call, (3,), "stop", true_tokens=sampled, output={"version": 1})
    script.result((3,), finish_reason="stop", version=tag)
    result = judge(script.trace(), REGISTRY)[_CHECK]
    assert verdict == result.verdict, result.reason


def test_labels_of_which_one_was_never_published_have_no_order() -> None:
    """Text has the order of publication alone, so bounds with another text enclose nothing."""
    script = TraceScript(versions="bounds")
    script.weights(0, label="base").submit("r0", (1, 2), 4)
    call = script.call((1, 2), max_tokens=4)
    sampled = (Span(start=0, end=1, version=0),)
    script.reply(call, (3,), "stop", true_tokens=sampled, output={"version": "base"})
    script.result((3,), finish_reason="stop", min_version="other", max_version="base")
    unknown("versions.bounds", script, "a bound was never published")
