"""Fake engine: a rollout server with continuous batching on a virtual clock, answering from the
coded policy.

One task a server, alive only while there is work. A step admits calls, lets its duration pass, and
then computes: prefill chunks, one token for every decoding call. So whatever happens in between (an
abort, a pause, a weight update) happens before the tokens of the step. Weights change between
steps, also while calls run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollproof.core.case import EngineOptions
from rollproof.core.engine_contract import PauseMode, Refusal
from rollproof.core.events.rollout import Abort, Call, Fault, Pause, Reply, Resume, Weights
from rollproof.core.records import EngineOutput, FinishReason, Scalar, Version, as_tokens
from rollproof.core.trace import Recorder
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.exceptions import (
    BadCall,
    EnginePaused,
    ReplyLost,
    ServerDied,
    TransferFailed,
)
from rollproof.fakes.engine.flavours import Flavour, PausedCalls
from rollproof.fakes.engine.inflight import InflightCall, Wire
from rollproof.fakes.engine.kv_cache import root_of
from rollproof.fakes.engine.replies import broken_stream_reply, caller_copy, empty_abort
from rollproof.fakes.engine.scheduler import EngineHooks, Scheduler

__all__ = ["MAX_LENGTH", "FakeEngine"]

MAX_LENGTH = 4096
"""Tokens of prompt and response that a call may have, unless the engine was made with another
bound.
"""


class FakeEngine:
    """A server ``server_id`` of weights ``version``, shown under ``label``.

    ``hooks`` number the calls, attribute them to requests and may act at every token. Everything is
    recorded. Methods that stand for a message to the server raise ``ServerDied`` while it is dead.
    """

    def __init__(
        self,
        server_id: str,
        policy: CodedPolicy,
        flavour: Flavour,
        options: EngineOptions,
        recorder: Recorder,
        *,
        version: int = 0,
        label: Version = 0,
        hooks: EngineHooks | None = None,
        max_length: int = MAX_LENGTH,
    ) -> None:
        self.server_id = server_id
        self.policy = policy
        self.flavour = flavour
        self.options = options
        self.max_length = max_length
        self.alive: bool = True
        self.fail_next_load: bool = False
        self._recorder = recorder
        self._hooks = hooks or EngineHooks()
        self._scheduler = Scheduler(
            server_id, policy, flavour, options, recorder, self._hooks, version, label
        )
        self._pause: PauseMode | None = None
        self._resumes = 0
        self._drained: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The weights that it has."""
        return self._scheduler.version

    @property
    def label(self) -> Version:
        """The label that it shows; ``None`` after an update without one."""
        return self._scheduler.label

    @property
    def paused(self) -> bool:
        """Whether calls are kept from being admitted."""
        return self._pause is not None

    @property
    def in_flight(self) -> tuple[InflightCall, ...]:
        """Calls that were not answered: those that run, then those that wait."""
        return tuple(self._scheduler.in_flight)

    async def generate(
        self,
        *,
        prompt_ids: Sequence[int],
        max_tokens: int | None = None,
        request_id: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        media: object = None,
        want_routes: bool = True,
        want_logprobs: bool = True,
        routes_start: int = 0,
        wire: Wire | None = None,
    ) -> EngineOutput:
        """One call: up to ``max_tokens`` tokens (``None``: up to the model's length) after
        ``prompt_ids``.

        ``request_id`` is the engine's own handle of the call, for ``abort``. Rows come from
        ``routes_start`` on where the flavour knows that option; elsewhere it is ignored, and the
        output says 0. ``wire`` is what the reply goes through to its caller. Raises ``BadCall``,
        ``ServerDied``, ``ReplyLost``, and ``EnginePaused`` where the flavour raises while paused.
        """
        ids = as_tokens(prompt_ids, what="prompt_ids")
        call = Call(
            call_id=self._hooks.new_call(),
            request_id=self._hooks.owner(ids, request_id),
            server_id=self.server_id,
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling={str(name): _scalar(value) for name, value in (sampling or {}).items()},
            media=None if media is None else str(media),
            want_routes=want_routes,
            want_logprobs=want_logprobs,
            routes_start=routes_start,
            stream=None if wire is None else wire.stream,
        )
        self._recorder.record(call)
        try:
            self._refuse_dead()
            refused = self._refused(call)
        except Exception:
            await self._answer_late()
            raise
        if refused is not None:
            await self._answer_late()
            return caller_copy(self._recorder.record(refused).output)
        queued = self._enqueue(call, request_id)
        queued.wire = wire
        return await self._answer(queued)

    async def abort(self, wanted: str = "*") -> tuple[int, ...]:
        """End the calls whose handle is ``wanted`` (``"*"``: all), with what they have; returns
        their call ids.
        """
        self._refuse_dead()
        by_prefix = self.flavour.abort_by_prefix and wanted
        hit = [
            call
            for call in self.in_flight
            if wanted == "*" or call.rid == wanted or (by_prefix and call.rid.startswith(wanted))
        ]
        return await self._abort(wanted, hit)

    async def abort_call(self, call_id: int) -> tuple[int, ...]:
        """End one call, by its id in the trace; nothing where it is not in flight any more."""
        self._refuse_dead()
        hit = [call for call in self.in_flight if call.call_id == call_id]
        return await self._abort(hit[0].rid if hit else f"call-{call_id}", hit)

    async def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> None:
        """Stop admitting, deal with the calls in flight as ``mode`` says, and return when that is
        done.

        ``clear_cache`` also drops all KV: the prefix cache, and that of frozen calls, which prefill
        anew after the resume. In place, nothing can be dropped. Pausing twice is allowed; one
        resume ends both. A pause that a resume ended before it was complete returns all the same,
        and is not recorded: the server admits, or drains for another pause.
        """
        self._refuse_dead()
        mode = PauseMode(mode)
        self._pause, resumes = mode, self._resumes
        if mode is PauseMode.ABORT:
            await self._end_all(self.in_flight)
        elif mode is PauseMode.WAIT:
            await self._drain()
        if self._pause is not mode or self._resumes != resumes:
            return  # somebody resumed, or paused otherwise, in the meantime
        clear = clear_cache and mode is not PauseMode.IN_PLACE
        if mode is PauseMode.RETRACT or (mode is PauseMode.KEEP and clear):
            self._scheduler.preempt(tuple(self._scheduler.running))
        if clear:
            self._scheduler.clear_cache()
        self._recorder.record(
            Pause(server_id=self.server_id, mode=mode, clear_cache=clear, progress=self.progress())
        )

    async def resume(self) -> None:
        """Admit and run again. Without a pause it changes nothing."""
        self._refuse_dead()
        self._pause = None
        self._resumes += 1
        self._recorder.record(Resume(server_id=self.server_id, progress=self.progress()))
        self._wake()

    async def load(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        """Weights become ``version`` after a transfer of one step, also while calls run; then
        ``label`` is shown.

        Without a label the server shows ``None``: nothing was published for these weights. Raises
        ``TransferFailed`` where ``fail_next_load`` is set; the weights then stay.
        """
        self._refuse_dead()
        await asyncio.sleep(self.options.step)
        self.load_now(version, label, identity=identity)

    def load_now(self, version: int, label: Version = None, *, identity: bool = False) -> None:
        """As ``load``, in no time: for stacks that block while they transfer (a ``ray.get`` inside
        of a coroutine).
        """
        self._refuse_dead()
        if self.fail_next_load:
            self.fail_next_load = False
            self._recorder.record(Fault(what="update-failure", server_id=self.server_id))
            raise TransferFailed(
                f"The weight transfer to {self.server_id} broke in the middle; it still serves"
                f" version {self.version}."
            )
        self._scheduler.reweigh(version)
        self._publish(label, loaded=True, identity=identity)

    def relabel(self, label: Version) -> None:
        """Publish ``label``; the weights stay."""
        self._refuse_dead()
        self._publish(label, loaded=False)

    def reset_prefix_cache(self) -> None:
        """Forget the KV that calls share; running calls keep their own."""
        self._refuse_dead()
        self._scheduler.clear_cache()

    def evict(self, call_id: int) -> bool:
        """Preempt a running call: its KV is freed, it goes to the head of the queue. False where it
        does not run.
        """
        return self._scheduler.preempt((call_id,))

    def kill(self) -> None:
        """Die with everything in flight: callers see ``ServerDied``. Nothing where it is dead
        already.
        """
        if not self.alive:
            return
        self.alive = False
        self._pause = None
        self._recorder.record(Fault(what="death", server_id=self.server_id))
        for call in self._scheduler.clear():
            if call.wire is not None and call.wire.stream is not None and call.sampled:
                self._recorder.record(
                    broken_stream_reply(call, self.version, self.policy, self.flavour, self.label)
                )
            if not call.future.done():
                call.future.set_exception(self._died())
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(self._died())

    def revive(self, version: int | None = None, label: Version = None) -> None:
        """Come back empty: with the weights it had, or with ``version`` under ``label``. Nothing
        where it lives.
        """
        if self.alive:
            return
        self.alive = True
        self._recorder.record(Fault(what="revive", server_id=self.server_id))
        if version is not None and (version, label) != (self.version, self.label):
            self._scheduler.reweigh(version)
            self._publish(label, loaded=True)

    def progress(self) -> dict[int, int]:
        """Tokens sampled by each call in flight, by call id."""
        return {
            call.call_id: call.sampled
            for call in sorted(self.in_flight, key=lambda call: call.call_id)
        }

    def gauges(self) -> dict[str, float]:
        """Counters that return to where they started: calls that run and wait, and whether the
        server is paused.
        """
        counts = {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.queue),
            "paused": self.paused,
        }
        return {f"{self.server_id}/{name}": float(count) for name, count in counts.items()}

    def _died(self) -> ServerDied:
        return ServerDied(f"Server {self.server_id} died.")

    def _refuse_dead(self) -> None:
        if not self.alive:
            raise self._died()

    def _publish(self, label: Version, *, loaded: bool, identity: bool = False) -> None:
        self._scheduler.show(label)
        self._recorder.record(
            Weights(
                server_id=self.server_id,
                version=self.version,
                label=label,
                loaded=loaded,
                identity=identity,
                flushed=not self._scheduler.holds_kv,
                progress=self.progress(),
            )
        )

    async def _answer_late(self) -> None:
        """A refusal takes time, too, though less than a step: a client that tries again at once
        would never let any pass.
        """
        await asyncio.sleep(self.options.step / 100)

    def _refused(self, call: Call) -> Reply | None:
        """The reply to a call that is not even queued, or ``None``. Raises where the flavour
        refuses by raising.
        """
        length, tokens = len(call.prompt_ids), call.max_tokens
        if not length or length >= self.max_length:
            raise BadCall(f"A prompt must have 1 to {self.max_length - 1} tokens, not {length}.")
        least = 0 if self.flavour.zero_budget is Refusal.EMPTY else 1
        if tokens is not None and tokens < least:
            raise BadCall(f"max_tokens must be at least {least}, not {tokens}.")
        if self.flavour.routes_start and not 0 <= call.routes_start <= length:
            raise BadCall(
                f"routes_start must be 0 to {length}, the length of the prompt, not"
                f" {call.routes_start}."
            )
        rejected = self._hooks.rejects(call.request_id)
        if rejected:
            self._recorder.record(
                Fault(what="reject", server_id=self.server_id, call_id=call.call_id)
            )
        if self.paused and self.flavour.paused_calls is PausedCalls.RAISE:
            raise EnginePaused(f"Server {self.server_id} is paused.")
        if not (rejected or (self.paused and self.flavour.paused_calls is PausedCalls.REJECT)):
            return None
        return empty_abort(call.call_id, self.flavour, self.label, want_logprobs=call.want_logprobs)

    def _enqueue(self, call: Call, rid: str | None) -> InflightCall:
        length = len(call.prompt_ids)
        queued = InflightCall(
            call_id=call.call_id,
            request_id=call.request_id,
            server_id=self.server_id,
            rid=rid or f"call-{call.call_id}",
            ids=list(call.prompt_ids),
            prompt_len=length,
            limit=(
                self.max_length
                if call.max_tokens is None
                else min(self.max_length, length + call.max_tokens)
            ),
            routes_start=call.routes_start if self.flavour.routes_start else 0,
            want_routes=call.want_routes,
            want_logprobs=call.want_logprobs,
            future=asyncio.get_running_loop().create_future(),
            state=self.policy.start_state(call.prompt_ids),
            watched=self._hooks.watches(call.request_id),
            root=root_of(call.sampling),
        )
        self._scheduler.add(queued)
        self._wake()
        return queued

    async def _answer(self, call: InflightCall) -> EngineOutput:
        """Wait for the reply and hand it over; the faults that were planned for it happen on the
        way.
        """
        wire = call.wire
        try:
            await call.future
            late = call.late_by * self.options.step + (0.0 if wire is None else wire.late)
            if late:
                await asyncio.sleep(late)
        except asyncio.CancelledError:
            self._scheduler.drop(call)
            self._tell_drained()
            if (
                call.future.done()
                and not call.future.cancelled()
                and call.future.exception() is None
            ):
                self._deliver(self._scheduler.reply(call), delivered=False)
            raise
        reply = self._scheduler.reply(call)
        if call.lost_after is not None:
            self._deliver(reply, delivered=False)
            await asyncio.sleep(call.lost_after * self.options.step)
            raise ReplyLost(f"The connection to {self.server_id} broke before the reply arrived.")
        if wire is not None and not wire.delivered:
            self._recorder.record(
                Fault(what="lost-reply", server_id=self.server_id, call_id=call.call_id)
            )
        self._deliver(reply, delivered=wire is None or wire.send(call.call_id))
        if call.duplicated:
            self._deliver(reply, delivered=False, duplicate=True)
        return caller_copy(reply.output) if wire is None else reply.output

    def _deliver(self, reply: Reply, *, delivered: bool = True, duplicate: bool = False) -> None:
        fresh = reply.index < 0 and reply.delivered is delivered and reply.duplicate is duplicate
        self._recorder.record(
            reply if fresh else replace(reply, index=-1, delivered=delivered, duplicate=duplicate)
        )

    async def _abort(self, wanted: str, calls: Sequence[InflightCall]) -> tuple[int, ...]:
        awaited = [
            call for call in calls if not call.future.cancelled()
        ]  # a caller that hangs up takes its call along
        hit = tuple(sorted(call.call_id for call in awaited))
        self._recorder.record(Abort(server_id=self.server_id, wanted=wanted, call_ids=hit))
        await self._end_all(awaited)
        return hit

    async def _end_all(self, calls: Iterable[InflightCall]) -> None:
        """Abort calls, and let their callers take the replies before anything else happens."""
        for call in calls:
            self._scheduler.end(call, FinishReason.ABORT)
        self._tell_drained()
        await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Wait until every call that has started is answered, or somebody resumes."""
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()
        self._tell_drained()
        self._wake()
        await asyncio.shield(self._drained)

    def _tell_drained(self) -> None:
        drains = self._pause is PauseMode.WAIT and any(call.started for call in self.in_flight)
        if self._drained is not None and not self._drained.done() and not drains:
            self._drained.set_result(None)

    def _wake(self) -> None:
        """Start the task that steps, where there is work and none runs."""
        self._tell_drained()
        if self._task is None and self._has_work():
            loop, context = asyncio.get_running_loop(), self._hooks.context.copy()
            self._task = loop.create_task(
                self._run(), name=f"engine {self.server_id}", context=context
            )

    def _has_work(self) -> bool:
        if not self.alive or not (self._scheduler.running or self._scheduler.queue):
            return False
        return self._pause is None or (
            self._pause is PauseMode.WAIT and any(call.started for call in self.in_flight)
        )

    async def _run(self) -> None:
        try:
            while self._has_work():
                self._scheduler.admit(only_started=self.paused)
                await asyncio.sleep(self.options.step)
                if self._has_work():
                    self._scheduler.step()
                # an admission, too, may end the last call: one that was evicted on its last token
                self._tell_drained()
        except Exception as error:  # noqa: BLE001 - a fault of the fake must reach the callers, or they would wait for ever
            for call in self._scheduler.clear():
                if not call.future.done():
                    call.future.set_exception(error)
        finally:
            self._task = None


def _scalar(value: Any) -> Scalar:
    return value if value is None or isinstance(value, (int, float, str, bool)) else repr(value)
