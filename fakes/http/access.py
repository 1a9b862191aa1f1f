"""Who may use a fake server that listens on a port: programs of this machine, or whoever has its
token.

A port of this machine is open to every web page that its user looks at: a browser sends what the
page asks for. So requests that a page sent are refused, and those for a name that is not this
machine's (a name of an attacker may lead here, too: DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollproof.errors import UsageError

__all__ = ["Access", "Guard"]

_SAME_PAGE = (b"same-origin", b"none")
"""What a browser says of requests that no other page made it send (``Sec-Fetch-Site``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Where a server listens, and what its clients must send.

    Attributes:
        host: the address or name to listen on.
        token: what clients send as ``Authorization: Bearer TOKEN``; ``None``: nothing.

    Raises:
        UsageError: other machines could reach the server, and it has no token.
    """

    host: str = "127.0.0.1"
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise UsageError("--token must be printable ASCII, as headers are.")
        if not self.token and not _is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} lets other machines in, and whoever reaches a fake server can"
                " change its weights: add --token TOKEN, which clients send as an API key"
                " (Authorization: Bearer TOKEN)."
            )


class Guard:
    """An ASGI application that answers requests which ``access`` does not allow, and hands on the
    others to ``app``.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._key = None if not access.token else f"Bearer {access.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, text = refusal
        body = {"error": {"message": text, "type": "rollproof", "code": status}}
        # the body was not read, so the connection cannot be used again
        await JSONResponse(body, status, {"connection": "close"})(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and text for a request that is not allowed."""
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"")
        if self._key is not None:
            key = headers.get(b"authorization", b"")
            if not hmac.compare_digest(key, self._key):
                return 401, "This fake server has a token: send Authorization: Bearer TOKEN."
        elif host and not _is_own(host):
            return 421, (
                f"This fake server answers requests to this machine's own address, not to"
                f" {host.decode('latin-1')!r}: call it by 127.0.0.1 or localhost, or start it with"
                " --host and --token."
            )
        origin = headers.get(b"origin")
        site = headers.get(b"sec-fetch-site", b"none")
        if site not in _SAME_PAGE or (origin is not None and origin != b"http://" + host):
            return 403, "This fake server takes no requests that a web page sends."
        return None


@lru_cache(maxsize=64)  # four fifths of the time of a request's checks
def _is_own(host: bytes) -> bool:
    """Return whether a header ``Host`` names this machine and no other, whatever the port."""
    try:
        return _is_loopback(urlsplit(f"//{host.decode('latin-1')}").hostname or "")
    except ValueError:
        return False


def _is_loopback(name: str) -> bool:
    """Return whether a name is this machine's and no other's."""
    # localhost and names below it never leave a machine (RFC 6761)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
