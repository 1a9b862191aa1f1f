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
    after = ["aborts mid-decode"]  # optional, with `shows`: situations, one of which each case has
    strict = false               # optional: the check may also pass, as in pytest's xfail
    verdict = "unknown"          # optional: the check cannot be decided (default: it fails)

With ``shows``, a check that finds something of another kind fails all the same: a second fault of
the same check is not excused. One check may have several entries with ``shows``, an entry a fault;
one whose fault does not show is an error although the check still fails.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rollproof.core.files import is_special, locked, read_toml, write_atomically
from rollproof.errors import ExpectationError
from rollproof.invariants import default_registry
from rollproof.judging.known_failures import KnownFailure
from rollproof.judging.situation_names import SITUATIONS

__all__ = ["Expectation", "ExpectedFailures", "Outcome"]

_KEYS = (
    "check",
    "reason",
    "issue",
    "shows",
    "since",
    "expires",
    "subject",
    "after",
    "strict",
    "verdict",
)
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
    after: situations, one of which occurred in every case that shows the fault; empty: any case.
    strict: whether it is an error if the check does not fail.
    undecided: the check is known to be unknown, not to fail.
    """

    check: str
    reason: str
    issue: str | None = None
    shows: tuple[str, ...] = ()
    since: dt.date | None = None
    expires: dt.date | None = None
    subject: str | None = None
    after: tuple[str, ...] = ()
    strict: bool = True
    undecided: bool = False

    def covers(self, subject: str) -> bool:
        """Whether the entry speaks about ``subject``."""
        return self.subject in (None, subject)

    @property
    def explanation(self) -> str:
        """The reason, with the issue if there is one."""
        return f"{self.reason} ({self.issue})" if self.issue else self.reason

    def toml(self) -> str:
        """Return the text of the entry."""
        fields: dict[str, str | dt.date | bool | list[str] | None] = {
            "check": self.check,
            "reason": self.reason,
            "issue": self.issue,
            "since": self.since,
            "expires": self.expires,
            "subject": self.subject,
            "shows": list(self.shows) or None,
            "after": list(self.after) or None,
            "strict": None if self.strict else False,
            "verdict": "unknown" if self.undecided else None,
        }
        lines = [f"{key} = {_value(value)}" for key, value in fields.items() if value is not None]
        return "\n".join(["[[expected]]", *lines])

    def complaint(self, verdict: str, shown: Collection[str]) -> str | None:
        """Return why a run shows the entry to be no longer needed; ``None`` if it does not.

        Args:
            verdict: That of its check, as the JSON report writes it.
            shown: The known failures that the check showed, by their explanation.
        """
        if not self.strict:
            return None
        if self.undecided:
            return None if verdict == "unknown" else f"its verdict is {verdict}"
        if verdict in ("fail", "expected fail"):
            # Without any known failure the check fails in a new way, which is reported as such.
            hidden = self.shows and shown and self.explanation not in shown
            return "the check fails without showing it" if hidden else None
        return None if verdict == "unknown" else f"its verdict is {verdict}"


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

    def complaint(self, entry: Expectation) -> str | None:
        """Return why the run shows an entry to be no longer needed, if it does."""
        verdict = self.verdicts.get(entry.check)
        if verdict is None or not entry.covers(self.subject):
            return None
        return entry.complaint(verdict, self.known.get(entry.check, ()))


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

    @classmethod
    def joined(cls, files: Iterable[ExpectedFailures]) -> ExpectedFailures:
        """Return the entries of several files, to look them up and not to rewrite them."""
        entries = tuple(entry for file in files for entry in file.entries)
        return cls(Path(), "", entries)

    def reasons(self, subject: str) -> dict[str, str]:
        """Return check id to reason for one subject: the ``expected`` of ``run_conformance``."""
        reasons: dict[str, str] = {}
        for entry in self.covering(subject):
            if not entry.undecided:
                earlier = reasons.get(entry.check)
                reasons[entry.check] = (
                    entry.explanation if earlier is None else f"{earlier}; {entry.explanation}"
                )
        return reasons

    def covering(self, subject: str) -> tuple[Expectation, ...]:
        """Return the entries that speak about one subject."""
        return tuple(entry for entry in self.entries if entry.covers(subject))

    def undecided(self, subject: str) -> dict[str, str]:
        """Return check id to reason of the checks that are known to be unknown."""
        return {
            entry.check: entry.explanation for entry in self.covering(subject) if entry.undecided
        }

    def ways(self, subject: str) -> dict[str, tuple[KnownFailure, ...]]:
        """Check id to how it is known to fail, where the file says so: what ``run_conformance``
        takes as ``ways``.
        """
        ways: dict[str, tuple[KnownFailure, ...]] = {}
        for entry in self.covering(subject):
            if entry.shows:
                failure = KnownFailure(
                    reason=entry.explanation, kinds=entry.shows, after=entry.after
                )
                ways[entry.check] = (*ways.get(entry.check, ()), failure)
        return ways

    def stale(self, outcome: Outcome) -> list[str]:
        """Return one sentence per entry that the run shows to be no longer needed."""
        return [
            f"{entry.check} is listed in {self.path} as"
            f" {'undecided' if entry.undecided else 'an expected failure'} ({entry.explanation}),"
            f" but {complaint}: remove the entry, or accept."
            for entry in self.entries
            if (complaint := outcome.complaint(entry)) is not None
        ]

    def accept(self, outcomes: Iterable[Outcome], *, today: dt.date | None = None) -> list[str]:
        """Rewrite the file so that it says what the runs found, and return one sentence per change.

        Entries that still fail and those that no run decided keep their text, comments included.
        Entries that no longer fail are removed, and every new failure is added with a reason for
        the user to replace. So is what another run, or a person, wrote into the file since it was
        read.

        Raises ``ExpectationError``, and leaves the file as it is, if its text cannot be edited.
        """
        with locked(self.path):
            # what came through a pipe cannot be read again
            now = (
                self
                if is_special(self.path)
                else self.read(self.path, missing_ok=True, today=today)
            )
            # a run says nothing of entries that it did not know
            return now._accept([*outcomes], known=self.entries, today=today or _today())

    def _accept(
        self, outcomes: list[Outcome], *, known: Sequence[Expectation], today: dt.date
    ) -> list[str]:
        blocks = self._blocks()
        per_subject = len(outcomes) > 1 or any(entry.subject for entry in self.entries)
        written, changes = [blocks[0]], []
        said: list[tuple[str, str | None]] = []
        for entry, block in zip(self.entries, blocks[1:], strict=True):
            failing, too_wide = _still_failing(entry, outcomes)
            if not too_wide or entry not in known:
                written.append(block)
                said.append((entry.check, entry.subject))
            elif failing:
                written += [_narrowed(block, name) for name in failing]
                said += [(entry.check, name) for name in failing]
                changes.append(
                    f"narrowed {entry.check} to {', '.join(failing)}: it does not fail elsewhere"
                )
            else:
                fails = any(outcome.fails(entry.check) for outcome in outcomes)
                news = "does not show this any more" if fails else "does not fail any more"
                news = "is decided now" if entry.undecided else news
                changes.append(
                    f"removed {entry.check}: it {news} (its reason was: {entry.explanation})"
                )
        for outcome in outcomes:
            for check_id in outcome.verdicts:
                if outcome.fails(check_id) and check_id not in self.reasons(outcome.subject):
                    said.append((check_id, outcome.subject if per_subject else None))
                    written.append(_block(check_id, outcome, named=per_subject, today=today))
                    changes.append(
                        f"added {check_id}: replace its reason in {self.path} by the true one"
                    )
        if changes:
            text = _joined(written)
            self._check_edited(text, said, today)
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
        if any(_twice(entry, other) for other in entries):
            problems.append(
                f"entry {number} ({entry.check}): listed twice. Several entries of a check need"
                " `shows` and reasons of their own."
            )
        entries.append(entry)
    return entries, problems


def _twice(entry: Expectation, other: Expectation) -> bool:
    """Whether two entries say the same, or contradict each other."""
    if entry.check != other.check or not (
        other.covers(entry.subject or "") or entry.subject is None
    ):
        return False
    # What a check shows of its entries is reported by their explanations.
    distinct = entry.explanation != other.explanation
    return not (entry.shows and other.shows and distinct)


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
    problems += _wrong_conditions(table)
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
    fields: dict[str, Any] = {key: value for key, value in table.items() if key != "verdict"}
    fields |= {key: tuple(table.get(key, ())) for key in ("shows", "after")}
    entry = Expectation(**fields, undecided=table.get("verdict") == "unknown")
    if entry.expires is not None and entry.expires <= today:
        problem = f"expired on {entry.expires}: fix the fault, or set a later date."
        return None, [f"{problem} Its reason: {entry.explanation}"]
    return entry, []


def _wrong_conditions(table: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the keys that say when an entry counts."""
    problems = []
    after = table.get("after")
    if "after" in table and (
        not isinstance(after, list) or not after or not {*map(str, after)} <= SITUATIONS
    ):
        problems.append("after must be a list of situations, as docs/situations.md has them.")
    if "after" in table and "shows" not in table:
        problems.append("after needs shows: it says when those findings are expected.")
    if not isinstance(table.get("strict", True), bool):
        problems.append("strict must be true or false.")
    if table.get("verdict", "unknown") != "unknown":
        problems.append('verdict can only be "unknown"; leave it out for a check that fails.')
    elif "verdict" in table and "shows" in table:
        problems.append("shows is for checks that fail: a check that is unknown finds nothing.")
    return problems


def _still_failing(entry: Expectation, outcomes: list[Outcome]) -> tuple[list[str], bool]:
    """Return the subjects in which the entry is still true, and whether it covers too much.

    It does if some run decided that it is not true there.
    """
    concerned = [
        outcome
        for outcome in outcomes
        if entry.covers(outcome.subject) and entry.check in outcome.verdicts
    ]
    untrue = [outcome for outcome in concerned if outcome.complaint(entry) is not None]
    passes_somewhere = bool(untrue)
    failing = [
        outcome.subject
        for outcome in concerned
        if outcome not in untrue and outcome.fails(entry.check) != entry.undecided
    ]
    undecided = not entry.undecided and any(
        not outcome.decided(entry.check) for outcome in concerned
    )
    return failing, passes_somewhere and not (undecided and not failing)


def _narrowed(block: str, subject: str) -> str:
    """Return the text of an entry, limited to one subject."""
    end = _HEADER.search(block).end()  # type: ignore[union-attr]  # blocks are cut at their headers
    return f"{block[:end]}\nsubject = {_quoted(subject)}{block[end:]}"


def _block(check_id: str, outcome: Outcome, *, named: bool, today: dt.date) -> str:
    entry = Expectation(
        check=check_id,
        reason=f"accepted, to be explained: {outcome.titles.get(check_id, 'it fails')}",
        since=today,
        subject=outcome.subject if named else None,
    )
    return entry.toml()


def _value(value: str | dt.date | bool | list[str]) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    return _quoted(value)


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
