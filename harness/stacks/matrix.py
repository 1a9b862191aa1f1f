"""Matrix: what each pinned release of a stack is known to do wrong, check by check; whatever else a run says is news.

One TOML file a stack, in ``verdicts/``. Format::

    pinned = ["0.3.0", "0.4.0"]            # the releases that are judged again and again

    [[entry]]
    name = "an abort comes out as a finished sample"
    kind = "fault"                          # or choice (left to the caller, who must know), or open (undecided)
    versions = ["0.3.0", "0.4.0"]
    where = "skyrl/.../remote_inference_client.py:412"   # file and line upstream
    script = "skyrl_abort.py"               # docs/track_record/: the same by hand, without rollproof
    upstream = "SkyRL#1835"                 # optional: issue or pull request
    fails."lifecycle.flags" = ["client"]    # must fail in these parts
    may_fail."stitch.tokens" = ["client"]   # an honest consequence that some schedules show and others do not
    unknown."gap.x" = ["client"]            # cannot be decided, for the reason that `name` gives

A check that fails though no entry names it, one that passes though ``fails`` names it, and one that is unknown though no entry
says so are deviations.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Self

from rollproof.checks import default_registry
from rollproof.errors import ExpectationError, UsageError

__all__ = ["Entry", "Matrix"]

_KINDS = ("fault", "choice", "open")
_TEXTS = ("name", "kind", "where", "script", "upstream")
_TABLES = ("fails", "may_fail", "unknown")
Parts = Mapping[str, tuple[str, ...]]
_FAILED = ("fail", "expected fail")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One known deed of a stack; ``fails``, ``may_fail`` and ``unknown`` map check ids to the parts that it concerns."""

    name: str
    kind: str
    versions: tuple[str, ...]
    where: str = ""
    script: str = ""
    upstream: str = ""
    fails: Parts = field(default_factory=dict)
    may_fail: Parts = field(default_factory=dict)
    unknown: Parts = field(default_factory=dict)

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
        """The matrix that is shipped for ``stack``. Raises ``UsageError`` where there is none, ``ExpectationError`` for a malformed one."""
        file = resources.files("rollproof.stacks") / "verdicts" / f"{stack}.toml"
        if not file.is_file():
            raise UsageError(f"rollproof ships no matrix of known verdicts for {stack}: judge it without --matrix.")
        return cls.parse(stack, file.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, stack: str, text: str) -> Self:
        """From TOML. Raises ``ExpectationError``, listing every problem."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ExpectationError(f"The matrix of {stack} is not TOML: {error}.") from error
        problems = [f"unknown key {key!r}" for key in sorted(set(data) - {"pinned", "entry"})]
        pinned = tuple(data.get("pinned", ()))
        if not pinned or not all(isinstance(version, str) for version in pinned):
            problems.append("pinned must list at least one release, as text")
        tables = data.get("entry", [])
        for table in tables:
            problems += [f"{table.get('name', 'an entry without a name')}: {wrong}" for wrong in _problems(table, pinned)]
        if problems:
            raise ExpectationError(f"The matrix of {stack} cannot be used:\n  - " + "\n  - ".join(problems))
        return cls(stack=stack, pinned=pinned, entries=tuple(_entry(table) for table in tables))

    def known(self, version: str, part: str) -> dict[str, str]:
        """Checks that fail or may fail in ``part`` of ``version``, and why: what a run takes as expected failures."""
        found: dict[str, str] = {}
        for entry in self.entries:
            for checks in (entry.fails, entry.may_fail):
                found.update({check: entry.told for check in _concerning(entry, checks, version, part) if check not in found})
        return found

    def deviations(self, version: str, part: str, verdicts: Mapping[str, str], judged: Collection[str] | None = None) -> list[str]:
        """One sentence for each verdict (in the words of the JSON report) that is not the expected one, of the checks ``judged`` (all)."""
        must, may, undecided = (
            {check for entry in self.entries for check in _concerning(entry, getattr(entry, table), version, part)} for table in _TABLES
        )
        said = []
        for check, verdict in verdicts.items():
            where = f"{self.stack} {version} {part}: {check}"
            if verdict in _FAILED and check not in must | may:
                said.append(f"{where} fails, and no entry of the matrix says why: a new fault, or a false alarm.")
            elif check in must and verdict not in _FAILED:
                said.append(f"{where} is listed as failing ({self.known(version, part)[check]}), but its verdict is {verdict}.")
            elif verdict == "unknown" and check not in undecided:
                said.append(f"{where} is unknown, and no entry of the matrix says why.")
        absent = sorted(must - set(verdicts) if judged is None else must.intersection(judged) - set(verdicts))
        return said + [f"{self.stack} {version} {part}: {check} is listed as failing, but was not judged." for check in absent]


def _concerning(entry: Entry, checks: Parts, version: str, part: str) -> list[str]:
    return [check for check, parts in checks.items() if part in parts] if version in entry.versions else []


def _problems(table: Mapping[str, Any], pinned: tuple[str, ...]) -> list[str]:
    said = [f"unknown key {key!r}" for key in sorted(set(table) - {*_TEXTS, *_TABLES, "versions"})]
    said += [f"{key} is missing" for key in ("name", "kind", "versions") if not table.get(key)]
    said += [f"{key} must be text" for key in _TEXTS if not isinstance(table.get(key, ""), str)]
    if table.get("kind") not in _KINDS:
        said.append(f"kind must be one of {', '.join(_KINDS)}")
    said += [f"version {version} is not pinned" for version in table.get("versions", ()) if version not in pinned]
    named = {check for kind in _TABLES for check in table.get(kind, {})}
    said += [f"no check is named {check}" for check in sorted(named - set(default_registry().ids))]
    if not named:
        said.append(f"no check is named under {', '.join(_TABLES)}")
    if table.get("kind") in ("fault", "choice") and not table.get("script"):
        said.append("a fault or a choice is shown by a script of docs/track_record")
    return said


def _entry(table: Mapping[str, Any]) -> Entry:
    texts: dict[str, Any] = {key: table[key] for key in _TEXTS if key in table}
    checks: dict[str, Any] = {kind: {check: tuple(parts) for check, parts in table.get(kind, {}).items()} for kind in _TABLES}
    return Entry(**texts, versions=tuple(table["versions"]), **checks)
