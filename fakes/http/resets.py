"""Cutting: ends of connections that HTTP knows nothing of."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rollproof.fakes.http.asgi import Message, Scope, Send

__all__ = ["Cut", "cut", "ended"]

_LINGER = 1000
"""Milliseconds for which a closed connection may take to send what is written."""


class Cut:
    """The message that asks whoever carries the connection to break it, where it offers the
    extension ``rollproof.cut``.
    """

    message: ClassVar[Message] = {"type": "rollproof.cut"}


async def ended(scope: Scope, send: Send) -> None:
    """Within ``except CancelledError``: the server ends, and would tell of everything that it
    cancels with a traceback.
    """
    if "rollproof.cut" in (scope.get("extensions") or {}):
        raise
    with suppress(asyncio.CancelledError):  # the loop ends meanwhile, and cancels once more
        await cut(scope, send)


async def cut(scope: Scope, send: Send, *, reset: bool = True) -> None:
    """End the connection below HTTP. ASGI has no word for that: the transport is asked for where
    the server keeps it.
    """
    if "rollproof.cut" in (scope.get("extensions") or {}):
        await send(Cut.message)
        return
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise ConnectionResetError(
            "The connection is cut here, and this ASGI server does not say how."
        )
    if reset:
        await asyncio.sleep(0)  # what was written before is under way
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # closing then sends RST, not FIN
        transport.abort()
    else:
        transport.close()
    for _ in range(
        _LINGER
    ):  # until uvicorn knows: it complains of an application that ends without having answered
        if send.__self__.disconnected:  # type: ignore[attr-defined]  # the cycle that ``transport`` was found in
            return
        await asyncio.sleep(0.001)
