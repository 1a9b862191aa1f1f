"""Forged Arrow traces: sealed batches with hostile rows are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from rollproof.errors import TraceError, TraceVersionError
from tests.store.test_arrow_format import HEADER
from tests.support.arrow_files import forge, take


def reply(array: str = "null", tokens: str = "[]") -> str:
    output = f'"token_ids":{tokens},"logprobs":null,"routes":{array},"finish_reason":"stop"'
    return f'{{"call_id":0,"output":{{{output}}}}}'


ROUTES = reply('{"$array":0}')


FORGED: list[tuple[dict[str, Any], str]] = [
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "object", "shape": [1], "data": b"x" * 8}],
        },
        "element type 'object'",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "<M8[ns]", "shape": [1], "data": b"x" * 8}],
        },
        "element type '<M8",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "float64", "shape": [1, 1, 1], "data": b"x" * 8}],
        },
        "must be an array of bool or int8",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "uint8", "shape": [-1, -1, 2], "data": b"xx"}],
        },
        "lengths >= 0",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "uint8", "shape": [1] * 9, "data": b"x"}],
        },
        "at most 8 lengths",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "uint8", "shape": [2**62, 4], "data": b"x"}],
        },
        "has the shape of 18446744073709551616 elements",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "int32", "shape": [1], "data": b"xyz"}],
        },
        "but 3 bytes of data",
    ),
    (
        {
            "kind": "reply",
            "body": ROUTES,
            "arrays": [{"dtype": "uint8", "shape": [0, 2**62, 2**62], "data": b""}],
        },
        "an impossible shape",
    ),
    ({"kind": "reply", "body": ROUTES}, "refers to 0 among its 0 parts"),
    (
        {
            "kind": "reply",
            "body": reply('{"$array":1}'),
            "arrays": [{"dtype": "uint8", "shape": [], "data": b"x"}],
        },
        "refers to 1 among its 1 parts",
    ),
    (
        {
            "kind": "reply",
            "body": reply('{"$array":true}'),
            "arrays": [{"dtype": "uint8", "shape": [], "data": b"x"}],
        },
        "refers to True",
    ),
    ({"kind": "reply", "body": reply('"x"')}, "refers to 'x' among its 0 parts"),
    ({"kind": "reply", "body": reply(tokens='{"$integers":0}')}, "refers to 0 among its 0 parts"),
    (
        {"kind": "reply", "body": reply(tokens="[1.5]")},
        r"output.token_ids\[0\] must be int, not 1.5",
    ),
    (
        {"kind": "reply", "body": reply(tokens="[true]")},
        r"output.token_ids\[0\] must be int, not True",
    ),
    (
        {
            "kind": "submit",
            "body": (
                '{"request":{"request_id":"r","prompt_ids":[],"turns":[{"$integers":0},{"$integers":0}]}}'
            ),
            "integers": [[1] * 9],
        },
        "refers to 0 among its 1 parts",
    ),
    ({"body": b'{"call_id":0,"server_id":"\xff\xfe"}'}, "(?i)invalid UTF8"),
    ({"body": '{"call_id":0,"server_id":"\\ud800"}'}, "server_id holds a lone surrogate"),
    ({"body": '{"call_id":0,"server_id":NaN}'}, "NaN is not JSON"),
    ({"body": '{"call_id":0,"call_id":1,"server_id":"s"}'}, "the key 'call_id' occurs twice"),
    ({"body": '{"call_id":1e400,"server_id":"s"}'}, "call_id is a number too large for a float"),
    ({"body": f'{{"call_id":{2**70},"server_id":"s"}}'}, "call_id must fit 64 bits"),
    ({"body": f'{{"call_id":{"9" * 5000},"server_id":"s"}}'}, "not the JSON of a trace"),
    ({"body": '{"call_id":true,"server_id":"s"}'}, "call_id must be int, not True"),
    ({"body": '{"server_id":"s"}'}, "Admit lacks the field 'call_id'"),
    ({"body": "[" * 100_000}, "nested too deeply"),
    ({"body": '{"a":' * 100_000}, "nested too deeply"),
    ({"body": "[]"}, "must be an object"),
    ({"body": "{"}, "not the JSON of a trace"),
    (
        {"kind": "gauge", "body": '{"name":"x","value":1e400,"phase":"end"}'},
        "value is a number too large for a float",
    ),
    (
        {"kind": "gauge", "body": '{"name":"x","value":{"$float":"snan"},"phase":"end"}'},
        "value must be a number, or one of",
    ),
    (
        {"kind": "pause", "body": '{"server_id":"s","mode":"nap"}'},
        "mode must be one of .*'retract'.*, not 'nap'",
    ),
    (
        {"kind": "pause", "body": '{"server_id":"s","mode":"wait","progress":{"01":1}}'},
        "progress has a key that is no int",
    ),
    ({"kind": "header", "body": '{"subject":"x"}'}, "Header lacks the field 'contract'"),
    (
        {"kind": "header", "body": '{"subject":"x","contract":{"rows":"T"}}'},
        "contract lacks the field 'resume'",
    ),
    (
        {
            "kind": "header",
            "body": (
                '{"subject":"x","contract":{"rows":"T","resume":"none","versions":"none","logprobs":"raw",'
                '"abort_surfaces":true,"kv_policy":"keep"}}'
            ),
        },
        "(?s)contract: .*num_layers.* must be declared",
    ),
    (
        {"kind": "header", "body": '{"subject":"x","contract":' + '{"a":' * 50_000},
        "nested too deeply",
    ),
    ({"time": float("nan")}, "time is a number too large for a float"),
]


@pytest.mark.parametrize(("content", "text"), FORGED, ids=[text[:30] for _, text in FORGED])
def test_forged_rows_are_refused(tmp_path: Path, content: dict[str, Any], text: str) -> None:
    """A row with hostile content, under a valid seal, is refused as damage with the reason; the
    episode before it is returned.
    """
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
        (
            {"kind": "header", "body": '{"schema":2,"subject":"x","made_by":"rollproof 9"}'},
            "written by 'rollproof 9' in schema 2",
        ),
    ],
)
def test_newer_files_are_distinguished_from_damage(
    tmp_path: Path, content: dict[str, Any], text: str
) -> None:
    """An unknown kind, an unknown field, a later schema: TraceVersionError, which names the file
    and says to upgrade.
    """
    path = tmp_path / "trace.arrow"
    forge(path, **content)
    _, _, error = take(path)
    assert isinstance(error, TraceVersionError)
    with pytest.raises(TraceVersionError, match=text):
        raise error
    assert "pgrade" in str(error)


def test_forgery_itself_is_sound(tmp_path: Path) -> None:
    """The forged file is refused for its content alone: with honest content it is read."""
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
    forge(
        path,
        body='{"call_id":0,"server_id":"' + "s" * 5000 + '"}',
        options=pa.ipc.IpcWriteOptions(compression="lz4"),
    )
    _, _, error = take(path)
    assert error is not None and "a batch is compressed" in str(error)


def test_nulls_are_refused(tmp_path: Path) -> None:
    """A column with nulls is refused: the views of its buffers would read what is not there."""
    path = tmp_path / "trace.arrow"
    forge(path, column=(2, pa.array([None], pa.int64())))
    _, _, error = take(path)
    assert error is not None and "has nulls" in str(error)


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
