"""Rows: events and headers on their way into a batch of a trace file, each column filled as they
come.

Arrays are copied once, into one buffer that is used again for the next batch: a served engine hands
over many megabytes a second.
"""

from __future__ import annotations

import json
from array import array as machine_array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.store.arrays import AnyArray, stored_in
from rollproof.store.codec import encode_fields, encode_header
from rollproof.store.columns import HEADER, SEAL, schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

__all__ = ["Rows"]

_ROOM = 1 << 16
"""Bytes for arrays that a batch has at first."""
_FIRST_BEYOND = 1 << 63


class _Shelf:
    """The ``Parts`` of rows that are being written. ``end_row`` closes a row, ``cut`` forgets one
    that was begun.
    """

    def __init__(self) -> None:
        self.room: AnyArray = np.empty(_ROOM, np.uint8)
        self.clear()

    def clear(self) -> None:
        """Begin a batch; the buffer stays."""
        self.numbers = machine_array("q")
        self.list_ends, self.row_lists = [0], [0]
        self.names: list[str] = []
        self.lengths = machine_array("q")
        self.rank_ends, self.data_ends, self.row_arrays = [0], [0], [0]

    def end_row(self) -> int:
        """What comes next belongs to another row. Returns the bytes of all parts so far, without
        those of their shapes.
        """
        lists, arrays = self.list_ends, self.names
        self.row_lists.append(len(lists) - 1)
        self.row_arrays.append(len(arrays))
        return 8 * lists[-1] + self.data_ends[-1]

    def cut(self) -> None:
        """Forget what was put since the last row ended."""
        del self.list_ends[self.row_lists[-1] + 1 :]
        del self.numbers[self.list_ends[-1] :]
        arrays = self.row_arrays[-1]
        del self.names[arrays:], self.rank_ends[arrays + 1 :], self.data_ends[arrays + 1 :]
        del self.lengths[self.rank_ends[-1] :]

    def put_array(self, array: AnyArray) -> Any:
        """Keep a copy: what a stack later does to its buffer does not reach the trace."""
        kind, name = stored_in(array)
        start = self.data_ends[-1]
        end = start + array.size * kind.itemsize
        if end > self.room.size:
            grown = np.empty(max(end, 2 * self.room.size), np.uint8)
            grown[:start] = self.room[:start]
            self.room = grown
        if end > start:
            np.copyto(np.ndarray(array.shape, kind, self.room, start), array, casting="unsafe")
        self.names.append(name)
        self.lengths.extend(array.shape)
        self.rank_ends.append(len(self.lengths))
        self.data_ends.append(end)
        return {"$array": len(self.names) - 1 - self.row_arrays[-1]}

    def put_integers(self, values: Sequence[int]) -> Any:
        """Keep the integers."""
        self.numbers.extend(values)
        self.list_ends.append(len(self.numbers))
        return {"$integers": len(self.list_ends) - 2 - self.row_lists[-1]}

    def array(self, wire: Any) -> AnyArray:
        """A row that is being written is not read."""
        raise NotImplementedError("this side of the codec only writes")

    def integers(self, wire: Any) -> tuple[int, ...] | None:
        """A row that is being written is not read."""
        raise NotImplementedError("this side of the codec only writes")


class Rows:
    """Rows that wait to be written."""

    def __init__(self) -> None:
        self._shelf = _Shelf()
        self._clear()

    def _clear(self) -> None:
        self._shelf.clear()
        self._heads: list[tuple[int, str, int, float, bytes]] = []
        self._text = 0
        self.size: int = 0
        """About the bytes of all rows."""

    def __len__(self) -> int:
        return len(self._heads)

    def add_header(self, episode: int, header: Header) -> None:
        """Begin an episode. Raises ``TraceError`` for a header that cannot be stored; then nothing
        was added.
        """
        try:
            self._add(episode, HEADER, -1, 0.0, _json(encode_header(header, self._shelf)))
        except BaseException:
            self._shelf.cut()
            raise

    def add_event(self, episode: int, event: Event) -> None:
        """Add an event. Raises ``TraceError`` for one that cannot be stored; then nothing was
        added.
        """
        try:
            wire = encode_fields(event, self._shelf)
            self._add(
                episode, event.kind, wire.pop("index", -1), wire.pop("time", 0.0), _json(wire)
            )
        except BaseException:
            self._shelf.cut()
            raise

    def add_seal(self, body: str) -> None:
        """The row of a seal."""
        self._add(-1, SEAL, -1, 0.0, body.encode())

    def frame(self) -> memoryview:
        """The rows as one message of an Arrow stream; then there are none."""
        frame = memoryview(self._batch().serialize())
        self._clear()
        return frame

    def _add(self, episode: int, kind: str, index: int, time: Any, body: bytes) -> None:
        if type(time) is not float:
            raise TraceError(f"The {kind} event cannot be stored: its time is {time['$float']}.")
        if not -_FIRST_BEYOND <= index < _FIRST_BEYOND:
            raise TraceError(f"The {kind} event cannot be stored: its index is {index}.")
        self._heads.append((episode, kind, index, time, body))
        self._text += len(body) + 64
        self.size = self._text + self._shelf.end_row()

    def _batch(self) -> pa.RecordBatch:
        import pyarrow as pa

        shelf, kind_of = self._shelf, schema().field
        episodes, kinds, indexes, times, bodies = zip(*self._heads, strict=True)
        integers, arrays = kind_of("integers").type, kind_of("arrays").type
        parts, data = arrays.value_type, shelf.room[: shelf.data_ends[-1]]
        structs = pa.Array.from_buffers(
            parts,
            len(shelf.names),
            [None],
            children=[
                _binary(pa.string(), [name.encode() for name in shelf.names]),
                _lists(
                    parts.field("shape").type, shelf.rank_ends, _flat(pa.int64(), shelf.lengths)
                ),
                _over(pa.large_binary(), shelf.data_ends, np.int64, data),
            ],
        )
        columns = [
            _flat(pa.int64(), machine_array("q", episodes)),
            _binary(pa.string(), [kind.encode() for kind in kinds]),
            _flat(pa.int64(), machine_array("q", indexes)),
            _flat(pa.float64(), machine_array("d", times)),
            _binary(pa.string(), bodies),
            _lists(
                integers,
                shelf.row_lists,
                _lists(integers.value_type, shelf.list_ends, _flat(pa.int64(), shelf.numbers)),
            ),
            _lists(arrays, shelf.row_arrays, structs),
        ]
        return pa.record_batch(columns, schema=schema())


def _flat(kind: Any, values: Any) -> Any:
    """Numbers as an Arrow array."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _over(kind: Any, ends: Sequence[int], width: Any, data: Any) -> Any:
    """An Arrow array of texts or bytes that lie one after the other in ``data``: element i from
    ``ends[i]`` to ``ends[i + 1]``.
    """
    import pyarrow as pa

    offsets: Any = np.array(ends, width)
    return pa.Array.from_buffers(
        kind, len(ends) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _binary(kind: Any, parts: Sequence[bytes]) -> Any:
    return _over(kind, [0, *accumulate(map(len, parts))], np.int32, b"".join(parts))


def _lists(kind: Any, ends: Sequence[int], values: Any) -> Any:
    """An Arrow array of lists over ``values``: list i from ``ends[i]`` to ``ends[i + 1]``."""
    import pyarrow as pa

    offsets: Any = np.array(ends, np.int32)
    return pa.Array.from_buffers(
        kind, len(ends) - 1, [None, pa.py_buffer(offsets)], children=[values]
    )


_SLOW = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _json(wire: Any) -> bytes:
    """Compact JSON. Numbers that it cannot spell are objects by now (``rollproof.store.values``)."""
    try:
        return orjson.dumps(wire)
    except TypeError:  # nested more deeply than orjson goes
        return _SLOW.encode(wire).encode()
