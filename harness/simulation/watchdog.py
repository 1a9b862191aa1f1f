"""Ends a step of somebody else's code that never gives control back, which a virtual clock cannot
see.

A coroutine that loops without awaiting, or waits in real time (``time.sleep`` in a loop), stops
everything: no other task runs, and no virtual deadline passes. Timer signals interrupt the main
thread once a second, and their handler looks whether the event loop still turns. It is slow to
judge, because a machine may be slow: a step is given up when it has had so many seconds of
processor time, and of real time too, or five times as many of the latter. No time passes while
somebody debugs it.

Python runs signal handlers in the main thread only, between two instructions. Steps in other
threads are not watched, nor is a call of C code that never returns: set pytest's
``faulthandler_timeout`` to see where those are.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self, TypeVar

from rollproof.errors import UsageError

__all__ = ["STUCK", "VARIABLE", "GivenUp", "Watchdog", "limit"]

VARIABLE = "ROLLPROOF_STUCK_AFTER"
"""The environment variable with the seconds after which a step is given up; 0: never."""
STUCK = "a step did not end"
"""The beginning of the message that a step was given up."""
_LIMIT = 120.0
_IDLE_FACTOR = 5
"""How many times as long a step may take that uses no processor."""
_TICK = 1.0
_TICKS_TO_RETRY = 5
"""Ticks until a step that goes on is given up again: it may have handled the exception."""
_MAX_FRAMES = 6
_DEBUGGERS = frozenset({"pdb", "ipdb", "pudb", "bdb", "debugpy", "pydevd"})
_WARN_AT = 3
"""How often a step is given up before the user is warned that it handles that."""

_T = TypeVar("_T")


class GivenUp(BaseException):
    """Raised in a step that never ends, by the handler of a timer signal."""


def limit() -> float:
    """Return the seconds after which a step is given up.

    Raises:
        UsageError: the environment variable is no number >= 0.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _LIMIT
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(f"{VARIABLE}={text!r} must be a number of seconds, 0 for no limit.")
    return seconds


class Watchdog:
    """While it is entered, raises ``GivenUp`` in a step when ``progress()`` stays the same for too
    long.

    ``message`` then says for how long, and where: the innermost lines of code that is not
    rollproof's.

    Args:
        progress: Any number that changes with every step.
        seconds: The limit of a step; 0: none.
        within: A step is what calls of this code object call. Nothing is raised elsewhere, so not
            in what puts a run away.
    """

    def __init__(
        self, progress: Callable[[], int], seconds: float, within: CodeType | None = None
    ) -> None:
        self.message: str | None = None
        self._progress = progress
        self._seconds = seconds
        self._within = within or Watchdog.run.__code__
        self._timers: list[_Timer] = []
        self._retrying = False
        self._times = 0
        self._turns = -1
        self._waited = self._last_look = self._cpu_start = 0.0

    def __enter__(self) -> Self:
        if self._seconds:
            self._last_look = time.monotonic()
            self._timers = [timer for timer in map(self._start, _clocks()) if timer is not None]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for timer in reversed(self._timers):
            timer.stop()

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what ``work()`` returns; it is one step."""
        return work()

    def _start(self, clock: tuple[int, int]) -> _Timer | None:
        which, signum = clock
        before = signal.getsignal(signum)
        outer = getattr(before, "__self__", None)
        busy = before not in (signal.SIG_DFL, signal.SIG_IGN) or any(signal.getitimer(which))
        # pytest-timeout and tests of alarms set SIGALRM: their timer ends what waits, and profilers
        # may have the other one. Only a watchdog's own timer is taken over.
        if busy and not isinstance(outer, Watchdog):
            return None
        try:
            signal.signal(signum, self._on_signal)
        except ValueError:
            # only the main thread may set handlers
            return None
        signal.setitimer(which, _TICK, _TICK)
        return _Timer(which, signum, self._on_signal, before)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        for timer in self._timers:
            # a watchdog within this one's step took the timer over, and still looks for both
            outer = getattr(timer.before, "__self__", None)
            if timer.signum == signum and isinstance(outer, Watchdog):
                outer._on_signal(signum, frame)
        self.look(frame)

    def look(self, frame: FrameType | None) -> None:
        """Check for progress since the last look, and give the step up if there was none for too
        long.

        Raises:
            GivenUp: the interrupted code is in a step that is given up.
        """
        now, turns = time.monotonic(), self._progress()
        if turns != self._turns or _is_debugged(frame):
            self._turns, self._waited, self._retrying = turns, 0.0, False
            self._cpu_start = time.process_time()
        else:
            # a process that was stopped in between was not waited for
            self._waited += min(now - self._last_look, 2 * _TICK)
            cpu = time.process_time() - self._cpu_start
            over = (
                self._waited >= self._seconds and cpu >= self._seconds
            ) or self._waited >= _IDLE_FACTOR * self._seconds
            if self._waited >= _TICKS_TO_RETRY * _TICK if self._retrying else over:
                self._last_look = now
                self._give_up(frame, cpu)
        self._last_look = now

    def _give_up(self, frame: FrameType | None, cpu: float) -> None:
        if not self._in_step(frame):
            return
        if self.message is None:
            self.message = (
                f"{STUCK} within {self._waited:.0f} s ({cpu:.0f} s of processor time): it never"
                f" awaits, or waits in real time, at {_place(frame)} ({VARIABLE} sets another"
                " limit)"
            )
        self._times += 1
        self._retrying, self._waited = True, 0.0
        if self._times == _WARN_AT:
            # standard error may be closed, or somebody else's
            with suppress(Exception):
                sys.stderr.write(
                    f"rollproof: {self.message}. It handles every exception, and cannot be ended"
                    " from outside: end this process.\n"
                )
        raise GivenUp(self.message)

    def _in_step(self, frame: FrameType | None) -> bool:
        # the frame of `within` itself is no step: it is about to begin or to leave one
        return any(caller.f_code is self._within for caller in _callers(frame and frame.f_back))


class _Timer:
    """A timer signal that a watchdog has set, and what was there before."""

    def __init__(self, which: int, signum: int, handler: Callable[..., None], before: Any) -> None:
        self.which = which
        self.signum = signum
        self.handler = handler
        self.before = before

    def stop(self) -> None:
        """Put back what was there."""
        if signal.getsignal(self.signum) != self.handler:
            # the code under test has set a handler of its own: it and its timer stay
            return
        signal.setitimer(self.which, 0)
        # ignoring a signal drops one that is on its way, whose default ends the process
        signal.signal(self.signum, signal.SIG_IGN)
        signal.signal(self.signum, self.before)
        if isinstance(getattr(self.before, "__self__", None), Watchdog):
            signal.setitimer(self.which, _TICK, _TICK)


def _clocks() -> tuple[tuple[int, int], ...]:
    """Return the timers that interrupt code that computes, and code that waits."""
    # Windows has neither
    if not hasattr(signal, "setitimer"):
        return ()
    return ((signal.ITIMER_VIRTUAL, signal.SIGVTALRM), (signal.ITIMER_REAL, signal.SIGALRM))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_debugged(frame: FrameType | None) -> bool:
    return any(_module(caller) in _DEBUGGERS for caller in _callers(frame))


def _place(frame: FrameType | None) -> str:
    """Return the innermost lines of code that is not rollproof's, outermost first: ``poll
    (client.py:31) > wait (client.py:40)``.
    """
    names: list[str] = []
    for caller in _callers(frame):
        if len(names) == _MAX_FRAMES:
            break
        if _module(caller) not in ("rollproof", "asyncio"):
            name = Path(caller.f_code.co_filename).name
            names.append(f"{caller.f_code.co_name} ({name}:{caller.f_lineno})")
        elif names:
            break
    return " > ".join(reversed(names)) or "a place that is not known"
