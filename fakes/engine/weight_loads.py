"""What stacks do with the weights of a fake engine: load them, label them, compare checksums."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollproof.core.events.rollout import Fault, Weights
from rollproof.core.events.weights import Checksums
from rollproof.core.records import Version
from rollproof.fakes.engine.adapter_loads import AdapterLoads
from rollproof.fakes.engine.checksums import tensor_checksums
from rollproof.fakes.engine.delta_loads import DeltaLoads
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.harness_acts import acts_for_harness

if TYPE_CHECKING:
    from rollproof.fakes.coded.policy import CodedPolicy

__all__ = ["WeightLoads"]


class WeightLoads(AdapterLoads, DeltaLoads):
    """The part of a fake engine that is about its weights, whatever brings them."""

    policy: CodedPolicy
    _transfer: asyncio.Future[None] | None
    """The end of the transfer that began last."""

    @property
    def version(self) -> int:
        """Return the version of its weights."""
        return self._scheduler.version

    @property
    def label(self) -> Version:
        """Return the label that it shows; ``None`` after an update without one."""
        return self._scheduler.label

    async def load(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        """Load weights ``version`` in a transfer of ``options.transfer_steps`` steps, also while
        calls run, and show ``label``.

        ``None`` as a label: nothing was published for these weights. ``identity`` is ignored:
        versions are equal if and only if weights are. Raises ``TransferFailed`` if
        ``fail_next_load`` is set; the weights then stay.
        """
        async with self._transferred():
            self.load_now(version, label, identity=identity)

    def load_now(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        """Load without letting time pass, for stacks that block while they transfer."""
        self._break_if_planned()
        # a procedure of a user's own does not know what an identity update is, or may be mistaken
        same = version == self.version and self._scheduler.altered is None
        self._scheduler.reweigh(version)
        # a label of the old weights must never be shown for the new ones, so both change here
        self._publish(label, loaded=True, identity=same)

    def relabel(self, label: Version) -> None:
        """Publish ``label``; the weights stay."""
        self._refuse_dead()
        self._publish(label, loaded=False)

    def checksums(self, adapter: str | None = None) -> Mapping[str, str]:
        """Return the checksum of each tensor of the model, or of an adapter, and record that it was
        told.
        """
        self._refuse_dead()
        key: Version = self._scheduler.key
        version = self.version
        if adapter is not None:
            loaded = self._scheduler.adapters.find(adapter)
            key, version = loaded.key(loaded.base), loaded.version
        digests = tensor_checksums(self.policy, key)
        self._recorder.record(
            Checksums(version=version, digests=digests, server_id=self.server_id, adapter=adapter)
        )
        return digests

    @asynccontextmanager
    async def _transferred(self) -> AsyncIterator[None]:
        """Let a transfer take its time, and run the block at its end."""
        self._refuse_dead()
        # Timers of the same moment run in no particular order, and of two transfers to one server
        # the one that began first ends first.
        before, done = self._transfer, asyncio.get_running_loop().create_future()
        self._transfer = done
        try:
            await asyncio.sleep(self.options.transfer_steps * self.options.step)
            if before is not None and not before.done():
                await asyncio.shield(before)
            yield
        finally:
            done.set_result(None)

    def _break_if_planned(self) -> None:
        self._refuse_dead()
        if self.fail_next_load:
            self.fail_next_load = False
            self._recorder.record(Fault(what="update-failure", server_id=self.server_id))
            raise TransferFailed(
                f"The weight transfer to {self.server_id} broke in the middle; it still serves"
                f" version {self.version}."
            )

    def _publish(self, label: Version, *, loaded: bool, identity: bool = False) -> None:
        self._scheduler.show(label)
        self._note_published(self.version, label)
        self._recorder.record(
            Weights(
                server_id=self.server_id,
                version=self.version,
                label=label,
                loaded=loaded,
                identity=identity,
                flushed=not self._scheduler.holds_kv,
                progress=self.progress(),
                by_harness=acts_for_harness(),
            )
        )
