"""Columns: the Arrow table whose rows are events, and how it is read; ``rollproof.store.rows``
writes it.

One row an event: its episode, kind, index and time, the small fields as JSON (``body``), integer
lists and arrays aside. Bytes of arrays are little-endian, C order; on reading they are views of the
batch, not copies, and read-only. Integers that a narrower type holds are stored in that
(``int32/uint8``), and read back as copies in their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollproof.core.events.base import Event
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.store.arrays import AnyArray, as_array, stored_as
from rollproof.store.codec import decode_event, decode_header
from rollproof.store.values import parse_json, show

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["HEADER", "SEAL", "read_rows", "read_seal", "schema", "validate"]

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
    array = pa.struct(
        [
            must("dtype", pa.string()),
            must("shape", pa.list_(must("item", pa.int64()))),
            must("data", pa.large_binary()),
        ]
    )
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


class _Given:
    """The ``Parts`` of a row that is being read. Each part is taken once, in the order in which it
    was put there.
    """

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

    def put_integers(self, values: Sequence[int]) -> Any:
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
        if (
            not isinstance(wire, dict)
            or wire.keys() != {key}
            or wire[key] != number
            or type(wire[key]) is not int
            or start + number >= end
        ):
            raise TraceError(
                "A row of the trace refers to"
                f" {show(wire.get(key) if isinstance(wire, dict) else wire)} among its"
                f" {end - start} parts."
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
        self._starts = (
            np.frombuffer(starts, np.int64, len(self._data) + 1)
            if len(self._data)
            else np.zeros(1, np.int64)
        )

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
    """Offsets ascending and within their buffers, text valid UTF-8, no nulls: numpy views rely on
    it.
    """
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
