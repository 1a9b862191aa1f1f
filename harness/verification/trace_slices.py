"""Slices of a trace that show a finding: small enough to be mailed, and traces by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollproof.core.events.base import Event
from rollproof.core.files import folder_name
from rollproof.core.trace import Trace
from rollproof.errors import RollproofError
from rollproof.invariants import default_registry
from rollproof.judging.judge import Judgement
from rollproof.store import dump_trace
from rollproof.verification.judged_files import FoundPlace
from rollproof.verification.trace_survey import Survey, TraceFile
from rollproof.verification.traces import judge

__all__ = ["Slices", "write_slices"]

_EVENTS = 20_000
"""The most events of a slice that is not of one request."""
_TRIES = 300
"""How many smaller slices are judged to find a minimal one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """The files with slices of a check's findings, by what they show: ``first``, ``worst`` and
    ``minimal``. ``missing`` says why there is none.
    """

    check: str
    files: Mapping[str, str]
    missing: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """The finding that a slice must show: of this check and kind, about this request if any."""

    check: str
    kind: str
    request: str

    def shown_by(self, judgement: Judgement) -> bool:
        result = judgement[self.check]
        if not self.request:
            return self.kind in result.kinds
        return any(
            (finding.kind, finding.where.get("request")) == (self.kind, self.request)
            for finding in result.findings
        )


def write_slices(
    first: Mapping[str, FoundPlace], worst: Mapping[str, FoundPlace], folder: Path
) -> Iterator[Slices]:
    """Write the slices of each failing check, and yield which files they are in.

    The first finding, the request with the most findings, if that is another one, and the smallest
    slice of the first that still shows it and nothing that the trace does not. Takes another pass
    over each file with one of them.

    Args:
        first: Where the first finding of each check is.
        worst: Where the request with most of its findings is.
        folder: Where the slices are written; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    surveys: dict[str, tuple[TraceFile, Survey]] = {}
    for check_id, place in first.items():
        # one survey at a time: files may be many
        if place.path not in surveys:
            surveys = {place.path: _surveyed(place.path)}
        trace, survey = surveys[place.path]
        files: dict[str, str] = {}
        found = _first_slice(trace, survey, check_id, place)
        if found is None:
            missing = "no slice that is small enough to be mailed shows its first finding"
            yield Slices(check=check_id, files={}, missing=missing)
            continue
        target, part = found
        _write(files, folder, check_id, "first", part)
        most = worst.get(check_id)
        if most is not None and most.request != target.request:
            other = _worst_slice(check_id, most)
            if other is not None:
                _write(files, folder, check_id, "worst", other)
        smallest = _minimal(part, target)
        if len(smallest.events) < len(part.events):
            _write(files, folder, check_id, "minimal", smallest)
        yield Slices(check=check_id, files=files)


def _surveyed(path: str) -> tuple[TraceFile, Survey]:
    trace = TraceFile(Path(path))
    return trace, trace.survey(complete=True)


def _write(files: dict[str, str], folder: Path, check_id: str, name: str, part: Trace) -> None:
    path = folder / f"{folder_name(check_id)}-{name}.json"
    dump_trace(part, path)
    files[name] = str(path)


def _first_slice(
    trace: TraceFile, survey: Survey, check_id: str, place: FoundPlace
) -> tuple[_Target, Trace] | None:
    """Return the first finding of a check in an episode, and a slice that shows it."""
    for item in survey.findings:
        if (item.check, item.episode) != (check_id, place.episode):
            continue
        request = item.finding["where"].get("request")
        target = _Target(
            check=check_id,
            kind=item.finding["kind"],
            request=request if isinstance(request, str) else "",
        )
        part = _slice(trace, survey, place.episode, target, item.last)
        if part is not None:
            return target, part
    return None


def _worst_slice(check_id: str, place: FoundPlace) -> Trace | None:
    """Return a slice with the request that has most findings of a check."""
    trace, survey = _surveyed(place.path)
    kinds = [item.finding["kind"] for item in survey.findings if item.check == check_id]
    for kind in kinds:
        target = _Target(check=check_id, kind=kind, request=place.request)
        part = _slice(trace, survey, place.episode, target, float("inf"))
        if part is not None:
            return part
    return None


def _slice(
    trace: TraceFile, survey: Survey, episode: int, target: _Target, last: float
) -> Trace | None:
    """Return a slice that shows a finding: what concerns its request, or all that was before."""
    place = survey.place_of(target.request) if target.request else None
    if place is not None and place.episode == episode:
        # from the start: which weights a server had is told there
        part = trace.slice(survey, episode, 0, place.last, only=target.request)
        if _fits(part, target):
            return part
        last = max(place.last, last) if last != float("inf") else place.last
    if survey.events > _EVENTS:
        low = max(0, (place.first if place is not None else last) - _EVENTS // 2)
        if last == float("inf"):
            return None
    else:
        low = 0
    part = trace.slice(survey, episode, low, last)
    return part if len(part.events) <= _EVENTS and _fits(part, target) else None


def _fits(part: Trace, target: _Target) -> bool:
    return target.shown_by(judge(part))


def _minimal(part: Trace, target: _Target) -> Trace:
    """Return the smallest slice, reached by leaving events out, that shows the finding and fails no
    check that ``part`` passes.
    """
    allowed = set(judge(part).failed)
    registry = default_registry()

    def shows(events: Sequence[Event]) -> bool:
        smaller = Trace(header=part.header, events=tuple(events))
        try:
            judgement = judge(smaller, registry)
        # a trace that lacks some events may contradict itself: that is no finding
        except RollproofError:
            return False
        return allowed.issuperset(judgement.failed) and target.shown_by(judgement)

    return Trace(header=part.header, events=tuple(_reduced(part.events, shows)))


def _reduced(events: Sequence[Event], shows: Callable[[Sequence[Event]], bool]) -> Sequence[Event]:
    """Leave out halves, quarters, ... and single events as long as ``shows`` holds
    (delta debugging: Zeller and Hildebrandt, IEEE TSE 28(2), 2002).
    """
    # tries, not seconds: a slow machine finds the same slice
    tries = _TRIES
    size = max(1, len(events) // 2)
    while tries > 0:
        place, shorter = 0, False
        while place < len(events) and tries > 0:
            candidate = [*events[:place], *events[place + size :]]
            tries -= 1
            if candidate and shows(candidate):
                events, shorter = candidate, True
            else:
                place += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2) if not shorter or size > 1 else 1
    return events
