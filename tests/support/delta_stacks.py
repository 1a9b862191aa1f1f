"""Unusual and correct stacks whose updates bring deltas."""

from __future__ import annotations

from typing import ClassVar

from rollproof.core.contract import Deltas
from rollproof.core.records import Version
from rollproof.fakes.clients.delta_clients import AsSampledDeltas
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.fake_engine import FakeEngine

__all__ = ["AnchorsOnly", "RepeatsDeltas"]


class RepeatsDeltas(AsSampledDeltas):
    """Its deltas have new values: one that broke is sent again, and so is one that got through, to
    be sure.
    """

    deltas: ClassVar[Deltas] = Deltas.OVERWRITE

    async def load_delta(self, server: FakeEngine, weights: int, base: int, label: Version) -> None:
        """Send it until it got through, and once more."""
        try:
            await super().load_delta(server, weights, base, label)
        except TransferFailed:
            await super().load_delta(server, weights, base, label)
        await super().load_delta(server, weights, base, label)


class AnchorsOnly(AsSampledDeltas):
    """May send deltas, and never has a reason to."""

    anchor_every: ClassVar[int] = 1
