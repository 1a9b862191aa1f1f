"""The command ``diff``: what changed between two traces or two reports, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollproof.cli.output import JsonTarget, Only, Output
from rollproof.judging.report import ExitCode
from rollproof.reporting.text import Line, Style, wrapped
from rollproof.reporting.timeline_text import timeline_lines
from rollproof.verification.trace_diff import Change, Difference, differences, read_side

__all__ = ["diff"]

_LISTED = 30
"""Changes of a kind that are listed; the JSON has all."""


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A trace, or a JSON report.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What it is compared with.")],
    only: Only = None,
    json_target: JsonTarget = None,
) -> int:
    """Compare two traces or two reports: verdicts, findings by kind, situations; of two traces also
    the contracts, field by field, and the first event that differs, with its story.

    Times do not count. Exit code 0: alike, 1: different, 254: one cannot be read.
    """
    output = Output(json_target)
    chosen = tuple(only or ())
    found = differences(read_side(a, chosen), read_side(b, chosen))
    output.lines(_lines(found, str(a), str(b), output.width))
    output.json({"schema": 1, "a": str(a), "b": str(b), **found.to_dict()})
    return output.ended(ExitCode.PASS if found.alike else ExitCode.FAIL)


def _lines(found: Difference, a: str, b: str, width: int) -> Iterator[Line]:
    if found.alike:
        yield Style.GOOD, f"{a} and {b} are alike"
        return
    yield Style.TITLE, f"from {a} to {b}"
    yield from _changes("verdicts", found.verdicts, width)
    yield from _changes("findings by kind", found.kinds, width)
    yield from _changes("situations", found.situations, width)
    yield from _changes("contract", found.contract, width)
    event = found.event
    if event is None:
        return
    place = f"event {event.number} of episode {event.episode}"
    kinds = [kind or "nothing" for kind in event.kinds]
    what = f"a {kinds[0]}" if kinds[0] == kinds[1] else f"{kinds[0]} in A, {kinds[1]} in B"
    about = f", about {event.request}" if event.request else ""
    yield Style.TITLE, f"  the first event that differs: {place}, {what}{about}"
    yield from _each(event.fields, width)
    for name, story in zip((a, b), event.stories, strict=True):
        if story:
            yield Style.TITLE, f"  what happened to {event.request} in {name}"
            yield from timeline_lines(story, width=width)


def _changes(title: str, changes: Sequence[Change], width: int) -> Iterator[Line]:
    if changes:
        yield Style.TITLE, f"  {title}"
        yield from _each(changes[:_LISTED], width)
    if len(changes) > _LISTED:
        yield Style.PLAIN, f"    and {len(changes) - _LISTED} more"


def _each(changes: Sequence[Change], width: int) -> Iterator[Line]:
    for change in changes:
        why = f" ({change.reason})" if change.reason else ""
        text = f"    {change.name}: {change.before} -> {change.after}{why}"
        style = Style.BAD if change.after == "fail" else Style.PLAIN
        yield style, wrapped(text, "        ", width)
