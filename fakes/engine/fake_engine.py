"""A rollout server with continuous batching on a virtual clock, which samples from the coded
policy.

Each server has one task, which lives while there is work. A step admits calls, lets its duration
pass, and then computes: prefill chunks, and one token for every decoding call. So an abort, a pause
or a weight update during the step happens before its tokens. Weights change between steps, also
while calls run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollproof.core.case import EngineOptions
from rollproof.core.engine_contract import PauseMode, Refusal
from rollproof.core.events.rollout import Abort, Call, Fault, Pause, Reply, Resume
from rollproof.core.records import EngineOutput, FinishReason, IntArray, Scalar, Version, as_tokens
from rollproof.core.sampling_masks import is_greedy
from rollproof.core.trace import Recorder
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.exceptions import (
    BadCall,
    EnginePaused,
    ReplyLost,
    ServerDied,
)
from rollproof.fakes.engine.flavours import Flavour, PausedCalls
from rollproof.fakes.engine.inflight import FirstDraw, InflightCall, Wire
from rollproof.fakes.engine.kv_cache import root_of
from rollproof.fakes.engine.replies import broken_stream_reply, caller_copy, empty_abort
from rollproof.fakes.engine.scheduler import EngineHooks, Scheduler
from rollproof.fakes.engine.weight_loads import WeightLoads
from rollproof.simulation.virtual_loop import VirtualLoop

__all__ = ["MAX_LENGTH", "FakeEngine"]

MAX_LENGTH = 4096
"""Default limit of a call's prompt and response together, in tokens."""


class FakeEngine(WeightLoads):
    """A server ``server_id`` with weights ``version``, shown under ``label``.

    Methods that represent a message to the server raise ``ServerDied`` while it is dead.

    Attributes:
        handed_out: The routes that callers within the program got and can write to, by call id.
        published: The weights and the label that the stack itself published last.
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
        self.handed_out: dict[int, IntArray] = {}
        self.published: tuple[int, Version] | None = None
        self._recorder = recorder
        self._hooks = hooks or EngineHooks()
        self._scheduler = Scheduler(
            server_id, policy, flavour, options, recorder, self._hooks, version, label
        )
        # the default of calls that do not say which tokens end them
        self._ends = frozenset((policy.eos_id,) if policy.eos_every is not None else ())
        self._pause: PauseMode | None = None
        self._resumes = 0
        self._drained: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._transfer: asyncio.Future[None] | None = None

    @property
    def paused(self) -> bool:
        """Whether calls are not admitted."""
        return self._pause is not None

    @property
    def in_flight(self) -> tuple[InflightCall, ...]:
        """Return the calls without a reply: running ones, then waiting ones."""
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
        ends: frozenset[int] | None = None,
        draw: int = 0,
        siblings: set[int] | None = None,
        wire: Wire | None = None,
        adapter: str | None = None,
        return_sampling_mask: bool = False,
    ) -> EngineOutput:
        """Sample up to ``max_tokens`` tokens after ``prompt_ids`` and return them.

        Args:
            prompt_ids: tokens of the prompt.
            max_tokens: the budget; ``None`` for the model's length.
            request_id: the engine's own handle of the call, for ``abort``. One that is the id of a
                rollout's request, or begins with it and ``-``, ``_``, ``:``, ``/``, ``.`` or ``#``,
                says to which request the call belongs.
            sampling: sampling parameters, recorded with the call.
            media: images or other media, recorded with the call.
            want_routes: return routes.
            want_logprobs: return logprobs.
            routes_start: first row to return, if the flavour has that option; else it is ignored,
                and the output says 0.
            ends: tokens that end the call; ``None``: the model's own end token, if it has one.
            draw: number of the sample; each draws another first token.
            siblings: first tokens of other samples of the same HTTP request, to which this one's is
                added: each draws another one, unless it is greedy.
            wire: the connection to the caller; ``None`` for a call within the program.
            adapter: the name of the adapter that serves the call; ``None``: the base model does.
            return_sampling_mask: return the tokens among which each token was drawn, if
                ``sampling`` leaves tokens out.

        Raises ``BadCall``, ``ServerDied``, ``ReplyLost``, and ``EnginePaused`` if the flavour
        raises while paused.
        """
        ids = as_tokens(prompt_ids, what="prompt_ids")
        call_id, owner = self._hooks.new_call(), self._hooks.owner(ids, request_id)
        call = Call(
            call_id=call_id,
            request_id=owner.request_id,
            server_id=self.server_id,
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling={str(name): _scalar(value) for name, value in (sampling or {}).items()},
            media=None if media is None else str(media),
            want_routes=want_routes,
            want_logprobs=want_logprobs,
            routes_start=routes_start,
            stream=None if wire is None else wire.stream,
            candidates=owner.candidates,
            internal=owner.internal,
            end_tokens=None if ends is None else tuple(sorted(ends & self._ends)),
            stop_token_ids=() if ends is None else tuple(sorted(ends - self._ends)),
            crossed=_crossed(ids),
            adapter=adapter,
            want_sampling_mask=return_sampling_mask,
        )
        self._recorder.record(call)
        try:
            self._refuse_dead()
            refused = self._refused(call)
        except Exception:
            await self._delay_refusal()
            raise
        if refused is not None:
            await self._delay_refusal()
            return caller_copy(self._recorder.record(refused).output)
        queued = self._enqueue(call, request_id)
        queued.wire = wire
        if ends is not None:
            queued.ends = ends
        if draw:
            queued.draw = FirstDraw(seed=draw)
        if siblings is not None and queued.draw.taken is None and not is_greedy(call.sampling):
            queued.draw = FirstDraw(seed=queued.draw.seed, taken=siblings)
        return await self._answer(queued)

    async def abort(self, wanted: str = "*") -> tuple[int, ...]:
        """End the calls with the handle ``wanted`` (``"*"``: all calls), and return their ids.

        Their callers get the tokens so far.
        """
        self._refuse_dead()
        return await self._abort(wanted, self._named(wanted))

    async def abort_call(self, call_id: int) -> tuple[int, ...]:
        """End one call, by its id in the trace, if it is in flight; what a case's abort does."""
        self._refuse_dead()
        hit = [call for call in self.in_flight if call.call_id == call_id]
        return await self._abort(
            hit[0].rid if hit else _made_up_handle(call_id), hit, injected=True
        )

    async def abort_handle(self, call_id: int) -> tuple[int, ...]:
        """End every call with the handle of one in flight, as an operator's abort does.

        A call without a handle of the stack's own ends alone.
        """
        own = _made_up_handle(call_id)
        handle = next((call.rid for call in self.in_flight if call.call_id == call_id), own)
        if handle == own:
            return await self.abort_call(call_id)
        self._refuse_dead()
        return await self._abort(handle, self._named(handle), injected=True)

    def _named(self, handle: str) -> list[InflightCall]:
        by_prefix = self.flavour.abort_by_prefix and handle
        return [
            call
            for call in self.in_flight
            if handle == "*" or call.rid == handle or (by_prefix and call.rid.startswith(handle))
        ]

    async def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> None:
        """Stop admitting, treat the calls in flight as ``mode`` says, and return when that is done.

        ``options.pause_steps`` pass first, in which calls run on. ``clear_cache`` also drops all
        KV: the prefix cache, and the KV of frozen calls, which prefill again after the resume. A
        pause in place drops nothing. Pausing twice is allowed; one resume ends both.
        """
        self._refuse_dead()
        if self.options.pause_steps:
            await asyncio.sleep(self.options.pause_steps * self.options.step)
            self._refuse_dead()
        # a resume may come while this call waits, so it compares the count afterwards
        mode = PauseMode(mode)
        self._pause, resumes = mode, self._resumes
        if mode is PauseMode.ABORT:
            await self._end_all(self.in_flight)
        elif mode is PauseMode.WAIT:
            await self._drain()
        if self._pause is not mode or self._resumes != resumes:
            return  # a resume, or a pause in another mode, came first
        clear = clear_cache and mode is not PauseMode.IN_PLACE
        if mode is PauseMode.RETRACT or (mode is PauseMode.KEEP and clear):
            self._scheduler.preempt(tuple(self._scheduler.running))
        if clear:
            self._scheduler.clear_cache()
        self._recorder.record(
            Pause(server_id=self.server_id, mode=mode, clear_cache=clear, progress=self.progress())
        )

    async def resume(self) -> None:
        """End the pause, if there is one."""
        self._refuse_dead()
        self._pause = None
        self._resumes += 1
        self._recorder.record(Resume(server_id=self.server_id, progress=self.progress()))
        self._wake()

    def run_while_blocked(self) -> None:
        """Run the steps of a transfer that blocks the stack's event loop, but not the engine, which
        is a process of its own. A paused engine samples nothing.
        """
        for _ in range(self.options.transfer_steps):
            if self._has_work():
                self._scheduler.admit(only_started=self.paused)
                self._scheduler.step()

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache; running calls keep their KV."""
        self._refuse_dead()
        self._scheduler.clear_cache()

    def evict(self, call_id: int) -> bool:
        """Preempt a running call: free its KV and put it at the head of the queue.

        Returns False if it does not run.
        """
        return self._scheduler.preempt((call_id,))

    def kill(self) -> None:
        """Die with everything in flight: callers see ``ServerDied``. A dead server stays dead."""
        if not self.alive:
            return
        self.alive = False
        self._pause = None
        self._recorder.record(Fault(what="death", server_id=self.server_id))
        # the client of a stream has received its first tokens when the connection breaks
        for call in self._scheduler.clear():
            if call.wire is not None and call.wire.stream is not None and call.sampled:
                self._recorder.record(
                    broken_stream_reply(
                        call,
                        self._scheduler.version_of(call),
                        self.policy,
                        self.flavour,
                        self._scheduler.label_of(call),
                    )
                )
            if not call.future.done():
                call.future.set_exception(self._died())
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(self._died())

    def revive(self, version: int | None = None, label: Version = None) -> None:
        """Restart without calls, with the old weights or with ``version`` under ``label``.

        A living server is left alone.
        """
        if self.alive:
            return
        self.alive = True
        self._recorder.record(Fault(what="revive", server_id=self.server_id))
        if version is not None and (version, label) != (self.version, self.label):
            same = version == self.version
            self._scheduler.reweigh(version)
            self._publish(label, loaded=True, identity=same)

    def progress(self) -> dict[int, int]:
        """Return the tokens sampled by each call in flight, by call id."""
        return {
            call.call_id: call.sampled
            for call in sorted(self.in_flight, key=lambda call: call.call_id)
        }

    def gauges(self) -> dict[str, float]:
        """Return gauges that are zero when idle: running calls, waiting calls, paused."""
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

    async def _delay_refusal(self) -> None:
        # A client that retries without a pause would otherwise stop the virtual clock.
        await asyncio.sleep(self.options.step / 100)

    def _refused(self, call: Call) -> Reply | None:
        """Return the reply to a call that is turned away, or ``None`` for one that is queued.

        Raises if the flavour refuses by raising.
        """
        length, tokens = len(call.prompt_ids), call.max_tokens
        if not length or length >= self.max_length:
            raise BadCall(f"A prompt must have 1 to {self.max_length - 1} tokens, not {length}.")
        minimum = 0 if self.flavour.zero_budget is Refusal.EMPTY else 1
        if tokens is not None and tokens < minimum:
            raise BadCall(f"max_tokens must be at least {minimum}, not {tokens}.")
        if self.flavour.routes_start and not 0 <= call.routes_start <= length:
            raise BadCall(
                f"routes_start must be 0 to {length}, the length of the prompt, not"
                f" {call.routes_start}."
            )
        if call.adapter is not None:
            self._scheduler.adapters.find(call.adapter)
        rejected = self._hooks.rejects(self._hooks.acting(call))
        if rejected:
            self._recorder.record(
                Fault(what="reject", server_id=self.server_id, call_id=call.call_id)
            )
        if self.paused and self.flavour.paused_calls is PausedCalls.RAISE:
            raise EnginePaused(f"Server {self.server_id} is paused.")
        if not (rejected or (self.paused and self.flavour.paused_calls is PausedCalls.REJECT)):
            return None
        label = self.label
        if call.adapter is not None:
            label = self._scheduler.adapters.find(call.adapter).label
        return empty_abort(call.call_id, self.flavour, label, want_logprobs=call.want_logprobs)

    def _enqueue(self, call: Call, rid: str | None) -> InflightCall:
        length, request_id = len(call.prompt_ids), self._hooks.acting(call)
        adapter = None
        if call.adapter is not None:
            adapter = self._scheduler.adapters.find(call.adapter)
        queued = InflightCall(
            call_id=call.call_id,
            request_id=request_id,
            server_id=self.server_id,
            rid=rid or _made_up_handle(call.call_id),
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
            ends=self._ends,
            watched=self._hooks.watches(request_id),
            draw=self._hooks.draw(call.prompt_ids, call.sampling),
            root=root_of(call.sampling, self._scheduler.identity_of(adapter)),
            adapter=adapter,
            masked_by=call.sampling if call.want_sampling_mask else None,
        )
        self._scheduler.add(queued)
        self._wake()
        return queued

    async def _answer(self, call: InflightCall) -> EngineOutput:
        """Wait for the reply and return it, after the planned faults of its delivery."""
        wire = call.wire
        try:
            await call.future
            late = call.late_by * self.options.step + (0.0 if wire is None else wire.late)
            if late:
                await asyncio.sleep(late)
        except asyncio.CancelledError:
            # The caller has left, so the trace cannot know what it got. A reply that exists is
            # recorded as not delivered: the engine did sample its tokens.
            self._scheduler.drop(call)
            self._report_drained()
            if (
                call.future.done()
                and not call.future.cancelled()
                and call.future.exception() is None
            ):
                self._deliver(self._scheduler.reply(call), delivered=False)
            raise
        reply = self._scheduler.reply(call)
        if call.lost_after is not None:
            self._record_lost_reply(call)
            self._deliver(reply, delivered=False)
            await asyncio.sleep(call.lost_after * self.options.step)
            raise ReplyLost(f"The connection to {self.server_id} broke before the reply arrived.")
        if wire is not None and not wire.delivered:
            self._record_lost_reply(call)
        delivered = wire is None or wire.send(call.call_id)
        self._deliver(reply, delivered=delivered)
        if delivered:
            _announce(call)
        if call.duplicated:
            self._deliver(reply, delivered=False, duplicate=True)
        if wire is not None:
            return reply.output
        output = caller_copy(reply.output)
        if output.routes is not None and output.routes.flags.writeable:
            self.handed_out[call.call_id] = output.routes
        return output

    def _record_lost_reply(self, call: InflightCall) -> None:
        self._recorder.record(
            Fault(what="lost-reply", server_id=self.server_id, call_id=call.call_id)
        )

    def _deliver(self, reply: Reply, *, delivered: bool = True, duplicate: bool = False) -> None:
        fresh = reply.index < 0 and reply.delivered is delivered and reply.duplicate is duplicate
        self._recorder.record(
            reply if fresh else replace(reply, index=-1, delivered=delivered, duplicate=duplicate)
        )

    async def _abort(
        self, handle: str, calls: Sequence[InflightCall], *, injected: bool = False
    ) -> tuple[int, ...]:
        # a call with a cancelled caller is about to be dropped
        awaited = [call for call in calls if not call.future.cancelled()]
        hit = tuple(sorted(call.call_id for call in awaited))
        self._recorder.record(
            Abort(server_id=self.server_id, wanted=handle, call_ids=hit, injected=injected)
        )
        await self._end_all(awaited)
        return hit

    async def _end_all(self, calls: Iterable[InflightCall]) -> None:
        """Abort calls, and let their callers take the replies before anything else happens."""
        for call in calls:
            self._scheduler.end(call, FinishReason.ABORT)
        self._report_drained()
        # a stack that aborts and then updates expects the replies before the update
        await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Wait until every started call has its reply, or until a resume."""
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()
        self._report_drained()
        self._wake()
        await asyncio.shield(self._drained)

    def _report_drained(self) -> None:
        drains = self._pause is PauseMode.WAIT and any(call.started for call in self.in_flight)
        if self._drained is not None and not self._drained.done() and not drains:
            self._drained.set_result(None)

    def _wake(self) -> None:
        """Start the task that steps if there is work."""
        self._report_drained()
        if self._task is None and self._has_work():
            # a copy per task: tasks of one engine must not see variables of another
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
                # an admission may end the last call, too: one that was evicted on its last token
                self._report_drained()
        except Exception as error:  # noqa: BLE001 - must reach the callers, or they would wait forever
            for call in self._scheduler.clear():
                if not call.future.done():
                    call.future.set_exception(error)
        finally:
            self._task = None


def _announce(call: InflightCall) -> None:
    """Note that whatever the running callback leads to in this instant may know of the reply."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        loop.learn((call.call_id, tuple(call.ids[: call.prompt_len])))


def _crossed(prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the calls with this prompt of whose replies the running callback cannot know."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        return ()
    return tuple(call for call, prompt in loop.unaware_of() if prompt == prompt_ids)


def _scalar(value: Any) -> Scalar:
    return value if value is None or isinstance(value, (int, float, str, bool)) else repr(value)


def _made_up_handle(call_id: int) -> str:
    """Return the handle of a call to which its caller gave none."""
    return f"call-{call_id}"
