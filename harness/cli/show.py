"""The command ``show``: the story of a finding or of a request, as text and as a page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.named_targets import options_of_recipe
from rollproof.cli.output import Meter, Output
from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.report import ExitCode, moment_dict
from rollproof.reporting.text import Style, wrapped
from rollproof.reporting.timeline_text import (
    finding_story_lines,
    listed_line,
    timeline_lines,
    trace_line,
)
from rollproof.verification.request_views import tell_request
from rollproof.verification.trace_survey import Survey, SurveyedFinding, TraceFile

__all__ = ["show"]

_LISTED = 20
"""Further findings, or requests, that are named."""


def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trace or a counterexample, in either form.")
    ],
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="Show what happened to this request."),
    ] = None,
    finding: Annotated[
        int | None,
        typer.Option("--finding", metavar="N", help="Show this finding, counted from 1."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also draw the trace, as one HTML file."),
    ] = None,
) -> int:
    """Show what happened to the request of a trace's first finding, event by event.

    Without findings: to its first request. Exit code 0, whatever was found; 254 if the file cannot
    be read to its end.
    """
    output = Output()
    if finding is not None and request is not None:
        raise UsageError("Give --finding or --request, not both: a story has one of them.")
    if html is not None:
        from rollproof.reporting.html.trace_page import check_page_target

        check_page_target(html)
    trace = TraceFile(file)
    with Meter() as meter:
        survey = trace.survey(complete=finding is not None or request is not None, progress=meter)
    width = output.width
    summary = trace_line(
        str(file),
        trace.header,
        events=survey.events,
        requests=survey.requests,
        episodes=survey.episodes,
        read=survey.complete,
    )
    output.lines([(Style.TITLE, wrapped(summary, "    ", width))])
    chosen = _chosen(survey, finding, file) if request is None else None
    if chosen is not None:
        number = survey.findings.index(chosen) + 1
        shown = {**chosen.finding, "rerun": _rerun(trace, file)}
        output.lines(
            finding_story_lines(
                shown,
                number=number,
                check_id=chosen.check,
                promise=default_registry()[chosen.check].promise,
                times=chosen.times,
                width=width,
            )
        )
        _list_others(output, survey, number)
    else:
        _tell_request(output, trace, survey, request)
    if html is not None:
        from rollproof.cli.shown_page import write_shown_page

        rerun = _rerun(trace, file)
        write_shown_page(trace, survey, html, finding=chosen, request=request, rerun=rerun)
        output.say()
        output.say(f"drawn in {html}")
    notes = [text for text in (survey.ending, survey.error) if text]
    output.lines((Style.BAD, wrapped(f"  {note}", "    ", width)) for note in notes)
    return output.ended(ExitCode.USAGE if survey.error else ExitCode.PASS)


def _chosen(survey: Survey, number: int | None, file: Path) -> SurveyedFinding | None:
    """Return the finding to tell, ``None`` if there is none."""
    findings = survey.findings
    if number is None:
        # a counterexample has the name of its check, and often findings of others
        check = re.sub(r"\.\d+$", "", file.stem)
        own = [found for found in findings if found.check == check]
        return next(iter(own or findings), None)
    if not 1 <= number <= len(findings):
        there = f"there are 1 to {len(findings)}" if len(findings) > 1 else "there is only 1"
        raise UsageError(f"There is no finding {number}; {there if findings else 'there is none'}.")
    return findings[number - 1]


def _rerun(trace: TraceFile, file: Path) -> str:
    """Return the command that runs a file again; "" if it cannot be run."""
    header = trace.header
    if header.case is None or header.recipe is None:
        return ""
    # anybody may have written the file: the command says what it runs
    return shlex.join(["rollproof", "replay", str(file), *options_of_recipe(header.recipe)])


def _list_others(output: Output, survey: Survey, shown: int) -> None:
    others = [(number, found) for number, found in enumerate(survey.findings, 1) if number != shown]
    if not survey.complete:
        output.say()
        output.say("  The trace was read up to here; --finding 1 reads all and lists the others.")
        return
    if not others:
        return
    output.say()
    output.lines([(Style.TITLE, "  other findings, told by --finding N")])
    output.lines(
        listed_line(
            found.finding,
            number=number,
            check_id=found.check,
            times=found.times,
            width=output.width,
        )
        for number, found in others[:_LISTED]
    )
    if len(others) > _LISTED:
        output.say(f"       and {len(others) - _LISTED} more")


def _tell_request(output: Output, trace: TraceFile, survey: Survey, name: str | None) -> None:
    """Tell a request, by default the first one."""
    if name is None:
        output.say("  No check found anything.")
    if name is None and not survey.places:
        output.say("  It has no requests to tell of.")
        return
    place = survey.places[0] if name is None else survey.place_of(name)
    shown = None
    if place is not None:
        part = trace.slice(survey, place.episode, place.first, place.last, only=place.name)
        shown = tell_request(part, place.name)
    if place is None or shown is None:
        known = [item.name for item in survey.places[:_LISTED]]
        more = ", ..." if len(survey.places) > len(known) else ""
        listed = f"; there are {', '.join(known)}{more}" if known else "; it has none"
        raise UsageError(f"{trace.path} has no request {name!r}{listed}.")
    output.say()
    output.lines(timeline_lines([moment_dict(m) for m in shown.story], width=output.width))
    others = survey.requests - 1
    if name is None and others > 0:
        plural = "s" if others > 1 else ""
        output.say()
        output.say(f"  {others:,} more request{plural}, told by --request ID")
