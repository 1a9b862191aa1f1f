"""The events of a stream, however its bytes come."""

from __future__ import annotations

import zlib

import pytest

from rollproof.recording.wire.exchange import Exchange, KeptReply, StreamedEvents
from rollproof.recording.wire.sampling_replies import UnreadableReply

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


@pytest.mark.parametrize("empty", [b"\n", b"\r\n"])
def test_a_stream_of_empty_lines_has_no_events(empty: bytes) -> None:
    """However many there are, nothing of them is kept."""
    events = StreamedEvents(newest_only=False)
    for _ in range(3):
        events.take(empty * 1000)

    assert [] == list(events)
    assert events.size <= len(empty)


def test_an_event_without_an_end_counts_as_kept() -> None:
    """Its size is known before its end, so that a limit holds for one that never ends."""
    events = StreamedEvents(newest_only=False)
    events.take(b"data: ")
    events.take(b"y" * 994)

    assert 1000 == events.size
    events.take(b"\n\n")
    assert (994, [b"y" * 994]) == (events.size, list(events))


@pytest.mark.parametrize(("kind", "encoding"), [("gzip", 31), ("deflate", zlib.MAX_WBITS)])
def test_a_packed_reply_expands_to_what_is_kept_and_no_further(kind: str, encoding: int) -> None:
    """The limit of replies holds for what they unpack to, and is named."""
    exchange = Exchange(
        number=1,
        server_id="s0",
        method="POST",
        path="/generate",
        query={},
        headers={},
        body=b"",
        began=0.0,
    )
    headers = {"content-encoding": kind}
    reply = KeptReply.begin(exchange, 200, headers, 4096, newest_only=False)
    packer = zlib.compressobj(wbits=encoding)
    fitting = packer.compress(b" " * 4096) + packer.flush()
    reply.take(fitting)
    reply.finish()
    assert b" " * 4096 == exchange.reply_bytes()

    packer = zlib.compressobj(wbits=encoding)
    exchange.reply = packer.compress(b" " * (1 << 20)) + packer.flush()
    assert len(exchange.reply) < 4096
    with pytest.raises(UnreadableReply, match="longer than the recorder keeps"):
        exchange.reply_bytes()
