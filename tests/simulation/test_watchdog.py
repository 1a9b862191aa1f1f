"""The watchdog: a step that never gives control back is ended and told, and a slow one is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
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


def test_nothing_of_it_is_left_behind() -> None:
    """CPython 3.11 hangs at the first traced call of a thread for which something was raised and
    taken back: a debugger's, for one.
    """
    code = """
        import sys
        from rollproof.verification.runner import run_case
        from tests.simulation.test_watchdog import Busy
        from tests.support.runner_case import CASE, result_of
        assert "a step did not end" in result_of(run_case(Busy, CASE)).error
        calls = []
        sys.settrace(lambda frame, *_: calls.append(frame.f_code.co_name))
        (lambda: None)()
        sys.settrace(None)
        print(calls)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, watchdog.VARIABLE: "0.3"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert "['<lambda>']\n" == done.stdout, done.stderr


def test_a_campaign_ends_after_two_of_them() -> None:
    """Each costs minutes: what was judged until then is told, checks that saw nothing are unknown,
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
def test_a_start_or_stop_that_never_awaits_is_told(method: str, message: str) -> None:
    """Such a subject cannot be run, and the error says where it loops."""

    def loops(self: AsSampled, *_args: Any) -> None:
        while True:
            pass

    with pytest.raises(SubjectError, match=f"{message}.*at loops .test_watchdog.py:"):
        run_case(type("Looping", (AsSampled,), {method: loops}), CASE)


def test_a_loop_that_handles_every_exception_is_told_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python cannot end it from outside, so the user is told to."""

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

    assert "It cannot be ended from outside: end this process." in capsys.readouterr().err


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


def test_what_is_not_in_the_step_is_not_interrupted() -> None:
    """A step that ends while it is given up: nothing is raised where the run is put away, nor told."""
    with watchdog.Watchdog(lambda: 0, 1.0) as dog:
        dog._give_up(1.0, 1.0)
        assert dog.told is None
        with pytest.raises(watchdog.GivenUp):
            dog.through(lambda: [dog._give_up(1.0, 1.0) for _ in range(2)])


def test_what_was_raised_at_the_end_of_a_step_does_not_come_behind_it() -> None:
    """A step that ends before CPython looks: it is given up within what runs it, not by whoever
    goes on, or puts the run away.
    """
    gate = threading.Lock()
    gate.acquire()

    def ends() -> None:
        for _ in iter(
            gate.acquire, True
        ):  # waits there, and CPython does not look for an exception until the next call or jump
            pass

    def give_up() -> None:
        time.sleep(0.1)
        dog._give_up(1.0, 1.0)
        gate.release()

    with watchdog.Watchdog(lambda: 0, 100.0) as dog:
        thread = threading.Thread(target=give_up)
        thread.start()
        with pytest.raises(watchdog.GivenUp):
            dog.through(ends)
        thread.join()


def test_a_step_that_waits_in_c_is_told_soon(capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be interrupted; that is said some ticks after it was given up, not after three
    times the time that it was given.
    """

    class Waiting(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=2.8)
            return await super().rollout(request)

    assert "a step did not end" in (result_of(run_case(Waiting, CASE)).error or "")
    assert "It cannot be ended from outside: end this process." in capsys.readouterr().err


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


def test_a_task_that_is_left_over_and_never_ends_is_told() -> None:
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


def test_runs_in_several_threads_leave_each_other_alone() -> None:
    """One that is stuck is ended, others go on; threads that run no case may start threads,
    meanwhile and afterwards.
    """
    told: dict[str, str | None] = {}

    def run(name: str, subject: type) -> None:
        told[name] = result_of(run_case(subject, CASE)).error

    class Slow(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            time.sleep(0.2)  # noqa: ASYNC251 - so that the runs overlap
            return await super().rollout(request)

    start, connect = threading.Thread.start, socket.socket.connect
    threads = [
        threading.Thread(target=run, args=args)
        for args in (("slow", Slow), ("stuck", Busy), ("slower", Slow))
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()

    assert (None, None) == (told["slow"], told["slower"])
    assert "a step did not end" in (told["stuck"] or "")
    assert (start, connect) == (threading.Thread.start, socket.socket.connect)


def test_a_fork_after_a_run_is_one_of_a_single_thread() -> None:
    """From Python 3.12 on, Python warns whoever forks a process of several: the thread that watches
    ends before.
    """
    code = """
        import os, warnings
        from rollproof.verification.runner import run_case
        from rollproof.fakes.clients.reference_clients import AsSampled
        from tests.support.runner_case import CASE, result_of
        result_of(run_case(AsSampled, CASE))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            child = os.fork()
        if not child:
            os._exit(result_of(run_case(AsSampled, CASE)).error is not None)
        print(os.waitpid(child, 0)[1], [str(one.message) for one in told], result_of(run_case(AsSampled, CASE)).error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert "0 [] None\n" == done.stdout, done.stderr


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # so it is: what forks are several threads
def test_several_threads_may_fork_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lets the thread that watches end before, and none is told of an error for it."""
    wrong: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: wrong.append(told.exc_value))

    def fork() -> None:
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)

    with watchdog.Watchdog(lambda: time.monotonic_ns(), 100.0):
        threads = [threading.Thread(target=fork) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [] == wrong


def test_many_slow_steps_are_none_that_never_ends() -> None:
    """A slow machine, or a slow stack: the limit is that of one step, however many there are."""

    class Slow(AsSampled):
        async def rollout(self, request: Request) -> Rollout | None:
            for _ in range(4):
                time.sleep(0.15)  # noqa: ASYNC251 - what is tested
                await asyncio.sleep(0)
            return await super().rollout(request)

    assert result_of(run_case(Slow, CASE)).error is None


def test_a_step_that_waits_for_the_processor_is_not_given_up(
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


def test_nothing_is_given_up_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 turns it off; what is no number of seconds is refused."""
    monkeypatch.setenv(watchdog.VARIABLE, "0")
    assert 0.0 == watchdog.limit()
    monkeypatch.delenv(watchdog.VARIABLE)
    assert 120.0 == watchdog.limit()
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv(watchdog.VARIABLE, wrong)
        with pytest.raises(UsageError, match="must be a number of seconds, 0 for no limit"):
            run_case(AsSampled, Case(flavour="sglang", requests=CASE.requests))


def test_no_more_threads_mean_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has none left the run goes on, and a later one is watched again."""

    def refuse(*_args: Any) -> None:
        raise RuntimeError("can't start new thread")

    while watchdog._watching.locked():
        time.sleep(0.01)
    with monkeypatch.context() as patched:
        patched.setattr("_thread.start_new_thread", refuse)
        assert result_of(run_case(AsSampled, CASE)).error is None
    assert "a step did not end" in (result_of(run_case(Busy, CASE)).error or "")
