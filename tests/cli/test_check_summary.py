"""What `rollproof check` says behind its report: what held, what was not judged and why."""

from __future__ import annotations

from rollproof.cli.check import summary_lines
from rollproof.verification.traces import judge
from tests.support.scripted_rollouts import ScriptedCall, script_rollout


def test_what_did_not_occur_is_named_of_the_checks_that_waited_for_it_alone() -> None:
    """A check that is unknown for a reason of its own says it above: requests did end, and nobody
    watched the caller's objects.
    """
    trace = script_rollout(ScriptedCall(tokens=(11, 12), reason="stop"), driven=False).trace()
    results = judge(trace).results
    objects = next(result for result in results if result.id == "stitch.caller-objects")
    assert "a recording does not watch the caller's objects" == objects.reason
    said = " ".join(" ".join(text.split()) for _, text in summary_lines(results, has_samples=True))
    idle = sum(result.reason.startswith("not exercised") for result in results)
    assert f"not judged: {idle} checks (" in said
    assert "ended requests" not in said
    assert "calls sent to a paused server" in said


def test_verbose_keeps_the_next_step() -> None:
    """With -v the report lists every check, and what to do about missing samples is still said."""
    trace = script_rollout(ScriptedCall(tokens=(11, 12), reason="stop"), driven=False).trace()
    results = judge(trace).results
    short = [text for _, text in summary_lines(results, has_samples=False)]
    verbose = [text for _, text in summary_lines(results, has_samples=False, verbose=True)]

    assert short[-1].startswith("  next: have your client report its samples:")
    assert [short[-1]] == verbose
