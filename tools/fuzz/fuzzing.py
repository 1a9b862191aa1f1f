"""Fuzzing targets, each shard of the inputs of one in a process of its own."""

from __future__ import annotations

import base64
import faulthandler
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tools.fuzz.targets import TARGETS

__all__ = ["Amount", "Outcome", "child", "fuzz"]

_HANG_SECONDS = 20
_MEMORY = 4 << 30
_BATCH = 200
"""Inputs of one run of Hypothesis."""
_SHARD = 2_500
"""Inputs of one process; a number of its own, so that a seed means the same on every machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much is fuzzed.

    Attributes:
        seconds: for each target, in one process.
        inputs: for each target instead, in processes of 2,500 inputs each.
        first: the seed.
        processes: how many run at once.
        within: seconds after which no further process is started; what is left is not counted.
    """

    seconds: float = 60.0
    inputs: int | None = None
    first: int = 0
    processes: int = 1
    within: float = float("inf")

    @property
    def shards(self) -> list[str]:
        """What each process of one target does."""
        if self.inputs is None:
            return [str(self.seconds)]
        whole, rest = divmod(self.inputs, _SHARD)
        return [f"{size} inputs" for size in [_SHARD] * whole + [rest] * bool(rest)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one target.

    Attributes:
        name: of the target.
        inputs: how many were read.
        seconds: of all processes together.
        memory: MiB of the largest process.
        problems: what went wrong, with the input.
    """

    name: str
    inputs: int
    seconds: float
    memory: int
    problems: Sequence[str]

    def __str__(self) -> str:
        outcome = "FAILED" if self.problems else "ok" if self.inputs else "not run"
        row = f"{self.name:<20}{self.inputs:>9,}{self.seconds:>9.1f}{self.memory:>7,}  {outcome}"
        return "\n    ".join([row, *(line for each in self.problems for line in each.split("\n"))])


def fuzz(names: Sequence[str], amount: Amount) -> list[Outcome]:
    """Fuzz targets, and print the line of each once it is done."""
    begun = time.monotonic()
    with ThreadPoolExecutor(amount.processes) as pool:
        running: list[tuple[str, list[Future[dict[str, Any] | None]]]] = [
            (
                name,
                [
                    pool.submit(_shard, name, shard, f"{amount.first}:{number}", begun, amount)
                    for number, shard in enumerate(amount.shards)
                ],
            )
            for name in names
        ]
        outcomes = []
        for name, shards in running:
            states = [state for shard in shards if (state := shard.result()) is not None]
            outcomes.append(
                Outcome(
                    name=name,
                    inputs=sum(state["inputs"] for state in states),
                    seconds=sum(state["seconds"] for state in states),
                    memory=max((state["memory"] for state in states), default=0),
                    problems=list(dict.fromkeys(s["problem"] for s in states if s["problem"])),
                )
            )
            print(outcomes[-1], flush=True)
    return outcomes


def _shard(
    name: str, shard: str, first: str, begun: float, amount: Amount
) -> dict[str, Any] | None:
    """Run a process, and return what became of it; ``None`` if the time was up."""
    if time.monotonic() > begun + amount.within:
        return None
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress.json"
        done = subprocess.run(
            [sys.executable, "-m", "tools.fuzz.fuzzing", name, shard, first, str(progress)],
            check=False,
            capture_output=True,
        )
        state: dict[str, Any] = {"inputs": 0, "seconds": 0.0, "memory": 0, "problem": None}
        if progress.exists():
            state = json.loads(progress.read_text())
        elif done.returncode == 0:
            state["problem"] = f"seed {first}: the process ended without a word"
        last = progress.with_suffix(".input")
        if done.returncode != 0 and state["problem"] is None:
            text = last.read_text() if last.exists() else ""
            said = done.stderr.decode(errors="replace")[-1500:]
            state["problem"] = (
                f"seed {first}: the process ended with {done.returncode} at the input"
                f" {text[:3000]}\n{said}"
            )
    return state


def child(name: str, amount: str, first: str, file: str) -> None:
    """Fuzz one target in this process, and write what became of it to ``file``.

    Args:
        name: of the target.
        amount: seconds, or ``N inputs``.
        first: the seed.
        file: for the figures, in JSON; the latest input is in a file next to it.
    """
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

            @seed(f"{name}:{first}:{batch}")
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
                if inputs is None and time.monotonic() - begun > seconds:
                    return
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
                problem = f"seed {first}: {type(error).__name__}: {error}\n{notes}"[:4000]
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
    child(*sys.argv[1:5])
