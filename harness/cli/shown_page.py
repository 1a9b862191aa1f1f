"""The page of ``rollproof show --html``: which slice of the trace it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollproof.errors import UsageError
from rollproof.invariants import default_registry
from rollproof.judging.report import moment_dict
from rollproof.reporting.html.drawing import draw
from rollproof.reporting.html.route_maps import route_maps
from rollproof.reporting.html.trace_page import OtherFinding, ShownFinding, TracePage, write_page
from rollproof.verification.request_views import ToldRequest, tell_request
from rollproof.verification.trace_survey import Survey, SurveyedFinding, TraceFile

__all__ = ["write_shown_page"]


def write_shown_page(
    trace: TraceFile,
    survey: Survey,
    path: Path,
    *,
    finding: SurveyedFinding | None,
    request: str | None,
    rerun: str,
) -> None:
    """Write the page of a finding, or of a request (``None``: the first one). Raises as
    ``write_page``.
    """
    place = None
    if finding is not None:
        episode, first, last = finding.episode, finding.first, finding.last
    else:
        place = survey.place_of(request) if request is not None else next(iter(survey.places), None)
        if request is not None and place is None:
            raise UsageError(f"{trace.path} has no request {request!r}.")
        episode, first, last = (
            (0, 0, 0) if place is None else (place.episode, place.first, place.last)
        )
    low, high = trace.window(survey, episode, first, last)
    part = trace.slice(survey, episode, low, high)
    name = _request_of(finding) if finding is not None else None if place is None else place.name
    shown = None
    if name is not None:
        shown = tell_request(trace.slice(survey, episode, first, last, only=name), name)
    story = _story(finding, shown)
    drawing = draw(part.events, chosen=name, story=story)
    counts = [("events", survey.events), ("requests", survey.requests)]
    if survey.episodes > 1:
        counts.append(("episodes", survey.episodes))
    if len(part.events) < survey.events:
        counts.append(("events drawn", len(part.events)))
    write_page(
        TracePage(
            name=str(trace.path),
            header=part.header,
            counts=counts,
            drawing=drawing,
            finding=None if finding is None else _shown(finding, rerun),
            request=name if finding is None else None,
            story=story,
            maps=_maps(finding, shown),
            others=[
                OtherFinding(
                    number=number,
                    check=other.check,
                    title=other.finding["title"],
                    times=other.times,
                )
                for number, other in enumerate(survey.findings, 1)
                if other is not finding
            ],
        ),
        path,
    )


def _request_of(finding: SurveyedFinding) -> str | None:
    name = finding.finding["where"].get("request")
    return name if isinstance(name, str) else None


def _story(finding: SurveyedFinding | None, shown: ToldRequest | None) -> list[dict[str, Any]]:
    if finding is not None:
        return list(finding.finding["story"])
    return [] if shown is None else [moment_dict(moment) for moment in shown.story]


def _shown(finding: SurveyedFinding, rerun: str) -> ShownFinding:
    return ShownFinding(
        check=finding.check,
        promise=default_registry()[finding.check].promise,
        finding={**finding.finding, "rerun": rerun},
    )


def _maps(finding: SurveyedFinding | None, shown: ToldRequest | None) -> dict[str, Any] | None:
    """Return the maps of a finding about the routes of a sample."""
    if finding is None or shown is None or not finding.check.startswith("routes."):
        return None
    return route_maps(shown.view, finding.finding["where"])
