"""The commands ``matrix ...``: store results of releases, and make a site of them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.output import Output
from rollproof.core.checksums import fits
from rollproof.core.files import check_folder
from rollproof.core.json_codec import parse_json
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode
from rollproof.reporting.html.matrix_site import check_site_target, write_site
from rollproof.reporting.results.stored_runs import read_runs, runs_of_report, write_run

__all__ = ["matrix_commands"]

matrix_commands: typer.Typer = typer.Typer(
    name="matrix",
    help="Results of releases: store them, and make a site of releases and checks.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@matrix_commands.command()
def add(
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT...", help="What `rollproof verify --json` wrote."),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder of stored results.")],
    date: Annotated[
        str | None,
        typer.Option(
            "--date", metavar="YYYY-MM-DD", help="Day of the run.", show_default="the file's day"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What to call a subject or an engine.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="The version of a subject or an engine."),
    ] = None,
) -> int:
    """Store what reports say of releases: verdicts, and the first finding of each kind.

    A report of the same release replaces the stored one.
    """
    output = Output()
    check_folder(to)
    stored = []
    for file in reports:
        data = _report(file)
        try:
            stored += runs_of_report(data, date=date or _day_of(file), name=name, version=version)
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
    for run in stored:
        output.say(f"stored {run.title}: {write_run(run, to)}")
    return output.ended(ExitCode.PASS)


@matrix_commands.command()
def build(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="Stored results: files, or folders of them."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of the site.")],
) -> int:
    """Make a static site of stored results: a table, a page a release, and what changed."""
    output = Output()
    check_site_target(out)
    runs = read_runs(results)
    index, *others = write_site(runs, out, tuple(default_registry()))
    output.say(f"{index} shows {len(others) - 1} releases")
    return output.ended(ExitCode.PASS)


def _report(file: Path) -> dict[str, object]:
    try:
        text = file.read_bytes()
        data = parse_json(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be opened: {error.strerror or error}.") from error
    except (TraceError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no report in JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{file} is no report of `rollproof verify --json`.")
    if fits(data) is False:
        raise UsageError(
            f"{file} does not fit its checksum: it is damaged, or was edited. If you edited it:"
            f" `rollproof seal {file}`."
        )
    return data


def _day_of(file: Path) -> str:
    return dt.datetime.fromtimestamp(file.stat().st_mtime, tz=dt.UTC).date().isoformat()
