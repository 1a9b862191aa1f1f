"""Processes of a distributed CPU run: forked together, given one job after the other, never left
behind.

``Ranks`` starts one process that imports what the jobs need, once, and forks the ranks of a run
from it: in milliseconds, and sharing their memory. The ranks meet in a gloo group over the loopback
device. A rank that fails, dies or hangs ends its job for all ranks within a bounded time, with a
``RankError`` that names it; the next job gets fresh ranks. Everything ends when its parent does,
however that ends.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NoReturn, Self

from rollproof.errors import RollproofError, UsageError
from rollproof.replay.forking import UNPICKLED, Said, Task

__all__ = ["RankError", "Ranks", "Task"]

_TAIL = 12  # lines of a rank's output that an error quotes
_ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}
_ON_GPUS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8"
}  # without it cuBLAS sums in an order of its own choice, and two runs differ
_DUMP_S = 5.0  # how long ranks that hang may take to say where they are


class RankError(RollproofError, RuntimeError):
    """A rank of a distributed run failed, died or did not answer in time.

    ``rank`` is the one to look at (``None`` where all hang and none can be told from the others).
    Where it raised an exception, that is the ``__cause__``, unless it cannot be pickled.
    """

    def __init__(self, text: str, *, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


class Ranks:
    """Runs jobs on any number of processes, one job at a time; use it as a context manager, or
    ``close`` it.

    ``preload`` are modules to import before forking (they must start no threads; torch and
    megatron-core do not). ``limit_s`` bounds a job, ``start_limit_s`` the imports; ``grace_s`` is
    how long other ranks may take to say what they saw, after one failed. With ``cuda`` each rank
    has the GPU of its number, they meet in an NCCL group, and each imports for itself: importing
    megatron-core starts CUDA, which does not survive a fork. Raises ``UsageError`` for a task that
    other processes cannot import.
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
        self._nursery: _Nursery | None = None
        self._crew: dict[int, Connection] = {}
        self._crew_of: tuple[int, Hashable] = (0, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Start to import, and do not wait: the first ``run`` does. Raises ``RankError`` where no
        process can be started.
        """
        if self._nursery is None:
            self._nursery = _Nursery(self._preload, self._start_limit_s, cuda=self._cuda)

    def run(self, job: Any, *, world_size: int = 1, crew: Hashable = None) -> list[Any]:
        """Run the job on ``world_size`` processes; returns the results by rank. Raises
        ``RankError``.

        The processes live on for the next job of that size and ``crew`` (any name); for another one
        they are ended first.
        """
        if world_size < 1:
            raise UsageError(f"world_size is {world_size}; a run needs at least one process.")
        try:
            if self._crew_of != (world_size, crew) or not self._crew:
                self._start(world_size)
                self._crew_of = (world_size, crew)
            for pipe in self._crew.values():
                with suppress(OSError):  # it died; its first answer is the end of the pipe
                    _send_job(pipe, job)
            said = self._answers(self._limit_s)
            if any(answer is None for answer in said.values()) or len(said) < world_size:
                self._raise(said, self._limit_s, "in its job")
            if any(answer.failed is not None for answer in said.values() if answer):
                # Everyone answered: nobody waits in a collective, and the ranks can go on.
                raise self._failure(said, "in its job")  # noqa: TRY301 - the same end as an error from further down
            return [said[rank].result for rank in range(world_size)]  # type: ignore[union-attr]
        except RankError:
            if self._nursery is None or not self._nursery.alive:
                self.close()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process."""
        self._end_crew()
        if self._nursery is not None:
            self._nursery.end()
            self._nursery = None

    def _start(self, world_size: int) -> None:
        self._end_crew()
        self.prepare()
        assert self._nursery is not None
        try:
            self._nursery.imported(self._start_limit_s)
        except RankError:
            self.close()  # without its modules it is of no use
            raise
        self._crew = self._nursery.fork(
            {
                "task": self._task,
                "world_size": world_size,
                "limit_s": self._start_limit_s + self._limit_s,
                "path": list(sys.path),
                "cuda": self._cuda,
            },
            self._start_limit_s,
        )
        said = self._answers(self._start_limit_s)
        if len(said) < world_size or any(
            answer is None or answer.failed is not None for answer in said.values()
        ):
            self._raise(said, self._start_limit_s, "while it started")

    def _end_crew(self) -> None:
        if self._nursery is not None:
            self._nursery.kill()
        for pipe in self._crew.values():
            pipe.close()
        self._crew = {}

    def _answers(self, limit_s: float) -> dict[int, Said | None]:
        """What each rank said, ``None`` where it is dead; ranks that said nothing in time are
        missing.
        """
        said: dict[int, Said | None] = {}
        deadline = time.monotonic() + limit_s
        while len(said) < len(self._crew):
            waiting = {pipe: rank for rank, pipe in self._crew.items() if rank not in said}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                said[rank] = answer = _heard(self._crew[rank])
                if answer is None or answer.failed is not None:
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return said

    def _raise(self, said: dict[int, Said | None], limit_s: float, when: str) -> NoReturn:
        """End the ranks and raise the error of the one to look at.

        One that died without a word comes first (its peers can only fail after it), then the one
        that failed first.
        """
        size = len(self._crew)
        nursery = self._nursery
        assert nursery is not None
        dead = [rank for rank, answer in said.items() if answer is None]
        failed = any(answer is not None and answer.failed is not None for answer in said.values())
        silent = [rank for rank in self._crew if rank not in said]
        error: RankError
        if dead:
            how = nursery.fate(dead[0])
            text = (
                f"Rank {dead[0]} of {size} {how} {when}; the other ranks were ended. Its last"
                f" output:{nursery.tail(dead[0]) or ' none'}"
            )
            error = RankError(text, rank=dead[0])
        elif failed:
            error = self._failure(said, when)
        else:
            where = nursery.whereabouts(silent)
            text = (
                f"No answer from rank {silent} of {size} within {limit_s:g} s {when}: a collective"
                " that not all ranks enter, or a limit too short for this machine. All ranks were"
                f" ended. Where each was:{where}"
            )
            error = RankError(text, rank=silent[0] if len(silent) == 1 else None)
        self._end_crew()
        raise error

    def _failure(self, said: dict[int, Said | None], when: str) -> RankError:
        failed = [
            (answer.at, rank, answer)
            for rank, answer in said.items()
            if answer is not None and answer.failed is not None
        ]
        _, rank, answer = min(failed, key=lambda one: one[:2])
        error = RankError(
            f"Rank {rank} of {len(self._crew)} failed {when}.\n{answer.failed}", rank=rank
        )
        error.__cause__ = answer.error
        return error


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
    except UNPICKLED as error:
        raise UsageError(
            f"The job, a {type(job).__name__}, cannot be sent to other processes: {error}. Send"
            " plain data."
        ) from error


def _heard(pipe: Connection) -> Said | None:
    try:
        message = pipe.recv()
    except (EOFError, OSError):
        return None
    return message if isinstance(message, Said) else None


def _folder_of_socket() -> tempfile.TemporaryDirectory[str]:
    """A new folder; below /tmp where the path of a socket in the usual place would be longer than
    systems take (104 bytes on macOS).
    """
    folder = tempfile.TemporaryDirectory(prefix="rollproof-ranks-")
    if len(os.fsencode(folder.name)) + len("/socket") < 104:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix="rollproof-ranks-", dir="/tmp")


class _Nursery:
    """The process that imports and forks, as its parent sees it. It forks, kills and tells how a
    rank ended.
    """

    def __init__(self, preload: Sequence[str], limit_s: float, *, cuda: bool = False) -> None:
        self._folder = _folder_of_socket()
        self.folder = Path(self._folder.name)
        self._listener = Listener(
            str(self.folder / "socket"), "AF_UNIX", authkey=(key := os.urandom(16))
        )
        self._runs = 0
        self._ready = False
        with (self.folder / "nursery.log").open("wb") as log:
            # A session of its own: a Ctrl-C of the terminal reaches the parent alone, which ends
            # the others.
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, on this module
                [sys.executable, "-m", "rollproof.replay.forking", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    **(_ON_GPUS if cuda else _ON_CPUS),
                },
            )
        try:
            assert self._process.stdin is not None
            pickle.dump(
                {"key": key, "path": list(sys.path), "preload": tuple(preload), "cuda": cuda},
                self._process.stdin,
            )
            self._process.stdin.close()
            self._pipe = self._accept(limit_s)
            self._pipe.send("import")
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._listener.close()
            self._folder.cleanup()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self._process.poll() is None

    def imported(self, limit_s: float) -> None:
        """Wait until it has imported everything."""
        if not self._ready:
            self._answer(limit_s)
            self._ready = True

    def fork(self, start: dict[str, Any], limit_s: float) -> dict[int, Connection]:
        """Fork the ranks of a run; returns their pipes."""
        self._runs += 1
        store = self.folder / f"store{self._runs}"
        self._ask(("fork", {**start, "store": store.as_uri()}), limit_s)
        pipes: dict[int, Connection] = {}
        for _ in range(start["world_size"]):
            pipe = self._accept(limit_s)
            pipes[pipe.recv()] = pipe
        return dict(sorted(pipes.items()))

    def fate(self, rank: int) -> str:
        """How a rank that is dead ended, in words."""
        code: int = self._ask(("fate", rank), 10)
        return (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )

    def kill(self) -> None:
        """End all ranks; returns when they are gone."""
        if self._ready:  # before, it has none
            with suppress(RankError):
                self._ask("kill", 10)

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Where each of these ranks is, as a traceback of each."""
        logs = [self._log(rank) for rank in ranks]
        sizes = [log.stat().st_size for log in logs]
        self._ask(("dump", list(ranks)), 10)
        deadline = time.monotonic() + _DUMP_S
        told = False
        while not told and time.monotonic() < deadline:  # on a busy machine a rank takes its time
            written = [log.stat().st_size for log in logs]
            time.sleep(0.2)
            told = written == [log.stat().st_size for log in logs] and all(
                map(int.__lt__, sizes, written)
            )
        return "".join(f"\n  rank {rank}:{self.tail(rank)}" for rank in ranks)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def tail(self, rank: int) -> str:
        """The last lines that a rank wrote."""
        text = self._log(rank).read_text(encoding="utf-8", errors="replace")
        return "".join(f"\n    {line}" for line in text.splitlines()[-_TAIL:])

    def end(self) -> None:
        self.kill()
        self._pipe.close()  # it ends by itself; the signal is for one that is busy
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._folder.cleanup()

    def _accept(self, limit_s: float) -> Connection:
        """The next process to come. A process that never comes is one that died."""
        socket: Any = self._listener._listener._socket  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        while not wait([socket], 0.2):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._lost("did not start")
        accepted = self._listener.accept()
        assert isinstance(accepted, Connection)
        return accepted

    def _ask(self, what: Any, limit_s: float) -> Any:
        with suppress(OSError):  # it is gone: there will be no answer
            self._pipe.send(what)
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> Any:
        try:
            if self._pipe.poll(limit_s):
                done, answer = self._pipe.recv()
                if done:
                    return answer
                raise RankError(f"The ranks cannot be started: {answer}", rank=None)
        except (EOFError, OSError):
            pass
        raise self._lost("gave no answer")

    def _lost(self, what: str) -> RankError:
        log = self.folder / "nursery.log"
        lines = (
            log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
            if log.exists()
            else []
        )
        return RankError(
            "\n    ".join([f"The process that starts the ranks {what}. Its last output:", *lines]),
            rank=None,
        )
