"""gap: measure how far a trainer's logprobs are from those of the rollout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollproof.cli.options import JsonTarget
from rollproof.cli.output import Meter, Output
from rollproof.errors import UsageError
from rollproof.progress import Progress
from rollproof.report import ExitCode

if TYPE_CHECKING:
    from rollproof.gap.pairs import TokenPairs

__all__ = ["gap"]


def gap(
    records: Annotated[
        Path | None, typer.Argument(metavar="RECORDS", help="Parquet or Arrow file with a row a token (or a row a sequence).")
    ] = None,
    rollout: Annotated[
        Path | None, typer.Option("--rollout", metavar="TRACE", help="In RECORDS' place: a recorded trace; needs --trainer.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer", metavar="SPEC", help="The trainer's logprobs for --rollout: a Parquet file, or score:SCORER in the trace."
        ),
    ] = None,
    limits: Annotated[
        str | None, typer.Option("--limits", metavar="NAME", help="Class of model that the limits are for; default: moe-bf16.")
    ] = None,
    limits_file: Annotated[
        Path | None, typer.Option("--limits-file", metavar="FILE", help="Limits of your own (TOML); they replace those of the same name.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="NAME=THEIRS", help="The file's own name of a column; may be repeated.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="The same rollout scored without replay: compared token by token.")
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option("--control", metavar="NAME=FILE", help="With --against: the rollout scored with wrong routes; may be repeated."),
    ] = None,
    page: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as one HTML file.")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Write each plot into this folder, as PNG and SVG.")] = None,
    resamples: Annotated[int, typer.Option("--resamples", metavar="N", min=100, help="Bootstrap resamples of sequences.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the resampling.")] = 0,
    json_target: JsonTarget = None,
) -> int:
    """Measure the gap of two columns of logprobs: the panel with intervals, a verdict with its sources, and the likely cause.

    The file has the columns sequence_id, rollout_logprob, trainer_logprob and mask; version, position, rollout_routes and
    others where they are at hand (docs/gap.md).
    """
    from rollproof.gap.comparison import compare
    from rollproof.gap.limits import GapVerdict, limits_named
    from rollproof.gap.measuring import measure_pairs
    from rollproof.gap.page import check_report_target, write_plots, write_report
    from rollproof.gap.report import comparison_lines, gap_lines
    from rollproof.gap.table import read_pairs

    chosen = limits_named(limits, override=limits_file)
    renamed = dict(_named(text, "--column", "trainer_logprob=old_log_probs") for text in column or ())
    controls = {name: Path(file) for name, file in (_named(text, "--control", "shifted=shifted.parquet") for text in control or ())}
    if controls and against is None:
        raise UsageError("--control compares wrong routes with no replay: say with --against which file holds the scores without replay.")
    check_report_target(page, plots)
    output = Output(json_target)
    with Meter() as meter:
        meter(Progress(done=0, total=3, what=f"reading {records or rollout}"))
        pairs, subject = _pairs(records, rollout, trainer, renamed)
        others = {name: read_pairs(file, renamed=renamed) for name, file in controls.items()}
        base = None if against is None else read_pairs(against, renamed=renamed)
        meter(Progress(done=1, total=3, what=f"measuring {pairs.n_tokens:,} tokens"))
        report = measure_pairs(pairs, limits=chosen, subject=subject, resamples=resamples, seed=seed)
        comparison = None if base is None else compare(pairs, base, controls=others, name=str(against), resamples=resamples, seed=seed)
        meter(Progress(done=2, total=3, what="drawing"))
        if page is not None:
            write_report(report, page, comparison=comparison)
        if plots is not None:
            write_plots(report, plots, comparison=comparison)
    output.lines(gap_lines(report))
    if comparison is not None:
        output.lines(comparison_lines(comparison))
    output.json(report.to_dict() | ({} if comparison is None else {"comparison": comparison.to_dict()}))
    verdicts = {report.verdict} | ({comparison.verdict} if comparison is not None else set())
    codes = {GapVerdict.FAIL: ExitCode.FAIL, GapVerdict.INCONCLUSIVE: ExitCode.UNKNOWN, GapVerdict.PASS: ExitCode.PASS}
    return output.ended(next(code for verdict, code in codes.items() if verdict in verdicts))


def _pairs(records: Path | None, rollout: Path | None, trainer: str | None, renamed: dict[str, str]) -> tuple[TokenPairs, str]:
    """The pairs, and what they are called in the report."""
    from rollproof.gap.joining import join_trace
    from rollproof.gap.table import read_pairs

    if (records is None) == (rollout is None):
        raise UsageError("Give either RECORDS, a file with both columns of logprobs, or --rollout TRACE with --trainer SPEC.")
    if rollout is None:
        if trainer is not None:
            raise UsageError("--trainer goes with --rollout TRACE: RECORDS holds the trainer's logprobs itself.")
        assert records is not None
        return read_pairs(records, renamed=renamed), str(records)
    if trainer is None:
        raise UsageError(
            "--rollout needs --trainer SPEC: a Parquet file with the trainer's logprobs, or score:SCORER for those in the trace."
        )
    return join_trace(rollout, trainer, renamed=renamed), f"{rollout} against {trainer}"


def _named(text: str, flag: str, example: str) -> tuple[str, str]:
    name, sign, theirs = text.partition("=")
    if not sign or not name or not theirs:
        raise UsageError(f"{flag} takes NAME={'THEIRS' if flag == '--column' else 'FILE'}, such as {example}, not {text!r}.")
    return name, theirs
