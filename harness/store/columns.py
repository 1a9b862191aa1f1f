"""Columns: events as rows of an Arrow table, and back.

One row an event: its episode, kind, index and time, the small fields as JSON (``body``), integer lists and arrays aside.
Bytes of arrays are little-endian, C order; on reading they are views of the batch, not copies, and read-only. Integers that a narrower type
holds are stored in that (``int32/uint8``), and read back as copies in their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from rollproof.errors import TraceError
from rollproof.store.arrays import DTYPES, AnyArray, as_array, name_of, narrowed, stored_as
from rollproof.store.values import parse_json, show
from rollproof.store.wire import decode_event, decode_header, encode_fields, encode_header
from rollproof.trace import Event, Header

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["HEADER", "SEAL", "Rows", "read_rows", "read_seal", "schema", "validate"]

HEADER = "header"
"""Kind of the row that begins an episode; its body is the trace's header."""
SEAL = "seal"
"""Kind of the only row of the batch that follows each batch and vouches for it."""


@cache
def schema() -> pa.Schema:
    """The schema of the table; no column holds nulls."""
    import pyarrow as pa

    def must(name: str, kind: pa.DataType) -> pa.Field[Any]:
        return pa.field(name, kind, nullable=False)

    integers = pa.list_(must("item", pa.list_(must("item", pa.int64()))))
    array = pa.struct([must("dtype", pa.string()), must("shape", pa.list_(must("item", pa.int64()))), must("data", pa.large_binary())])
    return pa.schema(
        [
            must("episode", pa.int64()),
            must("kind", pa.string()),
            must("index", pa.int64()),
            must("time", pa.float64()),
            must("body", pa.string()),
            must("integers", integers),
            must("arrays", pa.list_(must("item", array))),
        ]
    )


class _Aside:
    """The ``Parts`` of a row that is being written: what goes into its columns, ``size`` bytes."""

    __slots__ = ("arrays", "lists", "size")

    def __init__(self) -> None:
        self.lists: list[tuple[int, ...]] = []
        self.arrays: list[tuple[str, AnyArray]] = []
        self.size: int = 0

    def put_array(self, array: AnyArray) -> Any:
        """Keep a copy: what a stack later does to its buffer does not reach the trace. What nobody may write to is kept as it is."""
        name = name_of(array.dtype)
        small = narrowed(array)
        if small is not array:
            name = f"{name}/{name_of(small.dtype)}"
        else:
            kind, flags = DTYPES[name], array.flags
            whole = not flags.writeable and array.base is None and flags.c_contiguous and array.dtype == kind
            small = array if whole else np.array(array, dtype=kind, order="C")
        self.arrays.append((name, small))
        self.size += small.nbytes
        return {"$array": len(self.arrays) - 1}

    def put_integers(self, values: tuple[int, ...]) -> Any:
        """Keep the integers."""
        self.lists.append(values)
        self.size += 8 * len(values)
        return {"$integers": len(self.lists) - 1}

    def array(self, wire: Any) -> AnyArray:
        """A row that is being written is not read."""
        raise NotImplementedError("this side of the codec only writes")

    def integers(self, wire: Any) -> tuple[int, ...] | None:
        """A row that is being written is not read."""
        raise NotImplementedError("this side of the codec only writes")


class Rows:
    """Rows that wait to be written. ``size`` is about their bytes."""

    def __init__(self) -> None:
        self.size: int = 0
        self._heads: list[tuple[int, str, int, float, bytes]] = []
        self._asides: list[_Aside] = []

    def __len__(self) -> int:
        return len(self._heads)

    def add_header(self, episode: int, header: Header) -> None:
        """Begin an episode. Raises ``TraceError`` for a header that cannot be stored; then nothing was added."""
        aside = _Aside()
        self._add((episode, HEADER, -1, 0.0, _json(encode_header(header, aside))), aside)

    def add_event(self, episode: int, event: Event) -> None:
        """Add an event. Raises ``TraceError`` for one that cannot be stored; then nothing was added."""
        aside = _Aside()
        wire = encode_fields(event, aside)
        head = (episode, event.kind, wire.pop("index", -1), wire.pop("time", 0.0))
        if not isinstance(head[3], float):
            raise TraceError(f"The {event.kind} event cannot be stored: its time is {event.time}.")
        self._add((*head, _json(wire)), aside)

    def add_seal(self, body: str) -> None:
        """The row of a seal."""
        self._add((-1, SEAL, -1, 0.0, body.encode()), _Aside())

    def batch(self) -> pa.RecordBatch:
        """The rows as one Arrow batch."""
        import pyarrow as pa

        episodes, kinds, indexes, times, bodies = zip(*self._heads, strict=True)
        of = schema().field
        lists = [one for aside in self._asides for one in aside.lists]
        arrays = [one for aside in self._asides for one in aside.arrays]
        flat = np.fromiter(chain.from_iterable(lists), np.int64)
        integers, array = of("integers").type, of("arrays").type.value_type
        inner = _lists(map(len, lists), pa.array(flat), integers.value_type)
        columns = [
            pa.array(episodes, pa.int64()),
            pa.array(kinds, pa.string()),
            pa.array(indexes, pa.int64()),
            pa.array(times, pa.float64()),
            pa.StringArray.from_buffers(len(bodies), pa.py_buffer(_ends(bodies, np.int32)), pa.py_buffer(b"".join(bodies))),
            _lists((len(aside.lists) for aside in self._asides), inner, integers),
            _lists((len(aside.arrays) for aside in self._asides), _structs(arrays, array), of("arrays").type),
        ]
        return pa.record_batch(columns, schema=schema())

    def _add(self, head: tuple[int, str, int, float, bytes], aside: _Aside) -> None:
        self._heads.append(head)
        self._asides.append(aside)
        self.size += len(head[4]) + aside.size + 64


_SLOW = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _json(wire: Any) -> bytes:
    """Compact JSON. Numbers that it cannot spell are objects by now (``rollproof.store.values``)."""
    try:
        return orjson.dumps(wire)
    except TypeError:  # nested more deeply than orjson goes
        return _SLOW.encode(wire).encode()


def _ends(parts: Sequence[bytes], kind: type[np.integer[Any]]) -> bytes:
    """Where each part begins and the last one ends, when they are joined."""
    return np.cumsum([0, *map(len, parts)], dtype=kind).tobytes()


def _lists(lengths: Iterable[int], values: Any, kind: Any) -> Any:
    """An Arrow list array of ``kind`` with lists of these lengths, one after the other, over ``values``."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), values, type=kind)


def _structs(named: list[tuple[str, AnyArray]], kind: Any) -> pa.StructArray:
    import pyarrow as pa

    arrays = [array for _, array in named]
    starts = np.cumsum([0, *(one.nbytes for one in arrays)], dtype=np.int64).tobytes()
    joined = b"".join([one.data for one in arrays])
    lengths = pa.array([n for one in arrays for n in one.shape], pa.int64())
    children = [
        pa.array([name for name, _ in named], pa.string()),
        _lists((one.ndim for one in arrays), lengths, kind.field("shape").type),
        pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(arrays), [None, pa.py_buffer(starts), pa.py_buffer(joined)]),
    ]
    return pa.StructArray.from_arrays(children, fields=[kind.field(i) for i in range(kind.num_fields)])


class _Given:
    """The ``Parts`` of a row that is being read. Each part is taken once, in the order in which it was put there."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch
        self._row = 0
        self._lists = self._arrays = 0

    def move_to(self, row: int) -> None:
        """Read another row."""
        self._row = row
        self._lists = self._arrays = 0

    def put_array(self, array: AnyArray) -> Any:
        """A row that is being read is not written."""
        raise NotImplementedError("this side of the codec only reads")

    def put_integers(self, values: tuple[int, ...]) -> Any:
        """A row that is being read is not written."""
        raise NotImplementedError("this side of the codec only reads")

    def integers(self, wire: Any) -> tuple[int, ...] | None:
        """The integers that ``{"$integers": i}`` stands for."""
        if isinstance(wire, list):
            return None
        place = self._place(wire, "$integers", self._lists, self._batch.row_lists)
        self._lists += 1
        start, end = self._batch.list_offsets[place : place + 2]
        return tuple(self._batch.numbers[start:end].tolist())

    def array(self, wire: Any) -> AnyArray:
        """The array that ``{"$array": i}`` stands for: a read-only view."""
        place = self._place(wire, "$array", self._arrays, self._batch.row_arrays)
        self._arrays += 1
        return self._batch.array_at(place)

    def _place(self, wire: Any, key: str, number: int, offsets: npt.NDArray[Any]) -> int:
        start, end = int(offsets[self._row]), int(offsets[self._row + 1])
        if not isinstance(wire, dict) or wire.keys() != {key} or wire[key] != number or type(wire[key]) is not int or start + number >= end:
            raise TraceError(
                f"A row of the trace refers to {show(wire.get(key) if isinstance(wire, dict) else wire)} among its {end - start} parts."
            )
        return start + number


class _Batch:
    """The columns of a validated batch, as numpy views and lists."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        integers: Any = batch.column(5)
        arrays: Any = batch.column(6)
        self.row_lists = _view(integers.offsets)
        self.list_offsets = _view(integers.values.offsets)
        self.numbers = _view(integers.values.values)
        self.row_arrays = _view(arrays.offsets)
        dtypes, shapes, self._data = (arrays.values.field(i) for i in range(3))
        self._dtypes = dtypes.to_pylist()
        self._shape_offsets, self._shapes = _view(shapes.offsets), _view(shapes.values)
        _, starts, self._bytes = self._data.buffers()
        self._starts = np.frombuffer(starts, np.int64, len(self._data) + 1) if len(self._data) else np.zeros(1, np.int64)

    def array_at(self, place: int) -> AnyArray:
        """The array of that number, counted over the batch."""
        dtype, small = stored_as(self._dtypes[place])
        start, end = int(self._starts[place]), int(self._starts[place + 1])
        lengths = self._shapes[self._shape_offsets[place] : self._shape_offsets[place + 1]].tolist()
        array = as_array(self._bytes, small, lengths, start, end - start)
        if small is not dtype:
            array = array.astype(dtype)
            array.flags.writeable = False
        return array


def _view(array: pa.Array[Any]) -> npt.NDArray[Any]:
    return array.to_numpy(zero_copy_only=True)


def read_rows(batch: pa.RecordBatch) -> Iterator[Header | Event]:
    """Headers and events of a batch, in order. The batch is validated first; raises ``TraceError``."""
    validate(batch)
    columns = _Batch(batch)
    parts = _Given(columns)
    heads = zip(*(batch.column(i).to_pylist() for i in range(1, 5)), strict=True)
    for row, (kind, index, time, body) in enumerate(heads):
        wire = parse_json(body)
        parts.move_to(row)
        if kind == HEADER:
            yield decode_header(wire, parts)
        elif not isinstance(wire, dict):
            raise TraceError(f"The body of a row must be an object, not {show(wire)}.")
        else:
            yield decode_event({**wire, "kind": kind, "index": index, "time": time}, parts)


def read_seal(batch: pa.RecordBatch) -> str | None:
    """The body of a seal; ``None`` where the batch is none. Raises ``TraceError``."""
    validate(batch)
    if batch.num_rows != 1 or batch.column(1)[0].as_py() != SEAL:
        return None
    body: str = batch.column(4)[0].as_py()
    return body


def validate(batch: pa.RecordBatch) -> None:
    """Offsets ascending and within their buffers, text valid UTF-8, no nulls: numpy views rely on it."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise TraceError(f"A batch of the trace is inconsistent: {str(error)[:200]}.") from error
    if any(map(_has_nulls, batch.columns)):
        raise TraceError("A batch of the trace holds nulls, which no rollproof writes.")


def _has_nulls(array: pa.Array[Any]) -> bool:
    import pyarrow as pa

    if array.null_count:
        return True
    if isinstance(array, pa.ListArray):
        return _has_nulls(array.values)
    if isinstance(array, pa.StructArray):
        return any(_has_nulls(array.field(i)) for i in range(array.type.num_fields))
    return False
