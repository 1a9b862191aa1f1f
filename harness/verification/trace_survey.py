"""What a trace holds, found in one pass: its findings with their stories, its requests, and where
in the file both are, so that a slice can be read without the rest.

Memory holds what the judge holds, the first finding of each kind, and a bounded number of places.
The survey of a long file is stored in the user's cache: the next look takes no second pass.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from rollproof.core.events.base import Event
from rollproof.core.events.rollout import (
    Admit,
    Call,
    Chunk,
    Observation,
    Reference,
    Reply,
    Result,
    Submit,
)
from rollproof.core.events.training import Score
from rollproof.core.files import replace_file
from rollproof.core.progress import Progress
from rollproof.core.trace import Header, Trace
from rollproof.errors import TraceError, UsageError
from rollproof.invariants import default_registry
from rollproof.judging.judge import Judge, Tally
from rollproof.judging.report import finding_dict
from rollproof.store import TraceReader, TraceSource, open_trace
from rollproof.store.stream import BatchPlace
from rollproof.verification.traces import oracle_of

__all__ = ["Survey", "SurveyedFinding", "TraceFile"]

LONG = 64 << 20
"""Bytes of a file from which on a look at it ends at the first finding, unless it was surveyed."""
_HELD = 96 << 20
"""Bytes of a file that are held at once for a page."""
_DRAWN = 60_000
"""Events that a page draws."""
_FORMAT = 1
"""Of the stored surveys; raised when their fields change."""
_REQUESTS = 200_000
_KINDS = 200
_STORED = 32
"""Surveys in the cache; the oldest are deleted."""
_STORED_FROM = 8 << 20
"""Bytes of a file from which on its survey is stored: a smaller one is surveyed in a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyedFinding:
    """A finding, the first of its kind.

    check: The id of the check.
    finding: The JSON form of the finding (``finding_dict``), with its story.
    episode: The number of its episode in the file, from 0.
    times: How many findings of this kind there are.
    """

    check: str
    finding: dict[str, Any]
    episode: int = 0
    times: int = 1

    @property
    def last(self) -> float:
        """The index of the event at which it was found; infinity for the end of the trace."""
        story = self.finding["story"]
        if not story or story[-1]["index"] < 0:
            return float("inf")
        return max(int(moment["index"]) for moment in story)

    @property
    def first(self) -> int:
        """The index of the first event of its story; 0 if it has none."""
        return min((m["index"] for m in self.finding["story"] if m["index"] >= 0), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlace:
    """Where a request is: from its submission to its result, by the indexes of events."""

    name: str
    episode: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """What a batch of the file holds: events ``low`` to ``high`` of the episodes."""

    offset: int
    number: int
    first_episode: int
    last_episode: int
    low: int
    high: int

    def holds(self, episode: int, low: int, high: int) -> bool:
        """Return whether events ``low`` to ``high`` of an episode may be in it."""
        if not self.first_episode <= episode <= self.last_episode:
            return False
        # indexes begin again in each episode
        return self.first_episode < self.last_episode or (low <= self.high and high >= self.low)


@dataclass(kw_only=True, slots=True)
class Survey:
    """What one pass over a file found.

    events: The events that were read.
    episodes: The episodes.
    requests: The requests.
    findings: One of each kind of each check, in the order in which they arose.
    places: The first requests.
    batches: The batches of an Arrow file.
    complete: Whether the file was read to its end.
    ending: How it ended, if its writer did not close it.
    error: Why it could not be read further.
    """

    events: int = 0
    episodes: int = 0
    requests: int = 0
    findings: list[SurveyedFinding] = field(default_factory=list)
    places: list[RequestPlace] = field(default_factory=list)
    batches: list[_Batch] = field(default_factory=list)
    complete: bool = True
    ending: str = ""
    error: str = ""

    def place_of(self, request_id: str) -> RequestPlace | None:
        """Return where a request is, ``None`` if it is not among the listed ones."""
        return next((place for place in self.places if place.name == request_id), None)


@dataclass(kw_only=True)
class _StoredSurvey:
    """A survey in the cache, and the file that it is of."""

    format: int
    made_by: str
    path: str
    size: int
    changed: int
    survey: Survey


class _Others:
    """Tells events that certainly belong to other requests than one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[int] = set()

    def has(self, event: Event) -> bool:
        """Return whether an event belongs to another request; ask for each event in order."""
        if isinstance(event, Call):
            names = {event.request_id, *event.candidates} - {""}
            if not names or self._name in names:
                return False
            self._calls.add(event.call_id)
            return True
        if isinstance(event, Reply | Admit | Chunk | Reference):
            return event.call_id in self._calls
        if isinstance(event, Submit):
            return event.request.request_id != self._name
        if isinstance(event, Result | Observation | Score):
            return event.request_id != self._name
        return False


class TraceFile:
    """A file with a trace, of which slices are read. Raises as ``open_trace``.

    source: The opened trace.
    size: The bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source: TraceSource = open_trace(path)
        status = path.stat()
        self.size: int = status.st_size
        self._changed = status.st_mtime_ns

    @property
    def header(self) -> Header:
        """The header of the first episode."""
        return self.source.header

    def survey(
        self,
        *,
        complete: bool,
        progress: Callable[[Progress], None] | None = None,
        cache: Path | None = None,
    ) -> Survey:
        """Return the survey of the file: the stored one, or that of a pass over it.

        Args:
            complete: Read the file to its end, however long it is. Otherwise the pass over a long
                file ends after the first finding.
            progress: Called during the pass.
            cache: The folder of stored surveys (default: that of the user).
        """
        folder = _cache_folder() if cache is None else cache
        stored = None if folder is None else self._load(folder)
        if stored is not None:
            return stored
        survey = _Pass(self, stops=not complete and self.size > LONG, progress=progress).run()
        # a file that its writer did not close may grow
        whole = survey.complete and not survey.error and not survey.ending
        if folder is not None and whole and self.size >= _STORED_FROM:
            self._save(folder, survey)
        return survey

    def slice(
        self, survey: Survey, episode: int, low: float, high: float, *, only: str | None = None
    ) -> Trace:
        """Return the header of an episode, and its events from index ``low`` to ``high``.

        ``only`` leaves out what is certainly of other requests than this one: a request may take as
        long as the trace. Raises ``TraceError`` if the file was changed, or has no such episode.
        """
        header = None
        kept: list[Event] = []
        others = None if only is None else _Others(only)
        for row in self._rows_of(survey, episode, low, high):
            if isinstance(row, Header):
                header = row
            # an edited file may have no indexes
            elif (low <= row.index <= high or row.index < 0) and (
                others is None or not others.has(row)
            ):
                kept.append(row)
        if header is None:
            raise TraceError(f"{self.path} has no episode {episode}: it has changed.")
        return Trace(header=header, events=tuple(kept))

    def _rows_of(
        self, survey: Survey, episode: int, low: float, high: float
    ) -> Iterator[Header | Event]:
        reader = self.source
        if not isinstance(reader, TraceReader):
            for number, (header, events) in enumerate(reader.episodes()):
                if number == episode:
                    yield header
                    yield from events
            return
        of_episode = [b for b in survey.batches if b.first_episode <= episode <= b.last_episode]
        bounds = (int(max(low, 0)), int(min(high, 2**62)))
        wanted = [b for b in of_episode if b is of_episode[0] or b.holds(episode, *bounds)]
        places = [BatchPlace(offset=batch.offset, number=batch.number) for batch in wanted]
        for rows in reader.batches_at(places):
            yield from (row for number, row in rows if number == episode)

    def window(
        self, survey: Survey, episode: int, first: float, last: float
    ) -> tuple[float, float]:
        """Return the indexes of the events around ``first`` to ``last`` that fit into memory and on
        a page.
        """
        if survey.events <= _DRAWN and self.size <= _HELD:
            return 0, float("inf")
        batches = [b for b in survey.batches if b.first_episode <= episode <= b.last_episode]
        sizes = {a.offset: b.offset - a.offset for a, b in pairwise(survey.batches)}
        story = [
            i for i, b in enumerate(batches) if b.holds(episode, int(first), int(min(last, 2**62)))
        ]
        if not story:
            return first, first + _DRAWN
        low = high = story[0]
        size, events = 0, 0
        order = chain(
            story, *zip_longest(range(story[0] - 1, -1, -1), range(story[-1] + 1, len(batches)))
        )
        for i in order:
            if i is None:
                continue
            batch = batches[i]
            size += sizes.get(batch.offset, self.size - batch.offset)
            events += max(0, batch.high - batch.low + 1)
            if i != story[0] and (size > _HELD or events > _DRAWN):
                break
            low, high = min(low, i), max(high, i)
        if batches[low].first_episode < batches[low].last_episode:
            return 0, batches[high].high
        return batches[low].low, batches[high].high

    def _load(self, folder: Path) -> Survey | None:
        try:
            stored = msgspec.json.decode(self._stored(folder).read_bytes(), type=_StoredSurvey)
        # whatever is there: a pass over the trace finds it all again
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None
        key = (stored.format, stored.made_by, stored.path, stored.size, stored.changed)
        return stored.survey if key == self._key() else None

    def _save(self, folder: Path, survey: Survey) -> None:
        form, made_by, path, size, changed = self._key()
        stored = _StoredSurvey(
            format=form, made_by=made_by, path=path, size=size, changed=changed, survey=survey
        )
        target = self._stored(folder)
        # without it the next look takes another pass, no more
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(target, msgspec.json.encode(stored))
            surveys = sorted(folder.glob("*.json"), key=lambda file: -file.stat().st_mtime)
            for old in surveys[_STORED:]:
                old.unlink(missing_ok=True)

    def _stored(self, folder: Path) -> Path:
        name = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()
        return folder / f"{name[:32]}.json"

    def _key(self) -> tuple[int, str, str, int, int]:
        try:
            made_by = version("rollproof")
        except PackageNotFoundError:
            made_by = ""
        path = os.fsencode(self.path.resolve()).decode("utf-8", "backslashreplace")
        return (_FORMAT, made_by, path, self.size, self._changed)


def _cache_folder() -> Path | None:
    """Return the folder of stored surveys; ``None`` for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "rollproof" / "traces"
    except RuntimeError:
        return None


class _Pass:
    """One pass over a file."""

    def __init__(
        self, file: TraceFile, *, stops: bool, progress: Callable[[Progress], None] | None
    ) -> None:
        self._file = file
        self._stops = stops
        self._progress = progress
        self._survey = Survey()
        self._registry = default_registry()
        self._judge: Judge | None = None
        self._tally = Tally(self._registry)
        self._open: dict[str, int] = {}
        self._latest = -1
        self._found: dict[tuple[str, str], SurveyedFinding] = {}

    def run(self) -> Survey:
        """Return what the pass found; an error of the file ends it, and is noted."""
        survey, reader = self._survey, self._file.source
        try:
            if isinstance(reader, TraceReader):
                self._read(reader)
            else:
                for header, events in reader.episodes():
                    self._begin(header)
                    for event in events:
                        self._take(event)
            unfinished = reader.ending is not None and not reader.ending.closed
            if unfinished:
                survey.ending = str(reader.ending)
            if survey.complete:
                # the writer of an unfinished file may be at work: what is open does not hang
                self._end(finished=not unfinished)
        except (TraceError, UsageError) as error:
            survey.error = str(error)
            self._end(finished=False)
        order = {check_id: place for place, check_id in enumerate(self._registry.ids)}
        survey.findings = sorted(
            self._found.values(), key=lambda item: (item.episode, item.last, order[item.check])
        )
        return survey

    def _read(self, reader: TraceReader) -> None:
        survey = self._survey
        for place, rows in reader.placed():
            low, high, first = 2**62, -1, max(survey.episodes - 1, 0)
            begins = False
            for number, row in enumerate(rows):
                if isinstance(row, Header):
                    begins = begins or number == 0
                    self._begin(row)
                else:
                    self._take(row)
                    low, high = min(low, row.index), max(high, row.index)
            survey.batches.append(
                _Batch(
                    offset=place.offset,
                    number=place.number,
                    # a batch that begins with a header has nothing of the episode before
                    first_episode=first + 1 if begins and survey.episodes > 1 else first,
                    last_episode=max(survey.episodes - 1, 0),
                    low=low,
                    high=high,
                )
            )
            self._say(place.offset)
            if self._stops and self._tally.found():
                survey.complete = False
                self._end(finished=False)
                return

    def _say(self, done: int) -> None:
        if self._progress is not None:
            what = f"reading {self._file.path} (MB)"
            total = max(1, self._file.size // 1_000_000)
            self._progress(Progress(done=done // 1_000_000, total=total, what=what))

    def _begin(self, header: Header) -> None:
        self._end(finished=True)
        self._survey.episodes += 1
        self._tally = Tally(self._registry)
        self._judge = Judge(header, self._tally, oracle_of(header))
        self._open.clear()
        self._latest = -1

    def _take(self, event: Event) -> None:
        if self._judge is None:
            return
        self._survey.events += 1
        self._latest = max(self._latest, event.index)
        if isinstance(event, Submit):
            self._survey.requests += 1
            self._open[event.request.request_id] = event.index
        elif isinstance(event, Result):
            self._place(event.request_id, event.index)
        self._judge.feed(event)

    def _place(self, name: str, last: int) -> None:
        first = self._open.pop(name, None)
        if first is not None and len(self._survey.places) < _REQUESTS:
            episode = self._survey.episodes - 1
            self._survey.places.append(
                RequestPlace(name=name, episode=episode, first=first, last=last)
            )

    def _end(self, *, finished: bool) -> None:
        """Conclude an episode: its open requests, and its findings."""
        if self._judge is None:
            return
        for name in list(self._open):
            self._place(name, self._latest)
        if finished:
            self._judge.finish()
        self._judge = None
        episode = self._survey.episodes - 1
        for result in self._tally.judgement().results:
            first = {finding.kind: finding for finding in reversed(result.findings)}
            for kind, finding in first.items():
                times = result.kinds.get(kind, 1)
                known = self._found.get((result.id, kind))
                if known is not None:
                    self._found[result.id, kind] = replace(known, times=known.times + times)
                elif len(self._found) < _KINDS:
                    self._found[result.id, kind] = SurveyedFinding(
                        check=result.id, finding=finding_dict(finding), episode=episode, times=times
                    )
