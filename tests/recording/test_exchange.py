"""The events of a stream, however its bytes come."""

from __future__ import annotations

import pytest

from rollproof.recording.wire.exchange import StreamedEvents

STREAM = b"data: a\r\n\r\nevent: more\r\ndata: b\r\ndata: c\r\n\r\ndata: [DONE]\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 10, len(STREAM)])
@pytest.mark.parametrize("end_of_line", [b"\n", b"\r\n"])
def test_events_are_split_alike_wherever_a_chunk_ends(size: int, end_of_line: bytes) -> None:
    """A chunk may end between the two characters that end a line."""
    stream = STREAM.replace(b"\r\n", end_of_line)
    events = StreamedEvents(newest_only=False)
    for begin in range(0, len(stream), size):
        events.take(stream[begin : begin + size])
    assert [b"a", b"b\nc"] == list(events)
    assert events.done
