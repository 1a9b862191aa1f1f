"""What differs between two traces or two reports, and where it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rollproof.core.checksums import fits
from rollproof.core.error_text import show
from rollproof.core.events.base import Event
from rollproof.core.events.rollout import Call, Submit
from rollproof.core.json_codec import parse_json
from rollproof.core.trace import Header
from rollproof.errors import RollproofError, TraceError, UsageError
from rollproof.judging.judge import Tally
from rollproof.judging.report import moment_dict
from rollproof.store import open_trace
from rollproof.store.codec import encode_event
from rollproof.verification.judged_files import FilesJudged, UnitSettings, judge_unit
from rollproof.verification.request_views import tell_request
from rollproof.verification.trace_survey import TraceFile

__all__ = ["Change", "Difference", "EventDifference", "Side", "differences", "read_side"]

_MAX_REPORT = 256 << 20
_CALLS = 100_000
"""Calls of which the request is remembered, to name that of the event that differs."""
_FIELDS = 8
_LONGEST = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two: its report, and its file if that is a trace."""

    path: Path
    report: Mapping[str, Any]
    is_trace: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that has a name on both sides, and another value on each; ``reason`` says more."""

    name: str
    before: Any
    after: Any
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        out = {"name": self.name, "before": self.before, "after": self.after}
        return {**out, "why": self.reason} if self.reason else out


@dataclass(frozen=True, kw_only=True, slots=True)
class EventDifference:
    """The first event that differs.

    episode: The number of its episode, from 0.
    number: Its place in the episode, from 0; -1 for the header.
    kinds: What is there on each side, "" for nothing.
    fields: What differs in it.
    request: The request that it is about; "" if it is about none.
    stories: What happened to that request on each side, as moments in JSON form.
    """

    episode: int
    number: int
    kinds: tuple[str, str]
    fields: tuple[Change, ...] = ()
    request: str = ""
    stories: tuple[list[dict[str, Any]], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "episode": self.episode,
            "number": self.number,
            "before": self.kinds[0],
            "after": self.kinds[1],
            "fields": [change.to_dict() for change in self.fields],
            "request": self.request,
            "stories": [list(story) for story in self.stories],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What differs: verdicts, findings by kind, situations, fields of the contract, and the first
    event, if both are traces.
    """

    verdicts: list[Change] = field(default_factory=list)
    kinds: list[Change] = field(default_factory=list)
    situations: list[Change] = field(default_factory=list)
    contract: list[Change] = field(default_factory=list)
    event: EventDifference | None = None

    @property
    def alike(self) -> bool:
        """Whether nothing differs."""
        parts = (self.verdicts, self.kinds, self.situations, self.contract)
        return not any(parts) and self.event is None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = ("verdicts", "kinds", "situations", "contract")
        return {
            "alike": self.alike,
            **{name: [change.to_dict() for change in getattr(self, name)] for name in names},
            "event": None if self.event is None else self.event.to_dict(),
        }


def read_side(path: Path, only: tuple[str, ...] = ()) -> Side:
    """Read a report, or judge a trace.

    Raises:
        UsageError: There is no file.
        TraceError: It is neither, or is damaged: what differs behind the damage is not known.
    """
    report = _report_of(path)
    if report is not None:
        chosen = [check for check in report["checks"] if not only or _chosen(check["id"], only)]
        return Side(path=path, report={**report, "checks": chosen}, is_trace=False)
    settings = UnitSettings(only=only)
    judged = FilesJudged(tally=Tally(settings.registry()))
    judged.add(judge_unit([str(path)], settings))
    if judged.unjudged:
        raise TraceError(judged.unjudged[0].error)
    return Side(path=path, report=judged.report().to_dict(), is_trace=True)


def _chosen(check_id: str, only: tuple[str, ...]) -> bool:
    return check_id in only or check_id.partition(".")[0] in only


def _report_of(path: Path) -> Mapping[str, Any] | None:
    """Return the report in a file, ``None`` if it holds no JSON object with checks."""
    try:
        with path.open("rb") as file:
            if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
                return None
            file.seek(0)
            text = file.read(_MAX_REPORT)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror or error}.") from error
    try:
        data = parse_json(text.removeprefix(b"\xef\xbb\xbf"))
    except (TraceError, UnicodeDecodeError):
        # opening it as a trace says what is wrong with it
        return None
    if not isinstance(data, dict) or "checks" not in data:
        return None
    if fits(data) is False:
        raise TraceError(
            f"{path} does not fit its checksum: it is damaged, or was edited. `rollproof seal"
            " FILE` renews the checksum."
        )
    checks = data["checks"]
    sound = isinstance(checks, list) and all(
        isinstance(check, dict)
        and isinstance(check.get("id"), str)
        and isinstance(check.get("verdict"), str)
        and isinstance(check.get("kinds", {}), dict)
        and isinstance(check.get("findings", []), list)
        for check in checks
    )
    if not sound or not isinstance(data.get("exercised", {}), dict):
        raise TraceError(f"{path} is no report of rollproof: its checks are malformed.")
    return data


def differences(a: Side, b: Side) -> Difference:
    """Return what differs from ``a`` to ``b``. Times do not count."""
    both_traces = a.is_trace and b.is_trace
    verdicts, kinds = [], []
    before, after = ({check["id"]: check for check in side.report["checks"]} for side in (a, b))
    for check_id in dict.fromkeys((*before, *after)):
        old, new = before.get(check_id, {}), after.get(check_id, {})
        if old.get("verdict") != new.get("verdict"):
            change = Change(
                name=check_id,
                before=old.get("verdict", "not judged"),
                after=new.get("verdict", "not judged"),
                reason=_why(new) or _why(old),
            )
            verdicts.append(change)
        kinds += _counts(old.get("kinds", {}), new.get("kinds", {}), f"{check_id}: ")
    situations = _counts(a.report.get("exercised", {}), b.report.get("exercised", {}))
    return Difference(
        verdicts=verdicts,
        kinds=kinds,
        situations=situations,
        contract=_contract_changes(a.path, b.path) if both_traces else [],
        event=_first_event(a.path, b.path) if both_traces else None,
    )


def _why(check: Mapping[str, Any]) -> str:
    """Return the first finding of a check, or why its verdict is not a pass."""
    for finding in check.get("findings", ()):
        if isinstance(finding, dict) and finding.get("title"):
            return str(finding["title"])
    return str(check.get("reason", ""))


def _counts(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[Change]:
    names = dict.fromkeys((*before, *after))
    return [
        Change(name=f"{prefix}{name}", before=before.get(name, 0), after=after.get(name, 0))
        for name in names
        if before.get(name, 0) != after.get(name, 0)
    ]


def _contract_changes(a: Path, b: Path) -> list[Change]:
    """Return the fields of the contracts of the first episodes that differ."""
    old, new = (open_trace(path).header.contract.to_dict() for path in (a, b))
    return [
        Change(name=name, before=old.get(name), after=new.get(name))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _first_event(a: Path, b: Path) -> EventDifference | None:
    """Walk through both traces to the first event that differs."""
    episode, number = -1, -1
    requests: dict[int, str] = {}
    # one that ends early differs there, which zip would hide
    for old, new in zip_longest(_rows(a), _rows(b)):
        if isinstance(old, Header) or isinstance(new, Header):
            episode, number = episode + 1, -1
            requests.clear()
            if isinstance(old, Header) and isinstance(new, Header):
                # contracts are compared field by field, and the rest does not decide a verdict
                continue
        else:
            number += 1
        for event in (old, new):
            if isinstance(event, Call) and len(requests) < _CALLS:
                requests[event.call_id] = event.request_id
        fields = _changes(_values(old), _values(new))
        if not fields and type(old) is type(new):
            continue
        request = _request_of(old, requests) or _request_of(new, requests)
        kinds = (_kind(old), _kind(new))
        stories = (_story(a, episode, request), _story(b, episode, request))
        return EventDifference(
            episode=max(episode, 0),
            number=number,
            kinds=kinds,
            fields=tuple(fields[:_FIELDS]) if kinds[0] == kinds[1] else (),
            request=request,
            stories=stories,
        )
    return None


def _rows(path: Path) -> Iterator[Header | Event]:
    for header, events in open_trace(path).episodes():
        yield header
        yield from events


def _kind(row: Header | Event | None) -> str:
    if row is None:
        return ""
    return "header" if isinstance(row, Header) else row.kind


def _values(row: Header | Event | None) -> dict[str, Any]:
    if row is None or isinstance(row, Header):
        return {}
    values = encode_event(row, trusted=True)
    # two runs of the same take different times
    values.pop("time", None)
    return values


def _changes(old: Any, new: Any, path: str = "") -> list[Change]:
    """Return the values that differ, by their paths."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for name in dict.fromkeys((*old, *new))
            for change in _changes(old.get(name), new.get(name), f"{path}.{name}".lstrip("."))
        ]
    if _equal(old, new):
        return []
    return [Change(name=path, before=_shown(old), after=_shown(new), reason=_place(old, new))]


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if old.dtype != new.dtype or old.shape != new.shape:
            return False
        # a NaN at the same place on both sides is no difference
        return bool(np.array_equal(old, new, equal_nan=old.dtype.kind == "f"))
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return False
    return bool(old == new)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, list) and len(value) > _FIELDS:
        return f"{len(value)} values"
    return "nothing" if value is None else show(value)[:_LONGEST]


def _place(old: Any, new: Any) -> str:
    """Return where two sequences begin to differ."""
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray) and old.shape == new.shape:
        places = np.argwhere(~((old == new) | ((old != old) & (new != new))))
        if len(places):
            first = tuple(int(i) for i in places[0])
            return f"from {list(first)} on: {old[first]} and {new[first]}; {len(places)} differ"
    if isinstance(old, list) and isinstance(new, list):
        for i, (x, y) in enumerate(zip(old, new, strict=False)):
            if x != y:
                return f"from [{i}] on: {show(x)} and {show(y)}"
        return f"from [{min(len(old), len(new))}] on: one is shorter"
    return ""


def _request_of(row: Header | Event | None, requests: Mapping[int, str]) -> str:
    if isinstance(row, Submit):
        return row.request.request_id
    name = getattr(row, "request_id", "")
    if isinstance(name, str) and name:
        return name
    call_id = getattr(row, "call_id", None)
    return requests.get(call_id, "") if isinstance(call_id, int) else ""


def _story(path: Path, episode: int, request: str) -> list[dict[str, Any]]:
    """Return what happened to a request in a trace; nothing if it is not there."""
    if not request:
        return []
    trace = TraceFile(path)
    survey = trace.survey(complete=True)
    places = [item for item in survey.places if (item.name, item.episode) == (request, episode)]
    if not places:
        return []
    place = places[0]
    try:
        part = trace.slice(survey, place.episode, place.first, place.last, only=place.name)
    except RollproofError:
        return []
    told = tell_request(part, request)
    return [] if told is None else [moment_dict(moment) for moment in told.story]
