"""Report the samples of a client that speaks HTTP to the fake servers, without a call by hand.

::

    from rollproof.http_clients import httpx_transport, rollout

    client = httpx.Client(transport=httpx_transport())


    @rollout  # each call is one request, and what it returns is the sample
    def generate(prompt_ids): ...

The transport says in a header of each call in which rollout it is made; the server sees the call,
and knows its prompt. What is trained on is what the function returns: a transport sees the bytes
that come back, and not what becomes of them. Where ``ROLLPROOF_URL`` is not set, as in production,
nothing is added to any call, and the function runs as it is.

``httpx_transport`` and ``httpx_async_transport`` are for httpx, ``openai_http_client`` and
``openai_async_http_client`` for openai, ``requests_adapter`` for requests, ``aiohttp_trace`` for
aiohttp; other clients send ``headers(url)``. Each imports its package when it is called.
"""

from __future__ import annotations

from rollproof.http_clients.rollouts import headers, internal, rollout
from rollproof.http_clients.transports import (
    aiohttp_trace,
    httpx_async_transport,
    httpx_transport,
    openai_async_http_client,
    openai_http_client,
    requests_adapter,
)

__all__ = [
    "aiohttp_trace",
    "headers",
    "httpx_async_transport",
    "httpx_transport",
    "internal",
    "openai_async_http_client",
    "openai_http_client",
    "requests_adapter",
    "rollout",
]
