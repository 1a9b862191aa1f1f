"""A trace as one self-contained HTML file: a finding, its story, and the calls by server.

Needs jinja2 (the extra ``report``), imported on use. Texts of the trace are escaped by the
template, or reach the script as JSON, which only ever sets the text of an element.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollproof.core.files import check_target, write_atomically
from rollproof.core.trace import Header
from rollproof.reporting.html.drawing import Drawing
from rollproof.reporting.html.pages import (
    inline_script,
    page_template,
    require_packages,
    story_values,
)
from rollproof.reporting.text import finding_rows, run_text

__all__ = ["OtherFinding", "ShownFinding", "TracePage", "check_page_target", "page_text"]

_OTHERS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownFinding:
    """The finding of a page.

    check: The id of the check.
    promise: The promise that it broke.
    finding: The JSON form of the finding.
    """

    check: str
    promise: str
    finding: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherFinding:
    """A finding that the page lists: its number, check and title, and how often it was found."""

    number: int
    check: str
    title: str
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePage:
    """What a page shows.

    name: The name of the file.
    header: The header of the episode.
    counts: How much the file holds, as name and number.
    drawing: The calls.
    finding: The finding that the page is about, if it is about one.
    request: The request that it is about otherwise.
    story: The JSON form of the moments.
    maps: The routes of the finding's sample (``route_maps``).
    others: The other findings.
    """

    name: str
    header: Header
    counts: Sequence[tuple[str, int]]
    drawing: Drawing
    finding: ShownFinding | None = None
    request: str | None = None
    story: Sequence[Mapping[str, Any]] = ()
    maps: Mapping[str, Any] | None = None
    others: Sequence[OtherFinding] = ()


def check_page_target(path: Path) -> None:
    """Check, before a long trace is read, that a page can be made and written.

    Raises ``ExtraError`` if jinja2 is missing, ``UsageError`` if the path cannot be written to.
    """
    require_packages(
        ("jinja2",), "The HTML page needs", "Without it `rollproof show` prints the same in text."
    )
    check_target(path)


def write_page(page: TracePage, path: Path) -> None:
    """Write the page. Raises as ``check_page_target``."""
    check_page_target(path)
    write_atomically(path, page_text(page))


def page_text(page: TracePage) -> str:
    """Return the HTML."""
    from markupsafe import Markup

    data = {**page.drawing.data, "maps": page.maps}
    # escaped so that no text of the trace ends the element: JSON reads < as "<"
    values = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    text: str = page_template("rollproof.reporting.html", "trace.html").render(
        page=_values(page),
        data=Markup(values),  # noqa: S704 - ASCII without "<"
        **inline_script("rollproof.reporting.html", "trace.js"),
    )
    # the name of a file may contain bytes that are not text
    return text.encode("utf-8", "backslashreplace").decode()


def _values(page: TracePage) -> dict[str, Any]:
    """Return what the template shows as text."""
    header, finding = page.header, page.finding
    facts = [
        ("trace", page.name),
        ("subject", header.subject),
        ("run", run_text(header)),
        *((name, f"{count:,}") for name, count in page.counts),
    ]
    about = "" if page.request is None else f" of {page.request}"
    return {
        "title": header.subject if finding is None else f"{finding.check}: {header.subject}",
        "facts": facts,
        "finding": None if finding is None else _finding_values(finding),
        "story_title": "What happened" if finding is not None else f"The story{about}",
        "story": story_values(page.story) if page.story else None,
        "maps": _maps_text(page.maps),
        "left_out": "; ".join(page.drawing.left_out),
        "others": page.others[:_OTHERS],
    }


def _finding_values(shown: ShownFinding) -> dict[str, Any]:
    finding = shown.finding
    return {
        "check": shown.check,
        "promise": shown.promise,
        "title": finding["title"],
        "rows": finding_rows(finding, shown.check, is_shown=True),
    }


def _maps_text(maps: Mapping[str, Any] | None) -> str:
    if maps is None:
        return ""
    shown, total = maps["positions"], maps["total"]
    text = f"{maps['differing']:,} of {total:,} positions differ, the first is {maps['first']}."
    if len(shown) < total:
        text += f" Shown are positions {shown[0]} to {shown[-1]}."
    if maps["more_layers"]:
        text += f" {maps['more_layers']:,} more layers are not shown."
    return text
