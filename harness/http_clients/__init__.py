"""Report the samples of a client that speaks HTTP to the fake servers, without a call by hand.

::

    from rollproof.http_clients import httpx_hooks, rollout

    client = httpx.Client(event_hooks=httpx_hooks())


    @rollout  # each call is one request, and what it returns is the sample
    def generate(prompt_ids): ...

The hook says in a header of each call in which rollout it is made; the server sees the call,
and knows its prompt. What is trained on is what the function returns: a hook sees the bytes
that come back, and not what becomes of them. Where ``ROLLPROOF_URL`` is not set, as in production,
nothing is added to any call, and the function runs as it is.

``httpx_hooks`` and ``httpx_async_hooks`` are for httpx, ``openai_http_client`` and
``openai_async_http_client`` for openai, ``requests_adapter`` for requests, ``aiohttp_trace`` for
aiohttp; other clients send ``headers(url)``. Each imports its package when it is called.
"""

from __future__ import annotations

from rollproof.http_clients.client_hooks import (
    aiohttp_trace,
    httpx_async_hooks,
    httpx_hooks,
    openai_async_http_client,
    openai_http_client,
    requests_adapter,
)
from rollproof.http_clients.rollouts import headers, internal, rollout

__all__ = [
    "aiohttp_trace",
    "headers",
    "httpx_async_hooks",
    "httpx_hooks",
    "internal",
    "openai_async_http_client",
    "openai_http_client",
    "requests_adapter",
    "rollout",
]
