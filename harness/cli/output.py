"""What all commands share: some options, and output as lines, tables, JSON and progress."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Self, TypeAlias

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from rollproof.cli.completions import complete_checks
from rollproof.cli.safe_stdio import stdout_failure
from rollproof.core.checksums import with_checksum
from rollproof.core.files import check_target, keep_text, write_or_keep
from rollproof.core.progress import Progress
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode
from rollproof.reporting.annotations import annotations_of, command_lines, on_github
from rollproof.reporting.report_files import ReportForm, check_report_target, json_text, report_text
from rollproof.reporting.reported_run import ReportedRun
from rollproof.reporting.step_summary import append_step_summary
from rollproof.reporting.text import Line

__all__ = [
    "ByteMeter",
    "Github",
    "Jobs",
    "JsonTarget",
    "Meter",
    "Only",
    "Output",
    "RayAddress",
    "ReportTargets",
    "Verbose",
]

JsonTarget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write the JSON to this file, or to standard output (-) and nothing else there.",
    ),
]
ReportTargets: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write the report: FILE.html is one HTML page, FILE.sarif is SARIF 2.1.0, any other"
        " name JSON; may be repeated.",
    ),
]
Github: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--github/--no-github",
        help="Annotations and a step summary for GitHub Actions.",
        show_default="if GITHUB_ACTIONS is true",
    ),
]
Only: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ID",
        help="Only this check or family; may be repeated.",
        autocompletion=complete_checks,
    ),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="List every check, also those that passed and those that the contract rules out.",
    ),
]
Jobs: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        min=1,
        help="Number of worker processes; default: the number of processors.",
    ),
]
RayAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Spread the work over the Ray cluster at this address; `local` starts one here.",
    ),
]

_VERDICTS = {ExitCode.PASS: "pass", ExitCode.FAIL: "fail"}
_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)
"""The beginning of a line of output that GitHub Actions executes."""
_QUIET = 2.0
"""Seconds before a run shows progress."""
_WIDTH = 140
"""Columns of output that does not go to a terminal."""
_BETWEEN_LINES = 20.0
"""Seconds between two progress lines if standard error is no terminal, but a log of CI."""


class Output:
    """The output of a command. With ``--json -`` the JSON alone goes to standard output.

    Raises ``UsageError``, before the run, if the JSON or a report cannot be written to its target,
    and ``ExtraError`` if packages of the HTML page are missing.
    """

    def __init__(
        self,
        json_target: str | None = None,
        report_targets: Iterable[Path] | None = None,
        *,
        github: bool | None = None,
    ) -> None:
        self._json_target = json_target
        self._report_targets = tuple(report_targets or ())
        self._github = on_github() if github is None else github
        self._misplaced = False
        self._lines: IO[str] | None = None
        if json_target == "-" and (failure := stdout_failure()) is not None:
            raise UsageError(
                f"--json - writes to standard output, which cannot be written: {failure}. Name a"
                " file"
                " with --json FILE."
            )
        if json_target not in (None, "-"):
            check_target(Path(json_target))
        for target in self._report_targets:
            check_report_target(target)
        stream = sys.stderr if json_target == "-" else sys.stdout
        # rich would wrap at 80 columns in a log, in the middle of tables and paths.
        width = None if stream.isatty() else _WIDTH
        self._console = Console(
            file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    @property
    def width(self) -> int:
        """The columns of the terminal; many if the output is none."""
        return self._console.width

    def lines(self, lines: Iterable[Line]) -> None:
        """Print styled lines."""
        for style, text in lines:
            self._console.print(Text(self._visible(text), style=style.rich))

    def say(self, text: str = "") -> None:
        """Print one plain line."""
        self._console.print(Text(self._visible(text)))

    def _visible(self, text: str) -> str:
        """Return the text with control characters escaped, and what GitHub takes for a command."""
        # A trace is untrusted: its names could move the cursor, recolour the terminal, or hide
        # lines of a log.
        visible = "".join(
            char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text
        )
        return _COMMAND.sub(r"\1\\x3a:", visible) if self._github else visible

    def table(self, table: Table) -> None:
        """Print a table, within the width of the terminal."""
        self._console.print(table, soft_wrap=False)

    def json(self, data: Mapping[str, Any]) -> None:
        """Write ``data`` to the target of ``--json``, if there is one.

        If that fails after the run (a full disk), the JSON goes to a temporary file, which a
        message names: a run may have taken hours.
        """
        if self._json_target is None:
            return
        if self._lines is not None:
            self.json_line({"report": with_checksum(data)})
            if self._lines is not sys.stdout:
                self._lines.close()
            return
        text = json_text(data)
        if self._json_target != "-":
            trouble = write_or_keep(Path(self._json_target), text)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
            failure = stdout_failure()
            trouble = (
                None
                if failure is None
                else (
                    f"The JSON did not fit into standard output: {failure}."
                    f" {keep_text(text, 'report.json')}"
                )
            )
        self._report_trouble(trouble)

    def json_by_line(self) -> None:
        """Write JSON to the target of ``--json`` object by object, one a line, as it comes."""
        if self._json_target == "-":
            self._lines = sys.stdout
        elif self._json_target is not None:
            try:
                self._lines = Path(self._json_target).open("w", encoding="utf-8")  # noqa: SIM115 - `json` closes it
            except OSError as error:
                raise UsageError(f"Cannot write {self._json_target}: {error.strerror}.") from error

    def json_line(self, data: Mapping[str, Any]) -> None:
        """Write one object, if ``json_by_line`` was called and there is a target."""
        if self._lines is None:
            return
        try:
            self._lines.write(json.dumps(data) + "\n")
            # whoever reads the lines waits for them
            self._lines.flush()
        except OSError as error:
            if self._lines is sys.stdout:
                raise
            self._report_trouble(f"The JSON could not be written: {error.strerror}.")

    def report(
        self,
        data: Mapping[str, Any],
        code: int,
        *,
        problems: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> None:
        """Write the report to the targets of ``--report``, as ``json`` does, and what GitHub
        Actions shows if it runs the command.

        Args:
            data: The JSON form of the report.
            code: The exit code of the run.
            problems: What else made the run fail.
            notes: Remarks on the run.
        """
        run = ReportedRun(
            report=data,
            verdict=_VERDICTS.get(code, "unknown"),
            checks=tuple(default_registry()),
            problems=tuple(problems),
            notes=tuple(notes),
        )
        for target in self._report_targets:
            self.write(target, report_text(run, ReportForm.of(target)))
        if self._github:
            for line in command_lines(list(annotations_of(run)), run.root):
                self._console.print(Text(line))
            if (trouble := append_step_summary(run)) is not None:
                sys.stderr.write(f"rollproof: {trouble}\n")

    def write(self, target: Path, text: str) -> None:
        """Write a file, as ``json`` does."""
        self._report_trouble(write_or_keep(target, text))

    def _report_trouble(self, trouble: str | None) -> None:
        if trouble is not None:
            self._misplaced = True
            sys.stderr.write(f"rollproof: {trouble}\n")

    def ended(self, code: int) -> int:
        """Return the exit code for the verdict ``code``.

        JSON or a report that could not be written is an error, unless a check failed.
        """
        return ExitCode.USAGE if self._misplaced and code != ExitCode.FAIL else code


class Meter:
    """Shows the progress of a run on standard error; call it with each ``Progress``.

    A terminal gets a bar, which disappears at the end; a log gets a line now and then.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._started = time.monotonic()
        self._last_line = self._started - _BETWEEN_LINES
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._started < _QUIET:
            return
        # A bar redraws its line, which fills a log with control characters.
        if self._console.is_terminal:
            self._draw(progress)
        elif now - self._last_line >= _BETWEEN_LINES:
            self._last_line = now
            share = f"{progress.done}/{progress.total} " if progress.total else ""
            self._console.print(
                f"  ... {share}{progress.what} ({now - self._started:.0f} s)", markup=False
            )

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = RichProgress(*columns, console=self._console, transient=True)
            self._bar.add_task(progress.what)
            self._bar.start()
        task = self._bar.tasks[0].id
        self._bar.update(
            task, description=progress.what, completed=progress.done, total=progress.total or None
        )


class ByteMeter:
    """Shows how far a run is through its input, at which rate, and the time left: on a terminal
    alone, and nothing in a log or a pipe.

    Args:
        total: The bytes of the input.
        what: What is done with them.
    """

    def __init__(self, total: int, what: str) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._started = time.monotonic()
        self._bar: RichProgress | None = (
            RichProgress(*columns, console=console, transient=True) if console.is_terminal else None
        )
        self._begun = False
        if self._bar is not None:
            self._bar.add_task(what, total=max(total, 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._begun and self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int) -> None:
        """Show that ``done`` bytes were read."""
        if self._bar is None or time.monotonic() - self._started < _QUIET:
            return
        if not self._begun:
            self._begun = True
            self._bar.start()
        self._bar.update(self._bar.tasks[0].id, completed=done)
