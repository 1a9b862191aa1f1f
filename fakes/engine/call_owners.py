"""Which request of a case an engine call belongs to.

In order of certainty: the stack says that it belongs to none (``Fleet.internal``); the handle of
the call names a request; its tokens begin with the prompt of one request only, or continue what one
request sampled; its task works for a request. What the last two leave open is a guess. The call
then lists the requests to which it may belong: the judge decides by the delivered samples, or
leaves the call out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar

from rollproof.core.call_ownership import CallOwner, named_request
from rollproof.core.events.rollout import Fault, Result, Submit
from rollproof.core.records import FinishReason, Request, Scalar
from rollproof.core.sampling_masks import is_greedy
from rollproof.core.trace import Recorder
from rollproof.fakes.engine.inflight import FirstDraw, InflightCall

__all__ = ["CURRENT_REQUEST", "CallOwners", "InternalCalls"]

CURRENT_REQUEST: ContextVar[str | None] = ContextVar("rollproof_current_request", default=None)
"""The request that the running task works for; set by the caller of ``rollout``."""

_SEEDS = ("seed", "sampling_seed")


class InternalCalls(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """Let the calls inside belong to no request: those of the task, and of tasks begun inside.

    It stores no token of the context variable, because fixtures and generators may leave the block
    in another task than they entered it in. Leaving ends it for the task that leaves, if that task
    was inside.
    """

    __slots__ = ("_owners",)

    def __init__(self, owners: CallOwners) -> None:
        self._owners = owners

    def __enter__(self) -> None:
        # a block of an earlier case that nobody left says nothing of this case
        inside = [block for block in _INSIDE.get() if block.owners is self._owners]
        _INSIDE.set((*inside, self))

    def __exit__(self, *_: object) -> None:
        inside = list(_INSIDE.get())
        if self in inside:
            inside.remove(self)
            _INSIDE.set(tuple(inside))

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    @property
    def owners(self) -> CallOwners:
        """The owners to none of whose requests the calls belong."""
        return self._owners


_INSIDE: ContextVar[tuple[InternalCalls, ...]] = ContextVar("rollproof_internal_calls", default=())
"""The blocks of ``Fleet.internal`` that the running task is inside of."""


class CallOwners:
    """The requests of a case and what is known of their calls.

    ``latest`` has the last call of each request that entered a queue.
    """

    def __init__(self, requests: Iterable[Request], recorder: Recorder) -> None:
        self.latest: Mapping[str, InflightCall] = {}
        self._requests = {request.request_id: request for request in requests}
        self._recorder = recorder
        self._read = 0
        self._open: set[str] = set()
        self._faulty: set[int] = set()
        self._last: dict[str, CallOwner] = {}
        prompts = [request.prompt_ids for request in self._requests.values()]
        self._begun: dict[tuple[int, ...], set[int]] = {
            prompt: set() for prompt in prompts if prompts.count(prompt) > 1
        }

    def of(self, prompt_ids: tuple[int, ...], rid: str | None) -> CallOwner:
        """Return the request of a call."""
        self._catch_up()
        if any(block.owners is self for block in _INSIDE.get()):
            return CallOwner(internal=True)
        fitting = [
            name
            for name, request in self._requests.items()
            if prompt_ids[: len(request.prompt_ids)] == request.prompt_ids
        ]
        named, current = named_request(rid, self._requests), CURRENT_REQUEST.get()
        if not fitting:
            # a call with a wrong prompt, or one for another purpose
            guess = named or current or ""
            return CallOwner(request_id=guess, candidates=(guess,) if guess else ())
        if named is not None and named in fitting:
            # handles of a stack's own making may look like ids: then the task contradicts them
            doubted = current in fitting and current in self._open and current != named
            owner = CallOwner(
                request_id=named, candidates=(current,) if doubted and current else ()
            )
        else:
            owner = self._by_tokens(prompt_ids, fitting, current)
        self._last[owner.request_id or owner.acting] = owner
        return owner

    def draw(self, prompt_ids: tuple[int, ...], sampling: Mapping[str, Scalar]) -> FirstDraw:
        """Return how the first token of a call is drawn.

        The calls that begin samples of one prompt get one token each, unless they are greedy; a
        seed is a draw of its own, the same for each call with it.
        """
        if prompt_ids not in self._begun or is_greedy(sampling):
            return FirstDraw()
        seed = next((sampling[name] for name in _SEEDS if sampling.get(name) is not None), None)
        if seed is None:
            return FirstDraw(taken=self._begun[prompt_ids])
        return FirstDraw(seed=seed if isinstance(seed, int) else 0)

    def _by_tokens(
        self, prompt_ids: tuple[int, ...], fitting: list[str], current: str | None
    ) -> CallOwner:
        live = [name for name in fitting if name in self._open]
        own = current if current in (live or fitting) else None
        if len(fitting) == 1:
            # in the task of another request it may be a call for another purpose
            elsewhere = own is None and current is not None
            return CallOwner(request_id=fitting[0], candidates=(fitting[0],) if elsewhere else ())
        continued = self._continued(prompt_ids, fitting, own)
        if continued is not None:
            # a sequence stays whole: its calls are as certain as the one that began it
            return self._last[continued]
        # one prompt may be the beginning of another: the longer one is the more likely owner
        longest = max(len(self._requests[name].prompt_ids) for name in live or fitting)
        prompt = self._requests[own].prompt_ids if own else prompt_ids[:longest]
        twins = [name for name in live or fitting if self._requests[name].prompt_ids == prompt]
        if own is None:
            if len(twins) == 1:
                return CallOwner(request_id=twins[0])
            return CallOwner(candidates=tuple(twins), acting=min(twins, key=self._busy))
        fresh = [name for name in twins if name != own and name not in self.latest]
        begins_another = prompt_ids == prompt and self._ended_by_engine(own)
        owner = fresh[0] if begins_another and fresh else own
        # so a worker with the context of the shorter one may call for the longer one
        rivals = [name for name in live or fitting if self._begins_later(name, own)]
        return CallOwner(
            request_id=owner,
            candidates=tuple(name for name in (*twins, *rivals) if name != owner),
        )

    def _begins_later(self, name: str, own: str) -> bool:
        """Return whether the prompt of another request is longer than that of the task's."""
        return len(self._requests[name].prompt_ids) > len(self._requests[own].prompt_ids)

    def _continued(
        self, prompt_ids: tuple[int, ...], fitting: list[str], own: str | None
    ) -> str | None:
        """Return the request with the sampled tokens that a call continues, if there is one: that
        of the task, if the call has all tokens of it.
        """
        shared = {name: self._shared(name, prompt_ids) for name in fitting}
        if own is not None and shared[own]:
            start = len(self._requests[own].prompt_ids)
            if shared[own] == len(self.latest[own].ids) - start:
                return own
        most = max(shared.values())
        best = [name for name, count in shared.items() if count == most]
        return best[0] if most and len(best) == 1 else None

    def _shared(self, name: str, prompt_ids: tuple[int, ...]) -> int:
        """Return how many tokens that a request sampled a call sends."""
        last, start = self.latest.get(name), len(self._requests[name].prompt_ids)
        if last is None:
            return 0
        pairs = zip(last.ids[start:], prompt_ids[start:], strict=False)
        return next(
            (count for count, (a, b) in enumerate(pairs) if a != b),
            min(len(last.ids), len(prompt_ids)) - start,
        )

    def _busy(self, name: str) -> int:
        """Return the evidence against a request that may begin with a call: none, if it has not
        called yet; most, if a call of it is in flight.
        """
        last = self.latest.get(name)
        if last is None:
            return 0
        return 3 if not last.future.done() else 2 if self._ended_by_engine(name) else 1

    def _ended_by_engine(self, name: str) -> bool:
        """Whether an engine ended the request's last call, so that a call with its prompt begins
        another one.

        After a fault of that call it may be a retry: a client that never got the reply sends the
        same prompt again.
        """
        last = self.latest.get(name)
        return (
            last is not None
            and last.ended is not None
            and last.ended[0] is not FinishReason.ABORT
            and last.call_id not in self._faulty
        )

    def _catch_up(self) -> None:
        """Read what was recorded since the last time."""
        for event in self._recorder.since(self._read):
            self._read = event.index + 1
            if isinstance(event, Submit):
                self._open.add(event.request.request_id)
            elif isinstance(event, Result):
                self._open.discard(event.request_id)
            elif isinstance(event, Fault) and event.call_id is not None:
                self._faulty.add(event.call_id)
