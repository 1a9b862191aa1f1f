"""The results of docs/engine_results and docs/replay_results as stored runs, for the table of
releases and checks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollproof.reporting.results.stored_runs import StoredCheck, StoredPart, StoredRun

__all__ = ["measured_releases"]

DOCS = Path(__file__).parents[2] / "docs"


def measured_releases() -> Iterator[StoredRun]:
    """Yield a run for each engine, and for each library of replay."""
    for file in sorted((DOCS / "engine_results").glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        name, version = next(
            (name, version)
            for name, version in result["versions"].items()
            if name.startswith(file.stem)
        )
        runs = {part: row for part, row in result["runs"].items() if "verdicts" in row}
        yield _run("engine", name, version, runs, table=file.stem)
    for file in sorted((DOCS / "replay_results").glob("*.json")):
        grouped: dict[tuple[str, str], dict[str, Any]] = {}
        for part, row in json.loads(file.read_text(encoding="utf-8")).items():
            grouped.setdefault(_library(row), {})[part] = row
        for (name, version), parts in grouped.items():
            yield _run("trainer", f"{name}, replay", version, parts, table=file.stem)


def _library(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the library whose replay code ran, and its version."""
    versions = row["versions"]
    # rollproof's own code patches the models of transformers
    name = row["code"] if row["code"].lower() in versions else "transformers"
    if name not in versions and name.lower() not in versions:
        return row["code"], ", ".join(f"{other} {number}" for other, number in versions.items())
    return name, versions[name.lower()]


def _run(
    results: str,
    name: str,
    version: str,
    rows: Mapping[str, Mapping[str, Any]],
    *,
    table: str,
) -> StoredRun:
    return StoredRun(
        results=results,
        name=name,
        version=version,
        date="",
        rollproof="",
        profile="",
        seed=0,
        parts={
            part: StoredPart(
                checks={
                    check: StoredCheck(verdict=verdict, reason=_reason(row, check))
                    for check, verdict in row["verdicts"].items()
                },
                command=f"python -m tools.judge_table {table} table.json {shlex.quote(part)}",
            )
            for part, row in rows.items()
        },
    )


def _reason(row: Mapping[str, Any], check: str) -> str:
    """Return the first finding of a check, or why it was not decided."""
    found = row.get("findings", {}).get(check) or row.get("reasons", {}).get(check) or ""
    return found if isinstance(found, str) else json.dumps(found)
