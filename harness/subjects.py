"""Subjects: what a user implements so that rollproof can run their code.

Every method may be sync or async. Subjects are given as factories (a class, or a function without arguments), so that
each case starts from a fresh one. Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rollproof.contract import Contract
from rollproof.records import BatchRow, EngineOutput, IntArray, Request, Rollout, Version
from rollproof.trace import PauseMode

if TYPE_CHECKING:
    from rollproof.fakes.fleet import Fleet

__all__ = ["BatchSubject", "EngineSubject", "ReplaySubject", "RolloutSubject", "SubjectFactory"]


@runtime_checkable
class RolloutSubject(Protocol):
    """A stack's rollout code: its client, its resume loop, its agent loop.

    ``fleet`` gives fake servers in the face that the stack speaks (``fleet.ray_handles()``, ``fleet.servers``).
    ``rollout`` returns whatever the stack hands over; ``None`` means that the sample was dropped. ``to_record`` turns
    that into a ``Rollout``. ``update_weights`` runs the stack's own procedure for weights ``version`` (``None``: without
    a label), or ``await fleet.sync(version)`` where the stack leaves it to its caller. A subject may also have
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
    """A rollout engine, real or fake, driven call by call; resuming is rollproof's part."""

    contract: Contract

    def generate(self, request: Request, prompt_ids: tuple[int, ...], max_tokens: int) -> EngineOutput | Awaitable[EngineOutput]: ...
    def abort(self, request_id: str) -> Awaitable[None] | None: ...
    def pause(self, mode: PauseMode) -> Awaitable[None] | None: ...
    def resume(self) -> Awaitable[None] | None: ...
    def update_weights(self, version: Version) -> Awaitable[None] | None: ...


@runtime_checkable
class ReplaySubject(Protocol):
    """A trainer with routing replay. ``routers`` maps global layer indexes to modules; ``observe`` tells the ids really used."""

    contract: Contract

    def routers(self) -> Mapping[int, Any]: ...
    def install(self, routes: IntArray, layout: Any) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def observe(self) -> Mapping[int, IntArray]: ...
    def clear(self) -> None: ...


@runtime_checkable
class BatchSubject(Protocol):
    """A function from finished samples to a training batch (padding, packing, splitting), and back.

    ``collate`` hands the samples to the stack's own conversion, in order, and returns what that returns; what it raises
    counts as a refusal. ``rows`` tells what each sample became. ``contract`` declares the samples' convention of rows,
    and what the *batch* holds: its dtype, and the filler where nothing was captured.
    """

    contract: Contract

    def collate(self, samples: list[Rollout]) -> Any: ...
    def rows(self, batch: Any) -> list[BatchRow]: ...


SubjectFactory: TypeAlias = "Callable[[], Any]"
"""Makes a fresh subject: a class or a function without arguments."""
