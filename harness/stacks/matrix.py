"""What each pinned release of a stack is known to do wrong, check by check.

One file a stack, ``verdicts.toml`` in its folder. Format::

    pinned = ["0.3.0", "0.4.0"]  # the releases that are judged again and again

    [[entry]]
    name = "an abort comes out as a finished sample"
    # or choice (left to the caller, who must know), or open (undecided)
    kind = "fault"
    versions = ["0.3.0", "0.4.0"]
    where = "skyrl/.../remote_inference_client.py:412"  # file and line upstream
    script = "skyrl_faults.py empty_abort"  # in docs/track_record: the same by hand
    upstream = "SkyRL#1835"  # optional: issue or pull request
    fails."lifecycle.flags" = ["client"]  # must fail in these parts
    # an honest consequence that some schedules show and others do not
    may_fail."stitch.tokens" = ["client"]
    # of each check that fails: the kinds of its findings
    shows."lifecycle.flags" = ["a flag is ignored"]
    shows."stitch.tokens" = ["sampled tokens are missing"]
    # optional: situations, one of which arose in every case that shows it
    after = ["aborts mid-decode"]
    unknown."gap.x" = ["client"]  # cannot be decided, for the reason that `name` gives

Deviations are: a check that fails though no entry names it, one that finds something of another
kind or in another situation than its entries say, one that passes though ``fails`` names it or that
shows nothing of that entry, and one that is unknown though no entry says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollproof.core.files import read_toml
from rollproof.errors import ExpectationError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.known_failures import KnownFailure
from rollproof.judging.situation_names import SITUATIONS
from rollproof.stacks.releases import STACKS, verdicts_file
from rollproof.verification.expected_failures import Outcome

__all__ = ["Entry", "Matrix"]

_KINDS = ("fault", "choice", "open")
_TEXTS = ("name", "kind", "where", "script", "upstream")
_TABLES = ("fails", "may_fail", "unknown")
_CONDITIONS = ("shows", "after")
_UNIQUE_TEXTS = "texts, each of them once"
Parts = Mapping[str, tuple[str, ...]]
"""Names of parts by check id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A known behaviour of a stack.

    Fields:
        name, kind, versions, where, script, upstream: See the format above.
        fails, may_fail, unknown: The parts that it concerns, by check id.
        shows: Kinds of the findings of each check that fails.
        after: Situations; each case that shows the behaviour has one of them, if any is named.
    """

    name: str
    kind: str
    versions: tuple[str, ...]
    where: str = ""
    script: str = ""
    upstream: str = ""
    fails: Parts = field(default_factory=dict)
    may_fail: Parts = field(default_factory=dict)
    unknown: Parts = field(default_factory=dict)
    shows: Parts = field(default_factory=dict)
    after: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """``an abort comes out as a finished sample (fault, SkyRL#1835)``."""
        return f"{self.name} ({', '.join(filter(None, (self.kind, self.upstream or self.where)))})"

    def checks(self, table: str, version: str, part: str) -> list[str]:
        """The checks of ``fails``, ``may_fail`` or ``unknown`` that concern ``part`` of a
        version.
        """
        if version not in self.versions:
            return []
        parts: Parts = getattr(self, table)
        return [check for check, names in parts.items() if part in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The entries of a stack, and its pinned releases."""

    stack: str
    pinned: tuple[str, ...]
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, stack: str) -> Self:
        """The matrix that is shipped for ``stack``.

        Raises:
            UsageError: There is none.
            ExpectationError: It is malformed.
        """
        file = verdicts_file(stack) if stack in STACKS else None
        if file is None or not file.is_file():
            raise UsageError(
                f"rollproof ships no matrix of known verdicts for {stack}: judge it without"
                " --matrix."
            )
        return cls.parse(stack, file.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, stack: str, text: str) -> Self:
        """The matrix in TOML ``text``. Raises ``ExpectationError``, which lists every problem."""
        try:
            data = read_toml(text)
        except ValueError as error:
            raise ExpectationError(f"The matrix of {stack} is not TOML: {error}.") from error
        problems = [f"unknown key {key!r}" for key in sorted(set(data) - {"pinned", "entry"})]
        pinned: Any = data.get("pinned")
        if not _unique_texts(pinned):
            problems.append(f"pinned must list at least one release, as {_UNIQUE_TEXTS}")
        tables = data.get("entry", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            problems.append("entry must be written as [[entry]] tables")
            tables = []
        for table in tables:
            problems += [
                f"{table.get('name') or 'an entry without a name'}: {problem}"
                for problem in _problems(table, pinned)
            ]
        entries = () if problems else tuple(_entry(table) for table in tables)
        problems += _same_reasons(entries)
        if problems:
            raise ExpectationError(
                f"The matrix of {stack} cannot be used:\n  - " + "\n  - ".join(problems)
            )
        return cls(stack=stack, pinned=tuple(pinned), entries=entries)

    def unknown_parts(self, version: str, parts: Collection[str]) -> list[str]:
        """A sentence for each part that entries of ``version`` name, and that is not in ``parts``,
        all that the stack has.
        """
        unknown: dict[str, str] = {}
        for entry in self.entries:
            for table in _TABLES if version in entry.versions else ():
                for part in itertools.chain.from_iterable(getattr(entry, table).values()):
                    if part not in parts:
                        unknown.setdefault(part, entry.reason)
        return [
            f"{self.stack} {version} has no part {part}, which the matrix names ({reason})."
            for part, reason in sorted(unknown.items())
        ]

    def reasons(self, version: str, part: str) -> dict[str, str]:
        """Why checks fail or may fail in ``part`` of ``version``, by check id: the expected
        failures of a run.
        """
        reasons: dict[str, str] = {}
        for entry in self.entries:
            for table in ("fails", "may_fail"):
                for check in entry.checks(table, version, part):
                    reasons.setdefault(check, entry.reason)
        return reasons

    def known_failures(self, version: str, part: str) -> dict[str, tuple[KnownFailure, ...]]:
        """What the findings of the checks of ``reasons`` are expected to be."""
        return {
            check: tuple(
                KnownFailure(reason=entry.reason, kinds=entry.shows[check], after=entry.after)
                for entry in self.entries
                if any(check in entry.checks(table, version, part) for table in _TABLES[:2])
            )
            for check in self.reasons(version, part)
        }

    def deviations(
        self,
        version: str,
        part: str,
        outcome: Outcome,
        judged: Collection[str] | None = None,
        *,
        name: str | None = None,
    ) -> list[str]:
        """A sentence for each verdict that is not the expected one.

        Args:
            version: The release that was judged.
            part: The part of it that was judged.
            outcome: Of a run whose findings were compared with ``known_failures``.
            judged: The checks that were judged; default: all.
            name: What the sentences call the part that was judged; default: the release and part.
        """
        return [
            *self.new_failures(version, part, outcome, name=name),
            *self.absent_failures(version, part, outcome, judged, name=name),
        ]

    def new_failures(
        self, version: str, part: str, outcome: Outcome, *, name: str | None = None
    ) -> list[str]:
        """The deviations that something is wrong which the matrix does not list: for code that is
        not the release itself, in which a listed failure may be repaired. Arguments as for
        ``deviations``.
        """
        title = name or f"{self.stack} {version} {part}"
        fails, may_fail, undecided = (
            self._entries_by_check(table, version, part) for table in _TABLES
        )
        deviations = []
        for check, verdict in outcome.verdicts.items():
            subject, failed = f"{title}: {check}", outcome.fails(check)
            if failed and check not in fails and check not in may_fail:
                deviations.append(
                    f"{subject} fails, and no entry of the matrix says why: a new fault, or a false"
                    " alarm."
                )
            elif failed and outcome.otherwise.get(check):
                kinds = ", ".join(
                    f"{kind!r} ({count})" for kind, count in outcome.otherwise[check].items()
                )
                deviations.append(
                    f"{subject} fails in a way that the matrix does not list: findings of the kind"
                    f" {kinds}."
                )
            elif verdict == "unknown" and check not in undecided and check not in fails:
                deviations.append(f"{subject} is unknown, and no entry of the matrix says why.")
        return deviations

    def absent_failures(
        self,
        version: str,
        part: str,
        outcome: Outcome,
        judged: Collection[str] | None = None,
        *,
        name: str | None = None,
    ) -> list[str]:
        """The deviations that a listed failure did not show. Arguments as for ``deviations``."""
        title = name or f"{self.stack} {version} {part}"
        reasons, deviations = self.reasons(version, part), []
        fails = self._entries_by_check("fails", version, part)
        for check, entries in fails.items():
            subject, verdict = f"{title}: {check}", outcome.verdicts.get(check)
            if verdict is None:
                if judged is None or check in judged:
                    deviations.append(f"{subject} is listed as failing, but was not judged.")
            elif not outcome.fails(check):
                deviations.append(
                    f"{subject} is listed as failing ({reasons[check]}), but its verdict is"
                    f" {verdict}."
                )
            else:
                explained = outcome.known.get(check, ())
                deviations += [
                    f"{subject} fails, but shows nothing of what is listed: {entry.reason}."
                    for entry in entries
                    if entry.reason not in explained
                ]
        return deviations

    def _entries_by_check(self, table: str, version: str, part: str) -> dict[str, list[Entry]]:
        """The entries that name each check in ``table``."""
        by_check: dict[str, list[Entry]] = {}
        for entry in self.entries:
            for check in entry.checks(table, version, part):
                by_check.setdefault(check, []).append(entry)
        return by_check


def _unique_texts(value: object) -> bool:
    """Whether it is a list of texts, at least one, none of them empty or there twice."""
    if not isinstance(value, list) or not value:
        return False
    texts = all(isinstance(text, str) and text.strip() for text in value)
    return texts and len(set(value)) == len(value)


def _problems(table: Mapping[str, Any], pinned: object) -> list[str]:
    """What is wrong with an ``[[entry]]`` table."""
    known_keys = {*_TEXTS, *_TABLES, *_CONDITIONS, "versions"}
    problems = [f"unknown key {key!r}" for key in sorted(set(table) - known_keys)]
    problems += [f"{key} is missing" for key in ("name", "kind", "versions") if not table.get(key)]
    problems += [f"{key} must be text" for key in _TEXTS if not isinstance(table.get(key, ""), str)]
    problems += [
        f"{key} must be a list of {_UNIQUE_TEXTS}; omit it if there is none"
        for key in ("versions", "after")
        if key in table and not _unique_texts(table[key])
    ]
    for key in (*_TABLES, "shows"):
        if not isinstance(table.get(key, {}), dict):
            problems.append(f'{key} must be written as {key}."ID OF A CHECK" = [...]')
            continue
        problems += [
            f"{key}.{check!r} must be a list of {_UNIQUE_TEXTS}"
            for check, names in table.get(key, {}).items()
            if not _unique_texts(names)
        ]
    # Only a table of the right form can be looked at for contradictions.
    return problems or _contradictions(table, pinned if isinstance(pinned, list) else [])


def _contradictions(table: Mapping[str, Any], pinned: list[str]) -> list[str]:
    """What is wrong with the content of a table of the right form."""
    problems = []
    if table["kind"] not in _KINDS:
        problems.append(f"kind must be one of {', '.join(_KINDS)}")
    problems += [
        f"version {version} is not pinned" for version in table["versions"] if version not in pinned
    ]
    checks = {check for key in _TABLES for check in table.get(key, {})}
    problems += [
        f"no check is named {check}" for check in sorted(checks - set(default_registry().ids))
    ]
    if not checks:
        problems.append(f"no check is named under {', '.join(_TABLES)}")
    for first, second in itertools.combinations(_TABLES, 2):
        for check, parts in table.get(first, {}).items():
            problems += [
                f"{check} stands under {first} and under {second} for {part}"
                for part in parts
                if part in table.get(second, {}).get(check, ())
            ]
    failing = {check for key in ("fails", "may_fail") for check in table.get(key, {})}
    shows: Mapping[str, Any] = table.get("shows", {})
    problems += [
        f"shows must list the kinds of findings of {check}"
        for check in sorted(failing - set(shows))
    ]
    problems += [
        f"shows names {check}, which does not fail" for check in sorted(set(shows) - failing)
    ]
    problems += [
        f"after names {name!r}, which no run counts"
        for name in sorted(set(table.get("after", ())) - SITUATIONS)
    ]
    if table["kind"] in ("fault", "choice") and not table.get("script"):
        problems.append("a fault or a choice is shown by a script of docs/track_record")
    return problems


def _same_reasons(entries: Sequence[Entry]) -> list[str]:
    """Entries of a release with the same reason: what one shows would count for the other."""
    counts = Counter((entry.reason, version) for entry in entries for version in entry.versions)
    return [
        f"two entries of {version} have the same reason: {reason}"
        for (reason, version), count in counts.items()
        if count > 1
    ]


def _entry(table: Mapping[str, Any]) -> Entry:
    texts: dict[str, Any] = {key: table[key] for key in _TEXTS if key in table}
    parts: dict[str, Any] = {
        key: {check: tuple(names) for check, names in table.get(key, {}).items()}
        for key in (*_TABLES, "shows")
    }
    return Entry(
        **texts, versions=tuple(table["versions"]), after=tuple(table.get("after", ())), **parts
    )
