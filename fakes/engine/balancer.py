"""A load balancer that sends each call to the server with the fewest calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollproof.errors import UsageError

__all__ = ["Balancer"]


class Balancer:
    """Picks the least loaded server; among equals, the first of ``servers``."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._load = dict.fromkeys(servers, 0)
        self._left: set[str] = set()

    @property
    def load(self) -> dict[str, int]:
        """Return the calls acquired and not released, by server."""
        return dict(self._load)

    @property
    def left(self) -> frozenset[str]:
        """Return the servers that get no new calls, as long as others do."""
        return frozenset(self._left)

    def leave(self, server: str) -> None:
        """Send no new calls to a server, unless every server has left; those that run go on."""
        self._left.add(server)

    def join(self, server: str) -> None:
        """Send calls to a server again."""
        self._left.discard(server)

    def acquire(self, avoid: Collection[str] = ()) -> str:
        """Count one call for a server and return its id; avoid those in ``avoid`` if possible,
        and, before them, those that left.
        """
        server = min(
            self._load,
            key=lambda name: (name in self._left, name in avoid, self._load[name]),
        )
        self.count(server)
        return server

    def count(self, server: str) -> None:
        """Count one call for a server that somebody else has chosen."""
        self._load[server] += 1

    def release(self, server: str) -> None:
        """Release one call of a server. Raises ``UsageError`` if it has none."""
        if self._load.get(server, 0) < 1:
            raise UsageError(
                f"Server {server!r} has no acquired call to release; acquired are {self._load}."
            )
        self._load[server] -= 1

    def gauges(self) -> dict[str, float]:
        """Return the calls acquired and not released, as gauges."""
        return {f"balancer/{server}": float(count) for server, count in self._load.items()}
