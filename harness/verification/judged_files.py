"""Judging of trace files: what a unit of work found, as plain values that another process, or
another machine, can return, and the sum of all units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Result, Submit
from rollproof.core.trace import Header
from rollproof.errors import RollproofError, TraceVersionError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.checks import CheckResult, Verdict
from rollproof.judging.judge import Judge, Tally
from rollproof.judging.registry import Registry
from rollproof.judging.report import Report
from rollproof.judging.situations import ReplaySituationCounter, SituationCounter
from rollproof.store import TraceSource, open_trace
from rollproof.verification.reports import situations_of
from rollproof.verification.traces import oracle_of

__all__ = [
    "COPY",
    "DIED",
    "FilesJudged",
    "FoundPlace",
    "JudgedUnit",
    "UnitJudge",
    "UnitSettings",
    "Unjudged",
    "judge_unit",
    "unsealed_note",
]

COPY = "a copy"
"""Why a file is not judged that has the same bytes as another one."""
DIED = "its process died"
"""Why a file is not judged that ended the process that read it, alone and twice."""
_LISTED = 1000
"""Unjudged files that a report names; it counts all of them."""
_NOTED = 10
_UNFINISHED = (
    "a file is unfinished, so the rest of its run was not seen (--unfinished-ok judges by what"
    " there is)"
)
_STOPPED = "--fail-fast stopped at the first finding, so the rest was not seen"
_SUBJECTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Unjudged:
    """A file that was not judged, or not to its end.

    ``reason`` is one of a few, by which files are counted; ``error`` says more.
    """

    path: str
    reason: str
    error: str

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"path": self.path, "reason": self.reason, "error": self.error}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPlace:
    """Where a finding is: its file, the number of the episode in it, and the request.

    ``count`` are the findings of the check in this request; ``request`` is "" if it is about none.
    """

    path: str
    episode: int
    request: str = ""
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSettings:
    """How each unit is judged.

    only: The checks, by id or family; all without.
    fail_fast: Stop at the first finding.
    name_files: Say in each finding which file it is in.
    """

    only: tuple[str, ...] = ()
    fail_fast: bool = False
    name_files: bool = False

    def registry(self) -> Registry:
        """Return the checks. Raises ``UsageError`` for an id that does not exist."""
        registry = default_registry()
        return registry.select(self.only) if self.only else registry


@dataclass(kw_only=True, slots=True)
class JudgedUnit:
    """What was found in the files of a unit.

    totals: The results of the checks (``Tally.totals``).
    first: Where the first finding of each failing check is.
    worst: Where the request is that has most findings of a check.
    stopped: Whether it ended before the last file, at a finding.
    """

    totals: dict[str, Any] = field(default_factory=dict)
    headers: int = 0
    profile: str = ""
    seed: int = 0
    subjects: list[str] = field(default_factory=list)
    exercised: dict[str, int] = field(default_factory=dict)
    events: int = 0
    files: int = 0
    unfinished: list[str] = field(default_factory=list)
    unsealed: list[str] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    has_samples: bool = False
    first: dict[str, FoundPlace] = field(default_factory=dict)
    worst: dict[str, FoundPlace] = field(default_factory=dict)
    stopped: bool = False


def judge_unit(
    paths: Sequence[str],
    settings: UnitSettings,
    progress: Callable[[int], None] | None = None,
) -> JudgedUnit:
    """Judge files, one after the other, each as far as it can be read.

    The result depends on the bytes of the files alone: whoever judges a unit again, because a
    worker was lost, gets the same.

    Args:
        paths: The files.
        settings: How they are judged.
        progress: Called now and then with the bytes of the current file that were read.
    """
    unit = UnitJudge(settings)
    for path in paths:
        unit.add(path, progress)
        if unit.done.stopped:
            break
    return unit.result()


class UnitJudge:
    """Judges the files of a unit, event by event.

    done: What was found so far; ``result`` completes it.
    """

    def __init__(self, settings: UnitSettings) -> None:
        self._settings = settings
        self._tally = Tally(settings.registry())
        self._exercised: Counter[str] = Counter()
        self._judge: Judge | None = None
        self._situations: SituationCounter | ReplaySituationCounter | None = None
        self._path, self._episode = "", -1
        self._before: dict[str, int] = {}
        self.done: JudgedUnit = JudgedUnit()

    def result(self) -> JudgedUnit:
        """Return what was found."""
        self.done.totals = self._tally.totals()
        self.done.exercised = dict(self._exercised)
        return self.done

    def add(self, path: str, progress: Callable[[int], None] | None) -> None:
        """Judge every episode of a file."""
        self.begin_file(path)
        error = None
        closed = True
        try:
            reader = open_trace(path)
            if not reader.sealed:
                self.done.unsealed.append(path)
            for header, events in reader.episodes():
                self.begin(header)
                self._take_all(events, reader, progress)
                # `ending` is set behind the last episode, the only one that can lack its end
                closed = reader.ending is None or reader.ending.closed
                self.end(finished=closed and not self.done.stopped)
                if self.done.stopped:
                    break
            if not closed:
                self.done.unfinished.append(f"{path}: {reader.ending}")
        except RollproofError as refused:
            error = refused
        self.end_file(error)

    def _take_all(
        self, events: Iterator[Event], reader: TraceSource, progress: Callable[[int], None] | None
    ) -> None:
        for event in events:
            self.take(event)
            if type(event) is Result:
                if progress is not None:
                    progress(reader.offset)
                if self._settings.fail_fast and self.has_found():
                    self.done.stopped = True
                    return

    def begin_file(self, path: str) -> None:
        """Note which file the next episodes are in."""
        self.done.files += 1
        self._path, self._episode = path, -1
        self._before = {name: len(item.findings) for name, item in self._tally.collectors.items()}

    def begin(self, header: Header) -> None:
        """Begin an episode. Raises ``RollproofError`` if its header describes nothing possible."""
        self._episode += 1
        done = self.done
        if not done.headers:
            done.profile, done.seed = header.profile, header.seed
        done.headers += 1
        if header.subject not in done.subjects and len(done.subjects) < _SUBJECTS:
            done.subjects.append(header.subject)
        done.has_samples |= header.about != "rollouts"
        self._judge = Judge(header, self._tally, oracle_of(header))
        self._situations = situations_of(header.about, header)

    def take(self, event: Event) -> None:
        """Take one event of the episode."""
        if self._judge is None or self._situations is None:
            return
        self.done.has_samples |= type(event) is Submit
        self._judge.feed(event)
        self._situations.event(event)
        self.done.events += 1

    def end(self, *, finished: bool) -> None:
        """End an episode. The writer of one that is not ``finished`` was killed, or still runs:
        what it did not write must not count as a hang.
        """
        if self._judge is None or self._situations is None:
            return
        self._exercised.update(self._situations.counts)
        if finished:
            self._judge.finish()
        self._judge = self._situations = None
        self._locate()
        self.done.stopped |= self._settings.fail_fast and self.has_found()

    def end_file(self, error: RollproofError | None = None) -> None:
        """End a file, which could not be read further because of an ``error``."""
        if error is not None:
            reason = _reason(self._path, error)
            self.done.unjudged.append(Unjudged(path=self._path, reason=reason, error=str(error)))
            self.end(finished=False)
        if self._settings.name_files:
            self.name_file()

    def has_found(self) -> bool:
        """Return whether a check has found something."""
        return any(collector.found for collector in self._tally.collectors.values())

    @property
    def tally(self) -> Tally:
        """The results so far."""
        return self._tally

    def _locate(self) -> None:
        """Note where the first findings, and the most, of the checks are."""
        path, episode = self._path, max(self._episode, 0)
        for check_id, collector in self._tally.collectors.items():
            request, count = collector.take_worst()
            if not collector.found:
                continue
            if check_id not in self.done.first:
                self.done.first[check_id] = FoundPlace(path=path, episode=episode)
            worst = self.done.worst.get(check_id)
            if count and (worst is None or count > worst.count):
                self.done.worst[check_id] = FoundPlace(
                    path=path, episode=episode, request=request, count=count
                )

    def name_file(self) -> None:
        """Put the file into the findings that it added."""
        for check_id, collector in self._tally.collectors.items():
            for place in range(self._before.get(check_id, 0), len(collector.findings)):
                finding = collector.findings[place]
                where = {**finding.where, "file": self._path}
                collector.findings[place] = replace(finding, where=where)
            self._before[check_id] = len(collector.findings)


def _reason(path: str, error: RollproofError) -> str:
    if isinstance(error, TraceVersionError):
        return "of a newer rollproof"
    try:
        if not Path(path).stat().st_size:
            return "empty"
    except OSError:
        return "unreadable"
    return "unreadable" if isinstance(error, UsageError) else "damaged, or no trace"


@dataclass(kw_only=True, slots=True)
class FilesJudged:
    """The sum of all units, added in their order. Memory does not grow with the number of files.

    tally: The results of the checks.
    unfinished_ok: Whether checks may pass on what an unfinished file has.
    files: How many files were looked at.
    reasons: How many files were not judged, by reason.
    unjudged: The first of them.
    first: Where the first finding of each failing check is.
    worst: Where the request is that has most findings of a check.
    """

    tally: Tally
    unfinished_ok: bool = False
    files: int = 0
    headers: int = 0
    events: int = 0
    profile: str = ""
    seed: int = 0
    subjects: list[str] = field(default_factory=list)
    exercised: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    unsealed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unjudged: list[Unjudged] = field(default_factory=list)
    has_samples: bool = False
    stopped: bool = False
    first: dict[str, FoundPlace] = field(default_factory=dict)
    worst: dict[str, FoundPlace] = field(default_factory=dict)
    _unfinished: list[str] = field(default_factory=list)
    _unsealed: str = ""

    def add(self, unit: JudgedUnit) -> None:
        """Add what a unit found."""
        if unit.headers and not self.headers:
            self.profile, self.seed = unit.profile, unit.seed
        self.tally.add_totals(unit.totals)
        self.headers += unit.headers
        self.events += unit.events
        self.files += unit.files
        new = (name for name in unit.subjects if name not in self.subjects)
        self.subjects += islice(new, max(0, _SUBJECTS - len(self.subjects)))
        self.exercised.update(unit.exercised)
        self.unfinished += len(unit.unfinished)
        self._unfinished += unit.unfinished[: max(0, _NOTED - len(self._unfinished))]
        self.unsealed += len(unit.unsealed)
        self._unsealed = self._unsealed or next(iter(unit.unsealed), "")
        for item in unit.unjudged:
            self.leave_out(item)
        self.has_samples |= unit.has_samples
        self.stopped |= unit.stopped
        for check_id, place in unit.first.items():
            self.first.setdefault(check_id, place)
        for check_id, place in unit.worst.items():
            worst = self.worst.get(check_id)
            if worst is None or place.count > worst.count:
                self.worst[check_id] = place

    def leave_out(self, item: Unjudged) -> None:
        """Count a file that was not judged."""
        self.reasons[item.reason] += 1
        if len(self.unjudged) < _LISTED:
            self.unjudged.append(item)

    def report(self, notes: Sequence[str] = ()) -> Report:
        """Return the verdicts over all files, with more ``notes``."""
        results = self.tally.judgement().results
        if self.unfinished and not self.unfinished_ok:
            results = tuple(_of_a_part(result, _UNFINISHED) for result in results)
        if self.stopped:
            results = tuple(_of_a_part(result, _STOPPED) for result in results)
        return Report(
            subject=", ".join(self.subjects),
            profile=self.profile,
            seed=self.seed,
            results=results,
            exercised=dict(sorted(self.exercised.items())),
            cases=self.headers,
            notes=(*self._notes(), *notes),
        )

    def inputs(self) -> dict[str, Any]:
        """Return what of the input was judged, for the JSON report."""
        return {
            "files": self.files,
            "events": self.events,
            "unfinished": self.unfinished,
            "stopped": self.stopped,
            "unjudged": dict(self.reasons),
            "listed": [item.to_dict() for item in self.unjudged],
        }

    def _notes(self) -> Iterator[str]:
        yield from self._unfinished
        if self.unfinished > len(self._unfinished):
            yield f"{self.unfinished - len(self._unfinished):,} more files are unfinished"
        if self.unsealed:
            yield unsealed_note(self._unsealed, self.unsealed - 1)
        if self.stopped:
            yield "stopped at the first finding (--fail-fast): nothing behind it was judged"


def _of_a_part(result: CheckResult, reason: str) -> CheckResult:
    """Return the result of a check that saw a part of a run: what it did not see may fail."""
    if result.verdict is not Verdict.PASS:
        return result
    return replace(result, verdict=Verdict.UNKNOWN, reason=reason)


def unsealed_note(path: str, others: int = 0) -> str:
    """Return what to say of files without a checksum: once, however many there are."""
    more = f" and {others:,} more" if others else ""
    return (
        f"{path}{more}: no checksum, so damage would not be noticed; `rollproof seal FILE` adds one"
    )
