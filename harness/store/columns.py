"""The Arrow table whose rows are events: how rows are written and read.

One row an event: its episode, kind, index and time, the other fields as JSON (``body``), arrays in
a column of their own. Bytes of arrays are little-endian, in C order; on reading they are views of
the batch, not copies, and read-only. The column ``integers`` is read for files of older versions,
which kept lists of integers there; now they are in the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from rollproof.core.error_text import show
from rollproof.core.events.base import Event
from rollproof.core.json_codec import AnyArray, parse_json
from rollproof.core.trace import Header
from rollproof.errors import TraceError
from rollproof.store.arrays import array_of, stored_bytes, stored_dtypes
from rollproof.store.codec import decode_event, decode_header, encode_event, encode_header

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["HEADER", "SEAL", "Rows", "read_rows", "read_seal", "schema", "validate"]

HEADER = "header"
"""Kind of the row that begins an episode; its body is the trace's header."""
SEAL = "seal"
"""Kind of the only row of the batch that follows each batch and vouches for it."""
_INDEXES = range(-(2**63), 2**63)


@cache
def schema() -> pa.Schema:
    """Return the schema of the table; no column holds nulls."""
    # imported here, and wherever it is used: it takes a tenth of a second, which whoever reads
    # JSON need not wait for
    import pyarrow as pa

    def column(name: str, kind: pa.DataType) -> pa.Field[Any]:
        return pa.field(name, kind, nullable=False)

    integers = pa.list_(column("item", pa.list_(column("item", pa.int64()))))
    array = pa.struct(
        [
            column("dtype", pa.string()),
            column("shape", pa.list_(column("item", pa.int64()))),
            # 32-bit offsets end at 2 GiB, which the arrays of one event may pass
            column("data", pa.large_binary()),
        ]
    )
    return pa.schema(
        [
            column("episode", pa.int64()),
            column("kind", pa.string()),
            column("index", pa.int64()),
            column("time", pa.float64()),
            column("body", pa.string()),
            column("integers", integers),
            column("arrays", pa.list_(column("item", array))),
        ]
    )


class Rows:
    """Rows that wait to be written. Arrays are copied: what a stack later does to its buffer does
    not reach the trace.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._clear()

    def __len__(self) -> int:
        return len(self._bodies)

    def add_header(self, episode: int, header: Header) -> None:
        """Begin an episode. Raises ``TraceError``, and adds nothing, if the header cannot be
        stored.
        """
        self._add(episode, HEADER, encode_header(header))

    def add_event(self, episode: int, event: Event) -> None:
        """Add an event. Raises ``TraceError``, and adds nothing, if it cannot be stored."""
        fields = encode_event(event, trusted=self._trusted)
        kind = fields.pop("kind")
        index, time = fields.pop("index", -1), fields.pop("time", 0.0)
        # index and time have columns, which no mark like {"$float": "nan"} fits into
        if isinstance(time, dict):
            raise TraceError(f"The {kind} event cannot be stored: its time is {time['$float']}.")
        if index not in _INDEXES:
            raise TraceError(f"The {kind} event cannot be stored: its index is {index}.")
        self._add(episode, kind, fields, index, time)

    def add_seal(self, body: str) -> None:
        """Add the row of a seal."""
        self._append(-1, SEAL, -1, 0.0, body, [])

    def message(self) -> memoryview:
        """Return the rows as one message of an Arrow stream, and forget them."""
        import pyarrow as pa

        types = schema()
        arrays = types.field("arrays").type
        # by column: a dict for each row takes twice as long, and Python's garbage collector would
        # walk through those that wait
        columns = [
            pa.array(self._episodes, pa.int64()),
            pa.array(self._kinds, pa.string()),
            pa.array(self._indexes, pa.int64()),
            pa.array(self._times, pa.float64()),
            pa.array(self._bodies, pa.string()),
            pa.array([[]] * len(self), types.field("integers").type),
            pa.ListArray.from_arrays(
                self._ends, pa.array(self._arrays, arrays.value_type), type=arrays
            ),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=types)
        self._clear()
        return memoryview(batch.serialize())

    def _clear(self) -> None:
        self.size: int = 0
        """About the bytes of all rows."""
        self._episodes: list[int] = []
        self._kinds: list[str] = []
        self._indexes: list[int] = []
        self._times: list[float] = []
        self._bodies: list[str] = []
        self._arrays: list[tuple[str, list[int], bytes]] = []
        self._ends: list[int] = [0]

    def _add(
        self, episode: int, kind: str, fields: dict[str, Any], index: int = -1, time: float = 0.0
    ) -> None:
        arrays: list[tuple[str, list[int], bytes]] = []

        def put(array: AnyArray) -> Any:
            dtype, data = stored_bytes(array)
            arrays.append((dtype, list(array.shape), data))
            return {"$array": len(arrays) - 1}

        # not orjson: it refuses objects nested more than 254 deep, which a header's case may be
        body = msgspec.json.encode(fields, enc_hook=put).decode()
        self._append(episode, kind, index, time, body, arrays)
        self.size += len(body) + 64 + sum(len(data) for _, _, data in arrays)

    def _append(
        self,
        episode: int,
        kind: str,
        index: int,
        time: float,
        body: str,
        arrays: Iterable[tuple[str, list[int], bytes]],
    ) -> None:
        self._episodes.append(episode)
        self._kinds.append(kind)
        self._indexes.append(index)
        self._times.append(time)
        self._bodies.append(body)
        self._arrays += arrays
        self._ends.append(len(self._arrays))


def read_rows(batch: pa.RecordBatch) -> Iterator[Header | Event]:
    """Yield headers and events of a batch, in order.

    Raises:
        TraceError: the batch or a row of it is not what a trace holds.
    """
    validate(batch)
    columns: list[list[Any]] = [batch.column(i).to_pylist() for i in range(1, 6)]
    kinds, indexes, times, bodies, integers = columns
    arrays: Any = batch.column(6)
    # `values` are the arrays of all rows, one after the other
    ends = arrays.offsets.to_pylist()
    stored = _StoredArrays(arrays.values)
    for row, body in enumerate(bodies):
        fields = parse_json(body)
        parts = _Parts(integers[row], stored, range(ends[row], ends[row + 1]))
        if kinds[row] == HEADER:
            yield decode_header(fields, parts.array, parts.integers)
        elif not isinstance(fields, dict):
            raise TraceError(f"The body of a row must be an object, not {show(fields)}.")
        else:
            fields |= {"kind": kinds[row], "index": indexes[row], "time": times[row]}
            yield decode_event(fields, parts.array, parts.integers)


class _StoredArrays:
    """The arrays of a batch; columns are taken out once, which takes longer than an array."""

    def __init__(self, values: Any) -> None:
        self.names: list[str] = values.field(0).to_pylist()
        self.shapes: list[list[int]] = values.field(1).to_pylist()
        self._data = values.field(2)

    def data(self, place: int) -> Any:
        """Return the bytes of an array, without a copy."""
        return self._data[place].as_buffer()


class _Parts:
    """The arrays and lists of integers of one row. Each is taken once, in the order in which the
    row has them.
    """

    def __init__(self, integers: Sequence[list[int]], arrays: _StoredArrays, places: range) -> None:
        self._integers = integers
        self._arrays = arrays
        self._places = places
        self._integers_taken = self._arrays_taken = 0

    def integers(self, reference: Any) -> list[int]:
        """Return the integers that ``{"$integers": i}`` refers to."""
        number = _number(reference, "$integers", self._integers_taken, len(self._integers))
        self._integers_taken += 1
        return self._integers[number]

    def array(self, reference: Any) -> AnyArray:
        """Return the array that ``{"$array": i}`` refers to: a read-only view if it is stored in
        its own type.
        """
        number = _number(reference, "$array", self._arrays_taken, len(self._places))
        self._arrays_taken += 1
        place = self._places[number]
        dtype, stored = stored_dtypes(self._arrays.names[place])
        array = array_of(self._arrays.data(place), stored, self._arrays.shapes[place])
        if stored != dtype:
            array = array.astype(dtype)
            array.flags.writeable = False
        return array


def _number(reference: Any, key: str, expected: int, count: int) -> int:
    number = reference.get(key) if isinstance(reference, dict) else reference
    if type(number) is not int or number != expected or number >= count or len(reference) != 1:
        raise TraceError(f"A row of the trace refers to {show(number)} among its {count} parts.")
    return number


def read_seal(batch: pa.RecordBatch) -> str | None:
    """Return the body of a seal, or ``None`` if the batch is none. Raises ``TraceError``."""
    validate(batch)
    if batch.num_rows != 1 or batch.column(1)[0].as_py() != SEAL:
        return None
    body: str = batch.column(4)[0].as_py()
    return body


def validate(batch: pa.RecordBatch) -> None:
    """Raise ``TraceError`` unless offsets ascend within their buffers, text is valid UTF-8, and
    there are no nulls.
    """
    import pyarrow as pa

    # the file may be hostile, and views of its buffers are read without further checks
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise TraceError(f"A batch of the trace is inconsistent: {str(error)[:200]}.") from error
    if any(map(_has_nulls, batch.columns)):
        raise TraceError("A batch of the trace has nulls: rollproof did not write it.")


def _has_nulls(array: pa.Array[Any]) -> bool:
    import pyarrow as pa

    if array.null_count:
        return True
    if isinstance(array, pa.ListArray):
        return _has_nulls(array.values)
    if isinstance(array, pa.StructArray):
        return any(_has_nulls(array.field(i)) for i in range(array.type.num_fields))
    return False
