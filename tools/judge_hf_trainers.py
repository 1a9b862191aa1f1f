"""Table: judges HF trainers and keeps the verdicts in a file: `python -m tools.judge_hf_trainers
FILE [SETUP ...]`.

Without names all setups are judged (``tools.verdict_table`` says what the file holds).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rollproof.judging.report import Report
from rollproof.replay.hf.hf_replay_trainer import HfTrainer
from rollproof.replay.hf.hf_setups import SETUPS, Setup, setup_named
from rollproof.replay.hf.ranked_trainer import RankedHfTrainer, hf_ranks
from rollproof.replay.process_group import Ranks
from rollproof.verification.replay import judge_replay
from tools.verdict_table import judge_into, told_row

__all__ = ["judged"]


def judged(setup: Setup, ranks: Ranks) -> Report:
    """The report on the trainer of a setup, in this process or on two of ``ranks``."""
    if setup.parallel:
        return judge_replay(lambda: RankedHfTrainer(setup, ranks), name=setup.name)
    return judge_replay(lambda: HfTrainer(setup), name=setup.name)


def main(arguments: list[str]) -> int:
    """Judge and write; returns the exit code."""
    if not arguments:
        sys.stderr.write(__doc__ or "")
        return 254
    torch.set_num_threads(1)
    with hf_ranks() as ranks:

        def row(name: str) -> dict[str, object]:
            setup = setup_named(name)
            return told_row(
                judged(setup, ranks),
                packages=("torch", "transformers"),
                code="rollproof.replay.hf",
                parallel=setup.parallel and f"{setup.parallel}, 2 processes",
                model=f"{setup.family}, {setup.layout}, {setup.dtype}",
                mode="R3",
            )

        judge_into(Path(arguments[0]), arguments[1:] or SETUPS, row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
