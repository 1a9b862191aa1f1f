"""A trace in text: what it is, its findings, and their stories as timelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollproof.core.trace import Header
from rollproof.reporting.text import Line, Style, finding_lines, run_text, wrapped

__all__ = ["finding_story_lines", "listed_line", "timeline_lines", "trace_line"]

WIDEST = 118


def trace_line(
    path: str, header: Header, *, events: int, requests: int, episodes: int, read: bool
) -> str:
    """Return what a trace is: its subject, what made it, and how much is in it."""
    counts = [_counted(events, "event"), _counted(requests, "request")]
    if episodes > 1:
        counts.append(_counted(episodes, "episode"))
    so_far = "" if read else " read so far"
    return f"{path}: {header.subject} ({run_text(header)}); {', '.join(counts)}{so_far}"


def finding_story_lines(
    finding: Mapping[str, Any],
    *,
    number: int,
    check_id: str,
    promise: str,
    times: int = 1,
    width: int = WIDEST,
) -> Iterator[Line]:
    """Yield a finding with the promise that it broke, and all of its story."""
    width = min(width, WIDEST)
    yield Style.BAD, wrapped(f"  FAIL  {check_id}: {promise}", "      ", width)
    alone = {**finding, "story": [], "after": []}
    yield from finding_lines(
        alone, number, check_id, (finding["flavour"],), width=width, is_shown=True
    )
    if times > 1:
        yield Style.FAINT, f"     ... and {_counted(times - 1, 'more finding')} of this kind"
    yield Style.PLAIN, ""
    yield from timeline_lines(finding["story"], width=width)


def timeline_lines(story: Sequence[Mapping[str, Any]], *, width: int = WIDEST) -> Iterator[Line]:
    """Yield a story with the index of each event, and the seconds since its first one; ``>>`` marks
    the event that broke the promise.
    """
    if not story:
        return
    width = min(width, WIDEST)
    start = story[0]["time"]
    indexes = [str(moment["index"]) if moment["index"] >= 0 else "" for moment in story]
    times = [
        f"+{moment['time'] - start:.3f} s" if index else ""
        for moment, index in zip(story, indexes, strict=True)
    ]
    widths = max(5, *map(len, indexes)), max(4, *map(len, times))
    yield Style.TITLE, f"     {'event':>{widths[0]}}  {'time':>{widths[1]}}  what happened"
    for moment, index, time in zip(story, indexes, times, strict=True):
        style, mark = (Style.BAD, ">>") if moment.get("broke") else (Style.PLAIN, "  ")
        head = f"  {mark} {index:>{widths[0]}}  {time:>{widths[1]}}  "
        # one line an event: a text of several would look like events
        text = " ".join(str(moment["text"]).split())
        yield style, wrapped(head + text, " " * len(head), width)


def listed_line(
    finding: Mapping[str, Any], *, number: int, check_id: str, times: int, width: int = WIDEST
) -> Line:
    """Return a finding as one entry of a list."""
    often = f" ({times:,} times)" if times > 1 else ""
    text = f"  {number:>3}. {check_id}: {finding['title']}{often}"
    return Style.PLAIN, wrapped(text, " " * 7, min(width, WIDEST))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
