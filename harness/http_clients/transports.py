"""Transports that tag the calls of a rollout: drop-ins for httpx, openai, requests and aiohttp."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollproof.errors import ExtraError
from rollproof.http_clients.rollouts import headers

if TYPE_CHECKING:
    import aiohttp
    import httpx
    import requests.adapters

__all__ = [
    "aiohttp_trace",
    "httpx_async_transport",
    "httpx_transport",
    "openai_async_http_client",
    "openai_http_client",
    "requests_adapter",
]


def httpx_transport(transport: httpx.BaseTransport | None = None) -> httpx.BaseTransport:
    """Return a transport for ``httpx.Client(transport=...)``.

    Args:
        transport: the one that makes the calls; by default ``httpx.HTTPTransport()``.

    Raises:
        ExtraError: httpx is not installed.
    """
    library = _library("httpx")
    inner = library.HTTPTransport() if transport is None else transport

    class Tagging(library.BaseTransport):  # type: ignore[misc, name-defined]  # imported when it is called
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            request.headers.update(headers(str(request.url)))
            response: httpx.Response = inner.handle_request(request)
            return response

        def close(self) -> None:
            inner.close()

    tagging: httpx.BaseTransport = Tagging()
    return tagging


def httpx_async_transport(
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncBaseTransport:
    """Return a transport for ``httpx.AsyncClient(transport=...)``; see ``httpx_transport``."""
    library = _library("httpx")
    inner = library.AsyncHTTPTransport() if transport is None else transport

    class Tagging(library.AsyncBaseTransport):  # type: ignore[misc, name-defined]  # as above
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            request.headers.update(headers(str(request.url)))
            response: httpx.Response = await inner.handle_async_request(request)
            return response

        async def aclose(self) -> None:
            await inner.aclose()

    tagging: httpx.AsyncBaseTransport = Tagging()
    return tagging


def openai_http_client(**options: Any) -> Any:
    """Return a client for ``openai.OpenAI(http_client=...)``, with openai's own defaults.

    Args:
        options: those of ``openai.DefaultHttpxClient``.

    Raises:
        ExtraError: openai is not installed.
    """

    # a hook and no transport: releases of openai differ in the package of their transports
    def tag(request: Any) -> None:
        request.headers.update(headers(str(request.url)))

    return _library("openai").DefaultHttpxClient(**_with_hook(tag, options))


def openai_async_http_client(**options: Any) -> Any:
    """Return a client for ``openai.AsyncOpenAI(http_client=...)``; see ``openai_http_client``."""

    async def tag(request: Any) -> None:
        request.headers.update(headers(str(request.url)))

    return _library("openai").DefaultAsyncHttpxClient(**_with_hook(tag, options))


def requests_adapter(**options: Any) -> requests.adapters.HTTPAdapter:
    """Return an adapter for ``session.mount("http://", ...)`` of requests.

    Args:
        options: those of ``requests.adapters.HTTPAdapter``.

    Raises:
        ExtraError: requests is not installed.
    """
    library = _library("requests")

    class Tagging(library.adapters.HTTPAdapter):  # type: ignore[misc, name-defined]  # as above
        def add_headers(self, request: Any, **sending: Any) -> None:
            request.headers.update(headers(request.url))

    adapter: requests.adapters.HTTPAdapter = Tagging(**options)
    return adapter


def aiohttp_trace() -> aiohttp.TraceConfig:
    """Return a trace for ``aiohttp.ClientSession(trace_configs=[...])``.

    Raises:
        ExtraError: aiohttp is not installed.
    """
    library = _library("aiohttp")

    async def tag(_session: Any, _context: Any, started: aiohttp.TraceRequestStartParams) -> None:
        started.headers.update(headers(str(started.url)))

    trace: aiohttp.TraceConfig = library.TraceConfig()
    trace.on_request_start.append(tag)
    return trace


def _with_hook(tag: Callable[[Any], Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a client with one more hook before each call."""
    hooks = options.get("event_hooks") or {}
    return {**options, "event_hooks": {**hooks, "request": [*hooks.get("request", ()), tag]}}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraError(
            f"{name} is not installed, which this transport is for: pip install {name}."
        ) from error
