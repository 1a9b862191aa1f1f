"""What stacks do with deltas: bring to a fake engine what changed since other weights."""

from __future__ import annotations

from rollproof.core.events.rollout import Fault, Weights
from rollproof.core.records import Version
from rollproof.fakes.engine.adapters import AlteredKey
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.harness_acts import acts_for_harness
from rollproof.fakes.engine.transferring import Transferring

__all__ = ["DeltaLoads"]


class DeltaLoads(Transferring):
    """The part of a fake engine that is about deltas. Like real ones, it applies them to whatever
    it has: it does not know from which weights they were made.
    """

    fail_next_load: bool
    _torn: tuple[int, int] | None = None
    """The base and the version of a delta that broke in the middle."""

    async def load_delta(
        self, version: int, base: int, label: Version = None, *, adds: bool = False
    ) -> None:
        """Apply what changed from weights ``base`` to ``version``, like ``load``.

        If the server does not have ``base``, it has weights of no version afterwards, until all
        tensors are loaded. With ``adds`` the delta has differences, which must not be applied
        twice; otherwise it has new values, which may.

        Raises ``TransferFailed`` if ``fail_next_load`` is set: a part of the delta is then applied.
        """
        async with self._transferred():
            self._refuse_dead()
            scheduler = self._scheduler
            if self.fail_next_load:
                self.fail_next_load = False
                self._torn = (base, version)
                torn = AlteredKey(
                    f"a part of a delta from {base} to {version} over {scheduler.key!r}"
                )
                scheduler.reweigh(scheduler.version, torn)
                for kind in ("update-failure", "partial-update"):
                    self._recorder.record(Fault(what=kind, server_id=self.server_id))
                raise TransferFailed(
                    f"The delta to {self.server_id} broke in the middle: it has weights of no"
                    " version now."
                )
            altered = self._altered_by(version, base, adds=adds)
            same = altered is None and scheduler.altered is None and version == scheduler.version
            scheduler.reweigh(version, altered)
            self._torn = None
            scheduler.show(label)
            self._note_published(version, label)
            self._recorder.record(
                Weights(
                    server_id=self.server_id,
                    version=version,
                    label=label,
                    identity=same,
                    flushed=not scheduler.holds_kv,
                    progress=self.progress(),
                    by_harness=acts_for_harness(),
                    delta_of=base,
                )
            )

    def _altered_by(self, version: int, base: int, *, adds: bool) -> AlteredKey | None:
        """Return the key of the weights that a delta makes, unless they are of its version."""
        scheduler = self._scheduler
        if not adds:
            if scheduler.altered is None and scheduler.version in (base, version):
                return None
            if self._torn == (base, version) and scheduler.version == base:
                return None
        elif scheduler.altered is None and scheduler.version == base:
            return None
        return AlteredKey(f"a delta from {base} to {version} over {scheduler.key!r}")
