"""At once: an answer's head and body handed to the connection together, without joining their parts.

uvicorn writes head and body in a message each, and looks at each header with regular expressions; a body has to be one piece. For an answer
of 80 KB the copy alone costs as much as reading the request.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import h11

from rollproof.fakes.http.asgi import AT_ONCE, Receive, Scope, Send, Whole

__all__ = ["offering"]

_App = Callable[[Scope, Receive, Send], Awaitable[None]]
_PARTS = (
    *("access_log", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "on_response", "response_complete"),
    *("response_started", "scope", "transport", "waiting_for_100_continue"),
)
"""What is used of uvicorn's cycle of request and response, which is its own affair: releases from 0.29 on have it."""
_BARE, _END = h11.Response(status_code=204, headers=[]), h11.EndOfMessage()


def offering(app: _App, protocol: Any) -> _App:
    """``app``, which is offered to write at once where ``protocol`` of uvicorn is one that is known; elsewhere as it is."""
    for name, (part, ends) in _KNOWN.items():
        ours = next((one for one in protocol.__mro__ if one.__module__ == f"uvicorn.protocols.http.{name}"), None)
        if ours is not None and _known(getattr(inspect.getmodule(ours), "RequestResponseCycle", None), part):
            return _offered(app, ends)
    return app


def _offered(app: _App, ends: Callable[[Any], None]) -> _App:
    def written(send: Send, answer: Whole) -> bool:
        return _written(getattr(send, "__self__", None), answer, ends)

    extensions = {AT_ONCE: written}

    def offered(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope["extensions"] = extensions
        return app(scope, receive, send)

    return offered


def _known(kind: Any, part: str) -> bool:
    """Whether cycles of this ``kind`` have all that is used of them."""
    try:
        given = dict.fromkeys(inspect.signature(kind).parameters)
        cycle = kind(**{**given, "conn": h11.Connection(h11.SERVER)} if "conn" in given else given)
    except (TypeError, ValueError, AttributeError):
        return False
    return all(hasattr(cycle, name) for name in (*_PARTS, part))


def _written(cycle: Any, answer: Whole, ends: Callable[[Any], None]) -> bool:
    """Write ``answer`` and end its ``cycle`` of request and response as that would itself; false where it has to."""
    if not hasattr(cycle, "on_response"):  # what sends is a middleware's own
        return False
    if cycle.disconnected or cycle.response_started or cycle.flow.write_paused or cycle.access_log or not cycle.keep_alive:
        return False
    scope = cycle.scope
    # asyncio's ``writelines`` of 3.12 registers a socket that is lost anew, and never tells of a client that does not read
    if scope["http_version"] != "1.1" or cycle.transport.is_closing() or cycle.transport.get_write_buffer_size():
        return False
    if any(name == b"connection" and value.lower() != b"keep-alive" for name, value in scope["headers"]):
        return False
    head = [b"HTTP/1.1 200 OK\r\n", *[b"%b: %b\r\n" % header for header in (*cycle.default_headers, *answer.raw_headers)], b"\r\n"]
    ends(cycle)
    cycle.waiting_for_100_continue = False
    cycle.response_started = cycle.response_complete = True
    cycle.transport.writelines([b"".join(head), *answer.parts])
    cycle.message_event.set()
    cycle.on_response()
    return True


def _over_httptools(cycle: Any) -> None:
    cycle.chunked_encoding = False


def _over_h11(cycle: Any) -> None:
    """h11 has to know that the answer was sent, and nothing more of it: it is told of one without a body, and what it writes is dropped."""
    cycle.conn.send(_BARE)
    cycle.conn.send(_END)


_KNOWN: Mapping[str, tuple[str, Callable[[Any], None]]] = {
    "httptools_impl": ("chunked_encoding", _over_httptools),
    "h11_impl": ("conn", _over_h11),
}
"""Modules of uvicorn's protocols, what else is used of their cycles, and what ends a cycle."""
