"""Judging of traces while they are written: what is new is judged at each look, and what was found
since the last look is an alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollproof.core.trace import Header
from rollproof.errors import RollproofError
from rollproof.judging.checks import Finding
from rollproof.store import GrowingTrace
from rollproof.verification.judged_files import FilesJudged, UnitJudge, UnitSettings
from rollproof.verification.trace_files import ENDINGS, walk

__all__ = ["Alarm", "FollowedTraces", "Snapshot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Something that was found.

    path: The file that it is in.
    check: The id of the check; "" if the file cannot be read further.
    finding: The finding; ``None`` for findings that are only counted, since their kind is known.
    count: How many findings.
    error: Why the file cannot be read further.
    """

    path: str
    check: str = ""
    finding: Finding | None = None
    count: int = 1
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run that is followed, in numbers.

    findings: The findings by check, with those that have none.
    unjudged: Files that could not be read further, by reason.
    open: Files whose writers are at work.
    """

    findings: dict[str, int] = field(default_factory=dict)
    unjudged: dict[str, int] = field(default_factory=dict)
    events: int = 0
    open: int = 0
    closed: int = 0


class _File:
    """A file that is followed: its reader and its judge."""

    def __init__(self, path: str, settings: UnitSettings) -> None:
        self.path = path
        self.trace = GrowingTrace(path)
        self.judge = UnitJudge(settings)
        self.judge.begin_file(path)
        self._told: dict[str, tuple[int, int]] = {}

    def look(self, *, fail_fast: bool) -> None:
        """Judge what is new."""
        for row in self.trace.news():
            if isinstance(row, Header):
                self.judge.end(finished=True)
                self.judge.begin(row)
            else:
                self.judge.take(row)
                if fail_fast and self.judge.has_found():
                    self.judge.done.stopped = True
                    return

    def end(self, error: RollproofError | None = None) -> None:
        """End the file as it is now."""
        if error is None:
            if not self.judge.done.stopped:
                self.judge.end(finished=self.trace.closed)
            else:
                self.judge.end(finished=False)
            if not self.trace.closed and not self.judge.done.stopped:
                text = self.trace.ending or "nothing could be read yet: its writer is at work."
                self.judge.done.unfinished.append(f"{self.path}: {text}")
        self.judge.end_file(error)

    def alarms(self) -> Iterator[Alarm]:
        """Yield what was found since the last call."""
        for check_id, collector in self.judge.tally.collectors.items():
            stored, found = self._told.get(check_id, (0, 0))
            if collector.found == found:
                continue
            new = collector.findings[stored:]
            self._told[check_id] = (len(collector.findings), collector.found)
            for finding in new:
                yield Alarm(path=self.path, check=check_id, finding=finding)
            more = collector.found - found - len(new)
            if more:
                yield Alarm(path=self.path, check=check_id, count=more)


class FollowedTraces:
    """Files and folders whose traces are judged while they are written.

    A file that its writer closed, or that cannot be read further, is summed up and let go: memory
    does not grow with their number.

    Args:
        paths: Files, and folders in which files appear.
        settings: How they are judged.
        judged: Gets the sum.
    """

    def __init__(self, paths: Sequence[Path], settings: UnitSettings, judged: FilesJudged) -> None:
        self._paths = paths
        self._settings = settings
        self._judged = judged
        self._files: dict[str, _File] = {}
        self._ended: set[str] = set()

    @property
    def ended(self) -> bool:
        """Whether nothing will follow: no folder is followed, and the writers of all files closed
        them. With ``fail_fast`` also at the first finding.
        """
        if self._judged.stopped:
            return True
        return not self._files and not any(path.is_dir() for path in self._paths)

    def look(self) -> list[Alarm]:
        """Judge what is new in all files, and return what was found."""
        alarms: list[Alarm] = []
        for path in self._found():
            if path not in self._files and path not in self._ended:
                self._files[path] = _File(path, self._settings)
        for file in list(self._files.values()):
            error = None
            try:
                file.look(fail_fast=self._settings.fail_fast)
            except RollproofError as refused:
                error = refused
            if error is not None or file.trace.closed or file.judge.done.stopped:
                self._end(file, error)
            alarms += file.alarms()
            if error is not None:
                alarms.append(Alarm(path=file.path, error=str(error)))
            if self._judged.stopped:
                break
        return alarms

    def finish(self) -> list[Alarm]:
        """End the files whose writers are still at work, as far as they were read."""
        alarms: list[Alarm] = []
        for file in list(self._files.values()):
            self._end(file)
            alarms += file.alarms()
        return alarms

    def snapshot(self) -> Snapshot:
        """Return the state in numbers."""
        findings: dict[str, int] = {}
        tallies = [self._judged.tally, *(file.judge.tally for file in self._files.values())]
        for tally in tallies:
            for check_id, collector in tally.collectors.items():
                findings[check_id] = findings.get(check_id, 0) + collector.found
        opened = [file.judge.done for file in self._files.values()]
        return Snapshot(
            findings=findings,
            unjudged=dict(self._judged.reasons),
            events=self._judged.events + sum(done.events for done in opened),
            open=len(self._files),
            closed=self._judged.files,
        )

    def _end(self, file: _File, error: RollproofError | None = None) -> None:
        del self._files[file.path]
        self._ended.add(file.path)
        file.end(error)
        self._judged.add(file.judge.result())

    def _found(self) -> Iterator[str]:
        for path in self._paths:
            if path.is_dir():
                yield from (name for name in walk(path) if name.endswith(ENDINGS))
            else:
                yield str(path)
