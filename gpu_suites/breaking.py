"""Breaking: what happens to the processes of an engine on a bad day."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["break_children"]

_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def break_children(host: int, how: str) -> list[int]:
    """Have every process below the host with that id ``killed``, or ``stopped``: as if it hung; returns their ids."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid for pid in parents if _below(pid, host, parents)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[how])
    return found


def _below(pid: int, host: int, parents: dict[int, int]) -> bool:
    seen = 0
    while pid in parents and seen < 64:
        pid = parents[pid]
        if pid == host:
            return True
        seen += 1
    return False
