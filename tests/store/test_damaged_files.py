"""Damaged, truncated and foreign Arrow traces give correct events or a TraceError."""

from __future__ import annotations

import os
import pickle
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import TraceError, TraceVersionError
from rollproof.store import GrowingTrace, TraceReader, TraceWriter, columns, open_trace, stream
from rollproof.store.stream import END
from tests.store.test_arrow_format import HEADER, story
from tests.support.arrow_files import Episodes, flat, pairs_of, take
from tests.support.random_records import alike


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


def places(data: bytes, path: Path) -> list[int]:
    """Every byte of the schema's and the first batch's beginning and around every border, and every
    61st elsewhere.
    """
    path.write_bytes(data)
    head, pairs = pairs_of(path)
    borders, at = [0, len(head), len(data) - len(END), len(data)], len(head)
    for pair in pairs:
        seal = at + pair.rindex(b"\xff\xff\xff\xff")
        borders += [at, seal]
        at += len(pair)
    near = (
        {place + i for place in borders for i in range(-4, 24)}
        | set(range(len(head), len(head) + 200))
        | set(range(0, len(data), 61))
    )
    return sorted(place for place in near if 0 <= place < len(data))


def check_outcome(data: bytes, path: Path, records: list[Header | Event], original: bytes) -> None:
    """What is read is a beginning of what was written; an incomplete reading ends with an error or
    says that the file is not closed.
    """
    path.write_bytes(data)
    seen, reader, error = take(path)
    assert len(seen) <= len(records)
    assert all(map(alike, seen, records))
    if error is None and len(seen) < len(records):
        assert reader is not None and reader.ending is not None and not reader.ending.closed
    if error is not None:
        assert str(path) in str(error)


def test_cut_at_any_byte(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """A file cut at any byte gives every complete batch, and either says how much was lost or
    that nothing can be read.
    """
    data, episodes = sound
    records = flat(episodes)
    path = tmp_path / "trace.arrow"
    counts = []
    for cut in places(data, path):
        path.write_bytes(data[:cut])
        seen, reader, error = take(path)
        assert all(map(alike, seen, records))
        if reader is None:
            assert error is not None and not seen
            assert "before its first header" in str(error)
        else:
            assert error is None
            assert reader.ending is not None and not reader.ending.closed
        counts.append(len(seen))
    assert sorted(counts) == counts
    assert {0, 1, 6, len(records)} <= set(counts)


def test_flip_of_any_byte(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """A file with any one byte changed gives correct events, or a TraceError that says where and
    how much before it is sound.
    """
    data, episodes = sound
    records = flat(episodes)
    path = tmp_path / "trace.arrow"
    draw = random.Random(0)
    for place in places(data, path):
        changed = bytearray(data)
        changed[place] ^= draw.choice([1, 0x80, 0xFF, draw.randrange(1, 256)])
        check_outcome(bytes(changed), path, records, data)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "cut", "copy", "swap", "zero", "drop"]),
            st.integers(0, 1 << 20),
            st.integers(0, 1 << 20),
        ),
        max_size=5,
    )
)
@example([("drop", 0, 9)])
def test_any_vandalism(
    sound: tuple[bytes, Episodes], tmp_path: Path, deeds: list[tuple[str, int, int]]
) -> None:
    """Bytes set, cut out, copied, swapped, zeroed or dropped anywhere, in any combination: correct
    events or a TraceError.
    """
    data, episodes = sound
    out = bytearray(data)
    for deed, a, b in deeds:
        a, b = sorted((a % (len(out) + 1), b % (len(out) + 1)))
        piece = bytes(out[a:b])
        if deed == "set" and a < len(out):
            out[a] = b % 256
        elif deed == "cut":
            del out[a:b]
        elif deed == "copy":
            out[a:a] = piece[:5000]
        elif deed == "swap":
            out = bytearray(out[b:] + out[:b])
        elif deed == "zero":
            out[a:b] = bytes(b - a)
        elif deed == "drop":
            del out[b:]
    check_outcome(bytes(out), tmp_path / "trace.arrow", flat(episodes), data)


@pytest.mark.parametrize(
    "order",
    [
        lambda p: [p[0], p[2], p[1], *p[3:]],
        lambda p: [p[0], *p[2:]],
        lambda p: [p[0], p[1], p[1], *p[2:]],
        lambda p: p[1:],
    ],
)
def test_batches_out_of_place(
    sound: tuple[bytes, Episodes], tmp_path: Path, order: Callable[[list[bytes]], list[bytes]]
) -> None:
    """Batches that are swapped, cut out or doubled are each complete, and are detected all the
    same, before their events are returned.
    """
    data, episodes = sound
    path = tmp_path / "trace.arrow"
    path.write_bytes(data)
    head, pairs = pairs_of(path)
    assert data == head + b"".join(pairs) + END
    path.write_bytes(head + b"".join(order(pairs)) + END)
    seen, _, error = take(path)
    assert error is not None and "batches were removed, duplicated or moved" in str(error)
    assert all(map(alike, seen, flat(episodes)))


def test_two_joined_files_are_detected(sound: tuple[bytes, Episodes], tmp_path: Path) -> None:
    """Two traces in one file are read up to the end of the first, and then the error guesses what
    happened.
    """
    data, episodes = sound
    path = tmp_path / "trace.arrow"
    path.write_bytes(data + data)
    seen, _, error = take(path)
    assert len(flat(episodes)) == len(seen)
    assert error is not None and "were two files joined?" in str(error)
    assert (
        f"The {len(flat(episodes)) - 2} events in 2 episodes before it were read and are sound"
        in str(error)
    )


def test_payload_that_looks_like_an_end_mark(tmp_path: Path) -> None:
    """A killed writer's tail may end in the bytes of Arrow's end mark (filler -1, then 0): that is
    no damage.
    """
    path = tmp_path / "trace.arrow"
    with TraceWriter(path, HEADER) as writer:
        writer.write(story())
    head, pairs = pairs_of(path)
    path.write_bytes(head + pairs[0] + pairs[1][:400] + b"\xff\xff\xff\xff\0\0\0\0")
    reader = TraceReader(path)
    assert [] == list(reader)
    assert reader.ending is not None and (False, 408) == (reader.ending.closed, reader.ending.lost)


@pytest.mark.parametrize("claim", [2**31, 2**40, 2**62, -8])
def test_huge_claims_allocate_nothing(
    sound: tuple[bytes, Episodes], tmp_path: Path, claim: int
) -> None:
    """A batch whose metadata claims a huge or negative body is refused or counted as unfinished,
    without allocating it.
    """
    path = tmp_path / "trace.arrow"
    path.write_bytes(sound[0])
    head, pairs = pairs_of(path)
    message = pa.ipc.read_message(pairs[1])
    honest = len(message.body).to_bytes(8, "little")
    body = pairs[1].index(honest, 8, 8 + len(message.metadata))
    hostile = pairs[1][:body] + claim.to_bytes(8, "little", signed=True) + pairs[1][body + 8 :]
    path.write_bytes(head + pairs[0] + hostile + END)
    seen, _, error = take(path)
    assert error is not None
    with pytest.raises(TraceError, match=r"claims more bytes than there are|no Arrow message"):
        raise error
    assert 1 == len(seen)


def arrow_file(path: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.ipc.new_file(str(path), table.schema) as out:
        out.write_table(table)


def foreign_stream(path: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)


def other_columns(path: Path) -> None:
    wrong = pa.schema([pa.field("a", pa.int64())]).with_metadata(
        {"format": "rollproof-trace", "schema": "1"}
    )
    path.write_bytes(wrong.serialize().to_pybytes())


def newer(number: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        marks = {"format": "rollproof-trace", "schema": number, "made_by": "rollproof 9.0"}
        path.write_bytes(columns.schema().with_metadata(marks).serialize().to_pybytes())

    return write


@pytest.mark.parametrize(
    ("write", "kind", "text"),
    [
        (
            lambda path: path.write_bytes(random.Random(0).randbytes(4096)),
            TraceError,
            "in an unknown format",
        ),
        (lambda path: path.write_bytes(b""), TraceError, "is empty"),
        (arrow_file, TraceError, "an Arrow file"),
        (foreign_stream, TraceError, "an Arrow stream, but not a rollproof trace"),
        (other_columns, TraceError, "has other columns than a trace of schema 1"),
        (
            newer("2"),
            TraceVersionError,
            "written by 'rollproof 9.0' in schema 2; this rollproof reads schemas up to 1. Upgrade",
        ),
        (newer("0"), TraceError, "declares schema '0', which does not exist"),
        (newer("9" * 50), TraceError, "which does not exist"),
        (
            lambda path: pa.parquet.write_table(pa.table({"a": [1]}), path),
            TraceError,
            "a Parquet file",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps({"a": 1})),
            TraceError,
            "probably a pickle, which is never opened",
        ),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), TraceError, "a numpy array"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), TraceError, "a zip archive"),
        (lambda path: path.write_bytes(b"\xff\xff\xff\xff"), TraceError, "before its first header"),
        (
            lambda path: path.write_bytes(b"\xff\xff\xff\xff" + b"\x08\0\0\0" + b"\xff" * 8),
            TraceError,
            "not a rollproof trace",
        ),
        (lambda path: path.write_bytes(END), TraceError, "before its first header"),
        (
            lambda path: path.write_bytes(stream.schema_message()),
            TraceError,
            "ends before its first header",
        ),
    ],
)
def test_foreign_files(
    tmp_path: Path, write: Callable[[Path], object], kind: type[TraceError], text: str
) -> None:
    """A file that is no trace is refused by its content, with a guess what it is, whatever it is
    called.
    """
    path = tmp_path / "trace.json"
    write(path)
    with pytest.raises(kind, match=text):
        open_trace(path)


def test_appending_to_a_damaged_file_is_refused(
    sound: tuple[bytes, Episodes], tmp_path: Path
) -> None:
    """A writer does not go on behind damage that it meets, nor in a file that is no trace; the file
    is left as it was.
    """
    data, _ = sound
    for broken in (
        data[:-200] + bytes(200),
        data[:900] + b"\xff\xff\xff\xff\x07\0\0\0" + data[908:],
        b"PAR1" + data,
    ):
        path = tmp_path / "trace.arrow"
        path.write_bytes(broken)
        with pytest.raises(TraceError, match=r"damaged|not a rollproof trace"):
            TraceWriter(path, HEADER, mode="a")
        assert broken == path.read_bytes()


def test_seals_are_checksums(sound: tuple[bytes, Episodes]) -> None:
    """A seal's checksum covers the batch and what the seal says."""
    state = stream.State(3, 1, 7)
    batch = zlib.crc32(b"batch")
    assert f"{zlib.crc32(b'3 1 7', batch):08x} 3 1 7" == state.seal(batch)
    assert state == stream.State.read(state.seal(batch), batch)
    for body in (
        state.seal(zlib.crc32(b"batches")),
        state.seal(batch).replace(" 7", " 8"),
        "",
        "x y z",
        "1 2 3 4 5",
    ):
        with pytest.raises(TraceError, match="checksum of a batch does not match"):
            stream.State.read(body, batch)
    assert replace(state, events=8).seal(batch) != state.seal(batch)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    """A pipe may come into the place of a file that is followed, and nobody ever write to it."""
    pipe = tmp_path / "trace.arrow"
    os.mkfifo(pipe)
    for read in (open_trace, lambda path: [*GrowingTrace(path).news()]):
        with pytest.raises(TraceError, match="is a pipe or a device: copy what it holds"):
            read(pipe)
