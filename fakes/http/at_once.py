"""At once: an answer's head and body handed to the connection together, without joining their parts.

uvicorn writes head and body in a message each, and looks at each header with regular expressions; a body has to be one piece. For an answer
of 80 KB the copy alone costs as much as reading the request.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollproof.fakes.http.asgi import AT_ONCE, Send, Whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["writing_at_once"]

_OVER_HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"
_PARTS = (
    *("access_log", "chunked_encoding", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "on_response"),
    *("response_complete", "response_started", "scope", "transport", "waiting_for_100_continue"),
)
"""What is used of uvicorn's cycle of request and response, which is its own affair: releases from 0.29 on have it."""
_CLOSE = (b"connection", b"close")


def writing_at_once(protocol: Any) -> Any:
    """``protocol`` of uvicorn, which offers the extension where it is the one over httptools, and as it is known; any other as it is."""
    ours = next((one for one in protocol.__mro__ if one.__module__ == _OVER_HTTPTOOLS), None)
    if ours is None or not _known(getattr(inspect.getmodule(ours), "RequestResponseCycle", None)):
        return protocol

    class AtOnce(protocol):  # type: ignore[misc]
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = _EXTENSIONS

    return AtOnce


def _known(kind: Any) -> bool:
    """Whether cycles of this ``kind`` have all that is used of them."""
    try:
        cycle = kind(**dict.fromkeys(inspect.signature(kind).parameters))
    except (TypeError, ValueError, AttributeError):
        return False
    return all(hasattr(cycle, name) for name in _PARTS)


def _written(send: Send, answer: Whole) -> bool:
    """Write ``answer`` and end the cycle of request and response that ``send`` is of, as it would itself; false where it has to."""
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "on_response"):  # a middleware's own ``send``
        return False
    if cycle.disconnected or cycle.response_started or cycle.flow.write_paused or cycle.access_log or not cycle.keep_alive:
        return False
    # most releases of uvicorn look for the header when they answer; asyncio's ``writelines`` of 3.12 registers a socket that is lost anew
    if _CLOSE in cycle.scope["headers"] or cycle.transport.is_closing():
        return False
    head = [b"HTTP/1.1 200 OK\r\n", *[b"%b: %b\r\n" % header for header in (*cycle.default_headers, *answer.raw_headers)], b"\r\n"]
    cycle.waiting_for_100_continue = cycle.chunked_encoding = False
    cycle.response_started = cycle.response_complete = True
    cycle.transport.writelines([b"".join(head), *answer.parts])
    cycle.message_event.set()
    cycle.on_response()
    return True


_EXTENSIONS: Mapping[str, Callable[[Send, Whole], bool]] = {AT_ONCE: _written}
