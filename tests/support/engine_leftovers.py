"""What a run of a real engine could leave behind on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def leftovers(engine: str) -> set[str]:
    """Of the engine of that name: our temporary folders, shared memory that is named after it, and
    processes that hold it.

    Other programs may start and end during the tests: nothing is counted that is not surely
    this engine's.
    """
    found = {str(path) for path in Path(tempfile.gettempdir()).glob(f"rollproof-{engine}-*")}
    if Path("/dev/shm").is_dir():  # noqa: S108 - where Linux keeps shared memory
        found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if engine in name}  # noqa: PTH208, S108 - names only
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"rollproof.engines.{engine}.{engine}_host" in line or f"{engine}::" in line.lower():
            found.add(f"{entry.parent.name}: {line}")
    return found
