"""Table: judges HF trainers and keeps the verdicts in a file: `python -m rollproof.replay.hf.table FILE [SETUP ...]`.

Setups that are named are judged anew, the others keep their rows; without names all are judged. The file is JSON, sorted, without
times: only a verdict or a version changes it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rollproof.replay.hf.ranked import RankedHfTrainer, hf_ranks
from rollproof.replay.hf.setups import SETUPS, Setup, setup_named
from rollproof.replay.hf.trainer import HfTrainer
from rollproof.replay.judging import judge_replay
from rollproof.replay.ranks import Ranks
from rollproof.report import Report

__all__ = ["judged", "row_of"]


def judged(setup: Setup, ranks: Ranks) -> Report:
    """The report on the trainer of a setup, in this process or on two of ``ranks``."""
    if setup.parallel:
        return judge_replay(lambda: RankedHfTrainer(setup, ranks), name=setup.name)
    return judge_replay(lambda: HfTrainer(setup), name=setup.name)


def row_of(setup: Setup, report: Report) -> dict[str, Any]:
    """What a report says of a setup, JSON-ready: packages, and the verdict of each check; the first finding of what fails."""
    findings = {result.id: result.findings[0] for result in report.results if result.findings}
    return {
        "code": "rollproof.replay.hf",
        "versions": {package: importlib.metadata.version(package).partition("+")[0] for package in ("torch", "transformers")},
        "parallel": setup.parallel and f"{setup.parallel}, 2 processes",
        "model": f"{setup.family}, {setup.layout}, {setup.dtype}",
        "mode": "R3",
        "verdicts": {result.id: result.verdict for result in report.results},
        "findings": {check: f"{one.title}: {one.observed}" for check, one in findings.items()},
    }


def main(arguments: list[str]) -> int:
    """Judge and write; returns the exit code."""
    if not arguments:
        print(__doc__, file=sys.stderr)  # noqa: T201 - a program's word to its user
        return 254
    torch.set_num_threads(1)
    file = Path(arguments[0])
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    with hf_ranks() as ranks:
        for name in arguments[1:] or SETUPS:
            rows[name] = row_of(setup_named(name), judged(setup_named(name), ranks))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            failed = [check for check, verdict in rows[name]["verdicts"].items() if verdict == "fail"]
            print(f"{name}: {', '.join(failed) or 'no check fails'}", flush=True)  # noqa: T201 - as above
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
