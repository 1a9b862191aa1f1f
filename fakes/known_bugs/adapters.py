"""Known bugs of adapters (LoRA): names, caches and scales."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from rollproof.core.case import ActionKind, EngineOptions
from rollproof.core.contract import Contract, KvPolicy
from rollproof.core.records import EngineOutput, Version
from rollproof.fakes.clients.adapter_clients import AsSampledAdapters
from rollproof.fakes.clients.resuming import PartialSample
from rollproof.fakes.engine.adapters import AdapterTable, LoadedAdapter
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import act, case, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _AdapterKeptUnderItsName(AsSampledAdapters):
    """Loads under the name of before; the engine has an adapter of that name, and keeps it."""

    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        # the return value says so, and nobody reads it
        await server.load_adapter(self.adapter_name, weights, label)


class _AdapterNotNamed(AsSampledAdapters):
    def adapter(self, sample: PartialSample, server: FakeEngine) -> str | None:
        # the adapter is there, and no call asks for it
        return None


class _Versioned(AsSampledAdapters):
    """Each version of the adapter has a name of its own; a sample goes on by the one with which it
    began.
    """

    def start(self, fleet: Fleet) -> None:
        super().start(fleet)
        self._latest = fleet.case.first_version
        self._began: dict[str, str | None] = {}

    def name_of(self, weights: int) -> str:
        """Return the name of an adapter."""
        return f"policy-v{weights}"

    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        if self.name_of(weights) not in server.adapters:
            await server.load_adapter(self.name_of(weights), weights, label)
        self._latest = max(self._latest, weights)

    async def unload(self, server: FakeEngine) -> None:
        for name in list(server.adapters):
            await server.unload_adapter(name)

    def adapter(self, sample: PartialSample, server: FakeEngine) -> str | None:
        latest = self.name_of(self._latest)
        return self._began.setdefault(
            sample.request.request_id, latest if latest in server.adapters else None
        )


class _AdapterNameNotUpdated(_Versioned):
    def adapter(self, sample: PartialSample, server: FakeEngine) -> str | None:
        # the registry of names is filled once
        return next(iter(server.adapters), None)


class _AdapterUnloadedEarly(_Versioned):
    """Unloads the adapter of before as soon as the new one is there."""

    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        before = [name for name in server.adapters if name != self.name_of(weights)]
        await super().load_adapter(server, weights, label)
        for name in before:
            await server.unload_adapter(name)

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        # a wrapper repeats the call by the newest adapter if it is refused
        with suppress(BadCall):
            return await super().call(server_id, sample, sent, budget)
        self._began.pop(sample.request.request_id, None)
        return await super().call(server_id, sample, sent, budget)


class _AdapterCacheByName(AsSampledAdapters):
    """Replaces the adapter in place and leaves the prefix cache, which knows its name alone."""

    def start(self, fleet: Fleet) -> None:
        fleet.clear_cache = False
        super().start(fleet)

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), kv_policy=KvPolicy.RECOMPUTE)


class _AdapterScaledTwice(AsSampledAdapters):
    async def load_adapter(self, server: FakeEngine, weights: int, label: Version) -> None:
        # alpha / rank is in the tensors already, and in the configuration of the adapter, too
        await server.load_adapter(self.adapter_name, weights, label, in_place=True, scale=2.0)


class _ScaledAgain(AdapterTable):
    def reload(self, adapter: LoadedAdapter) -> None:
        # the tensors in memory were scaled in place by the first load
        adapter.scale *= 2.0
        super().reload(adapter)


class _AdapterScaledAfterEviction(AsSampledAdapters):
    def start(self, fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server._scheduler.adapters.__class__ = _ScaledAgain
        super().start(fleet)


class _AdapterOverNewBase(AsSampledAdapters):
    async def unload(self, server: FakeEngine) -> None:
        """Leave the adapter in place: the next update will replace it."""


_LATER = (request(), request("r1", (14, 15)), request("r2", (16, 17)))
_ARRIVALS = (0.0, 30.0, 60.0)
_TWO_UPDATES = case(
    act(ActionKind.SYNC, 3),
    act(ActionKind.SYNC, 3, "r1"),
    requests=_LATER,
    arrivals=_ARRIVALS,
)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="adapter-kept-under-its-name",
        summary=(
            "The new adapter is loaded under the name of the old one, which the engine keeps: the"
            " load is ignored."
        ),
        refs=("cf. SkyRL#1606", "cf. vllm#31326"),
        make=_AdapterKeptUnderItsName,
        cases=(_TWO_UPDATES,),
        detected_by=("weights.update-loads",),
    ),
    KnownBug(
        id="adapter-not-named",
        summary="The adapter is loaded, and no call names it: the base model samples.",
        refs=("cf. verl#7495",),
        make=_AdapterNotNamed,
        cases=(_TWO_UPDATES,),
        detected_by=("weights.adapter-current",),
    ),
    KnownBug(
        id="adapter-name-not-updated",
        summary="The new adapter has a new name, and calls go on to name the first one.",
        refs=("AReaL#1021", "cf. SkyRL#2064"),
        make=_AdapterNameNotUpdated,
        cases=(_TWO_UPDATES,),
        detected_by=("weights.adapter-current",),
    ),
    KnownBug(
        id="adapter-unloaded-early",
        summary="The old adapter is unloaded while rollouts that began with it go on.",
        refs=("TRL#7017",),
        make=_AdapterUnloadedEarly,
        cases=(
            case(
                act(ActionKind.SYNC, 2),
                act(ActionKind.SYNC, 3, "r1"),
                requests=_LATER[:2],
                arrivals=(0.0, 30.0),
            ),
        ),
        detected_by=("weights.adapter-loaded",),
    ),
    KnownBug(
        id="adapter-cache-by-name",
        summary=(
            "The adapter is replaced under its name, and the prefix cache gives out KV of the old"
            " one."
        ),
        refs=("vllm#42125", "vllm#30931", "ms-swift#6343"),
        make=_AdapterCacheByName,
        cases=(
            case(
                act(ActionKind.SYNC, 3),
                act(ActionKind.SYNC, 3, "r1"),
                requests=(
                    request(),
                    request("r1", (14, 15, 16)),
                    request("r2", (14, 15, 17)),
                ),
                arrivals=_ARRIVALS,
                engine=EngineOptions(prefix_cache=True),
            ),
        ),
        detected_by=("weights.no-stale-cache",),
        may_fail=("routes.prefix-cache",),
    ),
    KnownBug(
        id="adapter-scaled-twice",
        summary="alpha / rank is multiplied into the tensors, and applied again by the engine.",
        refs=("cf. UniRL#155",),
        make=_AdapterScaledTwice,
        cases=(_TWO_UPDATES,),
        detected_by=("weights.adapter-applied",),
    ),
    KnownBug(
        id="adapter-scaled-after-eviction",
        summary=(
            "An evicted adapter is rebuilt from tensors that the first load had scaled in place,"
            " and scaled again."
        ),
        refs=("SkyRL#2250",),
        make=_AdapterScaledAfterEviction,
        cases=(
            case(
                act(ActionKind.SYNC, 3),
                act(ActionKind.EVICT_ADAPTERS, 3, "r1"),
                requests=_LATER,
                arrivals=_ARRIVALS,
            ),
        ),
        detected_by=("weights.adapter-applied",),
    ),
    KnownBug(
        id="adapter-over-new-base",
        summary="The base model is updated, and calls go on to name the adapter of the old one.",
        refs=("cf. prime-rl#3358",),
        make=_AdapterOverNewBase,
        cases=(
            case(
                act(ActionKind.SYNC, 3),
                act(ActionKind.SYNC_MERGED, 3, "r1"),
                requests=_LATER,
                arrivals=_ARRIVALS,
            ),
        ),
        detected_by=("weights.adapter-applied",),
    ),
)
