"""Loopback connections in memory, on the virtual clock.

HTTP clients of real stacks (aiohttp, httpx) and a real HTTP server (uvicorn's protocols) use them,
byte for byte as a socket, while time stays virtual: what is written in one turn of the loop arrives
in the next. A server's tasks inherit the context of the client that wrote to it, so that a call is
attributed to its request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Network"]

Factory: TypeAlias = "Callable[[], asyncio.BaseProtocol]"
_HOSTS = ("127.0.0.1", "localhost", "::1")


class Network:
    """Listening servers by port. They and their clients run on ``loop``, which is virtual."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._servers: dict[int, Factory] = {}
        self._reserved: dict[int, tuple[str, int]] = {}
        self._ports = 50_000

    def listen(self, port: int, factory: Factory) -> None:
        """Serve ``port`` of 127.0.0.1 with a new protocol of ``factory`` for each connection."""
        self._servers[port] = factory

    def close(self, port: int) -> None:
        """Refuse further connections to ``port``; existing ones stay."""
        self._servers.pop(port, None)

    def reserve(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        """Connect a socket to ``address``, as ``loop.sock_connect`` does. Raises as a socket
        would.
        """
        host, port = str(address[0]), int(address[1])
        self._factory(host, port)
        self._reserved[id(sock)] = (host, port)

    def connect(
        self, factory: Factory, host: str | None, port: int | None, sock: Any = None
    ) -> tuple[Any, Any]:
        """Return the client's transport and protocol of a new connection. Raises
        ``ConnectionRefusedError`` if there is no such server.
        """
        if sock is not None:
            host, port = self._reserved.pop(id(sock))
            sock.close()
        assert host is not None
        assert port is not None
        server_protocol = self._factory(host, port)()
        self._ports += 1
        client_address, server_address = ("127.0.0.1", self._ports), ("127.0.0.1", port)
        client = _Pipe(self._loop, client_address, server_address)
        server = _Pipe(self._loop, server_address, client_address)
        client.peer, server.peer = server, client
        protocol = factory()
        server.attach(server_protocol)
        client.attach(protocol)
        return client, protocol

    def resolve(self, host: Any, port: Any) -> list[tuple[Any, ...]]:
        """Return what ``getaddrinfo`` says of this machine. Raises ``socket.gaierror`` for any
        other.
        """
        if str(host) not in _HOSTS:
            raise socket.gaierror(
                socket.EAI_NONAME, f"{host}: only this machine is on the virtual network"
            )
        return [
            (
                socket.AF_INET,
                socket.SOCK_STREAM,
                socket.IPPROTO_TCP,
                "",
                ("127.0.0.1", int(port or 0)),
            )
        ]

    def _factory(self, host: str, port: int) -> Factory:
        factory = self._servers.get(port) if host in _HOSTS else None
        if factory is None:
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        return factory


class _Pipe(asyncio.Transport):
    """One end of a connection. Its buffer is never full: writing never waits."""

    peer: _Pipe

    def __init__(
        self, loop: asyncio.AbstractEventLoop, own: tuple[str, int], peer: tuple[str, int]
    ) -> None:
        self._socket = _Socket(own, peer)
        super().__init__({"sockname": own, "peername": peer, "socket": self._socket})
        self._loop = loop
        self._protocol: Any = None
        self._closing = False
        self._lost = False
        self._paused = False
        self._waiting: list[bytes | None] = []

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Start the connection with a protocol."""
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing and data:
            self._loop.call_soon(self.peer.arrive, bytes(data))

    def write_eof(self) -> None:
        if not self._closing:
            self._loop.call_soon(self.peer.arrive, None)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        """End the connection after what was written has arrived."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self.peer.arrive, None)
            self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        """Close at once. The other side sees a reset only where a kernel would send one: if data is
        unread, or the socket lingers for no time.
        """
        # anyio aborts every connection that it closes (httpx), in good order too
        if not (self._waiting or self._socket.resets):
            self.close()
        elif not self._lost:
            self._closing = True
            self._loop.call_soon(
                self.peer.lose, ConnectionResetError(104, "Connection reset by peer")
            )
            self._loop.call_soon(self.lose, None)

    def arrive(self, data: bytes | None) -> None:
        """Take data of the other side, or its end (``None``)."""
        if self._closing:
            return
        if self._paused or self._waiting:
            # it must not overtake what waits already
            self._waiting.append(data)
        else:
            self._deliver(data)

    def _drain(self) -> None:
        """Deliver what arrived while reading was paused, in order, until it is paused again."""
        while self._waiting and not (self._paused or self._closing):
            self._deliver(self._waiting.pop(0))

    def _deliver(self, data: bytes | None) -> None:
        if data is not None:
            self._protocol.data_received(data)
        elif not self._protocol.eof_received():
            self.close()

    def lose(self, error: Exception | None) -> None:
        """Tell the protocol that the connection is lost."""
        if not self._lost:
            self._closing = self._lost = True
            self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._waiting:
            self._loop.call_soon(self._drain)

    def is_reading(self) -> bool:
        return not (self._paused or self._closing)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]  # any of the four kinds

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Accept and ignore limits: the buffer is never full."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 0


class _Socket:
    """The part of a socket that clients and servers of a transport use."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, own: tuple[str, int], peer: tuple[str, int]) -> None:
        self._own, self._peer = own, peer
        self.resets = False

    def getsockname(self) -> tuple[str, int]:
        return self._own

    def getpeername(self) -> tuple[str, int]:
        return self._peer

    def setsockopt(self, _level: int, option: int, *_: Any) -> None:
        """Remember a linger time, which is always 0 here; ignore other options."""
        if option == socket.SO_LINGER:
            self.resets = True

    def getsockopt(self, *_: Any) -> int:
        return 0

    def fileno(self) -> int:
        """Return no descriptor."""
        # clients that poll it believe that the connection is used up, and open another
        return -1
