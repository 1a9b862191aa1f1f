"""The command ``known-bugs``: plant published faults, and show which checks detect them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rollproof.cli.completions import complete_known_bugs
from rollproof.cli.output import JsonTarget, Meter, Output
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.report import REPORT_SCHEMA, ExitCode
from rollproof.reporting.html.known_bugs_page import known_bugs_page_text
from rollproof.reporting.report_files import ReportForm, json_text
from rollproof.reporting.text import Style

if TYPE_CHECKING:
    from rollproof.verification.kill_matrix import KillResult

__all__ = ["known_bugs"]


def known_bugs(
    only: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="Only these bugs.",
            show_default=False,
            autocompletion=complete_known_bugs,
        ),
    ] = None,
    json_target: JsonTarget = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write the table: FILE.html is one HTML page, any other name JSON.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every bug with the checks that detect it.")
    ] = False,
) -> int:
    """Plant every known bug into a reference client, and show which checks detect it.

    Bugs that you name are described. Bugs with a wrong outcome are listed, all of them with -v.
    Exit code 1 if a bug is not detected or a check fails that should not.
    """
    # Imported here, because the bugs of HTTP clients need the extra `serve`.
    from rollproof.verification.kill_matrix import run_kill_matrix

    form = None if report is None else ReportForm.of(report)
    if form is ReportForm.SARIF:
        raise UsageError(
            f"--report {report}: SARIF lists findings in your code, and known bugs are not in it."
            " Name a file that ends in .html or .json."
        )
    output = Output(json_target, [] if report is None else [report])
    with Meter() as meter:
        results = run_kill_matrix(only or (), meter)
    # Both directions count: a check that fails for a bug that is not its own would blame the wrong
    # code of a user.
    killed = sum(result.killed for result in results)
    blamed = sum(bool(result.blamed_wrongly) for result in results)
    good = killed == len(results) and not blamed
    summary = (
        f"{killed} of {len(results)} known bugs detected, {blamed} with a check that should not"
        " fail"
    )
    output.lines([(Style.GOOD if good else Style.BAD, summary)])
    if only:
        for result in results:
            output.say(f"{result.bug.id}: {result.bug.summary}")
    listed = results if only or verbose else tuple(filter(_is_wrong, results))
    if listed:
        output.table(_table(listed))
    else:
        output.say("-v lists each of them with the checks that detect it")
    data = {"schema": REPORT_SCHEMA, "bugs": [result.to_dict() for result in results]}
    output.json(data)
    if report is not None:
        page = form is ReportForm.PAGE
        output.write(
            report,
            known_bugs_page_text(data, summary=summary, checks=default_registry())
            if page
            else json_text(data),
        )
    return output.ended(ExitCode.PASS if good else ExitCode.FAIL)


def _is_wrong(result: KillResult) -> bool:
    return not result.killed or bool(result.blamed_wrongly)


def _table(results: tuple[KillResult, ...]) -> Table:
    table = Table(title="Known bugs", title_justify="left")
    table.add_column("bug", no_wrap=True)
    table.add_column("upstream", overflow="fold")
    table.add_column("detected by (! should not fail, ? should detect it)", overflow="fold")
    table.add_column("cases", justify="right")
    for result in results:
        bug = result.bug
        marked = [
            *(f"? {check_id}" for check_id in bug.detected_by if check_id not in result.failed)
        ]
        marked += [
            f"! {check_id}" if check_id in result.blamed_wrongly else check_id
            for check_id in result.failed
        ]
        style = "bold red" if _is_wrong(result) else ""
        table.add_row(
            bug.id, ", ".join(bug.refs), ", ".join(marked), str(result.examples), style=style
        )
    return table
