"""Table: judges Megatron setups and keeps the verdicts in a file: `python -m rollproof.replay.megatron.table FILE [SETUP ...]`.

Setups that are named are judged anew, the others keep their rows; without names all setups of megatron-core are judged, and those of
other people's replay code whose packages are installed. The file is JSON, sorted, without times: only a verdict or a version changes it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollproof.replay.judging import judge_replay
from rollproof.replay.megatron.setups import OTHERS, SETUPS, ReplayCodeName, Setup, setup_named
from rollproof.replay.megatron.subject import MegatronTrainer, megatron_ranks
from rollproof.replay.ranks import Ranks
from rollproof.report import Report

__all__ = ["judged", "row_of"]

_PACKAGES: Mapping[ReplayCodeName, tuple[str, ...]] = {
    ReplayCodeName.CORE: ("megatron-core",),
    ReplayCodeName.VERL: ("verl", "megatron-core"),
    ReplayCodeName.SKYRL: ("skyrl", "megatron-core"),
}


def judged(setups: Iterable[Setup], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """The row of each setup by its name."""
    return {one.name: row_of(one, judge_replay(lambda one=one: MegatronTrainer(one, ranks), name=one.name)) for one in setups}  # type: ignore[misc]


def row_of(setup: Setup, report: Report) -> dict[str, Any]:
    """What a report says of a setup, JSON-ready: its packages, sizes, and the verdict of each check; the first finding of what fails."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES[setup.code]}
    findings = {result.id: result.findings[0] for result in report.results if result.findings}
    return {
        "code": setup.code,
        "versions": {**versions, "torch": importlib.metadata.version("torch").partition("+")[0]},
        "parallel": setup.words,
        "model": f"{setup.router} routers in layers {', '.join(map(str, setup.moe_layers))} of {setup.num_layers}, {setup.dispatcher}",
        "mode": setup.mode,
        "verdicts": {result.id: result.verdict for result in report.results},
        "findings": {check: f"{one.title}: {one.observed}" for check, one in findings.items()},
    }


def main(arguments: list[str]) -> int:
    """Judge and write; returns the exit code."""
    if not arguments:
        print(__doc__, file=sys.stderr)  # noqa: T201 - a program's word to its user
        return 254
    file = Path(arguments[0])
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = arguments[1:] or [*SETUPS, *(name for name, one in OTHERS.items() if _installed(one))]
    with megatron_ranks() as ranks:
        for name in names:
            rows |= judged([setup_named(name)], ranks)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            failed = [check for check, verdict in rows[name]["verdicts"].items() if verdict == "fail"]
            print(f"{name}: {', '.join(failed) or 'no check fails'}", flush=True)  # noqa: T201 - as above
    return 0


def _installed(setup: Setup) -> bool:
    for package in _PACKAGES[setup.code]:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
