"""A worker that dies of some files, as one does that runs out of memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rollproof.cli.unit_workers import Unit
from rollproof.verification.judged_files import JudgedUnit, UnitSettings, judge_unit

__all__ = ["judge", "work"]


def work(number: int, paths: tuple[str, ...], settings: UnitSettings) -> JudgedUnit:
    """Judge files, unless one is named "deadly"; one named "once" is deadly the first time."""
    for path in paths:
        if path.endswith("once.json") and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if path.endswith("deadly.json"):
            os.kill(os.getpid(), signal.SIGKILL)
    return judge_unit(paths, settings)


def judge(unit: Unit, settings: UnitSettings) -> JudgedUnit:
    """As ``work``, on a Ray cluster."""
    return work(0, unit.paths, settings)
