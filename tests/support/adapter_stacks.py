"""Unusual and correct stacks whose updates bring adapters."""

from __future__ import annotations

from rollproof.core.records import Version
from rollproof.fakes.clients.adapter_clients import AsSampledAdapters
from rollproof.fakes.clients.resuming import PartialSample
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet

__all__ = ["NamedByVersion", "UnloadedFirst"]


class NamedByVersion(AsSampledAdapters):
    """Each version of the adapter has a name of its own. A sample ends by the adapter with which it
    began, which is unloaded once no sample needs it (TRL, Tinker).
    """

    def start(self, fleet: Fleet) -> None:
        """Start without an adapter."""
        super().start(fleet)
        self._latest = fleet.case.first_version
        self._began: dict[str, str] = {}

    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Load the new adapter next to those that are in use."""
        name = f"policy-v{weights}"
        if name not in server.adapters:
            await server.load_adapter(name, weights, label)
        self._latest = weights
        for other in server.adapters:
            if other != name and other not in self._began.values():
                await server.unload_adapter(other)

    async def unload(self, server: FakeEngine) -> None:
        """Forget all adapters: they were trained on another base model."""
        for name in list(server.adapters):
            await server.unload_adapter(name)
        self._latest = server.version

    async def run(self, sample: PartialSample) -> bool:
        """Remember by which adapter the sample goes on, until it ends."""
        try:
            return await super().run(sample)
        finally:
            self._began.pop(sample.request.request_id, None)

    def adapter(self, sample: PartialSample, server: FakeEngine) -> str | None:
        """Return the adapter that the sample began with, the newest one if the server lacks it."""
        began = self._began.get(sample.request.request_id)
        if began in server.adapters:
            return began
        newest = max(server.adapters, key=server.adapters.__getitem__, default=None)
        if newest is not None:
            self._began[sample.request.request_id] = newest
        return newest


class UnloadedFirst(AsSampledAdapters):
    """Unloads the adapter, and loads the new one under its name (SkyRL)."""

    adapter_name = "skyrl-lora"

    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        """Unload, and load."""
        await self.unload(server)
        await server.load_adapter(self.adapter_name, weights, label)
