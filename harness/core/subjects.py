"""Subjects: what a user implements so that rollproof can run their code.

Every method may be sync or async, but for those of an ``EngineSubject``, which are async. Subjects
are given as factories (a class, or a function without arguments), so that each case starts from a
fresh one. Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import BatchRow, EngineOutput, Request, Rollout

if TYPE_CHECKING:
    from rollproof.core.engine_protocol import Query, Watch, WeightUpdate
    from rollproof.core.events.replay import Outcome, Step
    from rollproof.core.router_spy import Spy
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["BatchSubject", "EngineSubject", "ReplaySubject", "RolloutSubject", "SubjectFactory"]


@runtime_checkable
class RolloutSubject(Protocol):
    """A stack's rollout code: its client, its resume loop, its agent loop.

    ``fleet`` gives fake servers in the face that the stack speaks (``fleet.ray_handles()``,
    ``fleet.servers``). ``rollout`` returns whatever the stack hands over; ``None`` means that the
    sample was dropped. ``to_record`` turns that into a ``Rollout``. ``update_weights`` runs the
    stack's own procedure for weights ``version`` (``None``: without a label), or ``await
    fleet.sync(version)`` where the stack leaves it to its caller. A subject may also have
    ``gauges() -> Mapping[str, float]``: counters that must return to where they started.
    """

    contract: Contract

    def start(self, fleet: Fleet) -> Awaitable[None] | None: ...
    def rollout(self, request: Request) -> Any: ...
    def update_weights(self, version: int | None) -> Awaitable[None] | None: ...
    def to_record(self, native: Any) -> Rollout | Awaitable[Rollout]: ...
    def stop(self) -> Awaitable[None] | None: ...


@runtime_checkable
class EngineSubject(Protocol):
    """A rollout engine, real or fake, driven call by call (``rollproof.engines``); resuming is
    rollproof's part.

    ``contract`` declares the engine's conventions, with its ``engine`` terms; it is read before
    ``start``, too. ``generate`` returns one output per sample, in order, and tells ``watch`` of
    every piece that the engine streams; calls run at the same time. A call that the engine refuses
    raises. ``abort`` ends the calls whose handle is given, ``pause`` and ``resume`` act on the
    whole engine: after ``pause`` has returned, it is in force. ``update_weights`` returns when the
    new weights serve. ``clear_cache`` forgets KV that calls share. ``counters`` are the engine's
    own, among them ``preemptions`` (since its start) where it counts them. ``stop`` leaves nothing
    running; it is called after a failed ``start``, too.
    """

    contract: Contract

    async def start(self) -> None: ...
    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]: ...
    async def abort(self, handle: str) -> None: ...
    async def pause(self, mode: PauseMode, clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, update: WeightUpdate) -> None: ...
    async def clear_cache(self) -> None: ...
    async def counters(self) -> Mapping[str, float]: ...
    async def stop(self) -> None: ...


@runtime_checkable
class ReplaySubject(Protocol):
    """A trainer with routing replay, driven step by step (``rollproof.replay``).

    ``contract`` is one with ``replay`` terms. ``run`` does one step the trainer's own way, from
    installing targets to its own cleaning up, and tells the spy of every call of a router and of
    every target that is installed. What it raises is judged.

    Optional, each for the checks that need it: ``set_weights(number)`` (0: the first weights; n >
    0: those plus noise, seeded by n, so large that routing changes; -1: the first ones with NaN in
    the first gate), ``nudge(layer, size)`` (adds ``size`` times ``spy.direction`` to the gate
    weight of a layer until the next ``set_weights``), ``residue() -> Mapping[str, int]`` (what is
    left of replay, each of which ought to be 0), ``variant(name)`` (another subject: with a router
    that must be refused, or ``no-moe-layers``), ``reference(step) -> Outcome`` (the step by a path
    that shares nothing with the replay code), ``stop()``.
    """

    contract: Contract

    def run(self, step: Step, spy: Spy) -> Outcome | Awaitable[Outcome]: ...


@runtime_checkable
class BatchSubject(Protocol):
    """A function from finished samples to a training batch (padding, packing, splitting), and back.

    ``collate`` hands the samples to the stack's own conversion, in order, and returns what that
    returns; what it raises counts as a refusal. ``rows`` tells what each sample became.
    ``contract`` declares the samples' convention of rows, and what the *batch* holds: its dtype,
    and the filler where nothing was captured.
    """

    contract: Contract

    def collate(self, samples: list[Rollout]) -> Any: ...
    def rows(self, batch: Any) -> list[BatchRow]: ...


SubjectFactory: TypeAlias = "Callable[[], Any]"
"""Makes a fresh subject: a class or a function without arguments."""
