"""Runner: run one case against a fresh subject on the virtual clock and record its trace."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollproof.core.case import Case
from rollproof.core.contract import Contract
from rollproof.core.error_text import describe_error, describe_error_with_place, show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Gauge, Reply, Result, Submit
from rollproof.core.record_validation import ARRAYS, converted, validate_samples
from rollproof.core.records import Request, Rollout
from rollproof.core.subjects import SubjectFactory
from rollproof.core.trace import Header, Recorder, Trace
from rollproof.errors import SubjectError
from rollproof.fakes.engine.fleet import CURRENT_REQUEST, Fleet
from rollproof.simulation import virtual_loop
from rollproof.simulation.exception_policy import raise_unless_outcome, reraise_foreign
from rollproof.simulation.mutation_guard import WATCH, Watch, changed_rows
from rollproof.simulation.watchdog import limit

__all__ = ["idle_contracts", "name_of", "run_case"]

# A client that polls would otherwise run for ever on a clock that jumps.
_JUMPS = 100_000
"""How often time may pass in one case: ten times what polling once a second up to the deadline
needs.
"""
_METHODS = ("start", "rollout", "update_weights", "to_record", "stop")


def run_case(
    factory: SubjectFactory,
    case: Case,
    *,
    name: str = "",
    profile: str = "",
    recipe: Mapping[str, Any] | None = None,
) -> Trace:
    """Run ``case`` against ``factory()`` and return its trace.

    An exception from ``rollout`` becomes a ``Result`` with an error, a rollout that never ends a
    ``Result`` that hung. A case in which the stack publishes strings as labels is run again, with a
    first label of their form.

    Raises ``SubjectError`` if the subject does not implement its protocol, does not start, does not
    return a ``Rollout`` from ``to_record``, or needs threads, sockets or an event loop of its own.
    """
    run = _Run(factory, case)
    run.through(run.main, _JUMPS)
    first_label = run.fleet.first_label
    if first_label is not None:
        run = _Run(factory, case, first_label)
        run.through(run.main, _JUMPS)
    header = Header(
        subject=name or name_of(factory),
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
    """Start and stop a fresh subject; return its contract, and that of its engines."""
    run = _Run(factory, case)
    run.through(run.idle)
    return run.contract, run.fleet.engine_contract


@dataclass(slots=True)
class _Ended:
    """The samples of a request: at the end of the run their arrays are compared with what they
    were.
    """

    index: int
    native: Any
    samples: tuple[Rollout, ...]


@dataclass
class _Run:
    factory: SubjectFactory
    case: Case
    first_label: str | None = None
    events: list[Event] = field(default_factory=list)
    ended: list[_Ended] = field(default_factory=list)
    later: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)

    fleet: Fleet = field(init=False)
    recorder: Recorder = field(init=False)
    subject: Any = field(init=False, default=None)
    started: bool = field(init=False, default=False)

    @property
    def name(self) -> str:
        return name_of(self.factory)

    @property
    def contract(self) -> Contract:
        try:
            contract = getattr(self.subject, "contract", None)
        except BaseException as error:
            reraise_foreign(error)
            raise SubjectError(
                f"{self.name}.contract raised {describe_error_with_place(error)}."
            ) from error
        if not isinstance(contract, Contract):
            raise SubjectError(
                f"{self.name} must have a `contract` of type Contract after start, not"
                f" {show(contract)}."
            )
        return contract

    def through(
        self, work: Callable[[], Coroutine[Any, Any, None]], jumps: int | None = None
    ) -> None:
        """Run ``work`` on a virtual clock.

        An exception that did not come through one of the subject's methods was raised in a task or
        a callback that the subject started.
        """
        try:
            virtual_loop.run(work, jumps, seconds=limit())
        except virtual_loop.Stalled as stall:
            self.stalled(stall)
        except SystemExit as error:
            raise_unless_outcome(error, f"A task or a callback of {self.name}")
        except asyncio.CancelledError as error:
            raise SubjectError(
                f"{self.name} cancels tasks that it did not start (all those of the event loop?):"
                " cancel only its own, so that the caller of a rollout is not cancelled with it."
            ) from error

    async def start(self) -> None:
        """Make the fleet and the subject, and start it.

        An ill-typed contract is refused before anything runs.
        """
        self.recorder = Recorder(asyncio.get_running_loop().time)
        self.fleet = Fleet(self.case, self.recorder, first_label=self.first_label)
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
        """Call ``start`` or ``stop`` and wait up to the case's deadline."""
        where = f"{self.name}.{method}"
        limit = asyncio.timeout(self.case.deadline)
        try:
            async with limit:
                await _maybe(getattr(self.subject, method)(*args))
        except BaseException as error:
            reraise_foreign(error)
            if limit.expired():
                raise SubjectError(
                    f"{self.name}: `{method}` never ended: the virtual deadline of"
                    f" {self.case.deadline:g} s passed."
                ) from None
            raise_unless_outcome(error, where)
            raise SubjectError(f"{where} raised {describe_error_with_place(error)}.") from error

    async def main(self) -> None:
        """Run the case."""
        await self.start()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_loop.VirtualLoop)
        await self._gauge("start")
        tasks = []
        for i, request in enumerate(self.case.requests):
            task = loop.create_task(
                self._run_request(request, self.case.arrivals[i] if self.case.arrivals else 0.0)
            )
            self.pending[request.request_id] = task
            tasks.append(task)
        done, hung = await asyncio.wait(tasks, timeout=self.case.deadline)
        # An idle loop at the deadline means that nothing polled: all rollouts wait for one another.
        reason = (
            virtual_loop.DEADLOCK
            if loop.idle
            else f"the virtual deadline of {self.case.deadline:g} s passed"
        )
        for task in done:
            if not task.cancelled():  # by the subject, which then left its request open: a hang
                task.result()
        for request_id in list(self.pending):
            # an error of the fake engine explains a hang better than the hang itself
            self.fleet.raise_error()
            self._hung(request_id, reason)
        if not hung:
            await self._wind_down()
        await self._look_again()

    def stalled(self, stall: virtual_loop.Stalled) -> None:
        """Record that every rollout hangs that has not ended: the loop cannot go on."""
        reason = str(stall)
        if not self.started:
            raise SubjectError(f"{self.name}: `start` never ended: {reason}.")
        told = any(
            isinstance(event, Result) and event.hung and event.error == reason
            for event in self.recorder.events
        )
        # A step that got stuck in a task of the subject after its rollouts ended has no request
        # that could carry the error.
        if isinstance(stall, virtual_loop.Stuck) and not self.pending and not told:
            raise SubjectError(f"{self.name}, when its rollouts had ended: {reason}.")
        self.fleet.raise_error()  # it may be why nothing goes on
        submitted = {
            event.request.request_id for event in self.recorder.events if isinstance(event, Submit)
        }
        for request_id in [name for name in self.pending if name in submitted]:
            self._hung(request_id, reason, awaits=not isinstance(stall, virtual_loop.Stuck))

    def finished_events(self) -> tuple[Event, ...]:
        """Return all events; results say which arrays changed that should not have."""
        events = list(self.recorder.events)
        for index, names in self.later.items():
            event = events[index]
            assert isinstance(event, Result)
            events[index] = replace(event, later_changed=names)
        written = self._replies_written_to(events)
        for index, event in enumerate(events) if written else ():
            if isinstance(event, Result) and event.request_id in written:
                names = (*event.caller_changed, *written.pop(event.request_id))
                events[index] = replace(event, caller_changed=names)
        return tuple(events)

    def _replies_written_to(self, events: Sequence[Event]) -> dict[str, list[str]]:
        """Return how the routes of replies differ from what the engine returned, by request."""
        handed_out = {
            call_id: routes
            for server in self.fleet.servers.values()
            for call_id, routes in server.handed_out.items()
        }
        written: dict[str, list[str]] = {}
        if not handed_out:
            return written
        owners = {event.call_id: event.request_id for event in events if isinstance(event, Call)}
        for event in events:
            if isinstance(event, Reply) and event.delivered and event.call_id in handed_out:
                change = changed_rows(event.output.routes, handed_out[event.call_id])
                if change:
                    written.setdefault(owners[event.call_id], []).append(
                        f"routes of call {event.call_id}: {change}"
                    )
        return written

    def _make(self) -> Any:
        try:
            subject = self.factory()
        except BaseException as error:
            raise_unless_outcome(error, f"The constructor of {self.name}")
            raise SubjectError(
                f"{self.name} could not be created: {describe_error_with_place(error)}."
            ) from error
        missing = [name for name in _METHODS if not callable(getattr(subject, name, None))]
        if missing:
            raise SubjectError(
                f"{self.name} made a {type(subject).__name__} without {missing}: a RolloutSubject"
                f" has {list(_METHODS)} and a `contract`."
            )
        return subject

    async def _run_request(self, request: Request, arrival: float) -> None:
        await asyncio.sleep(arrival)
        watch = Watch()
        WATCH.set(watch)
        CURRENT_REQUEST.set(request.request_id)
        self.recorder.record(Submit(request=request))
        # verl 0.8.0 wrote the remaining budget into its caller's sampling parameters: changes to
        # objects of the caller are recorded (`stitch.caller-objects`).
        given = watch.lend("request", {"sampling": dict(request.sampling)})
        own_request = replace(request, sampling=given["sampling"])
        try:
            native = await _maybe(self.subject.rollout(own_request))
        except BaseException as error:  # noqa: BLE001 - what the stack raises is an outcome to be judged
            raise_unless_outcome(error, f"{self.name}.rollout")
            self._end(request, error=describe_error_with_place(error), watch=watch)
            return
        if native is None:  # dropped: the protocol's word for a sample that is not delivered
            self._end(request, watch=watch)
            return
        samples = await self._records_of(native, request)
        self._end(request, watch=watch, samples=samples, native=native)

    def _end(
        self,
        request: Request,
        *,
        watch: Watch,
        samples: tuple[Rollout, ...] = (),
        error: str | None = None,
        native: Any = None,
    ) -> None:
        self.pending.pop(request.request_id, None)
        reason = self._reason_given_up()
        if reason is not None:
            # The subject handled the exception that ended its step; what it did then is no outcome.
            self.recorder.record(Result(request_id=request.request_id, hung=True, error=reason))
            return
        event = self.recorder.record(
            Result(
                request_id=request.request_id,
                rollout=samples[-1] if samples else None,
                error=error,
                caller_changed=watch.changed(),
                earlier=samples[:-1],
            ),
        )
        if samples:
            self.ended.append(_Ended(event.index, native, samples))

    @staticmethod
    def _reason_given_up() -> str | None:
        """Return why a step of this run was ended; ``None`` if none was."""
        loop = asyncio.get_running_loop()
        return (
            loop.watchdog.message
            if isinstance(loop, virtual_loop.VirtualLoop) and loop.watchdog is not None
            else None
        )

    async def _records_of(self, native: Any, request: Request) -> tuple[Rollout, ...]:
        where = f"{self.name}.to_record"
        try:
            converted = await _maybe(self.subject.to_record(native))
        except SubjectError as error:  # of the helpers in ``rollproof.core.records``
            raise SubjectError(f"{where}: {error}") from error
        except BaseException as error:
            raise_unless_outcome(error, where)
            raise SubjectError(
                f"{where} raised {describe_error_with_place(error)} on {type(native).__name__}."
            ) from error
        samples = validate_samples(converted, where, self.contract)
        return tuple(
            replace(sample, request_id=self._request_named(sample.request_id, request))
            for sample in samples
        )

    def _request_named(self, name: str, request: Request) -> str:
        """Return the request that the name of a sample stands for.

        A stack may name its samples as it likes, and differently in each run, which a trace may
        not depend on: such a name stands for the request whose sample had it first.
        ``stitch.request-id`` finds the others that have it.
        """
        if not name or any(other.request_id == name for other in self.case.requests):
            return name or request.request_id
        return self.named.setdefault(name, request.request_id)

    async def _update(self, version: int | None) -> None:
        try:
            await _maybe(self.subject.update_weights(version))
        except BaseException as error:
            raise_unless_outcome(error, f"{self.name}.update_weights")
            raise

    def _hung(self, request_id: str, reason: str, *, awaits: bool = True) -> None:
        task = self.pending.pop(request_id)
        if task.done() and not task.cancelled():
            task.exception()  # that of a step that was given up, which `why` tells
        place = f"; it awaits {virtual_loop.describe_wait(task)}" if awaits else ""
        self.recorder.record(Result(request_id=request_id, hung=True, error=f"{reason}{place}"))

    async def _wind_down(self) -> None:
        # Calls that the stack left running end here, before and after `stop`: the gauges that
        # follow must be back where they started.
        await self.fleet.settle()
        await self._bounded("stop")
        await asyncio.sleep(0)
        await self.fleet.settle()
        await self._gauge("end")

    async def _look_again(self) -> None:
        """Compare delivered samples with what they are now.

        Arrays that share an engine's memory have changed by then.
        """
        for ended in self.ended:
            try:
                now = await _maybe(self.subject.to_record(ended.native))
            except SubjectError:
                continue
            except BaseException as error:  # noqa: BLE001 - a stack may free what it handed over: then there is nothing to compare
                reraise_foreign(error)
                continue
            later = [now] if isinstance(now, Rollout) else now
            if not isinstance(later, list | tuple):
                continue
            names = tuple(
                name
                for name in ARRAYS
                if not all(
                    _equal(getattr(sample, name), _readable(name, same))
                    # a stack may have filtered its list by now
                    for sample, same in zip(ended.samples, later, strict=False)
                )
            )
            if names:
                self.later[ended.index] = names

    async def _gauge(self, phase: str) -> None:
        gauges = dict(self.fleet.gauges())
        own: Any = getattr(self.subject, "gauges", None)
        try:
            if own is not None:
                gauges.update(await _maybe(own()))
            read = [(str(name), float(value)) for name, value in sorted(gauges.items())]
        except BaseException as error:
            raise_unless_outcome(error, f"{self.name}.gauges")
            raise SubjectError(
                f"{self.name}.gauges must return a mapping of names to numbers, and raised"
                f" {describe_error(error)}."
            ) from error
        for name, value in read:
            self.recorder.record(Gauge(name=name, value=value, phase=phase))


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


_FREED = object()
"""An array that cannot be read any more: there is nothing to compare."""


def _readable(name: str, rollout: Any) -> Any:
    value = getattr(rollout, name, None)
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return value
    try:
        return converted(name, value)
    except SubjectError:
        return _FREED


def _equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if b is _FREED:
        return True
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def name_of(factory: SubjectFactory) -> str:
    """Return what errors call a subject: ``module:name`` of its factory."""
    module = inspect.getmodule(factory)
    name = getattr(factory, "__qualname__", type(factory).__name__)
    return f"{module.__name__}:{name}" if module is not None else name
