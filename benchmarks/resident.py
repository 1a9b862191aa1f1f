"""What a command takes: wall time, processor time, and the largest memory that it and all processes
below it held at one time.

``python benchmarks/resident.py COMMAND ...`` runs it and prints one line. Memory is proportional
(PSS: a page that forked ranks share counts once), read every five seconds from /proc (reading takes
processor time that is not counted: 33 s of eight minutes with six ranks, when it was every two);
Linux alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def main(command: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not command:
        print(__doc__)
        return 0
    start, largest = time.monotonic(), 0
    with subprocess.Popen(command) as process:  # noqa: S603 - the command line's own
        while process.poll() is None:
            largest = max(largest, sum(map(_held, _below(process.pid))))
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{time.monotonic() - start:.1f} s, {spent.ru_utime + spent.ru_stime:.1f} s of processor"
        f" time, {largest / 2**20:.2f} GiB at most: {' '.join(command)}"
    )
    return process.returncode


def _below(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = int(
                (folder / "stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[1]
            )
            children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _held(pid: int) -> int:
    """Kilobytes of proportional memory; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
