"""Expected failures: a TOML file in the user's repository lists checks that are known to fail.

The file is strict on purpose: an entry that names no check, one that has expired and one for a
check that passes are errors. So it cannot outlive the faults that it excuses. Format::

    [[expected]]
    check = "routes.position"
    reason = "routes are concatenated on resume"
    issue = "verl#6029"          # optional
    shows = ["too many route rows"]  # optional: kinds of findings, from `kinds` in the JSON report
    since = 2026-11-28           # optional
    expires = 2027-03-01         # optional: from that day on the entry is an error
    subject = "MyStack"          # optional: only this subject (default: every subject)

With ``shows``, a check that finds something of another kind fails all the same: a second fault of
the same check is not excused.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rollproof.core.files import read_toml, write_atomically
from rollproof.errors import ExpectationError
from rollproof.invariants import default_registry
from rollproof.judging.known_failures import KnownFailure

__all__ = ["Expectation", "ExpectedFailures", "Outcome"]

_KEYS = ("check", "reason", "issue", "shows", "since", "expires", "subject")
_EMPTY = re.compile(r"^[ \t]*expected[ \t]*=[ \t]*\[[ \t\n]*\][ \t]*(?=#|$)", re.MULTILINE)
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*expected[ \t]*\]\]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """One entry of the file.

    check: the id of the check that is known to fail.
    reason, issue: why, and where that is tracked.
    shows: the kinds of findings of the known fault; empty: all that the check finds.
    since, expires: when it was accepted, and from when on it is an error.
    subject: the subject that it speaks about; ``None``: all.
    """

    check: str
    reason: str
    issue: str | None = None
    shows: tuple[str, ...] = ()
    since: dt.date | None = None
    expires: dt.date | None = None
    subject: str | None = None

    def covers(self, subject: str) -> bool:
        """Whether the entry speaks about ``subject``."""
        return self.subject in (None, subject)

    @property
    def explanation(self) -> str:
        """The reason, with the issue if there is one."""
        return f"{self.reason} ({self.issue})" if self.issue else self.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run found out about one subject.

    verdicts: by check id, as the JSON report writes them.
    titles: the title of each failing check's first finding.
    known: the reasons of known failures that a check showed.
    otherwise: how many findings of each kind no known failure explains.
    """

    subject: str
    verdicts: Mapping[str, str]
    titles: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    otherwise: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> Self:
        """Read a JSON report."""
        return cls(
            subject=report["subject"],
            verdicts={check["id"]: check["verdict"] for check in report["checks"]},
            titles={
                check["id"]: check["findings"][0]["title"]
                for check in report["checks"]
                if check["findings"]
            },
            known={check["id"]: tuple(check.get("known", ())) for check in report["checks"]},
            otherwise={check["id"]: check.get("otherwise", {}) for check in report["checks"]},
        )

    def fails(self, check_id: str) -> bool:
        """Whether the check failed, expected or not."""
        return self.verdicts.get(check_id) in ("fail", "expected fail")

    def decided(self, check_id: str) -> bool:
        """Whether the run shows if an entry is still needed: an unknown verdict does not."""
        return self.verdicts.get(check_id) in ("fail", "expected fail", "pass", "not applicable")


class ExpectedFailures:
    """The entries of one file, in its order."""

    def __init__(self, path: Path, text: str, entries: tuple[Expectation, ...]) -> None:
        self.path = path
        self.entries = entries
        self._text = text

    @classmethod
    def read(
        cls, path: str | Path, *, missing_ok: bool = False, today: dt.date | None = None
    ) -> ExpectedFailures:
        """Read and check a file; with ``missing_ok`` an absent file counts as an empty one.

        Raises ``ExpectationError`` with every problem of the file.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if missing_ok:
                return cls(path, "", ())
            raise ExpectationError(
                f"There is no file of expected failures at {path}; the accept option writes one"
                " from what fails now."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ExpectationError(f"{path} cannot be read: {error}.") from error
        try:
            data = read_toml(text)
        except ValueError as error:
            raise ExpectationError(f"{path} is not TOML: {error}.") from error
        entries, problems = _entries(data, today or _today())
        if problems:
            raise ExpectationError(f"{path} cannot be used:\n  - " + "\n  - ".join(problems))
        return cls(path, text, tuple(entries))

    def reasons(self, subject: str) -> dict[str, str]:
        """Return check id to reason for one subject: the ``expected`` of ``run_conformance``."""
        return {entry.check: entry.explanation for entry in self.entries if entry.covers(subject)}

    def ways(self, subject: str) -> dict[str, tuple[KnownFailure, ...]]:
        """Check id to how it is known to fail, where the file says so: what ``run_conformance``
        takes as ``ways``.
        """
        return {
            entry.check: (KnownFailure(reason=entry.explanation, kinds=entry.shows),)
            for entry in self.entries
            if entry.covers(subject) and entry.shows
        }

    def stale(self, outcome: Outcome) -> list[str]:
        """Return one sentence per entry that the run shows to be no longer needed."""
        return [
            f"{entry.check} is listed in {self.path} as an expected failure"
            f" ({entry.explanation}), but its verdict is {outcome.verdicts[entry.check]}: remove"
            " the entry, or accept."
            for entry in self.entries
            if entry.covers(outcome.subject)
            and outcome.decided(entry.check)
            and not outcome.fails(entry.check)
        ]

    def accept(self, outcomes: Iterable[Outcome], *, today: dt.date | None = None) -> list[str]:
        """Rewrite the file so that it says what the runs found, and return one sentence per change.

        Entries that still fail and those that no run decided keep their text, comments included.
        Entries that no longer fail are removed, and every new failure is added with a reason for
        the user to replace.

        Raises ``ExpectationError``, and leaves the file as it is, if its text cannot be edited.
        """
        outcomes = list(outcomes)
        blocks = self._blocks()
        per_subject = len(outcomes) > 1 or any(entry.subject for entry in self.entries)
        written, changes = [blocks[0]], []
        said: list[tuple[str, str | None]] = []
        for entry, block in zip(self.entries, blocks[1:], strict=True):
            failing, too_wide = _still_failing(entry, outcomes)
            if not too_wide:
                written.append(block)
                said.append((entry.check, entry.subject))
            elif failing:
                written += [_narrowed(block, name) for name in failing]
                said += [(entry.check, name) for name in failing]
                changes.append(
                    f"narrowed {entry.check} to {', '.join(failing)}: it does not fail elsewhere"
                )
            else:
                changes.append(
                    f"removed {entry.check}: it does not fail any more (its reason was:"
                    f" {entry.explanation})"
                )
        for outcome in outcomes:
            for check_id in outcome.verdicts:
                if outcome.fails(check_id) and check_id not in self.reasons(outcome.subject):
                    said.append((check_id, outcome.subject if per_subject else None))
                    written.append(
                        _block(check_id, outcome, named=per_subject, today=today or _today())
                    )
                    changes.append(
                        f"added {check_id}: replace its reason in {self.path} by the true one"
                    )
        if changes:
            text = _joined(written)
            self._check_edited(text, said, today or _today())
            write_atomically(self.path, text)
        return changes or [f"{self.path} already says what was found"]

    def _blocks(self) -> list[str]:
        """Return the text before the first entry, then each entry with the comments above it."""
        # no tables may follow a list of that name, not even an empty one
        text = self._text if self.entries else _EMPTY.sub("", self._text)
        starts = [match.start() for match in _HEADER.finditer(text)]
        if len(starts) != len(self.entries):
            raise self._uneditable()
        starts = starts[:1] + [_with_comments(text, start) for start in starts[1:]]
        bounds = [0, *starts, len(text)]
        if not starts:
            return [text]
        return [text[begin:end] for begin, end in itertools.pairwise(bounds)]

    def _check_edited(
        self, text: str, said: Sequence[tuple[str, str | None]], today: dt.date
    ) -> None:
        """Raise ``ExpectationError`` if an edited text does not have the entries that it should: it
        is edited as text, so that every comment stays where it is.
        """
        try:
            entries, problems = _entries(read_toml(text), today)
        except ValueError:
            raise self._uneditable() from None
        if problems or said != [(entry.check, entry.subject) for entry in entries]:
            raise self._uneditable()

    def _uneditable(self) -> ExpectationError:
        return ExpectationError(
            f"{self.path} cannot be rewritten: write its entries as [[expected]] tables, each"
            " header on a line of its own, and nothing else."
        )


def _entries(data: Mapping[str, Any], today: dt.date) -> tuple[list[Expectation], list[str]]:
    problems = [
        f"unknown key {key!r}: only [[expected]] tables belong here."
        for key in sorted(set(data) - {"expected"})
    ]
    tables = data.get("expected", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        return [], [*problems, "`expected` must be written as [[expected]] tables."]
    entries: list[Expectation] = []
    for number, table in enumerate(tables, 1):
        entry, wrong = _entry(table, today)
        problems += [
            f"entry {number} ({table.get('check', 'no check named')}): {problem}"
            for problem in wrong
        ]
        if entry is None:
            continue
        if any(
            other.check == entry.check
            and (other.covers(entry.subject or "") or entry.subject is None)
            for other in entries
        ):
            problems.append(f"entry {number} ({entry.check}): listed twice.")
        entries.append(entry)
    return entries, problems


def _entry(table: Mapping[str, Any], today: dt.date) -> tuple[Expectation | None, list[str]]:
    problems = [
        f"unknown key {key!r}; valid keys are {', '.join(_KEYS)}."
        for key in sorted(set(table) - set(_KEYS))
    ]
    problems += [
        f"{key} must be text."
        for key in ("check", "reason", "issue", "subject")
        if not isinstance(table.get(key, ""), str)
    ]
    problems += [
        f"{key} must be a date without quotes, such as 2026-11-28."
        for key in ("since", "expires")
        if key in table and type(table[key]) is not dt.date
    ]
    shows = table.get("shows", ["-"])
    if (
        not isinstance(shows, list)
        or not shows
        or not all(isinstance(kind, str) and kind.strip() for kind in shows)
    ):
        problems.append(
            'shows must be a list of kinds of findings, such as ["too many route rows"]; leave it'
            " out to excuse any."
        )
    problems += [
        f"{key} is missing."
        for key in ("check", "reason")
        if table.get(key) in (None, "") or not str(table.get(key)).strip()
    ]
    if problems:
        return None, problems
    registry = default_registry()
    if table["check"] not in registry.ids:
        import difflib

        near = difflib.get_close_matches(table["check"], registry.ids, n=2)
        advice = f"did you mean {' or '.join(near)}?" if near else "`rollproof checks` lists all."
        return None, [f"no check has this id: {advice}"]
    entry = Expectation(**{**table, "shows": tuple(table.get("shows", ()))})
    if entry.expires is not None and entry.expires <= today:
        problem = f"expired on {entry.expires}: fix the fault, or set a later date."
        return None, [f"{problem} Its reason: {entry.explanation}"]
    return entry, []


def _still_failing(entry: Expectation, outcomes: list[Outcome]) -> tuple[list[str], bool]:
    """Return the subjects in which the entry's check fails, and whether the entry covers too much.

    It does if some run decided that the check does not fail there.
    """
    concerned = [
        outcome
        for outcome in outcomes
        if entry.covers(outcome.subject) and entry.check in outcome.verdicts
    ]
    failing = [outcome.subject for outcome in concerned if outcome.fails(entry.check)]
    passes_somewhere = any(
        outcome.decided(entry.check) and not outcome.fails(entry.check) for outcome in concerned
    )
    undecided = any(not outcome.decided(entry.check) for outcome in concerned)
    return failing, passes_somewhere and not (undecided and not failing)


def _narrowed(block: str, subject: str) -> str:
    """Return the text of an entry, limited to one subject."""
    end = _HEADER.search(block).end()  # type: ignore[union-attr]  # blocks are cut at their headers
    return f"{block[:end]}\nsubject = {_quoted(subject)}{block[end:]}"


def _block(check_id: str, outcome: Outcome, *, named: bool, today: dt.date) -> str:
    lines = [
        "[[expected]]",
        f"check = {_quoted(check_id)}",
        (
            "reason ="
            f" {_quoted('accepted, to be explained: ' + outcome.titles.get(check_id, 'it fails'))}"
        ),
        f"since = {today.isoformat()}",
    ]
    if named:
        lines.append(f"subject = {_quoted(outcome.subject)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    # a lone surrogate is no character that TOML can hold
    text = text.encode("utf-8", "backslashreplace").decode()
    # TOML escapes as JSON does, and does not allow DEL bare either
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _joined(blocks: list[str]) -> str:
    """Join blocks with one empty line between them."""
    return "\n\n".join(text for text in (block.strip("\n") for block in blocks) if text) + "\n"


def _with_comments(text: str, start: int) -> int:
    """Return where the comment lines directly above ``start`` begin."""
    while start > 0:
        above = text.rfind("\n", 0, start - 1) + 1
        if not text[above:start].lstrip().startswith("#"):
            return start
        start = above
    return start


def _today() -> dt.date:
    return dt.datetime.now(tz=dt.UTC).date()
