"""Known bugs of weight updates: leaking gates, caches that outlive their weights, updates that
interleave.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from rollproof.core.case import ActionKind, EngineOptions
from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Abort
from rollproof.core.records import FinishReason, Version
from rollproof.fakes.clients.reference_clients import AsSampled, EngineKeep
from rollproof.fakes.engine.exceptions import TransferFailed
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.known_bugs._planting import SYNCED, act, case, on_engine, request
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _NoResumeAfterFailure(AsSampled):
    """A weight update step by step, without the lock and the ``finally`` of the fleet's own."""

    def replicas(self) -> list[FakeEngine]:
        """Return the servers that are updated."""
        return list(self.fleet.servers.values())

    async def update_weights(self, version: int | None) -> None:
        await asyncio.gather(
            *(
                server.pause(self.fleet.pause_mode, self.fleet.clear_cache)
                for server in self.replicas()
            )
        )
        # an error here leaves all servers paused
        await asyncio.gather(*(self.load(server, version) for server in self.replicas()))
        for server in self.resumed():
            await server.resume()

    async def load(self, server: FakeEngine, version: int | None) -> None:
        """Load the weights on one server."""
        await server.load(self.fleet.weights_of(version), version)

    def resumed(self) -> list[FakeEngine]:
        """Return the servers that are resumed."""
        return self.replicas()


class _LoadsUnpaused(EngineKeep):
    async def update_weights(self, version: int | None) -> None:
        # the pause would have been here
        weights = self.fleet.weights_of(version)
        for server in self.fleet.servers.values():
            await server.load(weights, version)


# An update, and a request that comes after it.
_FOLLOWED = case(
    act(ActionKind.SYNC, 3), requests=(request(), request("r1", (14, 15))), arrivals=(0.0, 20.0)
)


_TWICE_FOLLOWED = replace(_FOLLOWED, actions=(act(ActionKind.SYNC_TWICE, 3),))


class _LabelWithoutWeights(_NoResumeAfterFailure):
    async def load(self, server: FakeEngine, version: int | None) -> None:
        # the label changes, the weights do not
        server.relabel(version)


class _UpdateRaises(AsSampled):
    async def update_weights(self, version: int | None) -> None:
        # the process groups of the server were never made
        groups: list[int] = []
        await self.fleet.sync(version if version is None else version + groups[0])


class _SyncSkipped(AsSampled):
    async def update_weights(self, version: int | None) -> None:
        """Do nothing: the flag that frees the cache is off."""


class _UpdateNotAwaited(AsSampled):
    async def update_weights(self, version: int | None) -> None:
        # the trainer goes on at once
        self._transfer = asyncio.ensure_future(self.fleet.sync(version))


class _PreviousCheckpointLoaded(AsSampled):
    """Loads what the link to the latest checkpoint still points to."""

    _latest: int | None = None

    async def update_weights(self, version: int | None) -> None:
        before, self._latest = self._latest, version
        weights = self.fleet.weights_of(before) if before is not None else 0
        servers = list(self.fleet.servers.values())
        for server in servers:
            await server.pause()
        for server in servers:
            await server.load(weights, version)
            await server.resume()


class _UpdateInProgressReturns(AsSampled):
    _running = False

    async def update_weights(self, version: int | None) -> None:
        if self._running:
            return
        self._running = True
        try:
            await self.fleet.sync(version)
        finally:
            self._running = False


class _MergedWithOlderUpdate(AsSampled):
    """Updates that are asked for at once share one load: that of the first one."""

    _load: asyncio.Task[None] | None = None

    async def update_weights(self, version: int | None) -> None:
        if self._load is None or self._load.done():
            self._load = asyncio.ensure_future(self.fleet.sync(version))
        await self._load


class _FailedTransferSwallowed(_NoResumeAfterFailure):
    async def load(self, server: FakeEngine, version: int | None) -> None:
        # an exception handler logs the error, and the update goes on
        with suppress(TransferFailed):
            await super().load(server, version)


class _OneReplicaUpdated(_NoResumeAfterFailure):
    def replicas(self) -> list[FakeEngine]:
        # the other replicas keep the old weights
        return super().replicas()[:1]


class _ReplicaNotResumed(_NoResumeAfterFailure):
    def resumed(self) -> list[FakeEngine]:
        # in vLLM the flag to resume was local to one data-parallel rank
        return self.replicas()[:1]


class _UpdatesInterleave(_NoResumeAfterFailure):
    """The older of two transfers takes longer, and overwrites the newer one."""

    async def load(self, server: FakeEngine, version: int | None) -> None:
        # version 1 arrives after version 2
        await asyncio.sleep(3.0 if version == 1 else 0.0)
        await super().load(server, version)


class _UpdateRunsTwice(AsSampled):
    """A timeout starts the update anew, and nobody cancels it when the first one gets through."""

    _retry: asyncio.Task[None] | None = None

    async def update_weights(self, version: int | None) -> None:
        await self.fleet.sync(version)
        self._retry = asyncio.ensure_future(self.fleet.sync(version))


class _UpdateNeverEnds(AsSampled):
    async def update_weights(self, version: int | None) -> None:
        await self.fleet.sync(version)
        # no acknowledgement resolves this future
        await asyncio.get_running_loop().create_future()


class _StalenessOfLastCall(AsSampled):
    """Promises a bound on staleness, and counts from the version of the last call."""

    def declared(self, fleet: Fleet) -> Contract:
        return replace(super().declared(fleet), max_staleness=1)


class _InFlightAcrossRefit(AsSampled):
    """Loads without a pause: calls in flight continue under the new weights."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.load(self.fleet.weights_of(version), version)


class _ResumedBeforeLoad(EngineKeep):
    """Frozen calls go on while the weights are still on their way."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.pause(self.fleet.pause_mode, self.fleet.clear_cache)
            await server.resume()
            await server.load(self.fleet.weights_of(version), version)


class _AdmitsWhilePaused(FakeEngine):
    """Acknowledges a pause but admits new calls."""

    async def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> None:
        await super().pause(mode, clear_cache)
        # calls of before the pause were dealt with; the gate itself stays open
        self._pause = None


class _SamplesWhilePaused(FakeEngine):
    """The pause does not reach the worker that runs the calls."""

    def _has_work(self) -> bool:
        # with two tokenizer workers only one of them knew of the pause
        return self.alive and bool(self.in_flight)

    async def load(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        # long enough for the worker to sample under the old weights
        await asyncio.sleep(2 * self.options.step)
        await super().load(version, label, identity=identity)


class _OldAdapterServed(FakeEngine):
    """Registers the new weights, but the name that calls use still points to the old ones."""

    async def load(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        old = self.version
        await super().load(version, label, identity=identity)
        self._scheduler.reweigh(old)


class _WeightsLostOnWake(FakeEngine):
    """Waking up after the update restores memory that was not filled."""

    async def resume(self) -> None:
        await super().resume()
        if self.version:
            self._scheduler.reweigh(-1)


class _CacheResetRefused(FakeEngine):
    """Skips the cache reset while calls run, and reports success."""

    async def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> None:
        running, self._scheduler.running = self._scheduler.running, {}
        await super().pause(mode, clear_cache)
        self._scheduler.running = running


class _LabelAbortsCalls(FakeEngine):
    """The endpoint that publishes a label aborts everything by default."""

    def relabel(self, label: Version) -> None:
        calls = self.in_flight
        self._recorder.record(
            Abort(
                server_id=self.server_id, wanted="*", call_ids=tuple(call.call_id for call in calls)
            )
        )
        super().relabel(label)
        # as SGLang does unless abort_all_requests is switched off
        for call in calls:
            self._scheduler.end(call, FinishReason.ABORT)


class _ReloadNotRepeatable(FakeEngine):
    """Loading the same weights again permutes them again."""

    async def load(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        again = version == self.version
        await super().load(version, label, identity=identity)
        if again:
            self._scheduler.reweigh(version + 1000)


_PAIR = (request(), request("r1", (31, 32, 33)))
_SYNC_AT_3 = act(ActionKind.SYNC, 3)
_TWO_SERVERS = case(_SYNC_AT_3, requests=_PAIR, servers=2)
_TWO_SERVERS_FOLLOWED = case(
    _SYNC_AT_3,
    requests=(*_PAIR, request("r2", (41, 42)), request("r3", (51, 52))),
    arrivals=(0.0, 0.0, 12.0, 12.0),
    servers=2,
)
_LATE_ARRIVAL = case(_SYNC_AT_3, requests=_PAIR, arrivals=(0.0, 3.5))
_TWICE = case(act(ActionKind.SYNC_TWICE, 3))

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="admits-while-paused",
        summary=(
            "Calls that come through another entry point are admitted while the server is paused."
        ),
        refs=("AReaL#1618",),
        make=on_engine(_AdmitsWhilePaused),
        cases=(_LATE_ARRIVAL,),
        detected_by=("weights.no-admission-while-paused",),
    ),
    KnownBug(
        id="samples-while-paused",
        summary="The pause is acknowledged, but the worker continues to sample.",
        refs=("sglang#24445",),
        make=on_engine(_SamplesWhilePaused, EngineKeep),
        cases=(case(_SYNC_AT_3, pause_mode=PauseMode.IN_PLACE, clear_cache=False),),
        detected_by=("weights.no-token-while-paused",),
    ),
    KnownBug(
        id="loads-unpaused",
        summary="Weights are broadcast to servers that were not paused, and sample meanwhile.",
        refs=("SkyRL#1212",),
        make=_LoadsUnpaused,
        cases=(case(_SYNC_AT_3, pause_mode=PauseMode.KEEP, clear_cache=False),),
        detected_by=("weights.no-load-while-running",),
    ),
    KnownBug(
        id="old-adapter-served",
        summary="The update is acknowledged, but the old weights are still served.",
        refs=("AReaL#1021", "NeMo-RL#2895", "vllm#48312"),
        make=on_engine(_OldAdapterServed),
        cases=(SYNCED,),
        detected_by=("weights.served-after-update",),
        may_fail=("versions.engine-tags",),
    ),
    KnownBug(
        id="weights-lost-on-wake",
        summary=(
            "The server sleeps during the update and wakes up with memory that does not contain"
            " the weights."
        ),
        refs=("TRL#5312", "TRL#5313"),
        make=on_engine(_WeightsLostOnWake),
        cases=(SYNCED,),
        detected_by=("weights.served-after-update",),
    ),
    KnownBug(
        id="cache-reset-refused",
        summary=(
            "The KV cache is reported as reset while running calls still use it: they read KV of"
            " older weights."
        ),
        refs=("NeMo-RL#3929",),
        make=on_engine(_CacheResetRefused, EngineKeep),
        cases=(case(_SYNC_AT_3, pause_mode=PauseMode.KEEP),),
        detected_by=("weights.no-stale-cache",),
    ),
    KnownBug(
        id="label-aborts-calls",
        summary="Publishing a version label aborts every call in flight.",
        refs=("miles#2372", "miles#2589", "miles#2296"),
        make=on_engine(_LabelAbortsCalls),
        cases=(case(act(ActionKind.RELABEL, 3)),),
        detected_by=("weights.label-only-keeps-calls",),
    ),
    KnownBug(
        id="reload-not-repeatable",
        summary="Loading equal weights again changes the engine's values.",
        refs=("sglang#14178", "SkyRL#1680", "SkyRL#1737"),
        make=on_engine(_ReloadNotRepeatable),
        cases=(case(act(ActionKind.SYNC_IDENTITY, 3)),),
        detected_by=("weights.identity-update-changes-nothing",),
        may_fail=("weights.served-after-update",),
    ),
    KnownBug(
        id="staleness-of-last-call",
        summary=(
            "Staleness is judged by the last call's version, so a sample with an old start is"
            " delivered."
        ),
        refs=("verl#7569", "prime-rl#1764", "AReaL#1345"),
        make=_StalenessOfLastCall,
        cases=(case(act(ActionKind.SYNC, 1), act(ActionKind.SYNC, 2), _SYNC_AT_3),),
        detected_by=("weights.staleness-bound",),
    ),
    KnownBug(
        id="in-flight-across-refit",
        summary=(
            "With partial rollout off, calls in flight are neither drained nor dropped before the"
            " update."
        ),
        refs=("labs-molt#124",),
        make=_InFlightAcrossRefit,
        cases=(case(_SYNC_AT_3, partial=False),),
        detected_by=("weights.one-version-per-sample", "weights.no-load-while-running"),
        may_fail=("weights.no-stale-cache",),
    ),
    KnownBug(
        id="resumed-before-load",
        summary="The servers resume before the weights arrive, and the calls keep their old KV.",
        refs=("cf. verl checkpoint_engine/base.py",),
        make=_ResumedBeforeLoad,
        cases=(
            case(
                _SYNC_AT_3,
                requests=(request(max_tokens=9),),
                pause_mode=PauseMode.KEEP,
                engine=EngineOptions(transfer_steps=4),
            ),
        ),
        detected_by=("weights.no-load-while-running", "weights.no-stale-cache"),
    ),
    KnownBug(
        id="update-raises",
        summary="Every update ends in an error of the stack's own, which is ignored.",
        refs=("cf. verl#7611",),
        make=_UpdateRaises,
        cases=(_FOLLOWED,),
        detected_by=("weights.no-failure-without-fault",),
    ),
    KnownBug(
        id="sync-skipped",
        summary="With one combination of flags the update returns without doing anything.",
        refs=("verl#4248",),
        make=_SyncSkipped,
        cases=(_FOLLOWED,),
        detected_by=("weights.update-loads",),
    ),
    KnownBug(
        id="label-without-weights",
        summary="The update publishes the new label but loads no weights.",
        refs=("verl#7495", "cf. verl#4248"),
        make=_LabelWithoutWeights,
        cases=(SYNCED,),
        detected_by=("weights.update-loads",),
        may_fail=("versions.engine-tags", "versions.label-with-weights"),
    ),
    KnownBug(
        id="update-not-awaited",
        summary="The update starts its transfer in a task and returns before the weights arrive.",
        refs=("cf. verl#4248",),
        make=_UpdateNotAwaited,
        cases=(_TWICE,),
        detected_by=("weights.update-loads",),
    ),
    KnownBug(
        id="previous-checkpoint-loaded",
        summary="The servers load the checkpoint before the newest one, under the new label.",
        refs=("cf. verl#7495",),
        make=_PreviousCheckpointLoaded,
        cases=(SYNCED,),
        detected_by=("weights.update-loads",),
        may_fail=("versions.engine-tags", "versions.label-with-weights"),
    ),
    KnownBug(
        id="update-in-progress-returns",
        summary=(
            "An update that is asked for while another one runs returns at once, and its weights"
            " are never loaded."
        ),
        refs=("cf. prime-rl#2004",),
        make=_UpdateInProgressReturns,
        cases=(_TWICE,),
        detected_by=("weights.update-loads",),
    ),
    KnownBug(
        id="merged-with-older-update",
        summary="Two updates are merged into one load, that of the older weights.",
        refs=("cf. prime-rl#2004",),
        make=_MergedWithOlderUpdate,
        cases=(_TWICE_FOLLOWED,),
        detected_by=("weights.update-loads",),
    ),
    KnownBug(
        id="failed-transfer-swallowed",
        summary="The error of a broken transfer is caught, and the update reports success.",
        refs=("cf. verl checkpoint_engine/base.py",),
        make=_FailedTransferSwallowed,
        cases=(case(act(ActionKind.SYNC_FAILS, 3)),),
        detected_by=("weights.update-loads",),
    ),
    KnownBug(
        id="one-replica-updated",
        summary="The update reaches the first replica only.",
        refs=("verl#6109", "verl checkpoint_engine/base.py"),
        make=_OneReplicaUpdated,
        cases=(_TWO_SERVERS_FOLLOWED,),
        detected_by=("weights.every-replica-updated", "weights.update-loads"),
    ),
    KnownBug(
        id="replica-not-resumed",
        summary=(
            "The resume reaches the first replica only; requests on the other one wait forever."
        ),
        refs=("prime-rl#2099", "vllm#39366"),
        make=_ReplicaNotResumed,
        cases=(_TWO_SERVERS,),
        detected_by=("weights.every-pause-resumes",),
        may_fail=("lifecycle.no-hang",),
    ),
    KnownBug(
        id="no-resume-after-failure",
        summary="The transfer fails, and the replicas are not resumed.",
        refs=("verl checkpoint_engine/base.py",),
        make=_NoResumeAfterFailure,
        cases=(case(act(ActionKind.SYNC_FAILS, 3)),),
        detected_by=("weights.failed-update-resumes",),
    ),
    KnownBug(
        id="updates-interleave",
        summary=(
            "Two updates run at once, and the first one to end resumes the servers during the"
            " other."
        ),
        refs=("prime-rl#2004", "prime-rl#1296"),
        make=_UpdatesInterleave,
        cases=(_TWICE,),
        detected_by=("weights.updates-do-not-interleave", "weights.newest-update-stays"),
        may_fail=("weights.no-stale-cache", "weights.no-load-while-running"),
    ),
    KnownBug(
        id="update-runs-twice",
        summary="An update is run again behind the back of a trainer that was told it is done.",
        refs=("prime-rl#2004",),
        make=_UpdateRunsTwice,
        cases=(SYNCED,),
        detected_by=("weights.one-load-per-version",),
    ),
    KnownBug(
        id="update-never-ends",
        summary="The update waits for an acknowledgement that never comes.",
        refs=("vllm#39366", "prime-rl#2325", "verl#7846"),
        make=_UpdateNeverEnds,
        cases=(SYNCED,),
        detected_by=("weights.updates-end",),
    ),
)
