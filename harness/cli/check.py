"""The command ``check``: judge recorded traces."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.follow import alarm_dict
from rollproof.cli.follow import follow as follow_traces
from rollproof.cli.output import (
    ByteMeter,
    Github,
    Jobs,
    JsonTarget,
    Only,
    Output,
    RayAddress,
    ReportTargets,
    Verbose,
)
from rollproof.cli.parallel import processors
from rollproof.cli.unit_workers import Unit, judge_here, judge_in_processes, judge_on_ray
from rollproof.core.files import check_folder
from rollproof.core.source_location import SourceLocation
from rollproof.errors import TraceError, UsageError
from rollproof.judging.checks import Check, CheckResult, Verdict
from rollproof.judging.judge import Tally
from rollproof.judging.report import ExitCode, Report
from rollproof.reporting.text import NOT_EXERCISED, WIDTH, Line, Style, report_lines, wrapped
from rollproof.verification.followed import Alarm
from rollproof.verification.judged_files import (
    COPY,
    FilesJudged,
    JudgedUnit,
    UnitSettings,
    Unjudged,
)
from rollproof.verification.trace_files import TraceFiles, find_traces, sample_of, since_of
from rollproof.verification.trace_slices import Slices, write_slices

__all__ = ["check", "check_served", "summary_lines"]

_SMALL_BYTES = 16 << 20
_SMALL_FILES = 256
"""Less than this is judged sooner than worker processes start."""
_NAMED = 10
"""A line names as many checks or situations; of more checks it counts the families."""
_SAMPLE_DATA = ("Submit", "Result", "samples")
"""Words in the ``needs`` of checks that judge requests and samples."""
_NEXT = (
    "  next: have your client report its samples: put `@rollout` of rollproof.http_clients on the"
    " function that makes one, and a hook of that module into its HTTP client (docs/http.md)."
    " The server needs what they promise: `rollproof serve --contract FILE` or `--like STACK`. A"
    " stack in Python needs no server: rollproof.record(...) or @rollproof.conformance."
)


def check(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Trace files, Arrow streams or JSON counterexamples, and folders of them.",
        ),
    ],
    only: Only = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only files changed since then: an age (90m, 24h, 7d) or a date (ISO 8601).",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="N|P%",
            help="Only so many files, or this share: the same ones in each run.",
        ),
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first finding.")
    ] = False,
    unfinished_ok: Annotated[
        bool,
        typer.Option(
            "--unfinished-ok",
            help="Let checks pass on what an unfinished file has: its writer runs, or was killed.",
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Judge while traces are written, and report each finding at once; ends when the"
            " writers close the files, or with Ctrl-C. --json then writes one object a line.",
        ),
    ] = False,
    metrics: Annotated[
        int | None,
        typer.Option(
            "--metrics",
            metavar="PORT",
            min=0,
            max=65535,
            help="With --follow: serve counts for Prometheus on this port of 127.0.0.1.",
        ),
    ] = None,
    slices: Annotated[
        Path | None,
        typer.Option(
            "--slices",
            metavar="DIR",
            help="Write traces into this folder that show the first and the worst finding of each"
            " failing check, and a minimal one: small enough to be mailed.",
        ),
    ] = None,
    jobs: Jobs = None,
    ray: RayAddress = None,
    json_target: JsonTarget = None,
    report: ReportTargets = None,
    github: Github = None,
    verbose: Verbose = False,
) -> int:
    """Judge recorded traces. Memory does not grow with their length, nor with their number.

    A damaged file is judged as far as it can be read. Files that could not be judged to their end,
    and copies of others, are listed, and the exit code is then not 0. In an unfinished file checks
    pass only with --unfinished-ok.
    """
    output = Output(json_target, report, github=github)
    if slices is not None:
        check_folder(slices)
    if metrics is not None and not follow:
        raise UsageError("--metrics counts what happens while a trace is followed: add --follow.")
    if ray is not None and jobs is not None:
        raise UsageError("Give --jobs or --ray, not both: the cluster has its own workers.")
    if follow:
        if (since, sample, jobs, ray) != (None, None, None, None):
            raise UsageError("--follow judges everything, in one process: omit the other options.")
        settings = UnitSettings(
            only=tuple(only or ()),
            fail_fast=fail_fast,
            name_files=len(traces) > 1 or traces[0].is_dir(),
        )
        judged = FilesJudged(tally=Tally(settings.registry()), unfinished_ok=unfinished_ok)
        _follow(output, traces, settings, judged, metrics)
        alone = traces[0] if len(traces) == 1 and not traces[0].is_dir() else None
        return _show(output, judged, alone, slices=slices, verbose=verbose)
    files = find_traces(
        traces,
        since=None if since is None else since_of(since),
        sample=None if sample is None else sample_of(sample),
    )
    settings = UnitSettings(only=tuple(only or ()), fail_fast=fail_fast, name_files=len(files) > 1)
    judged = FilesJudged(tally=Tally(settings.registry()), unfinished_ok=unfinished_ok)
    with ByteMeter(files.bytes, "judging") as meter:
        if ray is None:
            results = _results(files, settings, meter, processors() if jobs is None else jobs)
        else:
            results = judge_on_ray(_units(files), settings, meter, address=ray)
        _sum(results, files, judged)
    if not judged.headers:
        raise TraceError(judged.unjudged[0].error)
    alone = Path(files.paths[0]) if len(files) == 1 else None
    return _show(output, judged, alone, notes=files.notes, slices=slices, verbose=verbose)


def check_served(trace: Path) -> Report:
    """Judge the trace of one served command, print the report, and return it."""
    files, settings = find_traces([trace]), UnitSettings()
    judged = FilesJudged(tally=Tally(settings.registry()))
    _sum(_results(files, settings, lambda _: None, 1), files, judged)
    _show(Output(None, None), judged, trace, notes=files.notes, verbose=False)
    return judged.report(files.notes)


def _follow(
    output: Output,
    paths: Sequence[Path],
    settings: UnitSettings,
    judged: FilesJudged,
    metrics: int | None,
) -> None:
    """Judge traces while they are written."""

    def tell(alarm: Alarm, line: Line) -> None:
        output.lines([line])
        output.json_line(alarm_dict(alarm))

    output.json_by_line()
    follow_traces(paths, settings, judged, alarm=tell, say=output.say, metrics=metrics)
    if not judged.headers:
        error = judged.unjudged[0].error if judged.unjudged else "No trace was written."
        raise TraceError(error)


def _results(
    files: TraceFiles, settings: UnitSettings, progress: Callable[[int], None], jobs: int
) -> Generator[JudgedUnit]:
    """Yield what is found in each unit, judged by up to ``jobs`` processes."""
    units = _units(files)
    jobs = min(jobs, len(units))
    if jobs == 1 or (files.bytes < _SMALL_BYTES and len(files) < _SMALL_FILES):
        return judge_here(units, settings, progress)
    return judge_in_processes(units, settings, progress, jobs=jobs)


def _sum(results: Generator[JudgedUnit], files: TraceFiles, judged: FilesJudged) -> None:
    """Add what is found in each file, up to the first finding if that ends the run."""
    # closed at once, so that no worker judges on after the first finding
    with closing(results):
        for result in results:
            judged.add(result)
            if judged.stopped:
                break
    for place, original in files.copies.items():
        path, other = files.paths[place], files.paths[original]
        error = f"{path} has the same bytes as {other}: it was not judged again."
        judged.leave_out(Unjudged(path=path, reason=COPY, error=error))
        judged.files += 1


def _units(files: TraceFiles) -> list[Unit]:
    """Return the units of work; copies of other files are in none."""
    units = []
    for places in files.units():
        kept = [place for place in places if place not in files.copies]
        if kept:
            size = sum(max(files.sizes[place], 0) for place in kept)
            units.append(Unit(tuple(files.paths[place] for place in kept), size))
    return units


def _show(
    output: Output,
    judged: FilesJudged,
    alone: Path | None,
    *,
    notes: Sequence[str] = (),
    slices: Path | None = None,
    verbose: bool,
) -> int:
    """Show the report, and return the exit code. ``alone`` is the only file, if there is one, and
    ``slices`` the folder for slices of the trace.
    """
    report = judged.report(notes)
    data = report.to_dict()
    data["inputs"] = judged.inputs()
    if alone is not None:  # of several files each finding says which one it is in
        data["location"] = SourceLocation(file=alone.resolve(), line=1).to_dict(Path.cwd())
    output.lines(report_lines(data, verbose=verbose, gather=True, width=output.width))
    output.lines(
        summary_lines(
            report.results,
            has_samples=judged.has_samples,
            verbose=verbose,
            width=output.width,
        )
    )
    output.lines(_unjudged_lines(judged, verbose=verbose))
    if slices is not None:
        written = list(write_slices(judged.first, judged.worst, slices))
        data["inputs"]["slices"] = {item.check: dict(item.files) for item in written}
        output.lines(_slice_lines(written))
    output.json(data)
    # A failure outranks a damaged file: the part that could be read is enough to show it.
    unsure = judged.reasons and report.exit_code == ExitCode.PASS
    code = ExitCode.UNKNOWN if unsure else report.exit_code
    output.report(data, code, problems=[item.error for item in judged.unjudged])
    return output.ended(code)


def _slice_lines(written: Sequence[Slices]) -> Iterator[Line]:
    """Yield the commands that show the slices."""
    for item in written:
        if item.missing:
            yield Style.DOUBT, f"  no slice of {item.check}: {item.missing}"
        for name, path in item.files.items():
            yield Style.PLAIN, f"  {name} of {item.check}: rollproof show {shlex.quote(path)}"


def _unjudged_lines(judged: FilesJudged, *, verbose: bool) -> Iterator[Line]:
    """Yield lines on the files that were not judged, or not to their end."""
    count = judged.reasons.total()
    if not count:
        return
    reasons = ", ".join(f"{times:,} {reason}" for reason, times in judged.reasons.most_common())
    yield Style.BAD, f"  not judged to the end: {count:,} of {judged.files:,} files ({reasons})"
    shown = judged.unjudged if verbose else judged.unjudged[:_NAMED]
    for item in shown:
        yield Style.BAD, f"  {item.error}"
    if count > len(shown):
        more = "the JSON report lists more" if len(judged.unjudged) > len(shown) else "not listed"
        yield Style.BAD, f"  and {count - len(shown):,} more ({more})"


def summary_lines(
    results: Sequence[CheckResult],
    *,
    has_samples: bool,
    verbose: bool = False,
    width: int = WIDTH,
) -> Iterator[Line]:
    """Yield lines on which checks passed, which were not judged and why, and what to do next.

    ``has_samples``: whether the traces have requests. Without them no check of samples is judged.
    ``verbose``: whether the report lists every check, so that only the next step is left to say.
    ``width``: the columns of the terminal.
    """
    width = min(width, WIDTH)
    passed = [result.check for result in results if result.verdict is Verdict.PASS]
    if passed and not verbose:
        yield Style.GOOD, wrapped(f"  passed: {_listed(passed)}.", width=width)
    # Unknown checks with a reason of their own are in the report above; their situations may well
    # have occurred.
    idle = [
        result.check
        for result in results
        if result.verdict is Verdict.UNKNOWN and result.reason.startswith(NOT_EXERCISED)
    ]
    without_data = [] if has_samples else [check for check in idle if _needs_samples(check)]
    not_met = [check for check in idle if check not in without_data]
    if without_data and not verbose:
        reason = (
            "they need requests and samples, and none were reported to this recording: it has"
            " calls, aborts, pauses and weights"
        )
        yield Style.DOUBT, wrapped(f"  not judged: {_listed(without_data)}: {reason}.", width=width)
    if not_met and not verbose:
        situations = list(dict.fromkeys(name for check in not_met for name in check.exercised_by))
        more = f", and {len(situations) - _NAMED} more" if len(situations) > _NAMED else ""
        text = (
            f"  not judged: {_listed(not_met)}: none of their situations occurred"
            f" ({', '.join(situations[:_NAMED])}{more})."
        )
        yield Style.DOUBT, wrapped(text, width=width)
    if without_data:
        yield Style.PLAIN, wrapped(_NEXT, width=width)


def _needs_samples(check: Check) -> bool:
    return check.request is not None or any(word in check.needs for word in _SAMPLE_DATA)


def _listed(checks: Sequence[Check]) -> str:
    if len(checks) <= _NAMED:
        return ", ".join(check.id for check in checks)
    families = Counter(check.family for check in checks)
    return (
        f"{len(checks)} checks"
        f" ({', '.join(f'{family} {count}' for family, count in families.most_common())})"
    )
