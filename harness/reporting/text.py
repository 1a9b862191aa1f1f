"""Reports as lines of text, for the command line and for pytest's closing summary.

The functions take the JSON form of a report (schema 1), because that is what a worker process
delivers.
"""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rollproof.core.trace import Header
from rollproof.reporting.commands import replay_command

__all__ = [
    "KINDS",
    "NOT_EXERCISED",
    "NO_SAMPLE",
    "WIDTH",
    "Line",
    "Style",
    "check_lines",
    "failure_headline",
    "finding_headline",
    "finding_lines",
    "finding_rows",
    "first_of_each_kind",
    "flavours_text",
    "place_text",
    "report_lines",
    "run_text",
    "self_test_text",
    "story_lines",
    "summary_text",
    "text_of",
    "wrapped",
]

NOT_EXERCISED = "not exercised"
"""The start of a check's reason if its situation did not occur."""
NO_SAMPLE = "no rollout delivered a sample"
"""How the note of a run begins in which every rollout raised or returned nothing."""
WIDTH = 118
"""Columns of a report on a wide terminal, or in a log."""
# Seven ids and more would wrap, and hide the reason at the end of the line.
_NAMED = 6
"""A line that gathers more checks than this counts them, and names none."""
KINDS = 3
"""Kinds of findings of a check that are shown without ``-v``, one finding each."""
_NAMED_FIRST = (
    "requests",
    "engine calls",
    "resumes",
    "aborts mid-decode",
    "weight updates between calls",
    "weight updates while calls ran",
)
"""Situations that a run's one line names first: without them its passes say little."""
_FLAVOURS = 6
"""Engine flavours that a line names; the others are counted."""
_TOLD = 8
"""Events of a story that a finding shows; ``rollproof show`` tells all."""
_PLACE_KEYS = {
    key: rank
    for rank, key in enumerate(
        ("request", "call", "segment", "position", "index", "layer", "version", "server")
    )
}


class Style(Enum):
    """How a line looks. The value is the name of the style in rich."""

    PLAIN = ""
    TITLE = "bold"
    GOOD = "green"
    BAD = "bold red"
    DOUBT = "yellow"
    FAINT = "dim"

    @property
    def rich(self) -> str:
        """The style for rich."""
        return self.value

    @property
    def markup(self) -> Mapping[str, bool]:
        """Keyword arguments of pytest's ``TerminalReporter.write_line``."""
        return _MARKUP[self]


# pytest's writer has other names for styles than rich.
_MARKUP: Mapping[Style, Mapping[str, bool]] = {
    Style.PLAIN: {},
    Style.TITLE: {"bold": True},
    Style.GOOD: {"green": True},
    Style.BAD: {"red": True, "bold": True},
    Style.DOUBT: {"yellow": True},
    Style.FAINT: {"light": True},
}
Line: TypeAlias = "tuple[Style, str]"

_VERDICTS: Mapping[str, tuple[str, Style]] = {
    "pass": ("PASS", Style.GOOD),
    "fail": ("FAIL", Style.BAD),
    "unknown": ("UNKNOWN", Style.DOUBT),
    "expected fail": ("EXPECTED FAIL", Style.DOUBT),
    "not applicable": ("NOT APPLICABLE", Style.FAINT),
}


def report_lines(
    report: Mapping[str, Any],
    *,
    verbose: bool = False,
    findings: int | None = KINDS,
    gather: bool = False,
    width: int = WIDTH,
) -> Iterator[Line]:
    """Yield the lines of a report: head, checks, situations, self-test, notes and summary.

    Args:
        report: the JSON form of the report.
        verbose: list every check, also those that passed and those that do not apply.
        findings: how many findings of each failing check to show, each of another kind; ``None``:
            one of every kind.
        gather: count the unknown checks that were not exercised in one line, because a recorded run
            meets few situations.
        width: the columns of the terminal; lines are no longer than usual on a wide one.
    """
    width = min(width, WIDTH)
    # most checks are then unknown for one reason, which the note and a failed check have
    gather = gather or any(note.startswith(NO_SAMPLE) for note in report.get("notes", ()))
    yield Style.TITLE, _narrowed(_head(report), "    ", width)
    shown = (
        ("fail", "expected fail", "unknown", "pass", "not applicable")
        if verbose
        else ("fail", "expected fail", "unknown")
    )
    shown_kinds = None if verbose and findings else findings
    for verdict in shown:
        checks = [check for check in report["checks"] if check["verdict"] == verdict]
        idle = [
            check
            for check in checks
            if verdict == "unknown"
            and gather
            and not verbose
            and check["reason"].startswith(NOT_EXERCISED)
        ]
        if verdict == "not applicable":
            yield from _ruled_out(checks, width)
            continue
        alike = _alike(checks) if verdict == "unknown" and not verbose else {}
        for check in checks:
            if check not in idle and check["reason"] not in alike:
                known = verdict == "expected fail" and not verbose
                kinds = 0 if known else shown_kinds
                yield from check_lines(check, findings=kinds, option="-v", width=width)
        for reason, count in alike.items():
            if not (gather and reason.startswith(NOT_EXERCISED)):
                yield (
                    Style.DOUBT,
                    wrapped(f"  UNKNOWN  {_checks(count)}: {reason} (-v lists them)", width=width),
                )
        if idle:
            text = (
                f"  UNKNOWN  {_checks(len(idle))} not exercised: their situations did not occur in"
                " this run (-v lists them)"
            )
            yield Style.DOUBT, wrapped(text, width=width)
    exercised = report["exercised"]
    yield from _exercised(exercised, width) if verbose else _exercised_line(exercised, width)
    yield from _canary(report["canary"], width)
    for note in report.get("notes", ()):
        yield Style.DOUBT, _narrowed(f"  note: {note}", " " * 6, width)
    yield _style_of(report), wrapped(f"  {summary_text(report)}", width=width)


def _alike(checks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the reasons that so many checks share that they are counted, with the counts."""
    reasons = Counter(str(check["reason"]) for check in checks)
    return {reason: count for reason, count in reasons.items() if count > _NAMED}


def _ruled_out(checks: Sequence[Mapping[str, Any]], width: int) -> Iterator[Line]:
    """Yield the checks that do not apply; one line for those of a family that share a reason."""
    word, style = _VERDICTS["not applicable"]
    families: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        families.setdefault((check["id"].partition(".")[0], check["reason"]), []).append(
            check["id"]
        )
    for (family, reason), ids in families.items():
        name = ids[0] if len(ids) == 1 else f"{_checks(len(ids))} of {family}"
        short = ", ".join(check_id.partition(".")[2] for check_id in ids)
        listed = f" ({short})" if 1 < len(ids) <= _NAMED else ""
        yield style, wrapped(f"  {word}  {name}{listed}: {reason}", "      ", width)


def summary_text(report: Mapping[str, Any]) -> str:
    """Return one line: how many checks have each verdict."""
    summary = report["summary"]
    parts = [
        f"{summary['pass']} pass",
        f"{summary['fail']} fail",
        f"{summary['unknown']} unknown",
        f"{summary['not_applicable']} not applicable",
    ]
    if summary["expected_fail"]:
        parts.append(f"{summary['expected_fail']} expected to fail and did")
    return f"{_checks(sum(summary.values()))}: {', '.join(parts)}"


def check_lines(
    check: Mapping[str, Any],
    *,
    findings: int | None = KINDS,
    option: str = "",
    width: int = WIDTH,
) -> Iterator[Line]:
    """Yield one check: verdict, id and reason, then one finding each of its first ``findings``
    kinds (``None``: of every kind).

    ``option`` is what the reader can add to see the other kinds, if there is anything.
    """
    word, style = _VERDICTS[check["verdict"]]
    # The reason of a failure is the number of its findings, which are shown below.
    shows_findings = check["verdict"] == "fail" and findings != 0
    reason = "" if check["verdict"] == "pass" or shows_findings else check["reason"]
    if check.get("otherwise"):
        known = f" (known: {'; '.join(check['known'])})" if check["known"] else ""
        reason = f"fails in a new way{known}"
    times = sum(check["exercised"].values())
    exercised = f" (exercised {times:,} times)" if check["verdict"] == "pass" else ""
    detail = f": {reason}" if reason else ""
    yield style, wrapped(f"  {word}  {check['id']}{exercised}{detail}", width=width)
    one_each = first_of_each_kind(check["findings"])
    shown = one_each[:findings]
    flavours: Mapping[str, Sequence[str]] = check.get("flavours", {})
    for number, finding in enumerate(shown, 1):
        on = flavours.get(finding.get("kind", "")) or (finding.get("flavour", ""),)
        yield from finding_lines(
            finding, number, check["id"] if number == 1 else "", on, width=width
        )
    # The judge counts all findings, and keeps only the first ones.
    more = check.get("found", len(check["findings"])) - len(shown)
    if more > 0 and shown:
        others = max(len(check.get("kinds", ())), len(one_each)) - len(shown)
        kinds = f", of {others} other kind{'s' if others > 1 else ''} too" if others > 0 else ""
        hidden = len(one_each) > len(shown)
        hint = f" ({option} shows one of each kind)" if option and hidden else ""
        rest = f"{more:,} more finding{'s' if more > 1 else ''}"
        text = f"     ... and {rest} of this check{kinds}{hint}"
        yield Style.FAINT, wrapped(text, " " * 9, width)


def first_of_each_kind(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first finding of each kind: further ones differ from it by their place alone."""
    first: dict[str, Mapping[str, Any]] = {}
    for finding in findings:
        first.setdefault(finding.get("kind") or finding["title"], finding)
    return list(first.values())


def finding_lines(
    finding: Mapping[str, Any],
    number: int = 1,
    check_id: str = "",
    flavours: Sequence[str] = (),
    *,
    width: int = WIDTH,
    is_shown: bool = False,
) -> Iterator[Line]:
    """Yield one finding: title, place, the engine flavours on which its kind was found, its story,
    expected, observed, hint, and the commands that say more of the check ``check_id``, run the
    counterexample again, and show it; the last one not if ``is_shown``.
    """
    yield Style.TITLE, wrapped(f"  {number:>3}. {finding['title']}", " " * 7, width)
    yield from _rows(_place_rows(finding, flavours), width)
    yield from story_lines(finding.get("story", ()), most=_TOLD, width=width)
    yield from _rows(_promise_rows(finding), width)
    # a command stays on one line, so that it can be copied
    for name, text in _command_rows(finding, check_id, is_shown=is_shown):
        yield Style.PLAIN, f"       {name:<9} {text}"


def finding_rows(
    finding: Mapping[str, Any], check_id: str, *, is_shown: bool = False
) -> list[tuple[str, str]]:
    """Return what is known of a finding beside its title and story, as name and text: what
    ``finding_lines`` yields.
    """
    return [
        *_place_rows({**finding, "after": ()}, ()),
        *_promise_rows(finding),
        *_command_rows(finding, check_id, is_shown=is_shown),
    ]


def _place_rows(finding: Mapping[str, Any], flavours: Sequence[str]) -> list[tuple[str, str]]:
    told = [moment for moment in finding.get("story", ()) if not moment.get("broke")]
    rows = [
        ("where", place_text(finding["where"])),
        ("engine" if len(flavours) < 2 else "engines", _flavours(finding, flavours)),
        # the story names these events, too
        ("after", "" if told else "; ".join(finding.get("after", ()))),
    ]
    return [(name, value) for name, value in rows if value]


def _promise_rows(finding: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, finding[name]) for name in ("expected", "observed", "hint")]
    return [(name, value) for name, value in rows if value]


def _command_rows(
    finding: Mapping[str, Any], check_id: str, *, is_shown: bool
) -> list[tuple[str, str]]:
    witness = _relative(finding["witness"]) if finding["witness"] else ""
    rows = [
        ("more", f"rollproof checks {check_id}" if check_id else ""),
        ("rerun", replay_command(finding, witness)),
        ("show", f"rollproof show {shlex.quote(witness)}" if witness and not is_shown else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _rows(rows: Iterable[tuple[str, str]], width: int) -> Iterator[Line]:
    for name, value in rows:
        yield Style.PLAIN, wrapped(f"       {name:<9} {value}", " " * 17, width)


def story_lines(
    story: Sequence[Mapping[str, Any]], *, most: int, width: int = WIDTH
) -> Iterator[Line]:
    """Yield the story of a finding, one line an event; ``>>`` marks the event that broke the
    promise.

    Of a story of more than ``most`` events the last ones are shown, and marked ones; the others are
    counted.
    """
    broken = [place for place, moment in enumerate(story) if moment.get("broke")]
    if len(broken) == len(story):
        return
    # a count of one event would take the line of that event
    first = len(story) - most + 1 if len(story) > most else 0
    name, left = "story", 0
    for place, moment in enumerate(story):
        if place < first and place not in broken:
            left += 1
            continue
        if left:
            yield Style.PLAIN, f"       {name:<9} ... {left:,} more events"
            name, left = "", 0
        style, mark = (Style.BAD, ">>") if place in broken else (Style.PLAIN, "  ")
        yield style, wrapped(f"       {name:<7}{mark} {moment['text']}", " " * 17, width)
        name = ""


def finding_headline(check: Mapping[str, Any]) -> str:
    """Return the first finding of a failed check in one line: title, place, engine flavour, and
    the command that runs its counterexample again.
    """
    if not check["findings"]:
        return str(check["reason"])
    finding = check["findings"][0]
    place = [place_text(finding["where"]), finding.get("flavour", "")]
    facts = f" ({'; '.join(fact for fact in place if fact)})" if any(place) else ""
    witness = _relative(finding["witness"]) if finding["witness"] else ""
    rerun = replay_command(finding, witness)
    return f"{finding['title']}{facts}{f'; {rerun}' if rerun else ''}"


def failure_headline(report: Mapping[str, Any]) -> str:
    """Return the first failure of a report in one line, and how many other checks fail."""
    failed = [check for check in report["checks"] if check["verdict"] == "fail"]
    more = f"; {_checks(len(failed) - 1)} more" if len(failed) > 1 else ""
    return f"{failed[0]['id']}: {finding_headline(failed[0])}{more}" if failed else ""


def _flavours(finding: Mapping[str, Any], flavours: Sequence[str]) -> str:
    """Return the flavours of a kind, that of the finding itself first."""
    own = finding.get("flavour", "")
    return _first([name for name in dict.fromkeys((own, *flavours)) if name])


def flavours_text(report: Mapping[str, Any]) -> str:
    """Return the engine flavours on which the cases of a report ran; "" if they had none."""
    return _first(report.get("flavours", ()))


def _first(names: Sequence[str]) -> str:
    more = len(names) - _FLAVOURS
    return ", ".join(names[:_FLAVOURS]) + (f" and {more} more" if more > 0 else "")


def text_of(lines: Iterator[Line] | Sequence[Line]) -> str:
    """Return the lines without their styles."""
    return "\n".join(text for _, text in lines)


def run_text(header: Header) -> str:
    """Return what made a trace: ``vllm, profile pr, seed 0``; a recorded one has no such facts."""
    if header.case is None:
        return "recorded"
    flavour, profile = header.case.get("flavour"), header.profile
    facts = [
        str(flavour) if flavour else "",
        f"profile {profile}" if profile else "",
        f"seed {header.seed}",
    ]
    return ", ".join(fact for fact in facts if fact)


def _head(report: Mapping[str, Any]) -> str:
    facts = [f"profile {report['profile']}" if report["profile"] else "", f"seed {report['seed']}"]
    if report.get("cases"):
        flavours = flavours_text(report)
        cases = f"{report['cases']:,} case{'s' if report['cases'] > 1 else ''}"
        facts.append(f"{cases} on {flavours}" if flavours else cases)
    if report.get("seconds"):
        facts.append(f"{report['seconds']:.1f} s")
    return f"{report['subject']}  [{', '.join(fact for fact in facts if fact)}]"


# Yellow also if nothing passed: a run in which every check is not applicable shows nothing.
def _style_of(report: Mapping[str, Any]) -> Style:
    summary = report["summary"]
    if summary["fail"]:
        return Style.BAD
    return Style.DOUBT if summary["unknown"] or not summary["pass"] else Style.GOOD


def _exercised_line(counts: Mapping[str, int], width: int) -> Iterator[Line]:
    """Yield one line: how many situations arose, some of them, and those that did not."""
    if not counts:
        return
    arisen = {name: count for name, count in counts.items() if count}
    order = [
        *(name for name in _NAMED_FIRST if name in arisen),
        *(name for name, _ in Counter(arisen).most_common()),
    ]
    shown = list(dict.fromkeys(order))[:_NAMED]
    named = "; ".join(f"{name} {arisen[name]:,}" for name in shown)
    more = "; ... (-v lists all)" if len(shown) < len(arisen) else ""
    situations = f"{len(arisen)} situation{'' if len(arisen) == 1 else 's'}"
    yield Style.PLAIN, wrapped(f"  exercised {situations}: {named}{more}", width=width)
    missing = [name for name, count in counts.items() if not count]
    if missing:
        yield Style.DOUBT, wrapped(f"  not exercised: {', '.join(missing)}", width=width)


def _exercised(counts: Mapping[str, int], width: int) -> Iterator[Line]:
    if not counts:
        return
    yield Style.TITLE, "  exercised"
    for name, count in Counter(counts).most_common():
        yield (
            (Style.PLAIN if count else Style.DOUBT),
            f"    {name} {'.' * max(2, min(60, width - 14) - len(name))} {count:,}",
        )


def _canary(canary: Mapping[str, Any], width: int) -> Iterator[Line]:
    if text := self_test_text(canary):
        planted = canary["planted"] is not None
        style = (Style.GOOD if canary["red"] else Style.BAD) if planted else Style.DOUBT
        yield style, wrapped(f"  {text}", width=width)


def self_test_text(canary: Mapping[str, Any]) -> str:
    """Return what the self-test showed, ``""`` if a run has none."""
    if not canary:
        return ""
    if canary["planted"] is None:
        reason = canary["reason"] or "no trace was suitable"
        return f"self-test: no fault was planted ({reason})"
    if canary["red"]:
        return f"self-test: {canary['planted']}: detected by {canary['expected_by']}, as expected"
    return (
        f"self-test: {canary['planted']}: NOT detected by {canary['expected_by']}. A fault that was"
        " planted into this run's own trace went unnoticed, so its other verdicts cannot be"
        " trusted; please report this with the JSON report."
    )


def _checks(count: int) -> str:
    return f"{count} check{'' if count == 1 else 's'}"


def _relative(path: str) -> str:
    """Return the path relative to the current folder, if it is below it."""
    folder = Path.cwd()
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path


def place_text(keys: Mapping[str, Any]) -> str:
    """Return the place of a finding: ``request r0, segment 1, position 1``."""
    # From the outside in, whatever order the check gave; keys of its own come last.
    order = sorted(keys, key=lambda key: _PLACE_KEYS.get(key, len(_PLACE_KEYS)))
    return ", ".join(f"{key} {keys[key]}" for key in order)


def _narrowed(text: str, indent: str, width: int) -> str:
    """Return a line that is broken on narrow terminals alone: a log is searched for such lines."""
    return wrapped(text, indent, width) if width < WIDTH else text


# Paths and ids stay whole, so that they can be copied: no line is broken inside a word.
def wrapped(text: str, indent: str = "      ", width: int = WIDTH) -> str:
    """Return ``text`` with every line wrapped; continuation lines begin with ``indent``."""
    first, *rest = text.splitlines() or [""]
    fill = partial(
        textwrap.fill,
        width=width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([fill(first), *(fill(line, initial_indent=indent) for line in rest)])
