"""Hooks that tag the calls of a rollout, for httpx, openai, requests and aiohttp.

Each is the place that its library has for adding headers, so that nothing else of a client changes:
a transport of httpx, for instance, would take the place of the client's proxies and certificates.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollproof.errors import ExtraError
from rollproof.http_clients.rollouts import headers

if TYPE_CHECKING:
    import aiohttp
    import requests.adapters

__all__ = [
    "aiohttp_trace",
    "httpx_async_hooks",
    "httpx_hooks",
    "openai_async_http_client",
    "openai_http_client",
    "requests_adapter",
]


def httpx_hooks() -> dict[str, list[Callable[..., Any]]]:
    """Return hooks for ``httpx.Client(event_hooks=...)``.

    Of a client with hooks of its own, ``client.event_hooks = httpx_hooks()`` would remove them:
    add the one of ``httpx_hooks()["request"]`` to them.
    """

    def tag(request: Any) -> None:
        request.headers.update(headers(str(request.url)))

    return {"request": [tag]}


def httpx_async_hooks() -> dict[str, list[Callable[..., Any]]]:
    """Return hooks for ``httpx.AsyncClient(event_hooks=...)``; see ``httpx_hooks``."""

    async def tag(request: Any) -> None:
        request.headers.update(headers(str(request.url)))

    return {"request": [tag]}


def openai_http_client(**options: Any) -> Any:
    """Return a client for ``openai.OpenAI(http_client=...)``, with openai's own defaults.

    Args:
        options: those of ``openai.DefaultHttpxClient``.

    Raises:
        ExtraError: openai is not installed.
    """
    return _library("openai").DefaultHttpxClient(**_with_hooks(httpx_hooks(), options))


def openai_async_http_client(**options: Any) -> Any:
    """Return a client for ``openai.AsyncOpenAI(http_client=...)``; see ``openai_http_client``."""
    return _library("openai").DefaultAsyncHttpxClient(**_with_hooks(httpx_async_hooks(), options))


def requests_adapter(**options: Any) -> requests.adapters.HTTPAdapter:
    """Return an adapter for ``session.mount("http://", ...)`` of requests.

    Args:
        options: those of ``requests.adapters.HTTPAdapter``.

    Raises:
        ExtraError: requests is not installed.
    """
    library = _library("requests")

    class Tagging(library.adapters.HTTPAdapter):  # type: ignore[misc, name-defined]  # imported when it is called
        # requests leaves this method empty for subclasses, and calls it for redirects, too
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


def _with_hooks(
    hooks: Mapping[str, list[Callable[..., Any]]], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the options of a client with one more hook before each call."""
    own = options.get("event_hooks") or {}
    # the user's own first: one may change the URL, by which the tag is chosen
    requests_hooks = [*own.get("request", ()), *hooks["request"]]
    return {**options, "event_hooks": {**own, "request": requests_hooks}}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraError(
            f"{name} is not installed, and this is a hook for it: pip install {name}."
        ) from error
