"""gap: measure how far a trainer's logprobs are from those of the rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.options import JsonTarget
from rollproof.cli.output import Meter, Output
from rollproof.core.progress import Progress
from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode

__all__ = ["gap"]


def gap(
    records: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECORDS",
            help="Parquet or Arrow file with a row a token (or a row a sequence).",
        ),
    ] = None,
    rollout: Annotated[
        Path | None,
        typer.Option(
            "--rollout",
            metavar="TRACE",
            help="In RECORDS' place: a recorded trace; needs --trainer.",
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--trainer",
            metavar="SPEC",
            help=(
                "The trainer's logprobs for --rollout: a Parquet file; score:SCORER in the trace;"
                " hf:PATH, a checkpoint that scores them"
                " (hf:PATH/{version} or hf:VERSION=PATH,... for several versions); or"
                " module:factory."
            ),
        ),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Score with the rollout's routes replayed, and compare with the trainer's own.",
        ),
    ] = False,
    every_version: Annotated[
        bool,
        typer.Option(
            "--every-version",
            help="Score every rollout under every version: tells whether tags name the sampler.",
        ),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="With hf:PATH: float32, bfloat16 ...; default: the checkpoint's.",
        ),
    ] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=1e-6,
            help=(
                "With hf:PATH: the temperature that the rollouts were sampled with; default: what"
                " the trace's calls declare, else 1."
            ),
        ),
    ] = None,
    localise: Annotated[
        str | None,
        typer.Option(
            "--localise",
            metavar="SPEC",
            help=(
                "With hf:PATH: a second forward of the same tokens, hf:PATH or module:factory;"
                " names the"
                " first module where the two part by more than rounding."
            ),
        ),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(
            "--limits",
            metavar="NAME",
            help="Class of model that the limits are for; default: moe-bf16.",
        ),
    ] = None,
    limits_file: Annotated[
        Path | None,
        typer.Option(
            "--limits-file",
            metavar="FILE",
            help="Limits of your own (TOML); they replace those of the same name.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME=THEIRS",
            help="The file's own name of a column; may be repeated.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="The same rollout scored without replay: compared token by token.",
        ),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control",
            metavar="NAME=FILE",
            help="With --against: the rollout scored with wrong routes; may be repeated.",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the report as one HTML file."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            "--plots", metavar="DIR", help="Write each plot into this folder, as PNG and SVG."
        ),
    ] = None,
    resamples: Annotated[
        int,
        typer.Option("--resamples", metavar="N", min=100, help="Bootstrap resamples of sequences."),
    ] = 1000,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed of the resampling.")
    ] = 0,
    json_target: JsonTarget = None,
) -> int:
    """Measure the gap of two columns of logprobs: the panel with intervals, a verdict with its
    sources, and the likely cause.

    The file has the columns sequence_id, rollout_logprob, trainer_logprob and mask; version,
    position, rollout_routes and others where they are at hand (docs/gap.md).
    """
    from rollproof.cli.gap_inputs import Sides, localised
    from rollproof.gap.gap_report import comparison_lines, gap_lines, overall
    from rollproof.gap.html.page import check_report_target, write_plots, write_report
    from rollproof.gap.limits import GapVerdict, limits_named
    from rollproof.gap.localise.localisation import localisation_lines
    from rollproof.gap.measure import measure_pairs
    from rollproof.gap.pair_files import read_pairs
    from rollproof.gap.trainer_comparison import compare

    chosen = limits_named(limits, override=limits_file)
    renamed = dict(
        _named(text, "--column", "trainer_logprob=old_log_probs") for text in column or ()
    )
    controls = {
        name: Path(file)
        for name, file in (
            _named(text, "--control", "shifted=shifted.parquet") for text in control or ()
        )
    }
    if controls and against is None:
        raise UsageError(
            "--control compares wrong routes with no replay: say with --against which file holds"
            " the scores without replay."
        )
    if replay and against is not None:
        raise UsageError("--replay compares with the trainer's own routing: leave --against out.")
    sides = Sides.of(
        records,
        rollout,
        trainer,
        renamed=renamed,
        replay=replay,
        every_version=every_version,
        dtype=dtype,
        temperature=temperature,
    )
    if localise is not None:
        sides.require_model("--localise")
    check_report_target(page, plots)
    output = Output(json_target)
    with Meter() as meter:
        meter(Progress(done=0, total=4, what=f"reading {records or rollout}"))
        pairs = sides.pairs()
        others = {name: read_pairs(file, renamed=renamed) for name, file in controls.items()}
        base = (
            sides.native()
            if replay
            else None
            if against is None
            else read_pairs(against, renamed=renamed)
        )
        meter(Progress(done=1, total=4, what=f"measuring {pairs.n_tokens:,} tokens"))
        report = sides.noted(
            measure_pairs(pairs, limits=chosen, subject=sides.name, resamples=resamples, seed=seed)
        )
        name = "no replay" if replay else str(against)
        comparison = (
            None
            if base is None
            else compare(pairs, base, controls=others, name=name, resamples=resamples, seed=seed)
        )
        meter(Progress(done=2, total=4, what="localising" if localise else "drawing"))
        found = None if localise is None else localised(sides, localise)
        meter(Progress(done=3, total=4, what="drawing"))
        if page is not None:
            write_report(report, page, comparison=comparison, localisation=found)
        if plots is not None:
            write_plots(report, plots, comparison=comparison, localisation=found)
    output.lines(gap_lines(report))
    if comparison is not None:
        output.lines(comparison_lines(comparison))
    if found is not None:
        output.lines(localisation_lines(found))
    more = {} if comparison is None else {"comparison": comparison.to_dict()}
    verdict = overall(report, comparison, found)
    output.json(
        report.to_dict()
        | more
        | ({} if found is None else {"localisation": found.to_dict()})
        | {"overall": str(verdict)}
    )
    codes = {
        GapVerdict.FAIL: ExitCode.FAIL,
        GapVerdict.INCONCLUSIVE: ExitCode.UNKNOWN,
        GapVerdict.PASS: ExitCode.PASS,
    }
    return output.ended(codes[verdict])


def _named(text: str, flag: str, example: str) -> tuple[str, str]:
    name, sign, theirs = text.partition("=")
    if not sign or not name or not theirs:
        raise UsageError(
            f"{flag} takes NAME={'THEIRS' if flag == '--column' else 'FILE'}, such as {example},"
            f" not {text!r}."
        )
    return name, theirs
