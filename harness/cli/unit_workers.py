"""Judge units of trace files in this process, in worker processes or on a Ray cluster: same
results, in their order, whoever judges them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

from rollproof.cli.ray_cluster import ray_cluster
from rollproof.errors import UsageError
from rollproof.verification.judged_files import (
    DIED,
    JudgedUnit,
    UnitSettings,
    Unjudged,
    judge_unit,
)

__all__ = ["Unit", "judge_here", "judge_in_processes", "judge_on_ray"]

_REPORT_INTERVAL = 0.2
"""Seconds between two messages of a worker."""
_AHEAD = 4
"""Units by worker that may wait, or be done, before the next one in order is."""


class Unit(NamedTuple):
    """Files that are judged together. ``size`` is their bytes."""

    paths: tuple[str, ...]
    size: int


class _Message(NamedTuple):
    """How many bytes of a unit a worker has read."""

    number: int
    done: int


_Messages: TypeAlias = "SimpleQueue[_Message]"


def judge_here(
    units: Iterable[Unit], settings: UnitSettings, progress: Callable[[int], None]
) -> Generator[JudgedUnit]:
    """Yield what is found in each unit; ``progress`` gets the bytes that were read."""
    before = 0

    def show(done: int) -> None:
        progress(before + done)

    for unit in units:
        yield judge_unit(unit.paths, settings, show)
        before += unit.size
        progress(before)


def judge_in_processes(
    units: Iterable[Unit],
    settings: UnitSettings,
    progress: Callable[[int], None],
    *,
    jobs: int,
) -> Generator[JudgedUnit]:
    """Yield what is found in each unit, in order, judged by ``jobs`` processes.

    If a worker dies, what it was judging is judged again. A file that ends its process alone, and
    twice, is unjudged. No worker is left behind.
    """
    return _Pool(units, settings, progress, jobs).results()


def judge_on_ray(
    units: Iterable[Unit],
    settings: UnitSettings,
    progress: Callable[[int], None],
    *,
    address: str,
) -> Generator[JudgedUnit]:
    """Yield what is found in each unit, in order, judged by the workers of a Ray cluster.

    If a worker is lost, Ray judges its unit again. Raises as ``ray_cluster``.
    """
    done = 0
    with ray_cluster(address) as cluster:
        for outcome in cluster.ordered(_judge_seen, ((unit, settings) for unit in units)):
            unit: Unit = outcome.arguments[0]
            if outcome.result is not None:
                yield outcome.result
            else:
                alone = ((Unit((path,), 0), settings) for path in unit.paths)
                for single in cluster.ordered(_judge_seen, alone):
                    yield single.result or _died(single.arguments[0].paths[0])
            done += unit.size
            progress(done)


def _judge_seen(unit: Unit, settings: UnitSettings) -> JudgedUnit:
    """Judge a unit on a node of a cluster, which must see its files."""
    for path in unit.paths:
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise UsageError(
                f"A worker of the cluster does not see {folder}: put traces on a file system that"
                " all nodes mount."
            )
    return judge_unit(unit.paths, settings)


def _died(path: str) -> JudgedUnit:
    """Return what is known of a file that ended each process that judged it."""
    error = (
        f"{path}: the process that judged it died each time: it ran out of memory, or was ended."
        " `rollproof check --jobs 1` shows why."
    )
    item = Unjudged(path=path, reason=DIED, error=error)
    totals: dict[str, object] = {"checks": {}, "ruled_out": {}, "traces": 0}
    return JudgedUnit(files=1, unjudged=[item], totals=totals)


class _Pool:
    def __init__(
        self,
        units: Iterable[Unit],
        settings: UnitSettings,
        progress: Callable[[int], None],
        jobs: int,
    ) -> None:
        self._units = enumerate(units)
        self._settings = settings
        self._progress = progress
        self._jobs = jobs
        self._sizes: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._done = 0

    def results(self) -> Generator[JudgedUnit]:
        """Yield the results; a closed generator ends the workers."""
        while (yield from self._until_death()):
            pass

    def _until_death(self) -> Generator[JudgedUnit, None, bool]:
        """Yield results in order. Returns whether a worker died, so that units may be left."""
        with _workers(self._jobs) as (pool, messages):
            waiting: dict[int, tuple[Unit, Future[JudgedUnit]]] = {}
            broken = False
            while True:
                room = 0 if broken else _AHEAD * self._jobs - len(waiting)
                for number, unit in islice(self._units, room):
                    waiting[number] = (unit, _submitted(pool, number, unit, self._settings))
                if not waiting:
                    return broken
                first = min(waiting)
                unit, future = waiting[first]
                if not future.done():
                    running = [future for _, future in waiting.values() if not future.done()]
                    wait(running, _REPORT_INTERVAL, FIRST_COMPLETED)
                    self._show(messages)
                    continue
                del waiting[first]
                try:
                    yield future.result()
                except BrokenProcessPool:
                    # Nobody knows whose unit ended the worker, so each is judged alone.
                    broken = True
                    yield from self._carefully(first, unit)
                self._finish(first, unit)

    def _carefully(self, number: int, unit: Unit) -> Generator[JudgedUnit]:
        """Judge a unit in a process of its own, and if that dies each of its files."""
        result = self._alone(number, unit.paths)
        if result is not None:
            yield result
            return
        for path in unit.paths:
            yield self._alone(number, (path,)) or _died(path)

    def _alone(self, number: int, paths: Sequence[str]) -> JudgedUnit | None:
        # what the worker that died had read is read again, and counts once
        self._read.pop(number, None)
        with _workers(1) as (pool, messages):
            future = pool.submit(_work, number, tuple(paths), self._settings)
            while not future.done():
                wait([future], _REPORT_INTERVAL)
                self._show(messages)
            try:
                return future.result()
            except BrokenProcessPool:
                return None

    def _finish(self, number: int, unit: Unit) -> None:
        self._read.pop(number, None)
        self._done += unit.size
        self._progress(self._done)

    def _show(self, messages: _Messages) -> None:
        while not messages.empty():
            message = messages.get()
            self._read[message.number] = message.done
        self._progress(self._done + sum(self._read.values()))


def _submitted(
    pool: ProcessPoolExecutor, number: int, unit: Unit, settings: UnitSettings
) -> Future[JudgedUnit]:
    try:
        # a worker may die at any time, also while its next unit is handed over
        return pool.submit(_work, number, unit.paths, settings)
    except BrokenProcessPool as error:
        future: Future[JudgedUnit] = Future()
        future.set_exception(error)
        return future


@contextmanager
def _workers(jobs: int) -> Iterator[tuple[ProcessPoolExecutor, _Messages]]:
    """Processes that judge units, and their messages. On an error, or when a run is stopped, they
    are killed: the executor would wait for what they are judging.
    """
    # not fork: it copies locks that other threads hold, and a worker may wait for one for ever
    context = multiprocessing.get_context("spawn")
    messages: _Messages = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(messages,))
    try:
        yield pool, messages
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        messages.close()


class _Worker:
    """The state of a worker process, set by the pool's initializer."""

    messages: ClassVar[_Messages]


def _start(messages: _Messages) -> None:
    _Worker.messages = messages
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    # A worker would wait for ever for work from a parent that was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # sys.exit() would end this thread alone
        os._exit(1)


def _work(number: int, paths: tuple[str, ...], settings: UnitSettings) -> JudgedUnit:
    """Judge a unit in this worker."""
    last = time.monotonic()

    def progress(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_INTERVAL:
            last = now
            _Worker.messages.put(_Message(number, done))

    return judge_unit(paths, settings, progress)
