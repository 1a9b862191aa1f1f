"""Connections in memory on the virtual clock: what asyncio promises of sockets holds for them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from rollproof.errors import SubjectError
from rollproof.simulation import virtual_loop
from rollproof.simulation.memory_network import Network

WHO: ContextVar[str] = ContextVar("who", default="nobody")


class Server(asyncio.Protocol):
    """Keeps what it hears, and of whom."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.callers: list[str] = []
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        self.callers.append(WHO.get())

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


def on_network(work: Callable[[Server], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``work`` where a ``Server`` listens on port 80."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_loop.VirtualLoop)
        loop.network = Network(loop)
        server = Server()
        loop.network.listen(80, lambda: server)
        return await work(server)

    return virtual_loop.run(main)


async def settle() -> None:
    """Let everything arrive that was written."""
    for _ in range(4):
        await asyncio.sleep(0)


def test_data_arrives_in_order_and_before_the_end() -> None:
    """Also what was written just before the connection was closed."""

    async def work(server: Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", 80)
        writer.write(b"one")
        writer.write(b"two")
        writer.close()
        await settle()
        assert [b"one", b"two"] == server.received
        assert [None] == server.lost

    on_network(work)


def test_data_that_arrived_during_a_pause_is_not_overtaken() -> None:
    """Bytes keep their order over a pause, also those that arrive while it ends."""

    async def work(server: Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", 80)
        server.transport.pause_reading()
        writer.write(b"one")
        writer.write(b"two")
        await settle()
        assert [] == server.received
        server.transport.resume_reading()
        writer.write(b"three")
        await settle()
        writer.close()
        assert b"onetwothree" == b"".join(server.received)

    on_network(work)


def test_an_abort_without_linger_time_is_a_reset_for_the_other_side() -> None:
    """As a server that breaks a connection on purpose."""

    async def work(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", 80)
        sock = server.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.transport.abort()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()

    on_network(work)


def test_an_abort_with_nothing_unread_is_an_ordinary_end() -> None:
    """As a kernel does it: anyio aborts every connection that it has closed."""

    async def work(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", 80)
        server.transport.abort()
        assert b"" == await reader.read()
        writer.close()

    on_network(work)


def test_a_connection_without_a_server_is_refused() -> None:
    """On another port, and on one that was closed."""

    async def work(_server: Server) -> None:
        with pytest.raises(
            ConnectionRefusedError, match=r"Connect call failed \('127\.0\.0\.1', 81\)"
        ):
            await asyncio.open_connection("127.0.0.1", 81)
        loop = asyncio.get_running_loop()
        loop.network.close(80)  # type: ignore[attr-defined]  # of the virtual loop
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", 80)

    on_network(work)


def test_a_socket_that_is_connected_first_stands_for_the_connection() -> None:
    """The way of aiohttp, which makes its socket itself."""

    async def work(server: Server) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        await loop.sock_connect(sock, ("127.0.0.1", 80))
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=sock)
        transport.write(b"one")
        await settle()
        assert [b"one"] == server.received
        assert -1 == sock.fileno(), "the real socket is given back"

    on_network(work)


def test_a_server_works_in_the_context_of_who_wrote_to_it() -> None:
    """So a call is charged to the request that it is made for, also over one connection."""

    async def work(server: Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", 80)
        for name in ("r0", "r1"):
            WHO.set(name)
            writer.write(name.encode())
        await settle()
        writer.close()
        assert ["r0", "r1"] == server.callers

    on_network(work)


def test_there_is_no_other_machine() -> None:
    """Names resolve to this one only."""

    async def work(_server: Server) -> None:
        loop = asyncio.get_running_loop()
        assert ("127.0.0.1", 80) == (await loop.getaddrinfo("localhost", 80))[0][4]
        with pytest.raises(socket.gaierror, match="only this machine is on the virtual network"):
            await loop.getaddrinfo("elsewhere.example", 80)

    on_network(work)


def test_without_a_network_a_connection_is_refused_with_advice() -> None:
    """As before: nothing answers on a socket in virtual time."""

    async def work() -> None:
        await asyncio.open_connection("127.0.0.1", 80)

    with pytest.raises(SubjectError, match=r"opened a connection \(loop\.create_connection\)"):
        virtual_loop.run(work)
