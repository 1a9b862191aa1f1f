"""Watchdog: ends a step of somebody else's code that never gives control back, which a virtual
clock cannot see.

A coroutine that loops without awaiting, or waits in real time (``time.sleep`` in a loop), stops
everything: no other task runs, and no virtual deadline passes. A thread looks once a second whether
the event loop still turns. It is slow to judge, because a machine may be slow: a step is given up
when it has had so many seconds of processor time, and of real time too, or five times as many of
the latter. While somebody debugs it, no time passes.

An exception that is raised from outside comes where the thread was seen, for the watching thread
holds CPython's lock from looking to raising, or a little later: some steps of CPython get the lock
back and do not look for one (3.13: none does), but all loops and calls do. Whoever runs a step has
a loop behind it. So the exception does not come where a run is put away.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import sleep  # as it is now: a test of a stack may replace it
from types import CodeType, FrameType, TracebackType
from typing import Self, TypeVar

from rollproof.errors import UsageError

__all__ = ["STUCK", "VARIABLE", "GivenUp", "Watchdog", "limit"]

VARIABLE = "ROLLPROOF_STUCK_AFTER"
"""The environment variable with the seconds after which a step is given up; 0: never."""
STUCK = "a step did not end"
"""How it begins that a step was given up."""
_LIMIT = 120.0
_IDLE = 5
"""How many times as long a step may take that uses no processor."""
_TICK = 1.0
_AGAIN = 5
"""After how many ticks more a step that goes on is given up again: it may have handled the
exception.
"""
_FRAMES = 6
_DEBUGGERS = frozenset({"pdb", "ipdb", "pudb", "bdb", "debugpy", "pydevd"})
_WARNING = 3
"""How often a step is given up before it is said that it handles that, or waits where Python cannot
interrupt it.
"""


_T = TypeVar("_T")


class GivenUp(BaseException):
    """Raised into a step that never ends, from outside of it."""


def limit() -> float:
    """Seconds after which a step is given up. Raises ``UsageError`` for a value of the environment
    variable that is no number >= 0.
    """
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else _LIMIT
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(f"{VARIABLE}={given!r} must be a number of seconds, 0 for no limit.")
    return seconds


class Watchdog:
    """While it is entered, raises ``GivenUp`` in the thread that made it when ``progress()`` stays
    the same for too long.

    It comes only in what a call of ``within`` calls (``through``'s, where it is left out). ``told``
    then says for how long, and where that thread was. It is asked for the innermost lines of other
    code than ``rollproof``'s.
    """

    def __init__(
        self, progress: Callable[[], int], seconds: float, within: CodeType | None = None
    ) -> None:
        self.told: str | None = None
        self._progress = progress
        self._seconds = seconds
        self._within = within or Watchdog.through.__code__
        self._raising = _thread.allocate_lock()
        self._ended = False
        self._again = False
        self._times = 0
        self._watched = _thread.get_ident()
        self._seen, self._real, self._used, self._before = -1, 0.0, 0.0, 0.0

    def __enter__(self) -> Self:
        if self._seconds:
            _entered[id(self)] = self
            _see_to_a_thread()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._seconds:
            while not self._ended:
                try:
                    with self._raising:
                        self._ended = True
                except GivenUp:
                    continue
            _entered.pop(id(self), None)
            if self.told is not None:
                self._take()

    def through(self, work: Callable[[], _T]) -> _T:
        """What ``work()`` returns."""
        try:
            return work()
        finally:
            for _ in range(2):  # what was raised at its end comes here
                pass

    def look(self) -> None:
        """See whether there is progress since the last look, and give the step up where there was
        none for too long.
        """
        now, turned = time.monotonic(), self._progress()
        if turned != self._seen or self._debugged():
            self._seen, self._real, self._used, self._again = (
                turned,
                0.0,
                time.process_time(),
                False,
            )
        else:
            self._real += min(
                now - self._before, 2 * _TICK
            )  # a machine that slept in between was not waited for
            busy = time.process_time() - self._used
            over = (
                self._real >= self._seconds and busy >= self._seconds
            ) or self._real >= _IDLE * self._seconds
            if self._real >= _AGAIN * _TICK if self._again else over:
                self._give_up(self._real, busy)
        self._before = now

    def _give_up(self, real: float, busy: float) -> None:
        with self._raising:
            step = self._step()
            if self._ended or not step:
                return
            told = self.told or (
                f"{STUCK} within {real:.0f} s ({busy:.0f} s of processor time): it never awaits, "
                f"or waits in real time, at {_place(step[0])} ({VARIABLE} sets another limit)"
            )
            if self._times + 1 == _WARNING:
                with suppress(Exception):  # it may be closed, or somebody else's
                    sys.stderr.write(
                        f"rollproof: {told}. It cannot be ended from outside: end this process.\n"
                    )
            thread, what = ctypes.c_ulong(self._watched), ctypes.py_object(GivenUp)
            if self._step():  # as late as can be: what ended meanwhile is none of its affairs
                self.told = told
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, what)
                self._times += 1
                self._again, self._real = True, 0.0

    def _step(self) -> list[FrameType]:
        """The frames of the step, innermost first; none where the thread is in no step, or about to
        leave or begin one.
        """
        frames: list[FrameType] = []
        for frame in self._stack():
            if frame.f_code is self._within:
                return frames
            frames.append(frame)
        return []

    def _debugged(self) -> bool:
        return any(
            str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS
            for frame in self._stack()
        )

    def _stack(self) -> Iterator[FrameType]:
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _take(self) -> None:
        """Take what was raised and has not come yet, in the watched thread.

        To raise nothing in its place forgets it, but not that there is something: CPython 3.11 then
        looks for it at each call, and never gets past the first one that is traced, as by
        ``sys.settrace``.
        """
        try:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._watched), ctypes.py_object(GivenUp)
            )
            for _ in range(1000):
                pass
        except GivenUp:
            pass


_entered: dict[int, Watchdog] = {}
"""Those that are entered now, by ``id``."""
_watching = _thread.allocate_lock()
"""Held by the one thread that looks at all of them: there are thousands of cases, and to start a
thread takes as long as a small one.
"""
_on = _thread.allocate_lock()
"""Held while that thread may go on: it waits for it between two looks."""
_on.acquire()
_native = 0
"""What the system calls that thread."""


def _see_to_a_thread() -> None:
    if _watching.acquire(blocking=False):
        try:
            # not threading.Thread: a subject that lists its threads does not see it
            _thread.start_new_thread(_watch, ())
        except (
            RuntimeError
        ):  # the system has no more of them, or Python is about to end: nothing is watched then
            _watching.release()


def _watch() -> None:
    """Look at every watchdog once a tick, for as long as there are any."""
    global _native
    _native = _thread.get_native_id()
    while True:
        if _on.acquire(timeout=_TICK):  # a fork is about to come
            _watching.release()
            return
        for one in list(_entered.values()):
            with suppress(
                Exception
            ):  # one that cannot be looked at is no reason not to look at the others
                one.look()
        if not _entered:
            _watching.release()
            if not _entered or not _watching.acquire(
                blocking=False
            ):  # one may have come before the release
                return


def _rest() -> None:
    """End the thread before a fork: from Python 3.12 on it warns whoever forks a process that has
    more than one.
    """
    if not _watching.locked():
        return
    with suppress(RuntimeError):  # it is released: another thread is about to fork, too
        _on.release()
    if _watching.acquire(timeout=_TICK):
        _watching.release()
    _on.acquire(blocking=False)
    end = time.monotonic() + 0.1
    while Path(f"/proc/self/task/{_native}").exists() and time.monotonic() < end:
        sleep(0)


def _go_on() -> None:
    if _entered:
        _see_to_a_thread()


def _forked() -> None:
    """In a child the thread does not go on, and what its parent has entered is not its own."""
    global _watching, _on
    _entered.clear()
    _watching, _on = _thread.allocate_lock(), _thread.allocate_lock()
    _on.acquire()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest, after_in_parent=_go_on, after_in_child=_forked)


def _place(frame: FrameType | None) -> str:
    """The innermost lines of other code than rollproof's, outermost first: ``poll (client.py:31) >
    wait (client.py:40)``.
    """
    names: list[str] = []
    while frame is not None and len(names) < _FRAMES:
        ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] in (
            "rollproof",
            "asyncio",
        )
        if not ours:
            names.append(
                f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
            )
        elif names:
            break
        frame = frame.f_back
    return " > ".join(reversed(names)) or "a place that is not known"
