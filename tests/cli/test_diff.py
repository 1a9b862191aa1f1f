from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollproof.cli.app import run
from rollproof.core.events.rollout import Result
from rollproof.core.trace import Trace
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.judging.report import ExitCode
from rollproof.store import TraceWriter, dump_trace
from rollproof.verification.runner import run_case
from tests.support.command_line import output_of
from tests.support.faulty_subjects import Concat, Correct

pytestmark = pytest.mark.usefixtures("command_folder")


@pytest.fixture
def good(tmp_path: Path) -> Trace:
    """The trace in good.json."""
    trace = run_case(Correct, ABORTED)
    dump_trace(trace, tmp_path / "good.json")
    return trace


def found(a: str, b: str, *arguments: str, code: int) -> dict[str, Any]:
    """The JSON of ``diff``."""
    assert code == run(["diff", a, b, *arguments, "--json", "diff.json"])
    data: dict[str, Any] = json.loads(Path("diff.json").read_text(encoding="utf-8"))
    return data


def test_a_trace_is_like_itself_in_either_form_and_at_another_time(
    good: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the form of a file nor the time of an event is a difference."""
    with TraceWriter(tmp_path / "later.arrow", good.header) as writer:
        for event in good.events:
            writer.append(replace(event, time=event.time + 3600))
    data = found("good.json", "later.arrow", code=ExitCode.PASS)

    assert data["alike"]
    assert data["event"] is None
    assert "good.json and later.arrow are alike" in capsys.readouterr().out


def test_a_fault_is_told_from_its_first_event_on(
    good: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verdicts, kinds, and situations that changed, and the first event that differs with the
    story of its request on both sides.
    """
    dump_trace(run_case(Concat, ABORTED), tmp_path / "bad.json")
    data = found("good.json", "bad.json", code=ExitCode.FAIL)
    verdicts = {item["name"]: (item["before"], item["after"]) for item in data["verdicts"]}
    event = data["event"]

    assert ("pass", "fail") == verdicts["routes.rows"]
    assert [("routes.rows: too many route rows", 0, 1)] == [
        (item["name"], item["before"], item["after"]) for item in data["kinds"]
    ]
    assert ["route rows"] == [item["name"] for item in data["situations"]]
    assert ("call", "call", "r0") == (event["before"], event["after"], event["request"])
    assert ["routes_start"] == [item["name"] for item in event["fields"]]
    assert ["8 route rows", "13 route rows"] == [
        story[-1]["text"].split(", ")[1] for story in event["stories"]
    ]
    assert "what happened to r0 in bad.json" in capsys.readouterr().out


def test_one_value_of_an_array_is_found(good: Trace, tmp_path: Path) -> None:
    """The place at which two arrays differ is named."""
    events = list(good.events)
    (place,) = (i for i, event in enumerate(events) if isinstance(event, Result))
    rollout = events[place].rollout  # type: ignore[attr-defined]
    routes = rollout.routes.copy()
    routes[2, 1, 0] += 1
    changed = replace(rollout, routes=routes)
    events[place] = replace(events[place], rollout=changed)  # type: ignore[call-arg]
    dump_trace(Trace(header=good.header, events=tuple(events)), tmp_path / "other.json")
    (field,) = found("good.json", "other.json", code=ExitCode.FAIL)["event"]["fields"]

    assert "rollout.routes" == field["name"]
    assert "from [2, 1, 0] on" in field["why"]
    assert "1 differ" in field["why"]


def test_contracts_are_compared_field_by_field(good: Trace, tmp_path: Path) -> None:
    """A promise that changed is named, also if all events are the same."""
    contract = replace(good.header.contract, abort_surfaces=True)
    dump_trace(
        Trace(header=replace(good.header, contract=contract), events=good.events),
        tmp_path / "other.json",
    )
    data = found("good.json", "other.json", code=ExitCode.FAIL)

    assert [{"name": "abort_surfaces", "before": False, "after": True}] == data["contract"]
    assert data["event"] is None


def test_a_trace_that_goes_on_differs_at_the_first_event_more(good: Trace, tmp_path: Path) -> None:
    """A trace that lacks its end differs where it ends."""
    dump_trace(Trace(header=good.header, events=good.events[:-1]), tmp_path / "short.json")
    event = found("good.json", "short.json", code=ExitCode.FAIL)["event"]

    assert len(good.events) - 1 == event["number"]
    assert "" == event["after"]


def test_reports_are_compared_too(good: Trace, tmp_path: Path) -> None:
    """Reports have verdicts, kinds and situations; a report and a trace can be compared."""
    dump_trace(run_case(Concat, ABORTED), tmp_path / "bad.json")
    only = ("--only", "routes.rows")
    assert ExitCode.PASS == run(["check", "good.json", *only, "--json", "a"])
    assert ExitCode.FAIL == run(["check", "bad.json", *only, "--json", "b"])
    reports = found("a", "b", code=ExitCode.FAIL)

    assert ["routes.rows"] == [item["name"] for item in reports["verdicts"]]
    assert reports["event"] is None
    assert found("a", "a", code=ExitCode.PASS)["alike"]
    assert found("a", "good.json", *only, code=ExitCode.PASS)["alike"]


def test_what_cannot_be_read_is_refused(
    good: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing, damaged or foreign file is named, and nothing is said to be alike."""
    assert good.events
    (tmp_path / "junk").write_bytes(b"\x00junk")
    (tmp_path / "list.json").write_text('{"checks": [1]}')
    run(["check", "good.json", "--json", "edited.json"])
    text = Path("edited.json").read_text(encoding="utf-8")
    Path("edited.json").write_text(text.replace('"seed": 0', '"seed": 1'), encoding="utf-8")
    capsys.readouterr()
    for name, message in (
        ("missing", "missing cannot be opened"),
        ("junk", "junk is not a rollproof trace"),
        ("list.json", "its checks are malformed"),
        ("edited.json", "does not fit its checksum"),
    ):
        assert message in output_of(capsys, "diff", "good.json", name, code=ExitCode.USAGE)
