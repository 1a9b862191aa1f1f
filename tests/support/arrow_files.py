"""Arrow traces as bytes: what they hold, where their frames lie, and rows that are forged."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.store import TraceReader, TraceWriter, columns, stream
from rollproof.store.columns import Rows
from rollproof.store.stream import END
from tests.store.test_arrow_format import HEADER

__all__ = ["Episodes", "flat", "forge", "messages_of", "pairs_of", "take"]

Episodes = list[tuple[Header, list[Event]]]


def flat(episodes: Episodes) -> list[Header | Event]:
    out: list[Header | Event] = []
    for header, events in episodes:
        out += [header, *events]
    return out


def take(path: Path) -> tuple[list[Header | Event], TraceReader | None, TraceError | None]:
    """Everything that can be read, and the error that ended it. Any other exception is a fault of
    the store.
    """
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


def pairs_of(path: Path) -> tuple[bytes, list[bytes]]:
    """The schema of a trace file, and its batches each with its seal."""
    messages = list(messages_of(path.read_bytes()))
    pairs = zip(messages[1::2], messages[2::2], strict=True)
    return messages[0], [batch + seal for batch, seal in pairs]


def messages_of(data: bytes) -> Iterator[bytes]:
    """The messages of an Arrow stream, as bytes."""
    file = io.BytesIO(data)
    while True:
        start = file.tell()
        try:
            pa.ipc.read_message(pa.PythonFile(file, mode="r"))
        except EOFError:
            return
        yield data[start : file.tell()]


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
    """Write a trace whose second batch holds one row of any content, with a seal that vouches for
    it.
    """
    with TraceWriter(path, HEADER, mode="w"):
        pass
    head, pairs = pairs_of(path)
    text: Any = (
        body
        if isinstance(body, str)
        else pa.StringArray.from_buffers(
            1, pa.py_buffer(np.array([0, len(body)], np.int32).tobytes()), pa.py_buffer(body)
        )
    )
    values = [
        [0],
        [kind],
        [index],
        [time],
        [text] if isinstance(text, str) else text,
        [integers or []],
        [arrays or []],
    ]
    columns_ = [
        value if isinstance(value, pa.Array) else pa.array(value, field.type)
        for value, field in zip(values, columns.schema(), strict=True)
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
        _, frame = messages_of(sink.getvalue().to_pybytes())
    frame = patch(frame)
    seal = Rows()
    seal.add_seal(stream.State(2, 0, 1).seal(zlib.crc32(frame)))
    path.write_bytes(head + pairs[0] + frame + bytes(seal.message()) + END)
