"""What stacks do with the adapters of a fake engine: load, replace, unload."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import Weights
from rollproof.core.records import Version
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.engine.harness_acts import acts_for_harness
from rollproof.fakes.engine.transferring import Transferring

if TYPE_CHECKING:
    from rollproof.core.case import EngineOptions
    from rollproof.fakes.engine.flavours import Flavour
    from rollproof.fakes.engine.inflight import InflightCall

__all__ = ["AdapterLoads"]


class AdapterLoads(Transferring):
    """The part of a fake engine that is about adapters."""

    flavour: Flavour
    options: EngineOptions

    @property
    @abstractmethod
    def in_flight(self) -> tuple[InflightCall, ...]:
        """Return the calls without a reply."""

    @abstractmethod
    def _break_if_planned(self) -> None:
        """Raise ``TransferFailed`` if this transfer is to break."""

    async def load_adapter(
        self,
        name: str,
        version: int,
        label: Version = None,
        *,
        in_place: bool = False,
        scale: float = 1.0,
    ) -> bool:
        """Load the adapter of ``version`` under ``name``, like ``load``, and return whether the
        server has it.

        If the name is in use, the load is ignored and the server keeps the adapter that it has (as
        vLLM's ``add_lora`` does), unless it is replaced ``in_place``; a flavour without that
        raises. KV of the old adapter stays in the prefix cache, and calls that run under it go on
        under the new one.

        Args:
            name: By which calls name it.
            version: The weights, as for ``load``.
            label: Shown for calls that it serves.
            in_place: Replace the adapter that has the name.
            scale: The scale at which it is applied, as a multiple of its own.

        Raises:
            BadCall: The name is empty, or in use and the flavour cannot replace adapters.
            TransferFailed: As ``load``.
        """
        async with self._transferred():
            return self._load_adapter(name, version, label, in_place, scale)

    async def unload_adapter(self, name: str) -> None:
        """Forget the adapter of that name; calls that it serves go on. A flavour that cannot
        replace adapters waits until they have ended.

        Raises ``BadCall`` if no adapter has the name.
        """
        self._refuse_dead()
        adapter = self._scheduler.adapters.unload(name)
        served = [
            call.future for call in self.in_flight if call.adapter is adapter and call.started
        ]
        if served and not self.flavour.adapters_in_place:
            await asyncio.wait(served)

    def evict_adapters(self) -> None:
        """Let every adapter make room until a call needs it."""
        for name in list(self._scheduler.adapters.loaded):
            self._scheduler.adapters.evict(name)

    def trained_on(self, base_of: Callable[[int], int]) -> None:
        """Ask ``base_of`` on which base model the adapter of a version was trained."""
        self._scheduler.adapters.trained_on = base_of

    def restore_adapters(self, others: Sequence[AdapterLoads]) -> None:
        """Hold the adapters of that one of ``others`` that has the newest; without others, those
        that this server had.
        """
        own = self._scheduler.adapters
        newest = max(
            others, key=lambda other: max(other.adapters.values(), default=-1), default=self
        )
        adapters = list(newest._scheduler.adapters.loaded.values())
        own.loaded.clear()
        for adapter in adapters:
            self._add_adapter(adapter.name, adapter.version, adapter.label, scale=1.0)

    @property
    def adapters(self) -> Mapping[str, int]:
        """Return the versions of its adapters, by name."""
        loaded = self._scheduler.adapters.loaded
        return {name: adapter.version for name, adapter in loaded.items()}

    def _load_adapter(
        self, name: str, version: int, label: Version, in_place: bool, scale: float
    ) -> bool:
        self._break_if_planned()
        if not name:
            raise BadCall("An adapter needs a name: calls name it.")
        table = self._scheduler.adapters
        held = table.loaded.get(name)
        if held is not None and not self.flavour.adapters_in_place:
            raise BadCall(
                f"LoRA with name {name!r} is already loaded on {self.server_id}: unload it first."
            )
        if held is not None and not in_place:
            table.ignore(name, version)
            return False
        self._add_adapter(name, version, label, scale)
        return True

    def _add_adapter(self, name: str, version: int, label: Version, scale: float) -> None:
        table = self._scheduler.adapters
        held, adapter = table.loaded.get(name), table.make(name, version, label, scale)
        same = held is not None and (held.version, held.scale) == (version, scale)
        if held is None:
            table.loaded[name] = adapter
        else:
            self._scheduler.replace_adapter(held, adapter)
        self._note_published(version, label)
        self._recorder.record(
            Weights(
                server_id=self.server_id,
                version=version,
                label=label,
                identity=same,
                flushed=not self._scheduler.holds_kv,
                progress=self.progress(),
                by_harness=acts_for_harness(),
                adapter=name,
                base=adapter.base,
                true_scale=scale,
            )
        )
