"""Runner: runs one case against a fresh subject on the virtual clock, and gives the trace of what happened."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollproof import clock
from rollproof.case import Case
from rollproof.contract import Contract
from rollproof.errors import RollproofError, SubjectError
from rollproof.fakes.fleet import CURRENT_REQUEST, Fleet
from rollproof.lending import WATCH, Watch
from rollproof.records import Request, Rollout
from rollproof.subjects import RolloutSubject, SubjectFactory
from rollproof.trace import Event, Gauge, Header, Recorder, Result, Submit, Trace

__all__ = ["idle_contracts", "run_case"]

_THEIRS = (Exception, asyncio.CancelledError, GeneratorExit, SystemExit)
"""What a subject's code may raise; a ``KeyboardInterrupt`` is the user's own."""
_JUMPS = 100_000
"""How often time may pass in one case: ten times what polling once a second up to the deadline needs."""
_METHODS = ("start", "rollout", "update_weights", "to_record", "stop")
_ARRAYS = ("logprobs", "loss_mask", "routes")


def run_case(
    factory: SubjectFactory,
    case: Case,
    *,
    name: str = "",
    profile: str = "",
    recipe: Mapping[str, Any] | None = None,
) -> Trace:
    """Run ``case`` against ``factory()`` and return its trace.

    What the subject raises in ``rollout`` becomes a ``Result`` with an error, a rollout that never ends one that hung.
    Raises ``SubjectError`` where the subject does not implement its protocol, fails to start, hands ``to_record`` something it
    does not turn into a ``Rollout``, or needs threads, sockets or an event loop of its own.
    """
    run = _Run(factory, case)
    try:
        clock.run(run.main, _JUMPS)
    except clock.Stalled as stall:
        run.stalled(str(stall))
    header = Header(
        subject=name or _name_of(factory),
        contract=run.contract,
        engine=run.fleet.engine_contract,
        seed=case.seed,
        profile=profile,
        coding=run.fleet.policy.to_dict(),
        case=case.to_dict(),
        recipe=recipe,
    )
    return Trace(header=header, events=run.finished_events())


def idle_contracts(factory: SubjectFactory, case: Case) -> tuple[Contract, Contract]:
    """Start and stop a fresh subject without asking anything of it: its contract, and that of the engines it was given."""
    run = _Run(factory, case)
    try:
        clock.run(run.idle)
    except clock.Stalled as stall:
        run.stalled(str(stall))
    return run.contract, run.fleet.engine_contract


@dataclass(slots=True)
class _Ended:
    """A request's end, kept so that its arrays can be compared with what they were when the run is over."""

    index: int
    native: Any
    rollout: Rollout


@dataclass
class _Run:
    factory: SubjectFactory
    case: Case
    events: list[Event] = field(default_factory=list)
    ended: list[_Ended] = field(default_factory=list)
    later: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pending: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    fleet: Fleet = field(init=False)
    recorder: Recorder = field(init=False)
    subject: Any = field(init=False, default=None)
    started: bool = field(init=False, default=False)

    @property
    def contract(self) -> Contract:
        contract = getattr(self.subject, "contract", None)
        if not isinstance(contract, Contract):
            raise SubjectError(f"{_name_of(self.factory)} must have a `contract` of type Contract after start, not {contract!r}.")
        return contract

    async def start(self) -> None:
        """Make fleet and subject. An ill-typed contract is refused before anything runs."""
        self.recorder = Recorder(asyncio.get_running_loop().time)
        self.fleet = Fleet(self.case, self.recorder)
        self.subject = self._make()
        await self._bounded("start", self.fleet)
        assert self.contract
        self.fleet.set_updater(self._update)
        self.started = True

    async def idle(self) -> None:
        """Start and stop."""
        await self.start()
        await self._bounded("stop")

    async def _bounded(self, method: str, *args: Any) -> None:
        """``start`` or ``stop``, up to the case's deadline."""
        try:
            async with asyncio.timeout(self.case.deadline):
                await _call(self.subject, method, *args)
        except TimeoutError:
            raise SubjectError(
                f"{_name_of(self.factory)}: `{method}` never ended: the virtual deadline of {self.case.deadline:g} s passed."
            ) from None

    async def main(self) -> None:
        """The whole run."""
        await self.start()
        loop = asyncio.get_running_loop()
        self._gauge("start")
        tasks = []
        for i, request in enumerate(self.case.requests):
            task = loop.create_task(self._one(request, self.case.arrivals[i] if self.case.arrivals else 0.0))
            self.pending[request.request_id] = task
            tasks.append(task)
        done, hung = await asyncio.wait(tasks, timeout=self.case.deadline)
        for task in done:
            task.result()
        for request_id in list(self.pending):
            self._hung(request_id, f"the virtual deadline of {self.case.deadline:g} s passed")
        if not hung:
            await self._wind_down()
        await self._look_again()

    def stalled(self, why: str) -> None:
        """The loop cannot go on: every rollout that has not ended hangs."""
        if not self.started:
            raise SubjectError(f"{_name_of(self.factory)}: `start` never ended: {why}.")
        submitted = {event.request.request_id for event in self.recorder.events if isinstance(event, Submit)}
        for request_id in [name for name in self.pending if name in submitted]:
            self._hung(request_id, why)

    def finished_events(self) -> tuple[Event, ...]:
        """All events; results whose arrays changed after they were handed over say so."""
        events = list(self.recorder.events)
        for index, names in self.later.items():
            event = events[index]
            assert isinstance(event, Result)
            events[index] = replace(event, later_changed=names)
        return tuple(events)

    def _make(self) -> Any:
        try:
            subject = self.factory()
        except RollproofError:
            raise
        except _THEIRS as error:  # whatever a user's constructor raises, told in our words
            raise SubjectError(f"{_name_of(self.factory)} could not be made: {type(error).__name__}: {error}.") from error
        missing = [name for name in _METHODS if not callable(getattr(subject, name, None))]
        if missing:
            raise SubjectError(
                f"{_name_of(self.factory)} made a {type(subject).__name__} without {missing}: "
                f"a RolloutSubject has {list(_METHODS)} and a `contract`."
            )
        return subject

    async def _one(self, request: Request, arrival: float) -> None:
        await asyncio.sleep(arrival)
        watch = Watch()
        WATCH.set(watch)
        CURRENT_REQUEST.set(request.request_id)
        self.recorder.record(Submit(request=request))
        given = watch.lend("request", {"sampling": dict(request.sampling)})
        asked = replace(request, sampling=given["sampling"])
        try:
            native = await _maybe(self.subject.rollout(asked))
        except RollproofError:
            raise
        except SystemExit as error:
            raise SubjectError(f"{_name_of(self.factory)}.rollout ends the process (SystemExit {error.code!r}): let it raise.") from error
        except (Exception, asyncio.CancelledError, GeneratorExit) as error:  # what the stack raises is an outcome to be judged
            if isinstance(error, asyncio.CancelledError) and _cancelled_by_us():
                raise
            _refuse_own_loop(error, self.factory)
            self._end(request, error=f"{type(error).__name__}: {error}", watch=watch)
            return
        if native is None:
            self._end(request, watch=watch)
            return
        self._end(request, watch=watch, rollout=await self._record_of(native, request), native=native)

    def _end(self, request: Request, *, watch: Watch, rollout: Rollout | None = None, error: str | None = None, native: Any = None) -> None:
        self.pending.pop(request.request_id, None)
        event = self.recorder.record(
            Result(request_id=request.request_id, rollout=rollout, error=error, caller_changed=watch.changed()),
        )
        if rollout is not None:
            self.ended.append(_Ended(event.index, native, rollout))

    async def _record_of(self, native: Any, request: Request) -> Rollout:
        try:
            rollout = await _maybe(self.subject.to_record(native))
        except RollproofError:
            raise
        except _THEIRS as error:  # the adapter is the user's own code: tell which method failed on what
            raise SubjectError(
                f"{_name_of(self.factory)}.to_record raised {type(error).__name__}: {error} on {type(native).__name__}."
            ) from error
        if not isinstance(rollout, Rollout):
            raise SubjectError(f"{_name_of(self.factory)}.to_record must return a Rollout, not {type(rollout).__name__}.")
        _check_shapes(rollout, _name_of(self.factory))
        # The record gets arrays of its own: views of a stack's buffers would change in the trace when they are written again.
        own = {name: value.copy() for name in _ARRAYS if (value := getattr(rollout, name)) is not None}
        # an id that no request has is the stack's own affair; that of another one is kept, for stitch.request-id to judge
        theirs = any(other.request_id == rollout.request_id for other in self.case.requests)
        return replace(rollout, request_id=rollout.request_id if theirs else request.request_id, **own)

    async def _update(self, version: int | None) -> None:
        await _maybe(self.subject.update_weights(version))

    def _hung(self, request_id: str, why: str) -> None:
        task = self.pending.pop(request_id)
        self.recorder.record(Result(request_id=request_id, hung=True, error=f"{why}; it awaits {clock.describe_wait(task)}"))

    async def _wind_down(self) -> None:
        await self.fleet.settle()
        await self._bounded("stop")
        await asyncio.sleep(0)
        await self.fleet.settle()
        self._gauge("end")

    async def _look_again(self) -> None:
        """Compare what was handed over with what it is now: arrays that alias an engine's memory have changed."""
        for ended in self.ended:
            try:
                now = await _maybe(self.subject.to_record(ended.native))
            except Exception:  # noqa: BLE001, S112 - a stack may free what it handed over: then there is nothing to compare
                continue
            names = tuple(name for name in _ARRAYS if not _equal(getattr(ended.rollout, name), getattr(now, name, None)))
            if names:
                self.later[ended.index] = names

    def _gauge(self, phase: str) -> None:
        gauges = dict(self.fleet.gauges())
        own: Any = getattr(self.subject, "gauges", None)
        try:
            if own is not None:
                gauges.update(own())
            read = [(str(name), float(value)) for name, value in sorted(gauges.items())]
        except _THEIRS as error:
            raise SubjectError(f"{_name_of(self.factory)}.gauges raised {type(error).__name__}: {error}.") from error
        for name, value in read:
            self.recorder.record(Gauge(name=name, value=value, phase=phase))


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _call(subject: RolloutSubject, method: str, *args: Any) -> None:
    try:
        await _maybe(getattr(subject, method)(*args))
    except (RollproofError, clock.Stalled):
        raise
    except _THEIRS as error:  # told in our words: which method, on what
        if isinstance(error, asyncio.CancelledError) and _cancelled_by_us():
            raise
        raise SubjectError(f"{type(subject).__name__}.{method} raised {type(error).__name__}: {error}.") from error


def _cancelled_by_us() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _refuse_own_loop(error: BaseException, factory: SubjectFactory) -> None:
    text = str(error)
    if isinstance(error, RuntimeError) and (
        "cannot be called from a running event loop" in text or "already running" in text or "another loop is running" in text
    ):
        raise SubjectError(
            f"{_name_of(factory)} brings an event loop of its own ({text}) Make `rollout` async so that it runs on rollproof's loop, "
            "or record a real run with `rollproof.record(...)` and judge that."
        ) from error


def _check_shapes(rollout: Rollout, name: str) -> None:
    """Refuse values of a wrong type or rank; wrong lengths are for the checks to judge."""
    problems = []
    for field_name, rank, kinds in (("logprobs", 1, "f"), ("loss_mask", 1, "iub"), ("routes", 3, "iu")):
        value = getattr(rollout, field_name)
        if value is not None and not (isinstance(value, np.ndarray) and value.ndim == rank and value.dtype.kind in kinds):
            shape = f"{type(value).__name__} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}".strip()
            problems.append(f"{field_name} must be an array of rank {rank}, not {shape}")
    for field_name in ("prompt_ids", "response_ids"):
        value = getattr(rollout, field_name)
        if not isinstance(value, tuple) or not all(type(token) is int for token in value):
            problems.append(f"{field_name} must be a tuple of ints (rollproof.records.as_tokens makes one)")
    if problems:
        raise SubjectError(f"{name}.to_record returned an unusable Rollout: {'; '.join(problems)}.")


def _equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def _name_of(factory: SubjectFactory) -> str:
    module = inspect.getmodule(factory)
    name = getattr(factory, "__qualname__", type(factory).__name__)
    return f"{module.__name__}:{name}" if module is not None else name
