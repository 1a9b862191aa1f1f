"""Output: lines and tables for people, JSON for programs, and a progress bar for what takes longer
than two seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from rollproof.cli.safe_stdio import stdout_failure
from rollproof.core.files import check_target, keep_text, write_or_keep
from rollproof.core.progress import Progress
from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import Line

__all__ = ["JsonTarget", "Meter", "Only", "Output", "Verbose"]

JsonTarget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write the JSON to this file, or to standard output (-) and nothing else there.",
    ),
]
Only: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ID", help="Only this check or family; may be repeated."),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="List every check, also those that passed and those that the contract rules out.",
    ),
]

_QUIET = 2.0
"""Seconds during which a run shows no progress."""
_WIDTH = 140
"""Columns where there is no terminal."""
_BETWEEN_LINES = 20.0
"""Seconds between two progress lines where standard error is no terminal (a CI log)."""


class Output:
    """Where a command says what it found. With ``--json -`` standard output belongs to the JSON,
    and people read standard error.

    Raises ``UsageError`` where the JSON cannot go where ``--json`` says: before the run, not after
    it.
    """

    def __init__(self, json_target: str | None = None) -> None:
        self._json_target = json_target
        self._misplaced = False
        if json_target == "-" and (failure := stdout_failure()) is not None:
            raise UsageError(
                f"--json - writes to standard output, which takes nothing: {failure}. Name a file"
                " with --json FILE."
            )
        if json_target not in (None, "-"):
            check_target(Path(json_target))
        stream = sys.stderr if json_target == "-" else sys.stdout
        width = None if stream.isatty() else _WIDTH
        self._console = Console(
            file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def lines(self, lines: Iterable[Line]) -> None:
        """Print styled lines."""
        for style, text in lines:
            self._console.print(Text(_visible(text), style=style.rich))

    def say(self, text: str = "") -> None:
        """Print one plain line."""
        self._console.print(Text(_visible(text)))

    def table(self, table: Table) -> None:
        """Print a table, within the width of the terminal."""
        self._console.print(table, soft_wrap=False)

    def json(self, data: Mapping[str, Any]) -> None:
        """Write ``data`` where ``--json`` says, if it was given. Where that no longer works it is
        kept elsewhere, and told.
        """
        if self._json_target is None:
            return
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
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
        if trouble is not None:
            self._misplaced = True
            sys.stderr.write(f"rollproof: {trouble}\n")

    def ended(self, code: int) -> int:
        """The exit code where the verdict is ``code``: a failure stays one, else JSON that is not
        where it should be is an error.
        """
        return ExitCode.USAGE if self._misplaced and code != ExitCode.FAIL else code


def _visible(text: str) -> str:
    """Text without control characters: a trace is untrusted, and its names could move the cursor or
    recolour a terminal.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text
    )


class Meter:
    """Progress of one run on standard error; call it with each ``Progress``. Silent at first, and
    gone when the run is over.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._begun = time.monotonic()
        self._said = self._begun - _BETWEEN_LINES
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
        if now - self._begun < _QUIET:
            return
        if self._console.is_terminal:
            self._draw(progress)
        elif now - self._said >= _BETWEEN_LINES:
            self._said = now
            share = f"{progress.done}/{progress.total} " if progress.total else ""
            self._console.print(
                f"  ... {share}{progress.what} ({now - self._begun:.0f} s)", markup=False
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
