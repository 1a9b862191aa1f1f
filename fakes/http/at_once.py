"""At once: an answer's head and body handed to the connection together, without joining their
parts.

uvicorn writes head and body in a message each, and looks at each header with regular expressions; a
body has to be one piece. For an answer of 80 KB the copy alone costs as much as reading the
request.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from rollproof.fakes.http.asgi import AT_ONCE, Receive, Scope, Send, Whole

__all__ = ["offering"]

_OVER_HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"
_PARTS = (
    *(
        "access_log",
        "chunked_encoding",
        "default_headers",
        "disconnected",
        "flow",
        "keep_alive",
        "message_event",
        "on_response",
    ),
    *("response_complete", "response_started", "scope", "transport", "waiting_for_100_continue"),
)
"""What is used of uvicorn's cycle of request and response, which is its own affair: releases from
0.29 on have it.
"""


def offering(app: Any, protocol: Any) -> Any:
    """``app``, which is offered to write at once where ``protocol`` of uvicorn is the one over
    httptools, and as it is known.
    """
    ours = next((one for one in protocol.__mro__ if one.__module__ == _OVER_HTTPTOOLS), None)
    if ours is None or not _known(getattr(inspect.getmodule(ours), "RequestResponseCycle", None)):
        return app

    def offered(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope["extensions"] = _EXTENSIONS
        answering: Awaitable[None] = app(scope, receive, send)
        return answering

    return offered


def _known(kind: Any) -> bool:
    """Whether cycles of this ``kind`` have all that is used of them."""
    try:
        cycle = kind(**dict.fromkeys(inspect.signature(kind).parameters))
    except (TypeError, ValueError, AttributeError):
        return False
    return all(hasattr(cycle, name) for name in _PARTS)


def _written(send: Send, answer: Whole) -> bool:
    """Write ``answer`` and end the cycle of request and response that ``send`` is of, as it would
    itself; false where it has to.
    """
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "on_response"):  # a middleware's own ``send``
        return False
    if (
        cycle.disconnected
        or cycle.response_started
        or cycle.flow.write_paused
        or cycle.access_log
        or not cycle.keep_alive
    ):
        return False
    scope = cycle.scope
    # asyncio's ``writelines`` of 3.12 registers a socket that is lost anew, and never tells of a
    # client that does not read
    if (
        scope["http_version"] != "1.1"
        or cycle.transport.is_closing()
        or cycle.transport.get_write_buffer_size()
    ):
        return False
    if any(
        name == b"connection" and value.lower() != b"keep-alive" for name, value in scope["headers"]
    ):
        return False
    head = [
        b"HTTP/1.1 200 OK\r\n",
        *[b"%b: %b\r\n" % header for header in (*cycle.default_headers, *answer.raw_headers)],
        b"\r\n",
    ]
    cycle.waiting_for_100_continue = cycle.chunked_encoding = False
    cycle.response_started = cycle.response_complete = True
    cycle.transport.writelines([b"".join(head), *answer.parts])
    cycle.message_event.set()
    cycle.on_response()
    return True


_EXTENSIONS = {AT_ONCE: _written}
