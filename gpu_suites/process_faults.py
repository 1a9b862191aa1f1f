"""Breaking: what happens to the processes of an engine on a bad day."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["break_children", "engine_host", "engine_runs"]

_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


_COMPUTES = ("spawn_main", "VLLM::", "sglang::", "_host")
"""What stands in the command lines of processes in which engines compute: spawned ones, forked
ones, those that name themselves.
"""


def break_children(host: int, how: str) -> list[int]:
    """Have every process below the host with that id ``killed``, or ``stopped``: as if it hung;
    returns their ids.
    """
    found = _children(host)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[how])
    return found


def engine_host(engine: str) -> int | None:
    """The id of the process below this one that holds an engine, also one that is still starting;
    ``None`` where there is none.
    """
    return next(
        (
            pid
            for pid in _children(os.getpid())
            if f"rollproof.engines.{engine}.{engine}_host" in _command(pid)
        ),
        None,
    )


def engine_runs(host: int) -> bool:
    """Whether a process in which an engine computes runs below that host."""
    return any(any(name in _command(pid) for name in _COMPUTES) for pid in _children(host))


def _children(host: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return sorted(pid for pid in parents if _below(pid, host, parents))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def _below(pid: int, host: int, parents: dict[int, int]) -> bool:
    seen = 0
    while pid in parents and seen < 64:
        pid = parents[pid]
        if pid == host:
            return True
        seen += 1
    return False
