"""The command ``seal``: renew the checksum of a trace or a report in JSON that a person edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollproof.cli.output import Output
from rollproof.core.checksums import fits
from rollproof.core.files import write_atomically
from rollproof.core.json_codec import parse_json
from rollproof.errors import RollproofError, TraceError, UsageError
from rollproof.judging.report import ExitCode
from rollproof.reporting.report_files import json_text
from rollproof.store.json_format import MAX_BYTES, is_trace, seal_trace

__all__ = ["seal"]


def seal(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Traces and reports in JSON.")
    ],
    check: Annotated[
        bool,
        typer.Option("--check", help="Change nothing: say whether each file fits its checksum."),
    ] = False,
) -> int:
    """Renew the checksum of traces and reports that you edited, or add one.

    With --check, exit code 254 if a file has no checksum, or another one than it should.
    """
    output = Output()
    problems = 0
    for file in files:
        data = _read(file)
        if check:
            state = {True: "fits its checksum", None: "has no checksum"}.get(
                fits(data), "does not fit its checksum: it is damaged, or was edited"
            )
            problems += fits(data) is not True
            output.say(f"{file} {state}")
        elif fits(data):
            output.say(f"{file} fits its checksum: nothing to do")
        else:
            _write(file, data)
            output.say(f"{file} has a new checksum")
    return output.ended(ExitCode.USAGE if problems else ExitCode.PASS)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be opened: {error.strerror or error}.") from error
    if len(text) > MAX_BYTES:
        raise UsageError(f"{file} has more than {MAX_BYTES / 1e6:.0f} MB: it is no such file.")
    try:
        data = parse_json(text)
    except TraceError as error:
        raise UsageError(
            f"{file} is no trace and no report in JSON: {error} An Arrow trace needs no seal: its"
            " reader finds damage."
        ) from error
    if not isinstance(data, dict) or not (is_trace(data) or type(data.get("schema")) is int):
        raise UsageError(f"{file} is no trace and no report of rollproof: it has no schema.")
    return data


def _write(file: Path, data: dict[str, Any]) -> None:
    if is_trace(data):
        try:
            seal_trace(file, data)
        except RollproofError as error:
            raise UsageError(f"{file} cannot be sealed: {error}") from error
    else:
        write_atomically(file, json_text(data))
