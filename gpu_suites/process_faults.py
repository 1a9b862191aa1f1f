"""Faults of an engine's processes: killing them, or stopping them as if they hung."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["break_children", "engine_host", "engine_runs"]

_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# Parts of the command lines of processes in which engines compute.
# They are those of spawned processes, of processes that name themselves, and of forked ones.
_COMPUTES = ("spawn_main", "VLLM::", "sglang::", "_host")
_MAX_DEPTH = 64


def break_children(host: int, how: str) -> list[int]:
    """Kill or stop (``how``: ``killed``, ``stopped``) all descendants of a process; return them."""
    pids = _descendants(host)
    for pid in pids:
        # a process may end between the look and the signal
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[how])
    return pids


def engine_host(engine: str) -> int | None:
    """Return the descendant process that hosts an engine, which may be starting, or ``None``."""
    return next(
        (
            pid
            for pid in _descendants(os.getpid())
            if f"rollproof.engines.{engine}.{engine}_host" in _command(pid)
        ),
        None,
    )


def engine_runs(host: int) -> bool:
    """Whether a process in which an engine computes is a descendant of that host."""
    return any(any(name in _command(pid) for name in _COMPUTES) for pid in _descendants(host))


def _descendants(host: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the command in parentheses may contain spaces and parentheses, so fields are counted
            # from the last one
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return sorted(pid for pid in parents if _descends_from(pid, host, parents))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def _descends_from(pid: int, host: int, parents: dict[int, int]) -> bool:
    seen = 0
    # bounded: /proc is not read at one instant, so a recycled id could make a circle
    while pid in parents and seen < _MAX_DEPTH:
        pid = parents[pid]
        if pid == host:
            return True
        seen += 1
    return False
