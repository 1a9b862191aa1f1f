"""Merging the reports of several sessions, such as the shards of a suite.

    python -m rollproof.gpu_suites.report.merging OUT run.json ...

The sessions must have run on machines of one kind, because others are not comparable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollproof.core.files import write_atomically
from rollproof.errors import RollproofError, UsageError
from rollproof.gpu_suites.report.run_report import RUN_SCHEMA, page_text
from rollproof.gpu_suites.timing import Part

__all__ = ["main", "merged", "read_run"]


def read_run(path: Path) -> Mapping[str, Any]:
    """Read a ``run.json``. Raises ``UsageError`` for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a report of the GPU suites: {error}.") from error
    if (
        not isinstance(data, dict)
        or data.get("schema") != RUN_SCHEMA
        or not {"machine", "suites", "gap", "notes"} <= set(data)
    ):
        raise UsageError(
            f"{path} is not a report of the GPU suites: it lacks schema {RUN_SCHEMA} and its keys."
        )
    return data


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one run of several. Of two results on one subject the later one stays.

    Raises ``UsageError`` for machines of two kinds.
    """
    if not runs:
        raise UsageError("There is no run to merge.")
    kinds = {_kind(run) for run in runs}
    if len(kinds) > 1:
        raise UsageError(
            "These runs were made on different machines, and cannot be merged:"
            f" {'; '.join(sorted(map(str, kinds)))}."
        )
    machine = dict(runs[0]["machine"])
    machine["versions"] = {
        name: version for run in runs for name, version in run["machine"]["versions"].items()
    }
    # shards may have used different GPUs of one host
    machine["gpus"] = list(
        {gpu["index"]: gpu for run in runs for gpu in run["machine"]["gpus"]}.values()
    )
    machine["gpus"].sort(key=lambda gpu: gpu["index"])
    suites = {(suite["kind"], suite["subject"]): suite for run in runs for suite in run["suites"]}
    cells = {
        (cell["engine"], cell["trainer"], cell["dtype"], cell["about"]): cell
        for run in runs
        for cell in run["gap"]
    }
    return {
        "schema": RUN_SCHEMA,
        "began": min(run["began"] for run in runs),
        "seconds": round(sum(run["seconds"] for run in runs), 1),
        "seconds_ours": round(sum(run.get("seconds_ours", 0.0) for run in runs), 1),
        "spent": {
            part: round(sum(run.get("spent", {}).get(part, 0.0) for run in runs), 1)
            for part in map(str, Part)
        },
        "machine": machine,
        "suites": list(suites.values()),
        "gap": list(cells.values()),
        "notes": list(dict.fromkeys(note for run in runs for note in run["notes"])),
    }


def main(arguments: Sequence[str]) -> int:
    """Merge, write ``OUT.json`` and ``OUT.html``, and return the exit code."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)  # noqa: T201 - a program prints its usage
        return 254
    out = Path(arguments[0])
    try:
        data = merged([read_run(Path(path)) for path in arguments[1:]])
        write_atomically(out.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
        write_atomically(out.with_suffix(".html"), page_text(data))
    except RollproofError as error:
        print(error, file=sys.stderr)  # noqa: T201 - as above
        return 254
    return 0


def _kind(run: Mapping[str, Any]) -> str:
    machine = run["machine"]
    names = sorted({str(gpu["name"]) for gpu in machine["gpus"]})
    return (
        f"{', '.join(names) or 'no GPU'}, driver {machine['driver']}, torch"
        f" {machine['versions'].get('torch')}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
