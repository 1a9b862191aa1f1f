"""gap: measure how far a trainer's logprobs are from those of the rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.options import JsonTarget
from rollproof.cli.output import Meter, Output
from rollproof.errors import UsageError
from rollproof.progress import Progress
from rollproof.report import ExitCode

__all__ = ["gap"]


def gap(
    records: Annotated[Path, typer.Argument(metavar="RECORDS", help="Parquet or Arrow file with a row a token (or a row a sequence).")],
    limits: Annotated[
        str | None, typer.Option("--limits", metavar="NAME", help="Class of model that the limits are for; default: moe-bf16.")
    ] = None,
    limits_file: Annotated[
        Path | None, typer.Option("--limits-file", metavar="FILE", help="Limits of your own (TOML); they replace those of the same name.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="NAME=THEIRS", help="The file's own name of a column; may be repeated.")
    ] = None,
    resamples: Annotated[int, typer.Option("--resamples", metavar="N", min=100, help="Bootstrap resamples of sequences.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the resampling.")] = 0,
    json_target: JsonTarget = None,
) -> int:
    """Measure the gap of two columns of logprobs: the panel with intervals, a verdict with its sources, and the likely cause.

    The file has the columns sequence_id, rollout_logprob, trainer_logprob and mask; version, position, rollout_routes and
    others where they are at hand (docs/gap.md).
    """
    from rollproof.gap.limits import GapVerdict, limits_named
    from rollproof.gap.measuring import measure_pairs
    from rollproof.gap.report import gap_lines
    from rollproof.gap.table import read_pairs

    chosen = limits_named(limits, override=limits_file)
    renamed = dict(_renaming(text) for text in column or ())
    output = Output(json_target)
    with Meter() as meter:
        meter(Progress(done=0, total=2, what=f"reading {records}"))
        pairs = read_pairs(records, renamed=renamed)
        meter(Progress(done=1, total=2, what=f"measuring {pairs.n_tokens:,} tokens"))
        report = measure_pairs(pairs, limits=chosen, subject=str(records), resamples=resamples, seed=seed)
    output.lines(gap_lines(report))
    output.json(report.to_dict())
    return {GapVerdict.PASS: ExitCode.PASS, GapVerdict.FAIL: ExitCode.FAIL, GapVerdict.INCONCLUSIVE: ExitCode.UNKNOWN}[report.verdict]


def _renaming(text: str) -> tuple[str, str]:
    name, sign, theirs = text.partition("=")
    if not sign or not name or not theirs:
        raise UsageError(f"--column takes NAME=THEIRS, such as trainer_logprob=old_log_probs, not {text!r}.")
    return name, theirs
