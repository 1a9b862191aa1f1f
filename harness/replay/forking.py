"""Forking: the process that imports what the ranks of a run need, once, and forks them; and the
life of each rank.

The other side of ``rollproof.replay.process_group``, which starts it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

__all__ = ["UNPICKLED", "Said", "Task", "nurse"]

Task: TypeAlias = "Callable[[int, int], Callable[[Any], Any]]"
"""``task(rank, world_size)`` is called once in every rank, and what it returns for each job.
Importable; jobs and results are pickled.
"""

UNPICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot pickle."""
_UNMET = (EOFError, ConnectionError, FileNotFoundError, pickle.UnpicklingError)
"""What a nursery meets where its parent is gone already: half a start or none, a socket where
nobody listens, or no socket.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a rank answered: a result, or the text of an exception, the exception, and when (one
    clock for all ranks).
    """

    result: Any = None
    failed: str | None = None
    error: BaseException | None = None
    at: float = 0.0


def nurse(folder: Path) -> None:
    """The life of the nursery: import, then fork, kill and report until the parent closes the pipe."""
    try:
        start = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent, which started this process
        sys.path[:] = start["path"]
        parent = Client(str(folder / "socket"), "AF_UNIX", authkey=start["key"])
    except _UNMET:
        shutil.rmtree(
            folder, ignore_errors=True
        )  # its owner was killed before it could hand it over
        raise
    with parent as pipe:
        children: dict[int, int] = {}
        fates: dict[int, int] = {}
        try:
            while True:
                ask = pipe.recv()
                try:
                    answer = _nursed(ask, folder, start, children, fates, pipe)
                except Exception:  # noqa: BLE001 - told to the parent, whatever it is
                    pipe.send((False, traceback.format_exc()))
                else:
                    pipe.send((True, answer))
        except (EOFError, OSError):
            pass
        finally:
            _end(children, fates)
            shutil.rmtree(folder, ignore_errors=True)  # its owner may have been killed


def _nursed(
    ask: Any,
    folder: Path,
    start: dict[str, Any],
    children: dict[int, int],
    fates: dict[int, int],
    pipe: Connection,
) -> Any:
    match ask:
        case "import" if start["cuda"]:
            # CUDA, once started, does not survive a fork, and some modules start it when they are
            # imported
            pass
        case "import":
            import torch

            torch.set_num_threads(1)
            for module in start["preload"]:
                importlib.import_module(module)
            # or every full collection of a rank walks what all ranks share, and so copies it
            gc.freeze()
            gc.set_threshold(
                20_000, 50, 100
            )  # a step makes objects by the ten thousands, hardly any in cycles
        case ("fork", run):
            fates.clear()
            for rank in range(run["world_size"]):
                children[rank] = os.fork()
                if children[rank] == 0:
                    try:
                        pipe.close()
                        _live(rank, run, folder, start["key"])
                    finally:
                        os._exit(1)  # never on into the nursery's own code
        case ("dump", ranks):
            for rank in ranks:
                os.kill(children[rank], signal.SIGUSR1)
        case ("fate", rank):
            fates[rank] = os.waitstatus_to_exitcode(os.waitpid(children.pop(rank), 0)[1])
            return fates[rank]
        case "kill":
            _end(children, fates)
    return None


def _end(children: dict[int, int], fates: dict[int, int]) -> None:
    for rank, pid in children.items():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        fates[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    children.clear()


def _live(rank: int, run: dict[str, Any], folder: Path, key: bytes) -> NoReturn:
    """The life of one rank: join the group, then one job after the other, until the parent closes
    the pipe.
    """
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    sys.path[:] = run["path"]
    pipe = Client(str(folder / "socket"), "AF_UNIX", authkey=key)
    pipe.send(rank)
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                jobs.put(pipe.recv())
        os._exit(
            0
        )  # the parent is gone: a collective that waits for other ranks must not keep this one alive

    def answer(work: Callable[[], Any]) -> None:
        try:
            said = Said(result=work())
        except (
            Exception,
            SystemExit,
        ) as error:
            said = Said(failed=traceback.format_exc(), error=_portable(error), at=time.monotonic())
        try:
            pipe.send(said)
        except UNPICKLED as error:
            text = (
                f"What the job returned, a {type(said.result).__name__}, cannot be sent to the"
                f" parent: {error}"
            )
            pipe.send(Said(failed=text, at=time.monotonic()))

    do: list[Callable[[Any], Any]] = []
    threading.Thread(
        target=receive, daemon=True
    ).start()  # before it joins: that waits for other ranks too, and they may be gone
    answer(lambda: do.append(_join(rank, run)))
    while True:
        job = jobs.get()
        answer(lambda job=job: do[0](job))  # type: ignore[misc]


def _portable(error: BaseException) -> BaseException | None:
    """The exception, where the parent can read it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was dumped in the line itself
    except Exception:  # noqa: BLE001 - exceptions of frameworks fail here in many ways
        return None
    return error


def _join(rank: int, run: dict[str, Any]) -> Callable[[Any], Any]:
    """Join the gloo group and start the task. The ranks meet in a file: no port has to be free.

    The group's own limit is above that of a job: it also bounds how long ranks wait for each other
    to join, and where it ended a collective that hangs, the rank that waits would be told as the
    one that failed.
    """
    import torch

    if run["cuda"]:
        torch.cuda.set_device(rank)
    else:
        _share_device()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if run["cuda"] else "gloo",
        init_method=run["store"],
        rank=rank,
        world_size=run["world_size"],
        timeout=timedelta(seconds=run["limit_s"]),
    )
    module, _, name = run["task"].partition(":")
    task: Task = getattr(importlib.import_module(module), name)
    return task(rank, run["world_size"])


def _share_device() -> None:
    """Let all gloo groups of this process have one device, as gloo offers.

    torch gives each group its own, whose thread looks for messages a hundred times a second for as
    long as it lives: Megatron's thirty groups of four idle ranks take an eighth of a core.
    """
    from torch.distributed import distributed_c10d

    own: Any = distributed_c10d.ProcessGroupGloo
    device = own.create_default_device()

    class OnOneDevice(own):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = own._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice


if __name__ == "__main__":
    # Under its own name, so that what it sends is what the parent knows.
    from rollproof.replay import forking

    forking.nurse(Path(sys.argv[1]))
