"""The survey of a trace: what one pass finds, what it stores, and the slices that it allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollproof.core.events.rollout import Submit
from rollproof.core.trace import Trace
from rollproof.errors import TraceError
from rollproof.store import dump_trace
from rollproof.verification import trace_survey
from rollproof.verification.request_views import tell_request
from rollproof.verification.trace_survey import Survey, TraceFile
from tests.support.shown_traces import traced, written


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Surveys are stored in a folder of the test, of files of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trace_survey, "_STORED_FROM", 0)


def kinds(survey: Survey) -> list[tuple[str, object, int, int]]:
    """Check, request, episode and count of each finding."""
    return [
        (item.check, item.finding["where"]["request"], item.episode, item.times)
        for item in survey.findings
    ]


def no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any pass over a file fail."""

    def refuse(*_arguments: object, **_more: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(trace_survey, "_Pass", refuse)


def test_findings_come_in_the_order_of_the_trace(tmp_path: Path) -> None:
    """One of each kind, with its count, across episodes; the story is part of it."""
    file = written(
        tmp_path / "t.arrow", traced(4, wrong=[3], shifted=[1, 2]), traced(3, wrong=[0, 1])
    )
    survey = TraceFile(file).survey(complete=True)

    assert [("routes.position", "r1", 0, 2), ("stitch.tokens", "r3", 0, 3)] == kinds(survey)
    assert (2, 7, True) == (survey.episodes, survey.requests, survey.complete)
    assert "r1 delivered" in survey.findings[0].finding["story"][-1]["text"]


def test_both_forms_are_surveyed_alike(tmp_path: Path) -> None:
    """A JSON trace gives what the Arrow file gives."""
    trace = traced(3, wrong=[1])
    dump_trace(trace, tmp_path / "t.json")
    surveys = [
        TraceFile(file).survey(complete=True)
        for file in (tmp_path / "t.json", written(tmp_path / "t.arrow", trace))
    ]
    assert kinds(surveys[0]) == kinds(surveys[1])
    assert surveys[0].places == surveys[1].places


def test_a_long_file_is_read_to_its_first_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest stays unread unless all findings are wanted."""
    monkeypatch.setattr(trace_survey, "LONG", 0)
    file = TraceFile(written(tmp_path / "t.arrow", traced(40, wrong=[4, 30], shifted=[35])))
    first = file.survey(complete=False)

    assert [("stitch.tokens", "r4", 0, 1)] == kinds(first)
    assert not first.complete
    assert first.requests < 10
    whole = file.survey(complete=True)
    assert [("stitch.tokens", "r4", 0, 2), ("routes.position", "r35", 0, 1)] == kinds(whole)
    assert first.findings[0].finding == whole.findings[0].finding


def test_a_second_look_reads_the_stored_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second pass over the same file; one over a file that was changed."""
    path = written(tmp_path / "t.arrow", traced(3, wrong=[1]))
    survey = TraceFile(path).survey(complete=True)
    with monkeypatch.context() as patch:
        no_pass(patch)
        assert survey == TraceFile(path).survey(complete=True)
    written(path, traced(3, wrong=[2]))
    os.utime(path, ns=(1, 1))
    assert [("stitch.tokens", "r2", 0, 1)] == kinds(TraceFile(path).survey(complete=True))


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"format": 1}', b"\xff\xfe"])
def test_a_damaged_survey_is_made_again(tmp_path: Path, damage: bytes) -> None:
    """Whatever is in the cache, the pass finds it all."""
    path = written(tmp_path / "t.arrow", traced(3, wrong=[1]))
    survey = TraceFile(path).survey(complete=True)
    (stored,) = (tmp_path / "cache" / "rollproof" / "traces").glob("*.json")
    stored.write_bytes(damage)
    assert survey == TraceFile(path).survey(complete=True)


def test_a_cache_that_cannot_be_written_costs_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survey is returned all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = written(tmp_path / "t.arrow", traced(3, wrong=[1]))
    assert [("stitch.tokens", "r1", 0, 1)] == kinds(TraceFile(path).survey(complete=True))


def test_old_surveys_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds the latest ones."""
    monkeypatch.setattr(trace_survey, "_STORED", 2)
    for number in range(4):
        TraceFile(written(tmp_path / f"{number}.arrow", traced(1))).survey(complete=True)
    assert 2 == len(list((tmp_path / "cache" / "rollproof" / "traces").iterdir()))


def test_an_unfinished_file_is_surveyed_as_far_as_it_goes(tmp_path: Path) -> None:
    """A killed writer leaves a finding readable; what is open does not hang, and nothing is
    stored, for the file may grow.
    """
    path = written(tmp_path / "t.arrow", traced(6, wrong=[1]))
    path.write_bytes(path.read_bytes()[:-2000])
    survey = TraceFile(path).survey(complete=True)

    assert [("stitch.tokens", "r1", 0, 1)] == kinds(survey)
    assert "killed, or is still at work" in survey.ending
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_is_surveyed_up_to_the_damage(tmp_path: Path) -> None:
    """The error is part of the survey, next to what was found before."""
    path = written(tmp_path / "t.arrow", traced(6, wrong=[1]))
    data = bytearray(path.read_bytes())
    data[data.rindex(b'"r5"') + 1] ^= 1
    path.write_bytes(data)
    survey = TraceFile(path).survey(complete=True)

    assert [("stitch.tokens", "r1", 0, 1)] == kinds(survey)
    assert "is damaged behind byte" in survey.error


def test_a_slice_holds_the_events_between(tmp_path: Path) -> None:
    """Of its episode alone, with the header of that episode, whatever the batches."""
    traces = [traced(5), traced(9, wrong=[2])]
    file = TraceFile(written(tmp_path / "t.arrow", *traces, batch_events=7))
    survey = file.survey(complete=True)
    part = file.slice(survey, 1, 10, 33)

    assert list(range(10, 34)) == [event.index for event in part.events]
    assert [type(event) for event in traces[1].events[10:34]] == [type(e) for e in part.events]
    assert traces[1].header == part.header
    with pytest.raises(TraceError, match="has no episode 2"):
        file.slice(survey, 2, 0, 5)


def test_a_slice_of_one_request_leaves_out_the_others(tmp_path: Path) -> None:
    """A request may take as long as the trace: its story needs no event of others, and is the same
    without them.
    """
    trace = traced(9)
    file = TraceFile(written(tmp_path / "t.arrow", trace))
    survey = file.survey(complete=True)
    place = survey.place_of("r4")
    assert place is not None
    part = file.slice(survey, 0, 0, float("inf"), only="r4")

    assert ["r4"] == [e.request.request_id for e in part.events if isinstance(e, Submit)]
    told, whole = tell_request(part, "r4"), tell_request(trace, "r4")
    assert told is not None and whole is not None
    assert whole.story == told.story


def test_a_window_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page holds the events around a story, and no more than fit."""
    file = TraceFile(written(tmp_path / "t.arrow", traced(200)))
    survey = file.survey(complete=True)
    assert (0, float("inf")) == file.window(survey, 0, 900, 910)
    monkeypatch.setattr(trace_survey, "_DRAWN", 100)
    low, high = file.window(survey, 0, 900, 910)

    assert low < 900 and 910 < high
    assert 60 < high - low <= 100


def test_a_request_is_told_as_the_judge_sees_it() -> None:
    """With its calls and its sample, and without a mark; an open one up to the end of the trace."""
    trace = traced(2)
    told = tell_request(trace, "r1")
    assert told is not None
    assert [
        "r1 submitted: 3 prompt tokens, at most 4 new",
        "call 3 on s0 (v0) got 3 tokens, sampled 2 tokens, 4 route rows, aborted: segment 0",
        (
            "call 4 on s1 (v0) got 5 tokens, sampled 2 tokens, 6 route rows, ended by length:"
            " segment 1"
        ),
        "r1 delivered: 4 tokens, 6 route rows, ended by length",
    ] == [moment.text for moment in told.story]
    assert not any(moment.broke for moment in told.story)

    cut = Trace(header=trace.header, events=trace.events[:-1])
    still_open = tell_request(cut, "r1")
    assert still_open is not None
    assert told.story[:-1] == still_open.story
    assert tell_request(trace, "r9") is None
