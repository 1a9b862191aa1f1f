"""Table: judges a real engine on the models that it runs, and keeps the verdicts in a file.

``python -m tools.judge_engines ENGINE FILE [ROW ...]``, such as ``vllm
docs/engine_results/vllm.json``. Rows that are named are run anew, the others stay; without names
all of the engine's are run. A row is named by the target and, where it is not the target's own
models in float32, by the family or the dtype: ``vllm``, ``vllm bfloat16``, ``vllm-offline olmoe``.
A row that does not start is in the file, with the reason.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollproof.core.error_text import one_line
from rollproof.core.progress import Progress
from rollproof.engines.engine_targets import REAL, engine_target
from rollproof.errors import EngineStartError, RollproofError, UsageError
from rollproof.verification.engines import judged, run_experiments
from tools.engine_results import row_of, save_results

__all__ = ["main", "row_names", "run_row"]

_DTYPE = "bfloat16"
"""The dtype in which engines are judged beside float32."""


def row_names(engine: str) -> list[str]:
    """The rows of an engine's table. Raises ``UsageError`` for a name that is no real engine."""
    targets = [name for name in REAL if name == engine or name.startswith(f"{engine}-")]
    if not targets:
        raise UsageError(f"No real engine is named {engine!r}; choose among {list(REAL)}.")
    return [
        *targets,
        f"{engine} {_DTYPE}",
        *(f"{name} {family}" for name in targets for family in REAL[name].families),
    ]


def run_row(name: str) -> dict[str, Any]:
    """Run one row and return what it found, JSON-ready. Raises ``UsageError`` for a name that does
    not exist.
    """
    engine, _, other = name.partition(" ")
    dtype, family = (other, None) if other == _DTYPE else ("float32", other or None)
    with tempfile.TemporaryDirectory(prefix="rollproof-models-") as folder:
        target = engine_target(
            engine, model=None, folder=Path(folder), family=family, dtype=dtype, progress=_told
        )
        try:
            run = run_experiments(target, progress=_told)
        except EngineStartError as error:
            return {
                "about": target.about,
                "not_started": one_line(str(error).partition("The end of its log")[0]),
            }
        return row_of(judged(target.name, run), run, target.about)


def main(arguments: list[str]) -> int:
    """Run and write; returns the exit code."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)  # noqa: T201 - a program's word to its user
        return 254
    engine, file, *names = arguments
    try:
        for name in names or row_names(engine):
            start = time.monotonic()
            row = run_row(name)
            save_results(Path(file), REAL[engine].packages, runs={name: row})
            failed = [
                check for check, verdict in row.get("verdicts", {}).items() if verdict == "fail"
            ]
            told = row.get("not_started") or ", ".join(failed) or "no check fails"
            print(f"{name}: {told} ({time.monotonic() - start:.0f} s)", flush=True)  # noqa: T201 - as above
    except RollproofError as error:
        print(error, file=sys.stderr)  # noqa: T201 - as above
        return 254
    return 0


def _told(progress: Progress) -> None:
    print(f"  {progress.done}/{progress.total} {progress.what}", file=sys.stderr, flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
