"""Reference clients whose weight updates bring deltas, and that compare checksums."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from rollproof.core.contract import Contract, Deltas
from rollproof.core.records import Version
from rollproof.fakes.clients.resuming import AsSampled
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["AsSampledDeltas"]


class AsSampledDeltas(AsSampled):
    """Updates bring what changed since the weights that a server acknowledged, and all tensors now
    and then, or if the server has others. After each update trainer and servers tell checksums.
    """

    deltas: ClassVar[Deltas] = Deltas.ADD
    anchor_every: ClassVar[int] = 3

    def start(self, fleet: Fleet) -> None:
        """Start with the checksums of the first weights."""
        super().start(fleet)
        self._acknowledged: dict[str, int] = {}
        self._since_anchor: dict[str, int] = {}
        self.tell_checksums(fleet.case.first_version)

    def declared(self, fleet: Fleet) -> Contract:
        """Return the contract on this fleet."""
        return replace(super().declared(fleet), deltas=self.deltas)

    async def update_weights(self, version: int | None) -> None:
        """Run the fleet's procedure, and compare."""
        await self.fleet.sync(version, load=self.load)
        self.tell_checksums(version)

    async def load(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Bring weights to a paused server."""
        name, base = server.server_id, self._acknowledged.get(server.server_id)
        count = self._since_anchor.get(name, 0)
        if base is None or not self.holds(server, base) or count + 1 >= self.anchor_every:
            await self.load_anchor(server, weights, label)
        else:
            try:
                await self.load_delta(server, weights, base, label)
                self._since_anchor[name] = count + 1
            except TransferFailed:
                await self.repair(server, weights, label)
        self._acknowledged[name] = weights

    def holds(self, server: FakeEngine, base: int) -> bool:
        """Whether a server has the weights that it acknowledged: it may have been restarted."""
        return server.version == base

    async def load_anchor(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Bring all tensors."""
        await server.load(weights, label)
        self._since_anchor[server.server_id] = 0

    async def repair(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Bring all tensors to a server to which a part of a delta was applied."""
        # the update may not end before: its end resumes the server, with weights of no version
        while True:
            with suppress(TransferFailed):
                await self.load_anchor(server, weights, label)
                return

    async def load_delta(self, server: FakeEngine, weights: int, base: int, label: Version) -> None:
        """Bring what changed."""
        await server.load_delta(weights, base, label, adds=self.deltas is Deltas.ADD)

    def tell_checksums(self, version: int | None) -> None:
        """Let the trainer and its servers tell checksums."""
        self.fleet.checksums(version)
        for server in self.fleet.servers.values():
            if server.alive:
                server.checksums()
