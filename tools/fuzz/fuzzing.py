"""Fuzzing one target in a process of its own."""

from __future__ import annotations

import base64
import faulthandler
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tools.fuzz.targets import TARGETS

__all__ = ["child", "fuzz"]

_HANG_SECONDS = 20
_MEMORY = 4 << 30
_BATCH = 50
"""Inputs of one run of Hypothesis: the clock is looked at in between."""


def fuzz(name: str, *, seconds: float, inputs: int | None, first: int) -> bool:
    """Fuzz one target in a process, and print its line; return whether all inputs were fine."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress.json"
        amount = str(seconds) if inputs is None else f"{inputs} inputs"
        done = subprocess.run(
            [sys.executable, "-m", "tools.fuzz.fuzzing", name, amount, str(first), str(progress)],
            check=False,
        )
        state = json.loads(progress.read_text()) if progress.exists() else {}
        last = progress.with_suffix(".input")
        problem = state.get("problem")
        if done.returncode != 0 and problem is None:
            text = last.read_text() if last.exists() else ""
            problem = f"the process ended with {done.returncode} at the input {text[:3000]}"
    print(
        f"{name:<20}{state.get('inputs', 0):>9,}{state.get('seconds', 0):>9.1f}"
        f"{state.get('memory', 0):>7,}  {'ok' if problem is None else 'FAILED'}",
        flush=True,
    )
    if problem is not None:
        print("    " + problem.replace("\n", "\n    "), flush=True)
    return problem is None


def child(name: str, amount: str, first: int, file: str) -> None:
    """Fuzz one target, and write what became of it to ``file``."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    target, progress = TARGETS[name], Path(file)
    number, _, unit = amount.partition(" ")
    inputs, seconds = (int(number), 0.0) if unit else (None, float(number))
    count, begun, problem = 0, time.monotonic(), None
    strategy = target.inputs()
    with (
        progress.with_suffix(".input").open("w", encoding="utf-8") as latest,
        target.around() as running,
    ):
        batch = 0
        while problem is None and (
            count < inputs if inputs is not None else time.monotonic() - begun < seconds
        ):
            wanted = _BATCH if inputs is None else min(_BATCH, inputs - count)

            @seed(first * 1_000_003 + batch)
            @settings(
                max_examples=wanted,
                database=None,
                deadline=None,
                derandomize=False,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
                print_blob=False,
                report_multiple_bugs=False,
            )
            @given(strategy)
            def body(data: Any) -> None:
                nonlocal count
                count += 1
                # for a crash, which leaves nothing else
                latest.seek(0)
                latest.truncate()
                latest.write(_shown(data).encode("ascii", "backslashreplace").decode())
                latest.flush()
                faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
                try:
                    target.read(data, running)
                finally:
                    faulthandler.cancel_dump_traceback_later()

            before = count
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
                notes = "\n".join(getattr(error, "__notes__", ()))
                problem = f"{type(error).__name__}: {error}\n{notes}"[:4000]
            # Hypothesis ends early where it has tried everything
            batch += 1
            count = min(count, before + wanted) if problem is None else count
            if count == before:
                break
        state = {
            "inputs": count,
            "seconds": time.monotonic() - begun,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "problem": problem,
        }
        progress.write_text(json.dumps(state))


def _shown(data: Any) -> str:
    return f"base64 {base64.b64encode(data).decode()}" if isinstance(data, bytes) else repr(data)


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
