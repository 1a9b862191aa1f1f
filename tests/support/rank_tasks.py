"""Tasks for tests of ``rollproof.replay.process_group``: what each rank does for a job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["summing"]


def summing(rank: int, world_size: int) -> Callable[[str], Any]:
    """Adds up 1 + ... + world_size over all ranks, unless the job is that rank 1 (or ``all``) does
    something else first.
    """

    def do(job: str) -> Any:
        import torch

        if job == "pid":
            return os.getpid()
        if job == "count loops":
            for _ in range(3):
                torch.distributed.all_reduce(torch.zeros(1), group=torch.distributed.new_group())
            return sum(
                task.read_text(encoding="utf-8").startswith("gloo_tcp_loop")
                for task in Path("/proc/self/task").glob("*/comm")
            )
        if rank == 1 or job.startswith("all "):
            match job.removeprefix("all "):
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exits":
                    os.write(1, b"the last words of rank 1\n")
                    os._exit(3)
                case "raises":
                    raise ArithmeticError("rank 1 cannot count")
                case "ends":
                    raise SystemExit("rank 1 has enough")
                case "gives a function":
                    return do
                case "sleeps":
                    time.sleep(60)
        total = torch.tensor([rank + 1])
        torch.distributed.all_reduce(total)
        return int(total.item())

    return do


def not_starting(rank: int, world_size: int) -> Callable[[str], Any]:
    """Fails when it is set up."""
    raise LookupError("no such model")
