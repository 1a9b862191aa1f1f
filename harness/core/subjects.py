"""The protocols that a user implements so that rollproof can run their code.

Every method may be sync or async, except those of an ``EngineSubject``, which are async. Subjects
are passed as factories (a class, or a function without arguments), so that each case starts with a
fresh one. Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rollproof.core.contract import Contract
from rollproof.core.engine_contract import PauseMode
from rollproof.core.records import BatchRow, EngineOutput, Request, Rollout

if TYPE_CHECKING:
    # Only annotations name these: the fleet is in a higher layer, and importing it takes a while.
    # It is no protocol of fewer methods, because a user's `start(self, fleet: rollproof.Fleet)`
    # would then not be of the type that `RolloutSubject` says.
    from rollproof.core.engine_protocol import Query, Watch, WeightUpdate
    from rollproof.core.events.replay import Outcome, Step
    from rollproof.core.router_spy import Spy
    from rollproof.fakes.engine.fleet import Fleet

__all__ = ["BatchSubject", "EngineSubject", "ReplaySubject", "RolloutSubject", "SubjectFactory"]


@runtime_checkable
class RolloutSubject(Protocol):
    """A stack's rollout code: its client, its resume loop, its agent loop.

    A subject may also have ``gauges() -> Mapping[str, float]``: counters that must return to where
    they started.
    """

    contract: Contract

    def start(self, fleet: Fleet) -> Awaitable[None] | None:
        """Start the stack on fake servers, in the form that it calls: ``fleet.ray_handles()``,
        ``fleet.servers``.
        """

    def rollout(self, request: Request) -> Any:
        """Return whatever the stack returns; ``None`` if it dropped the sample."""

    def update_weights(self, version: int | None) -> Awaitable[None] | None:
        """Run the stack's own procedure for weights ``version`` (``None``: without a label), or
        ``await fleet.sync(version)`` if the stack leaves it to its caller.

        When it returns, every server that was alive all the time admits calls under these weights
        or newer ones only; otherwise it raises. ``fleet.weights_of(version)`` are the weights.
        """

    def to_record(
        self, native: Any
    ) -> Rollout | Sequence[Rollout] | Awaitable[Rollout | Sequence[Rollout]]:
        """Convert what ``rollout`` returned: into a list of samples if a request may deliver
        several (``Contract.samples``).
        """
        ...

    def stop(self) -> Awaitable[None] | None:
        """Stop the stack."""


@runtime_checkable
class EngineSubject(Protocol):
    """A rollout engine, real or fake, driven call by call (``rollproof.engines``). rollproof does
    the resuming.

    ``contract`` declares the engine's conventions, with its ``engine`` terms; it is also read
    before ``start``.
    """

    contract: Contract

    async def start(self) -> None:
        """Start the engine."""

    async def generate(self, query: Query, watch: Watch) -> Sequence[EngineOutput]:
        """Return one output per sample, in order, and call ``watch`` with every piece that the
        engine streams. Calls run at the same time. Raise for a call that the engine refuses.
        """
        ...

    async def abort(self, handle: str) -> None:
        """End the calls that have this handle."""

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause the engine. When this returns, the pause is in force."""

    async def resume(self) -> None:
        """Resume the engine."""

    async def update_weights(self, update: WeightUpdate) -> None:
        """Return when the new weights serve."""

    async def clear_cache(self) -> None:
        """Forget the KV that calls share."""

    async def counters(self) -> Mapping[str, float]:
        """Return the engine's own counters, among them ``preemptions`` (since its start) if it
        counts them.
        """
        ...

    async def stop(self) -> None:
        """Leave nothing running. Also called after a failed ``start``."""


@runtime_checkable
class ReplaySubject(Protocol):
    """A trainer with routing replay, driven step by step (``rollproof.replay``).

    ``contract`` has ``replay`` terms. The other methods are optional; some checks need them:

    - ``set_weights(number)``: load weights. 0: the initial ones; n > 0: those plus noise that is
      seeded by n and changes the routing; -1: those with NaN in the first gate.
    - ``nudge(layer, size)``: add ``size`` times ``spy.direction`` to the gate weight of a layer,
      until the next ``set_weights``.
    - ``residue() -> Mapping[str, int]``: count the state of replay that is left (targets, queues,
      hooks). Every count should be 0.
    - ``variant(name)``: return another subject, with a router that must be refused, or without MoE
      layers (``no-moe-layers``).
    - ``reference(step) -> Outcome``: run the step by code that shares nothing with the replay code.
      Nothing else is compared with the router weights of replayed experts.
    - ``stop()``: release everything.
    """

    contract: Contract

    def run(self, step: Step, spy: Spy) -> Outcome | Awaitable[Outcome]:
        """Run one step as the trainer does, from installing targets to its own cleanup, and report
        every router call and every installed target to the spy. An exception is recorded and
        judged.
        """
        ...


@runtime_checkable
class BatchSubject(Protocol):
    """A function from finished samples to a training batch (padding, packing, splitting), and back.

    ``contract`` declares the row convention of the samples, and the dtype and the filler of the
    *batch*.
    """

    contract: Contract

    def collate(self, samples: list[Rollout]) -> Any:
        """Pass the samples to the stack's own conversion, in order, and return its result. An
        exception counts as a refusal.
        """

    def rows(self, batch: Any) -> list[BatchRow]:
        """Return what each sample became."""
        ...


SubjectFactory: TypeAlias = "Callable[[], Any]"
"""Makes a fresh subject: a class or a function without arguments."""
