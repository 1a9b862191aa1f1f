"""Continuous batching: what a fake engine computes in a step, and for which calls.

Calls run in the order of their admission, so that one seed gives one trace.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Container, Hashable, Iterator, Mapping

from rollproof.core.call_ownership import CallOwner
from rollproof.core.case import EngineOptions
from rollproof.core.error_text import describe_error_with_place
from rollproof.core.events.rollout import Admit, Call, Reply
from rollproof.core.records import FinishReason, Scalar, Version
from rollproof.core.trace import Recorder
from rollproof.errors import RollproofError, SubjectError
from rollproof.fakes.coded.policy import CodedPolicy
from rollproof.fakes.engine.adapters import AdapterTable, AlteredKey, LoadedAdapter
from rollproof.fakes.engine.exceptions import BadCall
from rollproof.fakes.engine.flavours import AdapterIdentity, Flavour
from rollproof.fakes.engine.inflight import FirstDraw, InflightCall
from rollproof.fakes.engine.kv_cache import PrefixCache
from rollproof.fakes.engine.replies import reply_to

__all__ = ["EngineHooks", "Scheduler"]

_DRAWS = 256
"""How often a first token is drawn again if another sample of the prompt has it; a small vocabulary
may have no other.
"""


class EngineHooks:
    """Callbacks of an engine. These are the defaults, for an engine without a fleet."""

    def __init__(self) -> None:
        self._calls = 0
        # Servers run in this context: they work for all callers, so the context of one caller
        # (its current request) must not reach them.
        self.context: contextvars.Context = contextvars.copy_context()

    def new_call(self) -> int:
        """Return the id of the next call, from 1."""
        self._calls += 1
        return self._calls

    def owner(self, prompt_ids: tuple[int, ...], rid: str | None) -> CallOwner:
        """Return the request that a call belongs to."""
        return CallOwner(request_id=rid or "")

    def acting(self, call: Call) -> str:
        """Return the request whose actions a call triggers; called while the call is made."""
        return call.request_id

    def draw(self, prompt_ids: tuple[int, ...], sampling: Mapping[str, Scalar]) -> FirstDraw:
        """Return how the first token of a call is drawn."""
        return FirstDraw()

    def rejects(self, request_id: str) -> bool:
        """Whether this call is turned away."""
        return False

    def queued(self, call: InflightCall) -> bool:
        """Called when a call enters the queue; return True to keep it there for a step."""
        return False

    def admitted(self, call: InflightCall) -> None:
        """Called when a call leaves the queue, before the step that samples its next token."""

    def watches(self, request_id: str) -> bool:
        """Whether ``sampled`` and ``checked`` are called for each token of this request."""
        return False

    def sampled(self, call: InflightCall) -> bool:
        """Called after a token; return True to have the end of the call checked a step later."""
        return False

    def checked(self, call: InflightCall) -> None:
        """Called after the engine has checked whether the token ends the call."""


class Scheduler:
    """The calls and the KV of one server, with weights ``version`` shown under ``label``."""

    def __init__(
        self,
        server_id: str,
        policy: CodedPolicy,
        flavour: Flavour,
        options: EngineOptions,
        recorder: Recorder,
        hooks: EngineHooks,
        version: int,
        label: Version,
    ) -> None:
        self.version: int = version
        self.altered: AlteredKey | None = None
        self.label = label
        self.queue: deque[InflightCall] = deque()
        self.running: dict[int, InflightCall] = {}
        self.cache: PrefixCache = PrefixCache()
        self.adapters: AdapterTable = AdapterTable(server_id, recorder)
        self._server_id = server_id
        self._policy = policy
        self._flavour = flavour
        self._options = options
        self._recorder = recorder
        self._hooks = hooks

    @property
    def in_flight(self) -> list[InflightCall]:
        """Return the calls without a reply: running ones, then waiting ones."""
        return [*self.running.values(), *self.queue]

    @property
    def holds_kv(self) -> bool:
        """Whether there is KV that a later forward may use."""
        return len(self.cache) > 0 or any(
            call.kv.computed and not self._is_complete(call) for call in self.running.values()
        )

    def add(self, call: InflightCall) -> None:
        """Put a call into the queue."""
        self.queue.append(call)
        call.stays_queued = self._hooks.queued(call)

    def admit(self, only_started: bool) -> None:
        """Let calls leave the queue while there is room; with ``only_started``, preempted ones."""
        for call in self._eligible(only_started):
            if len(self.running) >= self._options.max_batch or not self._room_for(call):
                return
            self.queue.remove(call)
            if call.adapter is not None and not self._bind(call, call.adapter):
                continue
            call.running = call.started = True
            self.running[call.call_id] = call
            self._recorder.record(Admit(call_id=call.call_id, server_id=self._server_id))
            if self._options.prefix_cache:
                # the last token is always forwarded: its output is the next token
                call.kv.adopt(self.cache.find(call.ids, len(call.ids) - 1, call.root))
            if call.cached is None:
                call.cached = call.kv.computed
                call.admission_label = self.label_of(call)
            self._hooks.admitted(call)

    def step(self) -> None:
        """Run one forward of the batch: chunks of prefill, and a token for each decoding call."""
        policy, chunk = self._policy, self._options.prefill_chunk
        for call in tuple(self.running.values()):
            # an action raced with the end of this call; an engine sees the end in its next step
            if call.deferred and self._finished(call):
                continue
            was_decoding = call.decoding
            if not was_decoding:
                done = self._prefill(call, chunk)
                if chunk is not None:
                    chunk -= done
            if not call.decoding:
                continue
            # a budget of no tokens: the prompt is computed, and the call ends
            if not was_decoding and len(call.ids) >= call.limit:
                self.end(call, FinishReason.LENGTH)
                continue
            token = (
                policy.next_token(call.key, call.state)
                if len(call.ids) > call.prompt_len
                else self._first_token(call)
            )
            call.state = policy.extend(call.state, token)
            call.ids.append(token)
            if call.wire is not None and call.wire.on_token is not None:
                call.wire.on_token(call)
            if call.watched or token in call.ends or len(call.ids) >= call.limit:
                self._check_end(call)
        self._make_room()

    def end(self, call: InflightCall, reason: FinishReason) -> None:
        """End a call: it leaves the batch, and its caller can take the reply."""
        # the reply and the prefix cache need the KV up to the last token
        call.settle(self.version_of(call))
        if self.running.pop(call.call_id, None) is None:
            if call in self.queue:
                self.queue.remove(call)
        else:
            self._share(call)
        if not call.future.done():
            call.ended = (reason, self.label_of(call))
            call.future.set_result(None)

    def reply(self, call: InflightCall) -> Reply:
        """Return the reply of a call that ended.

        Raises ``SubjectError`` if the policy fails on it.
        """
        try:
            return reply_to(call, self._policy, self._flavour)
        except RollproofError:
            raise
        except Exception as error:
            raise SubjectError(
                f"The policy {type(self._policy).__name__} raised"
                f" {describe_error_with_place(error)} when the reply to call {call.call_id} was"
                " made."
            ) from error

    def drop(self, call: InflightCall) -> None:
        """Forget a call after its caller has left."""
        self.running.pop(call.call_id, None)
        if call in self.queue:
            self.queue.remove(call)

    def preempt(self, call_ids: Container[int]) -> bool:
        """Free the KV of running calls and put them at the head of the queue, the oldest first.

        Returns whether there were any. A call that has all its tokens stays: engines process the
        results that they have before they retract.
        """
        calls = [
            call
            for call in self.running.values()
            if call.call_id in call_ids and not self._is_complete(call)
        ]
        # from the youngest on, so that the oldest ends up at the head of the queue
        for call in reversed(calls):
            call.settle(self.version_of(call))
            call.drop_kv(self._flavour)
            call.running = call.deferred = False
            del self.running[call.call_id]
            self.queue.appendleft(call)
        return bool(calls)

    @property
    def key(self) -> Version:
        """The key of the base model's weights: its version, unless they are of no version."""
        return self.version if self.altered is None else self.altered

    def reweigh(self, version: int, altered: AlteredKey | None = None) -> None:
        """Compute under weights ``version`` from the next step on, or under ``altered``."""
        # KV up to here is of the old weights; later forwards read it and are coded as mixed
        for call in self.running.values():
            call.settle(self.version_of(call))
        self.version, self.altered = version, altered
        for call in self.running.values():
            call.rekey(self.version_of(call))

    def show(self, label: Version) -> None:
        """Show ``label`` from the next token on."""
        self.label = label
        for call in self.in_flight:
            if call.labels and call.adapter is None:
                call.mark_label(label)

    def version_of(self, call: InflightCall) -> Version:
        """Return the key of the weights that compute for a call."""
        return self.key if call.adapter is None else call.adapter.key(self.key)

    def label_of(self, call: InflightCall) -> Version:
        """Return the label that is shown for a call."""
        return self.label if call.adapter is None else call.adapter.label

    def identity_of(self, adapter: LoadedAdapter | None) -> Hashable:
        """Return what the prefix cache takes for the identity of an adapter."""
        if adapter is None:
            return None
        by_load = self._flavour.adapter_identity is AdapterIdentity.LOAD
        return adapter.name, adapter.number if by_load else 0

    def _bind(self, call: InflightCall, adapter: LoadedAdapter) -> bool:
        """Make the adapter of a call ready; return False if the call is refused."""
        # SGLang looks the name up only when it is resumed (tokenizer_manager.py), vLLM at once
        if not call.started and not self._flavour.adapters_in_place:
            try:
                adapter = self.adapters.find(adapter.name)
            except BadCall as error:
                call.future.set_exception(error)
                return False
            if adapter is not call.adapter:
                call.adapter = adapter
                call.root = call.root._replace(adapter=self.identity_of(adapter))
        if adapter.evicted:
            self.adapters.reload(adapter)
        return True

    def replace_adapter(self, old: LoadedAdapter, new: LoadedAdapter) -> None:
        """Give an adapter other weights in place, also under the calls that run by it."""
        calls = [call for call in self.running.values() if call.adapter is old]
        for call in calls:
            call.settle(self.version_of(call))
        old.version, old.base, old.label, old.scale = new.version, new.base, new.label, new.scale
        old.evicted = False
        for call in calls:
            call.rekey(self.version_of(call))
            if call.labels:
                call.mark_label(old.label)

    def clear_cache(self) -> None:
        """Clear the prefix cache; running calls keep their KV and share it no more."""
        self.cache.clear()
        for call in self.running.values():
            # KV of before the flush must not come back into the cache when the call ends
            call.shares = False

    def clear(self) -> list[InflightCall]:
        """Drop all calls and KV; return the calls that were in flight."""
        lost = self.in_flight
        self.running.clear()
        self.queue.clear()
        self.cache.clear()
        return lost

    def _first_token(self, call: InflightCall) -> int:
        """Return the first token of a call, see ``FirstDraw``."""
        policy, draw = self._policy, call.draw
        call.drawn = draw.seed
        token = policy.draw(call.key, call.state, draw.seed)
        if draw.taken is None:
            return token
        numbers = range(draw.seed, draw.seed + min(_DRAWS, policy.vocab))
        tokens = ((number, policy.draw(call.key, call.state, number)) for number in numbers)
        free = ((number, token) for number, token in tokens if token not in draw.taken)
        call.drawn, token = next(free, (0, policy.draw(call.key, call.state, 0)))
        draw.taken.add(token)
        return token

    def _eligible(self, only_started: bool) -> Iterator[InflightCall]:
        for call in tuple(self.queue):
            if call.stays_queued:
                call.stays_queued = False
            elif call.started or not only_started:
                yield call

    def _prefill(self, call: InflightCall, chunk: int | None) -> int:
        """Compute up to ``chunk`` positions and return how many; after the last one, decode."""
        missing = len(call.ids) - call.kv.computed
        count = missing if chunk is None else min(chunk, missing)
        if not count:
            return 0
        key = call.kv.forward(self.version_of(call), call.kv.computed + count)
        if count == missing:
            call.decoding = True
            call.mark_key(key)
            call.mark_label(self.label_of(call))
            self._share(call)
        return count

    def _share(self, call: InflightCall) -> None:
        if self._options.prefix_cache and call.shares:
            self.cache.store(call.ids, call.kv.spans, call.root)

    def _check_end(self, call: InflightCall) -> None:
        """Call the hooks after a token, and end the call if the token ends it."""
        if not call.watched:
            self._finished(call)
            return
        call.deferred = self._hooks.sampled(call)
        if not call.deferred:
            self._finished(call)
        self._hooks.checked(call)

    def _finished(self, call: InflightCall) -> bool:
        """End the call if its last token ends it; return whether it did."""
        call.deferred = False
        if not self._is_complete(call):
            return False
        stopped = call.sampled > 0 and call.ids[-1] in call.ends
        self.end(call, FinishReason.STOP if stopped else FinishReason.LENGTH)
        return True

    def _is_complete(self, call: InflightCall) -> bool:
        return len(call.ids) >= call.limit or (call.sampled > 0 and call.ids[-1] in call.ends)

    def _room_for(self, call: InflightCall) -> bool:
        capacity = self._options.kv_tokens
        return (
            capacity is None or not self.running or self._used_tokens() + len(call.ids) < capacity
        )

    def _make_room(self) -> None:
        """Preempt the youngest calls until the KV fits."""
        capacity = self._options.kv_tokens
        if capacity is None:
            return
        # the oldest call may exceed the capacity alone, or no call would ever end
        for call in reversed(tuple(self.running.values())[1:]):
            if self._used_tokens() <= capacity:
                return
            self.preempt((call.call_id,))

    def _used_tokens(self) -> int:
        return sum(len(call.ids) for call in self.running.values())
