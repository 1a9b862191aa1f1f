"""What changed from one release to the next, and since when each fault is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from rollproof.reporting.results.stored_runs import StoredRun

__all__ = ["Change", "Fault", "Releases", "changes_of", "faults_of", "releases_by_name"]

Releases = Mapping[tuple[str, str], Sequence[StoredRun]]
"""The newest run of each release, in the order of the releases, by what was judged and its name."""
_FAILS = ("fail", "expected fail")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A verdict that is another one than that of the release before.

    name: What was judged.
    older: The release before.
    newer: The release.
    date: Day of the newer release's run.
    part: The part.
    check: Id of the check.
    before: Its verdict in the older release; ``None`` if that has no such part or check.
    after: Its verdict in the newer release; ``None`` likewise.
    """

    name: str
    older: str
    newer: str
    date: str
    part: str
    check: str
    before: str | None
    after: str | None

    @property
    def text(self) -> str:
        """The change in words."""
        where = f"{self.name} {self.newer}, {self.part}: {self.check}"
        before, after = _plain(self.before), _plain(self.after)
        if after is None:
            return f"{where} is not judged any more (was {before} in {self.older})"
        if before is None:
            return f"{where} is {after}, and was not judged in {self.older}"
        return f"{where} was {before} in {self.older}, and is {after}"

    @property
    def is_worse(self) -> bool:
        """Whether the newer release fails what the older one did not."""
        return _plain(self.after) == "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A check that fails in the newest release of something.

    results: What was judged: ``stack``, ``engine`` or ``subject``.
    name: Its name.
    part: The part.
    check: Id of the check.
    title: The title of its first finding.
    since: The oldest of the releases in a row, up to the newest, that fail it.
    releases: How many these are.
    judged: How many releases are stored.
    """

    results: str
    name: str
    part: str
    check: str
    title: str
    since: str
    releases: int
    judged: int


def releases_by_name(runs: Iterable[StoredRun]) -> Releases:
    """Return the newest run of each release.

    Releases are ordered by their version numbers; where one has none, as a commit, by the day on
    which they were judged.
    """
    newest: dict[tuple[str, str], dict[str, StoredRun]] = {}
    # oldest first: a release that was judged again is left with its newest run
    for run in sorted(runs, key=lambda run: run.date):
        newest.setdefault((run.results, run.name), {})[run.version] = run
    return {name: _in_order(list(found.values())) for name, found in sorted(newest.items())}


def _in_order(runs: list[StoredRun]) -> list[StoredRun]:
    try:
        # as text 0.10 would come before 0.9; a commit among them has no place, and then days decide
        return sorted(runs, key=lambda run: Version(run.version))
    except InvalidVersion:
        return sorted(runs, key=lambda run: (run.date, run.version))


def changes_of(releases: Releases) -> list[Change]:
    """Return the changes between stored releases, the newest first.

    A part that only one of two releases has is no change of its checks: releases gain and lose
    parts. Of a part of both, a check that only one of them ran is one, unless it does not apply.
    """
    changes = [
        change
        for runs in releases.values()
        for older, newer in itertools.pairwise(runs)
        for change in _between(older, newer)
    ]
    return sorted(changes, key=lambda change: change.date, reverse=True)


def _between(older: StoredRun, newer: StoredRun) -> Iterator[Change]:
    for part, after in newer.parts.items():
        before = older.parts.get(part)
        if before is None:
            continue
        # a check that is gone counts: else a promise could go unjudged, and nobody would notice
        for check in dict.fromkeys([*before.checks, *after.checks]):
            old, new = (
                found.checks[check].verdict if check in found.checks else None
                for found in (before, after)
            )
            if _plain(old) != _plain(new):
                yield Change(
                    name=newer.name,
                    older=older.version,
                    newer=newer.version,
                    date=newer.date,
                    part=part,
                    check=check,
                    before=old,
                    after=new,
                )


def _plain(verdict: str | None) -> str | None:
    """Return a verdict without what was expected of it; a check that does not apply is as none."""
    return {"expected fail": "fail", "not applicable": None}.get(verdict or "", verdict)


def faults_of(releases: Releases) -> list[Fault]:
    """Return what fails in the newest release of each, the oldest faults first."""
    faults = []
    for (results, name), runs in releases.items():
        for part, judged in runs[-1].parts.items():
            for check, stored in judged.checks.items():
                if stored.verdict not in _FAILS:
                    continue
                failing = _failing_in_a_row(runs, part, check)
                faults.append(
                    Fault(
                        results=results,
                        name=name,
                        part=part,
                        check=check,
                        title=stored.findings[0].title if stored.findings else stored.reason,
                        since=failing[-1].version,
                        releases=len(failing),
                        judged=len(runs),
                    )
                )
    return sorted(faults, key=lambda fault: (-fault.releases, fault.name, fault.part, fault.check))


def _failing_in_a_row(runs: Sequence[StoredRun], part: str, check: str) -> list[StoredRun]:
    """Return the releases that fail a check, from the newest back to the first that does not."""
    failing: list[StoredRun] = []
    for run in reversed(runs):
        found = run.parts.get(part)
        # a release that did not judge it says nothing: no fault is dated back across such a gap
        if found is None or check not in found.checks:
            break
        if found.checks[check].verdict not in _FAILS:
            break
        failing.append(run)
    return failing
