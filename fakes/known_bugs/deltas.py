"""Known bugs of deltas, and of the checksums that are to show them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rollproof.core.case import ActionKind
from rollproof.core.events.weights import Checksums
from rollproof.core.records import Version
from rollproof.fakes.clients.delta_clients import AsSampledDeltas
from rollproof.fakes.engine.checksums import tensor_checksums
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.known_bugs._planting import act, case, on_engine, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _DeltaOnOtherWeights(AsSampledDeltas):
    def holds(self, server: FakeEngine, base: int) -> bool:
        # what the server acknowledged once is taken for what it has now
        return True


class _DeltaAppliedTwice(AsSampledDeltas):
    async def load_delta(self, server: FakeEngine, weights: int, base: int, label: Version) -> None:
        await super().load_delta(server, weights, base, label)
        # the acknowledgement of the first try came too late
        if weights == 2:
            await super().load_delta(server, weights, base, label)


class _PartialUpdateServed(AsSampledDeltas):
    async def load(self, server: FakeEngine, weights: int, label: Version) -> None:
        base = self._acknowledged.pop(server.server_id, None)
        if base is None:
            await self.load_anchor(server, weights, label)
        else:
            # if this breaks, the update fails and its servers are resumed until the next one
            await self.load_delta(server, weights, base, label)
        self._acknowledged[server.server_id] = weights


class _WrongDigests(FakeEngine):
    """Tells other checksums than those of its tensors."""

    def checksums(self, adapter: str | None = None) -> Mapping[str, str]:
        digests = {**tensor_checksums(self.policy, self._scheduler.key), **self.wrong()}
        self._recorder.record(
            Checksums(version=self.version, digests=digests, server_id=self.server_id)
        )
        return digests

    def wrong(self) -> Mapping[str, str]:
        """Return the checksums that are wrong: each bug has its own."""
        raise NotImplementedError(f"{type(self).__name__} must override ``wrong``")


class _ChecksumOfNothing(_WrongDigests):
    def wrong(self) -> Mapping[str, str]:
        # the parameter is an empty placeholder: its weights are packed for the kernel
        return {"layers.0.mlp.gate.weight": hashlib.sha256(b"").hexdigest()}


class _TensorNotLoaded(_WrongDigests):
    def wrong(self) -> Mapping[str, str]:
        # the loader takes it for a tied weight, and skips it
        return {"lm_head.weight": tensor_checksums(self.policy, 0)["lm_head.weight"]}


def _requests(count: int) -> dict[str, Any]:
    return {
        "requests": tuple(request(f"r{i}", (14 + i, 15)) for i in range(count)),
        "arrivals": tuple(30.0 * i for i in range(count)),
    }


_TWO_UPDATES = case(act(ActionKind.SYNC, 3), act(ActionKind.SYNC, 3, "r1"), **_requests(3))

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="delta-on-other-weights",
        summary=(
            "A delta is applied to a server that was given other weights than its base meanwhile."
        ),
        refs=("SkyRL#1902", "cf. TRL#5932"),
        make=_DeltaOnOtherWeights,
        cases=(
            case(
                act(ActionKind.SYNC, 3),
                act(ActionKind.SKEW, 3, "r1", server="s0"),
                act(ActionKind.SYNC, 3, "r2"),
                servers=2,
                **_requests(4),
            ),
        ),
        detected_by=("weights.delta-base",),
        may_fail=("weights.checksums-agree",),
    ),
    KnownBug(
        id="delta-applied-twice",
        summary="A delta of differences is applied again by a retry.",
        refs=("cf. SkyRL#1903",),
        make=_DeltaAppliedTwice,
        cases=(_TWO_UPDATES,),
        detected_by=("weights.delta-base",),
        may_fail=("weights.checksums-agree",),
    ),
    KnownBug(
        id="partial-update-served",
        summary="A delta breaks in the middle, and the server is resumed with what it has.",
        refs=("TRL#5932",),
        make=_PartialUpdateServed,
        cases=(case(act(ActionKind.SYNC, 3), act(ActionKind.SYNC_FAILS, 3, "r1"), **_requests(3)),),
        detected_by=("weights.partial-update-unserved",),
    ),
    KnownBug(
        id="checksum-of-nothing",
        summary="The checksum of a packed weight is that of its empty placeholder.",
        refs=("cf. vllm#52689",),
        make=on_engine(_ChecksumOfNothing, AsSampledDeltas),
        cases=(_TWO_UPDATES,),
        detected_by=("weights.checksums-can-differ",),
    ),
    KnownBug(
        id="tensor-not-loaded",
        summary="One tensor is skipped by the loader, and keeps its first value.",
        refs=("cf. verl#6666",),
        make=on_engine(_TensorNotLoaded, AsSampledDeltas),
        cases=(_TWO_UPDATES,),
        detected_by=("weights.checksums-agree",),
    ),
)
