"""The calls of an httpx client, as exchanges."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

import httpx

from rollproof.core.error_text import describe_error, show
from rollproof.errors import UsageError
from rollproof.recording.wire.control_calls import CONTROL_PATHS
from rollproof.recording.wire.exchange import Exchange, How, KeptReply
from rollproof.recording.wire.sampling_calls import SAMPLING_PATHS

__all__ = ["watch_http"]

_PATHS = frozenset((*SAMPLING_PATHS, *CONTROL_PATHS))
# as much as `rollproof proxy --max-body` keeps by default
_MAX_BODY = 64 << 20


def watch_http(
    client: Any,
    begun: Callable[[Exchange], None],
    ended: Callable[[Exchange], None],
    clock: Callable[[], float],
    *,
    server: str | None,
) -> Any:
    """Report the exchanges of a client; returns it.

    Args:
        client: a client of httpx, sync or async. Its method ``send`` is wrapped, through which all
            others go; what it returns is unchanged.
        begun: takes an exchange before its request is sent.
        ended: takes it when its client has the whole reply, or will get no more of it.
        clock: Unix time.
        server: the server's name in the trace.

    Raises:
        UsageError: it is no such client.
    """
    watching = _Watching(begun, ended, clock, server)
    if isinstance(client, httpx.AsyncClient):
        watching.watch_async(client)
    elif isinstance(client, httpx.Client):
        watching.watch(client)
    else:
        raise UsageError(
            f"http() takes a httpx.Client or httpx.AsyncClient, not {show(client)}: before the"
            " server of any other client put `rollproof proxy`."
        )
    return client


class _Watching:
    def __init__(
        self,
        begun: Callable[[Exchange], None],
        ended: Callable[[Exchange], None],
        clock: Callable[[], float],
        server: str | None,
    ) -> None:
        self._begun, self._ended, self._clock, self._server = begun, ended, clock, server
        self._count = 0

    def watch(self, client: httpx.Client) -> None:
        send = client.send

        def recorded(request: httpx.Request, *, stream: bool = False, **more: Any) -> Any:
            exchange = self._exchange(request)
            if exchange is None:
                return send(request, stream=stream, **more)
            try:
                # always streamed: httpx would have read the body before its stream is replaced
                response = send(request, stream=True, **more)
            except BaseException as error:
                self._fail(exchange, error)
                raise
            reply = self._reply(exchange, response)
            response.stream = _Stream(response.stream, reply, self)
            if not stream:
                response.read()
            return response

        client.send = recorded  # type: ignore[method-assign]  # the one place that every call passes

    def watch_async(self, client: httpx.AsyncClient) -> None:
        send = client.send

        async def recorded(request: httpx.Request, *, stream: bool = False, **more: Any) -> Any:
            exchange = self._exchange(request)
            if exchange is None:
                return await send(request, stream=stream, **more)
            try:
                response = await send(request, stream=True, **more)
            except BaseException as error:
                self._fail(exchange, error)
                raise
            reply = self._reply(exchange, response)
            response.stream = _AsyncStream(response.stream, reply, self)
            if not stream:
                await response.aread()
            return response

        client.send = recorded  # type: ignore[method-assign]  # as above

    def end(self, exchange: Exchange, how: How, detail: str = "") -> None:
        """Hand on an exchange that has ended, unless that was done."""
        if exchange.how is How.OPEN:
            exchange.how, exchange.detail, exchange.ended = how, detail, self._clock()
            self._ended(exchange)

    def _exchange(self, request: httpx.Request) -> Exchange | None:
        if request.url.path not in _PATHS:
            return None
        try:
            body = request.content
        except httpx.RequestNotRead:  # it is streamed: what is sent is not known before
            body, too_long = b"", True
        else:
            too_long = len(body) > _MAX_BODY
        self._count += 1
        url = request.url
        exchange = Exchange(
            number=self._count,
            server_id=self._server or url.netloc.decode("ascii"),
            method=request.method,
            path=url.path,
            query=dict(parse_qsl(url.query.decode("ascii"), keep_blank_values=True)),
            headers={name.lower(): value for name, value in request.headers.raw},
            body=b"" if too_long else body,
            body_too_long=too_long,
            began=self._clock(),
        )
        self._begun(exchange)
        return exchange

    def _fail(self, exchange: Exchange, error: BaseException) -> None:
        # where no connection was made, no engine can have seen the request
        refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        self.end(exchange, How.UNREACHED if refused else How.BROKEN, describe_error(error))

    def _reply(self, exchange: Exchange, response: httpx.Response) -> KeptReply:
        newest = SAMPLING_PATHS.get(exchange.path) == "sglang"
        return KeptReply.begin(
            exchange, response.status_code, response.headers, _MAX_BODY, newest_only=newest
        )


class _Stream(httpx.SyncByteStream):
    """A reply that is kept as it is read."""

    def __init__(self, stream: Any, reply: KeptReply, watching: _Watching) -> None:
        self._stream, self._reply, self._watching = stream, reply, watching

    def __iter__(self) -> Iterator[bytes]:
        reply, end = self._reply, self._watching.end
        try:
            for chunk in self._stream:
                reply.take(chunk)
                if reply.is_complete:
                    end(reply.exchange, How.COMPLETE)
                yield chunk
        except BaseException as error:
            reply.finish()
            left = isinstance(error, GeneratorExit)
            end(reply.exchange, How.LEFT if left else How.BROKEN, describe_error(error))
            raise
        reply.finish()
        end(reply.exchange, How.COMPLETE)

    def close(self) -> None:
        self._stream.close()
        self._reply.finish()
        # httpx also closes what was read to its end: that has ended already
        self._watching.end(self._reply.exchange, How.LEFT)


class _AsyncStream(httpx.AsyncByteStream):
    """The same for an async client."""

    def __init__(self, stream: Any, reply: KeptReply, watching: _Watching) -> None:
        self._stream, self._reply, self._watching = stream, reply, watching

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reply, end = self._reply, self._watching.end
        try:
            async for chunk in self._stream:
                reply.take(chunk)
                if reply.is_complete:
                    end(reply.exchange, How.COMPLETE)
                yield chunk
        except BaseException as error:
            reply.finish()
            left = isinstance(error, GeneratorExit)
            end(reply.exchange, How.LEFT if left else How.BROKEN, describe_error(error))
            raise
        reply.finish()
        end(reply.exchange, How.COMPLETE)

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._reply.finish()
        self._watching.end(self._reply.exchange, How.LEFT)
