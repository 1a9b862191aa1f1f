"""A step that never gives control back is ended and reported, and a slow one is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollproof.core.case import Case
from rollproof.core.events.rollout import Result
from rollproof.core.records import Request, Rollout
from rollproof.errors import SubjectError, UsageError
from rollproof.fakes.clients.reference_clients import AsSampled
from rollproof.judging.checks import Verdict
from rollproof.simulation import watchdog
from rollproof.verification.rollouts import run_conformance
from rollproof.verification.runner import run_case
from tests.support.busy_loop import spin
from tests.support.runner_case import CASE, result_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is given up after a third of a second."""
    monkeypatch.setattr(watchdog, "_TICK", 0.05)
    monkeypatch.setenv(watchdog.VARIABLE, "0.3")


class Busy(AsSampled):
    """Polls without awaiting: no other task of the loop runs, so what it waits for never comes."""

    async def rollout(self, request: Request) -> Any:
        while self.fleet is not None:
            pass


class Sleepy(AsSampled):
    """Polls in real time."""

    async def rollout(self, request: Request) -> Any:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 - what is tested


@pytest.mark.parametrize("subject", [Busy, Sleepy])
def test_a_rollout_that_never_awaits_hangs(subject: type) -> None:
    """The request ends as one that hung, with the line where it loops; the run goes on to the next
    case.
    """
    error = result_of(run_case(subject, CASE)).error or ""

    assert error.startswith("a step did not end within ")
    assert "it never awaits, or waits in real time, at rollout (test_watchdog.py:" in error
    assert "(ROLLPROOF_STUCK_AFTER sets another limit)" in error


def test_a_campaign_ends_after_two_of_them() -> None:
    """Each costs minutes: results until then are reported, checks that saw nothing are unknown,
    and the note says where it loops.
    """
    report = run_conformance(Busy, cases=[CASE] * 5, canary=False)
    verdicts = {result.id: result.verdict for result in report.results}

    assert 2 == report.cases
    assert (Verdict.FAIL, Verdict.UNKNOWN) == (
        verdicts["lifecycle.no-hang"],
        verdicts["stitch.tokens"],
    )
    assert "stopped after 2 of 5 cases, in 2 of which a step did not end within" in report.notes[0]
    assert "at rollout (test_watchdog.py:" in report.notes[0]


@pytest.mark.parametrize(
    ("method", "message"),
    [("start", "`start` never ended: a step did not end"), ("stop", "when its rollouts had ended")],
)
def test_a_start_or_stop_that_never_awaits_is_reported(method: str, message: str) -> None:
    """Such a subject cannot be run, and the error says where it loops."""

    def loops(self: AsSampled, *_args: Any) -> None:
        while True:
            pass

    with pytest.raises(SubjectError, match=f"{message}.*at loops .test_watchdog.py:"):
        run_case(type("Looping", (AsSampled,), {method: loops}), CASE)


def test_a_loop_that_handles_every_exception_is_reported_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python cannot end it from outside, so the user is asked to do it."""

    class Stubborn(AsSampled):
        async def rollout(self, request: Request) -> Any:
            for _ in range(4):
                try:
                    while True:
                        pass
                except BaseException:  # noqa: S110, BLE001 - what is tested
                    pass
            return await super().rollout(request)

    result_of(run_case(Stubborn, CASE))

    assert "cannot be ended from outside: end this process." in capsys.readouterr().err


@pytest.mark.parametrize("handles", ["raises", "returns", "is cancelled"])
def test_a_rollout_that_handles_its_end_hangs_all_the_same(handles: str) -> None:
    """What it does then is no outcome of its own: the request hung, and other cases are run."""

    class Handling(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            try:
                await (
                    asyncio.gather(spin(), asyncio.sleep(1))
                    if handles == "is cancelled"
                    else spin()
                )
            except BaseException as error:
                if handles == "raises":
                    raise ValueError("mine") from error
            return await super().rollout(request)

    trace = run_case(Handling, CASE)

    assert (result_of(trace).error or "").startswith("a step did not end within ")
    assert result_of(trace).hung
    assert 1 == sum(isinstance(event, Result) for event in trace)


def test_a_standard_error_that_is_closed_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread lives on where it cannot say what it has to say: the step is ended, and that of
    the next case, too.
    """

    class Stubborn(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            for _ in range(4):
                turns = 0
                with contextlib.suppress(BaseException):
                    while True:
                        turns += 1
            return await super().rollout(request)

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", None)
        assert "a step did not end" in (result_of(run_case(Stubborn, CASE)).error or "")
    assert "a step did not end" in (result_of(run_case(Busy, CASE)).error or "")


def test_a_leftover_task_that_never_ends_is_reported() -> None:
    """Each case would take minutes, and nobody would know why."""

    class Lingering(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            async def linger() -> None:
                try:
                    await asyncio.sleep(1e6)
                finally:
                    while True:
                        pass

            self.task = asyncio.ensure_future(linger())
            await asyncio.sleep(0)
            return await super().rollout(request)

    with pytest.raises(
        SubjectError,
        match=r"when its rollouts had ended: a step did not end .* at linger .test_watchdog.py:",
    ):
        run_case(Lingering, CASE)


def test_no_time_passes_in_a_debugger() -> None:
    """Whoever looks around at a breakpoint is not thrown out of it."""
    code = "def interaction(end, clock):\n    while clock() < end:\n        pass\n"
    debugger: dict[str, Any] = {"__name__": "pdb"}
    exec(compile(code, "pdb.py", "exec"), debugger)  # noqa: S102 - a stand-in for a module

    class Debugged(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            debugger["interaction"](time.monotonic() + 1.2, time.monotonic)
            return await super().rollout(request)

    assert result_of(run_case(Debugged, CASE)).error is None


def test_many_slow_steps_are_none_that_never_ends() -> None:
    """A slow machine, or a slow stack: the limit is that of one step, however many there are."""

    class Slow(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            for _ in range(4):
                time.sleep(0.15)  # noqa: ASYNC251 - what is tested
                await asyncio.sleep(0)
            return await super().rollout(request)

    assert result_of(run_case(Slow, CASE)).error is None


def test_a_step_that_waits_for_the_processor_is_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real time alone is not enough: a step without processor time has five times as long."""
    monkeypatch.setattr(time, "process_time", lambda: 0.0)

    class Starved(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            end = time.monotonic() + 0.9
            while time.monotonic() < end:
                pass
            return await super().rollout(request)

    assert result_of(run_case(Starved, CASE)).error is None


def test_no_step_is_ended_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 turns it off; what is no number of seconds is refused."""
    monkeypatch.setenv(watchdog.VARIABLE, "0")
    assert 0.0 == watchdog.limit()
    monkeypatch.delenv(watchdog.VARIABLE)
    assert 120.0 == watchdog.limit()
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv(watchdog.VARIABLE, wrong)
        with pytest.raises(UsageError, match="must be a number of seconds, 0 for no limit"):
            run_case(AsSampled, Case(flavour="sglang", requests=CASE.requests))


def test_nothing_is_raised_outside_of_a_step() -> None:
    """Neither before and after a step, nor where it is run: a run is put away in peace."""
    waiting = time.monotonic()
    with watchdog.Watchdog(lambda: 0, 0.1) as dog:
        while time.monotonic() < waiting + 1.0:
            pass
        assert dog.message is None
        with pytest.raises(watchdog.GivenUp, match="a step did not end"):
            dog.run(lambda: [None for _ in iter(int, 1)])
        assert dog.message is not None


def test_a_step_that_waits_for_a_lock_is_ended() -> None:
    """Python lets a signal interrupt the calls of its own that wait."""

    class Waiting(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=60)
            return await super().rollout(request)

    assert "a step did not end" in (result_of(run_case(Waiting, CASE)).error or "")


def _signals() -> list[Any]:
    return [
        state
        for which, signum in watchdog._clocks()
        for state in (signal.getsignal(signum), signal.getitimer(which))
    ]


@pytest.mark.parametrize("subject", [AsSampled, Busy, Sleepy])
def test_handlers_and_timers_are_put_back(subject: type) -> None:
    """Whoever calls has the signals that they had before."""
    before = _signals()
    run_case(subject, CASE)
    assert before == _signals()


def test_an_alarm_of_the_caller_is_left_alone(alarms: list[int]) -> None:
    """pytest-timeout sets one: its handler stays and is called, and loops are still ended."""
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    handler = signal.getsignal(signal.SIGALRM)
    assert "a step did not end" in (result_of(run_case(Busy, CASE)).error or "")
    assert [signal.SIGALRM] == alarms
    assert handler == signal.getsignal(signal.SIGALRM)


def test_an_alarm_of_the_code_under_test_is_left_to_it(alarms: list[int]) -> None:
    """A stack may use the signal itself: it gets it, and its handler is not replaced afterwards."""
    own = signal.getsignal(signal.SIGALRM)

    class Alarmed(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            signal.signal(signal.SIGALRM, own)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(0.1)  # noqa: ASYNC251 - what is tested
            return await super().rollout(request)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert result_of(run_case(Alarmed, CASE)).error is None
    assert [signal.SIGALRM] == alarms
    assert own == signal.getsignal(signal.SIGALRM)


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """A handler that notes its signals, for the time of a test."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda signum, _frame: seen.append(signum))
    yield seen
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_nested_watchdogs_end_their_own_steps() -> None:
    """Each has its own limit, and goes on when the other has ended."""
    with watchdog.Watchdog(lambda: 0, 60.0) as outer, watchdog.Watchdog(lambda: 0, 0.2) as inner:
        with pytest.raises(watchdog.GivenUp):
            outer.run(lambda: inner.run(lambda: [None for _ in iter(int, 1)]))
        assert outer.message is None

    with watchdog.Watchdog(lambda: 0, 0.2) as outer:
        with watchdog.Watchdog(lambda: 0, 60.0) as inner, pytest.raises(watchdog.GivenUp):
            outer.run(lambda: inner.run(lambda: [None for _ in iter(int, 1)]))
        assert inner.message is None
        with pytest.raises(watchdog.GivenUp):
            outer.run(lambda: [None for _ in iter(int, 1)])


def test_runs_in_other_threads_are_not_watched_and_left_alone() -> None:
    """Signals come in the main thread alone: the step there is ended, those of others go on."""
    errors: dict[str, str | None] = {}

    def run(name: str, subject: type) -> None:
        errors[name] = result_of(run_case(subject, CASE)).error

    class Slow(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            time.sleep(0.6)  # noqa: ASYNC251 - so that the runs overlap
            return await super().rollout(request)

    start, connect = threading.Thread.start, socket.socket.connect
    threads = [threading.Thread(target=run, args=(name, Slow)) for name in ("slow", "slower")]
    for thread in threads:
        thread.start()
    run("stuck", Busy)
    for thread in threads:
        thread.join()

    assert (None, None) == (errors["slow"], errors["slower"])
    assert "a step did not end" in (errors["stuck"] or "")
    assert (start, connect) == (threading.Thread.start, socket.socket.connect)


def test_a_process_that_a_step_forks_is_not_interrupted() -> None:
    """Timers are not inherited, and a run in the child has its own."""

    class Forking(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            child = os.fork()
            if not child:
                time.sleep(0.2)  # noqa: ASYNC251 - in a process that has nothing else to do
                os._exit(7)
            _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - what is tested
            assert 7 == os.waitstatus_to_exitcode(status)
            return await super().rollout(request)

    assert result_of(run_case(Forking, CASE)).error is None
