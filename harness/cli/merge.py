"""The command ``merge``: join the traces of several recorders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollproof.errors import UsageError
from rollproof.judging.report import ExitCode

__all__ = ["merge"]


def merge(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Arrow traces, or folders of them.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The new trace.")],
) -> int:
    """Join the traces of several proxies and hosts into one, for `rollproof check`.

    Needed if the calls of a request are in one file, and its sample in another.
    """
    from rollproof.store.merging import merge_traces

    paths: list[Path] = []
    for trace in traces:
        if not trace.exists():
            raise UsageError(f"There is no trace at {trace}: check the path.")
        found = sorted(trace.glob("*.arrow")) if trace.is_dir() else [trace]
        if not found:
            raise UsageError(f"The folder {trace} holds no Arrow trace.")
        # batches are judged by themselves
        paths += [path for path in found if "-batches." not in path.name or path == trace]
    if to.exists():
        raise UsageError(f"{to} exists: name another file with --to, or delete it.")
    report = merge_traces(paths, to)
    typer.echo(f"{to}: {report.events:,} events of {', '.join(report.writers)}")
    for note in report.notes:
        typer.echo(f"  {note}")
    return ExitCode.PASS
