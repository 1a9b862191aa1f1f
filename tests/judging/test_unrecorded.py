"""What a recorder says it could not record is unknown, never failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from rollproof.core.events.rollout import Unrecorded
from rollproof.judging.checks import Verdict
from rollproof.judging.event_words import described
from tests.support.trace_script import TraceScript, check, opened, passes, unknown

REASON = "its reply was no JSON"


def faulty(places: Mapping[str, Unrecorded]) -> TraceScript:
    """A request whose sample has a token that no engine sampled, and events at some places."""
    script = TraceScript(driven=False)

    def at(place: str) -> None:
        if place in places:
            script.add(places[place])

    at("start")
    script.submit()
    at("open")
    call = script.call([1, 2])
    at("called")
    script.reply(call, [7], "length")
    script.result([8])
    return script


@pytest.mark.parametrize(
    "places",
    [
        {"open": Unrecorded(reason=REASON, request_id="r0")},
        {"open": Unrecorded(reason=REASON)},
        {"called": Unrecorded(reason=REASON, call_id=1)},
    ],
)
def test_requests_that_lack_events_are_unknown(places: Mapping[str, Unrecorded]) -> None:
    """Named by their id, by their call, or open when events were lost."""
    unknown("stitch.tokens", faulty(places), REASON)


@pytest.mark.parametrize(
    "places",
    [
        {},
        {"open": Unrecorded(reason=REASON, request_id="r9")},
        {"start": Unrecorded(reason=REASON)},
        {"called": Unrecorded(reason=REASON, call_id=77)},
    ],
)
def test_other_requests_are_judged(places: Mapping[str, Unrecorded]) -> None:
    """Those that began later, or that the event does not name."""
    assert Verdict.FAIL is check("stitch.tokens", faulty(places)).verdict


def failed(lose: Callable[[TraceScript], object]) -> TraceScript:
    """A request that fails for no reason that is recorded; ``lose`` adds what is not."""
    script = TraceScript(driven=False)
    script.submit()
    script.call([1, 2])
    lose(script)
    script.result(event={"error": "ValueError: no JSON"})
    return script


def test_what_was_not_recorded_may_explain_an_error() -> None:
    """Of the request or of its call; without it the error has no cause."""
    name = "lifecycle.no-error-without-fault"
    assert Verdict.FAIL is check(name, failed(lambda script: None)).verdict
    for event in (
        Unrecorded(reason=REASON, request_id="r0"),
        Unrecorded(reason=REASON, call_id=1),
    ):
        passes(name, failed(lambda script, event=event: script.add(event)))
    lost = failed(lambda script: script.add(Unrecorded(reason=REASON)))
    unknown(name, lost, REASON)


def test_checks_of_admissions_need_admissions() -> None:
    """A recording of calls alone cannot break those promises, and so does not pass."""
    script = TraceScript(driven=False)
    script.submit()
    script.pause()
    script.send()
    script.resume()
    script.result([7])
    reason = "the trace does not say when a server admits a call"
    for name in ("weights.no-admission-while-paused", "lifecycle.no-orphan-calls"):
        unknown(name, script, reason)
    script.admit(script.send(request_id="r0"))
    passes("weights.no-admission-while-paused", script)


def test_loads_of_unknown_weights_are_no_repetitions() -> None:
    """An update may come in parts, each under the same label."""
    script = opened().weights(None, label="1").weights(None, label="1")  # type: ignore[arg-type]
    name = "weights.one-load-per-version"
    unknown(name, script, "the trace does not say which weights were loaded")


def test_it_has_words() -> None:
    """For a story."""
    event = Unrecorded(reason=REASON, count=3)
    assert "3 events not recorded: its reply was no JSON" == described(event)
