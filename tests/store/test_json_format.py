"""The JSON form: what a person mails comes back equal, reads well, and cannot do harm."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Admit, Reply, Result
from rollproof.core.records import EngineOutput, FinishReason, Rollout
from rollproof.core.trace import EVENT_KINDS, Header, Trace
from rollproof.errors import TraceError, TraceVersionError, UsageError
from rollproof.fakes.known_bugs._planting import ABORTED
from rollproof.store import (
    TraceReader,
    TraceWriter,
    dump_trace,
    json_format,
    load_trace,
    open_trace,
)
from tests.store.test_arrow_format import HEADER, story
from tests.support.random_records import alike, any_event, any_header
from tests.support.trace_builder import contract


def trip(trace: Trace, path: Path) -> Trace:
    dump_trace(trace, path)
    return load_trace(path)


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A sound file without a checksum, changed as a person would."""
    dump_trace(story(), path)
    data = json.loads(path.read_text())
    del data["checksum"]
    out = change(data)
    path.write_text(json.dumps(data if out is None else out))
    return path


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(any_header(), st.lists(any_event(), max_size=8))
def test_round_trip_of_any_events(tmp_path: Path, header: Header, events: list[Event]) -> None:
    """Whatever events are dumped come back equal, arrays and NaN included."""
    trace = Trace(header=header, events=tuple(events))
    assert alike(trace, trip(trace, tmp_path / "trace.json"))


@pytest.mark.parametrize("kind", sorted(EVENT_KINDS))
def test_every_kind_of_event_is_drawn(kind: str, tmp_path: Path) -> None:
    """Each registered kind of event makes the round trip by itself."""

    @settings(
        max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(any_event(kind))
    def round_trip(event: Event) -> None:
        trace = Trace(header=HEADER, events=(event,))
        assert alike(trace, trip(trace, tmp_path / "trace.json"))

    round_trip()


def test_both_forms_hold_the_same(tmp_path: Path) -> None:
    """A trace through the Arrow store and one through JSON are equal, and open_trace reads both
    whatever they are called.
    """
    trace = story()
    with TraceWriter(tmp_path / "a.json", trace.header) as writer:
        for event in trace:
            writer.append(event)
    dump_trace(trace, tmp_path / "b.arrow")
    arrow, text = open_trace(tmp_path / "a.json"), open_trace(tmp_path / "b.arrow")
    assert isinstance(arrow, TraceReader) and not isinstance(text, TraceReader)
    assert alike(trace.header, arrow.header) and alike(trace.header, text.header)
    assert alike(list(trace), list(arrow)) and alike(list(trace), list(text))
    assert [(trace.header, len(trace.events))] == [
        (header, len(list(events))) for header, events in text.episodes()
    ]
    assert (
        str(arrow.ending)
        == str(text.ending)
        == f"{len(trace.events)} events in 1 episodes were read."
    )


def test_the_text_is_readable(tmp_path: Path) -> None:
    """One event a line, ids as lists, routes as nested lists, NaN as a marked null."""
    path = tmp_path / "trace.json"
    output = EngineOutput(
        token_ids=(4, 5),
        logprobs=np.array([-0.5, np.nan, -np.inf]),
        routes=np.array([[[0, 1]], [[2, 3]]], np.uint8),
        finish_reason=FinishReason.ABORT,
    )
    dump_trace(
        Trace(
            header=HEADER,
            events=(
                Admit(index=0, call_id=1, server_id="s0"),
                Reply(index=1, time=2.0, call_id=1, output=output),
            ),
        ),
        path,
    )
    lines = path.read_text().splitlines()
    assert lines[0].startswith('{"format": "rollproof-trace", "schema": 1, "made_by": "rollproof')
    logprobs = '{"dtype": "float64", "shape": [3], "nan": "null", "data": [-0.5, null, "-inf"]}'
    routes = '{"dtype": "uint8", "shape": [2, 1, 2], "data": [[[0, 1]], [[2, 3]]]}'
    shown = (
        f'{{"token_ids": [4, 5], "logprobs": {logprobs}, "routes": {routes}, "finish_reason":'
        ' "abort"}'
    )
    assert lines[-3:] == [
        ' {"kind": "admit", "index": 0, "call_id": 1, "server_id": "s0"},',
        f' {{"kind": "reply", "index": 1, "time": 2.0, "call_id": 1, "output": {shown}}}',
        "]}",
    ]


def test_large_arrays_are_base64(tmp_path: Path) -> None:
    """Beyond 4,096 elements an array is base64 of its bytes, and comes back equal and read-only."""
    routes = np.arange(5000, dtype=np.uint16).reshape(-1, 5, 2)
    trace = Trace(
        header=HEADER,
        events=(
            Result(
                request_id="r",
                rollout=Rollout(
                    request_id="r",
                    prompt_ids=(),
                    response_ids=(),
                    finish_reason=None,
                    routes=routes,
                ),
            ),
        ),
    )
    back = trip(trace, tmp_path / "trace.json")
    assert '"base64"' in (tmp_path / "trace.json").read_text()
    assert alike(trace, back)
    (event,) = back.events
    assert (
        isinstance(event, Result) and event.rollout is not None and event.rollout.routes is not None
    )
    assert not event.rollout.routes.flags.writeable


def test_a_marked_file_of_an_editor_is_read(tmp_path: Path) -> None:
    """A byte-order mark, spaces in front and another layout of the lines do not matter."""
    path = tmp_path / "trace.json"
    dump_trace(story(), path)
    path.write_bytes(
        b"\xef\xbb\xbf\r\n " + json.dumps(json.loads(path.read_text()), indent=4).encode()
    )
    assert alike(list(story()), list(open_trace(path)))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at ``path`` of the JSON."""

    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


REPLY = ("events", 4, "output")
LOGPROBS = (*REPLY, "logprobs")
ROUTES = (*REPLY, "routes")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            put("events", 0, "index", value=True),
            r"event 0: The weights event cannot be read: index must be int, not True",
        ),
        (
            put("events", 0, "index", value=2**70),
            "index must fit 64 bits, not be 1180591620717411303424",
        ),
        (
            put("events", 0, "index", value=2**500),
            "index must fit 64 bits, not be a whole number of 501 bits",
        ),
        (put("events", 0, "time", value="now"), "time must be float, not 'now'"),
        (put("events", 0, "server_id", value=None), "server_id must be str, not None"),
        (put("events", 0, "loaded", value=1), "loaded must be bool, not 1"),
        (put("events", 0, "version", value=1.5), "version must be int or str or null, not 1.5"),
        (put("events", 0, value=[]), "event 0: An event must be an object with a kind"),
        (put("events", 0, "kind", value=7), "An event must be an object with a kind"),
        (
            put("events", 1, "request", value=None),
            "request must be an object with the fields of Request",
        ),
        (
            put("events", 1, "request", "prompt_ids", value=[1, "2"]),
            r"request.prompt_ids\[1\] must be int, not '2'",
        ),
        (
            put("events", 1, "request", "prompt_ids", value={"$integers": 0}),
            r"request.prompt_ids has the reserved key '\$integers'",
        ),
        (
            put("events", 1, "request", "sampling", value={"$x": 1}),
            r"request.sampling has the reserved key '\$x'",
        ),
        (
            put("events", 1, "request", "sampling", value={"$array": 0}),
            r"request.sampling has the reserved key '\$array'",
        ),
        (
            put("events", 1, "request", "sampling", value={"a": {"$array": {"$float": 1}}}),
            r"request.sampling\[a\] has the reserved key '\$array'",
        ),
        (
            put("events", 1, "request", "prompt_ids", value={"$array": 0}),
            r"request.prompt_ids has the reserved key '\$array'",
        ),
        (
            put(*REPLY, "finish_reason", value="tired"),
            r"output.finish_reason must be one of \['stop', 'length'",
        ),
        (
            put(*LOGPROBS, value=[-1.0]),
            "An array must be an object with dtype, shape, and data or base64",
        ),
        (put(*LOGPROBS, "dtype", value="object"), "its dtype one of"),
        (
            put(*LOGPROBS, "dtype", value="float32"),
            "output.logprobs must be an array of float64, not of float32",
        ),
        (put(*LOGPROBS, "dtype", value=["float64"]), "its dtype one of"),
        (put(*LOGPROBS, "shape", value=[-1]), r"do not have its shape"),
        (put(*LOGPROBS, "shape", value=[2**62]), r"do not have its shape"),
        (put(*LOGPROBS, "shape", value=[]), r"An array of float64 cannot hold a list of 2"),
        (put(*LOGPROBS, "shape", value="2"), "An array of float64 cannot hold a list of 2"),
        (put(*LOGPROBS, "shape", value=[True, 2]), "do not have its shape"),
        (put(*LOGPROBS, "extra", value=1), "An array must be an object"),
        (put(*LOGPROBS, "base64", value="AAAA"), "An array must be an object"),
        (
            put(*LOGPROBS, value={"dtype": "float64", "shape": [1], "data": [None]}),
            "An array of float64 cannot hold None",
        ),
        (
            put(*LOGPROBS, value={"dtype": "float64", "shape": [1], "data": [True]}),
            "cannot hold True",
        ),
        (
            put(*LOGPROBS, value={"dtype": "float64", "shape": [1], "data": [10**400]}),
            "cannot hold a value that must fit 64 bits, not be a whole number of 1329 bits",
        ),
        (
            put(
                *LOGPROBS, value={"dtype": "float64", "shape": [1], "nan": "null", "data": ["nan"]}
            ),
            "cannot hold 'nan'",
        ),
        (
            put(*ROUTES, value={"dtype": "uint8", "shape": [1], "data": [256]}),
            "An array of uint8 cannot hold 256",
        ),
        (
            put(*ROUTES, value={"dtype": "uint8", "shape": [1], "data": [-1]}),
            "An array of uint8 cannot hold -1",
        ),
        (
            put(*ROUTES, value={"dtype": "uint8", "shape": [1], "data": [1.0]}),
            "An array of uint8 cannot hold 1.0",
        ),
        (
            put(*ROUTES, value={"dtype": "int32", "shape": [1], "base64": "!!!!"}),
            "The base64 of an array is damaged",
        ),
        (
            put(*ROUTES, value={"dtype": "int32", "shape": [1], "base64": None}),
            "The base64 of an array is damaged",
        ),
        (
            put(*ROUTES, value={"dtype": "int32", "shape": [2], "base64": "AAAA"}),
            "has the shape of 2 elements, but 3 bytes of data",
        ),
        (
            put(*ROUTES, value={"dtype": "int32", "shape": [0, 2**61, 2**61], "data": []}),
            "an impossible shape",
        ),
        (put("header", value=None), "must be an object with the fields of Header"),
        (put("header", "contract", "rows", value="all"), "contract.rows must be one of"),
        (
            put("header", "case", value={"a": {"$float": "inf", "b": 1}}),
            r"case\['a'\] must be a number, or one of .* under '\$float'",
        ),
        (put("schema", value="1"), '"schema" must be a whole number >= 1'),
        (put("schema", value=0), '"schema" must be a whole number >= 1'),
        (put("events", value={}), "a list of events"),
        (put("extra", value=1), "unknown are"),
        (lambda data: [data], 'does not say "format"'),
        (lambda data: {"schema": 999}, 'does not say "format": "rollproof-trace"'),
        (lambda data: {"schema": 1, "checks": []}, "looks like a report"),
    ],
)
def test_hostile_values_are_refused_with_their_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    """A value that does not fit its field raises TraceError naming the file, the event and the
    field.
    """
    path = edited(tmp_path / "trace.json", change)
    with pytest.raises(TraceError, match=text) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"time": 1.0', '"time": 1e400', "time is a number too large for a float"),
        ('"time": 1.0', '"time": NaN', "NaN is not JSON"),
        ('"time": 1.0', '"time": -Infinity', "-Infinity is not JSON"),
        ('"time": 1.0', '"time": 1.0, "time": 2.0', "the key 'time' occurs twice"),
        ('"time": 1.0', '"time": ' + "9" * 5000, "not the JSON of a trace"),
        ('"time": 1.0', '"time": ' + "[" * 100_000, "nested too deeply"),
        ('"time": 1.0', '"time": 01', "not the JSON of a trace"),
        ('"s0"', '"\\ud800"', "holds a lone surrogate"),
        ('"kind": "weights"', '"kind": "w\\u0000"', "this rollproof does not know"),
    ],
)
def test_hostile_text_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    """JSON that Python would read leniently is refused: numbers out of range, NaN, keys twice,
    bottomless nesting.
    """
    path = tmp_path / "trace.json"
    dump_trace(story(), path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(TraceError, match=text):
        load_trace(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"actions": [{"do": "skew", "server": ["s0"]}]}, r"case\.actions\[0\]\.server"),
        ({"engine": {"transfer_steps": "2"}}, r"case\.engine\.transfer_steps"),
        ({"partial": 0}, r"case\.partial"),
    ],
)
def test_a_case_has_the_types_of_its_fields(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    """Checks look at the case: servers are looked up, and numbers compared."""
    case = {**ABORTED.to_dict(), **change}
    path = edited(tmp_path / "trace.json", put("header", "case", value=case))
    with pytest.raises(TraceError, match=f"The header cannot be read: {text}"):
        load_trace(path)


def test_nesting_that_the_parser_takes_and_we_do_not(tmp_path: Path) -> None:
    """Nesting just below the parser's own limit is refused like one above it: the error is ours at
    every depth.
    """
    path = tmp_path / "trace.json"
    dump_trace(story(), path)
    text = re.sub(r', "checksum": "[^"]*"', "", path.read_text())
    refused = 0
    for depth in range(50, 1200, 50):
        path.write_text(
            text.replace(
                '"schema": 1\n', f'"schema": 1, "case": {{"a": {"[" * depth}{"]" * depth}}}\n', 1
            )
        )
        try:
            load_trace(path)
        except TraceError as error:
            refused += 1
            assert "nested too deeply" in str(error)  # noqa: PT017 - both are right
    assert 0 < refused < 23


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put("schema", value=2), "in schema 2; this rollproof reads schemas up to 1. Upgrade"),
        (put("header", "schema", value=7), "in schema 7"),
        (put("events", 0, "kind", value="teleport"), "event of kind 'teleport'"),
        (put("events", 0, "colour", value="red"), r"Weights has the fields .*colour"),
        (put(*REPLY, "speed", value=1), r"EngineOutput has the fields .*speed"),
    ],
)
def test_newer_traces_are_distinguished(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    """What a newer rollproof may have written raises TraceVersionError, which says to upgrade."""
    path = edited(tmp_path / "trace.json", change)
    with pytest.raises(TraceVersionError, match=text) as caught:
        load_trace(path)
    assert "pgrade" in str(caught.value)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "cut", "copy"]),
            st.integers(0, 1 << 20),
            st.integers(0, 1 << 20),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_vandalism(tmp_path: Path, deeds: list[tuple[str, int, int]]) -> None:
    """Bytes set, cut out or copied anywhere: a trace (a digit may have changed) or a TraceError,
    never another exception.
    """
    path = tmp_path / "trace.json"
    dump_trace(story(), path)
    out = bytearray(path.read_bytes())
    for deed, a, b in deeds:
        a, b = sorted((a % (len(out) + 1), b % (len(out) + 1)))
        if deed == "set" and a < len(out):
            out[a] = b % 256
        elif deed == "cut":
            del out[a : a + b % 40]
        elif deed == "copy":
            out[a:a] = out[a : a + b % 40]
    path.write_bytes(out)
    try:
        trace = open_trace(path)
    except TraceError:
        return
    assert {type(event) for event in trace} <= set(EVENT_KINDS.values())


def test_size_is_bounded_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit nothing is written, the old file stays, and a larger file is not read."""
    path = tmp_path / "trace.json"
    dump_trace(story(), path)
    before = path.read_bytes()
    monkeypatch.setattr(json_format, "MAX_BYTES", len(before) - 1)
    with pytest.raises(
        TraceError,
        match=(
            r"above the limit of .* MB: write it with rollproof.store.TraceWriter, or shrink it"
            r" first"
        ),
    ):
        dump_trace(story(), path)
    assert before == path.read_bytes()
    with pytest.raises(TraceError, match="the limit of the JSON form"):
        load_trace(path)
    monkeypatch.setattr(json_format, "MAX_BYTES", len(before))
    assert alike(list(story()), list(load_trace(path)))


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writing fails, or a value cannot be stored, the old file stays complete and nothing is
    left next to it.
    """
    path = tmp_path / "trace.json"
    dump_trace(story(), path)
    before = path.read_bytes()
    unstorable = Trace(header=HEADER, events=(Admit(call_id="x", server_id="s"),))  # type: ignore[arg-type]
    with pytest.raises(
        TraceError, match="The admit event cannot be stored: call_id must be int, not 'x'"
    ):
        dump_trace(unstorable, path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        TraceError, match=r"could not be written: No space left on device\. Nothing was changed"
    ):
        dump_trace(story(), path)
    assert before == path.read_bytes()
    assert ["trace.json"] == [item.name for item in tmp_path.iterdir()]


def test_files_can_be_mailed(tmp_path: Path) -> None:
    """The file is ASCII text with the permissions that any new file has."""
    path, plain = tmp_path / "trace.json", tmp_path / "plain"
    dump_trace(Trace(header=Header(subject="süß", contract=contract()), events=()), path)
    plain.touch()
    assert path.read_bytes().isascii()
    assert stat.S_IMODE(plain.stat().st_mode) == stat.S_IMODE(path.stat().st_mode)
    assert load_trace(path).header.subject == "süß"


def test_wrong_paths_and_encodings(tmp_path: Path) -> None:
    """No file, a folder, no folder to write to, text in another encoding: each is reported in our
    words.
    """
    with pytest.raises(UsageError, match="There is no trace at"):
        load_trace(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match="is a folder"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match="could not be written: No such file or directory"):
        dump_trace(story(), tmp_path / "no" / "trace.json")
    TraceWriter(tmp_path / "served.arrow", HEADER).close()
    with pytest.raises(UsageError, match="is a trace in Arrow form: `rollproof check` and"):
        load_trace(tmp_path / "served.arrow")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xfc"}')
    with pytest.raises(TraceError, match=r"is not UTF-8 text \(at byte 7\)"):
        load_trace(tmp_path / "latin.json")
