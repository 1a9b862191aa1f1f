"""A small trace as JSON that a person can read, mail and edit.

``{"format": "rollproof-trace", "schema": 1, "checksum": ..., "header": {...}, "events": [...]}``,
one event a line.
An array is an object with ``dtype``, ``shape`` and ``data`` (nested lists), or beyond 4,096
elements ``base64`` of its little-endian bytes. Where ``data`` holds ``null`` for NaN, or ``"inf"``,
the object says ``"nan": "null"``.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.checksums import KEY, checksum_of, fits
from rollproof.core.error_text import show
from rollproof.core.events.base import Event
from rollproof.core.files import is_special, replace_file, target_of
from rollproof.core.json_codec import DTYPES, AnyArray, parse_json
from rollproof.core.trace import SCHEMA, Header, Trace
from rollproof.errors import TraceError, TraceVersionError, UsageError
from rollproof.store.arrays import array_of
from rollproof.store.codec import (
    decode_event,
    decode_header,
    encode_event,
    encode_header,
    newer_schema,
)
from rollproof.store.stream import CONTINUATION, FORMAT, Ending, made_by

__all__ = [
    "MAX_BYTES",
    "JsonTrace",
    "dump_trace",
    "event_of",
    "is_trace",
    "load_trace",
    "seal_trace",
    "wire_of",
]

MAX_BYTES = 64 << 20
_LISTED = 4096
"""Elements of the largest array that is written as nested lists."""


def dump_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` to ``path``, completely or not at all. Raises ``TraceError`` above 64 MB, and
    for values that no trace can hold.
    """
    marks: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA, "made_by": made_by()}
    header = ",\n ".join(
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in encode_header(trace.header).items()
    )
    events = ",\n ".join(
        json.dumps(encode_event(event), default=_stored, allow_nan=False) for event in trace.events
    )
    # one event a line, so that a person can find, compare and delete events
    body = f'"header": {{\n {header}\n}},\n"events": [\n {events}\n]}}\n'
    # of what a reader will parse: JSON turns tuples into lists, and keys into text
    marks[KEY] = checksum_of({**marks, **json.loads(f"{{{body}")})
    text = f"{json.dumps(marks)[:-1]},\n{body}"
    if len(text) > MAX_BYTES:
        raise TraceError(
            f"This trace has {len(text) / 1e6:.0f} MB as JSON, above the limit of"
            f" {MAX_BYTES / 1e6:.0f} MB: write it with rollproof.store.TraceWriter, or shrink it"
            " first."
        )
    _write_completely(Path(path), text.encode("ascii"))


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read what ``dump_trace`` wrote, or a person edited and sealed.

    Raises:
        UsageError: There is no file, or it is in Arrow form.
        TraceVersionError: A newer rollproof wrote the trace.
        TraceError: It is no trace in this form, or does not fit its checksum.
    """
    return _load(Path(path))[0]


def is_trace(data: Mapping[str, Any]) -> bool:
    """Return whether a JSON object says that it is a trace."""
    return data.get("format") == FORMAT


def seal_trace(path: Path, data: Mapping[str, Any]) -> None:
    """Write the trace ``data`` to ``path``, whatever its checksum was. Raises as ``load_trace``."""
    dump_trace(_trace_of({name: value for name, value in data.items() if name != KEY}), path)


def _load(source: Path) -> tuple[Trace, bool]:
    """Return a trace, and whether it has a checksum. Raises as ``load_trace``."""
    try:
        data = parse_json(_text(source))
        return _trace_of(data), KEY in data
    except TraceVersionError as error:
        raise TraceVersionError(f"{source}: {error}") from error
    except TraceError as error:
        raise TraceError(f"{source} cannot be read as a trace: {error}") from error


def wire_of(event: Event) -> dict[str, Any]:
    """Return one event in JSON form. Raises ``TraceError`` for values that no trace can hold."""
    text = json.dumps(encode_event(event), default=_stored, allow_nan=False)
    wire: dict[str, Any] = json.loads(text)
    return wire


def event_of(wire: Mapping[str, Any]) -> Event:
    """Read what ``wire_of`` wrote, or a stranger. Raises ``TraceError``."""
    return decode_event(dict(wire), _array)


class JsonTrace:
    """A trace in JSON form with the methods of a ``TraceReader``: one episode, in memory. Raises as
    ``load_trace``.

    sealed: whether the file has a checksum, so that damage would have been noticed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self.offset: int = 0
        self.ending: Ending | None = None
        trace, sealed = _load(self.path)
        self.trace: Trace = trace
        self.sealed: bool = sealed

    @property
    def header(self) -> Header:
        """The header of the only episode."""
        return self.trace.header

    def __iter__(self) -> Iterator[Event]:
        """The events."""
        for _, events in self.episodes():
            yield from events

    def episodes(self) -> Iterator[tuple[Header, Iterator[Event]]]:
        """The only episode."""
        yield self.trace.header, iter(self.trace.events)
        self.ending = Ending(episodes=1, events=len(self.trace.events), closed=True)


def _stored(array: AnyArray) -> dict[str, Any]:
    """Return an array as JSON values."""
    name = array.dtype.name
    stored: dict[str, Any] = {"dtype": name, "shape": list(array.shape)}
    if array.size > _LISTED:
        # nobody reads so many numbers, and base64 is a third of their text
        data = array.astype(DTYPES[name], order="C").tobytes()
        return {**stored, "base64": base64.b64encode(data).decode("ascii")}
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return {**stored, "data": array.tolist()}
    spelt = array.astype(object)
    spelt[np.isnan(array)] = None
    spelt[np.isposinf(array)], spelt[np.isneginf(array)] = "inf", "-inf"
    return {**stored, "nan": "null", "data": spelt.tolist()}


def _array(stored: Any) -> AnyArray:
    """Read what ``_stored`` wrote. Raises ``TraceError``."""
    keys = stored.keys() - {"dtype", "shape"} if isinstance(stored, dict) else set()
    name = stored.get("dtype") if isinstance(stored, dict) else None
    dtype = DTYPES.get(name) if isinstance(name, str) and "shape" in stored else None
    if dtype is None or keys not in ({"data"}, {"data", "nan"}, {"base64"}):
        raise TraceError(
            "An array must be an object with dtype, shape, and data or base64, its dtype one"
            f" of {list(DTYPES)}: {show(stored)}."
        )
    if "base64" in keys:
        return _from_base64(stored["base64"], dtype, stored["shape"])
    return _from_lists(stored["data"], dtype, stored["shape"], marked="nan" in keys)


def _from_base64(text: Any, dtype: np.dtype[Any], shape: Any) -> AnyArray:
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (AttributeError, UnicodeEncodeError, binascii.Error):
        raise TraceError(f"The base64 of an array is damaged: {show(text)}.") from None
    return array_of(data, dtype, shape)


def _from_lists(data: Any, dtype: np.dtype[Any], shape: Any, *, marked: bool) -> AnyArray:
    # numpy would make an array of objects out of lists of unequal lengths
    level = [data]
    for length in shape if isinstance(shape, list) else ():
        if any(type(item) is not list or len(item) != length for item in level):
            raise TraceError(f"The lists of an array do not have its shape {show(shape)}.")
        level = [inner for item in level for inner in item]
    if marked and dtype.kind == "f":
        level = [
            _SPELT.get(item, item) if item is None or isinstance(item, str) else item
            for item in level
        ]
    types = _ELEMENTS.get(dtype.kind, (int,))
    for item in level:
        if type(item) not in types or not _fits(item, dtype):
            raise TraceError(f"An array of {dtype.name} cannot hold {show(item)}.")
    return array_of(np.array(level, dtype=dtype).tobytes(), dtype, shape)


_ELEMENTS: Mapping[str, tuple[type, ...]] = {"b": (bool,), "f": (int, float)}
_SPELT = {None: np.nan, "inf": np.inf, "-inf": -np.inf}


def _fits(item: Any, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "b":
        return True
    if dtype.kind == "f":
        return bool(
            item != item or item in (np.inf, -np.inf) or abs(item) <= float(np.finfo(dtype).max)
        )
    return bool(np.iinfo(dtype).min <= item <= np.iinfo(dtype).max)


def _trace_of(data: Any) -> Trace:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        hint = (
            " It looks like a report: give the trace that it was made from."
            if isinstance(data, dict) and "checks" in data
            else ""
        )
        raise TraceError(f'it is JSON, but does not say "format": "{FORMAT}".{hint}')
    number = data.get("schema")
    if type(number) is not int or number < 1:
        raise TraceError(f'"schema" must be a whole number >= 1, not {show(number)}.')
    if number > SCHEMA:
        raise TraceVersionError(newer_schema(number, data.get("made_by")))
    unknown = sorted(data.keys() - {"format", "schema", "made_by", KEY, "header", "events"})
    if not isinstance(data.get("made_by", ""), str):
        raise TraceError(f'"made_by" must be a text, not {show(data["made_by"])}.')
    if unknown or not isinstance(data.get("events"), list) or "header" not in data:
        raise TraceError(
            "it must have a header, a list of events, and nothing else; unknown are"
            f" {[show(key) for key in unknown][:9]}."
        )
    trace = Trace(
        header=decode_header(data["header"], _array),
        events=tuple(_event(i, wire) for i, wire in enumerate(data["events"])),
    )
    # at the end: a value that no trace can hold is named
    if fits(data) is False:
        raise TraceError(
            "it does not fit its checksum: it is damaged, or was edited. If you edited it,"
            " `rollproof seal FILE` renews the checksum."
        )
    return trace


def _event(number: int, wire: Any) -> Event:
    try:
        return decode_event(wire, _array)
    except TraceVersionError:
        raise
    except TraceError as error:
        raise TraceError(f"event {number}: {error}") from error


def _text(source: Path) -> str:
    try:
        with source.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"There is no trace at {source}: check the path.") from None
    except IsADirectoryError:
        raise UsageError(f"{source} is a folder: name the trace file in it.") from None
    except OSError as error:
        raise TraceError(f"it cannot be opened: {error.strerror}.") from error
    if len(data) > MAX_BYTES:
        raise TraceError(f"it has more than {MAX_BYTES / 1e6:.0f} MB, the limit of the JSON form.")
    if data.startswith(CONTINUATION):
        raise UsageError(
            f"{source} is a trace in Arrow form: `rollproof check` and `open_trace` read it. Only a"
            " counterexample, which is JSON, can be run again."
        )
    try:
        # some editors put a byte order mark before what they save
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"it is not UTF-8 text (at byte {error.start}).") from None


def _write_completely(path: Path, data: bytes) -> None:
    """Write next to the target, then move: a reader sees the old file or the new one."""
    try:
        # a link stays a link
        target = target_of(path)
        if is_special(target):
            raise TraceError(
                f"{path} is a device or a pipe, and a trace would replace it by a file: name"
                " another place."
            )
        replace_file(target, data, sync=True)
    except OSError as error:
        raise TraceError(
            f"{path} could not be written: {error.strerror}. Nothing was changed."
        ) from error
