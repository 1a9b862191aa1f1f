"""Table: judges Megatron setups and keeps the verdicts in a file: `python -m
tools.judge_megatron_trainers FILE [SETUP ...]`.

Without names all setups of megatron-core are judged, and those of other people's replay code whose
packages are installed (``tools.verdict_table`` says what the file holds).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from rollproof.replay.megatron.megatron_setups import (
    OTHERS,
    SETUPS,
    ReplayCodeName,
    Setup,
    setup_named,
)
from rollproof.replay.megatron.megatron_trainer import MegatronTrainer, megatron_ranks
from rollproof.replay.process_group import Ranks
from rollproof.verification.replay import judge_replay
from tools.verdict_table import judge_into, told_row

__all__ = ["row_of"]

_PACKAGES: Mapping[ReplayCodeName, tuple[str, ...]] = {
    ReplayCodeName.CORE: ("megatron-core", "torch"),
    ReplayCodeName.VERL: ("verl", "megatron-core", "torch"),
    ReplayCodeName.SKYRL: ("skyrl", "megatron-core", "torch"),
}


def row_of(setup: Setup, ranks: Ranks) -> dict[str, Any]:
    """What a run says of a setup."""
    return told_row(
        judge_replay(lambda: MegatronTrainer(setup, ranks), name=setup.name),
        packages=_PACKAGES[setup.code],
        code=setup.code,
        parallel=setup.words,
        model=(
            f"{setup.router} routers in layers {', '.join(map(str, setup.moe_layers))} of"
            f" {setup.num_layers}, {setup.dispatcher}"
        ),
        mode=setup.mode,
    )


def main(arguments: list[str]) -> int:
    """Judge and write; returns the exit code."""
    if not arguments:
        sys.stderr.write(__doc__ or "")
        return 254
    names = arguments[1:] or [*SETUPS, *(name for name, one in OTHERS.items() if _installed(one))]
    for code, setups in groupby(names, lambda name: setup_named(name).code):
        with megatron_ranks(code=code) as ranks:
            judge_into(
                Path(arguments[0]),
                list(setups),
                lambda name, ranks=ranks: row_of(setup_named(name), ranks),
            )  # type: ignore[misc]
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
