"""Matrix: what each pinned release of a stack is known to do wrong, check by check; whatever else a
run says is news.

One file a stack, ``verdicts.toml`` in its folder. Format::

    pinned = ["0.3.0", "0.4.0"]            # the releases that are judged again and again

    [[entry]]
    name = "an abort comes out as a finished sample"
    kind = "fault"                          # or choice (left to the caller, who must know), or open (undecided)
    versions = ["0.3.0", "0.4.0"]
    where = "skyrl/.../remote_inference_client.py:412"   # file and line upstream
    script = "skyrl_faults.py empty_abort"  # in docs/track_record: the same by hand
    upstream = "SkyRL#1835"                 # optional: issue or pull request
    fails."lifecycle.flags" = ["client"]    # must fail in these parts
    may_fail."stitch.tokens" = ["client"]   # an honest consequence that some schedules show and others do not
    shows."lifecycle.flags" = ["a flag is ignored"]           # of each that fails: the kinds of its findings
    shows."stitch.tokens" = ["sampled tokens are missing"]
    after = ["aborts mid-decode"]           # optional: situations, one of which arose in every case that shows it
    unknown."gap.x" = ["client"]            # cannot be decided, for the reason that `name` gives

A check that fails though no entry names it, one that finds something of another kind or in another
situation than its entries say, one that passes though ``fails`` names it or shows nothing of that
entry, and one that is unknown though no entry says so are deviations.
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
from rollproof.judging.situations import SITUATIONS
from rollproof.stacks.releases import STACKS, verdicts_file
from rollproof.verification.expected_failures import Outcome

__all__ = ["Entry", "Matrix"]

_KINDS = ("fault", "choice", "open")
_TEXTS = ("name", "kind", "where", "script", "upstream")
_TABLES = ("fails", "may_fail", "unknown")
_WAYS = ("shows", "after")
_TEXTS_ONCE = "texts, each of them once"
Parts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One known deed of a stack; ``fails``, ``may_fail`` and ``unknown`` map check ids to the parts
    that it concerns.

    ``shows`` maps the ids of checks that fail to the kinds of their findings. ``after`` are
    situations: each case that shows the deed has one of them, where there are any.
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
    def told(self) -> str:
        """``an abort comes out as a finished sample (fault, SkyRL#1835)``."""
        return f"{self.name} ({', '.join(filter(None, (self.kind, self.upstream or self.where)))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The entries of one stack, and its pinned releases."""

    stack: str
    pinned: tuple[str, ...]
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, stack: str) -> Self:
        """The matrix that is shipped for ``stack``. Raises ``UsageError`` where there is none,
        ``ExpectationError`` for a malformed one.
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
        """From TOML. Raises ``ExpectationError``, listing every problem."""
        try:
            data = read_toml(text)
        except ValueError as error:
            raise ExpectationError(f"The matrix of {stack} is not TOML: {error}.") from error
        problems = [f"unknown key {key!r}" for key in sorted(set(data) - {"pinned", "entry"})]
        pinned: Any = data.get("pinned")
        if _names_nothing(pinned):
            problems.append(f"pinned must list at least one release, as {_TEXTS_ONCE}")
        tables = data.get("entry", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            problems.append("entry must be written as [[entry]] tables")
            tables = []
        for table in tables:
            problems += [
                f"{table.get('name') or 'an entry without a name'}: {wrong}"
                for wrong in _problems(table, pinned)
            ]
        entries = () if problems else tuple(_entry(table) for table in tables)
        problems += _twice(entries)
        if problems:
            raise ExpectationError(
                f"The matrix of {stack} cannot be used:\n  - " + "\n  - ".join(problems)
            )
        return cls(stack=stack, pinned=tuple(pinned), entries=entries)

    def stray_parts(self, version: str, parts: Collection[str]) -> list[str]:
        """One sentence for each part that entries of ``version`` name, and that is none of
        ``parts``, all that the stack has.
        """
        stray: dict[str, str] = {}
        for entry in self.entries:
            for table in _TABLES if version in entry.versions else ():
                named = (part for listed in getattr(entry, table).values() for part in listed)
                stray.update(
                    {part: entry.told for part in named if part not in parts and part not in stray}
                )
        return [
            f"{self.stack} {version} has no part {part}, which the matrix names ({told})."
            for part, told in sorted(stray.items())
        ]

    def known(self, version: str, part: str) -> dict[str, str]:
        """Checks that fail or may fail in ``part`` of ``version``, and why: what a run takes as
        expected failures.
        """
        found: dict[str, str] = {}
        for entry in self.entries:
            for checks in (entry.fails, entry.may_fail):
                found.update(
                    {
                        check: entry.told
                        for check in _concerning(entry, checks, version, part)
                        if check not in found
                    }
                )
        return found

    def ways(self, version: str, part: str) -> dict[str, tuple[KnownFailure, ...]]:
        """How the checks of ``known`` are known to fail."""
        return {
            check: tuple(
                KnownFailure(reason=entry.told, kinds=entry.shows[check], after=entry.after)
                for entry in self.entries
                if any(
                    check in _concerning(entry, table, version, part)
                    for table in (entry.fails, entry.may_fail)
                )
            )
            for check in self.known(version, part)
        }

    def deviations(
        self, version: str, part: str, outcome: Outcome, judged: Collection[str] | None = None
    ) -> list[str]:
        """One sentence for each verdict of a run held to ``ways`` that is not the expected one, of
        the checks ``judged`` (all).
        """
        fails, may, undecided = (
            {
                check: [
                    entry
                    for entry in self.entries
                    if check in _concerning(entry, getattr(entry, table), version, part)
                ]
                for entry in self.entries
                for check in _concerning(entry, getattr(entry, table), version, part)
            }
            for table in _TABLES
        )
        said = []
        for check, verdict in outcome.verdicts.items():
            where, failed = f"{self.stack} {version} {part}: {check}", outcome.fails(check)
            listed = fails.get(check, [])
            if failed and not listed and check not in may:
                said.append(
                    f"{where} fails, and no entry of the matrix says why: a new fault, or a false"
                    " alarm."
                )
            elif failed and outcome.otherwise.get(check):
                kinds = ", ".join(
                    f"{kind!r} ({count})" for kind, count in outcome.otherwise[check].items()
                )
                said.append(
                    f"{where} fails otherwise than the matrix says, by findings of the kind"
                    f" {kinds}."
                )
            elif listed and not failed:
                said.append(
                    f"{where} is listed as failing ({self.known(version, part)[check]}), but its"
                    f" verdict is {verdict}."
                )
            elif verdict == "unknown" and check not in undecided:
                said.append(f"{where} is unknown, and no entry of the matrix says why.")
            if failed:
                missed = [
                    entry.told for entry in listed if entry.told not in outcome.known.get(check, ())
                ]
                said += [
                    f"{where} fails, but shows nothing of what is listed: {told}."
                    for told in missed
                ]
        absent = sorted(
            set(fails) - set(outcome.verdicts)
            if judged is None
            else set(fails).intersection(judged) - set(outcome.verdicts)
        )
        return said + [
            f"{self.stack} {version} {part}: {check} is listed as failing, but was not judged."
            for check in absent
        ]


def _concerning(entry: Entry, checks: Parts, version: str, part: str) -> list[str]:
    return (
        [check for check, parts in checks.items() if part in parts]
        if version in entry.versions
        else []
    )


def _names_nothing(listed: object) -> bool:
    """Whether it is anything but a list of texts, each of which says something, and none twice."""
    if not isinstance(listed, list) or not listed:
        return True
    return not all(isinstance(text, str) and text.strip() for text in listed) or len(
        set(listed)
    ) < len(listed)


def _problems(table: Mapping[str, Any], pinned: object) -> list[str]:
    said = [
        f"unknown key {key!r}"
        for key in sorted(set(table) - {*_TEXTS, *_TABLES, *_WAYS, "versions"})
    ]
    said += [f"{key} is missing" for key in ("name", "kind", "versions") if not table.get(key)]
    said += [f"{key} must be text" for key in _TEXTS if not isinstance(table.get(key, ""), str)]
    said += [
        f"{key} must be a list of {_TEXTS_ONCE}; leave it out where there is none"
        for key in ("versions", "after")
        if key in table and _names_nothing(table[key])
    ]
    for key in (*_TABLES, "shows"):
        if not isinstance(table.get(key, {}), dict):
            said.append(f'{key} must be written as {key}."ID OF A CHECK" = [...]')
        else:
            lists = table.get(key, {}).items()
            said += [
                f"{key}.{check!r} must be a list of {_TEXTS_ONCE}"
                for check, listed in lists
                if _names_nothing(listed)
            ]
    return said or _contradictions(table, pinned if isinstance(pinned, list) else [])


def _contradictions(table: Mapping[str, Any], pinned: list[str]) -> list[str]:
    """What a table says that is of the right form."""
    said = [] if table["kind"] in _KINDS else [f"kind must be one of {', '.join(_KINDS)}"]
    said += [
        f"version {version} is not pinned" for version in table["versions"] if version not in pinned
    ]
    named = {check for kind in _TABLES for check in table.get(kind, {})}
    said += [f"no check is named {check}" for check in sorted(named - set(default_registry().ids))]
    if not named:
        said.append(f"no check is named under {', '.join(_TABLES)}")
    for one, other in itertools.combinations(_TABLES, 2):
        for check, parts in table.get(one, {}).items():
            both = [part for part in parts if part in table.get(other, {}).get(check, ())]
            said += [f"{check} stands under {one} and under {other} for {part}" for part in both]
    failing = {check for kind in ("fails", "may_fail") for check in table.get(kind, {})}
    shows: Mapping[str, Any] = table.get("shows", {})
    said += [
        f"shows must say of which kinds the findings of {check} are"
        for check in sorted(failing - set(shows))
    ]
    said += [f"shows names {check}, which does not fail" for check in sorted(set(shows) - failing)]
    said += [
        f"after names {name!r}, which no run counts"
        for name in sorted(set(table.get("after", ())) - SITUATIONS)
    ]
    if table["kind"] in ("fault", "choice") and not table.get("script"):
        said.append("a fault or a choice is shown by a script of docs/track_record")
    return said


def _twice(entries: Sequence[Entry]) -> list[str]:
    """Entries of one release that are told alike: what one shows would count for the other."""
    told = Counter((entry.told, version) for entry in entries for version in entry.versions)
    return [
        f"two entries of {version} are told alike: {text}"
        for (text, version), times in told.items()
        if times > 1
    ]


def _entry(table: Mapping[str, Any]) -> Entry:
    texts: dict[str, Any] = {key: table[key] for key in _TEXTS if key in table}
    checks: dict[str, Any] = {
        kind: {check: tuple(listed) for check, listed in table.get(kind, {}).items()}
        for kind in (*_TABLES, "shows")
    }
    return Entry(
        **texts, versions=tuple(table["versions"]), after=tuple(table.get("after", ())), **checks
    )
