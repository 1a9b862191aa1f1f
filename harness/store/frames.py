"""Frames: the messages of an Arrow IPC stream, found and measured without trusting them.

A frame is ``FF FF FF FF``, the length of its metadata (int32), the metadata (a flatbuffer
``Message``, padded to 8 bytes) and its body
(https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format). A stream may end
with a frame of length 0, the end mark. Lengths are read here before Arrow sees anything, so that a
hostile one allocates nothing; compressed bodies, which could unfold to any size, are refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from rollproof.errors import TraceError

__all__ = ["CONTINUATION", "END", "Cut", "Frame", "read_frame"]

CONTINUATION = b"\xff\xff\xff\xff"
_END_MARK = CONTINUATION + bytes(4)
_TRAILER = b"rollproof closed"
END = _END_MARK + _TRAILER
"""What a closed file ends with. Arrow reads nothing behind its end mark; the text tells the mark
from cut-off payload.
"""
_UNWRITTEN = bytes(8)
_MAX_METADATA = 1 << 16
_MAX_BODY = 1 << 30
_SCHEMA, _BATCH = 1, 3


class Cut(Exception):
    """The file ends inside a frame: its writer was killed, or is still at work."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a message lies in the file, in bytes, and whether it is the schema rather than a batch."""

    offset: int
    size: int
    schema: bool


def read_frame(file: BinaryIO, offset: int, end: int) -> Frame | None:
    """The frame at ``offset`` of a file of ``end`` bytes; ``None`` at ``END`` or where the file
    ends without one.

    Reads its metadata only. Raises ``Cut`` where the file ends inside it, ``TraceError`` where it
    is no frame.
    """
    file.seek(offset)
    prefix = file.read(8)
    if not prefix:
        return None
    if len(prefix) < 8 or prefix == _UNWRITTEN:
        raise Cut
    if prefix == _END_MARK:
        trailer = file.read(len(_TRAILER) + 1)
        if trailer == _TRAILER:
            return None
        if _TRAILER.startswith(trailer):
            raise Cut
        raise TraceError("an end mark stands in the middle (were two files joined?)")
    (length,) = struct.unpack_from("<i", prefix, 4)
    if prefix[:4] != CONTINUATION or not 0 < length <= _MAX_METADATA or length % 8:
        raise TraceError("there is no Arrow message")
    metadata = file.read(length)
    if len(metadata) < length:
        raise Cut
    kind, body, compressed = _measure(metadata)
    if kind not in (_SCHEMA, _BATCH):
        raise TraceError(f"a message is of kind {kind}, which a trace does not hold")
    if compressed:
        raise TraceError("a batch is compressed, which no rollproof writes: it is not unfolded")
    if not 0 <= body <= _MAX_BODY or body % 8:
        raise TraceError(f"a message claims a body of {body} bytes; at most {_MAX_BODY} are read")
    size = 8 + length + body
    if offset + size > end:
        raise Cut
    return Frame(offset, size, kind == _SCHEMA)


def _measure(metadata: bytes) -> tuple[int, int, bool]:
    """Kind of a message, length of its body, and whether a batch is compressed, from its
    flatbuffer. Raises ``TraceError``.
    """
    try:
        message = _table(metadata, 0)
        kind, body = _field(metadata, message, 1, "<B"), _field(metadata, message, 3, "<q")
        header = _table(metadata, message + _slot(metadata, message, 2))
        return kind, body, kind == _BATCH and _slot(metadata, header, 3) != 0
    except (struct.error, ValueError) as error:
        raise TraceError("the metadata of a message is damaged") from error


def _table(data: bytes, place: int) -> int:
    """Where the table lies that the offset at ``place`` points to."""
    if place < 0:
        raise ValueError
    return place + int(struct.unpack_from("<I", data, place)[0])


def _slot(data: bytes, table: int, number: int) -> int:
    """Offset of a field within its table; 0 where the field is absent."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if vtable < 0:
        raise ValueError
    (length,) = struct.unpack_from("<H", data, vtable)
    return (
        int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
        if 4 + 2 * number < length
        else 0
    )


def _field(data: bytes, table: int, number: int, form: str) -> int:
    slot = _slot(data, table, number)
    return int(struct.unpack_from(form, data, table + slot)[0]) if slot else 0
