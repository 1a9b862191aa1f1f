"""Known bugs of the life of requests: they hang, vanish, end twice or run on, and aborts miss their
target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from rollproof.core.case import ActionKind
from rollproof.core.engine_contract import PauseMode
from rollproof.core.events.rollout import Reply, Result
from rollproof.core.limits import RolloutLimits
from rollproof.core.records import EngineOutput, FinishReason, Request, Rollout
from rollproof.core.trace import Trace
from rollproof.fakes.clients.reference_clients import AsSampled, ClientOptions, PartialSample
from rollproof.fakes.engine.fake_engine import FakeEngine
from rollproof.fakes.engine.fleet import Fleet
from rollproof.fakes.engine.inflight import InflightCall
from rollproof.fakes.known_bugs._planting import (
    ABORTED,
    CLEAN,
    ENDING,
    LAST,
    SYNCED,
    act,
    case,
    on_engine,
    request,
)
from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["BUGS"]


class _CutTurnAnswered(AsSampled):
    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        reason = super().finish_reason(sample, output)
        more = sample.turn < len(sample.request.turns)
        # the text is parsed for a tool call before the finish reason is read
        return FinishReason.STOP if reason is FinishReason.ABORT and more else reason


class _LimitedTurnAnswered(AsSampled):
    """Parses a turn for a tool call before it looks at why the turn ended."""

    options: ClassVar[ClientOptions] = ClientOptions(
        multi_turn=True, limits=RolloutLimits(turn_tokens=3)
    )

    def next_turn(self, sample: PartialSample) -> bool:
        reason = sample.finish
        if reason is FinishReason.LENGTH:
            sample.finish = FinishReason.STOP
        more = super().next_turn(sample)
        if not more:
            sample.finish = reason
        return more


class _ToolCallLost(AsSampled):
    def next_turn(self, sample: PartialSample) -> bool:
        # the parser sees the last call's text only, and the tool call began before an abort
        return sample.attempts == 1 + sample.turn and super().next_turn(sample)


class _SlotLeaksOnAbort(AsSampled):
    """Releases the slot of a rollout without aborts only."""

    async def rollout(self, request: Request) -> Rollout | None:
        slots: asyncio.Semaphore = self.__dict__.setdefault("_slots", asyncio.Semaphore(1))
        await slots.acquire()
        rollout = await super().rollout(request)
        # a resumed rollout has more attempts, and keeps its slot
        if rollout is not None and rollout.extra["attempts"] == 1:
            slots.release()
        return rollout


class _CounterLeaksOnAbort(AsSampled):
    """Does not tell the balancer about aborted calls."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        output = await super().call(server_id, sample, sent, budget)
        self._aborted = output.finish_reason is FinishReason.ABORT
        return output

    def release(self, server_id: str) -> None:
        # the release is on the path of a normal end only
        if not self._aborted:
            super().release(server_id)


class _ProgressLostOnDeath(AsSampled):
    """Restarts the sample when a server dies, although earlier calls had returned tokens."""

    async def attempt(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        try:
            return await self.call("s0", sample, sent, budget)
        except ConnectionError:
            # everything goes, although only the call of the dead server is lost
            for values in (
                sample.response,
                sample.logprobs,
                sample.mask,
                sample.labels,
                sample.calls,
            ):
                values.clear()
            sample.rows = None
        await self.wait()
        return await super().attempt(sample, sample.ids, self.next_budget(sample))


class _VanishesOnDeath(AsSampled):
    """The task of a request ends with its server, without an error for the caller."""

    async def attempt(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        return await self.call("s0", sample, sent, budget)

    async def rollout(self, request: Request) -> Rollout | None:
        try:
            return await super().rollout(request)
        except ConnectionError:
            # the caller cannot tell this from a dropped sample
            return None


class _SyncDropsRequests(AsSampled):
    """The client has no resume loop, although partial rollout is on."""

    def resumes(self, sample: PartialSample) -> bool:
        return False


class _ClientWithoutResume(_SyncDropsRequests):
    """The same client, which returns aborted samples."""

    async def run(self, sample: PartialSample) -> bool:
        await super().run(sample)
        # delivered, whatever the finish reason is
        return True


class _PartialFlagIgnored(AsSampled):
    """Ignores the flag."""

    def resumes(self, sample: PartialSample) -> bool:
        return True


class _HedgeLeftRunning(AsSampled):
    """Sends slow calls a second time, and forgets the slower one."""

    async def call(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        if sample.request.request_id == "r0":
            self._loser = asyncio.ensure_future(self._again(server_id, sample, sent, budget))
        return await super().call(server_id, sample, sent, budget)

    async def _again(
        self, server_id: str, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> None:
        await asyncio.sleep(2.5)
        with suppress(ConnectionError):
            await super().call(server_id, sample, sent, budget)


class _RetryOutlivesRequest(AsSampled):
    """Does not cancel the timer that retries a call when the request ends."""

    async def rollout(self, request: Request) -> Rollout | None:
        rollout = await super().rollout(request)
        if request.request_id == "r0":
            self._timer = asyncio.ensure_future(self._late(PartialSample(request=request)))
        return rollout

    async def _late(self, sample: PartialSample) -> None:
        await self.wait()
        with suppress(ConnectionError):
            await self.call("s0", sample, sample.ids, 2)


class _ResumesWithNothingLeft(AsSampled):
    """Resumes after an abort on the last token, with a budget of zero."""

    def finish_reason(self, sample: PartialSample, output: EngineOutput) -> FinishReason:
        return output.finish_reason


# A server turns calls away while it drains.
_DRAINED = case(
    act(ActionKind.SYNC, 3),
    requests=(request(max_tokens=12), request("r1", (14, 15))),
    arrivals=(0.0, 4.0),
    pause_mode=PauseMode.WAIT,
    flavour="vllm-gated",
)


class _BusyLoopWhilePaused(AsSampled):
    """Retries at once while the server turns calls away."""

    options = ClientOptions(back_off=0.002)


class _HotRetryWhileDown(AsSampled):
    """Calls a dead server again at once."""

    options = ClientOptions(back_off=0.0, patience=100_000)


class _BareIds(FakeEngine):
    """Uses the id of a request for its calls; one id may be the beginning of another."""

    async def generate(self, **options: Any) -> EngineOutput:
        return await super().generate(
            # ids of calls are free of prefixes here, and SGLang aborts every id that begins so
            **{**options, "request_id": options["request_id"].partition("#")[0]}
        )


class _AbortByPrefix(AsSampled):
    """Aborts one stale request before it updates the weights."""

    def start(self, fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.__class__ = _BareIds
        super().start(fleet)

    async def update_weights(self, version: int | None) -> None:
        await self.fleet.servers["s0"].abort("r1")


class _RetractsThenAborts(AsSampled):
    """Sends everything back to the queue before it aborts it."""

    async def update_weights(self, version: int | None) -> None:
        for server in self.fleet.servers.values():
            await server.pause(PauseMode.RETRACT)
            await server.abort()
            await server.load(self.fleet.weights_of(version), version)
            await server.resume()


class _QueuedAbortLosesTokens(FakeEngine):
    """An abort in the queue returns nothing, also for preempted calls that had tokens."""

    async def _end_all(self, calls: Iterable[InflightCall]) -> None:
        calls = list(calls)
        for call in calls:
            # SGLang ends queued calls on a path of its own, which lost what they had
            if not call.running:
                del call.ids[call.prompt_len :]
                for marks in (call.keys, call.labels, call.kept_rows):
                    marks.clear()
        await super()._end_all(calls)


class _AbortOfEverything(AsSampled):
    """Cleans up after each rollout by aborting everything."""

    async def rollout(self, request: Request) -> Rollout | None:
        try:
            return await super().rollout(request)
        finally:
            for server in self.fleet.servers.values():
                await server.abort()


class _AbortNeverAnswered(FakeEngine):
    """Drops aborted calls from the batch without a reply."""

    async def _end_all(self, calls: Iterable[InflightCall]) -> None:
        for call in list(calls):
            # without a last output the waiting caller learns nothing
            self._scheduler.drop(call)


class _DuplicateUsedTwice(AsSampled):
    """Appends every reply that arrives, also a second copy."""

    def absorb(self, sample: PartialSample, sent: int, output: EngineOutput) -> None:
        super().absorb(sample, sent, output)
        last = self.fleet.recorder.events[-1]
        if isinstance(last, Reply) and last.duplicate:
            self.merge_tokens(sample, output)
            self.merge_logprobs(sample, output)
            self.merge_versions(sample, output)


class _OrphanKept(AsSampled):
    """Makes a slow call again, and keeps both replies."""

    async def attempt(
        self, sample: PartialSample, sent: tuple[int, ...], budget: int | None
    ) -> EngineOutput:
        first = asyncio.ensure_future(super().attempt(sample, sent, budget))
        done, _ = await asyncio.wait([first], timeout=8.0)
        if done:
            return first.result()
        second = await super().attempt(sample, sent, budget)
        self.absorb(sample, len(sent), await first)
        return second


def _handed_over_twice(trace: Trace) -> Trace:
    """Return a trace in which the completion of an abandoned call is a second sample."""
    results = [event for event in trace if isinstance(event, Result)]
    return trace.with_events(
        [*trace, *(replace(event, time=event.time + 1.0) for event in results)]
    )


_LONG = (request(), request("r1", (31, 32, 33), max_tokens=16))
_ALIKE = (request("r1", (31, 32, 33)), request("r10", (41, 42, 43)))
_ABORT, _KILL = act(ActionKind.ABORT, 2), act(ActionKind.KILL, 4)

# An abort in the first turn, and more room than any chat template takes.
_CUT_TURN = case(
    act(ActionKind.ABORT, 1),
    model=ENDING,
    requests=(request(max_tokens=100, turns=((21, 22), (23, 24))),),
    seed=1,
)

BUGS: tuple[KnownBug, ...] = (
    KnownBug(
        id="slot-leaks-on-abort",
        summary="A slot is not released after an abort, and the next request waits for it forever.",
        refs=("cf. prime-rl#3050",),
        make=_SlotLeaksOnAbort,
        cases=(case(_ABORT, requests=_LONG),),
        detected_by=("lifecycle.no-hang",),
    ),
    KnownBug(
        id="counter-leaks-on-abort",
        summary="The balancer still counts calls that were aborted.",
        refs=("cf. AReaL#1345", "cf. AReaL#1388"),
        make=_CounterLeaksOnAbort,
        cases=(ABORTED,),
        detected_by=("lifecycle.counters-return",),
    ),
    KnownBug(
        id="progress-lost-on-death",
        summary="When a server dies, the tokens of earlier calls are lost with it.",
        refs=("cf. SkyRL#656", "cf. xtuner#1917"),
        make=_ProgressLostOnDeath,
        cases=(case(_ABORT, _KILL, servers=2),),
        detected_by=("lifecycle.survives-death",),
    ),
    KnownBug(
        id="vanishes-on-death",
        summary="A request whose server dies ends without a sample and without an error.",
        refs=("verl#7611",),
        make=_VanishesOnDeath,
        cases=(case(_KILL),),
        detected_by=("lifecycle.survives-death", "lifecycle.drops-only-as-declared"),
    ),
    KnownBug(
        id="sync-drops-requests",
        summary="A weight update cancels the calls in flight, and their samples are lost.",
        refs=("verl#7611", "verl#5698"),
        make=_SyncDropsRequests,
        cases=(SYNCED,),
        detected_by=("lifecycle.drops-only-as-declared",),
    ),
    KnownBug(
        id="client-without-resume",
        summary=(
            "The asynchronous trainer uses a client that does not resume, and gets aborted samples."
        ),
        refs=("verl#6716",),
        make=_ClientWithoutResume,
        cases=(SYNCED,),
        detected_by=("lifecycle.aborts-do-not-surface",),
    ),
    KnownBug(
        id="partial-flag-ignored",
        summary="Partial rollout is off, but aborted samples are resumed.",
        refs=("verl#6882", "slime#2092"),
        make=_PartialFlagIgnored,
        cases=(case(act(ActionKind.ABORT, 3), partial=False),),
        detected_by=("lifecycle.partial-off-honoured",),
    ),
    KnownBug(
        id="hedge-left-running",
        summary="A call that was sent twice continues to run after its twin has returned.",
        refs=("AReaL#1498", "sglang#5963"),
        make=_HedgeLeftRunning,
        cases=(case(requests=_LONG),),
        detected_by=("lifecycle.no-orphan-calls",),
    ),
    KnownBug(
        id="retry-outlives-request",
        summary="A retry is sent for a request that has ended.",
        refs=("AReaL#1498",),
        make=_RetryOutlivesRequest,
        cases=(case(requests=_LONG),),
        detected_by=("lifecycle.no-call-after-end",),
    ),
    KnownBug(
        id="resumes-with-nothing-left",
        summary=(
            "An abort on the last token is resumed with a budget of zero, which engines refuse."
        ),
        refs=("slime#2260",),
        make=_ResumesWithNothingLeft,
        cases=(LAST,),
        detected_by=("lifecycle.no-empty-grant",),
        may_fail=("lifecycle.no-error-without-fault",),
    ),
    KnownBug(
        id="busy-loop-while-paused",
        summary="A server that turns calls away while it is paused is called again without a wait.",
        refs=("verl checkpoint_engine/base.py", "verl llm_server.py"),
        make=_BusyLoopWhilePaused,
        cases=(_DRAINED,),
        detected_by=("lifecycle.bounded-attempts",),
    ),
    KnownBug(
        id="hot-retry-while-down",
        summary="A server that is down is called again without a wait.",
        refs=("cf. verl llm_server.py",),
        make=_HotRetryWhileDown,
        cases=(case(act(ActionKind.KILL, 3)),),
        detected_by=("lifecycle.bounded-attempts",),
    ),
    KnownBug(
        id="abort-by-prefix",
        summary="An abort of r1 also ends r10: ids are compared by prefix.",
        refs=("sglang#25561", "sglang#30912"),
        make=_AbortByPrefix,
        cases=(case(act(ActionKind.SYNC, 3, "r1"), requests=_ALIKE, flavour="sglang"),),
        detected_by=("lifecycle.abort-hits-target",),
        may_fail=(
            "weights.update-loads",
        ),  # what stands for the update here aborts one request and loads nothing
    ),
    KnownBug(
        id="abort-of-everything",
        summary=(
            "Each rollout aborts everything on every server when it ends, and the other rollouts"
            " prefill again."
        ),
        refs=("cf. verl#6866",),
        make=_AbortOfEverything,
        cases=(
            case(
                requests=(
                    request(max_tokens=3),
                    request("r1", (31, 32, 33)),
                    request("r2", (41, 42), max_tokens=9),
                ),
                servers=2,
            ),
        ),
        detected_by=("lifecycle.end-spares-others",),
    ),
    KnownBug(
        id="queued-abort-loses-tokens",
        summary=(
            "A call that was sent back to the queue and aborted there loses the tokens that it"
            " had sampled."
        ),
        refs=("sglang#11673", "vllm#22197"),
        make=on_engine(_QueuedAbortLosesTokens, _RetractsThenAborts),
        cases=(SYNCED,),
        detected_by=("lifecycle.abort-keeps-tokens",),
    ),
    KnownBug(
        id="abort-never-answered",
        summary="The engine drops an aborted call without a reply, and its caller waits.",
        refs=("tpu-inference#3362", "vllm#22197"),
        make=on_engine(_AbortNeverAnswered),
        cases=(ABORTED,),
        detected_by=("lifecycle.abort-ends-call",),
        may_fail=("lifecycle.no-hang",),
    ),
    KnownBug(
        id="duplicate-used-twice",
        summary="A reply that is delivered twice is appended twice.",
        refs=("AReaL#1498",),
        make=_DuplicateUsedTwice,
        cases=(case(act(ActionKind.DUPLICATE_REPLY, 2), act(ActionKind.ABORT, 3)),),
        detected_by=("lifecycle.duplicate-consumed-once",),
        may_fail=("stitch.tokens", "lifecycle.aborts-do-not-surface"),
    ),
    KnownBug(
        id="orphan-kept",
        summary=(
            "A call that timed out is made again, and the tokens of both replies are in the sample."
        ),
        refs=("AReaL#1498",),
        make=_OrphanKept,
        cases=(case(act(ActionKind.LATE_REPLY, 3)),),
        detected_by=("lifecycle.one-reply-per-retry",),
        may_fail=("stitch.tokens",),
    ),
    KnownBug(
        id="handed-over-twice",
        summary="One request ends twice, with a sample each time.",
        refs=("AReaL#1498",),
        make=AsSampled,
        cases=(CLEAN,),
        edit=_handed_over_twice,
        detected_by=("lifecycle.ends-once",),
    ),
    KnownBug(
        id="cut-turn-answered",
        summary=(
            "The environment answers a turn that an abort cut off, and the fragment is trained on."
        ),
        refs=("cf. verl#5936",),
        make=_CutTurnAnswered,
        cases=(_CUT_TURN,),
        detected_by=("lifecycle.cut-turns-not-answered",),
    ),
    KnownBug(
        id="limited-turn-answered",
        summary="The environment answers a turn that was cut at the limit of a turn.",
        refs=("cf. verl tool_agent_loop.py",),
        make=_LimitedTurnAnswered,
        cases=(case(requests=(request(max_tokens=14, turns=((21, 22), (23, 24))),)),),
        detected_by=("lifecycle.cut-turns-not-answered",),
    ),
    KnownBug(
        id="tool-call-lost",
        summary="A tool call is lost when its turn is resumed, and the rollout ends early.",
        refs=("vllm#46079",),
        make=_ToolCallLost,
        cases=(_CUT_TURN,),
        detected_by=("lifecycle.ended-turns-answered",),
    ),
)
