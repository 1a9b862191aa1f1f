"""The command ``checks``: a table of all checks, or some checks in full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rollproof.cli.completions import complete_checks
from rollproof.cli.output import JsonTarget, Output
from rollproof.invariants import default_registry
from rollproof.judging.checks import Check
from rollproof.judging.report import REPORT_SCHEMA, ExitCode
from rollproof.reporting.text import Style

if TYPE_CHECKING:
    from rollproof.fakes.known_bugs.known_bug import KnownBug

__all__ = ["checks"]


def checks(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="Checks or families.",
            show_default=False,
            autocompletion=complete_checks,
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """List the checks with their promises; with ids, show each check in full."""
    output = Output(json_target)
    registry = default_registry().select(ids) if ids else default_registry()
    bugs = _bugs()
    if ids and set(ids) <= set(registry.ids):
        for check in registry:
            _show_check(output, check, bugs)
    else:
        output.table(_table(registry))
        output.say(f"{len(registry)} checks; `rollproof checks ID` shows one in full.")
    output.json({"schema": REPORT_SCHEMA, "checks": [_dict(check, bugs) for check in registry]})
    return output.ended(ExitCode.PASS)


# Imported when needed: the known bugs import every fake, which the other commands do not need.
def _bugs() -> tuple[KnownBug, ...]:
    from rollproof.fakes.known_bugs import KNOWN_BUGS

    return tuple(KNOWN_BUGS)


def _detected_bugs(check: Check, bugs: Iterable[KnownBug]) -> list[str]:
    return [bug.id for bug in bugs if check.id in bug.detected_by]


def _dict(check: Check, bugs: Iterable[KnownBug]) -> dict[str, Any]:
    return {
        "id": check.id,
        "family": check.family,
        "promise": check.promise,
        "needs": check.needs,
        "exercised_by": list(check.exercised_by),
        "kills": _detected_bugs(check, bugs),
    }


def _table(registry: Iterable[Check]) -> Table:
    table = Table(title="Checks", title_justify="left")
    table.add_column("id", no_wrap=True)
    table.add_column("promise", overflow="fold")
    for check in registry:
        table.add_row(check.id, check.promise)
    return table


def _show_check(output: Output, check: Check, bugs: Iterable[KnownBug]) -> None:
    rows = [
        ("promise", check.promise),
        ("needs", check.needs),
        ("exercised by", ", ".join(check.exercised_by)),
        ("detects", ", ".join(_detected_bugs(check, bugs)) or "no known bug"),
    ]
    output.lines(
        [(Style.TITLE, check.id), *((Style.PLAIN, f"  {name:<13} {value}") for name, value in rows)]
    )
