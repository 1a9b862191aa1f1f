"""Damaged, truncated, foreign and hostile Arrow traces: correct events or a TraceError, never anything else."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollproof.errors import TraceError, TraceVersionError
from rollproof.store import TraceReader, TraceWriter, columns, open_trace, stream
from rollproof.store.frames import END, read_frame
from rollproof.trace import Event, Header
from tests.core.test_store_arrow import HEADER, story
from tests.support.random_records import alike

Episodes = list[tuple[Header, list[Event]]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Episodes]:
    """The bytes of a small closed trace of two episodes in five batches, and what it holds."""
    path = tmp_path_factory.mktemp("sound") / "trace.arrow"
    stories = [story(0), story(1)]
    with TraceWriter(path, stories[0].header, batch_events=5) as writer:
        for event in stories[0]:
            writer.append(event)
        writer.write(stories[1])
    return path.read_bytes(), [(trace.header, list(trace.events)) for trace in stories]


def flat(episodes: Episodes) -> list[Header | Event]:
    out: list[Header | Event] = []
    for header, events in episodes:
        out += [header, *events]
    return out


def take(path: Path) -> tuple[list[Header | Event], TraceReader | None, TraceError | None]:
    """Everything that can be read, and the error that ended it. Any other exception is a fault of the store."""
    seen: list[Header | Event] = []
    reader = None
    try:
        reader = TraceReader(path)
        for header, events in reader.episodes():
            seen.append(header)
            seen.extend(events)
    except TraceError as error:
        return seen, reader, error
    return seen, reader, None


def places(data: bytes, path: Path) -> list[int]:
    """Every byte of the schema's and the first batch's beginning and around every border, and every 61st elsewhere."""
    path.write_bytes(data)
    head, pairs = pairs_of(path)
    borders, at = [0, len(head), len(data) - len(END), len(data)], len(head)
    for pair in pairs:
        seal = at + pair.rindex(b"\xff\xff\xff\xff")
        borders += [at, seal]
        at += len(pair)
    near = {place + i for place in borders for i in range(-4, 24)} | set(range(len(head), len(head) + 200)) | set(range(0, len(data), 61))
    return sorted(place for place in near if 0 <= place < len(data))


def check_outcome(data: bytes, path: Path, whole: list[Header | Event], original: bytes) -> None:
    """What is read is a beginning of what was written; an incomplete reading ends with an error or says that the file is not closed."""
    path.write_bytes(data)
    seen, reader, error = take(path)
    assert len(seen) <= len(whole)
    assert all(map(alike, seen, whole))
    if error is None and len(seen) < len(whole):
        assert reader is not None and reader.ending is not None and not reader.ending.closed
    if error is not None:
        assert str(path) in str(error)


def test_cut_at_any_byte(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """A file cut at any byte gives every batch that is whole, and either says how much was lost or that nothing can be read."""
    data, episodes = sound
    whole = flat(episodes)
    path = tmp_path / "trace.arrow"
    counts = []
    for cut in places(data, path):
        path.write_bytes(data[:cut])
        seen, reader, error = take(path)
        assert all(map(alike, seen, whole))
        if reader is None:
            assert error is not None and not seen
            assert "before its first header" in str(error)
        else:
            assert error is None
            assert reader.ending is not None and not reader.ending.closed
        counts.append(len(seen))
    assert sorted(counts) == counts
    assert {0, 1, 6, len(whole)} <= set(counts)


def test_flip_of_any_byte(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """A file with any one byte changed gives correct events, or a TraceError that says where and how much before it is sound."""
    data, episodes = sound
    whole = flat(episodes)
    path = tmp_path / "trace.arrow"
    draw = random.Random(0)
    for place in places(data, path):
        changed = bytearray(data)
        changed[place] ^= draw.choice([1, 0x80, 0xFF, draw.randrange(1, 256)])
        check_outcome(bytes(changed), path, whole, data)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "cut", "copy", "swap", "zero", "drop"]), st.integers(0, 1 << 20), st.integers(0, 1 << 20)),
        max_size=5,
    )
)
@example([("drop", 0, 9)])
def test_any_vandalism(sound: tuple[bytes, Episodes], tmp_path: Path, deeds: list[tuple[str, int, int]]) -> None:
    """Bytes set, cut out, copied, swapped, zeroed or dropped anywhere, in any combination: correct events or a TraceError."""
    data, episodes = sound
    out = bytearray(data)
    for what, a, b in deeds:
        a, b = sorted((a % (len(out) + 1), b % (len(out) + 1)))
        piece = bytes(out[a:b])
        if what == "set" and a < len(out):
            out[a] = b % 256
        elif what == "cut":
            del out[a:b]
        elif what == "copy":
            out[a:a] = piece[:5000]
        elif what == "swap":
            out = bytearray(out[b:] + out[:b])
        elif what == "zero":
            out[a:b] = bytes(b - a)
        elif what == "drop":
            del out[b:]
    check_outcome(bytes(out), tmp_path / "trace.arrow", flat(episodes), data)


def pairs_of(path: Path) -> tuple[bytes, list[bytes]]:
    """The schema of a trace file, and its batches each with its seal."""
    data = path.read_bytes()
    with path.open("rb") as file:
        walk = stream.Stream(path, file)
        head, pairs = data[: walk.offset], []
        while (pair := walk._pair()) is not None:
            pairs.append(data[walk.offset : pair[1].offset + pair[1].size])
            walk.offset = pair[1].offset + pair[1].size
    return head, pairs


@pytest.mark.parametrize(
    "order", [lambda p: [p[0], p[2], p[1], *p[3:]], lambda p: [p[0], *p[2:]], lambda p: [p[0], p[1], p[1], *p[2:]], lambda p: p[1:]]
)
def test_whole_batches_out_of_place(sound: tuple[bytes, Episodes], tmp_path: Path, order: Callable[[list[bytes]], list[bytes]]) -> None:
    """Batches that are swapped, cut out or doubled are each whole, and are seen all the same, before their events are given."""
    data, episodes = sound
    path = tmp_path / "trace.arrow"
    path.write_bytes(data)
    head, pairs = pairs_of(path)
    assert data == head + b"".join(pairs) + END
    path.write_bytes(head + b"".join(order(pairs)) + END)
    seen, _, error = take(path)
    assert error is not None and "batches were cut out, doubled or moved" in str(error)
    assert all(map(alike, seen, flat(episodes)))


def test_two_files_joined_are_told(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """Two traces in one file are read up to the end of the first, and then the error guesses what happened."""
    data, episodes = sound
    path = tmp_path / "trace.arrow"
    path.write_bytes(data + data)
    seen, _, error = take(path)
    assert len(flat(episodes)) == len(seen)
    assert error is not None and "were two files joined?" in str(error)
    assert f"The {len(flat(episodes)) - 2} events in 2 episodes before it were read and are sound" in str(error)


def test_payload_that_looks_like_an_end_mark(tmp_path: Path) -> None:
    """A killed writer's tail may end in the bytes of Arrow's end mark (filler -1, then 0): that is no damage."""
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.write(story())
    head, pairs = pairs_of(path)
    path.write_bytes(head + pairs[0] + pairs[1][:400] + b"\xff\xff\xff\xff\0\0\0\0")
    reader = TraceReader(path)
    assert [] == list(reader)
    assert reader.ending is not None and (False, 408) == (reader.ending.closed, reader.ending.lost)


def forge(
    path: Path,
    *,
    kind: str = "admit",
    body: str | bytes = '{"call_id":0,"server_id":"s0"}',
    index: int = 0,
    time: float = 0.0,
    integers: list[list[int]] | None = None,
    arrays: list[dict[str, Any]] | None = None,
    column: tuple[int, pa.Array[Any]] | None = None,
    patch: Callable[[bytes], bytes] = bytes,
    options: pa.ipc.IpcWriteOptions | None = None,
) -> None:
    """Write a trace whose second batch holds one row of any content, with a seal that vouches for it."""
    with TraceWriter(path, HEADER, mode="w"):
        pass
    head, pairs = pairs_of(path)
    text: Any = (
        body
        if isinstance(body, str)
        else pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, len(body)], np.int32).tobytes()), pa.py_buffer(body))
    )
    values = [[0], [kind], [index], [time], [text] if isinstance(text, str) else text, [integers or []], [arrays or []]]
    columns_ = [
        value if isinstance(value, pa.Array) else pa.array(value, field.type) for value, field in zip(values, columns.schema(), strict=True)
    ]
    if column is not None:
        columns_[column[0]] = column[1]
    batch = pa.record_batch(columns_, schema=columns.schema())
    if options is None:
        frame = batch.serialize().to_pybytes()
    else:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=options) as out:
            out.write_batch(batch)
        whole = io.BytesIO(sink.getvalue().to_pybytes())
        first = read_frame(whole, 0, 1 << 20)
        assert first is not None
        frame = whole.getvalue()[first.size : -8]
    frame = patch(frame)
    seal = columns.Rows()
    seal.add_seal(stream.State(2, 0, 1).seal(frame))
    path.write_bytes(head + pairs[0] + frame + seal.batch().serialize().to_pybytes() + END)


def reply(array: str = "null", tokens: str = "[]") -> str:
    return f'{{"call_id":0,"output":{{"token_ids":{tokens},"logprobs":null,"routes":{array},"finish_reason":"stop"}}}}'


ROUTES = reply('{"$array":0}')
FORGED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "object", "shape": [1], "data": b"x" * 8}]}, "element type 'object'"),
    ({"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "<M8[ns]", "shape": [1], "data": b"x" * 8}]}, "element type '<M8"),
    (
        {"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "float64", "shape": [1, 1, 1], "data": b"x" * 8}]},
        "must be an array of bool or int8",
    ),
    ({"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "uint8", "shape": [-1, -1, 2], "data": b"xx"}]}, "lengths >= 0"),
    ({"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "uint8", "shape": [1] * 9, "data": b"x"}]}, "at most 8 lengths"),
    (
        {"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "uint8", "shape": [2**62, 4], "data": b"x"}]},
        "claims 18446744073709551616 elements",
    ),
    ({"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "int32", "shape": [1], "data": b"xyz"}]}, "has 3 bytes"),
    ({"kind": "reply", "body": ROUTES, "arrays": [{"dtype": "uint8", "shape": [0, 2**62, 2**62], "data": b""}]}, "impossible lengths"),
    ({"kind": "reply", "body": ROUTES}, "refers to 0 among its 0 parts"),
    (
        {"kind": "reply", "body": reply('{"$array":1}'), "arrays": [{"dtype": "uint8", "shape": [], "data": b"x"}]},
        "refers to 1 among its 1 parts",
    ),
    ({"kind": "reply", "body": reply('{"$array":true}'), "arrays": [{"dtype": "uint8", "shape": [], "data": b"x"}]}, "refers to True"),
    ({"kind": "reply", "body": reply('"x"')}, "refers to 'x' among its 0 parts"),
    ({"kind": "reply", "body": reply(tokens='{"$integers":0}')}, "refers to 0 among its 0 parts"),
    ({"kind": "reply", "body": reply(tokens="[1.5]")}, r"output.token_ids\[0\] must be int, not 1.5"),
    ({"kind": "reply", "body": reply(tokens="[true]")}, r"output.token_ids\[0\] must be int, not True"),
    (
        {
            "kind": "submit",
            "body": '{"request":{"request_id":"r","prompt_ids":[],"turns":[{"$integers":0},{"$integers":0}]}}',
            "integers": [[1] * 9],
        },
        "refers to 0 among its 1 parts",
    ),
    ({"body": b'{"call_id":0,"server_id":"\xff\xfe"}'}, "(?i)invalid UTF8"),
    ({"body": '{"call_id":0,"server_id":"\\ud800"}'}, "server_id holds a lone surrogate"),
    ({"body": '{"call_id":0,"server_id":NaN}'}, "NaN is not JSON"),
    ({"body": '{"call_id":0,"call_id":1,"server_id":"s"}'}, "the key 'call_id' occurs twice"),
    ({"body": '{"call_id":1e400,"server_id":"s"}'}, "call_id must be int, not inf"),
    ({"body": f'{{"call_id":{2**70},"server_id":"s"}}'}, "call_id must fit 64 bits"),
    ({"body": f'{{"call_id":{"9" * 5000},"server_id":"s"}}'}, "not the JSON of a trace"),
    ({"body": '{"call_id":true,"server_id":"s"}'}, "call_id must be int, not True"),
    ({"body": '{"server_id":"s"}'}, "Admit lacks 'call_id'"),
    ({"body": "[" * 100_000}, "nested too deeply"),
    ({"body": '{"a":' * 100_000}, "nested too deeply"),
    ({"body": "[]"}, "must be an object"),
    ({"body": "{"}, "not the JSON of a trace"),
    ({"kind": "gauge", "body": '{"name":"x","value":1e400,"phase":"end"}'}, "value is a number too large for a float"),
    ({"kind": "gauge", "body": '{"name":"x","value":{"$float":"snan"},"phase":"end"}'}, "value must be a number, or one of"),
    ({"kind": "pause", "body": '{"server_id":"s","mode":"nap"}'}, "mode must be one of .*'retract'.*, not 'nap'"),
    ({"kind": "pause", "body": '{"server_id":"s","mode":"wait","progress":{"01":1}}'}, "key that is no whole number: '01'"),
    ({"kind": "header", "body": '{"subject":"x"}'}, "Header lacks 'contract'"),
    ({"kind": "header", "body": '{"subject":"x","contract":{"rows":"T"}}'}, "contract Contract lacks 'resume'"),
    (
        {
            "kind": "header",
            "body": '{"subject":"x","contract":{"rows":"T","resume":"none","versions":"none","logprobs":"raw",'
            '"abort_surfaces":true,"kv_policy":"keep"}}',
        },
        "(?s)contract Contract refuses its values: .*num_layers.* must be declared",
    ),
    ({"kind": "header", "body": '{"subject":"x","contract":' + '{"a":' * 50_000}, "nested too deeply"),
    ({"time": float("nan")}, "time is a number too large for a float"),
]


@pytest.mark.parametrize(("content", "text"), FORGED, ids=[text[:30] for _, text in FORGED])
def test_forged_rows_are_refused(tmp_path: Path, content: dict[str, Any], text: str) -> None:
    """A row with hostile content, under a valid seal, is refused as damage with the reason; the episode before it is given."""
    path = tmp_path / "trace.arrow"
    forge(path, **content)
    seen, _, error = take(path)
    assert [HEADER] == seen
    assert error is not None
    with pytest.raises(TraceError, match=text):
        raise error


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"kind": "teleport"}, "event of kind 'teleport', which this rollproof does not know"),
        (
            {"body": '{"call_id":0,"server_id":"s","colour":"red"}'},
            r"Admit has the fields \[\"'colour'\"\] here, which this rollproof does not know",
        ),
        ({"kind": "header", "body": '{"schema":2,"subject":"x","made_by":"rollproof 9"}'}, "written by 'rollproof 9' in schema 2"),
    ],
)
def test_what_a_newer_rollproof_writes_is_told_apart_from_damage(tmp_path: Path, content: dict[str, Any], text: str) -> None:
    """An unknown kind, an unknown field, a later schema: TraceVersionError, which names the file and says to upgrade."""
    path = tmp_path / "trace.arrow"
    forge(path, **content)
    _, _, error = take(path)
    assert isinstance(error, TraceVersionError)
    with pytest.raises(TraceVersionError, match=text):
        raise error
    assert "pgrade" in str(error)


def test_forgery_itself_is_sound(tmp_path: Path) -> None:
    """The forged file is refused for its content alone: with honest content the same file is read."""
    path = tmp_path / "trace.arrow"
    forge(
        path,
        kind="reply",
        body=reply('{"$array":0}', '{"$integers":0}'),
        integers=[[7]],
        arrays=[{"dtype": "uint8", "shape": [1, 1, 1], "data": b"x"}],
    )
    seen, _, error = take(path)
    assert error is None
    assert 2 == len(seen)


def test_compressed_batches_are_refused_unread(tmp_path: Path) -> None:
    """A compressed batch, which may unfold to any size, is refused before Arrow sees it."""
    path = tmp_path / "trace.arrow"
    forge(path, body='{"call_id":0,"server_id":"' + "s" * 5000 + '"}', options=pa.ipc.IpcWriteOptions(compression="lz4"))
    _, _, error = take(path)
    assert error is not None and "a batch is compressed" in str(error)


def test_nulls_are_refused(tmp_path: Path) -> None:
    """A column with nulls is refused: the views of its buffers would read what is not there."""
    path = tmp_path / "trace.arrow"
    forge(path, column=(2, pa.array([None], pa.int64())))
    _, _, error = take(path)
    assert error is not None and "holds nulls" in str(error)


def test_offsets_that_run_backwards_are_refused(tmp_path: Path) -> None:
    """Hostile list offsets are refused by validation rather than followed."""

    def backwards(frame: bytes) -> bytes:
        honest, hostile = struct.pack("<3i", 0, 2, 3), struct.pack("<3i", 0, -7, 3)
        assert 1 == frame.count(honest)
        return frame.replace(honest, hostile)

    path = tmp_path / "trace.arrow"
    forge(path, integers=[[1, 2], [3]], patch=backwards)
    _, _, error = take(path)
    assert error is not None and "is inconsistent" in str(error)


@pytest.mark.parametrize("claim", [2**31, 2**40, 2**62, -8])
def test_huge_claims_allocate_nothing(sound: tuple[bytes, Episodes], tmp_path: Path, claim: int) -> None:
    """A batch whose metadata claims a huge or negative body is refused or counted as unfinished, without allocating it."""
    path = tmp_path / "trace.arrow"
    path.write_bytes(sound[0])
    head, pairs = pairs_of(path)
    length = int.from_bytes(pairs[1][4:8], "little")
    body = next(
        place
        for place in range(8, 8 + length, 4)
        if int.from_bytes(pairs[1][place : place + 8], "little") == frame_body(path, len(head) + len(pairs[0]))
    )
    hostile = pairs[1][:body] + claim.to_bytes(8, "little", signed=True) + pairs[1][body + 8 :]
    path.write_bytes(head + pairs[0] + hostile + END)
    seen, _, error = take(path)
    assert error is not None and f"claims a body of {claim} bytes" in str(error)
    assert 1 == len(seen)


def frame_body(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        frame = read_frame(file, offset, path.stat().st_size)
    assert frame is not None
    return frame.size - 8 - int.from_bytes(path.read_bytes()[offset + 4 : offset + 8], "little")


def arrow_file(path: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.ipc.new_file(str(path), table.schema) as out:
        out.write_table(table)


def foreign_stream(path: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)


def other_columns(path: Path) -> None:
    wrong = pa.schema([pa.field("a", pa.int64())]).with_metadata({"format": "rollproof-trace", "schema": "1"})
    path.write_bytes(wrong.serialize().to_pybytes())


def newer(number: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        marks = {"format": "rollproof-trace", "schema": number, "made_by": "rollproof 9.0"}
        path.write_bytes(columns.schema().with_metadata(marks).serialize().to_pybytes())

    return write


@pytest.mark.parametrize(
    ("write", "kind", "text"),
    [
        (lambda path: path.write_bytes(random.Random(0).randbytes(4096)), TraceError, "in no form that rollproof knows"),
        (lambda path: path.write_bytes(b""), TraceError, "is empty"),
        (arrow_file, TraceError, "an Arrow file"),
        (foreign_stream, TraceError, "an Arrow stream, but not a rollproof trace"),
        (other_columns, TraceError, "has other columns than a trace of schema 1"),
        (newer("2"), TraceVersionError, "written by 'rollproof 9.0' in schema 2; this rollproof reads schemas up to 1. Upgrade"),
        (newer("0"), TraceError, "says that it has schema '0', which never was"),
        (newer("9" * 50), TraceError, "which never was"),
        (lambda path: pa.parquet.write_table(pa.table({"a": [1]}), path), TraceError, "a Parquet file"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), TraceError, "probably a pickle, which is never opened"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), TraceError, "a numpy array"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), TraceError, "a zip archive"),
        (lambda path: path.write_bytes(b"\xff\xff\xff\xff"), TraceError, "before its first header"),
        (lambda path: path.write_bytes(b"\xff\xff\xff\xff" + b"\x08\0\0\0" + b"\xff" * 8), TraceError, "not a rollproof trace"),
        (lambda path: path.write_bytes(END), TraceError, "before its first header"),
        (lambda path: path.write_bytes(stream.schema_frame()), TraceError, "ends before its first header"),
    ],
)
def test_foreign_files(tmp_path: Path, write: Callable[[Path], object], kind: type[TraceError], text: str) -> None:
    """A file that is no trace is refused by its content, with a guess what it is, whatever it is called."""
    path = tmp_path / "trace.json"
    write(path)
    with pytest.raises(kind, match=text):
        open_trace(path)


def test_appending_to_a_damaged_file_is_refused(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """A writer does not go on behind damage that it meets, nor in a file that is no trace; the file is left as it was."""
    data, _ = sound
    for broken in (data[:-200] + bytes(200), data[:900] + b"\xff\xff\xff\xff\x07\0\0\0" + data[908:], b"PAR1" + data):
        path = tmp_path / "trace.arrow"
        path.write_bytes(broken)
        with pytest.raises(TraceError, match=r"damaged|not a rollproof trace"):
            TraceWriter(path, HEADER, mode="a")
        assert broken == path.read_bytes()


def test_seals_are_checksums(sound: tuple[bytes, Episodes]) -> None:
    """A seal's checksum covers the batch and what the seal says."""
    state = stream.State(3, 1, 7)
    assert f"{zlib.crc32(b'3 1 7', zlib.crc32(b'frame')):08x} 3 1 7" == state.seal(b"frame")
    assert state == stream.State.read(state.seal(b"frame"), b"frame")
    for body in (state.seal(b"frames"), state.seal(b"frame").replace(" 7", " 8"), "", "x y z", "1 2 3 4 5"):
        with pytest.raises(TraceError, match="checksum of a batch does not match"):
            stream.State.read(body, b"frame")
    assert replace(state, events=8).seal(b"frame") != state.seal(b"frame")
