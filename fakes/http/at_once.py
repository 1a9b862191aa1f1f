"""At once: an answer's head and body handed to the connection together, without joining their parts.

uvicorn writes head and body in a message each, and looks at each header with regular expressions; a body has to be one piece. For an answer
of 80 KB the copy alone costs as much as reading the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollproof.fakes.http.asgi import AT_ONCE, Send, Whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["writing_at_once"]


def writing_at_once(protocol: Any) -> Any:
    """``protocol`` of uvicorn, which offers the extension where it is the one over httptools; any other as it is."""
    if not any(one.__module__ == "uvicorn.protocols.http.httptools_impl" for one in protocol.__mro__):
        return protocol

    class AtOnce(protocol):  # type: ignore[misc]
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = _EXTENSIONS

    return AtOnce


def _written(send: Send, answer: Whole) -> bool:
    """Write ``answer`` and end the cycle of request and response that ``send`` is of, as it would itself; false where it has to."""
    cycle: Any = getattr(send, "__self__", None)
    if cycle is None or cycle.disconnected or cycle.response_started or cycle.flow.write_paused or cycle.access_log or not cycle.keep_alive:
        return False
    head = [b"HTTP/1.1 200 OK\r\n", *[b"%b: %b\r\n" % header for header in (*cycle.default_headers, *answer.raw_headers)], b"\r\n"]
    cycle.waiting_for_100_continue = cycle.chunked_encoding = False
    cycle.response_started = cycle.response_complete = True
    cycle.transport.writelines([b"".join(head), *answer.parts])
    cycle.message_event.set()
    cycle.on_response()
    return True


_EXTENSIONS: Mapping[str, Callable[[Send, Whole], bool]] = {AT_ONCE: _written}
