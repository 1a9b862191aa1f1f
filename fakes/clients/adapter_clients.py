"""Reference clients whose weight updates bring adapters (LoRA)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from rollproof.core.contract import Adapters, Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import EngineOutput, Version
from rollproof.fakes.clients.resuming import FROZEN, AsSampled, PartialSample
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["AsSampledAdapters"]


class AsSampledAdapters(AsSampled):
    """Updates bring an adapter, always under one name. When the trainer has merged its adapter into
    its base model, the update brings that, and calls name no adapter until the next one is there.
    """

    adapter_name: ClassVar[str] = "policy"

    def start(self, fleet: Fleet) -> None:
        """Start with the base model."""
        super().start(fleet)
        self._updates = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._base_labels: dict[int, Version] = {}

    def pause_mode(self, fleet: Fleet) -> PauseMode:
        """Return a mode after which no call goes on by an adapter that was replaced."""
        return PauseMode.ABORT if fleet.pause_mode in FROZEN else super().pause_mode(fleet)

    def declared(self, fleet: Fleet) -> Contract:
        """Return the contract on this fleet."""
        return replace(super().declared(fleet), adapters=Adapters.MOVING_BASE)

    async def update_weights(self, version: int | None) -> None:
        """Run the fleet's procedure; no call is sent meanwhile."""
        # a server would park it, and serve it afterwards by the adapter that it named before
        self._updates += 1
        self._quiet.clear()
        try:
            await self.fleet.sync(version, load=self.load)
        finally:
            self._updates -= 1
            if not self._updates:
                self._quiet.set()

    async def load(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Bring weights to a paused server."""
        base = self.fleet.base_of(weights)
        if base == weights:
            self._base_labels[base] = label
            await server.load(base, label)
            await self.unload(server)
            return
        # a server that was down when the base model changed
        if server.version != base:
            await server.load(base, self._base_labels.get(base))
        await self.load_adapter(server, weights, label)

    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Bring an adapter to a paused server."""
        if not server.flavour.adapters_in_place:
            await self.unload(server)
        await server.load_adapter(self.adapter_name, weights, label, in_place=True)

    async def unload(self, server: FakeEngine) -> None:
        """Let a server forget the adapter."""
        if self.adapter_name in server.adapters:
            await server.unload_adapter(self.adapter_name)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        """Call one server when no update runs."""
        await self._quiet.wait()
        return await super().call(server_id, sample, sent, budget)

    def adapter(self, sample: PartialSample, server: FakeEngine) -> str | None:
        """Return the adapter, if the server has it."""
        return self.adapter_name if self.adapter_name in server.adapters else None
