"""The fake servers that a client may call: what the environment says of them.

``rollproof serve --run`` and the fixtures ``rollproof_sglang`` and ``rollproof_vllm`` set the
variables, which the processes that a client starts inherit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

__all__ = ["SERVERS", "URL", "address_of", "environment", "known_servers"]

URL = "ROLLPROOF_URL"
"""The address to call: that of the server, or of the router before several."""
SERVERS = "ROLLPROOF_SERVERS"
"""All addresses, with commas: also those of the servers behind a router."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def environment(urls: Sequence[str]) -> Mapping[str, str]:
    """Return the variables for a client of servers at ``urls``, the one to call first.

    Those of the openai client are among them; its key may be any text. A proxy that the environment
    names, as on many clusters, is not used for this machine.
    """
    return {
        URL: urls[0],
        SERVERS: ",".join(urls),
        "OPENAI_BASE_URL": f"{urls[0]}/v1",
        "OPENAI_API_KEY": "rollproof",
        # clients differ in which of the two spellings they read
        **{name: _without_proxy(os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")},
    }


def _without_proxy(hosts: str) -> str:
    """Return a list of hosts that no proxy is used for, with this machine among them."""
    listed = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join(dict.fromkeys([*listed, *sorted(_LOOPBACK)]))


def known_servers() -> tuple[str, ...]:
    """Return the addresses of the fake servers, the one to call first; none in production."""
    found = [os.environ.get(URL, ""), *os.environ.get(SERVERS, "").split(",")]
    return tuple(dict.fromkeys(url.strip().rstrip("/") for url in found if url.strip()))


def address_of(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL; the names of this machine are one."""
    parts: SplitResult = urlsplit(url)
    host = (parts.hostname or "").lower()
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:  # no number: no address of ours
        port = 0
    return "127.0.0.1" if host in _LOOPBACK else host, port
