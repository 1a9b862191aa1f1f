"""Process groups for distributed runs of a test: ranks that get jobs, and an error that names the
rank that failed.

``Ranks`` starts its processes from the fork server of ``multiprocessing``, which has imported what
they need: a rank starts in milliseconds and shares the memory of those imports. The ranks meet in
a gloo group over the loopback device. A rank that fails, dies or hangs ends its job for all ranks
within a bounded time, with a ``RankError`` that names it; the next job gets fresh ranks. All
processes end when their parent does, however that ends.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

from rollproof.errors import RollproofError, UsageError

__all__ = ["RankError", "Ranks", "Task", "preload_modules"]

Task: TypeAlias = "Callable[[int, int], Callable[[Any], Any]]"
"""``task(rank, world_size)`` is called once in every rank; what it returns is called with each job.
The task must be importable; jobs and results are pickled.
"""

_TAIL = 12  # lines of a rank's output that an error quotes
_DUMP_S = 5.0  # how long ranks that hang may take to write where they are
_EXIT_S = 10.0
# without a named interface gloo took half a minute longer to start
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", **_ENVIRONMENT}
# without the workspace cuBLAS sums in an order of its own choice, and two runs differ
_ON_GPUS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **_ENVIRONMENT}
_UNPICKLED = (pickle.PicklingError, AttributeError, TypeError)
_LONGEST_TMP = 60  # sun_path takes 104 bytes on macOS; multiprocessing adds up to 40
_preloaded: dict[str, None] = {"torch": None}  # of the fork server, one for the whole process


class RankError(RollproofError, RuntimeError):
    """A rank of a distributed run failed, died or did not answer in time.

    ``rank`` is the one to look at; ``None`` if all ranks hang, so that none is to blame. If the
    rank raised an exception, that is the ``__cause__``, unless it cannot be pickled.
    """

    def __init__(self, text: str, *, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What every rank of a group needs in order to start."""

    task: str
    world_size: int
    folder: Path
    preload: tuple[str, ...]
    join_limit_s: float
    cuda: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """Reply of a rank: a result; or the traceback and the exception, with the time on the clock
    that all ranks share.
    """

    result: Any = None
    failure: str | None = None
    error: BaseException | None = None
    at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """A rank as its parent sees it."""

    process: BaseProcess
    pipe: Connection
    log: Path

    def tail(self) -> str:
        """Return the last lines that the rank wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "".join(f"\n    {line}" for line in text.splitlines()[-_TAIL:])

    def receive(self) -> _Reply | None:
        """Return the next reply; ``None`` if the rank is dead."""
        try:
            reply = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return reply if isinstance(reply, _Reply) else None

    def exit_text(self) -> str:
        """Describe how the rank ended."""
        self.process.join(_EXIT_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with code {code}"


class Ranks:
    """Runs jobs on any number of processes, one job at a time.

    Use it as a context manager, or ``close`` it. The script that uses it needs an
    ``if __name__ == "__main__"`` guard, as for all of ``multiprocessing``.

    Args:
        task: makes the function that a rank calls with each job.
        preload: modules to import before forking. They must start no threads (torch and
            megatron-core do not). One fork server serves the whole process: if it already runs
            without them, each rank imports them by itself (see ``preload_modules``).
        limit_s: limit of a job.
        start_limit_s: limit until all ranks have joined their group.
        grace_s: how long the other ranks may take to reply after one failed.
        cuda: give each rank the GPU of its number, and an NCCL group.

    Raises ``UsageError`` for a task that other processes cannot import.
    """

    def __init__(
        self,
        task: Task,
        *,
        preload: Sequence[str] = (),
        limit_s: float = 120.0,
        start_limit_s: float = 300.0,
        grace_s: float = 3.0,
        cuda: bool = False,
    ) -> None:
        self._task = _importable(task)
        self._preload = tuple(preload)
        self._limit_s = limit_s
        self._start_limit_s = start_limit_s
        self._grace_s = grace_s
        self._cuda = cuda
        # importing megatron-core starts CUDA, which does not survive a fork
        self._context: Any = multiprocessing.get_context("spawn" if cuda else "forkserver")
        self._ranks: list[_Rank] = []
        self._crew: tuple[int, Hashable] = (0, None)
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the imports without waiting for them."""
        if self._cuda:
            return
        preload_modules(*self._preload)
        with _server_environment():
            forkserver.ensure_running()

    def run(self, job: Any, *, world_size: int = 1, crew: Hashable = None) -> list[Any]:
        """Run the job on ``world_size`` processes; return the results by rank.

        The processes stay for the next job of the same size and ``crew`` (any name); for another
        one they are ended first. Raises ``RankError``, and ``UsageError`` for a job that cannot be
        pickled.
        """
        if world_size < 1:
            raise UsageError(f"world_size is {world_size}; a run needs at least one process.")
        try:
            if self._crew != (world_size, crew) or not self._ranks:
                self._start(world_size)
                self._crew = (world_size, crew)
            for rank in self._ranks:
                with suppress(OSError):  # it died: its first reply is the end of the pipe
                    _send_job(rank.pipe, job)
            replies = self._replies(self._limit_s)
            if any(reply is None for reply in replies.values()) or len(replies) < world_size:
                self._raise(replies, self._limit_s, "in its job")
        except BaseException:
            self.close()
            raise
        if any(reply.failure is not None for reply in replies.values() if reply):
            # all ranks replied, so none waits in a collective: they can go on with the next job
            raise self._failure(replies, "in its job")
        return [replies[rank].result for rank in range(world_size)]  # type: ignore[union-attr]

    def close(self) -> None:
        """End every process."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, world_size: int) -> None:
        self.close()
        self.prepare()
        self._folder = Path(tempfile.mkdtemp(prefix="rollproof-ranks-"))
        start = _Start(
            task=self._task,
            world_size=world_size,
            folder=self._folder,
            preload=self._preload,
            # above the limit of a job. It bounds how long ranks wait for each other to join, too:
            # if it ended a collective that hangs, the rank that waits would be reported as failed
            join_limit_s=self._start_limit_s + self._limit_s,
            cuda=self._cuda,
        )
        try:
            for number in range(world_size):
                self._ranks.append(self._process(number, start))
        except (EOFError, OSError) as error:
            raise RankError(
                "The fork server of multiprocessing ended before it had started all ranks"
                f" ({type(error).__name__}: {error}); standard error shows why.",
                rank=None,
            ) from error
        replies = self._replies(self._start_limit_s)
        if len(replies) < world_size or any(
            reply is None or reply.failure is not None for reply in replies.values()
        ):
            self._raise(replies, self._start_limit_s, "while it started")

    def _process(self, number: int, start: _Start) -> _Rank:
        ours, theirs = multiprocessing.Pipe()
        log = start.folder / f"rank{number}.log"
        log.touch()
        # a daemon: at the normal end of the parent, multiprocessing ends what was never closed
        process = self._context.Process(target=_run_rank, args=(number, theirs, start), daemon=True)
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # or the death of the rank would not end our side of the pipe
        return _Rank(process=process, pipe=ours, log=log)

    def _replies(self, limit_s: float) -> dict[int, _Reply | None]:
        """Return the reply of each rank, ``None`` for a dead one; ranks that did not reply in time
        are missing.
        """
        replies: dict[int, _Reply | None] = {}
        deadline = time.monotonic() + limit_s
        while len(replies) < len(self._ranks):
            waiting = {
                rank.pipe: number
                for number, rank in enumerate(self._ranks)
                if number not in replies
            }
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = waiting[pipe]  # type: ignore[index]
                replies[number] = reply = self._ranks[number].receive()
                if reply is None or reply.failure is not None:
                    # the others may wait for it in a collective, which does not end by itself
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return replies

    def _raise(self, replies: dict[int, _Reply | None], limit_s: float, when: str) -> NoReturn:
        """Raise the error of the rank to look at."""
        size = len(self._ranks)
        # a rank that died comes first (its peers can only fail after it), then the first failure
        dead = [number for number, reply in replies.items() if reply is None]
        if dead:
            rank = self._ranks[dead[0]]
            raise RankError(
                f"Rank {dead[0]} of {size} {rank.exit_text()} {when}; the other ranks were ended."
                f" Its last output:{rank.tail() or ' none'}",
                rank=dead[0],
            )
        if any(reply is not None and reply.failure is not None for reply in replies.values()):
            raise self._failure(replies, when)
        silent = [number for number in range(size) if number not in replies]
        raise RankError(
            f"No answer from rank {silent} of {size} within {limit_s:g} s {when}: a collective"
            " that not all ranks enter, or a limit too short for this machine. All ranks were"
            f" ended. Where each was:{self._tracebacks(silent)}",
            rank=silent[0] if len(silent) == 1 else None,
        )

    def _failure(self, replies: dict[int, _Reply | None], when: str) -> RankError:
        failures = [
            (reply.at, number, reply)
            for number, reply in replies.items()
            if reply is not None and reply.failure is not None
        ]
        _, number, reply = min(failures, key=lambda failure: failure[:2])
        error = RankError(
            f"Rank {number} of {len(self._ranks)} failed {when}.\n{reply.failure}", rank=number
        )
        error.__cause__ = reply.error
        return error

    def _tracebacks(self, numbers: Sequence[int]) -> str:
        """Return the traceback of each of these ranks, as the rank itself writes it."""
        ranks = [self._ranks[number] for number in numbers]
        before = [rank.log.stat().st_size for rank in ranks]
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        written = False
        while not written and time.monotonic() < deadline:  # a busy machine takes its time
            sizes = [rank.log.stat().st_size for rank in ranks]
            time.sleep(0.2)
            written = sizes == [rank.log.stat().st_size for rank in ranks] and all(
                map(int.__lt__, before, sizes)
            )
        return "".join(
            f"\n  rank {number}:{rank.tail()}" for number, rank in zip(numbers, ranks, strict=True)
        )


def preload_modules(*names: str) -> None:
    """Let the fork server import these modules, too, if it has not been started yet.

    A module that cannot be imported is left to the ranks, which report it.
    """
    _preloaded.update(dict.fromkeys((__name__, *names)))
    multiprocessing.set_forkserver_preload(list(_preloaded))


@contextmanager
def _server_environment() -> Iterator[None]:
    """Start a fork server in here: it inherits what this process has now."""
    # CUDA must stay hidden from what it imports, and OpenMP start no threads: a fork loses them
    before = {name: os.environ.get(name) for name in _ON_CPUS}
    folder = tempfile.tempdir
    os.environ.update(_ON_CPUS)
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMP:
        # the path of a socket is bounded, and multiprocessing does not look (gh-93852)
        tempfile.tempdir = "/tmp"  # noqa: S108 - a private folder is made in there
    try:
        yield
    finally:
        tempfile.tempdir = folder
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _importable(task: Task) -> str:
    module, name = getattr(task, "__module__", ""), getattr(task, "__qualname__", "")
    if not name.isidentifier() or module in ("", "__main__"):
        raise UsageError(
            f"The task {name or task!r} of {module or 'no module'} cannot be imported by the"
            " processes that run it. Define it as a plain function at the top of a module, and"
            " pass that function."
        )
    return f"{module}:{name}"


def _send_job(pipe: Connection, job: Any) -> None:
    try:
        pipe.send(job)
    except _UNPICKLED as error:
        raise UsageError(
            f"The job, a {type(job).__name__}, cannot be sent to other processes: {error}. Send"
            " plain data."
        ) from error


# what follows runs in a rank


def _run_rank(number: int, pipe: Connection, start: _Start) -> NoReturn:
    """Join the group, then do one job after the other until the parent is gone."""
    # Ctrl-C in a terminal reaches the whole process group; the parent decides how the run ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # descriptors, not sys.stdout: NCCL, gloo and faulthandler write past Python
    log = os.open(start.folder / f"rank{number}.log", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(_ON_GPUS if start.cuda else _ON_CPUS)
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # before it joins: joining waits for other ranks, and the parent may be gone by then
    threading.Thread(target=_receive, args=(pipe, jobs, start.folder), daemon=True).start()
    calls: list[Callable[[Any], Any]] = []
    _reply(pipe, lambda: calls.append(_join(number, start)))
    while True:
        job = jobs.get()
        _reply(pipe, lambda job=job: calls[0](job))  # type: ignore[misc]


def _receive(pipe: Connection, jobs: queue.SimpleQueue[Any], folder: Path) -> NoReturn:
    with suppress(EOFError, OSError):
        while True:
            jobs.put(pipe.recv())
    # the parent is gone, perhaps killed: nobody else removes the folder, and a collective that
    # waits for other ranks must not keep this one alive
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _reply(pipe: Connection, work: Callable[[], Any]) -> None:
    try:
        reply = _Reply(result=work())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the parent, whatever it is
        reply = _Reply(failure=traceback.format_exc(), error=_picklable(error), at=time.monotonic())
    try:
        pipe.send(reply)
    except _UNPICKLED as error:
        text = (
            f"What the job returned, a {type(reply.result).__name__}, cannot be sent to the"
            f" parent: {error}"
        )
        pipe.send(_Reply(failure=text, at=time.monotonic()))


def _picklable(error: BaseException) -> BaseException | None:
    """Return the exception if the parent can read it, else ``None``."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was dumped in the line itself
    except Exception:  # noqa: BLE001 - exceptions of frameworks fail here in many ways
        return None
    return error


def _join(number: int, start: _Start) -> Callable[[Any], Any]:
    """Join the group and set up the task."""
    import torch

    for module in start.preload:
        importlib.import_module(module)
    # every full collection would walk, and so copy, the memory that all ranks share; and a step
    # makes objects by the ten thousands, hardly any of them in cycles
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    if start.cuda:
        torch.cuda.set_device(number)
    else:
        torch.set_num_threads(1)
        _share_device()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if start.cuda else "gloo",
        init_method=(start.folder / "store").as_uri(),  # a file: no port has to be free
        rank=number,
        world_size=start.world_size,
        timeout=timedelta(seconds=start.join_limit_s),
    )
    module, _, name = start.task.partition(":")
    task: Task = getattr(importlib.import_module(module), name)
    return task(number, start.world_size)


def _share_device() -> None:
    """Let all gloo groups of this process share one device."""
    # torch gives each group its own, whose thread looks for messages a hundred times a second for
    # as long as it lives: Megatron's thirty groups of four idle ranks take an eighth of a core
    from torch.distributed import distributed_c10d

    own: Any = distributed_c10d.ProcessGroupGloo
    device = own.create_default_device()

    class OnOneDevice(own):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = own._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice
